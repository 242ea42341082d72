"""The manifest: its presence commits a step. docs/format.md, "Manifest".

One small JSON file that grows with ranks, not with tensors. Reading is strict: a manifest decides
which files are loaded and which may be deleted, so one that is not exactly what a writer makes is
refused, and the checksum covers every byte of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sharded_ckpt import checksum
from sharded_ckpt.errors import LoadError, ManifestError, UsageError
from sharded_ckpt.layout import MAX_RANKS, MAX_STEP, SetId, parse_shard_file
from sharded_ckpt.tree import Json, parse_json

FORMAT_NAME = "sharded_ckpt"
FORMAT = 1
MAX_MANIFEST_NBYTES = 64 * 1024 * 1024

Content = Literal["full", "weights"]

_MAX_INT = 2**63 - 1
# Only a key of the outermost object stands behind a line break and one space: JSON strings hold no
# raw line breaks, and inner keys stand further in. So this finds that field, whatever state holds.
_CRC_MARK = b'\n "crc32c": "'
_NO_CRC = "0" * 8
_ODD_METRICS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard file of a set. Checksums are integers here, 8 hex digits in the file."""

    rank: int
    directory: str
    file: str
    nbytes: int
    header_nbytes: int
    header_crc32c: int
    file_crc32c: int

    @property
    def path(self) -> str:
        """Relative to the checkpoint directory."""
        return f"{self.directory}/{self.file}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed step. ``origin`` is the full set that a weights-only set was made from."""

    id: SetId
    run_id: str
    world_size: int
    content: Content
    origin: SetId | None
    layout: dict[str, Json]
    shards: tuple[ShardRef, ...]
    state: Json
    client_state: Json
    aliases: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    created_at: str = ""

    @property
    def rank_key(self) -> tuple[int, int]:
        """``(term, serial)`` that orders sets: a weights-only set ranks where its origin did."""
        source = self.origin or self.id
        return source.term, source.serial

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.nbytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        """The file, checksum included. Raises :class:`UsageError` when a reader would refuse it."""
        origin = self.origin
        made = {
            "format": {"name": FORMAT_NAME, "version": FORMAT},
            "step": self.id.step,
            "term": self.id.term,
            "serial": self.id.serial,
            "attempt": self.id.nonce,
            "run_id": self.run_id,
            "world_size": self.world_size,
            "content": self.content,
            "origin": origin
            and {"term": origin.term, "serial": origin.serial, "attempt": origin.nonce},
            "layout": _sorted(self.layout),
            "shards": [
                _shard_json(shard) for shard in sorted(self.shards, key=lambda shard: shard.rank)
            ],
            "state": self.state,
            "client_state": self.client_state,
            "aliases": _sorted(self.aliases),
            "metrics": {name: _metric_json(v) for name, v in sorted(self.metrics.items())},
            "versions": _sorted(self.versions),
            "created_at": self.created_at,
            "crc32c": _NO_CRC,
        }
        # Keys are sorted, but not inside the two trees: there the order is the dict's that was
        # saved, and comes back with it.
        text = json.dumps(dict(sorted(made.items())), indent=1, allow_nan=False) + "\n"
        blank = text.encode("ascii")
        if len(blank) > MAX_MANIFEST_NBYTES:
            raise UsageError(
                f"the manifest of step {self.id.step} would have {len(blank)} bytes, the limit is "
                f"{MAX_MANIFEST_NBYTES}; put big values of client_state into tensors"
            )
        position = blank.index(_CRC_MARK) + len(_CRC_MARK)
        digits = checksum.to_hex(checksum.crc32c(blank))
        data = blank[:position] + digits.encode("ascii") + blank[position + 8 :]
        try:
            Manifest.from_bytes(data, "the manifest being written")
        except (ManifestError, LoadError) as error:
            raise UsageError(str(error)) from error
        return data

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest. ``where`` names it in messages.

        Raises :class:`ManifestError` (damage) or :class:`LoadError` (written by a newer version).
        """
        _check_crc(data, where)
        try:
            found = _object(parse_json(data), "the file")
        except ValueError as error:
            raise _bad(where, str(error)) from error
        _check_version(found, where)
        try:
            return _Parser(found).parse()
        except ValueError as error:
            raise _bad(where, str(error)) from error


def _bad(where: str, what: str) -> ManifestError:
    return ManifestError(
        f"{where}: {what}; restore the file or load another step "
        "('python -m sharded_ckpt ls' lists them)"
    )


def _check_crc(data: bytes, where: str) -> None:
    if len(data) > MAX_MANIFEST_NBYTES:
        raise _bad(where, f"{len(data)} bytes, a manifest has at most {MAX_MANIFEST_NBYTES}")
    if _CRC_MARK not in data:
        raise _bad(where, f"{len(data)} bytes that are not a whole manifest")
    position = data.index(_CRC_MARK) + len(_CRC_MARK)
    digits = data[position : position + 8].decode("ascii", "replace")
    blank = data[:position] + _NO_CRC.encode("ascii") + data[position + 8 :]
    expected = checksum.to_hex(checksum.crc32c(blank))
    if digits != expected:
        raise _bad(where, f"checksum of the bytes is {expected}, the file says {digits!r}")


def _check_version(found: dict[str, Any], where: str) -> None:
    kind = found.get("format")
    if not isinstance(kind, dict) or kind.get("name") != FORMAT_NAME:
        raise _bad(where, "it does not say that its format is 'sharded_ckpt'")
    version = kind.get("version")
    if type(version) is not int or version < 1:
        raise _bad(where, f"format version is {version!r:.100}")
    if version > FORMAT:
        raise LoadError(
            f"{where}: format version {version}, this package reads up to {FORMAT}; "
            "upgrade sharded_ckpt"
        )


def _sorted(value: Json) -> Json:
    """``value`` with the keys of every dict in it sorted."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def _shard_json(shard: ShardRef) -> dict[str, Json]:
    return {
        "directory": shard.directory,
        "file": shard.file,
        "file_crc32c": checksum.to_hex(shard.file_crc32c),
        "header_crc32c": checksum.to_hex(shard.header_crc32c),
        "header_nbytes": shard.header_nbytes,
        "nbytes": shard.nbytes,
        "rank": shard.rank,
    }


