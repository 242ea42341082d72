"""Non-tensor state <-> JSON, by an allow-list of types. docs/format.md, "Tagged tree".

JSON's own values stand for themselves; everything else is an object ``{"$": tag, ...}``. A value
whose type is not on the list is refused with the path that leads to it, before anything is
written: a checkpoint must never hold what only the process that wrote it can read. Types are
compared exactly, because a subclass would come back as its base class, which is another value.

Also here: :func:`parse_json`, the strict reader that manifests and shard headers share.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharded_ckpt import dtypes
from sharded_ckpt.errors import CorruptError, StateTypeError, UnsupportedError

Json = Any  # what json.loads returns

MAX_DEPTH = 100  # of values; one value is at most three levels of JSON
MAX_INT_BITS = 4096  # numpy's generators need 128; Python refuses to parse more than 4300 digits

_TAG = "$"
_FACTORIES: dict[str, type] = {
    t.__name__: t for t in (bool, dict, float, int, list, set, str, tuple)
}
_NUMPY_SCALARS: dict[str, type[np.generic]] = {
    np.dtype(t).name: t
    for t in (
        *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128, np.bool_),
    )
}
_NUMPY_ARRAYS = frozenset(np.dtype(d.numpy_name) for d in dtypes.BY_NAME.values() if d.numpy_name)

_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, defaultdict, "
    "Counter, set, frozenset, numpy numbers and arrays, torch tensors, torch.dtype, torch.Size, "
    "torch.device"
)
# What people put into state most often, and what to write instead. First match wins.
_HINTS = (
    ("Namespace", "use vars(x)"),
    ("DTensor", "keep it in the model or the optimizer, or use x.full_tensor()"),
    ("FakeTensor", "it has no data; use a real tensor"),
    ("Module", "use x.state_dict(), or pass x in stateful="),
    ("Optimizer", "use x.state_dict()"),
    ("Generator", "use its state: x.get_state(), or x.bit_generator.state for numpy"),
    ("Enum", "use x.value or x.name"),
    ("PurePath", "use str(x)"),
    ("date", "use x.isoformat()"),
    ("Decimal", "use str(x)"),
    ("deque", "use list(x)"),
    ("DictConfig", "use OmegaConf.to_container(x)"),
    ("ndarray", "use np.asarray(x) with a plain bool, integer or float dtype"),
    ("Tensor", "use a plain dense tensor with data"),
    ("str_", "use str(x)"),
    ("bytearray", "use bytes(x)"),
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tagged tree, and the live tensors (``torch.Tensor`` or ``ndarray``) that it refers to."""

    tree: Json
    tensors: dict[str, Any]


def encode(value: Any, *, path: str, prefix: str) -> Encoded:
    """Turn ``value`` into a tagged tree; tensors are referenced by name, not copied.

    ``path`` is what error messages call the value (``client_state``); tensors are named ``prefix``
    plus the dotted keys that lead to them (``state/ema.weight``). Raises :class:`StateTypeError`.
    """
    encoder = _Encoder(prefix)
    return Encoded(encoder.encode(value, path, ()), encoder.tensors)


def decode(tree: Json, tensor: Callable[[str], Any]) -> Any:
    """The value that ``tree`` stands for; ``tensor(name)`` gives the tensors it refers to.

    Arrays that were numpy's are numpy's again, dtype kept. Raises :class:`CorruptError` when the
    tree is not one that :func:`encode` makes. Runs nothing that the tree could choose.
    """
    try:
        return _decode(tree, tensor)
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CorruptError(
            f"non-tensor state is not a tagged tree: {type(error).__name__}: {error}; "
            "run 'python -m sharded_ckpt verify' on the step"
        ) from error


def tensor_names(tree: Json) -> list[str]:
    """Names of the tensors that ``tree`` refers to, in the order of the tree."""
    return list(_tensor_names(tree))


def _tensor_names(tree: Json) -> Iterator[str]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(reversed(node))
        elif isinstance(node, dict):
            if node.get(_TAG) == "tensor" and isinstance(node.get("name"), str):
                yield node["name"]
            else:
                pending.extend(reversed(node.values()))


