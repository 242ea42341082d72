"""Reports from the field that need two ranks: adapters, placeholders, tied weights, counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sharded_ckpt import ShardedCheckpointer
from sharded_ckpt.cli import main
from sharded_ckpt.errors import LayoutMismatch
from tests.dist import ds_modes
from tests.dist.launch import launch

WORKER = Path(__file__).parent / "dist" / "field_worker.py"
ADAPTER = {"lora_a.weight", "lora_b.weight"}

case = pytest.mark.case
pytestmark = pytest.mark.usefixtures("deepspeed_helper")
Seen = tuple[Path, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The directory of the jobs, and each situation's reports in order of rank."""
    root = tmp_path_factory.mktemp("jobs")
    run = launch(WORKER, 2, [root], timeout_s=300).check()
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in run.ranks:
        for line in rank.stdout.splitlines():
            if line.startswith("CASE "):
                report = json.loads(line.removeprefix("CASE "))
                found.setdefault(report["case"], []).append(report)
    return root, found


def consolidated(directory: Path, target: Path, *options: object) -> dict[str, torch.Tensor]:
    arguments = ["consolidate", directory / "ckpt", target, *options]
    assert main([str(a) for a in arguments]) == 0
    return load_file(target / "model.safetensors")


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@case("B232", "B233", "B234")
def test_the_adapter_of_a_zero3_run_is_whole_whatever_state_dict_says(
    seen: Seen, tmp_path: Path
) -> None:
    root, reports = seen
    directory = root / "zero3_adapter"
    assert set(reports["zero3_adapter"][0]["trained"]) == ADAPTER
    whole = load_file(directory / "reference.safetensors")
    got = consolidated(directory, tmp_path / "adapter", "--only-trainable")
    same(got, {name: whole[name] for name in ADAPTER})
    assert all(t.numel() and t.abs().sum() > 0 for t in got.values())


@case("B68", "B110", "B234")
def test_frozen_weights_bytes_and_buffers_of_a_zero3_run_are_in_the_step(
    seen: Seen, tmp_path: Path
) -> None:
    root, _ = seen
    directory = root / "zero3_adapter"
    got = consolidated(directory, tmp_path / "all")
    same(got, load_file(directory / "reference.safetensors"))
    assert got["codes.weight"].dtype == torch.uint8  # a quantised base stays in bytes
    assert got["running.batches"].dtype == torch.int64 and got["running.batches"] == 2
    assert "running.scratch" not in got  # not persistent


@case("B25", "B217", "B221")
def test_placeholders_of_zero3_are_refused_before_anything_is_written(
    seen: Seen, tmp_path: Path
) -> None:
    root, reports = seen
    for report in reports["zero3_placeholders"]:
        assert report["error"] == "UsageError" and report["left"] is False
        assert "placeholders" in report["message"] and "embed.weight" in report["message"]
        assert "pass the engine" in report["message"]
    # Of the engine itself, the same model is whole.
    directory = root / "zero3_placeholders"
    got = consolidated(directory, tmp_path / "out")
    same(got, load_file(directory / "reference.safetensors"))
    assert all(tensor.numel() for tensor in got.values())


@case("B25", "B217")
def test_a_file_of_placeholders_passes_for_no_checkpoint(
    seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, reports = seen
    assert reports["zero3_placeholders"][0]["empty"] > 0
    file = root / "zero3_placeholders" / "file"
    for command in (["verify", file], ["consolidate", file, tmp_path / "out"]):
        assert main([str(a) for a in command]) == 1
        assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@case("B109")
def test_a_zero3_step_loads_into_a_plain_model_by_consolidation_and_else_says_so(
    seen: Seen, tmp_path: Path
) -> None:
    directory = seen[0] / "zero3_placeholders"
    plain = ds_modes.Net()
    before = plain.embed.weight.detach().clone()
    with (
        ShardedCheckpointer(plain, directory / "ckpt", timeout_s=60) as ckpt,
        pytest.raises(LayoutMismatch, match="consolidate"),
    ):
        ckpt.load()
    assert torch.equal(plain.embed.weight, before)
    plain.load_state_dict(consolidated(directory, tmp_path / "out"), strict=True)
    assert torch.equal(
        plain.embed.weight, load_file(directory / "reference.safetensors")["embed.weight"]
    )


@case("B80", "B242", "B243")
def test_the_lr_trajectory_of_a_zero3_run_with_a_cosine_schedule_goes_on(seen: Seen) -> None:
    for report in seen[1]["zero3_cosine"]:
        assert report["rates"] == report["expected"]
        assert len(set(report["rates"])) == 5


@case("B90")
def test_the_engines_counters_come_back_beside_the_step_of_the_loop(seen: Seen) -> None:
    for report in seen[1]["zero1_skipped_step"]:
        assert report["step"] == report["by_step"] == 800
        assert report["saved"] == report["loaded"]
        assert report["saved"][1] > 0, "nothing overflowed, so nothing was skipped"
        assert report["by_other"]["error"] == "StepNotFound"
        assert "[800]" in report["by_other"]["message"]


@case("B50", "B51")
def test_p7_a_save_on_the_main_process_alone_is_an_error_and_not_a_hang(seen: Seen) -> None:
    zero, one = seen[1]["main_process_only"]
    assert zero["error"] == "SaveTimeout"
    assert "rank 1 did not call save(1)" in zero["message"]
    assert zero["steps"] == one["steps"] == [2]


@case("B22", "B24")
@pytest.mark.parametrize("step", [0, 1])
def test_a_weight_shared_by_two_fsdp_units_is_one_tensor(
    step: int, seen: Seen, tmp_path: Path
) -> None:
    directory = seen[0] / "fsdp_tied_across_units"
    got = consolidated(directory, tmp_path / "out", "--step", step)
    assert set(got) == {"embed_tokens.weight", "body.weight", "body.bias"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["lm_head.weight"] == "embed_tokens.weight"
    if step == 1:
        same(got, load_file(directory / "reference.safetensors"))


@case("B22")
def test_weights_meant_to_be_tied_are_merged_only_while_they_are_equal(
    seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = seen[0] / "fsdp_meant_to_be_tied"
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"tie_word_embeddings": true, "vocab_size": 11}')
    copied = ("--copy-config", config, "--step")
    equal = consolidated(directory, tmp_path / "equal", *copied, 0)
    assert "lm_head.weight" not in equal and "DIFFER" not in capsys.readouterr().err
    apart = consolidated(directory, tmp_path / "apart", *copied, 1)
    same(apart, load_file(directory / "reference.safetensors"))
    assert not torch.equal(apart["lm_head.weight"], apart["embed_tokens.weight"])
    assert "DIFFER" in capsys.readouterr().err
