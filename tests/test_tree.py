"""Tagged trees: what goes in comes out, and what could not is refused with its path."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_ckpt import tree
from sharded_ckpt.errors import CorruptError, StateTypeError


def round_trip(value: Any) -> Any:
    """Through the text of a file, as a load would see it."""
    encoded = tree.encode(value, path="client_state", prefix="state/")
    text = json.dumps(encoded.tree, allow_nan=False)
    loaded = {
        name: torch.from_numpy(item.copy()) if isinstance(item, np.ndarray) else item.clone()
        for name, item in encoded.tensors.items()
    }
    parsed = tree.parse_json(text.encode())
    assert tree.tensor_names(parsed) == list(encoded.tensors)
    return tree.decode(parsed, loaded.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, NaN equal to itself and 0.0 unequal to -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [x.detach().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float | np.floating):
        return repr(a) == repr(b)
    if isinstance(a, complex | np.complexfloating):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        return same(list(a), list(b)) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(max_size=8),
    st.just("$"),
    st.tuples(st.integers(), st.text(st.characters(exclude_categories=["Cs"]))),
)
LEAVES = st.one_of(
    KEYS,
    st.floats(),
    st.complex_numbers(),
    st.sampled_from([np.float32(0.1), np.int8(-3), np.bool_(True), np.float64("nan")]),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])]),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.sampled_from(["float32", "uint16", "bool", "int64", "complex64"]).map(
        lambda name: np.arange(3).astype(name)
    ),
    st.sampled_from([torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool]).map(
        lambda dtype: torch.tensor([0, 1], dtype=torch.float32).to(dtype)
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=4).map(lambda d: defaultdict(list, d)),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(round_trip(value), value)


def test_plain_json_stands_for_itself() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"x": "é"}}
    encoded = tree.encode(value, path="x", prefix="state/")
    assert encoded.tree == value and list(encoded.tree) == ["b", "a"]


def test_states_of_the_random_generators() -> None:
    import random

    for state in (random.getstate(), np.random.get_state(), np.random.default_rng(0)):
        if isinstance(state, np.random.Generator):
            state = state.bit_generator.state
        assert same(round_trip(state), state)
    assert same(round_trip(torch.get_rng_state()), torch.get_rng_state())


def test_an_optimizer_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())
    parameter = round_trip([torch.nn.Parameter(torch.ones(2), requires_grad=False)])[0]
    assert type(parameter) is torch.nn.Parameter and not parameter.requires_grad


def test_sets_are_stored_in_one_order() -> None:
    """Strings hash differently in each process; the file must not show it."""
    mixed = {"b", "a", 1, None, (2, "c")}
    assert tree.encode({"b", "a", "c"}, path="x", prefix="").tree["items"] == ["a", "b", "c"]
    trees = [tree.encode(set(order), path="x", prefix="").tree for order in (mixed, list(mixed))]
    assert trees[0] == trees[1]


def test_tensor_names_are_unique_and_referenced_not_copied() -> None:
    a, b, c = (torch.zeros(i) for i in range(3))
    encoded = tree.encode({"x.y": a, "x": {"y": b}, "z": [c]}, path="p", prefix="state/")
    assert list(encoded.tensors) == ["state/x.y", "state/x.y~2", "state/z.0"]
    assert encoded.tensors["state/z.0"].data_ptr() == c.data_ptr()
    odd = tree.encode({"a\nb\0": a}, path="p", prefix="state/")
    assert list(odd.tensors) == ["state/a_b_"]
    assert list(tree.encode(a, path="p", prefix="state/").tensors) == ["state/value"]


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Words(str):
    pass


REFUSED = [
    (argparse.Namespace(a=1), r"use vars\(x\)"),
    (Colour.RED, r"use x\.value"),
    (Level.LOW, r"use x\.value"),
    (Point(1), r"_asdict"),
    (Config(), r"dataclasses\.asdict"),
    (Words("x"), r"test_tree\.Words"),
    (pathlib.Path("x"), r"use str\(x\)"),
    (datetime.datetime(2020, 1, 1), r"isoformat"),
    (collections.deque([1]), r"use list\(x\)"),
    (torch.nn.Linear(1, 1), r"state_dict"),
    (torch.Generator(), r"get_state"),
    (np.random.default_rng(), r"get_state"),
    (len, r"code is never stored"),
    (object(), r"type builtins\.object"),
    (bytearray(b"x"), r"use bytes"),
    (2**5000, r"bits"),
    ("\ud800", r"surrogate"),
    (np.array(["x"]), r"dtype"),
    (np.array([object()]), r"dtype"),
    (np.zeros(1, ">f4"), r"dtype"),
    (np.zeros(1, np.complex128), r"dtype"),
    (np.ma.zeros(2), r"np\.asarray"),
    (np.str_("x"), r"use str\(x\)"),
    (torch.zeros(2, dtype=torch.complex128), r"complex128"),
    (torch.zeros(2, device="meta"), r"dense tensor"),
    (torch.eye(2).to_sparse(), r"dense tensor"),
    (defaultdict(lambda: 1), r"factory"),
    ({frozenset([Colour.RED]): 1}, r"key "),
    ({(1, Point(2)): 1}, r"key "),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=lambda v: type(v).__name__)
def test_other_types_are_refused_with_the_path(value: Any, says: str) -> None:
    """P8, P7: nothing that needs code to be read is ever written, and the message says where."""
    where = re.escape("client_state['args']['model'][3]")
    with pytest.raises(StateTypeError, match=f"^{where}.*{says}") as caught:
        tree.encode({"args": {"model": [0, 1, 2, value]}}, path="client_state", prefix="state/")
    assert isinstance(caught.value, TypeError)


def test_keys_that_no_file_can_hold_are_refused() -> None:
    for key in ("\ud800", (1, "\udfff")):
        with pytest.raises(StateTypeError, match="surrogate"):
            tree.encode({key: 1}, path="p", prefix="")


def test_keys_that_are_tensors_and_cycles_and_depth_are_refused() -> None:
    with pytest.raises(StateTypeError, match="key holds a tensor"):
        tree.encode({torch.zeros(1): 1}, path="p", prefix="")
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(StateTypeError, match=r"p\[0\]\['again'\]: the object contains itself"):
        tree.encode(loop, path="p", prefix="")
    deep: Any = {1: 2}
    for _ in range(tree.MAX_DEPTH - 1):
        deep = {1: deep}
    assert round_trip(deep) == deep
    with pytest.raises(StateTypeError, match="nested deeper"):
        tree.encode([deep], path="p", prefix="")
    twice = [1]
    assert round_trip([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "node",
    [
        {"$": "pickle", "data": ""},
        {"$": ["tuple"], "items": []},
        {"$": "tuple"},
        {"$": "tuple", "items": 5},
        {"$": "float", "value": "1"},
        {"$": "bytes", "base64": "?"},
        {"$": "bytes", "base64": "AAA"},
        {"$": "complex", "value": [1]},
        {"$": "complex", "value": ["1", 2]},
        {"$": "numpy", "dtype": "object_", "value": 1},
        {"$": "numpy", "dtype": "int8", "value": 1000},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[1, 1], [1, 2]]},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "defaultdict", "factory": [], "items": []},
        {"$": "set", "items": [[]]},
        {"$": "torch.dtype", "value": "load"},
        {"$": "torch.dtype", "value": 5},
        {"$": "torch.device", "value": "nowhere"},
        {"$": "tensor", "name": "state/none"},
        {"$": "tensor", "name": "state/x", "numpy": "float64"},
    ],
    ids=str,
)
def test_trees_that_nobody_wrote_are_refused(node: Any) -> None:
    tensors = {"state/x": torch.zeros(1)}
    with pytest.raises(CorruptError, match="not a tagged tree"):
        tree.decode({"a": [node]}, tensors.__getitem__)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 1}}',
        b"[NaN]",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b"[-1e999]",
        b'["\xff"]',
        b"{} {}",
        b"",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"[" + b"9" * 5000 + b"]",
        '{"a": 1}'.encode("utf-16"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_strict_json(text: bytes) -> None:
    """P8: what json.loads lets through, or dies of, is refused."""
    with pytest.raises(ValueError):
        tree.parse_json(text)


def test_strict_json_takes_what_is_json() -> None:
    assert tree.parse_json(b' {"a": [1, -0.0, "\\u00e9", null]} ') == {"a": [1, -0.0, "é", None]}
    assert math.copysign(1, tree.parse_json(b"-0.0")) == -1
