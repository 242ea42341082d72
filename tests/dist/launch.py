"""Runs a script on several ranks on this machine, and never leaves a process behind.

Three ways, chosen by ``via``:

- ``"processes"``: plain child processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
  Rank 0 hosts the TCPStore. Nobody watches them, so when one rank is killed the others live on and
  can report what they saw: what tests of P1 and P7 need.
- ``"torchrun"`` and ``"deepspeed"``: the real launchers, which end all ranks when one fails.

Every process of a launch carries a random mark in its environment. At the end, or at the deadline,
whatever still carries the mark is killed: launchers put their workers into sessions of their own,
so process groups alone would miss them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Via = Literal["processes", "torchrun", "deepspeed"]
ROOT = Path(__file__).resolve().parent.parent.parent
_MARK = "SHARDED_CKPT_TEST_LAUNCH"
_TAIL_CHARS = 4000
_POLL_S = 0.02


class LaunchFailed(AssertionError):
    """A launch did not end in time, or not as expected; the message has the tails of all logs."""


@dataclass(frozen=True)
class RankResult:
    """What one rank printed. ``returncode`` is None under a launcher, which keeps it to itself."""

    rank: int
    returncode: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Result:
    """A finished launch. ``returncode``: the launcher's, or the ranks' first nonzero one."""

    args: tuple[str, ...]
    returncode: int
    ranks: tuple[RankResult, ...]
    launcher_output: str
    seconds: float

    @property
    def stdout(self) -> str:
        """What all ranks printed, in order of rank."""
        return "".join(rank.stdout for rank in self.ranks)

    def check(self) -> Result:
        """Returns itself if all went well, else raises with the tails of all logs."""
        if self.returncode != 0:
            raise LaunchFailed(f"exit code {self.returncode}: {self.describe()}")
        return self

    def describe(self) -> str:
        parts = [f"{' '.join(self.args)}\n(after {self.seconds:.1f} s)"]
        for rank in self.ranks:
            for name, text in (("stdout", rank.stdout), ("stderr", rank.stderr)):
                if text.strip():
                    head = f"--- rank {rank.rank}, exit code {rank.returncode}, {name}"
                    parts.append(f"{head}\n{text[-_TAIL_CHARS:]}")
        if self.launcher_output.strip():
            parts.append(f"--- launcher\n{self.launcher_output[-_TAIL_CHARS:]}")
        return "\n".join(parts)


def launch(
    script: str | Path,
    nproc: int,
    args: Sequence[str | Path] = (),
    *,
    via: Via = "processes",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> Result:
    """Runs ``script`` on ``nproc`` ranks to the end. Raises LaunchFailed at the deadline only."""
    with Launch(script, nproc, args, via=via, env=env) as running:
        return running.wait(timeout_s)


class Launch:
    """A launch under way; a context manager whose exit kills whatever is left of it."""

    def __init__(
        self,
        script: str | Path,
        nproc: int,
        args: Sequence[str | Path] = (),
        *,
        via: Via = "processes",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = secrets.token_hex(8)
        self._logs = tempfile.TemporaryDirectory(prefix="launch-")
        self._nproc = nproc
        self._via: Via = via
        self._started = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [str(script), *(str(a) for a in args)]
        base = environment() | {_MARK: self._mark} | dict(env or {})
        try:
            if via == "processes":
                self._start_ranks(command, base)
            else:
                self._start_launcher(command, base)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float = 300.0) -> Result:
        """Waits for all ranks. At the deadline kills them and raises with the tails of all logs."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill_all()
                message = f"no end after {timeout_s:.0f} s: {self._result().describe()}"
                raise LaunchFailed(message) from None
        self._kill_all()
        return self._result()

    def wait_for(self, text: str, *, rank: int = 0, timeout_s: float = 120.0) -> None:
        """Waits until a rank has printed ``text``; LaunchFailed if it ends or time runs out."""
        deadline = time.monotonic() + timeout_s
        while text not in self._read(rank, "stdout"):
            ended = all(p.poll() is not None for p in self._processes)
            if (ended and text not in self._read(rank, "stdout")) or time.monotonic() > deadline:
                self._kill_all()
                raise LaunchFailed(
                    f"rank {rank} never printed {text!r}: {self._result().describe()}"
                )
            time.sleep(_POLL_S)

    def kill(self, rank: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one rank (``via="processes"`` only)."""
        if self._via != "processes":
            raise ValueError("only ranks started as plain processes can be killed one by one")
        self._processes[rank].send_signal(signum)

    def close(self) -> None:
        self._kill_all()
        self._logs.cleanup()

    # ------------------------------------------------------------------------------------------

    def _start_ranks(self, command: list[str], base: dict[str, str]) -> None:
        port = str(free_port())
        for rank in range(self._nproc):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._nproc),
                "LOCAL_WORLD_SIZE": str(self._nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            out, err = self._log(rank, "stdout"), self._log(rank, "stderr")
            self._spawn([sys.executable, *command], base | own, out, err)

    def _start_launcher(self, command: list[str], base: dict[str, str]) -> None:
        logs = Path(self._logs.name)
        if self._via == "torchrun":
            argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            argv += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(self._nproc)]
            argv += ["--redirects", "3", "--log-dir", str(logs / "ranks"), *command]
        else:
            launcher = Path(sys.executable).parent / "deepspeed"
            argv = [str(launcher), "--num_gpus", str(self._nproc), "--master_addr", "127.0.0.1"]
            argv += ["--master_port", str(free_port())]
            argv += ["--enable_each_rank_log", str(logs / "ranks"), *command]
        self._spawn(argv, base, logs / "launcher", logs / "launcher.err")

    def _spawn(self, argv: list[str], env: dict[str, str], out: Path, err: Path) -> None:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._processes.append(process)

    def _log(self, rank: int, stream: str) -> Path:
        return Path(self._logs.name) / f"{stream}-{rank}"

    def _read(self, rank: int, stream: str) -> str:
        if self._via == "processes":
            return _text(self._log(rank, stream))
        ranks = Path(self._logs.name) / "ranks"
        if self._via == "torchrun":
            found = sorted(ranks.glob(f"*/attempt_*/{rank}/{stream}.log"))
        else:  # one log per rank, both streams in it
            found = sorted(ranks.glob(f"*rank{rank}.log")) if stream == "stdout" else []
        return "".join(_text(path) for path in found)

    def _result(self) -> Result:
        codes = [process.poll() for process in self._processes]
        ranks = tuple(
            RankResult(
                rank,
                codes[rank] if self._via == "processes" else None,
                self._read(rank, "stdout"),
                self._read(rank, "stderr"),
            )
            for rank in range(self._nproc)
        )
        logs = Path(self._logs.name)
        failed = [code for code in codes if code != 0]
        return Result(
            args=tuple(str(a) for a in self._processes[0].args),  # type: ignore[union-attr]
            returncode=(failed[0] or -1) if failed else 0,
            ranks=ranks,
            launcher_output=_text(logs / "launcher") + _text(logs / "launcher.err"),
            seconds=time.monotonic() - self._started,
        )

    def _kill_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for pid in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


def environment() -> dict[str, str]:
    """The environment of a rank: ours, without what a surrounding launcher may have set."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in outer}
    venv = str(Path(sys.executable).parent)
    path = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH")) if p)
    return env | {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{venv}{os.pathsep}{env.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": env.get(
            "TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions")
        ),
        "DS_ACCELERATOR": env.get("DS_ACCELERATOR", "cpu"),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": env.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _marked(mark: str) -> list[int]:
    """Processes, other than this one, whose environment carries the mark of a launch."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
