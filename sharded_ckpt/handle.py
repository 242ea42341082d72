"""What ``save`` and ``load`` return."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sharded_ckpt.errors import SaveTimeout
from sharded_ckpt.layout import SetId

if TYPE_CHECKING:
    from sharded_ckpt.staging import Snapshot


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load put where.

    ``step`` is 0 and ``id`` is ``None`` when the directory holds no committed step. ``loaded``
    counts tensors and bytes filled on this rank, and lists ``missing`` and ``extra`` names (empty
    unless ``strict=False``).
    """

    step: int
    client_state: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    id: SetId | None = None


class SaveHandle:
    """One save under way. Every rank has its own; all of them end the same way."""

    def __init__(self, step: int) -> None:
        self.step = step
        #: identity of the committed set, once ``done()``
        self.id: SetId | None = None
        #: whether the save was left out because both buffers were busy (``when_busy="skip"``)
        self.skipped = False
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._snapshot: Snapshot | None = None
        self._collected = False

    def staged(self) -> bool:
        """Whether the snapshot is complete, so that training may change anything. Never blocks."""
        snapshot = self._snapshot
        return self._finished.is_set() or (snapshot is not None and snapshot.staged())

    def done(self) -> bool:
        """Whether the save has ended, well or badly. Never blocks."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> SetId | None:
        """Blocks until the step is committed and durable on every rank; returns its identity.

        ``None`` only for a skipped save. Raises the :class:`SaveError` that ended it, or
        :class:`SaveTimeout` after ``timeout_s`` seconds (the save itself then goes on).
        """
        if not self._finished.wait(timeout_s):
            raise SaveTimeout(
                f"step {self.step} is not committed after {timeout_s} s; it is still being saved",
                step=self.step,
            )
        self._collected = True
        if self._error is not None:
            raise self._error
        return self.id

    def exception(self) -> BaseException | None:
        """The error that ended the save, if it has ended with one."""
        return self._error

    @property
    def collected(self) -> bool:
        """Whether somebody has seen how the save ended."""
        return self._collected

    def settle(self, timeout_s: float | None) -> bool:
        """Blocks until the save has ended, well or badly; False when it has not in time."""
        return self._finished.wait(timeout_s)

    def _finish(self, id: SetId | None, error: BaseException | None) -> None:
        self.id = id
        self._error = error
        self._snapshot = None
        self._finished.set()

    def __repr__(self) -> str:
        if not self.done():
            return f"SaveHandle(step={self.step}, running)"
        if self.skipped:
            return f"SaveHandle(step={self.step}, skipped)"
        return (
            f"SaveHandle(step={self.step}, {self._error!r})"
            if self._error
            else (f"SaveHandle(step={self.step}, committed)")
        )
