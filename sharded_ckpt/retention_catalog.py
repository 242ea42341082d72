"""The committed sets of a directory, and the pins on them. Everything is read from the disk.

A set is committed when its directory, named by the strict pattern, holds a manifest. Links and
names that are not ours are passed over: neither offered nor deleted.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from sharded_ckpt import layout
from sharded_ckpt.errors import CheckpointError, ManifestError, StepNotFound, StoreError
from sharded_ckpt.keep import Committed, best_first
from sharded_ckpt.layout import SetId
from sharded_ckpt.manifest import MAX_MANIFEST_NBYTES, Manifest
from sharded_ckpt.store import LocalStore

log = logging.getLogger(__name__)

_GONE = (errno.ENOENT, errno.ENOTDIR)


def committed_sets(store: LocalStore) -> list[tuple[SetId, Manifest | CheckpointError]]:
    """All committed sets, oldest first by ``(term, serial)``.

    A manifest that is damaged or cannot be read stands as the error, for the caller to raise or
    report; such a set is not offered, and never deleted. Raises :class:`StoreError` when the
    directory itself cannot be listed.
    """
    found: list[tuple[SetId, Manifest | CheckpointError]] = []
    for id in set_directories(store):
        try:
            found.append((id, read_manifest(store, id)))
        except StoreError as e:
            if e.errno not in _GONE:
                found.append((id, e))
        except CheckpointError as e:
            found.append((id, e))
    return found


def set_directories(store: LocalStore) -> list[SetId]:
    """Identities of all step directories, committed or not, oldest first."""
    found = []
    for name in store.list_dir():
        id = SetId.parse(name)
        if id is None:
            continue
        kind = store.kind(name)
        if kind == "dir":
            found.append(id)
        elif kind is not None:
            log.warning("%s is passed over: expected a directory, got a %s", store.path(name), kind)
    return sorted(found)


def read_manifest(store: LocalStore, id: SetId) -> Manifest:
    """The manifest of one set.

    Raises :class:`StoreError` (``ENOENT``: not committed), :class:`ManifestError`, or
    :class:`LoadError` when a newer version wrote it.
    """
    name = f"{id.dirname}/{layout.MANIFEST}"
    try:
        data = store.read(name, MAX_MANIFEST_NBYTES)
    except StoreError as e:
        if e.errno != errno.EFBIG:
            raise
        raise ManifestError(f"{store.path(name)}: {e}") from e
    manifest = Manifest.from_bytes(data, store.path(name))
    if manifest.id != id:
        raise ManifestError(
            f"{store.path(name)} is the manifest of {manifest.id.dirname}, in another directory; "
            "move it back, or move the damaged set away"
        )
    return manifest


def readable_sets(store: LocalStore) -> list[Committed]:
    """The sets with a sound manifest, oldest first; damaged ones are logged and left out."""
    found = []
    for id, manifest in committed_sets(store):
        if isinstance(manifest, Manifest):
            found.append(describe(store, manifest))
        else:
            log.warning("%s is left out: %s", id.dirname, manifest)
    return found


def describe(store: LocalStore, manifest: Manifest) -> Committed:
    """What the policy needs to know of a set."""
    return Committed(
        id=manifest.id,
        nbytes=manifest.nbytes,
        metrics=manifest.metrics,
        pinned=is_pinned(store, manifest.id),
        content=manifest.content,
        origin=manifest.origin,
    )


def best_step(committed: Sequence[Committed], metric: str, mode: str) -> int | None:
    """The step with the best finite ``metric``; of equals, the newer. ``None`` if none has it."""
    ranked = best_first(committed, metric=metric, mode="max" if mode == "max" else "min")
    return ranked[0].id.step if ranked else None


# ---- pins


def pin(store: LocalStore, id: SetId, note: str = "") -> None:
    """Keeps a set whatever the policy says. Pinning again changes nothing.

    Raises :class:`StepNotFound` when the set is not committed (any more).
    """
    name = f"{id.dirname}/{layout.PIN}"
    made = {"note": note, "pinned_at": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        store.create_exclusive(name, (json.dumps(made, indent=1) + "\n").encode())
    except StoreError as e:
        if e.errno == errno.EEXIST:
            return
        if e.errno not in _GONE:
            raise
        raise StepNotFound(f"{id.dirname} is not in {store.root}") from e
    # Whoever deletes unlinks the manifest and then looks for a pin again: one of the two sees the
    # other.
    if not store.exists(f"{id.dirname}/{layout.MANIFEST}"):
        store.unlink(name)
        raise StepNotFound(f"{id.dirname} is not committed in {store.root}, or is being deleted")


def unpin(store: LocalStore, id: SetId) -> None:
    """Gives a set back to the policy. Fine if it was not pinned."""
    try:
        store.unlink(f"{id.dirname}/{layout.PIN}")
    except StoreError as e:
        if e.errno not in _GONE:
            raise


def is_pinned(store: LocalStore, id: SetId) -> bool:
    return store.exists(f"{id.dirname}/{layout.PIN}")
