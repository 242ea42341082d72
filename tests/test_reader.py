"""Reading sets: which one is loaded, every cut gives the same tensors, and damage is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sharded_ckpt import plan, reader, tree
from sharded_ckpt.engine import Engine, select_engine
from sharded_ckpt.errors import (
    CorruptError,
    ManifestError,
    ShardError,
    StateMismatch,
    StepNotFound,
    StoreError,
    UsageError,
)
from sharded_ckpt.layout import MANIFEST, SetId
from sharded_ckpt.plan_spans import clip, windows
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.reader_verify import verify_set
from sharded_ckpt.slices import Box, Entry, Run
from sharded_ckpt.store import LocalStore
from sharded_ckpt.thin import write_weights
from tests.make_set import CUTS, make_set

SHAPES = {"w": (13, 7), "b": (5,), "s": (), "e": (0, 3), "long": (3, 700)}


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = select_engine(request.param)
    yield made
    made.close()


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"master/{k}": torch.randn(v, generator=generator) for k, v in SHAPES.items()}
    made["model/frozen"] = torch.randn(9, 4, generator=generator).to(torch.bfloat16)
    made["model/count"] = torch.arange(11)
    return made


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_p5_tensors_come_back_from_every_cut(
    tmp_path: Path, engine: Engine, cut: str, world_size: int
) -> None:
    saved = tensors()
    # Chunks of 64 bytes: most reads begin and end inside one.
    manifest = make_set(tmp_path, saved, cut=cut, world_size=world_size, chunk_nbytes=64)
    shards = ShardReader(LocalStore(tmp_path), engine, manifest.id, manifest)
    assert set(shards.entries()) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(shards.tensor(name), tensor), name
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(shards.array(name), raw), name


def test_p5_any_region_is_read_from_any_cut(tmp_path: Path, engine: Engine) -> None:
    saved = {"master/w": torch.randn(12, 10)}
    for serial, cut in enumerate(CUTS, 1):
        manifest = make_set(tmp_path, saved, cut=cut, world_size=4, serial=serial)
        shards = ShardReader(LocalStore(tmp_path), engine, manifest.id, manifest)
        for region in (Run(17, 71), Run(0, 120), Box((3, 2), (8, 5)), Box((11, 0), (1, 10))):
            entry = Entry("master/w", "F32", (12, 10), region)
            got = torch.empty(entry.local_shape)
            reads = plan.reads([entry], shards.holdings(), prefer_file=None)
            assert shards.fill(reads, [got]) == got.nbytes
            if isinstance(region, Run):
                want = saved["master/w"].reshape(-1)[region.start : region.start + region.numel]
            else:
                rows, cols = (
                    slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True)
                )
                want = saved["master/w"][rows, cols]
            assert torch.equal(got.reshape(want.shape), want), (cut, region)


def test_a_rank_gets_its_own_copy_and_its_own_state(tmp_path: Path, engine: Engine) -> None:
    manifest = make_set(
        tmp_path,
        {"master/w": torch.ones(4)},
        world_size=3,
        copies={"buffer/seen": [np.int64(10), np.int64(11), np.int64(12)]},
        rank_state=lambda rank: {"rng": torch.tensor([rank])},
        client_state={"epoch": 3, "table": torch.arange(4)},
    )
    shards = ShardReader(LocalStore(tmp_path), engine, manifest.id, manifest)
    for rank in range(3):
        assert shards.tensor("buffer/seen", rank=rank) == 10 + rank
        state = tree.decode(shards.state_tree(rank), shards.tensor_of(rank))
        assert state["rng"].tolist() == [rank]
    assert shards.state_tree(3) is None
    client = tree.decode(manifest.client_state, shards.tensor_of(0))
    assert (client["epoch"], client["table"].tolist()) == (3, [0, 1, 2, 3])


def test_a_destination_that_does_not_fit_is_refused_before_it_is_touched(
    tmp_path: Path, engine: Engine
) -> None:
    manifest = make_set(tmp_path, {"master/w": torch.ones(6, 4)})
    shards = ShardReader(LocalStore(tmp_path), engine, manifest.id, manifest)
    entry = shards.entries()["master/w"]
    wanted = Entry("master/w", "F32", (6, 4), Run(0, 24))
    reads = plan.reads([wanted], shards.holdings(), prefer_file=None)
    for bad in (torch.zeros(23), torch.zeros(4, 6).t()):
        with pytest.raises(UsageError, match="contiguous"):
            shards.fill(reads, [bad])
        assert not bad.any()
    assert entry.shape == (6, 4)
    with pytest.raises(StateMismatch, match="master/nowhere"):
        shards.tensor("master/nowhere")


def test_device_memory_is_filled_through_a_bounded_bounce(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"master/a": torch.randn(50, 3), "master/b": torch.randn(7), "model/c": torch.arange(5)}
    manifest = make_set(tmp_path, saved, world_size=3, cut="columns")
    shards = ShardReader(LocalStore(tmp_path), engine, manifest.id, manifest)
    # Windows of 100 bytes cut every tensor; the path is the one that a device takes.
    monkeypatch.setattr(reader, "BOUNCE_NBYTES", 100)
    monkeypatch.setattr(reader, "_needs_bounce", lambda tensor: True)
    got = [torch.zeros_like(tensor) for tensor in saved.values()]
    names = list(saved)
    wanted = [
        Entry(n, e.dtype, e.shape, Run(0, got[i].numel()))
        for i, n in enumerate(names)
        for e in [shards.entries()[n]]
    ]
    shards.fill(plan.reads(wanted, shards.holdings(), prefer_file=None), got)
    assert all(torch.equal(a, b) for a, b in zip(got, saved.values(), strict=True))


@pytest.mark.gpu
def test_cuda_tensors_are_filled(tmp_path: Path) -> None:
    saved = torch.randn(1000, 33)
    manifest = make_set(tmp_path, {"master/w": saved}, world_size=2)
    engine = select_engine("auto")
    shards = ShardReader(LocalStore(tmp_path), engine, manifest.id, manifest)
    got = torch.zeros(1000, 33, device="cuda")
    wanted = Entry("master/w", "F32", (1000, 33), Run(0, 33_000))
    shards.fill(plan.reads([wanted], shards.holdings(), prefer_file=None), [got])
    assert torch.equal(got.cpu(), saved)


# ---- which set


def test_the_newest_is_by_term_and_serial_never_by_step(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert reader.resolve(store) is None
    with pytest.raises(StepNotFound):
        reader.newest(store)
    one = {"master/w": torch.ones(2)}
    make_set(tmp_path, one, step=900, term=1, serial=9)
    rolled_back = make_set(tmp_path, one, step=100, term=2, serial=1)
    assert reader.newest(store)[0] == rolled_back.id
    again = make_set(tmp_path, one, step=900, term=2, serial=2)
    assert reader.find(store, 900)[0] == again.id
    with pytest.raises(StepNotFound, match=r"step 5 .*\[100, 900\]"):
        reader.find(store, 5)


def test_foreign_names_links_and_uncommitted_sets_are_passed_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest = make_set(tmp_path, {"master/w": torch.ones(2)}, step=1)
    high = SetId.new(step=5, term=9, serial=9)
    os.symlink(manifest.id.dirname, tmp_path / high.dirname)
    (tmp_path / SetId.new(step=6, term=9, serial=9).dirname).mkdir()
    (tmp_path / "step-7").mkdir()
    assert reader.newest(store)[0] == manifest.id


def test_a_weights_only_set_is_loaded_only_by_its_step(tmp_path: Path, engine: Engine) -> None:
    store = LocalStore(tmp_path)
    full = make_set(tmp_path, {"master/w": torch.ones(2)}, step=3)
    thin = write_weights(store, engine, full, SetId.new(step=3, term=1, serial=2))
    assert reader.find(store, 3)[0] == full.id  # the full one of the same origin first
    store.unlink(f"{full.id.dirname}/{MANIFEST}")
    assert reader.find(store, 3)[0] == thin.id
    with pytest.raises(StepNotFound, match="weights only"):
        reader.newest(store)


def test_a_damaged_newest_manifest_raises_or_is_passed_over_on_request(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    good = make_set(tmp_path, {"master/w": torch.ones(2)}, step=1)
    bad = make_set(tmp_path, {"master/w": torch.ones(2)}, step=2, serial=2)
    path = tmp_path / bad.id.dirname / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"world_size": 2', b'"world_size": 3'))
    with pytest.raises(ManifestError):
        reader.resolve(store)
    found = reader.resolve(store, fallback=True)
    assert found is not None and found[0] == good.id
    with pytest.raises(CorruptError, match="no undamaged step"):
        reader.resolve(store, fallback=True, skip=1)


def test_a_damaged_set_names_the_way_to_the_newest_sound_full_step(
    tmp_path: Path, engine: Engine
) -> None:
    store = LocalStore(tmp_path)
    old, twice, _ = (
        make_set(tmp_path, {"master/w": torch.ones(2)}, step=step, serial=serial)
        for serial, step in enumerate((3, 5, 4), 1)
    )
    thin = write_weights(store, engine, old, SetId.new(step=3, term=1, serial=9))
    path = tmp_path / thin.id.dirname / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"world_size": 2', b'"world_size": 3'))
    with pytest.raises(
        ManifestError, match=r"full step below it is 4: load\(step=4\), or --step 4"
    ):
        reader.resolve(store)
    assert reader.find(store, 4)[1].content == "full"
    # A step that has a damaged set above its sound one cannot be loaded by its number.
    for step in (4, 5):
        name = make_set(tmp_path, {}, step=step, serial=10 + step, copies={"buffer/n": [1, 1]})
        (tmp_path / name.id.dirname / MANIFEST).write_text("{}")
    with pytest.raises(ManifestError) as caught:
        reader.resolve(store)
    assert "sound full step" not in str(caught.value) and twice.id.step == 5
    with pytest.raises(ManifestError) as caught:
        reader.find(store, 5)
    assert "sound full step" not in str(caught.value)


# ---- damage


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def test_p1_a_flipped_bit_is_found_where_it_is(tmp_path: Path, engine: Engine) -> None:
    saved = {"master/a": torch.randn(100), "master/b": torch.randn(100)}
    manifest = make_set(tmp_path, saved, world_size=1, chunk_nbytes=256)
    ref = manifest.shards[0]
    path = tmp_path / ref.path
    flip(path, ref.header_nbytes + 600)  # in master/b, which begins at byte 400
    store = LocalStore(tmp_path)
    shards = ShardReader(store, engine, manifest.id, manifest)
    with pytest.raises(ShardError, match="master/b") as caught:
        shards.tensor("master/b")
    start, end = ref.header_nbytes + 512, ref.header_nbytes + 768
    assert (caught.value.start, caught.value.end) == (start, end)
    damage = verify_set(store, engine, manifest)
    assert [(d.file, d.start, d.end, d.tensors) for d in damage] == [
        (str(path), start, end, ("master/b",))
    ]
    assert torch.equal(shards.tensor("master/a")[:50], saved["master/a"][:50])


def test_p1_every_kind_of_damage_is_reported(tmp_path: Path, engine: Engine) -> None:
    saved = {"master/a": torch.randn(1000)}
    manifest = make_set(tmp_path, saved, world_size=5)
    store = LocalStore(tmp_path)
    paths = [tmp_path / ref.path for ref in manifest.shards]
    assert verify_set(store, engine, manifest) == []
    paths[0].unlink()
    with open(paths[1], "ab") as file:
        file.write(b"x")
    flip(paths[2], 100)
    os.replace(paths[4], paths[3])  # one file lost, and another under its name
    reported = {Path(d.file).name: d.message for d in verify_set(store, engine, manifest)}
    assert "missing" in reported[paths[0].name]
    assert "bytes" in reported[paths[1].name]
    assert "crc32c" in reported[paths[2].name]
    assert "crc32c" in reported[paths[3].name]
    assert "missing" in reported[paths[4].name]


def test_p1_a_shard_of_another_attempt_is_not_taken(tmp_path: Path, engine: Engine) -> None:
    one = make_set(tmp_path, {"master/a": torch.zeros(8)}, serial=1, world_size=1)
    other = make_set(tmp_path, {"master/a": torch.ones(8)}, serial=2, world_size=1)
    os.replace(tmp_path / other.shards[0].path, tmp_path / one.shards[0].path)
    with pytest.raises(ShardError, match="crc32c"):
        ShardReader(LocalStore(tmp_path), engine, one.id, one).headers()
    # Even where the manifest's checksums are those of the other file.
    forged = replace(one, shards=(replace(other.shards[0], directory=one.id.dirname),))
    with pytest.raises(ShardError, match="another save's file"):
        ShardReader(LocalStore(tmp_path), engine, one.id, forged).headers()


def test_p8_a_linked_shard_is_not_followed(tmp_path: Path, engine: Engine) -> None:
    manifest = make_set(tmp_path / "a", {"master/a": torch.zeros(8)}, world_size=1)
    path = tmp_path / "a" / manifest.shards[0].path
    os.replace(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(StoreError):
        ShardReader(LocalStore(tmp_path / "a"), engine, manifest.id, manifest).headers()


# ---- values


def test_windows_cut_items_within_the_budget_and_lose_nothing() -> None:
    counts, widths = [10, 0, 3, 1000, 3, 5], [4, 8, 1, 2, 64, 1]
    found = list(windows(counts, widths, 33))
    for window in found:
        nbytes = sum((end - start) * widths[i] for i, start, end in window)
        assert nbytes <= 33 or len(window) == 1
    flat = [(i, k) for w in found for i, start, end in w for k in range(start, end)]
    assert flat == [(i, k) for i, count in enumerate(counts) for k in range(count)]


def test_clipped_reads_fill_exactly_their_window() -> None:
    reads = [plan.Read(0, 100, 10, 0, 0), plan.Read(1, 50, 5, 0, 10), plan.Read(0, 7, 20, 0, 15)]
    source = {
        (r.file, r.data_start + k): r.dest_start_bytes + k for r in reads for k in range(r.nbytes)
    }
    for start in range(35):
        for end in range(start, 36):
            filled = {
                read.dest_start_bytes - 3 + k: source[read.file, read.data_start + k] - start
                for read in clip(reads, 0, start, end, 3)
                for k in range(read.nbytes)
            }
            assert filled == {k: k for k in range(end - start)}
