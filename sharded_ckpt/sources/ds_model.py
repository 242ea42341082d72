"""The parameters of a DeepSpeed engine's module: global names, shapes, and who holds copies.

A name here is unique over the whole job: experts carry their global number (DeepSpeed numbers the
experts of each rank from 0), and pipeline layers already do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sharded_ckpt.errors import UsageError
from sharded_ckpt.slices import Shape
from sharded_ckpt.sources import common

_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?)deepspeed_experts\.(?P<number>\d+)\.(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the module. ``shape`` is the whole parameter's, at ZeRO-3 too.

    ``expert_group`` names the expert-parallel group of an expert's parameter, else ``""``.
    ``writes`` is False for the copies of a tied weight that other pipeline stages hold.
    """

    fqn: str
    tensor: nn.Parameter
    shape: Shape
    expert_group: str
    writes: bool

    @property
    def numel(self) -> int:
        return int(getattr(self.tensor, "ds_numel", self.tensor.numel()))


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same copy of a parameter, and this rank's place among them."""

    rank: int
    size: int


class EngineModel:
    """The engine's module at one moment. Built afresh for every save and load."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.module: nn.Module = engine.module
        self._first_expert = _first_experts(self.module)
        named = common.named_parameters_once(self.module)
        self.params = [self._param(fqn, tensor) for fqn, tensor in named]
        self._by_id = {id(p.tensor): p for p in self.params}
        self._replicas: dict[str, Replicas] = {}

    def of(self, tensor: torch.Tensor) -> Param:
        """The parameter that the optimizer knows as ``tensor``. Raises :class:`UsageError`."""
        found = self._by_id.get(id(tensor))
        if found is None:
            raise UsageError(
                f"the optimizer trains a parameter of shape {list(tensor.shape)} that is not in "
                "engine.module, so it has no name; register it in the module"
            )
        return found

    def all_of(self, tensors: Sequence[torch.Tensor]) -> list[Param]:
        return [self.of(t) for t in tensors]

    def replicas(self, param: Param) -> Replicas:
        """Who else holds the same copy of ``param`` where nothing is partitioned."""
        found = self._replicas.get(param.expert_group)
        if found is None:
            group = _replica_group(self.engine, param.expert_group)
            found = Replicas(
                torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            )
            self._replicas[param.expert_group] = found
        return found

    def aliases(self) -> dict[str, str]:
        found = common.aliases(self.module)
        return {self.global_name(alias): self.global_name(fqn) for alias, fqn in found.items()}

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Persistent buffers by global name."""
        named = common.persistent_buffers(self.module)
        return [(self.global_name(fqn), tensor) for fqn, tensor in named]

    def global_name(self, fqn: str) -> str:
        """``fqn`` with the number of an expert counted over all ranks of its group."""
        match = _EXPERT.fullmatch(fqn)
        if match is None or match["layer"] not in self._first_expert:
            return fqn
        number = self._first_expert[match["layer"]] + int(match["number"])
        return f"{match['layer']}deepspeed_experts.{number}.{match['rest']}"

    def _param(self, fqn: str, tensor: nn.Parameter) -> Param:
        is_expert = not getattr(tensor, "allreduce", True)
        return Param(
            fqn=self.global_name(fqn),
            tensor=tensor,
            shape=tuple(getattr(tensor, "ds_shape", tensor.shape)),
            expert_group=str(getattr(tensor, "group_name", "")) if is_expert else "",
            writes=not getattr(tensor, "ds_pipe_replicated", False),
        )


def expert_groups(module: nn.Module) -> dict[str, int]:
    """``{expert-parallel group: size}`` of the module's mixture-of-experts layers."""
    from deepspeed.utils import groups

    names = {
        getattr(parameter, "group_name", "")
        for parameter in module.parameters()
        if not getattr(parameter, "allreduce", True)
    }
    return {name: int(groups._get_expert_parallel_world_size(name)) for name in sorted(names)}


def _first_experts(module: nn.Module) -> dict[str, int]:
    """Global number of the first expert of this rank, by the prefix of its list of experts."""
    found: dict[str, int] = {}
    for prefix, child in common.walk_modules(module):
        if "deepspeed_experts" not in child._modules:
            continue
        parameter = next(iter(child.parameters()), None)
        if parameter is None:
            continue
        from deepspeed.utils import groups

        rank = groups._get_expert_parallel_rank(parameter.group_name)
        found[prefix] = int(rank) * int(child.num_local_experts)
    return found


def _replica_group(engine: Any, expert_group: str) -> Any:
    if expert_group:
        from deepspeed.utils import groups

        return groups._get_expert_data_parallel_group(expert_group)
    # With sequence parallelism, weights are replicated over data x sequence ranks.
    group = getattr(engine, "seq_data_parallel_group", None)
    return engine.data_parallel_group if group is None else group
