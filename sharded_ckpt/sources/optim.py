"""State of a torch optimizer: captured by parameter name, and written back in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sharded_ckpt import dtypes
from sharded_ckpt.errors import StateMismatch, UnsupportedError, UsageError
from sharded_ckpt.slices import Entry, Slice
from sharded_ckpt.sources import common, mesh
from sharded_ckpt.sources.base import State
from sharded_ckpt.sources.bound import Bound, Piece, local_of

# Refused when they are given, rather than at the first save after hours of training.
_REFUSED = {
    "ZeroRedundancyOptimizer": "each rank has the state of other parameters",
    "PostLocalSGDOptimizer": "each rank averages on its own",
    "LBFGS": "its history is in lists that belong to no single parameter",
}
_REFUSED_MODULES = {"torchao": "its state is in quantised tensor subclasses"}


class OptimizerState:
    """A ``torch.optim.Optimizer``, seen by the canonical names of its parameters.

    Never calls ``Optimizer.state_dict`` or ``load_state_dict``: those number parameters, copy, and
    replace the group dicts that LR schedulers hold on to.
    """

    def __init__(self, optimizer: Any) -> None:
        """Raises ``UnsupportedError`` or ``UsageError``, by name, for what cannot be captured."""
        if isinstance(optimizer, list | tuple | dict):
            raise UnsupportedError(
                f"optimizer is a {type(optimizer).__name__}: several optimizers for one model are "
                "not supported; put their parameters into groups of one optimizer"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer; "
                "pass the one inside the wrapper (often wrapper.optimizer)"
            )
        for kind in type(optimizer).__mro__:
            reason = _REFUSED.get(kind.__name__)
            reason = reason or _REFUSED_MODULES.get(kind.__module__.partition(".")[0])
            if reason:
                raise UnsupportedError(
                    f"optimizer {kind.__name__} cannot be captured exactly: {reason}; use one "
                    "whose state is plain tensors, such as AdamW (sharded by fully_shard)"
                )
        self.optimizer = optimizer
        self._created: dict[str, dict[str, Any]] = {}

    # --- capture ---------------------------------------------------------------------------------

    def parameter_ids(self) -> set[int]:
        """``id`` of every parameter that ``step`` changes."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def group_names(self, bound: Sequence[Bound]) -> list[list[str]]:
        """Canonical names of the parameters of each group.

        Raises ``UsageError`` for parameters that are not the model's, ``UnsupportedError`` for
        state that belongs to no parameter.
        """
        names = {id(b.parameter): b.fqn for b in bound}
        groups = []
        for i, group in enumerate(self.optimizer.param_groups):
            unknown = [j for j, p in enumerate(group["params"]) if id(p) not in names]
            if unknown:
                first = group["params"][unknown[0]]
                raise UsageError(
                    f"{len(unknown)} parameters of the optimizer's group {i} are not the model's "
                    f"(the first is number {unknown[0]}, shape {list(first.shape)}); build the "
                    "optimizer from the parameters of this model, after fully_shard, DDP and .to()"
                )
            groups.append([names[id(p)] for p in group["params"]])
        known = self.parameter_ids()
        stray = next((k for k in self.optimizer.state if id(k) not in known), None)
        if stray is not None:
            what = repr(stray) if isinstance(stray, str) else f"a {type(stray).__name__}"
            raise UnsupportedError(
                f"the optimizer keeps state under {what}, which is no parameter of its groups; "
                "only state of single parameters can be captured"
            )
        return groups

    def pieces(self, bound: Sequence[Bound]) -> tuple[list[Piece], list[Slice]]:
        """Tensors that are cut as their parameters are, and this rank's own small ones."""
        pieces: list[Piece] = []
        copies = []
        for b, state in self._states(bound):
            pieces += [(f"optim/{b.fqn}/{k}", t, b) for k, t in state.aligned.items()]
            copies += [common.copy_slice(f"optim/{b.fqn}/{k}", t) for k, t in state.copies.items()]
        return pieces, copies

    def capture(self, bound: Sequence[Bound], opaque_cut: State) -> State:
        """Everything but tensors: class, groups by names, Python values, how tensors are held.

        ``opaque_cut`` describes what must be equal at load for state to fit that is not cut as its
        parameter is.
        """
        scalars: dict[str, Any] = {}
        opaque: set[str] = set()
        for b, state in self._states(bound):
            if state.scalars:
                scalars[b.fqn] = dict(state.scalars)
            opaque.update(state.opaque)
        found: State = {
            "class": type(self.optimizer).__name__,
            "groups": common.capture_groups(self.optimizer.param_groups, self.group_names(bound)),
            "scalars": scalars,
            "forms": self._forms(bound),
        }
        if opaque:
            found["opaque"] = {"keys": sorted(opaque), "cut": opaque_cut}
        return found

    def _live(self, b: Bound) -> Mapping[str, Any]:
        # The mapping creates what it is asked for by index; a save must not.
        found: Mapping[str, Any] = self.optimizer.state.get(b.parameter) or {}
        return found

    def _states(self, bound: Sequence[Bound]) -> Iterator[tuple[Bound, common.ParamState]]:
        """State of each parameter that has some, in the order of the model."""
        for b in bound:
            state = self._live(b)
            if state:
                local = {key: _local_state(b, key, value) for key, value in state.items()}
                yield b, common.sort_state(b.fqn, local, b.local.shape)

    def _forms(self, bound: Sequence[Bound]) -> State:
        """How state tensors are held: ``"sharded"`` (a DTensor), ``"local"``, or ``"host"``.

        ``"host"`` is a CPU tensor of a parameter that lives elsewhere. Most parameters have their
        states in the ``"usual"`` form.
        """
        usual: dict[str, str] = {}
        exceptions: dict[str, dict[str, str]] = {}
        for b in bound:
            for key, value in sorted(self._live(b).items()):
                if isinstance(value, torch.Tensor):
                    form = _form(value, b.local.device)
                    if usual.setdefault(key, form) != form:
                        exceptions.setdefault(b.fqn, {})[key] = form
        return {"usual": usual, "exceptions": exceptions}

    def install_fence(self, fence: Callable[[], None]) -> Callable[[], None]:
        """Calls ``fence`` first thing in every ``optimizer.step``; returns the remover."""

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            fence()

        handle = self.optimizer.register_step_pre_hook(before_step)
        # Before the hooks of others, which may change state: biases of experts, scales.
        hooks = getattr(self.optimizer, "_optimizer_step_pre_hooks", None)
        if hooks is not None and handle.id in hooks:
            hooks.move_to_end(handle.id, last=False)
        remove: Callable[[], None] = handle.remove
        return remove

    # --- load ------------------------------------------------------------------------------------

    def targets(
        self, bound: Sequence[Bound], names: Mapping[str, str], saved: Mapping[str, Entry]
    ) -> list[Slice]:
        """Tensors for all saved state of this optimizer's parameters.

        ``names`` tells under which name each parameter was saved. Live tensors are used where they
        fit; others are created here and installed by :meth:`restore`, so that a load that is
        refused leaves the optimizer as it was.
        """
        found = []
        states = common.saved_states(saved)
        owned = {fqn for own in self.group_names(bound) for fqn in own}
        self._created = {}
        for b in bound:
            if b.fqn not in owned:
                continue
            values = self._created[b.fqn] = {}
            for key in states.get(names[b.fqn], ()):
                name = f"optim/{names[b.fqn]}/{key}"
                entry = saved[name]
                values[key] = value = _value_for(b, entry, self._live(b).get(key))
                local = local_of(value).detach()
                found.append(
                    common.copy_slice(name, local)
                    if entry.copy
                    else common.make_slice(name, local, b.shape, b.region)
                )
        return found

    def check_saved(
        self, bound: Sequence[Bound], saved: State, opaque_cut: State, *, strict: bool
    ) -> list[common.Group]:
        """The saved group of each live one. Raises ``StateMismatch`` for what does not fit."""
        mine, theirs = type(self.optimizer).__name__, saved.get("class")
        if strict and theirs is not None and theirs != mine:
            raise StateMismatch(
                f"the step was saved with optimizer {theirs}, this one is {mine}; "
                "load(optimizer=False), or strict=False if their state is the same"
            )
        opaque = saved.get("opaque")
        if opaque and opaque["cut"] != opaque_cut:
            raise StateMismatch(
                f"optimizer state {', '.join(opaque['keys'])} is not cut as its parameters are "
                f"and fits only the layout that saved it: {opaque['cut']}, here is {opaque_cut}; "
                "load on the same layout, or load(optimizer=False)"
            )
        return common.match_groups(self.group_names(bound), saved["groups"], strict=strict)

    def restore(
        self, bound: Sequence[Bound], saved: State, opaque_cut: State, *, strict: bool
    ) -> None:
        """Groups, Python values, and the tensors of :meth:`targets`, which are filled by now.

        State that was not saved is dropped.
        """
        groups = self.check_saved(bound, saved, opaque_cut, strict=strict)
        common.restore_groups(self.optimizer.param_groups, groups)
        names = self.group_names(bound)
        options = {
            fqn: group
            for own, group in zip(names, self.optimizer.param_groups, strict=True)
            for fqn in own
        }
        forms = saved.get("forms", {})
        for b in bound:
            if b.fqn not in options:
                continue
            form = {**forms.get("usual", {}), **forms.get("exceptions", {}).get(b.fqn, {})}
            state = {
                key: _held_as(value, form.get(key), key, b.local.device, options[b.fqn])
                for key, value in self._created.get(b.fqn, {}).items()
            }
            state.update(saved.get("scalars", {}).get(b.fqn, {}))
            if state:
                live = self.optimizer.state[b.parameter]
                live.clear()
                live.update(state)
            else:
                self.optimizer.state.pop(b.parameter, None)
        self._created = {}


