"""Plain modules in one process: exact resume with each optimizer, and what is refused (P3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sharded_ckpt import tree
from sharded_ckpt.errors import StateMismatch, UnsupportedError, UsageError
from sharded_ckpt.slices import Entry
from sharded_ckpt.sources.base import Parts
from sharded_ckpt.sources.plain import PlainSource
from sharded_ckpt.sources.select import select_source
from tests.dist.fsdp_modes import MODES, Model, Training, train_step

MODE = MODES["plain"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def source_of(training: Training) -> Any:
    return select_source(training.model, training.optimizer, training.scheduler)


def through_json(state: Any) -> Any:
    encoded = tree.encode(state, path="state", prefix="state/")
    tensors = {name: torch.as_tensor(t).clone() for name, t in encoded.tensors.items()}
    return tree.decode(json.loads(json.dumps(encoded.tree)), tensors.__getitem__)


class Saved:
    """What a step on disk would hold."""

    def __init__(self, training: Training) -> None:
        source = source_of(training)
        slices = source.slices()
        self.tensors = {s.entry.name: s.tensor.clone() for s in slices}
        self.entries: dict[str, Entry] = {s.entry.name: s.entry for s in slices}
        assert len(self.entries) == len(slices)
        self.rank_state = through_json(source.rank_state())
        self.shared_state = through_json(source.shared_state())

    def load(self, training: Training, parts: Parts | None = None) -> None:
        source, parts = source_of(training), parts or Parts()
        for target in source.targets(self.entries, parts):
            saved = self.entries[target.entry.name]
            assert (saved.shape, saved.dtype) == (target.entry.shape, target.entry.dtype)
            target.tensor.copy_(self.tensors[target.entry.name])
        source.restore(self.rank_state, self.shared_state, parts)

    def same(self, other: Saved) -> bool:
        states = repr((self.rank_state, self.shared_state))
        return (
            self.entries == other.entries
            and states == repr((other.rank_state, other.shared_state))
            and all(torch.equal(t, other.tensors[name]) for name, t in self.tensors.items())
        )


def train(training: Training, steps: range) -> list[float]:
    return [train_step(MODE, training, step) for step in steps]


def build(seed: int, optimizer: Callable[[list[nn.Parameter]], Any]) -> Training:
    torch.manual_seed(seed)
    model = Model()
    return Training(model, optimizer([p for p in model.parameters() if p.requires_grad]))


class Packed(torch.optim.SGD):
    """Keeps state that is not shaped as its parameter, and Python numbers (as 8-bit Adam does)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(codes=torch.zeros(p.numel() + 3, dtype=torch.uint8), calls=0)
                    state.update(last=None, kind="packed")
                state["calls"] += 1
                state["codes"] += state["calls"]
                p.add_(p.grad, alpha=-group["lr"] / float(state["codes"][0]))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "packed": lambda p: Packed(p, lr=1e-2),
}


@pytest.mark.case("B65", "B67")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_p3_training_goes_on_bit_for_bit(name: str) -> None:
    # B65, B67: state of an optimizer that never stepped is created, of whatever shape it is.
    first = build(1, OPTIMIZERS[name])
    train(first, range(3))
    saved = Saved(first)
    losses = train(first, range(3, 6))
    for warm_steps in (0, 2):
        second = build(2, OPTIMIZERS[name])
        train(second, range(90, 90 + warm_steps))
        saved.load(second)
        assert Saved(second).same(saved)
        assert train(second, range(3, 6)) == losses
        assert Saved(second).same(Saved(first))


def test_saving_changes_nothing() -> None:
    training = build(1, OPTIMIZERS["adamw"])
    source = source_of(training)
    source.slices()
    source.rank_state()
    assert not training.optimizer.state


def test_back_to_before_the_first_step() -> None:
    saved = Saved(MODE.build(1))
    training = MODE.build(2)
    train(training, range(2))
    saved.load(training)
    assert not training.optimizer.state
    assert Saved(training).same(saved)


