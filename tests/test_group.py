"""group: every wait has a deadline, and says who is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_ckpt import group as group_module
from sharded_ckpt.errors import GroupError, GroupTimeout
from sharded_ckpt.group import SoloGroup, StoreGroup, ThreadGroup, ranks_text


def on_ranks(groups, call) -> list:
    """``call(group)`` on every rank at once; the results, or the errors, by rank."""
    results: list = [None] * len(groups)

    def run(i: int) -> None:
        try:
            results[i] = call(groups[i])
        except Exception as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def check_all_operations(groups) -> None:
    """What any kind of group does; ``groups`` has three ranks."""

    def talk(group) -> tuple:
        rank = group.rank
        said = group.broadcast("b", b"term 7" if rank == 0 else None, 20)
        gathered = group.gather("g", b"%d" % rank, 20)
        group.publish(f"big/{rank}", bytes([rank]) * (9 << 20))
        big = group.fetch(f"big/{(rank + 1) % 3}", 20)
        clone = group.clone()
        clone.publish(f"c/{rank}", b"")
        empty = group.fetch(f"c/{rank}", 20)
        clone.close()
        count = group.count("n")
        return said, gathered, (len(big), big[0]), empty, count

    results = on_ranks(groups, talk)
    assert [r[0] for r in results] == [b"term 7"] * 3
    assert [r[1] for r in results] == [[b"0", b"1", b"2"], [], []]
    assert [r[2] for r in results] == [(9 << 20, 1), (9 << 20, 2), (9 << 20, 0)]
    assert [r[3] for r in results] == [b""] * 3
    assert sorted(r[4] for r in results) == [1, 2, 3]

    first = groups[0]
    assert first.peek("never") is None
    assert first.count("n", 0) == 3
    first.forget(["n", "big/0", "never"])
    assert first.count("n", 0) == 0
    assert first.peek("big/0") is None
    with pytest.raises(GroupTimeout, match="'never' within 0.1 s"):
        first.fetch("never", 0.1)
    with pytest.raises(GroupTimeout, match="ranks 1, 2 did not answer 'alone'") as caught:
        first.gather("alone", b"", 0.1)
    assert caught.value.missing == (1, 2)
    with pytest.raises(GroupTimeout, match="rank 0 did not answer") as caught:
        groups[1].broadcast("silence", None, 0.1)
    assert caught.value.missing == (0,)


def test_threads_do_all_operations() -> None:
    check_all_operations(ThreadGroup.make(3))


def test_p7_collect_stops_at_the_stop_key_and_returns_what_came() -> None:
    zero, one, _ = ThreadGroup.make(3)
    one.publish("v/1", b"yes")
    one.publish("no", b"disk full")
    got = zero.collect([f"v/{rank}" for rank in range(3)], 30, "no")
    assert got.values == [None, b"yes", None]
    assert got.stop == b"disk full"


def test_collect_without_time_still_looks_once() -> None:
    zero, one = ThreadGroup.make(2)
    one.publish("v/1", b"yes")
    assert zero.collect(["v/0", "v/1"], 0).values == [None, b"yes"]


def test_collect_is_linear_in_ranks() -> None:
    def requests(ranks: int) -> int:
        groups = ThreadGroup.make(ranks)
        for group in groups:
            group.publish(f"v/{group.rank}", b"yes")
        board = groups[0].board
        board.requests = 0
        assert groups[0].collect([f"v/{r}" for r in range(ranks)], 10, "no").stop is None
        return board.requests

    assert requests(4096) <= 4096
    assert requests(4096) <= 4.2 * requests(1024)


def test_a_late_value_ends_the_wait() -> None:
    zero, one = ThreadGroup.make(2)
    results = on_ranks(
        [zero, one], lambda g: g.fetch("k", 20) if g.rank == 0 else g.publish("k", b"late")
    )
    assert results[0] == b"late"


def test_solo_needs_nobody() -> None:
    solo = SoloGroup()
    assert solo.gather("g", b"x", 0) == [b"x"]
    assert solo.broadcast("b", b"x", 0) == b"x"


def test_ranks_are_listed_shortly() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1, 2"
    assert ranks_text(range(4096), limit=2) == "ranks 0, 1 and 4094 more"


# ---- real stores; these import torch


def test_every_kind_of_torch_store_does_all_operations(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    tcp = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = {
        "hash": dist.HashStore(),
        "file": dist.FileStore(str(tmp_path / "store"), 3),
        "tcp": tcp,
        "prefix": dist.PrefixStore("default_pg", dist.PrefixStore("0", tcp)),
    }
    for name, store in stores.items():
        base = StoreGroup(store, 0, 3, f"sharded_ckpt/{name}")
        ranks = [base.clone() for _ in range(3)]
        for rank, group in enumerate(ranks):
            group.rank = rank
        keys = store.num_keys() if name != "file" else 0
        check_all_operations(ranks)
        if name == "tcp":
            # two 9 MiB values in three parts and a head, c/0..2, b, and the counter asked for
            assert store.num_keys() - keys == 2 * 4 + 3 + 1 + 1
        for group in [base, *ranks]:
            group.close()


SERVER = """
import os, sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen, int]]:
    pytest.importorskip("torch.distributed")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_p7_a_host_of_the_store_that_hangs_or_dies_is_reported_in_time(server, monkeypatch) -> None:
    import torch.distributed as dist

    process, port = server
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    monkeypatch.setattr(group_module, "OP_TIMEOUT_S", 1.0)
    base = StoreGroup(store, 1, 2, "sharded_ckpt/x")
    hung, dead = base.clone(), base.clone()
    hung.publish("a", b"x")

    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(GroupTimeout, match=r"rank 1: the coordinator \(rank 0\) cannot be reached"):
        hung.fetch("verdict", 0.5)
    with pytest.raises(GroupTimeout, match="gave no answer for 'b' within 1 s"):
        hung.publish("b", b"x")
    assert time.monotonic() - began < 10

    process.kill()
    process.wait()
    with pytest.raises(GroupError, match=r"rank 1: the coordinator \(rank 0\) cannot be reached"):
        dead.fetch("verdict", 20)
    assert time.monotonic() - began < 15
    for group in (base, hung, dead):
        group.close()


