"""The load path of one rank: one manifest for all, then only the bytes that this rank needs.

Rank 0 alone looks at the directory; what it finds, or fails to find, every rank is told, so that no
two ranks can resume from different steps. Each rank then reads its own slices straight into the
live tensors, checksums included, and all ranks agree on whether that went well before any
non-tensor state is touched.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sharded_ckpt import plan as planning
from sharded_ckpt import reader, rng, tree
from sharded_ckpt.engine import Engine
from sharded_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LayoutMismatch,
    LoadError,
    ManifestError,
    ShardError,
    StateMismatch,
    StepNotFound,
    StoreError,
    UsageError,
)
from sharded_ckpt.group import Group
from sharded_ckpt.handle import LoadResult
from sharded_ckpt.layout import SetId
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.slices import Entry, Slice
from sharded_ckpt.sources.base import Parts, Source
from sharded_ckpt.store import LocalStore

log = logging.getLogger(__name__)

T = TypeVar("T")

# Errors that travel between ranks by name: what one rank raises, all of them raise.
_BY_NAME: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CorruptError,
        LayoutMismatch,
        LoadError,
        ManifestError,
        StateMismatch,
        StepNotFound,
        UsageError,
    )
}


@dataclass(frozen=True, slots=True)
class Found:
    """A resolved step: the directory it is in, and its manifest."""

    id: SetId
    manifest: Manifest


class Loader:
    """Loads steps of one directory into one source. Used from the training thread only."""

    def __init__(
        self,
        *,
        store: LocalStore,
        group: Group,
        engine: Engine,
        source: Source,
        stateful: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self._store = store
        self._group = group
        self._engine = engine
        self._source = source
        self._stateful = stateful
        self._timeout_s = timeout_s
        self._calls = 0

    def load(self, step: int | None, parts: Parts, *, fallback: bool) -> LoadResult:
        """Fills the source from a committed step. Collective: every rank calls it.

        Raises :class:`StepNotFound` for an explicit ``step`` that is not there,
        :class:`LayoutMismatch`, :class:`StateMismatch`, and :class:`CorruptError`; with
        ``fallback`` a damaged step is logged and the next older one is tried.
        """
        self._calls += 1
        tries = 0
        while True:
            tries += 1
            prefix = f"load/{self._calls}/{tries}"
            found = self._resolve(prefix, step, skip=tries - 1, fallback=fallback)
            if found is None:
                return LoadResult(step=0)
            try:
                return self._load(prefix, found, parts)
            except CorruptError as error:
                if not fallback or step is not None:
                    raise
                log.error("step %d is damaged, trying the one before: %s", found.id.step, error)

    def _load(self, prefix: str, found: Found, parts: Parts) -> LoadResult:
        """One step, in phases that all ranks pass together or not at all.

        Ranks that disagreed would hang in their next collective, or train on different steps.
        """
        begun = self._together(f"{prefix}/plan", lambda: self._plan(found, parts))
        nbytes = self._together(f"{prefix}/fill", begun.fill)
        self._together(f"{prefix}/restore", lambda: self._restore(begun, parts))
        self._source.refresh(parts)
        self._together(f"{prefix}/finish", lambda: self._finish(found, begun, parts))
        log.info(
            "rank %d: loaded step %d: %d tensors, %d bytes",
            self._source.rank,
            found.id.step,
            len(begun.targets),
            nbytes,
        )
        return LoadResult(
            step=found.id.step,
            client_state=begun.client_state,
            metrics=dict(found.manifest.metrics),
            loaded={
                "tensors": len(begun.targets),
                "nbytes": nbytes,
                "missing": begun.missing,
                "extra": begun.extra,
                "tag": begun.shared_state.get("tag"),
            },
            id=found.id,
        )

    def _together(self, key: str, work: Callable[[], T]) -> T:
        """What ``work`` returns, once it has succeeded on every rank; else all ranks raise."""
        error: CheckpointError | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as problem:
            error = _as_load_error(problem)
        mine = b"" if error is None else _error_to_bytes(error, rank=self._group.rank)
        answers = self._group.gather(key, mine, self._timeout_s)
        first = next((a for a in answers if a), b"") if self._group.rank == 0 else None
        first = self._group.broadcast(f"{key}/all", first, self._timeout_s)
        if first:
            agreed = _error_from(json.loads(first))
            # A rank's own words, where they lead to the same consequence.
            if error is not None and isinstance(error, CorruptError) == isinstance(
                agreed, CorruptError
            ):
                raise error
            raise agreed
        return result  # type: ignore[return-value]

    # -- one manifest for all ----------------------------------------------------------------

    def _resolve(self, prefix: str, step: int | None, skip: int, fallback: bool) -> Found | None:
        answer: bytes | None = None
        if self._group.rank == 0:
            try:
                answer = self._lookup(step, skip, fallback and step is None)
            except Exception as error:
                answer = _error_to_bytes(_as_load_error(error), rank=0)
        answer = self._group.broadcast(f"{prefix}/manifest", answer, self._timeout_s)
        message = json.loads(answer)
        if "error" in message:
            raise _error_from(message)
        if message["directory"] is None:
            log.warning(
                "no committed step in %s: starting from step 0%s",
                self._store.path(),
                self._elsewhere(),
            )
            return None
        id = SetId.parse(message["directory"])
        assert id is not None
        data = message["manifest"].encode()
        return Found(id, Manifest.from_bytes(data, where=f"{message['directory']}"))

    def _lookup(self, step: int | None, skip: int, fallback: bool) -> bytes:
        found = reader.resolve(self._store, step=step, skip=skip, fallback=fallback)
        if found is None:
            return json.dumps({"directory": None}).encode()
        id, manifest = found
        text = manifest.to_bytes().decode()
        return json.dumps({"directory": id.dirname, "manifest": text}).encode()

    def _elsewhere(self) -> str:
        """A hint for the path that is one level too high, a common mistake."""
        below = []
        for name in self._store.list_dir():
            with contextlib.suppress(StoreError):
                if any(SetId.parse(inner) for inner in self._store.list_dir(name)):
                    below.append(self._store.path(name))
        return f"; there are steps in {', '.join(below[:3])}" if below else ""

    # -- reading -----------------------------------------------------------------------------

    def _plan(self, found: Found, parts: Parts) -> _Begun:
        """All that can be refused is refused here: no live tensor is touched."""
        manifest = found.manifest
        self._check_layout(manifest, parts)
        shards = reader.ShardReader(self._store, self._engine, found.id, manifest)
        everybody = list(range(manifest.world_size))
        # Without strictness "not saved" must mean in no shard at all.
        wide = self._source.reads_all_shards or not parts.strict
        try:
            ranks = everybody if wide else [self._source.rank]
            return self._plan_from(shards, ranks, found, parts)
        except StateMismatch:
            if wide or manifest.world_size == 1:
                raise
            # Something this rank needs is in another rank's shard (replicated tensors are cut
            # over ranks): look at all of them.
            return self._plan_from(shards, everybody, found, parts)

    def _plan_from(
        self, shards: reader.ShardReader, ranks: list[int], found: Found, parts: Parts
    ) -> _Begun:
        holdings = shards.holdings(ranks)
        saved: dict[str, Entry] = {name: held[0].entry for name, held in holdings.items()}
        targets = self._source.targets(saved, parts)
        missing: list[str] = []
        if not parts.strict:
            missing = [t.entry.name for t in targets if t.entry.name not in saved]
            targets = [t for t in targets if t.entry.name in saved]
        wanted_names = {t.entry.name for t in targets}
        # Each rank answers for its own shard: other ranks may hold what only they take (experts,
        # pipeline stages).
        extra = [
            name
            for name, held in shards.holdings([self._source.rank]).items()
            if name not in wanted_names and _belongs(held[0].entry, parts)
        ]
        if parts.strict and extra and not _only_derived(extra, wanted_names):
            raise StateMismatch(
                f"step {found.id.step} holds {len(extra)} tensors that nothing here takes: "
                f"{', '.join(sorted(extra)[:8])}{', ...' if len(extra) > 8 else ''}; "
                "load(strict=False) leaves them out, load(optimizer=False) all optimizer state"
            )
        reads = planning.reads([t.entry for t in targets], holdings, prefer_file=self._source.rank)
        own_tree = shards.state_tree(self._source.rank, ranks)
        own_tensor = shards.tensor_of(self._source.rank)
        rank_state = {} if own_tree is None else tree.decode(own_tree, own_tensor)
        shared_state = tree.decode(found.manifest.state, shards.tensor_of(0))
        if "client_state" in rank_state:
            client_state = rank_state["client_state"]
        else:
            client_state = tree.decode(found.manifest.client_state, shards.tensor_of(0))
        self._check_stateful(rank_state, found, parts)
        self._source.check_saved(rank_state.get("source", {}), shared_state["source"], parts)
        return _Begun(
            shards=shards,
            reads=reads,
            targets=targets,
            rank_state=rank_state,
            shared_state=shared_state,
            client_state=client_state,
            missing=missing,
            extra=extra,
        )

    def _check_layout(self, manifest: Manifest, parts: Parts) -> None:
        if manifest.content != "full" and (parts.optimizer or parts.scheduler or parts.rng):
            raise LoadError(
                f"step {manifest.id.step} holds weights only (its optimizer state was retired); "
                "load it with optimizer=False, scheduler=False, rng=False, data=False"
            )
        here = self._source.describe()
        if manifest.layout == here:
            return
        keys = sorted(set(manifest.layout) | set(here))
        different = [
            f"{k}: saved {manifest.layout.get(k)!r}, here {here.get(k)!r}"
            for k in keys
            if manifest.layout.get(k) != here.get(k)
        ]
        raise LayoutMismatch(
            f"step {manifest.id.step} was saved on another layout ({'; '.join(different)}); "
            "loading on another layout is not supported by this version: start with the saved "
            "layout, or consolidate the step and load plain weights"
        )

    # -- taking state back -------------------------------------------------------------------

    def _restore(self, begun: _Begun, parts: Parts) -> None:
        own = begun.rank_state.get("source", {})
        try:
            self._source.restore(own, begun.shared_state["source"], parts)
        except Exception as error:  # also what a scheduler of the user's raises
            raise LoadError(
                f"the loaded state could not be taken back ({type(error).__name__}: {error}); the "
                "training objects are partly loaded: load again, or start afresh"
            ) from error

    def _finish(self, found: Found, begun: _Begun, parts: Parts) -> None:
        if parts.data:
            for name, state in begun.rank_state.get("stateful", {}).items():
                self._stateful[name].load_state_dict(state)
        # Last of all: everything above may draw random numbers.
        if parts.rng:
            if "rng" in begun.rank_state:
                rng.restore(begun.rank_state["rng"])
            else:
                rng.reseed(found.manifest.run_id, found.id.step, self._source.rank)

    def _check_stateful(self, rank_state: Mapping[str, Any], found: Found, parts: Parts) -> None:
        saved = rank_state.get("stateful", {})
        if parts.data and set(saved) != set(self._stateful):
            raise StateMismatch(
                f"step {found.id.step} holds the state of stateful objects {sorted(saved)}, here "
                f"are {sorted(self._stateful)}; give the same names, or load(data=False)"
            )


@dataclass(slots=True)
class _Begun:
    """A load that is planned and checked on this rank; ``fill`` overwrites the live tensors."""

    shards: reader.ShardReader
    reads: list[planning.Read]
    targets: list[Slice]
    rank_state: dict[str, Any]
    shared_state: dict[str, Any]
    client_state: Any
    missing: list[str]
    extra: list[str]

    def fill(self) -> int:
        """Reads into the live tensors, checksums included; the number of bytes."""
        try:
            return self.shards.fill(self.reads, [t.tensor for t in self.targets])
        except CorruptError as error:
            error.add_note("live tensors are partly overwritten")
            raise


def _belongs(entry: Entry, parts: Parts) -> bool:
    """Whether a saved tensor is of a kind that this load asks for."""
    kind = entry.name.split("/", 1)[0]
    if kind == "optim":
        return parts.optimizer
    if kind in ("model", "master", "buffer"):
        return parts.weights
    return False  # state/ tensors are reached through the tree that names them


def _only_derived(extra: list[str], wanted: set[str]) -> bool:
    """Whether all of ``extra`` are 16-bit weights whose master is loaded (the source's choice)."""
    return all(
        name.startswith("model/") and "master/" + name.removeprefix("model/") in wanted
        for name in extra
    )


def _as_load_error(error: Exception) -> CheckpointError:
    """An error that every rank can be told of."""
    if isinstance(error, StoreError):
        # A file that a manifest names and that is not there is damage. Everything else (no
        # permission, a device that fails) may pass, and must not make a job resume further back.
        gone = error.errno in (errno.ENOENT, errno.ESTALE)
        made: CheckpointError = (ShardError if gone else LoadError)(str(error))
    elif isinstance(error, CheckpointError):
        return error
    else:
        made = LoadError(f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _error_to_bytes(error: CheckpointError, rank: int) -> bytes:
    names = [k.__name__ for k in type(error).__mro__ if k.__name__ in _BY_NAME]
    kind = names[0] if names else LoadError.__name__
    return json.dumps({"error": kind, "rank": rank, "message": str(error)}).encode()


def _error_from(message: Mapping[str, Any]) -> CheckpointError:
    return _BY_NAME[message["error"]](f"rank {message['rank']}: {message['message']}")