def parse_json(data: bytes) -> Json:
    """Parse strictly: UTF-8, no duplicate keys, no NaN or infinity. Raises :class:`ValueError`.

    The size of ``data`` is the caller's to bound; depth is bounded here.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice in one object")
    return made


def _no_constant(text: str) -> Json:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text} is out of range")
    return value


@dataclass(slots=True)
class _Encoder:
    prefix: str
    tensors: dict[str, Any] = field(default_factory=dict)
    open_ids: list[int] = field(default_factory=list)  # the containers around the current value

    def encode(self, value: Any, path: str, keys: tuple[str, ...]) -> Json:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            if value.bit_length() > MAX_INT_BITS:
                raise StateTypeError(f"{path}: an int of more than {MAX_INT_BITS} bits; use bytes")
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        if kind is bytes:
            return {_TAG: "bytes", "base64": base64.b64encode(value).decode("ascii")}
        if kind is complex:
            parts = [self.encode(part, path, keys) for part in (value.real, value.imag)]
            return {_TAG: "complex", "value": parts}
        if isinstance(value, np.generic) and value.dtype.name in _NUMPY_SCALARS:
            item = self.encode(value.item(), path, keys)
            return {_TAG: "numpy", "dtype": value.dtype.name, "value": item}
        if kind is np.ndarray:
            return self._array(value, path, keys)
        torch = sys.modules.get("torch")  # a torch value exists only where torch was imported
        if torch is not None:
            if kind in (torch.Tensor, torch.nn.Parameter):
                return self._tensor(torch, value, path, keys)
            if kind is torch.dtype:
                return {_TAG: "torch.dtype", "value": str(value).removeprefix("torch.")}
            if kind is torch.device:
                return {_TAG: "torch.device", "value": str(value)}
            if kind is torch.Size:
                return {_TAG: "torch.Size", "value": list(value)}
        return self._container(value, path, keys)

    def _container(self, value: Any, path: str, keys: tuple[str, ...]) -> Json:
        if id(value) in self.open_ids:
            raise StateTypeError(f"{path}: the object contains itself; store it once, by value")
        if len(self.open_ids) >= MAX_DEPTH:
            raise StateTypeError(f"{path[:200]}: nested deeper than {MAX_DEPTH} levels; flatten it")
        self.open_ids.append(id(value))
        try:
            kind = type(value)
            if kind is list:
                return self._items(value, path, keys)
            if kind is tuple:
                return {_TAG: "tuple", "items": self._items(value, path, keys)}
            if kind in (set, frozenset):
                return {_TAG: kind.__name__, "items": self._items(_ordered(value), path, keys)}
            if kind is dict and all(type(k) is str and not k.startswith(_TAG) for k in value):
                return {
                    self._text(k, path): self.encode(v, f"{path}[{k!r}]", (*keys, k))
                    for k, v in value.items()
                }
            if kind in (dict, OrderedDict, Counter):
                return {_TAG: kind.__name__, "items": self._pairs(value, path, keys)}
            if kind is defaultdict:
                factory = value.default_factory
                if factory is not None and factory not in _FACTORIES.values():
                    raise StateTypeError(
                        f"{path}: a defaultdict whose factory is {factory!r}, which is code; "
                        f"allowed factories: {', '.join(_FACTORIES)}; use dict(x)"
                    )
                name = None if factory is None else factory.__name__
                pairs = self._pairs(value, path, keys)
                return {_TAG: "defaultdict", "factory": name, "items": pairs}
        finally:
            self.open_ids.pop()
        raise _refusal(value, path)

    def _items(self, values: Sequence[Any], path: str, keys: tuple[str, ...]) -> list[Json]:
        return [
            self.encode(item, f"{path}[{index}]", (*keys, str(index)))
            for index, item in enumerate(values)
        ]

    def _pairs(self, mapping: Any, path: str, keys: tuple[str, ...]) -> list[Json]:
        pairs = []
        for key, item in mapping.items():
            before = len(self.tensors)
            encoded = self.encode(key, f"{path}, key {key!r:.100}", keys)
            if len(self.tensors) != before:
                raise StateTypeError(f"{path}: a key holds a tensor; use a name or a number as key")
            below = self.encode(item, f"{path}[{key!r:.100}]", (*keys, str(key)))
            pairs.append([encoded, below])
        return pairs

    def _text(self, value: str, path: str) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise StateTypeError(
                f"{path}: string {value!r:.100} holds a lone surrogate, which no file can hold; "
                "use bytes, for a file name os.fsencode(x)"
            ) from None
        return value

    def _array(self, value: Any, path: str, keys: tuple[str, ...]) -> Json:
        if value.dtype not in _NUMPY_ARRAYS:
            raise StateTypeError(
                f"{path}: a numpy array of dtype {value.dtype!r}, which safetensors cannot hold; "
                "use x.astype(...) to a native bool, integer or float dtype, or x.tolist()"
            )
        return {_TAG: "tensor", "name": self._name(value, keys), "numpy": value.dtype.name}

    def _tensor(self, torch: Any, value: Any, path: str, keys: tuple[str, ...]) -> Json:
        dense = value.layout is torch.strided and not value.is_quantized
        if not dense or value.device.type == "meta":
            raise _refusal(value, path)
        try:
            dtypes.from_torch(value.dtype, path)
        except UnsupportedError as error:
            raise StateTypeError(str(error)) from None
        node = {_TAG: "tensor", "name": self._name(value.detach(), keys)}
        if type(value) is torch.nn.Parameter:
            node["parameter"] = value.requires_grad
        return node

    def _name(self, tensor: Any, keys: tuple[str, ...]) -> str:
        """A name that no other tensor of this tree has: keys may hold dots, or print alike."""
        dotted = ".".join(keys) or "value"
        wanted = self.prefix + "".join(c if c.isprintable() else "_" for c in dotted[:400])
        name, count = wanted, 1
        while name in self.tensors:
            count += 1
            name = f"{wanted}~{count}"
        self.tensors[name] = tensor
        return name


def _ordered(values: set[Any] | frozenset[Any]) -> list[Any]:
    """The elements in an order that does not depend on the process's hash seed."""
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=lambda item: (type(item).__name__, repr(item)))


