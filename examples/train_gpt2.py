"""Trains a small GPT-2 under DeepSpeed ZeRO, saving as it goes and resuming where it was.

    torchrun --nproc-per-node 2 examples/train_gpt2.py runs/demo
    deepspeed --num_gpus 2      examples/train_gpt2.py runs/demo

The text is the English that every Python ships (``pydoc_data.topics``), the tokens are its bytes.
The model has GPT-2's architecture with tied embeddings and dropout, and random weights at first. So
a resumed run repeats the losses of the interrupted one only if everything came back: masters,
Adam's moments, the schedule, the position in the data, and the random generators.

``--die-at STEP`` makes rank 1 kill itself with SIGKILL while it writes its shard of that step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import deepspeed
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from sharded_ckpt import Event, Keep, SaveEvery, ShardedCheckpointer
from sharded_ckpt.events import JsonLinesSink

CONTEXT = 128


class ByteSampler:
    """Batches of byte tokens from random places; a pure function of seed, rank and position."""

    def __init__(self, seed: int, rank: int, batch: int) -> None:
        text = "\n".join(topics.topics[key] for key in sorted(topics.topics))
        self._tokens = np.frombuffer(text.encode(), dtype=np.uint8)
        self._seed, self._rank, self._batch = seed, rank, batch
        self.position = 0

    def next(self) -> torch.Tensor:
        draw = np.random.default_rng((self._seed, self._rank, self.position))
        starts = draw.integers(0, len(self._tokens) - CONTEXT, self._batch)
        self.position += 1
        return torch.from_numpy(np.stack([self._tokens[s : s + CONTEXT] for s in starts])).long()

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self.position = state["seed"], state["position"]


class RunLog:
    """What the demo wants to show afterwards: one JSON line per step and per call of ``save``."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, step: int, t_start: float, **more: Any) -> None:
        seconds = time.time() - t_start
        line = {"kind": kind, "step": step, "t_start": t_start, "seconds": seconds, **more}
        self._file.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where checkpoints and results go")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="of ZeRO")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--die-at", type=int, default=None, metavar="STEP")
    parser.add_argument("--local_rank", type=int, default=None, help="set by DeepSpeed's launcher")
    return parser.parse_args()


def make_engine(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)  # every rank starts from the same weights
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": args.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": args.stage},
            "steps_per_print": 10**9,
        },
    )
    torch.manual_seed(1 + engine.global_rank)  # dropout differs between ranks
    return engine


def main() -> None:
    args = arguments()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed("gloo" if os.environ.get("DS_ACCELERATOR") == "cpu" else None)
    engine = make_engine(args)
    rank = engine.global_rank
    args.directory.mkdir(parents=True, exist_ok=True)
    run_log = RunLog(args.directory / f"log-rank{rank}.jsonl")
    data = ByteSampler(seed=0, rank=rank, batch=args.batch)

    def die(event: Event) -> None:
        # Called while the shard is being written: this rank never gets to vote for the step.
        if (event.kind, event.step, event.rank) == ("staged", args.die_at, 1):
            print(f"rank 1: SIGKILL while it writes step {event.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    with ShardedCheckpointer(
        engine,
        args.directory / "checkpoints",
        stateful={"data": data},
        save_every=SaveEvery(steps=args.save_every),
        keep=Keep(last=3),
        on_event=(JsonLinesSink(args.directory / f"events-rank{rank}.jsonl"), die),
    ) as ckpt:
        start = ckpt.load().step
        if rank == 0:
            print(f"resuming after step {start}" if start else "starting afresh", flush=True)
        handle = None
        for step in range(start + 1, args.steps + 1):
            began = time.time()
            tokens = data.next().to(engine.device)
            loss = engine(tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            value = loss.item()
            run_log.write("step", step, began, loss=value.hex())
            if rank == 0 and step % args.save_every == 0:
                print(f"step {step:3d}  loss {value:.4f}  {time.time() - began:.2f} s", flush=True)
            if step == args.die_at and handle is not None:
                handle.wait(timeout_s=120)  # so that it is known which step the resume finds
            if ckpt.should_save(step):
                began = time.time()
                handle = ckpt.save(
                    step, client_state={"seen": data.position}, metrics={"loss": value}
                )
                run_log.write("save", step, began)
    save_logits(engine, args.directory, rank)
    torch.distributed.destroy_process_group()


def save_logits(engine: Any, directory: Path, rank: int) -> None:
    """The trained model's logits of a fixed batch, and its configuration, for the final check."""
    engine.eval()
    tokens = ByteSampler(seed=7, rank=0, batch=2).next().to(engine.device)
    with torch.no_grad():
        logits = engine(tokens).logits  # on all ranks: ZeRO-3 gathers the weights
    if rank == 0:
        np.save(directory / "tokens.npy", tokens.cpu().numpy())
        np.save(directory / "logits.npy", logits.float().cpu().numpy())
        engine.module.config.save_pretrained(directory / "config")


if __name__ == "__main__":
    main()
