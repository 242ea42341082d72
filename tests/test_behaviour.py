"""What two ranks see together: P7 loud (every failure reaches every rank), agreement, policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import launch

WORKER = Path(__file__).parent / "dist" / "behaviour_worker.py"
Pair = tuple[dict[str, Any], dict[str, Any]]

case = pytest.mark.case


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    run = launch(WORKER, 2, [tmp_path_factory.mktemp("cases")], timeout_s=400).check()
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for rank in run.ranks:
        for line in rank.stdout.splitlines():
            if line.startswith("CASE "):
                report = json.loads(line.removeprefix("CASE "))
                found.setdefault(report["case"], {})[report["rank"]] = report
    return {name: (ranks[0], ranks[1]) for name, ranks in found.items()}


@case("B50", "B51")
def test_p7_a_save_on_one_rank_alone_names_the_ranks_that_did_not_call(
    seen: dict[str, Pair],
) -> None:
    zero, one = seen["one_rank_alone"]
    assert zero["error"] == "SaveTimeout"
    assert "rank 1 did not call save(1)" in zero["message"]
    assert zero["steps"] == one["steps"] == [2]


def test_p7_a_rank_that_cannot_write_fails_the_step_on_every_rank_and_nothing_else(
    seen: dict[str, Pair],
) -> None:
    for report in seen["one_rank_cannot_write"]:
        assert report["error"] == "SaveAborted"
        assert "rank 1" in report["message"] and "File too large" in report["message"]
        assert "rank-00001.safetensors" in report["message"]
        assert report["steps"] == [1]  # P6: keep last=1 and a failing save leave the old set
        assert report["after"] == []  # its files are gone


def test_p7_ranks_at_different_steps_are_told_so(seen: dict[str, Pair]) -> None:
    zero, one = seen["different_steps"]
    assert "step 11" in zero["message"] and "step 10" in zero["message"]
    assert "step 10" in one["message"] or "rank 0" in one["message"]
    assert zero["steps"] == one["steps"] == [12]


def test_p7_a_value_refused_on_one_rank_is_heard_on_all(seen: dict[str, Pair]) -> None:
    zero, one = seen["a_bad_value_on_one_rank"]
    assert one["error"] == "StateTypeError" and "client_state" in one["message"]
    assert zero["error"] == "SaveAborted" and "rank 1" in zero["message"]
    assert "StateTypeError" in zero["message"]
    assert zero["steps"] == [2]


@case("B99")
def test_a_signal_to_one_rank_saves_the_same_step_on_all_and_stops(seen: dict[str, Pair]) -> None:
    zero, one = seen["a_signal_to_one_rank"]
    assert zero["saved"] == one["saved"] and len(zero["saved"]) == 1
    assert zero["stopped"] == one["stopped"] == zero["saved"][0]
    assert 5 <= zero["stopped"] <= 7


def test_time_based_policies_give_every_rank_the_same_answer(seen: dict[str, Pair]) -> None:
    zero, one = seen["a_clock_that_only_rank_0_reads"]
    assert zero["answers"] == one["answers"]


def test_a_busy_rank_makes_all_ranks_skip(seen: dict[str, Pair]) -> None:
    for report in seen["busy_on_one_rank_skips_on_all"]:
        assert report["skipped"] is True and report["again"] is False
        assert report["steps"] == [1, 3]


def test_every_rank_gets_its_own_client_state_back(seen: dict[str, Pair]) -> None:
    assert [r["me"] for r in seen["per_rank_client_state"]] == [0, 1]


@case("B53")
def test_damage_of_one_shard_is_refused_by_all_ranks_and_they_fall_back_together(
    seen: dict[str, Pair],
) -> None:
    for report in seen["damage_on_one_rank_is_everybodys"]:
        assert report["error"] in ("ShardError", "CorruptError")
        assert "rank-00001.safetensors" in report["message"]
        assert report["fallback"] == 1


def test_a_load_that_one_rank_refuses_changes_nothing_on_any_rank(seen: dict[str, Pair]) -> None:
    for report in seen["a_load_refused_on_one_rank_changes_nothing_on_the_others"]:
        assert report["error"] in ("ShardError", "CorruptError") and report["untouched"]


def test_p7_state_that_one_rank_cannot_take_back_fails_the_load_on_all(
    seen: dict[str, Pair],
) -> None:
    for report in seen["state_that_one_rank_cannot_take_back"]:
        assert report["error"] == "LoadError" and "not today" in report["message"]


def test_replicated_data_is_written_once_in_equal_parts(seen: dict[str, Pair]) -> None:
    sizes = seen["replicated_tensors_are_cut_evenly"][0]["sizes"]
    assert len(sizes) == 2 and abs(sizes[0] - sizes[1]) <= 8192


@case("B123", "B204")
def test_a_directory_that_is_not_shared_is_refused_on_every_rank(seen: dict[str, Pair]) -> None:
    for report in seen["another_directory_on_one_rank"]:
        assert report["error"] == "UsageError"
        assert "rank 1 on host" in report["message"]
        assert "term-0001.json" in report["message"]


def test_other_arguments_on_one_rank_are_refused_on_every_rank(seen: dict[str, Pair]) -> None:
    for report in seen["other_arguments_on_one_rank"]:
        assert report["error"] == "UsageError" and "blocking" in report["message"]


def test_a_newer_job_in_the_directory_stops_the_older_one(seen: dict[str, Pair]) -> None:
    for report in seen["a_newer_job_supersedes"]:
        assert report["error"] == "Superseded" and "term 2" in report["message"]
        assert report["steps"] == [1, 3]


def test_saves_in_a_row_are_committed_in_order(seen: dict[str, Pair]) -> None:
    for report in seen["two_in_flight"]:
        assert report["steps"] == list(range(1, 9))
        assert report["serials"] == list(range(1, 9))
