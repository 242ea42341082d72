"""Staging buffers: who may use them when, and how much memory they take."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from sharded_ckpt.device import InlineStream
from sharded_ckpt.engine import select_engine
from sharded_ckpt.errors import StoreError, UnsupportedError, UsageError
from sharded_ckpt.shard import CHUNK_NBYTES, plan_shard
from sharded_ckpt.slices import Entry, Slice, whole
from sharded_ckpt.staging import _TRANSITIONS, Buffer, BufferState, StagingPool


@pytest.fixture
def engine() -> Any:
    made = select_engine()
    yield made
    made.close()


def a_slice(name: str, tensor: torch.Tensor, eager: bool = False) -> Slice:
    shape = tuple(tensor.shape)
    return Slice(Entry(name, "F32", shape, whole(shape)), tensor, eager)


def test_every_move_is_in_the_table_and_no_other_is_allowed() -> None:
    assert set(_TRANSITIONS) == set(BufferState)
    for old in BufferState:
        for new in BufferState:
            buffer = Buffer(0, state=old)
            if new in _TRANSITIONS[old]:
                buffer.move(new)
            else:
                with pytest.raises(AssertionError):
                    buffer.move(new)


def test_a_third_snapshot_waits_until_a_buffer_is_released(engine: Any) -> None:
    pool = StagingPool(engine, buffers=2, staging_nbytes=None)
    first, second = pool.acquire(1), pool.acquire(1)
    assert first is not None and second is not None and pool.busy()
    assert pool.acquire(0) is None
    begun = time.monotonic()
    assert pool.acquire(0.05) is None
    assert time.monotonic() - begun >= 0.05
    pool.release(first)
    assert pool.acquire(1) is first


def test_arenas_are_allocated_once_and_bounded(engine: Any) -> None:
    tensors = [a_slice(f"model/{i}", torch.full((CHUNK_NBYTES,), float(i))) for i in range(4)]
    plan = plan_shard([s.entry for s in tensors])
    pool = StagingPool(engine, buffers=2, staging_nbytes=6 * CHUNK_NBYTES)
    pool.prepare(tensors).join(30)
    assert 0 < pool.nbytes <= 6 * CHUNK_NBYTES < plan.data_nbytes
    before = [b.arena.address for b in pool._buffers if b.arena]
    pool.prepare(tensors).join(30)
    assert [b.arena.address for b in pool._buffers if b.arena] == before


def test_a_bound_too_small_for_two_chunks_a_buffer_is_refused(engine: Any) -> None:
    pool = StagingPool(engine, buffers=2, staging_nbytes=3 * CHUNK_NBYTES)
    with pytest.raises(UsageError, match=f"need {4 * CHUNK_NBYTES}"):
        pool.check_limit(CHUNK_NBYTES)


def test_eager_slices_are_cloned_before_start_returns(engine: Any) -> None:
    pool = StagingPool(engine, buffers=1, staging_nbytes=None)
    live = torch.arange(1000, dtype=torch.float32)
    expected = live.clone()
    item = a_slice("buffer/x", live, eager=True)
    plan = plan_shard([item.entry])
    buffer = pool.acquire(1)
    assert buffer is not None
    snapshot = pool.start(buffer, [item], plan)
    live.zero_()
    assert not snapshot.reads_live_host
    assert snapshot.job.wait_staged(10)
    assert buffer.arena is not None
    staged = torch.frombuffer(bytearray(buffer.arena.view(0, 4000)), dtype=torch.float32)
    assert torch.equal(staged, expected)
    snapshot.job.cancel()
    snapshot.job.release()


class GateMark:
    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def reached(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> None:
        assert self.gate.wait(30)


class GateStream(InlineStream):
    """A device whose copies end when the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.held: list[Any] = []

    def mark(self) -> Any:
        return GateMark(self.gate)

    def hold_compute(self, mark: Any) -> None:
        self.held.append(mark)


