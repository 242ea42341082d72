"""Random number generators of one rank: captured as plain state, restored to the last bit.

Python's ``random``, numpy's global generator, torch's CPU generator, every CUDA device's, and the
generators of DeepSpeed's activation checkpointing, if that module is in use. State is per rank:
ranks draw different numbers.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

State = dict[str, Any]


def capture() -> State:
    """The state of all generators of this process, as a tree of the format's value types."""
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: State = {
        "python": random.getstate(),
        "numpy": {
            "name": str(name),
            "keys": np.array(keys, copy=True),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = {str(i): s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    tracker = _activation_tracker()
    if tracker is not None and tracker.get_states():
        state["activation_checkpointing"] = dict(tracker.get_states())
    return state


def restore(state: State) -> None:
    """Puts the generators back. Devices that are gone are left out, with a warning."""
    import torch

    random.setstate(state["python"])
    numpy_state = state["numpy"]
    np.random.set_state(
        (
            numpy_state["name"],
            numpy_state["keys"],
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["cached_gaussian"],
        )
    )
    torch.set_rng_state(state["torch"])
    saved_devices = state.get("cuda", {})
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index, device_state in saved_devices.items():
        if int(index) < present:
            torch.cuda.set_rng_state(device_state, int(index))
        else:
            log.warning("no CUDA device %s here; its saved RNG state was not restored", index)
    if "activation_checkpointing" in state:
        tracker = _activation_tracker()
        if tracker is not None:
            tracker.set_states(dict(state["activation_checkpointing"]))


def reseed(run_id: str, step: int, rank: int) -> None:
    """Seeds a rank that has no saved state: the same inputs give the same numbers everywhere."""
    import torch

    digest = hashlib.blake2b(f"{run_id}/{step}/{rank}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    log.warning(
        "rank %d has no RNG state in step %d; its generators were seeded from the run id, the step "
        "and the rank",
        rank,
        step,
    )


def _activation_tracker() -> Any:
    # Only looked at when the training program has imported it: importing it here would be slow,
    # and would mean that nobody uses it.
    module = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    return None if module is None else module.get_cuda_rng_tracker()
