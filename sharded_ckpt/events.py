"""What a checkpointer reports while it works, and where reports can go.

A report never costs a checkpoint: :class:`Emitter` swallows whatever a callback raises and logs it
once. Callbacks run on the thread that emits (training or background, at times both at once), so
they should be quick; the sinks below lock. Their files are logs, not checkpoint data: nothing is
fsynced, and nothing in the checkpoint directory is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

log = logging.getLogger(__name__)

#: The states of a save and a load, each with the lane of a trace that shows it.
LANES = {
    "planned": "snapshot",
    "staged": "snapshot",
    "written": "write",
    "voted": "commit",
    "committed": "commit",
    "failed": "commit",
    "skipped": "snapshot",
    "retired": "retention",
    "loaded": "load",
}
_LANE_NUMBERS = {lane: i for i, lane in enumerate(dict.fromkeys(LANES.values()), 1)}


@dataclass(frozen=True, slots=True)
class Event:
    """One state that a step has reached on one rank.

    ``kind`` is one of :data:`LANES`. ``nbytes`` and ``seconds`` are what it took to get there (0
    where that means nothing), ``t_start`` is when that began, in seconds of ``time.time()``.
    ``term`` and ``serial`` are 0 while the attempt has no identity yet. ``detail`` holds more,
    such as the cause of a failure; treat it as read-only.
    """

    kind: str
    step: int
    rank: int
    term: int = 0
    serial: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    t_start: float = field(default_factory=time.time)
    detail: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_json(self) -> dict[str, Any]:
        """The event as plain JSON; what JSON cannot hold becomes text."""
        return {
            "kind": self.kind,
            "step": self.step,
            "rank": self.rank,
            "term": self.term,
            "serial": self.serial,
            "nbytes": self.nbytes,
            "seconds": _plain(self.seconds),
            "t_start": _plain(self.t_start),
            "detail": _plain(self.detail),
        }


Callback = Callable[[Event], Any]


class Emitter:
    """Hands each event to every callback. No method raises."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self._lock = threading.Lock()
        self._broken: set[int] = set()

    def emit(self, event: Event) -> None:
        for number, callback in enumerate(self._callbacks):
            try:
                callback(event)
            # SystemExit too: in a background thread it would end the thread, not the program.
            except (Exception, SystemExit) as error:
                self._report(number, f"raised at {event.kind!r} of step {event.step}", error)

    def close(self) -> None:
        """Closes the sinks that can be closed. One that gets another event opens again."""
        for number, callback in enumerate(self._callbacks):
            close = getattr(callback, "close", None)
            if callable(close):
                try:
                    close()
                except (Exception, SystemExit) as error:
                    self._report(number, "could not be closed", error)

    def _report(self, number: int, what: str, error: BaseException) -> None:
        with self._lock:
            known = number in self._broken
            self._broken.add(number)
        if not known:
            log.error(
                "event callback %s %s: %s: %s; checkpoints are not affected, and its further "
                "errors are not logged",
                _name_of(self._callbacks[number]),
                what,
                type(error).__name__,
                error,
                exc_info=error,
            )


class LoggingSink:
    """Writes a line to a logger: failures as errors, skipped saves as warnings."""

    _LEVELS = {
        "failed": logging.ERROR,
        "skipped": logging.WARNING,
        "committed": logging.INFO,
        "retired": logging.INFO,
        "loaded": logging.INFO,
    }

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger if logger is not None else logging.getLogger("sharded_ckpt")

    def __call__(self, event: Event) -> None:
        level = self._LEVELS.get(event.kind, logging.DEBUG)
        if not self._logger.isEnabledFor(level):
            return
        text = f"step {event.step} {event.kind} on rank {event.rank}"
        if event.nbytes:
            text += f", {_size(event.nbytes)}"
        if event.seconds:
            text += f" in {event.seconds:.2f} s"
        if event.detail:
            text += f" ({', '.join(f'{key}={value}' for key, value in event.detail.items())})"
        self._logger.log(level, "%s", text)


