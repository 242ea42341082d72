"""What every rank says and hears about a save: where to write, how it ended, that it is through.

The other side is :class:`sharded_ckpt.coordinator.Coordinator`. A rank calls, for each save and in
the order of its saves: :func:`fetch_attempt`; publishes its :class:`Vote`; :func:`fetch_verdict`;
:func:`acknowledge`. Rank 0 opens attempts and decides instead of fetching, and acknowledges, too.
"""

from __future__ import annotations

import json
import logging

from sharded_ckpt.errors import GroupError, GroupTimeout, SaveTimeout
from sharded_ckpt.group import Group
from sharded_ckpt.layout import SetId
from sharded_ckpt.votes import Ballot, Verdict

log = logging.getLogger(__name__)


def fetch_attempt(group: Group, *, n: int, step: int, timeout_s: float) -> SetId:
    """Where this rank is to write. Raises what rank 0 failed with, or :class:`SaveTimeout`."""
    ballot = Ballot(step, n)
    group.publish(Ballot.at_key(group.rank), ballot.token.encode())
    try:
        said = group.fetch(ballot.attempt_key, timeout_s)
    except GroupTimeout as e:
        if e.missing:  # the store itself does not answer
            raise
        group.publish(Ballot.at_key(group.rank), b"")  # at no save any more
        at = group.peek(Ballot.at_key(0))
        where = f"; it is at step {step_of(at)}" if at is not None else ""
        raise SaveTimeout(
            f"rank {group.rank} called save for step {step}, but rank 0 did not within "
            f"{timeout_s:g} s{where}. Every rank must call save with the same step",
            step=step,
            rank=0,
        ) from e
    found = json.loads(said)
    if "directory" not in found:
        error = Verdict.from_bytes(said).as_error()
        raise error if error is not None else GroupError("rank 0 sent no directory")
    id = SetId.parse(found["directory"])
    if id is None or id.step != step:
        raise GroupError(f"rank 0 answered {said!r} to the save of step {step}")
    return id


def fetch_verdict(group: Group, *, n: int, step: int, timeout_s: float) -> Verdict:
    """How the attempt ended. Raises :class:`SaveTimeout` when rank 0 does not say in time."""
    try:
        return Verdict.from_bytes(group.fetch(Ballot(step, n).verdict_key, timeout_s))
    except GroupTimeout as e:
        raise SaveTimeout(
            f"rank 0 did not say within {timeout_s:g} s whether step {step} is committed: {e}. "
            "Load again after a restart to see",
            step=step,
            rank=0,
        ) from e


def acknowledge(group: Group, *, n: int, step: int) -> None:
    """Says that this rank is through with a save: voted, verdict read, failed file removed.

    The last thing to do about a save, on every rank. Never raises: it is about tidiness.
    """
    ballot = Ballot(step, n)
    try:
        group.forget([ballot.vote_key(group.rank)])
        group.count(ballot.seen_key)
    except GroupError as e:
        log.debug("could not acknowledge the verdict on step %d: %s", step, e)


def step_of(token: bytes) -> str:
    """The step in a ballot's token, for messages."""
    return token.decode(errors="replace").partition(".")[0]