def _metric_json(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def _object(value: Json, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{what} is {type(value).__name__}, not an object")
    return value


@dataclass(slots=True)
class _Parser:
    """Takes a manifest's JSON apart. Every ``ValueError`` names the field and what it holds.

    Unknown keys are ignored: a later version may add some without making old readers wrong.
    """

    found: dict[str, Any]

    def parse(self) -> Manifest:
        content = self.found.get("content")
        if content not in ("full", "weights"):
            raise ValueError(f"content is {content!r:.100}, not 'full' or 'weights'")
        for key in ("state", "client_state"):
            if key not in self.found:
                raise ValueError(f"{key!r} is missing")
        world_size = _integer(self.found, "world_size", 1, MAX_RANKS)
        return Manifest(
            id=self._id(self.found),
            run_id=_text(self.found, "run_id"),
            world_size=world_size,
            content=content,
            origin=self._origin(),
            layout=_object(self.found.get("layout"), "layout"),
            shards=self._shards(world_size),
            state=self.found["state"],
            client_state=self.found["client_state"],
            aliases=self._texts("aliases"),
            metrics=self._metrics(),
            versions=self._texts("versions"),
            created_at=_text(self.found, "created_at"),
        )

    def _id(self, where: dict[str, Any]) -> SetId:
        nonce = _text(where, "attempt")
        made = SetId(
            term=_integer(where, "term"),
            serial=_integer(where, "serial"),
            step=_integer(self.found, "step", 0, MAX_STEP),
            nonce=nonce,
        )
        if SetId.parse(made.dirname) != made:
            raise ValueError(f"{made.dirname} is not the name of a step directory")
        return made

    def _origin(self) -> SetId | None:
        if self.found.get("origin") is None:
            return None
        return self._id(_object(self.found["origin"], "origin"))

    def _shards(self, world_size: int) -> tuple[ShardRef, ...]:
        listed = self.found.get("shards")
        if type(listed) is not list or not 1 <= len(listed) <= world_size:
            raise ValueError(f"shards is not a list of 1 to {world_size} files")
        shards = tuple(self._shard(_object(item, "a shard"), world_size) for item in listed)
        ranks = [shard.rank for shard in shards]
        if any(a >= b for a, b in zip(ranks, ranks[1:], strict=False)):
            raise ValueError("shards are not in the order of their ranks, each rank once")
        return shards

    def _shard(self, item: dict[str, Any], world_size: int) -> ShardRef:
        rank = _integer(item, "rank", 0, world_size - 1)
        directory, file = _text(item, "directory"), _text(item, "file")
        if SetId.parse(directory) is None:
            raise ValueError(f"rank {rank}: {directory!r:.100} is not a step directory")
        if parse_shard_file(file) != rank:
            raise ValueError(f"rank {rank}: {file!r:.100} is not the name of its shard")
        header_nbytes = _integer(item, "header_nbytes", 8)
        return ShardRef(
            rank=rank,
            directory=directory,
            file=file,
            nbytes=_integer(item, "nbytes", header_nbytes),
            header_nbytes=header_nbytes,
            header_crc32c=_crc(item, "header_crc32c"),
            file_crc32c=_crc(item, "file_crc32c"),
        )

    def _texts(self, key: str) -> dict[str, str]:
        found = _object(self.found.get(key), key)
        return {name: _text(found, name) for name in found}

    def _metrics(self) -> dict[str, float]:
        metrics = {}
        for name, value in _object(self.found.get("metrics"), "metrics").items():
            if value is None:
                metrics[name] = math.nan
            elif isinstance(value, str) and value in _ODD_METRICS:
                metrics[name] = _ODD_METRICS[value]
            elif type(value) is float or (type(value) is int and abs(value) <= _MAX_INT):
                metrics[name] = float(value)
            else:
                raise ValueError(f"metric {name!r:.100} is {value!r:.100}, not a number")
        return metrics


def _integer(found: dict[str, Any], key: str, low: int = 0, high: int = _MAX_INT) -> int:
    value = found.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {value!r:.100}, not an integer from {low} to {high}")
    return value


def _text(found: dict[str, Any], key: str) -> str:
    value = found.get(key)
    if type(value) is not str:
        raise ValueError(f"{key} is {value!r:.100}, not a string")
    return value


def _crc(found: dict[str, Any], key: str) -> int:
    try:
        return checksum.from_hex(_text(found, key))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
