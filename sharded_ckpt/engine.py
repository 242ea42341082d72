"""The copy engine: memory to shard files and back, beside training.

:class:`NativeEngine` is C++ (``csrc/``): its threads never hold the GIL. ``engine_python`` has the
same behaviour in Python; it is the oracle of the tests, and what runs where the extension does not.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sharded_ckpt.checksum import NO_EXTENSION, extension_allowed
from sharded_ckpt.engine_types import (
    CHUNK_NBYTES,
    DEFAULT_IO_THREADS,
    READ_TIMEOUT_S,
    RELEASE_TIMEOUT_S,
    Arena,
    Engine,
    IoMode,
    Job,
    Written,
    cancelled_error,
    closed_error,
    default_copy_threads,
    forked_error,
    poll,
    read_timeout_error,
    release_error,
    shard_error,
)
from sharded_ckpt.errors import CheckpointError, StoreError, UsageError

if TYPE_CHECKING:
    from sharded_ckpt import _C

__all__ = ["Arena", "Engine", "Job", "NativeEngine", "Written", "select_engine"]


def _error(status: _C.Status) -> CheckpointError:
    """The exception that a failed status of the core stands for."""
    if status.code == "forked":
        return forked_error()
    if status.code == "closed":
        return closed_error()
    if status.code == "invalid":
        return UsageError(status.detail)
    if status.code == "cancelled":
        return cancelled_error(status.path, status.detail)
    if status.code == "corrupt":
        return shard_error(status.path, status.detail, status.start, status.end)
    return StoreError(status.operation, status.path, status.errno, status.detail)


def _check(status: _C.Status | None) -> None:
    if status is not None:
        raise _error(status)


class NativeArena:
    """A staging buffer of the core's, or memory that ``keepalive`` owns."""

    def __init__(self, core: _C.Arena, keepalive: Any = None) -> None:
        self._core = core
        self._keepalive = keepalive
        self.in_use = threading.Lock()  # held from start to release of a job

    @property
    def address(self) -> int:
        return self._core.address

    @property
    def nbytes(self) -> int:
        return self._core.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise UsageError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        array = (ctypes.c_ubyte * nbytes).from_address(self.address + offset)
        array._keepalive = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


