"""Framing of one shard: a valid safetensors file. docs/format.md, "Shard". No file access here.

::

    u64 N | JSON, padded with spaces so that 8 + N is a multiple of 4096 | data part, no holes

Writing: :func:`plan_shard` places the tensors, :func:`header_template` makes the header with
zeros where the chunk checksums go. Its length does not depend on them, so the data can be written
first and the header, once every checksum is known, last.

Reading: :func:`parse_header` believes nothing. Every number is checked against the size of the
file before anything of that size is made, and any difference from what the writer makes is a
:class:`ShardError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sharded_ckpt import dtypes
from sharded_ckpt.errors import LoadError, ShardError, UnsupportedError, UsageError
from sharded_ckpt.layout import MAX_RANKS, SetId
from sharded_ckpt.slices import Box, Entry, Region, Run, Shape, check_region
from sharded_ckpt.tree import Json, parse_json

FORMAT = 1
ALIGN = 4096  # the data part starts on a page, which O_DIRECT asks for
CHUNK_NBYTES = 4 * 1024 * 1024  # past this no device writes faster; a checksum per chunk
MAX_CHUNK_NBYTES = 64 * 1024 * 1024  # each reading thread may hold one
MAX_HEADER_NBYTES = 100_000_000  # what safetensors itself accepts
MAX_NAME_LENGTH = 4096

_MAX_INT = 2**63 - 1
_MAX_DIMS = 64
_NONCE = re.compile(r"[0-9a-f]{8}\Z")
_HEX = re.compile(r"(?:[0-9a-f]{8})*\Z")
_PREFIX = '{"__metadata__":{"format":"pt","sharded_ckpt":"'


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Where each tensor stands. ``offsets`` are bytes from the start of the data part."""

    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
    data_nbytes: int
    chunk_nbytes: int

    @property
    def chunk_count(self) -> int:
        return -(-self.data_nbytes // self.chunk_nbytes)

    def spans(self) -> Iterator[tuple[Entry, int, int]]:
        """``(entry, start, end)``, bytes of the data part, in file order."""
        ends = (*self.offsets[1:], self.data_nbytes)
        return zip(self.entries, self.offsets, ends, strict=bool(self.entries))


@dataclass(frozen=True, slots=True)
class HeaderTemplate:
    """The whole header, checksums all zeros; ``crc_pos`` is where their digits stand in ``data``.

    The digits are 8 for each chunk, one after the other, in the order of the chunks.
    """

    data: bytes
    crc_pos: int


@dataclass(slots=True)
class ShardHeader:
    """What a shard's header says. ``spans`` are ``(start, end)`` bytes of the data part."""

    id: SetId
    rank: int
    world_size: int
    chunk_nbytes: int
    crcs: list[int]
    entries: dict[str, Entry]
    spans: dict[str, tuple[int, int]]
    state: Json
    header_nbytes: int
    data_nbytes: int


def plan_shard(entries: Sequence[Entry], chunk_nbytes: int = CHUNK_NBYTES) -> ShardPlan:
    """Place tensors without holes, widest elements first, so that each one is aligned.

    Raises :class:`UsageError` for a name that stands twice or a region outside its tensor, and
    :class:`UnsupportedError` for a dtype that the format does not know.
    """
    if not 1 <= chunk_nbytes <= MAX_CHUNK_NBYTES:
        raise UsageError(f"chunk_nbytes must be 1 to {MAX_CHUNK_NBYTES}, got {chunk_nbytes}")
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise UsageError(f"{entry.name}: the name stands twice in one shard")
        seen.add(entry.name)
        if (problem := _name_problem(entry.name)) is not None:
            raise UsageError(f"tensor name {entry.name!r:.200} {problem}")
        check_region(entry.name, entry.shape, entry.region)
    itemsize = {name: kind.itemsize for name, kind in dtypes.BY_NAME.items()}
    for entry in entries:
        if entry.dtype not in itemsize:
            dtypes.by_name(entry.dtype)  # raises
    ordered = sorted(entries, key=lambda entry: -itemsize[entry.dtype])  # sorted() is stable
    offsets = []
    position = 0
    for entry in ordered:
        offsets.append(position)
        position += entry.numel * itemsize[entry.dtype]
    return ShardPlan(tuple(ordered), tuple(offsets), position, chunk_nbytes)


def header_template(
    plan: ShardPlan, *, id: SetId, rank: int, world_size: int, state_tree: Json
) -> HeaderTemplate:
    """The header of a shard, complete but for its checksums.

    Raises :class:`UsageError` when it would be longer than safetensors allows (100 MB).
    """
    about = {
        "format": FORMAT,
        "kind": "shard",
        "step": id.step,
        "term": id.term,
        "serial": id.serial,
        "attempt": id.nonce,
        "rank": rank,
        "world_size": world_size,
        "chunk_nbytes": plan.chunk_nbytes,
        "slices": {entry.name: _slice_json(entry) for entry in plan.entries},
        "state": state_tree,
    }
    tensors = {
        entry.name: {
            "dtype": entry.dtype,
            "shape": entry.local_shape,
            "data_offsets": (start, end),
        }
        for entry, start, end in plan.spans()
    }
    # The checksums stand last in the inner JSON, so their place is known without searching the
    # text, where state could hold anything. Both texts are ASCII: characters are bytes.
    inner = _dumps(about)[:-1] + ',"crc32c":"'
    head = _PREFIX + json.dumps(inner)[1:-1]
    digits = "0" * (8 * plan.chunk_count)
    tail = r"\"}" + '"}' + ("," + _dumps(tensors)[1:] if tensors else "}")
    text = head + digits + tail
    total = -(-(8 + len(text)) // ALIGN) * ALIGN
    if total - 8 > MAX_HEADER_NBYTES:
        raise UsageError(
            f"the header of rank {rank}'s shard would have {total} bytes, safetensors allows "
            f"{MAX_HEADER_NBYTES}; put big non-tensor state into tensors"
        )
    data = (total - 8).to_bytes(8, "little") + text.encode("ascii").ljust(total - 8)
    return HeaderTemplate(data, 8 + len(head))


def header_nbytes(first8: bytes, *, file_nbytes: int, where: str) -> int:
    """Length of a shard's header (8 + N) from its first 8 bytes. Raises :class:`ShardError`."""
    if file_nbytes < 8 or len(first8) < 8:
        raise _bad(where, f"the file has {file_nbytes} bytes, a shard at least {ALIGN}")
    length = int.from_bytes(first8[:8], "little")
    if length == 0:
        raise _bad(where, "it begins with zeros: its writer did not finish it")
    if length > MAX_HEADER_NBYTES:
        raise _bad(where, f"header length {length} is above the limit of {MAX_HEADER_NBYTES}")
    if 8 + length > file_nbytes:
        raise _bad(where, f"header length {length} does not fit into a file of {file_nbytes} bytes")
    if (8 + length) % ALIGN:
        raise _bad(where, f"header length {length} + 8 is not a multiple of {ALIGN}")
    return 8 + length


def parse_header(data: bytes, *, file_nbytes: int, where: str) -> ShardHeader:
    """Read a header of exactly 8 + N bytes; its checksum, which the manifest has, is the caller's.

    Raises :class:`ShardError` (damage) or :class:`LoadError` (written by a newer version).
    """
    expected_nbytes = header_nbytes(data[:8], file_nbytes=file_nbytes, where=where)
    if len(data) != expected_nbytes:
        raise _bad(where, f"{len(data)} bytes of header were read, it has {expected_nbytes}")
    try:
        return _Parser(where, file_nbytes - expected_nbytes).parse(data)
    except ShardError:
        raise
    except (ValueError, UnsupportedError) as error:
        raise _bad(where, f"bad header: {error}", end=expected_nbytes) from error


def _bad(where: str, what: str, end: int | None = None) -> ShardError:
    start = None if end is None else 0
    return ShardError(
        f"{where}: {what}; restore the file or load another step "
        "('python -m sharded_ckpt verify' lists the damage)",
        path=where,
        start=start,
        end=end,
    )


def _name_problem(name: str) -> str | None:
    if not name or len(name) > MAX_NAME_LENGTH:
        return f"must have 1 to {MAX_NAME_LENGTH} characters"
    if name == "__metadata__" or not name.isprintable():
        return "is reserved or holds control characters"
    return None


def _dumps(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _slice_json(entry: Entry) -> dict[str, Json]:
    made: dict[str, Json] = {"shape": entry.shape}
    if isinstance(entry.region, Run):
        made["start"] = entry.region.start
    else:
        made["offset"] = entry.region.offset
    if entry.copy:
        made["copy"] = True
    if entry.model_dtype is not None:
        made["model_dtype"] = entry.model_dtype
    return made


def _integer(value: Json, what: str, low: int = 0, high: int = _MAX_INT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what} is {value!r:.100}, not an integer from {low} to {high}")
    return value


def _integers(value: Json, what: str) -> Shape:
    if type(value) is not list or len(value) > _MAX_DIMS:
        raise ValueError(f"{what} is {value!r:.100}, not a list of at most {_MAX_DIMS} integers")
    for item in value:
        if type(item) is not int or not 0 <= item <= _MAX_INT:
            raise ValueError(f"{what} is {value!r:.100}, not a list of lengths")
    return tuple(value)


def _object(value: Json, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is {type(value).__name__}, not an object")
    return value


@dataclass(slots=True)
class _Parser:
    where: str
    data_nbytes: int

    def parse(self, data: bytes) -> ShardHeader:
        text = data[8:].rstrip(b" ")
        if not (text.startswith(b"{") and text.endswith(b"}")):
            raise ValueError("it is not one JSON object padded with spaces")
        tensors = _object(parse_json(text), "the header")
        outer = _object(tensors.pop("__metadata__", None), "__metadata__")
        if not isinstance(outer.get("sharded_ckpt"), str):
            raise ValueError("__metadata__ has no 'sharded_ckpt': not a shard of this package")
        about = _object(parse_json(outer["sharded_ckpt"].encode("utf-8")), "sharded_ckpt")
        version = _integer(about.get("format"), "format", low=1)
        if version > FORMAT:
            raise LoadError(
                f"{self.where}: format version {version}, this package reads up to {FORMAT}; "
                "upgrade sharded_ckpt"
            )
        if about.get("kind") != "shard":
            raise ValueError(f"kind is {about.get('kind')!r:.100}, not 'shard'")
        if "state" not in about:
            raise ValueError("'state' is missing")
        world_size = _integer(about.get("world_size"), "world_size", 1, MAX_RANKS)
        chunk_nbytes = _integer(about.get("chunk_nbytes"), "chunk_nbytes", 1, MAX_CHUNK_NBYTES)
        spans = {
            name: self._span(name, _object(info, f"tensor {name!r:.200}"))
            for name, info in tensors.items()
        }
        self._check_packed(spans)
        slices = _object(about.get("slices"), "slices")
        if slices.keys() != tensors.keys():
            odd = sorted(slices.keys() ^ tensors.keys())[0]
            raise ValueError(f"{odd!r:.200} is among the slices or the tensors, not both")
        return ShardHeader(
            id=self._id(about),
            rank=_integer(about.get("rank"), "rank", 0, world_size - 1),
            world_size=world_size,
            chunk_nbytes=chunk_nbytes,
            crcs=self._crcs(about.get("crc32c"), chunk_nbytes),
            entries={name: self._entry(name, tensors[name], slices[name]) for name in tensors},
            spans=spans,
            state=about["state"],
            header_nbytes=len(data),
            data_nbytes=self.data_nbytes,
        )

    def _id(self, about: dict[str, Any]) -> SetId:
        nonce = about.get("attempt")
        if not isinstance(nonce, str) or _NONCE.match(nonce) is None:
            raise ValueError(f"attempt is {nonce!r:.100}, not 8 hex digits")
        numbers = {key: _integer(about.get(key), key) for key in ("term", "serial", "step")}
        made = SetId(nonce=nonce, **numbers)
        if SetId.parse(made.dirname) != made:
            raise ValueError(f"step, term or serial is out of range: {made.dirname}")
        return made

    def _crcs(self, digits: Json, chunk_nbytes: int) -> list[int]:
        count = -(-self.data_nbytes // chunk_nbytes)
        if not isinstance(digits, str) or len(digits) != 8 * count or _HEX.match(digits) is None:
            raise ValueError(f"crc32c is not {count} times 8 hex digits")
        return [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]

    def _span(self, name: str, info: dict[str, Any]) -> tuple[int, int]:
        if (problem := _name_problem(name)) is not None:
            raise ValueError(f"tensor name {name!r:.200} {problem}")
        if info.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name}: keys are {sorted(info)!r:.200}")
        if not isinstance(info["dtype"], str):
            raise ValueError(f"{name}: dtype is not a string")
        itemsize = dtypes.by_name(info["dtype"]).itemsize
        shape = _integers(info["shape"], f"{name}: shape")
        offsets = _integers(info["data_offsets"], f"{name}: data_offsets")
        if len(offsets) != 2 or not offsets[0] <= offsets[1] <= self.data_nbytes:
            raise ValueError(
                f"{name}: data_offsets {list(offsets)} are not inside {self.data_nbytes} bytes"
            )
        start, end = offsets
        # Python's integers do not overflow, so this product is exact whatever the shape says.
        if math.prod(shape) * itemsize != end - start:
            raise ValueError(
                f"{name}: {end - start} bytes cannot be shape {list(shape)} of {info['dtype']}"
            )
        if start % itemsize:
            raise ValueError(f"{name}: byte {start} is not aligned to its {itemsize}-byte elements")
        return start, end

    def _check_packed(self, spans: dict[str, tuple[int, int]]) -> None:
        position = 0
        for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
            if start != position:
                kind = "overlap" if start < position else "hole"
                raise ValueError(f"{kind} of tensors at byte {min(start, position)}, near {name}")
            position = end
        if position != self.data_nbytes:
            raise ValueError(f"tensors have {position} bytes, the data part {self.data_nbytes}")

    def _entry(self, name: str, info: dict[str, Any], piece: Json) -> Entry:
        piece = _object(piece, f"{name}: slice")
        if not piece.keys() <= {"shape", "start", "offset", "copy", "model_dtype"}:
            raise ValueError(f"{name}: slice has keys {sorted(piece)!r:.200}")
        if ("start" in piece) == ("offset" in piece):
            raise ValueError(f"{name}: a slice has either 'start' or 'offset'")
        shape = _integers(piece.get("shape"), f"{name}: global shape")
        if math.prod(shape) * dtypes.by_name(info["dtype"]).itemsize > _MAX_INT:
            raise ValueError(f"{name}: global shape {list(shape)} is larger than any memory")
        local = tuple(info["shape"])
        region: Region
        if "start" in piece:
            region = Run(_integer(piece["start"], f"{name}: start"), math.prod(local))
        else:
            region = Box(_integers(piece["offset"], f"{name}: offset"), local)
        if piece.get("copy", True) is not True:
            raise ValueError(f"{name}: copy may only be true")
        model_dtype = piece.get("model_dtype")
        if "model_dtype" in piece and model_dtype not in tuple(dtypes.BY_NAME):
            raise ValueError(f"{name}: model_dtype is {model_dtype!r:.100}")
        check_region(name, shape, region)
        entry = Entry(name, info["dtype"], shape, region, "copy" in piece, model_dtype)
        if entry.local_shape != local:
            raise ValueError(f"{name}: shape {list(local)} is not that of {region} of {shape}")
        return entry
