"""What the documents show must be true: code runs, commands and files exist, lists are current."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharded_ckpt.layout import SetId
from tests.test_house import LAYERS, ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[pytest.param]:
    found = []
    for path in DOCUMENTS:
        for number, match in enumerate(_BLOCK.finditer(path.read_text())):
            if match.group(1) == language:
                name = f"{path.name}-{number}"
                found.append(pytest.param(match.group(2).strip(), match.group(3), id=name))
    return found


@pytest.mark.parametrize(("info", "code"), blocks("python"))
def test_python_blocks_run(info: str, code: str, tmp_path: Path) -> None:
    """In a fresh directory; blocks marked ``no-run`` need a training job and are only parsed."""
    ast.parse(code)
    if "no-run" in info:
        return
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_readme_is_the_quickstart() -> None:
    first = next(m for m in _BLOCK.finditer((ROOT / "README.md").read_text()) if m[1] == "python")
    assert first.group(3) == (ROOT / "examples" / "quickstart.py").read_text()


def test_the_quickstart_resumes(tmp_path: Path) -> None:
    """P1, P6 from the outside: the second run finds what the first one committed and kept."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "quickstart.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "newest committed step: 20\n"
    kept = [SetId.parse(path.name) for path in (tmp_path / "runs" / "quickstart").glob("step-*")]
    assert sorted((id.step, id.term) for id in kept if id) == [(15, 1), (20, 1)]


@pytest.mark.parametrize(("info", "text"), blocks("console"))
def test_commands_exist(info: str, text: str) -> None:
    from sharded_ckpt import cli

    commands = [line[2:].split("#")[0].split() for line in text.splitlines() if line[:2] == "$ "]
    assert commands
    for command in commands:
        if command[0].startswith("scripts/"):
            assert os.access(ROOT / command[0], os.X_OK), command
        elif command[:3] == ["python", "-m", "sharded_ckpt"]:
            with pytest.raises(SystemExit) as ended:
                cli.main([command[3], "--help"])
            assert ended.value.code == 0
        else:
            pytest.fail(f"no way to check {command}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_the_list_of_modules_is_current() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    listed = text.partition("<!-- layers -->\n```text\n")[2].partition("```")[0]
    assert tuple(line.split()[0] for line in listed.splitlines()) == LAYERS


def test_every_refused_deepspeed_mode_is_documented_with_what_to_do_instead() -> None:
    from sharded_ckpt.sources.ds_refusals import REFUSALS

    text = (ROOT / "docs" / "deepspeed.md").read_text()
    table = text.split("<!-- refusals -->")[1].split("<!-- end of refusals -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{r.key}` | {r.why} | {r.instead} |" for r in REFUSALS]
