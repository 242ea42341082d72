"""The commit: all ranks reach one verdict, and only a whole set is ever offered."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sharded_ckpt import coordinator as coordinator_module
from sharded_ckpt import layout, terms
from sharded_ckpt.coordinator import Coordinator, _Attempt
from sharded_ckpt.errors import (
    CommitUnknown,
    GroupError,
    SaveAborted,
    SaveTimeout,
    StoreError,
    Superseded,
)
from sharded_ckpt.keep import Keep
from sharded_ckpt.layout import MANIFEST, SetId, shard_file
from sharded_ckpt.retention import committed_sets
from sharded_ckpt.slices import Entry, Run
from sharded_ckpt.store import LocalStore, StoreUncertain
from sharded_ckpt.votes import TRANSITIONS, Ballot, Outcome, Verdict, Vote
from tests.job import Job, layout_of, offered, parts


def outcomes(results) -> list[str]:
    return [r.outcome.value for r in results]


def test_p1_a_step_is_committed_when_all_ranks_have_voted_yes(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    results = job.save(10, parts_=parts(metrics={"loss": 0.5}, client_state_tree={"epoch": 1}))
    assert outcomes(results) == ["committed"] * 3
    assert len(set(results)) == 1 and results[0].as_error() is None
    ((id, manifest),) = committed_sets(job.store)
    assert (id.step, id.term, id.serial) == (10, 1, 1)
    assert [s.file for s in manifest.shards] == [shard_file(r) for r in range(3)]
    assert manifest.metrics == {"loss": 0.5} and manifest.client_state == {"epoch": 1}
    assert manifest.run_id == job.run_id and manifest.world_size == 3
    assert offered(job.store) == [10]


def test_p7_a_no_vote_reaches_every_rank_with_rank_path_and_cause(tmp_path: Path) -> None:
    job = Job(tmp_path, 3, timeout_s=60)
    full = StoreError("fallocate", "/data/rank-00001.safetensors", errno.ENOSPC, "need 8 GiB")
    began = time.monotonic()
    results = job.save(10, per_rank={1: {"fail": full}})
    assert time.monotonic() - began < 20
    assert outcomes(results) == ["aborted"] * 3
    for result in results:
        error = result.as_error()
        assert isinstance(error, SaveAborted) and error.rank == 1 and error.step == 10
        assert "rank 1 voted no: fallocate /data/rank-00001.safetensors" in str(error)
        assert os.strerror(errno.ENOSPC) in str(error) and "need 8 GiB" in str(error)
    assert offered(job.store) == []
    assert outcomes(job.save(20)) == ["committed"] * 3
    assert offered(job.store) == [20]


def test_a_no_does_not_wait_for_the_other_votes(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, timeout_s=600)
    job.coordinator.open_attempt(10, n=1)
    vote = Vote.no(rank=1, step=10, n=1, error=SaveAborted("disk", rank=1))
    job.groups[1].publish(vote.no_key, vote.to_bytes())
    id = next(i for i in [SetId.parse(n) for n in job.store.list_dir()] if i)
    began = time.monotonic()
    verdict = job.coordinator.decide(n=1, step=10, id=id, parts=parts())
    assert verdict.outcome is Outcome.ABORTED
    assert time.monotonic() - began < 30


def test_a_no_that_repeats_another_names_the_first(tmp_path: Path) -> None:
    vote = Vote.no(rank=0, step=10, n=1, error=SaveAborted("disk full", step=10, rank=3))
    assert (vote.rank, vote.failed_rank) == (0, 3)
    assert Vote.from_bytes(vote.to_bytes()) == vote


def test_field_case_b50_save_on_one_rank_alone_names_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, 3, timeout_s=0.5)
    (verdict, *_) = job.save(10, ranks=[0])
    assert verdict.outcome is Outcome.TIMEOUT
    error = verdict.as_error()
    assert isinstance(error, SaveTimeout)
    assert "ranks 1, 2 did not call save(10)" in str(error) and "0.5 s" in str(error)

    result = job.save(20, ranks=[2])[2]
    assert isinstance(result, SaveTimeout)
    assert "rank 2 called save for step 20, but rank 0 did not within 0.5 s" in str(result)
    assert "it is at step 10" in str(result)
    # a rank that gave up is at no save: rank 0 waits for it again
    (verdict, *_) = job.save(25, ranks=[0])
    assert verdict.outcome is Outcome.TIMEOUT and "ranks 1, 2 did not" in verdict.message
    # and nobody is out of step afterwards
    job.timeout_s, job.coordinator._timeout_s = 20, 20
    assert outcomes(job.save(30)) == ["committed"] * 3


def test_a_rank_that_does_not_finish_is_told_from_one_that_did_not_call(tmp_path: Path) -> None:
    job = Job(tmp_path, 3, timeout_s=0.5)
    id = job.coordinator.open_attempt(10, n=1)
    job.groups[0].publish(Ballot(10, 1).vote_key(0), job.vote(id, 0).to_bytes())
    Coordinator.fetch_attempt(job.groups[2], n=1, step=10, timeout_s=10)
    verdict = job.coordinator.decide(n=1, step=10, id=id, parts=parts())
    assert verdict.outcome is Outcome.TIMEOUT
    assert "rank 1 did not call save(10)" in verdict.message
    assert "rank 2 did not finish writing" in verdict.message
    # a late YES changes nothing
    job.groups[2].publish(Ballot(10, 1).vote_key(2), job.vote(id, 2).to_bytes())
    assert offered(job.store) == []


def test_p7_different_steps_are_found_long_before_the_deadline(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(coordinator_module, "_FIRST_LOOK_S", 0.1)
    job = Job(tmp_path, 2, timeout_s=600)
    job.groups[1].publish(Ballot.at_key(1), b"20.1")
    began = time.monotonic()
    (verdict, _) = job.save(10, ranks=[0])
    assert time.monotonic() - began < 60
    assert verdict.outcome is Outcome.ABORTED and verdict.rank == 1
    assert "rank 1 called save for step 20, rank 0 for step 10" in verdict.message
    assert "every rank must call save with the same step" in verdict.message


def test_a_rank_at_an_earlier_save_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(coordinator_module, "_FIRST_LOOK_S", 0.01)
    job = Job(tmp_path, 2)
    assert outcomes(job.save(10)) == ["committed"] * 2
    looked = threading.Event()
    peek = job.coordinator._group.peek

    def noted(key: str):
        found = peek(key)
        if key == Ballot.at_key(1):
            assert found == b"10.1"  # rank 1 is still where it was
            looked.set()
        return found

    monkeypatch.setattr(job.coordinator._group, "peek", noted)
    results: list = []
    ahead = threading.Thread(target=lambda: results.append(job.save(20, ranks=[0])[0]))
    ahead.start()
    assert looked.wait(30)
    monkeypatch.setattr(job.coordinator._group, "peek", peek)
    job.save(20, ranks=[1])
    ahead.join(30)
    assert results[0].outcome is Outcome.COMMITTED, results[0].message


def test_a_rank_that_votes_and_goes_on_at_once_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch
) -> None:
    """The vote arrives between the coordinator's look at the votes and its look at the rank."""
    monkeypatch.setattr(coordinator_module, "_FIRST_LOOK_S", 0.01)
    job = Job(tmp_path, 2, timeout_s=30)
    id = job.coordinator.open_attempt(10, n=1)
    job.groups[0].publish(Ballot(10, 1).vote_key(0), job.vote(id, 0).to_bytes())
    group = job.coordinator._group
    peek = group.peek

    def peek_later(key: str):
        if key == Ballot.at_key(1) and peek(key) is None:
            job.groups[1].publish(Ballot(10, 1).vote_key(1), job.vote(id, 1).to_bytes())
            job.groups[1].publish(key, b"20.1")
        return peek(key)

    monkeypatch.setattr(group, "peek", peek_later)
    verdict = job.coordinator.decide(n=1, step=10, id=id, parts=parts())
    assert verdict.outcome is Outcome.COMMITTED, verdict.message


