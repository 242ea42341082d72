"""The command line: results, exit codes, messages, and how much memory an export takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sharded_ckpt.cli import main
from sharded_ckpt.engine import select_engine
from sharded_ckpt.layout import MANIFEST, SetId, term_file, trash_name
from sharded_ckpt.manifest import Manifest
from sharded_ckpt.store import LocalStore
from sharded_ckpt.thin import write_weights
from tests.make_set import make_set

ROOT = Path(__file__).resolve().parent.parent
ONE = {"master/w": torch.arange(6.0), "optim/w/exp_avg": torch.ones(6)}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; gives its exit code, its output (parsed with --json) and its messages."""

    def call(*args: object) -> tuple[int, Any, str]:
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in args else out, err

    return call


def process(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sharded_ckpt", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def corrupt(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# ---- ls, info


def test_ls_lists_in_load_order(tmp_path: Path, run: Any) -> None:
    first = make_set(tmp_path, ONE, step=900, term=1, metrics={"loss": 2.0, "bad": float("nan")})
    make_set(tmp_path, ONE, step=100, term=2, world_size=3)
    engine = select_engine("auto")
    write_weights(LocalStore(tmp_path), engine, first, SetId.new(step=900, term=2, serial=7))
    code, found, err = run("ls", tmp_path, "--json")
    assert (code, err, found["damaged"]) == (0, "", [])
    keys = {"step", "term", "serial", "path", "nbytes", "ranks", "metrics", "pinned", "content"}
    assert all(set(step) == keys for step in found["steps"])
    listed = [(step["step"], step["content"], step["ranks"]) for step in found["steps"]]
    assert listed == [(900, "weights", 2), (900, "full", 2), (100, "full", 3)]
    assert found["steps"][1]["path"] == str(tmp_path / first.id.dirname)
    assert found["steps"][1]["metrics"] == {"loss": 2.0, "bad": None}
    code, text, _ = run("ls", tmp_path)
    assert code == 0 and len(text.splitlines()) == 4


def test_ls_of_nothing_says_where_it_looked(tmp_path: Path, run: Any) -> None:
    code, found, err = run("ls", tmp_path, "--json")
    assert (code, found["steps"]) == (1, []) and str(tmp_path) in err
    make_set(tmp_path / "run" / "ckpt", ONE)
    code, _, err = run("ls", tmp_path / "run")
    assert code == 1 and f"did you mean {tmp_path / 'run' / 'ckpt'}" in err
    assert run("ls", tmp_path / "nowhere")[0] == 1


def test_ls_reports_a_damaged_manifest_and_goes_on(tmp_path: Path, run: Any) -> None:
    make_set(tmp_path, ONE, step=1)
    bad = make_set(tmp_path, ONE, step=2, serial=2)
    corrupt(tmp_path / bad.id.dirname / MANIFEST, 30)
    code, found, err = run("ls", tmp_path, "--json")
    assert code == 1 and [step["step"] for step in found["steps"]] == [1]
    assert bad.id.dirname in found["damaged"][0]["path"] and "damaged" in err


def test_info_tells_what_a_step_holds(tmp_path: Path, run: Any) -> None:
    make_set(tmp_path, ONE, step=7, model_dtypes="BF16", copies={"buffer/n": np.int64(3)})
    code, found, _ = run("info", tmp_path, "--json", "--tensors")
    assert code == 0 and found["step"] == 7 and found["kinds"]["master"] == [1, 24]
    master = next(t for t in found["tensors"] if t["name"] == "master/w")
    assert (master["shape"], master["pieces"], master["model_dtype"]) == ([6], 2, "BF16")
    code, text, _ = run("info", tmp_path, "--tensors")
    assert code == 0 and "optim/w/exp_avg" in text and "rank-00001.safetensors" in text


# ---- paths


@pytest.mark.case("B122")
def test_b122_a_file_where_a_directory_is_expected(tmp_path: Path, run: Any) -> None:
    manifest = make_set(tmp_path / "set", ONE)
    inside = tmp_path / "set" / manifest.id.dirname
    code, _, err = run("consolidate", inside / MANIFEST, tmp_path / "out")
    assert code == 2 and "is a file" in err and f"did you mean {inside}" in err
    code, _, err = run("gc", inside)
    assert code == 2 and str(tmp_path) in err


@pytest.mark.case("B118")
def test_b118_any_legal_path_works(tmp_path: Path, run: Any) -> None:
    directory = tmp_path / "a b" / "epoch=1-step=2 (x)ü☃"
    directory.parent.mkdir()
    manifest = make_set(directory, ONE)
    assert run("ls", directory)[0] == run("verify", directory)[0] == 0
    output = tmp_path / "aus gabe=ü"
    assert run("consolidate", directory / manifest.id.dirname, output)[0] == 0
    assert torch.equal(load_file(output / "model.safetensors")["w"], ONE["master/w"])
    code, _, err = run("consolidate", directory, tmp_path / "o2", "--step", "5")
    assert code == 1 and "step 5 is not committed" in err


@pytest.mark.case("B136")
def test_b136_a_copied_step_is_whole_under_any_name(tmp_path: Path, run: Any) -> None:
    manifest = make_set(tmp_path / "set", ONE)
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "final model"
    os.rename(tmp_path / "set" / manifest.id.dirname, moved)
    assert run("verify", moved)[0] == 0
    assert run("consolidate", moved, tmp_path / "out")[0] == 0
    code, found, _ = run("ls", moved, "--json")
    assert code == 0 and found["steps"][0]["path"] == str(moved)


# ---- verify


def test_p1_verify_names_every_damaged_region(tmp_path: Path, run: Any) -> None:
    manifest = make_set(tmp_path, ONE, step=3, world_size=2)
    assert run("verify", tmp_path)[0] == 0
    ref = manifest.shards[1]
    corrupt(tmp_path / ref.path, ref.header_nbytes + 20)
    (tmp_path / manifest.shards[0].path).unlink()
    code, found, _ = run("verify", tmp_path, "--json")
    assert code == 1 and not found["ok"]
    missing, bad = found["sets"][0]["damage"]
    assert "missing" in missing["message"] and missing["file"].endswith("rank-00000.safetensors")
    assert bad["file"].endswith("rank-00001.safetensors")
    assert (bad["start"], bad["end"]) == (ref.header_nbytes, ref.header_nbytes + 24)
    assert set(bad["tensors"]) == set(ONE)
    code, text, _ = run("verify", tmp_path)
    assert code == 1 and "DAMAGED" in text and f"bytes {bad['start']} to {bad['end']}" in text


@pytest.mark.case("B25", "B217")
def test_b25_verify_names_empty_tensors_that_should_not_be(tmp_path: Path, run: Any) -> None:
    manifest = make_set(tmp_path / "set", {"model/full": torch.ones(3)}, world_size=2)
    empty = _with_empty_tensor(tmp_path / "set", manifest)
    code, found, _ = run("verify", tmp_path / "set" / empty.id.dirname, "--json")
    assert code == 1
    assert any("model/w" in damage["message"] for damage in found["sets"][0]["damage"])
    code, _, err = run("consolidate", tmp_path / "set" / empty.id.dirname, tmp_path / "out")
    assert code == 1 and "model/w" in err and not (tmp_path / "out").exists()


def _with_empty_tensor(directory: Path, like: Manifest) -> Manifest:
    """A set whose only rank wrote none of the elements of a tensor (a placeholder)."""
    import tests.make_set as maker
    from sharded_ckpt.slices import Entry, Run

    def none(entries: Any, parts: int) -> Any:
        return [[Entry(e.name, e.dtype, e.shape, Run(0, 0)) for e in entries]]

    maker.CUTS["none"] = none
    try:
        return make_set(
            directory, {"model/w": torch.ones(4, 2)}, cut="none", world_size=1, serial=9
        )
    finally:
        del maker.CUTS["none"]


# ---- consolidate


def test_consolidate_says_what_it_wrote(tmp_path: Path, run: Any) -> None:
    make_set(tmp_path / "set", ONE, step=4, aliases={"tied": "w"}, model_dtypes="BF16")
    args = ("consolidate", tmp_path / "set", tmp_path / "out", "--json")
    code, found, _ = run(*args, "--dry-run")
    assert code == 0 and found["dry_run"] and not (tmp_path / "out").exists()
    code, found, _ = run(*args)
    assert code == 0 and found["files"] == [{"name": "model.safetensors", "nbytes": 12}]
    assert found["aliases"] == {"tied": "w"} and found["step"] == 4
    code, _, err = run(*args[:-1])
    assert code == 2 and "--overwrite" in err
    assert run(*args[:-1], "--overwrite", "--only", "all", "--dtype", "float32")[0] == 0
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert set(got) == {"w", "optim/w/exp_avg"} and got["w"].dtype == torch.float32


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("2GiB", 2**31), ("100", 100)])
def test_sizes_are_read_as_they_are_written(text: str, nbytes: int) -> None:
    from sharded_ckpt.cli_consolidate import parse_size

    assert parse_size(text) == nbytes


