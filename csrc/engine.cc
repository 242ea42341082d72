#include "engine.h"

#include <errno.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <utility>

#include "threads.h"

namespace sharded_ckpt {
namespace {

Status ClosedStatus() {
  return Status::Make(Code::kClosed, 0, "", "", "the copy engine was closed");
}

Status ForkedStatus() {
  return Status::Make(Code::kForked, 0, "", "",
                      "the copy engine belongs to the parent process and does not work in a "
                      "forked child; create a new one in the child");
}

}  // namespace

// What threads, engine and job handles share.
class EngineState {
 public:
  bool forked() const { return fork_generation != ForkGeneration(); }

  void CopyLoop();
  void IoLoop();

  template <typename Done>
  Waited Wait(const ShardWriter& writer, Job::Seconds timeout, Done done) {
    std::unique_lock<std::mutex> lock(mutex);
    Waited result = Waited::kTimeout;
    changed.wait_for(lock, timeout, [&] { return (result = done(writer)) != Waited::kTimeout; });
    return result;
  }

  const uint64_t fork_generation = ForkGeneration();
  std::mutex mutex;
  std::condition_variable copy_work;
  std::condition_variable io_work;
  std::condition_variable changed;  // For those who wait for a job or for the threads.
  // Guarded by mutex from here on.
  std::list<std::shared_ptr<ShardWriter>> jobs;  // Oldest first.
  bool closing = false;
  size_t running_threads = 0;

 private:
  // Called with the lock held after any change to a job.
  void Changed() {
    jobs.remove_if([](const std::shared_ptr<ShardWriter>& job) { return job->quiet(); });
    copy_work.notify_all();
    io_work.notify_all();
    changed.notify_all();
  }

  void ThreadEnds() {
    --running_threads;
    changed.notify_all();
  }
  friend class Job;
  friend class Engine;
};

void EngineState::CopyLoop() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!closing) {
    std::shared_ptr<ShardWriter> job;
    std::optional<size_t> chunk;
    for (const auto& candidate : jobs) {
      chunk = candidate->ClaimCopy();
      if (!chunk) continue;
      job = candidate;
      break;
    }
    if (!chunk) {
      copy_work.wait(lock);
      continue;
    }
    lock.unlock();
    const uint32_t crc = job->Copy(*chunk);
    lock.lock();
    job->FinishCopy(*chunk, crc);
    Changed();
  }
  ThreadEnds();
}

void EngineState::IoLoop() {
  std::unique_lock<std::mutex> lock(mutex);
  while (true) {
    std::shared_ptr<ShardWriter> job;
    std::optional<IoTask> task;
    for (const auto& candidate : jobs) {
      task = candidate->ClaimIo();
      if (!task) continue;
      job = candidate;
      break;
    }
    if (!task) {
      // Closing has failed all jobs; what is left to claim is closing their files.
      if (closing) break;
      io_work.wait(lock);
      continue;
    }
    lock.unlock();
    Status status = job->DoIo(*task);
    lock.lock();
    job->FinishIo(*task, std::move(status));
    Changed();
  }
  ThreadEnds();
}

// -- Job -----------------------------------------------------------------------------------------

Job::Job(std::shared_ptr<EngineState> state, std::shared_ptr<ShardWriter> writer)
    : state_(std::move(state)), writer_(std::move(writer)) {}

Job::~Job() {
  // In a child the locks and the file belong to threads that do not exist: leave them.
  if (Forked()) {
    new std::shared_ptr<EngineState>(std::move(state_));
    new std::shared_ptr<ShardWriter>(std::move(writer_));
  }
}

bool Job::Forked() const { return state_->forked(); }

Status Job::WriteTo(std::string path, std::string header, uint64_t crc_pos) {
  if (Forked()) return ForkedStatus();
  std::lock_guard<std::mutex> lock(state_->mutex);
  Status status = writer_->Name(std::move(path), std::move(header), crc_pos);
  state_->Changed();
  return status;
}

Status Job::Advance(uint64_t data_offset) {
  if (Forked()) return ForkedStatus();
  std::lock_guard<std::mutex> lock(state_->mutex);
  Status status = writer_->Advance(data_offset);
  state_->Changed();
  return status;
}

Status Job::Cancel() {
  if (Forked()) return ForkedStatus();
  std::lock_guard<std::mutex> lock(state_->mutex);
  writer_->Fail(Status::Make(Code::kCancelled, ECANCELED, "write", "", "the job was cancelled"));
  state_->Changed();
  return Status::Ok();
}

