"""The copy engine: the C++ and the Python one give the same files, bytes and errors.

The oracle of a written file is a few lines below: header with digits, then the sources.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from sharded_ckpt.engine import Engine, Job, Written, select_engine
from sharded_ckpt.engine_python_job import SLOT_TRANSITIONS, SlotState
from sharded_ckpt.errors import StoreError, UsageError

KINDS = ("native", "python")
HEADER = b"h" * 100 + b"0" * 3900 + b"t" * 96  # 4096 bytes; digits start at byte 100
CRC_POS = 100
CHUNK = 4096
T = 30.0  # seconds; every wait below ends long before


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = select_engine(request.param, copy_threads=2)
    yield made
    made.close()


def random_sources(seed: int, total: int = 60_000) -> list[np.ndarray]:
    rng = random.Random(seed)
    sizes = []
    while sum(sizes) < total:
        sizes.append(rng.choice([0, 1, 3, rng.randrange(500), rng.randrange(20_000), CHUNK]))
    return [np.frombuffer(rng.randbytes(n), np.uint8).copy() for n in sizes]


def addresses(sources: list[np.ndarray]) -> list[tuple[int, int]]:
    return [(s.ctypes.data if s.size else 0, s.size) for s in sources]


def data_of(sources: list[np.ndarray]) -> bytes:
    return b"".join(s.tobytes() for s in sources)


def chunk_crcs(data: bytes, chunk_nbytes: int) -> list[int]:
    return [
        google_crc32c.value(data[at : at + chunk_nbytes])
        for at in range(0, len(data), chunk_nbytes)
    ]


def expected_file(data: bytes, chunk_nbytes: int = CHUNK) -> bytes:
    digits = "".join(f"{crc:08x}" for crc in chunk_crcs(data, chunk_nbytes)).encode()
    return HEADER[:CRC_POS] + digits + HEADER[CRC_POS + len(digits) :] + data


def check(written: Written | None, path: Path, data: bytes, chunk_nbytes: int = CHUNK) -> None:
    expected = expected_file(data, chunk_nbytes)
    assert written is not None
    assert path.read_bytes() == expected
    assert (written.file_nbytes, written.header_nbytes) == (len(expected), len(HEADER))
    assert written.data_nbytes == len(data)
    assert written.header_crc32c == google_crc32c.value(expected[: len(HEADER)])
    assert written.file_crc32c == google_crc32c.value(expected)


def save(engine: Engine, path: Path, sources: list[np.ndarray], arena_nbytes: int) -> Written:
    arena = engine.arena(arena_nbytes)
    job = engine.start(arena, addresses(sources), chunk_nbytes=CHUNK)
    job.write_to(str(path), HEADER, CRC_POS)
    assert job.wait_staged(T)
    written = job.wait(T)
    assert written is not None
    job.release()
    return written


# ---- files


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [None, 1, 2, 7], ids=lambda n: "whole" if n is None else f"{n}")
def test_the_file_is_header_and_sources(
    engine: Engine, tmp_path: Path, seed: int, slots: int | None
) -> None:
    sources = random_sources(seed)
    data = data_of(sources)
    path = tmp_path / "shard"
    written = save(engine, path, sources, len(data) if slots is None else slots * CHUNK)
    check(written, path, data)
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("chunk_nbytes", [1, 1000, 4097, 1 << 20])
def test_any_chunk_size(engine: Engine, tmp_path: Path, chunk_nbytes: int) -> None:
    sources = [np.arange(400 if chunk_nbytes == 1 else 50_000, dtype=np.uint8)]
    data = data_of(sources)
    job = engine.start(engine.arena(len(data)), addresses(sources), chunk_nbytes=chunk_nbytes)
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    check(job.wait(T), tmp_path / "shard", data, chunk_nbytes)


@pytest.mark.parametrize("sources", [[], [(0, 0), (0, 0)]], ids=["none", "of no bytes"])
def test_an_empty_shard(engine: Engine, tmp_path: Path, sources: list[tuple[int, int]]) -> None:
    job = engine.start(engine.arena(0), sources, chunk_nbytes=CHUNK)
    assert job.wait_staged(T)
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    check(job.wait(T), tmp_path / "shard", b"")


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * CHUNK + 5])
def test_direct_and_buffered_write_the_same(tmp_path: Path, io: str, nbytes: int) -> None:
    engine = select_engine("native", io=io)
    sources = [np.arange(nbytes, dtype=np.uint8)]
    try:
        written = save(engine, tmp_path / "shard", sources, nbytes)
    except StoreError as error:
        # Not every file system has direct I/O; then "direct" must say so and write nothing.
        assert io == "direct" and error.operation == "probe O_DIRECT"
    else:
        check(written, tmp_path / "shard", data_of(sources))
    finally:
        engine.close()


def test_p4_sources_may_change_once_staged(engine: Engine, tmp_path: Path) -> None:
    sources = random_sources(7)
    data = data_of(sources)
    job = engine.start(engine.arena(len(data)), addresses(sources), chunk_nbytes=CHUNK)
    assert job.wait_staged(T)
    assert job.staged_nbytes == len(data)
    for source in sources:
        source[:] = 0
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    check(job.wait(T), tmp_path / "shard", data)


def test_wrapped_memory(engine: Engine, tmp_path: Path) -> None:
    memory = np.zeros(70_001, np.uint8)
    sources = random_sources(8, total=40_000)
    data = data_of(sources)
    arena = engine.wrap_arena(memory.ctypes.data + 1, 70_000, memory)  # off the 4096 grid
    job = engine.start(arena, addresses(sources), chunk_nbytes=CHUNK)
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    check(job.wait(T), tmp_path / "shard", data)
    assert bytes(arena.view(0, len(data))) == data == memory[1 : 1 + len(data)].tobytes()


# ---- external sources


def fill(job: Job, arena, data: bytes, slots: int, step: int) -> None:
    """A producer: puts ``data`` into the arena in steps, each once its slot is free."""
    for at in range(0, len(data), step):
        chunk, inside = divmod(at, CHUNK)
        end = min(at + step, len(data))
        assert job.wait_slot_for(at, T)
        place = chunk % slots * CHUNK + inside
        arena.view(place, end - at)[:] = data[at:end]
        job.advance(end)


@pytest.mark.parametrize("slots", [1, 3, 100])
@pytest.mark.parametrize("step", [CHUNK, CHUNK // 4])
def test_external_bytes(engine: Engine, tmp_path: Path, slots: int, step: int) -> None:
    data = random.Random(3).randbytes(10 * CHUNK + 77)
    arena = engine.arena(slots * CHUNK)
    job = engine.start(arena, [(0, len(data))], chunk_nbytes=CHUNK)
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    fill(job, arena, data, slots, step)
    check(job.wait(T), tmp_path / "shard", data)


@pytest.mark.parametrize("slots", [2, 100])
def test_external_bytes_among_our_own(engine: Engine, tmp_path: Path, slots: int) -> None:
    """Borders inside chunks: a chunk that is partly external waits for that part only."""
    parts = random_sources(9)
    data = data_of(parts)
    arena = engine.arena(slots * CHUNK)
    sources = [
        (0 if i % 2 else part.ctypes.data * bool(part.size), part.size)
        for i, part in enumerate(parts)
    ]
    job = engine.start(arena, sources, chunk_nbytes=CHUNK)
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    start = 0
    for (address, nbytes), part in zip(sources, parts, strict=True):
        at = start
        while address == 0 and at < start + nbytes:
            end = min(start + nbytes, (at // CHUNK + 1) * CHUNK)
            assert job.wait_slot_for(at, T)
            arena.view(at // CHUNK % slots * CHUNK + at % CHUNK, end - at)[:] = part[
                at - start : end - start
            ].tobytes()
            job.advance(end)
            at = end
        start += nbytes
    check(job.wait(T), tmp_path / "shard", data)


def test_the_header_is_written_last(engine: Engine, tmp_path: Path) -> None:
    """A ring of one slot: its being free for chunk 3 proves that chunk 2 is on disk."""
    data = random.Random(4).randbytes(4 * CHUNK)
    path = tmp_path / "shard"
    arena = engine.arena(CHUNK)
    job = engine.start(arena, [(0, len(data))], chunk_nbytes=CHUNK)
    job.write_to(str(path), HEADER, CRC_POS)
    fill(job, arena, data[: 3 * CHUNK], 1, CHUNK)
    assert job.wait_slot_for(3 * CHUNK, T)
    unfinished = path.read_bytes()
    assert unfinished[: len(HEADER)] == bytes(len(HEADER))
    assert unfinished[len(HEADER) :][: 3 * CHUNK] == data[: 3 * CHUNK]
    assert job.wait(0) is None and not job.wait_staged(0)
    arena.view(0, CHUNK)[:] = data[3 * CHUNK :]
    job.advance(len(data))
    check(job.wait(T), path, data)


def test_a_blocked_job_does_not_hold_up_the_next(engine: Engine, tmp_path: Path) -> None:
    blocked = engine.start(engine.arena(CHUNK), [(0, CHUNK)], chunk_nbytes=CHUNK)
    blocked.write_to(str(tmp_path / "blocked"), HEADER, CRC_POS)
    sources = random_sources(10)
    check(save(engine, tmp_path / "next", sources, 100_000), tmp_path / "next", data_of(sources))
    assert blocked.wait(0) is None
    blocked.cancel()


# ---- life of jobs and engines


def failed(job: Job) -> StoreError:
    with pytest.raises(StoreError) as caught:
        while job.wait(T) is None:
            pass
    return caught.value


def test_cancel_leaves_the_unfinished_file_and_frees_the_arena(
    engine: Engine, tmp_path: Path
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    arena = engine.arena(CHUNK)
    job = engine.start(arena, [(0, 4 * CHUNK)], chunk_nbytes=CHUNK)
    job.write_to(str(tmp_path / "shard"), HEADER, CRC_POS)
    fill(job, arena, bytes(2 * CHUNK), 1, CHUNK)
    with pytest.raises(UsageError, match="goes on"):
        job.release()
    with pytest.raises(UsageError, match="used by a job"):
        engine.start(arena, [], chunk_nbytes=CHUNK)
    job.cancel()
    assert failed(job).errno == errno.ECANCELED
    with pytest.raises(StoreError, match="cancelled"):
        job.wait_staged(T)
    with pytest.raises(StoreError, match="cancelled"):
        job.wait_slot_for(0, T)
    job.release()
    job.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (tmp_path / "shard").read_bytes()[: len(HEADER)] == bytes(len(HEADER))
    engine.start(arena, [], chunk_nbytes=CHUNK).cancel()


def test_a_wait_is_interruptible_and_ends_at_its_timeout(engine: Engine) -> None:
    job = engine.start(engine.arena(CHUNK), [(0, CHUNK)], chunk_nbytes=CHUNK)
    assert job.wait(0.01) is None and not job.wait_staged(0.01)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            job.wait_staged(T)
    finally:
        signal.signal(signal.SIGALRM, before)
    job.cancel()


def test_calls_that_cannot_be_right_say_the_same() -> None:
    messages: dict[str, list[str]] = {}
    for kind in KINDS:
        engine = select_engine(kind)
        job = engine.start(engine.arena(CHUNK), [(0, CHUNK)], chunk_nbytes=CHUNK)
        job.write_to("/nonexistent/x", HEADER, CRC_POS)
        other = engine.start(engine.arena(CHUNK), [(0, 3)], chunk_nbytes=1)
        calls = (
            lambda e=engine: e.start(e.arena(100), [(0, 9000)], chunk_nbytes=CHUNK * 2),
            lambda e=engine: e.start(e.arena(100), [], chunk_nbytes=0),
            lambda j=other: j.write_to("y", b"short", 0),
            lambda j=other: j.advance(CHUNK + 1),
            lambda e=engine: e.arena(100).view(0, CHUNK + 1),
        )
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            messages.setdefault(kind, []).append(str(caught.value))
        engine.close()
    assert messages["native"] == messages["python"]


def test_the_slots_have_one_table() -> None:
    from sharded_ckpt import _C

    python = {(a.value, b.value) for a in SlotState for b in SLOT_TRANSITIONS[a]}
    assert set(_C.slot_transitions()) == python
    f, i, r, w, x = "free", "filling", "ready", "writing", "failed"
    assert python == {(f, i), (i, r), (r, w), (w, f), (i, x), (r, x), (w, x)}
    assert {s.value for s in SlotState} == {f, i, r, w, x}


# ---- errors


def write_error(kind: str, path: Path, nbytes: int = 3 * CHUNK) -> StoreError:
    engine = select_engine(kind)
    try:
        source = np.zeros(nbytes, np.uint8)
        job = engine.start(engine.arena(nbytes), addresses([source]), chunk_nbytes=CHUNK)
        job.write_to(str(path), HEADER, CRC_POS)
        error = failed(job)
        assert str(failed(job)) == str(error), "an error is told every time"
        job.release()
        return error
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("there", errno.EEXIST), ("no/dir", errno.ENOENT), ("link", errno.EEXIST)],
)
def test_a_file_that_cannot_be_created(tmp_path: Path, name: str, expected: int) -> None:
    (tmp_path / "there").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    errors = [write_error(kind, tmp_path / name) for kind in KINDS]
    assert [e.errno for e in errors] == [expected] * 2
    assert len({str(e) for e in errors}) == 1
    assert errors[0].filename == str(tmp_path / name)
    assert (tmp_path / "there").read_bytes() == b"precious"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.root
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        error = write_error(kind, tmp_path / "shard", nbytes=1 << 20)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert (error.errno, error.operation) == (errno.ENOSPC, "fallocate")
    assert f"needs {(1 << 20) + len(HEADER)} bytes" in error.detail
    assert "65536 free" in error.detail


def run_script(code: str, *args: str) -> str:
    """Output of ``code`` in a process of its own, with this module's names."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import *\n{code}", *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_size_limit_is_an_error_and_not_a_signal(tmp_path: Path, kind: str) -> None:
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a trainer need not
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
print(write_error(sys.argv[1], Path(sys.argv[2])).errno)
"""
    assert run_script(code, kind, str(tmp_path / "shard")) == f"{errno.EFBIG}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_is_refused_and_does_not_hang(tmp_path: Path, kind: str) -> None:
    code = """
