"""Non-tensor training state of a DeepSpeed engine: counters, loss scalers, schedulers, groups.

Everything is copied when it is read, since ``step()`` changes the live objects in place, and
written back into the live objects, since schedulers and wrappers hold references to them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from sharded_ckpt.errors import StateMismatch, UsageError
from sharded_ckpt.sources import common
from sharded_ckpt.sources.base import Parts, State
from sharded_ckpt.sources.ds_model import EngineModel
from sharded_ckpt.sources.ds_wrappers import Flat, Wrapper

_COUNTERS = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "micro_steps",
    "_unmanaged_backward_count",
)
# Fields of the wrapper itself that the next step reads.
_FLAGS = ("overflow", "dynamic_loss_scale", "custom_loss_scaler", "external_loss_scale")
_SIMPLE = (bool, int, float, str, type(None))
# Where the wrappers keep the object with the loss scale: stages 1-3, then stage 0.
_SCALERS = ("loss_scaler", "loss_scale_config")
_GRAD_SCALERS = ("torch_autocast_z0_gradscaler", "torch_autocast_gradscaler")
# Hyper-parameters that a scheduler writes: they travel with it, not with the optimizer.
_SCHEDULED = ("lr", "initial_lr")


# --- equal on all ranks ------------------------------------------------------------------------


def capture_shared(engine: Any) -> State:
    """Counters, loss scalers and schedulers: what is equal on all ranks."""
    return {
        "counters": {k: getattr(engine, k) for k in _COUNTERS if hasattr(engine, k)},
        "optimizer": _inner_class(engine),
        "flags": _simple(engine.optimizer, _FLAGS),
        "loss_scaler": None if _scaler(engine) is None else _simple(_scaler(engine)),
        "grad_scaler": _state_dict(_grad_scaler(engine)),
        "lr_scheduler": _state_dict(engine.lr_scheduler),
        # Some schedulers leave out of their state what get_last_lr() returns.
        "last_lr": copy.deepcopy(getattr(engine.lr_scheduler, "_last_lr", None)),
        "random_ltd": _state_dict(_random_ltd(engine)),
    }


def restore_shared(engine: Any, saved: State, parts: Parts) -> None:
    """Writes back what :func:`capture_shared` gave. Raises :class:`StateMismatch`.

    Counters belong to the scheduler (both say how far training is), loss scalers to the optimizer.
    """
    if parts.scheduler:
        for key, value in saved["counters"].items():
            setattr(engine, key, value)
        _load_state_dict(engine.lr_scheduler, saved["lr_scheduler"])
        if saved["last_lr"] is not None and hasattr(engine.lr_scheduler, "_last_lr"):
            engine.lr_scheduler._last_lr = list(saved["last_lr"])
    if parts.data:
        _load_state_dict(_random_ltd(engine), saved["random_ltd"])
    if parts.optimizer:
        for key, value in saved["flags"].items():
            setattr(engine.optimizer, key, value)
        scaler = _scaler(engine)
        if _is_dynamic(scaler) == _was_dynamic(saved):
            for key, value in (saved["loss_scaler"] or {}).items():
                # Stages keep the same scale in objects of different classes.
                if scaler is not None and key in vars(scaler):
                    setattr(scaler, key, value)
        _load_state_dict(_grad_scaler(engine), saved["grad_scaler"])


def check_shared(engine: Any, saved: State, parts: Parts) -> None:
    """Raises :class:`StateMismatch` for what :func:`restore_shared` could not take back."""
    if not parts.strict:
        return
    mine, theirs = _inner_class(engine), saved["optimizer"]
    if parts.optimizer and mine != theirs:
        raise StateMismatch(
            f"the step was saved with optimizer {theirs}, this one is {mine}; "
            "load(optimizer=False), or strict=False if their state is the same"
        )
    if parts.optimizer and _is_dynamic(_scaler(engine)) != _was_dynamic(saved):
        here, there = ("on", "off") if _is_dynamic(_scaler(engine)) else ("off", "on")
        raise StateMismatch(
            f"dynamic loss scaling is {here} here and was {there} in the step; use the precision "
            "that was saved, or load(strict=False)"
        )
    for part, what, live, state in (
        (parts.scheduler, "lr_scheduler", engine.lr_scheduler, saved["lr_scheduler"]),
        (parts.data, "random_ltd scheduler", _random_ltd(engine), saved["random_ltd"]),
        (parts.optimizer, "gradient scaler", _grad_scaler(engine), saved["grad_scaler"]),
    ):
        if part and (live is None) != (state is None):
            here, there = ("no", "one") if live is None else ("a", "none")
            raise StateMismatch(
                f"the engine has {here} {what}, the step has {there}; give deepspeed.initialize "
                "what was saved, or leave it out: scheduler=False, optimizer=False, data=False"
            )


def _simple(obj: Any, names: Sequence[str] | None = None) -> State:
    """Fields of ``obj`` that are plain values; of ``names`` only, if given."""
    fields = vars(obj)
    wanted = fields if names is None else [n for n in names if n in fields]
    return {n: fields[n] for n in wanted if type(fields[n]) in _SIMPLE}


def _scaler(engine: Any) -> Any:
    found = (vars(engine.optimizer).get(key) for key in _SCALERS)
    return next((scaler for scaler in found if scaler is not None), None)


def _is_dynamic(scaler: Any) -> bool:
    fields = {} if scaler is None else vars(scaler)
    return bool(fields.get("dynamic") or fields.get("dynamic_loss_scale"))


def _was_dynamic(saved: State) -> bool:
    fields = saved["loss_scaler"] or {}
    return bool(fields.get("dynamic") or fields.get("dynamic_loss_scale"))


def _inner_class(engine: Any) -> str:
    return type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__


def _grad_scaler(engine: Any) -> Any:
    found = (vars(h).get(k) for h in (engine, engine.optimizer) for k in _GRAD_SCALERS)
    return next((scaler for scaler in found if scaler is not None), None)


def _random_ltd(engine: Any) -> Any:
    enabled = getattr(engine, "random_ltd_enabled", None)
    return engine.random_ltd_scheduler if enabled is not None and enabled() else None


def _state_dict(obj: Any) -> Any:
    return None if obj is None else copy.deepcopy(obj.state_dict())


def _load_state_dict(obj: Any, saved: Any) -> None:
    if obj is not None and saved is not None:
        obj.load_state_dict(copy.deepcopy(saved))


# --- each rank's own ---------------------------------------------------------------------------


def capture_rank(engine: Any, wrapper: Wrapper, model: EngineModel, flats: list[Flat]) -> State:
    """Parameter groups, Python-valued optimizer state and the data sampler's own position."""
    scalars: dict[str, dict[str, Any]] = {}
    for flat in flats:
        state = wrapper.inner.state.get(flat.master, {})
        own = common.sort_state(flat.params[0].fqn, state, flat.master.shape).scalars
        if own:
            scalars.update({param.fqn: dict(own) for param in flat.params})
    names = [[p.fqn for p in group] for group in wrapper.groups(model)]
    return {
        "param_groups": common.capture_groups(wrapper.inner.param_groups, names),
        "optimizer_scalars": scalars,
        "data_sampler": _sampler_state(engine),
    }


