"""Verification of a whole set: every byte read, every damaged region named."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharded_ckpt import plan, shard
from sharded_ckpt.errors import ShardError, StoreError
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.reader import ShardReader, tensors_in
from sharded_ckpt.slices import Entry

if TYPE_CHECKING:
    from sharded_ckpt.engine import Engine
    from sharded_ckpt.store import LocalStore


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged region: bytes ``start`` to ``end`` of ``file`` (``None``: not one region)."""

    file: str
    message: str
    tensors: tuple[str, ...] = ()
    start: int | None = None
    end: int | None = None


def verify_set(
    store: LocalStore,
    engine: Engine,
    manifest: Manifest,
    *,
    directory: str | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Damage]:
    """Reads every byte of a set; returns all that is wrong with it, the empty list if nothing.

    Goes on after damage, so that one run names every bad region. ``progress`` gets the bytes done.
    """
    reader = ShardReader(store, engine, manifest.id, manifest, directory=directory)
    damage: list[Damage] = []
    layouts: dict[int, list[Entry]] = {}
    for ref in manifest.shards:
        path = store.path(reader.file(ref))
        try:
            header = reader.header(ref.rank)
            layouts[ref.rank] = list(header.entries.values())
            damage.extend(_bad_chunks(engine, path, header))
        except ShardError as error:
            damage.append(Damage(path, str(error), start=error.start, end=error.end))
        except StoreError as error:
            missing = error.errno == errno.ENOENT
            what = f"rank {ref.rank}: the file is missing" if missing else str(error)
            damage.append(Damage(path, what))
        progress(ref.nbytes)
    if len(layouts) == len(manifest.shards):
        # Only now: with a header missing, every hole would be blamed on the wrong thing.
        where = store.path(reader.directory)
        damage.extend(Damage(where, problem) for problem in plan.coverage(layouts))
    return damage


def _bad_chunks(engine: Engine, path: str, header: shard.ShardHeader) -> Iterator[Damage]:
    bad = engine.verify(
        path,
        header_nbytes=header.header_nbytes,
        data_nbytes=header.data_nbytes,
        chunk_nbytes=header.chunk_nbytes,
        crcs=header.crcs,
    )
    for chunk in bad:
        start = header.header_nbytes + chunk * header.chunk_nbytes
        end = min(start + header.chunk_nbytes, header.header_nbytes + header.data_nbytes)
        yield Damage(
            path,
            f"rank {header.rank}: chunk {chunk} is not what was written",
            tuple(tensors_in(header, start, end)),
            start,
            end,
        )
