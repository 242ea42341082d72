// What the writer does when system calls fail, come back short, or are interrupted; and the order
// in which it makes them when they do not.

#include <errno.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "engine.h"
#include "file.h"

namespace sharded_ckpt {
namespace {

constexpr Job::Seconds kLong{30};
constexpr uint64_t kChunk = 8192;
constexpr uint64_t kHeader = 4096;

// The faults to inject and the calls seen. Set up before an engine starts, read after it is closed.
struct Script {
  std::mutex mutex;
  std::vector<std::string> calls;
  size_t max_write = SIZE_MAX;  // Longer writes come back short.
  int interrupts = 0;           // The next writes fail with EINTR.
  int zero_writes = 0;          // The next writes write nothing.
  int fail_write = 0;           // errno of every write of data.
  int fail_sync_number = 0;     // Counted from 1 ...
  int fail_sync = 0;            // ... fails with this errno.
  int fail_close = 0, fail_fallocate = 0, fail_direct = 0, fail_dir_sync = 0;
  int syncs = 0;
};

Script* g_script = nullptr;

int Injected(int err) {
  errno = err;
  return -1;
}

void Record(const std::string& call) {
  std::lock_guard<std::mutex> lock(g_script->mutex);
  g_script->calls.push_back(call);
}

ssize_t FaultyWrite(int fd, const void* data, size_t nbytes, off_t offset) {
  {
    std::lock_guard<std::mutex> lock(g_script->mutex);
    if (g_script->interrupts > 0) return --g_script->interrupts, Injected(EINTR);
    if (g_script->zero_writes > 0) return --g_script->zero_writes, 0;
    if (g_script->fail_write != 0 && offset > 0) return Injected(g_script->fail_write);
    g_script->calls.push_back("write@" + std::to_string(offset));
    nbytes = std::min(nbytes, g_script->max_write);
  }
  return RealSyscalls().pwrite(fd, data, nbytes, offset);
}

int FaultySync(int fd) {
  Record("fdatasync");
  std::lock_guard<std::mutex> lock(g_script->mutex);
  if (++g_script->syncs == g_script->fail_sync_number) return Injected(g_script->fail_sync);
  return RealSyscalls().fdatasync(fd);
}

int FaultyDirSync(int fd) {
  Record("fsync directory");
  return g_script->fail_dir_sync ? Injected(g_script->fail_dir_sync) : RealSyscalls().fsync(fd);
}

int FaultyClose(int fd) {
  Record("close");
  const int result = RealSyscalls().close(fd);
  return g_script->fail_close ? Injected(g_script->fail_close) : result;
}

int FaultyFallocate(int fd, off_t nbytes) {
  Record("fallocate");
  if (g_script->fail_fallocate) return Injected(g_script->fail_fallocate);
  return RealSyscalls().fallocate(fd, nbytes);
}

int FaultyDirect(int fd, bool on) {
  if (g_script->fail_direct) return Injected(g_script->fail_direct);
  return RealSyscalls().set_direct(fd, on);
}

int RecordedTruncate(int fd, off_t nbytes) {
  Record("ftruncate");
  return RealSyscalls().ftruncate(fd, nbytes);
}

// Saves `data` while `script` injects its faults; returns the job's status.
Status Save(Script* script, const std::string& path, const std::string& data, IoMode mode) {
  Syscalls faulty = RealSyscalls();
  faulty.pwrite = FaultyWrite;
  faulty.fdatasync = FaultySync;
  faulty.fsync = FaultyDirSync;
  faulty.close = FaultyClose;
  faulty.fallocate = FaultyFallocate;
  faulty.set_direct = FaultyDirect;
  faulty.ftruncate = RecordedTruncate;
  g_script = script;
  SetSyscalls(&faulty);
  Status status;
  {
    Engine engine(1, 1, mode);
    std::shared_ptr<Arena> arena;
    CHECK(Arena::Map(data.size(), &arena).ok());
    std::shared_ptr<Job> job;
    CHECK(engine.Start(arena, {{data.data(), data.size()}}, kChunk, &job).ok());
    CHECK(job->WaitStaged(kLong) == Waited::kYes);
    CHECK(job->WriteTo(path, std::string(kHeader, 'h'), 100).ok());
    CHECK(job->WaitQuiet(kLong) != Waited::kTimeout);
    status = job->status();
    CHECK(engine.Close(kLong).ok());
  }
  SetSyscalls(nullptr);
  return status;
}

bool Whole(const std::string& path, const std::string& data) {
  const std::string file = ReadFile(path);
  return file.size() == kHeader + data.size() && file.substr(kHeader) == data &&
         file.substr(0, 100) == std::string(100, 'h');
}

void CallsComeInOrder(TempDir& dir) {
  const std::string data = RandomBytes(1, 2 * kChunk + 5);
  const std::string path = dir.NewPath();
  Script script;
  CHECK(Save(&script, path, data, IoMode::kBuffered).ok());
  CHECK(Whole(path, data));
  const std::vector<std::string> expected = {
      "fallocate", "write@4096", "write@12288", "write@20480",     "fdatasync",
      "write@0",   "fdatasync",  "close",       "fsync directory", "close",
  };
  CHECK(script.calls == expected);
}

void DirectPaddingIsCutOffBeforeTheSync(TempDir& dir) {
  const std::string data = RandomBytes(2, kChunk + 5);
  const std::string path = dir.NewPath();
  Script script;
  const Status status = Save(&script, path, data, IoMode::kDirect);
  if (!status.ok()) {
    CHECK(status.operation == "probe O_DIRECT");
    std::puts("note: no direct I/O in TMPDIR, its padding was not tested");
    return;
  }
  CHECK(Whole(path, data));
  const std::vector<std::string> expected = {
      "fallocate", "write@0",   "write@4096", "write@12288",     "ftruncate", "fdatasync",
      "write@0",   "fdatasync", "close",      "fsync directory", "close",
  };
  CHECK(script.calls == expected);
}

void DirectFallsBack(TempDir& dir) {
  const std::string data = RandomBytes(3, kChunk + 5);
  Script script;
  script.fail_direct = EINVAL;
  const std::string path = dir.NewPath();
  CHECK(Save(&script, path, data, IoMode::kAuto).ok());
  CHECK(Whole(path, data));
  const Status refused = Save(&script, dir.NewPath(), data, IoMode::kDirect);
  CHECK(refused.operation == "probe O_DIRECT" && refused.err == EINVAL);
}

void ShortAndInterruptedWritesGoOn(TempDir& dir) {
  const std::string data = RandomBytes(4, 3 * kChunk + 77);
  for (IoMode mode : {IoMode::kBuffered, IoMode::kAuto}) {
    // 4097: a direct write then ends off the grid.
    for (size_t max_write : {size_t{4097}, size_t{4096}, size_t{5000}}) {
      Script script;
      script.max_write = max_write;
      script.interrupts = 50;
      script.zero_writes = 20;
      const std::string path = dir.NewPath();
      CHECK(Save(&script, path, data, mode).ok());
      CHECK(Whole(path, data));
    }
  }
}

void WritesWithoutProgressEnd(TempDir& dir) {
  Script script;
  script.zero_writes = 1 << 30;
  const Status status = Save(&script, dir.NewPath(), "data", IoMode::kBuffered);
  CHECK(status.operation == "write" && status.err == EIO);
  CHECK(status.detail == "writes make no progress");
}

void AFailedSyncIsFinal(TempDir& dir) {
  for (int number : {1, 2}) {
    Script script;
    script.fail_sync_number = number;
    script.fail_sync = EIO;
    const std::string path = dir.NewPath();
    const Status status = Save(&script, path, RandomBytes(5, kChunk), IoMode::kBuffered);
    CHECK(status.operation == "fdatasync" && status.err == EIO && status.path == path);
    CHECK(script.syncs == number);  // Never again after the failure.
    if (number == 1) {
      CHECK(ReadFile(path).substr(0, kHeader) == std::string(kHeader, '\0'));
    }
  }
}

void EveryErrorHasItsOperation(TempDir& dir) {
  const std::string data = RandomBytes(6, kChunk);
  struct Case {
    int Script::* fault;
    const char* operation;
  };
  for (const Case& item : {Case{&Script::fail_write, "write"},
                           {&Script::fail_close, "close"},
                           {&Script::fail_fallocate, "fallocate"},
                           {&Script::fail_dir_sync, "fsync directory"}}) {
    Script script;
    script.*item.fault = ENOSPC;
    const std::string path = dir.NewPath();
    const Status status = Save(&script, path, data, IoMode::kBuffered);
    CHECK(status.code == Code::kIo && status.err == ENOSPC);
    CHECK(status.operation == item.operation);
    const bool in_directory = status.operation == "fsync directory";
    CHECK(status.path == (in_directory ? dir.path() : path));
    if (!in_directory) CHECK(status.detail.find("free") != std::string::npos);
  }
  Script lenient;
  lenient.fail_fallocate = EOPNOTSUPP;
  lenient.fail_dir_sync = EINVAL;  // What file systems without it say.
  CHECK(Save(&lenient, dir.NewPath(), data, IoMode::kBuffered).ok());
}

}  // namespace
}  // namespace sharded_ckpt

int main() {
  using namespace sharded_ckpt;
  TempDir dir;
  CallsComeInOrder(dir);
  DirectPaddingIsCutOffBeforeTheSync(dir);
  DirectFallsBack(dir);
  ShortAndInterruptedWritesGoOn(dir);
  WritesWithoutProgressEnd(dir);
  AFailedSyncIsFinal(dir);
  EveryErrorHasItsOperation(dir);
  return 0;
}
