"""Reports from the field, in one process: each test names the public cases that it is about."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sharded_ckpt import (
    Keep,
    SaveError,
    SaveEvery,
    ShardedCheckpointer,
    StepNotFound,
    UsageError,
)
from sharded_ckpt.errors import LayoutMismatch, StateMismatch, StateTypeError

pytestmark = pytest.mark.usefixtures("read_by_the_independent_reader")

case = pytest.mark.case


class Net(nn.Module):
    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:  # two layers of one shape: only names tell them apart
            self.add_module(name, nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("big", torch.tensor([16777217.0, 1e-8], dtype=torch.float64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.norm(F.relu(self.a(x)))))


class Training:
    """Draws from every generator, so that a resume that misses one of them shows."""

    def __init__(self, seed: int = 0, order: str = "ab", lr: float = 1e-2) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net(order)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def step(self) -> float:
        x = torch.randn(4, 8) * random.uniform(0.5, 1.5) + float(np.random.rand())
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def open(self, directory: Path, **options: Any) -> ShardedCheckpointer:
        return ShardedCheckpointer(
            self.model,
            directory,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            timeout_s=60,
            **options,
        )

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@case("B80", "B242", "B88")
def test_the_lr_trajectory_and_every_random_number_go_on_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    first = Training()
    with first.open(tmp_path) as ckpt:
        for _ in range(3):
            first.step()
        ckpt.save(3)
        expected = [(first.step(), first.lr) for _ in range(5)]
    second = Training(seed=9)
    with second.open(tmp_path) as ckpt:
        assert ckpt.load().step == 3
        assert [(second.step(), second.lr) for _ in range(5)] == expected


@case("B87", "B145")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_resumes_in_the_middle_of_an_epoch(
    workers: int, tmp_path: Path
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(
            list(range(40)),  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(5),
        )

    first, data = Training(), loader()
    with first.open(tmp_path, stateful={"data": data}) as ckpt:
        batches = iter(data)
        seen = [next(batches).tolist() for _ in range(4)]
        ckpt.save(4).wait(60)
        rest = [b.tolist() for b in batches]
    assert sorted(sum(seen + rest, [])) == list(range(40))
    second, data = Training(seed=1), loader()
    with second.open(tmp_path, stateful={"data": data}) as ckpt:
        ckpt.load()
        assert [b.tolist() for b in data] == rest


@case("B184")
def test_each_piece_can_be_left_out_of_a_load(tmp_path: Path) -> None:
    first = Training()
    with first.open(tmp_path) as ckpt:
        for _ in range(3):
            first.step()
        ckpt.save(3).wait(60)
    other = Training(seed=1, lr=5e-4)
    with other.open(tmp_path) as ckpt:
        ckpt.load(optimizer=False, scheduler=False, rng=False)
        assert other.lr == 5e-4 and not other.optimizer.state
        assert torch.equal(other.model.a.weight, first.model.a.weight)
        ckpt.load(weights=False)
        assert other.lr == first.lr
        moments = other.optimizer.state[other.model.a.weight]["exp_avg"]
        assert torch.equal(moments, first.optimizer.state[first.model.a.weight]["exp_avg"])


@case("B170")
def test_moments_follow_names_when_parameters_are_defined_in_another_order(tmp_path: Path) -> None:
    first = Training()
    with first.open(tmp_path) as ckpt:
        first.step()
        ckpt.save(1).wait(60)
    second = Training(seed=1, order="ba")
    with second.open(tmp_path) as ckpt:
        ckpt.load()
    for name in ("a", "b"):
        mine, saved = getattr(second.model, name).weight, getattr(first.model, name).weight
        assert torch.equal(mine, saved)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(second.optimizer.state[mine][key], first.optimizer.state[saved][key])


@case("B172")
def test_a_group_added_later_and_missing_at_the_load_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.01})
    with ShardedCheckpointer(model, tmp_path, optimizer=optimizer, timeout_s=60) as ckpt:
        ckpt.save(1).wait(60)
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1, momentum=0.9)
    with (
        ShardedCheckpointer(model, tmp_path, optimizer=optimizer, timeout_s=60) as ckpt,
        pytest.raises((StateMismatch, LayoutMismatch), match=r"b\.weight|group"),
    ):
        ckpt.load()


class Lora(nn.Module):
    """A frozen base, small trained matrices, and a ``state_dict`` that hides the base."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, rank, bias=False), nn.Linear(rank, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {n: t for n, t in found.items() if "base" not in n}


