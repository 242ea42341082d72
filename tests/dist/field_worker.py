"""Two ranks in situations that users reported, one after another. Arguments: DIRECTORY [NAME...]

Each situation saves below DIRECTORY/NAME and prints ``CASE {"case", "rank", ...}`` on every rank.
Where the truth has to be gathered, rank 0 leaves it beside the checkpoint, as
``reference.safetensors``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from sharded_ckpt import CheckpointError, ShardedCheckpointer
from tests.dist import ds_modes

Report = dict[str, Any]
CASES: dict[str, Callable[[Path], Report]] = {}
REFERENCE = "reference.safetensors"


def case(function: Callable[[Path], Report]) -> Callable[[Path], Report]:
    CASES[function.__name__] = function
    return function


def refused(call: Callable[[], Any]) -> Report:
    try:
        call()
    except CheckpointError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "message": "not refused"}


def engine_of(model: nn.Module, config: ds_modes.Config, **options: Any) -> Any:
    import deepspeed

    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, config=config, **options
    )
    return engine


def steps(engine: Any, first: int, last: int) -> list[float]:
    """Trains on data that depends on step and rank; the learning rate after each step."""
    rates = []
    for number in range(first, last + 1):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        tokens = torch.randint(0, ds_modes.VOCAB, (2, 5), generator=generator)
        engine.backward(engine(tokens, tokens))
        engine.step()
        rates.append(engine.get_lr()[0])
    return rates


def write_gathered(engine: Any, directory: Path) -> None:
    """Whole weights and persistent buffers of a ZeRO-3 engine."""
    import deepspeed

    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        whole = {n: p.detach().clone() for n, p in module.named_parameters()}
    buffers = {n: b.clone() for n, b in module.named_buffers() if "scratch" not in n}
    if dist.get_rank() == 0:
        save_file(whole | buffers, directory / REFERENCE)


class Codes(nn.Module):
    """Frozen weights as a quantised base keeps them: bytes."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 255, (ds_modes.WIDTH,), dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.weight.to(x.dtype) / 2550)


