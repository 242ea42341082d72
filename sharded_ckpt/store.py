"""File operations in one checkpoint directory: exclusive creation, durable publication, safe names.

The only Python module that touches files. Names are relative to the directory and at most two
components deep; symbolic links inside the directory are never followed. Every effect on the disk
goes through :meth:`LocalStore._effect`, so that a test can count, delay, fail or kill each one.

What is durable when a method returns:

* ``make_dir``, ``create_exclusive``, ``publish``, ``unlink``, ``remove_dir``, ``rename_dir``: the
  file's bytes and its name (the directory is fsynced);
* nothing after an error. An fsync that failed is never repeated: the kernel may have dropped the
  dirty pages and would report success the second time.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from sharded_ckpt import layout
from sharded_ckpt.errors import StoreError

log = logging.getLogger(__name__)

Kind = Literal["file", "dir", "link", "other"]
T = TypeVar("T")

DIR_MODE = 0o750  # the umask takes away more
FILE_MODE = 0o640
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreUncertain(StoreError):
    """The operation may or may not have taken effect, now or after a power cut."""


class LocalStore:
    """A directory on a POSIX file system that all ranks share.

    ``create=True`` makes the directory, and those above it, if they are missing. Otherwise a
    missing directory shows at the first operation, as :class:`StoreError` with ``ENOENT``.
    Instances hold no open files and may be used by several threads.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        if create:
            self._make_root()

    # ---- names

    def path(self, name: str = "") -> str:
        """Absolute path of ``name`` (of the directory itself for an empty name)."""
        return os.path.join(self.root, *self._split("name", name)) if name else self.root

    def _split(self, operation: str, name: str) -> tuple[str, ...]:
        parts = tuple(name.split("/"))
        bad = any(part in ("", ".", "..") or "\0" in part for part in parts)
        if bad or len(parts) > 2:
            raise StoreError(
                operation, f"{self.root}: {name!r}", errno.EINVAL, "not a name of this directory"
            )
        return parts

    @contextmanager
    def _parent(self, operation: str, name: str) -> Iterator[tuple[int, str]]:
        """An open descriptor of the directory that holds ``name``, and the last component."""
        *above, last = self._split(operation, name)
        with self._open_dir(operation, "".join(above)) as fd:
            yield fd, last

    @contextmanager
    def _open_dir(self, operation: str, name: str) -> Iterator[int]:
        """``name`` is empty or one component. A symbolic link in its place is refused."""
        where = self.path(name)
        fd = self._call(operation, where, lambda: os.open(self.root, _DIR_FLAGS))
        try:
            if name:
                outer = fd
                flags = _DIR_FLAGS | os.O_NOFOLLOW
                fd = self._call(operation, where, lambda: os.open(name, flags, dir_fd=outer))
                os.close(outer)
            yield fd
        finally:
            os.close(fd)

    # ---- the two ways to the operating system

    def _call(self, operation: str, path: str, call: Callable[[], T]) -> T:
        """Runs something that only looks; a failure becomes a :class:`StoreError`."""
        try:
            return call()
        except OSError as e:
            raise StoreError(operation, path, e.errno or errno.EIO) from e

    def _effect(self, operation: str, path: str, call: Callable[[], T]) -> T:
        """Runs something that changes the disk or makes a change durable: the seam for faults."""
        return self._call(operation, path, call)

    # ---- looking

    def list_dir(self, name: str = "") -> list[str]:
        """Names in the directory, sorted."""
        with self._open_dir("list", name) as fd:
            return sorted(self._call("list", self.path(name), lambda: os.listdir(fd)))

    def kind(self, name: str) -> Kind | None:
        """What ``name`` is, without following links; ``None`` when there is no such name."""
        try:
            with self._parent("stat", name) as (fd, last):
                mode = self._call(
                    "stat", self.path(name), lambda: os.lstat(last, dir_fd=fd).st_mode
                )
        except StoreError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "dir"
        return "link" if stat.S_ISLNK(mode) else "other"

    def exists(self, name: str) -> bool:
        return self.kind(name) is not None

    def size(self, name: str) -> int:
        """Bytes of a regular file."""
        fd = self.open_read(name)
        try:
            return self._call("stat", self.path(name), lambda: os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def open_read(self, name: str) -> int:
        """A read-only descriptor of a regular file; the caller closes it. Never follows a link."""
        path = self.path(name)
        with self._parent("open", name) as (parent, last):
            fd = self._call("open", path, lambda: os.open(last, _READ_FLAGS, dir_fd=parent))
        try:
            mode = self._call("stat", path, lambda: os.fstat(fd).st_mode)
            if not stat.S_ISREG(mode):
                raise StoreError("open", path, errno.EINVAL, "not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, name: str, max_nbytes: int) -> bytes:
        """All bytes of a regular file. A file above ``max_nbytes`` is refused before it is read."""
        path = self.path(name)
        fd = self.open_read(name)
        try:
            nbytes = self._call("stat", path, lambda: os.fstat(fd).st_size)
            if nbytes > max_nbytes:
                detail = f"{nbytes} bytes, expected at most {max_nbytes}"
                raise StoreError("read", path, errno.EFBIG, detail)
            return self._call("read", path, lambda: _pread(fd, nbytes, 0))
        finally:
            os.close(fd)

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes from ``offset``; fewer only when the file ends there."""
        fd = self.open_read(name)
        try:
            return self._call("read", self.path(name), lambda: _pread(fd, nbytes, offset))
        finally:
            os.close(fd)

    def free_nbytes(self) -> int:
        """Bytes that this user may still write on the file system."""
        found = self._call("statvfs", self.root, lambda: os.statvfs(self.root))
        return found.f_bavail * found.f_frsize

    # ---- changing

    def make_dir(self, name: str) -> None:
        """Makes a directory that must not exist yet, and makes its name durable."""
        path = self.path(name)
        with self._parent("mkdir", name) as (fd, last):
            self._effect("mkdir", path, lambda: os.mkdir(last, DIR_MODE, dir_fd=fd))
            self._fsync_dir(fd, os.path.dirname(path))

    def create_exclusive(self, name: str, data: bytes) -> None:
        """Creates a file that must not exist yet (``EEXIST`` otherwise), durably.

        A crash may leave the file with only part of ``data``. What must appear whole is published.
        """
        with self._parent("create", name) as (fd, last):
            self._write_new(fd, last, self.path(name), data)
            self._fsync_dir(fd, os.path.dirname(self.path(name)))

    def publish(self, name: str, data: bytes) -> None:
        """Makes a file appear whole and durable, or not at all.

        Raises :class:`StoreError` when nothing has appeared, and :class:`StoreUncertain` when an
        error hides whether the file is there, or whether it would survive a power cut.
        """
        *above, _ = self._split("publish", name)
        temp = "/".join([*above, layout.temp_name()])
        path, temp_path = self.path(name), self.path(temp)
        with self._parent("publish", name) as (fd, _), self._open_dir("publish", "") as root:
            try:
                self._write_new(fd, temp.rpartition("/")[2], temp_path, data)
            except StoreError:
                self._forget_temp(fd, temp)
                raise
            try:
                # By name from the top, not through ``fd``: once a newer job's gc has moved the
                # directory away, the file must not appear in it any more.
                self._effect(
                    "rename", path, lambda: os.rename(temp, name, src_dir_fd=root, dst_dir_fd=root)
                )
                self._fsync_dir(fd, os.path.dirname(path))
            except StoreError as e:
                raise StoreUncertain(e.operation, e.path, e.errno or errno.EIO, e.detail) from e

    def unlink(self, name: str) -> None:
        """Removes a file (or a link, not what it points at), durably. ``ENOENT`` is an error."""
        path = self.path(name)
        with self._parent("unlink", name) as (fd, last):
            self._effect("unlink", path, lambda: os.unlink(last, dir_fd=fd))
            self._fsync_dir(fd, os.path.dirname(path))

    def unlink_many(self, directory: str, names: list[str]) -> list[str]:
        """Removes files of one directory with one fsync at the end; returns those not found."""
        missing = []
        with self._open_dir("unlink", directory) as fd:
            for name in names:
                path = self.path(f"{directory}/{name}")
                try:
                    self._effect("unlink", path, partial(os.unlink, name, dir_fd=fd))
                except StoreError as e:
                    if e.errno != errno.ENOENT:
                        raise
                    missing.append(name)
            self._fsync_dir(fd, self.path(directory))
        return missing

    def remove_dir(self, name: str) -> None:
        """Removes an empty directory, durably. ``ENOTEMPTY`` is an error; nothing is recursive."""
        path = self.path(name)
        with self._parent("rmdir", name) as (fd, last):
            self._effect("rmdir", path, lambda: os.rmdir(last, dir_fd=fd))
            self._fsync_dir(fd, os.path.dirname(path))

    def rename_dir(self, old: str, new: str) -> None:
        """Renames a directory to a name that is free, durably. Both lie in the top directory."""
        path = self.path(new)
        if self.exists(new):  # names carry random digits: this is a bug, or somebody else's work
            raise StoreError("rename", path, errno.EEXIST)
        with self._open_dir("rename", "") as fd:
            self._effect("rename", path, lambda: os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd))
            self._fsync_dir(fd, self.root)

    def fsync_dir(self, name: str = "") -> None:
        """Makes the names in a directory durable."""
        with self._open_dir("fsync", name) as fd:
            self._fsync_dir(fd, self.path(name))

    # ---- inside

    def _make_root(self) -> None:
        missing = []
        path = Path(self.root)
        while not path.is_dir():
            missing.append(path)
            if path.parent == path:
                break
            path = path.parent
        if not missing:
            self._sync_found(path)
        for path in reversed(missing):
            try:
                os.mkdir(path, DIR_MODE)
            except FileExistsError:
                if not path.is_dir():
                    raise StoreError("mkdir", str(path), errno.ENOTDIR) from None
                self._sync_found(path)  # another rank was quicker
            except OSError as e:
                raise StoreError("mkdir", str(path), e.errno or errno.EIO) from e
            else:
                above = str(path.parent)
                fd = self._call("open", above, partial(os.open, above, _DIR_FLAGS))
                try:
                    self._fsync_dir(fd, above)
                finally:
                    os.close(fd)

    def _sync_found(self, path: Path) -> None:
        """Whoever made the directory may not have made its name durable, or not yet.

        The directory above may be closed to this user; the checkpoint directory need not be.
        """
        above = str(path.parent)
        try:
            fd = self._call("open", above, lambda: os.open(above, _DIR_FLAGS))
            try:
                self._effect("fsync", above, lambda: os.fsync(fd))
            finally:
                os.close(fd)
        except StoreError as e:
            if e.errno not in (errno.EACCES, errno.EINVAL, errno.ENOENT):
                raise
            log.debug("the name of %s may not be durable: %s", path, e)

    def _write_new(self, parent: int, name: str, path: str, data: bytes) -> None:
        fd = self._effect(
            "create", path, lambda: os.open(name, _NEW_FLAGS, FILE_MODE, dir_fd=parent)
        )
        try:
            rest = memoryview(data)
            while rest:
                written = self._effect("write", path, partial(os.write, fd, rest))
                if written == 0:
                    raise StoreError("write", path, errno.EIO, "the write made no progress")
                rest = rest[written:]
            self._effect("fsync", path, lambda: os.fsync(fd))
        except BaseException:
            os.close(fd)
            raise
        # Network file systems report a full disk or quota here.
        self._effect("close", path, lambda: os.close(fd))

    def _fsync_dir(self, fd: int, path: str) -> None:
        try:
            self._effect("fsync", path, lambda: os.fsync(fd))
        except StoreError as e:
            if e.errno != errno.EINVAL:
                raise
            # Some FUSE and network file systems have no fsync for directories.
            log.warning(
                "%s: the file system does not fsync directories; new names may be lost "
                "by a power cut",
                path,
            )

    def _forget_temp(self, fd: int, temp: str) -> None:
        """Best effort: what stays behind has a temporary name, which every reader ignores."""
        name = temp.rpartition("/")[2]
        try:
            self._effect("unlink", self.path(temp), lambda: os.unlink(name, dir_fd=fd))
        except StoreError as e:
            log.debug("%s", e)


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    parts = []
    while nbytes > 0:
        part = os.pread(fd, min(nbytes, 1 << 24), offset)
        if not part:
            break
        parts.append(part)
        nbytes -= len(part)
        offset += len(part)
    return b"".join(parts)
