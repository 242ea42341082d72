"""A DeepSpeed engine as named slices, and back, bit for bit: ZeRO 0 to 3 and every wrapper.

DESIGN. The fp32 masters and the optimizer state are the truth; the model's 16-bit weights are
their cast and are written only where they are not. ``ds_wrappers`` says where a wrapper keeps its
tensors and which part of which parameter each element is; ``ds_fill`` writes them back in place;
``ds_state`` holds what is no tensor. Replicated tensors are cut by bytes over the ranks that hold
them, computed by each rank alone. Attributes are read afresh at each call: DeepSpeed reallocates
(first step, ``offload_states``), so nothing but the choice of adapter is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sharded_ckpt import plan
from sharded_ckpt.errors import LayoutMismatch, UsageError
from sharded_ckpt.slices import Entry, Run, Slice
from sharded_ckpt.sources import common, ds_state
from sharded_ckpt.sources.base import Parts, State
from sharded_ckpt.sources.ds_fill import Filling, cut
from sharded_ckpt.sources.ds_model import EngineModel, Replicas, expert_groups
from sharded_ckpt.sources.ds_refusals import refuse
from sharded_ckpt.sources.ds_weights import is_cast
from sharded_ckpt.sources.ds_wrappers import Flat, Piece, Wrapper, wrap


@dataclass(frozen=True, slots=True)
class _Held:
    """A piece that this rank holds: of an optimizer's flat, or of a weight nobody trains.

    ``replicas`` is set where other ranks hold the same; ``itemsize`` counts all that is written
    for one element, so that equal shares are equal in bytes.
    """

    piece: Piece
    tensor: torch.Tensor
    flat: Flat | None
    replicas: Replicas | None
    itemsize: int


class DeepSpeedSource:
    """An engine of ``deepspeed.initialize``. Raises ``UnsupportedError`` for refused modes."""

    kind = "deepspeed"

    def __init__(self, engine: Any) -> None:
        refuse(engine)
        self.engine = engine
        self.rank: int = torch.distributed.get_rank()
        self.world_size: int = torch.distributed.get_world_size()
        self._wrapper: Wrapper = wrap(engine)
        # Parameters whose 16-bit weights differed from the cast; None: not compared yet.
        self._overridden: set[str] | None = None
        self._filling: Filling | None = None

    # -- what is there -----------------------------------------------------------------------

    def describe(self) -> State:
        parts = None
        if getattr(self.engine, "grid", None) is not None:
            parts = [int(first) for first in self.engine.module.parts]
        return {
            "source": self.kind,
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "wrapper": self._wrapper.name,
            "world_size": self.world_size,
            "data_parallel": int(self.engine.dp_world_size),
            "pipeline_parts": parts,
            "expert_groups": expert_groups(self.engine.module),
        }

    @property
    def reads_all_shards(self) -> bool:
        """Whether a load needs other ranks' shards, since replicated tensors are cut over them."""
        model = EngineModel(self.engine)
        if not all(param.writes for param in model.params):
            return True
        held = self._held(model, self._wrapper.flats(model))
        return any(item.replicas is not None and item.replicas.size > 1 for item in held)

    def aliases(self) -> dict[str, str]:
        return EngineModel(self.engine).aliases()

    def check_can_save(self) -> None:
        ds_state.check_boundary(self.engine)

    def rank_state(self) -> State:
        model = EngineModel(self.engine)
        flats = self._wrapper.flats(model)
        return ds_state.capture_rank(self.engine, self._wrapper, model, flats)

    def shared_state(self) -> State:
        return {**ds_state.capture_shared(self.engine), "layout": self.describe()}

    # -- saving ------------------------------------------------------------------------------

    def slices(self) -> list[Slice]:
        model = EngineModel(self.engine)
        flats = self._wrapper.flats(model)
        self._overridden = overridden = self._compare(flats)
        changed = {model.global_name(n) for n in common.changed_in_forward(model.module)}
        share = [i for i in self._own_share(self._held(model, flats)) if i.piece.param.writes]
        found: list[Slice] = []
        holds: dict[int, list[str]] = {}
        for item in share:
            found += _weight_slices(item, overridden, changed)
            if item.flat is not None:
                found += self._aligned_slices(item.flat, item.piece)
                holds.setdefault(id(item.flat.master), []).append(item.piece.param.fqn)
        for flat in flats:
            found += self._copy_slices(flat, holds.get(id(flat.master), []))
        found += [
            common.copy_slice(f"buffer/{fqn}", common.check_tensor(fqn, tensor), eager=True)
            for fqn, tensor in model.buffers()
        ]
        return found

    def install_fence(self, fence: Callable[[], None]) -> Callable[[], None]:
        """Calls ``fence`` before masters, moments or the loss scaler change; returns the remover.

        ``_take_model_step`` is the one place that every engine passes, pipelines too; the
        optimizer's own hook stands behind it where that private name is gone.
        """
        removers: list[Callable[[], None]] = []
        take = getattr(self.engine, "_take_model_step", None)
        if take is not None:
            removers.append(_wrap_method(self.engine, "_take_model_step", take, fence))
        register = getattr(self.engine.basic_optimizer, "register_step_pre_hook", None)
        if register is not None:
            removers.append(register(lambda *_: fence()).remove)

        def remove() -> None:
            while removers:
                removers.pop()()

        return remove

    # -- loading -----------------------------------------------------------------------------

    def targets(self, saved: Mapping[str, Entry], parts: Parts) -> list[Slice]:
        # Gradients left over from an unfinished accumulation would go into the next step.
        ds_state.check_boundary(self.engine)
        model = EngineModel(self.engine)
        flats = self._wrapper.flats(model)
        filling = self._filling = Filling(self._wrapper.inner, saved)
        for flat in flats:
            if parts.weights:
                filling.add_weights(flat)
            if parts.optimizer:
                filling.add_state(flat)
        if parts.weights:
            for tensor, piece, _ in self._rest(model, flats):
                filling.add_rest(tensor, piece)
            for fqn, tensor in model.buffers():
                filling.add_buffer(fqn, tensor)
        return filling.slices

    def check_saved(self, rank_state: State, shared_state: State, parts: Parts) -> None:
        """Raises what :meth:`restore` would, once :meth:`targets` has said what will be filled."""
        filling = self._pending()
        if filling.opaque and shared_state["layout"] != self.describe():
            raise LayoutMismatch(
                f"optimizer state {filling.opaque[0]} is not one value for each element, so only "
                f"the layout that saved it can load it: saved {shared_state['layout']}, here "
                f"{self.describe()}; load on the saved layout, or load(optimizer=False)"
            )
        ds_state.check_shared(self.engine, shared_state, parts)
        if parts.optimizer:
            filling.check_scalars(rank_state.get("optimizer_scalars", {}))
        if parts.optimizer or parts.scheduler:
            self._groups(rank_state, parts)
        if parts.data and parts.strict:
            ds_state.check_sampler(self.engine, rank_state.get("data_sampler"))

    def restore(self, rank_state: State, shared_state: State, parts: Parts) -> None:
        with torch.no_grad():
            self.check_saved(rank_state, shared_state, parts)
            self._take(self._pending(), rank_state, shared_state, parts)
        self._filling = None

    def refresh(self, parts: Parts) -> None:
        with torch.no_grad():
            if parts.weights:
                # Collective: the other ranks compute with what this one has just loaded.
                self._wrapper.gather()
                self._overridden = None
            if parts.optimizer:
                self._wrapper.relink()

    # -- parts -------------------------------------------------------------------------------

    def _pending(self) -> Filling:
        if self._filling is None:
            raise UsageError("restore() without targets(); call targets() and fill them first")
        return self._filling

    def _groups(self, rank_state: State, parts: Parts) -> list[tuple[State, State]]:
        saved = rank_state.get("param_groups", [])
        return ds_state.match_groups(self._wrapper, EngineModel(self.engine), saved, parts)

    def _take(self, filling: Filling, rank_state: State, shared_state: State, parts: Parts) -> None:
        """Everything of a load that follows the bytes and needs no other rank."""
        groups = self._groups(rank_state, parts) if parts.optimizer or parts.scheduler else []
        filling.finish()
        ds_state.restore_shared(self.engine, shared_state, parts)
        if parts.optimizer:
            filling.restore_scalars(rank_state.get("optimizer_scalars", {}))
        ds_state.restore_groups(groups, parts)
        if parts.data:
            ds_state.restore_sampler(self.engine, rank_state.get("data_sampler"))
        if parts.weights:
            for flat in self._wrapper.flats(EngineModel(self.engine)):
                if flat.weights is not None:
                    flat.weights.detach().copy_(flat.master.detach())
            filling.override_weights()

    def _rest(
        self, model: EngineModel, flats: list[Flat]
    ) -> list[tuple[torch.Tensor, Piece, Replicas | None]]:
        """Weights that the optimizer does not train: frozen ones, and those left out of it."""
        trained = {id(p.tensor) for flat in flats for p in flat.params}
        untrained = [p for p in model.params if id(p.tensor) not in trained]
        return [self._wrapper.rest(model, param) for param in untrained]

    def _held(self, model: EngineModel, flats: list[Flat]) -> list[_Held]:
        held = []
        for flat in flats:
            states = self._state(flat).aligned.values()
            itemsize = flat.master.element_size() + sum(t.element_size() for t in states)
            held += [_Held(p, flat.master, flat, flat.replicas, itemsize) for p in flat.pieces]
        for tensor, piece, replicas in self._rest(model, flats):
            if replicas is not None or piece.numel:
                held.append(_Held(piece, tensor, None, replicas, tensor.element_size()))
        return held

    def _own_share(self, held: list[_Held]) -> Iterator[_Held]:
        """What this rank writes: its partitions whole, and its share of what is replicated."""
        replicated: dict[str, list[_Held]] = {}
        for item in held:
            if item.replicas is None:
                yield item
            else:
                replicated.setdefault(item.piece.param.expert_group, []).append(item)
        for items in replicated.values():
            replicas = items[0].replicas
            assert replicas is not None
            shares = plan.split_replicated(
                [i.piece.numel for i in items], [i.itemsize for i in items], replicas.size
            )
            for index, start, numel in shares[replicas.rank]:
                whole = items[index].piece
                piece = Piece(whole.param, whole.start + start, numel, whole.at + start)
                yield replace(items[index], piece=piece)

    def _compare(self, flats: list[Flat]) -> set[str]:
        """Parameters whose weights here are not the cast of their masters.

        All are compared at the first save of a run and after a load; later only those that
        differed, since each step makes the others the cast again.
        """
        suspects = self._overridden
        return {
            piece.param.fqn
            for flat in flats
            if flat.weights is not None
            for piece in flat.pieces
            if (suspects is None or piece.param.fqn in suspects)
            and not is_cast(cut(flat.master, piece), cut(flat.weights, piece))
        }

    def _state(self, flat: Flat) -> common.ParamState:
        state = self._wrapper.inner.state.get(flat.master, {})
        return common.sort_state(flat.params[0].fqn, state, flat.master.shape)

    def _aligned_slices(self, flat: Flat, piece: Piece) -> list[Slice]:
        return [
            _piece_slice(f"optim/{piece.param.fqn}/{key}", piece, tensor)
            for key, tensor in self._state(flat).aligned.items()
        ]

    def _copy_slices(self, flat: Flat, holds: list[str]) -> list[Slice]:
        """Counters under each parameter that this rank writes, other state under the first."""
        if not flat.named_after.writes:
            return []
        first = flat.named_after.fqn
        state = self._state(flat)
        found = []
        if not holds and flat.replicas is None:
            # A partition that is all padding: its counters, and which state there is.
            holds = [first]
            nothing = Piece(flat.named_after, 0, 0, 0)
            for key, tensor in state.aligned.items():
                found.append(_piece_slice(f"optim/{first}/{key}", nothing, tensor))
        for key, tensor in state.copies.items():
            for fqn in [first] if tensor.ndim else holds:
                name = f"optim/{fqn}/{key}"
                found.append(common.copy_slice(name, common.check_tensor(name, tensor)))
        return found


