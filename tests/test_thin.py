"""Weights-only sets: what they hold, where they rank, and that the full set is never touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sharded_ckpt import reader, tree
from sharded_ckpt.engine import Engine, select_engine
from sharded_ckpt.errors import ShardError, StoreError, UsageError
from sharded_ckpt.layout import SetId
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.reader_verify import verify_set
from sharded_ckpt.store import LocalStore, StoreUncertain
from sharded_ckpt.thin import Thinner
from tests.make_set import make_set


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = select_engine(request.param)
    yield made
    made.close()


def full_set(directory: Path, **changes: object):  # type: ignore[no-untyped-def]
    tensors = {
        "master/w": torch.randn(30_000, 70),
        "model/frozen": torch.randn(31).to(torch.bfloat16),
        "optim/w/exp_avg": torch.randn(30_000, 70),
    }
    manifest = make_set(
        directory,
        tensors,
        step=40,
        world_size=3,
        copies={"buffer/mean": torch.ones(4), "optim/w/step": np.float32(12)},
        overrides={"model/w": [(5, torch.randn(8).to(torch.bfloat16))]},
        model_dtypes="BF16",
        client_state={"epoch": 2, "seen": torch.arange(5)},
        state={"lr": 0.5},
        rank_state=lambda rank: {"rng": torch.arange(1000)},
        aliases={"head": "w"},
        metrics={"loss": 1.5},
        **changes,  # type: ignore[arg-type]
    )
    return manifest, tensors


@pytest.mark.parametrize("chunk_nbytes", [4096, 4 << 20])
def test_p6_only_weights_are_kept_bit_for_bit(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, chunk_nbytes: int
) -> None:
    # Small chunks, and the smallest arena: the ring goes round, in the middle of tensors.
    arena = engine.arena
    monkeypatch.setattr(engine, "arena", lambda nbytes: arena(4096))
    if chunk_nbytes > 4096:
        monkeypatch.undo()
    full, tensors = full_set(tmp_path, chunk_nbytes=chunk_nbytes)
    store = LocalStore(tmp_path)
    new = SetId.new(step=40, term=1, serial=2)
    made = Thinner(store, engine)(full, new)
    assert verify_set(store, engine, made) == []
    assert verify_set(store, engine, full) == []
    assert (made.content, made.origin, made.rank_key) == ("weights", full.id, full.rank_key)
    assert (made.aliases, made.metrics, made.layout) == (full.aliases, full.metrics, full.layout)
    shards = ShardReader(store, engine, made.id, made)
    assert set(shards.entries()) == {
        "master/w",
        "model/w",
        "model/frozen",
        "buffer/mean",
        "state/client_state.seen",
    }
    for name in ("master/w", "model/frozen"):
        assert torch.equal(shards.tensor(name), tensors[name])
    assert shards.entries()["master/w"].model_dtype == "BF16"
    client = tree.decode(made.client_state, shards.tensor_of(0))
    assert (client["epoch"], client["seen"].tolist()) == (2, [0, 1, 2, 3, 4])
    assert made.nbytes < full.nbytes
    found = reader.resolve(store)
    assert found is not None and found[0] == full.id


def test_p6_a_damaged_full_set_leaves_nothing_half_made(tmp_path: Path, engine: Engine) -> None:
    full, _ = full_set(tmp_path)
    ref = full.shards[1]
    data = bytearray((tmp_path / ref.path).read_bytes())
    data[ref.header_nbytes + 50] ^= 1
    (tmp_path / ref.path).write_bytes(data)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ShardError):
        Thinner(LocalStore(tmp_path), engine)(full, SetId.new(step=40, term=1, serial=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_p6_nothing_is_removed_when_the_commit_is_uncertain(tmp_path: Path, engine: Engine) -> None:
    class Uncertain(LocalStore):
        def publish(self, name: str, data: bytes) -> None:
            super().publish(name, data)
            raise StoreUncertain("fsync", name, 5)

    full, _ = full_set(tmp_path)
    store = Uncertain(tmp_path)
    new = SetId.new(step=40, term=1, serial=2)
    with pytest.raises(StoreError):
        Thinner(store, engine)(full, new)
    found = dict(reader.candidates(store, 40))
    assert verify_set(store, engine, found[new]) == []  # type: ignore[arg-type]


def test_what_cannot_be_thinned_is_refused(tmp_path: Path, engine: Engine) -> None:
    full, _ = full_set(tmp_path)
    thinner = Thinner(LocalStore(tmp_path), engine)
    with pytest.raises(UsageError, match="step 41"):
        thinner(full, SetId.new(step=41, term=1, serial=2))
    made = thinner(full, SetId.new(step=40, term=1, serial=2))
    with pytest.raises(UsageError, match="weights only already"):
        thinner(made, SetId.new(step=40, term=1, serial=3))