def started(engine: Any, stream: Any) -> tuple[StagingPool, Any]:
    pool = StagingPool(engine, buffers=1, staging_nbytes=None, stream=stream)
    item = a_slice("model/x", torch.ones(100_000))
    buffer = pool.acquire(1)
    assert buffer is not None
    return pool, pool.start(buffer, [item], plan_shard([item.entry]))


def test_a_fence_holds_the_compute_stream_at_every_call_and_never_the_host(engine: Any) -> None:
    stream = GateStream()
    _, snapshot = started(engine, stream)
    deadline = time.monotonic() + 30
    snapshot.fence(deadline)
    snapshot.fence(deadline)  # perhaps of another stream than the first
    assert len(stream.held) == 2 and not snapshot.staged()
    stream.gate.set()
    snapshot.fence(deadline, block=True)
    snapshot.fence(deadline)
    assert len(stream.held) == 2 and snapshot.staged()
    snapshot.job.cancel()
    snapshot.let_go()


def test_a_buffer_is_not_given_on_while_device_copies_into_it_are_under_way(engine: Any) -> None:
    stream = GateStream()
    pool, snapshot = started(engine, stream)
    snapshot.job.cancel()  # the save has failed; the device does not know
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (snapshot.let_go(), done.set()))
    waiter.start()
    assert not done.wait(0.2)
    assert snapshot.sources
    stream.gate.set()
    waiter.join(30)
    assert done.is_set() and not snapshot.sources
    pool.release(snapshot.buffer)


def test_a_given_up_buffer_comes_back_once_its_device_lets_go(engine: Any) -> None:
    stream = GateStream()
    pool, snapshot = started(engine, stream)
    snapshot.job.cancel()
    pool.give_up(snapshot)
    assert pool.busy()
    with pytest.raises(StoreError, match="do not let go"):
        pool.acquire(0)
    stream.gate.set()
    snapshot.stager.join(30)
    assert not pool.busy() and pool.acquire(1) is snapshot.buffer


def test_a_failure_to_queue_device_copies_leaves_the_buffer_usable(engine: Any) -> None:
    class Broken(InlineStream):
        def begin(self) -> None:
            raise RuntimeError("device lost")

    pool = StagingPool(engine, buffers=1, staging_nbytes=None, stream=Broken())
    item = a_slice("model/x", torch.ones(100_000))
    plan = plan_shard([item.entry])
    buffer = pool.acquire(1)
    assert buffer is not None
    with pytest.raises(RuntimeError, match="device lost"):
        pool.start(buffer, [item], plan)
    pool._forced_stream = InlineStream()
    snapshot = pool.start(buffer, [item], plan)  # the arena is not used by a job any more
    snapshot.fence(time.monotonic() + 30, block=True)
    snapshot.job.cancel()
    snapshot.let_go()


def test_tensors_on_two_devices_are_refused(engine: Any) -> None:
    pool = StagingPool(engine, buffers=1, staging_nbytes=None)
    streams = iter([InlineStream(), InlineStream()])
    pool._stream_of = lambda tensor: next(streams)  # type: ignore[method-assign]
    items = [a_slice("model/x", torch.ones(100_000)), a_slice("model/y", torch.ones(100_000))]
    buffer = pool.acquire(1)
    assert buffer is not None
    with pytest.raises(UnsupportedError, match="model/y"):
        pool.start(buffer, items, plan_shard([i.entry for i in items]))


def test_every_buffer_is_prepared(engine: Any) -> None:
    pool = StagingPool(engine, buffers=2, staging_nbytes=None)
    pool.prepare([a_slice("model/x", torch.ones(1000))]).join(30)
    assert all(buffer.arena is not None for buffer in pool._buffers)
    assert all(buffer.state is BufferState.FREE for buffer in pool._buffers)


def test_asking_a_failed_snapshot_whether_it_is_staged_does_not_raise(engine: Any) -> None:
    pool = StagingPool(engine, buffers=1, staging_nbytes=None)
    item = a_slice("model/x", torch.ones(100_000))
    buffer = pool.acquire(1)
    assert buffer is not None
    snapshot = pool.start(buffer, [item], plan_shard([item.entry]))
    snapshot.job.cancel()
    assert snapshot.staged()
    snapshot.let_go()
