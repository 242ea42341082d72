"""Cutting reads and tensors into windows, so that memory is bounded whatever a tensor's size.

Pure functions on the values of ``plan``: nothing here touches a disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sharded_ckpt import plan


def clip(
    reads: Sequence[plan.Read], want: int, start: int, end: int, at: int
) -> Iterator[plan.Read]:
    """The parts of one tensor's ``reads`` (sorted by destination) that fill its bytes start..end.

    They come out as reads of ``want`` whose destination counts from ``at``.
    """
    first = max(0, bisect_right(reads, start, key=lambda read: read.dest_start_bytes) - 1)
    for read in reads[first:]:
        if read.dest_start_bytes >= end:
            return
        skip = max(0, start - read.dest_start_bytes)
        nbytes = min(read.dest_start_bytes + read.nbytes, end) - read.dest_start_bytes - skip
        if nbytes > 0:
            yield replace(
                read,
                data_start=read.data_start + skip,
                nbytes=nbytes,
                want=want,
                dest_start_bytes=at + read.dest_start_bytes + skip - start,
            )


def windows(
    counts: Sequence[int], widths: Sequence[int], budget: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts items into consecutive windows of at most ``budget`` bytes (one element at the least).

    Item ``i`` has ``counts[i]`` elements of ``widths[i]`` bytes. A window is a list of ``(item,
    start, end)`` in elements; every element of every item occurs exactly once, in order.
    """
    window: list[tuple[int, int, int]] = []
    room = budget
    for item, (count, width) in enumerate(zip(counts, widths, strict=True)):
        start = 0
        while start < count:
            end = min(count, start + room // width)
            if end <= start and window:
                yield window
                window, room = [], budget
                continue
            end = max(end, start + 1)
            window.append((item, start, end))
            room -= (end - start) * width
            start = end
    if window:
        yield window


def split_by_want(reads: Iterable[plan.Read], count: int) -> list[list[plan.Read]]:
    """``reads`` for each of ``count`` wanted tensors, sorted by destination."""
    split: list[list[plan.Read]] = [[] for _ in range(count)]
    for read in reads:
        split[read.want].append(read)
    for part in split:
        part.sort(key=lambda read: read.dest_start_bytes)
    return split
