"""The DeepSpeed modes that the tests run: a config, a model and a training step for each.

Models are tiny and odd-sized on purpose, so that padding exists, partitions cut through parameters
and ranks own unequal pieces. Every step seeds its data and the generators by step and rank, so a
resumed run can be compared with one that never stopped. Modes that use global process groups
(MoE, pipelines, hpZ) need a launch of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HIDDEN = 101, 37, 53
BATCH, LENGTH = 4, 5
Config = dict[str, Any]


# --- models ------------------------------------------------------------------------------------


class RunningMean(nn.Module):
    """Buffers of several kinds that depend on the data a rank has seen, and change the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().float().mean((0, 1)).to(self.mean.dtype))
                self.batches.add_(1)
        return x - self.mean.to(x.dtype)


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.running = RunningMean(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.running(self.norm(F.gelu(self.up(self.embed(tokens)))))
        return self.down(x)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.head(self.features(tokens)), labels)


class LoraNet(Net):
    """A frozen base with small trained matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.lora_a = nn.Linear(WIDTH, 3, bias=False)
        self.lora_b = nn.Linear(3, WIDTH, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().features(tokens)
        return x + self.lora_b(self.lora_a(x))


class ScaledNet(Net):
    """One trained element in a group of its own: other ranks' partitions of it are all padding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().features(tokens) * self.scale


