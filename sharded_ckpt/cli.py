"""``python -m sharded_ckpt``: look at, check, export and tidy checkpoint directories.

Results go to stdout, everything else to stderr. Exit codes: 0 good, 1 damaged, different or absent,
2 wrong usage. Works without torch, deepspeed and a GPU, and writes nothing into a checkpoint
directory except by ``gc --yes``, ``pin`` and ``unpin``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from sharded_ckpt import cli_consolidate, cli_diff, cli_sets
from sharded_ckpt._version import __version__
from sharded_ckpt.cli_output import warn
from sharded_ckpt.errors import CheckpointError, UsageError

BAD, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Argument errors exit with 2 at once."""
    for stream in (sys.stdout, sys.stderr):
        # Any legal path can be printed, also one that is not text in this locale.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    args = parser().parse_args(argv)
    run: Command = args.run
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python must not try to flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except UsageError as error:
        warn(f"error: {error}")
        return USAGE
    except CheckpointError as error:
        warn(f"error: {error}")
        return BAD
    except KeyboardInterrupt:
        warn("interrupted")
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="sharded-ckpt", description="Look at, check, export and tidy sharded checkpoints."
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Command, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    def add_sets(name: str, run: Command, text: str, path: str) -> argparse.ArgumentParser:
        command = add(name, run, text)
        command.add_argument("path", help=path)
        command.add_argument("--json", action="store_true", help="result as JSON")
        return command

    either = "a checkpoint directory, or one step directory"
    add_sets("ls", cli_sets.ls, "list the committed steps", either)
    info = add_sets("info", cli_sets.info, "describe one step", either)
    info.add_argument("--step", type=int, help="default: the newest step")
    info.add_argument("--tensors", action="store_true", help="list the tensors, too")
    verify = add_sets("verify", cli_sets.verify, "read every byte and name what is damaged", either)
    verify.add_argument("--step", type=int, help="default: all steps")
    cli_consolidate.add_arguments(
        add("consolidate", cli_consolidate.run, "write whole tensors for other tools")
    )
    cli_diff.add_arguments(add("diff", cli_diff.run, "compare two steps"))
    gc = add_sets(
        "gc",
        cli_sets.gc,
        "show what jobs left behind without committing it; remove it with --yes",
        "a checkpoint directory",
    )
    gc.add_argument("--yes", action="store_true", help="remove it")
    gc.add_argument(
        "--force-term",
        action="store_true",
        help="also what the newest job left; only when no job is running",
    )
    pin = add_sets("pin", cli_sets.pin, "keep a step whatever the policy", "a checkpoint directory")
    pin.add_argument("--note", default="", help="why, for whoever finds it")
    unpin = add_sets("unpin", cli_sets.unpin, "undo pin", "a checkpoint directory")
    for command in (pin, unpin):
        command.add_argument("--step", type=int, required=True)
    return top


if __name__ == "__main__":
    sys.exit(main())
