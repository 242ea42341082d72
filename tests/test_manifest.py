"""Manifests: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_ckpt import checksum
from sharded_ckpt.errors import LoadError, ManifestError, UsageError
from sharded_ckpt.layout import SetId, shard_file
from sharded_ckpt.manifest import MAX_MANIFEST_NBYTES, Manifest, ShardRef

ID = SetId(term=3, serial=7, step=500, nonce="0123abcd")


def shard(rank: int, id: SetId = ID) -> ShardRef:
    return ShardRef(
        rank=rank,
        directory=id.dirname,
        file=shard_file(rank),
        nbytes=4096 + 64 * rank,
        header_nbytes=4096,
        header_crc32c=rank,
        file_crc32c=2**32 - 1 - rank,
    )


SMALL = Manifest(
    id=ID,
    run_id="r",
    world_size=2,
    content="full",
    origin=None,
    layout={"kind": "plain"},
    shards=(shard(0), shard(1)),
    state={"z": 1, "a": {"$": "float", "value": "nan"}},
    client_state={},
    aliases={"head.weight": "embed.weight"},
    metrics={"loss": 0.25, "count": 3.0},
    versions={"torch": "2"},
    created_at="2026-01-01T00:00:00Z",
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TREES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXT,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)
IDS = st.builds(
    SetId,
    term=st.integers(0, 10**8 - 1),
    serial=st.integers(0, 10**8 - 1),
    step=st.just(500),
    nonce=st.text("0123456789abcdef", min_size=8, max_size=8),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    id = draw(IDS)
    world_size = draw(st.integers(1, 10**6))
    ranks = draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=3))
    return Manifest(
        id=id,
        run_id=draw(TEXT),
        world_size=world_size,
        content=draw(st.sampled_from(["full", "weights"])),
        origin=draw(st.none() | IDS),
        layout=draw(st.dictionaries(TEXT, TREES, max_size=3)),
        shards=tuple(shard(rank, draw(IDS)) for rank in sorted(ranks)),
        state=draw(TREES),
        client_state=draw(TREES | st.just({"crc32c": '\n "crc32c": "00000000"'})),
        aliases=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        metrics=draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3)),
        versions=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        created_at=draw(TEXT),
    )


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data, "m") == manifest
    assert Manifest.from_bytes(data, "m").to_bytes() == data


def test_every_bit_flip_is_refused() -> None:
    """P1: no damaged manifest commits anything."""
    data = SMALL.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(ManifestError, match=r"^runs/m\.json: "):
                Manifest.from_bytes(bytes(damaged), "runs/m.json")


def test_every_truncation_and_extension_is_refused() -> None:
    data = SMALL.to_bytes()
    for nbytes in range(len(data)):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(data[:nbytes], "m")
    for tail in (b"\n", b" ", b"\0", data):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(data + tail, "m")


def test_the_text_is_for_people() -> None:
    text = SMALL.to_bytes().decode("ascii")
    assert text.endswith("\n}\n")
    outer = json.loads(text)
    assert list(outer) == sorted(outer)
    assert outer["shards"][1]["file"] == "rank-00001.safetensors"
    assert outer["shards"][1]["file_crc32c"] == "fffffffe"
    assert outer["format"] == {"name": "sharded_ckpt", "version": 1}
    # The checksum can be recomputed by hand.
    blank = text.replace(outer["crc32c"], "00000000")
    assert outer["crc32c"] == checksum.to_hex(checksum.crc32c(blank.encode()))


def test_the_order_of_state_is_kept() -> None:
    manifest = replace(SMALL, client_state={"b": 1, "a": 2})
    again = Manifest.from_bytes(manifest.to_bytes(), "m")
    assert list(again.client_state) == ["b", "a"] and list(again.state) == ["z", "a"]


def test_metrics_that_are_no_json_numbers() -> None:
    odd = {"a": math.nan, "b": math.inf, "c": -math.inf}
    again = Manifest.from_bytes(replace(SMALL, metrics=odd).to_bytes(), "m").metrics
    assert math.isnan(again["a"]) and (again["b"], again["c"]) == (math.inf, -math.inf)
    null = Manifest.from_bytes(edited(lambda m: m["metrics"].update(loss=None)), "m").metrics
    assert math.isnan(null["loss"])


def test_what_ranks_and_counts() -> None:
    assert SMALL.rank_key == (3, 7) and SMALL.nbytes == 2 * 4096 + 64
    thinned = replace(SMALL, content="weights", origin=SetId(2, 9, 500, "00000000"))
    assert thinned.rank_key == (2, 9)
    assert SMALL.shards[1].path == f"{ID.dirname}/rank-00001.safetensors"


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest that says something else, with a checksum that is right."""
    outer = json.loads(SMALL.to_bytes())
    edit(outer)
    return sealed(json.dumps({**outer, "crc32c": "00000000"}, indent=1) + "\n")


def sealed(text: str) -> bytes:
    mark = '\n "crc32c": "'
    head, tail = text.split(mark, 1)
    digits = checksum.to_hex(checksum.crc32c(text.encode()))
    return (head + mark + digits + tail[8:]).encode()


