"""Exports for Hugging Face: configuration beside the weights, tied heads, from_pretrained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sharded_ckpt.errors import UsageError
from sharded_ckpt.export import Request, Selection, consolidate, plan_export
from sharded_ckpt.manifest import Manifest
from tests.make_set import make_set
from tests.test_export import reader_of, same


def config_directory(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text("{}")
    (path / "modeling_custom.py").write_text("raise SystemExit")
    (path / "pytorch_model.bin").write_text("not to be copied")
    return path


def plan_with(directory: Path, manifest: Manifest, config: Path) -> Any:
    request = Request(str(directory.parent / "out"), copy_config=str(config))
    return plan_export(reader_of(directory, manifest), request)


@pytest.mark.case("B192")
def test_b192_config_and_tokenizer_are_copied(tmp_path: Path) -> None:
    manifest = make_set(tmp_path / "set", {"model/embed_tokens.weight": torch.ones(9, 2)})
    plan = plan_with(tmp_path / "set", manifest, config_directory(tmp_path / "c", vocab_size=9))
    assert plan.warnings == []
    consolidate(plan)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    with pytest.raises(UsageError, match=r"config\.json"):
        plan_with(tmp_path / "set", manifest, tmp_path)


@pytest.mark.case("B107")
@pytest.mark.parametrize("said", [0, 8])
def test_b107_a_wrong_vocabulary_size_is_reported(tmp_path: Path, said: int) -> None:
    manifest = make_set(tmp_path / "set", {"model/transformer.wte.weight": torch.ones(9, 2)})
    plan = plan_with(tmp_path / "set", manifest, config_directory(tmp_path / "c", vocab_size=said))
    assert len(plan.warnings) == 1 and "9 rows" in plan.warnings[0]


@pytest.mark.case("B22", "B23")
def test_b22_b23_heads_are_tied_only_where_they_are_equal(tmp_path: Path) -> None:
    embedding = torch.randn(9, 2)
    config = config_directory(tmp_path / "c", vocab_size=9, tie_word_embeddings=True)
    names = ("model/model.embed_tokens.weight", "model/lm_head.weight")
    equal = make_set(tmp_path / "set", dict.fromkeys(names, embedding))
    plan = plan_with(tmp_path / "set", equal, config)
    assert [tensor.name for tensor in plan.view.tensors] == ["model.embed_tokens.weight"]
    assert plan.view.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    apart = make_set(
        tmp_path / "set", dict(zip(names, (embedding, embedding + 1), strict=True)), serial=2
    )
    plan = plan_with(tmp_path / "set", apart, config)
    assert len(plan.view.tensors) == 2 and "DIFFER" in plan.warnings[0]


def test_masters_are_not_taken_for_the_weights_of_their_names(tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    saved = {f"master/{name}": torch.ones(9, 2) for name in names}
    manifest = make_set(tmp_path / "set", saved, model_dtypes="BF16")
    config = config_directory(tmp_path / "c", vocab_size=8, tie_word_embeddings=True)
    request = Request(
        str(tmp_path / "out"), selection=Selection(optimizer=True), copy_config=str(config)
    )
    plan = plan_export(reader_of(tmp_path / "set", manifest), request)
    assert plan.view.aliases == {names[1]: names[0]}
    assert [w.split(";")[0] for w in plan.warnings] == [
        f"config.json says vocab_size 8, but {names[0]} has 9 rows"
    ]


@pytest.mark.case("B245")
def test_b245_from_pretrained_loads_a_tied_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=40,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(config)
    config.save_pretrained(tmp_path / "config")
    named = dict(model.named_parameters())  # each tensor once
    every = dict(model.named_parameters(remove_duplicate=False))
    aliases = {
        alias: next(name for name, other in named.items() if other is value)
        for alias, value in every.items()
        if alias not in named
    }
    assert len(aliases) >= 2
    manifest = make_set(
        tmp_path / "set",
        {f"master/{name}": value.detach() for name, value in named.items()},
        cut="flat",
        world_size=3,
        aliases=aliases,
    )
    request = Request(
        str(tmp_path / "hf"), copy_config=str(tmp_path / "config"), max_shard_nbytes=4000
    )
    plan = plan_export(reader_of(tmp_path / "set", manifest), request)
    assert plan.warnings == []
    consolidate(plan)
    loaded, report = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    want = model.state_dict()
    assert all(same(value, want[name]) for name, value in loaded.state_dict().items())
