"""Opening a directory together: one term for the job, and proof that every rank sees it.

Rank 0 claims the next term by creating its file exclusively. That file is the token, too: every
other rank must find it, with the same content, where it believes the directory to be. A directory
that is not shared by all ranks is refused before anything is saved into it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from sharded_ckpt import terms
from sharded_ckpt.errors import CheckpointError, GroupError, StoreError, UsageError
from sharded_ckpt.group import Group
from sharded_ckpt.layout import term_file
from sharded_ckpt.store import LocalStore

# Shared file systems may show a new file late on other hosts; past this it is not the same
# directory, whatever the reason.
VISIBLE_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A directory that this job may write to, as term ``term``."""

    store: LocalStore
    term: int
    run_id: str


def open_directory(
    directory: str, group: Group, *, options: str, read_only: bool, timeout_s: float
) -> Opened:
    """Opens ``directory`` on all ranks. Collective.

    ``options`` describes how each rank was called; ranks that were called differently are refused
    here, since they would wait for each other later. With ``read_only`` no term is claimed (term
    0), and the directory must exist. Raises :class:`UsageError`, also for a directory that cannot
    be opened, with the cause and the host; and :class:`GroupTimeout`.
    """
    answer: bytes | None = None
    store: LocalStore | None = None
    if group.rank == 0:
        try:
            store, message = _claim(directory, read_only)
        except CheckpointError as error:
            message = {"error": str(error)}
        answer = json.dumps({**message, "options": options}).encode()
    said = json.loads(group.broadcast("open/term", answer, timeout_s))
    problem = said.get("error")
    if problem is None:
        problem = _problem_here(directory, group, said, options, read_only)
    report = json.dumps({"host": socket.gethostname(), "problem": problem}).encode()
    reports = group.gather("open/seen", report, timeout_s)
    verdict: bytes | None = None
    if group.rank == 0:
        verdict = _verdict(reports).encode()
    verdict = group.broadcast("open/verdict", verdict, timeout_s)
    if verdict:
        raise UsageError(verdict.decode())
    if store is None:
        store = LocalStore(directory, create=False)
    return Opened(store, int(said["term"]), str(said["run_id"]))


def _claim(directory: str, read_only: bool) -> tuple[LocalStore, dict[str, Any]]:
    store = LocalStore(directory, create=not read_only)
    run_id = secrets.token_hex(8)
    if read_only:
        return store, {"term": 0, "run_id": run_id, "token": ""}
    term = terms.claim_term(store, run_id)
    token = store.read(term_file(term), terms.MAX_TERM_FILE_NBYTES)
    return store, {"term": term, "run_id": run_id, "token": token.decode()}


def _problem_here(
    directory: str, group: Group, said: dict[str, Any], options: str, read_only: bool
) -> str | None:
    if said["options"] != options:
        return f"was called with {options}, rank 0 with {said['options']}"
    if group.rank == 0:
        return None
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    wanted = term_file(int(said["term"]))
    pause_s = 0.01
    while True:
        try:
            store = LocalStore(directory, create=False)
            if read_only:
                return None
            seen = store.read(wanted, terms.MAX_TERM_FILE_NBYTES).decode()
            if seen == said["token"]:
                return None
            reason = f"{wanted} there is another file"
        except StoreError as error:
            reason = str(error)
        if time.monotonic() >= deadline:
            return f"does not see {wanted} in {os.path.abspath(directory)}: {reason}"
        # Bounded polling of one name, for file systems that cache the absence of a file.
        time.sleep(pause_s)
        pause_s = min(1.0, pause_s * 2)


def _verdict(reports: list[bytes]) -> str:
    if not reports:
        raise GroupError("no rank reported on the directory")
    problems = []
    for rank, raw in enumerate(reports):
        report = json.loads(raw)
        if report["problem"]:
            problems.append(f"rank {rank} on host {report['host']} {report['problem']}")
    if not problems:
        return ""
    more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
    return (
        "; ".join(problems[:4]) + more + "; every rank needs the same directory on a file system "
        "that all hosts share, and the same arguments"
    )
