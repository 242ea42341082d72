"""P1 atomic, P7 loud: SIGKILL of a rank while it saves, ours beside DeepSpeed's own save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharded_ckpt.layout import MANIFEST, SetId
from tests.dist.launch import Result, launch

WORKER = Path(__file__).parent / "dist" / "kill_worker.py"
DEADLINE_S = 15.0

pytestmark = pytest.mark.usefixtures("deepspeed_helper", "read_by_the_independent_reader")


def results(run: Result, rank: int) -> list[dict]:
    lines = run.ranks[rank].stdout.splitlines()
    return [json.loads(x.removeprefix("RESULT ")) for x in lines if x.startswith("RESULT ")]


@pytest.mark.parametrize("stage", [1, 3])
def test_p1_a_killed_rank_leaves_the_previous_step_and_native_leaves_a_broken_one(
    stage: int, tmp_path: Path
) -> None:
    ours, native = tmp_path / "ours", tmp_path / "native"

    died = launch(WORKER, 2, [ours, str(stage), "ours", "die", str(DEADLINE_S)], timeout_s=180)
    assert died.ranks[1].returncode == -9, died.describe()
    (report,) = results(died, rank=0)
    # P7: the survivor is told, in time, who is missing.
    assert report["outcome"] == "SaveTimeout", report
    assert "rank 1" in report["message"], report
    assert report["seconds"] < DEADLINE_S + 10, report
    committed = sorted(p.parent.name for p in ours.glob(f"step-*/{MANIFEST}"))
    assert [SetId.parse(name).step for name in committed] == [1]

    back = launch(WORKER, 2, [ours, str(stage), "ours", "resume"], timeout_s=180).check()
    for rank in (0, 1):
        first, second = results(back, rank)
        assert first == {"step": 1, "steps": [1]}, back.describe()
        assert second == {"step": 2}

    # The same kill with DeepSpeed's own save: `latest` names the set without rank 1's shard.
    died = launch(WORKER, 2, [native, str(stage), "native", "die"], timeout_s=180)
    assert died.ranks[1].returncode == -9, died.describe()
    assert (native / "latest").read_text() == "bad"
    shards = sorted(p.name for p in (native / "bad").glob("*zero_pp_rank_*optim_states.pt"))
    assert len(shards) == 1 and "rank_0" in shards[0], shards
    back = launch(WORKER, 2, [native, str(stage), "native", "resume"], timeout_s=180)
    assert any("error" in r for rank in (0, 1) for r in results(back, rank)), back.describe()