class BlockSign(torch.optim.Optimizer):
    """State as 8-bit optimizers have it: a Python counter, bytes per element, floats per block."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["sign"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state["block"] = torch.zeros(-(-parameter.numel() // 8))
                state["step"] += 1
                flat = F.pad(parameter.grad.float().flatten(), (0, -parameter.numel() % 8))
                state["block"].mul_(0.9).add_(flat.view(-1, 8).abs().mean(1))
                up = (parameter.grad > 0) ^ (state["sign"] > 3)
                state["sign"].copy_((state["sign"] * 3 + up) % 7)
                scale = state["block"].repeat_interleave(8)[: parameter.numel()]
                change = scale.view(parameter.shape).clamp(max=1) / state["step"]
                signs = state["sign"].to(parameter.dtype) - 3
                parameter.sub_(group["lr"] * change.to(parameter.dtype) * signs)


def block_sign(model: nn.Module) -> torch.optim.Optimizer:
    return BlockSign([p for p in model.parameters() if p.requires_grad])


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that DeepSpeed takes for FusedAdam, so that FP16_Optimizer wraps it."""
    from deepspeed.ops.adam import FusedAdam

    class PlainFusedAdam(FusedAdam):  # type: ignore[misc]
        def __init__(self, params: Any) -> None:
            options = {"lr": 1e-2, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8}
            torch.optim.Optimizer.__init__(self, params, options | {"weight_decay": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group.setdefault("step", 0)
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    if not state:
                        state["step"] = 0
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
                    state["step"] += 1
                    first, second = state["exp_avg"], state["exp_avg_sq"]
                    first.lerp_(parameter.grad, 0.1)
                    second.mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                    by = second.sqrt().div_((1 - 0.99 ** state["step"]) ** 0.5).add_(group["eps"])
                    rate = group["lr"] / (1 - 0.9 ** state["step"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.addcdiv_(first, by, value=-rate)

        def zero_grad(self, set_to_none: bool = True) -> None:
            torch.optim.Optimizer.zero_grad(self, set_to_none)

    return PlainFusedAdam(two_groups(model))


class MoeNet(Net):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = nn.Sequential(nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=1, min_capacity=8)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.features(tokens)
        mixed, auxiliary, _ = self.moe(x)
        return loss_of(self.head(x + mixed), labels) + 0.01 * auxiliary.float()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.running = RunningMean(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.running(F.gelu(self.up(x))))


def _as_head(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight)


def pipeline_net() -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, tied_weight_attr="weight"),
        LayerSpec(Block),
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(Block),
        TiedLayerSpec(
            "embed", nn.Embedding, VOCAB, WIDTH, forward_fn=_as_head, tied_weight_attr="weight"
        ),
    ]
    return PipelineModule(
        layers=layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", base_seed=7
    )


# --- modes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """One way to train. ``wrapper`` is the class of ``engine.optimizer`` that it must give."""

    name: str
    config: Config
    wrapper: str
    model: Callable[[], nn.Module] = Net
    world_size: int = 2
    own_launch: bool = False
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    micro_batches: int = 1
    pipeline: bool = False

    def build(self, seed: int) -> Any:
        """A fresh engine with weights drawn from ``seed``. A collective."""
        import deepspeed

        if "fp16" in self.config or self._autocast_fp16():
            allow_fp16_on_cpu()
        torch.manual_seed(seed)
        model = self.model()
        _randomise(model, seed)
        parameters: Any = [p for p in model.parameters() if p.requires_grad]
        if self.groups is not None:
            parameters = self.groups(model)
        settings = copy.deepcopy(self.config)
        optimizer = None
        if self.optimizer is not None:
            del settings["optimizer"]
            optimizer, parameters = self.optimizer(model), None
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=parameters, config=settings
        )
        assert type(engine.optimizer).__name__ == self.wrapper, type(engine.optimizer)
        return engine

    def step(self, engine: Any, number: int) -> list[float]:
        """One optimizer step, number ``number`` of the run; the losses of its micro-batches."""
        if self.pipeline:
            torch.manual_seed(7919 * number + torch.distributed.get_rank())
            data = _batches(number, engine.grid.get_data_parallel_rank(), self.micro_batches)
            return [float(engine.train_batch(data_iter=data))]
        rank = torch.distributed.get_rank()
        torch.manual_seed(7919 * number + rank)
        losses = []
        for tokens, labels in _batches(number, rank, self.micro_batches):
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    def _autocast_fp16(self) -> bool:
        return self.config.get("torch_autocast", {}).get("dtype") == "float16"


def allow_fp16_on_cpu() -> None:
    """DeepSpeed's CPU accelerator refuses fp16 where oneDNN has none; torch itself can do it."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    decayed = [p for _, p in named if p.ndim > 1]
    plain = [p for _, p in named if p.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": 0.1, "label": "decayed"},
        {"params": plain, "weight_decay": 0.0, "lr": 3e-3, "label": "plain"},
    ]


def scale_apart(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name != "scale"]},
        {"params": [p for name, p in named if name == "scale"], "weight_decay": 0.0},
    ]


def _randomise(model: nn.Module, seed: int) -> None:
    """Makes weights depend on ``seed`` alone, also where a module seeds the generator itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Experts differ by rank, everything else must not.
            if not getattr(parameter, "allreduce", True):
                own = torch.Generator().manual_seed(
                    seed + 31 * torch.distributed.get_rank() + len(name)
                )
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=own))
            elif "tied" not in name:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            else:
                tied = torch.Generator().manual_seed(seed)
                parameter.copy_(torch.randn(parameter.shape, generator=tied))


def _batches(number: int, rank: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(104729 * number + rank)
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


ADAM: Config = {
    "type": "AdamW",
    "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True},
}
BF16: Config = {"bf16": {"enabled": True}}
FP16: Config = {
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1}
}
PRECISIONS: dict[str, Config] = {"fp32": {}, "bf16": BF16, "fp16": FP16}
FP32_ACCUMULATION: Config = {"data_types": {"grad_accum_dtype": "fp32"}}
CPU: Config = {"device": "cpu", "pin_memory": False}


def config(stage: int, *extra: Config, zero: Config | None = None) -> Config:
    base: Config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": copy.deepcopy(ADAM),
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-2,
                "warmup_num_steps": 3,
                "total_num_steps": 50,
            },
        },
        "zero_optimization": {"stage": stage, **(zero or {})},
        "steps_per_print": 10**9,
    }
    for part in extra:
        base |= copy.deepcopy(part)
    return base


