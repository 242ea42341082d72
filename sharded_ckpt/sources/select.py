"""Which source fits a training object."""

from __future__ import annotations

from typing import Any

from sharded_ckpt.errors import UnsupportedError, UsageError
from sharded_ckpt.sources.base import Source


def select_source(engine_or_model: Any, optimizer: Any = None, scheduler: Any = None) -> Source:
    """The source of a DeepSpeed engine, an FSDP2 model, a DDP model or a plain module.

    Raises ``UsageError`` for what is neither, ``UnsupportedError`` for FSDP1 and other wrappers
    that cannot be captured yet.
    """
    if _is_deepspeed_engine(engine_or_model):
        return _deepspeed_source(engine_or_model, optimizer, scheduler)

    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    model = engine_or_model
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"expected a DeepSpeed engine or a torch.nn.Module, got {type(model).__name__}; pass "
            "what deepspeed.initialize or fully_shard returned, or the module itself"
        )
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise UnsupportedError(
            "the model is wrapped by FSDP1 (FullyShardedDataParallel), which is not supported yet; "
            "shard it with FSDP2: torch.distributed.fsdp.fully_shard"
        )
    partitioned = [n for n, p in model.named_parameters() if hasattr(p, "ds_tensor")]
    if partitioned:
        # Saved as they are, these would be tensors of no elements.
        raise UsageError(
            f"the model was partitioned by DeepSpeed ZeRO-3: {len(partitioned)} of its parameters "
            f"are placeholders, {partitioned[0]} among them; pass the engine that "
            "deepspeed.initialize returned, not the module inside it"
        )
    sharded = any(isinstance(m, FSDPModule) for m in model.modules())
    if sharded or any(isinstance(p, DTensor) for p in model.parameters()):
        from sharded_ckpt.sources.fsdp import FsdpSource

        return FsdpSource(model, optimizer, scheduler)
    from sharded_ckpt.sources.plain import PlainSource

    return PlainSource(model, optimizer, scheduler)


def _is_deepspeed_engine(candidate: Any) -> bool:
    """Told by name, so that deepspeed is imported only by those who use it."""
    return any(
        c.__name__ in ("DeepSpeedEngine", "PipelineEngine") and c.__module__.startswith("deepspeed")
        for c in type(candidate).__mro__
    )


def _deepspeed_source(engine: Any, optimizer: Any, scheduler: Any) -> Source:
    for what, given, own in (
        ("optimizer", optimizer, getattr(engine, "optimizer", None)),
        ("scheduler", scheduler, getattr(engine, "lr_scheduler", None)),
    ):
        if given is not None and given is not own:
            raise UsageError(
                f"{what}= was given with a DeepSpeed engine, which has its own; give it to "
                f"deepspeed.initialize, or pass it as stateful={{'{what}': ...}}"
            )
    from sharded_ckpt.sources.deepspeed import DeepSpeedSource

    source: Source = DeepSpeedSource(engine)
    return source
