"""Non-tensor state at the call of ``save``: encoded to plain values, its tensors cloned at once.

Encoding happens before anything is copied or written, so that a value of a type that the format
does not hold is refused with its key path while nothing has been touched.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from sharded_ckpt import dtypes, tree
from sharded_ckpt._version import __version__
from sharded_ckpt.errors import UsageError
from sharded_ckpt.slices import Entry, Slice, whole

# Where the tensors inside non-tensor state live in a shard.
PREFIX = "state/"


def encode(value: Any, path: str) -> tuple[Any, list[Slice]]:
    """``value`` as a tagged tree, and its tensors as eager slices named ``state/<path>...``.

    Raises :class:`StateTypeError` naming the key path of a value that cannot be held.
    """
    import torch

    encoded = tree.encode(value, path=path, prefix=PREFIX)
    slices = []
    for name, item in encoded.tensors.items():
        tensor = torch.from_numpy(np.array(item)) if isinstance(item, np.ndarray) else item
        tensor = tensor.detach().contiguous()
        entry = Entry(
            name=name,
            dtype=dtypes.from_torch(tensor.dtype, name).name,
            shape=tuple(tensor.shape),
            region=whole(tensor.shape),
            copy=True,
        )
        slices.append(Slice(entry, tensor, eager=True))
    return encoded.tree, slices


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats. Raises :class:`UsageError` for what is not one number."""
    checked: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise UsageError(f"metrics: key {name!r} is not a string")
        try:
            checked[name] = float(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"metrics[{name!r}] is {type(value).__name__} {value!r}; expected one number"
            ) from None
    return checked


def versions() -> dict[str, str]:
    """Versions worth knowing when a step is looked at years later."""
    import sys

    found = {"sharded_ckpt": __version__, "python": platform.python_version()}
    for name in ("torch", "deepspeed", "numpy", "transformers"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
