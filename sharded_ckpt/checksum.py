"""CRC32C (Castagnoli): the checksum of every chunk, header, file and manifest.

Checksums of parts combine into that of the whole (:func:`combine`), so threads may compute them in
any order. It detects damage; it identifies nothing: do not deduplicate by it.

The extension computes it at memory speed. Without it (or with ``SHARDED_CKPT_NO_EXTENSION=1``)
numpy does: the data is laid out as rows of a matrix, all rows take one byte per step through the
usual table, and the rows' checksums are combined pairwise. Tens of megabytes a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEX_DIGITS = 8
NO_EXTENSION = "SHARDED_CKPT_NO_EXTENSION"

# A polynomial over GF(2) of degree < 32 is held reflected: bit 31 is the coefficient of x^0.
_POLYNOMIAL = 0x82F63B78  # x^32 mod P
_ONE = 0x80000000  # x^0
# P is (x + 1) times a primitive polynomial of degree 31, so exponents of x repeat after this.
_PERIOD = 2**31 - 1
# Below this, the plain byte loop beats setting up a matrix.
_SMALL_NBYTES = 512


def extension_allowed() -> bool:
    """Whether the environment lets the compiled extension be used."""
    return os.environ.get(NO_EXTENSION) != "1"


def to_hex(crc: int) -> str:
    """The 8 lower-case hex digits that files hold."""
    return f"{crc:08x}"


def from_hex(digits: str) -> int:
    """The inverse of :func:`to_hex`. Raises ``ValueError`` for anything it would not write."""
    if len(digits) != HEX_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise ValueError(f"a crc32c is 8 lower-case hex digits, got {digits!r}")
    return int(digits, 16)


def _multiply(a: int, b: int) -> int:
    """a * b mod P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)  # b *= x
    return product


def _power_of_x(exponent: int) -> int:
    """x**exponent mod P."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def python_combine(crc_a: int, crc_b: int, nbytes_b: int) -> int:
    return _multiply(_power_of_x(8 * (nbytes_b % _PERIOD)), crc_a) ^ crc_b


def _make_table() -> NDArray[np.uint32]:
    crc: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = (crc >> np.uint32(1)) ^ (crc & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return crc


_TABLE = _make_table()
_TABLE_LIST = [int(entry) for entry in _TABLE]


def _bytewise(data: bytes, value: int) -> int:
    crc = value ^ 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE_LIST[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def python_crc32c(data: Buffer, value: int = 0) -> int:
    """:func:`crc32c` without the extension; also the oracle of its tests."""
    flat = np.frombuffer(memoryview(data).cast("B"), dtype=np.uint8)
    if flat.size <= _SMALL_NBYTES:
        return _bytewise(flat.tobytes(), value)
    # A power of two of rows halves cleanly; rows of some 500 steps amortise numpy's call overhead.
    rows = 1 << max(1, (flat.size // _SMALL_NBYTES).bit_length() - 1)
    rows = min(rows, 1 << 14)
    width = flat.size // rows
    columns = np.ascontiguousarray(flat[: rows * width].reshape(rows, width).T)
    crc = np.full(rows, 0xFFFFFFFF, dtype=np.uint32)
    for column in columns:
        crc = (crc >> np.uint32(8)) ^ _TABLE[(crc ^ column) & np.uint32(0xFF)]
    crc ^= np.uint32(0xFFFFFFFF)
    while crc.size > 1:
        # Neighbours (a, b) become a * x^(8 * width) + b.
        power = _power_of_x(8 * (width % _PERIOD))
        crc = _multiply_all(crc[0::2], power) ^ crc[1::2]
        width *= 2
    whole = python_combine(value, int(crc[0]), width)
    return _bytewise(flat[width:].tobytes(), whole)


def _multiply_all(values: NDArray[np.uint32], factor: int) -> NDArray[np.uint32]:
    product = np.zeros_like(values)
    for bit in range(32):
        selected = (values >> np.uint32(31 - bit)) & np.uint32(1)
        product ^= selected * np.uint32(factor)
        factor = (factor >> 1) ^ (_POLYNOMIAL if factor & 1 else 0)
    return product


def _python_crc32c_at(address: int, nbytes: int, value: int = 0) -> int:
    import ctypes

    return python_crc32c((ctypes.c_char * nbytes).from_address(address), value) if nbytes else value


_Crc = Callable[..., int]


def _select() -> tuple[_Crc, _Crc, _Crc]:
    if extension_allowed():
        try:
            from sharded_ckpt import _C
        except ImportError:
            pass
        else:
            return _C.crc32c, _C.crc32c_combine, _C.crc32c_at
    return python_crc32c, python_combine, _python_crc32c_at


_crc32c, _combine, _crc32c_at = _select()


def crc32c(data: Buffer, value: int = 0) -> int:
    """The CRC32C of the bytes that gave ``value`` followed by ``data`` (C-contiguous)."""
    return _crc32c(data, value)


def crc32c_at(address: int, nbytes: int, value: int = 0) -> int:
    """:func:`crc32c` of ``nbytes`` of memory at ``address``, which the caller keeps alive."""
    return _crc32c_at(address, nbytes, value)


def combine(crc_a: int, crc_b: int, nbytes_b: int) -> int:
    """The CRC32C of A followed by B, from those of A and B and B's size in bytes."""
    return _combine(crc_a, crc_b, nbytes_b)
