"""The bytes of whole tensors, put together from the pieces in shards, in a stream.

DESIGN. A shard set stores pieces: fp32 masters, 16-bit weights where no master exists, and
16-bit overrides where the model's own weight is not the cast of its master. An export wants whole
tensors of one dtype. :meth:`TensorStream.pieces` gives their bytes in order, a window at a time:
read the pieces of the base (checksums included), cast, overlay the overrides. Two buffers of
:data:`WINDOW_NBYTES` are all the memory it takes, whatever the size of a tensor.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sharded_ckpt import dtypes, plan
from sharded_ckpt.export.cast import Bytes, cast_into
from sharded_ckpt.plan_spans import windows
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.slices import Entry, Run, Shape, runs

# Larger windows read each 4 MiB chunk of a shard fewer times; memory is what they cost.
WINDOW_NBYTES = 96 << 20


class Role(enum.Enum):
    """What an exported tensor is to the model."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    OPTIM = "optim"  # optimizer state, or an fp32 master beside its 16-bit weight


@dataclass(frozen=True, slots=True)
class Exported:
    """One tensor of an export. ``base`` is the saved tensor it is made from.

    ``override`` names the saved tensor whose pieces replace the cast, or is empty.
    """

    name: str
    role: Role
    dtype: str
    base: Entry
    override: str = ""

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def numel(self) -> int:
        return math.prod(self.base.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * dtypes.by_name(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``end`` of tensor number ``index`` of a stream, as raw bytes.

    ``data`` is valid until the next piece is asked for.
    """

    index: int
    start: int
    end: int
    data: Bytes

    @property
    def buffer(self) -> memoryview:
        """``data`` for what takes bytes."""
        return memoryview(self.data)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a tensor in one window: its elements, and where they stand in the buffers."""

    tensor: Exported
    start: int
    end: int
    at: int


class TensorStream:
    """Reads whole tensors of one set in bounded memory. ``holdings`` say who has the pieces."""

    def __init__(self, reader: ShardReader, holdings: Mapping[str, Sequence[plan.Holding]]) -> None:
        self._reader = reader
        self._holdings = holdings

    def pieces(self, tensors: Sequence[Exported]) -> Iterator[Piece]:
        """Every element of ``tensors``, in order, as pieces of at most :data:`WINDOW_NBYTES`.

        Raises :class:`ShardError` where bytes on disk are not those that were written.
        """
        widths = [
            max(dtypes.by_name(t.dtype).itemsize, dtypes.by_name(t.base.dtype).itemsize)
            for t in tensors
        ]
        total = sum(t.numel * width for t, width in zip(tensors, widths, strict=True))
        # Places in a window are aligned to 8 bytes, which costs up to 7 bytes for each tensor.
        size = min(WINDOW_NBYTES, total) + 8 * (len(tensors) + 1)
        source, target = np.empty(size, np.uint8), np.empty(size, np.uint8)
        for window in windows([t.numel for t in tensors], widths, WINDOW_NBYTES):
            places: list[_Place] = []
            at = 0
            for index, start, end in window:
                places.append(_Place(tensors[index], start, end, at))
                at += -(-(end - start) * widths[index] // 8) * 8
            assert at <= size, "a window is larger than its buffers"
            self._read(places, source, target)
            for (index, start, end), place in zip(window, places, strict=True):
                length = (end - start) * dtypes.by_name(place.tensor.dtype).itemsize
                yield Piece(index, start, end, target[place.at : place.at + length])

    def _read(self, places: Sequence[_Place], source: Bytes, target: Bytes) -> None:
        """Fills one window: bases (cast where they must be), then what overrides them."""
        wanted: list[Entry] = []
        addresses: list[int] = []
        for place in places:
            base = place.tensor.base
            wanted.append(replace(base, region=Run(place.start, place.end - place.start)))
            buffer = target if base.dtype == place.tensor.dtype else source
            addresses.append(buffer.ctypes.data + place.at)
        self._reader.read(plan.reads(wanted, self._holdings, prefer_file=None), addresses)
        for place in places:
            given, made = place.tensor.base.dtype, place.tensor.dtype
            if given != made:
                there, here = (
                    slice(place.at, place.at + (place.end - place.start) * itemsize)
                    for itemsize in (dtypes.by_name(given).itemsize, dtypes.by_name(made).itemsize)
                )
                cast_into(source[there], given, target[here], made)
        overrides = [
            read for want, place in enumerate(places) for read in self._overrides(place, want)
        ]
        if overrides:
            self._reader.read(overrides, [target.ctypes.data + place.at for place in places])

    def _overrides(self, place: _Place, want: int) -> Iterator[plan.Read]:
        tensor = place.tensor
        if not tensor.override:
            return
        size = dtypes.by_name(tensor.dtype).itemsize
        for held in self._holdings[tensor.override]:
            position = 0
            for first, numel in runs(held.entry.region, tensor.shape):
                low, high = max(first, place.start), min(first + numel, place.end)
                if low < high:
                    yield plan.Read(
                        file=held.file,
                        data_start=held.data_start + (position + low - first) * size,
                        nbytes=(high - low) * size,
                        want=want,
                        dest_start_bytes=(low - place.start) * size,
                    )
                position += numel