def _local_state(b: Bound, key: Any, value: Any) -> Any:
    """A state value with the data of this rank in place of a DTensor, checked."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        if not isinstance(b.parameter, DTensor) or not mesh.same_cut(value, b.parameter):
            raise UnsupportedError(
                f"optimizer state {key!r} of {b.fqn} has shape {list(value.shape)} and placements "
                f"{value.placements}, which are not its parameter's; use an optimizer whose state "
                "is sharded as its parameters are"
            )
        value = value._local_tensor
    return common.check_tensor(f"optimizer state {key!r} of {b.fqn}", value)


def _value_for(b: Bound, entry: Entry, live: Any) -> Any:
    """What takes the saved state of ``entry``: ``live`` if it fits, else a new tensor."""
    shape = entry.shape if entry.copy else tuple(b.local.shape)
    dtype = dtypes.to_torch(entry.dtype)
    if isinstance(live, torch.Tensor):
        local = local_of(live)
        if tuple(local.shape) == shape and local.dtype == dtype:
            return live
    device = torch.device("cpu") if entry.copy and not shape else b.local.device
    value = torch.zeros(shape, dtype=dtype, device=device)
    return (
        value
        if entry.copy or not isinstance(b.parameter, DTensor)
        else mesh.like(b.parameter, value)
    )


def _form(value: torch.Tensor, device: torch.device) -> str:
    if isinstance(value, DTensor):
        return "sharded"
    return "local" if value.device.type == device.type else "host"


def _held_as(
    value: Any, form: str | None, key: str, device: torch.device, options: Mapping[str, Any]
) -> Any:
    """``value`` held as it was when it was saved; where that is unknown, as torch would."""
    if form is None:
        on_device = key != "step" or options.get("fused") or options.get("capturable")
        return value.to(device) if on_device and value.ndim == 0 else value
    if form == "sharded":
        return value
    return local_of(value).to("cpu" if form == "host" else device)
