"""What both engines share: the protocol they follow, their errors, and how they wait.

An engine copies memory into an arena, writes the arena to a shard, and reads shards back. It knows
neither tensors nor names: only addresses, bytes, chunks and one header with room for checksums.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sharded_ckpt.checksum import to_hex
from sharded_ckpt.errors import ClosedError, ShardError, StoreError, UsageError

IoMode = Literal["auto", "direct", "buffered"]

CHUNK_NBYTES = 4 << 20  # past this no device writes faster
ALIGN = 4096  # pages, and what O_DIRECT asks of every file system we know
# How long one blocking call into an engine lasts: between two of them Ctrl-C is served.
SLICE_S = 0.1
# How long an I/O thread may take to let go of a file after its job was cancelled.
RELEASE_TIMEOUT_S = 30.0
DEFAULT_IO_THREADS = 2  # one in the device, one on the way to it


@dataclass(frozen=True, slots=True)
class Written:
    """A durable shard file. ``copy_seconds`` and ``write_seconds`` overlap."""

    file_nbytes: int
    header_nbytes: int
    header_crc32c: int
    file_crc32c: int
    data_nbytes: int
    copy_seconds: float
    write_seconds: float


class Arena(Protocol):
    """A staging buffer: ``nbytes`` of memory at ``address``, aligned to 4096 bytes if ours."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def view(self, offset: int, nbytes: int) -> memoryview:
        """That range as writable bytes. The arena must outlive the view."""


class Job(Protocol):
    """One shard file in the making. Every method may be called by any thread."""

    @property
    def staged_nbytes(self) -> int:
        """Bytes copied (or, for external sources, checksummed) so far."""

    def write_to(self, path: str, header: bytes, crc_pos: int) -> None:
        """Names the file, which must not exist. Returns at once; failures come with the waits.

        ``header`` comes before the data and is written last, when the 8 hex digits of each chunk's
        checksum have been put at ``crc_pos``. Until then the file begins with zeros.
        """

    def advance(self, data_offset: int) -> None:
        """All external bytes below ``data_offset`` are in the arena."""

    def wait_slot_for(self, data_offset: int, timeout_s: float) -> bool:
        """Whether the chunk with ``data_offset`` may be put into its slot now. Raises the error
        of a failed job."""

    def wait_staged(self, timeout_s: float) -> bool:
        """Whether all sources are copied and may change. Raises the error of a failed job, once
        no thread reads the sources any more."""

    def wait(self, timeout_s: float) -> Written | None:
        """The durable file, or ``None`` at the timeout. Raises the error of a failed job."""

    def cancel(self) -> None:
        """Stops the job; nothing is removed. No source is read any more when this returns."""

    def release(self, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        """Lets the arena be used again, once no thread uses it. Raises :class:`UsageError` while
        the job goes on, :class:`StoreError` when a device does not let go in time."""


class Engine(Protocol):
    """Copies, writes and reads. Threads start with the first job and end with ``close``."""

    def arena(self, nbytes: int) -> Arena:
        """At least ``nbytes`` of touched memory."""

    def wrap_arena(self, address: int, nbytes: int, keepalive: Any) -> Arena:
        """An arena of memory that ``keepalive`` owns."""

    def start(
        self,
        arena: Arena,
        sources: Sequence[tuple[int, int]],
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> Job:
        """Begins to copy ``sources``, pairs of address and size, which lie one after the other in
        the data part. Address 0: the caller fills the arena and calls :meth:`Job.advance`.

        Chunk ``c`` lies at ``c * chunk_nbytes`` in the arena, or, when the sources do not fit, in
        slot ``c % (arena.nbytes // chunk_nbytes)``. Sources must stay alive, and must not change,
        until the job is staged or has failed. Raises :class:`UsageError`.
        """

    def read(
        self,
        path: str,
        *,
        header_nbytes: int,
        data_nbytes: int,
        chunk_nbytes: int,
        crcs: Sequence[int],
        spans: Sequence[tuple[int, int, int]],
        timeout_s: float = ...,
    ) -> None:
        """Fills each span ``(data_start, nbytes, address)`` and checks every chunk it touches.

        Raises :class:`ShardError` for the first damaged chunk and :class:`StoreError`; spans hold
        undefined bytes then.
        """

    def verify(
        self,
        path: str,
        *,
        header_nbytes: int,
        data_nbytes: int,
        chunk_nbytes: int,
        crcs: Sequence[int],
        timeout_s: float = ...,
    ) -> list[int]:
        """The chunks of the data part that are not what was written. Raises as ``read`` does for
        a file of another size."""

    def close(self, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        """Cancels what is unfinished and joins the threads. May be called again."""


# A day: loads have no shorter natural limit, and nothing waits without one.
READ_TIMEOUT_S = 86_400.0


def default_copy_threads() -> int:
    """One core is the trainer's; past four threads the memory bus is full."""
    return min(4, max(1, len(os.sched_getaffinity(0)) - 1))


def poll(step: Callable[[float], bool], timeout_s: float) -> bool:
    """Calls ``step`` with at most :data:`SLICE_S` until it says yes or ``timeout_s`` has passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if step(min(max(left, 0.0), SLICE_S)):
            return True
        if time.monotonic() >= deadline:
            return False


def forked_error() -> UsageError:
    return UsageError(
        "the copy engine belongs to the parent process and does not work in a forked child; "
        "create a new one in the child"
    )


def closed_error() -> ClosedError:
    return ClosedError("the copy engine was closed")


def cancelled_error(path: str, why: str) -> StoreError:
    return StoreError("write", path, errno.ECANCELED, why)


def release_error(path: str, timeout_s: float) -> StoreError:
    detail = f"a thread still waits for the file system after {timeout_s:g} s"
    return StoreError("release staging buffer of", path, errno.ETIMEDOUT, detail)


def read_timeout_error(path: str, timeout_s: float) -> StoreError:
    return StoreError("read", path, errno.ETIMEDOUT, f"not finished after {timeout_s:g} s")


def size_detail(got: int, expected: int) -> str:
    return f"the file has {got} bytes, expected {expected}"


def checksum_detail(start: int, end: int, got: int, expected: int) -> str:
    return f"crc32c of bytes {start} to {end} is {to_hex(got)}, the header says {to_hex(expected)}"


def shard_error(path: str, detail: str, start: int, end: int) -> ShardError:
    return ShardError(f"{path}: {detail}", path=path, start=start, end=end)
