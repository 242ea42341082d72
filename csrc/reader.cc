#include "reader.h"

#include <errno.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>
#include <system_error>
#include <utility>

#include "crc32c.h"
#include "threads.h"

namespace sharded_ckpt {
namespace {

std::string Hex(uint32_t crc) {
  char digits[9];
  std::snprintf(digits, sizeof(digits), "%08x", crc);
  return digits;
}

}  // namespace

ShardReader::~ShardReader() {
  if (!threads_.empty() && fork_generation_ != ForkGeneration()) {
    // A forked child: these threads exist in the parent only, and must not be joined.
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  Cancel();
  for (std::thread& thread : threads_) thread.join();
}

uint64_t ShardReader::ChunkEnd(size_t chunk) const {
  return std::min(request_.data_nbytes, (chunk + 1) * request_.chunk_nbytes);
}

Status ShardReader::CheckRequest() const {
  const ReadRequest& r = request_;
  if (r.chunk_nbytes == 0) return Status::Invalid("chunk_nbytes must be positive");
  const uint64_t limit = uint64_t{1} << 62;
  if (r.data_nbytes > limit || r.header_nbytes > limit || r.chunk_nbytes > limit) {
    return Status::Invalid("sizes are larger than any file can be");
  }
  const uint64_t chunks = r.data_nbytes / r.chunk_nbytes + (r.data_nbytes % r.chunk_nbytes != 0);
  if (r.crcs.size() != chunks) {
    return Status::Invalid(std::to_string(r.crcs.size()) + " checksums for " +
                           std::to_string(chunks) + " chunks");
  }
  for (const Span& span : r.spans) {
    if (span.start > r.data_nbytes || span.nbytes > r.data_nbytes - span.start) {
      return Status::Invalid("a span of " + std::to_string(span.nbytes) + " bytes at " +
                             std::to_string(span.start) + " leaves the data part of " +
                             std::to_string(r.data_nbytes) + " bytes");
    }
    if (span.nbytes > 0 && span.dest == nullptr) return Status::Invalid("a span has no memory");
  }
  return Status::Ok();
}

void ShardReader::PlanPieces() {
  const uint64_t chunk_nbytes = request_.chunk_nbytes;
  for (size_t i = 0; i < request_.spans.size(); ++i) {
    const Span& span = request_.spans[i];
    if (span.nbytes == 0) continue;
    const uint64_t last = (span.start + span.nbytes - 1) / chunk_nbytes;
    for (uint64_t chunk = span.start / chunk_nbytes; chunk <= last; ++chunk) {
      pieces_.push_back({chunk, i});
    }
  }
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [](const Piece& a, const Piece& b) { return a.chunk < b.chunk; });
  if (request_.scan) {
    work_.resize(request_.crcs.size());
    std::iota(work_.begin(), work_.end(), size_t{0});
  } else {
    for (const Piece& piece : pieces_) {
      if (work_.empty() || work_.back() != piece.chunk) work_.push_back(piece.chunk);
    }
  }
  size_t piece = 0;
  for (size_t chunk : work_) {
    first_piece_.push_back(piece);
    while (piece < pieces_.size() && pieces_[piece].chunk == chunk) ++piece;
  }
  first_piece_.push_back(piece);
}

Status ShardReader::Start(ReadRequest request, int threads) {
  request_ = std::move(request);
  fork_generation_ = ForkGeneration();
  Status status = CheckRequest();
  if (!status.ok()) return status;
  uint64_t file_nbytes = 0;
  status = OpenForRead(request_.path, &fd_, &file_nbytes);
  if (!status.ok()) return status;
  const uint64_t expected = request_.header_nbytes + request_.data_nbytes;
  if (file_nbytes != expected) {
    status = Status::Make(Code::kCorrupt, 0, "read", request_.path,
                          "the file has " + std::to_string(file_nbytes) + " bytes, expected " +
                              std::to_string(expected));
    status.start = std::min(file_nbytes, expected);
    status.end = std::max(file_nbytes, expected);
    return status;
  }
  PlanPieces();
  const size_t count = std::min<size_t>(std::max(1, threads), work_.size());
  // Made here, one for each thread: a thread without memory could not make it.
  const uint64_t most = std::min(request_.chunk_nbytes, request_.data_nbytes);
  Status no_memory = Status::Io(ENOMEM, "allocate", request_.path,
                                "for a chunk of " + std::to_string(most) + " bytes");
  bad_chunks_.reserve(work_.size());
  const SignalsBlocked blocked;
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    for (size_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, no_memory]() mutable { Loop(std::move(no_memory)); });
      ++running_;
    }
  } catch (const std::system_error& error) {
    if (threads_.empty()) return Status::Io(error.code().value(), "start thread", request_.path);
  }
  return Status::Ok();
}

