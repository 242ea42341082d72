"""When to save: a pure function from the step and the progress made to yes or no.

Every rule looks at the span ``(last_step, step]`` rather than at ``step`` alone. So a loop that
asks only now and then misses nothing, a step that was saved is not due again after a resume, and a
save that was skipped stays due until it is made. Rules that read a clock differ from rank to rank:
rank 0 answers for all of them (:attr:`SaveEvery.needs_agreement`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sharded_ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rule may look at. Times are seconds of one monotonic clock.

    ``last_step`` is the step of the last save or, before the first one, the step that training
    began or resumed at. ``last_save_s`` is when that was. ``save_cost_s`` is the training time that
    one save costs and ``step_time_s`` what one step takes, both ``None`` until measured.
    """

    last_step: int
    last_save_s: float
    now_s: float
    save_cost_s: float | None = None
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Auto:
    """Lets Young/Daly choose the interval from the measured cost of a save.

    ``mtbf_minutes``: mean time between failures of the whole job, not of one machine.
    ``first_minutes``: when to make the first save, which measures the cost.

    Raises ``UsageError`` unless both are positive and finite.
    """

    mtbf_minutes: float
    first_minutes: float = 5.0

    def __post_init__(self) -> None:
        _check_minutes("Auto(mtbf_minutes=)", self.mtbf_minutes)
        _check_minutes("Auto(first_minutes=)", self.first_minutes)

    def interval_s(self, save_cost_s: float | None) -> float:
        """Seconds from one save to the next."""
        if save_cost_s is None:
            return self.first_minutes * 60
        return young_daly_s(save_cost_s, self.mtbf_minutes * 60)


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """When to save. Several rules together: whichever comes first.

    ``steps=N``       at multiples of ``N``
    ``minutes=M``     when ``M`` minutes have passed since the last save
    ``at=(a, b)``     at these steps
    ``schedule``      pairs ``(first_step, every_steps)``: from ``first_step`` on, at multiples of
                      ``every_steps``, until the next pair takes over
    ``auto``          at the Young/Daly interval, see :class:`Auto`

    Raises ``UsageError`` for a rule that cannot be right, and when no rule is given.
    """

    steps: int | None = None
    minutes: float | None = None
    at: Iterable[int] = ()
    schedule: Sequence[tuple[int, int]] = ()
    auto: Auto | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            _check_int("SaveEvery(steps=)", self.steps, at_least=1)
        if self.minutes is not None:
            _check_minutes("SaveEvery(minutes=)", self.minutes)
        if self.auto is not None and not isinstance(self.auto, Auto):
            raise UsageError(
                f"SaveEvery(auto=) must be an Auto, got {self.auto!r}; "
                "write auto=Auto(mtbf_minutes=720) for a failure every 12 hours"
            )
        # A frozen dataclass is normalised through object.__setattr__: the fields stay hashable.
        object.__setattr__(self, "at", _check_at(self.at))
        object.__setattr__(self, "schedule", _check_schedule(self.schedule))
        if not self._has_rule:
            raise UsageError(
                "SaveEvery() has no rule and would never save; give steps=, minutes=, at=, "
                "schedule= or auto=, or leave save_every unset and call save() yourself"
            )

    @property
    def _has_rule(self) -> bool:
        rules = (self.steps, self.minutes, self.auto)
        return any(rule is not None for rule in rules) or bool(self.at) or bool(self.schedule)

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks could answer differently, so that rank 0 has to answer for all."""
        return self.minutes is not None or self.auto is not None

    def due(self, step: int, now: Progress) -> bool:
        """Whether ``step`` is to be saved. Depends on the arguments alone."""
        return bool(self.reasons(step, now))

    def reasons(self, step: int, now: Progress) -> tuple[str, ...]:
        """The rules that make ``step`` due, by name; empty when it is not due."""
        if step <= now.last_step:
            return ()
        elapsed_s = now.now_s - now.last_save_s
        found = []
        if self.steps is not None and _multiple_in(now.last_step, step, self.steps):
            found.append("steps")
        if any(now.last_step < milestone <= step for milestone in self.at):
            found.append("at")
        if self._schedule_due(now.last_step, step):
            found.append("schedule")
        if self.minutes is not None and elapsed_s >= self.minutes * 60:
            found.append("minutes")
        if self.auto is not None:
            # A save can only fall between steps: take the step whose end is nearest.
            half_step_s = (now.step_time_s or 0.0) / 2
            if elapsed_s + half_step_s >= self.auto.interval_s(now.save_cost_s):
                found.append("auto")
        return tuple(found)

    def _schedule_due(self, last_step: int, step: int) -> bool:
        high = step
        for first, every in reversed(self.schedule):
            low = max(last_step, first - 1)
            if low < high and _multiple_in(low, high, every):
                return True
            high = min(high, first - 1)
        return False


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """The interval that wastes least: the square root of ``2 * cost * mtbf``, in seconds.

    A short interval wastes time on saves (``cost / interval``), a long one on work that a failure
    takes back (``interval / (2 * mtbf)``); this is where the sum is smallest. The first-order
    formula of Young, refined by Daly; it holds while ``cost_s`` is far below ``mtbf_s``.
    """
    return math.sqrt(2 * max(cost_s, 0.0) * mtbf_s)


def _multiple_in(low: int, high: int, every: int) -> bool:
    """Whether a multiple of ``every`` lies in ``(low, high]``."""
    return high // every > low // every


def _check_at(at: Any) -> tuple[int, ...]:
    if isinstance(at, int) or not isinstance(at, Iterable):
        raise UsageError(f"SaveEvery(at=) must list steps, got {at!r}; write at=(1000, 5000)")
    steps = tuple(at)
    for step in steps:
        _check_int("each step of SaveEvery(at=)", step, at_least=1)
    return tuple(sorted(set(steps)))


def _check_schedule(schedule: Any) -> tuple[tuple[int, int], ...]:
    example = "write schedule=((0, 100), (1000, 500))"
    try:
        pairs = tuple((first, every) for first, every in schedule)
    except (TypeError, ValueError):
        raise UsageError(
            f"SaveEvery(schedule=) must list (first_step, every_steps) pairs, got {schedule!r}; "
            f"{example}"
        ) from None
    for first, every in pairs:
        _check_int("first_step in SaveEvery(schedule=)", first, at_least=0)
        _check_int("every_steps in SaveEvery(schedule=)", every, at_least=1)
    firsts = [first for first, _ in pairs]
    if any(a >= b for a, b in zip(firsts, firsts[1:], strict=False)):
        raise UsageError(
            f"SaveEvery(schedule=) must have rising first steps, got {firsts}; {example}"
        )
    return pairs


def _check_int(what: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError(f"{what} must be a whole number of at least {at_least}, got {value!r}")


def _check_minutes(what: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{what} must be a finite number of minutes above 0, got {value!r}")
