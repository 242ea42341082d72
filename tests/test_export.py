"""Exports: the right bytes of every tensor in every format, and nothing where it fails."""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sharded_ckpt.engine import select_engine
from sharded_ckpt.errors import ShardError, StateMismatch, UsageError
from sharded_ckpt.export import ModelView, Request, Selection, consolidate, plan_export
from sharded_ckpt.export import orbax as orbax_export
from sharded_ckpt.export.cast import cast_into
from sharded_ckpt.layout import term_file
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.store import LocalStore
from sharded_ckpt.store_output import check_apart, output_directory
from tests.make_set import CUTS, make_set

BF16 = torch.bfloat16


def reader_of(directory: Path, manifest: Manifest) -> ShardReader:
    return ShardReader(LocalStore(directory), select_engine("auto"), manifest.id, manifest)


def export(directory: Path, manifest: Manifest, target: Path | str, **request: Any) -> None:
    selection = request.pop("selection", Selection())
    made = Request(str(target), selection=selection, **request)
    consolidate(plan_export(reader_of(directory, manifest), made))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit."""
    bits = [t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def load_orbax(directory: Path) -> dict[str, torch.Tensor]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    checkpoint = pytest.importorskip("orbax.checkpoint")
    restored = checkpoint.PyTreeCheckpointer().restore(directory)
    return {name: _from_numpy(value) for name, value in restored.items()}


def _from_numpy(value: np.ndarray) -> torch.Tensor:
    value = np.asarray(value)
    if value.dtype.name != "bfloat16":
        return torch.from_numpy(np.array(value))
    return torch.from_numpy(value.view(np.uint16).copy()).view(BF16).reshape(value.shape)


LOADERS: dict[str, tuple[str, Callable[[Path], dict[str, torch.Tensor]]]] = {
    "safetensors": ("out", lambda path: load_file(path / "model.safetensors")),
    "torch": ("out.pt", lambda path: torch.load(path, weights_only=True)),
    "orbax": ("out", load_orbax),
}


# ---- casts


def all_16_bit_neighbours() -> torch.Tensor:
    """Every bfloat16 as float32, and what lies just beside each and between each two."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] + low[None, :]).reshape(-1)
    return bits.to(torch.uint32).view(torch.float32)


@pytest.mark.parametrize(("name", "dtype"), [("BF16", BF16), ("F16", torch.float16)])
def test_casts_round_to_nearest_even_as_torch_does(name: str, dtype: torch.dtype) -> None:
    values = all_16_bit_neighbours()
    made = np.empty(2 * values.numel(), np.uint8)
    cast_into(values.view(torch.uint8).numpy(), "F32", made, name)
    got, want = torch.from_numpy(made).view(dtype), values.to(dtype)
    nan = values.isnan()
    assert torch.equal(got.isnan(), nan)
    assert same(got[~nan], want[~nan])
    # And back, which is exact; and through float64, which torch does in the same two steps.
    wide = np.empty(4 * got.numel(), np.uint8)
    cast_into(made, name, wide, "F32")
    assert same(torch.from_numpy(wide).view(torch.float32)[~nan], got.float()[~nan])
    cast_into(values.double().view(torch.uint8).numpy(), "F64", made, name)
    assert same(torch.from_numpy(made).view(dtype)[~nan], values.double().to(dtype)[~nan])


# ---- what is exported


