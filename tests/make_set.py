"""Committed shard sets without a training job: global tensors, cut over n ranks, really written.

The package's own plan, shard, engine and manifest code writes the files, so what a test reads is
what a save would have left. See :func:`make_set`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sharded_ckpt import dtypes, plan, shard, tree
from sharded_ckpt.engine import Engine, select_engine
from sharded_ckpt.layout import MANIFEST, SetId, shard_file
from sharded_ckpt.manifest import Manifest, ShardRef
from sharded_ckpt.slices import Box, Entry, Region, Run, Shape, whole
from sharded_ckpt.store import LocalStore

Cut = Callable[[Sequence[Entry], int], list[list[Entry]]]


def make_set(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    step: int = 1,
    term: int = 1,
    serial: int = 1,
    world_size: int = 2,
    cut: str | Mapping[str, str] = "runs",
    copies: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Sequence[tuple[int, Any]]] | None = None,
    model_dtypes: Mapping[str, str] | str | None = None,
    client_state: Any = None,
    state: Any = None,
    rank_state: Callable[[int], Any] = lambda rank: {},
    aliases: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
    chunk_nbytes: int = shard.CHUNK_NBYTES,
    engine: Engine | None = None,
) -> Manifest:
    """Writes and commits one set; returns its manifest.

    ``tensors`` maps saved names (``master/a.weight``, ``optim/a.weight/exp_avg``, ...) to global
    numpy arrays or torch tensors. ``cut`` says how they are cut over ranks, for all of them or by
    name: one of :data:`CUTS`. ``copies`` are written whole by every rank, marked as copies; a list
    gives each rank its own. ``overrides`` maps ``model/`` names to ``(start, values)`` runs, all
    written by rank 0. ``model_dtypes`` is the format name of the weights' own dtype, for all
    masters or by parameter name.
    """
    store = LocalStore(directory)
    own_engine = engine is None
    engine = engine or select_engine("auto")
    id = SetId.new(step=step, term=term, serial=serial)
    parts = _Parts(world_size)
    globals_ = {name: as_array(value) for name, value in tensors.items()}
    groups: dict[str, list[Entry]] = {}
    for name, (dtype, array) in globals_.items():
        model_dtype = model_dtypes
        if isinstance(model_dtypes, Mapping):
            model_dtype = model_dtypes.get(name.partition("/")[2])
        is_master = name.startswith("master/")
        entry = Entry(
            name,
            dtype,
            array.shape,
            whole(array.shape),
            model_dtype=model_dtype if is_master else None,
        )
        groups.setdefault(cut if isinstance(cut, str) else cut[name], []).append(entry)
    for kind, entries in groups.items():
        for rank, cut_entries in enumerate(CUTS[kind](entries, world_size)):
            for entry in cut_entries:
                parts.add(rank, entry, take(globals_[entry.name][1], entry.region))
    for name, runs in (overrides or {}).items():
        shape = globals_["master/" + name.removeprefix("model/")][1].shape
        ((start, values),) = runs  # one run: a name stands once in a shard
        dtype, array = as_array(values)
        parts.add(0, Entry(name, dtype, shape, Run(start, array.size)), array.reshape(-1))
    for name, value in (copies or {}).items():
        for rank in range(world_size):
            dtype, array = as_array(value[rank] if isinstance(value, list) else value)
            parts.add(rank, Entry(name, dtype, array.shape, whole(array.shape), copy=True), array)
    client = parts.encode(0, client_state, "client_state")
    shared = parts.encode(0, state, "state")
    store.make_dir(id.dirname)
    refs = []
    try:
        for rank in range(world_size):
            rank_tree = parts.encode(rank, rank_state(rank), "rank_state")
            if rank == 0 or parts.entries[rank]:
                refs.append(_write(store, engine, id, parts, rank, rank_tree, chunk_nbytes))
    finally:
        if own_engine:
            engine.close()
    manifest = Manifest(
        id=id,
        run_id="test",
        world_size=world_size,
        content="full",
        origin=None,
        layout={"source": "make_set", "world_size": world_size},
        shards=tuple(refs),
        state=shared,
        client_state=client,
        aliases=dict(aliases or {}),
        metrics=dict(metrics or {}),
        versions={},
        created_at="2030-01-01T00:00:00+00:00",
    )
    store.publish(f"{id.dirname}/{MANIFEST}", manifest.to_bytes())
    return manifest


def as_array(value: Any) -> tuple[str, np.ndarray]:
    """The format's dtype name, and the elements as a C-contiguous array (of bits, for bf16)."""
    if type(value).__module__.startswith("torch"):
        import torch

        dtype = dtypes.from_torch(value.dtype)
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return dtype.name, flat.view(dtype.bits).reshape(tuple(value.shape))
    array = np.array(value, order="C")
    for dtype in dtypes.BY_NAME.values():
        known = dtype.numpy_name and np.dtype(dtype.numpy_name) == array.dtype
        if known or array.dtype.name == dtype.ml_dtypes_name:
            return dtype.name, array.view(dtype.bits) if dtype.ml_dtypes_name else array
    raise TypeError(f"no dtype of the format is {array.dtype}")


