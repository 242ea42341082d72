"""Every set that a test of whole saves has committed is read by the independent reader afterwards.

Tests that damage files on purpose are marked ``damages``. Sets with a large shard are left to the
tests that read them themselves: that reader is slow.
"""

from __future__ import annotations

from pathlib import Path

from tests.reference_reader import Step

LARGE_NBYTES = 4 << 20


def check(directory: Path) -> int:
    """Reads all committed sets below ``directory``; how many. Raises ``ValueError`` for damage."""
    count = 0
    for manifest in directory.glob("**/step-*/manifest.json"):
        step = manifest.parent
        if step.is_symlink() or step.name.startswith("trash-"):
            continue
        if any(shard.stat().st_size > LARGE_NBYTES for shard in step.glob("rank-*")):
            continue
        saved = Step(step)
        for name in saved.names():
            saved.tensor(name)
        count += 1
    return count
