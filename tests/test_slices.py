"""Regions against numpy: the same elements, in the same order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_ckpt.errors import UsageError
from sharded_ckpt.slices import Box, Entry, Region, Run, Shape, check_region, common, runs, whole

SHAPES = st.lists(st.integers(0, 5) | st.integers(2, 5), max_size=4).map(tuple)


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Region:
    if draw(st.booleans()):
        total = int(np.prod(shape, dtype=int))
        start = draw(st.integers(0, total))
        return Run(start, draw(st.integers(0, total - start)))
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(
        offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    )


def elements(region: Region, shape: Shape) -> list[int]:
    """Flat indexes of a region in its own order, by numpy."""
    flat = np.arange(int(np.prod(shape, dtype=int)))
    if isinstance(region, Run):
        return flat[region.start : region.start + region.numel].tolist()
    block = tuple(slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True))
    return flat.reshape(shape)[block].reshape(-1).tolist()


@given(st.data(), SHAPES)
def test_runs_are_the_elements_and_maximal(data: st.DataObject, shape: Shape) -> None:
    region = data.draw(regions(shape))
    check_region("x", shape, region)
    found = list(runs(region, shape))
    assert [i for start, n in found for i in range(start, start + n)] == elements(region, shape)
    assert all(n > 0 for _, n in found)
    if isinstance(region, Box) and region.extent[1:] == shape[1:]:
        assert len(found) <= 1


@given(st.data(), SHAPES)
def test_common_is_the_intersection(data: st.DataObject, shape: Shape) -> None:
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    in_a, in_b = elements(a, shape), elements(b, shape)
    spans = list(common(a, b, shape))
    assert all(n > 0 for _, _, n in spans)
    left = [i for at, _, n in spans for i in in_a[at : at + n]]
    right = [i for _, at, n in spans for i in in_b[at : at + n]]
    assert left == right == sorted(set(in_a) & set(in_b))


def test_common_of_all_pairs_of_regions() -> None:
    """Drawn regions are mostly small and apart; here every case of a small tensor is tried."""
    shape = (3, 3)
    edges = [(o, n) for o in range(4) for n in range(4 - o)]
    every: list[Region] = [Run(s, n) for s in range(9) for n in range(1, 10 - s)]
    every += [Box((a, b), (n, m)) for a, n in edges for b, m in edges if n and m]
    held = {region: elements(region, shape) for region in every}
    for a in every:
        for b in every:
            spans = list(common(a, b, shape))
            left = [i for at, _, n in spans for i in held[a][at : at + n]]
            right = [i for _, at, n in spans for i in held[b][at : at + n]]
            assert left == right == sorted(set(held[a]) & set(held[b])), (a, b)


@pytest.mark.parametrize(
    "region",
    [
        Run(-1, 2),
        Run(0, 7),
        Run(6, 1),
        Run(0, -1),
        Box((0,), (2,)),
        Box((0, 0), (3, 3)),
        Box((-1, 0), (1, 1)),
        Box((0, 0), (1, -1)),
        Box((0, 0), (1,)),
    ],
)
def test_regions_outside_are_refused(region: Region) -> None:
    with pytest.raises(UsageError, match=r"model/w: region .* is not inside shape \[2, 3\]"):
        check_region("model/w", (2, 3), region)


@pytest.mark.parametrize(
    ("shape", "region", "local"),
    [
        ((2, 3), whole((2, 3)), (2, 3)),
        ((2, 3), Run(0, 5), (5,)),
        ((2, 3), Box((1, 0), (1, 3)), (1, 3)),
        ((), whole(()), ()),
        ((), Run(0, 0), (0,)),
        ((), Box((), ()), ()),
        ((0, 3), whole((0, 3)), (0, 3)),
    ],
)
def test_local_shapes(shape: Shape, region: Region, local: Shape) -> None:
    entry = Entry("x", "F32", shape, region)
    assert entry.local_shape == local
    assert entry.numel == int(np.prod(local, dtype=int))
