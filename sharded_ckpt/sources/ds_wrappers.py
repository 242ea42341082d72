"""Where each DeepSpeed optimizer wrapper keeps its tensors: one small adapter for each class.

An adapter is chosen by the attributes that the wrapper has, never by version or class name, and
gives :class:`Flat` values: one for each tensor that the inner optimizer updates, with the
parameters (or parts of them) laid out in it. Padding is in no piece, so it is never written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sharded_ckpt.sources.ds_model import EngineModel, Param, Replicas
from sharded_ckpt.sources.ds_refusals import unknown_wrapper

# The older name of the collective is deprecated where the newer one exists.
_ALL_GATHER: Callable[..., Any] = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start .. start + numel`` of ``param``, which are at ``at`` in the flat tensor."""

    param: Param
    start: int
    numel: int
    at: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One tensor that the inner optimizer updates, and what belongs to it.

    ``weights`` is the model's own (16-bit) copy of the same elements, in the same order, where
    there is one apart from ``master``. ``params`` are all parameters of the group that was cut,
    also those of which this rank holds nothing. ``replicas`` is set where every rank of a
    data-parallel group holds the whole of ``master``; then each writes an equal share.
    """

    master: torch.Tensor
    weights: torch.Tensor | None
    group: int
    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    replicas: Replicas | None

    @property
    def named_after(self) -> Param:
        """The parameter under whose name state that belongs to the whole tensor is kept."""
        return next((p for p in self.params if p.writes), self.params[0])


class Wrapper(ABC):
    """One kind of optimizer wrapper. ``inner`` is the torch optimizer that it steps."""

    name: str

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.outer = engine.optimizer
        self.inner: torch.optim.Optimizer = getattr(self.outer, "optimizer", self.outer)

    @abstractmethod
    def flats(self, model: EngineModel) -> list[Flat]:
        """Every tensor that the inner optimizer updates on this rank, read from live attributes."""

    def groups(self, model: EngineModel) -> list[list[Param]]:
        """The trained parameters of each of the inner optimizer's groups."""
        found: list[list[Param]] = [[] for _ in self.inner.param_groups]
        for flat in self.flats(model):
            found[flat.group].extend(flat.params)
        return found

    def rest(self, model: EngineModel, param: Param) -> tuple[torch.Tensor, Piece, Replicas | None]:
        """The weight of a parameter that the optimizer does not train."""
        piece = Piece(param, 0, param.numel, 0)
        return param.tensor.detach(), piece, model.replicas(param)

    def gather(self) -> None:
        """Gives this rank's new weights to the ranks that compute with them; a collective."""
        return

    def relink(self) -> None:
        """Rebuilds DeepSpeed's links from parameters to optimizer state (``safe_get_full_*``)."""
        link = getattr(self.outer, "_link_all_hp_params", None)
        if link is not None:
            link()
        if hasattr(self.outer, "_hp_optimizer_states_linked"):
            self.outer._hp_optimizer_states_linked = False


class Raw(Wrapper):
    """Stage 0 in fp32: the torch optimizer itself, on the module's own parameters."""

    name = "torch"

    def flats(self, model: EngineModel) -> list[Flat]:
        found = []
        for index, group in enumerate(self.inner.param_groups):
            for tensor in group["params"]:
                if tensor.requires_grad and tensor.numel():
                    found.append(_whole(model, tensor, tensor, None, index))
        return found


class Unfused(Wrapper):
    """``FP16_UnfusedOptimizer``: one fp32 master for each parameter, the same on all ranks."""

    name = "FP16_UnfusedOptimizer"

    def flats(self, model: EngineModel) -> list[Flat]:
        return [
            _whole(model, tensor, master, tensor, index)
            for index, (tensors, masters) in enumerate(
                zip(self.outer.fp16_groups, self.outer.fp32_groups, strict=True)
            )
            for tensor, master in zip(tensors, masters, strict=True)
        ]


class Fused(Wrapper):
    """``FP16_Optimizer``: one flat fp32 master for each group, unpadded, the same on all ranks."""

    name = "FP16_Optimizer"

    def flats(self, model: EngineModel) -> list[Flat]:
        found = []
        for index, tensors in enumerate(self.outer.fp16_groups):
            params = model.all_of(tensors)
            found.append(
                Flat(
                    master=self.outer.fp32_groups_flat[index],
                    weights=self.outer.fp16_groups_flat[index],
                    group=index,
                    params=tuple(params),
                    pieces=_cut(params, _offsets(params), 0, sum(p.numel for p in params)),
                    replicas=model.replicas(params[0]),
                )
            )
        return found


class _Partitioned(Wrapper):
    """ZeRO-1/2 and BF16_Optimizer: groups are flattened, padded at the end, cut equally."""

    @abstractmethod
    def _layout(self, index: int) -> tuple[Sequence[torch.Tensor], Sequence[int] | None]:
        """Parameters of a group in flat order; their offsets, unless they simply follow."""

    @abstractmethod
    def _buffers(self, index: int) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        """The master partition, the flat weights, and the flat weights' parts by rank."""

    def flats(self, model: EngineModel) -> list[Flat]:
        found = []
        for index in range(len(self.inner.param_groups)):
            tensors, offsets = self._layout(index)
            master, flat, parts = self._buffers(index)
            group = self.outer.real_dp_process_group[index]
            rank = torch.distributed.get_rank(group)
            size = flat.numel() // torch.distributed.get_world_size(group)
            params = model.all_of(tensors)
            found.append(
                Flat(
                    master=master,
                    weights=parts[rank],
                    group=index,
                    params=tuple(params),
                    pieces=_cut(params, offsets or _offsets(params), rank * size, size),
                    replicas=None,
                )
            )
        return found

    def gather(self) -> None:
        for index in range(len(self.inner.param_groups)):
            _, flat, parts = self._buffers(index)
            group = self.outer.real_dp_process_group[index]
            own = parts[torch.distributed.get_rank(group)]
            # The parts are views of the flat tensor; not every backend gathers in place.
            _ALL_GATHER(flat.detach(), own.detach().clone(), group)


