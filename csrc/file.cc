#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sharded_ckpt {
namespace {

// A call that keeps being interrupted, or keeps writing nothing, is an error and not a loop.
constexpr int kMaxFruitless = 100;

// Bytes handed to the device but not yet waited for, per file: enough to keep it busy, little
// enough that a save does not push the trainer's own pages out of the cache.
constexpr size_t kMaxBehindRanges = 8;

int RealOpen(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }

int RealSetDirect(int fd, bool on) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -1;
  return ::fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT);
}

int RealFallocate(int fd, off_t nbytes) { return ::fallocate(fd, 0, 0, nbytes); }

int RealWriteBehind(int fd, off_t offset, off_t nbytes, bool wait) {
  const unsigned flags =
      wait ? SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER
           : SYNC_FILE_RANGE_WRITE;
  return ::sync_file_range(fd, offset, nbytes, flags);
}

int RealDropCache(int fd, off_t offset, off_t nbytes) {
  return ::posix_fadvise(fd, offset, nbytes, POSIX_FADV_DONTNEED);
}

constexpr Syscalls kReal = {
    RealOpen,    ::close,         RealSetDirect, ::pread,     ::pwrite, RealFallocate,
    ::ftruncate, RealWriteBehind, RealDropCache, ::fdatasync, ::fsync,
};

std::atomic<const Syscalls*> g_syscalls{&kReal};

const Syscalls& Sys() { return *g_syscalls.load(std::memory_order_acquire); }

// Repeats `call` while it is interrupted, a bounded number of times. Not for syncs.
template <typename Call>
auto RetryInterrupted(Call call) {
  auto result = call();
  for (int tries = 1; result < 0 && errno == EINTR && tries < kMaxFruitless; ++tries) {
    result = call();
  }
  return result;
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// For "no space" errors: what was asked for, and what is there.
std::string SpaceDetail(const std::string& path, int err, uint64_t nbytes) {
  if (err != ENOSPC && err != EDQUOT && err != EFBIG) return "";
  std::string detail = "the file needs " + std::to_string(nbytes) + " bytes";
  struct statvfs space;
  if (::statvfs(ParentOf(path).c_str(), &space) == 0) {
    const uint64_t free_nbytes = uint64_t{space.f_bavail} * space.f_frsize;
    detail += ", the file system has " + std::to_string(free_nbytes) + " free";
  }
  return detail;
}

bool MeansUnsupported(int err) {
  return err == EOPNOTSUPP || err == ENOSYS || err == EINVAL || err == ENOTTY;
}

}  // namespace

const Syscalls& RealSyscalls() { return kReal; }

void SetSyscalls(const Syscalls* table) {
  g_syscalls.store(table ? table : &kReal, std::memory_order_release);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Fd::~Fd() { Close(); }

int Fd::Close() {
  if (fd_ < 0) return 0;
  const int result = Sys().close(std::exchange(fd_, -1));
  // Linux has closed the descriptor when it reports EINTR; calling again could hit another's.
  return result == 0 || errno == EINTR ? 0 : errno;
}

Status NewFile::Fail(const char* operation, int err, std::string detail) const {
  if (detail.empty()) detail = SpaceDetail(path_, err, nbytes_);
  return Status::Io(err, operation, path_, std::move(detail));
}

Status NewFile::Create(const std::string& path, uint64_t nbytes, IoMode mode, bool aligned) {
  path_ = path;
  nbytes_ = nbytes;
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int fd = RetryInterrupted([&] { return Sys().open(path.c_str(), kFlags, 0640); });
  if (fd < 0) return Fail("create", errno);
  fd_ = Fd(fd);
  const auto size = static_cast<off_t>(nbytes);
  if (RetryInterrupted([&] { return Sys().fallocate(fd_.get(), size); }) != 0 &&
      !MeansUnsupported(errno)) {
    return Fail("fallocate", errno);
  }
  return TryDirect(mode, aligned);
}

// The probe is a real write: some file systems accept the flag and refuse the write. It puts
// zeros where the header will be, which is what an unfinished file begins with anyway.
Status NewFile::TryDirect(IoMode mode, bool aligned) {
  if (mode == IoMode::kBuffered) return Status::Ok();
  if (!aligned) {
    if (mode == IoMode::kAuto) return Status::Ok();
    return Fail("probe O_DIRECT", EINVAL, "buffers or offsets are not aligned to 4096");
  }
  alignas(kAlign) static const char kZeros[kAlign] = {};
  if (Sys().set_direct(fd_.get(), true) == 0) {
    const ssize_t n =
        RetryInterrupted([&] { return Sys().pwrite(fd_.get(), kZeros, sizeof(kZeros), 0); });
    if (n == static_cast<ssize_t>(sizeof(kZeros))) {
      direct_ = true;
      return Status::Ok();
    }
    const int err = n < 0 ? errno : EINVAL;
    if (!MeansUnsupported(err)) return Fail("write", err);
    if (Sys().set_direct(fd_.get(), false) != 0) return Fail("clear O_DIRECT", errno);
  }
  if (mode == IoMode::kDirect) return Fail("probe O_DIRECT", EINVAL, "use io='auto'");
  return Status::Ok();
}

Status NewFile::Write(uint64_t offset, const void* data, uint64_t nbytes) {
  const Range range{offset, nbytes};
  const char* from = static_cast<const char*>(data);
  alignas(kAlign) char padded_tail[kAlign];
  int fruitless = 0;
  while (nbytes > 0) {
    const void* source = from;
    uint64_t size = nbytes;
    if (direct_ && nbytes >= kAlign) {
      size = nbytes / kAlign * kAlign;
    } else if (direct_) {
      std::memcpy(padded_tail, from, nbytes);
      std::memset(padded_tail + nbytes, 0, kAlign - nbytes);
      source = padded_tail;
      size = kAlign;
      padded_.store(true, std::memory_order_relaxed);
    }
    const ssize_t n = Sys().pwrite(fd_.get(), source, size, static_cast<off_t>(offset));
    if (n < 0 && errno != EINTR) return Fail("write", errno);
    // A short direct write may end off the grid; the rest must start on it.
    uint64_t done = n < 0 ? 0 : static_cast<uint64_t>(n);
    if (direct_) done = done / kAlign * kAlign;
    done = std::min(done, nbytes);
    if (done == 0) {
      if (++fruitless >= kMaxFruitless) return Fail("write", EIO, "writes make no progress");
      continue;
    }
    fruitless = 0;
    from += done;
    offset += done;
    nbytes -= done;
  }
  return direct_ ? Status::Ok() : WriteBehind(range);
}

// Starts the device on `written`, and waits for and drops what was started long ago. Waiting
// reports (and so consumes) write errors of the device: they are final, like those of a sync.
Status NewFile::WriteBehind(Range written) {
  Range oldest{0, 0};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    behind_.push_back(written);
    if (behind_.size() > kMaxBehindRanges) {
      oldest = behind_.front();
      behind_.pop_front();
    }
  }
  const auto advise = [&](Range range, bool wait) {
    return Sys().write_behind(fd_.get(), static_cast<off_t>(range.offset),
                              static_cast<off_t>(range.nbytes), wait);
  };
  if (advise(written, false) != 0 && !MeansUnsupported(errno) && errno != ESPIPE) {
    return Fail("sync_file_range", errno);
  }
  if (oldest.nbytes == 0) return Status::Ok();
  if (advise(oldest, true) != 0 && !MeansUnsupported(errno) && errno != ESPIPE) {
    return Fail("sync_file_range", errno);
  }
  // Advice only: a failure costs memory, not data.
  (void)Sys().drop_cache(fd_.get(), static_cast<off_t>(oldest.offset),
                         static_cast<off_t>(oldest.nbytes));
  return Status::Ok();
}

