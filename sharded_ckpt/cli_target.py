"""What a path on the command line means: a checkpoint directory, or one set in it or out of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from sharded_ckpt import reader
from sharded_ckpt.engine import Engine, select_engine
from sharded_ckpt.errors import CheckpointError, StepNotFound, UsageError
from sharded_ckpt.layout import MANIFEST, SetId
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.retention_catalog import committed_sets
from sharded_ckpt.store import LocalStore


@dataclass(frozen=True, slots=True)
class FoundSet:
    """One committed set, or what is wrong with its manifest.

    ``directory`` is relative to the store's root; empty where the root is the set itself.
    """

    store: LocalStore
    directory: str
    id: SetId | None
    manifest: Manifest | CheckpointError
    engine: Engine = field(default_factory=lambda: select_engine("auto"))

    @property
    def path(self) -> str:
        return self.store.path(self.directory)

    def sound(self) -> Manifest:
        """The manifest. Raises its error where it is damaged."""
        if isinstance(self.manifest, Manifest):
            return self.manifest
        raise self.manifest

    def reader(self, names: Callable[[str], bool] | None = None) -> ShardReader:
        manifest = self.sound()
        return ShardReader(
            self.store,
            self.engine,
            manifest.id,
            manifest,
            directory=self.directory,
            names=names,
        )


def open_store(path: str) -> LocalStore:
    """The checkpoint directory ``path``. Raises :class:`UsageError` where it is none."""
    path = _directory(path)
    if os.path.exists(os.path.join(path, MANIFEST)):
        raise UsageError(
            f"{path} is one step, this command wants the checkpoint directory: "
            f"{os.path.dirname(path)}"
        )
    return LocalStore(path, create=False)


def find_set(path: str, step: int | None) -> FoundSet:
    """The one set that ``path`` and ``step`` name; the newest full one without ``step``.

    Raises :class:`UsageError` (not such a path), :class:`StepNotFound`, or the manifest's error.
    """
    path = _directory(path)
    if os.path.exists(os.path.join(path, MANIFEST)):
        found = _alone(path)
        manifest = found.sound()
        if step is not None and manifest.id.step != step:
            raise StepNotFound(f"{path} is step {manifest.id.step}, not step {step}")
        return found
    store = LocalStore(path, create=False)
    resolved = reader.resolve(store, step=step)
    if resolved is None:
        raise StepNotFound(_nothing_in(path))
    id, manifest = resolved
    return FoundSet(store, id.dirname, id, manifest)


def find_sets(path: str, step: int | None) -> list[FoundSet]:
    """Every committed set that ``path`` and ``step`` name, oldest first, damaged ones too."""
    path = _directory(path)
    if os.path.exists(os.path.join(path, MANIFEST)):
        return [_alone(path)]
    store = LocalStore(path, create=False)
    engine = select_engine("auto")
    found = [
        FoundSet(store, id.dirname, id, manifest, engine)
        for id, manifest in committed_sets(store)
        if step is None or id.step == step
    ]
    if not found:
        if step is not None:
            raise StepNotFound(f"step {step} is not committed in {path}; run 'ls' to see what is")
        raise StepNotFound(_nothing_in(path))
    return found


def _alone(path: str) -> FoundSet:
    store = LocalStore(path, create=False)
    id = SetId.parse(os.path.basename(path))
    try:
        manifest: Manifest | CheckpointError = reader.read_manifest(store, "")
    except CheckpointError as error:
        manifest = error
    return FoundSet(store, "", manifest.id if isinstance(manifest, Manifest) else id, manifest)


def _directory(path: str) -> str:
    # A link that the user names is followed; links inside the directory are not.
    real = os.path.realpath(path)
    if not os.path.lexists(real):
        raise StepNotFound(f"{path} does not exist")
    if not os.path.isdir(real):
        hint = os.path.dirname(real)
        inside = os.path.exists(os.path.join(hint, MANIFEST))
        raise UsageError(
            f"{path} is a file; expected a checkpoint directory, or one step directory in it"
            + (f"; did you mean {hint}" if inside else "")
        )
    return real


def _nothing_in(path: str) -> str:
    """Says what was looked for, and where it is instead if that is one level away."""
    looked = f"no committed step in {path} (looked for step-*/{MANIFEST})"
    below = [
        name
        for name in sorted(os.listdir(path))[:1000]
        if os.path.isdir(os.path.join(path, name))
        and any(SetId.parse(inner) for inner in _names(os.path.join(path, name)))
    ]
    above = os.path.dirname(path)
    if below:
        return f"{looked}; did you mean {os.path.join(path, below[0])}"
    if SetId.parse(os.path.basename(path)) and any(SetId.parse(n) for n in _names(above)):
        return f"{path} was never committed: it has no {MANIFEST}; 'ls {above}' lists what was"
    return looked


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