def test_state_that_was_not_saved_is_dropped() -> None:
    first = build(1, OPTIMIZERS["adamw"])
    train(first, range(2))
    saved = Saved(first)
    second = build(2, OPTIMIZERS["adamw-foreach"])  # amsgrad: one more tensor per parameter
    train(second, range(2))
    saved.load(second)
    keys = {frozenset(state) for state in second.optimizer.state.values()}
    assert keys == {frozenset({"step", "exp_avg", "exp_avg_sq"})}
    assert train(second, range(2, 4)) == train(first, range(2, 4))


@pytest.mark.case("B80", "B242")
def test_learning_rates_go_on_through_the_scheduler() -> None:
    # B80, B242, B243: the scheduler must still drive the optimizer's own groups.
    first = MODE.build(1)
    train(first, range(3))
    saved = Saved(first)
    second = MODE.build(2)
    groups = list(second.optimizer.param_groups)
    saved.load(second)
    assert all(a is b for a, b in zip(groups, second.optimizer.param_groups, strict=True))
    rates = []
    for training in (first, second):
        rates.append([])
        for step in range(3, 8):
            train(training, range(step, step + 1))
            rates[-1].append([group["lr"] for group in training.optimizer.param_groups])
    assert rates[0] == rates[1]
    assert len({tuple(r) for r in rates[0]}) == 5