class _FileSink:
    """A file that is opened by the first event; ``{rank}`` in its name becomes that rank."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None

    def __call__(self, event: Event) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._open(self._path.replace("{rank}", str(event.rank)))
            self._write(self._file, event)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self, path: str) -> BinaryIO:
        raise NotImplementedError

    def _write(self, file: BinaryIO, event: Event) -> None:
        raise NotImplementedError


class JsonLinesSink(_FileSink):
    """Appends one JSON object a line.

    Each line is one write in append mode, so on a local file system the ranks of one host may
    share a file. Put ``{rank}`` into the path where they cannot.
    """

    def _open(self, path: str) -> BinaryIO:
        return open(path, "ab", buffering=0)

    def _write(self, file: BinaryIO, event: Event) -> None:
        file.write(_json(event.as_json()) + b"\n")


class ChromeTraceSink(_FileSink):
    """Writes a trace for Perfetto or ``chrome://tracing``: a process a rank, a lane a kind of work.

    The file is a whole JSON array after every event, so it can be read while the job runs and
    after it was killed. A file from an earlier job is continued. One process writes a file: put
    ``{rank}`` into the path, and open the files of all ranks together.
    """

    _END = b"\n]\n"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._named: set[tuple[int, int]] = set()

    def _open(self, path: str) -> BinaryIO:
        # Append mode creates the file without emptying it; overwriting its end needs the other.
        open(path, "ab").close()
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - stays open until close()
        try:
            self._claim(file, path)
        except BaseException:
            file.close()
            raise
        self._named.clear()
        return file

    def _claim(self, file: BinaryIO, path: str) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"trace {path} is being written by another process; put {{rank}} into the path"
            ) from None
        except OSError:
            log.debug("trace %s: this file system has no locks", path)
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            file.write(b"[" + self._END)
            return
        file.seek(max(0, size - len(self._END)))
        if file.read() != self._END:
            raise OSError(f"trace {path} exists and is no trace of ours; move it or name another")

    def _write(self, file: BinaryIO, event: Event) -> None:
        lane = LANES.get(event.kind, event.kind)
        number = _LANE_NUMBERS.get(lane, 0)
        entries = self._names(event.rank, number, lane)
        entries.append(
            {
                "name": f"{event.kind} {event.step}",
                "cat": "checkpoint",
                "ph": "X",
                "pid": event.rank,
                "tid": number,
                "ts": round(event.t_start * 1e6),
                "dur": max(0, round(event.seconds * 1e6)),
                "args": event.as_json(),
            }
        )
        # One write over the end of the array, which brings an end of its own.
        end = file.seek(-len(self._END), os.SEEK_END)
        separator = b",\n" if end > 1 else b"\n"
        file.write(separator + b",\n".join(_json(entry) for entry in entries) + self._END)

    def _names(self, rank: int, number: int, lane: str) -> list[dict[str, Any]]:
        """Entries that name the process and the lane, before the first event in it."""
        found = []
        if (rank, number) not in self._named:
            names = {"process_name": f"rank {rank}", "thread_name": f"checkpoint: {lane}"}
            for kind, name in names.items():
                entry = {"name": kind, "ph": "M", "pid": rank, "tid": number, "ts": 0}
                found.append({**entry, "args": {"name": name}})
            self._named.add((rank, number))
        return found


class DeepSpeedMonitorSink:
    """Sends seconds and bytes to DeepSpeed's monitor (TensorBoard, W&B, Comet, CSV).

    Pass ``engine.monitor``. DeepSpeed writes on rank 0 only. The x axis is the step that was
    saved. Commits are reported when they happen, some steps later; a W&B run drops values for a
    step that it has passed, the other monitors keep them.
    """

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if not getattr(self._monitor, "enabled", True):
            return
        values = [(f"Checkpoint/{event.kind}_seconds", float(event.seconds), event.step)]
        if event.nbytes:
            values.append((f"Checkpoint/{event.kind}_nbytes", float(event.nbytes), event.step))
        with self._lock:
            self._monitor.write_events(values)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it. NaN and infinity become text: JSON has no such numbers."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    with contextlib.suppress(Exception):
        return str(value)
    return f"<{type(value).__name__}>"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _name_of(callback: Any) -> str:
    kind = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{kind.__module__}.{kind.__qualname__}"
