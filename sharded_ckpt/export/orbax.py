"""A checkpoint for JAX: one OCDBT store of Zarr3 arrays that Orbax restores as a flat dict.

``orbax.checkpoint.PyTreeCheckpointer().restore(path)`` needs three things: arrays under their
names, in one OCDBT key-value store, and the file ``_METADATA`` that lists them. ``_METADATA`` is
written last, so an export that was cut off is not taken for one. The target is a local directory
(hidden until it is whole), or any key-value store that tensorstore knows: by URL (``s3://``,
``gs://``), or by its JSON specification where a URL cannot say enough.

Chunks are contiguous runs of the row-major tensor, so the stream fills them one after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from sharded_ckpt import dtypes
from sharded_ckpt.errors import CheckpointError, StoreError, UnsupportedError, UsageError
from sharded_ckpt.export.cast import Bytes
from sharded_ckpt.export.stream import Exported, Piece
from sharded_ckpt.export.weights import ModelView
from sharded_ckpt.slices import Shape
from sharded_ckpt.store_output import durable_file, output_directory

METADATA = "_METADATA"

# A chunk is held about four times on its way (assembled, encoded, in the store, on the wire).
CHUNK_NBYTES = 16 << 20

# Names of element types in Zarr3, where they are not numpy's.
_ZARR_TYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    "C64": "complex64",
}


def write(
    view: ModelView,
    target: str,
    *,
    tensors: Sequence[Exported],
    overwrite: bool,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes ``tensors`` to a directory or key-value URL. Aliases are recorded, not duplicated.

    Raises :class:`UnsupportedError` without tensorstore, :class:`UsageError` where the target is
    not empty, :class:`StoreError` where the store refuses.
    """
    ts = _tensorstore()
    local = local_path(target)
    metadata = json.dumps(tree_metadata(view, tensors)).encode()
    if local is not None:
        with output_directory(local, overwrite=overwrite) as directory:
            base = {"driver": "file", "path": f"{directory}/"}
            _write_arrays(ts, base, tensors, view.stream(tensors), progress)
            with durable_file(os.path.join(directory, METADATA)) as file:
                file.write(metadata)
        return
    with _store_errors(target):
        store = ts.KvStore.open(_kvstore_spec(target)).result()
        if store.list().result():
            raise UsageError(
                f"{target} is not empty, and a store of objects cannot replace a folder in one "
                "step; choose another name"
            )
        try:
            base = store.spec().to_json()
            _write_arrays(ts, base, tensors, view.stream(tensors), progress)
            store.write(METADATA, metadata).result()
        except BaseException:
            store.delete_range(ts.KvStore.KeyRange()).result()
            raise


def local_path(target: str) -> str | None:
    """The local directory that ``target`` names, or ``None`` for a URL or spec of another store."""
    if target.startswith("{"):
        return None
    if "://" not in target:
        return target
    if urlsplit(target).scheme == "file":
        return unquote(urlsplit(target).path).rstrip("/") or "/"
    return None


