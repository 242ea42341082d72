#include "slots.h"

namespace sharded_ckpt {
namespace {

struct Transition {
  SlotState from;
  SlotState to;
};

constexpr Transition kTransitions[] = {
    {SlotState::kFree, SlotState::kFilling},   {SlotState::kFilling, SlotState::kReady},
    {SlotState::kReady, SlotState::kWriting},  {SlotState::kWriting, SlotState::kFree},
    {SlotState::kFilling, SlotState::kFailed}, {SlotState::kReady, SlotState::kFailed},
    {SlotState::kWriting, SlotState::kFailed},
};

}  // namespace

const char* SlotStateName(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kFilling:
      return "filling";
    case SlotState::kReady:
      return "ready";
    case SlotState::kWriting:
      return "writing";
    case SlotState::kFailed:
      return "failed";
  }
  return "unknown";
}

bool SlotMayMove(SlotState from, SlotState to) {
  for (const Transition& allowed : kTransitions) {
    if (allowed.from == from && allowed.to == to) return true;
  }
  return false;
}

bool Slots::Move(size_t slot, SlotState to) {
  if (!SlotMayMove(states_[slot], to)) return false;
  states_[slot] = to;
  return true;
}

}  // namespace sharded_ckpt
