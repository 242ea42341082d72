"""A job of threads that commits shard sets without training: what the commit tests drive.

Each rank's shard is a few bytes; its vote says what the file holds. Everything else is the real
coordinator, store, group and retention.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharded_ckpt import layout, plan, terms
from sharded_ckpt.checksum import crc32c
from sharded_ckpt.coordinator import Coordinator
from sharded_ckpt.errors import CheckpointError, StoreError
from sharded_ckpt.events import Emitter, Event
from sharded_ckpt.group import ThreadGroup
from sharded_ckpt.keep import Keep
from sharded_ckpt.layout import SetId, shard_file
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.retention import Retention, committed_sets
from sharded_ckpt.slices import Entry, Run
from sharded_ckpt.store import LocalStore
from sharded_ckpt.votes import Ballot, CommitParts, Verdict, Vote

NUMEL = 120


class RecordingStore(LocalStore):
    """Notes every effect on the disk; ``fault`` may give one an errno to fail with."""

    fault = staticmethod(lambda operation, path: None)

    def __init__(self, root: Path, **options: Any) -> None:
        self.effects: list[tuple[str, str]] = []
        super().__init__(root, **options)

    def _effect(self, operation: str, path: str, call: Callable[[], Any]) -> Any:
        self.effects.append((operation, os.path.relpath(path, self.root)))
        error = self.fault(operation, path)
        if error is not None:
            raise StoreError(operation, path, error)
        return super()._effect(operation, path, call)


@dataclass(frozen=True)
class Written:
    file_nbytes: int
    header_nbytes: int
    header_crc32c: int
    file_crc32c: int


def parts(**changes: Any) -> CommitParts:
    made: dict[str, Any] = {
        "layout": {"kind": "test"},
        "state_tree": {},
        "client_state_tree": {},
        "aliases": {},
        "metrics": {},
        "versions": {},
    }
    return CommitParts(**{**made, **changes})


def layout_of(rank: int, world_size: int) -> list[Entry]:
    """A tensor cut evenly over the ranks."""
    each = max(1, NUMEL // world_size)
    total = each * world_size
    return [Entry("model/w", "F32", (total,), Run(rank * each, each))]


class Job:
    """One launch: claims a term, then saves."""

    def __init__(
        self,
        root: Path,
        world_size: int = 2,
        *,
        keep: Keep | None = None,
        store: LocalStore | None = None,
        timeout_s: float = 20.0,
        thin: Callable[[Manifest, SetId], Manifest] | None = None,
    ) -> None:
        self.store = store or LocalStore(root)
        self.run_id = f"run-{time.monotonic_ns()}"
        self.term = terms.claim_term(self.store, self.run_id)
        self.groups = ThreadGroup.make(world_size)
        self.events: list[Event] = []
        emitter = Emitter([self.events.append])
        self.retention = Retention(
            self.store, keep or Keep(), term=self.term, emitter=emitter, thin=thin
        )
        self.coordinator = Coordinator(
            self.store,
            self.groups[0].clone(),
            term=self.term,
            run_id=self.run_id,
            timeout_s=timeout_s,
            emitter=emitter,
            retention=self.retention,
        )
        self.timeout_s = timeout_s
        self.known = [""] * world_size
        self.saves: dict[int, list[int]] = {}

    @property
    def world_size(self) -> int:
        return len(self.groups)

    def vote(
        self, id: SetId, rank: int, n: int = 1, entries: Sequence[Entry] | None = None
    ) -> Vote:
        """Writes the rank's shard and makes its YES vote."""
        entries = layout_of(rank, self.world_size) if entries is None else entries
        data = b"shard %d of %d" % (rank, id.serial)
        self.store.create_exclusive(f"{id.dirname}/{shard_file(rank)}", data)
        digest = plan.layout_digest(entries)
        return Vote.yes(
            rank=rank,
            step=id.step,
            n=n,
            serial=id.serial,
            written=Written(len(data), 8, crc32c(data[:8]), crc32c(data)),
            layout_digest=digest,
            entries=None if digest == self.known[rank] else entries,
        )

    def rank_save(
        self,
        rank: int,
        step: int,
        *,
        entries: Sequence[Entry] | None = None,
        fail: BaseException | None = None,
        acknowledge: bool = True,
        parts_: CommitParts | None = None,
    ) -> Verdict | CheckpointError:
        """One rank's part in a save, as the saver plays it: every error but the verdict's own
        becomes a NO vote."""
        group = self.groups[rank]
        n = self.saves.setdefault(step, [0] * self.world_size)[rank] = (
            self.saves.setdefault(step, [0] * self.world_size)[rank] + 1
        )
        ballot = Ballot(step, n)
        id: SetId | None = None
        own: CheckpointError | None = None
        try:
            if rank == 0:
                id = self.coordinator.open_attempt(step, n=n)
            else:
                id = Coordinator.fetch_attempt(group, n=n, step=step, timeout_s=self.timeout_s)
            if fail is not None:
                raise fail
            vote = self.vote(id, rank, n, entries)
        except CheckpointError as e:
            own = e
            vote = Vote.no(rank=rank, step=step, n=n, error=e)
            group.publish(vote.no_key, vote.to_bytes())
        group.publish(vote.key, vote.to_bytes())
        try:
            if rank == 0:
                verdict = self.coordinator.decide(n=n, step=step, id=id, parts=parts_ or parts())
            else:
                verdict = Coordinator.fetch_verdict(group, n=n, step=step, timeout_s=self.timeout_s)
        except CheckpointError as e:
            return own or e
        if verdict.as_error() is None:
            self.known[rank] = vote.layout_digest
            if rank == 0 and id is not None:
                self.coordinator.after_commit(id)
        if acknowledge:
            Coordinator.acknowledge(group, n=ballot.n, step=step)
        return verdict

    def save(self, step: int, ranks: Sequence[int] | None = None, **options: Any) -> list[Any]:
        """All ranks save ``step`` (or a rank's own, ``steps={rank: step}``); results by rank.

        ``per_rank={rank: {...}}`` gives one rank other options.
        """
        per_rank = options.pop("per_rank", {})
        steps = options.pop("steps", {})
        chosen = range(self.world_size) if ranks is None else ranks
        results: dict[int, Any] = {}

        def run(rank: int) -> None:
            results[rank] = self.rank_save(
                rank, steps.get(rank, step), **{**options, **per_rank.get(rank, {})}
            )

        threads = [threading.Thread(target=run, args=(rank,)) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return [results.get(rank) for rank in range(self.world_size)]


def offered(store: LocalStore) -> list[int]:
    """Committed steps, oldest first, after checking that each set is whole."""
    steps = []
    for id, manifest in committed_sets(store):
        assert isinstance(manifest, Manifest), manifest
        for shard in manifest.shards:
            data = store.read(shard.path, 1 << 20)
            assert (len(data), crc32c(data)) == (shard.nbytes, shard.file_crc32c)
        steps.append(id.step)
    return steps


def outcomes(results: Sequence[Any]) -> list[str]:
    return [result.outcome.value for result in results]


def saved(tmp_path: Path, *steps: int, keep: Keep | None = None, **options) -> Job:
    job = Job(tmp_path, 2, keep=keep, **options)
    for step in steps:
        save(job, step)
    return job


def save(job: Job, step: int, **metrics: float) -> SetId:
    results = job.save(step, parts_=parts(metrics=metrics))
    assert [r.outcome.value for r in results] == ["committed"] * 2, results[0].message
    return [id for id, _ in committed_sets(job.store) if id.step == step][-1]


def step_dirs(store: LocalStore) -> list[str]:
    return [name for name in store.list_dir() if layout.parse_term_file(name) is None]
