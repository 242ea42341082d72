"""How all ranks come to one answer: save this step or not, stop after it or not.

Rank 0 decides, since clocks and signals differ from rank to rank, and announces each decision
under a key of its own. A signal handler does nothing but set a flag; the training thread publishes
it at its next call, from where rank 0 learns of it. So a signal that reaches a single rank makes
all ranks save the same step, one or two steps later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from sharded_ckpt.errors import GroupError, GroupTimeout, UsageError
from sharded_ckpt.group import Group

#: Decisions that stay readable. Training keeps ranks within a step or two of each other; a rank
#: this far behind is not training with the others any more.
LAG = 1024

#: A scheduler and the launcher under it may both signal the same end of the job. A SIGTERM this
#: soon after the first one says nothing new; a later one is somebody who does not want to wait.
DUPLICATE_WITHIN_S = 5.0

_PREEMPT = "preempt"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at one step. ``reason`` is for the log; empty when nothing is due."""

    save: bool
    stop: bool
    reason: str


class Agreement:
    """One decision a call, made on rank 0, the same on every rank.

    Every rank calls :meth:`decide` equally often, with the same steps. Not for use from two
    threads at once: give each its own, on a clone of the group with its own prefix.
    """

    def __init__(self, group: Group, *, timeout_s: float = 600.0) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._calls = 0

    def decide(self, step: int, local: Callable[[], Decision]) -> Decision:
        """Rank 0's ``local()``, on every rank. ``local`` is called on rank 0 only.

        Raises :class:`GroupTimeout` when rank 0 announces nothing within ``timeout_s``, and
        :class:`GroupError` when ``local`` raised there (rank 0 itself raises what ``local`` did)
        or when the ranks ask about different steps.
        """
        self._calls += 1
        key = f"decide/{self._calls}"
        if self._group.rank != 0:
            return self._hear(key, step)
        try:
            decision = local()
        except BaseException as error:
            # The others are waiting for this key: they are told now, not at their deadline.
            with contextlib.suppress(GroupError):
                self._announce(key, {"step": step, "error": f"{type(error).__name__}: {error}"})
            raise
        self._announce(key, {"step": step, **asdict(decision)})
        return decision

    def _announce(self, key: str, message: dict[str, Any]) -> None:
        if self._group.world_size == 1:
            return
        self._group.publish(key, json.dumps(message).encode())
        if self._calls > LAG:
            self._group.forget([f"decide/{self._calls - LAG}"])

    def _hear(self, key: str, step: int) -> Decision:
        try:
            message = json.loads(self._group.fetch(key, self._timeout_s))
        except GroupTimeout as error:
            raise GroupTimeout(
                f"step {step}: rank 0 did not announce whether to save within "
                f"{self._timeout_s:g} s ({key}); every rank must call should_save() after every "
                "step, and rank 0 must be alive: look at its log first",
                missing=(0,),
            ) from error
        if "error" in message:
            raise GroupError(f"step {step}: rank 0 could not decide: {message['error']}")
        if message["step"] != step:
            raise GroupError(
                f"rank {self._group.rank} asks whether to save step {step}, rank 0 asked about "
                f"step {message['step']} in its call {self._calls}; every rank must call "
                "should_save() with the same steps, equally often"
            )
        return Decision(message["save"], message["stop"], message["reason"])


class Preemption:
    """Signals of the scheduler, such as SIGTERM before the machine is taken away.

    The handler only sets a flag. Handlers that were there before are not called, since many of
    them exit; :meth:`uninstall` puts them back. A SIGTERM that comes more than
    :data:`DUPLICATE_WITHIN_S` after the first one takes its default action: the process ends. So
    does the first one in a forked child (a DataLoader worker, say), which inherits the handler but
    has nothing to save.
    """

    def __init__(self, group: Group, signals: Sequence[signal.Signals] = _SIGNALS) -> None:
        self._group = group
        self._signals = tuple(signals)
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._received: signal.Signals | None = None
        self._terminated_s: float | None = None  # monotonic, of the first SIGTERM
        self._announced = False
        self._reason = ""

    @property
    def received(self) -> signal.Signals | None:
        """The signal that reached this rank, if any: SIGTERM rather than one that warns of it."""
        return self._received

    @property
    def reason(self) -> str:
        """Which rank got which signal, once :meth:`requested` has said yes."""
        return self._reason

    def install(self) -> None:
        """Raises ``UsageError`` outside the main thread, where Python cannot install handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signal handlers can only be installed from the main thread, got "
                f"{threading.current_thread().name!r}; call install_signal_handlers() there"
            )
        for one in self._signals:
            if one not in self._previous:
                self._previous[one] = signal.signal(one, self._handle)

    def uninstall(self) -> None:
        """Puts the previous handlers back where ours are still in place."""
        if threading.current_thread() is not threading.main_thread():
            # Python cannot do it here. The handler left behind still ends at a later SIGTERM.
            return
        while self._previous:
            one, previous = self._previous.popitem()
            if signal.getsignal(one) == self._handle:
                # None: a handler from C that Python cannot put back.
                signal.signal(one, signal.SIG_DFL if previous is None else previous)

    def announce(self) -> None:
        """Tells rank 0 of a signal that reached this rank. Every rank calls it at every step.

        Costs nothing until there is a signal.
        """
        received = self._received
        if received is None or self._announced:
            return
        self._announced = True
        text = f"rank {self._group.rank} got {received.name}"
        self._reason = self._reason or text
        if self._group.world_size > 1:
            # Several ranks may write this key: whichever text is read, it is true.
            self._group.publish(_PREEMPT, text.encode())

    def requested(self) -> bool:
        """Whether a signal has reached this rank, or was announced by another one."""
        self.announce()
        if not self._reason and self._group.world_size > 1:
            heard = self._group.peek(_PREEMPT)
            self._reason = "" if heard is None else heard.decode(errors="replace")
        return bool(self._reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing here may block, allocate much or log: this runs between any two bytecodes.
        now_s, first_s = time.monotonic(), self._terminated_s
        terminate = number == signal.SIGTERM
        again = terminate and first_s is not None and now_s - first_s > DUPLICATE_WITHIN_S
        if again or os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if terminate and first_s is None:
            self._terminated_s = now_s
        if self._received is None or number == signal.SIGTERM:
            self._received = signal.Signals(number)