@pytest.mark.case("B205", "B230")
@pytest.mark.parametrize("to", LOADERS)
@pytest.mark.parametrize("cut", CUTS)
def test_p5_every_cut_gives_the_same_model(tmp_path: Path, cut: str, to: str) -> None:
    masters = {
        "a.weight": torch.randn(33, 20),
        "a.bias": torch.randn(33),
        "b.scale": torch.ones(()),
    }
    manifest = make_set(
        tmp_path / "set",
        {f"master/{name}": value for name, value in masters.items()}
        | {
            "optim/a.weight/exp_avg": torch.randn(33, 20),
            "model/frozen": torch.randn(7, 3).to(BF16),
        },
        cut=cut,
        world_size=3,
        model_dtypes="BF16",
        copies={"buffer/count": torch.tensor(5), "optim/a.weight/step": torch.tensor(3.0)},
        chunk_nbytes=128,
    )
    name, load = LOADERS[to]
    export(tmp_path / "set", manifest, tmp_path / name, format=to)
    got = load(tmp_path / name)
    assert set(got) == {"a.weight", "a.bias", "b.scale", "frozen", "count"}
    assert all(same(got[name], value.to(BF16)) for name, value in masters.items())
    assert same(got["count"], torch.tensor(5)) and got["frozen"].dtype == BF16


def test_overrides_belong_to_the_models_own_dtype(tmp_path: Path) -> None:
    master, given = torch.randn(40, 5), torch.randn(12).to(BF16)
    manifest = make_set(
        tmp_path / "set",
        {"master/w": master},
        world_size=2,
        model_dtypes="BF16",
        overrides={"model/w": [(77, given)]},
    )
    want = master.to(BF16)
    want.view(-1)[77:89] = given
    for dtype, expected in ((None, want), ("BF16", want), ("F32", master), ("F16", master.half())):
        target = tmp_path / f"out-{dtype}"
        export(tmp_path / "set", manifest, target, selection=Selection(dtype=dtype))
        assert same(load_file(target / "model.safetensors")["w"], expected), dtype


