"""The DeepSpeed source: bit-exact resume (P3) in every mode, refusals, fences, overrides.

Engines run in launches of their own (``dist/ds_source_probe.py``, ``dist/ds_source_cases.py``);
what needs no engine is tested here directly.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharded_ckpt.errors import UnsupportedError
from sharded_ckpt.sources import ds_weights
from sharded_ckpt.sources.deepspeed import _wrap_method
from sharded_ckpt.sources.ds_model import Param
from sharded_ckpt.sources.ds_refusals import REFUSALS, refuse
from sharded_ckpt.sources.ds_wrappers import _cut, _offsets, wrap
from tests.dist.ds_modes import MODES
from tests.dist.launch import launch

DIST = Path(__file__).parent / "dist"
# What every run shows; the others run with --slow.
CORE = [
    "z0-fp32",
    "z0-bf16",
    "z1-bf16",
    "z1-fp16",
    "z1-bf16opt",
    "z2-bf16",
    "z2-roundrobin",
    "z2-gas2",
    "z2-lora",
    "z3-fp32",
    "z3-bf16",
    "z3-groups",
    "z3-lora",
    "z0-bf16-fused",
    "z1-scale",
    "z3-blocks",
]
OWN_LAUNCH = [name for name, mode in MODES.items() if mode.own_launch]
BATCH = 9


def run(script: str, nproc: int, names: list[str]) -> None:
    result = launch(DIST / script, nproc, names, via="torchrun", timeout_s=240.0)
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"mode"')]
    passed = [found["mode"] for found in map(json.loads, lines) if found["ok"]]
    assert passed == names, result.describe()


def test_p3_core_modes() -> None:
    run("ds_source_probe.py", 2, CORE)


def _batches() -> list[list[str]]:
    rest = [name for name, mode in MODES.items() if not mode.own_launch and name not in CORE]
    return [rest[i : i + BATCH] for i in range(0, len(rest), BATCH)]


@pytest.mark.slow
@pytest.mark.parametrize("names", _batches(), ids=lambda names: names[0])
def test_p3_more_modes(names: list[str]) -> None:
    run("ds_source_probe.py", 2, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_LAUNCH)
def test_p3_modes_with_global_groups(name: str) -> None:
    run("ds_source_probe.py", MODES[name].world_size, [name])


def test_p5_other_stages_and_wrappers() -> None:
    pairs = [
        "z3-bf16:z1-bf16",
        "z2-bf16:z3-bf16",
        "z2-roundrobin:z3-subgroups",
        "z2-aligned:z1-bf16opt",
        "z3-groups:z2-groups",
        "z3-bf16:z2-roundrobin",
        "z0-bf16:z3-bf16",
        "z3-fp32:z1-fp32",
        "z1-fp32:z0-fp32",
        "z0-fp32:z3-fp32",
        "z2-lora:z3-lora",
        "z0-lora:z1-lora",
    ]
    run("ds_source_cases.py", 2, [f"cross:{pair}" for pair in pairs])


def test_what_is_not_plain_resume() -> None:
    cases = [
        "edited:z0-bf16",
        "edited:z1-bf16",
        "edited:z3-persistence0",
        "edited:z1-bf16opt",
        "parts:z2-bf16",
        "parts:z3-bf16",
        "unstepped:z1-bf16",
        "unstepped:z0-fp32",
        "wrong:z2-bf16",
    ]
    run("ds_source_cases.py", 2, cases)


# --- weights and their masters -----------------------------------------------------------------


def test_a_cast_is_told_bit_by_bit() -> None:
    master = torch.tensor([1.0, float("nan"), -0.0, 3.0e38])
    weights = master.to(torch.bfloat16)
    assert ds_weights.is_cast(master, weights)
    other = weights.clone()
    other[2] = 0.0  # equal to -0.0, but not the same bits
    assert not ds_weights.is_cast(master, other)
    assert not ds_weights.is_cast(master + 1, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_override_keeps_what_was_not_read(dtype: torch.dtype) -> None:
    live = torch.arange(5.0).to(dtype)
    scratch = ds_weights.marked(live, dtype)
    scratch[1:3] = torch.tensor([float("nan"), -7.0])
    ds_weights.apply_override(scratch, live)
    assert live[[0, 3, 4]].tolist() == [0.0, 3.0, 4.0]
    assert live[1].isnan()
    assert live[2] == -7.0


# --- layout of flat groups ----------------------------------------------------------------------


def _param(name: str, numel: int) -> Param:
    tensor = torch.nn.Parameter(torch.zeros(numel))
    return Param(name, tensor, (numel,), expert_group="", writes=True)


def test_pieces_skip_padding_and_cut_through_parameters() -> None:
    params = [_param("a", 5), _param("b", 4)]
    assert _offsets(params) == [0, 5]
    first = _cut(params, [0, 8], 0, 6)  # "b" is aligned to 8: three elements of padding before it
    second = _cut(params, [0, 8], 6, 6)
    assert [(p.param.fqn, p.start, p.numel, p.at) for p in first] == [("a", 0, 5, 0)]
    assert [(p.param.fqn, p.start, p.numel, p.at) for p in second] == [("b", 0, 4, 2)]
    through = _cut(params, _offsets(params), 3, 4)
    assert [(p.param.fqn, p.start, p.numel, p.at) for p in through] == [
        ("a", 3, 2, 0),
        ("b", 0, 2, 2),
    ]


# --- refusals -----------------------------------------------------------------------------------


class _Adam(torch.optim.AdamW):
    """A real optimizer for the stand-in engines of modes that need other hardware."""


def _engine(zero: dict[str, Any] | None = None, **fields: Any) -> SimpleNamespace:
    optimizer = _Adam([torch.nn.Parameter(torch.zeros(2))])
    for key in ("swap_optimizer", "backup_optimizer", "params_in_nvme_and_cpu"):
        if key in fields:
            setattr(optimizer, key, fields.pop(key))
    config = SimpleNamespace(zero_config=SimpleNamespace(**(zero or {})))
    base = {"optimizer": optimizer, "basic_optimizer": optimizer, "_config": config, "mpu": None}
    return SimpleNamespace(**(base | {"module": torch.nn.Linear(2, 2)} | fields))


class ZenFlowZeroOptimizerSequential(_Adam): ...


class SuperOffloadOptimizer_Stage3(_Adam): ...  # noqa: N801


class OnebitAdam(_Adam): ...


class AutoEPMoELayer(torch.nn.Linear): ...


def _of(kind: type[_Adam]) -> _Adam:
    return kind([torch.nn.Parameter(torch.zeros(2))])


def _quantized() -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.weight.ds_tensor = SimpleNamespace(ds_quant_scale=1)
    return module


NVME = {"offload_optimizer": SimpleNamespace(device="nvme")}
NVME_PARAMS = {"offload_param": SimpleNamespace(device="nvme")}
SUPER = {"offload_optimizer": SimpleNamespace(device="cpu", super_offload=True)}
TWO_WAYS = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
MODEL_PARALLEL = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
REFUSED = [
    ("optimizer", _engine(optimizer=None)),
    ("zero_optimization.offload_optimizer.device = nvme", _engine(NVME)),
    ("zero_optimization.offload_optimizer.device = nvme", _engine(swap_optimizer=True)),
    ("zero_optimization.offload_param.device = nvme", _engine(NVME_PARAMS)),
    ("zero_optimization.offload_param.device = nvme", _engine(params_in_nvme_and_cpu=True)),
    ("zero_optimization.offload_optimizer.super_offload", _engine(SUPER)),
    (
        "zero_optimization.offload_optimizer.super_offload",
        _engine(optimizer=_of(SuperOffloadOptimizer_Stage3)),
    ),
    ("zero_optimization.zenflow", _engine({"zenflow": SimpleNamespace()})),
    ("zero_optimization.zenflow", _engine(optimizer=_of(ZenFlowZeroOptimizerSequential))),
    ("zero_optimization.offload_optimizer.ratio < 1", _engine(backup_optimizer=_of(_Adam))),
    (
        "zero_optimization.zero_quantized_nontrainable_weights",
        _engine({"zero_quantized_nontrainable_weights": True}, module=_quantized()),
    ),
    ("expert_parallel.autoep_size", _engine(module=AutoEPMoELayer(2, 2))),
    (
        "tensor_parallel.autotp_size, or mpu with tensor parallelism",
        _engine(autotp_size=lambda: 2),
    ),
    ("tensor_parallel.autotp_size, or mpu with tensor parallelism", _engine(mpu=TWO_WAYS)),
    ("tensor_parallel.autotp_size, or mpu with tensor parallelism", _engine(mpu=MODEL_PARALLEL)),
    (
        "optimizer.type = OneBitAdam, OneBitLamb, ZeroOneAdam",
        _engine(basic_optimizer=_of(OnebitAdam)),
    ),
]


@pytest.mark.parametrize(("key", "engine"), REFUSED)
def test_what_cannot_be_captured_is_refused_by_its_config_key(key: str, engine: Any) -> None:
    refusal = next(r for r in REFUSALS if r.key == key)
    with pytest.raises(UnsupportedError) as raised:
        refuse(engine)
    message = str(raised.value)
    assert key in message
    assert refusal.why in message
    assert refusal.instead in message


def test_every_refusal_is_tested() -> None:
    assert {r.key for r in REFUSALS} == {key for key, _ in REFUSED}


def test_an_ordinary_engine_is_not_refused() -> None:
    cpu = {"offload_optimizer": SimpleNamespace(device="cpu", super_offload=False)}
    refuse(_engine())
    refuse(_engine(cpu, mpu=SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 1)))


def test_an_unknown_wrapper_is_refused_by_its_class() -> None:
    with pytest.raises(UnsupportedError, match=r"types\.SimpleNamespace is not known"):
        wrap(_engine(optimizer=SimpleNamespace()))


# --- fence --------------------------------------------------------------------------------------


class _Steps:
    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self, scale: int) -> int:
        self.log.append("step")
        return 2 * scale


def test_a_fence_runs_before_the_method_and_leaves_no_trace() -> None:
    owner = _Steps()
    remove = _wrap_method(owner, "step", owner.step, lambda: owner.log.append("fence"))
    assert owner.step(scale=4) == 8
    assert owner.log == ["fence", "step"]
    remove()
    assert "step" not in vars(owner)
    assert owner.step(1) == 2
    assert owner.log == ["fence", "step", "step"]


def test_a_fence_below_a_later_wrapper_is_silent_once_removed() -> None:
    owner = _Steps()
    remove = _wrap_method(owner, "step", owner.step, lambda: owner.log.append("fence"))
    remove_later = _wrap_method(owner, "step", owner.step, lambda: owner.log.append("later"))
    remove()
    owner.step(1)
    assert owner.log == ["later", "step"]
    remove_later()
    assert owner.step(1) == 2
    assert owner.log == ["later", "step", "step"]
