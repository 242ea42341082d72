"""P4 isolated: a file holds the values at the call of save, whatever training does afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sharded_ckpt import SaveError, ShardedCheckpointer
from sharded_ckpt.device import InlineStream
from sharded_ckpt.shard import CHUNK_NBYTES
from tests.reference_reader import Step

pytestmark = pytest.mark.usefixtures("read_by_the_independent_reader")

# Big enough that copies are still running when save() returns.
WIDTH, LAYERS = 1536, 5


class Big(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return x


def trained() -> tuple[Big, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Big()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model)
    optimizer.step()
    return model, optimizer


def backward(model: Big) -> None:
    model.zero_grad()
    model(torch.ones(1, WIDTH)).square().mean().backward()


def values(model: Big, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model/{n}": p.detach().clone() for n, p in model.named_parameters()}
    found["buffer/seen"] = model.seen.clone()
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"optim/{name}/{key}"] = value.detach().clone()
    return found


def assert_file_holds(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    (found,) = directory.glob("step-*")
    saved = Step(found)
    for name, value in expected.items():
        assert torch.equal(torch.from_numpy(saved.tensor(name).copy()), value), name


@pytest.mark.case("B150")
@pytest.mark.parametrize("mode", ["lazy", "blocking"])
@pytest.mark.parametrize("path", ["threads", "stream"])
def test_p4_an_optimizer_step_right_after_save_never_reaches_the_file(
    mode: str, path: str, tmp_path: Path
) -> None:
    model, optimizer = trained()
    stream = InlineStream() if path == "stream" else None
    with ShardedCheckpointer(
        model, tmp_path, optimizer=optimizer, snapshot=mode, _stream=stream
    ) as ckpt:
        backward(model)
        expected = values(model, optimizer)
        handle = ckpt.save(1)
        model.seen += 100  # buffers are copied at the call
        optimizer.step()  # the fence holds this back until the copies are done
        assert handle.staged()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        handle.wait(60)
    assert_file_holds(tmp_path, expected)


@pytest.mark.parametrize("mode", ["lazy", "blocking"])
def test_p4_changes_outside_the_optimizer_wait_for_the_fence(mode: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    with ShardedCheckpointer(model, tmp_path, optimizer=optimizer, snapshot=mode) as ckpt:
        expected = values(model, optimizer)
        handle = ckpt.save(1)
        if mode == "lazy":
            ckpt.fence()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        handle.wait(60)
    assert_file_holds(tmp_path, expected)


def test_p4_bounded_staging_streams_the_same_bytes(tmp_path: Path) -> None:
    model, optimizer = trained()
    with ShardedCheckpointer(
        model, tmp_path, optimizer=optimizer, staging_nbytes=8 * CHUNK_NBYTES
    ) as ckpt:
        backward(model)
        expected = values(model, optimizer)
        handle = ckpt.save(1)
        optimizer.step()
        handle.wait(60)
        assert ckpt._pool.nbytes <= 8 * CHUNK_NBYTES
    assert_file_holds(tmp_path, expected)


def test_p4_bounded_staging_through_a_stream(tmp_path: Path) -> None:
    model, optimizer = trained()
    with ShardedCheckpointer(
        model,
        tmp_path,
        optimizer=optimizer,
        staging_nbytes=8 * CHUNK_NBYTES,
        _stream=InlineStream(),
    ) as ckpt:
        backward(model)
        expected = values(model, optimizer)
        handle = ckpt.save(1)
        optimizer.step()
        handle.wait(60)
    assert_file_holds(tmp_path, expected)


def test_p4_parameters_that_no_optimizer_here_owns_are_copied_at_the_call(tmp_path: Path) -> None:
    """Nothing holds back what changes them: no fence could be installed."""
    model, optimizer = trained()
    with ShardedCheckpointer(model, tmp_path) as ckpt:
        backward(model)
        expected = {n: t for n, t in values(model, optimizer).items() if n.startswith("model/")}
        handle = ckpt.save(1)
        optimizer.step()
        handle.wait(60)
    assert_file_holds(tmp_path, expected)


def test_check_snapshot_names_what_changed_without_a_fence(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckpt = ShardedCheckpointer(model, tmp_path, optimizer=optimizer, check_snapshot=True)
    ckpt.save(1).wait(60)
    real_start = ckpt._pool.start

    def start_late(*args: Any) -> Any:
        # The change lands between the call and the copy, as a forgotten fence would let it.
        with torch.no_grad():
            model.layers[4].bias.add_(1.0)
        return real_start(*args)

    ckpt._pool.start = start_late  # type: ignore[method-assign]
    handle = ckpt.save(2)
    with pytest.raises(SaveError, match=r"model/layers\.4\.bias changed between save\(2\)"):
        handle.wait(60)
    assert ckpt.all_steps() == [1]
    ckpt.close()