Waited Job::WaitStaged(Seconds timeout) const {
  if (Forked()) return Waited::kFailed;
  return state_->Wait(*writer_, timeout, [](const ShardWriter& writer) {
    if (writer.failed()) return writer.sources_idle() ? Waited::kFailed : Waited::kTimeout;
    return writer.staged() ? Waited::kYes : Waited::kTimeout;
  });
}

Waited Job::WaitSlotFor(uint64_t data_offset, Seconds timeout) const {
  if (Forked()) return Waited::kFailed;
  return state_->Wait(*writer_, timeout, [data_offset](const ShardWriter& writer) {
    if (writer.failed()) return Waited::kFailed;
    return writer.SlotFreeFor(data_offset) ? Waited::kYes : Waited::kTimeout;
  });
}

Waited Job::WaitQuiet(Seconds timeout) const {
  if (Forked()) return Waited::kFailed;
  return state_->Wait(*writer_, timeout, [](const ShardWriter& writer) {
    if (!writer.quiet()) return Waited::kTimeout;
    return writer.failed() ? Waited::kFailed : Waited::kYes;
  });
}

Status Job::status() const {
  if (Forked()) return ForkedStatus();
  std::lock_guard<std::mutex> lock(state_->mutex);
  return writer_->status();
}

Written Job::written() const {
  if (Forked()) return Written();
  std::lock_guard<std::mutex> lock(state_->mutex);
  return writer_->written();
}

uint64_t Job::staged_nbytes() const {
  if (Forked()) return 0;
  std::lock_guard<std::mutex> lock(state_->mutex);
  return writer_->staged_nbytes();
}

// -- Engine --------------------------------------------------------------------------------------

Engine::Engine(int copy_threads, int io_threads, IoMode io_mode)
    : copy_threads_(std::max(1, copy_threads)),
      io_threads_(std::max(1, io_threads)),
      io_mode_(io_mode) {
  state_ = std::make_shared<EngineState>();
}

Engine::~Engine() {
  if (state_->forked()) {
    new std::shared_ptr<EngineState>(std::move(state_));
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  (void)Close(Job::Seconds(0));
}

Status Engine::StartThreads() {
  if (!threads_.empty()) return Status::Ok();
  const SignalsBlocked blocked;
  try {
    for (int i = 0; i < copy_threads_ + io_threads_; ++i) {
      auto loop = i < copy_threads_ ? &EngineState::CopyLoop : &EngineState::IoLoop;
      threads_.emplace_back([state = state_, loop] { ((*state).*loop)(); });
      ++state_->running_threads;
    }
  } catch (const std::system_error& error) {
    state_->closing = true;
    return Status::Io(error.code().value(), "start thread", "copy engine");
  }
  return Status::Ok();
}

Status Engine::Start(std::shared_ptr<Arena> arena, std::vector<Source> sources,
                     uint64_t chunk_nbytes, std::shared_ptr<Job>* job) {
  if (state_->forked()) return ForkedStatus();
  Status status = ShardWriter::Check(*arena, sources, chunk_nbytes);
  if (!status.ok()) return status;
  auto writer =
      std::make_shared<ShardWriter>(std::move(arena), std::move(sources), chunk_nbytes, io_mode_);
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->closing) return ClosedStatus();
  status = StartThreads();
  if (!status.ok()) return status;
  state_->jobs.push_back(writer);
  state_->Changed();
  *job = std::make_shared<Job>(state_, std::move(writer));
  return Status::Ok();
}

Status Engine::CheckOpen() const {
  if (state_->forked()) return ForkedStatus();
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->closing ? ClosedStatus() : Status::Ok();
}

Status Engine::Close(Job::Seconds timeout) {
  if (state_->forked()) return ForkedStatus();
  std::vector<std::thread> threads;
  bool ended = false;
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->closing = true;
    for (const auto& job : state_->jobs) {
      job->Fail(Status::Make(Code::kCancelled, ECANCELED, "write", "", "the engine was closed"));
    }
    state_->Changed();
    threads.swap(threads_);
    ended = state_->changed.wait_for(lock, timeout, [&] { return state_->running_threads == 0; });
  }
  for (std::thread& thread : threads) {
    if (ended) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  if (ended || threads.empty()) return Status::Ok();
  return Status::Make(Code::kTimeout, ETIMEDOUT, "close", "copy engine",
                      "a thread still waits for the file system; its memory is kept");
}

}  // namespace sharded_ckpt
