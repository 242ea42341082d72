// Files: the only place of the core that opens, writes, syncs or closes one.
//
// Every error carries operation, path and errno. An error of a sync is final for its file: the
// kernel may have dropped the dirty pages and will report success next time, so a sync is never
// retried and what was written is never read back to find out.

#ifndef SHARDED_CKPT_FILE_H_
#define SHARDED_CKPT_FILE_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "status.h"

namespace sharded_ckpt {

// What O_DIRECT asks of offsets, sizes and addresses. 4096 satisfies every file system we know.
constexpr uint64_t kAlign = 4096;

enum class IoMode {
  kAuto,      // O_DIRECT where the file system takes it, else buffered.
  kDirect,    // O_DIRECT or an error.
  kBuffered,  // Page cache, written behind and dropped.
};

// The seam: every system call with an effect goes through this table. Tests replace it to make
// calls fail; nothing else does.
struct Syscalls {
  int (*open)(const char* path, int flags, mode_t mode);
  int (*close)(int fd);
  int (*set_direct)(int fd, bool on);
  ssize_t (*pread)(int fd, void* data, size_t nbytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* data, size_t nbytes, off_t offset);
  int (*fallocate)(int fd, off_t nbytes);
  int (*ftruncate)(int fd, off_t nbytes);
  int (*write_behind)(int fd, off_t offset, off_t nbytes, bool wait);
  int (*drop_cache)(int fd, off_t offset, off_t nbytes);
  int (*fdatasync)(int fd);
  int (*fsync)(int fd);
};

const Syscalls& RealSyscalls();

// Installs `table` (which must outlive its use), or the real one for nullptr.
void SetSyscalls(const Syscalls* table);

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // Closes and returns 0 or the errno. The descriptor is gone either way.
  int Close();

 private:
  int fd_ = -1;
};

// One new file, written by several threads at once, then synced and closed by one.
class NewFile {
 public:
  NewFile() = default;
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  // Creates `path`, which must not exist, and reserves `nbytes` (a full disk is found here).
  // `aligned`: the caller's buffers and offsets are multiples of kAlign, except a tail's size.
  Status Create(const std::string& path, uint64_t nbytes, IoMode mode, bool aligned);

  // Writes all bytes. Thread safe. In direct mode a size that is no multiple of kAlign is padded
  // with zeros on disk (Sync cuts them off), so it must be the last range of the file.
  Status Write(uint64_t offset, const void* data, uint64_t nbytes);

  // Makes all that was written durable, with the file's exact size.
  Status Sync();

  // Closes; a deferred write error of a network file system is reported here. Idempotent.
  Status Close();

  bool is_open() const { return fd_.valid(); }
  bool direct() const { return direct_; }

 private:
  struct Range {
    uint64_t offset;
    uint64_t nbytes;
  };

  Status TryDirect(IoMode mode, bool aligned);
  Status WriteBehind(Range written);
  Status Fail(const char* operation, int err, std::string detail = "") const;

  std::string path_;
  Fd fd_;
  uint64_t nbytes_ = 0;
  bool direct_ = false;
  bool sync_failed_ = false;
  std::atomic<bool> padded_{false};
  std::mutex mutex_;
  std::deque<Range> behind_;  // Guarded by mutex_: handed to the device, not yet waited for.
};

// Opens an existing regular file for reading; never follows a link, never waits for a FIFO.
Status OpenForRead(const std::string& path, Fd* fd, uint64_t* nbytes);

// Reads exactly `nbytes`; kCorrupt when the file ends before.
Status ReadAll(const Fd& fd, const std::string& path, uint64_t offset, void* data, uint64_t nbytes);

// Makes the names in the directory that holds `path` durable.
Status SyncParent(const std::string& path);

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_FILE_H_
