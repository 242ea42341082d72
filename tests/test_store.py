"""store: names that cannot escape, exclusive creation, publication that is whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharded_ckpt import layout
from sharded_ckpt.engine_python_files import sync_parent
from sharded_ckpt.errors import StoreError
from sharded_ckpt.store import LocalStore, StoreUncertain


class RecordingStore(LocalStore):
    """Notes every effect, and fails the ones that ``fail`` picks."""

    def __init__(self, root: Path) -> None:
        self.effects: list[tuple[str, str]] = []
        self.fail: Callable[[str, str], int] = lambda operation, path: 0
        super().__init__(root)

    def _effect(self, operation: str, path: str, call: Callable[[], Any]) -> Any:
        self.effects.append((operation, os.path.relpath(path, self.root)))
        if code := self.fail(operation, path):
            raise StoreError(operation, path, code)
        return super()._effect(operation, path, call)


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    made = RecordingStore(tmp_path / "run")
    made.effects.clear()
    return made


def without_nonce(effects: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (op, os.path.join(os.path.dirname(path), "TEMP"))
        if layout.is_temp_name(os.path.basename(path))
        else (op, path)
        for op, path in effects
    ]


def test_p2_publish_writes_syncs_renames_and_syncs_the_directory_in_this_order(store) -> None:
    store.make_dir("d")
    store.effects.clear()
    store.publish("d/manifest.json", b"whole")
    assert without_nonce(store.effects) == [
        ("create", "d/TEMP"),
        ("write", "d/TEMP"),
        ("fsync", "d/TEMP"),
        ("close", "d/TEMP"),
        ("rename", "d/manifest.json"),
        ("fsync", "d"),
    ]
    assert store.read("d/manifest.json", 100) == b"whole"
    assert store.list_dir("d") == ["manifest.json"]


def test_p2_making_a_directory_makes_its_name_durable(store) -> None:
    store.make_dir("d")
    assert store.effects == [("mkdir", "d"), ("fsync", ".")]


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close"])
def test_publish_that_fails_before_the_rename_leaves_nothing(store, operation: str) -> None:
    store.fail = lambda op, path: (
        errno.ENOSPC if (op, path != store.root) == (operation, True) else 0
    )
    with pytest.raises(StoreError) as caught:
        store.publish("manifest.json", b"x")
    assert not isinstance(caught.value, StoreUncertain)
    assert (caught.value.operation, caught.value.errno) == (operation, errno.ENOSPC)
    assert store.list_dir() == []


@pytest.mark.parametrize("at", ["rename", "directory"])
def test_publish_that_fails_at_the_rename_or_after_is_uncertain(store, at: str) -> None:
    def fail(operation: str, path: str) -> int:
        hit = operation == "rename" if at == "rename" else path == store.root
        return errno.EIO if hit else 0

    store.fail = fail
    with pytest.raises(StoreUncertain):
        store.publish("manifest.json", b"x")


def test_a_failed_fsync_is_never_tried_again(store) -> None:
    store.fail = lambda op, path: errno.EIO if op == "fsync" else 0
    with pytest.raises(StoreError):
        store.create_exclusive("a", b"x")
    assert [op for op, _ in store.effects].count("fsync") == 1


def test_a_write_that_makes_no_progress_is_an_error(store, monkeypatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(StoreError, match="no progress"):
        store.create_exclusive("a", b"x")


def test_short_writes_are_continued(store, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    store.create_exclusive("a", b"0123456789")
    assert store.read("a", 100) == b"0123456789"


def test_creation_is_exclusive(store) -> None:
    store.create_exclusive("a", b"first")
    with pytest.raises(StoreError) as caught:
        store.create_exclusive("a", b"second")
    assert caught.value.errno == errno.EEXIST
    assert store.read("a", 100) == b"first"


@pytest.mark.parametrize(
    "name", ["..", "a/..", "../a", "a/b/c", "/a", "a//b", ".", "", "a\0", "a/."]
)
def test_p8_names_cannot_leave_the_directory(store, name: str) -> None:
    for call in (
        lambda: store.read(name, 10),
        lambda: store.create_exclusive(name, b""),
        lambda: store.publish(name, b""),
        lambda: store.unlink(name),
        lambda: store.make_dir(name),
        lambda: store.remove_dir(name),
        lambda: store.size(name),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.errno == errno.EINVAL
    assert store.effects == []


def test_p8_links_are_not_followed(store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"precious")
    os.symlink(outside, store.path("dir"))
    os.symlink(outside / "victim", store.path("file"))
    os.symlink(outside / "new", store.path("dangling"))
    assert [store.kind(n) for n in ("dir", "file", "dangling")] == ["link"] * 3
    for call in (
        lambda: store.read("file", 100),
        lambda: store.read("dir/victim", 100),
        lambda: store.list_dir("dir"),
        lambda: store.unlink("dir/victim"),
        lambda: store.unlink_many("dir", ["victim"]),
        lambda: store.create_exclusive("dangling", b"x"),
        lambda: store.create_exclusive("dir/new", b"x"),
        lambda: store.publish("dir/new", b"x"),
        lambda: store.make_dir("dir/new"),
    ):
        with pytest.raises(StoreError):
            call()
    assert (outside / "victim").read_bytes() == b"precious"
    assert os.listdir(outside) == ["victim"]


def test_only_regular_files_are_read_and_a_fifo_does_not_hang(store) -> None:
    os.mkfifo(store.path("fifo"))
    store.make_dir("d")
    for name in ("fifo", "d"):
        with pytest.raises(StoreError, match="not a regular file"):
            store.read(name, 10)


def test_size_is_checked_before_reading(store) -> None:
    store.create_exclusive("a", b"0123456789")
    with pytest.raises(StoreError, match="10 bytes, expected at most 9"):
        store.read("a", 9)
    assert store.size("a") == 10
    assert store.read_range("a", 4, 3) == b"456"
    assert store.read_range("a", 8, 30) == b"89"


def test_removal_is_never_recursive(store) -> None:
    store.make_dir("d")
    store.create_exclusive("d/a", b"")
    with pytest.raises(StoreError) as caught:
        store.remove_dir("d")
    assert caught.value.errno == errno.ENOTEMPTY
    assert store.unlink_many("d", ["a", "b"]) == ["b"]
    store.remove_dir("d")
    assert store.kind("d") is None


def test_a_directory_is_not_renamed_over_another(store) -> None:
    store.make_dir("a")
    store.make_dir("b")
    with pytest.raises(StoreError):
        store.rename_dir("a", "b")
    store.rename_dir("a", "c")
    assert store.list_dir() == ["b", "c"]


def test_a_directory_moved_away_takes_no_publication_with_it(store) -> None:
    """What gc relies on: once an attempt is moved to the trash, no manifest can appear in it."""
    store.make_dir("d")
    effect = store._effect

    def move_before_rename(operation: str, path: str, call: Callable[[], Any]) -> Any:
        if operation == "rename" and path.endswith("manifest.json"):
            os.rename(store.path("d"), store.path("trash"))
        return effect(operation, path, call)

    store._effect = move_before_rename
    with pytest.raises(StoreUncertain):
        store.publish("d/manifest.json", b"x")
    assert "manifest.json" not in store.list_dir("trash")


def test_file_systems_without_directory_fsync_are_tolerated_with_a_warning(store, caplog) -> None:
    store.fail = lambda op, path: errno.EINVAL if (op, path) == ("fsync", store.root) else 0
    store.create_exclusive("a", b"x")
    assert "does not fsync directories" in caplog.text


def test_the_python_engine_tolerates_the_same_file_systems(tmp_path: Path, monkeypatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(failure, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    failure = errno.EINVAL
    sync_parent(str(tmp_path / "shard"))
    failure = errno.EIO
    with pytest.raises(StoreError) as caught:
        sync_parent(str(tmp_path / "shard"))
    assert (caught.value.operation, caught.value.errno) == ("fsync directory", errno.EIO)


def test_root_is_made_durably_and_may_be_required_to_exist(tmp_path: Path) -> None:
    made = RecordingStore(tmp_path / "x" / "y")
    assert made.effects == [("fsync", "../.."), ("fsync", "..")]
    assert LocalStore(tmp_path / "x" / "y").list_dir() == []
    with pytest.raises(StoreError) as caught:
        LocalStore(tmp_path / "absent", create=False).list_dir()
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        LocalStore(tmp_path / "file" / "run")


def test_p2_a_root_that_is_there_already_gets_a_durable_name(tmp_path: Path, caplog) -> None:
    root = tmp_path / "run"
    root.mkdir()
    assert RecordingStore(root).effects == [("fsync", "..")]

    class Failing(LocalStore):
        code = 0

        def _effect(self, operation: str, path: str, call: Callable[[], Any]) -> Any:
            raise StoreError(operation, path, self.code)

    caplog.set_level("DEBUG")
    for Failing.code in (errno.EACCES, errno.EINVAL, errno.ENOENT):
        Failing(root)
    assert caplog.text.count("may not be durable") == 3
    Failing.code = errno.EIO
    with pytest.raises(StoreError):
        Failing(root)


def test_a_file_that_goes_stale_once_open_is_a_store_error(store, monkeypatch) -> None:
    store.create_exclusive("a", b"x")
    before = len(os.listdir("/proc/self/fd"))
    fstat = os.fstat
    for good in (0, 1):
        for call in (lambda: store.size("a"), lambda: store.read("a", 10)):
            left = [good]

            def stale(fd: int, left: list[int] = left) -> os.stat_result:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ESTALE, "stale")
                return fstat(fd)

            monkeypatch.setattr(os, "fstat", stale)
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.errno == errno.ESTALE
    monkeypatch.setattr(os, "fstat", fstat)
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_is_left_open(store) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store.make_dir("d")
    store.publish("d/a", b"x")
    store.fail = lambda op, path: errno.EIO if op in ("fsync", "rename") else 0
    for call in (
        lambda: store.publish("d/b", b"x"),
        lambda: store.create_exclusive("d/c", b"x"),
        lambda: store.read("d/zz", 1),
        lambda: store.list_dir("zz"),
    ):
        with pytest.raises(StoreError):
            call()
    assert len(os.listdir("/proc/self/fd")) == before


def test_modes_keep_others_out(store) -> None:
    store.make_dir("d")
    store.create_exclusive("d/a", b"x")
    assert os.stat(store.path("d")).st_mode & 0o027 == 0
    assert os.stat(store.path("d/a")).st_mode & 0o137 == 0
    assert store.free_nbytes() > 0
