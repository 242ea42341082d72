#include "shard_writer.h"

#include <errno.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "crc32c.h"

namespace sharded_ckpt {
namespace {

constexpr size_t kCrcDigits = 8;

struct JobTransition {
  JobState from;
  JobState to;
};

constexpr JobTransition kJobTransitions[] = {
    {JobState::kUnnamed, JobState::kNamed},   {JobState::kNamed, JobState::kOpening},
    {JobState::kOpening, JobState::kWriting}, {JobState::kWriting, JobState::kFinishing},
    {JobState::kFinishing, JobState::kDone},  {JobState::kUnnamed, JobState::kFailed},
    {JobState::kNamed, JobState::kFailed},    {JobState::kOpening, JobState::kFailed},
    {JobState::kWriting, JobState::kFailed},  {JobState::kFinishing, JobState::kFailed},
};

size_t CountChunks(uint64_t data_nbytes, uint64_t chunk_nbytes) {
  return data_nbytes / chunk_nbytes + (data_nbytes % chunk_nbytes != 0);
}

uint64_t SumNbytes(const std::vector<Source>& sources) {
  uint64_t total = 0;
  for (const Source& source : sources) total += source.nbytes;
  return total;
}

size_t CountSlots(const Arena& arena, uint64_t data_nbytes, uint64_t chunk_nbytes) {
  if (data_nbytes <= arena.nbytes()) return CountChunks(data_nbytes, chunk_nbytes);
  return arena.nbytes() / chunk_nbytes;
}

void PutHex(uint32_t value, char* digits) {
  for (size_t i = 0; i < kCrcDigits; ++i) {
    digits[i] = "0123456789abcdef"[(value >> (28 - 4 * i)) & 0xf];
  }
}

double SecondsBetween(std::chrono::steady_clock::time_point from,
                      std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

struct Freer {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

Status ShardWriter::Check(const Arena& arena, const std::vector<Source>& sources,
                          uint64_t chunk_nbytes) {
  if (chunk_nbytes == 0) return Status::Invalid("chunk_nbytes must be positive");
  uint64_t total = 0;
  for (const Source& source : sources) {
    if (source.nbytes > (uint64_t{1} << 62) - total) {
      return Status::Invalid("the sources are larger than any file can be");
    }
    total += source.nbytes;
  }
  if (total > arena.nbytes() && arena.nbytes() < chunk_nbytes) {
    return Status::Invalid("the arena of " + std::to_string(arena.nbytes()) +
                           " bytes holds neither the " + std::to_string(total) +
                           " bytes of data nor one chunk of " + std::to_string(chunk_nbytes));
  }
  return Status::Ok();
}

ShardWriter::ShardWriter(std::shared_ptr<Arena> arena, std::vector<Source> sources,
                         uint64_t chunk_nbytes, IoMode io_mode)
    : arena_(std::move(arena)),
      sources_(std::move(sources)),
      chunk_nbytes_(chunk_nbytes),
      io_mode_(io_mode),
      data_nbytes_(SumNbytes(sources_)),
      started_(Clock::now()),
      slots_(CountSlots(*arena_, data_nbytes_, chunk_nbytes)) {
  const size_t chunks = CountChunks(data_nbytes_, chunk_nbytes_);
  crcs_.resize(chunks);
  chunk_written_.resize(chunks);
  external_ends_.resize(chunks);
  source_starts_.reserve(sources_.size() + 1);
  uint64_t start = 0;
  for (const Source& source : sources_) {
    source_starts_.push_back(start);
    const uint64_t end = start + source.nbytes;
    if (source.address == nullptr) {
      for (uint64_t at = start; at < end;) {
        const size_t chunk = at / chunk_nbytes_;
        at = std::min(end, ChunkEnd(chunk));
        external_ends_[chunk] = at;
      }
    }
    start = end;
  }
  source_starts_.push_back(start);
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    (external_ends_[chunk] == 0 ? own_chunks_ : external_chunks_).push_back(chunk);
  }
}

uint64_t ShardWriter::ChunkEnd(size_t chunk) const {
  return std::min(data_nbytes_, ChunkStart(chunk) + chunk_nbytes_);
}

char* ShardWriter::ChunkAddress(size_t chunk) const {
  return arena_->address() + (chunk % slots_.count()) * chunk_nbytes_;
}

void ShardWriter::Move(JobState to) {
  for (const JobTransition& allowed : kJobTransitions) {
    if (allowed.from == state_ && allowed.to == to) {
      state_ = to;
      return;
    }
  }
  Fail(Status::Invalid("internal error: a job cannot go from state " +
                       std::to_string(static_cast<int>(state_)) + " to " +
                       std::to_string(static_cast<int>(to))));
}

void ShardWriter::MoveSlot(size_t chunk, SlotState to) {
  const size_t slot = chunk % slots_.count();
  const SlotState from = slots_.state(slot);
  if (slots_.Move(slot, to)) return;
  Fail(Status::Invalid("internal error: slot " + std::to_string(slot) + " cannot go from " +
                       SlotStateName(from) + " to " + SlotStateName(to)));
}

void ShardWriter::Fail(Status status) {
  if (failed() || done()) return;
  status_ = std::move(status);
  if (status_.path.empty()) status_.path = path_;
  state_ = JobState::kFailed;
  for (size_t chunk : ready_) MoveSlot(chunk, SlotState::kFailed);
  ready_.clear();
}

Status ShardWriter::Name(std::string path, std::string header, uint64_t crc_pos) {
  if (failed()) return Status::Ok();  // Told by the next wait, with everything else.
  if (state_ != JobState::kUnnamed) return Status::Invalid("write_to was called before");
  const uint64_t digits = kCrcDigits * chunk_count();
  if (header.empty() || crc_pos > header.size() || digits > header.size() - crc_pos) {
    return Status::Invalid("a header of " + std::to_string(header.size()) +
                           " bytes has no room for " + std::to_string(digits) + " digits at byte " +
                           std::to_string(crc_pos));
  }
  path_ = std::move(path);
  header_ = std::move(header);
  crc_pos_ = crc_pos;
  Move(JobState::kNamed);
  return Status::Ok();
}

Status ShardWriter::Advance(uint64_t data_offset) {
  if (data_offset > data_nbytes_) {
    return Status::Invalid("advance to byte " + std::to_string(data_offset) + " of " +
                           std::to_string(data_nbytes_));
  }
  advanced_ = std::max(advanced_, data_offset);
  return Status::Ok();
}

bool ShardWriter::SlotFreeForChunk(size_t chunk) const {
  return chunk < slots_.count() || chunk_written_[chunk - slots_.count()];
}

bool ShardWriter::SlotFreeFor(uint64_t data_offset) const {
  return data_offset >= data_nbytes_ || SlotFreeForChunk(data_offset / chunk_nbytes_);
}

bool ShardWriter::MayCopy(size_t chunk) const {
  return external_ends_[chunk] <= advanced_ && SlotFreeForChunk(chunk);
}

std::optional<size_t> ShardWriter::ClaimCopy() {
  if (failed()) return std::nullopt;
  for (auto [chunks, next] :
       {std::pair(&own_chunks_, &next_own_), std::pair(&external_chunks_, &next_external_)}) {
    if (*next == chunks->size() || !MayCopy((*chunks)[*next])) continue;
    const size_t chunk = (*chunks)[(*next)++];
    MoveSlot(chunk, SlotState::kFilling);
    if (failed()) return std::nullopt;
    ++copies_in_flight_;
    return chunk;
  }
  return std::nullopt;
}

uint32_t ShardWriter::Copy(size_t chunk) const {
  char* const dest = ChunkAddress(chunk);
  const uint64_t start = ChunkStart(chunk);
  const uint64_t end = ChunkEnd(chunk);
  const auto after = std::upper_bound(source_starts_.begin(), source_starts_.end(), start);
  auto source = static_cast<size_t>(after - source_starts_.begin()) - 1;
  uint32_t crc = 0;
  for (uint64_t at = start; at < end; ++source) {
    const uint64_t nbytes = std::min(end, source_starts_[source + 1]) - at;
    char* const to = dest + (at - start);
    const char* const address = sources_[source].address;
    crc = address == nullptr ? Crc32cExtend(crc, to, nbytes)
                             : Crc32cCopy(crc, to, address + (at - source_starts_[source]), nbytes);
    at += nbytes;
  }
  return crc;
}

void ShardWriter::FinishCopy(size_t chunk, uint32_t crc) {
  --copies_in_flight_;
  ++copied_chunks_;
  staged_nbytes_ += ChunkEnd(chunk) - ChunkStart(chunk);
  crcs_[chunk] = crc;
  if (staged()) written_.copy_seconds = SecondsBetween(started_, Clock::now());
  MoveSlot(chunk, failed() ? SlotState::kFailed : SlotState::kReady);
  if (!failed()) ready_.push_back(chunk);
}

std::optional<IoTask> ShardWriter::ClaimIo() {
  std::optional<IoTask> task;
  if (failed()) {
    // The last thread out leaves the file to be closed.
    if (io_in_flight_ == 0 && file_.is_open()) task = IoTask{IoTask::Kind::kAbandon, 0};
  } else if (state_ == JobState::kNamed) {
    Move(JobState::kOpening);
    task = IoTask{IoTask::Kind::kOpen, 0};
  } else if (state_ == JobState::kWriting && !ready_.empty()) {
    task = IoTask{IoTask::Kind::kWrite, ready_.front()};
    ready_.pop_front();
    MoveSlot(task->chunk, SlotState::kWriting);
  } else if (state_ == JobState::kWriting && written_chunks_ == chunk_count()) {
    Move(JobState::kFinishing);
    task = IoTask{IoTask::Kind::kFinish, 0};
  }
  if (task) ++io_in_flight_;
  return task;
}

Status ShardWriter::DoIo(const IoTask& task) {
  switch (task.kind) {
    case IoTask::Kind::kOpen: {
      opened_ = Clock::now();
      const bool aligned = header_.size() % kAlign == 0 && chunk_nbytes_ % kAlign == 0 &&
                           reinterpret_cast<uintptr_t>(arena_->address()) % kAlign == 0;
      return file_.Create(path_, header_.size() + data_nbytes_, io_mode_, aligned);
    }
    case IoTask::Kind::kWrite:
      return file_.Write(header_.size() + ChunkStart(task.chunk), ChunkAddress(task.chunk),
                         ChunkEnd(task.chunk) - ChunkStart(task.chunk));
    case IoTask::Kind::kFinish:
      return FinishFile();
    case IoTask::Kind::kAbandon:
      return file_.Close();
  }
  return Status::Ok();
}

// The order of these steps is the promise that a file with a header is whole.
Status ShardWriter::FinishFile() {
  // 1. All data is durable.
  Status status = file_.Sync();
  if (!status.ok()) return status;

  // 2. The header, with the checksums of what was staged (not of what the file says).
  uint32_t data_crc = 0;
  for (size_t chunk = 0; chunk < chunk_count(); ++chunk) {
    PutHex(crcs_[chunk], header_.data() + crc_pos_ + kCrcDigits * chunk);
    data_crc = Crc32cCombine(data_crc, crcs_[chunk], ChunkEnd(chunk) - ChunkStart(chunk));
  }
  const char* header = header_.data();
  std::unique_ptr<char, Freer> aligned;
  if (file_.direct()) {
    aligned.reset(static_cast<char*>(std::aligned_alloc(kAlign, header_.size())));
    if (!aligned) return Status::Io(ENOMEM, "write header", path_);
    std::memcpy(aligned.get(), header_.data(), header_.size());
    header = aligned.get();
  }
  status = file_.Write(0, header, header_.size());
  if (!status.ok()) return status;

  // 3. The header is durable; errors that were deferred to close are known.
  status = file_.Sync();
  if (!status.ok()) return status;
  status = file_.Close();
  if (!status.ok()) return status;

  // 4. So is the name.
  status = SyncParent(path_);
  if (!status.ok()) return status;

  written_.header_nbytes = header_.size();
  written_.data_nbytes = data_nbytes_;
  written_.file_nbytes = header_.size() + data_nbytes_;
  written_.header_crc32c = Crc32cExtend(0, header_.data(), header_.size());
  written_.file_crc32c = Crc32cCombine(written_.header_crc32c, data_crc, data_nbytes_);
  written_.write_seconds = SecondsBetween(opened_, Clock::now());
  return status;
}

void ShardWriter::FinishIo(const IoTask& task, Status status) {
  --io_in_flight_;
  const bool ok = status.ok();
  if (!ok) Fail(std::move(status));
  switch (task.kind) {
    case IoTask::Kind::kOpen:
      if (!failed()) Move(JobState::kWriting);
      break;
    case IoTask::Kind::kWrite:
      MoveSlot(task.chunk, ok && !failed() ? SlotState::kFree : SlotState::kFailed);
      if (!ok) break;
      chunk_written_[task.chunk] = true;
      ++written_chunks_;
      break;
    case IoTask::Kind::kFinish:
      if (!failed()) Move(JobState::kDone);
      break;
    case IoTask::Kind::kAbandon:
      break;
  }
}

}  // namespace sharded_ckpt
