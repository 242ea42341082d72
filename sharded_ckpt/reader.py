"""Reading: which step is loaded, and bytes of shards into memory, checked on the way.

DESIGN. Discovery is one listing of the directory (rank 0 does it and broadcasts the manifest; the
functions here know nothing of other ranks). A :class:`ShardReader` then opens headers: bytes first
against the CRC in the manifest, then the strict parser, then the identity they claim. What to read
is planned by ``plan.reads`` (pure) and done by ``engine.read``, which checks every chunk that it
touches and copies straight into the destination. Memory that the CPU cannot write to (a device
tensor) is filled through one bounce buffer, window by window, so that peak memory stays bounded.

Nothing here is executed from a file, and nothing outside the directory is opened.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_ckpt import checksum, dtypes, layout, plan, shard
from sharded_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ShardError,
    StateMismatch,
    StepNotFound,
    StoreError,
    UsageError,
)
from sharded_ckpt.layout import SetId
from sharded_ckpt.manifest import MAX_MANIFEST_NBYTES, Manifest, ShardRef
from sharded_ckpt.plan_spans import clip, split_by_want, windows
from sharded_ckpt.retention_catalog import committed_sets
from sharded_ckpt.slices import Entry, whole

if TYPE_CHECKING:
    import torch

    from sharded_ckpt.engine import Engine
    from sharded_ckpt.store import LocalStore

log = logging.getLogger(__name__)

Candidate = tuple[SetId, Manifest | CheckpointError]

# Past this a device copy gains nothing from a larger buffer, and the host pays for it.
BOUNCE_NBYTES = 64 << 20


# ---- which set -------------------------------------------------------------------------------


def candidates(store: LocalStore, step: int | None = None) -> list[Candidate]:
    """Committed sets that a load may take, best first; a damaged manifest stands as its error.

    Without ``step``: the full sets, newest first. With it: every set of that step, newest first,
    full ones before weights-only ones of the same origin.
    """
    found: list[tuple[tuple[int, int, bool], Candidate]] = []
    for set_id, manifest in committed_sets(store):
        if isinstance(manifest, Manifest):
            if step is None and manifest.content != "full":
                continue
            rank = (*manifest.rank_key, manifest.content == "full")
        else:
            rank = (set_id.term, set_id.serial, True)
        if step is None or set_id.step == step:
            found.append((rank, (set_id, manifest)))
    found.sort(key=lambda item: item[0], reverse=True)
    return [candidate for _, candidate in found]


def resolve(
    store: LocalStore, *, step: int | None = None, skip: int = 0, fallback: bool = False
) -> tuple[SetId, Manifest] | None:
    """The set that a load takes: of ``step``, or the newest full one (``skip``: not that many).

    ``None`` where the directory holds no set at all. With ``fallback``, sets whose manifest is
    damaged are logged and count as not there; otherwise the error of the manifest is raised: it
    cannot say whether its set was a full one. It names the newest sound full step below, if any.
    Raises :class:`StepNotFound` where there are sets but none that fits, and
    :class:`CorruptError` where ``skip`` has used them up.
    """
    choices = candidates(store, step)
    if fallback:
        for set_id, manifest in choices:
            if not isinstance(manifest, Manifest):
                log.error("step %d is damaged, passed over: %s", set_id.step, manifest)
        sound = [choice for choice in choices if isinstance(choice[1], Manifest)]
    else:
        sound = choices
    if skip < len(sound):
        set_id, manifest = sound[skip]
        if not isinstance(manifest, Manifest):
            raise _with_way_out(manifest, None if step is not None else _sound_step(sound))
        return set_id, manifest
    if choices:
        raise CorruptError(
            f"no undamaged step is left in {store.path()}; tried, newest first: "
            f"{', '.join(set_id.dirname for set_id, _ in choices)}; "
            "run 'python -m sharded_ckpt verify' to see what is wrong with each"
        )
    steps = sorted({set_id.step for set_id, _ in committed_sets(store)})
    if step is not None:
        there = f"committed steps there: {steps}" if steps else "no step is committed there"
        raise StepNotFound(f"step {step} is not committed in {store.path()}; {there}")
    if steps:
        raise StepNotFound(
            f"no full step in {store.path()}; steps {steps} hold weights only: name one of them"
        )
    return None


def _sound_step(choices: Iterable[Candidate]) -> int | None:
    """The newest full step that can be loaded by its number, past every damaged set above it."""
    damaged: set[int] = set()
    for set_id, manifest in choices:
        if not isinstance(manifest, Manifest):
            damaged.add(set_id.step)
        elif set_id.step not in damaged:
            return set_id.step
    return None


def _with_way_out(error: CheckpointError, step: int | None) -> CheckpointError:
    if step is None:
        return error
    way_out = (
        f"the newest sound full step below it is {step}: load(step={step}), or --step {step} on "
        "the command line"
    )
    if isinstance(error, StoreError):
        detail = f"{error.detail}; {way_out}" if error.detail else way_out
        return StoreError(error.operation, error.path, error.errno or 0, detail)
    return type(error)(f"{error}; {way_out}")


def newest(store: LocalStore) -> tuple[SetId, Manifest]:
    """The newest full set. Raises :class:`StepNotFound`, or the error of its damaged manifest."""
    found = resolve(store)
    if found is None:
        raise StepNotFound(f"no step is committed in {store.path()}")
    return found


def find(store: LocalStore, step: int) -> tuple[SetId, Manifest]:
    """The best set of ``step``. Raises :class:`StepNotFound` naming the steps that there are."""
    found = resolve(store, step=step)
    assert found is not None  # an explicit step that is not there raises
    return found


# ---- one set ---------------------------------------------------------------------------------


class ShardReader:
    """Reads tensors of one committed set. A file number in a ``plan.Read`` is a rank.

    ``directory`` is where the set's own files are, relative to the store's root; ``""`` when the
    root is the set itself (a copied step directory, whatever its name). ``names`` says which saved
    names to know of: with a thousand shards, what is not needed would fill the memory.
    """

    def __init__(
        self,
        store: LocalStore,
        engine: Engine,
        id: SetId,
        manifest: Manifest,
        *,
        directory: str | None = None,
        names: Callable[[str], bool] | None = None,
    ) -> None:
        self.store = store
        self.engine = engine
        self.id = id
        self.manifest = manifest
        self.directory = id.dirname if directory is None else directory
        self._names = names
        self._refs = {ref.rank: ref for ref in manifest.shards}
        self._headers: dict[int, shard.ShardHeader] = {}

    # -- headers

    def file(self, ref: ShardRef) -> str:
        """Name of a shard's file, relative to the store's root."""
        own = ref.directory == self.id.dirname
        directory = self.directory if own else ref.directory
        return f"{directory}/{ref.file}" if directory else ref.file

    def header(self, rank: int) -> shard.ShardHeader:
        """The checked header of ``rank``'s shard. Raises :class:`ShardError`, ``StoreError``."""
        known = self._headers.get(rank)
        if known is None:
            known = self._open(self._ref(rank))
            if self._names is not None:
                kept = [name for name in known.entries if self._names(name)]
                known.entries = {name: known.entries[name] for name in kept}
                known.spans = {name: known.spans[name] for name in kept}
            self._headers[rank] = known
        return known

    def headers(self, ranks: Iterable[int] | None = None) -> dict[int, shard.ShardHeader]:
        """Checked headers by rank: of all ranks, or of those of ``ranks`` that have a file."""
        wanted = self._refs if ranks is None else [rank for rank in ranks if rank in self._refs]
        return {rank: self.header(rank) for rank in wanted}

    def _ref(self, rank: int) -> ShardRef:
        if rank not in self._refs:
            raise ShardError(
                f"{self.id.dirname} names no shard of rank {rank}; it has {len(self._refs)} "
                f"shards, of world size {self.manifest.world_size}"
            )
        return self._refs[rank]

    def _open(self, ref: ShardRef) -> shard.ShardHeader:
        name = self.file(ref)
        path = self.store.path(name)
        nbytes = self.store.size(name)
        if nbytes != ref.nbytes:
            raise ShardError(
                f"{path} (rank {ref.rank}) has {nbytes} bytes, its manifest says {ref.nbytes}; "
                "run 'python -m sharded_ckpt verify', or load an older step",
                path=path,
                start=min(nbytes, ref.nbytes),
                end=max(nbytes, ref.nbytes),
            )
        limit = min(nbytes, shard.MAX_HEADER_NBYTES + 8)
        data = self.store.read_range(name, 0, min(ref.header_nbytes, limit))
        # The manifest's checksum first: nothing in a damaged header is worth parsing.
        found = checksum.crc32c(data)
        if found != ref.header_crc32c:
            raise ShardError(
                f"{path} (rank {ref.rank}): header crc32c {checksum.to_hex(found)}, its manifest "
                f"says {checksum.to_hex(ref.header_crc32c)} (bytes 0 to {ref.header_nbytes}); "
                "run 'python -m sharded_ckpt verify', or load an older step",
                path=path,
                start=0,
                end=ref.header_nbytes,
            )
        header = shard.parse_header(data, file_nbytes=nbytes, where=path)
        claimed = (header.id, header.rank, header.world_size)
        expected = (self.id, ref.rank, self.manifest.world_size)
        if claimed != expected:
            raise ShardError(
                f"{path} is another save's file: it claims (set, rank, world size) {claimed}, its "
                f"manifest says {expected}",
                path=path,
            )
        if file_crc32c(ref.header_crc32c, header) != ref.file_crc32c:
            raise ShardError(
                f"{path} (rank {ref.rank}): the chunk checksums in its header do not add up to "
                f"the file crc32c {checksum.to_hex(ref.file_crc32c)} in its manifest",
                path=path,
                start=0,
                end=ref.header_nbytes,
            )
        return header

    # -- names

    def entries(self, ranks: Iterable[int] | None = None) -> dict[str, Entry]:
        """One entry of every saved name, of the lowest rank that has it."""
        return {name: held[0].entry for name, held in self.holdings(ranks).items()}

    def holdings(self, ranks: Iterable[int] | None = None) -> dict[str, list[plan.Holding]]:
        """Who holds what: for each saved name its pieces, by ascending rank (default: all)."""
        found: dict[str, list[plan.Holding]] = {}
        for rank, header in sorted(self.headers(ranks).items()):
            for name, entry in header.entries.items():
                holding = plan.Holding(file=rank, entry=entry, data_start=header.spans[name][0])
                found.setdefault(name, []).append(holding)
        return found

    def state_tree(self, rank: int, ranks: Iterable[int] | None = None) -> Any:
        """The tagged tree that ``rank`` saved; ``None`` where it has none, or is not in ``ranks``.

        A rank without a file has none: the step was saved with fewer ranks.
        """
        if rank not in self._refs or (ranks is not None and rank not in set(ranks)):
            return None
        return self.header(rank).state

    # -- bytes

    def read(self, reads: Iterable[plan.Read], addresses: Sequence[int]) -> None:
        """Does ``reads``: ``addresses[read.want]`` is host memory that holds the wanted bytes.

        Every chunk touched is checked. Raises :class:`ShardError` naming file, tensors and bytes;
        what was filled by then stays filled.
        """
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for read in reads:
            if read.nbytes:
                address = addresses[read.want] + read.dest_start_bytes
                spans.setdefault(read.file, []).append((read.data_start, read.nbytes, address))
        for rank in sorted(spans):
            ref, header = self._ref(rank), self.header(rank)
            try:
                self.engine.read(
                    self.store.path(self.file(ref)),
                    header_nbytes=header.header_nbytes,
                    data_nbytes=header.data_nbytes,
                    chunk_nbytes=header.chunk_nbytes,
                    crcs=header.crcs,
                    spans=sorted(spans[rank]),
                )
            except ShardError as error:
                names = tensors_in(header, error.start, error.end)
                raise ShardError(
                    f"{error} (step {self.id.step}, rank {rank}"
                    + (f", in {', '.join(names[:4])}" if names else "")
                    + "); run 'python -m sharded_ckpt verify', or load an older step",
                    path=error.path,
                    start=error.start,
                    end=error.end,
                ) from error

    def fill(self, reads: Iterable[plan.Read], tensors: Sequence[Any]) -> int:
        """Does ``reads`` into ``tensors[read.want]``; returns the number of bytes filled.

        Tensors are contiguous: torch tensors on any device, or numpy arrays. Raises as
        :meth:`read` does, and :class:`UsageError` before anything is touched.
        """
        split = split_by_want(reads, len(tensors))
        for i, tensor in enumerate(tensors):
            _check_destination(i, tensor, split[i])
        device = [i for i, tensor in enumerate(tensors) if _needs_bounce(tensor)]
        addresses = [0 if _needs_bounce(tensor) else _address(tensor) for tensor in tensors]
        behind_bounce = set(device)
        host = (read for part in split for read in part if read.want not in behind_bounce)
        self.read(host, addresses)
        if device:
            self._fill_through_bounce([tensors[i] for i in device], [split[i] for i in device])
        return sum(read.nbytes for part in split for read in part)

    def _fill_through_bounce(
        self, tensors: Sequence[torch.Tensor], reads: Sequence[Sequence[plan.Read]]
    ) -> None:
        import torch

        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        sizes = [len(tensor) for tensor in flat]
        pin = any(tensor.is_cuda for tensor in tensors)
        length = min(BOUNCE_NBYTES, sum(sizes))
        bounce = torch.empty(length, dtype=torch.uint8, pin_memory=pin)
        for window in windows(sizes, [1] * len(sizes), BOUNCE_NBYTES):
            todo: list[plan.Read] = []
            moves: list[tuple[torch.Tensor, int]] = []
            at = 0
            for i, start, end in window:
                todo.extend(clip(reads[i], 0, start, end, at))
                moves.append((flat[i][start:end], at))
                at += end - start
            self.read(todo, [bounce.data_ptr()])
            for part, begin in moves:
                part.copy_(bounce[begin : begin + len(part)])

    # -- whole tensors, for what is small

    def array(self, name: str, *, rank: int | None = None) -> np.ndarray[Any, Any]:
        """All of one tensor as raw little-endian bytes: uint8, 1-D. ``rank`` prefers its copy."""
        wanted, reads = self._whole(name, rank)
        data = np.empty(_nbytes(wanted), dtype=np.uint8)
        self.fill(reads, [data])
        return data

    def tensor(self, name: str, *, rank: int | None = None) -> torch.Tensor:
        """All of one tensor on the CPU, in its global shape. ``rank`` prefers its own copy."""
        import torch

        wanted, reads = self._whole(name, rank)
        filled = torch.empty(wanted.shape, dtype=dtypes.to_torch(wanted.dtype))
        self.fill(reads, [filled])
        return filled

    def tensor_of(self, rank: int) -> Callable[[str], torch.Tensor]:
        """The loader that ``tree.decode`` wants, for a tree that ``rank`` saved."""
        return lambda name: self.tensor(name, rank=rank)

    def _whole(self, name: str, rank: int | None) -> tuple[Entry, list[plan.Read]]:
        held: list[plan.Holding] = []
        if rank is not None and rank in self._refs:
            held = self.holdings([rank]).get(name, [])
            held = [one for one in held if one.entry.region.numel == math.prod(one.entry.shape)]
        held = held or self.holdings().get(name, [])
        if not held:
            raise StateMismatch(f"{self.id.dirname} holds no tensor {name!r}")
        wanted = replace(held[0].entry, region=whole(held[0].entry.shape))
        return wanted, plan.reads([wanted], {name: held}, prefer_file=rank)