class NativeJob:
    def __init__(self, core: _C.Job, arena: NativeArena, held: list[NativeArena]) -> None:
        self._core = core
        self._arena: NativeArena | None = arena
        self._held = held
        self._path = "(not named yet)"
        self._lock = threading.Lock()

    @property
    def staged_nbytes(self) -> int:
        return self._core.staged_nbytes

    def write_to(self, path: str, header: bytes, crc_pos: int) -> None:
        self._path = os.fspath(path)
        _check(self._core.write_to(self._path, header, crc_pos))

    def advance(self, data_offset: int) -> None:
        _check(self._core.advance(data_offset))

    def wait_slot_for(self, data_offset: int, timeout_s: float) -> bool:
        return self._poll(lambda slice_s: self._core.wait_slot_for(data_offset, slice_s), timeout_s)

    def wait_staged(self, timeout_s: float) -> bool:
        return self._poll(self._core.wait_staged, timeout_s)

    def wait(self, timeout_s: float) -> Written | None:
        if not self._poll(self._core.wait_quiet, timeout_s):
            # An error is told even while a thread is stuck in the device.
            _check(self._core.status())
            return None
        done = self._core.written()
        return Written(
            file_nbytes=done.file_nbytes,
            header_nbytes=done.header_nbytes,
            header_crc32c=done.header_crc32c,
            file_crc32c=done.file_crc32c,
            data_nbytes=done.data_nbytes,
            copy_seconds=done.copy_seconds,
            write_seconds=done.write_seconds,
        )

    def cancel(self) -> None:
        _check(self._core.cancel())
        # Copies in flight end within milliseconds; they depend on no device.
        poll(lambda slice_s: self._core.wait_staged(slice_s) != 0, RELEASE_TIMEOUT_S)

    def release(self, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        if self._core.wait_quiet(0) == 0:
            if self._core.status() is None:
                raise UsageError("release() of a job that goes on; wait for it or cancel it first")
            if not poll(lambda slice_s: self._core.wait_quiet(slice_s) != 0, timeout_s):
                raise release_error(self._path, timeout_s)
        with self._lock:
            arena, self._arena = self._arena, None
        if arena is not None:
            self._held.remove(arena)
            arena.in_use.release()

    def _poll(self, step: Callable[[float], int], timeout_s: float) -> bool:
        """``step`` answers 1 for yes, 0 at its timeout, -1 when the job failed."""

        def ask(slice_s: float) -> bool:
            answer = step(slice_s)
            if answer < 0:
                _check(self._core.status())
            return answer > 0

        return poll(ask, timeout_s)


# What threads stuck in a device still use; the memory must not be freed under them.
_ABANDONED: list[Any] = []


def _close(core: _C.Engine, held: list[NativeArena], timeout_s: float) -> _C.Status | None:
    status = core.close(timeout_s)
    if status is not None and status.code == "timeout":
        _ABANDONED.extend(held)
    return status


class NativeEngine:
    """Raises ``ImportError`` when the extension is not built."""

    def __init__(
        self,
        *,
        copy_threads: int | None = None,
        io_threads: int = DEFAULT_IO_THREADS,
        io: IoMode = "auto",
    ) -> None:
        from sharded_ckpt import _C

        self._module = _C
        self._copy_threads = copy_threads or default_copy_threads()
        self._io_threads = io_threads
        try:
            self._core = _C.Engine(self._copy_threads, io_threads, io)
        except ValueError as error:
            raise UsageError(str(error)) from None
        # Arenas in use: a job that its owner forgot still writes from them.
        self._held: list[NativeArena] = []
        self._finalizer = weakref.finalize(self, _close, self._core, self._held, RELEASE_TIMEOUT_S)

    def arena(self, nbytes: int) -> Arena:
        status, core = self._module.Arena.map(nbytes)
        _check(status)
        return NativeArena(core)

    def wrap_arena(self, address: int, nbytes: int, keepalive: Any) -> Arena:
        return NativeArena(self._module.Arena.wrap(address, nbytes), keepalive)

    def start(
        self,
        arena: Arena,
        sources: Sequence[tuple[int, int]],
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> Job:
        if not isinstance(arena, NativeArena):
            raise UsageError("the arena must come from this engine's arena() or wrap_arena()")
        if not arena.in_use.acquire(blocking=False):
            raise UsageError("the arena is used by a job; release() that job first")
        try:
            status, core = self._core.start(arena._core, sources, chunk_nbytes)
            _check(status)
        except BaseException:
            arena.in_use.release()
            raise
        self._held.append(arena)
        return NativeJob(core, arena, self._held)

    def read(
        self,
        path: str,
        *,
        header_nbytes: int,
        data_nbytes: int,
        chunk_nbytes: int,
        crcs: Sequence[int],
        spans: Sequence[tuple[int, int, int]],
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._read(path, (header_nbytes, data_nbytes, chunk_nbytes), crcs, spans, timeout_s)

    def verify(
        self,
        path: str,
        *,
        header_nbytes: int,
        data_nbytes: int,
        chunk_nbytes: int,
        crcs: Sequence[int],
        timeout_s: float = READ_TIMEOUT_S,
    ) -> list[int]:
        return self._read(path, (header_nbytes, data_nbytes, chunk_nbytes), crcs, None, timeout_s)

    def memcpy_crc(self, dest: int, source: int, nbytes: int, value: int = 0) -> int:
        """Copies, and extends ``value`` by the copied bytes. For tests and benchmarks."""
        return self._module.memcpy_crc(dest, source, nbytes, value)

    def close(self, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        _check(_close(self._core, self._held, timeout_s))
        self._finalizer.detach()

    def _read(
        self,
        path: str,
        sizes: tuple[int, int, int],
        crcs: Sequence[int],
        spans: Sequence[tuple[int, int, int]] | None,
        timeout_s: float,
    ) -> list[int]:
        path = os.fspath(path)
        threads = max(self._copy_threads, self._io_threads)
        reader = self._module.ShardReader()
        try:
            scan = spans is None
            _check(self._core.check_open())
            _check(reader.start(path, *sizes, crcs, spans or (), scan, threads))
            if not poll(reader.wait, timeout_s):
                raise read_timeout_error(path, timeout_s)
        finally:
            # Threads must be gone before the spans' memory may be: at once, or (after Ctrl-C or
            # the deadline) when the chunk at hand is read.
            reader.cancel()
            if not poll(reader.wait, RELEASE_TIMEOUT_S):
                _ABANDONED.append(reader)  # its end would wait for the device, with the GIL
        _check(reader.status())
        return reader.bad_chunks()


_warned = threading.Event()


def select_engine(kind: Literal["auto", "native", "python"] = "auto", **options: Any) -> Engine:
    """The engine to use, with ``copy_threads``, ``io_threads`` and ``io`` passed on.

    "auto" takes the C++ engine, or the Python one (warning once) where the extension is not built
    or ``SHARDED_CKPT_NO_EXTENSION=1`` forbids it. Raises :class:`UsageError` for "native" then.
    """
    from sharded_ckpt.engine_python import PyEngine

    if kind not in ("auto", "native", "python"):
        raise UsageError(f"the engine is 'auto', 'native' or 'python', got {kind!r}")
    if kind == "python":
        return PyEngine(**options)
    why = f"{NO_EXTENSION}=1"
    if extension_allowed():
        try:
            return NativeEngine(**options)
        except ImportError as error:
            why = f"the extension is not built ({error})"
    if kind == "native":
        raise UsageError(f"the C++ engine cannot be used: {why}; use engine 'python' or rebuild")
    if not _warned.is_set():
        _warned.set()
        warnings.warn(
            f"sharded_ckpt uses its Python engine: {why}; saves are as safe, and slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return PyEngine(**options)
