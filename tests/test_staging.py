"""Staging buffers: who may use them when, and how much memory they take."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from sharded_ckpt.engine import select_engine
from sharded_ckpt.errors import UsageError
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
