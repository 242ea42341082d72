"""Files of the Python engine: one new shard written by several threads, one shard read back.

Every failure is a :class:`StoreError` with operation, path and errno. An error of a sync is final
for its file: it is never repeated, since the kernel may have dropped the dirty pages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from sharded_ckpt.checksum import crc32c
from sharded_ckpt.engine_types import (
    checksum_detail,
    read_timeout_error,
    shard_error,
    size_detail,
)
from sharded_ckpt.errors import StoreError, UsageError

_NEW_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that somebody put there must not hang.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FILE_MODE = 0o640
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_MAX_FRUITLESS = 100  # writes in a row that write nothing: an error, not a loop


def close_error() -> StoreError:
    detail = "a thread still waits for the file system; its memory is kept"
    return StoreError("close", "copy engine", errno.ETIMEDOUT, detail)


class NewFile:
    """Creates ``path``, which must not exist, and reserves ``nbytes``."""

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._sync_failed = False
        try:
            self._fd = os.open(path, _NEW_FLAGS, _FILE_MODE)
        except OSError as error:
            raise self._error("create", error) from error
        try:
            # Unlike fallocate(2), this emulates what the file system lacks; it is never short.
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(self._fd)
                raise self._error("fallocate", error) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of ``data``. Thread safe."""
        fruitless = 0
        while data:
            try:
                done = os.pwrite(self._fd, data, offset)
            except OSError as error:
                raise self._error("write", error) from error
            fruitless = fruitless + 1 if done == 0 else 0
            if fruitless >= _MAX_FRUITLESS:
                raise StoreError("write", self._path, errno.EIO, "writes make no progress")
            offset += done
            data = data[done:]

    def sync(self) -> None:
        if self._sync_failed:
            detail = "an earlier sync of this file failed"
            raise StoreError("fdatasync", self._path, errno.EIO, detail)
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._sync_failed = True
            raise self._error("fdatasync", error) from error

    def close(self) -> None:
        """Reports write errors that a network file system deferred."""
        with suppress(OSError):  # advice
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.close(self._fd)
        except OSError as error:
            raise self._error("close", error) from error

    def _error(self, operation: str, error: OSError) -> StoreError:
        code = error.errno or errno.EIO
        detail = ""
        if code in _NO_SPACE:
            detail = f"the file needs {self._nbytes} bytes"
            with suppress(OSError):
                space = os.statvfs(os.path.dirname(self._path) or ".")
                free_nbytes = space.f_bavail * space.f_frsize
                detail += f", the file system has {free_nbytes} free"
        return StoreError(operation, self._path, code, detail)


def sync_parent(path: str) -> None:
    """Makes the names in the directory that holds ``path`` durable."""
    parent = os.path.dirname(path) or "."
    operation = "open directory"
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            operation = "fsync directory"
            try:
                os.fsync(fd)
            except OSError as error:
                # EINVAL: a file system that has no fsync for directories. The store, which syncs
                # the same directory when it commits, warns of it.
                if error.errno != errno.EINVAL:
                    raise
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(operation, parent, error.errno or errno.EIO) from error


@dataclass(frozen=True, slots=True)
class _Bad:
    """A chunk that is not what was written."""

    chunk: int
    start: int
    end: int
    detail: str


