"""The document is enough to read what the package writes: tests/reference_reader.py does.

Sets are made here by the framing and manifest modules alone, over random layouts, so the two
readings of the format meet without anything between them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_ckpt import checksum, dtypes, plan, tree
from sharded_ckpt.errors import CheckpointError
from sharded_ckpt.layout import MANIFEST, SetId, shard_file
from sharded_ckpt.manifest import Manifest, ShardRef
from sharded_ckpt.shard import header_template, parse_header, plan_shard
from sharded_ckpt.slices import Box, Entry, Region, Run, Shape, whole
from tests import reference_reader
from tests.reference_reader import Step

ID = SetId(term=1, serial=3, step=500, nonce="9f3ac2d1")
FORMAT_MD = Path(__file__).resolve().parent.parent / "docs" / "format.md"

Piece = tuple[Entry, np.ndarray]  # an entry, and its bytes as unsigned integers of its width


def cut(name: str, dtype: str, array: np.ndarray, region: Region, **more: Any) -> Piece:
    """The piece of a whole tensor that ``region`` is."""
    if isinstance(region, Run):
        part = array.reshape(-1)[region.start : region.start + region.numel]
    else:
        block = zip(region.offset, region.extent, strict=True)
        part = array[tuple(slice(o, o + e) for o, e in block)]
    return Entry(name, dtype, array.shape, region, **more), np.ascontiguousarray(part)


def write_shard(
    home: Path,
    rank: int,
    pieces: Sequence[Piece],
    *,
    world_size: int,
    state: Any,
    chunk_nbytes: int,
) -> ShardRef:
    data_of = {entry.name: array.tobytes() for entry, array in pieces}
    shard = plan_shard([entry for entry, _ in pieces], chunk_nbytes)
    template = header_template(shard, id=ID, rank=rank, world_size=world_size, state_tree=state)
    data = b"".join(data_of[entry.name] for entry in shard.entries)
    chunks = [data[i : i + chunk_nbytes] for i in range(0, len(data), chunk_nbytes)]
    digits = "".join(checksum.to_hex(checksum.crc32c(chunk)) for chunk in chunks).encode()
    end = template.crc_pos + len(digits)
    header = template.data[: template.crc_pos] + digits + template.data[end:]
    (home / shard_file(rank)).write_bytes(header + data)
    return ShardRef(
        rank=rank,
        directory=home.name,
        file=shard_file(rank),
        nbytes=len(header) + len(data),
        header_nbytes=len(header),
        header_crc32c=checksum.crc32c(header),
        file_crc32c=checksum.crc32c(header + data),
    )


def write_step(
    root: Path,
    ranks: Sequence[Sequence[Piece]],
    *,
    states: Sequence[Any] | None = None,
    chunk_nbytes: int = 64,
    **more: Any,
) -> Path:
    home = root / ID.dirname
    home.mkdir()
    shards = tuple(
        write_shard(
            home,
            rank,
            pieces,
            world_size=len(ranks),
            state=states[rank] if states else {},
            chunk_nbytes=chunk_nbytes,
        )
        for rank, pieces in enumerate(ranks)
    )
    fields: dict[str, Any] = {
        "run_id": "example",
        "layout": {"kind": "plain"},
        "state": {},
        "client_state": {},
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    manifest = Manifest(
        id=ID,
        world_size=len(ranks),
        content="full",
        origin=None,
        shards=shards,
        **{**fields, **more},
    )
    (home / MANIFEST).write_bytes(manifest.to_bytes())
    return home


def words(draw: st.DrawFn, shape: Shape, itemsize: int) -> np.ndarray:
    count = math.prod(shape)
    raw = draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
    return np.frombuffer(raw, f"<u{itemsize}").reshape(shape)


@st.composite
def regions(draw: st.DrawFn, shape: Shape, parts: int) -> list[Region]:
    """A cut into ``parts``, as runs or along one dimension."""
    dim = draw(st.integers(-1, len(shape) - 1))
    length = math.prod(shape) if dim < 0 else shape[dim]
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    edges = list(zip([0, *inner], [*inner, length], strict=True))
    if dim < 0:
        return [Run(a, b - a) for a, b in edges]
    found: list[Region] = []
    for a, b in edges:
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = a, b - a
        found.append(Box(tuple(offset), tuple(extent)))
    return found


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[Piece]], dict[str, np.ndarray], list[np.ndarray]]:
    """Pieces of each rank, the whole tensors, and each rank's copy of ``optim/w/step``."""
    world_size = draw(st.integers(1, 4))
    ranks: list[list[Piece]] = [[] for _ in range(world_size)]
    tensors = {}
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(list(dtypes.BY_NAME.values())))
        shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
        name = f"model/layer{index}"
        # Any bits, except where only two are a value.
        array = words(draw, shape, dtype.itemsize) & (
            1 if dtype.name == "BOOL" else -1 % 256**dtype.itemsize
        )
        tensors[name] = array
        for rank, region in enumerate(draw(regions(shape, world_size))):
            ranks[rank].append(cut(name, dtype.name, array, region))
    copies = [np.array([rank + 1], "<f4") for rank in range(world_size)]
    for rank, copy in enumerate(copies):
        ranks[rank].append(cut("optim/w/step", "F32", copy, Run(0, 1), copy=True))
    return ranks, tensors, copies


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 100))
def test_it_reads_whatever_is_written(
    step: tuple[list[list[Piece]], dict[str, np.ndarray], list[np.ndarray]], chunk_nbytes: int
) -> None:
    ranks, tensors, copies = step
    assert plan.coverage({r: [e for e, _ in pieces] for r, pieces in enumerate(ranks)}) == []
    with tempfile.TemporaryDirectory() as root:
        found = Step(write_step(Path(root), ranks, chunk_nbytes=chunk_nbytes))
        for name, array in tensors.items():
            read = found.tensor(name)
            assert read.shape == array.shape and read.tobytes() == array.tobytes()
        for rank, copy in enumerate(copies):
            assert found.tensor("optim/w/step", rank).tobytes() == copy.tobytes()
        assert found.tensor("optim/w/step").tobytes() == copies[0].tobytes()