def _refusal(value: Any, path: str) -> StateTypeError:
    kind = type(value)
    names = [base.__name__ for base in kind.__mro__]
    hint = next((text for name, text in _HINTS if name in names), None)
    if hint is None:
        if hasattr(kind, "__dataclass_fields__"):
            hint = "use dataclasses.asdict(x)"
        elif hasattr(kind, "_asdict"):
            hint = "use x._asdict() or tuple(x)"
        elif callable(value):
            hint = "code is never stored; store a name and look it up after loading"
        else:
            hint = (
                "store its parts as these types, or pass an object with state_dict() in stateful="
            )
    return StateTypeError(
        f"{path}: an object of type {kind.__module__}.{kind.__qualname__} cannot be stored; {hint} "
        f"(allowed, exactly: {_ALLOWED})"
    )


def _decode(tree: Json, tensor: Callable[[str], Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: _decode(item, tensor) for key, item in tree.items()}
    tag = tree[_TAG]
    if not isinstance(tag, str) or tag not in _DECODERS:
        raise ValueError(f"unknown tag {tag!r}; a newer version of the package may know it")
    return _DECODERS[tag](tree, tensor)


Tensors = Callable[[str], Any]


def _decode_float(node: Json, _tensor: Tensors) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[node["value"]]


def _decode_bytes(node: Json, _tensor: Tensors) -> bytes:
    try:
        return base64.b64decode(node["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"bad base64: {error}") from None


def _decode_complex(node: Json, tensor: Tensors) -> complex:
    real, imag = (_decode(part, tensor) for part in node["value"])
    return complex(real, imag)


def _decode_numpy(node: Json, tensor: Tensors) -> np.generic:
    made: np.generic = _NUMPY_SCALARS[node["dtype"]](_decode(node["value"], tensor))
    return made


def _decode_tensor(node: Json, tensor: Tensors) -> Any:
    value = tensor(node["name"])
    if "numpy" in node:
        array = value if isinstance(value, np.ndarray) else value.numpy()
        if array.dtype.name != node["numpy"]:
            raise ValueError(f"{node['name']} is {array.dtype.name}, not {node['numpy']}")
        return array
    if "parameter" in node:
        import torch

        return torch.nn.Parameter(value, requires_grad=bool(node["parameter"]))
    return value


def _decode_torch(node: Json, _tensor: Tensors) -> Any:
    import torch

    if node[_TAG] == "torch.Size":
        return torch.Size(node["value"])
    if node[_TAG] == "torch.device":
        try:
            return torch.device(node["value"])
        except RuntimeError:
            raise ValueError(f"{node['value']!r:.100} is not a torch device") from None
    found = getattr(torch, node["value"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{node['value']!r} is not a torch dtype")
    return found


def _decode_mapping(node: Json, tensor: Tensors) -> Any:
    pairs = [(_decode(key, tensor), _decode(item, tensor)) for key, item in node["items"]]
    made: Any = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}.get(node[_TAG])
    if made is None:
        factory = node["factory"]
        made = defaultdict(None if factory is None else _FACTORIES[factory])
    else:
        made = made()
    for key, item in pairs:
        made[key] = item
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one mapping")
    return made


def _decode_items(node: Json, tensor: Tensors) -> Any:
    kinds: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[node[_TAG]](_decode(item, tensor) for item in node["items"])


_DECODERS: dict[str, Callable[[Json, Tensors], Any]] = {
    "float": _decode_float,
    "bytes": _decode_bytes,
    "complex": _decode_complex,
    "numpy": _decode_numpy,
    "tensor": _decode_tensor,
    "torch.dtype": _decode_torch,
    "torch.Size": _decode_torch,
    "torch.device": _decode_torch,
    "dict": _decode_mapping,
    "OrderedDict": _decode_mapping,
    "Counter": _decode_mapping,
    "defaultdict": _decode_mapping,
    "tuple": _decode_items,
    "set": _decode_items,
    "frozenset": _decode_items,
}
