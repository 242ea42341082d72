"""One job of the Python engine: the books of one shard file in the making.

The design is that of ``csrc/shard_writer.h``, in short:

Order. A chunk may be filled once its slot's last chunk is on disk and its external bytes are there;
it may be written once it is filled; the header is written after all chunks are durable.

Errors. The first one is kept and stops all claims. A job is quiet once no thread works on it and
its file is closed; only then may its arena be used again. The unfinished file stays.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from sharded_ckpt import engine_python_files as files
from sharded_ckpt.checksum import combine, crc32c, crc32c_at, to_hex
from sharded_ckpt.engine_types import (
    RELEASE_TIMEOUT_S,
    Written,
    cancelled_error,
    forked_error,
    release_error,
)
from sharded_ckpt.errors import CheckpointError, StoreError, UsageError


class SlotState(enum.Enum):
    FREE = "free"  # the next chunk of the slot may move in
    FILLING = "filling"  # a copy thread fills or checksums it
    READY = "ready"  # waits for an I/O thread
    WRITING = "writing"  # an I/O thread writes it
    FAILED = "failed"  # its job failed; not used again by that job


SLOT_TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.FILLING}),
    SlotState.FILLING: frozenset({SlotState.READY, SlotState.FAILED}),
    SlotState.READY: frozenset({SlotState.WRITING, SlotState.FAILED}),
    SlotState.WRITING: frozenset({SlotState.FREE, SlotState.FAILED}),
    SlotState.FAILED: frozenset(),
}


class JobState(enum.Enum):
    UNNAMED = "unnamed"  # no file yet; chunks are being staged
    NAMED = "named"  # the file may be opened
    OPENING = "opening"
    WRITING = "writing"
    FINISHING = "finishing"  # sync, header, sync, close
    DONE = "done"
    FAILED = "failed"  # ``error`` says why; includes cancelled


_RUNNING = (JobState.UNNAMED, JobState.NAMED, JobState.OPENING, JobState.WRITING)
_JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    **{
        state: frozenset({following, JobState.FAILED})
        for state, following in zip(_RUNNING, (*_RUNNING[1:], JobState.FINISHING), strict=True)
    },
    JobState.FINISHING: frozenset({JobState.DONE, JobState.FAILED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
}


class PyArena:
    def __init__(self, address: int, nbytes: int, keepalive: Any) -> None:
        self.address = address
        self.nbytes = nbytes
        self._keepalive = keepalive
        self.in_use = threading.Lock()  # held from start to release of a job

    def view(self, offset: int, nbytes: int) -> memoryview:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise UsageError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        array = (ctypes.c_ubyte * nbytes).from_address(self.address + offset)
        array._keepalive = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


@dataclass(slots=True)
class Work:
    """What an I/O thread has claimed: ``run`` without the lock, then ``done`` with it."""

    run: Callable[[], None]
    done: Callable[[], None]


@dataclass(slots=True)
class Shared:
    """The lock and the queue of an engine. ``changed`` is its lock and wakes everybody."""

    pid: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    jobs: list[PyJob] = field(default_factory=list)  # oldest first
    closing: bool = False

    def check(self) -> None:
        if os.getpid() != self.pid:
            raise forked_error()

    def notify(self) -> None:
        """With the lock held, after any change to a job."""
        self.jobs = [job for job in self.jobs if not job.quiet()]
        self.changed.notify_all()


class PyJob:
    """First what its owner calls, then what the engine calls with its lock held."""

    def __init__(
        self, shared: Shared, arena: PyArena, sources: Sequence[tuple[int, int]], chunk_nbytes: int
    ) -> None:
        self._shared = shared
        self._arena: PyArena | None = arena
        self._memory = arena  # for threads, also after release
        self._sources = list(sources)
        self._starts = [0, *accumulate(nbytes for _, nbytes in sources)]
        self._chunk_nbytes = chunk_nbytes
        self._data_nbytes = self._starts[-1]
        chunks = -(-self._data_nbytes // chunk_nbytes)
        fits = self._data_nbytes <= arena.nbytes
        self._slots = [SlotState.FREE] * (chunks if fits else arena.nbytes // chunk_nbytes)
        self._crcs = [0] * chunks
        self._chunk_written = [False] * chunks
        self._external_ends = [0] * chunks  # end of each chunk's last external byte
        for (address, nbytes), start in zip(sources, self._starts, strict=False):
            if address == 0 and nbytes:
                for chunk in range(start // chunk_nbytes, -(-(start + nbytes) // chunk_nbytes)):
                    self._external_ends[chunk] = min(start + nbytes, self._bounds(chunk)[1])
        self._uncopied = (
            deque(c for c in range(chunks) if not self._external_ends[c]),
            deque(c for c in range(chunks) if self._external_ends[c]),
        )
        self._ready: deque[int] = deque()
        self._advanced = 0
        self._copying = self._writing = self._copied = self._landed = 0
        self.staged_nbytes = 0
        self._state = JobState.UNNAMED
        self._error: CheckpointError | None = None
        self.path = ""
        self._header = bytearray()
        self._crc_pos = 0
        self._file: files.NewFile | None = None
        self._started = time.monotonic()
        self._opened = self._copy_seconds = 0.0
        self._written: Written | None = None

    # ---- what the owner calls

    def write_to(self, path: str, header: bytes, crc_pos: int) -> None:
        self._shared.check()
        with self._shared.changed:
            if self._state is JobState.FAILED:
                return  # told by the next wait
            if self._state is not JobState.UNNAMED:
                raise UsageError("write_to was called before")
            digits = 8 * len(self._crcs)
            if not header or not 0 <= crc_pos <= len(header) - digits:
                raise UsageError(
                    f"a header of {len(header)} bytes has no room for {digits} digits at byte "
                    f"{crc_pos}"
                )
            self.path, self._header, self._crc_pos = os.fspath(path), bytearray(header), crc_pos
            self._move(JobState.NAMED)
            self._shared.notify()

    def advance(self, data_offset: int) -> None:
        self._shared.check()
        if data_offset > self._data_nbytes:
            raise UsageError(f"advance to byte {data_offset} of {self._data_nbytes}")
        with self._shared.changed:
            self._advanced = max(self._advanced, data_offset)
            self._shared.notify()

    def wait_slot_for(self, data_offset: int, timeout_s: float) -> bool:
        chunk = data_offset // self._chunk_nbytes
        past = data_offset >= self._data_nbytes
        return self._wait(lambda: True, lambda: past or self._slot_free(chunk), timeout_s)

    def wait_staged(self, timeout_s: float) -> bool:
        return self._wait(lambda: self._copying == 0, self._staged, timeout_s)

    def wait(self, timeout_s: float) -> Written | None:
        if not self._wait(self.quiet, lambda: self._state is JobState.DONE, timeout_s):
            if self._error is not None:
                raise self._again(self._error)
            return None
        return self._written

    def cancel(self) -> None:
        self._shared.check()
        with self._shared.changed:
            self.fail(cancelled_error(self.path, "the job was cancelled"))
            self._shared.notify()
            self._shared.changed.wait_for(lambda: self._copying == 0, RELEASE_TIMEOUT_S)

    def release(self, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        self._shared.check()
        with self._shared.changed:
            if not self.quiet():
                if self._error is None:
                    raise UsageError(
                        "release() of a job that goes on; wait for it or cancel it first"
                    )
                if not self._shared.changed.wait_for(self.quiet, timeout_s):
                    raise release_error(self.path, timeout_s)
            arena, self._arena = self._arena, None
        if arena is not None:
            arena.in_use.release()

    def _wait(
        self, settled: Callable[[], bool], ready: Callable[[], bool], timeout_s: float
    ) -> bool:
        """Whether ``ready`` in time; raises the job's error once it is ``settled``. No lock held.

        Python's own waits serve Ctrl-C, so there are no slices here.
        """
        self._shared.check()
        with self._shared.changed:
            self._shared.changed.wait_for(
                lambda: settled() if self._error else ready(), max(timeout_s, 0.0)
            )
            if self._error is not None:
                if settled():
                    raise self._again(self._error)
                return False
            return ready()

    @staticmethod
    def _again(error: CheckpointError) -> CheckpointError:
        """A fresh copy: one exception raised by several threads would mix their tracebacks."""
        if isinstance(error, StoreError):
            return StoreError(error.operation, error.filename, error.errno or 0, error.detail)
        return type(error)(*error.args)

    # ---- books

    def _bounds(self, chunk: int) -> tuple[int, int]:
        start = chunk * self._chunk_nbytes
        return start, min(self._data_nbytes, start + self._chunk_nbytes)

    def _address(self, chunk: int) -> int:
        return self._memory.address + chunk % len(self._slots) * self._chunk_nbytes

    def _staged(self) -> bool:
        return self._copied == len(self._crcs)

    def quiet(self) -> bool:
        ended = self._state in (JobState.DONE, JobState.FAILED)
        return ended and not self._copying and not self._writing and self._file is None

    def _slot_free(self, chunk: int) -> bool:
        return chunk < len(self._slots) or self._chunk_written[chunk - len(self._slots)]

    def _move(self, to: JobState) -> None:
        if to not in _JOB_TRANSITIONS[self._state]:
            raise AssertionError(f"a job cannot go from {self._state} to {to}")
        self._state = to

    def _move_slot(self, chunk: int, to: SlotState) -> None:
        slot = chunk % len(self._slots)
        if to not in SLOT_TRANSITIONS[self._slots[slot]]:
            raise AssertionError(f"slot {slot} cannot go from {self._slots[slot]} to {to}")
        self._slots[slot] = to

    def fail(self, error: CheckpointError) -> None:
        if self._state in (JobState.DONE, JobState.FAILED):
            return
        self._error = error
        self._move(JobState.FAILED)
        while self._ready:
            self._move_slot(self._ready.popleft(), SlotState.FAILED)

    # ---- copying

    def claim_copy(self) -> Work | None:
        if self._state is JobState.FAILED:
            return None
        for chunks in self._uncopied:
            if not chunks or self._external_ends[chunks[0]] > self._advanced:
                continue
            if not self._slot_free(chunks[0]):
                continue
            return self._copy_work(chunks.popleft())
        return None

    def _copy_work(self, chunk: int) -> Work:
        self._move_slot(chunk, SlotState.FILLING)
        self._copying += 1
        return Work(lambda: self._copy(chunk), lambda: self._copied_chunk(chunk))

    def _copy(self, chunk: int) -> None:
        """Without the lock."""
        start, end = self._bounds(chunk)
        to = self._address(chunk)
        for address, nbytes, at in self._pieces(start, end):
            if address:
                ctypes.memmove(to + at - start, address, nbytes)
        self._crcs[chunk] = crc32c_at(to, end - start)

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """``(address, nbytes, data offset)`` of what the sources have in ``start`` to ``end``."""
        for (address, _), first, last in zip(
            self._sources, self._starts, self._starts[1:], strict=False
        ):
            low, high = max(start, first), min(end, last)
            if low < high:
                yield (address and address + low - first), high - low, low

    def _copied_chunk(self, chunk: int) -> None:
        self._copying -= 1
        self._copied += 1
        start, end = self._bounds(chunk)
        self.staged_nbytes += end - start
        if self._staged():
            self._copy_seconds = time.monotonic() - self._started
        if self._state is JobState.FAILED:
            self._move_slot(chunk, SlotState.FAILED)
        else:
            self._move_slot(chunk, SlotState.READY)
            self._ready.append(chunk)

    # ---- writing

    def claim_io(self) -> Work | None:
        work: Work | None = None
        if self._state is JobState.FAILED:
            if not self._writing and self._file is not None:
                work = Work(self._abandon, lambda: None)
        elif self._state is JobState.NAMED:
            self._move(JobState.OPENING)
            work = Work(self._open, lambda: self._unless_failed(JobState.WRITING))
        elif self._state is JobState.WRITING and self._ready:
            chunk = self._ready.popleft()
            self._move_slot(chunk, SlotState.WRITING)
            work = Work(lambda: self._write(chunk), lambda: self._wrote(chunk))
        elif self._state is JobState.WRITING and self._landed == len(self._crcs):
            self._move(JobState.FINISHING)
            work = Work(self._finish, lambda: self._unless_failed(JobState.DONE))
        if work is not None:
            self._writing += 1
        return work

    def io_done(self, work: Work, error: CheckpointError | None) -> None:
        self._writing -= 1
        if error is not None:
            self.fail(error)
        else:
            work.done()

    def _unless_failed(self, to: JobState) -> None:
        if self._state is not JobState.FAILED:
            self._move(to)

    def _wrote(self, chunk: int) -> None:
        self._chunk_written[chunk] = True
        self._landed += 1
        failed = self._state is JobState.FAILED
        self._move_slot(chunk, SlotState.FAILED if failed else SlotState.FREE)

    # The rest runs in an I/O thread without the lock.

    def _open(self) -> None:
        self._opened = time.monotonic()
        self._file = files.NewFile(self.path, len(self._header) + self._data_nbytes)

    def _write(self, chunk: int) -> None:
        start, end = self._bounds(chunk)
        assert self._file is not None
        memory = (ctypes.c_ubyte * (end - start)).from_address(self._address(chunk))
        self._file.write(len(self._header) + start, memoryview(memory).cast("B"))

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _finish(self) -> None:
        """The order of these steps is the promise that a file with a header is whole."""
        file = self._file
        assert file is not None
        # 1. All data is durable.
        file.sync()
        # 2. The header, with the checksums of what was staged.
        digits = "".join(map(to_hex, self._crcs)).encode()
        self._header[self._crc_pos : self._crc_pos + len(digits)] = digits
        file.write(0, memoryview(self._header))
        # 3. The header is durable; errors that were deferred to close are known.
        file.sync()
        self._abandon()
        # 4. So is the name.
        files.sync_parent(self.path)
        header_crc = crc32c(self._header)
        crc = header_crc
        for chunk, chunk_crc in enumerate(self._crcs):
            start, end = self._bounds(chunk)
            crc = combine(crc, chunk_crc, end - start)
        self._written = Written(
            file_nbytes=len(self._header) + self._data_nbytes,
            header_nbytes=len(self._header),
            header_crc32c=header_crc,
            file_crc32c=crc,
            data_nbytes=self._data_nbytes,
            copy_seconds=self._copy_seconds,
            write_seconds=time.monotonic() - self._opened,
        )