def test_weights_are_the_cast_of_their_masters_with_what_overrides_it(tmp_path: Path) -> None:
    values = np.array([1.0, 1.00390625, -0.0, np.nan, np.inf, 3e38, 65504, 1e-45], "<f4")
    master = values.view("<u4")
    override = np.full(8, 0x4242, "<u2")
    ranks = [
        [cut("master/w", "F32", master, Run(0, 4), model_dtype="BF16")],
        [
            cut("master/w", "F32", master, Run(4, 4), model_dtype="BF16"),
            cut("model/w", "BF16", override, Run(5, 2)),
        ],
        [cut("model/plain", "BF16", override, whole((8,)))],
    ]
    assert plan.coverage({r: [e for e, _ in pieces] for r, pieces in enumerate(ranks)}) == []
    found = Step(write_step(tmp_path, ranks, aliases={"head": "w"}))
    expected = values.astype(ml_dtypes.bfloat16).view("<u2")
    expected[5:7] = 0x4242
    assert found.weight("w").tolist() == found.weight("head").tolist() == expected.tolist()
    assert found.weight("plain").tolist() == override.tolist()
    with pytest.raises(ValueError, match="has holes"):
        found.tensor("model/w")


def test_state_comes_back(tmp_path: Path) -> None:
    value = {
        "epoch": 3,
        "odd": [float("inf"), -0.0, 2**70, None, True, "é", b"\x00\xff", 1j],
        "keys": {1: "a", (2, "x"): "b", "$": "c"},
        "kinds": (OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, x=[1]), {1, 2}),
        "numpy": [np.float32(0.1), np.arange(6, dtype="<u2").reshape(2, 3)],
    }
    encoded = tree.encode(value, path="client_state", prefix="state/")
    ranks = [
        [
            cut(name, "U16", array, whole(array.shape), copy=True)
            for name, array in encoded.tensors.items()
        ],
        [],
    ]
    home = write_step(
        tmp_path, ranks, states=[encoded.tree, {"rank": 1}], client_state=encoded.tree
    )
    found = Step(home)
    for read in (found.state(0), found.shared("client_state")):
        assert repr(read) == repr(value)
    assert found.state(1) == {"rank": 1}


def test_a_copied_step_directory_is_a_whole_checkpoint(tmp_path: Path) -> None:
    array = np.arange(6, dtype="<u4")
    home = write_step(tmp_path, [[cut("model/w", "F32", array, whole((6,)))]])
    copied = shutil.copytree(home, tmp_path / "elsewhere" / "any-name")
    shutil.rmtree(home)
    assert Step(copied).tensor("model/w").tobytes() == array.tobytes()


def test_both_readers_find_damage_anywhere(tmp_path: Path) -> None:
    """Every byte of a set is under a checksum that both readers check."""
    array = np.arange(20, dtype="<u4")
    home = write_step(tmp_path, [[cut("model/w", "F32", array, whole((20,)))]])
    for file in (home / MANIFEST, home / shard_file(0)):
        good = file.read_bytes()
        # Of the padding, a few bytes stand for all.
        text = len(good.rstrip(b" ")) if file.name == MANIFEST else good.index(b" " * 64) + 2
        for at in sorted({*range(0, text, 7), *range(len(good) - 90, len(good))}):
            damaged = bytearray(good)
            damaged[at] ^= 1 << (at % 8)
            file.write_bytes(damaged)
            with pytest.raises((ValueError, KeyError, TypeError)):
                Step(home)
            with pytest.raises(CheckpointError):
                read_by_the_package(home)
        file.write_bytes(good)
    assert Step(home).tensor("model/w").tobytes() == array.tobytes()
    read_by_the_package(home)


