"""Captures, restores and trains on, in every mode named on the command line, without any file.

Prints ``OK <mode>`` on each rank for a mode whose losses and state are bit-identical to those of
the training that never stopped.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sharded_ckpt import plan, tree
from sharded_ckpt.errors import UsageError
from sharded_ckpt.slices import Entry, Slice, common
from sharded_ckpt.sources.base import Parts
from sharded_ckpt.sources.select import select_source
from tests.dist.fsdp_modes import MODES, Mode, Training, train_step

Captured = list[tuple[Entry, torch.Tensor]]


def source_of(training: Training) -> Any:
    return select_source(training.model, training.optimizer, training.scheduler)


def capture(source: Any) -> tuple[Captured, Any, Any]:
    """Tensors and both state trees, as they go through JSON, one rank after the other.

    The other ranks wait at a barrier meanwhile, so a collective in here would not come back.
    """
    found: Any = None
    for turn in range(source.world_size):
        if turn == source.rank:
            slices = source.slices()
            for s in slices:
                assert s.tensor.is_contiguous() and s.tensor.numel() == s.entry.numel, s.entry
            tensors = [(s.entry, s.tensor.clone()) for s in slices]
            found = tensors, through_json(source.rank_state()), through_json(source.shared_state())
        dist.barrier()
    return found


def through_json(state: Any) -> Any:
    encoded = tree.encode(state, path="state", prefix="state/")
    tensors = {name: torch.as_tensor(t).clone() for name, t in encoded.tensors.items()}
    return tree.decode(json.loads(json.dumps(encoded.tree)), tensors.__getitem__)


def fill(targets: list[Slice], mine: Captured, rank: int) -> None:
    """Fills the targets from the captured tensors of all ranks, as the reader would from shards."""
    ranks: list[Captured] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    problems = plan.coverage({r: [e for e, _ in own] for r, own in enumerate(ranks)})
    assert not problems, problems
    holders: dict[str, list[tuple[int, Entry, torch.Tensor]]] = {}
    for r, own in enumerate(ranks):
        for entry, tensor in own:
            holders.setdefault(entry.name, []).append((r, entry, tensor))
    assert sorted(t.entry.name for t in targets) == sorted(holders)
    for target in targets:
        entry, out = target.entry, target.tensor.reshape(-1)
        assert out.data_ptr() == target.tensor.data_ptr()
        filled = 0
        for r, held, tensor in holders[entry.name]:
            assert (held.dtype, held.copy) == (entry.dtype, entry.copy), (held, entry)
            if held.copy and r != rank:
                continue
            assert held.shape == entry.shape, (held, entry)
            for there, here, numel in common(held.region, entry.region, entry.shape):
                out[here : here + numel] = tensor.reshape(-1)[there : there + numel]
                filled += numel
        assert filled == entry.numel, (entry, filled)


def same(a: Captured, b: Captured) -> None:
    assert [e for e, _ in a] == [e for e, _ in b]
    for (entry, x), (_, y) in zip(a, b, strict=True):
        assert torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)), entry.name


def check_shares(tensors: Captured, training: Training) -> None:
    """Ranks write about as many bytes, where everything is cut evenly or replicated."""
    counts = torch.zeros(dist.get_world_size())
    own = sum(t.numel() * t.element_size() for e, t in tensors if not e.copy)
    counts[dist.get_rank()] = own
    dist.all_reduce(counts)
    assert counts.max() - counts.min() <= 16, counts


def check_gathered(mode: Mode, training: Training) -> None:
    """Between forward and backward the parameters are gathered, and a save is refused."""
    source = source_of(training)
    if source.kind != "fsdp2" or mode.plain_grads:
        return
    out = training.model(torch.zeros((6, 4), dtype=torch.int64))
    for call in (source.check_can_save, source.slices):
        try:
            call()
        except UsageError as error:
            assert "optimizer.step()" in str(error), error
        else:
            raise AssertionError(f"{call.__name__} did not notice gathered parameters")
    out.float().sum().backward()
    training.optimizer.zero_grad()
    source.check_can_save()


def run(name: str, mode: Mode) -> None:
    training = mode.build(1)
    source = source_of(training)
    before_first_step = capture(source)
    for step in range(3):
        train_step(mode, training, step)
    saved = capture(source)
    if name.startswith(("ddp", "hsdp-2x1")):
        check_shares(saved[0], training)

    calls: list[int] = []
    remove = source.install_fence(lambda: calls.append(1))
    wanted_losses = [train_step(mode, training, step) for step in range(3, 6)]
    assert len(calls) == 3, calls
    remove()
    wanted = capture(source)

    # Into a fresh optimizer, into one that has stepped already, and back to before the first step.
    for seed, warm_steps in ((2, 0), (3, 1)):
        other = mode.build(seed)
        for step in range(warm_steps):
            train_step(mode, other, 50 + step)
        restore(other, saved)
        same(capture(source_of(other))[0], saved[0])
        losses = [train_step(mode, other, step) for step in range(3, 6)]
        assert losses == wanted_losses, (losses, wanted_losses)
        found = capture(source_of(other))
        same(found[0], wanted[0])
        assert repr(found[1:]) == repr(wanted[1:]), (found[1:], wanted[1:])
    restore(other, before_first_step)
    found = capture(source_of(other))
    same(found[0], before_first_step[0])
    assert repr(found[1:]) == repr(before_first_step[1:])
    check_gathered(mode, other)


def restore(training: Training, saved: tuple[Captured, Any, Any]) -> None:
    source = source_of(training)
    tensors, rank_state, shared_state = saved
    everything: list[Any] = [None] * source.world_size
    dist.all_gather_object(everything, [e for e, _ in tensors])
    names = {e.name: e for own in reversed(everything) for e in own}
    fill(source.targets(names, Parts()), tensors, source.rank)
    source.restore(rank_state, shared_state, Parts())


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        run(name, MODES[name])
        print(f"OK {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
