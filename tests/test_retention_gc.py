"""gc: what goes of attempts that were not committed, whoever may still be at work on them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sharded_ckpt import layout
from sharded_ckpt.errors import StoreError
from sharded_ckpt.layout import PIN, SetId, shard_file
from sharded_ckpt.retention import committed_sets, gc_orphans, remove_leftover
from sharded_ckpt.store import LocalStore
from tests.job import Job, RecordingStore, offered, parts, save, saved, step_dirs


def orphan(store: LocalStore, term: int, *names: str, trash: bool = False) -> str:
    id = SetId.new(step=5, term=term, serial=77)
    name = layout.trash_name(id.dirname) if trash else id.dirname
    store.make_dir(name)
    for file in names:
        store.create_exclusive(f"{name}/{file}", b"half")
    return name


def test_orphans_of_lower_terms_go_after_a_commit_and_not_before(tmp_path: Path) -> None:
    Job(tmp_path, 2)
    job = Job(tmp_path, 2)
    names = [
        orphan(job.store, 1),
        orphan(job.store, 1, shard_file(0), shard_file(1), layout.temp_name()),
        orphan(job.store, 1, shard_file(0), trash=True),
    ]
    job.save(1, per_rank={0: {"fail": StoreError("write", "f", errno.EIO)}})
    assert set(names) <= set(step_dirs(job.store))
    save(job, 2)
    assert not set(names) & set(step_dirs(job.store))
    assert len(step_dirs(job.store)) == 1


def test_orphans_of_our_own_and_higher_terms_are_not_touched(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = [orphan(store, 3, shard_file(0)), orphan(store, 4), orphan(store, 3, trash=True)]
    assert gc_orphans(store, 3) == []
    assert step_dirs(store) == sorted(names)


def test_files_of_others_in_an_orphan_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    orphan(store, 1, shard_file(0), "notes.txt")
    assert gc_orphans(store, 2) == []
    (name,) = step_dirs(store)
    assert layout.parse_trash_name(name) and store.list_dir(name) == ["notes.txt"]


def test_an_entry_that_cannot_be_looked_at_does_not_end_gc(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    store = LocalStore(tmp_path)
    stale = orphan(store, 1)
    store.rename_dir(stale, SetId(0, 1, 5, "00000000").dirname)  # sorts before the other
    gone = orphan(store, 1)
    kind = store.kind

    def stat(name: str):
        if name == gone:
            return kind(name)
        raise StoreError("stat", name, errno.ESTALE)

    monkeypatch.setattr(store, "kind", stat)
    monkeypatch.setattr(store, "exists", lambda name: kind(name) is not None)
    assert gc_orphans(store, 2) == [SetId.parse(gone)]
    assert "could not be removed" in caplog.text


def test_p6_an_orphan_that_is_committed_while_it_is_moved_is_put_back(tmp_path: Path) -> None:
    """A job of a lower term still runs, and publishes just before the directory is moved."""
    slow = Job(tmp_path, 1)
    id = slow.coordinator.open_attempt(5, n=1)
    vote = slow.vote(id, 0)
    slow.groups[0].publish(vote.key, vote.to_bytes())
    store = RecordingStore(tmp_path)
    store.fault = lambda operation, path: (
        slow.coordinator.decide(n=1, step=5, id=id, parts=parts()) and None
        if operation == "rename" and not offered(slow.store)
        else None
    )
    assert gc_orphans(store, 2) == []
    assert offered(store) == [5]


def test_p6_trash_that_holds_a_manifest_is_put_back(tmp_path: Path) -> None:
    """gc was killed between moving an orphan away and looking at it again."""
    job = saved(tmp_path, 1)
    id = committed_sets(job.store)[0][0]
    job.store.rename_dir(id.dirname, layout.trash_name(id.dirname))
    assert offered(job.store) == []
    assert gc_orphans(job.store, 2) == []
    assert offered(job.store) == [1]


def test_p6_a_job_whose_attempt_was_moved_away_cannot_commit_it(tmp_path: Path) -> None:
    slow = Job(tmp_path, 1)
    id = slow.coordinator.open_attempt(5, n=1)
    vote = slow.vote(id, 0)
    slow.groups[0].publish(vote.key, vote.to_bytes())
    assert gc_orphans(slow.store, 2) == [id]
    verdict = slow.coordinator.decide(n=1, step=5, id=id, parts=parts())
    assert verdict.outcome.value == "aborted"
    assert step_dirs(slow.store) == []


def test_own_failed_attempts_go_once_every_rank_is_through(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    failing = {1: {"fail": StoreError("write", "f", errno.EIO)}}
    job.save(1, per_rank=failing)
    job.save(2, per_rank={1: {**failing[1], "acknowledge": False}})
    assert [job.store.list_dir(n) for n in step_dirs(job.store)] == [[shard_file(0)]] * 2
    save(job, 3)
    left = [SetId.parse(n).step for n in step_dirs(job.store)]
    assert left == [2, 3]  # rank 1 may still be writing into 2
    job.coordinator.acknowledge(job.groups[1], n=1, step=2)
    save(job, 4)
    assert [SetId.parse(n).step for n in step_dirs(job.store)] == [3, 4]


def test_an_attempt_that_some_rank_is_still_in_goes_only_if_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    id = SetId(1, 1, 1, "00000000")
    assert remove_leftover(store, id, settled=True)  # gone already
    store.make_dir(id.dirname)
    store.create_exclusive(f"{id.dirname}/{shard_file(0)}", b"half")
    assert not remove_leftover(store, id, settled=False)
    assert store.list_dir(id.dirname) == [shard_file(0)]
    store.unlink(f"{id.dirname}/{shard_file(0)}")
    assert remove_leftover(store, id, settled=False)
    assert step_dirs(store) == []


def test_a_committed_or_pinned_set_is_never_a_leftover(tmp_path: Path) -> None:
    job = saved(tmp_path, 1)
    id = committed_sets(job.store)[0][0]
    assert not remove_leftover(job.store, id, settled=True)
    assert offered(job.store) == [1]
    pinned = SetId(1, 9, 9, "00000000")
    job.store.make_dir(pinned.dirname)
    job.store.create_exclusive(f"{pinned.dirname}/{PIN}", b"{}")
    assert not remove_leftover(job.store, pinned, settled=True)


# ---- crashes


class KilledStore(LocalStore):
    left = -1

    def _effect(self, operation, path, call):
        if self.left == 0:
            os._exit(77)
        self.left -= 1
        return super()._effect(operation, path, call)


def test_p6_gc_killed_before_any_effect_is_finished_by_the_next(tmp_path: Path) -> None:
    killed = 0
    for k in range(100):
        root = tmp_path / str(k)
        job = saved(root, 1)
        committed = committed_sets(job.store)[0][0]
        job.store.rename_dir(committed.dirname, layout.trash_name(committed.dirname))
        orphan(job.store, 1, shard_file(0))
        orphan(job.store, 1, shard_file(0), trash=True)
        pid = os.fork()
        if pid == 0:
            store = KilledStore(root)
            store.left = k
            gc_orphans(store, 2)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 77)
        killed += code == 77
        gc_orphans(job.store, 2)
        assert offered(job.store) == [1]
        assert step_dirs(job.store) == [committed.dirname]
        if code == 0:
            break
    assert code == 0 and killed == 12
