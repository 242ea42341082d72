"""Agreement of ranks, and signals: what one rank learns, all ranks do at the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharded_ckpt import preemption
from sharded_ckpt.errors import GroupError, GroupTimeout, UsageError
from sharded_ckpt.group import SoloGroup, ThreadGroup
from sharded_ckpt.preemption import Agreement, Decision, Preemption

NO = Decision(save=False, stop=False, reason="")


def on_ranks(count, work):
    """``work(group)`` on each rank in a thread of its own; what each returned or raised."""
    groups = ThreadGroup.make(count)
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, group) for group in groups]
        return [future.exception(60) or future.result() for future in futures]


@pytest.fixture
def handlers():
    kept = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for one, handler in kept.items():
        signal.signal(one, handler)


def test_every_rank_does_what_rank_0_decided():
    def work(group):
        agreement = Agreement(group, timeout_s=30)
        own = group.rank == 0
        return [
            agreement.decide(step, lambda step=step: Decision(own and step % 3 == 0, False, "due"))
            for step in range(1, 10)
        ]

    results = on_ranks(3, work)
    assert [d.save for d in results[0]] == [step % 3 == 0 for step in range(1, 10)]
    assert results[1] == results[2] == results[0]


def test_only_rank_0_is_asked():
    asked = []

    def work(group):
        Agreement(group, timeout_s=30).decide(1, lambda: asked.append(group.rank) or NO)

    on_ranks(3, work)
    assert asked == [0]


def test_p7_a_silent_rank_0_is_named_within_the_deadline():
    (_, group) = ThreadGroup.make(2)
    with pytest.raises(
        GroupTimeout, match="step 12: rank 0 did not announce .* within 0.05 s"
    ) as e:
        Agreement(group, timeout_s=0.05).decide(12, lambda: NO)
    assert e.value.missing == (0,)


def test_p7_an_error_on_rank_0_reaches_all_ranks_at_once():
    def work(group):
        def local():
            raise OSError("no clock")

        Agreement(group, timeout_s=3600).decide(5, local)

    first, second = on_ranks(2, work)
    assert isinstance(first, OSError)
    assert isinstance(second, GroupError) and "OSError: no clock" in str(second)


def test_p7_ranks_that_ask_about_different_steps_are_told():
    def work(group):
        return Agreement(group, timeout_s=30).decide(7 + group.rank, lambda: NO)

    first, second = on_ranks(2, work)
    assert first == NO
    assert isinstance(second, GroupError)
    assert "step 8" in str(second) and "step 7" in str(second)


def test_old_decisions_are_forgotten_with_a_lag(monkeypatch):
    monkeypatch.setattr(preemption, "LAG", 4)
    first, second = ThreadGroup.make(2)
    speaker, hearer = Agreement(first, timeout_s=1), Agreement(second, timeout_s=1)
    for step in range(1, 21):
        speaker.decide(step, lambda: NO)
        assert hearer.decide(step, lambda: NO) == NO
    assert len(first.board.values) == 4


def test_a_job_of_one_rank_publishes_nothing():
    group = SoloGroup()
    preempted = Preemption(group)
    assert Agreement(group).decide(1, lambda: Decision(True, False, "due")).save
    assert not preempted.requested()
    assert group.board.values == {}


@pytest.mark.case("B99")
@pytest.mark.parametrize("one", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_on_one_rank_makes_all_ranks_stop_at_the_same_step(handlers, one):
    # Field case B99. The rank that is signalled is not the one that decides.
    groups = ThreadGroup.make(3)
    preempted = [Preemption(group) for group in groups]
    agreed = [Agreement(group.clone(), timeout_s=30) for group in groups]
    preempted[2].install()

    def rank(r, step):
        preempted[r].announce()
        return agreed[r].decide(
            step,
            lambda: Decision(True, True, preempted[r].reason) if preempted[r].requested() else NO,
        )

    def all_ranks(step):
        # In turn, the signalled rank first: no thread is needed for a fixed order.
        preempted[2].announce()
        return [rank(r, step) for r in range(3)]

    assert all_ranks(1) == [NO, NO, NO]
    os.kill(os.getpid(), one)
    assert preempted[2].received == one
    assert preempted[0].received is None
    decisions = all_ranks(2)
    assert decisions == [Decision(True, True, f"rank 2 got {one.name}")] * 3
    preempted[2].uninstall()


def test_the_handler_sets_a_flag_and_uninstall_puts_the_old_one_back(handlers):
    called = []
    signal.signal(signal.SIGTERM, lambda *_: called.append("old"))
    preempted = Preemption(SoloGroup())
    preempted.install()
    preempted.install()  # a second call must not take our own handler for the previous one
    os.kill(os.getpid(), signal.SIGTERM)
    assert preempted.requested() and preempted.reason == "rank 0 got SIGTERM"
    assert called == []
    preempted.uninstall()
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == ["old"]


def test_a_handler_installed_after_ours_is_left_alone(handlers):
    preempted = Preemption(SoloGroup())
    preempted.install()
    later = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, later)
    preempted.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is later


def test_handlers_are_refused_outside_the_main_thread():
    found = []

    def work():
        try:
            Preemption(SoloGroup()).install()
        except UsageError as error:
            found.append(str(error))

    thread = threading.Thread(target=work, name="helper")
    thread.start()
    thread.join(30)
    assert "main thread, got 'helper'" in found[0]


def run_script(body):
    head = """
        import os, signal
        from sharded_ckpt.group import SoloGroup
        from sharded_ckpt.preemption import Preemption
        preempted = Preemption(SoloGroup())
        preempted.install()
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )


def test_a_sigterm_that_both_scheduler_and_launcher_send_leaves_time_to_save():
    done = run_script(
        """
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        print(preempted.received.name)
        """
    )
    assert (done.stdout, done.returncode) == ("SIGTERM\n", 0)


def test_a_sigterm_long_after_the_first_ends_the_process_at_once():
    done = run_script(
        """
        import time
        from sharded_ckpt import preemption
        now = time.monotonic
        os.kill(os.getpid(), signal.SIGUSR1)   # the warning that comes before SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        print("alive", flush=True)
        time.monotonic = lambda: now() + preemption.DUPLICATE_WITHIN_S + 1
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached", flush=True)
        """
    )
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGTERM


def test_a_forked_worker_still_dies_of_its_first_sigterm():
    done = run_script(
        """
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status), preempted.received)
        """
    )
    assert done.stdout == f"{int(signal.SIGTERM)} None\n"
