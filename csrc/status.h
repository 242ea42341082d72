// Status: how every function of the core reports failure. No exception leaves the core.

#ifndef SHARDED_CKPT_STATUS_H_
#define SHARDED_CKPT_STATUS_H_

#include <cstdint>
#include <string>
#include <utility>

namespace sharded_ckpt {

enum class Code {
  kOk,
  kIo,         // A system call failed; `err` is its errno.
  kCorrupt,    // Bytes on disk are not those expected; `start`/`end` bound them in the file.
  kInvalid,    // A call that cannot be right.
  kCancelled,  // The job was cancelled, by its owner or by closing the engine.
  kClosed,     // The engine was closed before this call.
  kForked,     // The engine belongs to the parent process.
  kTimeout,    // A deadline passed.
};

struct Status {
  Code code = Code::kOk;
  int err = 0;
  std::string operation;
  std::string path;
  std::string detail;
  uint64_t start = 0;
  uint64_t end = 0;

  bool ok() const { return code == Code::kOk; }

  static Status Ok() { return Status(); }

  static Status Io(int err, std::string operation, std::string path, std::string detail = "") {
    return Make(Code::kIo, err, std::move(operation), std::move(path), std::move(detail));
  }

  static Status Invalid(std::string detail) {
    return Make(Code::kInvalid, 0, "", "", std::move(detail));
  }

  static Status Make(Code code, int err, std::string operation, std::string path,
                     std::string detail) {
    Status status;
    status.code = code;
    status.err = err;
    status.operation = std::move(operation);
    status.path = std::move(path);
    status.detail = std::move(detail);
    return status;
  }
};

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_STATUS_H_
