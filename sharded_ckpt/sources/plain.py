"""A module in one process, or replicated over all ranks by ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sharded_ckpt.errors import UnsupportedError, UsageError
from sharded_ckpt.sources import common
from sharded_ckpt.sources.module import ModuleSource

# State of these communication hooks lives outside the model and the optimizer, on each rank.
_STATEFUL_HOOKS = ("PowerSGDState", "PostLocalSGDState", "HierarchicalSGDState")


class PlainSource(ModuleSource):
    """Parameters and optimizer state that every rank holds whole.

    With DDP they are cut by bytes over the ranks, so that each writes an equal share; a load gives
    every rank everything. Buffers are each rank's own.
    """

    kind = "plain"

    def _check_model(self) -> None:
        modules = [module for _, module in common.walk_modules(self.model)]
        if any(isinstance(m, DataParallel) for m in modules):
            raise UnsupportedError(
                "torch.nn.DataParallel is not supported; use DistributedDataParallel, or pass the "
                "module inside it"
            )
        outer = next((m for m in _wrappers(self.model) if _is_ddp(m)), None)
        if any(_is_ddp(m) and m is not outer for m in modules):
            raise UnsupportedError(
                "DistributedDataParallel around a part of the model leaves the rest different on "
                "each rank; wrap the whole model"
            )
        if outer is not None:
            _check_ddp(outer)
        elif self.world_size > 1:
            raise UsageError(
                f"the model is a plain {type(self.model).__name__} on {self.world_size} ranks, "
                "which nothing keeps equal; wrap it in DistributedDataParallel or fully_shard, and "
                "pass the wrapped model"
            )


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model and, while it is a wrapper, what it wraps."""
    for prefix, module in common.walk_modules(model):
        if prefix:
            return
        yield module


def _check_ddp(ddp: Any) -> None:
    for _, state in getattr(ddp, "_comm_hooks", ()):
        if type(state).__name__ in _STATEFUL_HOOKS:
            raise UnsupportedError(
                f"the DDP communication hook with {type(state).__name__} keeps state on each rank "
                "that cannot be captured; register a hook without state"
            )
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    trained = [n for n, p in ddp.module.named_parameters() if n in ignored and p.requires_grad]
    if trained:
        raise UnsupportedError(
            f"DDP is told to ignore trained parameters ({', '.join(trained[:8])}), which then "
            "differ between ranks; freeze them or let DDP reduce them"
        )
