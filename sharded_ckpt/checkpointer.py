"""``ShardedCheckpointer``: the one object that a training script talks to."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharded_ckpt import capture, reader, retention, thin
from sharded_ckpt.coordinator import Coordinator
from sharded_ckpt.device import CopyStream
from sharded_ckpt.engine import select_engine
from sharded_ckpt.errors import (
    CheckpointError,
    ClosedError,
    StepNotFound,
    UsageError,
)
from sharded_ckpt.events import Emitter, Event
from sharded_ckpt.group import group_from_torch
from sharded_ckpt.handle import LoadResult, SaveHandle
from sharded_ckpt.keep import Committed, Keep
from sharded_ckpt.layout import MAX_STEP
from sharded_ckpt.loader import Loader
from sharded_ckpt.opening import open_directory
from sharded_ckpt.pending import PendingSaves
from sharded_ckpt.policy import SaveEvery
from sharded_ckpt.saver import RankSave, Saver
from sharded_ckpt.schedule import BusyVote, Schedule
from sharded_ckpt.shard import CHUNK_NBYTES
from sharded_ckpt.sources.base import Parts, Source
from sharded_ckpt.sources.select import select_source
from sharded_ckpt.staging import StagingPool

log = logging.getLogger(__name__)

_instances = 0


class ShardedCheckpointer:
    """Saves and loads the sharded training state of one engine or model in one directory.

    Every rank of the job constructs one, with the same arguments, and calls ``should_save``,
    ``save``, ``load`` and ``close`` together with the others.

    Args:
        engine_or_model: a DeepSpeed engine; or an ``nn.Module`` (FSDP2, DDP or plain) together
            with ``optimizer`` and, if there is one, ``scheduler``.
        directory: where steps are kept; on a file system that all ranks share.
        optimizer: the ``torch.optim.Optimizer`` of a bare model; not with a DeepSpeed engine.
        scheduler: anything with ``state_dict``/``load_state_dict``; not with a DeepSpeed engine.
        stateful: further objects with ``state_dict``/``load_state_dict`` by name, such as a
            ``StatefulDataLoader``; saved and restored on each rank for itself.
        save_every: when ``should_save`` says yes: a :class:`SaveEvery`, or a number of steps.
        keep: which committed steps stay: a :class:`Keep`; by default all of them.
        snapshot: ``"lazy"`` copies beside the next forward and backward and holds only the
            optimizer back until the copies are done; ``"blocking"`` copies before ``save`` returns.
        buffers: staging buffers, each as large as this rank's shard.
        staging_nbytes: upper bound in bytes on all staging buffers together; a larger shard then
            streams through them and the snapshot takes as long as the disk does.
        when_busy: what ``save`` does when no buffer is free: ``"wait"``, or ``"skip"`` the step on
            all ranks.
        max_failures: failed saves in a row after which ``save`` raises the last one's error.
        timeout_s: seconds from the call of ``save`` to the verdict; also the deadline of every
            exchange between ranks.
        on_event: callables that receive an :class:`Event` for each state of a save.
        check_snapshot: compare checksums of the sources at the call with the staged bytes, and
            name the tensor that something changed in between.
        read_only: claim no term; ``save`` is refused. For evaluation beside a running job.

    Raises:
        UnsupportedError: the training mode cannot be captured exactly; the message names it.
        UsageError: arguments that cannot be right, that differ between ranks, or a directory that
            is not the same for all ranks.
    """

    def __init__(
        self,
        engine_or_model: Any,
        directory: str | os.PathLike[str],
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        stateful: Mapping[str, Any] | None = None,
        save_every: SaveEvery | int | None = None,
        keep: Keep | None = None,
        snapshot: str = "lazy",
        buffers: int = 2,
        staging_nbytes: int | None = None,
        when_busy: str = "wait",
        max_failures: int = 3,
        timeout_s: float = 600.0,
        on_event: Callable[[Event], None] | Sequence[Callable[[Event], None]] = (),
        check_snapshot: bool = False,
        read_only: bool = False,
        _stream: CopyStream | None = None,
    ) -> None:
        global _instances
        _check_choice("snapshot", snapshot, ("lazy", "blocking"))
        _check_choice("when_busy", when_busy, ("wait", "skip"))
        if timeout_s <= 0 or max_failures < 1:
            raise UsageError(
                f"timeout_s must be positive and max_failures at least 1, "
                f"got {timeout_s} and {max_failures}"
            )
        if check_snapshot and staging_nbytes is not None:
            raise UsageError("check_snapshot needs the whole shard staged: drop staging_nbytes")
        self._stateful = capture.checked_stateful(stateful)
        policy = SaveEvery(steps=save_every) if isinstance(save_every, int) else save_every
        self._keep = keep if keep is not None else Keep()
        self._source: Source = select_source(engine_or_model, optimizer, scheduler)
        self._snapshot_mode = snapshot
        self._when_busy = when_busy
        self._timeout_s = float(timeout_s)
        self._read_only = read_only
        self._check_snapshot = check_snapshot
        self._pid = os.getpid()
        self._closed = False
        self._saver: Saver | None = None
        self._coordinator: Coordinator | None = None
        self._pending = PendingSaves(max_failures)
        self._prepared = False

        callbacks = [on_event] if callable(on_event) else list(on_event)
        self._emitter = Emitter(callbacks)
        _instances += 1
        self._group = group_from_torch(str(_instances))
        self._schedule = Schedule(policy, self._group, self._timeout_s)
        self._busy = BusyVote(self._group, self._timeout_s)
        self._engine = select_engine()
        self._pool = StagingPool(
            self._engine, buffers=buffers, staging_nbytes=staging_nbytes, stream=_stream
        )
        self._pool.check_limit(CHUNK_NBYTES)
        options = json.dumps(
            {
                "snapshot": snapshot,
                "when_busy": when_busy,
                "timeout_s": self._timeout_s,
                "read_only": read_only,
                "buffers": buffers,
                "max_failures": max_failures,
                "stateful": sorted(self._stateful),
                "save_every": repr(policy),
                "layout": self._source.describe(),
            },
            sort_keys=True,
        )
        try:
            opened = open_directory(
                os.path.abspath(os.fspath(directory)),
                self._group,
                options=options,
                read_only=read_only,
                timeout_s=self._timeout_s,
            )
        except BaseException:
            self._engine.close()
            self._group.close()
            raise
        self._store = opened.store
        self._term = opened.term
        self._run_id = opened.run_id
        self._loader = Loader(
            store=self._store,
            group=self._group,
            engine=self._engine,
            source=self._source,
            stateful=self._stateful,
            timeout_s=self._timeout_s,
        )
        self._remove_fence = self._source.install_fence(self.fence)
        # Background threads are daemons and still run then: a pending save is finished.
        atexit.register(self._at_exit)

    # -- when --------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """Absolute path of the checkpoint directory."""
        return Path(self._store.path(""))

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop after the step just saved (preemption)."""
        return self._schedule.stop

    def should_save(self, step: int) -> bool:
        """Whether ``step`` (the number of finished training steps) is to be saved now.

        Every rank calls it once after each step, and all get the same answer: policies that look
        at a clock, and signals, are decided on rank 0 and announced. Raises :class:`GroupTimeout`
        when rank 0 does not announce within the deadline.
        """
        self._check_open()
        self._prepare_staging()
        return self._schedule.due(step)

    def install_signal_handlers(self) -> None:
        """Makes SIGTERM and SIGUSR1 on any rank save the next step and set ``should_stop``.

        Call it on every rank, from the main thread. Ranks agree through ``should_save``, so the
        training loop must call that after every step.
        """
        self._check_open()
        self._schedule.install_signal_handlers()

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        client_state: Any = None,
        metrics: Mapping[str, float] | None = None,
        _tag: str | None = None,
    ) -> SaveHandle:
        """Snapshots this rank's state as ``step`` and returns while it is still being written.

        ``client_state`` is a tree of plain values (see docs/format.md), kept for each rank;
        ``metrics`` are numbers that ``Keep(best=...)`` ranks by (rank 0's are kept). Every rank
        calls with the same ``step``.

        Raises :class:`UsageError` off a gradient-accumulation boundary, :class:`StateTypeError`
        for a value that the format does not hold, :class:`SaveError` when ``max_failures`` saves
        in a row have failed, :class:`ClosedError`. Failures in the background are logged, and
        raised by ``SaveHandle.wait()`` and ``close()``.
        """
        self._check_open()
        if self._read_only:
            raise UsageError("save: this checkpointer was opened with read_only=True")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
            raise UsageError(f"save: step must be an int from 0 to {MAX_STEP}, got {step!r}")
        begun = time.monotonic()
        self._pending.raise_repeated()
        handle = SaveHandle(step)
        saver = self._started_saver()
        if self._when_busy == "skip" and self._busy.anywhere(step, self._pool.busy()):
            log.warning("step %d was not saved: every staging buffer is still being written", step)
            self._emit("skipped", step)
            handle.skipped = True
            handle._collected = True
            handle._finish(None, None)
            return handle
        save = RankSave(saver.ballot(step), handle, deadline=begun + self._timeout_s)
        try:
            self._begin(saver, save, client_state, metrics, _tag)
        except BaseException as error:
            # The other ranks are told through a NO vote; this one hears it right here.
            save.error = error
            handle._collected = True
            saver.submit(save)
            self._pending.add(save)
            self._schedule.saved(step)  # as on the ranks where it began well
            raise
        saver.submit(save)
        self._pending.add(save)
        if self._snapshot_mode == "blocking":
            self._pending.fence(block=True)
        self._schedule.saved(step)
        self._schedule.cost(time.monotonic() - begun)
        return handle

    def _begin(
        self,
        saver: Saver,
        save: RankSave,
        client_state: Any,
        metrics: Mapping[str, float] | None,
        tag: str | None,
    ) -> None:
        self._source.check_can_save()
        # Everything that can be refused is refused before a byte is copied.
        slices, captured = capture.capture(self._source, self._stateful, client_state, metrics, tag)
        saver.begin(save, slices, captured)

    def fence(self) -> None:
        """Returns once everything that was being copied may be changed.

        The optimizer's step calls this by itself. Call it before changing parameters, buffers or
        optimizer state in any other way (weight clipping, EMA). A failed copy does not raise here:
        training goes on, and the save ends with the error.
        """
        begun = time.monotonic()
        if self._pending.fence() and self._snapshot_mode == "lazy":
            self._schedule.cost(time.monotonic() - begun, more=True)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until every save so far has ended; raises the first error among them."""
        self._check_open()
        self._pending.drain(timeout_s)

    def close(self) -> None:
        """Finishes pending saves, stops all threads, and gives the staging memory back.

        Raises the error of a failed save that nobody has seen yet. A second call does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        with contextlib.ExitStack() as stack:
            # In reverse order, each of them whatever happens to the others.
            stack.callback(self._group.close)
            stack.callback(self._emitter.close)
            stack.callback(self._pool.close)
            stack.callback(self._engine.close)
            if self._saver is not None:
                stack.callback(self._saver.close, self._timeout_s)
            stack.callback(self._schedule.close)
            stack.callback(self._remove_fence)
            self._pending.drain()

    def __enter__(self) -> ShardedCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
            return
        # The exception under way says more than a save that failed because of it.
        with contextlib.suppress(CheckpointError):
            self.close()

    # -- loading -----------------------------------------------------------------------------

    def load(
        self,
        step: int | None = None,
        *,
        weights: bool = True,
        optimizer: bool = True,
        scheduler: bool = True,
        rng: bool = True,
        data: bool = True,
        strict: bool = True,
        on_corrupt: str = "raise",
    ) -> LoadResult:
        """Fills the live objects from a committed step: the newest, or ``step``.

        With nothing committed and no explicit ``step``, returns ``LoadResult(step=0)`` and leaves
        everything as it is. Each piece may be left out. ``on_corrupt="fallback"`` takes the next
        older step when the newest is damaged. Pending saves of this process are finished first.

        Raises :class:`StepNotFound`, :class:`LayoutMismatch`, :class:`StateMismatch`,
        :class:`CorruptError`; every rank raises when one does.
        """
        self._check_open()
        _check_choice("on_corrupt", on_corrupt, ("raise", "fallback"))
        self._pending.drain(raise_errors=False)
        parts = Parts(weights, optimizer, scheduler, rng, data, strict)
        begun = time.time()
        result = self._loader.load(step, parts, fallback=on_corrupt == "fallback")
        self._schedule.saved(result.step)
        self._emit("loaded", result.step, result.loaded.get("nbytes", 0), begun)
        return result

    def all_steps(self) -> list[int]:
        """Committed steps, oldest first by ``(term, serial)``; read from the directory."""
        return [c.id.step for c in self._committed()]

    def latest_step(self) -> int | None:
        """The step that ``load()`` would take, or ``None``."""
        full = [c for c in self._committed() if c.content == "full"]
        return full[-1].id.step if full else None

    def best_step(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """The committed step with the best ``metric`` (those of ``keep`` by default)."""
        name = metric if metric is not None else self._keep.metric
        if name is None:
            raise UsageError("best_step: name a metric, here or in Keep(metric=...)")
        return retention.best_step(self._committed(), name, mode or self._keep.mode)

    def pin(self, step: int, note: str = "") -> None:
        """Keeps ``step`` whatever the policy says, until :meth:`unpin`. Acts on rank 0."""
        if self._source.rank == 0:
            retention.pin(self._store, self._id_of(step), note)

    def unpin(self, step: int) -> None:
        """Gives ``step`` back to the policy. Acts on rank 0."""
        if self._source.rank == 0:
            # A step that was saved again after a rollback has several sets.
            for committed in self._committed():
                if committed.id.step == step and committed.pinned:
                    retention.unpin(self._store, committed.id)

    def delete(self, step: int) -> None:
        """Deletes ``step``, manifest first. Acts on rank 0. Refuses the newest and pinned steps."""
        if self._source.rank == 0:
            retention.delete(self._store, self._id_of(step))

    def install(self, engine: Any) -> None:
        """Routes ``engine.save_checkpoint`` and ``engine.load_checkpoint`` of DeepSpeed here."""
        from sharded_ckpt.integrations.deepspeed import install

        install(self, engine)

    def _committed(self) -> list[Committed]:
        return retention.readable_sets(self._store)

    def _id_of(self, step: int) -> Any:
        found = reader.resolve(self._store, step=step)
        if found is None:
            raise StepNotFound(f"no committed step {step} in {self.directory}")
        return found[0]

    # -- inside ------------------------------------------------------------------------------

    def _prepare_staging(self) -> None:
        """Allocates staging memory in the background, so that the first save finds it ready."""
        if self._prepared or self._read_only:
            return
        self._prepared = True
        try:
            slices = self._source.slices()
        except CheckpointError:
            return  # not a moment to save, so none to measure; the save itself allocates
        self._pool.prepare(slices)

    def _started_saver(self) -> Saver:
        if self._saver is None:
            if self._group.rank == 0:
                self._coordinator = Coordinator(
                    self._store,
                    self._group.clone(),
                    term=self._term,
                    run_id=self._run_id,
                    timeout_s=self._timeout_s,
                    emitter=self._emitter,
                    retention=retention.Retention(
                        self._store,
                        self._keep,
                        term=self._term,
                        emitter=self._emitter,
                        thin=thin.Thinner(self._store, self._engine),
                    ),
                )
            self._saver = Saver(
                store=self._store,
                group=self._group,
                pool=self._pool,
                emitter=self._emitter,
                coordinator=self._coordinator,
                timeout_s=self._timeout_s,
                check_snapshot=self._check_snapshot,
            )
        return self._saver

    def _emit(self, kind: str, step: int, nbytes: int = 0, begun: float | None = None) -> None:
        now = time.time()
        start = now if begun is None else begun
        self._emitter.emit(
            Event(
                kind=kind,
                step=step,
                rank=self._source.rank,
                term=self._term,
                serial=0,
                nbytes=nbytes,
                seconds=now - start,
                t_start=start,
                detail={},
            )
        )

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this checkpointer belongs to the process that made it, not to a forked child "
                "(a DataLoader worker, say)"
            )
        if self._closed:
            raise ClosedError("this checkpointer is closed")

    def _at_exit(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        unfinished = self._pending.unfinished_steps()
        if unfinished:
            log.error(
                "the program ends without close(): finishing the saves of steps %s", unfinished
            )
        try:
            self.close()
        except CheckpointError as error:
            log.error("a save failed and nobody had asked: %s", error)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
