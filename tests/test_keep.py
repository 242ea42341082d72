"""Retention: every policy against an independent model, on random histories."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_ckpt.errors import UsageError
from sharded_ckpt.keep import Committed, Decision, Keep, best_first
from sharded_ckpt.layout import SetId


def saved(
    term, serial, step, *, loss=None, nbytes=10, pinned=False, content="full", of=None, nonce=None
):
    metrics = {} if loss is None else {"loss": loss}
    nonce = nonce or f"{term:04x}{serial:04x}"
    one = SetId(term=term, serial=serial, step=step, nonce=nonce)
    return Committed(one, nbytes, metrics, pinned, content, of)


def run_of(steps, *, term=1, **kwargs):
    return [saved(term, serial, step, **kwargs) for serial, step in enumerate(steps, 1)]


def steps(ids):
    return sorted(one.step for one in ids)


# Random histories: several jobs in one directory, steps that go back, odd metrics, pins, and
# weights-only sets, with or without the full set that they were made from, and sets of another run
# that were given the same numbers there.


@st.composite
def histories(draw, weights=True, pins=True):
    found = []
    for term in range(1, draw(st.integers(1, 3)) + 1):
        step = draw(st.integers(0, 30))
        for serial in range(1, draw(st.integers(0, 7)) + 1):
            step = max(0, step + draw(st.sampled_from([1, 5, 5, 10, -7])))
            loss = draw(
                st.one_of(
                    st.sampled_from([None, math.nan, math.inf, -math.inf, "bad", True, 10**400]),
                    st.integers(0, 5),
                    st.floats(-3, 3),
                )
            )
            one = saved(
                term,
                serial,
                step,
                loss=loss,
                nbytes=draw(st.integers(1, 40)),
                pinned=pins and draw(st.integers(0, 6)) == 0,
            )
            form = draw(st.sampled_from(["full", "full", "full", "weights", "both"]))
            if not weights or form != "weights":
                found.append(one)
            if weights and form != "full":
                small = saved(
                    9,
                    100 * term + serial,
                    step,
                    loss=loss,
                    nbytes=3,
                    pinned=pins and draw(st.integers(0, 6)) == 0,
                    content="weights",
                    of=one.id,
                )
                found.append(small)
            if draw(st.integers(0, 4)) == 0:
                found.append(saved(term, serial, step, loss=loss, nonce="ffffffff"))
    return draw(st.permutations(found))


@st.composite
def policies(draw, budget=True):
    def maybe(strategy):
        return draw(st.one_of(st.none(), strategy))

    best = maybe(st.integers(1, 4))
    return Keep(
        last=maybe(st.integers(1, 5)),
        best=best,
        metric=None if best is None else "loss",
        mode=draw(st.sampled_from(["min", "max"])),
        every=maybe(st.sampled_from([1, 5, 10])),
        at=draw(st.sets(st.integers(0, 40), max_size=3)),
        weights_only_after=maybe(st.integers(1, 3)),
        max_nbytes=maybe(st.integers(1, 200)) if budget else None,
    )


# The model: written from the words of the policy, one version at a time, without its data types.


def usable(value):
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN as well


def model_versions(sets):
    """state_id -> its full set or None, and its weights-only sets; newest first."""
    table = {}
    for one in sets:
        row = table.setdefault(one.state_id, {"full": None, "weights": []})
        if one.content == "full":
            row["full"] = one
        else:
            row["weights"].append(one)
    return dict(sorted(table.items(), reverse=True))


def model_selected(policy, sets):
    table = model_versions(sets)
    keys = list(table)
    loss = {k: (r["full"] or r["weights"][0]).metrics.get("loss") for k, r in table.items()}
    step = {k: (r["full"] or r["weights"][0]).id.step for k, r in table.items()}
    ranked = [k for k in keys if usable(loss[k])]

    def better(a, b):
        if loss[a] == loss[b]:
            return a > b
        return (loss[a] < loss[b]) == (policy.mode == "min")

    selected = set()
    for k in keys:
        why = [
            not (policy.last or policy.best or policy.every or policy.at),
            k == keys[0],
            table[k]["full"] is not None
            and not any(table[n]["full"] is not None for n in keys if n > k),
            table[k]["full"] is not None and table[k]["full"].pinned,
            policy.last is not None and sum(n > k for n in keys) < policy.last,
            policy.every is not None and step[k] % policy.every == 0,
            step[k] in policy.at,
        ]
        if policy.best is not None:
            if k in ranked:
                why.append(sum(better(n, k) for n in ranked) < policy.best)
            else:
                why.append(len(ranked) < policy.best)
        if any(why):
            selected.add(k)
    return selected


def model_decide(policy, sets):
    """(keep, thin) as sets of ids, by brute force."""
    if not sets:
        return set(), set()
    table = model_versions(sets)
    selected = model_selected(policy, sets)
    keep = {one.id for one in sets if one.state_id in selected or one.pinned}
    thin = set()
    for k in selected:
        full = table[k]["full"]
        if policy.weights_only_after is None or full is None or full.pinned:
            continue
        newer_full = sum(1 for n in selected if n > k and table[n]["full"] is not None)
        if newer_full >= policy.weights_only_after:
            if table[k]["weights"]:
                keep.discard(full.id)
            else:
                thin.add(full.id)
    if policy.max_nbytes is not None:
        newest_full = max((s.state_id for s in sets if s.content == "full"), default=None)
        newest = max(s.state_id for s in sets)
        # The top of a weights-only version is its newest set; of a full one, the full set.
        top = table[newest]["full"] or max(table[newest]["weights"], key=lambda s: s.id)
        safe = {top.id} | ({table[newest_full]["full"].id} if newest_full else set())
        order = sorted((s for s in sets if s.id in keep), key=lambda s: (s.state_id, s.id))
        for one in order:
            used = sum(s.nbytes for s in sets if s.id in keep and s.id not in thin)
            if used <= policy.max_nbytes:
                break
            if not one.pinned and one.id not in safe:
                keep.discard(one.id)
                thin.discard(one.id)
    return keep, thin


@settings(max_examples=600, deadline=None)
@given(policies(), histories())
def test_every_policy_decides_as_the_model_does(policy, sets):
    decision = policy.decide(sets)
    keep, thin = model_decide(policy, sets)
    assert set(decision.keep) == keep
    assert set(decision.thin) == thin


@settings(max_examples=400, deadline=None)
@given(policies(), histories(), st.randoms(use_true_random=False))
def test_invariants(policy, sets, rng):
    decision = policy.decide(sets)
    by_id = {one.id: one for one in sets}

    # P6: keep and retire part the input; each list is oldest first and free of repeats.
    assert set(decision.keep) | set(decision.retire) == set(by_id)
    assert not set(decision.keep) & set(decision.retire)
    for ids in (decision.retire, decision.thin):
        keys = [(by_id[one].state_id, one) for one in ids]
        assert keys == sorted(set(keys))

    # The newest full set stays, and stays full. Pinned sets stay as they are.
    full = [one for one in sets if one.content == "full"]
    protected = {one.id for one in sets if one.pinned}
    if full:
        protected.add(max(full, key=lambda one: one.state_id).id)
    assert protected <= decision.keep
    assert not protected & set(decision.thin)
    assert set(decision.thin) <= decision.keep
    assert all(by_id[one].content == "full" for one in decision.thin)

    # The order of the input decides nothing.
    shuffled = list(sets)
    rng.shuffle(shuffled)
    assert policy.decide(shuffled) == decision


@settings(max_examples=300, deadline=None)
@given(policies(), histories())
def test_what_was_kept_is_kept_again(policy, sets):
    decision = policy.decide(sets)
    again = policy.decide([one for one in sets if one.id in decision.keep])
    assert again.keep == decision.keep
    assert again.retire == ()


@settings(max_examples=400, deadline=None)
@given(policies(budget=False), histories(), st.integers(0, 40), st.sampled_from([None, 0.5, 9.0]))
def test_a_newer_commit_never_brings_an_older_step_back(policy, sets, step, loss):
    before = policy.decide(sets)
    after = policy.decide([*sets, saved(7, 1, step, loss=loss)])
    by_id = {one.id: one for one in sets}
    stays = {by_id[one].state_id for one in before.keep}
    again = {by_id[one].state_id for one in after.keep if one in by_id}
    assert again <= stays


@settings(max_examples=400, deadline=None)
@given(policies(budget=False), histories(weights=False), st.data())
def test_losing_its_metric_never_makes_another_step_go(policy, sets, data):
    if not sets:
        return
    before = policy.decide(sets)
    victim = data.draw(st.sampled_from(sets))
    odd = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, "n/a"]))
    changed = [
        Committed(s.id, s.nbytes, {"loss": odd}, s.pinned, s.content, s.origin)
        if s is victim
        else s
        for s in sets
    ]
    after = policy.decide(changed)
    assert before.keep - {victim.id} <= after.keep


# The same words as plain examples, for a reader.


def test_keep_without_rules_keeps_everything():
    sets = run_of([100, 200, 300])
    assert Keep().decide(sets) == Decision(keep=frozenset(one.id for one in sets))
    assert Keep().decide([]) == Decision(keep=frozenset())


def test_latest_only_and_last_three():
    sets = run_of(range(100, 600, 100))
    assert steps(Keep(last=1).decide(sets).keep) == [500]
    decision = Keep(last=3).decide(sets)
    assert steps(decision.keep) == [300, 400, 500]
    assert [one.step for one in decision.retire] == [100, 200]


def test_best_and_last_together():
    losses = {100: 0.1, 200: 0.9, 300: 0.2, 400: 0.8, 500: 0.7}
    sets = [saved(1, i, step, loss=loss) for i, (step, loss) in enumerate(losses.items(), 1)]
    assert steps(Keep(last=1, best=2, metric="loss").decide(sets).keep) == [100, 300, 500]
    assert steps(Keep(best=1, metric="loss", mode="max").decide(sets).keep) == [200, 500]


def test_milestones():
    sets = run_of([500, 1000, 1500, 2000, 2500])
    assert steps(Keep(last=1, every=1000).decide(sets).keep) == [1000, 2000, 2500]
    assert steps(Keep(last=1, at={500}).decide(sets).keep) == [500, 2500]


@pytest.mark.case("B35")
def test_steps_of_an_older_run_do_not_push_out_the_new_runs_first_save():
    # Field case B35: 500..700 are left over; the new run has just saved its step 100.
    old = run_of([500, 600, 700], term=1)
    new = run_of([100], term=2)
    decision = Keep(last=3).decide(old + new)
    assert steps(decision.keep) == [100, 600, 700]
    assert steps(Keep(last=1).decide(old + new).keep) == [100]


@pytest.mark.case("B212")
def test_history_is_what_is_on_disk_not_what_this_process_saved():
    # Field case B212: job 1 saved three, job 2 resumed and saved one; the limit counts them all.
    sets = run_of([100, 200, 300], term=1) + run_of([400], term=2)
    assert steps(Keep(last=1).decide(sets).keep) == [400]


def test_after_a_rollback_the_retrained_steps_are_the_newer_ones():
    sets = run_of([100, 200, 300, 400, 250], term=1)
    assert [one.step for one in Keep(last=2).decide(sets).retire] == [100, 200, 300]
    assert steps(Keep(last=2).decide(sets).keep) == [250, 400]


@pytest.mark.case("B216")
@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -math.inf, "0.1", True])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_without_a_usable_metric_nothing_is_best_and_nothing_is_deleted(odd, mode):
    # Field case B216.
    sets = run_of([100, 200, 300], loss=odd)
    policy = Keep(last=1, best=1, metric="loss", mode=mode)
    decision = policy.decide(sets)
    assert decision.retire == ()
    assert "cannot be told" in decision.notes[0]
    assert best_first(sets, metric="loss", mode=mode) == []
    # Once as many as `best` can be ranked, the others are left to the other rules.
    ranked = saved(1, 4, 400, loss=5.0)
    newest = saved(1, 5, 500, loss=odd)
    assert steps(policy.decide([*sets, ranked, newest]).keep) == [400, 500]


def test_of_equal_metrics_the_newer_is_best():
    sets = run_of([100, 200], loss=1.0) + [saved(2, 1, 300, loss=2.0)]
    assert steps(Keep(best=1, metric="loss").decide(sets).keep) == [200, 300]


def test_pinned_steps_stay_full_and_whole():
    sets = [saved(1, 1, 100, pinned=True), *run_of([200, 300, 400], term=2)]
    decision = Keep(last=1, weights_only_after=1, max_nbytes=1).decide(sets)
    assert steps(decision.keep) == [100, 400]
    assert decision.thin == ()


def test_weights_only_after_thins_what_stays_but_not_the_newest():
    sets = run_of([1000, 2000, 3000, 4000])
    decision = Keep(weights_only_after=2).decide(sets)
    assert [one.step for one in decision.thin] == [1000, 2000]
    assert decision.retire == ()


def test_a_full_set_goes_once_its_weights_are_committed():
    old, new = run_of([1000, 2000])
    weights = saved(1, 3, 1000, content="weights", of=old.id)
    decision = Keep(weights_only_after=1).decide([old, new, weights])
    assert decision.retire == (old.id,)
    assert decision.thin == ()
    # It ranks by the training state inside: committed last, it is still not the newest step.
    assert steps(Keep(last=1).decide([old, new, weights]).keep) == [2000]


def test_p6_weights_of_another_run_with_the_same_numbers_do_not_stand_for_a_full_set():
    old, new = run_of([1000, 2000])
    copied_in = SetId(term=1, serial=1, step=1000, nonce="ffffffff")
    weights = saved(1, 3, 1000, content="weights", of=copied_in)
    decision = Keep(weights_only_after=1).decide([old, new, weights])
    assert decision.retire == ()
    assert decision.thin == (old.id,)


def test_a_byte_limit_takes_the_oldest_and_says_so():
    sets = run_of([100, 200, 300, 400], nbytes=30)
    decision = Keep(max_nbytes=70).decide(sets)
    assert steps(decision.keep) == [300, 400]
    assert "step-00000100-t0001-0001" in decision.notes[0]
    assert "max_nbytes=70" in decision.notes[0]
    alone = Keep(max_nbytes=10).decide(sets)
    assert steps(alone.keep) == [400]
    assert "over max_nbytes=10" in alone.notes[-1]


def test_ranking_is_shared_with_best_step():
    rng = random.Random(3)
    sets = [saved(1, i, i, loss=rng.choice([0.5, 1.5, 2.5])) for i in range(1, 20)]
    order = [
        (one.metrics["loss"], -one.id.serial) for one in best_first(sets, metric="loss", mode="min")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"last": 0}, "last=1 keeps only"),
        ({"last": -2}, "at least 1, got -2"),
        ({"last": True}, "got True"),
        ({"last": 2.0}, "got 2.0"),
        ({"best": 0, "metric": "loss"}, "leave best= out"),
        ({"best": 2}, "pass metrics="),
        ({"best": 2, "metric": ""}, "pass metrics="),
        ({"metric": "loss"}, "nothing without best="),
        ({"best": 1, "metric": "loss", "mode": "lowest"}, "'min' or 'max', got 'lowest'"),
        ({"every": 0}, "multiple of 1000"),
        ({"at": 5}, "write at="),
        ({"at": (-1,)}, "got -1"),
        ({"at": ("5",)}, "got '5'"),
        ({"weights_only_after": 0}, "newest step stays full"),
        ({"max_nbytes": 0}, "size in bytes"),
    ],
)
def test_a_rule_that_cannot_be_right_is_refused_with_what_to_do(arguments, says):
    with pytest.raises(UsageError, match=says):
        Keep(**arguments)


def test_one_identity_given_twice_is_refused():
    (one,) = run_of([100])
    with pytest.raises(UsageError, match="list each once"):
        Keep(last=1).decide([one, one])
