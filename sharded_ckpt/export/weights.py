"""The model inside a shard set: which tensors an export holds, under which names and dtypes.

Which copy is exported: with the model's own dtype (the default, or asked for) exactly the weights
that the model computed with, overrides included; with any other dtype the cast of the master.
Integers and bools are never cast, and buffers keep their own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sharded_ckpt import plan
from sharded_ckpt.errors import ShardError, StateMismatch, UsageError
from sharded_ckpt.export.cast import CASTABLE
from sharded_ckpt.export.stream import Exported, Piece, Role, TensorStream
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.reader import ShardReader
from sharded_ckpt.slices import Entry


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors an export holds, and how: the user's choices.

    ``dtype`` is a name of ``dtypes`` or ``None`` (each weight's own dtype). ``strip_prefixes`` are
    taken off the front of names, each once, in order.
    """

    dtype: str | None = None
    optimizer: bool = False
    trainable_only: bool = False
    strip_prefixes: tuple[str, ...] = ()


def wanted_names(selection: Selection) -> Callable[[str], bool]:
    """Which saved names a reader has to know of for ``selection``."""
    kinds = {"model", "master", "buffer"}
    if selection.optimizer or selection.trainable_only:
        kinds.add("optim")
    return lambda name: name.split("/", 1)[0] in kinds


class ModelView:
    """The tensors of one set that ``selection`` asks for, in natural order of their names.

    Raises :class:`StateMismatch` where the pieces on disk do not make whole tensors, each element
    exactly once, naming the tensors; :class:`ShardError` where shards are missing.
    """

    def __init__(self, reader: ShardReader, selection: Selection) -> None:
        self.reader = reader
        self.manifest: Manifest = reader.manifest
        require_shards(reader)
        self._holdings = reader.holdings()
        self._check_coverage()
        self._strip = selection.strip_prefixes
        self.aliases = {
            self._renamed(alias): self._renamed(name)
            for alias, name in sorted(self.manifest.aliases.items())
        }
        self.tensors = self._select(selection)
        self._check_names()
        self._stream = TensorStream(reader, self._holdings)

    def stream(self, tensors: Sequence[Exported]) -> Iterator[Piece]:
        """Every element of ``tensors``, in order. Raises :class:`ShardError` on damage."""
        return self._stream.pieces(tensors)

    def _check_coverage(self) -> None:
        layouts = {rank: list(h.entries.values()) for rank, h in self.reader.headers().items()}
        problems = plan.coverage(layouts)
        if problems:
            raise StateMismatch(
                f"{self.reader.id.dirname} does not make whole tensors: {'; '.join(problems[:8])}"
                f"{f'; and {len(problems) - 8} more' if len(problems) > 8 else ''}"
            )

    def _select(self, selection: Selection) -> list[Exported]:
        by_kind: dict[str, dict[str, Entry]] = {}
        for name, held in self._holdings.items():
            kind, _, rest = name.partition("/")
            by_kind.setdefault(kind, {})[rest] = held[0].entry
        masters, models = by_kind.get("master", {}), by_kind.get("model", {})
        trained = _trained(masters, by_kind.get("optim", {}))
        if selection.trainable_only and not trained:
            raise UsageError(
                f"{self.reader.id.dirname} does not tell trainable from frozen parameters: it has "
                "neither masters nor optimizer state; leave out --only-trainable"
            )
        found: list[Exported] = []
        for name in {**masters, **models}:
            if not selection.trainable_only or name in trained:
                found += self._weight(name, masters.get(name), models.get(name), selection)
        if not selection.trainable_only:
            for name, entry in by_kind.get("buffer", {}).items():
                found.append(Exported(self._renamed(name), Role.BUFFER, entry.dtype, entry))
        if selection.optimizer:
            for name, entry in by_kind.get("optim", {}).items():
                fqn, _, state = name.rpartition("/")
                full = f"optim/{self._renamed(fqn)}/{state}" if fqn else f"optim/{name}"
                found.append(Exported(full, Role.OPTIM, entry.dtype, entry))
        return sorted(found, key=lambda tensor: natural_key(tensor.name))

    def _weight(
        self, name: str, master: Entry | None, model: Entry | None, selection: Selection
    ) -> list[Exported]:
        base = master or model
        assert base is not None
        own = base.model_dtype or (model.dtype if model is not None else base.dtype)
        dtype = own
        if selection.dtype is not None and own in CASTABLE:
            dtype = selection.dtype
        override = model.name if master and model and model.dtype == dtype else ""
        full = self._renamed(name)
        made = [Exported(full, Role.WEIGHT, dtype, base, override)]
        if selection.optimizer and master is not None and master.dtype != dtype:
            made.append(Exported(f"master/{full}", Role.OPTIM, master.dtype, master))
        return made

    def _renamed(self, name: str) -> str:
        for prefix in self._strip:
            name = name.removeprefix(prefix)
        return name

    def _check_names(self) -> None:
        names: dict[str, str] = {}
        for tensor in self.tensors:
            other = names.setdefault(tensor.name, tensor.base.name)
            if other != tensor.base.name:
                raise UsageError(
                    f"two tensors would be called {tensor.name!r}: {other} and "
                    f"{tensor.base.name}; strip less"
                )
        self.aliases = {a: n for a, n in self.aliases.items() if n in names and a not in names}
        if not names:
            raise StateMismatch(f"{self.reader.id.dirname} holds no tensor that this export wants")


def require_shards(reader: ShardReader) -> None:
    """Raises :class:`ShardError` that lists the ranks whose shard files are not there."""
    gone = [ref for ref in reader.manifest.shards if not reader.store.exists(reader.file(ref))]
    if gone:
        listed = ", ".join(f"rank {ref.rank} ({ref.file})" for ref in gone[:16])
        more = f" and {len(gone) - 16} more" if len(gone) > 16 else ""
        raise ShardError(
            f"{len(gone)} of {len(reader.manifest.shards)} shards are missing in "
            f"{reader.store.path(reader.directory)}: {listed}{more}; copy them there",
            path=reader.store.path(reader.file(gone[0])),
        )


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.10`` behind ``layers.9``."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def _trained(masters: Mapping[str, Entry], optim: Mapping[str, Entry]) -> set[str]:
    """Names of parameters that an optimizer owns: what has a master, or state of its own."""
    return set(masters) | {name.rpartition("/")[0] for name in optim}
