"""Plans against brute force: every element once, whatever the two layouts are."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_ckpt import plan
from sharded_ckpt.errors import StateMismatch, UsageError
from sharded_ckpt.plan import Holding, Read
from sharded_ckpt.slices import Box, Entry, Region, Run, Shape, whole

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def elements(region: Region, shape: Shape) -> np.ndarray:
    """Flat indexes of a region in its own order."""
    flat = np.arange(math.prod(shape))
    if isinstance(region, Run):
        return flat[region.start : region.start + region.numel]
    block = tuple(slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True))
    return flat.reshape(shape)[block].reshape(-1)


@st.composite
def cuts(draw: st.DrawFn, length: int, most: int = 4) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), max_size=most - 1))
    return [0, *sorted(inner), length]


@st.composite
def splits(draw: st.DrawFn, shape: Shape) -> list[Region]:
    """Some way to cut a tensor over ranks: by elements, or as a grid, some pieces empty."""
    if draw(st.booleans()):
        edges = draw(cuts(math.prod(shape)))
        return [Run(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    regions: list[Box] = [Box((), ())]
    for length in shape:
        edges = draw(cuts(length, 3))
        regions = [
            Box((*r.offset, a), (*r.extent, b - a))
            for r in regions
            for a, b in zip(edges, edges[1:], strict=False)
        ]
    return list(draw(st.permutations(regions)))


@st.composite
def pieces(draw: st.DrawFn, shape: Shape) -> list[Region]:
    """Some way to cut that need not be a grid: boxes are cut again, in halves."""
    found: list[Region] = []
    for region in draw(splits(shape)):
        if isinstance(region, Box) and shape and draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(0, region.extent[dim]))
            low, high = list(region.extent), list(region.extent)
            low[dim], high[dim] = at, region.extent[dim] - at
            offset = list(region.offset)
            offset[dim] += at
            found += [Box(region.offset, tuple(low)), Box(tuple(offset), tuple(high))]
        else:
            found.append(region)
    return found


def entries(name: str, shape: Shape, regions: Sequence[Region], dtype: str = "F32") -> list[Entry]:
    return [Entry(name, dtype, shape, region) for region in regions]


def hold(name: str, shape: Shape, regions: Sequence[Region]) -> dict[str, list[Holding]]:
    return {name: [Holding(i, e, 40 * i) for i, e in enumerate(entries(name, shape, regions))]}


def carry_out(
    found: Sequence[Read], wanted: Sequence[Entry], holdings: dict[str, list[Holding]]
) -> list[np.ndarray]:
    """What the wanted pieces hold after the reads, -1 where nothing was read; F32 throughout."""
    disk: dict[int, np.ndarray] = {}
    for held in holdings.values():
        for h in held:
            data = disk.setdefault(h.file, np.full(4000, -7, np.int32))
            values = elements(h.entry.region, h.entry.shape)
            data[h.data_start // 4 : h.data_start // 4 + len(values)] = values
    filled = [np.full(entry.numel, -1, np.int32) for entry in wanted]
    for read in found:
        assert read.nbytes > 0 and read.nbytes % 4 == 0
        start, to, count = read.data_start // 4, read.dest_start_bytes // 4, read.nbytes // 4
        assert to + count <= len(filled[read.want])
        assert (filled[read.want][to : to + count] == -1).all(), "an element was read twice"
        filled[read.want][to : to + count] = disk[read.file][start : start + count]
    return filled


@settings(max_examples=300)
@given(st.data(), SHAPES)
def test_any_layout_is_read_from_any_other(data: st.DataObject, shape: Shape) -> None:
    """P5: each wanted element is read exactly once, from the place where it is."""
    holdings = hold("master/w", shape, data.draw(pieces(shape)))
    wanted = entries("master/w", shape, data.draw(pieces(shape)))
    found = plan.reads(wanted, holdings, prefer_file=None)
    for entry, values in zip(wanted, carry_out(found, wanted, holdings), strict=True):
        assert values.tolist() == elements(entry.region, shape).tolist()
    assert found == sorted(found, key=lambda read: (read.file, read.data_start))


@settings(max_examples=200)
@given(st.data(), SHAPES)
def test_what_is_missing_is_noticed(data: st.DataObject, shape: Shape) -> None:
    regions = data.draw(pieces(shape))
    regions.pop(data.draw(st.integers(0, len(regions) - 1)))
    wanted = entries("master/w", shape, data.draw(pieces(shape)))
    there = {i for region in regions for i in elements(region, shape).tolist()}
    needed = {i for entry in wanted for i in elements(entry.region, shape).tolist()}
    whole_again = bool(regions) and needed <= there
    try:
        plan.reads(wanted, hold("master/w", shape, regions), prefer_file=None)
        assert whole_again
    except StateMismatch as error:
        assert not whole_again and "master/w" in str(error)


def test_the_same_layout_is_one_read_a_piece() -> None:
    """However many rows a block has, and however a run was cut."""
    shape = (100, 6)
    regions: list[Region] = [Box((0, 0), (100, 3)), Box((0, 3), (100, 3))]
    found = plan.reads(entries("x", shape, regions), hold("x", shape, regions), prefer_file=None)
    assert found == [Read(0, 0, 1200, 0, 0), Read(1, 40, 1200, 1, 0)]
    merged = plan.reads(
        entries("x", shape, [Box((10, 0), (20, 3))]), hold("x", shape, regions), prefer_file=None
    )
    assert merged == [Read(0, 120, 240, 0, 0)]


def test_an_element_held_twice_is_read_once() -> None:
    regions = [Run(0, 6), Run(4, 6), Run(2, 3)]
    holdings, wanted = hold("x", (10,), regions), entries("x", (10,), [Run(0, 10)])
    found = plan.reads(wanted, holdings, prefer_file=None)
    assert carry_out(found, wanted, holdings)[0].tolist() == list(range(10))


def copy_of(file: int, name: str = "optim/w/step") -> Holding:
    return Holding(file, Entry(name, "F32", (), Run(0, 1), copy=True), 8)


def test_copies_come_from_the_own_file_else_the_lowest() -> None:
    wanted = [Entry("optim/w/step", "F32", (), Run(0, 1), copy=True)]
    holdings = {"optim/w/step": [copy_of(5), copy_of(2), copy_of(3)]}
    for prefer, file in ((3, 3), (5, 5), (4, 2), (None, 2)):
        assert plan.reads(wanted, holdings, prefer_file=prefer) == [Read(file, 8, 4, 0, 0)]
    part = Holding(0, Entry("optim/w/step", "F32", (), Run(0, 1)), 0)
    with pytest.raises(StateMismatch, match="1 not saved: optim/w/step"):
        plan.reads(wanted, {"optim/w/step": [part]}, prefer_file=None)
    assert plan.reads(wanted, {"optim/w/step": [part, copy_of(2)]}, prefer_file=0)[0].file == 2


def test_a_part_is_read_from_parts_and_only_then_from_a_copy() -> None:
    wanted = [Entry("optim/w/step", "F32", (), Run(0, 1))]
    part = Holding(7, Entry("optim/w/step", "F32", (), Run(0, 1)), 0)
    for held, file in (([copy_of(1), part], 7), ([copy_of(4), copy_of(1)], 1)):
        assert [r.file for r in plan.reads(wanted, {"optim/w/step": held}, prefer_file=None)] == [
            file
        ]


def test_everything_that_does_not_fit_is_listed_at_once() -> None:
    """P7: one error with all names, not one error a name."""
    wanted = [
        Entry("model/gone", "F32", (2,), whole((2,))),
        Entry("model/part", "F32", (4,), whole((4,))),
        Entry("model/shape", "F32", (5,), whole((5,))),
        Entry("model/dtype", "BF16", (4,), whole((4,))),
    ]
    names = ("model/part", "model/shape", "model/dtype")
    holdings = {name: hold(name, (4,), [Run(0, 3)])[name] for name in names}
    with pytest.raises(StateMismatch) as caught:
        plan.reads(wanted, holdings, prefer_file=None)
    text = str(caught.value)
    assert "1 not saved: model/gone" in text
    assert "model/part (3 of 4 elements are saved)" in text
    assert "model/shape (saved as F32 [4], wanted as F32 [5])" in text
    assert "model/dtype (saved as F32 [4], wanted as BF16 [4])" in text
    many = [Entry(f"model/{i}", "F32", (2,), whole((2,))) for i in range(50)]
    with pytest.raises(StateMismatch, match=r"50 not saved: .*model/9 and 40 more"):
        plan.reads(many, {}, prefer_file=None)


def test_one_holding_of_another_shape_is_enough_to_refuse() -> None:
    holdings = {"x": [*hold("x", (4,), [Run(0, 4)])["x"], *hold("x", (2, 2), [Run(0, 4)])["x"]]}
    with pytest.raises(StateMismatch, match=r"saved as F32 \[2, 2\]"):
        plan.reads(entries("x", (4,), [Run(0, 4)]), holdings, prefer_file=None)


def over_ranks(name: str, shape: Shape, regions: Sequence[Region]) -> dict[int, list[Entry]]:
    return {rank: [entry] for rank, entry in enumerate(entries(name, shape, regions))}


@settings(max_examples=300)
@given(st.data(), SHAPES)
def test_coverage_agrees_with_counting(data: st.DataObject, shape: Shape) -> None:
    """P1: a set is committed only if every element of every tensor is there, once."""
    regions = data.draw(pieces(shape))
    for _ in range(data.draw(st.integers(0, 2))):
        fault = data.draw(st.sampled_from(["drop", "twice", "none"]))
        if fault == "drop" and len(regions) > 1:
            regions.pop(data.draw(st.integers(0, len(regions) - 1)))
        elif fault == "twice":
            regions += data.draw(pieces(shape))[:1]
    count = np.zeros(math.prod(shape), int)
    for region in regions:
        count[elements(region, shape)] += 1
    found = plan.coverage(over_ranks("master/w", shape, regions))
    assert (found == []) == bool((count == 1).all()), found
    # model/ may be partial where there is a master, but nothing may be there twice.
    with_master = {
        **over_ranks("model/w", shape, regions),
        99: entries("master/w", shape, [whole(shape)]),
    }
    assert (plan.coverage(with_master) == []) == bool((count <= 1).all())


def test_coverage_says_what_is_wrong_and_who() -> None:
    def problem(*regions: Region, shape: Shape = (10,)) -> str:
        (text,) = plan.coverage(over_ranks("master/w", shape, regions))
        return text

    assert problem(Run(0, 4), Run(6, 4)) == ("master/w: elements 4:6 of 10 are written by no rank")
    assert problem(Run(0, 5)) == "master/w: elements 5:10 of 10 are written by no rank"
    assert problem(Run(2, 8)) == "master/w: elements 0:2 of 10 are written by no rank"
    assert problem(Run(0, 6), Run(4, 6)) == (
        "master/w: elements 4:6 of 10 are written by rank 0 and by rank 1"
    )
    quarters = [Box((a, b), (2, 2)) for a in (0, 2) for b in (0, 2)]
    assert problem(*quarters[:3], shape=(4, 4)) == (
        "master/w: elements 2:4 of 4 are written by no rank, at 2:4 of dimension 0"
    )
    assert problem(*quarters, Box((3, 3), (1, 1)), shape=(4, 4)) == (
        "master/w: elements 3:4 of 4 are written by rank 3 and by rank 4, at 3:4 of dimension 0"
    )
    # The corners are all there and the number of elements is right, but not the elements.
    assert "written by" in problem(*quarters[:3], quarters[0], shape=(4, 4))
    mixed = [Box((0, 0), (4, 2)), Run(2, 2), Run(6, 2), Run(10, 2), Run(14, 2)]
    assert plan.coverage(over_ranks("x", (4, 4), mixed)) == []
    assert "written by rank 0 and by rank 5" in problem(*mixed, Run(4, 1), shape=(4, 4))


def test_coverage_of_copies_and_of_ranks_that_disagree() -> None:
    step = Entry("optim/w/step", "F32", (), Run(0, 1), copy=True)
    assert plan.coverage({0: [step], 1: [step]}) == []
    assert plan.coverage({}) == []
    w = Entry("model/w", "F32", (4,), Run(0, 2))
    for other in (
        Entry("model/w", "F32", (2, 2), Run(2, 2)),
        Entry("model/w", "BF16", (4,), Run(2, 2)),
    ):
        (text,) = plan.coverage({3: [w], 4: [other]})
        assert text.startswith("model/w: rank 4 has ") and "rank 3 F32 [4]" in text


def test_overrides_are_models_with_a_master() -> None:
    names = ["model/a", "model/b", "master/b", "buffer/b", "master/c", "optim/a/model"]
    assert plan.overrides(names) == ["model/b"]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8])), max_size=12),
    st.integers(1, 9),
)
def test_replicated_tensors_are_shared_out_equally(
    tensors: list[tuple[int, int]], parts: int
) -> None:
    sizes, itemsizes = [n for n, _ in tensors], [size for _, size in tensors]
    shares = plan.split_replicated(sizes, itemsizes, parts)
    assert len(shares) == parts
    total = sum(n * size for n, size in tensors)
    for share in shares:
        nbytes = sum(count * itemsizes[index] for index, _, count in share)
        assert abs(nbytes - total / parts) < 2 * max(itemsizes, default=1)
    for index, numel in enumerate(sizes):
        found = sorted((s, n) for share in shares for i, s, n in share if i == index)
        assert found, "an empty tensor is somewhere too"
        assert [s for s, _ in found] == [0, *np.cumsum([n for _, n in found])[:-1]]
        assert sum(n for _, n in found) == numel
        assert numel == 0 or all(n > 0 for _, n in found)
    one_each = plan.split_replicated([5, 5], [4, 4], 2)
    assert one_each == [[(0, 0, 5)], [(1, 0, 5)]]


@given(st.data(), SHAPES)
def test_layouts_survive_a_vote(data: st.DataObject, shape: Shape) -> None:
    listed = entries("model/é", shape, data.draw(pieces(shape)))
    listed.append(Entry("master/x", "F32", (2,), Run(1, 1), copy=True, model_dtype="BF16"))
    again = plan.entries_from_json(json.loads(json.dumps(plan.entries_to_json(listed))))
    assert again == listed
    assert plan.layout_digest(again) == plan.layout_digest(listed)


def test_digests_tell_layouts_apart_but_not_orders() -> None:
    a = Entry("model/a", "F32", (4,), Run(0, 2))
    b = Entry("model/b", "F32", (4,), Run(0, 2))
    digest = plan.layout_digest([a, b])
    assert digest == plan.layout_digest([b, a]) and len(digest) == 16
    changed = [
        Entry("model/c", "F32", (4,), Run(0, 2)),
        Entry("model/a", "I32", (4,), Run(0, 2)),
        Entry("model/a", "F32", (5,), Run(0, 2)),
        Entry("model/a", "F32", (4,), Run(1, 2)),
        Entry("model/a", "F32", (4,), Box((0,), (2,))),
        Entry("model/a", "F32", (4,), Run(0, 2), copy=True),
        Entry("model/a", "F32", (4,), Run(0, 2), model_dtype="BF16"),
    ]
    assert len({plan.layout_digest([entry, b]) for entry in [a, *changed]}) == 8


@pytest.mark.parametrize(
    "tree",
    [
        5,
        [5],
        [["x"]],
        [["x", "F33", [2], [0, 2], 0, None]],
        [["x", ["F32"], [2], [0, 2], 0, None]],
        [["x", "F32", None, [0, 2], 0, None]],
        [["x", "F32", [2], [0], 0, None]],
        [["x", "F32", [2], [0, 3], 0, None]],
        [["x", "F32", [2], [[0], [3]], 0, None]],
        [["x", "F32", [2], [[0], 2], 0, None]],
        [["x", "F32", [2], ["a", 2], 0, None]],
        [[None, "F32", [2], [0, 2], 0, None]],
    ],
    ids=str,
)
def test_layouts_that_nobody_sent_are_refused(tree: object) -> None:
    with pytest.raises(UsageError):
        plan.entries_from_json(tree)


def seconds(work: object) -> float:
    started = time.process_time()
    assert callable(work)
    work()
    return time.process_time() - started


def test_time_is_near_linear() -> None:
    """P9: ten thousand pieces of one tensor, or of as many tensors, in well under a second."""
    n = 10_000
    runs = over_ranks("x", (7 * n,), [Run(7 * i, 7) for i in range(n)])
    grid = over_ranks("x", (100, 300), [Box((i // 100, i % 100 * 3), (1, 3)) for i in range(n)])
    many = {0: [Entry(f"optim/{i}/a", "F32", (64, 64), Run(0, 4096)) for i in range(n)]}
    for layouts in (runs, grid, many):
        holdings: dict[str, list[Holding]] = {}
        for rank, listed in layouts.items():
            for entry in listed:
                holdings.setdefault(entry.name, []).append(Holding(rank, entry, 0))
        wanted = [entry for listed in layouts.values() for entry in listed]
        assert seconds(lambda layouts=layouts: plan.coverage(layouts)) < 1
        assert seconds(lambda w=wanted, h=holdings: plan.reads(w, h, prefer_file=None)) < 2
    assert seconds(lambda: plan.layout_digest(many[0])) < 1
    # A column block of 20,000 rows from 1,000 flat shards: rows of it are walked once.
    shape, share = (20_000, 64), 20_000 * 64 // 1000
    flat = hold("x", shape, [Run(i * share, share) for i in range(1000)])
    column = entries("x", shape, [Box((0, 32), (20_000, 32))])
    assert seconds(lambda: plan.reads(column, flat, prefer_file=None)) < 2
