"""A module sharded by FSDP2 (``fully_shard``), alone, hybrid (HSDP) or with tensor parallelism."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sharded_ckpt.errors import UsageError
from sharded_ckpt.sources import common, mesh
from sharded_ckpt.sources.base import State
from sharded_ckpt.sources.bound import Bound
from sharded_ckpt.sources.module import ModuleSource


class FsdpSource(ModuleSource):
    """Each rank's blocks of the parameters and of their optimizer state.

    Blocks that replicas share, and plain parameters outside of every mesh, are cut by bytes over
    the ranks that hold them. Runs no collective and never calls ``state_dict``, whose hooks would
    reshard the module.
    """

    kind = "fsdp2"

    def _bind(self) -> list[Bound]:
        self._check_sharded()
        return super()._bind()

    def check_can_save(self) -> None:
        """Raises ``UsageError`` while parameters are gathered: that is within a training step."""
        self._check_sharded()

    def _check_sharded(self) -> None:
        gathered = [
            prefix.rstrip(".") or "the root module"
            for prefix, module in common.walk_modules(self.model)
            if isinstance(module, FSDPModule) and any(not _is_sharded(g) for g in _groups(module))
        ]
        if gathered:
            raise UsageError(
                f"the parameters of {', '.join(gathered[:4])} are gathered (unsharded) now: this "
                "is not the end of a training step; call this after optimizer.step() and before "
                "the next forward, or call reshard() on the model after an evaluation"
            )

    def _model_dtypes(self) -> Mapping[str, torch.dtype]:
        found: dict[str, torch.dtype] = {}
        policies: list[tuple[str, torch.dtype | None]] = [
            (prefix, getattr(_state(module)._mp_policy, "param_dtype", None))
            for prefix, module in common.walk_modules(self.model)
            if isinstance(module, FSDPModule)
        ]
        for fqn, parameter in common.named_parameters_once(self.model):
            if not isinstance(parameter, DTensor) or not parameter.dtype.is_floating_point:
                continue
            # The innermost module that shards a parameter decides.
            near = max((p for p in policies if fqn.startswith(p[0])), key=_depth, default=None)
            if near is not None and near[1] not in (None, parameter.dtype):
                found[fqn] = near[1]
        return found

    def describe(self) -> State:
        cuts = {
            json.dumps(mesh.describe(p), sort_keys=True)
            for _, p in common.named_parameters_once(self.model)
            if isinstance(p, DTensor)
        }
        return {**super().describe(), "cuts": [json.loads(cut) for cut in sorted(cuts)]}

    def _opaque_cut(self) -> State:
        return self.describe()


def _depth(policy: tuple[str, Any]) -> int:
    return len(policy[0])


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _groups(module: nn.Module) -> Iterator[Any]:
    """Groups of parameters that ``module`` gathers together; torch has had one or several."""
    state = _state(module)
    several = getattr(state, "_fsdp_param_groups", None)
    yield from several if several is not None else filter(None, [state._fsdp_param_group])


def _is_sharded(group: Any) -> bool:
    return bool(group._sharded_state.name == "SHARDED")
