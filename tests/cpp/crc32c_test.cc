// CRC32C: known vectors, the table against the processor's instruction, combination, copying.

#include "crc32c.h"

#include <string>

#include "check.h"
#include "slots.h"

namespace sharded_ckpt {
namespace {

void KnownVectors() {
  CHECK(Crc32cExtend(0, "123456789", 9) == 0xe3069283);
  CHECK(Crc32cExtendTable(0, "123456789", 9) == 0xe3069283);
  CHECK(Crc32cExtend(0, std::string(32, '\0').data(), 32) == 0x8a9136aa);
  CHECK(Crc32cExtend(0, nullptr, 0) == 0);
}

void ImplementationsAgree() {
  const std::string data = RandomBytes(1, 100'000);
  for (size_t nbytes : {1, 7, 8, 767, 768, 769, 12287, 12288, 12289, 24575, 99'000}) {
    for (size_t start : {0, 1, 5}) {
      const uint32_t table = Crc32cExtendTable(7, data.data() + start, nbytes);
      CHECK(Crc32cExtend(7, data.data() + start, nbytes) == table);
    }
  }
}

void PartsCombine() {
  const std::string data = RandomBytes(2, 50'000);
  const uint32_t whole = Crc32cExtend(0, data.data(), data.size());
  for (size_t cut : {size_t{0}, size_t{1}, size_t{4096}, size_t{49'999}, data.size()}) {
    const uint32_t a = Crc32cExtend(0, data.data(), cut);
    const uint32_t b = Crc32cExtend(0, data.data() + cut, data.size() - cut);
    CHECK(Crc32cCombine(a, b, data.size() - cut) == whole);
    CHECK(Crc32cExtend(a, data.data() + cut, data.size() - cut) == whole);
  }
}

void CopyChecksumsWhatArrived() {
  constexpr size_t kMargin = 64;
  const std::string data = RandomBytes(3, (1 << 20) + 200);
  for (size_t nbytes : {0, 1, 15, 16, 12287, 12288, 12289, 12303, 40'000, (1 << 20) + 77}) {
    for (size_t source : {0, 3}) {
      for (size_t dest : {0, 1, 8, 15}) {
        std::string copy(kMargin + dest + nbytes + kMargin, '#');
        const uint32_t crc =
            Crc32cCopy(5, copy.data() + kMargin + dest, data.data() + source, nbytes);
        CHECK(crc == Crc32cExtendTable(5, data.data() + source, nbytes));
        CHECK(copy == std::string(kMargin + dest, '#') + data.substr(source, nbytes) +
                          std::string(kMargin, '#'));
      }
    }
  }
}

void SlotsMoveAsTheTableSays() {
  int allowed = 0;
  for (size_t from = 0; from < kSlotStateCount; ++from) {
    for (size_t to = 0; to < kSlotStateCount; ++to) {
      allowed += SlotMayMove(static_cast<SlotState>(from), static_cast<SlotState>(to));
    }
  }
  CHECK(allowed == 7);
  Slots slots(2);
  CHECK(!slots.Move(1, SlotState::kReady));
  CHECK(slots.state(1) == SlotState::kFree);
  for (SlotState next :
       {SlotState::kFilling, SlotState::kReady, SlotState::kWriting, SlotState::kFree}) {
    CHECK(slots.Move(1, next));
  }
  CHECK(slots.Move(1, SlotState::kFilling) && slots.Move(1, SlotState::kFailed));
  CHECK(!slots.Move(1, SlotState::kFree));
  CHECK(slots.state(0) == SlotState::kFree);
}

}  // namespace
}  // namespace sharded_ckpt

int main() {
  using namespace sharded_ckpt;
  KnownVectors();
  ImplementationsAgree();
  PartsCombine();
  CopyChecksumsWhatArrived();
  SlotsMoveAsTheTableSays();
  return 0;
}
