"""One rank of the kill tests: a small ZeRO engine that saves twice, and may die in the second save.

Arguments: DIRECTORY STAGE WRITER PHASE [DEADLINE_S]. WRITER is ``ours`` or ``native``. PHASE is
``die`` (rank 1 kills itself with SIGKILL while the second step is being saved) or ``resume``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import deepspeed
import torch

WIDTH = 256


def make_engine(stage: int, accumulate: int = 1) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            # No parameter stays gathered, or stage 3 would run a collective in the middle of
            # its own save and rank 0 could not run ahead of rank 1.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "steps_per_print": 10**9,
        },
    )
    return engine


def train_step(engine: Any, step: int) -> float:
    generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
    batch = torch.randn(2, WIDTH, generator=generator)
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def say(**what: Any) -> None:
    print("RESULT " + json.dumps(what), flush=True)


def ours(engine: Any, directory: str, deadline_s: float) -> None:
    from sharded_ckpt import ShardedCheckpointer
    from sharded_ckpt.errors import SaveError

    def die_in_second_step(event: Any) -> None:
        if event.kind == "staged" and event.step == 2 and engine.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    ckpt = ShardedCheckpointer(engine, directory, timeout_s=deadline_s, on_event=die_in_second_step)
    train_step(engine, 1)
    ckpt.save(1).wait(60)
    train_step(engine, 2)
    begun = time.monotonic()
    handle = ckpt.save(2)
    try:
        handle.wait(deadline_s + 30)
        say(outcome="committed")
    except SaveError as error:
        say(outcome=type(error).__name__, message=str(error), seconds=time.monotonic() - begun)
    sys.stdout.flush()
    os._exit(0)  # rank 1 is gone: tearing the process group down would hang


def native(engine: Any, directory: str) -> None:
    train_step(engine, 1)
    engine.save_checkpoint(directory, tag="good")
    train_step(engine, 2)
    if engine.global_rank == 1:
        writer = engine.checkpoint_engine

        def die(state_dict: Any, path: str) -> None:
            # Rank 0 has written its part by then; this rank's shard never appears.
            deadline = time.monotonic() + 60
            while open(os.path.join(directory, "latest")).read() != "bad":
                if time.monotonic() > deadline:
                    sys.exit("`latest` was not moved")
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

        writer.save = die
    try:
        engine.save_checkpoint(directory, tag="bad")
        say(outcome="returned")
    except Exception as error:  # the barrier notices that rank 1 is gone
        say(outcome=type(error).__name__)
    sys.stdout.flush()
    os._exit(0)


def resume(engine: Any, directory: str, writer: str) -> None:
    if writer == "ours":
        from sharded_ckpt import ShardedCheckpointer

        with ShardedCheckpointer(engine, directory, timeout_s=60) as ckpt:
            result = ckpt.load()
            say(step=result.step, steps=ckpt.all_steps())
            train_step(engine, result.step + 1)
            ckpt.save(result.step + 1).wait(60)
            say(step=ckpt.latest_step())
        return
    try:
        path, _ = engine.load_checkpoint(directory)
        say(loaded=path)
    except Exception as error:
        say(error=type(error).__name__)


def main() -> None:
    directory, stage, writer, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    engine = make_engine(stage)
    if phase == "resume":
        resume(engine, directory, writer)
    elif writer == "ours":
        ours(engine, directory, float(sys.argv[5]))
    else:
        native(engine, directory)


if __name__ == "__main__":
    main()
