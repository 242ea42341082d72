"""What one process pays for a save, as ratios against limits measured in the same run.

    python benchmarks/quick.py [--mib 512] [--rounds 7] [--directory DIR]

One rank, host memory, AdamW state of one model. Subjects and limits take turns in every round, and
each figure is the median of the rounds:

* copy and checksum of one buffer, over a bare ``memcpy`` of it (one thread);
* time that ``save(snapshot="blocking")`` blocks, over a copy of the same tensors into warm memory;
* time that ``save`` blocks in lazy mode, and its fence when the step is longer than the copy,
  likewise;
* a save until it is committed and durable, over a plain O_DIRECT write, fsynced, of the same number
  of bytes to the same file system.

It is a quick look, not the comparison with other libraries.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sharded_ckpt import Keep, ShardedCheckpointer
from sharded_ckpt.engine import NativeEngine

BLOCK = 4 << 20


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def trained(mib: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose parameters and AdamW moments take ``mib`` MiB together."""
    width = 1024
    layers = max(1, mib * (1 << 20) // (12 * width * width))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def direct_write(path: Path, nbytes: int) -> float:
    """Seconds of a plain O_DIRECT write, durable, of ``nbytes`` rounded to whole blocks."""
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(BLOCK))
    begun = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_EXCL, 0o600)
    try:
        for _ in range(nbytes // BLOCK):
            os.write(fd, block)
        os.fsync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    model, optimizer = trained(args.mib)
    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    warm = [torch.zeros_like(t, requires_grad=False) for t in tensors]
    nbytes = sum(t.numel() * t.element_size() for t in tensors)

    engine = NativeEngine()
    source, target = torch.rand(32 << 20), torch.zeros(32 << 20)
    size = source.numel() * 4
    options = {"optimizer": optimizer, "keep": Keep(last=1)}
    lazy = ShardedCheckpointer(model, directory / "lazy", **options)
    blocking = ShardedCheckpointer(model, directory / "blocking", snapshot="blocking", **options)
    figures: dict[str, list[float]] = defaultdict(list)
    for step in range(args.rounds + 1):
        copy = timed(lambda: [w.copy_(t.detach()) for w, t in zip(warm, tensors, strict=True)])
        bare = timed(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), size))
        fused = timed(lambda: engine.memcpy_crc(target.data_ptr(), source.data_ptr(), size))
        blocked = timed(lambda step=step: blocking.save(step))
        blocking.wait()
        begun = time.perf_counter()
        handle = lazy.save(step)
        call = time.perf_counter() - begun
        while not handle.staged():  # the rest of a training step
            time.sleep(0.001)
        fence = timed(lazy.fence)
        lazy.wait()
        durable = time.perf_counter() - begun
        plain = direct_write(directory / "plain", nbytes)
        if step == 0:
            continue  # memory is touched for the first time
        figures["copy and checksum / memcpy"].append(fused / bare)
        figures["save blocks, blocking / copy into warm memory"].append(blocked / copy)
        figures["save blocks, lazy / copy into warm memory"].append(call / copy)
        figures["fence, step longer than the copy / copy"].append(fence / copy)
        figures["durable save / plain O_DIRECT write"].append(durable / plain)
        figures["GiB/s, plain O_DIRECT write"].append(nbytes / plain / (1 << 30))
        figures["GiB/s, copy into warm memory"].append(nbytes / copy / (1 << 30))
    lazy.close()
    blocking.close()
    engine.close()
    print(f"{nbytes / (1 << 20):.0f} MiB in {len(tensors)} tensors, {args.rounds} rounds")
    print("| figure | median | min | max |\n|---|---|---|---|")
    for name, values in figures.items():
        row = (statistics.median(values), min(values), max(values))
        print(f"| {name} | " + " | ".join(f"{v:.3g}" for v in row) + " |")
    print(json.dumps({n: statistics.median(v) for n, v in figures.items()}))


if __name__ == "__main__":
    main()
