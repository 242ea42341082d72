"""Weights-only sets: the weights of a full set, written anew without its optimizer state.

DESIGN. Every shard is copied by itself into a fresh step directory: its ``model/``, ``master/`` and
``buffer/`` tensors, read with their checksums checked, pass through one ring of chunks into the
engine, which writes a durable shard as it does for a save. The manifest comes last and commits the
set; ``origin`` names the full set, so that the new one ranks where that did and not above it. Only
then may the caller retire the full set. A failure removes what was written and commits nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from sharded_ckpt import plan, shard, tree
from sharded_ckpt.errors import CheckpointError, StateMismatch, StoreError, UsageError
from sharded_ckpt.layout import MANIFEST, SetId, parse_term_file, shard_file
from sharded_ckpt.manifest import Manifest, ShardRef
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.retention_catalog import read_manifest
from sharded_ckpt.store import LocalStore, StoreUncertain

if TYPE_CHECKING:
    from sharded_ckpt.engine import Arena, Engine

log = logging.getLogger(__name__)

T = TypeVar("T")

KINDS = ("model/", "master/", "buffer/")

# Chunks filled by one read, and slots of the ring: two groups, one written while one is read.
_GROUP = 4
_SLOTS = 2 * _GROUP
# One chunk waits for one write of a few MiB; past this the device has stopped answering.
_STALL_S = 300.0


@dataclass(frozen=True, slots=True)
class Thinner:
    """What ``Retention`` calls for each set to thin: takes the full set's identity."""

    store: LocalStore
    engine: Engine

    def __call__(self, full: SetId) -> SetId:
        """Raises as :func:`write_weights` does; the full set is still whole then."""
        manifest = read_manifest(self.store, full)
        return write_weights(self.store, self.engine, manifest, next_id(self.store, full.step)).id


def next_id(store: LocalStore, step: int) -> SetId:
    """A fresh identity in the newest term, with the serial after the highest there.

    A save that is opened meanwhile may get the same serial. That is no conflict: the random digits
    keep the directories apart, and a weights-only set ranks where its origin does.
    """
    names = store.list_dir()
    ids = [id for id in map(SetId.parse, names) if id is not None]
    claimed = [term for term in map(parse_term_file, names) if term is not None]
    term = max([*claimed, *(id.term for id in ids)])
    serial = max((id.serial for id in ids if id.term == term), default=0) + 1
    return SetId.new(step=step, term=term, serial=serial)


def write_weights(store: LocalStore, engine: Engine, full: Manifest, new: SetId) -> Manifest:
    """Commits the weights of ``full`` as the set ``new`` and returns its manifest.

    ``new`` is a fresh identity of the same step, see :func:`next_id`. Peak memory is one ring of
    32 MiB and one header. Raises :class:`UsageError` for a set that cannot be thinned,
    :class:`ShardError` where it is damaged, :class:`StoreError` where the new one cannot be
    written; the full set is never touched.
    """
    if full.content != "full":
        raise UsageError(f"{full.id.dirname} holds weights only already")
    if new.step != full.id.step:
        raise UsageError(f"a thinned step {full.id.step} cannot be called step {new.step}")
    store.make_dir(new.dirname)
    written: list[str] = []
    try:
        # State that the manifest refers to stays whole; what ranks keep for themselves goes.
        kept_state = {*tree.tensor_names(full.state), *tree.tensor_names(full.client_state)}
        arena = engine.arena(_SLOTS * shard.CHUNK_NBYTES)
        shards: list[ShardRef] = []
        for ref in full.shards:
            # A reader for each shard: headers are not kept for the whole set.
            reader = ShardReader(store, engine, full.id, full)
            names = [
                name
                for name in reader.header(ref.rank).entries
                if name.startswith(KINDS) or name in kept_state
            ]
            if names:
                written.append(shard_file(ref.rank))
                shards.append(_copy_shard(reader, ref.rank, names, new, arena))
        if not shards:
            raise StateMismatch(f"{full.id.dirname} holds no weights")
        made = replace(
            full,
            id=new,
            content="weights",
            origin=full.id,
            shards=tuple(shards),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        store.publish(f"{new.dirname}/{MANIFEST}", made.to_bytes())
    except StoreUncertain:
        raise  # it may be committed: nothing is removed
    except BaseException:
        _remove(store, new, written)
        raise
    log.info("step %d: weights kept as %s", new.step, new.dirname)
    return made


def _copy_shard(
    reader: ShardReader, rank: int, names: list[str], new: SetId, arena: Arena
) -> ShardRef:
    header = reader.header(rank)
    entries = [header.entries[name] for name in names]
    entries.sort(key=lambda entry: header.spans[entry.name][0])
    made = shard.plan_shard(entries)
    template = shard.header_template(
        made, id=new, rank=rank, world_size=header.world_size, state_tree={}
    )
    path = reader.store.path(f"{new.dirname}/{shard_file(rank)}")
    sources = [(0, made.data_nbytes)] if made.data_nbytes else []
    job = reader.engine.start(arena, sources, chunk_nbytes=made.chunk_nbytes)
    try:
        job.write_to(path, template.data, template.crc_pos)
        step = _GROUP * made.chunk_nbytes
        for start in range(0, made.data_nbytes, step):
            end = min(start + step, made.data_nbytes)
            for slot in range(start, end, made.chunk_nbytes):
                _in_time(job.wait_slot_for, slot, path)
            address = arena.address + start % (_SLOTS * made.chunk_nbytes)
            reader.read(_reads(rank, header, made, start, end), [address])
            job.advance(end)
        done = _in_time(lambda _, timeout_s: job.wait(timeout_s), 0, path)
        assert done is not None
    except BaseException:
        with contextlib.suppress(CheckpointError):
            job.cancel()
        raise
    finally:
        job.release()
    return ShardRef(
        rank=rank,
        directory=new.dirname,
        file=shard_file(rank),
        nbytes=done.file_nbytes,
        header_nbytes=done.header_nbytes,
        header_crc32c=done.header_crc32c,
        file_crc32c=done.file_crc32c,
    )


def _reads(
    rank: int, header: shard.ShardHeader, made: shard.ShardPlan, start: int, end: int
) -> list[plan.Read]:
    """Reads from the old shard that give bytes ``start`` to ``end`` of the new data part."""
    found = []
    for entry, offset in zip(made.entries, made.offsets, strict=True):
        old, old_end = header.spans[entry.name]
        low, high = max(offset, start), min(offset + old_end - old, end)
        if low < high:
            found.append(plan.Read(rank, old + low - offset, high - low, 0, low - start))
    return found


def _in_time(wait: Callable[[int, float], T], position: int, path: str) -> T:
    """The answer of a wait that must say yes within :data:`_STALL_S`."""
    answer = wait(position, _STALL_S)
    if not answer:
        raise StoreError("write", path, errno.ETIMEDOUT, f"no progress within {_STALL_S:g} s")
    return answer


def _remove(store: LocalStore, new: SetId, files: list[str]) -> None:
    """Best effort: what stays is a directory without a manifest, which gc removes one day."""
    try:
        store.unlink_many(new.dirname, files)
        store.remove_dir(new.dirname)
    except StoreError as error:
        log.warning("leftovers of a weights-only set stay in %s: %s", new.dirname, error)
