"""Draws what one save blocked and what it overlapped, from the lines that train_gpt2.py wrote.

python examples/timeline.py runs/demo
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

COLUMNS = 56

Line = dict[str, Any]
Bar = tuple[str, float, float, str]  # label, start and end in seconds, remark


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def last(items: list[Line], kind: str, step: int) -> Line:
    """The last such line: a step that was trained again after a crash counts as it went then."""
    found = [item for item in items if item["kind"] == kind and item["step"] == step]
    if not found:
        raise SystemExit(f"no line of kind {kind!r} for step {step}")
    return found[-1]


def moment(event: Line) -> float:
    """When an event happened; events carry the start of their save and the seconds since."""
    return float(event["t_start"]) + float(event["seconds"])


def bars_of(events: list[Line], log: list[Line], step: int) -> list[Bar]:
    call, training = last(log, "save", step), last(log, "step", step + 1)
    staged, written = (last(events, kind, step) for kind in ("staged", "written"))
    committed = last(events, "committed", step)
    start = float(call["t_start"])
    called = start + float(call["seconds"])
    return [
        ("save() call", start, called, "the training loop waits"),
        ("copying", start, moment(staged), "the optimizer waits if it gets there first"),
        ("writing", called, moment(written), "beside training"),
        ("votes, commit", moment(written), moment(committed), "beside training"),
        (f"train step {step + 1}", float(training["t_start"]), moment(training), ""),
    ]


def draw(bars: list[Bar]) -> list[str]:
    start, end = min(b[1] for b in bars), max(b[2] for b in bars)
    scale = COLUMNS / max(end - start, 1e-9)
    drawn = [f"{'':14} 0{f'{(end - start) * 1e3:.0f} ms':>{COLUMNS}}"]
    for label, begin, finish, remark in bars:
        left = min(COLUMNS - 1, int((begin - start) * scale))
        width = max(1, min(COLUMNS - left, round((finish - begin) * scale)))
        bar = (" " * left + "#" * width).ljust(COLUMNS)
        drawn.append(f"{label:14} |{bar}| {(finish - begin) * 1e3:6.1f} ms  {remark}".rstrip())
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the directory that train_gpt2.py wrote")
    parser.add_argument("--step", type=int, default=None, help="default: the last but one saved")
    args = parser.parse_args()
    committed: list[int] = []
    for path in sorted(args.run.glob("events-rank*.jsonl")):
        rank = path.stem.removeprefix("events-rank")
        events, log = lines(path), lines(args.run / f"log-rank{rank}.jsonl")
        committed = sorted({e["step"] for e in events if e["kind"] == "committed"})
        step = args.step or committed[-2]
        nbytes = last(events, "staged", step)["nbytes"]
        print(f"save of step {step} on rank {rank}, {nbytes / 1e6:.1f} MB")
        print("\n".join(draw(bars_of(events, log, step))))
        times = {item["step"]: item["seconds"] for item in log if item["kind"] == "step"}
        after = [t for s, t in times.items() if s - 1 in committed]
        others = [t for s, t in times.items() if s - 1 not in committed and s > min(times) + 1]
        if after and others:
            print(
                f"training steps, median: {statistics.median(after) * 1e3:.0f} ms beside a save, "
                f"{statistics.median(others) * 1e3:.0f} ms without\n"
            )
    return 0 if committed else 1


if __name__ == "__main__":
    sys.exit(main())
