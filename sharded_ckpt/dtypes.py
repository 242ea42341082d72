"""The only table of element types: safetensors name, item size, torch and numpy names.

torch is imported only when a torch dtype is asked for, so that the offline tools start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_ckpt.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. ``bits`` is the unsigned numpy type of the same width (exact compares)."""

    name: str
    itemsize: int
    torch_name: str
    numpy_name: str  # "" where numpy has no such type; then ml_dtypes_name
    ml_dtypes_name: str = ""

    @property
    def bits(self) -> Any:
        return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[self.itemsize])

    @property
    def is_float(self) -> bool:
        return self.name.startswith(("F", "BF"))


_TABLE = (
    DType("F64", 8, "float64", "<f8"),
    DType("F32", 4, "float32", "<f4"),
    DType("F16", 2, "float16", "<f2"),
    DType("BF16", 2, "bfloat16", "", "bfloat16"),
    DType("F8_E4M3", 1, "float8_e4m3fn", "", "float8_e4m3fn"),
    DType("F8_E5M2", 1, "float8_e5m2", "", "float8_e5m2"),
    DType("C64", 8, "complex64", "<c8"),
    DType("I64", 8, "int64", "<i8"),
    DType("I32", 4, "int32", "<i4"),
    DType("I16", 2, "int16", "<i2"),
    DType("I8", 1, "int8", "i1"),
    DType("U64", 8, "uint64", "<u8"),
    DType("U32", 4, "uint32", "<u4"),
    DType("U16", 2, "uint16", "<u2"),
    DType("U8", 1, "uint8", "u1"),
    DType("BOOL", 1, "bool", "?"),
)
BY_NAME: dict[str, DType] = {d.name: d for d in _TABLE}
_BY_TORCH: dict[str, DType] = {d.torch_name: d for d in _TABLE}


def by_name(name: str) -> DType:
    """The type that the format calls ``name``. Raises :class:`UnsupportedError`."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnsupportedError(
            f"dtype {name!r} is not in the format; known: {', '.join(BY_NAME)}"
        ) from None


def from_torch(dtype: torch.dtype, where: str = "a tensor") -> DType:
    """The format's type of a torch dtype. Raises :class:`UnsupportedError` naming ``where``."""
    short = str(dtype).removeprefix("torch.")
    try:
        return _BY_TORCH[short]
    except KeyError:
        raise UnsupportedError(
            f"{where} has dtype {dtype}, which safetensors cannot hold; "
            f"known: {', '.join(_BY_TORCH)}"
        ) from None


def to_torch(name: str) -> torch.dtype:
    """The torch dtype that the format calls ``name``."""
    import torch

    found: torch.dtype = getattr(torch, by_name(name).torch_name)
    return found