def take(array: np.ndarray, region: Region) -> np.ndarray:
    if isinstance(region, Run):
        return array.reshape(-1)[region.start : region.start + region.numel]
    index = tuple(slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True))
    return np.ascontiguousarray(array[index])


# ---- cuts ------------------------------------------------------------------------------------


def _each(regions: Callable[[Shape, int], list[Region | None]]) -> Cut:
    def cut(entries: Sequence[Entry], parts: int) -> list[list[Entry]]:
        cut_entries: list[list[Entry]] = [[] for _ in range(parts)]
        for entry in entries:
            for rank, region in enumerate(regions(entry.shape, parts)):
                if region is not None:
                    cut_entries[rank].append(
                        Entry(
                            entry.name, entry.dtype, entry.shape, region, False, entry.model_dtype
                        )
                    )
        return cut_entries

    return cut


def _runs(shape: Shape, parts: int) -> list[Region | None]:
    """ZeRO-3: every tensor in equal runs, rounded up; the last ranks may have none."""
    numel = math.prod(shape)
    each = -(-numel // parts)
    return [
        Run(start, min(each, numel - start))
        if (start := each * rank) < numel or rank == 0
        else None
        for rank in range(parts)
    ]


def _rows(shape: Shape, parts: int) -> list[Region | None]:
    """FSDP2: blocks of rows."""
    return _boxes(shape, parts, 0)


def _columns(shape: Shape, parts: int) -> list[Region | None]:
    """Tensor parallel: blocks of columns, where there are two dimensions."""
    return _boxes(shape, parts, 1) if len(shape) > 1 else _boxes(shape, parts, 0)


def _boxes(shape: Shape, parts: int, dim: int) -> list[Region | None]:
    if not shape:
        return [whole(shape), *[None] * (parts - 1)]
    each = max(1, -(-shape[dim] // parts))
    found: list[Region | None] = []
    for rank in range(parts):
        start = min(each * rank, shape[dim])
        length = min(each, shape[dim] - start)
        offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        extent = tuple(length if d == dim else n for d, n in enumerate(shape))
        found.append(Box(offset, extent) if length or rank == 0 else None)
    return found


def _first(shape: Shape, parts: int) -> list[Region | None]:
    return [whole(shape), *[None] * (parts - 1)]


def _flat(entries: Sequence[Entry], parts: int) -> list[list[Entry]]:
    """ZeRO-1 and 2: all tensors one after the other, cut into equal bytes."""
    sizes = [math.prod(entry.shape) for entry in entries]
    itemsizes = [dtypes.by_name(entry.dtype).itemsize for entry in entries]
    return [
        [
            Entry(
                entries[i].name,
                entries[i].dtype,
                entries[i].shape,
                Run(start, numel),
                False,
                entries[i].model_dtype,
            )
            for i, start, numel in share
        ]
        for share in plan.split_replicated(sizes, itemsizes, parts)
    ]


CUTS: dict[str, Cut] = {
    "runs": _each(_runs),
    "flat": _flat,
    "rows": _each(_rows),
    "columns": _each(_columns),
    "first": _each(_first),
}


# ---- writing ---------------------------------------------------------------------------------


class _Parts:
    """Entries and bytes of each rank."""

    def __init__(self, world_size: int) -> None:
        self.entries: list[list[Entry]] = [[] for _ in range(world_size)]
        self.data: list[dict[str, np.ndarray]] = [{} for _ in range(world_size)]

    def add(self, rank: int, entry: Entry, array: np.ndarray) -> None:
        self.entries[rank].append(entry)
        self.data[rank][entry.name] = np.ascontiguousarray(array)

    def encode(self, rank: int, value: Any, path: str) -> Any:
        encoded = tree.encode(value, path=path, prefix=f"state/{path}.")
        for name, tensor in encoded.tensors.items():
            dtype, array = as_array(tensor)
            self.add(rank, Entry(name, dtype, array.shape, whole(array.shape), copy=True), array)
        return encoded.tree


def _write(
    store: LocalStore,
    engine: Engine,
    id: SetId,
    parts: _Parts,
    rank: int,
    rank_tree: Any,
    chunk_nbytes: int,
) -> ShardRef:
    made = shard.plan_shard(parts.entries[rank], chunk_nbytes)
    template = shard.header_template(
        made, id=id, rank=rank, world_size=len(parts.entries), state_tree=rank_tree
    )
    arrays = [parts.data[rank][entry.name] for entry in made.entries]
    sources = [(array.ctypes.data, array.nbytes) for array in arrays if array.nbytes]
    arena = engine.arena(max(made.data_nbytes, 4096))
    job = engine.start(arena, sources, chunk_nbytes=chunk_nbytes)
    job.write_to(store.path(f"{id.dirname}/{shard_file(rank)}"), template.data, template.crc_pos)
    done = job.wait(120)
    assert done is not None, "the shard was not written within 120 s"
    job.release()
    return ShardRef(
        rank=rank,
        directory=id.dirname,
        file=shard_file(rank),
        nbytes=done.file_nbytes,
        header_nbytes=done.header_nbytes,
        header_crc32c=done.header_crc32c,
        file_crc32c=done.file_crc32c,
    )