class QuantisedLora(ds_modes.LoraNet):
    """A frozen base, partly in bytes, small trained matrices, a ``state_dict`` that hides all."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = Codes()

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.codes(super().features(tokens))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}


@case
def zero3_adapter(directory: Path) -> Report:
    torch.manual_seed(3)
    engine = engine_of(QuantisedLora(), ds_modes.config(3, ds_modes.BF16))
    with ShardedCheckpointer(engine, directory / "ckpt", timeout_s=60) as ckpt:
        steps(engine, 1, 2)
        ckpt.save(2).wait(60)
    write_gathered(engine, directory)
    trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    engine.destroy()
    return {"trained": trained}


@case
def zero3_placeholders(directory: Path) -> Report:
    """The module inside the engine holds empty tensors, and so does a file made of it."""
    torch.manual_seed(3)
    engine = engine_of(ds_modes.Net(), ds_modes.config(3))
    report = refused(lambda: ShardedCheckpointer(engine.module, directory / "wrong"))
    report["left"] = (directory / "wrong").exists()
    if dist.get_rank() == 0:
        state = {n: t.detach().clone() for n, t in engine.module.state_dict().items()}
        report["empty"] = sum(t.numel() == 0 for t in state.values())
        (directory / "file").mkdir()
        save_file(state, directory / "file" / "model.safetensors")
    with ShardedCheckpointer(engine, directory / "ckpt", timeout_s=60) as ckpt:
        steps(engine, 1, 1)
        ckpt.save(1).wait(60)
    write_gathered(engine, directory)
    engine.destroy()
    return report


@case
def zero3_cosine(directory: Path) -> Report:
    from transformers import get_cosine_schedule_with_warmup

    config = ds_modes.config(3)
    del config["scheduler"]

    def opened(seed: int) -> tuple[Any, ShardedCheckpointer]:
        torch.manual_seed(seed)
        engine = engine_of(
            ds_modes.Net(),
            config,
            lr_scheduler=lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, 12),
        )
        return engine, ShardedCheckpointer(engine, directory, timeout_s=60)

    engine, ckpt = opened(1)
    steps(engine, 1, 3)
    ckpt.save(3).wait(60)
    expected = steps(engine, 4, 8)
    ckpt.close()
    engine.destroy()
    engine, ckpt = opened(2)
    ckpt.load()
    rates = steps(engine, 4, 8)
    ckpt.close()
    engine.destroy()
    return {"rates": rates, "expected": expected}


@case
def zero1_skipped_step(directory: Path) -> Report:
    """An overflow makes the engine's count of steps that changed weights fall behind the loop's."""
    ds_modes.allow_fp16_on_cpu()
    huge: ds_modes.Config = {
        "fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1},
    }

    def counters(engine: Any) -> list[float]:
        return [engine.global_steps, engine.skipped_steps, engine.optimizer.cur_scale]

    torch.manual_seed(1)
    engine = engine_of(ds_modes.Net(), ds_modes.config(1, huge))
    with ShardedCheckpointer(engine, directory, timeout_s=60) as ckpt:
        steps(engine, 1, 3)
        saved = counters(engine)
        ckpt.save(800).wait(60)  # a loop that counts in its own way
        steps(engine, 4, 5)
    engine.destroy()
    torch.manual_seed(2)
    engine = engine_of(ds_modes.Net(), ds_modes.config(1, huge))
    with ShardedCheckpointer(engine, directory, timeout_s=60) as ckpt:
        step = ckpt.load().step
        report = {"step": step, "saved": saved, "loaded": counters(engine)}
        report["by_step"] = ckpt.load(800).step
        report["by_other"] = refused(lambda: ckpt.load(799))
    engine.destroy()
    return report


@case
def main_process_only(directory: Path) -> Report:
    """The habit of Accelerate's users, with a ZeRO-3 engine: save on the main process alone."""
    from accelerate import PartialState

    state = PartialState(cpu=True)
    assert state.num_processes == 2
    torch.manual_seed(1)
    engine = engine_of(ds_modes.Net(), ds_modes.config(3))
    ckpt = ShardedCheckpointer(engine, directory, timeout_s=3)
    report: Report = {}
    if state.is_main_process:
        report = refused(lambda: ckpt.save(1).wait(60))
    dist.barrier()
    steps(engine, 1, 1)
    ckpt.save(2).wait(60)
    report["steps"] = ckpt.all_steps()
    ckpt.close()
    engine.destroy()
    return report


class SmallLm(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, 11, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.embed_tokens.weight)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(torch.tanh(self.body(self.embed_tokens(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def fsdp_lm(directory: Path, tied: bool) -> Report:
    """Saves step 0, where both tensors are equal, and step 1, where only tied ones still are."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = SmallLm(tied)
    fully_shard(model.body)
    if tied:  # embedding and head in one unit, everything between them in others
        fully_shard([model.embed_tokens, model.lm_head])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ShardedCheckpointer(model, directory / "ckpt", optimizer=optimizer) as ckpt:
        ckpt.save(0).wait(60)
        model(torch.arange(10).reshape(2, 5)).backward()
        optimizer.step()
        ckpt.save(1).wait(60)
    whole = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    if dist.get_rank() == 0:
        save_file(whole, directory / REFERENCE)
    return {"names": list(whole)}


@case
def fsdp_tied_across_units(directory: Path) -> Report:
    return fsdp_lm(directory, tied=True)


@case
def fsdp_meant_to_be_tied(directory: Path) -> Report:
    """The config says tied, the model has two tensors."""
    return fsdp_lm(directory, tied=False)


def main() -> None:
    import deepspeed

    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for name in sys.argv[2:] or CASES:
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        report = CASES[name](directory)
        print("CASE " + json.dumps({"case": name, "rank": dist.get_rank(), **report}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