def tree_metadata(view: ModelView, tensors: Sequence[Exported]) -> dict[str, Any]:
    """What Orbax reads first: the tree (a flat dict of numpy arrays) and how it is stored."""
    return {
        "tree_metadata": {
            str((tensor.name,)): {
                "key_metadata": [{"key": tensor.name, "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for tensor in tensors
        },
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"step": view.reader.id.step, "aliases": view.aliases},
    }


def chunk_shape(shape: Shape, itemsize: int, limit_nbytes: int) -> Shape:
    """The largest block of at most ``limit_nbytes`` that is a run of the row-major tensor."""
    chunk = [1] * len(shape)
    inner = itemsize
    for dim in reversed(range(len(shape))):
        chunk[dim] = max(1, min(shape[dim], limit_nbytes // inner))
        if chunk[dim] < shape[dim]:
            break
        inner *= chunk[dim]
    return tuple(chunk)


def chunk_boxes(shape: Shape, chunk: Shape) -> Iterator[tuple[slice, ...]]:
    """The blocks of a tensor in row-major order, cut off at its edges."""
    counts = [-(-length // extent) for length, extent in zip(shape, chunk, strict=True)]
    for index in np.ndindex(*counts):
        yield tuple(
            slice(i * extent, min((i + 1) * extent, length))
            for i, extent, length in zip(index, chunk, shape, strict=True)
        )


def _write_arrays(
    ts: Any,
    base: Any,
    tensors: Sequence[Exported],
    pieces: Iterator[Piece],
    progress: Callable[[int], None],
) -> None:
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    batch = _Batch(ts)
    reader = _Bytes(pieces)
    for tensor in tensors:
        itemsize = dtypes.by_name(tensor.dtype).itemsize
        chunk = chunk_shape(tensor.shape, itemsize, CHUNK_NBYTES)
        array = ts.open(
            _spec(base, tensor, chunk), create=True, context=context, transaction=batch.transaction
        ).result()
        for box in chunk_boxes(tensor.shape, chunk):
            extents = [part.stop - part.start for part in box]
            data = reader.take(math.prod(extents) * itemsize)
            values = data.view(_numpy_type(tensor.dtype)).reshape(extents)
            array[box].write(values).result()
            progress(data.nbytes)
            if batch.add(data.nbytes):
                array = array.with_transaction(batch.transaction)
    batch.commit()


class _Batch:
    """Commits to the store for every few chunks, since each commit rewrites its root."""

    def __init__(self, ts: Any) -> None:
        self._ts = ts
        self._nbytes = 0
        self.transaction = ts.Transaction()

    def add(self, nbytes: int) -> bool:
        """Counts bytes written; whether that was enough for a commit (and a new transaction)."""
        self._nbytes += nbytes
        if self._nbytes < CHUNK_NBYTES:
            return False
        self.commit()
        return True

    def commit(self) -> None:
        self.transaction.commit_async().result()
        self._nbytes = 0
        self.transaction = self._ts.Transaction()


class _Bytes:
    """The pieces of a stream as one run of bytes, taken in other portions."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._rest: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        taken = np.empty(nbytes, np.uint8)
        filled = 0
        while filled < nbytes:
            if not len(self._rest):
                self._rest = next(self._pieces).data
            part = self._rest[: nbytes - filled]
            taken[filled : filled + len(part)] = part
            filled += len(part)
            self._rest = self._rest[len(part) :]
        return taken


def _spec(base: Any, tensor: Exported, chunk: Shape) -> dict[str, Any]:
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{tensor.name}/"},
        # Zeros are data: without this, chunks of zeros would be left out.
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": list(tensor.shape),
            "data_type": _zarr_type(tensor.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "codecs": codecs,
        },
    }


def _zarr_type(dtype: str) -> str:
    return _ZARR_TYPES.get(dtype) or np.dtype(dtypes.by_name(dtype).numpy_name).name


def _numpy_type(dtype: str) -> Any:
    kind = dtypes.by_name(dtype)
    if not kind.ml_dtypes_name:
        return np.dtype(kind.numpy_name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise _not_installed("ml_dtypes") from error
    return np.dtype(getattr(ml_dtypes, kind.ml_dtypes_name))


def _kvstore_spec(target: str) -> Any:
    """A URL, or tensorstore's own JSON where a URL cannot say enough (an endpoint, for one)."""
    if not target.startswith("{"):
        return target if target.endswith("/") else f"{target}/"
    try:
        spec = json.loads(target)
    except ValueError as error:
        raise UsageError(f"not a key-value store in JSON: {target}: {error}") from error
    path = str(spec.get("path", ""))
    return {**spec, "path": path if not path or path.endswith("/") else f"{path}/"}


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise _not_installed("tensorstore") from error
    return tensorstore


def _not_installed(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"an export for Orbax needs {name}, which is not installed; "
        "run: pip install 'sharded_ckpt[orbax]'"
    )


@contextmanager
def _store_errors(target: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        # tensorstore raises these three, with the store's answer in the text.
        raise StoreError("write", target, getattr(error, "errno", 0) or 0, str(error)) from error