def set_in(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(outer: Any) -> None:
        for key in keys[:-1]:
            outer = outer[key]
        outer[keys[-1]] = to

    return edit


LIES = {
    "no format": lambda m: m.pop("format"),
    "other format": set_in("format", "name", to="zip"),
    "version 0": set_in("format", "version", to=0),
    "version text": set_in("format", "version", to="1"),
    "version true": set_in("format", "version", to=True),
    "step text": set_in("step", to="500"),
    "step float": set_in("step", to=500.0),
    "step true": set_in("step", to=True),
    "step negative": set_in("step", to=-1),
    "step huge": set_in("step", to=10**16),
    "term huge": set_in("term", to=2**64),
    "attempt path": set_in("attempt", to="../../xy"),
    "attempt newline": set_in("attempt", to="0123abc\n"),
    "world size 0": set_in("world_size", to=0),
    "world size small": set_in("world_size", to=1),
    "content": set_in("content", to="half"),
    "content list": set_in("content", to=["full"]),
    "origin number": set_in("origin", to=1),
    "origin part": set_in("origin", to={"term": 1, "serial": 1}),
    "layout": set_in("layout", to=[]),
    "no shards": set_in("shards", to=[]),
    "shards object": set_in("shards", to={}),
    "shard null": set_in("shards", 0, to=None),
    "rank twice": set_in("shards", 1, to=json.loads(SMALL.to_bytes())["shards"][0]),
    "rank order": lambda m: m["shards"].reverse(),
    "rank high": set_in("shards", 1, "rank", to=2),
    "directory up": set_in("shards", 0, "directory", to=".."),
    "directory deep": set_in("shards", 0, "directory", to="a/" + ID.dirname),
    "directory empty": set_in("shards", 0, "directory", to=""),
    "directory null": set_in("shards", 0, "directory", to=None),
    "file up": set_in("shards", 0, "file", to="../rank-00000.safetensors"),
    "file absolute": set_in("shards", 0, "file", to="/etc/passwd"),
    "file of another": set_in("shards", 0, "file", to="rank-00001.safetensors"),
    "nbytes negative": set_in("shards", 0, "nbytes", to=-1),
    "nbytes small": set_in("shards", 0, "nbytes", to=4095),
    "nbytes huge": set_in("shards", 0, "nbytes", to=2**63),
    "header 0": set_in("shards", 0, "header_nbytes", to=0),
    "crc short": set_in("shards", 0, "file_crc32c", to="123"),
    "crc upper": set_in("shards", 0, "file_crc32c", to="ABCDEF01"),
    "crc number": set_in("shards", 0, "header_crc32c", to=1),
    "no state": lambda m: m.pop("state"),
    "no client state": lambda m: m.pop("client_state"),
    "alias number": set_in("aliases", "x", to=1),
    "aliases list": set_in("aliases", to=[]),
    "metric text": set_in("metrics", "loss", to="low"),
    "metric true": set_in("metrics", "loss", to=True),
    "metric huge": set_in("metrics", "loss", to=10**400),
    "version of torch": set_in("versions", "torch", to=None),
    "created": set_in("created_at", to=0),
    "run id": set_in("run_id", to=None),
}


@pytest.mark.parametrize("edit", LIES.values(), ids=LIES)
def test_lies_with_a_good_checksum_are_refused(edit: Callable[[dict[str, Any]], object]) -> None:
    """P8: what a manifest says decides what is read and deleted, so it must be what we write."""
    with pytest.raises(ManifestError, match="^m: "):
        Manifest.from_bytes(edited(edit), "m")


def test_the_edits_themselves_are_accepted() -> None:
    """The tests above refuse what was edited, not the editing."""
    assert Manifest.from_bytes(edited(lambda m: None), "m") == SMALL
    # An additional key is what a later minor change would look like.
    assert Manifest.from_bytes(edited(set_in("new", to=1)), "m") == SMALL


@pytest.mark.parametrize(
    "change",
    [
        ('"step": 500', '"step": 500,\n "step": 500'),
        ('"loss": 0.25', '"loss": NaN'),
        ('"loss": 0.25', '"loss": 1e999'),
        ('"client_state": {}', '"client_state": ' + "[" * 5000 + "]" * 5000),
        ('"client_state": {}', '"client_state": ' + "9" * 5000),
        ('"run_id": "r"', '"run_id": "r",\n "crc32c": "00000000"'),
    ],
    ids=["key twice", "NaN", "overflow", "depth", "digits", "crc twice"],
)
def test_json_that_is_not_strict_is_refused(change: tuple[str, str]) -> None:
    text = json.dumps({**json.loads(SMALL.to_bytes()), "crc32c": "00000000"}, indent=1) + "\n"
    assert change[0] in text
    with pytest.raises(ManifestError):
        Manifest.from_bytes(sealed(text.replace(*change)), "m")


def test_a_newer_version_asks_for_an_upgrade() -> None:
    with pytest.raises(LoadError, match=r"^m: format version 2.* upgrade sharded_ckpt"):
        Manifest.from_bytes(edited(set_in("format", "version", to=2)), "m")


def test_size_is_checked_before_anything_is_read() -> None:
    with pytest.raises(ManifestError, match="at most"):
        Manifest.from_bytes(bytes(MAX_MANIFEST_NBYTES + 1), "m")
    with pytest.raises(UsageError, match="put big values of client_state into tensors"):
        replace(SMALL, client_state="x" * MAX_MANIFEST_NBYTES).to_bytes()


@pytest.mark.parametrize(
    "wrong",
    [
        {"content": "half"},
        {"shards": ()},
        {"shards": (shard(0), shard(0))},
        {"world_size": 1},
        {"aliases": {"x": 1}},
    ],
    ids=str,
)
def test_what_a_reader_would_refuse_is_not_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the manifest being written"):
        replace(SMALL, **wrong).to_bytes()


def test_it_grows_with_ranks_and_not_with_tensors() -> None:
    big = replace(SMALL, world_size=4096, shards=tuple(shard(rank) for rank in range(4096)))
    assert len(big.to_bytes()) < 4096 * 300
