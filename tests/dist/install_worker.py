"""Code that calls DeepSpeed's own methods, with ours behind them. Argument: DIRECTORY."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sharded_ckpt import CheckpointError, ShardedCheckpointer
from tests.dist.kill_worker import WIDTH, make_engine, train_step


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def main() -> None:
    directory = str(Path(sys.argv[1]) / "run")
    engine = make_engine(2)
    ckpt = ShardedCheckpointer(engine, directory, timeout_s=60)
    ckpt.install(engine)
    report: dict[str, Any] = {"empty": engine.load_checkpoint(directory)}

    train_step(engine, 1)
    report["saved"] = engine.save_checkpoint(directory, tag="first", client_state={"epoch": 3})
    first = [train_step(engine, step) for step in (2, 3)]
    engine.save_checkpoint(directory)  # tag and step from the engine
    later = [train_step(engine, step) for step in (4, 5)]
    ckpt.wait()
    report["steps"] = ckpt.all_steps()
    report["latest_file"] = (Path(directory) / "latest").exists()

    path, state = engine.load_checkpoint(directory)
    report["newest"] = [Path(path).name[:13], state, engine.global_steps]
    report["later"] = [train_step(engine, step) for step in (4, 5)] == later
    path, state = engine.load_checkpoint(directory, tag="first")
    report["by_tag"] = [Path(path).name[:13], state, engine.global_steps]
    report["first"] = [train_step(engine, step) for step in (2, 3)] == first
    weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.load_checkpoint(directory, tag="global_step3", load_module_only=True)
    changed = [n for n, p in engine.module.named_parameters() if not torch.equal(p, weights[n])]
    report["module_only"] = [len(changed), engine.global_steps]

    report["refused"] = [
        refused(lambda: engine.save_checkpoint(directory + "-other")),
        refused(lambda: engine.save_checkpoint(directory, save_latest=False)),
        refused(lambda: engine.save_checkpoint(directory, exclude_frozen_parameters=True)),
        refused(lambda: engine.load_checkpoint(directory, custom_load_fn=print)),
        refused(lambda: engine.load_checkpoint(directory, tag="nowhere")),
    ]
    ckpt.close()

    # Off a gradient-accumulation boundary a save would lose half-summed gradients.
    engine.destroy()
    engine = make_engine(2, accumulate=2)
    ckpt = ShardedCheckpointer(engine, Path(sys.argv[1]) / "gas", timeout_s=60)
    batch = torch.ones(2, WIDTH)
    engine.backward(engine(batch).square().mean())
    engine.step()
    report["mid_accumulation"] = refused(lambda: ckpt.save(1))
    engine.backward(engine(batch).square().mean())
    engine.step()
    ckpt.save(2).wait(60)
    report["at_boundary"] = ckpt.all_steps()
    ckpt.close()
    print("RESULT " + json.dumps(report), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
