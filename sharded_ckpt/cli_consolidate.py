"""The command ``consolidate``: whole tensors out of a set, see ``sharded_ckpt.export``."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sharded_ckpt.cli_output import human, progress, say, say_json, warn
from sharded_ckpt.cli_target import find_set
from sharded_ckpt.export import Request, Selection, consolidate, plan_export
from sharded_ckpt.export.weights import wanted_names

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\Z")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint directory, or one step directory")
    parser.add_argument("output", help="directory to write (torch: file; orbax: also a URL)")
    parser.add_argument("--step", type=int, help="default: the newest step")
    parser.add_argument(
        "--to", choices=("safetensors", "torch", "orbax"), default="safetensors", dest="format"
    )
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), help="default: each weight's own; buffers keep theirs"
    )
    parser.add_argument(
        "--only",
        choices=("weights", "all"),
        default="weights",
        help="all: optimizer state, too, under optim/ and master/",
    )
    parser.add_argument(
        "--max-shard-size", type=parse_size, default="5GB", metavar="SIZE", help="default: 5GB"
    )
    parser.add_argument(
        "--strip-prefix",
        action="append",
        default=[],
        metavar="PREFIX",
        help="take this off the front of names; may be given more than once",
    )
    parser.add_argument(
        "--only-trainable",
        "--exclude-frozen",
        action="store_true",
        help="leave out parameters that no optimizer owns, and buffers",
    )
    parser.add_argument(
        "--copy-config",
        metavar="DIR",
        help="copy config.json, tokenizer and generation config from DIR, and check them",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be written")
    parser.add_argument("--json", action="store_true", help="result as JSON")


def run(args: argparse.Namespace) -> int:
    selection = Selection(
        dtype=_DTYPES[args.dtype] if args.dtype else None,
        optimizer=args.only == "all",
        trainable_only=args.only_trainable,
        strip_prefixes=tuple(args.strip_prefix),
    )
    request = Request(
        target=args.output,
        format=args.format,
        selection=selection,
        max_shard_nbytes=args.max_shard_size,
        copy_config=args.copy_config,
        overwrite=args.overwrite,
    )
    found = find_set(args.path, args.step)
    plan = plan_export(found.reader(wanted_names(selection)), request)
    for warning in plan.warnings:
        warn(f"warning: {warning}")
    peak = plan.peak_memory_nbytes
    if not args.dry_run:
        with _terminated_is_an_exit(), progress(plan.nbytes, "consolidate") as done:
            consolidate(plan, done)
    if args.json:
        say_json(
            {
                "step": found.sound().id.step,
                "from": found.path,
                "to": args.output,
                "format": args.format,
                "dry_run": args.dry_run,
                "tensors": len(plan.view.tensors),
                "aliases": plan.view.aliases,
                "nbytes": plan.nbytes,
                "files": [{"name": name, "nbytes": nbytes} for name, nbytes in plan.files],
                "copied": plan.config_files,
                "peak_memory_nbytes": peak,
                "warnings": plan.warnings,
            }
        )
        return 0
    verb = "would write" if args.dry_run else "wrote"
    say(
        f"{verb} {len(plan.view.tensors)} tensors of step {found.sound().id.step}, "
        f"{human(plan.nbytes)}, to {args.output}"
    )
    for name, nbytes in plan.files:
        say(f"  {name}  {human(nbytes)}")
    for name in plan.config_files:
        say(f"  {name}  (copied)")
    for alias, name in plan.view.aliases.items():
        say(f"  {alias} is tied to {name}")
    if args.dry_run:
        say(f"peak memory: about {human(peak)}")
    return 0


def parse_size(text: str) -> int:
    """``5GB``, ``500MB``, ``2GiB`` or plain bytes."""
    found = _SIZE.match(text.strip().upper())
    if found is None or (found.group(3) and not found.group(2)):
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write 5GB, 500MB or 2GiB")
    unit = _BINARY[found.group(2)] if found.group(3) else _UNITS[found.group(2)]
    return int(float(found.group(1)) * unit)


@contextmanager
def _terminated_is_an_exit() -> Iterator[None]:
    """Lets SIGTERM unwind, so that what was written by halves is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