def test_wrong_usage_exits_with_2(tmp_path: Path, run: Any) -> None:
    for args in (
        ["consolidate"],
        ["frob"],
        ["consolidate", "a", "b", "--max-shard-size", "5 apples"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 2
    make_set(tmp_path / "set", ONE)
    assert run("consolidate", tmp_path / "set", tmp_path / "o", "--max-shard-size", "0")[0] == 2
    assert run("consolidate", tmp_path / "set", "s3://bucket/x")[0] == 2


@pytest.mark.case("B131")
def test_b131_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    manifest = make_set(tmp_path / "c", {"master/w": torch.randn(400_000)}, world_size=2)
    before = {ref.file: (tmp_path / "c" / ref.path).read_bytes() for ref in manifest.shards}

    # The limit on file sizes stands for the disk: writes fail in the middle of a tensor.
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, 1000000));"
        "from sharded_ckpt.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for to in ("safetensors", "torch"):
        arguments = ["consolidate", tmp_path / "c", tmp_path / "out", "--to", to]
        done = subprocess.run(
            [sys.executable, "-c", limited, *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=300,
        )
        assert done.returncode == 1 and "File too large" in done.stderr, done.stderr
        assert sorted(os.listdir(tmp_path)) == ["c"]
    after = {ref.file: (tmp_path / "c" / ref.path).read_bytes() for ref in manifest.shards}
    assert after == before


@pytest.mark.case("B131")
@pytest.mark.root
def test_b131_a_file_system_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    make_set(tmp_path / "c", {"master/w": torch.randn(400_000)})
    (tmp_path / "small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "small"], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        done = process("consolidate", tmp_path / "c", tmp_path / "small" / "out")
        assert done.returncode == 1 and "No space left" in done.stderr
        assert os.listdir(tmp_path / "small") == []
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


@pytest.mark.case("B97")
def test_the_script_runs_from_anywhere_without_torch(tmp_path: Path) -> None:
    make_set(tmp_path / "set", ONE, model_dtypes="BF16")
    blocked = tmp_path / "blocked"
    for name in ("torch", "deepspeed"):
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text("raise ImportError('not here')")
    for to, output in (("safetensors", "out"), ("torch", "out.pt")):
        done = subprocess.run(
            [
                sys.executable,
                ROOT / "scripts" / "consolidate.py",
                tmp_path / "set",
                tmp_path / output,
                "--to",
                to,
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(blocked)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(got["w"], ONE["master/w"].bfloat16())


def test_a_closed_pipe_is_no_error_message(tmp_path: Path) -> None:
    for serial in range(1, 4):
        make_set(tmp_path, ONE, serial=serial, world_size=1)
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sharded_ckpt", "ls", tmp_path],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=300,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# ---- memory

MIB = 1 << 20

_MEASURE = """
import json, sys
from sharded_ckpt.cli import main
def peak():  # not ru_maxrss, which a child inherits from the process that started it
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
code = main([*sys.argv[1:], "--dry-run", "--json"])
before = peak()
code = code or main([*sys.argv[1:], "--json"])
print(json.dumps([code, before, peak()]), file=sys.stderr)
"""


def _peak(*args: object) -> tuple[int, int, int]:
    """Exit code, peak after the plan, peak after the export; the estimate is checked, too."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, "consolidate", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    code, before, after = json.loads(done.stderr.splitlines()[-1])
    estimate = json.JSONDecoder().raw_decode(done.stdout)[0]["peak_memory_nbytes"]
    assert code == 0 and after <= estimate, (before / MIB, after / MIB, estimate / MIB)
    return code, before, after


def _big_set(directory: Path, rows: list[int]) -> None:
    values = np.ones((max(rows), 1 << 18), np.float32)
    tensors = {f"master/layers.{i}.w": values[:count] for i, count in enumerate(rows)}
    make_set(directory, tensors, world_size=2, model_dtypes="BF16")


# Two windows of 96 MiB; tensorstore adds what a dozen chunks of 16 MiB take.
_ADDED = {"safetensors": 240 * MIB, "torch": 240 * MIB, "orbax": 460 * MIB}


@pytest.mark.case("B14", "B17")
@pytest.mark.parametrize("to", _ADDED)
def test_b14_b17_memory_of_an_export_is_bounded(tmp_path: Path, to: str) -> None:
    _big_set(tmp_path / "c", [300, 100])  # 400 MiB of masters, 300 MiB in one tensor
    _, before, after = _peak(tmp_path / "c", tmp_path / "out", "--to", to)
    assert after - before <= _ADDED[to], (before / MIB, after / MIB)


@pytest.mark.case("B14", "B17")
@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "torch", "orbax"])
def test_b14_b17_memory_does_not_grow_with_the_model(tmp_path: Path, to: str) -> None:
    _big_set(tmp_path / "c", [600, 600, 600, 248])  # 2 GiB
    _, _, after = _peak(tmp_path / "c", tmp_path / "out", "--to", to)
    assert after <= 512 * MIB


# ---- diff


def test_diff_finds_names_forms_and_values(tmp_path: Path, run: Any) -> None:
    a = {"master/w": torch.randn(50, 4), "model/n": torch.arange(9), "optim/w/m": torch.ones(3)}
    one = make_set(tmp_path, a, step=1, cut="runs", world_size=3)
    make_set(tmp_path, a, step=2, serial=2, cut="columns", world_size=2)
    ends = ("diff", tmp_path, tmp_path, "--step-a", 1, "--step-b")
    code, found, _ = run(*ends, 2, "--json")
    assert (code, found["equal"], found["tensors_compared"]) == (0, True, 3)
    b = {"master/w": a["master/w"].clone(), "model/n": torch.arange(9).float()}
    b["master/w"][3, 1] += 0.5
    b["master/w"][7, 2] -= 0.25
    make_set(tmp_path, {**b, "model/new": torch.ones(1)}, step=3, serial=3, cut="flat")
    code, found, _ = run(*ends, 3, "--json")
    assert code == 1 and found["only_a"] == ["optim/w/m"] and found["only_b"] == ["model/new"]
    assert found["form"] == [{"name": "model/n", "a": "I64 [9]", "b": "F32 [9]"}]
    (value,) = found["values"]
    assert (value["name"], value["elements"]) == ("master/w", 2)
    assert value["max_abs_diff"] == pytest.approx(0.5)
    code, text, _ = run(*ends, 3)
    assert code == 1 and "DIFFERENT" in text and "master/w: 2 elements" in text
    assert run("diff", tmp_path / one.id.dirname, tmp_path, "--step-b", 2)[0] == 0


def test_diff_skips_shards_with_equal_checksums_unless_asked(tmp_path: Path, run: Any) -> None:
    for serial in (1, 2):
        made = make_set(tmp_path, ONE, step=serial, serial=serial, world_size=1)
    ref = made.shards[0]
    corrupt(tmp_path / ref.path, ref.header_nbytes + 1)
    ends = ("diff", tmp_path, tmp_path, "--step-a", 1, "--step-b", 2)
    assert run(*ends)[0] == 0
    code, _, err = run(*ends, "--bytes")
    assert code == 1 and "crc32c" in err


def test_diff_compares_overrides_by_their_elements(tmp_path: Path, run: Any) -> None:
    patch = torch.randn(5).bfloat16()
    for step, start, values in ((1, 2, patch), (2, 2, patch), (3, 3, patch), (4, 2, patch + 1)):
        make_set(
            tmp_path,
            {"master/w": torch.zeros(20)},
            step=step,
            serial=step,
            model_dtypes="BF16",
            overrides={"model/w": [(start, values)]},
        )
    for step, elements in ((2, None), (3, 1), (4, 5)):
        code, found, err = run(
            "diff", tmp_path, tmp_path, "--step-a", 1, "--step-b", step, "--bytes", "--json"
        )
        values = {value["name"]: value["elements"] for value in found["values"]}
        assert values == ({} if elements is None else {"model/w": elements})
        assert (code, err) == (0 if elements is None else 1, "")


def test_diff_compares_copies_rank_by_rank(tmp_path: Path, run: Any) -> None:
    for step, values in enumerate(([1, 2], [1, 5], [1, 2, 2]), 1):
        copies = {"buffer/n": [np.int64(value) for value in values]}
        make_set(tmp_path, ONE, step=step, serial=step, world_size=len(values), copies=copies)
    ends = ("diff", tmp_path, tmp_path, "--json", "--step-a", 1, "--step-b")
    assert run(*ends, 1, "--bytes")[1]["equal"]
    code, found, _ = run(*ends, 2)
    assert code == 1 and [(v["name"], v["elements"]) for v in found["values"]] == [("buffer/n", 1)]
    code, found, _ = run(*ends, 3)
    assert (code, found["values"]) == (1, [])
    assert found["ranks"] == [{"name": "buffer/n", "a": [0, 1], "b": [0, 1, 2]}]


# ---- gc, pin


def test_p6_gc_touches_only_what_was_never_committed(tmp_path: Path, run: Any) -> None:
    kept = make_set(tmp_path, ONE, step=1, term=1)
    store = LocalStore(tmp_path)
    orphan = SetId.new(step=2, term=1, serial=2).dirname
    trash = trash_name(SetId.new(step=3, term=1, serial=3).dirname)
    young = SetId.new(step=4, term=2, serial=1).dirname
    for name in (orphan, trash, young):
        store.make_dir(name)
        store.create_exclusive(f"{name}/rank-00000.safetensors", b"half")
    store.create_exclusive(term_file(2), b"{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    everything = sorted(os.listdir(tmp_path))
    code, found, _ = run("gc", tmp_path, "--json")
    assert code == 0 and found["dry_run"] and sorted(os.listdir(tmp_path)) == everything
    assert {o["name"] for o in found["orphans"]} == {orphan, trash}
    assert [o["name"] for o in found["kept"]] == [young]
    code, text, _ = run("gc", tmp_path, "--yes")
    assert code == 0 and orphan in text and "--force-term" in text
    left = sorted(name for name in everything if name not in (orphan, trash))
    assert sorted(os.listdir(tmp_path)) == left
    assert run("gc", tmp_path, "--yes", "--force-term")[0] == 0
    left.remove(young)
    assert sorted(os.listdir(tmp_path)) == left and kept.id.dirname in left


def test_pins_are_set_and_taken_back(tmp_path: Path, run: Any) -> None:
    make_set(tmp_path, ONE, step=8)
    for command, pinned in (("pin", True), ("pin", True), ("unpin", False), ("unpin", False)):
        code, found, _ = run(command, tmp_path, "--step", 8, "--json")
        assert (code, found["pinned"]) == (0, pinned)
        assert run("ls", tmp_path, "--json")[1]["steps"][0]["pinned"] is pinned
    code, _, err = run("pin", tmp_path, "--step", 9)
    assert code == 1 and "step 9" in err


def test_unpin_takes_back_every_pin_of_the_step(tmp_path: Path, run: Any) -> None:
    first = make_set(tmp_path, ONE, step=8)
    run("pin", tmp_path, "--step", 8)
    again = make_set(tmp_path, ONE, step=8, serial=2)
    run("pin", tmp_path, "--step", 8)
    code, found, _ = run("unpin", tmp_path, "--step", 8, "--json")
    assert not any(step["pinned"] for step in run("ls", tmp_path, "--json")[1]["steps"])
    assert code == 0 and found["paths"] == [
        str(tmp_path / made.id.dirname) for made in (again, first)
    ]
    assert run("unpin", tmp_path, "--step", 9)[0] == 1
