"""Atomic, durable, asynchronous sharded checkpoints for DeepSpeed and PyTorch FSDP.

>>> ckpt = ShardedCheckpointer(engine, "runs/gpt", save_every=500, keep=Keep(last=3))
>>> start = ckpt.load().step
"""

from sharded_ckpt._version import __version__
from sharded_ckpt.checkpointer import ShardedCheckpointer
from sharded_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LoadError,
    SaveError,
    StepNotFound,
    UnsupportedError,
    UsageError,
)
from sharded_ckpt.events import Event
from sharded_ckpt.handle import LoadResult, SaveHandle
from sharded_ckpt.keep import Keep
from sharded_ckpt.policy import Auto, SaveEvery

__all__ = [
    "Auto",
    "CheckpointError",
    "CorruptError",
    "Event",
    "Keep",
    "LoadError",
    "LoadResult",
    "SaveError",
    "SaveEvery",
    "SaveHandle",
    "ShardedCheckpointer",
    "StepNotFound",
    "UnsupportedError",
    "UsageError",
    "__version__",
]
