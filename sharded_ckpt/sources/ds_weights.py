"""The model's own weights beside their masters: are they the cast, and where are they not.

A weight that is not the cast of its master is written as an override, ``model/<fqn>``. Overrides
may cover part of a tensor only (a rank compares its own partition), so on loading they go into a
scratch tensor that was filled with a marker, and what is still the marker takes the cast. The
marker is a signalling NaN: no arithmetic on any device produces one.
"""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MARKERS = {torch.bfloat16: 0x7FA5, torch.float16: 0x7DA5, torch.float32: 0x7FA5A5A5}
# Bounds the memory of a comparison; large enough to keep the number of kernels low.
_CHUNK_NUMEL = 1 << 22


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers of the same width, so that NaNs compare like everything else."""
    return tensor.view(_BITS[tensor.element_size()])


def is_cast(master: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether ``weights`` equals ``master.to(weights.dtype)`` in every bit. Both are flat."""
    for start in range(0, master.numel(), _CHUNK_NUMEL):
        cast = master[start : start + _CHUNK_NUMEL].to(weights.device, weights.dtype)
        if not torch.equal(bits(cast), bits(weights[start : start + _CHUNK_NUMEL])):
            return False
    return True


def can_override(dtype: torch.dtype) -> bool:
    return dtype in _MARKERS


def marked(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A scratch tensor of ``like``'s shape and device, full of the marker of ``dtype``."""
    scratch = torch.empty(like.shape, dtype=dtype, device=like.device)
    bits(scratch).fill_(_MARKERS[dtype])
    return scratch


def apply_override(scratch: torch.Tensor, live: torch.Tensor) -> None:
    """Copies what a load has filled of ``scratch`` over ``live``, bit by bit."""
    filled = bits(scratch) != _MARKERS[scratch.dtype]
    bits(live).copy_(torch.where(filled, bits(scratch), bits(live)))