_ZERO = {
    1: "DeepSpeedZeroOptimizer",
    2: "DeepSpeedZeroOptimizer",
    3: "DeepSpeedZeroOptimizer_Stage3",
}
_UNFUSED, _BF16 = "FP16_UnfusedOptimizer", "BF16_Optimizer"


def _wrapper(stage: int, precision: str) -> str:
    if stage:
        return _ZERO[stage]
    return "AdamW" if precision == "fp32" else _UNFUSED


def _modes() -> Iterator[Mode]:
    for stage in range(4):
        for precision, extra in PRECISIONS.items():
            wrapper = _wrapper(stage, precision)
            yield Mode(f"z{stage}-{precision}", config(stage, extra), wrapper)
    yield Mode("z1-bf16opt", config(1, BF16, FP32_ACCUMULATION), _BF16)
    sub_groups = config(3, BF16, zero={"sub_group_size": 2000})
    yield Mode("z3-subgroups", sub_groups, _ZERO[3])
    nothing_kept = config(3, BF16, zero={"stage3_param_persistence_threshold": 0})
    yield Mode("z3-persistence0", nothing_kept, _ZERO[3])
    for stage in range(4):
        wrapper = _wrapper(stage, "bf16")
        yield Mode(f"z{stage}-groups", config(stage, BF16), wrapper, groups=two_groups)
        yield Mode(f"z{stage}-lora", config(stage, BF16), wrapper, model=LoraNet)
        yield Mode(f"z{stage}-tied", config(stage, BF16), wrapper, model=tied_net)
    yield Mode("z0-fp32-groups", config(0), "AdamW", groups=two_groups)
    yield Mode("z0-fp32-lora", config(0), "AdamW", model=LoraNet)
    yield Mode("z1-bf16opt-groups", config(1, BF16, FP32_ACCUMULATION), _BF16, groups=two_groups)
    for stage in (0, 2, 3):
        twice = config(stage, BF16, {"gradient_accumulation_steps": 2})
        yield Mode(f"z{stage}-gas2", twice, _wrapper(stage, "bf16"), micro_batches=2)
    for stage in (1, 2):
        ordered = config(stage, BF16, zero={"round_robin_gradients": True})
        yield Mode(f"z{stage}-roundrobin", ordered, _ZERO[stage])
    aligned = config(2, BF16, zero={"parameter_alignment": True})
    yield Mode("z2-aligned", aligned, _ZERO[2])
    both = config(2, BF16, zero={"parameter_alignment": True, "round_robin_gradients": True})
    yield Mode("z2-aligned-roundrobin-groups", both, _ZERO[2], groups=two_groups)
    untested: Config = {"zero_allow_untested_optimizer": True}
    sgd: Config = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}
    for stage in (0, 1, 3):
        wrapper = _wrapper(stage, "bf16")
        yield Mode(f"z{stage}-sgd", config(stage, BF16, sgd, untested), wrapper)
    for stage in range(4):
        wrapper = "BlockSign" if stage == 0 else _ZERO[stage]
        settings = config(stage, untested)
        yield Mode(f"z{stage}-blocks", settings, wrapper, optimizer=block_sign)
    for precision in ("bf16", "fp16"):
        settings = config(0, PRECISIONS[precision])
        yield Mode(f"z0-{precision}-fused", settings, "FP16_Optimizer", optimizer=fused_adam)
    yield Mode("z1-fused", config(1, BF16, untested), _ZERO[1], optimizer=fused_adam)
    for stage, zero in ((1, {}), (3, {"sub_group_size": 1})):
        settings = config(stage, BF16, zero=zero)
        name = f"z{stage}-scale"
        yield Mode(name, settings, _ZERO[stage], model=ScaledNet, groups=scale_apart)
    adagrad: Config = {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}
    yield Mode("z2-adagrad", config(2, BF16, adagrad, untested), _ZERO[2])
    muon: Config = {
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 1e-2, "momentum": 0.95, "weight_decay": 0.01, "torch_adam": True},
        }
    }
    for stage in (1, 2, 3):
        zero = {"reduce_scatter": False} if stage == 3 else {}
        settings = config(stage, BF16, muon, untested, zero=zero)
        yield Mode(f"z{stage}-muon", settings, _ZERO[stage])
    for stage, dtype in ((1, "bfloat16"), (3, "bfloat16"), (0, "float16"), (2, "float16")):
        autocast: Config = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        yield Mode(f"z{stage}-autocast-{dtype}", config(stage, autocast), _wrapper(stage, "fp32"))
    any_adam: Config = {"zero_force_ds_cpu_optimizer": False}
    for stage in (1, 2, 3):
        offloaded = config(stage, BF16, any_adam, zero={"offload_optimizer": CPU})
        yield Mode(f"z{stage}-offload", offloaded, _ZERO[stage])
    all_offloaded = config(3, BF16, any_adam, zero={"offload_optimizer": CPU, "offload_param": CPU})
    yield Mode("z3-offload-params", all_offloaded, _ZERO[3])
    yield Mode("z3-offload-params-lora", all_offloaded, _ZERO[3], model=LoraNet)

    hpz = config(
        3, BF16, zero={"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    )
    yield Mode("z3-hpz", hpz, _ZERO[3], own_launch=True)
    yield from _moe_modes()
    yield from _pipeline_modes()


def tied_net() -> nn.Module:
    return Net(tied=True)


def moe_ep1() -> nn.Module:
    return MoeNet(1)


def moe_ep2() -> nn.Module:
    return MoeNet(2)


def _moe_modes() -> Iterator[Mode]:
    table = (
        ("z0-moe", config(0), "AdamW"),
        ("z0-moe-bf16", config(0, BF16), _UNFUSED),
        ("z1-moe", config(1, BF16), _ZERO[1]),
        ("z2-moe", config(2, BF16), _ZERO[2]),
        ("z1-moe-bf16opt", config(1, BF16, FP32_ACCUMULATION), _BF16),
    )
    for name, settings, wrapper in table:
        yield Mode(name, settings, wrapper, model=moe_ep2, own_launch=True)
        if name in ("z0-moe-bf16", "z1-moe", "z1-moe-bf16opt"):
            more = f"{name}-ep2dp2"
            yield Mode(more, settings, wrapper, model=moe_ep2, own_launch=True, world_size=4)
    yield Mode("z1-moe-ep1", config(1, BF16), _ZERO[1], model=moe_ep1, own_launch=True)


def _pipeline_modes() -> Iterator[Mode]:
    twice: Config = {"gradient_accumulation_steps": 2}
    table = (
        ("z0-pipe", config(0, twice), "AdamW"),
        ("z0-pipe-fp16", config(0, FP16, twice), _UNFUSED),
        ("z0-pipe-bf16", config(0, BF16, twice), _BF16),
        ("z1-pipe", config(1, twice), _ZERO[1]),
        ("z1-pipe-bf16", config(1, BF16, twice), _ZERO[1]),
        ("z1-pipe-bf16opt", config(1, BF16, FP32_ACCUMULATION, twice), _BF16),
    )
    for name, settings, wrapper in table:
        for world_size in (2, 4):
            if world_size == 4 and name not in ("z0-pipe", "z1-pipe-bf16"):
                continue
            yield Mode(
                name if world_size == 2 else f"{name}-pp2dp2",
                settings,
                wrapper,
                model=pipeline_net,
                own_launch=True,
                world_size=world_size,
                micro_batches=2,
                pipeline=True,
            )


MODES: dict[str, Mode] = {mode.name: mode for mode in _modes()}
