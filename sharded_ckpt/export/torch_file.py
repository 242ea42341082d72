"""One file for ``torch.load(weights_only=True)``, written as a stream.

``torch.save`` wants the whole dict in memory. The file it makes is a zip archive whose tensors are
stored uncompressed, one record each, next to a small ``data.pkl`` that says how to put them
together. Here the records are streamed with :mod:`zipfile`, so memory stays that of the stream. The
structure is always the same (a dict of contiguous tensors), so ``data.pkl`` is spelled out from
nine opcodes: no object is pickled, and torch is not needed to write.

Tied names are two tensors over one record, so they share their storage after loading.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

from sharded_ckpt import dtypes
from sharded_ckpt.export.stream import Exported, Piece
from sharded_ckpt.export.weights import ModelView
from sharded_ckpt.store_output import durable_file, output_file

_ROOT = "archive"
# torch maps records into memory at this alignment; it is what torch.save itself keeps.
_ALIGN = 64
_ZIP_HEADER_NBYTES = 30
_ZIP64_NBYTES = 20
_ZIP64_ABOVE = 1 << 30  # well below the 2 GiB at which zipfile switches by itself

# Types that torch has a typed storage for; the others are rebuilt from untyped bytes.
_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "C64": "ComplexFloatStorage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}


def write(
    view: ModelView,
    target: str,
    *,
    tensors: Sequence[Exported],
    overwrite: bool,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes ``tensors``, and the aliases of ``view`` among them, as one file ``target``."""
    with (
        output_file(target, overwrite=overwrite) as path,
        durable_file(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        _small(archive, file, "data.pkl", structure(tensors, view.aliases))
        _small(archive, file, "byteorder", b"little")
        pieces = view.stream(tensors)
        for number, tensor in enumerate(tensors):
            _record(archive, file, f"data/{number}", tensor, pieces, progress)
        _small(archive, file, "version", b"3\n")


def structure(tensors: Sequence[Exported], aliases: Mapping[str, str]) -> bytes:
    """``data.pkl``: a dict from name to tensor; tensor ``i`` is backed by the record ``data/i``."""
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    items = [(tensor.name, number) for number, tensor in enumerate(tensors)]
    items += [(alias, numbers[name]) for alias, name in aliases.items() if name in numbers]
    body = b"".join(_text(name) + _tensor(tensors[number], number) for name, number in items)
    return b"\x80\x02}(" + body + b"u."  # protocol 2, empty dict, mark ... set items, stop


def _tensor(tensor: Exported, number: int) -> bytes:
    typed = _STORAGES.get(tensor.dtype)
    numel = tensor.numel if typed else tensor.nbytes
    storage = _tuple(
        _text("storage"),
        _global("torch", typed) if typed else _global("torch.storage", "UntypedStorage"),
        _text(str(number)),
        _text("cpu"),
        _integer(numel),
    )
    strides = [math.prod(tensor.shape[i + 1 :]) for i in range(len(tensor.shape))]
    parts = [
        storage + b"Q",  # persistent id: the reader looks the record up
        _integer(0),
        _tuple(*map(_integer, tensor.shape)),
        _tuple(*map(_integer, strides)),
        b"\x89",  # requires_grad=False
        _global("collections", "OrderedDict") + b")R",  # no hooks
    ]
    if typed is None:
        parts.append(_global("torch", dtypes.by_name(tensor.dtype).torch_name))
    rebuild = "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
    return _global("torch._utils", rebuild) + _tuple(*parts) + b"R"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _small(archive: zipfile.ZipFile, file: BinaryIO, name: str, data: bytes) -> None:
    with archive.open(_info(file, name, len(data)), "w") as record:
        record.write(data)


def _record(
    archive: zipfile.ZipFile,
    file: BinaryIO,
    name: str,
    tensor: Exported,
    pieces: Iterator[Piece],
    progress: Callable[[int], None],
) -> None:
    big = tensor.nbytes > _ZIP64_ABOVE
    with archive.open(_info(file, name, tensor.nbytes), "w", force_zip64=big) as record:
        written = 0
        while written < tensor.nbytes:
            data = next(pieces).buffer
            record.write(data)
            written += data.nbytes
            progress(data.nbytes)


def _info(file: BinaryIO, name: str, nbytes: int) -> zipfile.ZipInfo:
    """The entry of a record whose data begins on a multiple of 64 bytes of the file."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = nbytes
    head = _ZIP_HEADER_NBYTES + len(info.filename.encode())
    head += _ZIP64_NBYTES if nbytes > _ZIP64_ABOVE else 0
    padding = -(file.tell() + head) % _ALIGN
    if padding:
        # An extra field has 4 bytes of its own; "FB" is what torch calls its padding.
        length = padding - 4 if padding >= 4 else padding - 4 + _ALIGN
        info.extra = b"FB" + struct.pack("<H", length) + b"\0" * length
    return info
