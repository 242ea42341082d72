"""An independent reader of the format, written from docs/format.md and nothing else.

json, struct and numpy only, nothing of the package: what this reads, the document describes. It
reads one step directory, checks every checksum, and is slow. Element types that numpy lacks come
as unsigned integers of their width; torch's own values (dtypes, devices) come as strings.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = (
    "F64=<f8 F32=<f4 F16=<f2 BF16=<u2 F8_E4M3=u1 F8_E5M2=u1 C64=<c8 BOOL=? "
    "I64=<i8 I32=<i4 I16=<i2 I8=i1 U64=<u8 U32=<u4 U16=<u2 U8=u1"
)
DTYPES = dict(pair.split("=") for pair in _DTYPES.split())
_TABLE = np.arange(256, dtype=np.uint32)
for _ in range(8):
    _TABLE = (_TABLE >> 1) ^ np.where(_TABLE & 1, np.uint32(0x82F63B78), np.uint32(0))


def _steps(state: np.ndarray, columns: np.ndarray) -> np.ndarray:
    for column in columns:
        state = (state >> 8) ^ _TABLE[(state ^ column) & 0xFF]
    return state


def crc32c(data: bytes) -> int:
    """Rows of a matrix take their bytes together; then each row moves past the ones behind it."""
    if len(data) < 4:
        crc = np.uint32(0xFFFFFFFF)
        return int(_steps(crc, np.frombuffer(data, np.uint8))) ^ 0xFFFFFFFF
    width = math.isqrt(len(data)) + 4
    rows = -(-len(data) // width)
    matrix = np.zeros(rows * width, np.uint8)
    matrix[rows * width - len(data) :] = np.frombuffer(data, np.uint8)
    # The register starts as ones, which is the same as inverting the first four bytes.
    matrix[rows * width - len(data) :][:4] ^= 0xFF
    sums = _steps(np.zeros(rows, np.uint32), matrix.reshape(rows, width).T)
    bits = _steps(np.uint32(1) << np.arange(32, dtype=np.uint32), np.zeros((width, 1), np.uint32))
    total = 0
    for value in sums.tolist():
        moved = 0
        for bit in range(32):
            if total >> bit & 1:
                moved ^= int(bits[bit])
        total = moved ^ value
    return total ^ 0xFFFFFFFF


def check(condition: bool, *what: object) -> None:
    if not condition:
        raise ValueError(" ".join(map(str, what)))


class Shard:
    def __init__(self, path: Path, ref: dict[str, Any]) -> None:
        raw = path.read_bytes()
        check(len(raw) == ref["nbytes"], path, "size")
        size = 8 + struct.unpack("<Q", raw[:8])[0]
        check(size == ref["header_nbytes"] and size % 4096 == 0, path, "header length")
        check(f"{crc32c(raw[:size]):08x}" == ref["header_crc32c"], path, "header checksum")
        check(f"{crc32c(raw):08x}" == ref["file_crc32c"], path, "file checksum")
        self.tensors = json.loads(raw[8:size])
        self.about = json.loads(self.tensors.pop("__metadata__")["sharded_ckpt"])
        check(self.about["format"] == 1 and self.about["kind"] == "shard", path, "format")
        self.data = raw[size:]
        step, digits = self.about["chunk_nbytes"], self.about["crc32c"]
        starts = range(0, len(self.data), step)
        found = "".join(f"{crc32c(self.data[i : i + step]):08x}" for i in starts)
        check(found == digits, path, "chunk checksums")

    def piece(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        start, end = info["data_offsets"]
        array = np.frombuffer(self.data[start:end], DTYPES[info["dtype"]])
        return array.reshape(info["shape"]).copy()


class Step:
    """One committed step. Raises ``ValueError`` for any damage."""

    def __init__(self, directory: Path) -> None:
        raw = (directory / "manifest.json").read_bytes()
        self.manifest = json.loads(raw)
        check(self.manifest["format"] == {"name": "sharded_ckpt", "version": 1}, "format version")
        at = raw.index(b'\n "crc32c": "') + len(b'\n "crc32c": "')
        blank = raw[:at] + b"00000000" + raw[at + 8 :]
        check(f"{crc32c(blank):08x}" == self.manifest["crc32c"], "manifest checksum")
        self.shards: dict[int, Shard] = {}
        own = "step-{step:08d}-t{term:04d}-{serial:04d}-{attempt}".format(**self.manifest)
        for ref in self.manifest["shards"]:
            # A copied step directory may have any name; its own files are beside the manifest.
            home = directory if ref["directory"] == own else directory.parent / ref["directory"]
            shard = Shard(home / ref["file"], ref)
            for key in ("step", "term", "serial", "attempt", "world_size"):
                check(ref["directory"] != own or shard.about[key] == self.manifest[key], key)
            check(shard.about["rank"] == ref["rank"], "rank")
            self.shards[ref["rank"]] = shard

    def names(self) -> set[str]:
        return {name for shard in self.shards.values() for name in shard.tensors}

    def tensor(self, name: str, rank: int | None = None) -> np.ndarray:
        """A whole tensor, from its pieces, or from the copy of ``rank`` (else of the lowest)."""
        flat, filled = self._assemble(name, rank)
        check(bool(filled.all()), name, "has holes")
        return flat

    def weight(self, fqn: str) -> np.ndarray:
        """A parameter as the model had it: the cast of its master, with what overrides it."""
        fqn = self.manifest["aliases"].get(fqn, fqn)
        if f"master/{fqn}" not in self.names():
            return self.tensor(f"model/{fqn}")
        holder = next(s for s in self.shards.values() if f"master/{fqn}" in s.tensors)
        wanted = holder.about["slices"][f"master/{fqn}"].get("model_dtype")
        made = cast(self.tensor(f"master/{fqn}"), wanted)
        if f"model/{fqn}" in self.names():
            override, there = self._assemble(f"model/{fqn}", None)
            made[there] = override[there]
        return made

    def state(self, rank: int) -> Any:
        return self._decode(self.shards[rank].about["state"], rank)

    def shared(self, key: str) -> Any:
        """``state`` or ``client_state`` of the manifest; its tensors are in rank 0's shard."""
        return self._decode(self.manifest[key], 0)

    def _assemble(self, name: str, rank: int | None) -> tuple[np.ndarray, np.ndarray]:
        holders = {r: s for r, s in sorted(self.shards.items()) if name in s.tensors}
        check(bool(holders), name, "is nowhere")
        parts = {r: s for r, s in holders.items() if "copy" not in s.about["slices"][name]}
        if not parts or (rank in holders and rank not in parts):
            chosen = rank if rank in holders else min(holders)
            parts = {chosen: holders[chosen]}
        first = next(iter(parts.values()))
        shape = tuple(first.about["slices"][name]["shape"])
        made = np.zeros(shape, DTYPES[first.tensors[name]["dtype"]])
        count = np.zeros(shape, np.uint8)
        for shard in parts.values():
            where, piece = shard.about["slices"][name], shard.piece(name)
            check(tuple(where["shape"]) == shape and piece.dtype == made.dtype, name, "differs")
            for target, value in ((made, piece), (count, np.uint8(1))):
                if "offset" in where:
                    block = zip(where["offset"], piece.shape, strict=True)
                    place = target[tuple(slice(o, o + e) for o, e in block)]
                    place[...] = place + value if target is count else value
                else:
                    run = slice(where["start"], where["start"] + piece.size)
                    flat = target.reshape(-1)[run]
                    flat[...] = flat + value if target is count else value.reshape(-1)
        check(bool((count <= 1).all()), name, "has elements twice")
        return made, count == 1

    def _decode(self, tree: Any, rank: int) -> Any:
        if isinstance(tree, list):
            return [self._decode(item, rank) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self._decode(item, rank) for key, item in tree.items()}
        tag = tree["$"]
        if tag == "tensor":
            return self.tensor(tree["name"], rank)
        if tag in ("float", "bytes"):
            return float(tree["value"]) if tag == "float" else base64.b64decode(tree["base64"])
        if tag in ("torch.dtype", "torch.device", "torch.Size"):
            return tuple(tree["value"]) if tag == "torch.Size" else tree["value"]
        if tag in ("complex", "numpy"):
            value = self._decode(tree["value"], rank)
            return complex(*value) if tag == "complex" else np.dtype(tree["dtype"]).type(value)
        items = [self._decode(item, rank) for item in tree["items"]]
        if tag in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
        if tag == "defaultdict":
            factories = {t.__name__: t for t in (bool, dict, float, int, list, set, str, tuple)}
            return defaultdict(factories.get(tree["factory"]), items)
        kind = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag]
        return kind(dict(items))


def cast(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """Round to nearest, ties to even: what a conversion of dtypes does."""
    if dtype == "BF16" and array.dtype == np.float32:
        bits = array.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
    return array.copy() if dtype is None else array.astype(DTYPES[dtype])