Status NewFile::Sync() {
  if (sync_failed_) return Fail("fdatasync", EIO, "an earlier sync of this file failed");
  if (padded_.exchange(false, std::memory_order_relaxed)) {
    const auto size = static_cast<off_t>(nbytes_);
    if (RetryInterrupted([&] { return Sys().ftruncate(fd_.get(), size); }) != 0) {
      return Fail("ftruncate", errno);
    }
  }
  if (Sys().fdatasync(fd_.get()) != 0) {
    sync_failed_ = true;
    return Fail("fdatasync", errno);
  }
  return Status::Ok();
}

Status NewFile::Close() {
  if (!fd_.valid()) return Status::Ok();
  // Durable by now, or abandoned: either way its pages are of no use to the trainer.
  (void)Sys().drop_cache(fd_.get(), 0, 0);
  const int err = fd_.Close();
  return err == 0 ? Status::Ok() : Fail("close", err);
}

Status OpenForRead(const std::string& path, Fd* fd, uint64_t* nbytes) {
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  const int opened = RetryInterrupted([&] { return Sys().open(path.c_str(), kFlags, 0); });
  if (opened < 0) return Status::Io(errno, "open", path);
  *fd = Fd(opened);
  struct stat info;
  if (::fstat(opened, &info) != 0) return Status::Io(errno, "stat", path);
  if (!S_ISREG(info.st_mode)) return Status::Io(EINVAL, "open", path, "not a regular file");
  *nbytes = static_cast<uint64_t>(info.st_size);
  (void)::posix_fadvise(opened, 0, 0, POSIX_FADV_SEQUENTIAL);
  return Status::Ok();
}

Status ReadAll(const Fd& fd, const std::string& path, uint64_t offset, void* data,
               uint64_t nbytes) {
  char* to = static_cast<char*>(data);
  int fruitless = 0;
  while (nbytes > 0) {
    const ssize_t n = Sys().pread(fd.get(), to, nbytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR && ++fruitless < kMaxFruitless) continue;
    if (n < 0) return Status::Io(errno, "read", path, "at byte " + std::to_string(offset));
    if (n == 0) {
      Status status = Status::Make(Code::kCorrupt, 0, "read", path,
                                   "the file ends at byte " + std::to_string(offset) + ", " +
                                       std::to_string(nbytes) + " bytes too early");
      status.start = offset;
      status.end = offset + nbytes;
      return status;
    }
    fruitless = 0;
    to += n;
    offset += static_cast<uint64_t>(n);
    nbytes -= static_cast<uint64_t>(n);
  }
  return Status::Ok();
}

Status SyncParent(const std::string& path) {
  const std::string parent = ParentOf(path);
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  const int opened = RetryInterrupted([&] { return Sys().open(parent.c_str(), kFlags, 0); });
  if (opened < 0) return Status::Io(errno, "open directory", parent);
  Fd fd(opened);
  // EINVAL: a file system that has no fsync for directories. The store, which syncs the same
  // directory when it commits, warns of it.
  if (Sys().fsync(fd.get()) != 0 && errno != EINVAL) {
    return Status::Io(errno, "fsync directory", parent);
  }
  const int err = fd.Close();
  return err == 0 ? Status::Ok() : Status::Io(err, "close directory", parent);
}

}  // namespace sharded_ckpt
