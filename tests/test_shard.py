"""Shards are safetensors files that every reader opens, and whose headers cannot lie."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from sharded_ckpt import checksum, dtypes
from sharded_ckpt.errors import LoadError, ShardError, UnsupportedError, UsageError
from sharded_ckpt.layout import SetId
from sharded_ckpt.shard import (
    ALIGN,
    MAX_HEADER_NBYTES,
    ShardHeader,
    header_nbytes,
    header_template,
    parse_header,
    plan_shard,
)
from sharded_ckpt.slices import Box, Entry, Run, whole

ID = SetId(term=1, serial=2, step=500, nonce="9f3ac2d1")


def header_of(entries: list[Entry], *, chunk_nbytes: int = 64, state: Any = None) -> bytes:
    plan = plan_shard(entries, chunk_nbytes)
    return header_template(plan, id=ID, rank=1, world_size=4, state_tree=state).data


def parse(header: bytes, data_nbytes: int) -> ShardHeader:
    return parse_header(header, file_nbytes=len(header) + data_nbytes, where="d/rank-00001")


def frame(tensors: dict[str, torch.Tensor], chunk_nbytes: int = 64) -> bytes:
    """A whole shard of whole tensors."""
    entries = [
        Entry(name, dtypes.from_torch(t.dtype).name, tuple(t.shape), whole(t.shape))
        for name, t in tensors.items()
    ]
    plan = plan_shard(entries, chunk_nbytes)
    data = b"".join(
        tensors[e.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for e in plan.entries
    )
    assert len(data) == plan.data_nbytes
    template = header_template(plan, id=ID, rank=1, world_size=4, state_tree={"x": [1]})
    chunks = [data[i : i + chunk_nbytes] for i in range(0, len(data), chunk_nbytes)]
    digits = "".join(checksum.to_hex(checksum.crc32c(chunk)) for chunk in chunks).encode()
    header = bytearray(template.data)
    assert header[template.crc_pos : template.crc_pos + len(digits)] == b"0" * len(digits)
    header[template.crc_pos : template.crc_pos + len(digits)] = digits
    return bytes(header) + data


EVERY_KIND = {
    f"model/{name}.{index}": torch.arange(n)
    .to(torch.float32)
    .to(dtypes.to_torch(name))
    .reshape(shape)
    for name in dtypes.BY_NAME
    for index, (n, shape) in enumerate([(1, ()), (0, (0, 3)), (6, (2, 3)), (5, (5,))])
}


def test_safetensors_opens_every_kind_of_tensor(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(frame(EVERY_KIND))
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == set(EVERY_KIND)
        for name, tensor in EVERY_KIND.items():
            loaded = file.get_tensor(name)
            assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
            bits = [t.reshape(-1).view(torch.uint8) for t in (loaded, tensor)]
            assert torch.equal(*bits), name


def test_an_empty_shard_opens(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(frame({}))
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == []
    header = parse(path.read_bytes(), 0)
    assert header.entries == {} and header.crcs == [] and header.state == {"x": [1]}


def test_tensors_are_packed_aligned_and_in_order() -> None:
    entries = [
        Entry("model/a", "U8", (3,), whole((3,))),
        Entry("model/b", "F64", (2,), whole((2,))),
        Entry("model/c", "BF16", (3,), whole((3,))),
        Entry("model/d", "F64", (1,), whole((1,))),
    ]
    plan = plan_shard(entries)
    assert [e.name[-1] for e in plan.entries] == ["b", "d", "c", "a"]
    assert plan.offsets == (0, 16, 24, 30) and plan.data_nbytes == 33
    assert [end for _, _, end in plan.spans()] == [16, 24, 30, 33]
    header = header_of(entries)
    assert len(header) % ALIGN == 0 and len(header) == 8 + struct.unpack("<Q", header[:8])[0]


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    made = []
    for index in range(draw(st.integers(0, 6))):
        shape = draw(SHAPES)
        total = int(np.prod(shape, dtype=int))
        if draw(st.booleans()):
            start = draw(st.integers(0, total))
            region: Run | Box = Run(start, draw(st.integers(0, total - start)))
        else:
            offset = tuple(draw(st.integers(0, n)) for n in shape)
            extent = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
            region = Box(offset, extent)
        name = draw(st.sampled_from(["model/é", "master/a", 'state/"x"\\', "optim/w/exp_avg"]))
        made.append(
            Entry(
                f"{name}{index}",
                draw(st.sampled_from(list(dtypes.BY_NAME))),
                shape,
                region,
                draw(st.booleans()),
                draw(st.sampled_from([None, "BF16"])),
            )
        )
    return made


@given(entry_lists(), st.integers(1, 100))
def test_headers_come_back(entries: list[Entry], chunk_nbytes: int) -> None:
    state = {"crc32c": '","crc32c":"00000000', "é": [None, 1.5, "\\u0000"]}
    header = header_of(entries, chunk_nbytes=chunk_nbytes, state=state)
    plan = plan_shard(entries, chunk_nbytes)
    found = parse(header, plan.data_nbytes)
    assert tuple(found.entries.values()) == plan.entries
    assert tuple(start for start, _ in found.spans.values()) == plan.offsets
    assert (found.id, found.rank, found.world_size) == (ID, 1, 4)
    assert found.state == state and found.chunk_nbytes == chunk_nbytes
    assert found.crcs == [0] * plan.chunk_count
    assert found.header_nbytes == len(header) and found.data_nbytes == plan.data_nbytes


def test_checksums_stand_where_the_template_says() -> None:
    """Whatever state holds, even a text that looks like the field itself."""
    plan = plan_shard([Entry("model/a", "F32", (100,), whole((100,)))], 64)
    state = {"crc32c": '"crc32c":"' + "0" * 56, '\\"crc32c\\":\\"00': 1}
    template = header_template(plan, id=ID, rank=0, world_size=1, state_tree=state)
    data = bytearray(template.data)
    wanted = list(range(1, 1 + plan.chunk_count))
    digits = "".join(map(checksum.to_hex, wanted)).encode()
    data[template.crc_pos : template.crc_pos + len(digits)] = digits
    found = parse(bytes(data), 400)
    assert found.crcs == wanted and found.state == state


def small_header() -> bytes:
    return header_of(
        [Entry("model/a", "F32", (2, 3), Run(2, 3)), Entry("model/b", "U8", (), Run(0, 1))]
    )


def test_every_bit_flip_of_a_header_is_refused() -> None:
    """The manifest holds the header's checksum: no single flip keeps it."""
    header = small_header()
    length = len(header.rstrip(b" ")) + 2
    good = checksum.crc32c(header)
    for position in range(length):
        for bit in range(8):
            damaged = bytearray(header)
            damaged[position] ^= 1 << bit
            assert checksum.crc32c(bytes(damaged)) != good
            # And without it, a flip is an error of this kind or of no consequence to the parser.
            try:
                parse(bytes(damaged), 13)
            except (ShardError, LoadError) as error:
                assert "d/rank-00001" in str(error)


