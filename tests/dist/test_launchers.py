"""The same script under torchrun and under DeepSpeed's launcher, in one directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.launch import ROOT, Via, launch

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


def train(run: Path, steps: int, via: Via) -> str:
    small = ["--save-every", 4, "--layers", 2, "--width", 64, "--batch", 2]
    arguments = [run, "--steps", steps, *small]
    result = launch(
        EXAMPLES / "train_gpt2.py", 2, [str(a) for a in arguments], via=via, timeout_s=240
    )
    return result.check().ranks[0].stdout


def test_p3_saved_under_one_launcher_resumed_under_the_other(tmp_path: Path) -> None:
    """Each launch goes two steps past its last save; the next one must repeat their losses."""
    run = tmp_path / "run"
    assert "starting afresh" in train(run, 6, "torchrun")
    assert "resuming after step 4" in train(run, 10, "deepspeed")
    assert "resuming after step 8" in train(run, 11, "torchrun")
    compared = subprocess.run(
        [sys.executable, EXAMPLES / "compare_losses.py", run], capture_output=True, text=True
    )
    assert compared.returncode == 0, compared.stderr
    # Steps 5 and 6, 9 and 10, on two ranks.
    assert compared.stdout.startswith("8 losses were computed twice")