@case("B68", "B73", "B75", "B233")
def test_the_best_step_of_a_lora_run_loads_strictly_into_a_fresh_model(tmp_path: Path) -> None:
    def opened(seed: int) -> tuple[Lora, torch.optim.Optimizer, ShardedCheckpointer]:
        torch.manual_seed(seed)
        model = Lora()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        keep = Keep(last=1, best=1, metric="loss")
        return (
            model,
            optimizer,
            ShardedCheckpointer(model, tmp_path, optimizer=optimizer, keep=keep),
        )

    model, optimizer, ckpt = opened(1)
    weights: dict[int, dict[str, torch.Tensor]] = {}
    with ckpt:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            weights[step] = {n: p.detach().clone() for n, p in model.named_parameters()}
            ckpt.save(step, metrics={"loss": loss}).wait(60)
    model, optimizer, ckpt = opened(2)
    with ckpt:
        best = ckpt.best_step()
        assert best == 2 and ckpt.load(best).step == 2
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights[2][name]), name  # the frozen ones, too
    # A frozen weight that the step does not hold is no detail: it is named.
    model.extra = nn.Linear(8, 8).requires_grad_(False)
    with (
        ShardedCheckpointer(model, tmp_path, optimizer=optimizer) as ckpt,
        pytest.raises((StateMismatch, LayoutMismatch), match=r"extra\.weight"),
    ):
        ckpt.load()


@case("B89", "B239")
def test_no_pointer_is_needed_and_links_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    first = Training()
    with first.open(tmp_path, keep=Keep(last=1)) as ckpt:
        (tmp_path / "last").symlink_to("last")  # recursive
        (tmp_path / "step-00000099-t0001-0009-0123abcd").symlink_to(tmp_path / "nowhere")
        (tmp_path / "latest").write_text("step-00000099-t0001-0009-0123abcd")
        ckpt.save(1).wait(60)
        first.step()
        ckpt.save(2).wait(60)
    with Training(seed=1).open(tmp_path) as ckpt:
        assert ckpt.load().step == 2
        assert ckpt.all_steps() == [2]
    assert (tmp_path / "last").is_symlink() and (tmp_path / "latest").exists()


@case("B138", "B39", "B211")
def test_a_failed_save_is_never_listed_and_later_saves_of_lower_steps_are_not_skipped(
    tmp_path: Path,
) -> None:
    training = Training()
    with training.open(tmp_path, keep=Keep(last=1)) as ckpt:
        ckpt.save(10).wait(60)
        failing = save_beyond_the_file_size_limit(ckpt, 20)
        with pytest.raises(SaveError):
            failing.wait(60)
        assert ckpt.all_steps() == [10]  # keep last=1 and a failure: the old set is there
        assert ckpt.load().step == 10
        ckpt.save(15).wait(60)
        assert ckpt.latest_step() == 15


@case("B57")
def test_the_error_of_the_background_writer_surfaces_with_rank_path_and_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    ckpt = training.open(tmp_path, max_failures=2)
    handle = save_beyond_the_file_size_limit(ckpt, 1)
    with pytest.raises(SaveError, match=r"rank 0.*rank-00000\.safetensors.*File too large"):
        handle.wait(60)
    assert any("step 1 was not saved" in r.message for r in caplog.records)
    # Not a reason to stop training, until it happens max_failures times in a row.
    second = save_beyond_the_file_size_limit(ckpt, 2)
    assert isinstance(second.exception(), SaveError)
    with pytest.raises(SaveError, match=r"2 saves in a row have failed.*File too large"):
        ckpt.save(3)
    ckpt.save(4).wait(60)
    ckpt.close()


