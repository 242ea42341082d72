"""The coordinator's memory of shard layouts, so that ranks send them only when they change."""

from __future__ import annotations

from collections.abc import Mapping

from sharded_ckpt import plan
from sharded_ckpt.votes import Vote, unpack_entries


class UnknownLayout(Exception):
    """A rank named a layout that it has not sent."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Layouts:
    """Layouts by rank, packed as they came, and the combination that was found complete last."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[str, str]] = {}  # rank -> digest, packed entries
        self._complete: dict[int, str] = {}  # rank -> digest

    def problems(self, votes: Mapping[int, Vote]) -> list[str]:
        """What is wrong with the shards taken together; nothing when the list is empty.

        Costs one comparison a rank while no layout changes. Raises :class:`UnknownLayout`.
        """
        for rank, vote in votes.items():
            if vote.packed_entries is not None:
                self._packed[rank] = (vote.layout_digest, vote.packed_entries)
        digests = {rank: vote.layout_digest for rank, vote in votes.items()}
        if digests == self._complete:
            return []
        layouts = {}
        for rank, digest in sorted(digests.items()):
            known, packed = self._packed.get(rank, ("", ""))
            if known != digest:
                raise UnknownLayout(
                    f"rank {rank} did not send the layout of its shard ({digest})", rank
                )
            layouts[rank] = unpack_entries(packed)
            if plan.layout_digest(layouts[rank]) != digest:
                raise UnknownLayout(
                    f"rank {rank} sent another layout than that of its shard ({digest})", rank
                )
        problems = plan.coverage(layouts)
        if not problems:
            self._complete = digests
        return problems
