"""Cases beyond plain resume, on real engines: ``NAME ARG...`` for each, one JSON line for each.

``cross:A:B`` loads what mode A saved into mode B (another ZeRO stage or wrapper, same ranks);
``edited:A`` changes 16-bit weights behind the masters' back; ``parts:A`` loads pieces;
``wrong:A`` loads what does not fit, and must say so on every rank; ``unstepped:A`` loads a step
that was saved before the first training step into an engine that has trained.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sharded_ckpt.errors import StateMismatch
from sharded_ckpt.slices import common
from sharded_ckpt.sources.base import Parts
from sharded_ckpt.sources.deepspeed import DeepSpeedSource
from tests.dist.ds_modes import MODES, Mode
from tests.dist.ds_source_probe import Captured, digest, same

STEPS = (1, 2, 3)
MORE = (4, 5, 6)


def trained(mode: Mode, seed: int = 1) -> tuple[Any, DeepSpeedSource]:
    engine = mode.build(seed)
    for number in STEPS:
        mode.step(engine, number)
    return engine, DeepSpeedSource(engine)


def whole_tensors(saved: Captured) -> dict[str, torch.Tensor]:
    """Every saved tensor put together, under one name whatever its wrapper calls the truth."""
    found: dict[str, torch.Tensor] = {}
    for name, held in saved.holdings.items():
        kind, _, rest = name.partition("/")
        if kind == "buffer" or (kind == "model" and f"master/{rest}" in saved.holdings):
            continue
        label = f"weight/{rest}" if kind in ("model", "master") else name
        first = held[0][1]
        if first.copy:
            found[label] = held[0][2].clone()
            continue
        out = torch.zeros(first.shape, dtype=held[0][2].dtype).view(-1)
        for _, entry, tensor in held:
            region = replace(entry, region=type(entry.region)(0, out.numel())).region
            for at, to, numel in common(entry.region, region, entry.shape):
                out[to : to + numel] = tensor[at : at + numel]
        found[label] = out
    return found


def cross(one: Mode, other: Mode) -> None:
    engine, source = trained(one)
    saved = Captured(source)
    expected = [one.step(engine, number) for number in MORE]
    engine, source = trained(other, seed=5)
    saved.load(source, wide=True)
    same("assembled tensors", "cross", whole_tensors(saved), whole_tensors(Captured(source)))
    found = [other.step(engine, number) for number in MORE]
    # The forward pass of the same weights is the same; later, stages add up in another order.
    assert found[0] == expected[0], (found, expected)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-2, atol=0)


def edited(mode: Mode) -> None:
    """A weight that is not the cast of its master is saved, and comes back."""
    engine, source = trained(mode)
    edit(engine)
    saved = Captured(source)
    overrides = [n for n in saved.holdings if n.startswith("model/")]
    assert "model/head.weight" in overrides, overrides
    assert "model/up.weight" not in overrides, overrides
    at_save = digest(engine)
    expected = [mode.step(engine, number) for number in MORE]
    assert not any(n.startswith("model/") for n in Captured(source).holdings), "not stepped away"
    at_end = digest(engine)
    engine, source = trained(mode, seed=2)
    saved.load(source)
    same("state right after loading", "edited", at_save, digest(engine))
    same("what is saved next", "edited", saved.own(), Captured(source).own())
    assert [mode.step(engine, number) for number in MORE] == expected
    same("state 3 steps later", "edited", at_end, digest(engine))


def edit(engine: Any) -> None:
    """Adds to the first row of the head's weights, on every rank alike, and to no master."""
    weight = engine.module.head.weight
    with torch.no_grad():
        if not hasattr(weight, "ds_tensor"):
            weight.data[0] += 1.0
        elif torch.distributed.get_rank() == 0:
            weight.ds_tensor[:37] += 1.0


def parts(mode: Mode) -> None:
    """Weights alone leave the optimizer as it was; the scheduler travels with the learning rate."""
    engine, source = trained(mode)
    saved = Captured(source)
    full = digest(engine)
    engine, source = trained(mode, seed=2)
    before = digest(engine)
    saved.load(source, Parts(optimizer=False, scheduler=False, rng=False, data=False))
    after = digest(engine)
    same("scalars", "weights only", before["scalars"], after["scalars"])
    for name, tensor in after["tensors"].items():
        weights = name.startswith(("weight", "part", "master", "buffer"))
        expected = (full if weights else before)["tensors"][name]
        same(name, "weights only", expected, tensor)
    engine, source = trained(mode, seed=2)
    mode.step(engine, 4)
    rate = engine.get_lr()
    saved.load(source, Parts(scheduler=False))
    assert engine.get_lr() == rate and engine.global_steps == 4
    same("tensors", "no scheduler", full["tensors"], digest(engine)["tensors"])


def unstepped(mode: Mode) -> None:
    """P3 for a step saved before any training: state of a used optimizer must go."""
    engine = mode.build(1)
    source = DeepSpeedSource(engine)
    saved = Captured(source)
    fresh = digest(engine)
    expected = [mode.step(engine, number) for number in STEPS]
    end = digest(engine)
    engine, source = trained(mode, seed=2)
    saved.load(source)
    same("state right after loading", "unstepped", fresh, digest(engine))
    assert [mode.step(engine, number) for number in STEPS] == expected
    same("state 3 steps later", "unstepped", end, digest(engine))


def wrong(mode: Mode) -> None:
    """B172: groups that differ are told by name, on every rank, also where one rank alone fails."""
    engine, source = trained(mode)

    last = source.rank_state()["param_groups"][0]["params"][-1]

    def spoil_group(saved: Captured) -> None:
        moved = saved.rank_state["param_groups"][0]["params"].pop()
        saved.rank_state["param_groups"].append({"params": [moved], "options": {}})

    def spoil_one_rank(saved: Captured) -> None:
        if source.rank == 1:
            spoil_group(saved)

    def spoil_scheduler(saved: Captured) -> None:
        saved.shared_state["lr_scheduler"] = None

    refused(spoil_group, source, ["groups", last])
    refused(spoil_one_rank, source, ["groups"] if source.rank == 1 else ["rank 1", "groups"])
    refused(spoil_scheduler, source, ["lr_scheduler"])


def refused(spoil: Callable[[Captured], None], source: DeepSpeedSource, words: list[str]) -> None:
    saved = Captured(source)
    spoil(saved)
    try:
        saved.load(source)
    except StateMismatch as error:
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(f"{spoil.__name__} was not noticed")


CASES: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (cross, edited, parts, unstepped, wrong)
}


def main(cases: list[str]) -> None:
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    # The first ZeRO-3 engine of a process swaps in another F.linear, which rounds differently, for
    # every engine after it: without this, the order of the cases would decide about last bits.
    MODES["z3-bf16"].build(9)
    for case in cases:
        name, *modes = case.split(":")
        try:
            CASES[name](*(MODES[mode] for mode in modes))
        except Exception:
            traceback.print_exc()
            print(json.dumps({"mode": case, "ok": False}), flush=True)
            os._exit(1)  # the other ranks wait in a collective; the launcher ends them
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"mode": case, "ok": True}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