@pytest.mark.case("B170")
def test_moments_follow_names_when_the_order_changes() -> None:
    # B170: two equal-shaped layers whose order in the optimizer is swapped.
    def backwards(parameters: list[nn.Parameter]) -> Any:
        return torch.optim.Adam(parameters[::-1], lr=1e-2)

    first = build(1, lambda p: torch.optim.Adam(p, lr=1e-2))
    train(first, range(2))
    saved = Saved(first)
    second = build(2, backwards)
    saved.load(second)
    for (_, a), (_, b) in zip(
        first.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        if a.requires_grad:
            state = second.optimizer.state[b]
            assert torch.equal(first.optimizer.state[a]["exp_avg"], state["exp_avg"])


def test_another_optimizer_is_refused_before_anything_changes() -> None:
    saved = Saved(build(1, OPTIMIZERS["adamw"]))
    other = build(2, OPTIMIZERS["sgd"])
    with pytest.raises(StateMismatch, match="saved with optimizer AdamW, this one is SGD"):
        source_of(other).check_saved(saved.rank_state, saved.shared_state, Parts())
    saved.load(other, Parts(optimizer=False))
    assert other.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_scheduler_on_one_side_only_is_told() -> None:
    saved = Saved(MODE.build(1))
    training = MODE.build(2)
    training.scheduler = None
    with pytest.raises(StateMismatch, match="scheduler was saved, but none was given"):
        source_of(training).check_saved(saved.rank_state, saved.shared_state, Parts())
    source_of(training).check_saved(saved.rank_state, saved.shared_state, Parts(scheduler=False))


def test_a_refused_load_leaves_the_optimizer_as_it_was() -> None:
    first = build(1, OPTIMIZERS["adamw"])
    train(first, range(1))
    saved = Saved(first)
    second = build(2, OPTIMIZERS["adamw"])
    source_of(second).targets(saved.entries, Parts())
    assert not second.optimizer.state


def test_parts_left_out_stay_as_they_are() -> None:
    first = MODE.build(1)
    train(first, range(2))
    saved = Saved(first)
    second = MODE.build(2)
    train(second, range(5, 6))
    before = Saved(second)
    saved.load(second, Parts(weights=False, scheduler=False))
    after = Saved(second)
    assert after.shared_state == before.shared_state
    for name, tensor in after.tensors.items():
        expected = saved if name.startswith("optim/") else before
        assert torch.equal(tensor, expected.tensors[name]), name


def test_a_saved_master_is_what_fills_a_parameter() -> None:
    model = nn.Linear(2, 2)
    saved = {
        f"{kind}/{name}": Entry(f"{kind}/{name}", dtype, tuple(p.shape), s.entry.region)
        for s, (name, p) in zip(PlainSource(model).slices(), model.named_parameters(), strict=True)
        for kind, dtype in (("master", "F32"), ("model", "BF16"))
    }
    names = [t.entry.name for t in PlainSource(model).targets(saved, Parts())]
    assert names == ["master/weight", "master/bias"]


def test_a_tied_parameter_loads_from_its_other_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    (stored,) = PlainSource(model).slices()
    assert stored.entry.name == "model/a.weight"
    saved = Entry("model/b.weight", "F32", (2, 2), stored.entry.region)
    (target,) = PlainSource(model).targets({"model/b.weight": saved}, Parts())
    assert target.entry.name == "model/b.weight"


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused"])
def test_the_fence_comes_first_and_once_a_step(name: str) -> None:
    training = build(1, OPTIMIZERS[name])
    order: list[str] = []
    training.optimizer.register_step_pre_hook(lambda *_: order.append("hook"))
    weight = next(training.model.parameters())
    start = weight.detach().clone()

    def fence() -> None:
        assert torch.equal(weight, start)
        order.append("fence")

    remove = source_of(training).install_fence(fence)
    train(training, range(1))
    assert order == ["fence", "hook"]
    remove()
    train(training, range(1))
    assert order == ["fence", "hook", "hook"]


def test_embeddings_with_max_norm_are_copied_at_once() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    eager = {s.entry.name for s in PlainSource(model, optimizer).slices() if s.eager}
    assert eager == {"model/0.weight"}


def test_parameters_that_nothing_here_can_hold_back_are_copied_at_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters())
    for source, expected in (
        (PlainSource(model, optimizer), {"model/1.weight", "model/1.bias"}),
        (PlainSource(model), {f"model/{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}),
    ):
        assert {s.entry.name for s in source.slices() if s.eager} == expected


# --- refused by name -----------------------------------------------------------------------------


class Wrapper:
    """Stands for the optimizer wrappers of training frameworks."""


@pytest.mark.parametrize(
    ("optimizer", "error", "words"),
    [
        (lambda p: [torch.optim.SGD(p)], UnsupportedError, "several optimizers"),
        (lambda p: Wrapper(), UsageError, "Wrapper, expected a torch.optim.Optimizer"),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(3))]), UsageError, "not the model's"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(
    optimizer: Any, error: type[Exception], words: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=words):
        select_source(model, optimizer(model.parameters()))


def test_state_outside_of_parameters_is_refused() -> None:
    training = build(1, OPTIMIZERS["sgd"])
    training.optimizer.state["global"] = {"step": 3}
    with pytest.raises(UnsupportedError, match="state under 'global'"):
        source_of(training)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Stands for torch's, which needs several ranks."""


@pytest.mark.case("B130")
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, ZeroRedundancyOptimizer])
def test_optimizers_with_state_of_their_own_are_refused_early(kind: type) -> None:
    # B130: at construction, and not at the end of training.
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=f"optimizer {kind.__name__} cannot be captured"):
        select_source(model, kind(model.parameters(), lr=0.1))


def test_models_that_cannot_be_captured_are_refused() -> None:
    with pytest.raises(UsageError, match="got dict"):
        select_source({})
    with pytest.raises(UnsupportedError, match="DataParallel is not supported"):
        select_source(DataParallel(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="meta device"):
        select_source(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match="without state_dict and load_state_dict"):
        select_source(nn.Linear(2, 2), scheduler=object())


class FullyShardedDataParallel(nn.Module):
    """Stands for FSDP1, which is told by its name: the real one warns and needs process groups."""


def test_fsdp1_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="fully_shard"):
        select_source(nn.Sequential(FullyShardedDataParallel()))


def test_ddp_around_a_part_of_the_model_is_refused(one_rank: None) -> None:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="part of the model"):
        select_source(model)


def test_ddp_that_keeps_state_of_its_own_is_refused(one_rank: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert select_source(ddp).kind == "plain"
    state = powerSGD_hook.PowerSGDState(None)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(UnsupportedError, match="PowerSGDState"):
        select_source(ddp)


def test_ddp_that_ignores_trained_parameters_is_refused(one_rank: None) -> None:
    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    with pytest.raises(UnsupportedError, match=r"ignore trained parameters \(bias\)"):
        select_source(DistributedDataParallel(model))