def read_by_the_package(home: Path) -> None:
    """The checks of manifest and shard modules, in the order of a load."""
    manifest = Manifest.from_bytes((home / MANIFEST).read_bytes(), "m")
    for ref in manifest.shards:
        data = (home / ref.file).read_bytes()
        header = data[: ref.header_nbytes]
        if checksum.crc32c(header) != ref.header_crc32c:
            raise CheckpointError("header checksum")
        found = parse_header(header, file_nbytes=len(data), where="s")
        for index, crc in enumerate(found.crcs):
            start = ref.header_nbytes + index * found.chunk_nbytes
            if checksum.crc32c(data[start : start + found.chunk_nbytes]) != crc:
                raise CheckpointError("chunk checksum")


@pytest.mark.parametrize("nbytes", [*range(20), 63, 64, 65, 4095, 4096, 100_001])
def test_its_checksum_is_crc32c(nbytes: int) -> None:
    import google_crc32c

    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert reference_reader.crc32c(data) == google_crc32c.value(data) == checksum.crc32c(data)


# The worked example of docs/format.md. ---------------------------------------------------------


def write_example(root: Path) -> Path:
    """Two ranks hold one 2 x 3 weight by halves; rank 1 has a random generator's state too."""
    weight = np.array([[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]], "<f4")
    counter = np.array([500.0], "<f4")
    rng = np.arange(4, dtype="<u4")
    state = tree.encode({"rng": {"numpy": rng}}, path="rank", prefix="state/")
    return write_step(
        root,
        [
            [
                cut("master/net.weight", "F32", weight, Run(0, 3), model_dtype="BF16"),
                cut("optim/net.weight/step", "F32", counter.reshape(()), Run(0, 1), copy=True),
            ],
            [
                cut("master/net.weight", "F32", weight, Run(3, 3), model_dtype="BF16"),
                cut("optim/net.weight/step", "F32", counter.reshape(()), Run(0, 1), copy=True),
                cut("state/rng.numpy", "U32", rng, whole((4,)), copy=True),
            ],
        ],
        states=[{}, state.tree],
        chunk_nbytes=4 * 1024 * 1024,
        client_state={"epoch": 2, "betas": {"$": "tuple", "items": [0.9, 0.95]}},
        state={"scheduler": {"last_epoch": 500}},
        aliases={"head.weight": "net.weight"},
        metrics={"loss": 0.25},
        versions={"sharded_ckpt": "0.1.0"},
    )


def example_texts(root: Path) -> dict[str, str]:
    """What docs/format.md shows, by the caption of its block."""
    home = write_example(root)
    raw = (home / shard_file(1)).read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    outer = json.loads(raw[8:size])
    inner = json.loads(outer["__metadata__"]["sharded_ckpt"])
    outer["__metadata__"]["sharded_ckpt"] = "(the JSON text below)"
    dump = [
        f"{at:08x}  {raw[at : at + 16].hex(' ', 1)}  |{printable(raw[at : at + 16])}|"
        for at in (*range(0, 64, 16), *range(size, len(raw), 16))
    ]
    dump.insert(4, "*")
    return {
        "manifest.json": (home / MANIFEST).read_text(),
        "header": json.dumps(outer, indent=1) + "\n",
        "sharded_ckpt": json.dumps(inner, indent=1) + "\n",
        "hex": "\n".join(dump) + "\n",
    }


def printable(data: bytes) -> str:
    return re.sub(r"[^ -~]", ".", data.decode("latin-1"))


def test_the_worked_example_of_the_document_is_what_the_code_writes(tmp_path: Path) -> None:
    text = FORMAT_MD.read_text()
    for caption, block in example_texts(tmp_path).items():
        assert f"```\n{block}```" in text or f"```json\n{block}```" in text, caption


def test_the_worked_example_can_be_read(tmp_path: Path) -> None:
    found = Step(write_example(tmp_path))
    expected = np.array([[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]], ml_dtypes.bfloat16)
    assert found.weight("head.weight").tobytes() == expected.tobytes()
    assert found.state(1)["rng"]["numpy"].tolist() == [0, 1, 2, 3]
    assert found.shared("client_state") == {"epoch": 2, "betas": (0.9, 0.95)}
