"""One flipped bit, anywhere: ``verify`` says where, and no load hands the bytes out (P1, P8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sharded_ckpt import CorruptError, LoadError, ShardedCheckpointer, StepNotFound, cli
from sharded_ckpt.layout import MANIFEST, shard_file
from tests.reference_reader import Step


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(9, 7)
        self.b = torch.nn.Embedding(5, 3, dtype=torch.bfloat16)
        self.register_buffer("count", torch.arange(4))


def save_one(directory: Path) -> Path:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    (model.a(torch.ones(1, 9)).sum() + model.b.weight.float().sum()).backward()
    optimizer.step()
    with ShardedCheckpointer(model, directory, optimizer=optimizer, timeout_s=60) as ckpt:
        ckpt.save(1, client_state={"note": "x", "t": torch.ones(3)}).wait(60)
    (step,) = directory.glob("step-*")
    return step


def flips(path: Path, stride: int) -> Iterator[tuple[int, int]]:
    """A different bit of every ``stride``-th byte, and the last byte."""
    size = path.stat().st_size
    yield from ((at, 1 << (at * 5 % 8)) for at in range(0, size, stride))
    yield size - 1, 0x80


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What the command reports of one set."""
    code = cli.main(["verify", str(path), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["sets"]
    assert code == (1 if found["damage"] else 0)
    return found["damage"]


@pytest.mark.parametrize(("name", "stride"), [(shard_file(0), 7), (MANIFEST, 1)])
def test_verify_reports_every_flipped_bit_with_file_tensor_and_range(
    name: str, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = save_one(tmp_path)
    path = step / name
    whole = path.read_bytes()
    saved = Step(step)
    spans = {}
    if name != MANIFEST:
        (shard,) = saved.shards.values()
        data = len(whole) - len(shard.data)
        spans = {n: [data + x for x in i["data_offsets"]] for n, i in shard.tensors.items()}
    assert verify(step, capsys) == []
    for at, bit in flips(path, stride):
        damaged = bytearray(whole)
        damaged[at] ^= bit
        path.write_bytes(damaged)
        found = verify(step, capsys)
        assert found, f"bit {bit:#x} of byte {at} of {name} went unnoticed"
        assert all(name in d["file"] for d in found), (at, found)
        hit = [n for n, (a, b) in spans.items() if a <= at < b]
        if hit:
            (damage,) = found
            assert hit[0] in damage["tensors"], (at, damage)
            assert damage["start"] <= at < damage["end"], (at, damage)
    path.write_bytes(whole)
    assert verify(step, capsys) == []


@pytest.mark.parametrize(("name", "stride"), [(shard_file(0), 97), (MANIFEST, 61)])
def test_no_load_hands_out_flipped_bits(name: str, stride: int, tmp_path: Path) -> None:
    step = save_one(tmp_path)
    path = step / name
    whole = path.read_bytes()
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"optimizer": optimizer, "timeout_s": 60, "read_only": True}
    with ShardedCheckpointer(model, tmp_path, **options) as ckpt:
        for at, bit in flips(path, stride):
            damaged = bytearray(whole)
            damaged[at] ^= bit
            path.write_bytes(damaged)
            with pytest.raises((CorruptError, LoadError)) as caught:
                ckpt.load()
            assert not isinstance(caught.value, StepNotFound), at
        path.write_bytes(whole)
        assert ckpt.load().step == 1


def test_any_shard_opens_with_safetensors(tmp_path: Path) -> None:
    step = save_one(tmp_path)
    with safe_open(step / shard_file(0), "pt") as file:
        names = set(file.keys())
        assert {"model/a.weight", "optim/a.weight/exp_avg", "buffer/count"} <= names
        assert file.get_tensor("model/b.weight").dtype == torch.bfloat16
