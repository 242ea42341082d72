"""The launcher of the tests: survivors live on, deadlines hold, nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import launch as launching
from tests.dist.launch import Launch, LaunchFailed, launch

RANK = """
import os, signal, subprocess, sys
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1], flush=True)
print("to stderr", file=sys.stderr, flush=True)
if sys.argv[1] == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "hang":
    # A child in a session of its own, as launchers make them.
    subprocess.run([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    signal.pause()
print("end of", rank)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def test_all_ranks_run_and_their_output_is_kept_apart(script: Path) -> None:
    result = launch(script, 2, ["fine"], timeout_s=60).check()
    assert [r.stdout for r in result.ranks] == [f"rank {i} of 2 fine\nend of {i}\n" for i in (0, 1)]
    assert [r.stderr for r in result.ranks] == ["to stderr\n"] * 2


def test_survivors_are_not_ended_with_the_rank_that_died(script: Path) -> None:
    result = launch(script, 2, ["die"], timeout_s=60)
    assert [r.returncode for r in result.ranks] == [0, -9]
    assert "end of 0" in result.ranks[0].stdout
    with pytest.raises(LaunchFailed, match="exit code -9"):
        result.check()


def test_at_the_deadline_everything_is_killed_and_the_logs_are_shown(script: Path) -> None:
    with Launch(script, 2, ["hang"]) as running:
        running.wait_for("rank 0 of 2 hang", rank=0, timeout_s=60)
        running.wait_for("rank 1 of 2 hang", rank=1, timeout_s=60)
        with pytest.raises(LaunchFailed, match="(?s)no end after 0 s.*rank 1 of 2 hang"):
            running.wait(timeout_s=0.1)
        assert launching._marked(running._mark) == []


def test_waiting_for_a_line_that_never_comes_fails_when_the_rank_ends(script: Path) -> None:
    with Launch(script, 1, ["fine"]) as running, pytest.raises(LaunchFailed, match="never printed"):
        running.wait_for("no such line", timeout_s=60)