def test_a_shard_that_was_not_finished_is_refused() -> None:
    """P1: the header is written last; until then a shard begins with zeros."""
    with pytest.raises(ShardError, match="its writer did not finish it"):
        parse(bytes(ALIGN), 13)
    with pytest.raises(ShardError):
        header_nbytes(b"", file_nbytes=0, where="x")
    header = small_header()
    for nbytes in range(len(header)):
        with pytest.raises(ShardError):
            parse_header(header[:nbytes], file_nbytes=nbytes, where="x")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, 4097, 4088 + 4096, 1, 4087])
def test_lengths_that_lie_are_refused(length: int) -> None:
    with pytest.raises(ShardError, match="header length"):
        header_nbytes(struct.pack("<Q", length), file_nbytes=4096 + 13, where="x")


def edited(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    """A small header that says something else: ``edit(outer JSON, inner JSON)``."""
    outer = json.loads(small_header()[8:])
    inner = json.loads(outer["__metadata__"]["sharded_ckpt"])
    metadata = dict(outer["__metadata__"])
    edit(outer, inner)
    if outer.get("__metadata__") == metadata:
        outer["__metadata__"]["sharded_ckpt"] = json.dumps(inner)
    return framed(json.dumps(outer).encode())


def framed(text: bytes) -> bytes:
    total = -(-(8 + len(text)) // ALIGN) * ALIGN
    return struct.pack("<Q", total - 8) + text.ljust(total - 8)


def tensor(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda outer, inner: outer["model/a"].update(changes)


def piece(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda outer, inner: inner["slices"]["model/a"].update(changes)


def about(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda outer, inner: inner.update(changes)


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "overlap": lambda o, i: o["model/b"].update(data_offsets=[8, 9]),
    "overlap that ends well": lambda o, i: (
        o["model/b"].update(data_offsets=[11, 13], shape=[2]),
        i["slices"].update({"model/b": {"shape": [2], "start": 0}}),
    ),
    "hole that ends well": tensor(data_offsets=[0, 8], shape=[2]),
    "gap": lambda o, i: o["model/b"].update(data_offsets=[12, 12], shape=[0]),
    "data not covered": lambda o, i: (o.pop("model/b"), i["slices"].pop("model/b")),
    "offset past the end": tensor(data_offsets=[0, 14]),
    "offset huge": tensor(data_offsets=[0, 2**63 - 1], shape=[2**61 - 1]),
    "offset negative": tensor(data_offsets=[-12, 0]),
    "offsets swapped": tensor(data_offsets=[12, 0]),
    "offsets one": tensor(data_offsets=[0]),
    "offsets three": tensor(data_offsets=[0, 6, 12]),
    "offsets float": tensor(data_offsets=[0, 12.0]),
    "offset true": tensor(data_offsets=[False, 12]),
    "shape overflow": tensor(shape=[2**32, 2**32, 3]),
    "shape wraps to 3": tensor(shape=[2**62 + 1, 3, 2**62]),
    "shape negative": tensor(shape=[-1, -3]),
    "shape null": tensor(shape=None),
    "shape text": tensor(shape="3"),
    "shape of shapes": tensor(shape=[[3]]),
    "shape long": tensor(shape=[1] * 10_000 + [3]),
    "dtype unknown": tensor(dtype="F33"),
    "dtype other": tensor(dtype="F64"),
    "dtype list": tensor(dtype=["F32"]),
    "key more": tensor(extra=1),
    "key less": lambda o, i: o["model/a"].pop("dtype"),
    "tensor null": lambda o, i: o.update({"model/a": None}),
    "no metadata": lambda o, i: o.pop("__metadata__"),
    "foreign metadata": lambda o, i: o.update({"__metadata__": {"format": "pt"}}),
    "metadata number": lambda o, i: o.update({"__metadata__": 5}),
    "inner not JSON": lambda o, i: o.update({"__metadata__": {"sharded_ckpt": "{"}}),
    "inner list": lambda o, i: o.update({"__metadata__": {"sharded_ckpt": "[]"}}),
    "inner bomb": lambda o, i: o.update({"__metadata__": {"sharded_ckpt": "[" * 10**6}}),
    "inner twice": lambda o, i: o.update({"__metadata__": {"sharded_ckpt": '{"a":1,"a":1}'}}),
    "inner NaN": lambda o, i: o.update({"__metadata__": {"sharded_ckpt": '{"a":NaN}'}}),
    "format 0": about(format=0),
    "format text": about(format="1"),
    "kind": about(kind="index"),
    "step negative": about(step=-1),
    "step huge": about(step=10**17),
    "term true": about(term=True),
    "attempt": about(attempt="../../.."),
    "attempt null": about(attempt=None),
    "rank high": about(rank=4),
    "world size": about(world_size=0),
    "chunk zero": about(chunk_nbytes=0),
    "chunk negative": about(chunk_nbytes=-64),
    "chunk small": about(chunk_nbytes=1),
    "chunk above any writer's": about(chunk_nbytes=(64 << 20) + 1),
    "crc short": about(crc32c="0000000"),
    "crc long": about(crc32c="0" * 16),
    "crc upper": about(crc32c="ABCDEF01"),
    "crc null": about(crc32c=None),
    "no state": lambda o, i: i.pop("state"),
    "slices list": about(slices=[]),
    "slice missing": lambda o, i: i["slices"].pop("model/a"),
    "slice extra": lambda o, i: i["slices"].update(c={"shape": [1], "start": 0}),
    "slice null": lambda o, i: i["slices"].update({"model/a": None}),
    "start outside": piece(start=4),
    "start negative": piece(start=-1),
    "start huge": piece(start=2**63),
    "start and offset": piece(offset=[0, 0]),
    "neither": lambda o, i: i["slices"]["model/a"].pop("start"),
    "global shape small": piece(shape=[1, 3]),
    "global shape overflow": piece(shape=[2**32, 2**32]),
    "global shape wraps": piece(shape=[2**62 + 2, 4]),
    "global shape negative": piece(shape=[-2, -3]),
    "global shape null": piece(shape=None),
    "shape is the whole": piece(shape=[1, 3], start=0),
    "copy text": piece(copy="yes"),
    "copy false": piece(copy=False),
    "model dtype": piece(model_dtype="X"),
    "model dtype list": piece(model_dtype=[]),
    "model dtype null": piece(model_dtype=None),
    "slice key": piece(file="/etc/passwd"),
    "box of other size": lambda o, i: i["slices"].update(
        {"model/a": {"shape": [2, 3], "offset": [0, 1]}}
    ),
    "box of other rank": lambda o, i: i["slices"].update(
        {"model/a": {"shape": [6], "offset": [5]}}
    ),
    "not aligned": lambda o, i: (
        o["model/a"].update(data_offsets=[1, 13]),
        o["model/b"].update(data_offsets=[0, 1]),
    ),
    "name empty": lambda o, i: rename(o, i, ""),
    "name control": lambda o, i: rename(o, i, "model/\x00"),
    "name surrogate": lambda o, i: rename(o, i, "model/\ud800"),
    "name long": lambda o, i: rename(o, i, "x" * 5000),
}


def rename(outer: dict[str, Any], inner: dict[str, Any], name: str) -> None:
    outer[name] = outer.pop("model/a")
    inner["slices"][name] = inner["slices"].pop("model/a")


def test_the_edits_themselves_are_accepted() -> None:
    assert parse(edited(about(chunk_nbytes=64 << 20)), 13).chunk_nbytes == 64 << 20
    assert parse(edited(lambda o, i: None), 13).spans == {"model/a": (0, 12), "model/b": (12, 13)}
    box = {"shape": [9], "offset": [2]}
    found = parse(edited(lambda o, i: i["slices"].update({"model/a": box})), 13)
    assert found.entries["model/a"].region == Box((2,), (3,))


@pytest.mark.parametrize("edit", LIES.values(), ids=LIES)
def test_lies_are_refused(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """P8: every number of a header is checked before it is believed."""
    with pytest.raises(ShardError, match="d/rank-00001") as caught:
        parse(edited(edit), 13)
    assert caught.value.path == "d/rank-00001"


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{",
        b'{"a":1}x',
        b"\n" + small_header()[8:].rstrip(b" "),
        small_header()[8:].rstrip(b" ") + b"\n",
        b"\xff{}",
        b'{"m":{},"m":{}}',
        b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
        small_header()[8:].replace(b'"model/b"', b'"model/a"'),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_headers_that_are_not_strict_json_are_refused(text: bytes) -> None:
    with pytest.raises(ShardError):
        parse(framed(text), 13)


def test_the_file_must_have_exactly_the_bytes_that_the_header_says() -> None:
    header = small_header()
    for nbytes in (0, 12, 14, 4096, 2**62):
        with pytest.raises(ShardError):
            parse(header, nbytes)
    with pytest.raises(ShardError, match="bytes of header were read"):
        parse_header(header + b" ", file_nbytes=len(header) + 13, where="x")


def test_lies_allocate_nothing() -> None:
    """P8: a header that claims petabytes costs no memory."""
    claims = [
        tensor(data_offsets=[0, 2**60], shape=[2**58]),
        piece(shape=[2**62, 2]),
        about(chunk_nbytes=1),
    ]
    tracemalloc.start()
    try:
        for edit in claims:
            data = edited(edit)
            for file_nbytes in (len(data) + 13, 2**62):
                with pytest.raises(ShardError):
                    parse_header(data, file_nbytes=file_nbytes, where="x")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_newer_version_asks_for_an_upgrade() -> None:
    with pytest.raises(LoadError, match=r"format version 2.* upgrade sharded_ckpt"):
        parse(edited(about(format=2, kind="other")), 13)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 2**64))
def test_noise_is_refused(noise: bytes, length: int, file_nbytes: int) -> None:
    for data in (noise, struct.pack("<Q", length) + noise, framed(noise)):
        with pytest.raises(ShardError):
            parse_header(data, file_nbytes=file_nbytes, where="x")


@settings(max_examples=300)
@given(st.data())
def test_mutations_are_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever stands in the text, the parser ends in its own errors and in a consistent header."""
    text = bytearray(small_header())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(8, len(text.rstrip(b" "))))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"0", b"9", b"-", b"1e9", b'"', b"[", b"]", b"{", b",", b"null", b""])
        )
    framed_again = framed(bytes(text[8:]).rstrip(b" "))
    try:
        found = parse(framed_again, 13)
    except (ShardError, LoadError):
        return
    assert sum(end - start for start, end in found.spans.values()) == 13


def test_plans_that_cannot_be_right_are_refused() -> None:
    a = Entry("model/a", "F32", (2,), whole((2,)))
    with pytest.raises(UsageError, match="model/a: the name stands twice"):
        plan_shard([a, a])
    with pytest.raises(UsageError, match="not inside shape"):
        plan_shard([Entry("model/a", "F32", (2,), Run(1, 2))])
    with pytest.raises(UnsupportedError, match="F33"):
        plan_shard([Entry("model/a", "F33", (2,), Run(0, 2))])
    for name in ("", "__metadata__", "a\nb", "x" * 5000, "\ud800"):
        with pytest.raises(UsageError, match="tensor name"):
            plan_shard([Entry(name, "F32", (2,), Run(0, 2))])
    with pytest.raises(UsageError, match="chunk_nbytes"):
        plan_shard([a], 0)
    with pytest.raises(UsageError, match=f"safetensors allows {MAX_HEADER_NBYTES}"):
        header_of([a], state="x" * MAX_HEADER_NBYTES)


def test_ten_thousand_tensors_are_planned_quickly() -> None:
    entries = [
        Entry(f"optim/layers.{i}.weight/exp_avg", "F32", (4096, 4096), Run(i, 1000))
        for i in range(10_000)
    ]
    started = time.process_time()
    header = header_of(entries, chunk_nbytes=4 << 20)
    written = time.process_time()
    parse(header, 40_000_000)
    parsed = time.process_time()
    assert written - started < 0.6  # 0.15 on a quiet machine
    assert parsed - written < 1.5