void ShardReader::Loop(Status no_memory) {
  std::vector<char> bounce;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ && next_work_ < work_.size()) {
    const size_t item = next_work_++;
    lock.unlock();
    const Piece* pieces = pieces_.data();
    Status status;
    try {
      status = ReadChunk(work_[item], pieces + first_piece_[item], pieces + first_piece_[item + 1],
                         &bounce);
    } catch (const std::bad_alloc&) {
      status = std::move(no_memory);  // At most once: the report stops this thread.
    }
    lock.lock();
    if (!status.ok()) Report(work_[item], std::move(status));
  }
  --running_;
  ended_.notify_all();
}

// Called with the lock held.
void ShardReader::Report(size_t chunk, Status status) {
  const bool wrong_crc = status.code == Code::kCorrupt && status.operation == "checksum";
  if (wrong_crc) bad_chunks_.push_back(chunk);
  if (wrong_crc && request_.scan) return;
  stop_ = true;
  if (chunk >= failed_chunk_) return;
  failed_chunk_ = chunk;
  status_ = std::move(status);
}

Status ShardReader::ReadChunk(size_t chunk, const Piece* first, const Piece* last,
                              std::vector<char>* bounce) {
  const uint64_t start = chunk * request_.chunk_nbytes;
  const uint64_t end = ChunkEnd(chunk);
  const uint64_t nbytes = end - start;
  const Span* only = last - first == 1 ? &request_.spans[first->span] : nullptr;
  const bool in_place = only && only->start <= start && end <= only->start + only->nbytes;
  char* memory = nullptr;
  if (in_place) {
    memory = only->dest + (start - only->start);
  } else {
    if (bounce->empty()) bounce->resize(std::min(request_.chunk_nbytes, request_.data_nbytes));
    memory = bounce->data();
  }
  const uint64_t offset = request_.header_nbytes + start;
  Status status = ReadAll(fd_, request_.path, offset, memory, nbytes);
  if (!status.ok()) return status;
  const uint32_t crc = Crc32cExtend(0, memory, nbytes);
  if (crc != request_.crcs[chunk]) {
    status = Status::Make(Code::kCorrupt, 0, "checksum", request_.path,
                          "crc32c of bytes " + std::to_string(offset) + " to " +
                              std::to_string(offset + nbytes) + " is " + Hex(crc) +
                              ", the header says " + Hex(request_.crcs[chunk]));
    status.start = offset;
    status.end = offset + nbytes;
    return status;
  }
  if (in_place) return status;
  for (const Piece* piece = first; piece != last; ++piece) {
    const Span& span = request_.spans[piece->span];
    const uint64_t from = std::max(start, span.start);
    const uint64_t to = std::min(end, span.start + span.nbytes);
    std::memcpy(span.dest + (from - span.start), memory + (from - start), to - from);
  }
  return status;
}

bool ShardReader::Wait(std::chrono::duration<double> timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, timeout, [&] { return running_ == 0; });
}

void ShardReader::Cancel() {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_ = true;
}

Status ShardReader::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

std::vector<size_t> ShardReader::bad_chunks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<size_t> sorted = bad_chunks_;
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

}  // namespace sharded_ckpt
