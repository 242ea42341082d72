"""What to keep: a pure function from the committed sets to those that stay, shrink and go.

Sets are ordered by ``(term, serial)`` alone. Step numbers, clocks and the order of the input decide
nothing: the first save of a new run ranks above every step that an older run left behind.

A weights-only set ranks where the full set it came from does. Both are there for a moment, or after
a crash for longer: they count as one version. Sets copied in from another run may have the same
``(term, serial)`` and are versions of their own; their order is fixed, but means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sharded_ckpt.errors import UsageError
from sharded_ckpt.layout import SetId

RankKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Committed:
    """One committed set, as its manifest tells it.

    ``origin`` is the full set that a weights-only set was made from.
    """

    id: SetId
    nbytes: int
    metrics: Mapping[str, float] = field(hash=False)
    pinned: bool
    content: Literal["full", "weights"]
    origin: SetId | None = None

    def __post_init__(self) -> None:
        if self.content not in ("full", "weights"):
            raise UsageError(f"content must be 'full' or 'weights', got {self.content!r}")

    @property
    def state_id(self) -> SetId:
        """The set that the training state inside was saved as."""
        return self.origin or self.id

    @property
    def rank_key(self) -> RankKey:
        """``(term, serial)`` of the training state inside: what orders sets."""
        return self.state_id.term, self.state_id.serial


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of each committed set: ``keep`` and ``retire`` part them without overlap.

    ``thin``, a part of ``keep``, are the full sets to be replaced by weights-only ones. ``thin``
    and ``retire`` are sorted oldest first, the order to work in. ``notes`` say, for the log, what
    a reader of the policy might not expect.
    """

    keep: frozenset[SetId]
    thin: tuple[SetId, ...] = ()
    retire: tuple[SetId, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """Which committed steps stay. Rules add up: a set stays if any rule keeps it.

    ``last=K``                the ``K`` newest
    ``best=M, metric, mode``  the ``M`` with the smallest (``"min"``) or largest metric; of equals,
                              the newer
    ``every=N``               those whose step is a multiple of ``N``
    ``at=(a, b)``             those with these steps
    ``weights_only_after=k``  of the sets that stay, all but the ``k`` newest full ones keep only
                              their weights
    ``max_nbytes``            then the oldest go until the rest fits

    With none of ``last``, ``best``, ``every`` and ``at``, every set stays. The newest set and the
    newest full set always stay, pinned sets stay as they are. A set whose metric is missing or not
    finite is never best; while fewer than ``M`` sets can be ranked, none of those that cannot be
    ranked is deleted, since it might be the best.

    Raises ``UsageError`` for a rule that cannot be right.
    """

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None
    at: Iterable[int] = ()
    weights_only_after: int | None = None
    max_nbytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "best", "every", "weights_only_after", "max_nbytes"):
            _check_limit(name, getattr(self, name))
        if self.mode not in ("min", "max"):
            raise UsageError(f"Keep(mode=) must be 'min' or 'max', got {self.mode!r}")
        if self.best is not None and not (isinstance(self.metric, str) and self.metric):
            raise UsageError(
                f"Keep(best={self.best}) needs the name of a metric, got {self.metric!r}; write "
                f"Keep(best={self.best}, metric='loss') and pass metrics={{'loss': ...}} to save()"
            )
        if self.metric is not None and self.best is None:
            raise UsageError(
                f"Keep(metric={self.metric!r}) does nothing without best=; "
                f"write Keep(best=1, metric={self.metric!r}) to keep the best step"
            )
        object.__setattr__(self, "at", _check_at(self.at))

    def decide(self, committed: Sequence[Committed]) -> Decision:
        """Parts ``committed`` into what stays, shrinks and goes. The order given does not matter.

        The size of a thinned set is not known before it is written: ``max_nbytes`` counts the sets
        in ``thin`` as nothing. Decide again after thinning to have the limit hold exactly.

        Raises ``UsageError`` when one identity is given twice.
        """
        versions = _versions(committed)
        if not versions:
            return Decision(keep=frozenset())
        notes: list[str] = []
        kept = self._select(versions, notes)
        shrunk = self._shrink(kept)

        stay = {one.id: one for one in committed if one.pinned}
        thin: set[SetId] = set()
        for version in kept:
            small = version in shrunk
            stay |= {one.id: one for one in version.sets(shrunk=small)}
            if small and version.full is not None and not version.weights:
                thin.add(version.full.id)
        self._fit(stay, thin, safe={one.id for one in _newest(versions)}, notes=notes)
        return Decision(
            keep=frozenset(stay),
            thin=_oldest_first(one for one in stay.values() if one.id in thin),
            retire=_oldest_first(one for one in committed if one.id not in stay),
            notes=tuple(notes),
        )

    def _select(self, versions: list[_Version], notes: list[str]) -> list[_Version]:
        """The versions that some rule keeps, newest first."""
        if self.last is None and self.best is None and self.every is None and not self.at:
            return versions
        newest = {one.state_id for one in _newest(versions)}
        keys = newest | {v.state_id for v in versions if v.full is not None and v.full.pinned}
        if self.last is not None:
            keys |= {v.state_id for v in versions[: self.last]}
        if self.best is not None:
            keys |= self._best_keys(versions, self.best, notes)
        return [
            v
            for v in versions
            if v.state_id in keys
            or v.step in self.at
            or (self.every is not None and v.step % self.every == 0)
        ]

    def _best_keys(self, versions: list[_Version], best: int, notes: list[str]) -> set[SetId]:
        metric = self.metric or ""
        ranked = best_first([v.judged for v in versions], metric=metric, mode=self.mode)
        keys = {one.state_id for one in ranked[:best]}
        unranked = {v.state_id for v in versions} - {one.state_id for one in ranked}
        if len(ranked) < best and unranked:
            notes.append(
                f"best={best} cannot be told yet: {len(ranked)} of {len(versions)} steps have a "
                f"finite metric {metric!r}; the {len(unranked)} without it are kept"
            )
            keys |= unranked
        return keys

    def _shrink(self, kept: list[_Version]) -> list[_Version]:
        """Of the kept versions, those whose weights are enough."""
        if self.weights_only_after is None:
            return []
        full = [version for version in kept if version.full is not None]
        return [v for v in full[self.weights_only_after :] if not (v.full and v.full.pinned)]

    def _fit(
        self,
        stay: dict[SetId, Committed],
        thin: set[SetId],
        *,
        safe: set[SetId],
        notes: list[str],
    ) -> None:
        """Drops the oldest unprotected sets from ``stay`` until it fits ``max_nbytes``."""
        if self.max_nbytes is None:
            return
        total = sum(one.nbytes for one in stay.values() if one.id not in thin)
        for one in sorted(stay.values(), key=_order):
            if total <= self.max_nbytes:
                return
            if one.pinned or one.id in safe:
                continue
            # Strictly oldest first, even where a set to be thinned frees nothing in this count: an
            # older step never stays in place of a newer one.
            del stay[one.id]
            total -= 0 if one.id in thin else one.nbytes
            notes.append(f"{one.id.dirname} goes to stay within max_nbytes={self.max_nbytes}")
        if total > self.max_nbytes:
            notes.append(
                f"the newest and the pinned steps alone hold {total} bytes, over "
                f"max_nbytes={self.max_nbytes}; raise the limit or unpin steps"
            )


