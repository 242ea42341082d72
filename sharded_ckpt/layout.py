"""Every file and directory name of a checkpoint directory: built here, parsed here, nowhere else.

The patterns are strict on purpose: a name that does not match exactly is not ours, and what is not
ours is neither offered nor deleted. The grammar is in docs/format.md, "Names".
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

MANIFEST = "manifest.json"
PIN = "pinned.json"
MAX_STEP = 10**16 - 1
MAX_RANKS = 10**8

_STEP = re.compile(r"step-(\d{8,16})-t(\d{4,8})-(\d{4,8})-([0-9a-f]{8})\Z")
_TERM = re.compile(r"term-(\d{4,8})\.json\Z")
_SHARD = re.compile(r"rank-(\d{5,8})\.safetensors\Z")
_TRASH = re.compile(r"trash-(step-.+)-([0-9a-f]{8})\Z")
_TEMP = re.compile(r"\.tmp-[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True, order=True)
class SetId:
    """Identity of one attempt to save one step. Ordered by ``(term, serial)``: newest is largest.

    ``nonce`` (8 hex digits) makes the directory name unique, so that it has one writer for ever.
    """

    term: int
    serial: int
    step: int
    nonce: str

    @property
    def dirname(self) -> str:
        return f"step-{self.step:08d}-t{self.term:04d}-{self.serial:04d}-{self.nonce}"

    @classmethod
    def new(cls, *, step: int, term: int, serial: int) -> SetId:
        if not 0 <= step <= MAX_STEP:
            raise ValueError(f"step must be between 0 and {MAX_STEP}, got {step}")
        return cls(term=term, serial=serial, step=step, nonce=secrets.token_hex(4))

    @classmethod
    def parse(cls, name: str) -> SetId | None:
        """The identity that ``name`` spells, or ``None`` when it is not a step directory's name."""
        found = _STEP.match(name)
        if found is None:
            return None
        step, term, serial = (int(found.group(i)) for i in (1, 2, 3))
        parsed = cls(term=term, serial=serial, step=step, nonce=found.group(4))
        # One spelling per identity: extra leading zeros are somebody else's name.
        return parsed if parsed.dirname == name else None


def term_file(term: int) -> str:
    return f"term-{term:04d}.json"


def parse_term_file(name: str) -> int | None:
    found = _TERM.match(name)
    if found is None or term_file(int(found.group(1))) != name:
        return None
    return int(found.group(1))


def shard_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def parse_shard_file(name: str) -> int | None:
    found = _SHARD.match(name)
    if found is None or shard_file(int(found.group(1))) != name:
        return None
    return int(found.group(1))


def trash_name(step_dirname: str) -> str:
    """Where gc moves an orphan before it looks again and removes it."""
    return f"trash-{step_dirname}-{secrets.token_hex(4)}"


def parse_trash_name(name: str) -> SetId | None:
    found = _TRASH.match(name)
    return None if found is None else SetId.parse(found.group(1))


def temp_name() -> str:
    """Name of a file that is renamed into place, or left behind by a crash and ignored."""
    return f".tmp-{secrets.token_hex(8)}"


def is_temp_name(name: str) -> bool:
    return _TEMP.match(name) is not None
