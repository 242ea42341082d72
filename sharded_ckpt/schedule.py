"""Whether to save now: the policy, the clock and signals, agreed by all ranks.

Policies that only count steps give every rank the same answer by themselves. Those that look at a
clock, and signals that reach a single rank, are decided on rank 0 and announced, once per call.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from sharded_ckpt.group import Group
from sharded_ckpt.policy import Progress, SaveEvery
from sharded_ckpt.preemption import Agreement, Decision, Preemption

log = logging.getLogger(__name__)


class Schedule:
    """The answer of ``should_save``, and what it is made from."""

    def __init__(self, policy: SaveEvery | None, group: Group, timeout_s: float) -> None:
        self._policy = policy
        self._group = group
        self._timeout_s = timeout_s
        self._clones: list[Group] = []
        self._agreement: Agreement | None = None
        self._preemption: Preemption | None = None
        self._last_step = 0
        self._last_save_s = time.monotonic()
        self._seen: tuple[int, float] | None = None
        self._step_time_s: float | None = None
        self._save_cost_s: float | None = None
        #: whether all ranks have agreed to stop
        self.stop = False

    def due(self, step: int) -> bool:
        """Whether ``step`` is to be saved; the same on every rank that asks for the same step."""
        self._see(step)
        policy = self._policy
        if self._agreement is None:
            if policy is None or not policy.needs_agreement:
                return policy is not None and policy.due(step, self._progress())
            self._agreement = Agreement(self._clone(), timeout_s=self._timeout_s)
        if self._preemption is not None:
            self._preemption.announce()
        decision = self._agreement.decide(step, lambda: self._decide(step))
        if decision.stop and not self.stop:
            log.warning("stopping after step %d: %s", step, decision.reason)
        self.stop = self.stop or decision.stop
        return decision.save

    def install_signal_handlers(self) -> None:
        """From now on SIGTERM and SIGUSR1 on any rank make the next step due, and ``stop`` true."""
        if self._agreement is None:
            self._agreement = Agreement(self._clone(), timeout_s=self._timeout_s)
        if self._preemption is None:
            self._preemption = Preemption(self._clone())
            self._preemption.install()

    def saved(self, step: int) -> None:
        """Intervals count from ``step`` and from now on; also what a load resumed from."""
        self._last_step = step
        self._last_save_s = time.monotonic()

    def cost(self, seconds: float, *, more: bool = False) -> None:
        """What a save cost the training thread; ``more`` adds the fence of the save before."""
        known = self._save_cost_s
        self._save_cost_s = known + seconds if more and known is not None else seconds

    def close(self) -> None:
        if self._preemption is not None:
            self._preemption.uninstall()
        for group in self._clones:
            group.close()

    def _clone(self) -> Group:
        clone = self._group.clone()
        self._clones.append(clone)
        return clone

    def _decide(self, step: int) -> Decision:
        if self._preemption is not None and self._preemption.requested():
            # One save for one preemption; the loop may take a few more steps before it stops.
            return Decision(save=not self.stop, stop=True, reason=self._preemption.reason)
        due = self._policy is not None and self._policy.due(step, self._progress())
        return Decision(save=due, stop=False, reason="due" if due else "")

    def _progress(self) -> Progress:
        return Progress(
            last_step=self._last_step,
            last_save_s=self._last_save_s,
            now_s=time.monotonic(),
            save_cost_s=self._save_cost_s,
            step_time_s=self._step_time_s,
        )

    def _see(self, step: int) -> None:
        now = time.monotonic()
        if self._seen is not None and step > self._seen[0]:
            took = (now - self._seen[1]) / (step - self._seen[0])
            known = self._step_time_s
            self._step_time_s = took if known is None else 0.8 * known + 0.2 * took
        self._seen = (step, now)


class BusyVote:
    """Whether any rank has no free staging buffer: then all ranks skip a save, or none does."""

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._asked: Counter[int] = Counter()
        self._last_key = ""

    def anywhere(self, step: int, busy_here: bool) -> bool:
        """Every rank asks, with the same ``step``. Raises :class:`GroupTimeout`."""
        # Counted by step, as saves are: a rank that left one out is with the others at the next.
        self._asked[step] += 1
        key = f"busy/{step}.{self._asked[step]}"
        busy = self._group.gather(key, b"1" if busy_here else b"0", self._timeout_s)
        answer = (b"1" if b"1" in busy else b"0") if self._group.rank == 0 else None
        agreed = self._group.broadcast(f"{key}/all", answer, self._timeout_s) == b"1"
        if self._group.rank == 0:
            # Every rank has asked again, so all have read the answer of last time.
            self._group.forget([self._last_key] if self._last_key else [])
            self._last_key = f"{key}/all"
        return agreed