def _weight_slices(item: _Held, overridden: set[str], changed: set[str]) -> list[Slice]:
    piece, fqn = item.piece, item.piece.param.fqn
    weights = None if item.flat is None else item.flat.weights
    if weights is None:
        # The model computes with this very tensor, so some forward passes change it.
        return [_piece_slice(f"model/{fqn}", piece, item.tensor, eager=fqn in changed)]
    found = [_piece_slice(f"master/{fqn}", piece, item.tensor, model_dtype=weights.dtype)]
    if fqn in overridden:
        found.append(_piece_slice(f"model/{fqn}", piece, weights, eager=fqn in changed))
    return found


def _piece_slice(
    name: str,
    piece: Piece,
    tensor: torch.Tensor,
    *,
    eager: bool = False,
    model_dtype: torch.dtype | None = None,
) -> Slice:
    region = Run(piece.start, piece.numel)
    return common.make_slice(
        name, cut(tensor, piece), piece.param.shape, region, eager=eager, model_dtype=model_dtype
    )


def _wrap_method(
    owner: Any, name: str, method: Callable[..., Any], before: Callable[[], None]
) -> Callable[[], None]:
    """Calls ``before`` ahead of an instance's method; the remover leaves later wrappers alone."""
    active = True

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if active:
            before()
        return method(*args, **kwargs)

    previous = vars(owner).get(name)
    setattr(owner, name, wrapped)

    def remove() -> None:
        nonlocal active
        active = False
        if vars(owner).get(name) is not wrapped:
            return  # somebody wrapped it after us and still calls us
        if previous is None:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)

    return remove
