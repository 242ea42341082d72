"""``engine.save_checkpoint`` and ``engine.load_checkpoint``, routed through this package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.launch import launch

WORKER = Path(__file__).parent / "dist" / "install_worker.py"

pytestmark = pytest.mark.usefixtures("deepspeed_helper", "read_by_the_independent_reader")


@pytest.mark.case("B89", "B90", "B194")
def test_code_that_calls_deepspeeds_methods_gains_all_of_this(tmp_path: Path) -> None:
    run = launch(WORKER, 2, [tmp_path], timeout_s=200).check()
    for rank in run.ranks:
        (line,) = [x for x in rank.stdout.splitlines() if x.startswith("RESULT ")]
        report = json.loads(line.removeprefix("RESULT "))
        assert report["empty"] == [None, {}]
        assert report["saved"] is True
        assert report["steps"] == [1, 3]
        assert report["latest_file"] is False
        assert report["newest"] == ["step-00000003", {}, 3]
        assert report["later"] is True
        assert report["by_tag"] == ["step-00000001", {"epoch": 3}, 1]
        assert report["first"] is True
        assert report["module_only"][0] == 0 and report["module_only"][1] == 3
        other, latest, frozen, custom, nowhere = report["refused"]
        assert "UsageError" in other and "run-other" in other
        assert "UnsupportedError" in latest and "save_latest" in latest
        assert "UnsupportedError" in frozen and "exclude_frozen_parameters" in frozen
        assert "UnsupportedError" in custom
        assert "StepNotFound" in nowhere and "'nowhere'" in nowhere
        assert "UsageError" in report["mid_accumulation"], report["mid_accumulation"]
        assert "accumulation" in report["mid_accumulation"]
        assert report["at_boundary"] == [2]
