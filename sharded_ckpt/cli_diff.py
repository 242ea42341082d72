"""The command ``diff``: names, shapes, dtypes and values of two sets, on whatever layouts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sharded_ckpt import dtypes, plan
from sharded_ckpt.cli_output import progress, say, say_json
from sharded_ckpt.cli_target import find_set
from sharded_ckpt.export.cast import CASTABLE, Bytes, float_values
from sharded_ckpt.export.stream import Exported, Role, TensorStream
from sharded_ckpt.plan import Holding
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.slices import Run, runs

Holdings = dict[str, list[Holding]]

# Compared at a time: a multiple of every item size, small enough for the temporaries.
_BLOCK_NBYTES = 8 << 20


@dataclass(slots=True)
class ValueDiff:
    """How two tensors of one shape and dtype differ, bit by bit; ``max_abs`` for floats only."""

    elements: int = 0
    max_abs: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a checkpoint directory, or one step directory")
    parser.add_argument("b", help="the same, of the other set")
    parser.add_argument("--step-a", type=int, help="default: the newest step")
    parser.add_argument("--step-b", type=int, help="default: the newest step")
    parser.add_argument(
        "--bytes", action="store_true", help="read shards whose checksums are equal, too"
    )
    parser.add_argument("--json", action="store_true", help="result as JSON")


def run(args: argparse.Namespace) -> int:
    """0 when both sets hold the same tensors with the same values, else 1.

    What each rank saved a copy of is compared rank by rank, and the ranks must be the same.
    """
    left, right = find_set(args.a, args.step_a), find_set(args.b, args.step_b)
    a, b = left.reader(), right.reader()
    held_a, held_b = a.holdings(), b.holdings()
    only_a, only_b = sorted(held_a.keys() - held_b.keys()), sorted(held_b.keys() - held_a.keys())
    unlike: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    alike: list[str] = []
    for name in sorted(held_a.keys() & held_b.keys()):
        ranks_a, ranks_b = _copied_by(held_a[name]), _copied_by(held_b[name])
        if ranks_a and ranks_b and ranks_a != ranks_b:
            apart.append({"name": name, "a": ranks_a, "b": ranks_b})
        forms = _forms(held_a[name], held_b[name])
        if forms is None:
            alike.append(name)
        else:
            unlike.append({"name": name, "a": forms[0], "b": forms[1]})
    same = set() if args.bytes else _equal_by_checksum(a, b, held_a, held_b)
    values = _compare(a, b, held_a, held_b, [name for name in alike if name not in same])
    state = [
        key
        for key in ("state", "client_state", "aliases", "metrics")
        if getattr(left.sound(), key) != getattr(right.sound(), key)
    ]
    equal = not (only_a or only_b or unlike or apart or values)
    if args.json:
        say_json(
            {
                "equal": equal,
                "a": left.path,
                "b": right.path,
                "only_a": only_a,
                "only_b": only_b,
                "form": unlike,
                "ranks": apart,
                "values": [
                    {"name": name, "elements": found.elements, "max_abs_diff": found.max_abs}
                    for name, found in values.items()
                ],
                "state": state,
                "tensors_compared": len(alike),
            }
        )
        return 0 if equal else 1
    for name in only_a:
        say(f"only in a: {name}")
    for name in only_b:
        say(f"only in b: {name}")
    for item in unlike:
        say(f"shape or dtype: {item['name']}: a {item['a']}, b {item['b']}")
    for item in apart:
        say(f"ranks that have a copy: {item['name']}: a {item['a']}, b {item['b']}")
    for name, found in values.items():
        largest = "" if found.max_abs is None else f", largest difference {found.max_abs:g}"
        say(f"values: {name}: {found.elements} elements{largest}")
    if state:
        say(f"non-tensor state differs in: {', '.join(state)}")
    say(f"{'equal' if equal else 'DIFFERENT'}: {len(alike)} tensors compared")
    return 0 if equal else 1


def _equal_by_checksum(
    a: ShardReader, b: ShardReader, held_a: Holdings, held_b: Holdings
) -> set[str]:
    """Names whose shards have the same tensors at the same places with the same checksums."""
    headers_a, headers_b = a.headers(), b.headers()
    same = {
        rank
        for rank, one in headers_a.items()
        if (other := headers_b.get(rank)) is not None
        and (one.crcs, one.spans, one.entries) == (other.crcs, other.spans, other.entries)
        and one.chunk_nbytes == other.chunk_nbytes
    }
    return {
        name
        for name, held in held_a.items()
        if (ranks := {one.file for one in held}) <= same
        and ranks == {one.file for one in held_b.get(name, ())}
    }


def _compare(
    a: ShardReader, b: ShardReader, held_a: Holdings, held_b: Holdings, names: list[str]
) -> dict[str, ValueDiff]:
    """The tensors that differ. Both sets are streamed side by side, in bounded memory."""
    whole = [name for name in names if _is_whole(held_a[name]) and _is_whole(held_b[name])]
    found: dict[str, ValueDiff] = {}
    # Cut tensors in one stream; then, for each rank, what it has a copy of.
    streams: dict[int | None, tuple[Holdings, Holdings]] = {}
    for name in whole:
        for rank, one, other in _pairs(held_a[name], held_b[name]):
            side_a, side_b = streams.setdefault(rank, ({}, {}))
            side_a[name], side_b[name] = one, other
    total = sum(
        tensor.nbytes for held, _ in streams.values() for tensor in _exported(held, list(held))
    )
    with progress(total, "diff") as done:
        for side_a, side_b in streams.values():
            _stream(a, b, side_a, side_b, found, done)
    for name in sorted(set(names) - set(whole)):
        # Overrides of a cast cover a tensor in part: equal where both correct the same elements.
        diff = ValueDiff()
        runs_a, runs_b = _runs(held_a[name]), _runs(held_b[name])
        if runs_a != runs_b:
            diff.elements = abs(sum(n for _, n in runs_a) - sum(n for _, n in runs_b)) or 1
        else:
            for start, numel in runs_a:
                data = [_read(*side, name, start, numel) for side in ((a, held_a), (b, held_b))]
                _add(diff, held_a[name][0].entry.dtype, *data)
        if diff.elements:
            found[name] = diff
    return found


def _stream(
    a: ShardReader,
    b: ShardReader,
    held_a: Holdings,
    held_b: Holdings,
    found: dict[str, ValueDiff],
    done: Callable[[int], None],
) -> None:
    """Compares all that is held, and adds what differs to ``found``."""
    tensors = _exported(held_a, list(held_a))
    stream_a = TensorStream(a, held_a).pieces(tensors)
    stream_b = TensorStream(b, held_b).pieces(_exported(held_b, list(held_a)))
    for one, other in zip(stream_a, stream_b, strict=True):
        done(one.data.nbytes)
        if not np.array_equal(one.data, other.data):
            tensor = tensors[one.index]
            diff = found.setdefault(tensor.name, ValueDiff())
            _add(diff, tensor.dtype, one.data, other.data)


def _copied_by(held: list[Holding]) -> list[int]:
    """The ranks that have their own copy; none where the tensor is cut over the ranks."""
    return [one.file for one in held] if held[0].entry.copy else []


def _pairs(
    held_a: list[Holding], held_b: list[Holding]
) -> Iterator[tuple[int | None, list[Holding], list[Holding]]]:
    """What is compared with what: each rank's copies (with all of a cut tensor), else all."""
    ranks_a, ranks_b = _copied_by(held_a), _copied_by(held_b)
    if not ranks_a and not ranks_b:
        yield None, held_a, held_b
        return
    for rank in ranks_a or ranks_b:
        one = [held for held in held_a if not ranks_a or held.file == rank]
        other = [held for held in held_b if not ranks_b or held.file == rank]
        if one and other:
            yield rank, one, other


