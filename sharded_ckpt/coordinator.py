"""The commit of a step: rank 0's side of it, and the little that the other ranks say and hear.

:meth:`Coordinator._commit` is the protocol, in one place. ``docs/format.md`` has the crash table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from sharded_ckpt import coordinator_rank, layout
from sharded_ckpt.coordinator_layouts import Layouts, UnknownLayout
from sharded_ckpt.coordinator_rank import step_of
from sharded_ckpt.errors import (
    CheckpointError,
    GroupError,
    StoreError,
    Superseded,
)
from sharded_ckpt.events import Emitter, Event
from sharded_ckpt.group import Group, ranks_text
from sharded_ckpt.layout import SetId
from sharded_ckpt.manifest import Manifest, ShardRef
from sharded_ckpt.store import LocalStore, StoreUncertain
from sharded_ckpt.terms import check_superseded
from sharded_ckpt.votes import (
    TRANSITIONS,
    Ballot,
    CommitParts,
    Outcome,
    Verdict,
    Vote,
)

log = logging.getLogger(__name__)

# A network file system may show another host's new file late; past this it is another directory.
VISIBLE_WITHIN_S = 5.0
_FIRST_LOOK_S = 1.0  # then 2, 4, ...: how often the coordinator looks where silent ranks are
_MAX_BALLOTS = 256  # ended ones whose keys are kept for ranks that have not come by yet
_MAX_LISTED = 5
# How long after its deadline a step may still be committed. The other ranks wait for the verdict at
# least 5 s longer than that; a commit that none of them hears of would be an error to them.
GRACE_S = 2.0


class AfterCommit(Protocol):
    """What the coordinator asks of retention."""

    def run(
        self,
        just_committed: SetId,
        leftovers: Mapping[SetId, bool],
        next_serial: Callable[[], int],
    ) -> set[SetId]:
        """Deletes what a newer commit has made superfluous.

        ``leftovers`` are this job's attempts without a manifest, and whether every rank has left
        them. Returns those that are gone. ``next_serial`` numbers sets that are made meanwhile.
        """

    def suspend(self, reason: str, id: SetId) -> None:
        """Neither counts nor deletes ``id``, whose outcome is not known."""


class _Stop(Exception):
    """Ends an attempt without a commit."""

    def __init__(self, outcome: Outcome, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.rank = rank


@dataclass(slots=True)
class _Attempt:
    """One attempt on the coordinator."""

    ballot: Ballot
    id: SetId
    parts: CommitParts | None
    deadline: float  # monotonic seconds
    timeout_s: float
    outcome: Outcome = Outcome.VOTING
    votes: dict[int, Vote] = field(default_factory=dict)

    def move(self, new: Outcome) -> None:
        if new not in TRANSITIONS[self.outcome]:
            raise AssertionError(f"attempt {self.id.dirname}: {self.outcome} -> {new}")
        self.outcome = new


class Coordinator:
    """Makes the commits of one job, on rank 0.

    ``open_attempt`` may be called by one thread while another is in ``decide``; saves go through
    each of them in order. ``group`` is a clone that nobody else uses.
    """

    def __init__(
        self,
        store: LocalStore,
        group: Group,
        *,
        term: int,
        run_id: str,
        timeout_s: float,
        emitter: Emitter,
        retention: AfterCommit | None,
    ) -> None:
        self._store = store
        self._group = group
        self._term = term
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._emitter = emitter
        self._retention = retention
        self._serials = itertools.count(1)  # next() is one step for all threads
        # The last ballots that were opened, for telling where silent ranks are.
        self._opened: deque[bytes] = deque(maxlen=_MAX_BALLOTS)
        self._refused: dict[Ballot, Verdict] = {}  # attempts that could not be opened
        self._opened_s: dict[Ballot, float] = {}  # monotonic; until they are decided
        self._layouts = Layouts()
        # Attempts without a manifest; ``None`` once every rank is through with it.
        self._leftovers: dict[SetId, Ballot | None] = {}
        self._ended: dict[Ballot, None] = {}  # in order; their keys are still in the store

    # What the other ranks do; here so that a caller needs one name.
    fetch_attempt = staticmethod(coordinator_rank.fetch_attempt)
    fetch_verdict = staticmethod(coordinator_rank.fetch_verdict)
    acknowledge = staticmethod(coordinator_rank.acknowledge)

    def open_attempt(self, step: int, *, n: int) -> SetId:
        """Makes the directory of a new attempt and tells every rank its name.

        Raises :class:`Superseded`, :class:`StoreError` or whatever else went wrong, and then has
        told the ranks that.
        """
        ballot = Ballot(step, n)
        self._opened.append(ballot.token.encode())
        self._opened_s[ballot] = time.monotonic()
        serial = self._next_serial()
        try:
            self._group.publish(Ballot.at_key(0), ballot.token.encode())
            id = SetId.new(step=step, term=self._term, serial=serial)
            check_superseded(self._store, self._term, step)
            self._store.make_dir(id.dirname)
        except Exception as e:  # every rank is waiting for an answer
            late = isinstance(e, Superseded)
            verdict = Verdict(
                outcome=Outcome.SUPERSEDED if late else Outcome.ABORTED,
                step=step,
                serial=serial,
                term=self._term,
                message=str(e) if late else f"rank 0 could not begin step {step}: {e}",
                rank=0,
            )
            self._refused[ballot] = verdict
            with contextlib.suppress(GroupError):
                self._group.publish(ballot.attempt_key, verdict.to_bytes())
            raise
        self._group.publish(ballot.attempt_key, json.dumps({"directory": id.dirname}).encode())
        return id

    def decide(
        self,
        *,
        n: int,
        step: int,
        id: SetId | None,
        parts: CommitParts | None,
        timeout_s: float | None = None,
    ) -> Verdict:
        """Commits the step or does not, and tells every rank which. Ends within ``timeout_s``.

        ``timeout_s`` is what is left until the deadline, below 0 when that has passed. A step that
        was opened longer ago than the coordinator's own time limit is past its deadline, too.

        ``id`` is ``None`` when ``open_attempt`` failed, ``parts`` when rank 0 could not capture its
        state; both are then decided already, and only have to be said.
        """
        ballot = Ballot(step, n)
        opened_s = self._opened_s.pop(ballot, math.inf)
        if id is None:
            verdict = self._refused.pop(ballot, None) or Verdict(
                Outcome.ABORTED, step, 0, self._term, f"rank 0 could not begin step {step}", 0
            )
        else:
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            deadline = min(time.monotonic() + limit_s, opened_s + self._timeout_s)
            attempt = _Attempt(ballot, id, parts, deadline, max(0.0, limit_s))
            verdict = self._verdict_of(attempt)
            if verdict.outcome in (Outcome.ABORTED, Outcome.TIMEOUT):
                self._leftovers[id] = ballot
            if verdict.outcome is Outcome.UNKNOWN and self._retention is not None:
                self._retention.suspend(verdict.message, id)
        self._ended[ballot] = None
        try:
            self._group.publish(ballot.verdict_key, verdict.to_bytes())
        except GroupError as e:
            # What is committed stays so; the ranks that hear nothing run into their deadline.
            log.error("step %d is %s, but no rank can be told: %s", step, verdict.outcome.value, e)
        return verdict

    def _verdict_of(self, attempt: _Attempt) -> Verdict:
        message, rank = "", -1
        try:
            self._commit(attempt)
        except _Stop as stop:
            attempt.move(stop.outcome)
            message, rank = str(stop), stop.rank
        except Exception as e:  # every rank is waiting: whatever it is, they must hear of it
            if not isinstance(e, CheckpointError):
                log.exception("the commit of step %d failed", attempt.id.step)
            unsure = attempt.outcome is Outcome.PUBLISHING
            attempt.move(Outcome.UNKNOWN if unsure else Outcome.ABORTED)
            message, rank = f"rank 0 failed to commit step {attempt.id.step}: {e}", 0
        id = attempt.id
        return Verdict(attempt.outcome, id.step, id.serial, id.term, message, rank)

    def _commit(self, attempt: _Attempt) -> None:
        """The protocol. Returns with the step committed, or raises :class:`_Stop`."""
        step = attempt.id.step
        # 1. When the directory was opened, this job claimed its term by creating a file that no
        #    other job can create, and proved that every rank sees that file.
        # 2. ``open_attempt`` made the attempt's directory. Its name holds random digits: it has one
        #    writer for ever, and the ranks learn it from the group, not from the file system.
        # 3. Each rank creates its shard exclusively, writes and fsyncs it, fsyncs the directory.
        # 4. Each rank votes. One NO ends the attempt, so does the deadline; a late YES is ignored.
        self._collect_votes(attempt)
        # 5. The votes must be about the same attempt and describe a whole checkpoint: every element
        #    of every tensor in exactly one shard, and every shard where rank 0 looks for it.
        self._check_votes(attempt)
        self._check_coverage(attempt)
        self._check_visible(attempt)
        manifest = self._manifest(attempt)
        # 6. A job that claimed the directory meanwhile may be loading from it: leave it alone.
        try:
            check_superseded(self._store, self._term, step)
        except Superseded as e:
            raise _Stop(Outcome.SUPERSEDED, str(e)) from e
        self._check_in_time(attempt)
        # 7. The manifest appears, whole and durable: that is the commit. An error after it may have
        #    appeared leaves the outcome unknown, and then nothing at all is deleted.
        name = f"{attempt.id.dirname}/{layout.MANIFEST}"
        attempt.move(Outcome.PUBLISHING)
        try:
            self._store.publish(name, manifest)
        except StoreUncertain as e:
            message = f"whether step {step} is committed is not known: {e}; nothing was deleted"
            raise _Stop(Outcome.UNKNOWN, f"{message}. Load again after a restart to see", 0) from e
        except StoreError as e:
            message = f"rank 0 could not write the manifest of step {step}: {e}"
            raise _Stop(Outcome.ABORTED, message, 0) from e
        attempt.move(Outcome.COMMITTED)
        # 8. ``decide`` tells the ranks. Only then do handles finish and does retention run.

    def after_commit(self, id: SetId) -> None:
        """Retention, once the handle has finished. Never raises: the step is committed anyway."""
        began = time.time()
        try:
            self._forget_keys()
            if self._retention is not None:
                leftovers = {old: ballot is None for old, ballot in self._leftovers.items()}
                for gone in self._retention.run(id, leftovers, self._next_serial):
                    self._leftovers.pop(gone, None)
        except Exception as e:
            if not isinstance(e, CheckpointError):
                log.exception("retention after step %d failed", id.step)
            log.warning("retention after step %d stopped: %s; it is done by the next", id.step, e)
            detail = {"operation": "retention", "error": str(e)}
            seconds = time.time() - began
            self._emitter.emit(
                Event("failed", id.step, 0, id.term, id.serial, 0, seconds, began, detail)
            )

    def after_failure(self, id: SetId) -> None:
        """No file is deleted after a failure; the next commit cleans up."""
        with contextlib.suppress(GroupError):
            self._forget_keys()
        log.info("attempt %s was not committed; what is left of it goes later", id.dirname)

    def settle(self, timeout_s: float = 5.0) -> None:
        """Waits until every rank is through with the last save. Call it once none is in ``decide``.

        The process of rank 0 may host the store: were it to end first, the others would not hear
        the last verdict. Never raises; gives up after ``timeout_s``.
        """
        last = next(reversed(self._ended), None)
        if last is None:
            return
        try:
            if not self._group.await_count(last.seen_key, self._group.world_size, timeout_s):
                log.warning(
                    "not every rank is through with the save of step %d after %g s; one may have "
                    "died, see its log",
                    last.step,
                    timeout_s,
                )
        except GroupError as e:
            log.debug("could not wait for the other ranks: %s", e)

    # ---- inside

    def _collect_votes(self, attempt: _Attempt) -> None:
        ballot, votes = attempt.ballot, attempt.votes
        missing = list(range(self._group.world_size))
        look_s = _FIRST_LOOK_S
        while missing:
            left_s = attempt.deadline - time.monotonic()
            keys = [ballot.vote_key(rank) for rank in missing]
            try:
                got = self._group.collect(
                    keys, max(0.0, min(look_s, left_s)), ballot.no_key, patience_s=left_s
                )
            except GroupError as e:
                raise _Stop(Outcome.TIMEOUT, f"the votes on step {ballot.step}: {e}", 0) from e
            if got.stop is not None:
                raise _no(Vote.from_bytes(got.stop))
            for rank, data in zip(missing, got.values, strict=True):
                if data is not None:
                    votes[rank] = Vote.from_bytes(data)
                    if not votes[rank].ok:
                        raise _no(votes[rank])
            missing = [rank for rank in missing if rank not in votes]
            if missing:
                self._check_silent(attempt, missing, final=left_s <= look_s)
            look_s *= 2

    def _check_silent(self, attempt: _Attempt, missing: list[int], *, final: bool) -> None:
        """Raises if a rank is at another save than this one, or, at the deadline, why it is late.

        Ranks take their saves in order. One that is at a save which rank 0 never opened has left
        this one out; one that is at an earlier save may still come.
        """
        ballot = attempt.ballot
        writing = []
        for rank in missing:
            at = self._group.peek(Ballot.at_key(rank))
            if at == ballot.token.encode():
                writing.append(rank)
            elif at and at not in self._opened:
                if self._group.peek(ballot.vote_key(rank)) is not None:
                    continue  # it has voted just now, and gone on to its next save
                raise _Stop(
                    Outcome.ABORTED,
                    f"rank {rank} called save for step {step_of(at)}, rank 0 for step "
                    f"{ballot.step}: every rank must call save with the same step",
                    rank,
                )
        if not final:
            return
        absent = [rank for rank in missing if rank not in writing]
        reasons = []
        if absent:
            reasons.append(
                f"{ranks_text(absent)} did not call save({ballot.step}): every rank must, not only "
                "rank 0"
            )
        if writing:
            reasons.append(f"{ranks_text(writing)} did not finish writing")
        raise _Stop(
            Outcome.TIMEOUT,
            f"step {ballot.step} was given up after {attempt.timeout_s:g} s: "
            f"{'; '.join(reasons)}. A rank may have died; see its log",
            missing[0],
        )

    def _check_votes(self, attempt: _Attempt) -> None:
        for rank, vote in sorted(attempt.votes.items()):
            expected = (rank, attempt.ballot, attempt.id.serial)
            if (vote.rank, vote.ballot, vote.serial) != expected:
                raise _Stop(
                    Outcome.ABORTED,
                    f"rank {rank} voted for step {vote.step} (attempt {vote.serial}), rank 0 for "
                    f"step {attempt.id.step} (attempt {attempt.id.serial}): every rank must call "
                    "save with the same step",
                    rank,
                )

    def _check_coverage(self, attempt: _Attempt) -> None:
        try:
            problems = self._layouts.problems(attempt.votes)
        except UnknownLayout as e:
            raise _Stop(Outcome.ABORTED, str(e), e.rank) from e
        if problems:
            more = len(problems) - _MAX_LISTED
            raise _Stop(
                Outcome.ABORTED,
                f"the shards of step {attempt.id.step} are not a whole checkpoint: "
                + "; ".join(problems[:_MAX_LISTED])
                + (f"; and {more} more" if more > 0 else "")
                + ". Every rank must hand over the same model with the same sharding",
            )

    def _check_visible(self, attempt: _Attempt) -> None:
        ranks = [rank for rank, vote in attempt.votes.items() if vote.nbytes]
        expected = {layout.shard_file(rank): rank for rank in ranks}
        deadline = time.monotonic() + VISIBLE_WITHIN_S
        pause_s = 0.01
        while absent := set(expected).difference(self._store.list_dir(attempt.id.dirname)):
            if time.monotonic() > deadline:
                where = self._store.path(attempt.id.dirname)
                rank = min(expected[name] for name in absent)
                raise _Stop(
                    Outcome.ABORTED,
                    f"rank {rank} voted yes, but rank 0 does not see {layout.shard_file(rank)} in "
                    f"{where} ({len(absent)} of {len(expected)} shards are missing); all hosts "
                    "must share the directory, and nothing else may delete in it",
                    rank,
                )
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def _check_in_time(self, attempt: _Attempt) -> None:
        late_s = time.monotonic() - attempt.deadline
        if late_s > GRACE_S:
            raise _Stop(
                Outcome.TIMEOUT,
                f"step {attempt.id.step} was given up: rank 0 was ready {late_s:.1f} s "
                "after its deadline, when other ranks may be gone. The file system is slow, or "
                "deletion after an earlier save; save less often or raise timeout_s",
                0,
            )

    def _manifest(self, attempt: _Attempt) -> bytes:
        parts = attempt.parts
        if parts is None:
            raise _Stop(Outcome.ABORTED, "rank 0 has no state to put into the manifest", 0)
        shards = tuple(
            ShardRef(
                rank=rank,
                directory=attempt.id.dirname,
                file=layout.shard_file(rank),
                nbytes=vote.nbytes,
                header_nbytes=vote.header_nbytes,
                header_crc32c=vote.header_crc32c,
                file_crc32c=vote.file_crc32c,
            )
            for rank, vote in sorted(attempt.votes.items())
            if vote.nbytes
        )
        return Manifest(
            id=attempt.id,
            run_id=self._run_id,
            world_size=self._group.world_size,
            content="full",
            origin=None,
            layout=dict(parts.layout),
            shards=shards,
            state=parts.state_tree,
            client_state=parts.client_state_tree,
            aliases=dict(parts.aliases),
            metrics=dict(parts.metrics),
            versions=dict(parts.versions),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ).to_bytes()

    def _next_serial(self) -> int:
        return next(self._serials)

    def _forget_keys(self) -> None:
        """Removes the keys of ballots that every rank has acknowledged."""
        for ballot in list(self._ended):
            if self._group.count(ballot.seen_key, 0) < self._group.world_size:
                continue
            self._forget(ballot)
            for id, left_by in self._leftovers.items():
                if left_by == ballot:
                    self._leftovers[id] = None
        while len(self._ended) > _MAX_BALLOTS:  # of ranks that died or left a save out
            self._forget(next(iter(self._ended)))

    def _forget(self, ballot: Ballot) -> None:
        self._group.forget([ballot.attempt_key, ballot.no_key, ballot.verdict_key, ballot.seen_key])
        del self._ended[ballot]


def _no(vote: Vote) -> _Stop:
    return _Stop(
        Outcome.ABORTED, f"rank {vote.failed_rank} voted no: {vote.cause}", vote.failed_rank
    )
