"""What a source is: the seam between a training object and everything else.

A source turns one training object (a DeepSpeed engine, an FSDP2 model with its optimizer, a plain
module) into named slices, and takes them back. It starts no thread, touches no disk, and runs no
collective except in :meth:`Source.refresh`, which the training thread calls on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sharded_ckpt.slices import Entry, Slice

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """Which pieces of a step are loaded. What is left out stays as it is in the live objects.

    ``strict=False`` allows saved names that nothing here wants, and wanted names that were not
    saved; both are reported in ``LoadResult.loaded``.
    """

    weights: bool = True
    optimizer: bool = True
    scheduler: bool = True
    rng: bool = True
    data: bool = True
    strict: bool = True


class Source(Protocol):
    """One training object, seen as named slices."""

    kind: str
    rank: int
    world_size: int

    @property
    def reads_all_shards(self) -> bool:
        """Whether targets lie in other ranks' shards too: replicated tensors are cut over ranks."""

    def describe(self) -> State:
        """JSON description of how tensors are cut over ranks. Equal on every rank of one layout."""

    def slices(self) -> list[Slice]:
        """All tensors that this rank writes, as live views, collected afresh at every call.

        No collectives, no copies, no change of training state. Raises ``UnsupportedError`` for
        what cannot be captured exactly.
        """

    def rank_state(self) -> State:
        """Non-tensor state that each rank keeps for itself (parameter groups by name, counters)."""

    def shared_state(self) -> State:
        """Non-tensor state that is equal on all ranks (schedulers, loss scaler, step counters)."""

    def aliases(self) -> dict[str, str]:
        """Tied parameters: every further name of one, mapped to the name it is stored as."""

    def check_can_save(self) -> None:
        """Raises ``UsageError`` where saving now would lose state (mid gradient accumulation)."""

    def targets(self, saved: Mapping[str, Entry], parts: Parts) -> list[Slice]:
        """Live tensors that a load must fill, given what was saved under which name.

        ``saved`` maps each saved name to one entry of it, for dtype and global shape. Optimizer
        state that does not exist yet is created, with the saved dtype.
        """

    def check_saved(self, rank_state: State, shared_state: State, parts: Parts) -> None:
        """Raises ``StateMismatch`` for non-tensor state that :meth:`restore` could not take back.

        Called on every rank before any live tensor is filled.
        """

    def restore(self, rank_state: State, shared_state: State, parts: Parts) -> None:
        """Takes non-tensor state back, once the targets are filled. Needs no other rank."""

    def refresh(self, parts: Parts) -> None:
        """Refreshes what is derived from the restored state: 16-bit weights, gathered copies.

        The only method that runs collectives: every rank calls it from its training thread, after
        all ranks have agreed that they could restore.
        """

    def install_fence(self, fence: Callable[[], None]) -> Callable[[], None]:
        """Calls ``fence`` before every in-place update by the optimizer; returns the remover."""
