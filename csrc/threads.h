// What threads of this library have to do with signals and fork.

#ifndef SHARDED_CKPT_THREADS_H_
#define SHARDED_CKPT_THREADS_H_

#include <signal.h>

#include <cstdint>

namespace sharded_ckpt {

// Blocks every signal that can be blocked while threads are created, so that they inherit the
// mask: handlers run in the trainer's threads, and a file size limit (SIGXFSZ) is an error of the
// write and not the end of the process.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// How many forks lie between the process that loaded this library and this one. The first call
// installs the handler that counts: whoever starts threads calls it before.
uint64_t ForkGeneration();

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_THREADS_H_