def test_windows_of_any_size_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {
        "master/a": torch.randn(101, 9),
        "model/b": torch.arange(77),
        "master/c": torch.randn(3),
    }
    manifest = make_set(
        tmp_path / "set",
        saved,
        cut="columns",
        world_size=3,
        model_dtypes={"a": "BF16", "c": "F16"},
        overrides={"model/a": [(500, torch.randn(60).to(BF16))]},
    )
    export(tmp_path / "set", manifest, tmp_path / "whole")
    for window in (1, 8, 100, 1000):
        monkeypatch.setattr("sharded_ckpt.export.stream.WINDOW_NBYTES", window)
        export(tmp_path / "set", manifest, tmp_path / f"{window}")
        one, other = (tmp_path / name / "model.safetensors" for name in ("whole", f"{window}"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.case("B110", "B111")
def test_b110_b111_buffers_and_integers_keep_their_dtype(tmp_path: Path) -> None:
    kept = {
        "mean": torch.tensor([16777217.0, 1e-8], dtype=torch.float64),
        "count": torch.tensor(2**40),
        "mask": torch.tensor([True, False]),
    }
    manifest = make_set(
        tmp_path / "set",
        {"master/w": torch.randn(4), "model/index": torch.arange(3), "model/z": torch.ones(2) + 1j},
        copies={f"buffer/{name}": value for name, value in kept.items()},
    )
    export(
        tmp_path / "set",
        manifest,
        tmp_path / "o.pt",
        format="torch",
        selection=Selection(dtype="F16"),
    )
    got = torch.load(tmp_path / "o.pt", weights_only=True)
    assert all(same(got[name], value) for name, value in kept.items())
    dtypes = [got[name].dtype for name in ("w", "index", "z")]
    assert dtypes == [torch.float16, torch.int64, torch.complex64]


def test_optimizer_state_is_exported_on_request(tmp_path: Path) -> None:
    master, moment = torch.randn(8, 3), torch.randn(8, 3)
    manifest = make_set(
        tmp_path / "set",
        {"master/module.w": master, "optim/module.w/exp_avg": moment},
        copies={"optim/module.w/step": torch.tensor(9.0)},
        model_dtypes="BF16",
    )
    selection = Selection(optimizer=True, strip_prefixes=("module.",))
    export(tmp_path / "set", manifest, tmp_path / "out", selection=selection)
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert set(got) == {"w", "master/w", "optim/w/exp_avg", "optim/w/step"}
    assert same(got["w"], master.to(BF16)) and same(got["master/w"], master)
    assert same(got["optim/w/exp_avg"], moment)


@pytest.mark.case("B73", "B232", "B233")
def test_b73_trainable_parameters_alone(tmp_path: Path) -> None:
    manifest = make_set(
        tmp_path / "set",
        {
            "model/base.weight": torch.ones(4),
            "model/lora.A": torch.ones(2),
            "optim/lora.A/exp_avg": torch.ones(2),
            "master/lora.B": torch.ones(3),
        },
        copies={"buffer/mean": torch.ones(1)},
    )
    export(tmp_path / "set", manifest, tmp_path / "out", selection=Selection(trainable_only=True))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"lora.A", "lora.B"}
    silent = make_set(tmp_path / "set", {"model/w": torch.ones(4)}, serial=2)
    with pytest.raises(UsageError, match="only-trainable"):
        export(tmp_path / "set", silent, tmp_path / "no", selection=Selection(trainable_only=True))


def test_names_that_would_collide_are_refused(tmp_path: Path) -> None:
    manifest = make_set(tmp_path / "set", {"model/a.w": torch.ones(1), "model/w": torch.ones(1)})
    with pytest.raises(UsageError, match="'w'"):
        export(
            tmp_path / "set", manifest, tmp_path / "o", selection=Selection(strip_prefixes=("a.",))
        )


# ---- formats


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    sizes = [10, 3000, 10, 400, 700, 700]
    saved = {f"model/layers.{i}.w": torch.randn(size) for i, size in enumerate(sizes)}
    manifest = make_set(tmp_path / "set", saved, world_size=2)
    export(tmp_path / "set", manifest, tmp_path / "out", max_shard_nbytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count == 5 and index["metadata"]["total_size"] == 4 * sum(sizes)
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert set(tensors) == {n for n, f in index["weight_map"].items() if f == file}
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert nbytes <= 4000 or len(tensors) == 1
        assert all(same(t, saved[f"model/{name}"]) for name, t in tensors.items())


@pytest.mark.case("B21")
def test_b21_tied_names_are_one_tensor_everywhere(tmp_path: Path) -> None:
    saved = torch.randn(6, 2)
    aliases = {"head.weight": "embed.weight", "decoder.weight": "embed.weight"}
    manifest = make_set(tmp_path / "set", {"model/embed.weight": saved}, aliases=aliases)
    export(tmp_path / "set", manifest, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["embed.weight"]
        assert file.metadata() == {"format": "pt", **aliases}
    export(tmp_path / "set", manifest, tmp_path / "out.pt", format="torch")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert set(got) == {"embed.weight", *aliases}
    assert len({tensor.data_ptr() for tensor in got.values()}) == 1


def test_a_torch_file_holds_every_dtype_and_shape(tmp_path: Path) -> None:
    saved: dict[str, torch.Tensor] = {
        "model/half": torch.randn(3).half(),
        "model/double": torch.randn(2, 0, 4).double(),
        "model/f8": torch.randn(5).to(torch.float8_e4m3fn),
        "model/f8b": torch.randn(5).to(torch.float8_e5m2),
        "model/u16": torch.arange(7).to(torch.uint16),
        "model/u64": torch.arange(7).to(torch.uint64),
        "model/i8": torch.arange(-3, 4, dtype=torch.int8),
        "model/bool": torch.tensor([[True], [False]]),
        "model/scalar": torch.tensor(1.5),
        "model/complex": torch.ones(2) * 1j,
        "model/größe ☃": torch.arange(2, dtype=torch.int32),
    }
    manifest = make_set(tmp_path / "set", saved, world_size=3)
    export(tmp_path / "set", manifest, tmp_path / "out.pt", format="torch")
    for mmap in (False, True):
        got = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mmap)
        assert set(got) == {name.removeprefix("model/") for name in saved}
        assert all(same(got[name.removeprefix("model/")], value) for name, value in saved.items())
        assert all(t.is_contiguous() and not t.requires_grad for t in got.values())
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None  # the checksums inside are right, which torch ignores
        data = (tmp_path / "out.pt").read_bytes()
        for info in archive.infolist():
            lengths = data[info.header_offset + 26 : info.header_offset + 30]
            name, extra = lengths[:2], lengths[2:]
            start = (
                info.header_offset
                + 30
                + sum(int.from_bytes(length, "little") for length in (name, extra))
            )
            assert start % 64 == 0, info.filename


def test_orbax_restores_tensors_of_many_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_export, "CHUNK_NBYTES", 64)
    saved = {
        "model/w": torch.randn(7, 5, 11).to(BF16),
        "model/zeros": torch.zeros(100),
        "model/long": torch.arange(200),
        "model/flag": torch.tensor(True),
    }
    manifest = make_set(tmp_path / "set", saved, world_size=2, aliases={"tied": "w"})
    export(tmp_path / "set", manifest, tmp_path / "out", format="orbax")
    got = load_orbax(tmp_path / "out")
    assert all(same(got[name.removeprefix("model/")], value) for name, value in saved.items())
    metadata = json.loads((tmp_path / "out" / "_METADATA").read_text())
    assert metadata["custom_metadata"] == {"step": 1, "aliases": {"tied": "w"}}


@pytest.mark.parametrize("limit", [4, 30, 100, 10**6])
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (4, 6), (3, 2, 5), (2, 1, 4, 3)])
def test_chunks_are_consecutive_runs(shape: tuple[int, ...], limit: int) -> None:
    chunk = orbax_export.chunk_shape(shape, 2, limit)
    assert all(extent >= 1 for extent in chunk)
    assert math.prod(chunk) * 2 <= max(limit, 2)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = [numbers[box].reshape(-1) for box in orbax_export.chunk_boxes(shape, chunk)]
    found = np.concatenate(parts) if parts else np.empty(0)
    assert np.array_equal(found, np.arange(math.prod(shape)))


