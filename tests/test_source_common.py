"""Names, tensors and groups that every source relies on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from sharded_ckpt.errors import StateMismatch, UnsupportedError, UsageError
from sharded_ckpt.sources import common


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Inner(nn.Module):
    """Has a submodule that is really called "module", and so must keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


NAMES = ["module.weight", "module.bias", "norm.weight", "norm.bias"]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS = {"compile": compiled, "checkpoint": checkpoint_wrapper, "ddp": DistributedDataParallel}


@pytest.mark.case("B76", "B77", "B78")
@pytest.mark.parametrize(
    "nesting", [n for k in (1, 2, 3) for n in itertools.permutations(WRAPPERS, k)], ids="-".join
)
def test_wrapper_prefixes_are_dropped_in_any_nesting(one_rank: None, nesting: tuple) -> None:
    # B76, B77, B78: names must not depend on what wraps the model, at the root or below it.
    module: nn.Module = Inner()
    for wrapper in nesting:
        module = WRAPPERS[wrapper](module)
    assert [n for n, _ in common.named_parameters_once(module)] == NAMES
    below = Outer(module)
    assert [n for n, _ in common.named_parameters_once(below)] == [f"inner.{n}" for n in NAMES]
    assert [n for n, _ in common.persistent_buffers(module)] == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    spelled = [common.canonical_name(below, n) for n, _ in below.named_parameters()]
    assert spelled == [f"inner.{n}" for n in NAMES]


def test_two_tensors_of_one_name_are_refused() -> None:
    module = Outer(checkpoint_wrapper(Inner()))
    module.inner.module = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"both called 'inner\.module\.weight'"):
        common.named_parameters_once(module)


@pytest.mark.case("B21", "B245")
def test_tied_parameters_are_stored_once_under_the_first_name() -> None:
    # B21, B245: encoder, decoder and head share one weight.
    model = nn.ModuleDict({name: nn.Embedding(3, 2) for name in ("shared", "encoder", "head")})
    model["encoder"].weight = model["head"].weight = model["shared"].weight
    assert [n for n, _ in common.named_parameters_once(model)] == ["shared.weight"]
    assert common.aliases(model) == {
        "encoder.weight": "shared.weight",
        "head.weight": "shared.weight",
    }


def test_a_module_registered_twice_is_an_alias() -> None:
    norm = nn.BatchNorm1d(1, affine=False)
    model = nn.ModuleList([norm, norm])
    assert common.aliases(model) == {
        "1.running_mean": "0.running_mean",
        "1.running_var": "0.running_var",
        "1.num_batches_tracked": "0.num_batches_tracked",
    }
    assert len(common.buffer_slices(model)) == 3


@pytest.mark.case("B110", "B111")
def test_buffers_keep_their_dtype_and_are_copied_at_once() -> None:
    # B110, B111: int64 stays int64, what is not persistent is not saved.
    slices = {s.entry.name: s for s in common.buffer_slices(Inner())}
    assert sorted(slices) == [
        "buffer/norm.num_batches_tracked",
        "buffer/norm.running_mean",
        "buffer/norm.running_var",
    ]
    assert slices["buffer/norm.num_batches_tracked"].entry.dtype == "I64"
    assert all(s.eager and s.entry.copy for s in slices.values())


def test_embeddings_that_renormalise_in_forward_are_found() -> None:
    model = nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(3, 2, max_norm=1.0)])
    assert common.changed_in_forward(model) == {"1.weight"}


