"""Consolidation: from a request to a plan (what, where, how large), and from the plan to files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from sharded_ckpt.errors import UsageError
from sharded_ckpt.export import hf_config, orbax, safetensors, torch_file
from sharded_ckpt.export.stream import WINDOW_NBYTES
from sharded_ckpt.export.weights import ModelView, Selection
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.store_output import check_apart, check_space, check_target, resident_nbytes

Format = Literal["safetensors", "torch", "orbax"]

# Threads' stacks, the allocator, tensorstore's pools: what a run takes besides the windows.
_OVERHEAD_NBYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What to write, and where. ``copy_config`` is a directory with a ``config.json``."""

    target: str
    format: Format = "safetensors"
    selection: Selection = field(default_factory=Selection)
    max_shard_nbytes: int = safetensors.MAX_SHARD_NBYTES
    copy_config: str | None = None
    overwrite: bool = False


@dataclass(slots=True)
class ExportPlan:
    """What a consolidation would do. ``files`` are ``(name, bytes of tensors)``."""

    request: Request
    view: ModelView
    files: list[tuple[str, int]]
    config_files: list[str]
    warnings: list[str]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.files)

    @property
    def peak_memory_nbytes(self) -> int:
        """Estimate of the most memory the run will have: what is there now and what it adds."""
        now = resident_nbytes()
        largest = max((tensor.numel * 8 for tensor in self.view.tensors), default=0)
        buffers = 2 * min(WINDOW_NBYTES, max(self.nbytes, largest))
        chunks = 12 * orbax.CHUNK_NBYTES if self.request.format == "orbax" else 0
        return now + buffers + chunks + _OVERHEAD_NBYTES


def plan_export(reader: ShardReader, request: Request) -> ExportPlan:
    """Checks everything that can be checked before a byte is written.

    Raises :class:`UsageError` for a request that cannot be met, :class:`StateMismatch` and
    :class:`ShardError` for a set that is not whole, :class:`StoreError` (ENOSPC) for a full disk.
    """
    _check_request(request)
    view = ModelView(reader, request.selection)
    warnings: list[str] = []
    config_files: list[str] = []
    if request.copy_config is not None:
        config_files = hf_config.config_files(request.copy_config)
        config = hf_config.read_config(request.copy_config)
        warnings += hf_config.check_vocabulary(config, view.tensors)
        warnings += hf_config.tie(view, config)
    total = sum(tensor.nbytes for tensor in view.tensors)
    if request.format == "safetensors":
        cut = safetensors.plan_files(view.tensors, request.max_shard_nbytes)
        files = [(file.name, file.nbytes) for file in cut]
    else:
        files = [(request.target, total)]
    local = request.target if request.format != "orbax" else orbax.local_path(request.target)
    if local is not None:
        check_apart(local, reader.store.root)
        check_target(local, directory=request.format != "torch", overwrite=request.overwrite)
        check_space(local, total)
    return ExportPlan(request, view, files, config_files, warnings)


def consolidate(plan: ExportPlan, progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Writes what :func:`plan_export` planned. The target appears whole, or not at all.

    ``progress`` gets the bytes written since its last call. Raises :class:`ShardError` where the
    set is damaged, :class:`StoreError` where the target cannot be written.
    """
    request, view = plan.request, plan.view
    if request.format == "safetensors":
        also = []
        if request.copy_config is not None:
            also.append(partial(_copy_config, request.copy_config, plan.config_files))
        safetensors.write(
            view,
            request.target,
            files=safetensors.plan_files(view.tensors, request.max_shard_nbytes),
            overwrite=request.overwrite,
            also=also,
            progress=progress,
        )
        return
    write = torch_file.write if request.format == "torch" else orbax.write
    write(
        view,
        request.target,
        tensors=view.tensors,
        overwrite=request.overwrite,
        progress=progress,
    )


def _check_request(request: Request) -> None:
    if request.max_shard_nbytes <= 0:
        raise UsageError(f"the largest file must have at least 1 byte: {request.max_shard_nbytes}")
    if request.copy_config is not None and request.format != "safetensors":
        raise UsageError("--copy-config goes with --to safetensors only")
    if request.format != "orbax" and "://" in request.target:
        raise UsageError(
            f"{request.target}: a URL goes with --to orbax only; give a local path, then copy"
        )


def _copy_config(source: str, names: list[str], directory: str) -> None:
    hf_config.copy_files(source, names, directory)
