"""The saves that are under way, and how those ended that nobody has asked about yet."""

from __future__ import annotations

import time

from sharded_ckpt.errors import CheckpointError, SaveError
from sharded_ckpt.saver import RankSave


class PendingSaves:
    """Kept by the training thread; saves end in the background."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._saves: list[RankSave] = []
        self._failures = 0
        self._last_failure: RankSave | None = None

    def add(self, save: RankSave) -> None:
        self._saves.append(save)

    def unfinished_steps(self) -> list[int]:
        return [s.step for s in self._saves if not s.handle.done()]

    def fence(self, *, block: bool = False) -> bool:
        """Returns once no source is copied any more; whether there was anything to wait for.

        A failed copy does not raise: its save ends with the error, and training goes on.
        """
        waited = False
        for save in self._saves:
            snapshot = save.snapshot
            if snapshot is None or snapshot.released:
                continue
            waited = True
            try:
                snapshot.fence(save.deadline, block=block)
            except BaseException as error:
                # The sources may change from here on: what is not copied yet must not be written.
                save.error = save.error or error
                snapshot.job.cancel()
                snapshot.released = True
                if not isinstance(error, CheckpointError):
                    raise
        self._reap()
        return waited

    def raise_repeated(self) -> None:
        """Raises :class:`SaveError` once ``max_failures`` saves in a row have failed."""
        self._reap()
        last = self._last_failure
        if last is None or self._failures < self._max_failures:
            return
        count, self._failures = self._failures, 0
        last.handle._collected = True
        error = last.handle.exception()
        raise SaveError(
            f"{count} saves in a row have failed, the last one at step {last.step}: {error}",
            step=last.step,
        ) from error

    def drain(self, timeout_s: float | None = None, *, raise_errors: bool = True) -> None:
        """Blocks until every save has ended; raises the first error that nobody has seen."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for save in self._saves:
            if not save.handle.settle(None if end is None else max(0.0, end - time.monotonic())):
                raise SaveError(
                    f"step {save.step} is still being saved after {timeout_s} s", step=save.step
                )
        failed = [s for s in self._saves if s.handle.exception() is not None]
        if self._last_failure is not None and self._last_failure not in failed:
            failed.insert(0, self._last_failure)
        self._reap()
        if not raise_errors:
            return
        unseen = [s for s in failed if not s.handle.collected]
        for save in unseen:
            save.handle._collected = True
        if unseen:
            error = unseen[0].handle.exception()
            assert error is not None
            raise error

    def _reap(self) -> None:
        running = []
        for save in self._saves:
            if not save.handle.done():
                running.append(save)
            elif save.handle.exception() is None:
                self._failures = 0
            else:
                self._failures += 1
                self._last_failure = save
        self._saves = running
