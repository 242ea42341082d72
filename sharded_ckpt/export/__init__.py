"""Whole tensors out of shard sets, offline: for Hugging Face, torch and JAX.

One call does it: :func:`consolidate`. It needs neither a GPU nor deepspeed nor torch, and its
memory does not grow with the model.
"""

from __future__ import annotations

from sharded_ckpt.export.consolidate import ExportPlan, Request, consolidate, plan_export
from sharded_ckpt.export.stream import Exported
from sharded_ckpt.export.weights import ModelView, Selection

__all__ = [
    "ExportPlan",
    "Exported",
    "ModelView",
    "Request",
    "Selection",
    "consolidate",
    "plan_export",
]
