"""What ranks say about an attempt, and what the coordinator answers: plain values and keys."""

from __future__ import annotations

import base64
import binascii
import enum
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, TypeVar

from sharded_ckpt import plan
from sharded_ckpt.errors import (
    CommitUnknown,
    GroupError,
    SaveAborted,
    SaveError,
    SaveTimeout,
    StoreError,
    Superseded,
)
from sharded_ckpt.slices import Entry

T = TypeVar("T")

MAX_CAUSE_CHARS = 2000
MAX_LAYOUT_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Ballot:
    """One save, as all ranks know it before anything else: the ``n``-th of this step.

    The step is part of it so that a rank that once called ``save`` alone is in step with the others
    again at the next one.
    """

    step: int
    n: int

    @property
    def token(self) -> str:
        return f"{self.step}.{self.n}"

    @property
    def attempt_key(self) -> str:
        """Rank 0's answer to "where do we write": a set's name, or a verdict."""
        return f"attempt/{self.token}"

    def vote_key(self, rank: int) -> str:
        return f"vote/{self.token}/{rank}"

    @property
    def no_key(self) -> str:
        """A NO vote; one is enough to call the attempt off."""
        return f"no/{self.token}"

    @property
    def verdict_key(self) -> str:
        return f"verdict/{self.token}"

    @property
    def seen_key(self) -> str:
        """Counts the ranks that are through with this ballot and all its keys."""
        return f"seen/{self.token}"

    @staticmethod
    def at_key(rank: int) -> str:
        """The ballot at which ``rank`` is now: for messages, and the one key that changes."""
        return f"at/{rank}"


class Outcome(enum.Enum):
    """Where an attempt is, on the coordinator. All but the first two are final."""

    VOTING = "voting"
    PUBLISHING = "publishing"
    COMMITTED = "committed"
    ABORTED = "aborted"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    SUPERSEDED = "superseded"


TRANSITIONS: dict[Outcome, frozenset[Outcome]] = {
    Outcome.VOTING: frozenset(
        {Outcome.PUBLISHING, Outcome.ABORTED, Outcome.TIMEOUT, Outcome.SUPERSEDED}
    ),
    Outcome.PUBLISHING: frozenset({Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN}),
    Outcome.COMMITTED: frozenset(),
    Outcome.ABORTED: frozenset(),
    Outcome.TIMEOUT: frozenset(),
    Outcome.UNKNOWN: frozenset(),
    Outcome.SUPERSEDED: frozenset(),
}

_ERRORS: dict[Outcome, type[SaveError]] = {
    Outcome.ABORTED: SaveAborted,
    Outcome.TIMEOUT: SaveTimeout,
    Outcome.UNKNOWN: CommitUnknown,
    Outcome.SUPERSEDED: Superseded,
}


