"""Resume through ``DeepSpeedSource`` and memory alone, for the modes named on the command line.

For each mode: train 3 steps, capture, train 3 more; build a fresh engine from another seed, fill
it, and train the same 3 steps. State right after the fill, the losses and the state at the end must
be equal bit for bit on every rank; then the used engine is filled again. One JSON line per mode.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from typing import Any

import torch

from sharded_ckpt import dtypes, plan
from sharded_ckpt.errors import StateMismatch, UsageError
from sharded_ckpt.slices import Entry, Slice, common
from sharded_ckpt.sources.base import Parts
from sharded_ckpt.sources.deepspeed import DeepSpeedSource
from tests.dist.ds_modes import MODES, Mode

Holdings = dict[str, list[tuple[int, Entry, torch.Tensor]]]
_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat",
    "fp32_groups",
)


def main(names: list[str]) -> None:
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    for name in names:
        try:
            facts = check_mode(MODES[name])
        except Exception:
            traceback.print_exc()
            print(json.dumps({"mode": name, "ok": False}), flush=True)
            os._exit(1)  # the other ranks wait in a collective; the launcher ends them
        if torch.distributed.get_rank() == 0:
            print(json.dumps({"mode": name, "ok": True, **facts}), flush=True)


def check_mode(mode: Mode) -> dict[str, Any]:
    engine = mode.build(seed=1)
    source = DeepSpeedSource(engine)
    for number in (1, 2, 3):
        mode.step(engine, number)
    source.check_can_save()
    saved = Captured(source)
    at_save = digest(engine)
    expected = [mode.step(engine, number) for number in (4, 5, 6)]
    at_end = digest(engine)
    assert not equal(at_save["tensors"], at_end["tensors"]), "training changed nothing"

    engine = mode.build(seed=2)
    source = DeepSpeedSource(engine)
    assert source.describe() == saved.layout
    for turn in ("fresh", "used"):
        saved.load(source)
        same("state right after loading", turn, at_save, digest(engine))
        again = Captured(source)
        same("what is saved next", turn, saved.own(), again.own())
        found = [mode.step(engine, number) for number in (4, 5, 6)]
        assert found == expected, f"{turn}: losses {found}, expected {expected}"
        same("state 3 steps later", turn, at_end, digest(engine))
    check_fence(mode, engine, source)
    check_boundary(mode, engine, source)
    return {"tensors": len(saved.slices), "wide": source.reads_all_shards}


def check_fence(mode: Mode, engine: Any, source: DeepSpeedSource) -> None:
    """The fence is called before anything but buffers changes, and no more once removed."""
    before = unfenced(digest(engine))
    calls: list[list[str]] = []

    def fence() -> None:
        if not calls:
            calls.append(differences(before, unfenced(digest(engine))))

    remove = source.install_fence(fence)
    mode.step(engine, 7)
    assert calls == [[]], calls
    assert differences(before, unfenced(digest(engine))), "the step changed nothing"
    remove()
    calls.clear()
    mode.step(engine, 8)
    assert not calls, "the fence was called after its removal"
    assert "_take_model_step" not in vars(engine)


def unfenced(state: dict[str, Any]) -> dict[str, Any]:
    """State without what is copied at the call of ``save``, or counts micro-batches."""
    tensors = {k: v for k, v in state["tensors"].items() if not k.startswith(("buffer", "weight"))}
    scalars = {k: v for k, v in state["scalars"].items() if k != "micro_steps"}
    return {"tensors": tensors, "scalars": scalars}


def check_boundary(mode: Mode, engine: Any, source: DeepSpeedSource) -> None:
    """In the middle of a gradient accumulation a save is refused; what to do is said."""
    source.check_can_save()
    if mode.micro_batches == 1 or mode.pipeline:
        return
    tokens = torch.zeros((4, 5), dtype=torch.int64)
    engine.backward(engine(tokens, tokens))
    engine.step()
    try:
        source.check_can_save()
    except UsageError as error:
        assert "1 of 2 micro-batches" in str(error), error
    else:
        raise AssertionError("a save within a gradient accumulation was allowed")


class Captured:
    """What a save would write, copied: this rank's slices and states, and all ranks' slices."""

    def __init__(self, source: DeepSpeedSource) -> None:
        found = source.slices()
        names = [s.entry.name for s in found]
        assert len(names) == len(set(names)), "a name occurs twice on one rank"
        for one in found:
            assert one.tensor.is_contiguous() and one.tensor.numel() == one.entry.numel, one.entry
            assert dtypes.from_torch(one.tensor.dtype).name == one.entry.dtype, one.entry
        self.slices = [(s.entry, s.tensor.detach().clone().view(-1)) for s in found]
        self.rank_state = copy.deepcopy(source.rank_state())
        self.shared_state = copy.deepcopy(source.shared_state())
        self.layout = source.describe()
        gathered: list[Any] = [None] * source.world_size
        mine = (self.slices, self.shared_state, self.layout)
        torch.distributed.all_gather_object(gathered, mine)
        self.holdings: Holdings = {}
        for rank, (slices, shared, layout) in enumerate(gathered):
            for entry, tensor in slices:
                self.holdings.setdefault(entry.name, []).append((rank, entry, tensor))
            assert equal(shared, self.shared_state), "shared_state differs between ranks"
            assert layout == self.layout, "describe() differs between ranks"
        problems = plan.coverage({r: [e for e, _ in g[0]] for r, g in enumerate(gathered)})
        assert not problems, problems

    def own(self) -> dict[str, Any]:
        return {
            "tensors": {e.name: t for e, t in self.slices},
            "entries": {e.name: e for e, _ in self.slices},
            "rank_state": self.rank_state,
            "shared_state": self.shared_state,
        }

    def load(
        self, source: DeepSpeedSource, parts: Parts | None = None, *, wide: bool = False
    ) -> None:
        """Fills the targets as a reader would: from the own shard, or from all if asked to."""
        parts = Parts() if parts is None else parts
        rank = source.rank
        wide = wide or source.reads_all_shards
        seen = {n: h for n, h in self.holdings.items() if wide or any(r == rank for r, _, _ in h)}
        saved = {n: min(h, key=lambda x: (x[0] != rank, x[0]))[1] for n, h in seen.items()}
        targets = source.targets(saved, parts)
        states = copy.deepcopy((self.rank_state, self.shared_state))
        for target in targets:
            self._fill(target, rank)
        wanted: list[Any] = [None] * source.world_size
        torch.distributed.all_gather_object(wanted, {t.entry.name for t in targets})
        kinds = ("optim/",) * parts.optimizer + ("model/", "master/", "buffer/") * parts.weights
        due = {name for name in self.holdings if name.startswith(kinds)}
        assert not due - set().union(*wanted), "saved, but loaded by nobody"
        failure: Exception | None = None
        try:
            source.restore(*states, parts)
        except StateMismatch as error:
            failure = error
        # As the loader does: all ranks agree before any of them runs a collective.
        failures: list[Any] = [None] * source.world_size
        torch.distributed.all_gather_object(failures, failure and str(failure))
        if failure is not None:
            raise failure
        for other, text in enumerate(failures):
            if text is not None:
                raise StateMismatch(f"rank {other} could not take the state back: {text}")
        source.refresh(parts)

    def _fill(self, target: Slice, rank: int) -> None:
        entry = target.entry
        held = self.holdings.get(entry.name, [])
        assert held, f"{entry.name} was not saved"
        cut = [h for h in held if not h[1].copy]
        if entry.copy or not cut:
            held = [min(held, key=lambda h: (h[0] != rank, h[0]))]
        flat = target.tensor.view(-1)
        filled = 0
        for _, have, tensor in held:
            assert (have.dtype, have.shape) == (entry.dtype, entry.shape), (have, entry)
            for at, to, numel in common(have.region, entry.region, entry.shape):
                flat[to : to + numel].copy_(tensor[at : at + numel])
                filled += numel
        holes_allowed = entry.name in plan.overrides(self.holdings)
        assert filled == entry.numel or holes_allowed, f"{entry.name}: {filled} of {entry.numel}"


def digest(engine: Any) -> dict[str, Any]:
    """All training state, read from DeepSpeed's own attributes and not through the source."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if not hasattr(parameter, "ds_tensor"):
            tensors[f"weight {name}"] = parameter.detach().clone()
            continue
        real = real_numel(parameter, engine)
        tensors[f"part {name}"] = parameter.ds_tensor[:real].detach().clone()
        if parameter.ds_status.name == "AVAILABLE":
            tensors[f"weight {name}"] = parameter.detach().clone()
    for name, buffer in engine.module.named_buffers():
        if not name.endswith("scratch"):
            tensors[f"buffer {name}"] = buffer.clone()
    scalars: dict[str, Any] = {}
    for number, master in enumerate(_masters(engine, inner)):
        keep = slice(None)
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            keep = _real_elements(engine, number)
        tensors[f"master {number}"] = master.detach().view(-1)[keep].clone()
        for key, value in inner.state.get(master, {}).items():
            if not isinstance(value, torch.Tensor):
                scalars[f"{key} {number}"] = value
            elif value.shape == master.shape:
                tensors[f"{key} {number}"] = value.view(-1)[keep].clone()
            else:
                tensors[f"{key} {number}"] = value.clone()
    for holder in ("loss_scaler", "loss_scale_config"):
        scaler = vars(optimizer).get(holder)
        if scaler is not None:
            plain = (int, float, bool)
            scalars[holder] = {k: v for k, v in vars(scaler).items() if isinstance(v, plain)}
    for owner, key in (
        (engine, "torch_autocast_z0_gradscaler"),
        (optimizer, "torch_autocast_gradscaler"),
    ):
        if getattr(owner, key, None) is not None:
            scalars[key] = getattr(owner, key).state_dict()
    scalars["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
    scalars["scheduler"] = engine.lr_scheduler.state_dict()
    scalars["lr"] = engine.get_lr()
    for key in ("global_steps", "global_samples", "skipped_steps", "micro_steps"):
        scalars[key] = getattr(engine, key)
    return {"tensors": tensors, "scalars": copy.deepcopy(scalars)}


def _masters(engine: Any, inner: Any) -> list[torch.Tensor]:
    for attribute in _MASTERS:
        found = getattr(engine.optimizer, attribute, None)
        if found is not None:
            return [t for g in found for t in (g if isinstance(g, list) else [g])]
    return [p for g in inner.param_groups for p in g["params"]]


def _real_elements(engine: Any, sub_group: int) -> torch.Tensor:
    """Positions of a ZeRO-3 sub-group that are no padding (padding is uninitialised memory)."""
    kept, at = [], 0
    for parameter in engine.optimizer.fp16_groups[sub_group]:
        kept.append(torch.arange(at, at + real_numel(parameter, engine)))
        at += parameter.partition_numel()
    return torch.cat(kept)


def real_numel(parameter: Any, engine: Any) -> int:
    part = parameter.partition_numel()
    start = torch.distributed.get_rank(engine.optimizer.dp_process_group) * part
    return max(0, min(part, parameter.ds_numel - start))


def equal(a: Any, b: Any) -> bool:
    return not differences(a, b)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two trees differ; tensors are compared bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        like = (a.dtype, a.shape) == (b.dtype, b.shape)
        if like and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            return []
        return [f"{where}: {a.dtype} {list(a.shape)} vs {b.dtype} {list(b.shape)}"]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{where}.{key} is on one side only" for key in a.keys() ^ b.keys()]
        return found + [
            d for k in a.keys() & b.keys() for d in differences(a[k], b[k], f"{where}.{k}")
        ]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {a!r} vs {b!r}"]


def same(what: str, turn: str, expected: Any, found: Any) -> None:
    different = differences(expected, found)
    assert not different, f"{turn}: {what} differs: {sorted(different)[:12]}"


if __name__ == "__main__":
    main(sys.argv[1:])
