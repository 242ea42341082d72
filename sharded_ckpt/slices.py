"""Regions of a global tensor, and the named slices that sources hand out.

A region says which elements of a tensor of a given global shape somebody holds. Two kinds are
enough for every layout that DeepSpeed and FSDP use:

* :class:`Run`: consecutive elements of the row-major flattened tensor (ZeRO, FSDP1, replicated
  tensors that are cut by bytes);
* :class:`Box`: an n-dimensional block (FSDP2, tensor parallel).

Everything here is a value: nothing touches torch, a disk or another rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sharded_ckpt.errors import UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``start .. start + numel`` of the row-major flattened tensor."""

    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Box:
    """The block that begins at ``offset`` and extends ``extent`` elements along each dimension."""

    offset: Shape
    extent: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.extent)


Region = Run | Box


def whole(shape: Sequence[int]) -> Run:
    """The region that is all of a tensor of ``shape``."""
    return Run(0, math.prod(shape))


def check_region(name: str, shape: Shape, region: Region) -> None:
    """Raises :class:`UsageError` unless ``region`` lies inside a tensor of ``shape``."""
    if isinstance(region, Run):
        inside = region.start >= 0 and region.numel >= 0
        inside = inside and region.start + region.numel <= math.prod(shape)
    else:
        inside = len(region.offset) == len(region.extent) == len(shape) and all(
            o >= 0 and e >= 0 and o + e <= n
            for o, e, n in zip(region.offset, region.extent, shape, strict=True)
        )
    if not inside:
        raise UsageError(f"{name}: region {region} is not inside shape {list(shape)}")


def runs(region: Region, shape: Shape) -> Iterator[tuple[int, int]]:
    """``(start, numel)`` of the maximal runs of the flattened tensor, in row-major order.

    The elements of the region, in its own row-major order, are exactly these runs one after the
    other, which is why a run list is all that two regions need to be intersected.
    """
    if isinstance(region, Run):
        if region.numel:
            yield region.start, region.numel
        return
    if region.numel == 0:
        return
    # Dimensions that are held whole from the right merge into one run.
    split = len(shape)
    length = 1
    while split > 0:
        split -= 1
        length *= region.extent[split]
        if region.extent[split] != shape[split]:
            break
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(o * s for o, s in zip(region.offset, strides, strict=True))
    index = [0] * split
    while True:
        yield base + sum(i * strides[d] for d, i in enumerate(index)), length
        for d in reversed(range(split)):
            index[d] += 1
            if index[d] < region.extent[d]:
                break
            index[d] = 0
        else:
            return


def common(a: Region, b: Region, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Spans that two regions share: ``(position in a, position in b, numel)``, in elements.

    Positions count inside each region's own row-major order; spans come in row-major order of the
    tensor. Time is linear in the number of runs of the two regions.
    """
    left, right = runs(a, shape), runs(b, shape)
    pos_a = pos_b = 0
    run_a, run_b = next(left, None), next(right, None)
    while run_a is not None and run_b is not None:
        start = max(run_a[0], run_b[0])
        end = min(run_a[0] + run_a[1], run_b[0] + run_b[1])
        if start < end:
            yield pos_a + start - run_a[0], pos_b + start - run_b[0], end - start
        if run_a[0] + run_a[1] <= run_b[0] + run_b[1]:
            pos_a += run_a[1]
            run_a = next(left, None)
        else:
            pos_b += run_b[1]
            run_b = next(right, None)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the format says of one tensor in one shard: everything but its bytes.

    ``copy`` marks a per-rank copy of a whole tensor (a buffer, a step counter, private state): it
    does not count towards coverage, and a reader prefers its own rank's. ``model_dtype`` stands at
    ``master/`` tensors: the dtype that the model's own weight has, which is the cast of this one.
    """

    name: str
    dtype: str
    shape: Shape
    region: Region
    copy: bool = False
    model_dtype: str | None = None

    @property
    def numel(self) -> int:
        return self.region.numel

    @property
    def local_shape(self) -> Shape:
        """Shape of the tensor in the shard: 1-D for a run of part of it, else the block's."""
        if isinstance(self.region, Box):
            return self.region.extent
        if self.region == whole(self.shape):
            return self.shape
        return (self.region.numel,)


@dataclass(slots=True)
class Slice:
    """A named live tensor (a view, never a copy) and the part of the global tensor it is.

    ``tensor`` is a contiguous ``torch.Tensor`` of exactly ``entry.numel`` elements. ``eager`` asks
    for a copy at the call of ``save``, for what changes outside ``optimizer.step``.
    """

    entry: Entry
    tensor: Any
    eager: bool = False
