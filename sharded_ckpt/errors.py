"""Every error this package raises on purpose.

::

    CheckpointError
    |-- UsageError (ValueError)         a call that cannot be right, whatever is on disk
    |-- UnsupportedError                a mode that cannot be captured exactly is refused by name
    |-- ClosedError                     a call after close()
    |-- StateTypeError (TypeError)      a non-tensor value outside the allow-list, with its key path
    |-- StoreError (OSError)            a file operation failed: operation, path, errno
    |-- GroupError                      another rank could not be reached
    |   `-- GroupTimeout                ... within the deadline; names the missing ranks
    |-- SaveError                       a step was not committed
    |   |-- SaveAborted                 a rank voted no, or the votes do not fit together
    |   |-- SaveTimeout                 votes or the verdict did not come within the deadline
    |   |-- CommitUnknown               the manifest may or may not be durable; nothing was deleted
    |   `-- Superseded                  a newer job has claimed the directory
    |-- LoadError                       a step could not be loaded
    |   |-- StepNotFound (FileNotFoundError)
    |   |-- LayoutMismatch              saved on another layout than the one loading
    |   `-- StateMismatch               missing or extra names, or other shapes and dtypes
    `-- CorruptError                    bytes on disk are not those that were written
        |-- ManifestError               ... in a manifest
        `-- ShardError                  ... in a shard: file, tensors, byte range

A message says what happened, where, what was found, what was expected, and what to do next.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of every error of this package."""


class UsageError(CheckpointError, ValueError):
    """A call that cannot be right, whatever is on disk."""


class UnsupportedError(CheckpointError):
    """A training mode whose state cannot be captured exactly; refused by name."""


class ClosedError(CheckpointError):
    """The checkpointer was closed before this call."""


class StateTypeError(CheckpointError, TypeError):
    """A non-tensor value whose type is not on the allow-list of the format."""


class StoreError(CheckpointError, OSError):
    """A file operation failed. ``errno`` and ``filename`` are those of :class:`OSError`."""

    def __init__(self, operation: str, path: str, errno: int, detail: str = "") -> None:
        self.operation = operation
        self.path = path
        self.detail = detail
        reason = os.strerror(errno) if errno else "failed"
        message = f"{operation}: {reason}" + (f" ({detail})" if detail else "")
        OSError.__init__(self, errno, message, path)

    def __str__(self) -> str:
        reason = os.strerror(self.errno) if self.errno else "failed"
        tail = f" ({self.detail})" if self.detail else ""
        return f"{self.operation} {self.path}: {reason}{tail}"


class GroupError(CheckpointError):
    """Another rank could not be reached."""


class GroupTimeout(GroupError):
    """Some ranks did not answer within the deadline. ``missing`` holds their numbers."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class SaveError(CheckpointError):
    """A step was not committed. ``step`` says which; ``rank`` who failed, when one rank did."""

    def __init__(self, message: str, *, step: int | None = None, rank: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank


class SaveAborted(SaveError):
    """A rank voted no, or the votes do not fit together. Nothing already saved was touched."""


class SaveTimeout(SaveError):
    """Votes, or the coordinator's verdict, did not arrive within the deadline."""


class CommitUnknown(SaveError):
    """The manifest was written, but an error hides whether it is durable.

    The step may or may not be offered after a restart; nothing was deleted because of it.
    """


class Superseded(SaveError):
    """A newer job has claimed the directory; this one must not write there any more."""


class LoadError(CheckpointError):
    """A step could not be loaded. Live state is not half-filled unless the message says so."""


class StepNotFound(LoadError, FileNotFoundError):
    """The step asked for is not among the committed ones."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LayoutMismatch(LoadError):
    """The step was saved on another layout (source, ZeRO stage, world size or mesh)."""


class StateMismatch(LoadError):
    """Saved names, shapes or dtypes are not those of the objects being filled."""


class CorruptError(CheckpointError):
    """Bytes on disk are not those that were written."""


class ManifestError(CorruptError):
    """A manifest is damaged, or is not one."""


class ShardError(CorruptError):
    """A shard is damaged. ``path`` names the file; ``start``/``end`` bound the bytes, if known."""

    def __init__(
        self, message: str, *, path: str = "", start: int | None = None, end: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.start = start
        self.end = end
