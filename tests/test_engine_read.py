"""Reading shards back: every byte in place, every damaged chunk found, nothing else opened."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from sharded_ckpt.engine import Engine, select_engine
from sharded_ckpt.errors import ShardError, StoreError, UsageError

KINDS = ("native", "python")
HEADER_NBYTES = 4096
CHUNK = 1000
DATA = random.Random(0).randbytes(10 * CHUNK + 123)
CRCS = [google_crc32c.value(DATA[at : at + CHUNK]) for at in range(0, len(DATA), CHUNK)]
SIZES = {
    "header_nbytes": HEADER_NBYTES,
    "data_nbytes": len(DATA),
    "chunk_nbytes": CHUNK,
    "crcs": CRCS,
}


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = select_engine(request.param, copy_threads=3)
    yield made
    made.close()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(b"h" * HEADER_NBYTES + DATA)
    return path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def read(engine: Engine, path: Path, ranges: list[tuple[int, int]]) -> list[bytes]:
    """The bytes of each ``(start, nbytes)``, with guards around them that must stay."""
    buffers = [np.full(nbytes + 16, 0xEE, np.uint8) for _, nbytes in ranges]
    spans = [
        (start, nbytes, buffer.ctypes.data + 8)
        for (start, nbytes), buffer in zip(ranges, buffers, strict=True)
    ]
    engine.read(str(path), spans=spans, **SIZES)
    for buffer in buffers:
        assert set(buffer[:8].tolist() + buffer[-8:].tolist()) == {0xEE}
    return [buffer[8:-8].tobytes() for buffer in buffers]


@pytest.mark.parametrize("seed", range(8))
def test_spans_are_filled(engine: Engine, shard: Path, seed: int) -> None:
    """In any order, overlapping, inside one chunk, on its borders and over many."""
    rng = random.Random(seed)
    ranges = [(0, len(DATA)), (len(DATA), 0), (2 * CHUNK, CHUNK)]
    for _ in range(12):
        start = rng.randrange(len(DATA))
        ranges.append((start, rng.randrange(len(DATA) - start + 1)))
    rng.shuffle(ranges)
    assert read(engine, shard, ranges) == [DATA[s : s + n] for s, n in ranges]


def test_no_spans_read_nothing(engine: Engine, shard: Path) -> None:
    flip(shard, HEADER_NBYTES)
    assert read(engine, shard, []) == []


@pytest.mark.parametrize("chunk", [0, 3, 10])
def test_a_flipped_bit_is_found_and_placed(engine: Engine, shard: Path, chunk: int) -> None:
    start = HEADER_NBYTES + chunk * CHUNK
    end = min(start + CHUNK, HEADER_NBYTES + len(DATA))
    flip(shard, end - 1)
    with pytest.raises(ShardError) as caught:
        read(engine, shard, [(0, len(DATA))])
    error = caught.value
    assert (error.path, error.start, error.end) == (str(shard), start, end)
    got = google_crc32c.value(shard.read_bytes()[start:end])
    assert str(error) == (
        f"{shard}: crc32c of bytes {start} to {end} is {got:08x}, the header says {CRCS[chunk]:08x}"
    )


def test_only_touched_chunks_are_checked(engine: Engine, shard: Path) -> None:
    flip(shard, HEADER_NBYTES + 4 * CHUNK)
    before, after = (0, 4 * CHUNK), (5 * CHUNK, len(DATA) - 5 * CHUNK)
    assert read(engine, shard, [before, after]) == [DATA[: 4 * CHUNK], DATA[5 * CHUNK :]]
    with pytest.raises(ShardError):
        read(engine, shard, [(4 * CHUNK + 500, 1)])


def test_the_first_damaged_chunk_is_reported(engine: Engine, shard: Path) -> None:
    for chunk in (4, 2, 3):  # neighbours, which three threads read at the same time
        flip(shard, HEADER_NBYTES + chunk * CHUNK + 7)
    for _ in range(300):
        with pytest.raises(ShardError) as caught:
            read(engine, shard, [(0, len(DATA))])
        assert caught.value.start == HEADER_NBYTES + 2 * CHUNK
    assert engine.verify(str(shard), **SIZES) == [2, 3, 4]


def test_verify_of_a_whole_file(engine: Engine, shard: Path) -> None:
    assert engine.verify(str(shard), **SIZES) == []


@pytest.mark.parametrize("change", [-1, 1, -len(DATA)])
def test_a_file_of_another_size(engine: Engine, shard: Path, change: int) -> None:
    nbytes = HEADER_NBYTES + len(DATA)
    os.truncate(shard, nbytes + change)
    for call in (lambda: read(engine, shard, [(0, 1)]), lambda: engine.verify(str(shard), **SIZES)):
        with pytest.raises(ShardError, match=f"has {nbytes + change} bytes, expected {nbytes}"):
            call()


def test_what_is_no_regular_file_is_refused(engine: Engine, shard: Path, tmp_path: Path) -> None:
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(shard)
    os.mkfifo(fifo)
    for path, code in (
        (link, errno.ELOOP),
        (fifo, errno.EINVAL),
        (tmp_path, errno.EINVAL),
        (tmp_path / "none", errno.ENOENT),
    ):
        with pytest.raises(StoreError) as caught:
            engine.verify(str(path), **SIZES)
        assert (caught.value.errno, caught.value.filename) == (code, str(path))


def test_requests_that_cannot_be_right_say_the_same(shard: Path) -> None:
    messages: dict[str, list[str]] = {}
    for kind in KINDS:
        engine = select_engine(kind)
        for spans, changed in (
            ([(len(DATA), 1, 1)], {}),
            ([(0, len(DATA) + 1, 1)], {}),
            ([(0, 1, 0)], {}),
            ([], {"crcs": CRCS[:-1]}),
            ([], {"chunk_nbytes": 0}),
        ):
            with pytest.raises(UsageError) as caught:
                engine.read(str(shard), spans=spans, **(SIZES | changed))
            messages.setdefault(kind, []).append(str(caught.value))
        engine.close()
    assert messages["native"] == messages["python"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_memory_has_no_room_for_is_an_error(tmp_path: Path, kind: str) -> None:
    code = """
import ctypes, resource, sys
from sharded_ckpt.engine import select_engine
from sharded_ckpt.errors import StoreError
nbytes = 4 << 30
engine = select_engine(sys.argv[1])
buffer = ctypes.create_string_buffer(1)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), now + (2 << 30)))
try:
    engine.read(sys.argv[2], header_nbytes=0, data_nbytes=nbytes, chunk_nbytes=nbytes, crcs=[0],
                spans=[(0, 1, ctypes.addressof(buffer))])
except StoreError as error:
    print(error.operation, error.errno, error.path == sys.argv[2])
"""
    path = tmp_path / "shard"
    path.touch()
    os.truncate(path, 4 << 30)  # sparse
    done = subprocess.run(
        [sys.executable, "-c", code, kind, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"allocate {errno.ENOMEM} True\n"), done.stderr
