"""One parameter as this rank holds it, and the cut of what several ranks hold alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sharded_ckpt import plan
from sharded_ckpt.slices import Region, Run, Slice, runs
from sharded_ckpt.sources import common


@dataclass(slots=True)
class Bound:
    """One parameter of the model: its name, this rank's data, and which part of it that is.

    ``holders`` are all ranks that hold the same part, this one among them.
    """

    fqn: str
    parameter: Any
    local: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    holders: tuple[int, ...]
    eager: bool = False
    model_dtype: torch.dtype | None = None


# A name, the data of this rank, and the parameter that it is cut like.
Piece = tuple[str, torch.Tensor, Bound]


def local_of(tensor: Any) -> Any:
    """The data that this rank holds of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def cut(pieces: Sequence[Piece], rank: int) -> list[Slice]:
    """The slices that ``rank`` writes: what it holds alone, and its share of everything else.

    Blocks that are no single run of the flattened tensor, and empty ones, are not cut: the first
    of their holders writes them.
    """
    found = []
    shared: dict[tuple[int, ...], list[tuple[Piece, int]]] = {}
    for name, tensor, b in pieces:
        spans = list(islice(runs(b.region, b.shape), 2))
        if len(b.holders) > 1 and len(spans) == 1:
            shared.setdefault(b.holders, []).append(((name, tensor, b), spans[0][0]))
        elif b.holders[0] == rank:
            found.append(_slice(name, tensor, b, b.region))
    for holders, members in shared.items():
        sizes = [tensor.numel() for (_, tensor, _), _ in members]
        itemsizes = [tensor.element_size() for (_, tensor, _), _ in members]
        shares = plan.split_replicated(sizes, itemsizes, len(holders))
        for index, start, numel in shares[holders.index(rank)]:
            (name, tensor, b), base = members[index]
            if numel == tensor.numel():
                found.append(_slice(name, tensor, b, b.region))
            else:
                part = tensor.view(-1)[start : start + numel]
                found.append(_slice(name, part, b, Run(base + start, numel)))
    return found


def _slice(name: str, tensor: torch.Tensor, b: Bound, region: Region) -> Slice:
    return common.make_slice(
        name,
        tensor,
        b.shape,
        region,
        eager=b.eager and name.startswith("model/"),
        model_dtype=b.model_dtype if name.startswith("model/") else None,
    )