def save_beyond_the_file_size_limit(ckpt: ShardedCheckpointer, step: int) -> Any:
    """A save whose shard is larger than this process may write: EFBIG, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        handle = ckpt.save(step)
        assert handle.settle(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return handle


def test_an_unseen_failure_is_raised_by_close(tmp_path: Path) -> None:
    ckpt = Training().open(tmp_path)
    save_beyond_the_file_size_limit(ckpt, 1)
    with pytest.raises(SaveError, match="File too large"):
        ckpt.close()


@case("B225", "B150")
def test_a_load_right_after_an_asynchronous_save_waits_for_it(tmp_path: Path) -> None:
    training = Training()
    with training.open(tmp_path) as ckpt:
        training.step()
        expected = training.model.a.weight.detach().clone()
        ckpt.save(1)
        training.step()
        assert not torch.equal(training.model.a.weight, expected)
        assert ckpt.load().step == 1
        assert torch.equal(training.model.a.weight, expected)


@case("B55", "B56")
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    model = nn.Linear(3072, 4096)  # about 50 MB
    process = psutil.Process()
    with ShardedCheckpointer(model, tmp_path, keep=Keep(last=1), timeout_s=120) as ckpt:
        sizes = []
        for step in range(30):
            ckpt.save(step).wait(120)
            sizes.append(process.memory_info().rss)
            if step == 0:
                fds = process.num_fds()
    growth = max(sizes[-5:]) - max(sizes[2:7])
    assert growth < 8 << 20, f"{growth} bytes over 25 saves"
    assert process.num_fds() <= fds


@case("B118")
def test_any_legal_path_works_and_a_missing_step_is_an_error(tmp_path: Path) -> None:
    directory = tmp_path / "a b" / "epoch=1-step=2 (x)ü"
    directory.parent.mkdir()
    training = Training()
    with training.open(directory) as ckpt:
        ckpt.save(2).wait(60)
        with pytest.raises(StepNotFound, match=r"step 7 is not committed.*\[2\]"):
            ckpt.load(7)
        assert ckpt.load(2).step == 2


@case("B144")
def test_an_empty_directory_says_what_was_looked_for_and_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Training().open(tmp_path / "run" / "last") as ckpt:
        ckpt.save(1).wait(60)
    caplog.set_level(logging.WARNING)
    with Training().open(tmp_path / "run") as ckpt:
        assert ckpt.load().step == 0
    (text,) = [r.getMessage() for r in caplog.records if "no committed step" in r.getMessage()]
    assert str(tmp_path / "run") in text
    assert str(tmp_path / "run" / "last") in text  # where there is one


@case("B111", "B110")
def test_buffers_come_back_with_their_own_dtype_and_the_others_are_left_alone(
    tmp_path: Path,
) -> None:
    first = Training()
    first.step()
    with first.open(tmp_path) as ckpt:
        ckpt.save(1).wait(60)
    second = Training(seed=1)
    second.model.big.zero_()
    second.model.scratch.fill_(3)
    with second.open(tmp_path) as ckpt:
        ckpt.load()
    assert second.model.big.dtype == torch.float64
    assert torch.equal(second.model.big, torch.tensor([16777217.0, 1e-8], dtype=torch.float64))
    assert second.model.norm.num_batches_tracked.item() == 1
    assert torch.equal(second.model.norm.running_mean, first.model.norm.running_mean)
    assert second.model.scratch.tolist() == [3, 3]


def test_client_state_and_metrics_come_back(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "shape": (1, (2, 3)),
        "seen": {7: "a", "b": None},
        "weights": torch.arange(4),
        "table": np.arange(6, dtype=np.int16).reshape(2, 3),
        "dtype": torch.bfloat16,
        "raw": b"\x00\xff",
        "scores": [float("inf"), 0.1],
        "rng": torch.arange(3),  # named as this rank's own generators are
    }
    training = Training()
    with training.open(tmp_path) as ckpt:
        ckpt.save(1, client_state=state, metrics={"loss": 0.25, "acc": torch.tensor(0.5)})
    with Training(seed=1).open(tmp_path) as ckpt:
        result = ckpt.load()
    assert result.metrics == {"loss": 0.25, "acc": 0.5}
    got = result.client_state
    assert torch.equal(got.pop("weights"), state.pop("weights"))
    assert torch.equal(got.pop("rng"), state.pop("rng"))
    table = state.pop("table")
    assert got["table"].dtype == table.dtype and np.array_equal(got.pop("table"), table)
    assert got == state


def test_a_value_that_cannot_be_held_is_refused_with_its_path_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    training = Training()
    with training.open(tmp_path) as ckpt:
        ckpt.save(1).wait(60)
        with pytest.raises(StateTypeError, match=r"client_state.*args.*Path|client_state.*Path"):
            ckpt.save(2, client_state={"args": {"out": Path("x")}})
        assert ckpt.all_steps() == [1]
        ckpt.save(3).wait(60)
        assert ckpt.all_steps() == [1, 3]


def test_a_step_is_saved_again_after_a_rollback_and_ranks_above_what_it_replaces(
    tmp_path: Path,
) -> None:
    training = Training()
    with training.open(tmp_path, save_every=SaveEvery(steps=2)) as ckpt:
        for step in (2, 4, 6):
            training.step()
            assert ckpt.should_save(step)
            ckpt.save(step).wait(60)
        assert ckpt.load(4).step == 4
        training.step()
        ckpt.save(5).wait(60)
        assert ckpt.latest_step() == 5
        assert ckpt.all_steps() == [2, 4, 6, 5]


def test_when_both_buffers_are_busy_a_save_is_skipped_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []
    training = Training()
    with training.open(tmp_path, when_busy="skip", buffers=1, on_event=events.append) as ckpt:
        ckpt.save(1).wait(60)
        held = ckpt._pool.acquire(5)  # as a save that is still being written would
        assert held is not None
        handle = ckpt.save(2)
        assert handle.skipped and handle.wait(1) is None
        ckpt._pool.release(held)
        ckpt.save(3).wait(60)
        assert ckpt.all_steps() == [1, 3]
    assert [e.step for e in events if e.kind == "skipped"] == [2]
    assert "step 2 was not saved" in caplog.text


def test_a_forked_child_may_not_use_the_checkpointer(tmp_path: Path) -> None:
    training = Training()
    with training.open(tmp_path) as ckpt:
        ckpt.save(1).wait(60)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                ckpt.save(2)
                answer = "saved"
            except UsageError as error:
                answer = str(error)
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert "forked child" in json.loads(os.read(reader, 65536))
        ckpt.save(3).wait(60)


def test_pins_deletion_and_the_best_step(tmp_path: Path) -> None:
    training = Training()
    keep = Keep(last=1, best=1, metric="loss", mode="min")
    with training.open(tmp_path, keep=keep) as ckpt:
        ckpt.save(1, metrics={"loss": 3.0}).wait(60)
        ckpt.pin(1, "published")
        for step, loss in ((2, 1.0), (3, 2.0), (4, 2.5)):
            ckpt.save(step, metrics={"loss": loss}).wait(60)
        ckpt.wait()
    with training.open(tmp_path, keep=keep) as ckpt:
        assert ckpt.all_steps() == [1, 2, 4]  # pinned, best, newest
        assert ckpt.best_step() == 2
        with pytest.raises(UsageError):
            ckpt.delete(4)
        with pytest.raises(UsageError):
            ckpt.delete(1)
        ckpt.unpin(1)
        ckpt.delete(1)
        assert ckpt.all_steps() == [2, 4]
