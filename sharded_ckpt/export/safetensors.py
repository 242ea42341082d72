"""Hugging Face style safetensors: sharded files and their index, written as a stream.

The library's own writer wants all tensors in memory at once. Here sizes are known before the first
byte, so the header is written first and the data follows. Tensors stand in a file by descending
item size, which keeps each one aligned for readers that map the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sharded_ckpt import dtypes
from sharded_ckpt.export.stream import Exported
from sharded_ckpt.export.weights import ModelView
from sharded_ckpt.store_output import durable_file, output_directory

MAX_SHARD_NBYTES = 5_000_000_000
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class File:
    """One file of the export: its name and its tensors, in file order."""

    name: str
    tensors: tuple[Exported, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data (the header comes on top)."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_files(tensors: Sequence[Exported], max_shard_nbytes: int) -> list[File]:
    """Cuts ``tensors``, in their order, into files of at most ``max_shard_nbytes`` of data.

    A tensor larger than that has a file of its own. One file is called ``model.safetensors``.
    """
    groups: list[list[Exported]] = [[]]
    room = max_shard_nbytes
    for tensor in tensors:
        if tensor.nbytes > room and groups[-1]:
            groups.append([])
            room = max_shard_nbytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) == 1:
        return [File(WEIGHTS, _ordered(groups[0]))]
    return [
        File(f"model-{i:05d}-of-{len(groups):05d}.safetensors", _ordered(group))
        for i, group in enumerate(groups, 1)
    ]


def write(
    view: ModelView,
    target: str,
    *,
    files: Sequence[File],
    overwrite: bool,
    also: Iterable[Callable[[str], None]] = (),
    progress: Progress = lambda nbytes: None,
) -> None:
    """Writes ``files`` (and the index, where there are several) into the directory ``target``.

    ``also`` is called with the hidden directory before it is renamed into place.
    """
    with output_directory(target, overwrite=overwrite) as directory:
        for file in files:
            _write_file(view, os.path.join(directory, file.name), file.tensors, progress)
        if len(files) > 1:
            _write_index(view, os.path.join(directory, INDEX), files)
        for extra in also:
            extra(directory)


def header_bytes(tensors: Sequence[Exported], metadata: dict[str, str]) -> bytes:
    """The length and JSON of a safetensors file, padded with spaces to a multiple of 8."""
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(
    view: ModelView, path: str, tensors: Sequence[Exported], progress: Progress
) -> None:
    here = {tensor.name for tensor in tensors}
    # The library's convention for tied weights: the name left out points at the one kept.
    aliases = {alias: name for alias, name in view.aliases.items() if name in here}
    with durable_file(path) as file:
        file.write(header_bytes(tensors, {**aliases, "format": "pt"}))
        for piece in view.stream(tensors):
            file.write(piece.buffer)
            progress(piece.data.nbytes)


def _write_index(view: ModelView, path: str, files: Sequence[File]) -> None:
    metadata: dict[str, object] = {"total_size": sum(file.nbytes for file in files)}
    if view.aliases:
        metadata["aliases"] = view.aliases
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    with durable_file(path) as file:
        file.write((json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())


def _ordered(tensors: Sequence[Exported]) -> tuple[Exported, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -dtypes.by_name(tensor.dtype).itemsize))