# ---- what cannot be exported


@pytest.mark.case("B123")
def test_b123_missing_shards_are_listed_by_rank(tmp_path: Path) -> None:
    manifest = make_set(tmp_path / "set", {"master/w": torch.ones(64)}, world_size=5)
    for rank in (1, 3):
        (tmp_path / "set" / manifest.shards[rank].path).unlink()
    with pytest.raises(ShardError, match=r"2 of 5 shards.*rank 1 .*rank 3"):
        export(tmp_path / "set", manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.case("B230")
def test_b230_a_hole_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    manifest = make_set(
        tmp_path / "set", {"master/w": torch.ones(64), "master/v": torch.ones(1)}, world_size=4
    )
    holed = replace(manifest, shards=manifest.shards[:2] + manifest.shards[3:])
    with pytest.raises(StateMismatch, match=r"master/w: elements 32:48"):
        export(tmp_path / "set", holed, tmp_path / "out")


def test_p1_damage_leaves_no_output_and_the_old_one_untouched(tmp_path: Path) -> None:
    manifest = make_set(tmp_path / "set", {"master/w": torch.randn(1000)}, world_size=2)
    for to, (name, _) in LOADERS.items():
        (tmp_path / to).mkdir()
        export(tmp_path / "set", manifest, tmp_path / to / name, format=to)
    ref = manifest.shards[1]
    data = bytearray((tmp_path / "set" / ref.path).read_bytes())
    data[-1] ^= 1
    (tmp_path / "set" / ref.path).write_bytes(data)
    for to, (name, load) in LOADERS.items():
        with pytest.raises(ShardError, match="rank 1"):
            export(tmp_path / "set", manifest, tmp_path / to / name, format=to, overwrite=True)
        assert os.listdir(tmp_path / to) == [name]
        assert load(tmp_path / to / name)["w"].shape == (1000,)


def test_an_existing_output_is_replaced_only_on_request(tmp_path: Path) -> None:
    one = make_set(tmp_path / "set", {"model/w": torch.ones(3)})
    two = make_set(tmp_path / "set", {"model/w": torch.zeros(3)}, serial=2)
    for to, (name, load) in LOADERS.items():
        (tmp_path / to).mkdir()
        target = tmp_path / to / name
        export(tmp_path / "set", one, target, format=to)
        with pytest.raises(UsageError, match="overwrite"):
            export(tmp_path / "set", two, target, format=to)
        assert load(target)["w"].sum() == 3
        export(tmp_path / "set", two, target, format=to, overwrite=True)
        assert load(target)["w"].sum() == 0
        assert os.listdir(tmp_path / to) == [name]
    with pytest.raises(UsageError, match="does not exist"):
        export(tmp_path / "set", one, tmp_path / "no" / "such")


def test_the_view_needs_no_bytes(tmp_path: Path) -> None:
    """A plan reads headers only: it is quick for a set of any size."""
    manifest = make_set(tmp_path / "set", {"model/w": torch.ones(8)}, world_size=2)
    for ref in manifest.shards:
        path = tmp_path / "set" / ref.path
        data = path.read_bytes()
        path.write_bytes(data[: ref.header_nbytes] + bytes(len(data) - ref.header_nbytes))
    view = ModelView(reader_of(tmp_path / "set", manifest), Selection())
    assert [tensor.name for tensor in view.tensors] == ["w"]
    with pytest.raises(ShardError):
        list(view.stream(view.tensors))


# ---- what an export must not harm


def test_p6_a_target_that_could_harm_checkpoints_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "run" / "set"
    manifest, other = (make_set(root, {"model/w": torch.ones(3)}, serial=n) for n in (1, 2))
    step = root / manifest.id.dirname
    alone = tmp_path / "copy" / manifest.id.dirname
    shutil.copytree(step, alone)
    (tmp_path / "link").symlink_to(root)
    before = sorted(tmp_path.rglob("*"))

    def refused(target: Path | str, read: Path, **request: Any) -> None:
        shards = ShardReader(
            LocalStore(read),
            select_engine("auto"),
            manifest.id,
            manifest,
            directory=None if read == root else "",
        )
        with pytest.raises(UsageError, match="is the|holds the|lies in"):
            plan_export(shards, Request(str(target), overwrite=True, **request))

    inside = [root / "out", step, step / "out", root / other.id.dirname, tmp_path / "link" / "o"]
    for target in [root, root.parent, tmp_path / "link", "/", *inside]:
        refused(target, root)
        refused(target, root, format="orbax")
    refused(root / "out.pt", root, format="torch")
    refused(step / "rank-00000.safetensors", root, format="torch")
    refused(f"file://{root}", root, format="orbax")
    refused("file:///", root, format="orbax")
    # One step directory is read: its neighbours are as safe, and so is what a job owns.
    refused(root / other.id.dirname, step)
    (root / term_file(1)).write_text("{}")
    refused(root / "out", step)
    (root / term_file(1)).unlink()
    assert sorted(tmp_path.rglob("*")) == before
    # A step that was copied elsewhere protects itself alone.
    refused(alone / "out", alone)
    refused(alone.parent, alone)
    check_apart(str(alone.parent / "out"), str(alone))
    export(root, manifest, root.parent / "out", overwrite=True)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_p1_an_export_that_is_ended_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before and after each of the two renames that put the new one in its place."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    rename, calls = os.rename, []

    def ended(source: str, to: str) -> None:
        calls.append(to)
        if at == 2 * len(calls) - 2:
            raise KeyboardInterrupt
        rename(source, to)
        if at == 2 * len(calls) - 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", ended)
    with pytest.raises(KeyboardInterrupt), output_directory(str(target), overwrite=True) as made:
        (Path(made) / "new").write_text("new")
    assert os.listdir(target) == ["new" if at == 3 else "old"]
