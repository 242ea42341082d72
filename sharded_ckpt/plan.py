"""Who writes what, who reads what, and whether it fits: pure functions on entries.

Writing: :func:`split_replicated` shares replicated tensors out over ranks, :func:`coverage` proves
before a commit that every element of every tensor is written exactly once. Reading: :func:`reads`
turns "these pieces are wanted" and "these pieces are on disk" into byte ranges, whatever the two
layouts are.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sharded_ckpt import dtypes
from sharded_ckpt.errors import StateMismatch, UsageError
from sharded_ckpt.slices import Box, Entry, Region, Run, Shape, check_region, common, runs
from sharded_ckpt.tree import Json

MODEL, MASTER = "model/", "master/"
_MAX_LISTED = 10  # names of one kind in an error message


@dataclass(frozen=True, slots=True)
class Holding:
    """A piece on disk: ``data_start`` is its first byte in the data part of shard ``file``."""

    file: int
    entry: Entry
    data_start: int


@dataclass(frozen=True, slots=True)
class Read:
    """Copy bytes of a shard's data part into ``wanted[want]``, at byte ``dest_start_bytes``."""

    file: int
    data_start: int
    nbytes: int
    want: int
    dest_start_bytes: int


def split_replicated(
    sizes: Sequence[int], itemsizes: Sequence[int], parts: int
) -> list[list[tuple[int, int, int]]]:
    """Cut tensors of ``sizes`` elements into ``parts`` shares of equal bytes.

    A share is a list of ``(index, start, numel)``. Shares follow each other through the tensors,
    are cut between elements (so they differ by less than two elements), and every tensor, an empty
    one too, is in at least one share.
    """
    total = sum(n * size for n, size in zip(sizes, itemsizes, strict=True))
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    part = 0
    begin = 0  # first byte of the current tensor
    for index, (numel, size) in enumerate(zip(sizes, itemsizes, strict=True)):
        start = 0
        while True:
            cut = total * (part + 1) // parts
            stop = numel if part == parts - 1 else min(numel, max(start, (cut - begin) // size))
            if stop > start or numel == 0:
                shares[part].append((index, start, stop - start))
            start = stop
            if start >= numel:
                break
            part += 1
        begin += numel * size
    return shares


def reads(
    wanted: Sequence[Entry],
    holdings: Mapping[str, Sequence[Holding]],
    *,
    prefer_file: int | None,
) -> list[Read]:
    """Byte ranges that fill every wanted piece, each element once, ordered by file and position.

    A wanted ``copy`` is read whole from the copy in ``prefer_file``, else from the lowest file that
    has one. Raises :class:`StateMismatch` that lists what is missing, incomplete or different.
    """
    found: list[Read] = []
    problems = _Problems()
    indexes: dict[tuple[str, bool], _Index] = {}
    for want, entry in enumerate(wanted):
        key = entry.name, entry.copy
        if key not in indexes:
            held = _usable(holdings.get(entry.name, ()), entry.copy, prefer_file)
            indexes[key] = _Index(held)
        index = indexes[key]
        if not index.holdings:
            problems.missing.append(entry.name)
        elif (other := index.unlike(entry)) is not None:
            problems.different.append(
                f"{entry.name} (saved as {other.dtype} {list(other.shape)}, wanted as "
                f"{entry.dtype} {list(entry.shape)})"
            )
        else:
            filled = index.fill(entry, want, found)
            if filled != entry.numel:
                problems.incomplete.append(
                    f"{entry.name} ({filled} of {entry.numel} elements are saved)"
                )
    problems.check()
    found.sort(key=lambda read: (read.file, read.data_start))
    return found


def coverage(layouts: Mapping[int, Sequence[Entry]]) -> list[str]:
    """What is wrong with a set of shards, by rank; nothing is wrong when the list is empty.

    Every element of every tensor must be in exactly one shard, and all shards must agree on shape
    and dtype. ``copy`` entries do not count. A ``model/`` tensor may have holes where ``master/``
    has one of the same name, since the rest of it is the cast of that.
    """
    pieces: dict[str, list[tuple[int, Entry]]] = {}
    for rank, entries in layouts.items():
        for entry in entries:
            if not entry.copy:
                pieces.setdefault(entry.name, []).append((rank, entry))
    overridden = set(overrides(pieces))
    problems = []
    for name in sorted(pieces):
        problem = _cover_problem(pieces[name], holes_allowed=name in overridden)
        if problem is not None:
            problems.append(f"{name}: {problem}")
    return problems


def overrides(names: Iterable[str]) -> list[str]:
    """The ``model/`` names among ``names`` that have a ``master/`` twin, in the order given.

    Such entries correct the cast of the master where the model's own weight differs from it.
    """
    known = set(names)
    return [
        name
        for name in names
        if name.startswith(MODEL) and MASTER + name.removeprefix(MODEL) in known
    ]


def entries_to_json(entries: Iterable[Entry]) -> Json:
    """Compact JSON of a layout, for votes: one list per entry."""
    made: list[Json] = []
    for entry in entries:
        region = entry.region
        where = (
            [region.start, region.numel]
            if isinstance(region, Run)
            else [list(region.offset), list(region.extent)]
        )
        made.append(
            [entry.name, entry.dtype, list(entry.shape), where, int(entry.copy), entry.model_dtype]
        )
    return made


def entries_from_json(tree: Json) -> list[Entry]:
    """What :func:`entries_to_json` was given. Raises :class:`UsageError` for any other JSON."""
    try:
        return [_entry_from_json(*item) for item in tree]
    except (TypeError, ValueError) as error:
        raise UsageError(f"not a layout in JSON: {error}") from error


def layout_digest(entries: Iterable[Entry]) -> str:
    """16 hex digits that are equal for equal sets of entries, whatever their order."""
    listed = sorted(entries_to_json(entries), key=lambda item: item[0])
    text = json.dumps(listed, separators=(",", ":")).encode("ascii")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _entry_from_json(
    name: str, dtype: str, shape: Json, where: Json, copy: int, model_dtype: str | None
) -> Entry:
    if not isinstance(name, str) or dtype not in dtypes.BY_NAME:
        raise ValueError(f"entry {name!r:.100} of dtype {dtype!r:.100}")
    first, second = where
    region: Region
    if isinstance(first, list):
        region = Box(tuple(map(int, first)), tuple(map(int, second)))
    else:
        region = Run(int(first), int(second))
    entry = Entry(name, dtype, tuple(map(int, shape)), region, bool(copy), model_dtype)
    check_region(name, entry.shape, region)
    return entry


def _usable(held: Sequence[Holding], copy: bool, prefer_file: int | None) -> Sequence[Holding]:
    """The holdings to read from: all parts of the tensor, or one copy of it."""
    parts = [h for h in held if not h.entry.copy]
    if parts and not copy:
        return parts
    copies = [h for h in held if h.entry.copy]
    return sorted(copies, key=lambda h: (h.file != prefer_file, h.file))[:1]


@dataclass(slots=True)
class _Problems:
    missing: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def check(self) -> None:
        kinds = (
            ("not saved", self.missing),
            ("not saved whole", self.incomplete),
            ("of another shape or dtype", self.different),
        )
        texts = [f"{len(names)} {what}: {_some(names)}" for what, names in kinds if names]
        if texts:
            raise StateMismatch(
                "the saved step does not fit the objects being filled: "
                + "; ".join(texts)
                + "; 'python -m sharded_ckpt info' lists what is saved"
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _bounds(region: Region, shape: Shape) -> tuple[int, int]:
    """First element, and one past the last, of the flattened tensor that the region touches."""
    if isinstance(region, Run):
        return region.start, region.start + region.numel
    if region.numel == 0:
        return 0, 0
    first = last = 0
    for offset, extent, length in zip(region.offset, region.extent, shape, strict=True):
        first = first * length + offset
        last = last * length + offset + extent - 1
    return first, last + 1


def _apart(a: Region, b: Region) -> bool:
    """Whether two boxes share nothing, which is cheaper to see than to find by their runs."""
    return (
        isinstance(a, Box)
        and isinstance(b, Box)
        and any(
            o + e <= p or p + f <= o
            for o, e, p, f in zip(a.offset, a.extent, b.offset, b.extent, strict=True)
        )
    )


class _Index:
    """Holdings of one name, so ordered that a piece finds those that it touches by bisection."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        bounded = [(_bounds(h.entry.region, h.entry.shape), h) for h in holdings]
        bounded.sort(key=lambda item: (item[0], item[1].file))
        self.holdings = [holding for _, holding in bounded]
        self._firsts = [first for (first, _), _ in bounded]
        # Bounds of boxes overlap, so their ends are not ordered; the largest so far are.
        self._ends = list(accumulate((end for (_, end), _ in bounded), max))
        self._likes = {(h.entry.shape, h.entry.dtype) for h in holdings}

    def unlike(self, entry: Entry) -> Entry | None:
        """A holding of another shape or dtype than ``entry``, if there is one."""
        if self._likes == {(entry.shape, entry.dtype)}:
            return None
        return next(
            h.entry
            for h in self.holdings
            if (h.entry.shape, h.entry.dtype) != (entry.shape, entry.dtype)
        )

    def fill(self, entry: Entry, want: int, out: list[Read]) -> int:
        """Append the reads that fill ``entry``; the number of its elements that they fill."""
        itemsize = dtypes.by_name(entry.dtype).itemsize
        spans = sorted(
            (to, at, count, number)
            for number, holding in self._near(entry)
            for at, to, count in _spans(holding.entry.region, entry.region, entry.shape)
        )
        filled = 0
        cursor = 0
        last: tuple[int, int] | None = None  # (holding, element of it) that would continue a read
        for to, at, count, number in spans:
            skip = max(0, cursor - to)  # an element held twice is read once
            if skip >= count:
                continue
            to, at, count = to + skip, at + skip, count - skip
            holding = self.holdings[number]
            if last == (number, at) and to == cursor:
                read = out.pop()
                nbytes = read.nbytes + count * itemsize
                out.append(Read(read.file, read.data_start, nbytes, want, read.dest_start_bytes))
            else:
                start = holding.data_start + at * itemsize
                out.append(Read(holding.file, start, count * itemsize, want, to * itemsize))
            filled += count
            cursor = to + count
            last = number, at + count
        return filled

    def _near(self, entry: Entry) -> Iterator[tuple[int, Holding]]:
        first, end = _bounds(entry.region, entry.shape)
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        for number in range(low, high):
            holding = self.holdings[number]
            if not _apart(holding.entry.region, entry.region):
                yield number, holding


def _spans(held: Region, wanted: Region, shape: Shape) -> Iterator[tuple[int, int, int]]:
    if held == wanted:  # the same layout: one read however many runs the region has
        if held.numel:
            yield 0, 0, held.numel
        return
    # common() walks all runs of both; leave out the rows of a box that the other cannot touch.
    near_held, skipped_held = _trim(held, _bounds(wanted, shape), shape)
    near_wanted, skipped_wanted = _trim(wanted, _bounds(held, shape), shape)
    for at, to, count in common(near_held, near_wanted, shape):
        yield skipped_held + at, skipped_wanted + to, count


def _trim(region: Region, bounds: tuple[int, int], shape: Shape) -> tuple[Region, int]:
    """The rows of a box that elements ``bounds`` touch, and how many elements stand before them."""
    if isinstance(region, Run) or region.numel == 0 or not shape:
        return region, 0
    row = math.prod(shape[1:])  # not zero: the box is not empty
    begin = region.offset[0]
    end = begin + region.extent[0]
    first = min(max(begin, bounds[0] // row), end)
    stop = max(min(end, -(-bounds[1] // row)), first)
    trimmed = Box((first, *region.offset[1:]), (stop - first, *region.extent[1:]))
    return trimmed, (first - begin) * math.prod(region.extent[1:])


def _cover_problem(pieces: Sequence[tuple[int, Entry]], holes_allowed: bool) -> str | None:
    first_rank, first = pieces[0]
    for rank, entry in pieces:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            return (
                f"rank {rank} has {entry.dtype} {list(entry.shape)}, "
                f"rank {first_rank} {first.dtype} {list(first.shape)}"
            )
    shape = first.shape
    held = [(rank, entry.region) for rank, entry in pieces if entry.numel]
    flat = [_Block(rank, _flat(region, shape)) for rank, region in held]
    if any(isinstance(block.region, Box) for block in flat):
        if all(isinstance(region, Box) for _, region in held):
            return _cover([_Block(rank, region) for rank, region in held], shape, 0, holes_allowed)
        # Both kinds at once: only their runs can be compared.
        flat = [_Block(rank, Run(*run)) for rank, region in held for run in runs(region, shape)]
    return _cover(flat, (math.prod(shape),), 0, holes_allowed)


@dataclass(frozen=True, slots=True)
class _Block:
    rank: int
    region: Region

    def along(self, dim: int) -> tuple[int, int]:
        if isinstance(self.region, Run):
            return self.region.start, self.region.start + self.region.numel
        return self.region.offset[dim], self.region.offset[dim] + self.region.extent[dim]


def _flat(region: Region, shape: Shape) -> Region:
    """The region as a run, where it is one."""
    if isinstance(region, Box):
        first, end = _bounds(region, shape)
        if end - first == region.numel:
            return Run(first, region.numel)
    return region


def _cover(blocks: Sequence[_Block], shape: Shape, dim: int, holes_allowed: bool) -> str | None:
    """First overlap or hole along ``dim`` and the dimensions behind it, or ``None``.

    Along the last dimension blocks are intervals: sort and sweep. Along any other they change only
    where one begins or ends; between two such places is a slab in which all blocks reach from side
    to side, so it is covered when they cover the dimensions behind. A grid costs its number of
    blocks times dimensions.
    """
    if dim == len(shape) - 1:
        return _sweep(blocks, shape[dim], holes_allowed)
    begins = sorted((*block.along(dim), number) for number, block in enumerate(blocks))
    ends = sorted({0, shape[dim], *(edge for block in blocks for edge in block.along(dim))})
    active: list[tuple[int, int, int]] = []
    position = 0
    for low, high in zip(ends, ends[1:], strict=False):
        active = [item for item in active if item[1] > low]
        while position < len(begins) and begins[position][0] == low:
            active.append(begins[position])
            position += 1
        slab = [blocks[number] for _, _, number in active]
        problem = _cover(slab, shape, dim + 1, holes_allowed)
        if problem is not None:
            return f"{problem}, at {low}:{high} of dimension {dim}"
    return None


def _sweep(blocks: Sequence[_Block], length: int, holes_allowed: bool) -> str | None:
    position = 0
    previous = -1
    last = len(blocks[0].region.offset) - 1 if blocks and isinstance(blocks[0].region, Box) else 0
    for begin, end, rank in sorted((*block.along(last), block.rank) for block in blocks):
        if begin < position:
            low, high = sorted((previous, rank))
            return (
                f"elements {begin}:{min(end, position)} of {length} are written by rank {low} "
                f"and by rank {high}"
            )
        if begin > position and not holes_allowed:
            break
        position, previous = end, rank
    if position < length and not holes_allowed:
        begins = [block.along(last)[0] for block in blocks]
        stop = min((begin for begin in begins if begin >= position), default=length)
        return f"elements {position}:{stop} of {length} are written by no rank"
    return None
