// ShardWriter: one job, which is one shard file from its sources in memory to a durable file.
//
// DESIGN
//
// Threads. The engine (engine.h) has copy threads and I/O threads; each claims one piece of work
// under the engine's lock, does it without the lock, and reports it under the lock again. This
// class decides what may be claimed and keeps the books. Its methods require the engine's lock,
// except Copy, DoIo and the constant accessors, which run without it.
//
// Work. The data part is cut into chunks. A copy thread fills a chunk's slot of the arena from the
// sources and computes its checksum. An I/O thread opens the file, writes ready chunks (several in
// flight, in the order in which they became ready), and, when all are written, finishes the file:
// sync, header with the checksums, sync, close, sync of the directory. So the header, which alone
// makes the file readable, is written after everything else is durable.
//
// Buffers. The arena is used by one job at a time. Chunk c lives in slot c % slots; with as many
// slots as chunks that is a plain copy, with fewer it is a ring, where chunk c may be filled once
// chunk c - slots is on disk. The sources belong to the caller and are read until the job is
// staged or quiet. Bytes of external sources (address null) are put into the arena by the caller,
// who says with Advance how far they are there; the job then only checksums them.
//
// Order. Chunks whose bytes are all ours do not wait for external ones before them. The smallest
// unclaimed chunk can always be claimed sooner or later, so a ring cannot deadlock.
//
// Errors. The first one is kept and stops all further claims. The job is quiet once no thread
// works on it and its file is closed; only then may sources and arena be touched or freed. The
// unfinished file stays for the owner of the name to remove.

#ifndef SHARDED_CKPT_SHARD_WRITER_H_
#define SHARDED_CKPT_SHARD_WRITER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "file.h"
#include "slots.h"
#include "status.h"

namespace sharded_ckpt {

// A piece of the data part. `address` is null when the caller fills the arena itself.
struct Source {
  const char* address;
  uint64_t nbytes;
};

struct Written {
  uint64_t file_nbytes = 0;
  uint64_t header_nbytes = 0;
  uint64_t data_nbytes = 0;
  uint32_t header_crc32c = 0;
  uint32_t file_crc32c = 0;
  double copy_seconds = 0;   // From the start of the job until it was staged.
  double write_seconds = 0;  // From opening the file until its name was durable.
};

enum class JobState : uint8_t {
  kUnnamed,    // No file yet; chunks are being staged.
  kNamed,      // The file may be opened.
  kOpening,    // An I/O thread creates it.
  kWriting,    // Ready chunks are written.
  kFinishing,  // An I/O thread syncs it and writes the header.
  kDone,       // Durable and closed.
  kFailed,     // `status()` says why; includes cancelled.
};

// A piece of work of an I/O thread.
struct IoTask {
  enum class Kind { kOpen, kWrite, kFinish, kAbandon };
  Kind kind;
  size_t chunk;  // kWrite only.
};

class ShardWriter {
 public:
  ShardWriter(std::shared_ptr<Arena> arena, std::vector<Source> sources, uint64_t chunk_nbytes,
              IoMode io_mode);
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Whether these arguments can make a job.
  static Status Check(const Arena& arena, const std::vector<Source>& sources,
                      uint64_t chunk_nbytes);

  // Names the file. The digits of the checksums go to `header[crc_pos...]`.
  Status Name(std::string path, std::string header, uint64_t crc_pos);

  // All external bytes below `data_offset` are in the arena.
  Status Advance(uint64_t data_offset);

  // Keeps `status` unless there is an error already, and stops all claims.
  void Fail(Status status);

  std::optional<size_t> ClaimCopy();
  uint32_t Copy(size_t chunk) const;  // Without the lock. Returns the chunk's checksum.
  void FinishCopy(size_t chunk, uint32_t crc);

  std::optional<IoTask> ClaimIo();
  Status DoIo(const IoTask& task);  // Without the lock.
  void FinishIo(const IoTask& task, Status status);

  const Status& status() const { return status_; }
  const Written& written() const { return written_; }
  uint64_t data_nbytes() const { return data_nbytes_; }
  uint64_t staged_nbytes() const { return staged_nbytes_; }
  bool failed() const { return state_ == JobState::kFailed; }
  bool done() const { return state_ == JobState::kDone; }
  // Every source was copied.
  bool staged() const { return copied_chunks_ == chunk_count(); }
  // No thread reads the sources.
  bool sources_idle() const { return copies_in_flight_ == 0; }
  // Ended, and no thread uses sources, arena or file.
  bool quiet() const {
    return (done() || failed()) && copies_in_flight_ == 0 && io_in_flight_ == 0 && !file_.is_open();
  }
  // The slot of the chunk that holds `data_offset` may be filled with that chunk.
  bool SlotFreeFor(uint64_t data_offset) const;

 private:
  using Clock = std::chrono::steady_clock;

  size_t chunk_count() const { return crcs_.size(); }
  uint64_t ChunkStart(size_t chunk) const { return chunk * chunk_nbytes_; }
  uint64_t ChunkEnd(size_t chunk) const;
  char* ChunkAddress(size_t chunk) const;
  bool SlotFreeForChunk(size_t chunk) const;
  bool MayCopy(size_t chunk) const;
  void Move(JobState to);
  void MoveSlot(size_t chunk, SlotState to);
  Status FinishFile();

  // Constant after construction.
  const std::shared_ptr<Arena> arena_;
  const std::vector<Source> sources_;
  const uint64_t chunk_nbytes_;
  const IoMode io_mode_;
  std::vector<uint64_t> source_starts_;  // Data offset of each source, then the total.
  std::vector<uint64_t> external_ends_;  // Per chunk: end of its last external byte, 0 for none.
  uint64_t data_nbytes_ = 0;
  const Clock::time_point started_;

  // Guarded by the engine's lock.
  JobState state_ = JobState::kUnnamed;
  Status status_;
  Slots slots_;
  uint64_t advanced_ = 0;
  std::vector<size_t> own_chunks_;       // Chunks without external bytes, ascending.
  std::vector<size_t> external_chunks_;  // The others.
  size_t next_own_ = 0;
  size_t next_external_ = 0;
  std::vector<bool> chunk_written_;
  std::deque<size_t> ready_;
  size_t copied_chunks_ = 0;
  size_t written_chunks_ = 0;
  size_t copies_in_flight_ = 0;
  size_t io_in_flight_ = 0;
  uint64_t staged_nbytes_ = 0;
  std::vector<uint32_t> crcs_;  // Written by FinishCopy; constant once kFinishing.

  // Set by Name, then used by the one I/O thread that opens or finishes the file.
  std::string path_;
  std::string header_;
  uint64_t crc_pos_ = 0;
  NewFile file_;
  Clock::time_point opened_;
  Written written_;
};

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_SHARD_WRITER_H_
