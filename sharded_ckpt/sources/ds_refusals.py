"""Every DeepSpeed mode that is refused, by the key of its config, and what to do instead.

A mode is refused where part of its training state lives outside the tensors that this package can
reach (files of a swap folder, another process, private buffers), so that a resume would silently
differ. The table is printed by the documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sharded_ckpt.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused mode: ``key`` of the DeepSpeed config, why, and what to use instead."""

    key: str
    why: str
    instead: str
    applies: Callable[[Any], bool]


def _zero(engine: Any, name: str) -> Any:
    config = getattr(getattr(engine, "_config", None), "zero_config", None)
    return getattr(config, name, None)


def _offload(engine: Any, which: str, name: str) -> Any:
    return getattr(_zero(engine, which), name, None)


def _device(engine: Any, which: str) -> str:
    device = _offload(engine, which, "device")
    return str(getattr(device, "value", device))


def _class_has(engine: Any, word: str) -> bool:
    return any(word in c.__name__ for c in type(engine.optimizer).__mro__)


def _nvme_optimizer(engine: Any) -> bool:
    swapped = getattr(engine.optimizer, "swap_optimizer", False)
    return bool(swapped) or _device(engine, "offload_optimizer") == "nvme"


def _nvme_params(engine: Any) -> bool:
    swapped = getattr(engine.optimizer, "params_in_nvme_and_cpu", False)
    return bool(swapped) or _device(engine, "offload_param") == "nvme"


def _super_offload(engine: Any) -> bool:
    asked = bool(_offload(engine, "offload_optimizer", "super_offload"))
    return asked or _class_has(engine, "SuperOffload")


def _zenflow(engine: Any) -> bool:
    asked = _zero(engine, "zenflow") is not None or bool(getattr(engine, "zenflow", False))
    return asked or _class_has(engine, "ZenFlow")


def _twin_flow(engine: Any) -> bool:
    # The ratio is kept in the config without an offload device as well; only a second optimizer
    # holds state that the first does not know.
    return getattr(engine.optimizer, "backup_optimizer", None) is not None


def _quantized_frozen(engine: Any) -> bool:
    if not _zero(engine, "zero_quantized_nontrainable_weights"):
        return False
    tensors = (getattr(p, "ds_tensor", None) for p in engine.module.parameters())
    return any(hasattr(t, "ds_quant_scale") for t in tensors if t is not None)


def _auto_ep(engine: Any) -> bool:
    return any(type(m).__name__ == "AutoEPMoELayer" for m in engine.module.modules())


def _tensor_parallel(engine: Any) -> bool:
    autotp = getattr(engine, "autotp_size", None)
    if autotp is not None and autotp() > 1:
        return True
    mpu = getattr(engine, "mpu", None)
    for name in ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size"):
        if hasattr(mpu, name):
            return bool(getattr(mpu, name)() > 1)
    size = getattr(mpu, "get_model_parallel_world_size", None)
    return size is not None and bool(size() > 1)


def _no_optimizer(engine: Any) -> bool:
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ == "DeepSpeedZeRoOffload":
        return True
    return type(getattr(optimizer, "optimizer", optimizer)).__name__ == "DummyOptim"


def _one_bit(engine: Any) -> bool:
    return any(word in type(engine.basic_optimizer).__name__ for word in ("Onebit", "ZeroOne"))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "optimizer",
        "the engine has no optimizer, so it does not train",
        "give deepspeed.initialize an optimizer, or checkpoint engine.module without an engine",
        _no_optimizer,
    ),
    Refusal(
        "zero_optimization.offload_optimizer.device = nvme",
        "optimizer state is in swap files",
        "use device 'cpu' or 'none'",
        _nvme_optimizer,
    ),
    Refusal(
        "zero_optimization.offload_param.device = nvme",
        "weights are in swap files",
        "use device 'cpu' or 'none'",
        _nvme_params,
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        "optimizer state is in another process",
        "use plain offload_optimizer with device 'cpu'",
        _super_offload,
    ),
    Refusal(
        "zero_optimization.zenflow",
        "selected gradients and a second optimizer's state are in private buffers",
        "remove 'zenflow'; plain offload_optimizer with device 'cpu' is supported",
        _zenflow,
    ),
    Refusal(
        "zero_optimization.offload_optimizer.ratio < 1",
        "part of the optimizer state belongs to a second, hidden optimizer",
        "use ratio 1.0",
        _twin_flow,
    ),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "frozen weights are int8 with a scale that is kept apart",
        "set it to false",
        _quantized_frozen,
    ),
    Refusal(
        "expert_parallel.autoep_size",
        "AutoEP places experts in its own layout",
        "use deepspeed.moe.layer.MoE, or no expert parallelism",
        _auto_ep,
    ),
    Refusal(
        "tensor_parallel.autotp_size, or mpu with tensor parallelism",
        "which part of a weight a rank holds is known only to the model",
        "use tensor parallel size 1",
        _tensor_parallel,
    ),
    Refusal(
        "optimizer.type = OneBitAdam, OneBitLamb, ZeroOneAdam",
        "error feedback of the compressed gradients differs per rank and is not exposed",
        "use Adam or AdamW",
        _one_bit,
    ),
)


def refuse(engine: Any) -> None:
    """Raises :class:`UnsupportedError` for the first refused mode that ``engine`` runs in."""
    for refusal in REFUSALS:
        if refusal.applies(engine):
            raise UnsupportedError(
                f"DeepSpeed config key {refusal.key}: {refusal.why}, so its state cannot be "
                f"captured exactly; {refusal.instead}"
            )


def unknown_wrapper(optimizer: Any) -> UnsupportedError:
    """The error for an optimizer wrapper that no adapter knows."""
    kind = type(optimizer)
    return UnsupportedError(
        f"optimizer wrapper {kind.__module__}.{kind.__qualname__} is not known here; known: "
        "ZeRO-1/2, ZeRO-3, BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer and torch "
        "optimizers; use one of the DeepSpeed configs listed in docs/deepspeed.md"
    )
