"""FSDP2 in all its modes: exact resume without files (P3), geometry, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sharded_ckpt.errors import UnsupportedError, UsageError
from sharded_ckpt.slices import Box, Run
from sharded_ckpt.sources import mesh
from sharded_ckpt.sources.fsdp import FsdpSource
from sharded_ckpt.sources.select import select_source
from tests.dist.fsdp_modes import MODES
from tests.dist.launch import launch

PROBE = Path(__file__).parent / "dist" / "fsdp_source_probe.py"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_p3_every_mode_resumes_bit_for_bit(world_size: int) -> None:
    modes = [name for name, mode in MODES.items() if mode.world_size == world_size]
    result = launch(PROBE, world_size, modes, timeout_s=300.0).check()
    assert result.stdout.split("\n")[:-1] == [f"OK {name}" for name in modes] * world_size


# --- geometry, without processes -----------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (3, 2), (2, 3), (4, 4)])
def test_boxes_of_fsdp_over_tensor_parallelism_cover_every_row_once(dp: int, tp: int) -> None:
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    for size in range(20):
        rows = []
        for coordinate in itertools.product(range(dp), range(tp)):
            box = mesh.local_box((size, 3), (dp, tp), coordinate, placements)
            assert (box.offset[1], box.extent[1]) == (0, 3)
            rows += range(box.offset[0], box.offset[0] + box.extent[0])
        assert sorted(rows) == list(range(size))


def test_uneven_rows_are_where_fsdp2_puts_them() -> None:
    # torch's compute_local_shape_and_global_offset has these two the wrong way round.
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert mesh.local_box((7,), (3, 2), (2, 0), placements).extent == (0,)
    assert mesh.local_box((7,), (3, 2), (2, 1), placements) == Box((6,), (1,))


def test_boxes_of_plain_shards_and_replicas() -> None:
    placements = (Replicate(), Shard(0), Shard(1))
    assert mesh.local_box((5, 4), (2, 2, 2), (1, 1, 0), placements) == Box((3, 0), (2, 2))
    assert mesh.local_box((1, 4), (4,), (3,), (Shard(0),)) == Box((1, 0), (0, 4))
    with pytest.raises(UnsupportedError, match="neither a shard nor a replica"):
        mesh.local_box((4,), (2,), (0,), (Partial(),))


# --- one rank ------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(**options: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    fully_shard(model[1], **options)
    return fully_shard(model, **options)


@pytest.mark.case("B102")
def test_parameters_are_boxes_and_record_what_the_model_computes_in(one_rank: None) -> None:
    # B102: exported as the bf16 that the run was configured with.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(mp_policy=policy)
    source = select_source(model, torch.optim.AdamW(model.parameters()))
    entries = {s.entry.name: s.entry for s in source.slices()}
    assert sorted(entries) == ["model/0.bias", "model/0.weight", "model/1.weight"]
    weight = entries["model/0.weight"]
    assert (weight.dtype, weight.model_dtype) == ("F32", "BF16")
    assert weight.region == Box((0, 0), (4, 3))
    assert source.describe()["cuts"] == [{"mesh": [1], "dims": [], "placements": ["shard(0)"]}]


def test_slices_are_views_of_the_shards(one_rank: None) -> None:
    model = sharded()
    slices = {s.entry.name: s.tensor for s in FsdpSource(model).slices()}
    local = model[0].weight._local_tensor
    assert slices["model/0.weight"].data_ptr() == local.data_ptr()


def test_gathered_parameters_are_refused_until_reshard(one_rank: None) -> None:
    model = sharded()
    source = FsdpSource(model)
    with torch.no_grad():
        model(torch.zeros(1, 3))
    with pytest.raises(UsageError, match=r"the root module are gathered.*reshard\(\)"):
        source.check_can_save()
    with pytest.raises(UsageError, match="gathered"):
        select_source(model)
    model.reshard()
    source.check_can_save()


def test_an_optimizer_from_before_fully_shard_is_refused(one_rank: None) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)
    with pytest.raises(UsageError, match="after fully_shard"):
        select_source(model, optimizer)


def test_optimizer_state_that_is_cut_in_another_way_is_refused(one_rank: None) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters())
    device_mesh = init_device_mesh("cpu", (1,))
    optimizer.state[model[0].weight]["momentum_buffer"] = distribute_tensor(
        torch.zeros(4, 3), device_mesh, [Replicate()]
    )
    with pytest.raises(UnsupportedError, match=r"'momentum_buffer' of 0\.weight"):
        select_source(model, optimizer)


def test_state_that_only_this_layout_can_use_is_not_loaded_on_another(one_rank: None) -> None:
    from sharded_ckpt.errors import StateMismatch
    from sharded_ckpt.sources.base import Parts

    model = sharded()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model[0].weight]["codes"] = torch.zeros(5, dtype=torch.uint8)
    source = FsdpSource(model, optimizer)
    state = source.rank_state()
    source.check_saved(state, {}, Parts())
    state["optimizer"]["opaque"]["cut"]["world_size"] = 2
    with pytest.raises(StateMismatch, match="codes is not cut as its parameters are"):
        source.check_saved(state, {}, Parts())


def test_a_shard_that_is_not_where_it_should_be_is_refused(one_rank: None) -> None:
    device_mesh = init_device_mesh("cpu", (1,))
    odd = DTensor.from_local(
        torch.zeros(3), device_mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
    )
    with pytest.raises(UnsupportedError, match=r"local tensor of shape \[3\].*expected \[4\]"):
        mesh.held("odd", odd, 1)


def test_a_mesh_of_some_ranks_is_refused(one_rank: None) -> None:
    tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(UnsupportedError, match="over 1 of 2 ranks"):
        mesh.held("weight", tensor, 2)


def test_whole_tensors_outside_of_the_mesh_are_runs(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    fully_shard(model[0])
    regions = {s.entry.name: s.entry.region for s in select_source(model).slices()}
    assert regions == {"model/0.weight": Box((0, 0), (2, 2)), "model/1.weight": Run(0, 4)}
