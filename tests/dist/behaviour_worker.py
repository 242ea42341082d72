"""Two ranks of a small DDP job in many situations, one after another. Arguments: DIRECTORY NAME...

Each situation prints ``CASE {"case", "rank", ...}`` on every rank; the test compares.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sharded_ckpt import CheckpointError, Keep, SaveEvery, ShardedCheckpointer

Report = dict[str, Any]
CASES: dict[str, Callable[[Path], Report]] = {}


def case(function: Callable[[Path], Report]) -> Callable[[Path], Report]:
    CASES[function.__name__] = function
    return function


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)))


def opened(directory: Path, **options: Any) -> ShardedCheckpointer:
    options = {"timeout_s": 60, **options}
    return ShardedCheckpointer(model(), directory, **options)


def outcome(call: Callable[[], Any]) -> Report:
    try:
        return {"value": str(call())}
    except CheckpointError as error:
        return {"error": type(error).__name__, "message": str(error)}


@contextlib.contextmanager
def small_files(on: bool) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@case
def one_rank_alone(directory: Path) -> Report:
    ckpt = opened(directory, timeout_s=8)
    report: Report = {}
    if dist.get_rank() == 0:
        report = outcome(lambda: ckpt.save(1).wait(60))
    dist.barrier()
    ckpt.save(2).wait(60)
    report["steps"] = ckpt.all_steps()
    ckpt.close()
    return report


@case
def one_rank_cannot_write(directory: Path) -> Report:
    ckpt = opened(directory, keep=Keep(last=1))
    ckpt.save(1).wait(60)
    with small_files(dist.get_rank() == 1):
        handle = ckpt.save(2)
        handle.settle(60)
    report = outcome(lambda: handle.wait(60))
    report["steps"] = ckpt.all_steps()
    ckpt.save(3).wait(60)
    ckpt.close()
    report["after"] = [p.name for p in directory.glob("step-*-t0001-0002-*/*")]
    return report


@case
def different_steps(directory: Path) -> Report:
    ckpt = opened(directory, timeout_s=10)
    handle = ckpt.save(10 + dist.get_rank())
    report = outcome(lambda: handle.wait(60))
    dist.barrier()
    ckpt.save(12).wait(60)
    report["steps"] = ckpt.all_steps()
    ckpt.close()
    return report


@case
def a_bad_value_on_one_rank(directory: Path) -> Report:
    ckpt = opened(directory)
    bad = {"x": object()} if dist.get_rank() == 1 else {"x": 1}
    report = outcome(lambda: ckpt.save(1, client_state=bad).wait(60))
    ckpt.save(2).wait(60)
    report["steps"] = ckpt.all_steps()
    ckpt.close()
    return report


@case
def a_signal_to_one_rank(directory: Path) -> Report:
    ckpt = opened(directory, save_every=SaveEvery(steps=1000))
    ckpt.install_signal_handlers()
    saved, stopped = [], None
    for step in range(1, 200):
        if step == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        dist.barrier()  # the coupling that a training step has
        if ckpt.should_save(step):
            ckpt.save(step).wait(60)
            saved.append(step)
        if ckpt.should_stop:
            stopped = step
            break
    ckpt.close()
    return {"saved": saved, "stopped": stopped}


@case
def a_clock_that_only_rank_0_reads(directory: Path) -> Report:
    ckpt = opened(directory, save_every=SaveEvery(minutes=0.0005))
    answers = [ckpt.should_save(step) for step in range(1, 400)]
    ckpt.close()
    return {"answers": answers, "some": any(answers)}


@case
def busy_on_one_rank_skips_on_all(directory: Path) -> Report:
    ckpt = opened(directory, when_busy="skip", buffers=1)
    ckpt.save(1).wait(60)
    held = ckpt._pool.acquire(5) if dist.get_rank() == 1 else None
    skipped = ckpt.save(2).skipped
    if held is not None:
        ckpt._pool.release(held)
    again = ckpt.save(3)
    again.wait(60)
    report = {"skipped": skipped, "again": again.skipped, "steps": ckpt.all_steps()}
    ckpt.close()
    return report


@case
def per_rank_client_state(directory: Path) -> Report:
    ckpt = opened(directory)
    ckpt.save(1, client_state={"me": dist.get_rank()}, metrics={"m": 1.0}).wait(60)
    result = ckpt.load()
    ckpt.close()
    return {"me": result.client_state["me"], "metrics": result.metrics}


@case
def damage_on_one_rank_is_everybodys(directory: Path) -> Report:
    ckpt = opened(directory)
    ckpt.save(1).wait(60)
    last = ckpt.save(2).wait(60)
    dist.barrier()
    if dist.get_rank() == 0:
        path = directory / last.dirname / "rank-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)
    dist.barrier()
    report = outcome(ckpt.load)
    report["fallback"] = ckpt.load(on_corrupt="fallback").step
    ckpt.close()
    return report


@case
def a_load_refused_on_one_rank_changes_nothing_on_the_others(directory: Path) -> Report:
    torch.manual_seed(1)
    net = DistributedDataParallel(nn.Linear(64, 64))
    ckpt = ShardedCheckpointer(net, directory, timeout_s=20)
    last = ckpt.save(1).wait(60)
    dist.barrier()
    if dist.get_rank() == 0:
        path = directory / last.dirname / "rank-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[20] ^= 1  # in the header: found while planning
        path.write_bytes(data)
    with torch.no_grad():
        net.module.weight.fill_(7.0)
    dist.barrier()
    report = outcome(ckpt.load)
    report["untouched"] = bool((net.module.weight == 7.0).all())
    ckpt.close()
    return report


class Touchy:
    """State that one rank cannot take back."""

    def state_dict(self) -> Report:
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state: Report) -> None:
        if state["rank"] == 1:
            raise RuntimeError("not today")


@case
def state_that_one_rank_cannot_take_back(directory: Path) -> Report:
    ckpt = opened(directory, stateful={"touchy": Touchy()})
    ckpt.save(1).wait(60)
    report = outcome(ckpt.load)
    ckpt.close()
    return report


@case
def replicated_tensors_are_cut_evenly(directory: Path) -> Report:
    ckpt = opened(directory)
    last = ckpt.save(1).wait(60)
    sizes = [p.stat().st_size for p in sorted((directory / last.dirname).glob("rank-*"))]
    ckpt.close()
    return {"sizes": sizes}


@case
def another_directory_on_one_rank(directory: Path) -> Report:
    mine = directory / str(dist.get_rank())
    mine.mkdir(parents=True)
    return outcome(lambda: opened(mine))


@case
def other_arguments_on_one_rank(directory: Path) -> Report:
    snapshot = "blocking" if dist.get_rank() else "lazy"
    return outcome(lambda: opened(directory, snapshot=snapshot))


@case
def a_newer_job_supersedes(directory: Path) -> Report:
    old = opened(directory)
    old.save(1).wait(60)
    new = opened(directory)
    report = outcome(lambda: old.save(2).wait(60))
    with contextlib.suppress(CheckpointError):
        old.close()
    new.save(3).wait(60)
    report["steps"] = new.all_steps()
    new.close()
    return report


@case
def two_in_flight(directory: Path) -> Report:
    ckpt = opened(directory)
    handles = [ckpt.save(step) for step in range(1, 9)]
    ids = [h.wait(60) for h in handles]
    report = {"steps": ckpt.all_steps(), "serials": [i.serial for i in ids]}
    ckpt.close()
    return report


def main() -> None:
    import sharded_ckpt.opening

    sharded_ckpt.opening.VISIBLE_WITHIN_S = 1.0  # of the directory that is another one
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or CASES:
        report = CASES[name](root / name)
        print("CASE " + json.dumps({"case": name, "rank": dist.get_rank(), **report}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
