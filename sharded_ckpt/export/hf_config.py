"""Configuration and tokenizer files beside exported weights, and whether they fit together."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from sharded_ckpt.errors import UsageError
from sharded_ckpt.export.stream import Exported, Role
from sharded_ckpt.export.weights import ModelView
from sharded_ckpt.store_output import copy_file, read_small

CONFIG = "config.json"
_MAX_CONFIG_NBYTES = 16 << 20

# What from_pretrained and the tokenizers read. Code (*.py) is never copied.
_PATTERNS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "sentencepiece*.model",
    "spiece.model",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "chat_template*",
)
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "shared.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight")


def config_files(source: str) -> list[str]:
    """Names of the files of ``source`` that belong beside weights. Raises :class:`UsageError`."""
    if not os.path.isdir(source):
        raise UsageError(f"--copy-config {source}: not a directory")
    names = sorted(
        name
        for name in os.listdir(source)
        if not name.endswith(".py")
        and os.path.isfile(os.path.join(source, name))
        and any(fnmatch.fnmatch(name, pattern) for pattern in _PATTERNS)
    )
    if CONFIG not in names:
        raise UsageError(f"--copy-config {source}: there is no {CONFIG} in it")
    return names


def copy_files(source: str, names: Sequence[str], target: str) -> None:
    """Copies ``names`` and flushes them to the disk."""
    for name in names:
        copy_file(os.path.join(source, name), os.path.join(target, name))


def read_config(source: str) -> dict[str, Any]:
    """``config.json`` of ``source``. Raises :class:`UsageError` where it is not a JSON object."""
    path = os.path.join(source, CONFIG)
    try:
        found = json.loads(read_small(path, _MAX_CONFIG_NBYTES))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object")
    return found


def check_vocabulary(config: dict[str, Any], tensors: Sequence[Exported]) -> list[str]:
    """Warnings where the vocabulary of the config is not that of the embedding."""
    embedding = _ending(tensors, _EMBEDDINGS)
    text_config = config.get("text_config")
    sizes = text_config if isinstance(text_config, dict) and "vocab_size" in text_config else config
    if embedding is None or "vocab_size" not in sizes:
        return []
    rows, said = embedding.shape[0], sizes["vocab_size"]
    if rows == said:
        return []
    return [
        f"{CONFIG} says vocab_size {said}, but {embedding.name} has {rows} rows; "
        f"correct vocab_size to {rows}, or from_pretrained will refuse or cut the weights"
    ]


def tie(view: ModelView, config: dict[str, Any]) -> list[str]:
    """Brings tied embeddings in line with the config: one copy where both are equal.

    Drops the head from ``view.tensors`` and records it as an alias when the config ties it and the
    two tensors are equal, bit for bit; otherwise both stay. Returns warnings.
    """
    tied = config.get("tie_word_embeddings")
    heads = [alias for alias in view.aliases if alias.endswith(_HEADS)]
    if tied is False and heads:
        return [
            f"{CONFIG} says tie_word_embeddings false, but {heads[0]} is tied to "
            f"{view.aliases[heads[0]]} and written once; set it to true, or from_pretrained "
            "will start with a random head"
        ]
    head, embedding = _ending(view.tensors, _HEADS), _ending(view.tensors, _EMBEDDINGS)
    if not tied or head is None or embedding is None:
        return []
    alike = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if alike and _digest(view, head) == _digest(view, embedding):
        view.tensors.remove(head)
        view.aliases[head.name] = embedding.name
        return []
    return [
        f"{CONFIG} says tie_word_embeddings true, but {head.name} and {embedding.name} DIFFER; "
        "both are written, and from_pretrained will use only the embedding: set "
        "tie_word_embeddings to false if they were trained apart"
    ]


def _ending(tensors: Sequence[Exported], endings: tuple[str, ...]) -> Exported | None:
    """The first weight so named; masters and optimizer state may have such names, too."""
    found = [
        tensor
        for tensor in tensors
        if tensor.role is Role.WEIGHT
        and tensor.shape
        and any(f".{tensor.name}".endswith(f".{end}") for end in endings)
    ]
    return found[0] if found else None


def _digest(view: ModelView, tensor: Exported) -> bytes:
    digest = hashlib.blake2b()
    for piece in view.stream([tensor]):
        digest.update(piece.buffer)
    return digest.digest()
