#include "arena.h"

#include <errno.h>
#include <sys/mman.h>

#include "file.h"

namespace sharded_ckpt {
namespace {

constexpr uint64_t kHugePageNbytes = 2 << 20;

}  // namespace

Status Arena::Map(uint64_t nbytes, std::shared_ptr<Arena>* arena) {
  if (nbytes > (uint64_t{1} << 47)) {
    return Status::Invalid("an arena of " + std::to_string(nbytes) + " bytes cannot be addressed");
  }
  // Whole huge pages where it matters, so that the end of a large arena is not made of small ones.
  const uint64_t unit = nbytes >= kHugePageNbytes ? kHugePageNbytes : kAlign;
  const uint64_t size = nbytes == 0 ? kAlign : (nbytes + unit - 1) / unit * unit;
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    return Status::Io(errno, "mmap", "staging buffer", std::to_string(size) + " bytes");
  }
  // Advice: without huge pages the copy is slower, not wrong.
  (void)::madvise(address, size, MADV_HUGEPAGE);
  // Forked children (data workers) neither share nor copy it: they must not use the engine.
  (void)::madvise(address, size, MADV_DONTFORK);
  auto* bytes = static_cast<char*>(address);
  for (uint64_t i = 0; i < size; i += kAlign) {
    *static_cast<volatile char*>(bytes + i) = 0;
  }
  arena->reset(new Arena(bytes, size, true));
  return Status::Ok();
}

std::shared_ptr<Arena> Arena::Wrap(char* address, uint64_t nbytes) {
  return std::shared_ptr<Arena>(new Arena(address, nbytes, false));
}

Arena::~Arena() {
  if (owned_) ::munmap(address_, nbytes_);
}

}  // namespace sharded_ckpt
