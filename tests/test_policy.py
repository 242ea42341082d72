"""When to save: each rule against a simulation of training."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_ckpt.errors import UsageError
from sharded_ckpt.policy import Auto, Progress, SaveEvery, young_daly_s


def train(policy, steps, *, start=0, step_s=1.0, cost_s=None):
    """The steps saved in a run that goes from ``start`` to ``steps``; a clock of equal steps."""
    saved, last_step, last_save_s = [], start, 0.0
    for step in range(start + 1, steps + 1):
        now_s = (step - start) * step_s
        now = Progress(last_step, last_save_s, now_s, cost_s, step_s)
        if policy.due(step, now):
            assert not policy.due(step, Progress(step, now_s, now_s, cost_s, step_s))
            saved.append(step)
            last_step, last_save_s = step, now_s
    return saved


def test_steps_are_saved_at_multiples():
    assert train(SaveEvery(steps=250), 1000) == [250, 500, 750, 1000]


def test_minutes_count_from_the_last_save():
    assert train(SaveEvery(minutes=1), 200, step_s=25.0)[:3] == [3, 6, 9]


def test_steps_and_minutes_whichever_comes_first():
    # 100 s a step: two minutes pass at every second step, and step 5 comes before the third.
    assert train(SaveEvery(steps=5, minutes=3), 10, step_s=100.0) == [2, 4, 5, 7, 9, 10]


def test_named_steps():
    assert train(SaveEvery(at=(7, 3, 7)), 10) == [3, 7]


def test_a_schedule_changes_the_interval_with_training():
    policy = SaveEvery(schedule=((0, 10), (40, 25), (100, 50)))
    assert train(policy, 200) == [10, 20, 30, 50, 75, 100, 150, 200]
    assert train(SaveEvery(schedule=((100, 50),)), 160) == [100, 150]


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 20)),
        min_size=1,
        max_size=4,
        unique_by=lambda pair: pair[0],
    ),
    st.integers(0, 70),
)
def test_a_schedule_is_its_own_list_of_steps(pairs, start):
    pairs = sorted(pairs)

    def every(step):
        return [n for first, n in pairs if first <= step][-1:]

    expected = [s for s in range(start + 1, 90) if every(s) and s % every(s)[0] == 0]
    assert train(SaveEvery(schedule=pairs), 89, start=start) == expected


@given(st.integers(1, 30), st.sets(st.integers(1, 100)), st.integers(0, 100))
def test_after_a_resume_the_same_steps_are_due_as_without_one(every, at, resumed):
    policy = SaveEvery(steps=every, at=at)
    whole = train(policy, 120)
    assert train(policy, 120, start=resumed) == [step for step in whole if step > resumed]


@given(st.integers(1, 30), st.integers(1, 7))
def test_a_loop_that_asks_now_and_then_misses_nothing(every, stride):
    policy = SaveEvery(steps=every)
    last = 0
    for step in range(stride, 200, stride):
        crossed = any(multiple % every == 0 for multiple in range(last + 1, step + 1))
        assert policy.due(step, Progress(last, 0.0, 0.0)) == crossed
        if crossed:
            last = step


def test_a_step_that_was_due_stays_due_until_it_is_saved():
    policy = SaveEvery(steps=10)
    assert [policy.due(step, Progress(5, 0.0, 0.0)) for step in (9, 10, 11)] == [False, True, True]
    assert not policy.due(11, Progress(10, 0.0, 0.0))


def test_a_step_is_not_due_twice_even_when_time_has_passed():
    policy = SaveEvery(steps=1, minutes=1, at=(5,), auto=Auto(mtbf_minutes=1))
    assert not policy.due(5, Progress(5, 0.0, 1e6, 1.0, 1.0))
    assert policy.reasons(6, Progress(4, 0.0, 1e6, 1.0, 1.0)) == ("steps", "at", "minutes", "auto")


def test_auto_measures_first_and_then_keeps_the_young_daly_interval():
    auto = Auto(mtbf_minutes=600, first_minutes=2)
    assert train(SaveEvery(auto=auto), 300)[:2] == [120, 240]
    interval = young_daly_s(0.5, 36_000)
    assert interval == pytest.approx(189.7, abs=0.1)
    assert train(SaveEvery(auto=auto), 600, cost_s=0.5) == [190, 380, 570]


def test_auto_takes_the_step_that_ends_nearest_to_the_interval():
    interval = young_daly_s(0.5, 36_000)  # 189.7 s: 100 s steps end at 100, 200
    assert interval < 200
    policy = SaveEvery(auto=Auto(mtbf_minutes=600))
    assert train(policy, 4, step_s=100.0, cost_s=0.5) == [2, 4]
    assert train(policy, 4, step_s=130.0, cost_s=0.5) == [1, 2, 3, 4]  # 130 is nearer than 260


@given(st.floats(0.01, 100), st.floats(1e4, 1e6))
def test_the_young_daly_interval_wastes_least(cost_s, mtbf_s):
    def waste(interval_s):
        return cost_s / interval_s + interval_s / (2 * mtbf_s)

    best = young_daly_s(cost_s, mtbf_s)
    assert all(waste(best) <= waste(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_clocks_need_agreement_of_ranks_and_counters_do_not():
    assert not SaveEvery(steps=5, at=(3,), schedule=((0, 5),)).needs_agreement
    assert SaveEvery(minutes=5).needs_agreement
    assert SaveEvery(auto=Auto(mtbf_minutes=60)).needs_agreement


def test_a_policy_is_a_value():
    assert SaveEvery(at=[3, 1]) == SaveEvery(at=(1, 3, 3))
    assert hash(SaveEvery(schedule=[[0, 5]])) == hash(SaveEvery(schedule=((0, 5),)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "would never save; give steps="),
        ({"steps": 0}, "at least 1, got 0"),
        ({"steps": True}, "got True"),
        ({"steps": 2.5}, "got 2.5"),
        ({"minutes": 0}, "above 0, got 0"),
        ({"minutes": math.nan}, "got nan"),
        ({"minutes": math.inf}, "got inf"),
        ({"minutes": "5"}, "got '5'"),
        ({"at": 5}, r"write at=\(1000"),
        ({"at": (0,)}, "at least 1, got 0"),
        ({"schedule": (5, 10)}, r"write schedule=\(\("),
        ({"schedule": ((0, 0),)}, "every_steps"),
        ({"schedule": ((-1, 5),)}, "first_step"),
        ({"schedule": ((10, 5), (10, 6))}, "rising"),
        ({"auto": 60}, r"write auto=Auto\("),
    ],
)
def test_a_rule_that_cannot_be_right_is_refused_with_what_to_do(arguments, says):
    with pytest.raises(UsageError, match=says):
        SaveEvery(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"mtbf_minutes": 0}, {"mtbf_minutes": 5, "first_minutes": -1}]
)
def test_auto_refuses_what_is_not_a_time(arguments):
    with pytest.raises(UsageError, match="above 0"):
        Auto(**arguments)
