"""What every source needs: names of parameters and buffers, checks of tensors, parameter groups.

Names are canonical: the prefixes that ``torch.compile``, activation checkpointing, FSDP1 and DDP
put in front of a name are dropped, in any nesting, so that a step loads whatever wraps the model.
The module tree is walked, never the string: a submodule that is really called ``module`` stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sharded_ckpt import dtypes
from sharded_ckpt.errors import StateMismatch, UnsupportedError, UsageError
from sharded_ckpt.slices import Entry, Region, Slice, whole

# Child names that only these wrappers use; "module" is too common a name to be among them.
_WRAPPED_AS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_SCALARS = (bool, int, float, str, type(None))

Group = dict[str, Any]


# --- names ---------------------------------------------------------------------------------------


def _is_wrapped_child(module: nn.Module | None, child: str) -> bool:
    if module is None or child not in module._modules:
        return False
    return child in _WRAPPED_AS or (child == "module" and isinstance(module, _DATA_PARALLEL))


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(canonical prefix, module)`` of every module, parents first.

    The prefix is empty or ends with a dot. A module that is registered twice is given twice.
    """

    def visit(prefix: str, module: nn.Module, above: tuple[nn.Module, ...]) -> Any:
        yield prefix, module
        for name, child in module._modules.items():
            if child is None or child is module or any(child is m for m in above):
                continue
            inner = prefix if _is_wrapped_child(module, name) else f"{prefix}{name}."
            yield from visit(inner, child, (*above, module))

    yield from visit("", root, ())


def canonical_name(root: nn.Module, fqn: str) -> str:
    """``fqn``, a dotted name as ``root.named_parameters()`` spells it, without wrapper prefixes."""
    kept, module = [], root
    for part in fqn.split("."):
        if not _is_wrapped_child(module, part):
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def _named(root: nn.Module, what: str) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """Every name of every parameter or buffer. Raises ``UsageError`` where two share a name."""
    seen: dict[str, torch.Tensor] = {}
    for prefix, module in walk_modules(root):
        for name, tensor in getattr(module, what).items():
            if tensor is None:
                continue
            if seen.setdefault(prefix + name, tensor) is not tensor:
                raise UsageError(
                    f"two tensors of the model are both called {prefix + name!r} once wrapper "
                    f"prefixes ({', '.join(_WRAPPED_AS)}, module) are dropped; rename one of them"
                )
            yield prefix + name, tensor, module


def named_parameters_once(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """``(canonical name, parameter)``, in the order of the modules. A tied one has its first name.

    The order follows the module tree alone, so it is the same on every rank.
    """
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter, _ in _named(module, "_parameters"):
        first.setdefault(id(parameter), (name, parameter))
    return list(first.values())


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers: alias to the name that is stored."""
    found: dict[str, str] = {}
    for what in ("_parameters", "_buffers"):
        first: dict[int, str] = {}
        for name, tensor, owner in _named(module, what):
            if what == "_buffers" and _is_transient(owner, name):
                continue
            stored = first.setdefault(id(tensor), name)
            if stored != name:
                found[name] = stored
    return found


def _is_transient(owner: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] in owner._non_persistent_buffers_set


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """``(canonical name, buffer)`` of what ``state_dict()`` would hold. Shared ones come once."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor, owner in _named(module, "_buffers"):
        if not _is_transient(owner, name):
            first.setdefault(id(tensor), (name, tensor))
    return list(first.values())


def changed_in_forward(module: nn.Module) -> set[str]:
    """Names of parameters that a forward pass changes: embeddings with ``max_norm``."""
    return {
        f"{prefix}weight"
        for prefix, child in walk_modules(module)
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None
    }


# --- tensors -------------------------------------------------------------------------------------


def check_tensor(name: str, tensor: Any) -> torch.Tensor:
    """``tensor``, detached, if its bytes are its value.

    Raises ``UsageError`` for what is not materialised, ``UnsupportedError`` for tensor subclasses
    (quantised weights and states), sparse and non-contiguous tensors and unknown dtypes.
    """
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise UsageError(f"{name} is not initialised yet; run one forward pass first")
    if type(tensor) not in _PLAIN_TENSORS:
        kind = type(tensor)
        raise UnsupportedError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, whose inner tensors cannot be "
            "captured exactly; expected a plain torch.Tensor; use a model or an optimizer without "
            "this tensor subclass"
        )
    if tensor.is_meta:
        raise UsageError(
            f"{name} is on the meta device and has no data; materialise it (to_empty, then "
            "initialise) before it is checkpointed"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            f"{name} has layout {tensor.layout} and dtype {tensor.dtype}; only dense strided "
            "tensors can be captured"
        )
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            f"{name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}; only "
            "contiguous tensors can be captured (channels_last and expanded ones are not); call "
            ".contiguous() on it when the model is built"
        )
    dtypes.from_torch(tensor.dtype, name)
    return tensor.detach()