class Quantised(torch.Tensor):
    """Stands for the weights of quantisation libraries: a subclass of Tensor."""


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (torch.zeros(2).as_subclass(Quantised), UnsupportedError, "Quantised"),
        (torch.zeros(2, device="meta"), UsageError, "meta device"),
        (torch.zeros(2, 2).to_sparse(), UnsupportedError, "sparse"),
        (torch.zeros(2, 3).t(), UnsupportedError, "contiguous"),
        (torch.zeros(1).expand(3), UnsupportedError, "contiguous"),
        (torch.zeros(2, dtype=torch.complex64).conj(), UnsupportedError, "contiguous"),
        (torch.zeros(2, dtype=torch.complex128), UnsupportedError, "complex128"),
        (nn.parameter.UninitializedParameter(), UsageError, "forward pass"),
    ],
)
def test_tensors_whose_bytes_are_not_their_value_are_refused(
    tensor: torch.Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        common.check_tensor("parameter a.b", tensor)
    assert "parameter a.b" in str(caught.value)


@pytest.mark.case("B67")
def test_optimizer_state_is_sorted_by_shape() -> None:
    # B67: packed states of other shapes and dtypes are kept as they are.
    state = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.zeros(2, 3),
        "codes": torch.zeros(7, dtype=torch.uint8),
        "count": 4,
        "momentum_buffer": None,
    }
    found = common.sort_state("a", state, (2, 3))
    assert list(found.aligned) == ["exp_avg"]
    assert list(found.copies) == ["codes", "step"]
    assert found.opaque == ["codes"]
    assert found.scalars == {"count": 4, "momentum_buffer": None}


def test_step_of_a_scalar_parameter_is_a_counter() -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(1.0)}
    found = common.sort_state("a", state, ())
    assert (list(found.aligned), list(found.copies)) == (["exp_avg"], ["step"])


@pytest.mark.parametrize("value", [[torch.zeros(1)], {"a": 1}, object()])
def test_other_optimizer_state_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedError, match=r"'old_dirs' of layer\.weight"):
        common.sort_state("layer.weight", {"old_dirs": value}, (1,))


def saved_groups(*names: list[str]) -> list[common.Group]:
    return [{"params": own, "options": {"lr": i}} for i, own in enumerate(names)]


@pytest.mark.case("B170")
def test_groups_are_matched_by_names_not_by_order() -> None:
    # B170: neither the order of parameters nor that of groups decides.
    saved = saved_groups(["a", "b"], ["c"])
    assert common.match_groups([["c"], ["b", "a"]], saved) == [saved[1], saved[0]]


@pytest.mark.case("B172")
@pytest.mark.parametrize(
    ("live", "words"),
    [
        ([["a", "b", "c"]], "2 groups were saved, 1 are here"),
        ([["a"], ["b", "c"]], r"in another group: b \(saved in group 0, now in group 1\)"),
        ([["a", "b"], ["c", "d"]], "not saved: d"),
        ([["a"], ["c"]], "saved, but not in the optimizer: b"),
    ],
)
def test_other_groups_are_told_apart_by_name(live: list[list[str]], words: str) -> None:
    # B172: the number of groups alone explains nothing.
    with pytest.raises(StateMismatch, match=words):
        common.match_groups(live, saved_groups(["a", "b"], ["c"]))


def test_loose_matching_allows_missing_and_extra_names_only() -> None:
    saved = saved_groups(["a", "b"], ["c"])
    assert common.match_groups([["a"], ["c", "d"]], saved, strict=False) == saved
    with pytest.raises(StateMismatch, match="in another group"):
        common.match_groups([["a"], ["b", "c"]], saved, strict=False)


@pytest.mark.case("B80", "B242")
def test_groups_are_restored_in_place() -> None:
    # B80, B242: the scheduler keeps the dict, a compiled optimizer the tensor.
    rate = torch.tensor(0.5)
    group = {"params": [], "lr": rate, "betas": (0.9, 0.99), "param_names": ["x"]}
    (saved,) = common.capture_groups([group], [["a"]])
    assert saved == {"params": ["a"], "options": {"lr": rate, "betas": (0.9, 0.99)}}
    options = {"lr": torch.tensor(0.25), "betas": (0.5, 0.5), "initial_lr": 1.0}
    common.restore_groups([group], [{"params": ["a"], "options": options}])
    assert group["lr"] is rate and float(rate) == 0.25
    assert group["betas"] == (0.5, 0.5) and group["initial_lr"] == 1.0
