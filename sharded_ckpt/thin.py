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
from sharded_ckpt.layout import MANIFEST, SetId, shard_file
from sharded_ckpt.manifest import Manifest, ShardRef
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.store import LocalStore, StoreUncertain

if TYPE_CHECKING:
    from sharded_ckpt.engine import Arena, Engine

log = logging.getLogger(__name__)

T = TypeVar("T")

KINDS = ("model/", "master/", "buffer/")

# Chunks filled by one read: more would read fewer bytes twice, and take more memory.
_GROUP = 4
# One chunk waits for one write of a few MiB; past this the device has stopped answering.
_STALL_S = 300.0


@dataclass(frozen=True, slots=True)
class Thinner:
    """What ``Retention`` calls to thin a set: writes the weights of ``full`` as the set ``new``."""

    store: LocalStore
    engine: Engine

    def __call__(self, full: Manifest, new: SetId) -> Manifest:
        """Raises as :func:`write_weights` does; the full set is whole in any case."""
        return write_weights(self.store, self.engine, full, new)


def write_weights(store: LocalStore, engine: Engine, full: Manifest, new: SetId) -> Manifest:
    """Commits the weights of ``full`` as the set ``new`` and returns its manifest.

    ``new`` is a fresh identity of the same step. Peak memory is one ring of 32 MiB and one header.
    Raises :class:`UsageError` for a set that cannot be thinned,
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
        arena = engine.arena(2 * _GROUP * shard.CHUNK_NBYTES)  # one group is read, one written
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
    chunk_nbytes = min(header.chunk_nbytes, shard.CHUNK_NBYTES)
    made = shard.plan_shard(entries, chunk_nbytes)
    template = shard.header_template(
        made, id=new, rank=rank, world_size=header.world_size, state_tree={}
    )
    path = reader.store.path(f"{new.dirname}/{shard_file(rank)}")
    sources = [(0, made.data_nbytes)] if made.data_nbytes else []
    slots = arena.nbytes // chunk_nbytes
    group = max(1, min(_GROUP, slots // 2))
    job = reader.engine.start(arena, sources, chunk_nbytes=chunk_nbytes)
    try:
        job.write_to(path, template.data, template.crc_pos)
        for first in range(0, made.chunk_count, group):
            chunks = range(first, min(first + group, made.chunk_count))
            reads: list[plan.Read] = []
            for chunk in chunks:
                start = chunk * chunk_nbytes
                _in_time(job.wait_slot_for, start, path)
                end = min(start + chunk_nbytes, made.data_nbytes)
                reads += _reads(rank, header, made, start, end, want=chunk - first)
            reader.read(reads, [arena.address + chunk % slots * chunk_nbytes for chunk in chunks])
            job.advance(min(chunks.stop * chunk_nbytes, made.data_nbytes))
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
    rank: int, header: shard.ShardHeader, made: shard.ShardPlan, start: int, end: int, want: int
) -> list[plan.Read]:
    """Reads from the old shard that give bytes ``start`` to ``end`` of the new data part."""
    found = []
    for entry, offset in zip(made.entries, made.offsets, strict=True):
        old, old_end = header.spans[entry.name]
        low, high = max(offset, start), min(offset + old_end - old, end)
        if low < high:
            found.append(plan.Read(rank, old + low - offset, high - low, want, low - start))
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
