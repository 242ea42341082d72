// Arena: a staging buffer. Page aligned and touched once, so that the first save is as quick as
// the tenth.

#ifndef SHARDED_CKPT_ARENA_H_
#define SHARDED_CKPT_ARENA_H_

#include <cstdint>
#include <memory>

#include "status.h"

namespace sharded_ckpt {

class Arena {
 public:
  // Maps and touches at least `nbytes`, rounded up to whole pages. Huge pages are advised.
  static Status Map(uint64_t nbytes, std::shared_ptr<Arena>* arena);

  // Uses memory of the caller, which must stay alive as long as the arena or a job uses it.
  static std::shared_ptr<Arena> Wrap(char* address, uint64_t nbytes);

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  char* address() const { return address_; }
  uint64_t nbytes() const { return nbytes_; }

 private:
  Arena(char* address, uint64_t nbytes, bool owned)
      : address_(address), nbytes_(nbytes), owned_(owned) {}

  char* const address_;
  const uint64_t nbytes_;
  const bool owned_;
};

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_ARENA_H_
