#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <initializer_list>

namespace sharded_ckpt {
namespace {

std::atomic<uint64_t> g_fork_generation{0};

void CountFork() { g_fork_generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

SignalsBlocked::SignalsBlocked() {
  sigset_t set;
  ::sigfillset(&set);
  // These report faults of the thread itself; blocking them would hide where it crashed.
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) ::sigdelset(&set, fault);
  ::pthread_sigmask(SIG_SETMASK, &set, &before_);
}

SignalsBlocked::~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

uint64_t ForkGeneration() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, CountFork);
  (void)registered;
  return g_fork_generation.load(std::memory_order_relaxed);
}

}  // namespace sharded_ckpt
