"""The table of element types agrees with torch, numpy, ml_dtypes and safetensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from sharded_ckpt import dtypes
from sharded_ckpt.errors import UnsupportedError

ALL = list(dtypes.BY_NAME.values())


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_every_name_means_the_same_everywhere(dtype: dtypes.DType) -> None:
    from safetensors.torch import _getdtype

    torch_dtype = dtypes.to_torch(dtype.name)
    assert dtypes.from_torch(torch_dtype) is dtype
    assert dtypes.by_name(dtype.name) is dtype
    assert torch_dtype.itemsize == dtype.itemsize == dtype.bits.itemsize
    assert _getdtype(dtype.name) is torch_dtype
    assert bool(dtype.numpy_name) != bool(dtype.ml_dtypes_name)
    twin = np.dtype(dtype.numpy_name or getattr(ml_dtypes, dtype.ml_dtypes_name))
    assert twin.itemsize == dtype.itemsize
    # The same bits mean the same number.
    bits = np.arange(48, 64, dtype=np.uint8)
    if dtype.name == "BOOL":
        bits %= 2
    ours = torch.from_numpy(bits.copy()).view(torch_dtype).to(torch.complex128).numpy()
    assert ours.tolist() == bits.view(twin).astype(np.complex128).tolist()


def test_floats_are_told_from_integers() -> None:
    for dtype in ALL:
        assert dtype.is_float == dtypes.to_torch(dtype.name).is_floating_point


def test_unknown_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'F99'.*F32"):
        dtypes.by_name("F99")
    with pytest.raises(UnsupportedError, match=r"model/x has dtype torch.complex128"):
        dtypes.from_torch(torch.complex128, "model/x")
