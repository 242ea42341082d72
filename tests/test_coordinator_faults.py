"""The commit when rank 0's own disk fails, and when it is killed before any effect on the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharded_ckpt import layout
from sharded_ckpt.coordinator import Coordinator
from sharded_ckpt.errors import CommitUnknown, SaveAborted, StoreError
from sharded_ckpt.keep import Keep
from sharded_ckpt.layout import MANIFEST, SetId
from sharded_ckpt.store import LocalStore
from sharded_ckpt.votes import Outcome
from tests.job import Job, offered, outcomes, parts

# ---- failures of rank 0's own store


class FaultyStore(LocalStore):
    """Fails the effects that a test picks."""

    fault = staticmethod(lambda operation, path: None)

    def _effect(self, operation, path, call):
        error = self.fault(operation, path)
        if error is not None:
            raise StoreError(operation, path, error)
        return super()._effect(operation, path, call)


def manifest_fault(operation_wanted: str, after_rename: bool = False):
    """EIO at an effect on the manifest, or on its directory once it is in place."""
    renamed = []

    def fault(operation: str, path: str):
        if operation == "rename" and path.endswith(MANIFEST):
            renamed.append(path)
            return errno.EIO if operation_wanted == "rename" else None
        wanted = layout.is_temp_name(os.path.basename(path)) or (after_rename and renamed)
        return errno.EIO if operation == operation_wanted and wanted else None

    return fault


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "close"])
def test_a_manifest_that_cannot_be_written_aborts(tmp_path: Path, operation: str) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 2, store=store)
    store.fault = manifest_fault(operation)
    results = job.save(10)
    assert outcomes(results) == ["aborted"] * 2
    assert "rank 0 could not write the manifest" in results[1].message
    assert results[1].rank == 0
    store.fault = FaultyStore.fault
    assert offered(store) == []
    assert outcomes(job.save(20)) == ["committed"] * 2


@pytest.mark.parametrize("at", ["rename", "directory"])
def test_p6_an_unknown_outcome_is_said_and_deletes_nothing(tmp_path: Path, at: str) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 2, store=store, keep=Keep(last=1))
    assert outcomes(job.save(10)) == ["committed"] * 2
    store.fault = manifest_fault("rename" if at == "rename" else "fsync", at == "directory")
    if at == "directory":
        store.fault = directory_fault(store)
    results = job.save(20)
    assert outcomes(results) == ["unknown"] * 2
    error = results[1].as_error()
    assert isinstance(error, CommitUnknown) and "nothing was deleted" in str(error)
    store.fault = FaultyStore.fault
    assert len([n for n in store.list_dir() if SetId.parse(n)]) == 2
    assert 10 in offered(store)
    assert outcomes(job.save(30)) == ["committed"] * 2
    # It stays, whether it looks committed or not: this job cannot tell.
    assert [id.step for n in store.list_dir() if (id := SetId.parse(n))] == [20, 30]


def test_p6_a_set_of_unknown_outcome_does_not_count_as_kept(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 2, store=store, keep=Keep(last=2))
    assert outcomes(job.save(10)) == ["committed"] * 2
    store.fault = directory_fault(store)
    assert outcomes(job.save(20)) == ["unknown"] * 2
    store.fault = FaultyStore.fault
    assert outcomes(job.save(30)) == ["committed"] * 2
    assert offered(store) == [10, 20, 30]
    assert outcomes(job.save(40)) == ["committed"] * 2
    assert offered(store) == [20, 30, 40]


def directory_fault(store: LocalStore):
    """EIO at the fsync of the step directory after the manifest was renamed into it."""

    def fault(operation: str, path: str):
        there = os.path.exists(os.path.join(path, MANIFEST)) and "step-00000020" in path
        return errno.EIO if operation == "fsync" and there else None

    return fault


def test_p7_a_directory_that_cannot_be_made_is_told_to_every_rank(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path)
    job = Job(tmp_path, 3, store=store, timeout_s=60)
    store.fault = lambda operation, path: errno.EROFS if operation == "mkdir" else None
    began = time.monotonic()
    results = job.save(10)
    assert time.monotonic() - began < 20
    assert outcomes(results) == ["aborted"] * 3
    assert "rank 0 could not begin step 10: mkdir" in results[2].message
    store.fault = FaultyStore.fault
    assert outcomes(job.save(10)) == ["committed"] * 3


def test_p7_a_state_that_does_not_fit_a_manifest_is_told_to_every_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    results = job.save(10, parts_=parts(metrics={"loss": "text"}))
    assert outcomes(results) == ["aborted"] * 2
    assert outcomes(job.save(20)) == ["committed"] * 2


def test_p7_a_step_that_has_no_name_is_told_to_every_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    step = layout.MAX_STEP + 1
    with pytest.raises(ValueError, match="step must be between"):
        job.coordinator.open_attempt(step, n=1)
    with pytest.raises(SaveAborted, match="rank 0 could not begin step"):
        Coordinator.fetch_attempt(job.groups[1], n=1, step=step, timeout_s=0.5)
    verdict = job.coordinator.decide(n=1, step=step, id=None, parts=None)
    assert verdict.outcome is Outcome.ABORTED and "step must be between" in verdict.message


# ---- crashes: a child process is killed before each effect on the disk in turn


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sharded_ckpt.keep import Keep
from sharded_ckpt.store import LocalStore
from tests.job import Job

class KilledStore(LocalStore):
    left = -1
    def _effect(self, operation, path, call):
        if self.left == 0:
            os._exit(77)
        self.left -= 1
        return super()._effect(operation, path, call)

store = KilledStore(sys.argv[2])
first = int(sys.argv[4])
fds = os.open(sys.argv[2] + ".acked", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
job = Job(sys.argv[2], 1, store=store, keep=Keep(last=1))
for step in (first, first + 1):
    if step == first + 1:
        store.left = int(sys.argv[3])
    (verdict,) = job.save(step)
    assert verdict.as_error() is None, verdict.message
    os.write(fds, b"%d\\n" % step)
if store.left >= 0:
    sys.exit(0)
"""


