"""The rules of the house, read from the source itself: layers, sizes, file access, exports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sharded_ckpt"

# Each layer may import only those before it. A module whose noun needed two files has its layer's
# name as a prefix (engine_python belongs to engine); a directory is one layer.
LAYERS = (
    "errors",
    "layout",
    "dtypes",
    "tree",
    "checksum",
    "slices",
    "manifest",
    "shard",
    "policy",
    "keep",
    "plan",
    "events",
    "store",
    "engine",
    "device",
    "staging",
    "handle",
    "rng",
    "group",
    "votes",
    "terms",
    "opening",
    "coordinator",
    "retention",
    "reader",
    "thin",
    "sources",
    "capture",
    "saver",
    "pending",
    "preemption",
    "schedule",
    "loader",
    "checkpointer",
    "export",
    "cli",
    "integrations",
)
ANYWHERE = {"_version", "_C"}
EXCEPTIONS = {
    ("checkpointer", "integrations"): "install() hands over to the adapter, imported when called",
}
# Adapters know their frameworks. Elsewhere heavy imports stay inside functions, so that the commit
# path and the command line start in milliseconds.
ADAPTERS = {"sources", "integrations"}
HEAVY = {"torch", "deepspeed", "transformers", "tensorstore", "jax", "orbax"}

EXPORTS = 15
MAX_LINES = {".py": 500, ".sh": 200, ".cc": 400, ".h": 400}


def python_files(*tops: str) -> list[Path]:
    found = [p for top in tops for p in (ROOT / top).rglob("*.py")]
    return sorted([*found, *ROOT.glob("*.py")] if "." in tops else found)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def where(path: Path, node: ast.AST | int) -> str:
    line = node if isinstance(node, int) else getattr(node, "lineno", 0)
    return f"{path.relative_to(ROOT)}:{line}"


def layer_of(module: tuple[str, ...]) -> str | None:
    """The layer of a module below the package, given as its path: ("sources", "fsdp")."""
    first = module[0]
    if first in LAYERS or first in ANYWHERE:
        return first
    prefixes = [layer for layer in LAYERS if first.startswith(layer + "_")]
    return max(prefixes, key=len) if prefixes else None


def module_path(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def internal_imports(path: Path) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Every module of this package that ``path`` imports, inside functions and for types too."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += (node.module or "").split(".") if node.module else []
            # ``from sharded_ckpt import store``: each name is a module; deeper, the base is one.
            names = [[*base, a.name] for a in node.names] if base == ["sharded_ckpt"] else [base]
        else:
            continue
        for name in names:
            if name[0] == "sharded_ckpt" and len(name) > 1:
                yield node, tuple(name[1:])


def test_every_module_has_a_layer() -> None:
    free = {"__init__.py", "__main__.py", "_version.py"}
    unknown = [
        str(p.relative_to(ROOT))
        for p in python_files("sharded_ckpt")
        if p.name not in free and layer_of(module_path(p)) is None
    ]
    assert unknown == [], "name the layer as a prefix, or add the noun to LAYERS"
    used = {layer_of(module_path(p)) for p in python_files("sharded_ckpt")}
    assert [layer for layer in LAYERS if layer not in used] == [], "layers without a module"


def test_imports_go_down_the_layers_only() -> None:
    wrong = []
    for path in python_files("sharded_ckpt"):
        own = layer_of(module_path(path))
        if own is None or own in ANYWHERE:
            continue  # __init__ and __main__ stand above all layers
        for node, module in internal_imports(path):
            other = layer_of(module)
            if other in ANYWHERE:
                continue
            if (own, other) in EXCEPTIONS:
                continue
            if other is None or LAYERS.index(other) > LAYERS.index(own):
                wrong.append(f"{where(path, node)}: {own} must not import {'.'.join(module)}")
    assert wrong == []


def runtime_imports(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Top-level packages imported when the module itself is: not in functions, not for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((child, alias.name.split(".")[0]) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield child, (child.module or "").split(".")[0]
        else:
            yield from runtime_imports(child)


def test_the_core_imports_no_framework() -> None:
    wrong = [
        f"{where(path, node)}: imports {name}"
        for path in python_files("sharded_ckpt")
        if layer_of(module_path(path)) not in ADAPTERS
        for node, name in runtime_imports(parsed(path))
        if name in HEAVY
    ]
    assert wrong == []


def test_the_commit_path_and_the_command_line_start_without_torch() -> None:
    code = (
        "import sys, sharded_ckpt, sharded_ckpt.coordinator, sharded_ckpt.retention;"
        "import sharded_ckpt.reader, sharded_ckpt.cli;"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_no_file_is_too_long() -> None:
    tops = ("sharded_ckpt", "csrc", "tests", "scripts", "examples", "benchmarks")
    files = [p for top in tops for p in (ROOT / top).rglob("*") if p.suffix in MAX_LINES]
    long = {
        str(p.relative_to(ROOT)): n
        for p in files
        if (n := len(p.read_text().splitlines())) > MAX_LINES[p.suffix]
    }
    assert long == {}


# P8: nothing that turns bytes into running code, and no collective of torch that pickles.
CODE_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
CODE_BUILTINS = {"eval", "exec", "compile", "__import__"}
CODE_CALLS = re.compile(
    r"(torch\.load|torch\.jit\.load|(np|numpy)\.(load|save|savez)|"
    r"(\w+\.)*(all_gather_object|gather_object|broadcast_object_list|scatter_object_list|"
    r"send_object_list|recv_object_list)|yaml\.(load|unsafe_load))\Z"
)
# torch.save pickles; writing a torch file is what `consolidate --to torch` is asked for.
TORCH_SAVE_ONLY_IN = "export"


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node, ast.unparse(node.func)


def test_p8_nothing_runs_code_from_files() -> None:
    wrong = []
    for path in python_files("sharded_ckpt"):
        for node in ast.walk(parsed(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            wrong += [f"{where(path, node)}: imports {n}" for n in names if n in CODE_MODULES]
        for call, name in calls(path):
            if name in CODE_BUILTINS or CODE_CALLS.match(name):
                wrong.append(f"{where(path, call)}: calls {name}")
            if name == "torch.save" and layer_of(module_path(path)) != TORCH_SAVE_ONLY_IN:
                wrong.append(f"{where(path, call)}: calls {name}")
    assert wrong == []


# What changes a disk. Only store and engine do, so that one fault-injecting store sees everything.
FILE_CALLS = re.compile(
    r"os\.(open|write|writev|pwrite|pwritev|rename|renames|replace|fsync|fdatasync|unlink|remove|"
    r"rmdir|removedirs|mkdir|makedirs|link|symlink|truncate|ftruncate|posix_fallocate|mkfifo)\Z|"
    r"shutil\.\w+\Z|tempfile\.\w+\Z|open\Z|io\.open\Z|os\.fdopen\Z"
)
FILE_METHODS = {"write_text", "write_bytes", "unlink", "mkdir", "rmdir", "touch", "symlink_to"}
FILE_LAYERS = {
    "store": "names, commits and removals in the checkpoint directory",
    "engine": "the bytes of shards",
}
FILE_EXCEPTIONS = {
    ("cli", "os.open"): "the null device, once whoever read the output has gone",
    ("events", "open"): "event sinks append lines to a file of the user's, outside the directory",
}


def test_only_store_and_engine_touch_files() -> None:
    wrong = []
    for path in python_files("sharded_ckpt"):
        layer = layer_of(module_path(path)) or path.stem
        if layer in FILE_LAYERS:
            continue
        for call, name in calls(path):
            method = name.rpartition(".")[2]
            receiver = name.rpartition(".")[0]
            touches = FILE_CALLS.match(name) or (
                # A method of a path; the same verbs of our own store are the way it should be.
                method in FILE_METHODS and receiver and "store" not in receiver
            )
            if touches and (layer, name) not in FILE_EXCEPTIONS:
                wrong.append(f"{where(path, call)}: calls {name}")
    assert wrong == []


def test_exports_are_few_sorted_and_real() -> None:
    import sharded_ckpt

    exported = list(sharded_ckpt.__all__)
    assert len(exported) <= EXPORTS
    assert exported == sorted(exported)
    assert set(exported) >= {"Keep", "SaveEvery", "SaveHandle", "LoadResult", "ShardedCheckpointer"}
    assert [name for name in exported if not hasattr(sharded_ckpt, name)] == []


TEXT = (".py", ".cc", ".h", ".sh", ".md", ".toml", ".txt", ".yml", ".cfg")


def texts() -> Iterator[tuple[Path, str]]:
    tops = ("sharded_ckpt", "csrc", "tests", "scripts", "examples", "benchmarks", "docs", ".ci")
    files = [p for top in (*tops, "requirements") for p in (ROOT / top).rglob("*")]
    for path in sorted([*files, *ROOT.glob("*.*")]):
        plain = path.is_file() and "__pycache__" not in path.parts and path != Path(__file__)
        if plain and (path.suffix in TEXT or path.parent.name == ".ci"):
            yield path, path.read_text(errors="replace")


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a TODO without the number of an issue", r"\b(TODO(?!\(#\d+\))|FIXME|XXX)\b"),
        ("a path of one machine", r"(?<![\w.$}])/(work|home|root|Users|opt|usr/local)/"),
        ("a registry's host", r"(?i)\b(pypi\.org|pythonhosted|npmjs|deb\.debian)"),
        (
            "who or what wrote it",
            r"(?i)(co-authored-by|(generated|written) (by|with) (an? )?(ai|assistant|bot|model)\b)",
        ),
    ],
)
def test_no_text_has(what: str, pattern: str) -> None:
    rule = re.compile(pattern)
    found = [
        f"{where(path, number)}: {line.strip()[:90]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if rule.search(line)
    ]
    assert found == [], what
