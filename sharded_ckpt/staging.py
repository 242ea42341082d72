"""Staging buffers: where a snapshot lives in host memory while it is written.

DESIGN. A rank owns a few buffers (two by default): one is being written while the next snapshot is
taken. A buffer holds one arena of the engine's, as large as the shard, or smaller: then the shard
streams through it as a ring of chunks, and a snapshot takes as long as the disk does.

Who copies: host tensors are copied by the engine's threads, straight from their own memory. Device
tensors are copied on a side stream (device.py); a *stager* thread waits for each batch's event and
tells the engine how far the arena is filled.

A buffer moves FREE -> STAGING -> DRAINING -> FREE. STAGING ends when every source has been copied:
from then on training may change them. DRAINING ends when the file is durable or has failed.
"""

from __future__ import annotations

import enum
import errno
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sharded_ckpt.device import CopyStream, Mark, host_bytes, stream_for
from sharded_ckpt.engine import Arena, Engine, Job
from sharded_ckpt.engine_types import RELEASE_TIMEOUT_S
from sharded_ckpt.errors import (
    CheckpointError,
    SaveTimeout,
    StoreError,
    UnsupportedError,
    UsageError,
)
from sharded_ckpt.shard import CHUNK_NBYTES, ShardPlan
from sharded_ckpt.slices import Slice

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Device copies are marked once per this many bytes: often enough that checksums and writes start
# early, rarely enough that thousands of small tensors share one event.
MARK_NBYTES = 64 << 20


# Host tensors up to this size are copied at the call.
SMALL_NBYTES = 64 << 10

# (flat uint8 view of a source, position in the data part, nbytes)
_Piece = tuple[Any, int, int]


class BufferState(enum.Enum):
    FREE = "free"  # nobody uses it
    STAGING = "staging"  # copies into it are running; sources must not change
    DRAINING = "draining"  # holds a whole snapshot (or its tail) that is being written


_TRANSITIONS: dict[BufferState, frozenset[BufferState]] = {
    BufferState.FREE: frozenset({BufferState.STAGING}),
    BufferState.STAGING: frozenset({BufferState.DRAINING, BufferState.FREE}),
    BufferState.DRAINING: frozenset({BufferState.FREE}),
}


@dataclass(slots=True)
class Buffer:
    """One staging buffer. Its arena is allocated on first use, and again for a larger shard."""

    index: int
    arena: Arena | None = None
    locked: bool = False  # page-locked for device copies
    state: BufferState = BufferState.FREE

    def move(self, new: BufferState) -> None:
        if new not in _TRANSITIONS[self.state]:
            raise AssertionError(f"staging buffer {self.index}: {self.state} -> {new}")
        self.state = new


@dataclass(slots=True)
class Snapshot:
    """One shard's bytes on their way from live tensors to the engine's file."""

    plan: ShardPlan
    job: Job
    buffer: Buffer
    # Live tensors and eager clones; held until the engine has read them.
    sources: list[Any] = field(default_factory=list)
    # Whether the engine's threads read host tensors that training will change.
    reads_live_host: bool = True
    stream: CopyStream | None = None
    last_mark: Mark | None = None  # behind all device copies; set once they are all queued
    queued: threading.Event = field(default_factory=threading.Event)
    stager: threading.Thread | None = None  # waits for device copies, one of them at a time
    released: bool = False  # every source has been copied, or never will be
    error: BaseException | None = None

    def staged(self) -> bool:
        """Whether every source has been copied, or nothing is copied any more. Never blocks."""
        if self.released:
            return True
        if self.stream is not None and not self._device_copied():
            return False
        try:
            return not self.reads_live_host or self.job.wait_staged(0)
        except CheckpointError:
            return True  # a failed job reads no source

    def fence(self, deadline: float, *, block: bool = False) -> None:
        """Returns once training may change the sources.

        Host copies are waited for. For device copies the compute stream is made to wait and the
        host is not, unless ``block`` asks for it or they still stream through a ring. Every call
        makes the stream wait that is current then, until the copies are done. Raises
        :class:`SaveTimeout` at the deadline (monotonic seconds), and the error of the copy.
        """
        if self.released:
            return
        if self.stream is not None:
            if not self.queued.wait(max(0.0, deadline - time.monotonic())):
                raise SaveTimeout("device copies of the snapshot were not queued by the deadline")
            if self.error is not None:
                raise self.error
            assert self.last_mark is not None
            if block:
                self.last_mark.wait()
            elif not self.last_mark.reached():
                self.stream.hold_compute(self.last_mark)
        if self.reads_live_host and not self.job.wait_staged(max(0.0, deadline - time.monotonic())):
            raise SaveTimeout(
                "the snapshot was not copied by the deadline; the optimizer step waits for it"
            )
        self.released = self.stream is None or self._device_copied()

    def let_go(self) -> None:
        """Ends every use of sources and arena; the job has ended or was cancelled before.

        Raises :class:`StoreError` while a thread or a device copy still uses them: the buffer must
        not be given to another save then.
        """
        self.job.release()
        if self.stager is not None:
            self.stager.join(RELEASE_TIMEOUT_S)
            if self.stager.is_alive():
                raise StoreError(
                    "release staging buffer",
                    str(self.buffer.index),
                    errno.ETIMEDOUT,
                    "device copies into it do not end",
                )
        if self.last_mark is not None:
            self.last_mark.wait()
        self.sources.clear()
        self.released = True

    def _device_copied(self) -> bool:
        return self.queued.is_set() and self.last_mark is not None and self.last_mark.reached()


