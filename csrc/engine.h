// Engine: the threads that copy and write, and the queue of jobs they serve.
//
// DESIGN
//
// One lock guards the queue and the books of all jobs; it is held for microseconds, between pieces
// of work of about 4 MiB. Copy threads and I/O threads scan the queue from its front, so that the
// oldest job is served first and a blocked one does not idle the threads. Threads start with the
// first job and end in Close. A job leaves the queue when it is quiet.
//
// All of this lives in a State that the threads share with the engine and the jobs' handles: should
// a thread hang in a dead device, Close gives up at its deadline and the thread keeps what it uses.
//
// Fork. Threads do not exist in a child, and locks may be held there for ever. A counter that a
// child handler of fork increments tells an engine that it is in a child: every call returns
// kForked before it touches a lock, and destructors leave everything as it is.

#ifndef SHARDED_CKPT_ENGINE_H_
#define SHARDED_CKPT_ENGINE_H_

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "shard_writer.h"
#include "status.h"

namespace sharded_ckpt {

// How a bounded wait ended.
enum class Waited { kTimeout, kYes, kFailed };

class EngineState;

// A handle on one job. Copies refer to the same job. Thread safe.
class Job {
 public:
  using Seconds = std::chrono::duration<double>;

  Job(std::shared_ptr<EngineState> state, std::shared_ptr<ShardWriter> writer);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();

  Status WriteTo(std::string path, std::string header, uint64_t crc_pos);
  Status Advance(uint64_t data_offset);
  // Stops the job as soon as threads let go of it; WaitQuiet tells when.
  Status Cancel();

  // The job is staged: the sources may change. kFailed only once no thread reads them any more.
  Waited WaitStaged(Seconds timeout) const;
  // The slot of the chunk at `data_offset` may be filled by its external producer.
  Waited WaitSlotFor(uint64_t data_offset, Seconds timeout) const;
  // The job ended and nothing uses sources, arena or file: kYes when done, else kFailed.
  Waited WaitQuiet(Seconds timeout) const;

  Status status() const;  // What went wrong, or ok.
  Written written() const;
  uint64_t staged_nbytes() const;

 private:
  bool Forked() const;

  std::shared_ptr<EngineState> state_;
  std::shared_ptr<ShardWriter> writer_;
};

class Engine {
 public:
  Engine(int copy_threads, int io_threads, IoMode io_mode);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Tells the threads to end and does not wait for them.
  ~Engine();

  Status Start(std::shared_ptr<Arena> arena, std::vector<Source> sources, uint64_t chunk_nbytes,
               std::shared_ptr<Job>* job);

  // Whether calls are still taken: kForked or kClosed otherwise.
  Status CheckOpen() const;

  // Cancels what is unfinished and joins the threads. kTimeout: some did not end in time; they
  // are left behind, with what they use. Closing again is fine.
  Status Close(Job::Seconds timeout);

 private:
  Status StartThreads();

  const int copy_threads_;
  const int io_threads_;
  const IoMode io_mode_;
  std::shared_ptr<EngineState> state_;
  std::vector<std::thread> threads_;
};

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_ENGINE_H_
