"""Compares the losses of steps that were trained twice: before a crash, and again after resuming.

python examples/compare_losses.py runs/demo
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the directory that train_gpt2.py wrote")
    args = parser.parse_args()
    twice = 0
    for path in sorted(args.run.glob("log-rank*.jsonl")):
        losses: dict[int, list[str]] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            if line["kind"] == "step":
                losses.setdefault(line["step"], []).append(line["loss"])
        for step, seen in sorted(losses.items()):
            if len(set(seen)) > 1:
                values = ", ".join(repr(float.fromhex(loss)) for loss in seen)
                print(f"{path.stem}: step {step} had other losses: {values}", file=sys.stderr)
                return 1
        twice += sum(len(seen) > 1 for seen in losses.values())
    if not twice:
        print("no step was trained twice", file=sys.stderr)
        return 1
    print(f"{twice} losses were computed twice, before and after the crash: equal to the last bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