class Written(Protocol):
    """What the engine tells of a finished shard file."""

    @property
    def file_nbytes(self) -> int: ...
    @property
    def header_nbytes(self) -> int: ...
    @property
    def header_crc32c(self) -> int: ...
    @property
    def file_crc32c(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CommitParts:
    """What goes into the manifest besides the shards. Trees are those of ``tree.encode``."""

    layout: Mapping[str, Any]
    state_tree: Any
    client_state_tree: Any
    aliases: Mapping[str, str]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's YES (its shard is durable, and this is it) or NO (and this is why).

    A rank that owns no data votes YES with ``nbytes`` 0 and has no file. ``packed_entries`` is the
    shard's layout; it is left out while it is the one that was committed last. A rank that votes NO
    only because another did names that one as ``failed_rank``.
    """

    ok: bool
    rank: int
    step: int
    n: int
    serial: int = 0
    nbytes: int = 0
    header_nbytes: int = 0
    header_crc32c: int = 0
    file_crc32c: int = 0
    layout_digest: str = ""
    packed_entries: str | None = None
    operation: str = ""
    path: str = ""
    errno: int = 0
    cause: str = ""
    failed_rank: int = -1

    @classmethod
    def yes(
        cls,
        *,
        rank: int,
        step: int,
        n: int,
        serial: int,
        written: Written,
        layout_digest: str,
        entries: Sequence[Entry] | None,
    ) -> Vote:
        return cls(
            ok=True,
            rank=rank,
            step=step,
            n=n,
            serial=serial,
            nbytes=written.file_nbytes,
            header_nbytes=written.header_nbytes,
            header_crc32c=written.header_crc32c,
            file_crc32c=written.file_crc32c,
            layout_digest=layout_digest,
            packed_entries=None if entries is None else pack_entries(entries),
        )

    @classmethod
    def no(cls, *, rank: int, step: int, n: int, error: BaseException) -> Vote:
        cause = str(error) or type(error).__name__
        if not isinstance(error, SaveError | StoreError):
            cause = f"{type(error).__name__}: {cause}"
        failed = getattr(error, "rank", None)
        vote = cls(
            ok=False,
            rank=rank,
            step=step,
            n=n,
            cause=cause[:MAX_CAUSE_CHARS],
            failed_rank=rank if failed is None else failed,
        )
        if not isinstance(error, OSError):
            return vote
        return cls(
            **{
                **asdict(vote),
                "operation": getattr(error, "operation", ""),
                "path": str(getattr(error, "path", None) or error.filename or ""),
                "errno": error.errno or 0,
            }
        )

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.step, self.n)

    @property
    def key(self) -> str:
        return self.ballot.vote_key(self.rank)

    @property
    def no_key(self) -> str:
        return self.ballot.no_key

    def entries(self) -> list[Entry] | None:
        """The shard's layout, if it was sent along. Raises :class:`GroupError` if it is garbled."""
        return None if self.packed_entries is None else unpack_entries(self.packed_entries)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Vote:
        """Raises :class:`GroupError` for anything but a vote."""
        return _parse(cls, data)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended; equal on all ranks. ``rank`` is who failed, if one did, else -1."""

    outcome: Outcome
    step: int
    serial: int
    term: int
    message: str = ""
    rank: int = -1

    def as_error(self) -> SaveError | None:
        """What ``SaveHandle.wait`` raises; ``None`` when the step is committed."""
        kind = _ERRORS.get(self.outcome)
        if kind is None:
            return None
        return kind(self.message, step=self.step, rank=None if self.rank < 0 else self.rank)

    def to_bytes(self) -> bytes:
        return json.dumps({**asdict(self), "outcome": self.outcome.value}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Verdict:
        """Raises :class:`GroupError` for anything but a final verdict."""
        verdict = _parse(cls, data)
        if TRANSITIONS[verdict.outcome]:
            raise GroupError(f"not a verdict: the outcome is still {verdict.outcome.value!r}")
        return verdict


def pack_entries(entries: Sequence[Entry]) -> str:
    text = json.dumps(plan.entries_to_json(entries), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 3)).decode()


def unpack_entries(packed: str) -> list[Entry]:
    """Raises :class:`GroupError`."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(base64.b64decode(packed, validate=True), MAX_LAYOUT_NBYTES)
        if not inflate.eof:
            raise ValueError(f"more than {MAX_LAYOUT_NBYTES} bytes, or cut off")
        return list(plan.entries_from_json(json.loads(text)))
    except (ValueError, binascii.Error, zlib.error) as e:
        raise GroupError(f"a rank sent a layout that cannot be read: {e}") from e


def _parse(kind: type[T], data: bytes) -> T:
    """A dataclass of plain fields from JSON that has exactly its keys."""
    made: Any = kind
    try:
        found = json.loads(data)
        known = {f.name for f in fields(made)}
        if not isinstance(found, dict) or set(found) != known:
            raise ValueError(f"expected the keys {sorted(known)}")
        if "outcome" in known:
            found["outcome"] = Outcome(found["outcome"])
        return kind(**found)
    except ValueError as e:
        raise GroupError(f"a message that is not a {kind.__name__.lower()}: {e}") from e
