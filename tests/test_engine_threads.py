"""Threads of an engine: started by its first job, joined when it is closed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharded_ckpt.engine import select_engine
from sharded_ckpt.errors import ClosedError
from tests.test_engine import CHUNK, CRC_POS, HEADER, KINDS, T, failed


def threads_since(before: set[str]) -> set[str]:
    return set(os.listdir("/proc/self/task")) - before


def check_threads(tmp_path: Path) -> None:
    for kind in KINDS:
        before = threads_since(set())
        engine = select_engine(kind, copy_threads=2, io_threads=3)
        assert threads_since(before) == set(), "threads start with the first job"
        job = engine.start(engine.arena(CHUNK), [(0, CHUNK)], chunk_nbytes=CHUNK)
        job.write_to(str(tmp_path / kind), HEADER, CRC_POS)
        assert len(threads_since(before)) == 5
        engine.close()
        # A joined thread leaves the list a moment later.
        deadline = time.monotonic() + T
        while threads_since(before) and time.monotonic() < deadline:
            os.sched_yield()
        assert threads_since(before) == set()
        assert failed(job).detail == "the engine was closed"
        with pytest.raises(ClosedError):
            engine.start(engine.arena(CHUNK), [], chunk_nbytes=CHUNK)
        with pytest.raises(ClosedError):
            engine.verify("x", header_nbytes=0, data_nbytes=0, chunk_nbytes=1, crcs=[])
        engine.close()


def test_close_cancels_jobs_and_joins_threads(tmp_path: Path) -> None:
    # In a process of its own: threads that other tests have left may end, or start more, any time.
    code = (
        "import sys; from pathlib import Path; from tests.test_engine_threads import check_threads;"
        "check_threads(Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=120, cwd=root)
