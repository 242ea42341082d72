"""Terms: the number of the job launch that writes to a directory, claimed by creating a file.

A job that finds a higher term than its own has been replaced, perhaps without knowing (a requeued
job, a process stuck in a network file system). It must not write or delete any more.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from datetime import UTC, datetime

from sharded_ckpt import layout
from sharded_ckpt.errors import StoreError, Superseded
from sharded_ckpt.layout import SetId
from sharded_ckpt.store import LocalStore

MAX_TERM_FILE_NBYTES = 64 << 10
_MAX_TRIES = 1000


def claim_term(store: LocalStore, run_id: str) -> int:
    """Claims the next term for this job. Of several jobs that try at once each gets its own.

    Raises :class:`StoreError`.
    """
    claim = {
        "run_id": run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "claimed_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    data = (json.dumps(claim, indent=1, sort_keys=True) + "\n").encode()
    term = 0
    for _ in range(_MAX_TRIES):
        # Directories count, too: one may have been copied in from a place with higher terms.
        term = max(term, max(map(_term_of, store.list_dir()), default=0)) + 1
        try:
            store.create_exclusive(layout.term_file(term), data)
        except StoreError as e:
            if e.errno != errno.EEXIST:
                raise
        else:
            return term
    raise StoreError("claim a term in", store.root, errno.EBUSY, f"{_MAX_TRIES} were taken")


def check_superseded(store: LocalStore, term: int, step: int | None = None) -> None:
    """Raises :class:`Superseded`, saying who and when, if a higher term has been claimed."""
    found = [layout.parse_term_file(name) for name in store.list_dir()]
    newest = max((number for number in found if number is not None), default=0)
    if newest > term:
        raise Superseded(
            f"{store.root} was claimed as term {newest} by {_who(store, newest)}; this job has "
            f"term {term} and writes there no more. Stop this job, or give it its own directory",
            step=step,
        )


def _term_of(name: str) -> int:
    number = layout.parse_term_file(name)
    if number is not None:
        return number
    set_id = SetId.parse(name) or layout.parse_trash_name(name)
    return 0 if set_id is None else set_id.term


def _who(store: LocalStore, term: int) -> str:
    """For a message only: a claim that is being written, or is damaged, is still a claim."""
    try:
        claim = json.loads(store.read(layout.term_file(term), MAX_TERM_FILE_NBYTES))
        return f"run {claim['run_id']} on host {claim['host']} at {claim['claimed_at']}"
    except (StoreError, ValueError, KeyError, TypeError):
        return "a job that its file does not name"