class ShardData:
    """The data part of one shard file. Raises :class:`UsageError` for sizes that do not fit."""

    def __init__(
        self,
        path: str,
        header_nbytes: int,
        data_nbytes: int,
        chunk_nbytes: int,
        crcs: Sequence[int],
    ) -> None:
        self._path = os.fspath(path)
        self._header_nbytes = header_nbytes
        self._data_nbytes = data_nbytes
        self._chunk_nbytes = chunk_nbytes
        self._crcs = crcs
        if chunk_nbytes <= 0:
            raise UsageError("chunk_nbytes must be positive")
        chunks = -(-data_nbytes // chunk_nbytes)
        if len(crcs) != chunks:
            raise UsageError(f"{len(crcs)} checksums for {chunks} chunks")

    def read(self, spans: Sequence[tuple[int, int, int]], timeout_s: float) -> None:
        """Fills ``(data_start, nbytes, address)`` spans; see ``Engine.read``."""
        touched: dict[int, list[tuple[int, int, int]]] = {}
        for span in spans:
            start, nbytes, address = span
            if not 0 <= start <= start + nbytes <= self._data_nbytes:
                raise UsageError(
                    f"a span of {nbytes} bytes at {start} leaves the data part of "
                    f"{self._data_nbytes} bytes"
                )
            if nbytes and not address:
                raise UsageError("a span has no memory")
            if nbytes:
                last = (start + nbytes - 1) // self._chunk_nbytes
                for chunk in range(start // self._chunk_nbytes, last + 1):
                    touched.setdefault(chunk, []).append(span)
        for bad in self._check(sorted(touched), touched, timeout_s):
            raise shard_error(self._path, bad.detail, bad.start, bad.end)

    def verify(self, timeout_s: float) -> list[int]:
        return [bad.chunk for bad in self._check(range(len(self._crcs)), {}, timeout_s)]

    def _check(
        self,
        chunks: Sequence[int],
        touched: dict[int, list[tuple[int, int, int]]],
        timeout_s: float,
    ) -> Iterator[_Bad]:
        """Reads ``chunks`` in order, fills the spans that touch them, and yields the bad ones."""
        deadline = time.monotonic() + timeout_s
        fd = self._open()
        try:
            # Reading one chunk while another is checksummed is worth one thread.
            with ThreadPoolExecutor(1, thread_name_prefix="sharded_ckpt-read") as pool:
                coming = pool.submit(self._read_chunk, fd, chunks[0]) if chunks else None
                for i, chunk in enumerate(chunks):
                    if time.monotonic() >= deadline:
                        raise read_timeout_error(self._path, timeout_s)
                    assert coming is not None
                    data = coming.result()
                    if i + 1 < len(chunks):
                        coming = pool.submit(self._read_chunk, fd, chunks[i + 1])
                    bad = self._judge(chunk, data)
                    if bad is not None:
                        yield bad
                    else:
                        self._scatter(chunk, data, touched.get(chunk, []))
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            fd = os.open(self._path, _READ_FLAGS)
        except OSError as error:
            raise StoreError("open", self._path, error.errno or errno.EIO) from error
        found = os.fstat(fd)
        expected = self._header_nbytes + self._data_nbytes
        if stat.S_ISREG(found.st_mode) and found.st_size == expected:
            return fd
        os.close(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StoreError("open", self._path, errno.EINVAL, "not a regular file")
        got = found.st_size
        detail = size_detail(got, expected)
        raise shard_error(self._path, detail, min(got, expected), max(got, expected))

    def _bounds(self, chunk: int) -> tuple[int, int]:
        start = chunk * self._chunk_nbytes
        return start, min(self._data_nbytes, start + self._chunk_nbytes)

    def _read_chunk(self, fd: int, chunk: int) -> bytearray:
        start, end = self._bounds(chunk)
        try:
            data = bytearray(end - start)
        except MemoryError as error:
            detail = f"for a chunk of {end - start} bytes"
            raise StoreError("allocate", self._path, errno.ENOMEM, detail) from error
        view = memoryview(data)
        offset = self._header_nbytes + start
        while view:
            try:
                done = os.preadv(fd, [view], offset)
            except OSError as error:
                detail = f"at byte {offset}"
                raise StoreError("read", self._path, error.errno or errno.EIO, detail) from error
            if done == 0:
                detail = f"the file ends at byte {offset}, {len(view)} bytes too early"
                raise shard_error(self._path, detail, offset, offset + len(view))
            offset += done
            view = view[done:]
        return data

    def _judge(self, chunk: int, data: bytearray) -> _Bad | None:
        crc = crc32c(data)
        if crc == self._crcs[chunk]:
            return None
        start, end = (self._header_nbytes + bound for bound in self._bounds(chunk))
        return _Bad(chunk, start, end, checksum_detail(start, end, crc, self._crcs[chunk]))

    def _scatter(self, chunk: int, data: bytearray, spans: list[tuple[int, int, int]]) -> None:
        start, end = self._bounds(chunk)
        source = (ctypes.c_ubyte * len(data)).from_buffer(data) if data else None
        for span_start, nbytes, address in spans:
            low, high = max(start, span_start), min(end, span_start + nbytes)
            assert source is not None
            from_address = ctypes.addressof(source) + low - start
            ctypes.memmove(address + low - span_start, from_address, high - low)
