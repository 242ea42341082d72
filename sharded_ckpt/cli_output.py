"""How commands talk: results to stdout (text or JSON), progress and warnings to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def say(line: str = "") -> None:
    """A line of the result."""
    print(line)


def warn(line: str) -> None:
    """A line beside the result."""
    print(line, file=sys.stderr)


def say_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False))


def human(nbytes: int) -> str:
    """``nbytes`` with a decimal unit, as disks are sold and files are listed."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def table(rows: list[list[str]]) -> Iterator[str]:
    """``rows`` as lines with aligned columns; numbers are the caller's to format."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


@contextmanager
def progress(total_nbytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere. Gives the function that takes the bytes done."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from tqdm import tqdm

    with tqdm(total=total_nbytes, unit="B", unit_scale=True, desc=what, file=sys.stderr) as bar:
        yield bar.update


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
