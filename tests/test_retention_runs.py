"""Retention through whole saves: what is on disk after each policy had its say (P6)."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sharded_ckpt import Keep, LoadError, ShardedCheckpointer, UsageError

pytestmark = pytest.mark.usefixtures("read_by_the_independent_reader")


def job(directory: Path, seed: int = 0, **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return model, ShardedCheckpointer(
        model, directory, optimizer=optimizer, timeout_s=60, **options
    )


def save(ckpt: ShardedCheckpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(step).wait(60)


def steps_in(directory: Path) -> list[int]:
    """From a job of its own, since retention of the last save may still be running in the first."""
    with job(directory, read_only=True)[1] as ckpt:
        return ckpt.all_steps()


@pytest.mark.case("B34")
def test_p6_scrambled_times_change_nothing(tmp_path: Path) -> None:
    _, ckpt = job(tmp_path)
    save(ckpt, 1, 2, 3, 4, 5)
    ckpt.close()
    shuffle = random.Random(3)
    for path in [*tmp_path.glob("*"), *tmp_path.glob("*/*")]:
        os.utime(path, (shuffle.randrange(2**31), shuffle.randrange(2**31)))
    _, ckpt = job(tmp_path, keep=Keep(last=3))
    assert ckpt.load().step == 5
    save(ckpt, 6)
    ckpt.close()
    assert steps_in(tmp_path) == [4, 5, 6]


@pytest.mark.case("B35", "B212")
def test_p6_a_new_run_in_an_old_directory_keeps_its_own_new_steps(tmp_path: Path) -> None:
    _, ckpt = job(tmp_path, keep=Keep(last=3))
    save(ckpt, 500, 600, 700)
    ckpt.close()
    _, ckpt = job(tmp_path, keep=Keep(last=3))
    save(ckpt, 100)
    assert ckpt.latest_step() == 100
    save(ckpt, 200)
    ckpt.close()
    assert steps_in(tmp_path) == [700, 100, 200]


@pytest.mark.case("B189")
def test_weights_only_sets_replace_full_ones_and_load_as_weights(tmp_path: Path) -> None:
    model, ckpt = job(tmp_path, keep=Keep(last=3, weights_only_after=1))
    expected = {}
    for step in (1, 2, 3, 4):
        with torch.no_grad():
            model.weight.fill_(step)
        expected[step] = model.weight.detach().clone()
        save(ckpt, step)
    ckpt.close()
    sizes = {p.parent.name[:13]: p.stat().st_size for p in tmp_path.glob("step-*/rank-*")}
    assert sizes["step-00000004"] > 2 * sizes["step-00000003"]
    other, ckpt = job(tmp_path, seed=1)
    assert ckpt.latest_step() == 4 and ckpt.load().step == 4
    with pytest.raises(LoadError, match="weights only"):
        ckpt.load(3)
    ckpt.load(3, optimizer=False, scheduler=False, rng=False, data=False)
    assert torch.equal(other.weight, expected[3])
    assert sorted(ckpt.all_steps()) == [2, 3, 4]
    ckpt.close()


def test_a_byte_budget_and_milestones(tmp_path: Path) -> None:
    _, ckpt = job(tmp_path)
    save(ckpt, 1)
    nbytes = ckpt._committed()[0].nbytes
    ckpt.close()
    _, ckpt = job(
        tmp_path, keep=Keep(every=10, at=[7], last=2, max_nbytes=4 * nbytes + nbytes // 2)
    )
    save(ckpt, 7, 10, 11, 12, 20)
    ckpt.close()
    assert steps_in(tmp_path) == [7, 10, 12, 20]
    _, ckpt = job(tmp_path, keep=Keep(last=5, max_nbytes=2 * nbytes + nbytes // 2))
    save(ckpt, 21)
    ckpt.close()
    assert steps_in(tmp_path) == [20, 21]


@pytest.mark.case("B39")
def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="last"):
        Keep(last=0)


def test_what_killed_jobs_left_is_cleaned_by_a_later_commit_and_nothing_else(
    tmp_path: Path,
) -> None:
    _, ckpt = job(tmp_path)
    save(ckpt, 1)
    ckpt.close()
    orphan = tmp_path / "step-00000002-t0001-0009-0badcafe"
    orphan.mkdir()
    (orphan / "rank-00000.safetensors").write_bytes(bytes(100))
    foreign = tmp_path / "notes"
    foreign.mkdir()
    (foreign / "keep.txt").write_text("mine")
    _, ckpt = job(tmp_path)
    assert ckpt.load().step == 1
    assert orphan.exists()  # a load deletes nothing
    save(ckpt, 3)
    ckpt.close()
    assert not orphan.exists()
    assert (foreign / "keep.txt").read_text() == "mine"
    assert steps_in(tmp_path) == [1, 3]
