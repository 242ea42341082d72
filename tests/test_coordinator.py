"""The commit: all ranks reach one verdict, and only a whole set is ever offered."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from sharded_ckpt import coordinator as coordinator_module
from sharded_ckpt import layout, terms
from sharded_ckpt.coordinator import Coordinator, _Attempt
from sharded_ckpt.errors import (
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
from tests.job import Job, layout_of, offered, outcomes, parts


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


# ---- size


def test_the_store_does_not_grow_with_saves(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, keep=Keep(last=1))
    sizes = []
    for step in range(1, 13):
        assert outcomes(job.save(step)) == ["committed"] * 2
        sizes.append(len(job.groups[0].board.values))
    assert max(sizes[3:]) <= max(sizes[:3]) + 4


def test_keys_go_after_failures_and_when_a_rank_never_comes_by(tmp_path: Path, monkeypatch) -> None:
    job = Job(tmp_path, 1)
    for step in (1, 2):
        job.save(step, per_rank={0: {"fail": StoreError("write", "f", errno.EIO)}})
        job.coordinator.after_failure(SetId(1, step, step, "00000000"))
    board = job.groups[0].board.values
    assert sorted(board) == [Ballot.at_key(0)]
    monkeypatch.setattr(coordinator_module, "_MAX_BALLOTS", 2)
    for step in (3, 4, 5, 6):
        assert outcomes(job.save(step, acknowledge=False)) == ["committed"]
    assert [key for key in board if key.startswith("verdict/")] == [
        Ballot(step, 1).verdict_key for step in (5, 6)
    ]


def test_settle_waits_for_the_last_ranks_but_not_for_ever(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.coordinator.settle()  # nothing was saved
    job.save(10, per_rank={1: {"acknowledge": False}})
    began = time.monotonic()
    job.coordinator.settle(0.05)
    assert 0.05 <= time.monotonic() - began < 5
    settled = threading.Thread(target=job.coordinator.settle, args=(60.0,))
    settled.start()
    assert settled.is_alive()
    Coordinator.acknowledge(job.groups[1], n=1, step=10)
    settled.join(30)
    assert not settled.is_alive()


@pytest.mark.parametrize("late_s", [1.0, 30.0])
def test_p7_nothing_is_committed_when_the_others_have_given_up(
    tmp_path: Path, monkeypatch, late_s: float
) -> None:
    job = Job(tmp_path, 1)
    id = job.coordinator.open_attempt(10, n=1)
    vote = job.vote(id, 0)
    job.groups[0].publish(vote.key, vote.to_bytes())
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + job.timeout_s + late_s)
    verdict = job.coordinator.decide(n=1, step=10, id=id, parts=parts(), timeout_s=0.0)
    if late_s < coordinator_module.GRACE_S:
        assert verdict.outcome is Outcome.COMMITTED, verdict.message
    else:
        assert verdict.outcome is Outcome.TIMEOUT and "after its deadline" in verdict.message
        assert offered(job.store) == []


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
