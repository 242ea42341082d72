"""Names: one spelling for each thing, and nothing else is taken for ours."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_ckpt import layout
from sharded_ckpt.layout import SetId

IDS = st.builds(
    SetId,
    term=st.integers(0, 10**8 - 1),
    serial=st.integers(0, 10**8 - 1),
    step=st.integers(0, layout.MAX_STEP),
    nonce=st.text("0123456789abcdef", min_size=8, max_size=8),
)
ODD_NAMES = (
    "",
    ".",
    "..",
    "../step-00000005-t0001-0001-00000000",
    "step-00000005-t0001-0001-00000000/",
    "step-00000005-t0001-0001-00000000\n",
    "step-00000005-t0001-0001-0000000G",
    "step-00000005-t0001-0001-ABCDEF00",
    "step-5-t1-1-00000000",
    "step-000000005-t0001-0001-00000000",
    "step-00000005-t00001-0001-00000000",
    "step-00000005-t0001-0001-00000000.tmp",
    "step-０0000005-t0001-0001-00000000",
    "STEP-00000005-t0001-0001-00000000",
    "term-1.json",
    "term-00001.json",
    "term-0001.json~",
    "rank-0.safetensors",
    "rank-000000.safetensors",
    "rank-00000.safetensors\0",
    "rank--0001.safetensors",
    ".tmp-0123",
    "trash-step-00000005-t0001-0001-00000000",
    "trash-../x-00000000",
)


@given(IDS)
def test_names_come_back(id: SetId) -> None:
    assert SetId.parse(id.dirname) == id
    assert layout.parse_trash_name(layout.trash_name(id.dirname)) == id
    assert layout.parse_term_file(layout.term_file(id.term)) == id.term
    assert layout.parse_shard_file(layout.shard_file(id.serial)) == id.serial


@pytest.mark.parametrize("name", ODD_NAMES)
def test_other_names_are_not_ours(name: str) -> None:
    assert SetId.parse(name) is None
    assert layout.parse_term_file(name) is None
    assert layout.parse_shard_file(name) is None
    assert layout.parse_trash_name(name) is None
    assert not layout.is_temp_name(name)


@given(IDS, st.data())
def test_a_changed_name_never_names_the_same_set(id: SetId, data: st.DataObject) -> None:
    name = id.dirname
    at = data.draw(st.integers(0, len(name) - 1))
    other = data.draw(st.characters())
    changed = name[:at] + other + name[at + 1 :]
    if changed != name:
        assert SetId.parse(changed) != id


@given(IDS, IDS)
def test_sets_are_ordered_by_term_then_serial(a: SetId, b: SetId) -> None:
    if (a.term, a.serial) != (b.term, b.serial):
        assert (a < b) == ((a.term, a.serial) < (b.term, b.serial))


def test_new_names_are_unique_and_steps_bounded() -> None:
    made = {SetId.new(step=5, term=1, serial=1).dirname for _ in range(100)}
    assert len(made) == 100
    for step in (-1, layout.MAX_STEP + 1):
        with pytest.raises(ValueError, match=re.escape(f"got {step}")):
            SetId.new(step=step, term=1, serial=1)


def test_temp_names_are_known_again() -> None:
    assert layout.is_temp_name(layout.temp_name())
    assert layout.temp_name() != layout.temp_name()
