"""Real transformers models: every engine, consolidated, gives what ``from_pretrained`` expects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import read_back
from tests.dist.launch import ROOT, launch

WORKER = Path(__file__).parent / "dist" / "models_worker.py"
CASES = ["gpt2:0", "gpt2:1", "gpt2:2", "gpt2:3", "gpt2:fsdp"]
HALF = ["gpt2-bf16:3", "gpt2-bf16:fsdp"]

case = pytest.mark.case
pytestmark = pytest.mark.usefixtures("deepspeed_helper")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict]]:
    root = tmp_path_factory.mktemp("models")
    run = launch(WORKER, 2, [root, "smollm:fsdp", *CASES, *HALF, "minilm:3"], timeout_s=500).check()
    assert read_back.check(root) == len(CASES) + len(HALF)  # the others are too large for it
    lines = [x for x in run.ranks[0].stdout.splitlines() if x.startswith("MODEL ")]
    reports = [json.loads(x.removeprefix("MODEL ")) for x in lines]
    return root, {r["case"]: r for r in reports}


def consolidated(root: Path, name: str, *options: str) -> Path:
    """The case's set, consolidated by the script in a process of its own."""
    directory = root / name.replace(":", "-")
    target = directory / ("out" + "-".join(options).replace("/", "_"))
    if not target.exists():
        subprocess.run(
            [
                sys.executable,
                ROOT / "scripts" / "consolidate.py",
                directory / "ckpt",
                target,
                "--copy-config",
                directory / "reference",
                *options,
            ],
            check=True,
            timeout=120,
        )
    return target


def logits(directory: Path) -> torch.Tensor:
    from transformers import GPT2LMHeadModel

    model, info = GPT2LMHeadModel.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(tokens).logits


@case("B21", "B23", "B121", "B166", "B192", "B109", "B221")
@pytest.mark.parametrize("name", CASES)
def test_consolidated_gpt2_gives_identical_logits(
    name: str, runs: tuple[Path, dict[str, dict]]
) -> None:
    root, _ = runs
    out = consolidated(root, name, "--strip-prefix", "lm.")
    expected = logits(root / name.replace(":", "-") / "reference")
    assert torch.equal(logits(out), expected)
    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert "lm_head.weight" not in names  # tied: one copy, and the alias is recorded
        assert "lm_head.weight" in json.dumps(file.metadata())


@case("B102", "B104")
@pytest.mark.parametrize("name", HALF)
def test_bf16_runs_export_the_same_dtype_from_both_engines(
    name: str, runs: tuple[Path, dict[str, dict]]
) -> None:
    root, _ = runs
    out = consolidated(root, name, "--strip-prefix", "lm.")
    reference = root / name.replace(":", "-") / "reference" / "model.safetensors"
    with safe_open(out / "model.safetensors", "pt") as ours, safe_open(reference, "pt") as theirs:
        names = set(ours.keys())
        assert names == set(theirs.keys())
        for key in names:
            tensor = ours.get_tensor(key)
            assert tensor.dtype == torch.bfloat16, key
            assert torch.equal(tensor, theirs.get_tensor(key)), key
    full = consolidated(root, name, "--strip-prefix", "lm.", "--dtype", "float32")
    with safe_open(full / "model.safetensors", "pt") as wide, safe_open(reference, "pt") as theirs:
        for key in set(wide.keys()):
            assert wide.get_tensor(key).dtype == torch.float32, key
            assert torch.equal(wide.get_tensor(key).to(torch.bfloat16), theirs.get_tensor(key)), key


@pytest.mark.parametrize(
    ("name", "step", "options", "kind"),
    [
        ("minilm:3", 3, ["--strip-prefix", "bert."], "AutoModel"),
        ("smollm:fsdp", 1, [], "AutoModelForCausalLM"),
    ],
)
def test_real_weights_train_resume_exactly_and_load_with_from_pretrained(
    name: str, step: int, options: list[str], kind: str, runs: tuple[Path, dict[str, dict]]
) -> None:
    import transformers

    root, reports = runs
    report = reports[name]
    assert report["step"] == step
    assert report["losses"] == report["expected"]
    out = consolidated(root, name, *options)
    load = getattr(transformers, kind).from_pretrained
    ours = load(out).state_dict()
    theirs = load(root / name.replace(":", "-") / "reference").state_dict()
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key
