"""Deletion: the reverse of a commit, done only by rank 0 and only after a newer commit of its own.

What is deleted comes from names that this package makes: a set's manifest, the shards that it
names, temporary files. Nothing is recursive, no link is followed, and an error of a deletion never
becomes an error of the save.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping

from sharded_ckpt import layout
from sharded_ckpt.errors import CheckpointError, StoreError, UsageError
from sharded_ckpt.events import Emitter, Event
from sharded_ckpt.keep import Committed, Keep
from sharded_ckpt.layout import SetId
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.retention_catalog import (
    best_step,
    committed_sets,
    describe,
    is_pinned,
    pin,
    read_manifest,
    readable_sets,
    set_directories,
    unpin,
)
from sharded_ckpt.store import LocalStore, StoreUncertain
from sharded_ckpt.terms import check_superseded

__all__ = [
    "Retention",
    "best_step",
    "committed_sets",
    "delete",
    "gc_orphans",
    "is_pinned",
    "pin",
    "readable_sets",
    "remove_leftover",
    "uncommit",
    "unpin",
]

log = logging.getLogger(__name__)

_GONE = (errno.ENOENT, errno.ENOTDIR)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)


class Retention:
    """Applies a :class:`Keep` policy after each commit of this job, on rank 0.

    ``thin(full, new)`` writes and commits the weights of the set ``full`` as the set ``new`` and
    returns its manifest, or raises; the full set is deleted only once that one is committed.
    """

    def __init__(
        self,
        store: LocalStore,
        keep: Keep,
        *,
        term: int,
        emitter: Emitter,
        thin: Callable[[Manifest, SetId], Manifest] | None = None,
    ) -> None:
        self._store = store
        self._keep = keep
        self._term = term
        self._emitter = emitter
        self._thin = thin
        self._uncertain: dict[SetId, str] = {}
        # Manifests never change, so each is read once; a large directory has thousands.
        self._known: dict[SetId, Committed] = {}

    def suspend(self, reason: str, id: SetId) -> None:
        """From now on neither counts nor deletes ``id``: whether it is committed is not known.

        It may look committed and be gone after a power cut, so no other set may go for its sake.
        """
        self._uncertain[id] = reason

    def run(
        self,
        just_committed: SetId,
        leftovers: Mapping[SetId, bool],
        next_serial: Callable[[], int],
    ) -> set[SetId]:
        """Deletes what the commit of ``just_committed`` has made superfluous.

        ``leftovers`` are attempts of this job that were not committed, and whether every rank is
        through with them. Sets made by thinning take their numbers from ``next_serial``. Returns
        the leftovers that are gone. Raises :class:`Superseded` when a newer job
        has taken over, :class:`StoreError` when the directory cannot be listed.
        """
        check_superseded(self._store, self._term, just_committed.step)
        sets = self._survey()
        newest = sets.get(just_committed)
        if newest is None:
            log.warning("%s has gone since its commit; nothing is deleted", just_committed.dirname)
            return set()
        decision = self._keep.decide(list(sets.values()))
        thin = [id for id in decision.thin if self._may_go(id, sets, newest)]
        if thin:
            # Two a commit, since the verdicts of later saves wait for this thread: the newest (it
            # has just become due) and the oldest, so that a backlog shrinks as well.
            for id in dict.fromkeys((thin[-1], thin[0])):
                self._shrink(id, max(0, len(thin) - 2), next_serial)
            check_superseded(self._store, self._term, just_committed.step)  # copying takes a while
            # A full set is retired only if a weights-only one of it is found on the disk.
            sets = self._survey()
            decision = self._keep.decide(list(sets.values()))
        for note in decision.notes:
            log.info("retention: %s", note)
        for id in decision.retire:
            if self._may_go(id, sets, newest):
                self._retire(id)
        gone = {id for id, settled in leftovers.items() if self._remove_leftover(id, settled)}
        gc_orphans(self._store, self._term)
        return gone

    def _survey(self) -> dict[SetId, Committed]:
        """The committed sets whose manifests are sound."""
        found = {}
        for id in set_directories(self._store):
            if id in self._uncertain:
                log.info("%s stays, uncounted: %s", id.dirname, self._uncertain[id])
                continue
            known = self._known.get(id)
            try:
                if known is None:
                    known = describe(self._store, read_manifest(self._store, id))
                elif not self._store.exists(f"{id.dirname}/{layout.MANIFEST}"):
                    continue
                elif known.pinned != is_pinned(self._store, id):
                    known = describe(self._store, read_manifest(self._store, id))
            except StoreError as e:
                if e.errno not in _GONE:
                    log.warning("%s is kept, its manifest cannot be read: %s", id.dirname, e)
                continue
            except CheckpointError as e:
                log.warning("%s is kept, its manifest is damaged: %s", id.dirname, e)
                continue
            found[id] = known
        self._known = found
        return dict(found)

    def _may_go(self, id: SetId, sets: Mapping[SetId, Committed], newest: Committed) -> bool:
        """The policy decides; these rules hold whatever it says."""
        set_ = sets[id]
        older = id.term <= self._term and set_.rank_key < newest.rank_key
        return older and id != newest.id and not set_.pinned

    def _shrink(self, id: SetId, later: int, next_serial: Callable[[], int]) -> None:
        """Writes a weights-only set of the full set ``id``; ``later`` others are due as well."""
        if self._thin is None:
            log.warning("%s stays full: nothing here writes weights-only sets", id.dirname)
            return
        if later:
            log.info("%d more sets are due to shrink: two do after each commit", later)
        new = SetId.new(step=id.step, term=self._term, serial=next_serial())
        try:
            self._thin(read_manifest(self._store, id), new)
        except CheckpointError as e:
            if isinstance(e, StoreUncertain):
                self.suspend(str(e), new)
            log.warning("%s stays full: %s", id.dirname, e)

    def _retire(self, id: SetId) -> None:
        began = time.time()
        try:
            manifest = read_manifest(self._store, id)
            uncommit(self._store, manifest)
        except CheckpointError as e:
            log.warning("%s could not be deleted: %s; the next commit tries again", id.dirname, e)
            return
        seconds = time.time() - began
        self._emitter.emit(
            Event("retired", id.step, 0, id.term, id.serial, manifest.nbytes, seconds, began)
        )

    def _remove_leftover(self, id: SetId, settled: bool) -> bool:
        try:
            return remove_leftover(self._store, id, settled=settled)
        except StoreError as e:
            log.warning("what is left of %s could not be removed: %s", id.dirname, e)
            return False


def delete(store: LocalStore, id: SetId) -> None:
    """Deletes one committed set at a user's wish. Refuses the newest full set, and pinned ones.

    Raises :class:`UsageError`, :class:`StoreError`, :class:`ManifestError`.
    """
    full = [one for one in readable_sets(store) if one.content == "full"]
    newest = max(full, key=lambda one: one.rank_key, default=None)
    if newest is not None and newest.id == id:
        raise UsageError(
            f"step {id.step} is the newest in {store.root} and is kept; save a newer one first, or "
            f"delete the directory {id.dirname} yourself"
        )
    uncommit(store, read_manifest(store, id))


def uncommit(store: LocalStore, manifest: Manifest) -> None:
    """Deletes a committed set so that it is never offered without all of its files.

    Files that are missing already, and files that are not ours, are logged and left at that.
    Raises :class:`UsageError` for a pinned set, and :class:`StoreError` when a step failed; no
    later step is tried then.
    """
    id = manifest.id
    pinned = f"step {id.step} ({id.dirname}) is pinned; unpin it first"
    if is_pinned(store, id):
        raise UsageError(pinned)
    # 1. The manifest goes first, durably: from here on nobody is offered the set.
    name = f"{id.dirname}/{layout.MANIFEST}"
    try:
        store.unlink(name)
    except StoreError as e:
        if e.errno not in _GONE:
            raise
        log.warning("%s is gone already; somebody else deletes here", store.path(name))
        return
    if is_pinned(store, id):  # in this very moment: whoever pinned may have seen the manifest
        store.publish(name, manifest.to_bytes())
        raise UsageError(pinned)
    # 2. The shards that it names. A manifest may name other directories; those are not this set's.
    files = [
        shard.file
        for shard in manifest.shards
        if shard.directory == id.dirname and layout.parse_shard_file(shard.file) is not None
    ]
    files += [name for name in store.list_dir(id.dirname) if layout.is_temp_name(name)]
    missing = store.unlink_many(id.dirname, files)
    if missing:
        where = store.path(id.dirname)
        log.warning("%s: %d files were gone already, %s first", where, len(missing), missing[0])
    # 3. The directory, if nothing else is in it.
    _remove_if_empty(store, id.dirname)


def remove_leftover(store: LocalStore, id: SetId, *, settled: bool) -> bool:
    """Removes what is left of this job's own failed attempt; returns whether it is gone.

    Until every rank is through with it (``settled``) a file may still be being written; then only
    an empty directory is removed. A rank that comes later finds no directory and votes no.
    """
    if store.kind(id.dirname) is None:
        return True
    names = store.list_dir(id.dirname)
    if layout.MANIFEST in names or layout.PIN in names:
        return False
    if settled:
        store.unlink_many(id.dirname, _ours(names))
    return _remove_if_empty(store, id.dirname)


def gc_orphans(store: LocalStore, term: int) -> list[SetId]:
    """Removes attempts that jobs of lower terms left behind; returns their identities.

    To be called only after a commit that this process made. Jobs of lower terms may still run and
    be about to commit such an attempt, so it is moved away first, which makes that fail, and looked
    at again. Trash that a crash left behind is treated the same. Errors are logged.
    """
    removed = []
    for name in store.list_dir():
        trashed = layout.parse_trash_name(name)
        id = trashed or SetId.parse(name)
        if id is None or id.term >= term:
            continue
        try:
            if store.kind(name) != "dir":
                continue
            if trashed is None:
                names = store.list_dir(name)
                if layout.MANIFEST in names or layout.PIN in names:
                    continue
                away = layout.trash_name(name)
                store.rename_dir(name, away)
                name = away
            if _empty_trash(store, name, id):
                removed.append(id)
        except StoreError as e:
            if e.errno not in _GONE:  # somebody else's gc was quicker
                log.warning("the orphan %s could not be removed: %s", name, e)
    return removed


def _empty_trash(store: LocalStore, trash: str, id: SetId) -> bool:
    names = store.list_dir(trash)
    if layout.MANIFEST in names or layout.PIN in names:
        log.warning("%s was committed after all, by another job; it is put back", id.dirname)
        store.rename_dir(trash, id.dirname)
        return False
    store.unlink_many(trash, _ours(names))
    return _remove_if_empty(store, trash)


def _ours(names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if layout.parse_shard_file(name) is not None or layout.is_temp_name(name)
    ]


def _remove_if_empty(store: LocalStore, name: str) -> bool:
    try:
        store.remove_dir(name)
    except StoreError as e:
        if e.errno in _GONE:
            return True
        if e.errno not in _NOT_EMPTY:
            raise
        log.info("%s stays, it holds other files: %s", store.path(name), store.list_dir(name)[:5])
        return False
    return True