@dataclass(frozen=True, slots=True)
class _Version:
    """One training state: its full set, and weights-only sets made from it, newest first."""

    state_id: SetId
    full: Committed | None
    weights: tuple[Committed, ...]

    @property
    def judged(self) -> Committed:
        return self.full if self.full is not None else self.weights[0]

    @property
    def step(self) -> int:
        return self.judged.id.step

    def sets(self, *, shrunk: bool) -> list[Committed]:
        """What stays of this version if it is kept. Its weights, once there, may be enough."""
        if self.full is None or (shrunk and self.weights):
            return list(self.weights)
        return [self.full, *self.weights]


def _order(one: Committed) -> tuple[SetId, SetId]:
    return one.state_id, one.id


def best_first(
    committed: Iterable[Committed], *, metric: str, mode: Literal["min", "max"]
) -> list[Committed]:
    """The sets with a finite ``metric``, best first; of equals, the newer first."""
    sign = 1.0 if mode == "min" else -1.0
    ranked = []
    for one in sorted(committed, key=_order, reverse=True):
        value = _finite(one.metrics.get(metric))
        if value is not None:
            ranked.append((sign * value, one))
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _versions(committed: Sequence[Committed]) -> list[_Version]:
    """Sets grouped by the training state they hold, newest first."""
    ids = {one.id for one in committed}
    if len(ids) != len(committed):
        raise UsageError(
            f"{len(committed)} committed sets have {len(ids)} identities; list each once"
        )
    groups: dict[SetId, list[Committed]] = {}
    for one in sorted(committed, key=_order, reverse=True):
        groups.setdefault(one.state_id, []).append(one)
    found = []
    for state_id, sets in groups.items():
        full = [one for one in sets if one.content == "full"]
        weights = tuple(one for one in sets if one.content == "weights")
        found.append(_Version(state_id, full[0] if full else None, weights))
        # A full set has no origin. Should a manifest give it one, it is not known to be redundant.
        found += [_Version(state_id, extra, ()) for extra in full[1:]]
    return found


def _newest(versions: list[_Version]) -> list[Committed]:
    """The newest set, and the newest full set: usually one and the same."""
    newest = [versions[0].judged]
    full = [version.full for version in versions if version.full is not None]
    return newest + [one for one in full[:1] if one not in newest]


def _oldest_first(sets: Iterable[Committed]) -> tuple[SetId, ...]:
    return tuple(one.id for one in sorted(sets, key=_order))


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_INSTEAD = {
    "last": "the newest step is always kept: last=1 keeps only that one, Keep() keeps all",
    "best": "leave best= out to keep no step for its metric",
    "every": "every=1000 keeps each step that is a multiple of 1000",
    "weights_only_after": "the newest step stays full: weights_only_after=1 thins all others",
    "max_nbytes": "give a size in bytes, such as 500 * 2**30",
}


def _check_limit(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(
            f"Keep({name}=) must be a whole number of at least 1, got {value!r}; {_INSTEAD[name]}"
        )


def _check_at(at: Any) -> frozenset[int]:
    if isinstance(at, int) or not isinstance(at, Iterable):
        raise UsageError(f"Keep(at=) must list steps, got {at!r}; write at=(1000, 5000)")
    steps = frozenset(at)
    for step in steps:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"each step of Keep(at=) must be a whole number, got {step!r}")
    return steps
