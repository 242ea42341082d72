"""One rank of the P3 tests: trains modes, saves, and resumes them in another process.

Arguments: PHASE DIRECTORY MODE... with MODE ``ds:<name>`` or ``torch:<name>``, and PHASE one of

* ``train``: steps 1 to 3, a save (and DeepSpeed's own save), steps 4 to 8, a record of everything;
* ``resume``: other weights, a load, steps 4 to 8, and the record compared with the first one. Then
  the same with DeepSpeed's own checkpoint, for the table.

Prints one line ``P3 {...}`` for each mode.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sharded_ckpt import ShardedCheckpointer, tree

SAVED, LAST = 3, 8
Record = dict[str, Any]


class DeepSpeedRun:
    """One engine of a mode, seen as what the tests need."""

    def __init__(self, name: str, seed: int) -> None:
        from tests.dist import ds_modes

        self.mode = ds_modes.MODES[name]
        self.engine = self.mode.build(seed)
        self.wrapper = self.mode.wrapper

    def checkpointer(self, directory: Path) -> ShardedCheckpointer:
        return ShardedCheckpointer(self.engine, directory, timeout_s=120)

    def step(self, number: int) -> Any:
        return self.mode.step(self.engine, number)

    def save_natively(self, directory: Path) -> str:
        self.engine.save_checkpoint(str(directory), tag="native")
        return "saved"

    def load_natively(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), tag="native")
        if path is None:
            raise AssertionError("nothing was loaded")

    def close(self) -> None:
        self.engine.destroy()


class TorchRun:
    """One FSDP2, DDP or plain training."""

    def __init__(self, name: str, seed: int) -> None:
        from tests.dist import fsdp_modes

        self.mode = fsdp_modes.MODES[name]
        self.train_step = fsdp_modes.train_step
        self.training = self.mode.build(seed)
        self.wrapper = type(self.training.optimizer).__name__

    def checkpointer(self, directory: Path) -> ShardedCheckpointer:
        t = self.training
        return ShardedCheckpointer(
            t.model, directory, optimizer=t.optimizer, scheduler=t.scheduler, timeout_s=120
        )

    def step(self, number: int) -> Any:
        return self.train_step(self.mode, self.training, number)

    def close(self) -> None:
        return


def start(mode: str, seed: int) -> Any:
    kind, name = mode.split(":", 1)
    return (DeepSpeedRun if kind == "ds" else TorchRun)(name, seed)


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def record(run: Any, ckpt: ShardedCheckpointer) -> Record:
    """Every tensor and every value that the training state of this rank is made of."""
    source = ckpt._source
    tensors = {item.entry.name: digest(item.tensor) for item in source.slices()}
    # The working copies too, which a load has to derive from the masters.
    module = run.engine.module if isinstance(run, DeepSpeedRun) else run.training.model
    for name, param in module.named_parameters():
        local = getattr(param, "ds_tensor", None)
        if local is None:
            local = getattr(param, "_local_tensor", param)
            tensors[f"working/{name}"] = digest(local)
    for name, buffer in module.named_buffers():
        if "scratch" not in name:  # not persistent
            tensors[f"working/{name}"] = digest(buffer)
    values = {
        "shared": tree.encode(source.shared_state(), path="shared", prefix="s/").tree,
        "rank": tree.encode(source.rank_state(), path="rank", prefix="r/").tree,
    }
    return {"tensors": tensors, "values": json.dumps(values, sort_keys=True)}


def differences(got: Record, expected: Record) -> list[str]:
    a, b = got["tensors"], expected["tensors"]
    found = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    if got["values"] != expected["values"]:
        found.append(f"values: {got['values']} instead of {expected['values']}")
    if got["losses"] != expected["losses"]:
        found.append(f"losses: {got['losses']} instead of {expected['losses']}")
    return found


def train(mode: str, directory: Path) -> Record:
    run = start(mode, seed=1)
    ckpt = run.checkpointer(directory / "ours")
    for number in range(1, SAVED + 1):
        run.step(number)
    native = "-"
    if isinstance(run, DeepSpeedRun):
        try:
            native = run.save_natively(directory / "native")
        except Exception as error:
            native = f"save: {type(error).__name__}"
    handle = ckpt.save(SAVED, client_state={"rank": ckpt._source.rank})
    losses = [run.step(number) for number in range(SAVED + 1, LAST + 1)]
    handle.wait(120)
    rank = ckpt._source.rank
    kept = {**record(run, ckpt), "losses": losses}
    (directory / f"expected-{rank}.json").write_text(json.dumps(kept))
    ckpt.close()
    run.close()
    return {"wrapper": run.wrapper, "native_save": native, "ok": True}


def resume(mode: str, directory: Path) -> Record:
    run = start(mode, seed=2)
    ckpt = run.checkpointer(directory / "ours")
    rank = ckpt._source.rank
    expected = json.loads((directory / f"expected-{rank}.json").read_text())
    result = ckpt.load()
    assert result.step == SAVED, result
    assert result.client_state == {"rank": rank}, result
    losses = [run.step(number) for number in range(SAVED + 1, LAST + 1)]
    got = {**record(run, ckpt), "losses": losses}
    wrong = differences(got, expected)
    report = {
        "wrapper": run.wrapper,
        "tensors": len(got["tensors"]),
        "wrong": wrong[:6],
        "ok": not wrong,
    }
    ckpt.close()
    run.close()
    if isinstance(run, DeepSpeedRun):
        report["native"] = native_resume(mode, directory, expected)
    return report


def native_resume(mode: str, directory: Path, expected: Record) -> str:
    """What DeepSpeed's own checkpoint of the same step gives: exact, differs, or its error."""
    try:
        run = start(mode, seed=2)
        run.load_natively(directory / "native")
        losses = [run.step(number) for number in range(SAVED + 1, LAST + 1)]
        ckpt = run.checkpointer(directory / "scratch")
        got = {**record(run, ckpt), "losses": losses}
        ckpt.close()
        run.close()
    except Exception as error:
        return f"load: {type(error).__name__}"
    wrong = [w for w in differences(got, expected) if not w.startswith("values")]
    return "exact" if not wrong else "differs"


def main() -> None:
    phase, root, modes = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    if any(m.startswith("ds:") for m in modes):
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif not all(m == "torch:plain" for m in modes):
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for mode in modes:
        directory = root / mode.replace(":", "-")
        directory.mkdir(parents=True, exist_ok=True)
        try:
            report = (train if phase == "train" else resume)(mode, directory)
        except Exception:
            report = {"ok": False, "wrong": [traceback.format_exc()[-3000:]]}
        print("P3 " + json.dumps({"mode": mode, "rank": rank, **report}), flush=True)
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
