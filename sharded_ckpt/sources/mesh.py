"""Which block of a DTensor this rank holds, and which other ranks hold the same one.

Computed from mesh and placements alone, without a collective. torch's own function gives wrong
boxes for uneven tensors that tensor parallelism and FSDP2 shard along the same dimension, so ours
is used, and every box is compared with the shape of the local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from sharded_ckpt.errors import UnsupportedError
from sharded_ckpt.slices import Box, Region

try:  # Private, and a subclass of Shard in some releases of torch only.
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # pragma: no cover

    class _StridedShard:  # type: ignore[no-redef]
        """Stands for a placement that this release of torch does not have."""


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a tensor that this rank holds, and all ranks that hold the same, in order."""

    region: Region
    holders: tuple[int, ...]


def local_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Any
) -> Box:
    """The block that ``coordinate`` of the mesh holds of a tensor of ``shape``.

    A ``_StridedShard`` cuts what the shards to its right have left (FSDP2 shards a tensor that
    tensor parallelism has already sharded). Raises ``UnsupportedError`` for partial placements.
    """
    size, offset = list(shape), [0] * len(shape)
    strided = [i for i, p in enumerate(placements) if isinstance(p, _StridedShard)]
    order = [i for i in range(len(placements)) if i not in strided] + strided
    for i in order:
        placement = placements[i]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise UnsupportedError(f"placement {placement} is neither a shard nor a replica")
        dim = placement.dim % len(shape)
        chunk = -(-size[dim] // mesh_shape[i])
        start = min(chunk * coordinate[i], size[dim])
        end = min(start + chunk, size[dim])
        offset[dim] += start
        size[dim] = end - start
    return Box(tuple(offset), tuple(size))


def _check_strided(
    name: str, shape: Sequence[int], mesh_shape: Sequence[int], placements: Any
) -> None:
    """A strided shard must skip exactly the shards to its right: the only kind that FSDP2 makes."""
    for i, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        right = [
            (p, mesh_shape[j])
            for j, p in enumerate(placements)
            if j > i and isinstance(p, Shard | _StridedShard) and p.dim == placement.dim
        ]
        skipped = math.prod(count for _, count in right)
        if placement.split_factor != skipped or any(isinstance(p, _StridedShard) for p, _ in right):
            raise UnsupportedError(
                f"{name} of shape {list(shape)} has placements {tuple(placements)} on a mesh of "
                f"{list(mesh_shape)}, which are not those of FSDP2 over tensor parallelism; this "
                "way of sharding cannot be captured"
            )


def held(name: str, tensor: DTensor, world_size: int) -> Held:
    """What this rank holds of ``tensor``, checked against its local shape.

    Raises ``UnsupportedError`` where mesh and placements do not tell: partial sums, shards that
    are not where they should be, a mesh that covers some ranks and no root mesh that covers all.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedError(
            f"{name} lives on a mesh of which this rank is no part ({mesh}); models that differ "
            "between ranks cannot be captured"
        )
    mesh_shape = tuple(mesh.shape)
    _check_strided(name, tensor.shape, mesh_shape, placements)
    try:
        box = local_box(tensor.shape, mesh_shape, coordinate, placements)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name} of shape {list(tensor.shape)}: {error}") from None
    local = tuple(tensor._local_tensor.shape)
    if box.extent != local:
        raise UnsupportedError(
            f"{name} of shape {list(tensor.shape)} has a local tensor of shape {list(local)} at "
            f"coordinate {list(coordinate)} of mesh {list(mesh_shape)} with placements "
            f"{tuple(placements)}, expected {list(box.extent)}; this way of sharding cannot be "
            "captured"
        )
    return Held(box, _holders(name, mesh, placements, world_size))


def _holders(name: str, mesh: Any, placements: Any, world_size: int) -> tuple[int, ...]:
    """Ranks whose blocks equal this rank's: those along replicated dimensions of the mesh.

    Where the mesh was sliced from a larger one, the ranks along the dimensions that it leaves out
    hold equal blocks too: a module that is not in the tensor-parallel plan is sharded over the
    data-parallel ranks only, once for every tensor-parallel rank.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.size() == world_size:
        free = {i for i, p in enumerate(placements) if isinstance(p, Replicate)}
    else:
        cut_along = {
            n for n, p in zip(names, placements, strict=False) if not isinstance(p, Replicate)
        }
        mesh, part = mesh._get_root_mesh(), mesh
        whole_names = mesh.mesh_dim_names or ()
        if mesh.size() != world_size or not names or not set(names) <= set(whole_names):
            raise UnsupportedError(
                f"{name} is sharded over {part.size()} of {world_size} ranks by the mesh {part}, "
                "and what the other ranks hold is not known; slice every mesh from one named "
                "init_device_mesh that covers all ranks"
            )
        free = {i for i, n in enumerate(whole_names) if n not in cut_along}
    coordinate = mesh.get_coordinate()
    index = tuple(slice(None) if i in free else c for i, c in enumerate(coordinate))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def describe(tensor: DTensor) -> dict[str, Any]:
    """Mesh and placements as JSON, equal on all ranks."""
    mesh = tensor.device_mesh
    return {
        "mesh": list(mesh.shape),
        "dims": list(mesh.mesh_dim_names or ()),
        "placements": [_spell(p) for p in tensor.placements],
    }


def _spell(placement: Any) -> str:
    if isinstance(placement, _StridedShard):
        return f"strided_shard({placement.dim}, {placement.split_factor})"
    return f"shard({placement.dim})" if isinstance(placement, Shard) else "replicate"


def same_cut(a: DTensor, b: DTensor) -> bool:
    """Whether two DTensors of one shape are cut alike over the same ranks."""
    return bool(
        a.shape == b.shape and a.device_mesh == b.device_mesh and a.placements == b.placements
    )


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of ``local`` data that is cut as ``tensor`` is, without a collective."""
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