class Zero12(_Partitioned):
    """``DeepSpeedZeroOptimizer``, stages 1 and 2. Round-robin order and alignment are its own."""

    name = "DeepSpeedZeroOptimizer"

    def _layout(self, index: int) -> tuple[Sequence[torch.Tensor], Sequence[int] | None]:
        offsets = getattr(self.outer, "round_robin_bit16_offsets", None)
        ordered = self.outer.round_robin_bit16_groups[index]
        return ordered, None if offsets is None else offsets[index]

    def _buffers(self, index: int) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        return (
            self.outer.single_partition_of_fp32_groups[index],
            self.outer.bit16_groups_flat[index],
            self.outer.parallel_partitioned_bit16_groups[index],
        )


class Bf16(_Partitioned):
    """``BF16_Optimizer``: stage 1 with fp32 gradient accumulation, and bf16 pipelines."""

    name = "BF16_Optimizer"

    def _layout(self, index: int) -> tuple[Sequence[torch.Tensor], Sequence[int] | None]:
        return self.outer.bf16_groups[index], None

    def _buffers(self, index: int) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
        return (
            self.outer.fp32_groups_flat_partition[index],
            self.outer.bf16_groups_flat[index],
            self.outer.bf16_partitioned_groups[index],
        )


class Zero3(Wrapper):
    """``DeepSpeedZeroOptimizer_Stage3``: every parameter is cut on its own, by sub-groups."""

    name = "DeepSpeedZeroOptimizer_Stage3"

    def flats(self, model: EngineModel) -> list[Flat]:
        found = []
        for index, tensors in enumerate(self.outer.fp16_groups):
            params = model.all_of(tensors)
            pieces, at = [], 0
            for param in params:
                pieces.append(self._piece(param, self._sub_group(index), at))
                at += int(param.tensor.partition_numel())
            master = self.outer.fp32_partitioned_groups_flat[index]
            weights = self.outer.fp16_partitioned_groups_flat[index]
            if weights.data_ptr() == master.data_ptr() and weights.dtype == master.dtype:
                weights = None  # fp32 training: one storage for both
            found.append(
                Flat(
                    master=master,
                    weights=weights,
                    group=self.outer.sub_group_to_group_id[index],
                    params=tuple(params),
                    pieces=tuple(p for p in pieces if p.numel),
                    replicas=None,
                )
            )
        return found

    def rest(self, model: EngineModel, param: Param) -> tuple[torch.Tensor, Piece, Replicas | None]:
        group = getattr(param.tensor, "ds_process_group", None) or self.outer.dp_process_group
        partition: torch.Tensor = param.tensor.ds_tensor
        return partition.detach(), self._piece(param, group, 0), None

    def gather(self) -> None:
        # Gathered weights and hpZ's second copies are stale: drop them, fetch the persistent ones.
        self.outer.checkpoint_event_prologue()
        for parameter in self.engine.module.parameters():
            if getattr(parameter, "ds_secondary_tensor", None) is not None:
                parameter.ds_secondary_tensor = None
        self.outer.checkpoint_event_epilogue()

    def _sub_group(self, index: int) -> Any:
        find = getattr(self.outer, "_get_sub_group_process_group", None)
        return self.outer.dp_process_group if find is None else find(index)

    @staticmethod
    def _piece(param: Param, group: Any, at: int) -> Piece:
        # Each rank's part is equally long; the last ones may be partly or wholly padding.
        length = int(param.tensor.partition_numel())
        start = min(torch.distributed.get_rank(group) * length, param.numel)
        return Piece(param, start, min(length, param.numel - start), at)


# The first attribute that the wrapper has decides; the order goes from special to general.
_BY_ATTRIBUTE: tuple[tuple[str, type[Wrapper]], ...] = (
    ("single_partition_of_fp32_groups", Zero12),
    ("fp32_groups_flat_partition", Bf16),
    ("fp32_partitioned_groups_flat", Zero3),
    ("fp32_groups_flat", Fused),
    ("fp32_groups", Unfused),
)


def wrap(engine: Any) -> Wrapper:
    """The adapter of ``engine.optimizer``. Raises :class:`UnsupportedError` for unknown ones."""
    optimizer = engine.optimizer
    for attribute, adapter in _BY_ATTRIBUTE:
        if hasattr(optimizer, attribute):
            return adapter(engine)
    if isinstance(optimizer, torch.optim.Optimizer):
        return Raw(engine)
    raise unknown_wrapper(optimizer)


def _whole(
    model: EngineModel,
    tensor: torch.Tensor,
    master: torch.Tensor,
    weights: torch.Tensor | None,
    group: int,
) -> Flat:
    param = model.of(tensor)
    piece = Piece(param, 0, param.numel, 0)
    return Flat(master, weights, group, (param,), (piece,), model.replicas(param))


def _offsets(params: Sequence[Param]) -> list[int]:
    offsets, at = [], 0
    for param in params:
        offsets.append(at)
        at += param.numel
    return offsets


def _cut(
    params: Sequence[Param], offsets: Sequence[int], start: int, numel: int
) -> tuple[Piece, ...]:
    """The pieces of ``params`` in elements ``start .. start + numel`` of the flattened group."""
    pieces = []
    for param, offset in zip(params, offsets, strict=True):
        low, high = max(offset, start), min(offset + param.numel, start + numel)
        if low < high:
            pieces.append(Piece(param, low - offset, high - low, low - start))
    return tuple(pieces)
