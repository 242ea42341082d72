"""retention: what is deleted, when, and above all what is not."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sharded_ckpt import layout, retention, terms
from sharded_ckpt.errors import ManifestError, StepNotFound, StoreError, Superseded, UsageError
from sharded_ckpt.keep import Keep
from sharded_ckpt.layout import MANIFEST, SetId, shard_file
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.retention import (
    best_step,
    committed_sets,
    delete,
    is_pinned,
    pin,
    readable_sets,
    uncommit,
    unpin,
)
from sharded_ckpt.store import LocalStore, StoreUncertain
from tests.job import Job, RecordingStore, offered, save, saved, step_dirs

# ---- the policy, applied


def test_p6_last_and_best_are_kept_and_the_rest_goes(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, keep=Keep(last=2, best=1, metric="loss"))
    for step, loss in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0), (5, 2.0)):
        save(job, step, loss=loss)
    assert offered(job.store) == [2, 4, 5]
    assert len(step_dirs(job.store)) == 3
    assert [e.step for e in job.events if e.kind == "retired"] == [1, 3]
    assert best_step(readable_sets(job.store), "loss", "min") == 2
    assert best_step(readable_sets(job.store), "loss", "max") == 4
    assert best_step(readable_sets(job.store), "absent", "max") is None


def test_keep_keeps_everything(tmp_path: Path) -> None:
    assert offered(saved(tmp_path, 1, 2, 3).store) == [1, 2, 3]


def test_p6_the_manifest_goes_first_and_durably(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path)
    job = Job(tmp_path, 2, store=store)
    id = save(job, 1)
    store.effects.clear()
    (manifest,) = (m for _, m in committed_sets(store))
    uncommit(store, manifest)
    d = id.dirname
    assert store.effects == [
        ("unlink", f"{d}/{MANIFEST}"),
        ("fsync", d),
        ("unlink", f"{d}/{shard_file(0)}"),
        ("unlink", f"{d}/{shard_file(1)}"),
        ("fsync", d),
        ("rmdir", d),
        ("fsync", "."),
    ]


@pytest.mark.parametrize("operation", ["unlink", "fsync"])
def test_p6_shards_stay_when_the_manifest_does_not_go(tmp_path: Path, operation: str) -> None:
    store = RecordingStore(tmp_path)
    job = Job(tmp_path, 2, store=store, keep=Keep(last=1))
    old = save(job, 1)

    def fault(op: str, path: str):
        about = path.endswith(MANIFEST) if op == "unlink" else path.endswith(old.dirname)
        return errno.EIO if op == operation and about else None

    store.fault = fault
    save(job, 2)  # the failed deletion is not a failed save
    assert store.list_dir(old.dirname)[-2:] == [shard_file(0), shard_file(1)]
    assert [e.step for e in job.events if e.kind == "retired"] == []


def test_p6_sets_of_higher_terms_are_not_touched(tmp_path: Path) -> None:
    old = saved(tmp_path, 1, keep=Keep(last=1))
    new = saved(tmp_path, 2)
    os.unlink(new.store.path(layout.term_file(new.term)))  # even if its claim were not seen
    save(old, 3)
    assert offered(old.store) == [3, 2]


def test_p6_a_superseded_job_deletes_nothing(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2)
    job.retention._keep = Keep(last=1)
    newest = committed_sets(job.store)[-1][0]
    terms.claim_term(job.store, "newer")
    with pytest.raises(Superseded):
        job.retention.run(newest, {}, lambda: 9)
    assert offered(job.store) == [1, 2]


def test_p6_nothing_is_deleted_for_a_commit_that_is_not_there(tmp_path: Path, caplog) -> None:
    job = saved(tmp_path, 1, 2, 3)
    job.retention._keep = Keep(last=1)
    assert job.retention.run(SetId(1, 9, 9, "00000000"), {}, lambda: 9) == set()
    assert "has gone since its commit" in caplog.text
    assert offered(job.store) == [1, 2, 3]


def test_only_what_ranks_below_the_new_commit_goes(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2, 3, 4)
    job.retention._keep = Keep(last=1)
    second = committed_sets(job.store)[1][0]
    job.retention.run(second, {}, lambda: 9)
    assert offered(job.store) == [2, 3, 4]


def test_p6_weights_that_a_newer_job_made_of_an_old_set_are_not_touched(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2)
    old = committed_sets(job.store)[0][1]
    theirs = SetId(job.term + 1, 1, 1, "00000000")
    job.store.make_dir(theirs.dirname)
    shards = tuple(replace(s, directory=theirs.dirname) for s in old.shards)
    weights = replace(old, id=theirs, content="weights", origin=old.id, shards=shards)
    job.store.publish(f"{theirs.dirname}/{MANIFEST}", weights.to_bytes())
    job.retention._keep = Keep(last=1)
    save(job, 3)
    assert [id.step for id, _ in committed_sets(job.store)] == [3, 1]


def test_p6_a_failed_save_deletes_nothing(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, keep=Keep(last=1))
    results = job.save(2, per_rank={1: {"fail": StoreError("write", "f", errno.ENOSPC)}})
    assert results[0].outcome.value == "aborted"
    assert offered(job.store) == [1]


# ---- what other people put there


def test_names_that_are_not_ours_stay(tmp_path: Path) -> None:
    job = saved(tmp_path, 1)
    root = Path(job.store.root)
    foreign = ["latest", "global_step1", "step-1", "step-00000001-t0001-0001-XXXXXXXX"]
    foreign.append("trash-step-00000001")
    for name in foreign:
        (root / name).mkdir()
        (root / name / MANIFEST).write_text("{}")
    (root / "notes.txt").write_text("mine")
    first = committed_sets(job.store)[0][0]
    (root / first.dirname / "notes.txt").write_text("mine too")
    after = saved(tmp_path, 2, keep=Keep(last=1))
    assert offered(after.store) == [2]
    (trash,) = (n for n in after.store.list_dir() if layout.parse_trash_name(n) == first)
    assert after.store.list_dir(trash) == ["notes.txt"]
    for name in [*foreign, "notes.txt"]:
        assert (root / name).exists()


def test_field_case_b239_linked_step_directories_are_passed_over(tmp_path: Path, caplog) -> None:
    job = saved(tmp_path / "run", 1, keep=Keep(last=1))
    elsewhere = saved(tmp_path / "elsewhere", 7).store
    linked = committed_sets(elsewhere)[0][0]
    root = Path(job.store.root)
    os.symlink(elsewhere.path(linked.dirname), root / linked.dirname)
    loop = SetId(1, 8, 8, "00000000").dirname
    os.symlink(loop, root / loop)
    orphan = SetId(0, 1, 9, "00000000").dirname
    os.symlink(elsewhere.root, root / orphan)
    save(job, 2)
    assert offered(job.store) == [2]
    assert "got a link" in caplog.text
    assert offered(elsewhere) == [7]
    assert all(os.path.islink(root / name) for name in (linked.dirname, loop, orphan))


def test_field_case_b214_files_deleted_by_hand_cost_a_warning(tmp_path: Path, caplog) -> None:
    job = saved(tmp_path, 1, 2, 3)
    first, second, _ = (id for id, _ in committed_sets(job.store))
    job.store.unlink(f"{first.dirname}/{shard_file(1)}")
    os.rename(job.store.path(second.dirname), tmp_path / "renamed-by-hand")
    job.retention._keep = Keep(last=1)
    save(job, 4)
    assert "1 files were gone already, rank-00001.safetensors first" in caplog.text
    assert offered(job.store) == [4]
    assert (tmp_path / "renamed-by-hand" / MANIFEST).exists()


def test_a_manifest_that_is_gone_already_leaves_the_rest_alone(tmp_path: Path, caplog) -> None:
    job = saved(tmp_path, 1)
    ((id, manifest),) = committed_sets(job.store)
    job.store.unlink(f"{id.dirname}/{MANIFEST}")
    uncommit(job.store, manifest)
    assert "is gone already" in caplog.text
    assert job.store.list_dir(id.dirname) == [shard_file(0), shard_file(1)]


def test_p8_a_manifest_cannot_have_other_files_deleted(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2)
    (first, manifest), (second, _) = committed_sets(job.store)
    theirs = replace(manifest.shards[0], directory=second.dirname)
    odd = replace(manifest.shards[1], file="../../victim")
    (tmp_path.parent / "victim").write_text("precious")
    uncommit(job.store, replace(manifest, shards=(theirs, odd)))
    assert offered(job.store) == [2]
    assert (tmp_path.parent / "victim").exists()
    assert job.store.list_dir(first.dirname) == [shard_file(0), shard_file(1)]


# ---- damage


@pytest.mark.parametrize("damage", ["cut", "flip", "huge", "link", "moved"])
def test_damaged_sets_are_reported_never_offered_never_deleted(
    tmp_path: Path, damage: str, caplog
) -> None:
    job = saved(tmp_path, 1, 2, 3)
    (first, _), (second, _), _ = committed_sets(job.store)
    path = Path(job.store.path(f"{first.dirname}/{MANIFEST}"))
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-20])
    elif damage == "flip":
        path.write_bytes(data.replace(b'"step": 1', b'"step": 7'))
    elif damage == "huge":
        os.truncate(path, 65 << 20)
    elif damage == "moved":
        path.write_bytes(Path(job.store.path(f"{second.dirname}/{MANIFEST}")).read_bytes())
    else:
        path.rename(tmp_path / "aside")
        path.symlink_to(tmp_path / "aside")
    found = dict(committed_sets(job.store))
    assert isinstance(found[first], StoreError if damage == "link" else ManifestError)
    assert first.dirname in str(found[first])
    assert [c.id.step for c in readable_sets(job.store)] == [2, 3]

    after = saved(tmp_path, 4, keep=Keep(last=1))
    assert first.dirname in step_dirs(after.store)
    assert shard_file(0) in after.store.list_dir(first.dirname)
    assert "is kept, its manifest" in caplog.text


# ---- pins


def test_pinned_sets_stay_until_unpinned(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2, keep=Keep(last=1))
    id = committed_sets(job.store)[0][0]
    pin(job.store, id, "paper")
    pin(job.store, id, "again")
    assert is_pinned(job.store, id)
    save(job, 3)
    assert offered(job.store) == [2, 3]
    unpin(job.store, id)
    unpin(job.store, id)
    save(job, 4)
    assert offered(job.store) == [4]


def test_a_pinned_set_cannot_be_deleted(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2)
    (first, manifest), _ = committed_sets(job.store)
    pin(job.store, first)
    with pytest.raises(UsageError, match="is pinned; unpin it first"):
        uncommit(job.store, manifest)
    with pytest.raises(UsageError, match="is pinned"):
        delete(job.store, first)
    assert offered(job.store) == [1, 2]


def test_a_pin_set_while_deletion_begins_wins_or_is_refused(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path)
    job = Job(tmp_path, 2, store=store)
    id = save(job, 1)
    (manifest,) = (m for _, m in committed_sets(store))
    pinned = []

    def pin_at_the_unlink(operation: str, path: str):
        if operation == "unlink" and path.endswith(MANIFEST) and not pinned:
            pinned.append(id)
            pin(LocalStore(tmp_path), id)
        return None

    store.fault = pin_at_the_unlink
    with pytest.raises(UsageError, match="is pinned"):
        uncommit(store, manifest)
    assert pinned and offered(store) == [1]


def test_what_is_not_committed_cannot_be_pinned(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    id = SetId(1, 1, 1, "00000000")
    with pytest.raises(StepNotFound):
        pin(store, id)
    store.make_dir(id.dirname)
    with pytest.raises(StepNotFound, match="not committed"):
        pin(store, id)
    assert store.list_dir(id.dirname) == []


def test_delete_refuses_the_newest(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2)
    (first, _), (second, _) = committed_sets(job.store)
    with pytest.raises(UsageError, match="step 2 is the newest"):
        delete(job.store, second)
    delete(job.store, first)
    assert offered(job.store) == [2]


# ---- weights only


def test_p6_a_full_set_goes_only_for_a_weights_only_set_of_it(tmp_path: Path) -> None:
    made: list[SetId] = []

    def thin(full: Manifest, new: SetId) -> Manifest:
        assert full.content == "full" and new.step == full.id.step
        if full.id.step == 2:
            raise StoreError("write", "x", errno.ENOSPC)
        store = LocalStore(tmp_path)
        store.make_dir(new.dirname)
        made.append(new)
        shards = tuple(replace(s, directory=new.dirname) for s in full.shards)
        for shard in full.shards:
            data = store.read(shard.path, 1 << 20)
            store.create_exclusive(f"{new.dirname}/{shard.file}", data)
        weights = replace(full, id=new, content="weights", origin=full.id, shards=shards)
        if full.id.step != 3:  # 3 claims to be done and is not
            store.publish(f"{new.dirname}/{MANIFEST}", weights.to_bytes())
        return weights

    job = saved(tmp_path, 1, 2, 3, 4, keep=Keep(weights_only_after=1), thin=thin)
    found = {(m.id.step, m.content) for _, m in committed_sets(job.store)}
    assert found == {(1, "weights"), (2, "full"), (3, "full"), (4, "full")}
    assert len({id.serial for id in made}) == len(made)
    assert not {id.serial for id in made} & {
        id.serial for id, m in committed_sets(job.store) if m.content == "full"
    }


def copy_weights(store: LocalStore, full: Manifest, new: SetId) -> Manifest:
    store.make_dir(new.dirname)
    shards = tuple(replace(s, directory=new.dirname) for s in full.shards)
    for shard in full.shards:
        data = store.read(shard.path, 1 << 20)
        store.create_exclusive(f"{new.dirname}/{shard.file}", data)
    weights = replace(full, id=new, content="weights", origin=full.id, shards=shards)
    store.publish(f"{new.dirname}/{MANIFEST}", weights.to_bytes())
    return weights


def test_p6_a_full_set_stays_when_it_is_not_known_whether_its_weights_are_durable(
    tmp_path: Path,
) -> None:
    def thin(full: Manifest, new: SetId) -> Manifest:
        copy_weights(LocalStore(tmp_path), full, new)
        raise StoreUncertain("fsync", new.dirname, errno.EIO)

    job = saved(tmp_path, 1, 2, keep=Keep(weights_only_after=1), thin=thin)
    assert [m.content for _, m in committed_sets(job.store)] == ["full", "full", "weights"]
    job.retention._thin = None
    save(job, 3)
    assert {m.id.step for _, m in committed_sets(job.store) if m.content == "full"} == {1, 2, 3}


def test_two_sets_shrink_after_each_commit_the_newest_and_the_oldest(tmp_path: Path) -> None:
    job = saved(tmp_path, 1, 2, 3, 4)
    shrunk: list[int] = []

    def thin(full: Manifest, new: SetId) -> Manifest:
        shrunk.append(full.id.step)
        return copy_weights(job.store, full, new)

    job.retention._keep, job.retention._thin = Keep(weights_only_after=1), thin
    save(job, 5)
    assert shrunk == [4, 1]
    full = [m.id.step for _, m in committed_sets(job.store) if m.content == "full"]
    assert full == [2, 3, 5]
    save(job, 6)
    save(job, 7)  # the backlog shrinks, though each commit makes one more due
    assert [m.id.step for _, m in committed_sets(job.store) if m.content == "full"] == [7]


def test_p6_a_job_that_is_superseded_while_it_thins_deletes_nothing(tmp_path: Path) -> None:
    def thin(full: Manifest, new: SetId) -> Manifest:
        terms.claim_term(LocalStore(tmp_path), "newer")
        return copy_weights(LocalStore(tmp_path), full, new)

    job = saved(tmp_path, 1, 2, keep=Keep(weights_only_after=1), thin=thin)
    assert [m.content for _, m in committed_sets(job.store)] == ["full", "full", "weights"]


def test_without_a_thinner_full_sets_stay_full(tmp_path: Path, caplog) -> None:
    job = saved(tmp_path, 1, 2, keep=Keep(weights_only_after=1))
    assert offered(job.store) == [1, 2]
    assert "stays full" in caplog.text


def test_everything_the_other_modules_use_is_exported() -> None:
    assert all(hasattr(retention, name) for name in retention.__all__)
