"""``engine.save_checkpoint`` and ``engine.load_checkpoint`` of DeepSpeed, routed through us.

Code that calls these methods (trainers, training scripts) keeps its calls and gains asynchronous,
atomic, checked saves. The signatures are those of DeepSpeed 0.19; what an argument asks for and
this package cannot do is refused by name, never ignored.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sharded_ckpt import reader
from sharded_ckpt.errors import StepNotFound, UnsupportedError, UsageError
from sharded_ckpt.manifest import Manifest

if TYPE_CHECKING:
    from sharded_ckpt.checkpointer import ShardedCheckpointer


def install(ckpt: ShardedCheckpointer, engine: Any) -> None:
    """Replaces the two methods on this ``engine`` (an instance, not the class)."""
    for name in ("save_checkpoint", "load_checkpoint"):
        if not callable(getattr(engine, name, None)):
            raise UsageError(f"install: {type(engine).__name__} has no {name}()")

    def save_checkpoint(
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves ``engine.global_steps`` under ``tag``; returns while it is being written."""
        _check_directory(ckpt, "save_checkpoint", save_dir)
        if not save_latest:
            raise UnsupportedError(
                "save_checkpoint(save_latest=False): the newest committed step is always the "
                "newest one; pin an older step, or load it by its tag"
            )
        if exclude_frozen_parameters:
            raise UnsupportedError(
                "save_checkpoint(exclude_frozen_parameters=True): frozen parameters are part of "
                "every step in this version"
            )
        step = int(engine.global_steps)
        ckpt.save(
            step,
            client_state=dict(client_state or {}),
            _tag=str(tag) if tag is not None else f"global_step{step}",
        )
        return True

    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Loads the newest step, or the one saved as ``tag``: ``(path, client_state)``.

        ``(None, {})`` when nothing is committed and no tag was given, as DeepSpeed does.
        """
        _check_directory(ckpt, "load_checkpoint", load_dir)
        if custom_load_fn is not None:
            raise UnsupportedError("load_checkpoint(custom_load_fn=...) is not supported")
        step = None if tag is None else _step_of_tag(ckpt, str(tag))
        full = not load_module_only
        result = ckpt.load(
            step,
            strict=load_module_strict,
            optimizer=full and load_optimizer_states,
            scheduler=full and load_lr_scheduler_states,
            rng=full,
            data=full,
        )
        if result.id is None:
            return None, {}
        return str(ckpt.directory / result.id.dirname), result.client_state

    engine.save_checkpoint = save_checkpoint
    engine.load_checkpoint = load_checkpoint


def _check_directory(ckpt: ShardedCheckpointer, call: str, directory: str) -> None:
    if os.path.realpath(directory) != os.path.realpath(ckpt.directory):
        raise UsageError(
            f"{call}({directory!r}): this engine saves into {str(ckpt.directory)!r}; make a "
            "ShardedCheckpointer for the directory that the calls name"
        )


def _step_of_tag(ckpt: ShardedCheckpointer, tag: str) -> int:
    for id, manifest in reader.candidates(ckpt._store):
        if isinstance(manifest, Manifest) and manifest.state.get("tag") == tag:
            return id.step
    raise StepNotFound(f"no committed step in {ckpt.directory} was saved with tag {tag!r}")
