"""Small trainings, one for each FSDP2, DDP and plain mode that must resume exactly.

``MODES[name].build(seed)`` needs an initialised gloo group of ``world_size`` ranks (none for
world size 1) and gives model, optimizer and scheduler; ``train_step`` runs one step of any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None


@dataclass(frozen=True)
class Mode:
    """One way to train.

    ``plain_grads`` are averaged by hand: nothing else reduces them. ``same_data`` consecutive ranks
    train on the same data, as those of one tensor-parallel group must.
    """

    build: Callable[[int], Training]
    world_size: int = 2
    plain_grads: bool = False
    same_data: int = 1


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.module = nn.Linear(hidden, width)  # a submodule that is really called "module"
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.module(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Uneven and (on two ranks) empty shards, tied and frozen weights, every kind of buffer."""

    def __init__(self, width: int = 5, hidden: int = 7, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width, hidden), Block(width, hidden)])
        self.norm = nn.BatchNorm1d(width)
        self.gain = nn.Parameter(torch.ones(1, width))  # one row: empty on all ranks but the first
        self.frozen = nn.Parameter(torch.randn(3, width), requires_grad=False)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.gain + self.frozen.sum(0))


def train_step(mode: Mode, training: Training, step: int) -> float:
    """One step on data that depends on step and rank. Returns this rank's loss."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank // mode.same_data)
    tokens = torch.randint(0, 11, (6, 4), generator=generator)
    labels = torch.randint(0, 11, (6,), generator=generator)
    loss = nn.functional.cross_entropy(training.model(tokens).float(), labels)
    loss.backward()
    if mode.plain_grads:
        for parameter in training.model.parameters():
            if type(parameter.data) is torch.Tensor and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
    training.optimizer.step()
    training.optimizer.zero_grad()
    if training.scheduler is not None:
        training.scheduler.step()
    return float(loss.detach())


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW with two groups, of which one has no weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
        **options,
    )


def _cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def _shard(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)  # type: ignore[return-value]


def _seeded(seed: int, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def _fsdp(seed: int) -> Training:
    model = _shard(_seeded(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = _adamw(model)
    return Training(model, optimizer, _cosine(optimizer))


def _fused(seed: int) -> Training:
    model = _shard(_seeded(seed))
    return Training(model, _adamw(model, fused=True))


def _foreach_amsgrad(seed: int) -> Training:
    model = _shard(_seeded(seed), reshard_after_forward=False)
    return Training(model, _adamw(model, foreach=True, amsgrad=True))


def _sgd(seed: int) -> Training:
    model = _shard(_seeded(seed))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def _part_of_parameters(seed: int) -> Training:
    model = _shard(_seeded(seed))
    trained = [p for block in model.blocks for p in block.parameters()]
    return Training(model, torch.optim.Adam(trained, lr=1e-2))


def _cpu_offload(seed: int) -> Training:
    model = _shard(_seeded(seed), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return Training(model, _adamw(model))


def _mixed_precision(seed: int) -> Training:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Batch norm computes in fp32, as its running averages are.
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    model = _seeded(seed)
    fully_shard(model.norm, mp_policy=exact)
    _shard(model, mp_policy=policy)
    return Training(model, _adamw(model))


def _bf16(seed: int) -> Training:
    model = _shard(_seeded(seed).to(torch.bfloat16))
    return Training(model, _adamw(model))


def _compiled(seed: int) -> Training:
    model = _shard(_seeded(seed))
    compiled = torch.compile(model, backend="eager")
    return Training(compiled, _adamw(model))


def _activation_checkpointed(seed: int) -> Training:
    model = _seeded(seed)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(torch.compile(block, backend="eager"))
    model = _shard(model)
    return Training(model, _adamw(model))


def _plain_outside(seed: int) -> Training:
    """Only the blocks are sharded: all else is replicated, and reduced by hand."""
    model = _seeded(seed)
    for block in model.blocks:
        fully_shard(block)
    return Training(model, _adamw(model, foreach=False))


def _hsdp(seed: int) -> Training:
    world = dist.get_world_size()
    shape = (2, world // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = _shard(_seeded(seed), mesh=mesh)
    return Training(model, _adamw(model))


def _tensor_parallel(seed: int) -> Training:
    """Two tensor-parallel ranks in each of ``world / 2`` data-parallel ones; embeddings are not
    in the plan, so each tensor-parallel rank has them."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _seeded(seed, width=6, hidden=8)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "module": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    _shard(model, mesh=mesh["dp"])
    return Training(model, _adamw(model, foreach=False))


def _ddp(seed: int) -> Training:
    model = DistributedDataParallel(_seeded(seed))
    optimizer = _adamw(model)
    return Training(model, optimizer, _cosine(optimizer))


def _ddp_compiled(seed: int) -> Training:
    model = torch.compile(DistributedDataParallel(_seeded(seed)), backend="eager")
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def _plain(seed: int) -> Training:
    model = _seeded(seed)
    optimizer = _adamw(model)
    return Training(model, optimizer, _cosine(optimizer))


MODES: dict[str, Mode] = {
    "fsdp": Mode(_fsdp),
    "fsdp-fused": Mode(_fused),
    "fsdp-foreach-amsgrad": Mode(_foreach_amsgrad),
    "fsdp-sgd": Mode(_sgd),
    "fsdp-part-of-parameters": Mode(_part_of_parameters),
    "fsdp-cpu-offload": Mode(_cpu_offload),
    "fsdp-mixed-precision": Mode(_mixed_precision),
    "fsdp-bf16": Mode(_bf16),
    "fsdp-compiled": Mode(_compiled),
    "fsdp-activation-checkpointed": Mode(_activation_checkpointed),
    "fsdp-plain-outside": Mode(_plain_outside, plain_grads=True),
    "hsdp-2x1": Mode(_hsdp),
    "ddp": Mode(_ddp),
    "ddp-compiled": Mode(_ddp_compiled),
    "fsdp-3": Mode(_fsdp, world_size=3),
    "hsdp-2x2": Mode(_hsdp, world_size=4),
    "tensor-parallel-2x2": Mode(_tensor_parallel, world_size=4, same_data=2),
    "plain": Mode(_plain, world_size=1),
}
