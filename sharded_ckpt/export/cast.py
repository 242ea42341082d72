"""Casts between float types on raw bytes, with numpy alone: bf16 is done on the bits.

All casts round to nearest, ties to even, as torch does; NaN stays NaN, overflow becomes infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharded_ckpt.errors import UnsupportedError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Integers, bools and complex are never cast, and an 8-bit float means nothing without its scale.
CASTABLE = ("F64", "F32", "F16", "BF16")

# Elements at a time: keeps the temporaries (a few arrays of 4 bytes an element) in the cache.
_BLOCK = 1 << 18


def cast_into(source: Bytes, source_dtype: str, target: Bytes, target_dtype: str) -> None:
    """Casts all elements of ``source`` into ``target``; both are 1-D uint8 arrays of raw bytes.

    Raises :class:`UnsupportedError` for a pair that is not a cast between :data:`CASTABLE` types.
    """
    if source_dtype == target_dtype:
        target[:] = source
        return
    if source_dtype not in CASTABLE or target_dtype not in CASTABLE:
        raise UnsupportedError(
            f"no cast from {source_dtype} to {target_dtype}; only {', '.join(CASTABLE)} are cast"
        )
    given, wanted = source.view(_stored(source_dtype)), target.view(_stored(target_dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(given), _BLOCK):
            block = _to_float(given[start : start + _BLOCK], source_dtype)
            wanted[start : start + _BLOCK] = _from_float(block, target_dtype)


def float_values(data: Bytes, dtype: str) -> np.ndarray[Any, Any]:
    """Raw bytes of a castable type as numpy floats that numpy can compute with."""
    return _to_float(data.view(_stored(dtype)), dtype)


def bf16_bits(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, Any]:
    """float32 to the bits of bfloat16: round to nearest even, NaN to a quiet NaN of its sign."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan = np.isnan(values)
    if nan.any():
        # Rounding could carry a NaN's payload into infinity, or into the sign.
        rounded[nan] = (bits[nan] >> 16) | 0x7FC0
    narrow: np.ndarray[Any, Any] = rounded.astype("<u2")
    return narrow


def _stored(dtype: str) -> str:
    return {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]


def _to_float(block: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype != "BF16":
        return block
    widened: np.ndarray[Any, Any] = (block.astype("<u4") << 16).view("<f4")
    return widened


def _from_float(block: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "F64":
        return block.astype("<f8")
    single = block.astype("<f4")  # float64 goes through float32, as torch's casts do
    if dtype == "BF16":
        return bf16_bits(single)
    return single.astype(_stored(dtype), copy=False)
