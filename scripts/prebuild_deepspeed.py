"""Builds DeepSpeed's ``deepspeed_shm_comm`` once, in one process, with a deadline.

DeepSpeed compiles this helper when the first engine starts, guarded by a file named ``lock`` whose
mere existence means "somebody is building". A process killed at that moment leaves the file behind,
and every later start waits for it for ever, silently. So the build is made here, before any ranks
are launched: a lock that no process holds open is removed, and the compiler is ended at a deadline.

Takes about a minute the first time and milliseconds afterwards. Needs TORCH_EXTENSIONS_DIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "deepspeed_shm_comm"
BUILD_TIMEOUT_S = 900.0

_BUILD = (
    "import torch; from deepspeed.comm.torch import build_shm_op; "
    "assert build_shm_op() is not None, 'this machine cannot build it'"
)


def prebuild(directory: Path, *, timeout_s: float = BUILD_TIMEOUT_S) -> str:
    """Makes sure that the helper is built under ``directory``; returns a line saying what was done.

    Raises TimeoutError when another build, or this one, does not end in time, and RuntimeError with
    the end of the compiler's output when it fails.
    """
    build = directory / NAME
    library = build / f"{NAME}.so"
    stamp = directory / f"{NAME}.stamp"
    versions = " ".join(
        [sys.prefix, *(f"{p}={importlib.metadata.version(p)}" for p in ("torch", "deepspeed"))]
    )
    deadline = time.monotonic() + timeout_s
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusively(directory / f"{NAME}.flock", deadline):
        removed = _remove_stale_lock(build / "lock")
        if library.exists() and stamp.exists() and stamp.read_text() == versions:
            return f"{NAME}: {'removed a stale lock' if removed else 'up to date'}"
        started = time.monotonic()
        _build(directory, deadline)
        if not library.exists():
            raise RuntimeError(f"{NAME}: the build ended well but {library} is not there")
        stamp.write_text(versions)
        return f"{NAME}: built in {time.monotonic() - started:.0f} s"


@contextlib.contextmanager
def _exclusively(path: Path, deadline: float) -> Iterator[None]:
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is still held by another build") from None
                time.sleep(0.2)
        yield


def _remove_stale_lock(lock: Path) -> bool:
    """Removes torch's lock file if no process has it open, which a live builder always has."""
    if not lock.exists():
        return False
    target = str(lock.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == target:
                return False
    lock.unlink(missing_ok=True)
    return True


def _build(directory: Path, deadline: float) -> None:
    env = os.environ | {
        "TORCH_EXTENSIONS_DIR": str(directory),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "DS_ACCELERATOR": "cpu",
    }
    log = directory / f"{NAME}.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _BUILD],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{NAME}: the compiler did not end in time; its output is in {log}"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            _remove_stale_lock(directory / NAME / "lock")
    if code != 0:
        tail = log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"{NAME}: building ended with exit code {code}:\n{tail}")


def main() -> int:
    directory = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not directory:
        print("set TORCH_EXTENSIONS_DIR first (scripts/env.sh does)", file=sys.stderr)
        return 2
    try:
        print(prebuild(Path(directory)), flush=True)
    except (RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