def test_votes_about_another_attempt_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    id = job.coordinator.open_attempt(10, n=1)
    stale = SetId(id.term, id.serial + 7, 10, id.nonce)
    for rank, about in ((0, id), (1, stale)):
        vote = Vote.from_bytes(job.vote(id, rank).to_bytes())
        vote = Vote(**{f: getattr(vote, f) for f in vote.__slots__} | {"serial": about.serial})
        job.groups[rank].publish(vote.key, vote.to_bytes())
    verdict = job.coordinator.decide(n=1, step=10, id=id, parts=parts())
    assert verdict.outcome is Outcome.ABORTED and verdict.rank == 1
    assert "attempt 8" in verdict.message


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry("model/w", "F32", (120,), Run(70, 50))], "model/w"),  # a hole: 60..70
        ([Entry("model/w", "F32", (120,), Run(50, 70))], "model/w"),  # an overlap: 50..60
        ([Entry("model/w", "BF16", (120,), Run(60, 60))], "model/w"),
        ([Entry("model/v", "F32", (120,), Run(60, 60))], "model/"),
    ],
)
def test_p1_shards_that_do_not_make_a_whole_are_refused(tmp_path: Path, entries, why) -> None:
    job = Job(tmp_path, 2)
    results = job.save(10, per_rank={1: {"entries": entries}})
    assert outcomes(results) == ["aborted"] * 2
    assert "not a whole checkpoint" in results[1].message and why in results[1].message
    assert offered(job.store) == []
    assert outcomes(job.save(20)) == ["committed"] * 2


