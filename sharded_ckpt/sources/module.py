"""The part that plain modules and FSDP2 share: a module, a torch optimizer and an LR scheduler.

Every tensor is either a DTensor, of which this rank holds a block, or a plain tensor that all
ranks hold whole. Blocks that several ranks hold are cut by bytes over these ranks, so that each
element is written once and ranks write alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sharded_ckpt import dtypes
from sharded_ckpt.errors import StateMismatch, UsageError
from sharded_ckpt.slices import Entry, Slice, whole
from sharded_ckpt.sources import common, mesh
from sharded_ckpt.sources.base import Parts, State
from sharded_ckpt.sources.bound import Bound, Piece, cut, local_of
from sharded_ckpt.sources.optim import OptimizerState


class ModuleSource:
    """A ``torch.nn.Module`` with an optional ``torch.optim.Optimizer`` and LR scheduler."""

    kind: str = "module"

    def __init__(self, model: nn.Module, optimizer: Any = None, scheduler: Any = None) -> None:
        """Raises ``UnsupportedError`` or ``UsageError``, by name, for what cannot be captured."""
        self.model = model
        self.scheduler = scheduler
        ready = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if ready else 0
        self.world_size: int = dist.get_world_size() if ready else 1
        missing = [m for m in ("state_dict", "load_state_dict") if not hasattr(scheduler, m)]
        if scheduler is not None and missing:
            raise UsageError(
                f"scheduler is a {type(scheduler).__name__} without {' and '.join(missing)}; "
                "pass the object that steps the learning rate"
            )
        self._check_model()
        self._optimizer = None if optimizer is None else OptimizerState(optimizer)
        self._tensors()  # what cannot be captured is refused now, not at the first save

    def _check_model(self) -> None:
        """Raises for models that this source cannot capture."""

    def _model_dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype in which the model computes with a parameter, where it is another than its own."""
        return {}

    def _opaque_cut(self) -> State:
        """What must be equal at load for opaque state to fit: nothing, where it is replicated."""
        return {}

    def _bind(self) -> list[Bound]:
        """Every parameter once, as it is now. No pointer is kept from one save to the next."""
        eager = common.changed_in_forward(self.model)
        stepped = self._optimizer.parameter_ids() if self._optimizer is not None else set()
        computed_in = self._model_dtypes()
        everybody = tuple(range(self.world_size))
        found = []
        for fqn, parameter in common.named_parameters_once(self.model):
            shape = tuple(parameter.shape)
            held = mesh.Held(whole(shape), everybody)
            if isinstance(parameter, DTensor):
                held = mesh.held(fqn, parameter, self.world_size)
            found.append(
                Bound(
                    fqn=fqn,
                    parameter=parameter,
                    local=common.check_tensor(f"parameter {fqn}", local_of(parameter)),
                    shape=shape,
                    region=held.region,
                    holders=held.holders,
                    # Nothing here can hold back what changes a trained parameter that this
                    # optimizer does not own (another optimizer, none at all).
                    eager=fqn in eager
                    or (parameter.requires_grad and id(parameter) not in stepped),
                    model_dtype=computed_in.get(fqn),
                )
            )
        return found

    def _tensors(self) -> tuple[list[Piece], list[Slice]]:
        """All that is cut over ranks, and all that is this rank's own."""
        bound = self._bind()
        pieces: list[Piece] = [(f"model/{b.fqn}", b.local, b) for b in bound]
        copies = common.buffer_slices(self.model)
        if self._optimizer is not None:
            self._optimizer.group_names(bound)
            more, own = self._optimizer.pieces(bound)
            pieces += more
            copies = own + copies
        return pieces, copies

    # --- saving ----------------------------------------------------------------------------------

    def describe(self) -> State:
        return {"source": self.kind, "world_size": self.world_size}

    def check_can_save(self) -> None:
        """Nothing that a plain module does forbids a save."""

    def aliases(self) -> dict[str, str]:
        return common.aliases(self.model)

    def slices(self) -> list[Slice]:
        pieces, copies = self._tensors()
        return [*cut(pieces, self.rank), *copies]

    def rank_state(self) -> State:
        if self._optimizer is None:
            return {}
        return {"optimizer": self._optimizer.capture(self._bind(), self._opaque_cut())}

    def shared_state(self) -> State:
        return {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}

    def install_fence(self, fence: Callable[[], None]) -> Callable[[], None]:
        return (lambda: None) if self._optimizer is None else self._optimizer.install_fence(fence)

    # --- loading ---------------------------------------------------------------------------------

    @property
    def reads_all_shards(self) -> bool:
        """Whether what this rank holds is spread over the shards of several ranks."""
        return any(len(b.holders) > 1 for b in self._bind())

    def targets(self, saved: Mapping[str, Entry], parts: Parts) -> list[Slice]:
        bound = self._bind()
        names = self._saved_names(bound, saved)
        found = []
        if parts.weights:
            for b in bound:
                # A saved master is the parameter; only a saved model without one is it itself.
                name, master = f"model/{names[b.fqn]}", f"master/{names[b.fqn]}"
                if master in saved and dtypes.to_torch(saved[master].dtype) == b.local.dtype:
                    name = master
                found.append(common.make_slice(name, b.local, b.shape, b.region))
            found += common.buffer_slices(self.model)
        if parts.optimizer and self._optimizer is not None:
            found += self._optimizer.targets(bound, names, saved)
        return found

    def _saved_names(self, bound: list[Bound], saved: Mapping[str, Entry]) -> dict[str, str]:
        """Name under which each parameter was saved: a tied one may be stored under another."""
        spellings = {b.fqn: [b.fqn] for b in bound}
        for alias, stored in self.aliases().items():
            spellings.setdefault(stored, []).append(alias)
        return {
            b.fqn: next(
                (n for n in spellings[b.fqn] if f"model/{n}" in saved or f"master/{n}" in saved),
                b.fqn,
            )
            for b in bound
        }

    def check_saved(self, rank_state: State, shared_state: State, parts: Parts) -> None:
        """Raises ``StateMismatch`` where ``restore`` would. Call it before the targets are filled,
        so that a load that is refused changes nothing."""
        if parts.optimizer and self._optimizer is not None:
            saved = rank_state.get("optimizer")
            if saved is not None:
                self._optimizer.check_saved(
                    self._bind(), saved, self._opaque_cut(), strict=parts.strict
                )
            elif parts.strict:
                raise StateMismatch(
                    "the step holds no optimizer state, and an optimizer is to be restored; "
                    "load(optimizer=False) to start it afresh"
                )
        saved = shared_state.get("scheduler")
        if parts.scheduler and parts.strict and (self.scheduler is None) != (saved is None):
            what = "was saved, but none was given" if saved else "was given, but none was saved"
            raise StateMismatch(
                f"an LR scheduler {what}; pass scheduler= as at the save, or load(scheduler=False)"
            )

    def restore(self, rank_state: State, shared_state: State, parts: Parts) -> None:
        self.check_saved(rank_state, shared_state, parts)
        saved = rank_state.get("optimizer")
        if parts.optimizer and self._optimizer is not None and saved is not None:
            self._optimizer.restore(self._bind(), saved, self._opaque_cut(), strict=parts.strict)
        saved = shared_state.get("scheduler")
        if parts.scheduler and self.scheduler is not None and saved is not None:
            self.scheduler.load_state_dict(saved)

    def refresh(self, parts: Parts) -> None:
        """Nothing: what is loaded is what the ranks compute with."""
