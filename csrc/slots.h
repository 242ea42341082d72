// Slots: the pieces of a staging buffer, one chunk each, and the states they pass through.

#ifndef SHARDED_CKPT_SLOTS_H_
#define SHARDED_CKPT_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sharded_ckpt {

enum class SlotState : uint8_t {
  kFree,     // Holds nothing that is still needed; the next chunk of the slot may move in.
  kFilling,  // A copy thread fills it (or checksums what others put there).
  kReady,    // Filled and checksummed; waits for an I/O thread.
  kWriting,  // An I/O thread writes it.
  kFailed,   // Its job failed or was cancelled; the slot is not used again by that job.
};
constexpr size_t kSlotStateCount = 5;

const char* SlotStateName(SlotState state);

// Whether the one transition table allows the move.
bool SlotMayMove(SlotState from, SlotState to);

// The slots of one job. Not thread safe: the engine's lock guards them.
class Slots {
 public:
  explicit Slots(size_t count) : states_(count, SlotState::kFree) {}

  size_t count() const { return states_.size(); }
  SlotState state(size_t slot) const { return states_[slot]; }

  // Moves `slot` to `to`; false, and no move, when the table does not allow it.
  [[nodiscard]] bool Move(size_t slot, SlotState to);

 private:
  std::vector<SlotState> states_;
};

}  // namespace sharded_ckpt

#endif  // SHARDED_CKPT_SLOTS_H_