def test_layouts_are_sent_once_and_looked_at_again_when_one_changes(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    assert outcomes(job.save(10)) == ["committed"] * 2
    assert job.vote(job.coordinator.open_attempt(11, n=1), 0).packed_entries is None
    assert outcomes(job.save(20)) == ["committed"] * 2
    hole = [Entry("model/w", "F32", (120,), Run(70, 50))]
    assert outcomes(job.save(30, per_rank={1: {"entries": hole}})) == ["aborted"] * 2
    assert outcomes(job.save(40)) == ["committed"] * 2


def test_a_layout_that_was_never_sent_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.known[1] = job.vote(job.coordinator.open_attempt(9, n=1), 1).layout_digest
    results = job.save(10)
    assert outcomes(results) == ["aborted"] * 2
    assert "rank 1 did not send the layout" in results[0].message


def test_p1_a_shard_that_rank_0_does_not_see_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(coordinator_module, "VISIBLE_WITHIN_S", 0.05)
    job = Job(tmp_path, 2)
    vote = job.vote

    def elsewhere(id, rank, *rest):
        made = vote(id, rank, *rest)
        if rank == 1:
            os.unlink(job.store.path(f"{id.dirname}/{shard_file(1)}"))
        return made

    monkeypatch.setattr(job, "vote", elsewhere)
    results = job.save(10)
    assert outcomes(results) == ["aborted"] * 2
    assert "rank 1 voted yes, but rank 0 does not see rank-00001.safetensors" in results[0].message


def test_ranks_without_data_have_no_file(tmp_path: Path, monkeypatch) -> None:
    job = Job(tmp_path, 2)
    vote = job.vote

    def empty(id, rank, *rest):
        if rank == 0:
            return vote(id, rank, 1, [Entry("model/w", "F32", (3,), Run(0, 3))])
        digest = vote(id, 1, 1, []).layout_digest
        os.unlink(job.store.path(f"{id.dirname}/{shard_file(1)}"))
        return Vote(True, 1, 10, 1, id.serial, layout_digest=digest, packed_entries=_packed([]))

    monkeypatch.setattr(job, "vote", empty)
    assert outcomes(job.save(10)) == ["committed"] * 2
    ((_, manifest),) = committed_sets(job.store)
    assert [s.rank for s in manifest.shards] == [0] and manifest.world_size == 2


def _packed(entries) -> str:
    from sharded_ckpt.votes import pack_entries

    return pack_entries(entries)


# ---- two jobs


def test_p6_a_superseded_job_learns_who_when_and_stops(tmp_path: Path) -> None:
    old = Job(tmp_path, 2)
    assert outcomes(old.save(10)) == ["committed"] * 2
    new = Job(tmp_path, 2)
    results = old.save(20)
    assert outcomes(results) == ["superseded"] * 2
    error = results[1].as_error()
    assert isinstance(error, Superseded)
    for part in (f"term {new.term}", new.run_id, "on host", "this job has term 1"):
        assert part in str(error)
    assert outcomes(new.save(20)) == ["committed"] * 2
    assert [(i.term, i.step) for i, _ in committed_sets(new.store)] == [(1, 10), (2, 20)]


def test_p6_a_job_that_is_superseded_while_writing_publishes_nothing(tmp_path: Path) -> None:
    old = Job(tmp_path, 1, keep=Keep(last=1))
    id = old.coordinator.open_attempt(10, n=1)
    vote = old.vote(id, 0)
    old.groups[0].publish(vote.key, vote.to_bytes())
    Job(tmp_path, 1)
    verdict = old.coordinator.decide(n=1, step=10, id=id, parts=parts())
    assert verdict.outcome is Outcome.SUPERSEDED
    assert MANIFEST not in old.store.list_dir(id.dirname)


def test_every_job_gets_its_own_term(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    claimed: list[int] = []
    threads = [
        threading.Thread(target=lambda: claimed.append(terms.claim_term(store, "r")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(claimed) == list(range(1, 9))


def test_a_term_is_above_every_set_that_is_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.make_dir(SetId(41, 1, 5, "00000000").dirname)
    store.make_dir("trash-" + SetId(42, 1, 5, "00000000").dirname + "-00000000")
    store.make_dir("term-9999.json.d")
    assert terms.claim_term(store, "r") == 43


def test_a_damaged_claim_is_still_a_claim(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create_exclusive(layout.term_file(5), b"{")
    with pytest.raises(Superseded, match="a job that its file does not name"):
        terms.check_superseded(store, 4)
    terms.check_superseded(store, 5)


# ---- failures of rank 0's own store


class FaultyStore(LocalStore):
    """Fails the effects that a test picks."""

    fault = staticmethod(lambda operation, path: None)

    def _effect(self, operation, path, call):
        error = self.fault(operation, path)
        if error is not None:
            raise StoreError(operation, path, error)
        return super()._effect(operation, path, call)


def manifest_fault(operation_wanted: str, after_rename: bool = False):
    """EIO at an effect on the manifest, or on its directory once it is in place."""
    renamed = []

    def fault(operation: str, path: str):
        if operation == "rename" and path.endswith(MANIFEST):
            renamed.append(path)
            return errno.EIO if operation_wanted == "rename" else None
        wanted = layout.is_temp_name(os.path.basename(path)) or (after_rename and renamed)
        return errno.EIO if operation == operation_wanted and wanted else None

    return fault


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close"])
def test_a_manifest_that_cannot_be_written_aborts(tmp_path: Path, operation: str) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 2, store=store)
    store.fault = manifest_fault(operation)
    results = job.save(10)
    assert outcomes(results) == ["aborted"] * 2
    assert "rank 0 could not write the manifest" in results[1].message
    assert results[1].rank == 0
    store.fault = FaultyStore.fault
    assert offered(store) == []
    assert outcomes(job.save(20)) == ["committed"] * 2


@pytest.mark.parametrize("at", ["rename", "directory"])
def test_p6_an_unknown_outcome_is_said_and_deletes_nothing(tmp_path: Path, at: str) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 2, store=store, keep=Keep(last=1))
    assert outcomes(job.save(10)) == ["committed"] * 2
    store.fault = manifest_fault("rename" if at == "rename" else "fsync", at == "directory")
    if at == "directory":
        store.fault = directory_fault(store)
    results = job.save(20)
    assert outcomes(results) == ["unknown"] * 2
    error = results[1].as_error()
    assert isinstance(error, CommitUnknown) and "nothing was deleted" in str(error)
    assert job.retention.suspended
    store.fault = FaultyStore.fault
    assert len([n for n in store.list_dir() if SetId.parse(n)]) == 2
    assert 10 in offered(store)
    assert outcomes(job.save(30)) == ["committed"] * 2
    assert not job.retention.suspended
    assert offered(store) == [30]


def directory_fault(store: LocalStore):
    """EIO at the fsync of the step directory after the manifest was renamed into it."""

    def fault(operation: str, path: str):
        there = os.path.exists(os.path.join(path, MANIFEST)) and "step-00000020" in path
        return errno.EIO if operation == "fsync" and there else None

    return fault


def test_p7_a_directory_that_cannot_be_made_is_told_to_every_rank(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 3, store=store, timeout_s=60)
    store.fault = lambda operation, path: errno.EROFS if operation == "mkdir" else None
    began = time.monotonic()
    results = job.save(10)
    assert time.monotonic() - began < 20
    assert outcomes(results) == ["aborted"] * 3
    assert "rank 0 could not begin step 10: mkdir" in results[2].message
    store.fault = FaultyStore.fault
    assert outcomes(job.save(10)) == ["committed"] * 3


def test_p7_a_state_that_does_not_fit_a_manifest_is_told_to_every_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    results = job.save(10, parts_=parts(metrics={"loss": "text"}))
    assert outcomes(results) == ["aborted"] * 2
    assert outcomes(job.save(20)) == ["committed"] * 2


# ---- size


def test_the_store_does_not_grow_with_saves(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, keep=Keep(last=1))
    sizes = []
    for step in range(1, 13):
        assert outcomes(job.save(step)) == ["committed"] * 2
        sizes.append(len(job.groups[0].board.values))
    assert max(sizes[3:]) <= max(sizes[:3]) + 4


def test_p9_a_commit_of_4096_ranks_is_linear(tmp_path: Path) -> None:
    def commit(world_size: int) -> tuple[int, int]:
        store = CountingStore(tmp_path / str(world_size))
        job = Job(tmp_path, world_size, store=store)
        id = job.coordinator.open_attempt(10, n=1)
        for rank in range(world_size):  # as if each rank had written: no fsyncs here
            entries = layout_of(rank, world_size)
            Path(store.path(f"{id.dirname}/{shard_file(rank)}")).write_bytes(b"x")
            vote = Vote(
                True,
                rank,
                10,
                1,
                id.serial,
                nbytes=9,
                header_nbytes=8,
                layout_digest=_digest(entries),
                packed_entries=_packed(entries),
            )
            job.groups[rank].publish(vote.key, vote.to_bytes())
        job.groups[0].board.requests = store.effects = 0
        verdict = job.coordinator.decide(n=1, step=10, id=id, parts=parts())
        assert verdict.outcome is Outcome.COMMITTED, verdict.message
        return job.groups[0].board.requests, store.effects

    small, large = commit(512), commit(4096)
    assert large[0] <= 4096 and large[0] <= 8.5 * small[0]
    assert large[1] <= small[1] + 2  # one manifest, however many ranks


def _digest(entries) -> str:
    from sharded_ckpt.plan import layout_digest

    return layout_digest(entries)


class CountingStore(LocalStore):
    effects = 0

    def _effect(self, operation, path, call):
        self.effects += operation != "write"
        return super()._effect(operation, path, call)


# ---- values


def test_final_outcomes_have_no_way_out() -> None:
    attempt = _Attempt(Ballot(1, 1), SetId(1, 1, 1, "00000000"), None, 0.0, 0.0)
    attempt.move(Outcome.PUBLISHING)
    attempt.move(Outcome.COMMITTED)
    for outcome in Outcome:
        with pytest.raises(AssertionError):
            attempt.move(outcome)
    finals = {o for o, after in TRANSITIONS.items() if not after}
    assert finals == set(Outcome) - {Outcome.VOTING, Outcome.PUBLISHING}
    assert set(TRANSITIONS) == set(Outcome)


def test_garbled_messages_are_refused() -> None:
    for data in (b"", b"[]", b"{}", b'{"ok": true}', b"\xff"):
        with pytest.raises(GroupError):
            Vote.from_bytes(data)
        with pytest.raises(GroupError):
            Verdict.from_bytes(data)
    pending = Verdict(Outcome.VOTING, 1, 1, 1)
    with pytest.raises(GroupError, match="still 'voting'"):
        Verdict.from_bytes(pending.to_bytes())


def test_uncertain_errors_are_store_errors() -> None:
    assert issubclass(StoreUncertain, StoreError)


# ---- crashes: a child process is killed before each effect on the disk in turn


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sharded_ckpt.keep import Keep
from sharded_ckpt.store import LocalStore
from tests.job import Job

class KilledStore(LocalStore):
    left = -1
    def _effect(self, operation, path, call):
        if self.left == 0:
            os._exit(77)
        self.left -= 1
        return super()._effect(operation, path, call)

store = KilledStore(sys.argv[2])
first = int(sys.argv[4])
fds = os.open(sys.argv[2] + ".acked", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
job = Job(sys.argv[2], 1, store=store, keep=Keep(last=1))
for step in (first, first + 1):
    if step == first + 1:
        store.left = int(sys.argv[3])
    (verdict,) = job.save(step)
    assert verdict.as_error() is None, verdict.message
    os.write(fds, b"%d\\n" % step)
if store.left >= 0:
    sys.exit(0)
"""


def run_forked(root: Path, kill_before: int, first: int) -> int:
    """The child above as a fork of this process, which has everything imported."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            sys.argv = ["child", ".", str(root), str(kill_before), str(first)]
            exec(compile(CHILD, "child", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_p1_p2_p6_killed_before_any_effect_of_a_commit_or_its_retention(tmp_path: Path) -> None:
    """After a crash anywhere: whole sets only, what was acknowledged is there, and a new job can
    load, save and clean up."""
    killed = 0
    for k in range(200):
        root = tmp_path / str(k)
        LocalStore(root)
        code = run_forked(root, k, first=10)
        assert code in (0, 77)
        killed += code == 77
        store = LocalStore(root)
        acked = [int(line) for line in (tmp_path / f"{k}.acked").read_text().split()]
        steps = offered(store)
        assert steps, f"nothing is offered after a kill before effect {k}"
        assert steps[-1] >= acked[-1]
        after = Job(root, 1, keep=Keep(last=1))
        assert after.term == 2
        assert outcomes(after.save(100)) == ["committed"]
        assert offered(store) == [100]
        left = [n for n in store.list_dir() if layout.parse_term_file(n) is None]
        assert len(left) == 1, f"left behind after a kill before effect {k}: {left}"
        if code == 0:
            break
    assert code == 0 and killed == 19


def test_p2_the_child_of_the_crash_test_runs_as_a_process_too(tmp_path: Path) -> None:
    root = tmp_path / "run"
    repository = str(Path(__file__).resolve().parent.parent)
    code = subprocess.run(
        [sys.executable, "-c", CHILD, repository, str(root), "9", "10"], timeout=120
    ).returncode
    assert code == 77
    assert offered(LocalStore(root))[0] == 10
