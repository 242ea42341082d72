"""The copy engine in Python: the same files, bit for bit, and the same errors; slower.

It is the oracle of the C++ engine's tests, and takes over where the extension is not built. The
design is that of ``csrc/engine.h``, in short:

Threads. Copy and I/O threads claim one chunk at a time under one lock, work without it, and report
under it again; the oldest job is served first. They start with the first job and end in ``close``.

Fork. An engine knows the process that made it and refuses to work in another one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sharded_ckpt import engine_python_files as files
from sharded_ckpt.checksum import crc32c_at
from sharded_ckpt.engine_python_job import PyArena, PyJob, Shared, Work
from sharded_ckpt.engine_types import (
    ALIGN,
    CHUNK_NBYTES,
    DEFAULT_IO_THREADS,
    READ_TIMEOUT_S,
    RELEASE_TIMEOUT_S,
    Arena,
    IoMode,
    Job,
    cancelled_error,
    closed_error,
    default_copy_threads,
)
from sharded_ckpt.errors import CheckpointError, UsageError


def _copy_loop(shared: Shared) -> None:
    _loop(shared, PyJob.claim_copy, lambda job, work, error: work.done())


def _io_loop(shared: Shared) -> None:
    _loop(shared, PyJob.claim_io, PyJob.io_done)


def _loop(
    shared: Shared,
    claim: Callable[[PyJob], Work | None],
    report: Callable[[PyJob, Work, CheckpointError | None], None],
) -> None:
    # A file size limit is an error of the write, and not the end of the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
    with shared.changed:
        while True:
            claims = ((job, claim(job)) for job in shared.jobs)
            found = next(((job, work) for job, work in claims if work is not None), None)
            if found is None:
                # Closing has failed all jobs; what was left to claim was closing their files.
                if shared.closing:
                    return
                shared.changed.wait()
                continue
            job, work = found
            error: CheckpointError | None = None
            shared.changed.release()
            try:
                work.run()
            except CheckpointError as raised:
                error = raised
            finally:
                shared.changed.acquire()
            report(job, work, error)
            shared.notify()


class PyEngine:
    """Always buffered: ``io="direct"`` is refused."""

    def __init__(
        self,
        *,
        copy_threads: int | None = None,
        io_threads: int = DEFAULT_IO_THREADS,
        io: IoMode = "auto",
    ) -> None:
        if io not in ("auto", "buffered"):
            raise UsageError(f"the Python engine writes buffered; io={io!r} needs the C++ engine")
        self._copy_threads = copy_threads or default_copy_threads()
        self._io_threads = max(1, io_threads)
        self._shared = Shared(pid=os.getpid())
        self._threads: list[threading.Thread] = []

    def arena(self, nbytes: int) -> Arena:
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        array = (ctypes.c_ubyte * size).from_buffer(memory)
        address = ctypes.addressof(array)
        ctypes.memset(address, 0, size)  # touched now, not during the first save
        return PyArena(address, size, array)

    def wrap_arena(self, address: int, nbytes: int, keepalive: Any) -> Arena:
        return PyArena(address, nbytes, keepalive)

    def start(
        self,
        arena: Arena,
        sources: Sequence[tuple[int, int]],
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> Job:
        self._shared.check()
        if not isinstance(arena, PyArena):
            raise UsageError("the arena must come from this engine's arena() or wrap_arena()")
        if chunk_nbytes <= 0:
            raise UsageError("chunk_nbytes must be positive")
        total = sum(nbytes for _, nbytes in sources)
        if total > arena.nbytes and arena.nbytes < chunk_nbytes:
            raise UsageError(
                f"the arena of {arena.nbytes} bytes holds neither the {total} bytes of data nor "
                f"one chunk of {chunk_nbytes}"
            )
        if not arena.in_use.acquire(blocking=False):
            raise UsageError("the arena is used by a job; release() that job first")
        with self._shared.changed:
            if self._shared.closing:
                arena.in_use.release()
                raise closed_error()
            job = PyJob(self._shared, arena, sources, chunk_nbytes)
            self._shared.jobs.append(job)
            self._start_threads()
            self._shared.notify()
        return job

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
        self._check_open()
        shard = files.ShardData(path, header_nbytes, data_nbytes, chunk_nbytes, crcs)
        shard.read(spans, timeout_s)

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
        self._check_open()
        shard = files.ShardData(path, header_nbytes, data_nbytes, chunk_nbytes, crcs)
        return shard.verify(timeout_s)

    def memcpy_crc(self, dest: int, source: int, nbytes: int, value: int = 0) -> int:
        """Copies, and extends ``value`` by the copied bytes. For tests and benchmarks."""
        ctypes.memmove(dest, source, nbytes)
        return crc32c_at(dest, nbytes, value)

    def close(self, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        self._shared.check()
        with self._shared.changed:
            self._shared.closing = True
            for job in self._shared.jobs:
                job.fail(cancelled_error(job.path, "the engine was closed"))
            self._shared.notify()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise files.close_error()
        self._threads.clear()

    def _check_open(self) -> None:
        self._shared.check()
        if self._shared.closing:
            raise closed_error()

    def _start_threads(self) -> None:
        if self._threads:
            return
        loops = [_copy_loop] * self._copy_threads + [_io_loop] * self._io_threads
        for i, loop in enumerate(loops):
            # Threads hold no reference to the engine, and none that would keep the process alive.
            thread = threading.Thread(
                target=loop, args=(self._shared,), name=f"sharded_ckpt-engine-{i}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