def make_slice(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    region: Region,
    *,
    eager: bool = False,
    model_dtype: torch.dtype | None = None,
) -> Slice:
    """A slice of a checked tensor: ``region`` of the global tensor ``name`` of ``shape``."""
    entry = Entry(
        name=name,
        dtype=dtypes.from_torch(tensor.dtype, name).name,
        shape=tuple(shape),
        region=region,
        model_dtype=None if model_dtype is None else dtypes.from_torch(model_dtype, name).name,
    )
    return Slice(entry, tensor, eager=eager)


def copy_slice(name: str, tensor: torch.Tensor, *, eager: bool = False) -> Slice:
    """A slice that is this rank's own copy of a whole small tensor."""
    shape = tuple(tensor.shape)
    dtype = dtypes.from_torch(tensor.dtype, name).name
    return Slice(Entry(name, dtype, shape, whole(shape), copy=True), tensor, eager=eager)


def buffer_slices(module: nn.Module) -> list[Slice]:
    """This rank's copy of every persistent buffer, ``buffer/<name>``.

    Buffers change in the forward pass and may differ between ranks (batch norm), so each rank
    writes its own and they are copied at the call of ``save``.
    """
    return [
        copy_slice(
            f"buffer/{fqn}", check_tensor(f"buffer {fqn}", _local_buffer(tensor)), eager=True
        )
        for fqn, tensor in persistent_buffers(module)
    ]


