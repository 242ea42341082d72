"""Non-tensor state at the call of ``save``: encoded to plain values, its tensors cloned at once.

Encoding happens before anything is copied or written, so that a value of a type that the format
does not hold is refused with its key path while nothing has been touched.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharded_ckpt import dtypes, rng, tree
from sharded_ckpt._version import __version__
from sharded_ckpt.errors import UsageError
from sharded_ckpt.slices import Entry, Slice, whole
from sharded_ckpt.sources.base import Source
from sharded_ckpt.votes import CommitParts


@dataclass(slots=True)
class Captured:
    """Non-tensor state of one save: this rank's own tree, and on rank 0 what the manifest gets."""

    rank_tree: Any
    parts: CommitParts | None


# Where the tensors inside non-tensor state live in a shard.
PREFIX = "state/"


def capture(
    source: Source,
    stateful: Mapping[str, Any],
    client_state: Any,
    metrics: Mapping[str, Any] | None,
    tag: str | None,
) -> tuple[list[Slice], Captured]:
    """All that a save of this rank consists of: its slices, and its non-tensor state.

    Raises :class:`UsageError` and :class:`StateTypeError` for what cannot be held, before
    anything is copied.
    """
    checked = checked_metrics(metrics)
    rank_state = {
        "source": source.rank_state(),
        "rng": rng.capture(),
        "stateful": {name: obj.state_dict() for name, obj in stateful.items()},
    }
    rank_tree, slices = encode(rank_state, "rank")
    # Kept by each rank for itself, since scripts put per-rank values there; the manifest has
    # rank 0's.
    rank_tree["client_state"], client_slices = encode(client_state, "client_state")
    slices += client_slices
    shared_state = {"source": source.shared_state(), "tag": tag}
    shared_tree, shared_slices = encode(shared_state, "shared")
    slices += source.slices()
    if source.rank != 0:
        return slices, Captured(rank_tree, None)
    slices += shared_slices
    parts = CommitParts(
        layout=source.describe(),
        state_tree=shared_tree,
        client_state_tree=rank_tree["client_state"],
        aliases=source.aliases(),
        metrics=checked,
        versions=versions(),
    )
    return slices, Captured(rank_tree, parts)


def encode(value: Any, path: str) -> tuple[Any, list[Slice]]:
    """``value`` as a tagged tree, and its tensors as eager slices named ``state/<path>/...``.

    Raises :class:`StateTypeError` naming the key path of a value that cannot be held.
    """
    import torch

    encoded = tree.encode(value, path=path, prefix=f"{PREFIX}{path}/")
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


def checked_stateful(stateful: Mapping[str, Any] | None) -> dict[str, Any]:
    """Objects to save by name. Raises :class:`UsageError` for one without the two methods."""
    checked = dict(stateful or {})
    for name, obj in checked.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"stateful: {name!r} is not a name")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise UsageError(f"stateful[{name!r}] is a {type(obj).__name__} without {method}()")
    return checked