# ---- small helpers ---------------------------------------------------------------------------


def file_crc32c(header_crc32c: int, header: shard.ShardHeader) -> int:
    """CRC32C of a whole shard file, from that of its header and those of its chunks."""
    crc = header_crc32c
    for i, chunk in enumerate(header.crcs):
        start = i * header.chunk_nbytes
        length = min(header.chunk_nbytes, header.data_nbytes - start)
        crc = checksum.combine(crc, chunk, length)
    return crc


def read_manifest(store: LocalStore, directory: str) -> Manifest:
    """The manifest of one directory (``""``: the store's root). Raises ``ManifestError``."""
    name = f"{directory}/{layout.MANIFEST}" if directory else layout.MANIFEST
    data = store.read(name, MAX_MANIFEST_NBYTES)
    return Manifest.from_bytes(data, store.path(name))


def tensors_in(header: shard.ShardHeader, start: int | None, end: int | None) -> list[str]:
    """Names of the tensors that have bytes in ``start..end`` of the file."""
    if start is None or end is None:
        return []
    low, high = start - header.header_nbytes, end - header.header_nbytes
    return [name for name, (a, b) in header.spans.items() if a < high and b > low and a < b]


def _nbytes(entry: Entry) -> int:
    return entry.numel * dtypes.by_name(entry.dtype).itemsize


def _needs_bounce(tensor: Any) -> bool:
    return not isinstance(tensor, np.ndarray) and tensor.device.type != "cpu"


def _address(tensor: Any) -> int:
    if isinstance(tensor, np.ndarray):
        return int(tensor.ctypes.data)
    return int(tensor.data_ptr())


def _check_destination(index: int, tensor: Any, reads: Sequence[plan.Read]) -> None:
    if isinstance(tensor, np.ndarray):
        contiguous, nbytes = bool(tensor.flags.c_contiguous), int(tensor.nbytes)
    else:
        contiguous, nbytes = tensor.is_contiguous(), tensor.numel() * tensor.element_size()
    expected = sum(read.nbytes for read in reads)
    if not contiguous or nbytes != expected:
        raise UsageError(
            f"destination {index} must be contiguous and hold the {expected} bytes planned for "
            f"it, got {nbytes} bytes, contiguous: {contiguous}"
        )