def _forms(held_a: list[Holding], held_b: list[Holding]) -> tuple[str, str] | None:
    """The first dtypes and shapes that are not the same, if any."""
    for _, one, other in _pairs(held_a, held_b):
        left, right = (f"{h[0].entry.dtype} {list(h[0].entry.shape)}" for h in (one, other))
        if left != right:
            return left, right
    return None


def _exported(held: Holdings, names: list[str]) -> list[Exported]:
    entries = [held[name][0].entry for name in names]
    return [Exported(entry.name, Role.WEIGHT, entry.dtype, entry) for entry in entries]


def _is_whole(held: list[Holding]) -> bool:
    saved = sum(one.entry.numel for one in held)
    return held[0].entry.copy or saved == math.prod(held[0].entry.shape)


def _runs(held: list[Holding]) -> list[tuple[int, int]]:
    """The elements that are held, as maximal runs."""
    merged: list[tuple[int, int]] = []
    for start, numel in sorted(run for h in held for run in runs(h.entry.region, h.entry.shape)):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + numel)
        else:
            merged.append((start, numel))
    return merged


def _read(reader: ShardReader, held: Holdings, name: str, start: int, numel: int) -> Bytes:
    entry = replace(held[name][0].entry, region=Run(start, numel))
    data = np.empty(numel * dtypes.by_name(entry.dtype).itemsize, np.uint8)
    reader.fill(plan.reads([entry], held, prefer_file=None), [data])
    return data


def _add(diff: ValueDiff, dtype: str, a: Bytes, b: Bytes) -> None:
    """Counts the elements that differ in their bits, and the largest difference of floats."""
    bits = dtypes.by_name(dtype).bits
    for start in range(0, len(a), _BLOCK_NBYTES):
        one, other = a[start : start + _BLOCK_NBYTES], b[start : start + _BLOCK_NBYTES]
        different = one.view(bits) != other.view(bits)
        diff.elements += int(np.count_nonzero(different))
        if dtype not in CASTABLE or not different.any():
            continue
        left, right = (float_values(side, dtype)[different] for side in (one, other))
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
        finite = apart[np.isfinite(apart)]
        if len(finite):
            diff.max_abs = max(diff.max_abs or 0.0, float(finite.max()))
