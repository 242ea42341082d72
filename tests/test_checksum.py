"""CRC32C against its known vector, an independent library, and itself in two languages."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import google_crc32c
import pytest

from sharded_ckpt import checksum

# RFC 3720, B.4: the check value, and 32 bytes of zeros, of ones, and counting up.
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
]
# Around the sizes at which the implementations change their way of working.
SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 767, 768, 769, 1025, 12287, 12288, 12289, 100_003, 1 << 20]


def _implementations() -> dict[str, object]:
    found = {"python": checksum.python_crc32c}
    try:
        from sharded_ckpt import _C
    except ImportError:
        return found
    return found | {_C.crc32c_implementation(): _C.crc32c, "table": _C.crc32c_table}


@pytest.fixture(params=_implementations().items(), ids=lambda item: item[0])
def crc32c(request: pytest.FixtureRequest):
    return request.param[1]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(crc32c, data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@pytest.mark.parametrize("nbytes", SIZES)
def test_equals_an_independent_library(crc32c, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    assert crc32c(data) == google_crc32c.value(data)
    assert crc32c(data, 0xDEADBEEF) == google_crc32c.extend(0xDEADBEEF, data)


def test_unaligned_memory(crc32c) -> None:
    data = random.Random(1).randbytes(40_000)
    for start in range(9):
        assert crc32c(data[start:]) == google_crc32c.value(data[start:])


@pytest.mark.parametrize("combine", [checksum.combine, checksum.python_combine])
def test_combine_is_the_checksum_of_the_whole(combine) -> None:
    rng = random.Random(2)
    for _ in range(50):
        a, b = rng.randbytes(rng.randrange(3000)), rng.randbytes(rng.randrange(3000))
        whole = google_crc32c.value(a + b)
        assert combine(google_crc32c.value(a), google_crc32c.value(b), len(b)) == whole


@pytest.mark.parametrize("combine", [checksum.combine, checksum.python_combine])
def test_combine_takes_lengths_beyond_memory(combine) -> None:
    """n zero bytes after A, by doubling a length whose result is known from real bytes."""
    start = google_crc32c.value(b"start")
    # crc(A + zeros) from a real buffer gives the shift; the shift of 2n is that of n twice. The
    # checksum of n zeros is needed too, and doubles in the same way.
    nbytes = 1 << 20
    zeros = google_crc32c.value(bytes(nbytes))
    shifted = google_crc32c.extend(start, bytes(nbytes))
    while nbytes < 1 << 62:
        assert combine(start, zeros, nbytes) == shifted
        shifted = combine(shifted, zeros, nbytes)
        zeros = combine(zeros, zeros, nbytes)
        nbytes *= 2


def test_bytes_like_arguments() -> None:
    data = b"123456789"
    for like in (data, bytearray(data), memoryview(data)):
        assert checksum.crc32c(like) == 0xE3069283
        assert checksum.python_crc32c(like) == 0xE3069283
    with pytest.raises((BufferError, TypeError, ValueError)):
        checksum.crc32c(memoryview(bytes(20))[::2])


def test_of_memory_at_an_address() -> None:
    import numpy as np

    data = np.arange(10_000, dtype=np.uint32)
    expected = google_crc32c.value(data.tobytes())
    assert checksum.crc32c_at(data.ctypes.data, data.nbytes) == expected
    assert checksum.crc32c_at(0, 0, 7) == 7


def test_hex() -> None:
    assert checksum.to_hex(0xAB) == "000000ab"
    assert checksum.from_hex("000000ab") == 0xAB
    for wrong in ("ab", "000000AB", "0x0000ab", "000000ab ", "+00000ab", ""):
        with pytest.raises(ValueError, match="8 lower-case hex digits"):
            checksum.from_hex(wrong)


def test_the_environment_forces_the_python_implementation() -> None:
    code = (
        "from sharded_ckpt import checksum;"
        "print(checksum._crc32c is checksum.python_crc32c, checksum.crc32c(b'123456789'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={checksum.NO_EXTENSION: "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", str(0xE3069283)], done.stderr