JOB = """
import sys
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from sharded_ckpt import group as group_module
from sharded_ckpt.group import StoreGroup, group_from_torch
rank, path = int(sys.argv[1]), sys.argv[2]
address = "tcp://127.0.0.1:" + sys.argv[3]
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
seen = []
for _ in range(2):  # a second checkpointer of one process must not read the first one's keys
    group = group_from_torch("run", 30)
    assert isinstance(group, StoreGroup) and (group.rank, group.world_size) == (rank, 2)
    seen.append(group.broadcast("k", b"%d" % len(seen) if rank == 0 else None, 30))
    group.gather("end", b"", 30)
    if rank == 0:  # a later start of the job under the same name must find nothing here
        meeting = group_module._meeting("run", len(seen), 2)
        lobby = StoreGroup(_get_default_store(), rank, 2, meeting)
        assert lobby.peek("nonce") is None
        lobby.close()
assert seen == [b"0", b"1"], seen
dist.barrier()
"""


def test_the_group_of_a_torch_job(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, "-c", JOB, str(rank), str(tmp_path), port])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_starts_with_other_members_meet_elsewhere(monkeypatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    first = group_module._meeting("run", 1, 8)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    assert len({first, group_module._meeting("run", 1, 8), group_module._meeting("run", 1, 4)}) == 3


def test_a_counter_is_waited_for_within_a_deadline() -> None:
    zero, one = ThreadGroup.make(2)
    assert not zero.await_count("n", 1, 0.05)
    results = on_ranks(
        [zero, one], lambda g: g.await_count("n", 1, 20) if g.rank == 0 else g.count("n")
    )
    assert results == [True, 1]


def test_without_a_job_the_group_is_solo() -> None:
    pytest.importorskip("torch.distributed")
    assert isinstance(group_module.group_from_torch("run"), SoloGroup)
