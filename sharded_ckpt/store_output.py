"""Where an export is written: hidden beside its target, durable, renamed into place at the end.

A target appears whole or not at all. What existed before is replaced only after the new one is
durable, and stays untouched when the export fails.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar

from sharded_ckpt.errors import StoreError, UsageError
from sharded_ckpt.layout import SetId, parse_term_file

T = TypeVar("T")


@contextmanager
def output_directory(target: str, *, overwrite: bool) -> Iterator[str]:
    """Gives a fresh hidden directory that becomes ``target`` when the block ends without error.

    Raises :class:`UsageError` where ``target`` is a file, or not empty without ``overwrite``.
    """
    target = os.path.abspath(target)
    check_target(target, directory=True, overwrite=overwrite)
    with _hidden(target) as partial:
        _call("create", partial, os.mkdir, partial)
        yield partial
        for root, _, _ in os.walk(partial):
            fsync_directory(root)
        replaced = ""
        try:
            if os.path.isdir(target) and os.listdir(target):
                replaced = _beside(target, "replaced")
                _call("rename", target, os.rename, target, replaced)
            _call("rename", target, os.rename, partial, target)
        except BaseException:
            # Also when a signal ends the run between the two renames, or just after one of them.
            if replaced and not os.path.lexists(target):
                os.rename(replaced, target)
            raise
        fsync_directory(os.path.dirname(target))
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def output_file(target: str, *, overwrite: bool) -> Iterator[str]:
    """Gives the path of a hidden file that becomes ``target`` when the block ends without error."""
    target = os.path.abspath(target)
    check_target(target, directory=False, overwrite=overwrite)
    with _hidden(target) as partial:
        yield partial
        _call("rename", target, os.replace, partial, target)
        fsync_directory(os.path.dirname(target))


def check_target(target: str, *, directory: bool, overwrite: bool) -> None:
    """Raises :class:`UsageError` unless an export may be written to ``target``."""
    target = os.path.abspath(target)
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise UsageError(f"the directory {parent} does not exist; create it first")
    if not os.path.lexists(target):
        return
    if directory and (os.path.islink(target) or not os.path.isdir(target)):
        raise UsageError(f"{target} is not a directory; give the name of a directory to write")
    if not directory and os.path.isdir(target):
        raise UsageError(f"{target} is a directory; give the name of the file to write")
    empty = directory and not os.listdir(target)
    if not empty and not overwrite:
        raise UsageError(f"{target} exists already; choose another name, or pass --overwrite")


def check_apart(target: str, root: str) -> None:
    """Raises :class:`UsageError` where writing ``target`` could harm checkpoints.

    ``root`` is the checkpoint directory, or one step directory, that is read. A target must not be
    it, hold it or lie in it; nor lie in any step directory, which only the package writes to.
    """
    root = os.path.realpath(root)
    parent = os.path.dirname(root)
    if SetId.parse(os.path.basename(root)) and any(map(parse_term_file, _names(parent))):
        root = parent  # a step directory in its place: the whole directory is protected
    # A link is replaced, not followed, but where it points to is what the user means.
    above, name = os.path.split(os.path.abspath(target))
    for real in {os.path.realpath(target), os.path.join(os.path.realpath(above), name)}:
        relation = ""
        if real == root:
            relation = "is"
        elif _lies_in(root, real):
            relation = "holds"
        elif _lies_in(real, root):
            relation = "lies in"
        if relation:
            raise UsageError(
                f"{target} {relation} the checkpoint directory {root}; an export must not touch "
                "it: choose a target outside"
            )
        if any(map(SetId.parse, real.split(os.sep))):
            raise UsageError(f"{target} lies in a step directory; choose a target outside")


def check_space(target: str, nbytes: int) -> None:
    """Raises :class:`StoreError` (ENOSPC) where the file system has no room for ``nbytes``."""
    parent = os.path.dirname(os.path.abspath(target))
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise StoreError(
            "write", target, errno.ENOSPC, f"needs {nbytes} bytes, {free} are free in {parent}"
        )


@contextmanager
def durable_file(path: str) -> Iterator[BinaryIO]:
    """A new file that is flushed to the disk when the block ends. Raises :class:`StoreError`."""
    try:
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except StoreError:
        raise
    except OSError as error:
        raise StoreError("write", path, error.errno or 0) from error


def copy_file(source: str, target: str) -> None:
    """Copies the bytes of a file to a new one, durably. Raises :class:`StoreError`."""
    try:
        with open(source, "rb") as given, durable_file(target) as made:
            shutil.copyfileobj(given, made)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError("copy", source, error.errno or 0) from error


def read_small(path: str, max_nbytes: int) -> bytes:
    """The bytes of a file of at most ``max_nbytes``. Raises :class:`StoreError`."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_nbytes + 1)
    except OSError as error:
        raise StoreError("read", path, error.errno or 0) from error
    if len(data) > max_nbytes:
        raise StoreError("read", path, errno.EFBIG, f"expected at most {max_nbytes} bytes")
    return data


def resident_nbytes() -> int:
    """Memory that this process has now; 0 where the system does not tell."""
    try:
        pages = int(read_small("/proc/self/statm", 4096).split()[1])
    except (StoreError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def fsync_directory(path: str) -> None:
    """Makes the names in a directory durable. Raises :class:`StoreError`."""
    fd = _call("open", path, os.open, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _call("fsync", path, os.fsync, fd)
    finally:
        os.close(fd)


@contextmanager
def _hidden(target: str) -> Iterator[str]:
    """A name beside ``target`` on the same file system; whatever is left under it is removed."""
    partial = _beside(target, "partial")
    try:
        yield partial
    finally:
        if os.path.isdir(partial):
            shutil.rmtree(partial, ignore_errors=True)
        elif os.path.lexists(partial):
            os.unlink(partial)


def _lies_in(inner: str, outer: str) -> bool:
    return inner != outer and os.path.commonpath([inner, outer]) == outer


def _names(path: str) -> list[str]:
    return _call("list", path, os.listdir, path)


def _beside(target: str, what: str) -> str:
    parent, name = os.path.split(target)
    # The name is cut so that the hidden one is legal wherever the target's is (255 bytes).
    short = os.fsencode(name)[:200].decode(errors="ignore")
    return os.path.join(parent, f".{short}.{what}-{secrets.token_hex(4)}")


def _call(operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
    try:
        return function(*args)
    except OSError as error:
        raise StoreError(operation, path, error.errno or 0) from error