def run_forked(root: Path, kill_before: int, first: int) -> int:
    """The child above as a fork of this process, which has everything imported."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            sys.argv = ["child", ".", str(root), str(kill_before), str(first)]
            exec(compile(CHILD, "child", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_p1_p2_p6_killed_before_any_effect_of_a_commit_or_its_retention(tmp_path: Path) -> None:
    """After a crash anywhere: whole sets only, what was acknowledged is there, and a new job can
    load, save and clean up."""
    killed = 0
    for k in range(200):
        root = tmp_path / str(k)
        LocalStore(root)
        code = run_forked(root, k, first=10)
        assert code in (0, 77)
        killed += code == 77
        store = LocalStore(root)
        acked = [int(line) for line in (tmp_path / f"{k}.acked").read_text().split()]
        steps = offered(store)
        assert steps, f"nothing is offered after a kill before effect {k}"
        assert steps[-1] >= acked[-1]
        after = Job(root, 1, keep=Keep(last=1))
        assert after.term == 2
        assert outcomes(after.save(100)) == ["committed"]
        assert offered(store) == [100]
        left = [n for n in store.list_dir() if layout.parse_term_file(n) is None]
        assert len(left) == 1, f"left behind after a kill before effect {k}: {left}"
        if code == 0:
            break
    assert code == 0 and killed == 19


def test_p2_the_child_of_the_crash_test_runs_as_a_process_too(tmp_path: Path) -> None:
    root = tmp_path / "run"
    repository = str(Path(__file__).resolve().parent.parent)
    code = subprocess.run(
        [sys.executable, "-c", CHILD, repository, str(root), "9", "10"], timeout=120
    ).returncode
    assert code == 77
    assert offered(LocalStore(root))[0] == 10
