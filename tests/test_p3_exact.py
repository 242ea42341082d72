"""P3 exact: every mode resumes bit for bit in new processes, and one table says so.

Each launch takes many modes one after another; only those with global process groups (MoE,
pipelines, hpZ) need launches of their own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import read_back
from tests.dist import ds_modes, fsdp_modes
from tests.dist.launch import launch

WORKER = Path(__file__).parent / "dist" / "p3_worker.py"
TABLE: dict[str, dict[str, Any]] = {}
# Reports from the field by group of modes: frozen weights, buffers, prefixes, uneven shards.
CASES = {
    "zero-2": ("B73", "B110"),
    "zero-3": ("B62", "B68", "B73", "B110", "B197"),
    "torch-2": ("B62", "B76", "B77", "B78", "B110"),
    "torch-3": ("B62",),
}

pytestmark = pytest.mark.usefixtures("deepspeed_helper")


def groups() -> Iterator[Any]:
    """``(name, world size, modes)`` of each pair of launches."""
    shared = [f"ds:{n}" for n, m in ds_modes.MODES.items() if not m.own_launch]
    for stage in range(4):
        modes = [m for m in shared if m.startswith(f"ds:z{stage}-")]
        yield param(2, modes, f"zero-{stage}")
    own = [(n, m) for n, m in ds_modes.MODES.items() if m.own_launch]
    for kind in ("hpz", "moe", "pipe"):
        for world_size in (2, 4):
            modes = [f"ds:{n}" for n, m in own if kind in n and m.world_size == world_size]
            for label, some in split_moe(modes):
                yield param(world_size, some, f"{kind}{label}-{world_size}")
    for world_size in (1, 2, 3, 4):
        modes = [f"torch:{n}" for n, m in fsdp_modes.MODES.items() if m.world_size == world_size]
        yield param(world_size, modes, f"torch-{world_size}")


def param(world_size: int, modes: list[str], name: str) -> Any:
    marks = [pytest.mark.case(*CASES[name])] if name in CASES else []
    return pytest.param(world_size, modes, id=name, marks=marks)


def split_moe(modes: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Expert-parallel groups are named by their size alone: one size a launch."""
    ep1 = [m for m in modes if m.endswith("-ep1")]
    for label, some in (("", [m for m in modes if m not in ep1]), ("-ep1", ep1)):
        if some:
            yield label, some


@pytest.mark.parametrize(("world_size", "modes"), list(groups()))
def test_p3_training_resumed_in_new_processes_is_bit_identical(
    world_size: int, modes: list[str], tmp_path: Path
) -> None:
    reports: dict[str, list[dict[str, Any]]] = {}
    for phase in ("train", "resume"):
        run = launch(WORKER, world_size, [phase, tmp_path, *modes], timeout_s=540)
        reports = {}
        for rank in run.ranks:
            for line in rank.stdout.splitlines():
                if line.startswith("P3 "):
                    report = json.loads(line.removeprefix("P3 "))
                    reports.setdefault(report["mode"], []).append(report)
        bad = [r for m in modes for r in reports.get(m, [{"mode": m, "ok": False}]) if not r["ok"]]
        assert not bad, f"{phase}: {json.dumps(bad, indent=1)[:6000]}"
        assert set(reports) == set(modes), run.describe()
        assert all(len(r) == world_size for r in reports.values()), run.describe()
        run.check()
    for mode, per_rank in reports.items():
        natives = {r.get("native", "-") for r in per_rank}
        TABLE[mode] = {
            "wrapper": per_rank[0]["wrapper"],
            "ranks": world_size,
            "tensors": sum(r["tensors"] for r in per_rank),
            "native": "exact" if natives == {"exact"} else ", ".join(sorted(natives - {"exact"})),
        }
    assert read_back.check(tmp_path) >= len(modes)
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_p3_table_of_all_modes(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what the tests above have shown; run them all for the whole table."""
    if not TABLE:
        pytest.skip("no mode was run before this test")
    with capsys.disabled():
        print(f"\n\n{'mode':34} {'optimizer':28} ranks tensors  ours   DeepSpeed's own resume")
        for mode, row in TABLE.items():
            print(
                f"{mode:34} {row['wrapper']:28} {row['ranks']:5} {row['tensors']:7}  exact  "
                f"{row['native']}"
            )
        exact = [m for m, r in TABLE.items() if r["native"] == "exact"]
        print(f"{len(TABLE)} modes resume exactly; DeepSpeed's own resume is exact in {len(exact)}")
