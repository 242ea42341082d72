"""The save path of one rank, from the call of ``save`` to the verdict.

DESIGN. Three threads take part; each save passes from one to the next through a queue, in order:

* the *training* thread collects slices and state, takes a staging buffer, starts the copies, and
  returns (``blocking``: after the copies). A fence before the next in-place update waits for them;
* the *writer* thread learns the step's directory from the coordinator, lets the engine write the
  shard, and votes;
* the *committer* thread waits for the verdict. On rank 0 it is the coordinator that makes it.

So the next shard is written while the votes for the last one still travel. An error anywhere
becomes a NO vote, so that every rank hears of it; nothing waits without the deadline that the call
of ``save`` set. Whoever owns a save's file removes it when the verdict is no, and keeps it when the
verdict is unknown.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sharded_ckpt import plan as planning
from sharded_ckpt.capture import Captured
from sharded_ckpt.checksum import crc32c
from sharded_ckpt.coordinator import Coordinator
from sharded_ckpt.engine_types import RELEASE_TIMEOUT_S
from sharded_ckpt.errors import (
    CheckpointError,
    CommitUnknown,
    SaveAborted,
    SaveError,
    SaveTimeout,
    StoreError,
)
from sharded_ckpt.events import Emitter, Event
from sharded_ckpt.group import Group
from sharded_ckpt.handle import SaveHandle
from sharded_ckpt.layout import SetId, shard_file
from sharded_ckpt.shard import ShardPlan, header_template, plan_shard
from sharded_ckpt.slices import Slice
from sharded_ckpt.staging import Snapshot, StagingPool
from sharded_ckpt.store import LocalStore
from sharded_ckpt.votes import Ballot, Verdict, Vote

log = logging.getLogger(__name__)

# How often a blocked background thread looks whether its save has been called off.
POLL_S = 0.25


class SaveState(enum.Enum):
    COPYING = "copying"  # sources are being copied; the fence holds the optimizer back
    WRITING = "writing"  # the snapshot is complete, the file is not
    VOTED = "voted"  # this rank has said yes or no
    COMMITTED = "committed"
    FAILED = "failed"


_TRANSITIONS: dict[SaveState, frozenset[SaveState]] = {
    SaveState.COPYING: frozenset({SaveState.WRITING, SaveState.VOTED, SaveState.FAILED}),
    SaveState.WRITING: frozenset({SaveState.VOTED, SaveState.FAILED}),
    SaveState.VOTED: frozenset({SaveState.COMMITTED, SaveState.FAILED}),
    SaveState.COMMITTED: frozenset(),
    SaveState.FAILED: frozenset(),
}


@dataclass(slots=True)
class RankSave:
    """One save on this rank."""

    ballot: Ballot
    handle: SaveHandle
    deadline: float  # monotonic seconds
    started_s: float = field(default_factory=time.time)
    captured: Captured | None = None
    plan: ShardPlan | None = None
    snapshot: Snapshot | None = None
    source_crcs: dict[str, int] = field(default_factory=dict)
    state: SaveState = SaveState.COPYING
    error: BaseException | None = None  # what this rank votes NO with
    id: SetId | None = None
    opened: threading.Event = field(default_factory=threading.Event)
    file_made: bool = False
    layout_digest: str = ""  # of the shard that this rank votes for
    # Set by the writer when it no longer touches the file or the buffer.
    written: threading.Event = field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        return self.ballot.step

    def move(self, new: SaveState) -> None:
        if new not in _TRANSITIONS[self.state]:
            raise AssertionError(f"save {self.ballot.token}: {self.state} -> {new}")
        self.state = new

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class Saver:
    """Runs the background part of saves, in order, until closed."""

    def __init__(
        self,
        *,
        store: LocalStore,
        group: Group,
        pool: StagingPool,
        emitter: Emitter,
        coordinator: Coordinator | None,
        timeout_s: float,
        check_snapshot: bool,
    ) -> None:
        self._store = store
        self._rank = group.rank
        self._world_size = group.world_size
        self._write_group = group.clone()
        self._commit_group = group.clone()
        self._pool = pool
        self._emitter = emitter
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._check_snapshot = check_snapshot
        self._to_write: queue.SimpleQueue[RankSave | None] = queue.SimpleQueue()
        self._to_commit: queue.SimpleQueue[RankSave | None] = queue.SimpleQueue()
        self._known_layout = ""  # digest of the layout that the coordinator has committed
        self._counts: Counter[int] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(name, source, work), name=name, daemon=True)
            for name, source, work in (
                ("sharded_ckpt-writer", self._to_write, self._write),
                ("sharded_ckpt-committer", self._to_commit, self._commit),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- training thread ---------------------------------------------------------------------

    def ballot(self, step: int) -> Ballot:
        """The next save of ``step``; equal on all ranks that have saved it equally often."""
        self._counts[step] += 1
        return Ballot(step, self._counts[step])

    def begin(self, save: RankSave, slices: list[Slice], captured: Captured) -> None:
        """Starts the copies of ``save``. Raises what makes this rank vote NO."""
        save.captured = captured
        save.plan = plan_shard([item.entry for item in slices])
        order = {entry.name: i for i, entry in enumerate(save.plan.entries)}
        in_order = sorted(slices, key=lambda item: order[item.entry.name])
        self._emit(save, "planned", nbytes=save.plan.data_nbytes)
        buffer = self._pool.acquire(save.left_s())
        if buffer is None:
            raise SaveTimeout(
                f"no staging buffer got free within the deadline of {self._timeout_s:g} s: "
                f"earlier saves are still being written",
                step=save.step,
                rank=self._rank,
            )
        try:
            if self._check_snapshot:
                save.source_crcs = {i.entry.name: _tensor_crc(i.tensor) for i in in_order}
            save.snapshot = self._pool.start(buffer, in_order, save.plan)
        except BaseException:
            self._pool.release(buffer)
            raise
        save.handle._snapshot = save.snapshot

    def submit(self, save: RankSave) -> None:
        """Hands ``save`` to the background, whether it began well or has failed already."""
        self._to_write.put(save)
        self._to_commit.put(save)

    def close(self, timeout_s: float) -> None:
        """Ends the threads once every submitted save has ended, or after ``timeout_s`` seconds."""
        self._to_write.put(None)
        self._to_commit.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.error("%s did not end within %g s", thread.name, timeout_s)
                return  # it still uses its connection
        if self._coordinator is not None:
            # This process may host the store through which the others hear the last verdict.
            self._coordinator.settle()
        self._write_group.close()
        self._commit_group.close()

    # -- background --------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        source: queue.SimpleQueue[RankSave | None],
        work: Callable[[RankSave], None],
    ) -> None:
        while (save := source.get()) is not None:
            try:
                work(save)
            except Exception as error:  # a bug; the ranks must still hear of it
                log.exception("%s failed at step %d", name, save.step)
                save.error = save.error or error
                save.opened.set()
                if source is self._to_write:
                    self._vote(save, Vote.no(**self._who(save), error=error))
                elif not save.handle.done():
                    save.handle._finish(None, error)

    def _write(self, save: RankSave) -> None:
        try:
            vote = self._vote_of(save)
        except Exception as error:
            if not isinstance(error, CheckpointError) and error is not save.error:
                log.exception("rank %d: writing step %d failed", self._rank, save.step)
            staging = save.snapshot.error if save.snapshot is not None else None
            save.error = save.error or staging or error
            vote = Vote.no(**self._who(save), error=save.error)
        finally:
            save.opened.set()
            self._let_go(save)
        self._vote(save, vote)
        self._emit(save, "voted", detail={"ok": vote.ok})

    def _who(self, save: RankSave) -> dict[str, int]:
        return {"rank": self._rank, "step": save.step, "n": save.ballot.n}

    def _vote(self, save: RankSave, vote: Vote) -> None:
        try:
            if save.state is not SaveState.FAILED:  # given up by the committer meanwhile
                save.move(SaveState.VOTED)
            self._write_group.publish(vote.key, vote.to_bytes())
            if not vote.ok:
                self._write_group.publish(vote.no_key, vote.to_bytes())
        except CheckpointError as error:
            save.error = save.error or error
            log.error("rank %d could not vote on step %d: %s", self._rank, save.step, error)
        finally:
            save.written.set()

    def _vote_of(self, save: RankSave) -> Vote:
        """Writes this rank's shard; its YES vote. Raises what the NO vote is about."""
        # Rank 0 makes the directory even for a save that it will vote against: the others are
        # waiting to hear its name.
        if self._coordinator is not None:
            save.id = self._coordinator.open_attempt(save.step, n=save.ballot.n)
        else:
            save.id = Coordinator.fetch_attempt(
                self._write_group, n=save.ballot.n, step=save.step, timeout_s=save.left_s()
            )
        save.opened.set()
        if save.error is not None:
            raise save.error
        assert save.plan is not None and save.snapshot is not None and save.captured is not None
        job = save.snapshot.job
        header = header_template(
            save.plan,
            id=save.id,
            rank=self._rank,
            world_size=self._world_size,
            state_tree=save.captured.rank_tree,
        )
        path = self._store.path(f"{save.id.dirname}/{shard_file(self._rank)}")
        save.file_made = True
        job.write_to(path, header.data, header.crc_pos)
        while not job.wait_staged(POLL_S):
            self._check_on(save)
        self._pool.drain(save.snapshot)
        save.move(SaveState.WRITING)
        self._emit(save, "staged", nbytes=save.plan.data_nbytes)
        if self._check_snapshot:
            self._compare_sources(save)
        while (written := job.wait(POLL_S)) is None:
            self._check_on(save)
        self._emit(save, "written", nbytes=written.file_nbytes)
        save.layout_digest = planning.layout_digest(save.plan.entries)
        return Vote.yes(
            rank=self._rank,
            step=save.step,
            n=save.ballot.n,
            serial=save.id.serial,
            written=written,
            layout_digest=save.layout_digest,
            entries=None if save.layout_digest == self._known_layout else save.plan.entries,
        )

    def _check_on(self, save: RankSave) -> None:
        """Called while blocked: raises when the save was called off, or its deadline has passed."""
        snapshot = save.snapshot
        if snapshot is not None and snapshot.error is not None:
            raise snapshot.error
        if save.error is not None:
            raise save.error
        if save.left_s() <= 0:
            raise SaveTimeout(
                f"rank {self._rank} did not finish writing step {save.step} within "
                f"{self._timeout_s:g} s",
                step=save.step,
                rank=self._rank,
            )
        if (no := self._write_group.peek(save.ballot.no_key)) is not None:
            other = Vote.from_bytes(no)
            raise SaveAborted(
                other.cause or "another rank failed", step=save.step, rank=other.failed_rank
            )

    def _let_go(self, save: RankSave) -> None:
        """Gives the staging buffer back; the engine has stopped using it when this returns."""
        snapshot = save.snapshot
        if snapshot is None:
            return
        if save.error is not None:
            snapshot.job.cancel()
        try:
            snapshot.let_go()
        except CheckpointError as error:
            log.error("rank %d: a staging buffer cannot be used for now: %s", self._rank, error)
            self._pool.give_up(snapshot)
            return
        self._pool.release(snapshot.buffer)

    def _compare_sources(self, save: RankSave) -> None:
        """``check_snapshot``: the staged bytes must be those that the sources had at the call."""
        assert save.snapshot is not None and save.plan is not None
        arena = save.snapshot.buffer.arena
        assert arena is not None
        for entry, start, end in save.plan.spans():
            if crc32c(arena.view(start, end - start)) != save.source_crcs[entry.name]:
                raise SaveError(
                    f"{entry.name} changed between save({save.step}) and the end of its copy; "
                    "whatever changes it outside optimizer.step() must call fence() first",
                    step=save.step,
                    rank=self._rank,
                )

    def _commit(self, save: RankSave) -> None:
        verdict: Verdict | None = None
        error: BaseException | None = None
        try:
            verdict = self._verdict_of(save)
            error = verdict.as_error()
        except CheckpointError as problem:
            # Of two failures this rank's own says more: why it never got as far as a verdict.
            error = save.error or problem
        # The writer has deadlines of its own; only a file system that hangs keeps it longer.
        if not save.written.wait(save.left_s() + 2 * RELEASE_TIMEOUT_S):
            stuck = SaveTimeout(
                f"rank {self._rank} still waits for the file system; its part of step "
                f"{save.step} was given up",
                step=save.step,
                rank=self._rank,
            )
            error, verdict = error or stuck, None
        if error is None:
            self._committed(save)
        else:
            self._failed(save, error, known=verdict is not None)
        Coordinator.acknowledge(self._commit_group, n=save.ballot.n, step=save.step)

    def _verdict_of(self, save: RankSave) -> Verdict:
        n, step = save.ballot.n, save.step
        if self._coordinator is None:
            # The coordinator's own deadline runs out first; the margin lets its verdict arrive.
            margin_s = max(5.0, 0.1 * self._timeout_s)
            return Coordinator.fetch_verdict(
                self._commit_group, n=n, step=step, timeout_s=save.left_s() + margin_s
            )
        save.opened.wait(save.left_s())  # without a directory there is nothing to decide
        parts = save.captured.parts if save.captured is not None else None
        return self._coordinator.decide(
            n=n, step=step, id=save.id, parts=parts, timeout_s=save.deadline - time.monotonic()
        )

    def _committed(self, save: RankSave) -> None:
        save.move(SaveState.COMMITTED)
        self._known_layout = save.layout_digest
        self._emit(save, "committed")
        save.handle._finish(save.id, None)
        if self._coordinator is not None and save.id is not None:
            self._coordinator.after_commit(save.id)

    def _failed(self, save: RankSave, error: BaseException, *, known: bool) -> None:
        save.move(SaveState.FAILED)
        # What the coordinator knows of the layout may not be what was committed last.
        self._known_layout = ""
        # A file whose set may be committed, for all that is known, is left alone.
        if known and not isinstance(error, CommitUnknown):
            self._remove_own_file(save)
        log.error("rank %d: step %d was not saved: %s", self._rank, save.step, error)
        self._emit(save, "failed", detail={"error": str(error)})
        save.handle._finish(None, error)
        if self._coordinator is not None and save.id is not None:
            self._coordinator.after_failure(save.id)

    def _remove_own_file(self, save: RankSave) -> None:
        if save.id is None or not save.file_made:
            return
        name = f"{save.id.dirname}/{shard_file(self._rank)}"
        try:
            if self._store.exists(name):
                self._store.unlink(name)
        except StoreError as error:
            log.warning("could not remove the shard of a failed save: %s", error)

    def _emit(
        self, save: RankSave, kind: str, *, nbytes: int = 0, detail: dict[str, Any] | None = None
    ) -> None:
        now = time.time()
        self._emitter.emit(
            Event(
                kind=kind,
                step=save.step,
                rank=self._rank,
                term=save.id.term if save.id else 0,
                serial=save.id.serial if save.id else 0,
                nbytes=nbytes,
                seconds=now - save.started_s,
                t_start=save.started_s,
                detail=detail or {},
            )
        )


def _tensor_crc(tensor: Any) -> int:
    import torch

    host = tensor.detach().to("cpu").contiguous()
    return crc32c(host.reshape(-1).view(torch.uint8).numpy())