class StagingPool:
    """The staging buffers of one rank."""

    def __init__(
        self,
        engine: Engine,
        *,
        buffers: int,
        staging_nbytes: int | None,
        stream: CopyStream | None = None,
    ) -> None:
        if buffers < 1:
            raise UsageError(f"buffers must be at least 1, got {buffers}")
        self._engine = engine
        self._limit = None if staging_nbytes is None else staging_nbytes // buffers
        self._buffers = [Buffer(i) for i in range(buffers)]
        self._changed = threading.Condition()
        self._forced_stream = stream
        self._streams: dict[str, CopyStream | None] = {}
        self._preparing: threading.Thread | None = None
        self._lost: list[Snapshot] = []

    @property
    def nbytes(self) -> int:
        """Host memory held by the buffers."""
        return sum(b.arena.nbytes for b in self._buffers if b.arena is not None)

    def check_limit(self, chunk_nbytes: int) -> None:
        """Raises :class:`UsageError` when ``staging_nbytes`` cannot hold two chunks a buffer."""
        if self._limit is not None and self._limit < 2 * chunk_nbytes:
            need = 2 * chunk_nbytes * len(self._buffers)
            raise UsageError(
                f"staging_nbytes={self._limit * len(self._buffers)} is too small: "
                f"{len(self._buffers)} buffers of two {chunk_nbytes}-byte chunks need {need}"
            )

    def prepare(self, slices: Sequence[Slice]) -> threading.Thread:
        """Allocates every buffer for a shard of these slices, in a thread that it returns.

        Touching fresh memory costs more than copying into it. One chunk is added for what a save
        brings besides (generators, client state).
        """
        device = any(self._stream_of(item.tensor) is not None for item in slices if not item.eager)
        sizes = [item.tensor.numel() * item.tensor.element_size() for item in slices]
        nbytes = sum(sizes) + CHUNK_NBYTES

        def allocate() -> None:
            taken = []
            while (buffer := self.acquire(timeout_s=0)) is not None:
                taken.append(buffer)
            for buffer in taken:
                try:
                    self._fit(buffer, nbytes, CHUNK_NBYTES, device)
                except CheckpointError as error:
                    log.debug("staging memory is left to the first save: %s", error)
                finally:
                    self.release(buffer)

        self._preparing = threading.Thread(
            target=allocate, name="sharded_ckpt-prepare", daemon=True
        )
        self._preparing.start()
        return self._preparing

    def acquire(self, timeout_s: float) -> Buffer | None:
        """A free buffer, now in state STAGING, or ``None`` when none gets free in time.

        Raises :class:`StoreError` when all buffers are held by devices that do not let go.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._take_back()
                if len(self._lost) == len(self._buffers):
                    raise StoreError(
                        "take a staging buffer",
                        "",
                        errno.EBUSY,
                        f"all {len(self._buffers)} are held by files or devices that do not let go",
                    )
                for buffer in self._buffers:
                    if buffer.state is BufferState.FREE:
                        buffer.move(BufferState.STAGING)
                        return buffer
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None

    def give_up(self, snapshot: Snapshot) -> None:
        """Keeps a buffer whose file or device does not let go of it, until it does."""
        with self._changed:
            self._lost.append(snapshot)

    def _take_back(self) -> None:
        """Frees buffers that were given up and are quiet now. Called with the lock held."""
        for snapshot in list(self._lost):
            try:
                snapshot.job.release(0)
            except CheckpointError:
                continue
            if snapshot.stager is not None and snapshot.stager.is_alive():
                continue
            self._lost.remove(snapshot)
            snapshot.released = True
            snapshot.buffer.move(BufferState.FREE)

    def release(self, buffer: Buffer) -> None:
        with self._changed:
            buffer.move(BufferState.FREE)
            self._changed.notify_all()

    def busy(self) -> bool:
        if self._preparing is not None:
            self._preparing.join()  # it only allocates, and ends
        with self._changed:
            self._take_back()
            return all(b.state is not BufferState.FREE for b in self._buffers)

    def start(self, buffer: Buffer, slices: Sequence[Slice], plan: ShardPlan) -> Snapshot:
        """Begins to copy ``slices`` (in the plan's file order) into ``buffer``.

        Eager slices are cloned before this returns. Everything else may still be read until
        :meth:`Snapshot.fence` returns.
        """
        sources: list[Any] = []
        addresses: list[tuple[int, int]] = []
        stream: CopyStream | None = None
        reads_live_host = False
        for item in slices:
            tensor = item.tensor.detach()
            nbytes = tensor.numel() * tensor.element_size()
            # Small host tensors (step counters) are cloned: on a machine with a device the fence
            # would otherwise wait for all copies because of them.
            small = nbytes <= SMALL_NBYTES and tensor.device.type == "cpu"
            if item.eager or small:
                tensor = tensor.to("cpu", copy=True)
            of_tensor = self._stream_of(tensor)
            if of_tensor is not None:
                if stream is not None and of_tensor is not stream:
                    raise UnsupportedError(
                        f"{item.entry.name} is on {tensor.device}, other tensors of this rank on "
                        "another device: one rank saves from one device"
                    )
                stream = of_tensor
            elif nbytes and not (item.eager or small):
                reads_live_host = True
            sources.append(tensor)
            addresses.append((0 if of_tensor is not None else tensor.data_ptr(), nbytes))
        self._fit(buffer, plan.data_nbytes, plan.chunk_nbytes, device=stream is not None)
        assert buffer.arena is not None
        job = self._engine.start(buffer.arena, addresses, chunk_nbytes=plan.chunk_nbytes)
        snapshot = Snapshot(plan, job, buffer, sources, reads_live_host, stream)
        if stream is None:
            snapshot.queued.set()
            return snapshot
        try:
            self._start_device(snapshot, stream, _device_pieces(sources, addresses, plan))
        except BaseException:
            # The sources must outlive the threads that read them.
            job.cancel()
            snapshot.let_go()
            raise
        return snapshot

    def _start_device(
        self, snapshot: Snapshot, stream: CopyStream, pieces: Sequence[_Piece]
    ) -> None:
        plan, arena = snapshot.plan, snapshot.buffer.arena
        assert arena is not None
        stream.begin()
        work: Any = pieces
        if plan.data_nbytes <= arena.nbytes:
            # Everything fits: queue all copies now, from the training thread, and let the stager
            # only wait for their marks. The host does not wait for the device here.
            work = _queue(stream, arena, pieces, plan)
            snapshot.last_mark = work[-1][1] if work else stream.mark()
            snapshot.queued.set()
        snapshot.stager = threading.Thread(
            target=_stage, args=(snapshot, work), name="sharded_ckpt-stager", daemon=True
        )
        snapshot.stager.start()

    def drain(self, snapshot: Snapshot) -> None:
        """Marks that all sources are copied; the buffer is now only read."""
        with self._changed:
            snapshot.buffer.move(BufferState.DRAINING)

    def close(self) -> None:
        """Gives the memory back. Buffers whose device copies never ended stay page-locked."""
        if self._preparing is not None:
            self._preparing.join()
        lost = {snapshot.buffer.index for snapshot in self._lost}
        for buffer in self._buffers:
            if buffer.index in lost:
                continue
            self._unlock(buffer)
            buffer.arena = None

    def _stream_of(self, tensor: torch.Tensor) -> CopyStream | None:
        if self._forced_stream is not None:
            return self._forced_stream
        key = str(tensor.device)
        if key not in self._streams:
            self._streams[key] = stream_for(tensor.device)
        return self._streams[key]

    def _fit(self, buffer: Buffer, nbytes: int, chunk_nbytes: int, device: bool) -> None:
        wanted = max(nbytes, 1)
        if self._limit is not None and wanted > self._limit:
            wanted = self._limit // chunk_nbytes * chunk_nbytes
        if buffer.arena is None or buffer.arena.nbytes < wanted:
            self._unlock(buffer)
            buffer.arena = None  # freed first: two arenas at once would break the memory bound
            buffer.arena = self._engine.arena(wanted)
        if device and not buffer.locked:
            self._locker().page_lock(buffer.arena.address, buffer.arena.nbytes)
            buffer.locked = True

    def _locker(self) -> CopyStream:
        if self._forced_stream is not None:
            return self._forced_stream
        return next(s for s in self._streams.values() if s is not None)

    def _unlock(self, buffer: Buffer) -> None:
        if buffer.locked and buffer.arena is not None:
            self._locker().page_unlock(buffer.arena.address)
            buffer.locked = False


def _device_pieces(
    sources: Sequence[Any], addresses: Sequence[tuple[int, int]], plan: ShardPlan
) -> list[_Piece]:
    """Device sources cut at chunk borders, so that each piece lies in one slot of a ring."""
    import torch

    pieces: list[_Piece] = []
    for tensor, (address, nbytes), start in zip(sources, addresses, plan.offsets, strict=True):
        if address or not nbytes:
            continue
        flat = tensor.reshape(-1).view(torch.uint8)
        done = 0
        while done < nbytes:
            border = (start + done) // plan.chunk_nbytes * plan.chunk_nbytes + plan.chunk_nbytes
            step = min(nbytes - done, border - start - done)
            pieces.append((flat[done : done + step], start + done, step))
            done += step
    return pieces


def _queue(
    stream: CopyStream, arena: Arena, pieces: Sequence[_Piece], plan: ShardPlan
) -> list[tuple[int, Mark]]:
    """Queues copies; ``(offset below which the arena is filled, mark)`` for each batch."""
    memory = host_bytes(arena.address, arena.nbytes)
    slots = max(1, arena.nbytes // plan.chunk_nbytes)
    ring = plan.data_nbytes > arena.nbytes
    marks: list[tuple[int, Mark]] = []
    pending = 0
    for view, start, nbytes in pieces:
        at = start
        if ring:
            at = start // plan.chunk_nbytes % slots * plan.chunk_nbytes + start % plan.chunk_nbytes
        stream.copy(memory[at : at + nbytes], view)
        pending += nbytes
        if pending >= MARK_NBYTES:
            marks.append((start + nbytes, stream.mark()))
            pending = 0
    if pieces:
        marks.append((plan.data_nbytes, stream.mark()))
    return marks


def _stage(snapshot: Snapshot, work: Any) -> None:
    """Body of the stager thread of one snapshot with device sources."""
    job, stream, arena = snapshot.job, snapshot.stream, snapshot.buffer.arena
    assert stream is not None and arena is not None
    try:
        if snapshot.queued.is_set():
            for filled, mark in work:
                mark.wait()
                job.advance(filled)
        else:
            # A ring: each chunk waits until its slot has been written.
            plan = snapshot.plan
            for index, piece in enumerate(work):
                while not job.wait_slot_for(piece[1], timeout_s=1.0):
                    pass  # ends with the job's error when it fails or is cancelled
                _queue(stream, arena, [piece], plan)
                snapshot.last_mark = stream.mark()
                snapshot.last_mark.wait()
                following = work[index + 1][1] if index + 1 < len(work) else plan.data_nbytes
                job.advance(following)
        job.advance(snapshot.plan.data_nbytes)
    except CheckpointError as error:
        snapshot.error = error
    except Exception as error:
        log.exception("staging a snapshot failed")
        snapshot.error = error
        job.cancel()
    finally:
        if snapshot.last_mark is None:
            try:
                snapshot.last_mark = stream.mark()
            except Exception as error:  # a device that has failed altogether
                snapshot.error = snapshot.error or error
        snapshot.queued.set()
