// ShardReader: reads ranges of one shard's data part into memory and checks what it reads.
//
// DESIGN
//
// A read has its own threads, which end with it; it shares nothing with the engine's queue, so a
// load never waits behind a save. Threads take the touched chunks in ascending order. A chunk that
// lies wholly in one span is read straight into place, any other one into a buffer of the thread.
// Its checksum is compared before the bytes are copied out of a buffer, or after they were read
// into place: after an error the destinations hold undefined bytes.
//
// Errors. The one of the lowest chunk is kept; all chunks below it are claimed by then and are
// finished, so the report does not depend on timing. With `scan` the read goes on after a wrong
// checksum and lists all chunks that have one. A thread that gets no memory reports ENOMEM.

#ifndef SHARDED_CKPT_READER_H_
#define SHARDED_CKPT_READER_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "file.h"
#include "status.h"

namespace sharded_ckpt {

// Copy `nbytes` of the data part, from `start`, to `dest`.
struct Span {
  uint64_t start;
  uint64_t nbytes;
  char* dest;
};

struct ReadRequest {
  std::string path;
  uint64_t header_nbytes = 0;
  uint64_t data_nbytes = 0;
  uint64_t chunk_nbytes = 0;
  std::vector<uint32_t> crcs;  // One per chunk of the data part.
  std::vector<Span> spans;     // In any order; they may overlap.
  bool scan = false;           // Check every chunk of the data part, whatever the spans touch.
};

class ShardReader {
 public:
  ShardReader() = default;
  ShardReader(const ShardReader&) = delete;
  ShardReader& operator=(const ShardReader&) = delete;
  // Cancels and joins: spans must outlive the reader.
  ~ShardReader();

  // Opens the file, checks its size and starts `threads` threads. To be called once.
  Status Start(ReadRequest request, int threads);

  // Whether the read has ended, after waiting up to `timeout`.
  bool Wait(std::chrono::duration<double> timeout);

  // Threads stop after the chunk at hand.
  void Cancel();

  // After Wait returned true.
  Status status() const;
  std::vector<size_t> bad_chunks() const;  // Ascending.

 private:
  // The part of a span that lies in one chunk.
  struct Piece {
    size_t chunk;
    size_t span;
  };

  Status CheckRequest() const;
  void PlanPieces();
  void Loop(Status no_memory);
  Status ReadChunk(size_t chunk, const Piece* first, const Piece* last, std::vector<char>* bounce);
  void Report(size_t chunk, Status status);
  uint64_t ChunkEnd(size_t chunk) const;

  // Constant once threads run.
  ReadRequest request_;
  Fd fd_;
  uint64_t fork_generation_ = 0;
  std::vector<Piece> pieces_;        // Ascending by chunk.
  std::vector<size_t> work_;         // Touched chunks, ascending.
  std::vector<size_t> first_piece_;  // Per work item, then the end.

  std::vector<std::thread> threads_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  // Guarded by mutex_.
  size_t next_work_ = 0;
  size_t running_ = 0;
  bool stop_ = false;
  Status status_;
  size_t failed_chunk_ = SIZE_MAX;
  std::vector<size_t> bad_chunks_;
};

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_READER_H_