def match_groups(
    wrapper: Wrapper, model: EngineModel, saved: Sequence[State], parts: Parts
) -> list[tuple[State, State]]:
    """Live groups of the optimizer with their saved ones, matched by the names of parameters.

    Raises :class:`StateMismatch` with the differing names.
    """
    here = {p.fqn for p in model.params}
    # A step of a pipeline may name parameters of other stages.
    known = [{**g, "params": [n for n in g["params"] if n in here]} for g in saved]
    known = [g for g in known if g["params"]]
    pairs = zip(wrapper.inner.param_groups, wrapper.groups(model), strict=True)
    live = [(options, [p.fqn for p in params]) for options, params in pairs if params]
    matched = common.match_groups([names for _, names in live], known, strict=parts.strict)
    return [(options, group) for (options, _), group in zip(live, matched, strict=True)]


def restore_groups(groups: Sequence[tuple[State, State]], parts: Parts) -> None:
    """Hyper-parameters of matched groups, in place, so that schedulers keep pointing at them."""

    def wanted(key: str) -> bool:
        return parts.scheduler if key in _SCHEDULED else parts.optimizer

    chosen = [
        {**group, "options": {k: v for k, v in group["options"].items() if wanted(k)}}
        for _, group in groups
    ]
    common.restore_groups([options for options, _ in groups], chosen)


def _sampler(engine: Any) -> Any:
    loader = getattr(engine, "training_dataloader", None)
    enabled = getattr(engine, "curriculum_learning_enabled", None)
    if loader is None or enabled is None or not enabled():
        return None
    return loader.data_sampler


def _sampler_state(engine: Any) -> State | None:
    sampler = _sampler(engine)
    if sampler is None:
        return None
    state = copy.deepcopy(sampler.state_dict())
    # state_dict() holds numpy's global generator; what the sampler draws from is its own.
    own = getattr(sampler, "np_rng", None)
    return {"state": state, "rng": None if own is None else own.bit_generator.state}


def restore_sampler(engine: Any, saved: State | None) -> None:
    """Position and generator of a curriculum data sampler."""
    sampler = _sampler(engine)
    if sampler is not None and saved is not None:
        sampler.load_state_dict(copy.deepcopy(saved["state"]))
        if saved["rng"] is not None:
            sampler.np_rng.bit_generator.state = saved["rng"]


def check_sampler(engine: Any, saved: State | None) -> None:
    """Raises :class:`StateMismatch` where one of engine and step has a data sampler."""
    if (_sampler(engine) is None) != (saved is None):
        here, there = ("no", "a") if saved is not None else ("a", "no")
        raise StateMismatch(
            f"the engine has {here} curriculum data sampler, the step has {there} state for one; "
            "use the data_efficiency config that was saved, or load(data=False)"
        )


def check_boundary(engine: Any) -> None:
    """Raises :class:`UsageError` where part of the state is not where it belongs."""
    away = getattr(engine.optimizer, "offloaded_states", None)
    if away:
        raise UsageError(
            f"engine.offload_states() has moved {sorted(str(s) for s in away)} away; call "
            "engine.reload_states() before save() and load()"
        )
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        pending = int(getattr(engine, "_unmanaged_backward_count", 0))
        if pending:
            raise UsageError(
                f"{pending} backward passes have not been stepped yet, and their gradients are not "
                "part of a checkpoint; call save() or load() after engine.step()"
            )
        return
    every = int(engine.gradient_accumulation_steps())
    done = int(engine.micro_steps) % every
    if done:
        raise UsageError(
            f"{done} of {every} micro-batches of a gradient accumulation are done (micro step "
            f"{engine.micro_steps}), and their gradients are not part of a checkpoint; call save() "
            f"or load() after {every - done} more engine.step()"
        )