kind, path = sys.argv[1:]
engine = select_engine(kind)
job = engine.start(engine.arena(CHUNK), [(0, CHUNK)], chunk_nbytes=CHUNK)
job.write_to(path, HEADER, CRC_POS)
if (child := os.fork()) == 0:
    signal.alarm(20)  # should it hang, it ends
    calls = (
        lambda: engine.start(engine.wrap_arena(1, 0, None), [], chunk_nbytes=CHUNK),
        lambda: job.wait(T), lambda: job.wait_staged(T), lambda: job.wait_slot_for(0, T),
        lambda: job.advance(0), lambda: job.write_to("y", HEADER, 0), lambda: job.cancel(),
        lambda: engine.verify("x", header_nbytes=0, data_nbytes=0, chunk_nbytes=1, crcs=[]),
        lambda: engine.close(),
    )
    for call in calls:
        with pytest.raises(UsageError, match="forked child"):
            call()
    del job, engine, calls
    sys.exit(7)  # runs finalizers and exit handlers, which must not hang
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
job.cancel()
engine.close()
print("parent fine")
"""
    assert run_script(code, kind, str(tmp_path / "shard")).endswith("parent fine\n")


def test_an_engine_that_nobody_closed_does_not_keep_the_process(tmp_path: Path) -> None:
    code = """
for kind in KINDS:
    engine = select_engine(kind)
    job = engine.start(engine.arena(CHUNK), [(0, CHUNK)], chunk_nbytes=CHUNK)
    job.write_to(sys.argv[1] + kind, HEADER, CRC_POS)
print("end")
"""
    assert run_script(code, str(tmp_path / "shard")) == "end\n"


def test_without_the_extension_the_python_engine_warns_once() -> None:
    code = """
import warnings
os.environ["SHARDED_CKPT_NO_EXTENSION"] = "1"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kinds = [type(select_engine()).__name__ for _ in range(2)]
print(kinds, len(caught), "SHARDED_CKPT_NO_EXTENSION" in str(caught[0].message))
try:
    select_engine("native")
except UsageError as error:
    print("cannot be used" in str(error))
"""
    assert run_script(code) == "['PyEngine', 'PyEngine'] 1 True\nTrue\n"


def test_many_jobs_from_many_threads(engine: Engine, tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(4):
                sources = random_sources(100 * thread + turn, total=30_000)
                path = tmp_path / f"{thread}-{turn}"
                arena_nbytes = 2 * CHUNK if turn % 2 else 60_000
                check(save(engine, path, sources, arena_nbytes), path, data_of(sources))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(T)
    assert errors == []
