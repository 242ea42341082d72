"""What a load writes into a live engine, and what must follow once the bytes are there.

Saved tensors go straight into live memory where dtypes agree. Where they do not (a 16-bit frozen
weight taken from a saved fp32 master), they go through a scratch tensor. Optimizer state that the
live optimizer has not created yet is created; what it has and the step has not is cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sharded_ckpt import dtypes
from sharded_ckpt.errors import StateMismatch
from sharded_ckpt.slices import Entry, Run, Slice, whole
from sharded_ckpt.sources import common
from sharded_ckpt.sources.ds_weights import apply_override, can_override, marked
from sharded_ckpt.sources.ds_wrappers import Flat, Piece

Scalars = Mapping[str, Mapping[str, Any]]


class Filling:
    """The targets of one load. ``finish`` and the calls after it run once all are filled."""

    def __init__(self, inner: torch.optim.Optimizer, saved: Mapping[str, Entry]) -> None:
        self.slices: list[Slice] = []
        self.opaque: list[str] = []
        self._inner = inner
        self._saved = saved
        self._states = common.saved_states(saved)
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._overrides: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._numbers: list[tuple[torch.Tensor, dict[str, Any], str]] = []
        self._twins: list[tuple[str, torch.Tensor, str, torch.Tensor]] = []
        self._flats: list[Flat] = []
        self._named_scalars: dict[int, set[str]] = {}
        # Nothing live changes before everything was read: what is new waits here.
        self._created: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self._cleared: list[torch.Tensor] = []

    # -- before the bytes are read ------------------------------------------------------------

    def add_weights(self, flat: Flat) -> None:
        for piece in flat.pieces:
            live = cut(flat.master, piece)
            own = None if flat.weights is None else cut(flat.weights, piece)
            self._add_weight(piece, live, own)

    def add_rest(self, tensor: torch.Tensor, piece: Piece) -> None:
        if piece.numel or f"model/{piece.param.fqn}" in self._saved:
            self._add_weight(piece, cut(tensor, piece), None)

    def add_buffer(self, fqn: str, tensor: torch.Tensor) -> None:
        name = f"buffer/{fqn}"
        shape = tuple(tensor.shape)
        self._add(Entry(name, "", shape, whole(shape), copy=True), tensor)

    def add_state(self, flat: Flat) -> None:
        """Targets for all saved state of ``flat``, created where the optimizer has none yet."""
        self._flats.append(flat)
        keys = dict.fromkeys(k for p in flat.params for k in self._states.get(p.fqn, ()))
        state: dict[str, Any] = self._inner.state.get(flat.master, {})
        named = self._named_scalars[id(flat.master)] = set()
        for key in keys:
            holders = [p for p in flat.params if key in self._states.get(p.fqn, ())]
            entry = self._saved[f"optim/{holders[0].fqn}/{key}"]
            if not entry.copy:
                self._add_aligned(flat, state, key, entry)
            elif entry.shape == ():
                named.add(key)
                self._add_scalar(flat, state, key, entry)
            else:
                self._add_opaque(flat, state, key, entry)
        if keys:
            # What exists here but was not saved is wanted all the same: the reader reports it.
            have = common.sort_state(flat.params[0].fqn, state, flat.master.shape)
            for key in have.aligned.keys() - keys:
                for piece in flat.pieces:
                    self._add_piece(f"optim/{piece.param.fqn}/{key}", piece, have.aligned[key])
            for key in set(have.opaque) - keys.keys():
                self._add_copy(f"optim/{flat.named_after.fqn}/{key}", have.copies[key])

    # -- after they are ------------------------------------------------------------------------

    def finish(self) -> None:
        """Installs what was created and moves scratch tensors to where they belong."""
        for (_, key), (master, tensor) in self._created.items():
            self._inner.state[master][key] = tensor
        for live in self._cleared:
            live.zero_()
        for scratch, live in self._converted:
            live.copy_(scratch)
        for scratch, state, key in self._numbers:
            state[key] = type(state[key])(scratch.item())
        for name, tensor, other_name, other in self._twins:
            if not torch.equal(tensor.cpu(), other):
                raise StateMismatch(
                    f"{name} is {tensor.item()} but {other_name} is {other.item()}, and this "
                    "optimizer keeps one value for both; load on the saved layout instead"
                )

    def override_weights(self) -> None:
        """Puts back the 16-bit weights that were not the cast of their masters."""
        for scratch, live in self._overrides:
            apply_override(scratch, live)

    def check_scalars(self, scalars: Scalars) -> None:
        """Raises :class:`StateMismatch` where the optimizer counts what the step did not save."""
        for flat in self._flats:
            saved = self._scalars_of(flat, scalars)
            state = self._inner.state.get(flat.master, {})
            have = common.sort_state(flat.params[0].fqn, state, flat.master.shape)
            counters = {k for k, t in have.copies.items() if t.ndim == 0} | have.scalars.keys()
            known = self._named_scalars[id(flat.master)] | saved.keys()
            if counters - known and (saved or self._has_tensors(flat)):
                raise StateMismatch(
                    f"optimizer state {sorted(counters - known)} of {flat.params[0].fqn} is not in "
                    f"the step, which has {sorted(known)}; use the optimizer that was saved, or "
                    "load(optimizer=False)"
                )

    def restore_scalars(self, scalars: Scalars) -> None:
        """Python values of optimizer state, by parameter; clears state that was not saved."""
        for flat in self._flats:
            saved = self._scalars_of(flat, scalars)
            if not saved and not self._has_tensors(flat):
                self._inner.state.pop(flat.master, None)
                continue
            state = self._inner.state[flat.master]
            for key, value in saved.items():
                live = state.get(key)
                if isinstance(live, torch.Tensor) and value is not None:
                    live.fill_(value)
                else:
                    state[key] = value

    @staticmethod
    def _scalars_of(flat: Flat, scalars: Scalars) -> Mapping[str, Any]:
        return next((scalars[p.fqn] for p in flat.params if p.fqn in scalars), {})

    def _has_tensors(self, flat: Flat) -> bool:
        return any(p.fqn in self._states for p in flat.params)

    # -- one target ----------------------------------------------------------------------------

    def _add_weight(self, piece: Piece, live: torch.Tensor, own: torch.Tensor | None) -> None:
        fqn = piece.param.fqn
        master, model = f"master/{fqn}", f"model/{fqn}"
        default = model if own is None else master
        name = next((n for n in (master, model) if n in self._saved), default)
        self._add_piece(name, piece, live, cut_already=True)
        if not (master in self._saved and model in self._saved):
            return
        weights = live if own is None else own
        dtype = dtypes.to_torch(self._saved[model].dtype)
        if dtype == weights.dtype and can_override(dtype):
            scratch = marked(weights, dtype)
            self._overrides.append((scratch, weights))
            entry = replace(self._saved[model], region=Run(piece.start, piece.numel))
            self.slices.append(Slice(entry, scratch))

    def _add_aligned(self, flat: Flat, state: dict[str, Any], key: str, entry: Entry) -> None:
        live = state.get(key)
        if not isinstance(live, torch.Tensor):
            live = self._create(flat, key, flat.master.shape, entry, flat.master.device)
        if live.shape != flat.master.shape:
            raise StateMismatch(
                f"optimizer state {key!r} of {flat.params[0].fqn} was saved for each element, here "
                f"it has shape {list(live.shape)} for {list(flat.master.shape)}; use the optimizer "
                "that was saved, or load(optimizer=False)"
            )
        # A partition that is all padding is still asked for by name, with no elements.
        for piece in flat.pieces or [Piece(flat.named_after, 0, 0, 0)]:
            if piece.param.fqn in self._states:
                self._add_piece(f"optim/{piece.param.fqn}/{key}", piece, live)
            else:  # never stepped where it was saved: what a fresh optimizer starts from
                self._cleared.append(cut(live, piece))

    def _add_scalar(self, flat: Flat, state: dict[str, Any], key: str, entry: Entry) -> None:
        own = [p.param.fqn for p in flat.pieces] or [flat.named_after.fqn]
        own = [fqn for fqn in own if key in self._states.get(fqn, ())] or [
            p.fqn for p in flat.params if key in self._states.get(p.fqn, ())
        ][:1]
        first = f"optim/{own[0]}/{key}"
        live = state.get(key)
        if key not in state:
            group = self._inner.param_groups[flat.group]
            on_device = group.get("capturable") or group.get("fused")
            device = flat.master.device if on_device else torch.device("cpu")
            live = self._create(flat, key, (), entry, device)
        elif not isinstance(live, torch.Tensor):
            live = torch.zeros((), dtype=dtypes.to_torch(entry.dtype))
            self._numbers.append((live, state, key))
        self._add_copy(first, live)
        for fqn in own[1:]:
            twin = torch.zeros((), dtype=live.dtype)
            self._add_copy(f"optim/{fqn}/{key}", twin)
            self._twins.append((first, live, f"optim/{fqn}/{key}", twin))

    def _add_opaque(self, flat: Flat, state: dict[str, Any], key: str, entry: Entry) -> None:
        live = state.get(key)
        if not isinstance(live, torch.Tensor):
            live = self._create(flat, key, entry.shape, entry, flat.master.device)
        name = f"optim/{flat.named_after.fqn}/{key}"
        self.opaque.append(name)
        self._add_copy(name, live)

    def _create(
        self, flat: Flat, key: str, shape: Sequence[int], entry: Entry, device: torch.device
    ) -> torch.Tensor:
        tensor = torch.zeros(tuple(shape), dtype=dtypes.to_torch(entry.dtype), device=device)
        self._created[id(flat.master), key] = (flat.master, tensor)
        return tensor

    def _add_piece(
        self, name: str, piece: Piece, tensor: torch.Tensor, *, cut_already: bool = False
    ) -> None:
        live = tensor if cut_already else cut(tensor, piece)
        self._add(Entry(name, "", piece.param.shape, Run(piece.start, piece.numel)), live)

    def _add_copy(self, name: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        self._add(Entry(name, "", shape, whole(shape), copy=True), tensor)

    def _add(self, entry: Entry, live: torch.Tensor) -> None:
        """Asks for ``entry`` in the saved dtype, by way of scratch where ``live`` differs."""
        live = common.check_tensor(entry.name, live)
        found = self._saved.get(entry.name)
        own = dtypes.from_torch(live.dtype, entry.name).name
        entry = replace(entry, dtype=own if found is None else found.dtype)
        if entry.dtype != own:
            scratch = torch.empty(
                live.shape, dtype=dtypes.to_torch(entry.dtype), device=live.device
            )
            self._converted.append((scratch, live))
            live = scratch
        self.slices.append(Slice(entry, live))


def cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of ``piece`` in a tensor that is laid out like its flat master; a view."""
    flat = common.check_tensor(piece.param.fqn, tensor).view(-1)
    return flat[piece.at : piece.at + piece.numel]