def _local_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The data of a buffer that tensor parallelism has turned into a replicated DTensor."""
    placements = getattr(tensor, "placements", None)
    if placements is not None and all(p.is_replicate() for p in placements):
        local: torch.Tensor = tensor._local_tensor
        return local
    return tensor


# --- optimizer state of one parameter ------------------------------------------------------------


@dataclass(slots=True)
class ParamState:
    """Optimizer state of one parameter, sorted by how it is stored.

    ``aligned`` tensors have the (local) shape of the parameter and are cut as it is; ``copies``
    are whole per-rank tensors (a step counter, blocks of a quantised state); ``scalars`` are
    Python values.
    """

    aligned: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)

    @property
    def opaque(self) -> list[str]:
        """Keys of copies that are no scalars: only the layout that wrote them can use them."""
        return [key for key, tensor in self.copies.items() if tensor.ndim > 0]


def sort_state(fqn: str, state: Mapping[Any, Any], local_shape: Sequence[int]) -> ParamState:
    """Sorts ``optimizer.state[parameter]``. Tensors are local ones, already checked.

    Raises ``UnsupportedError``, naming parameter and key, for values that are neither tensors nor
    numbers, strings or ``None``.
    """
    found = ParamState()
    # Sorted: the order of creation is another one after a load.
    for key, value in sorted(state.items(), key=lambda item: str(item[0])):
        if not isinstance(key, str) or not key or "/" in key:
            raise UnsupportedError(
                f"optimizer state of {fqn} has the key {key!r}; expected a non-empty string "
                "without '/'"
            )
        if isinstance(value, torch.Tensor):
            # "step" of a 0-d parameter has the parameter's shape, but is a counter all the same.
            aligned = tuple(value.shape) == tuple(local_shape) and (value.ndim or key != "step")
            (found.aligned if aligned else found.copies)[key] = value
        elif isinstance(value, _SCALARS):
            found.scalars[key] = value
        else:
            raise UnsupportedError(
                f"optimizer state {key!r} of {fqn} is a {type(value).__name__}; only tensors, "
                "numbers, strings and None can be captured; use an optimizer without such state"
            )
    return found


def saved_states(saved: Iterable[str]) -> dict[str, list[str]]:
    """``{parameter: [state keys]}`` of the saved names ``optim/<fqn>/<key>``, in their order."""
    found: dict[str, list[str]] = {}
    for name in saved:
        if name.startswith("optim/"):
            fqn, _, key = name.removeprefix("optim/").rpartition("/")
            found.setdefault(fqn, []).append(key)
    return found


# --- parameter groups ----------------------------------------------------------------------------


def capture_groups(groups: Sequence[Group], names: Sequence[Sequence[str]]) -> list[Group]:
    """Parameter groups as ``{"params": [names], "options": {...}}``, one for each live group.

    ``names[i]`` are the canonical names of the parameters of ``groups[i]``. Options are the live
    values (numbers, tuples, 0-d tensors), which the caller copies.
    """
    return [
        {
            "params": list(own),
            "options": {k: v for k, v in group.items() if k not in ("params", "param_names")},
        }
        for group, own in zip(groups, names, strict=True)
    ]


def match_groups(
    names: Sequence[Sequence[str]], saved: Sequence[Group], *, strict: bool = True
) -> list[Group]:
    """The saved group of each live one, matched by the set of names, whatever their order.

    Raises ``StateMismatch`` that lists the number of groups and the names that are in another
    group, missing or extra. ``strict=False`` allows missing and extra names.
    """
    left = list(saved)
    matched: list[Group] = []
    for own in names:
        found = next((i for i, g in enumerate(left) if set(g["params"]) == set(own)), None)
        if found is None:
            break
        matched.append(left.pop(found))
    if len(matched) == len(names) and not left:
        return matched
    problems, moved = _group_problems(names, saved)
    if strict or moved or len(names) != len(saved):
        raise StateMismatch(
            "the optimizer's parameter groups are not the saved ones: "
            + "; ".join(problems)
            + "; build the optimizer with the saved groups, or load(optimizer=False)"
        )
    return list(saved)


def _group_problems(
    names: Sequence[Sequence[str]], saved: Sequence[Group]
) -> tuple[list[str], list[str]]:
    here = {name: i for i, own in enumerate(names) for name in own}
    there = {name: i for i, group in enumerate(saved) for name in group["params"]}
    moved = [
        f"{name} (saved in group {there[name]}, now in group {i})"
        for name, i in here.items()
        if there.get(name, i) != i
    ]
    problems = []
    if len(names) != len(saved):
        problems.append(f"{len(saved)} groups were saved, {len(names)} are here")
    for what, found in (
        ("in another group", moved),
        ("not saved", [n for n in here if n not in there]),
        ("saved, but not in the optimizer", [n for n in there if n not in here]),
    ):
        if found:
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            problems.append(f"{what}: {', '.join(found[:8])}{more}")
    return problems, moved


def restore_groups(groups: Sequence[Group], saved: Sequence[Group]) -> None:
    """Writes saved options into live groups, in place; ``saved[i]`` belongs to ``groups[i]``.

    The dicts keep their identity, as do 0-d tensor options: LR schedulers hold on to both.
    """
    for group, found in zip(groups, saved, strict=True):
        for key, value in found["options"].items():
            live = group.get(key)
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
                with torch.no_grad():
                    live.copy_(torch.as_tensor(value))
            else:
                group[key] = value.clone() if isinstance(value, torch.Tensor) else value
