"""Reports from the field, and the tests that show the right behaviour: what ``case`` marks say.

``tests/field_cases.json`` lists every case, with its kind, and which kinds are due in this version.
At the end of a run, :func:`report` prints a row for each case and test that ran.
``python -m tests.case_table`` compares the marks with the list and with ``docs/field-cases.md``;
with ``--write`` it makes that document anew.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "field_cases.json"
DOCUMENT = ROOT / "docs" / "field-cases.md"
NOT_DUE = "not due yet"
Marks = Mapping[str, Iterable[str]]  # names of tests by case

_HEAD = """\
# Cases from the field

What users of checkpoint systems reported in public threads, as requirements for this one: what is
right in each case, and the test that shows it. `pytest` prints the same table for the tests that it
ran. The list is `tests/field_cases.json`; `python -m tests.case_table --write` makes this page.
"""
_LATER = """\
## Other kinds

Kinds of later versions. Where a test is named, the case is covered already.
"""


@dataclass(frozen=True)
class Case:
    """One report. ``not_covered`` is why no test shows it, where none does."""

    id: str
    kind: str
    symptom: str
    right: str
    url: str
    not_covered: str = ""


@cache
def cases() -> dict[str, Case]:
    listed = json.loads(LIST.read_text())["cases"]
    return {id: Case(id=id, **fields) for id, fields in listed.items()}


@cache
def due_kinds() -> tuple[str, ...]:
    """The kinds that this version has to handle, in the order of the document."""
    return tuple(json.loads(LIST.read_text())["due"])


# ---- marks -------------------------------------------------------------------------------------


def marked(item: pytest.Item) -> dict[str, str]:
    """The cases that a test is about, each with the name to show: parameters only where they alone
    carry the mark."""
    base = item.nodeid.partition("[")[0].removeprefix("tests/")
    own = getattr(getattr(item, "callspec", None), "marks", ())
    found: dict[str, str] = {}
    for marker in item.iter_markers("case"):
        by_parameter = any(marker == other for other in own)
        name = item.nodeid.removeprefix("tests/") if by_parameter else base
        found |= {str(id): name for id in marker.args}
    return found


# ---- at the end of a run -----------------------------------------------------------------------

_cases_of: dict[str, dict[str, str]] = {}  # by node id, of all collected tests


def collected(items: Iterable[pytest.Item]) -> None:
    """To be called with the tests of a run. Raises ``UsageError`` for a case that is not listed."""
    for item in items:
        found = marked(item)
        unknown = [id for id in found if id not in cases()]
        if unknown:
            raise pytest.UsageError(f"{item.nodeid}: no such case in {LIST.name}: {unknown}")
        if found:
            _cases_of[item.nodeid] = found


def report(terminal: pytest.TerminalReporter) -> None:
    """Prints kind, case, test and result of every marked test that ran, parameters together."""
    rows: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for entry in terminal.getreports(outcome):
            for id, name in _cases_of.get(entry.nodeid, {}).items():
                rows[cases()[id].kind, id, name][outcome] += 1
    if not rows:
        return
    terminal.section("cases from the field")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in sorted(rows, key=lambda row: (row[0], number(row[1]), row[2])):
        result = ", ".join(
            name if count == 1 else f"{count} {name}" for name, count in rows[row].items()
        )
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        bad = "failed" in result or "error" in result
        terminal.write_line("  ".join([*cells, result]), red=bad)


def number(id: str) -> int:
    return int(id.removeprefix("B"))


# ---- the document ------------------------------------------------------------------------------


def render(marks: Marks) -> str:
    """The document, for the tests that carry marks."""
    parts = [_HEAD]
    for kind in due_kinds():
        rows = [case for case in cases().values() if case.kind == kind]
        parts.append(f"## {kind}\n\n{_table(rows, marks)}")
    rest = [case for case in cases().values() if case.kind not in due_kinds()]
    parts.append(f"{_LATER}\n{_table(rest, marks, with_kind=True)}")
    return "\n".join(parts)


def _table(rows: list[Case], marks: Marks, with_kind: bool = False) -> str:
    head = ["case", "reported", "right", "shown by"]
    lines = []
    for case in sorted(rows, key=lambda case: number(case.id)):
        found = sorted(set(marks.get(case.id, ())))
        shown = "<br>".join(_linked(test) for test in found)
        why = case.not_covered or NOT_DUE
        cells = [f"[{case.id}]({case.url})", case.symptom, case.right, shown or f"nothing: {why}"]
        lines.append([case.kind, *cells] if with_kind else cells)
    head = ["kind", *head] if with_kind else head
    table = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def _linked(test: str) -> str:
    file, _, function = test.partition("::")
    return f"[{Path(file).stem}](../tests/{file}) `{function}`"


def problems(marks: Marks) -> list[str]:
    """What does not agree: list, marks and document."""
    found = [f"{id} is marked on a test, but not listed" for id in marks if id not in cases()]
    for case in cases().values():
        if case.kind in due_kinds() and not case.not_covered and case.id not in marks:
            found.append(f"{case.id} ({case.kind}) is due, but no test is marked with it")
        if case.not_covered and case.id in marks:
            found.append(f"{case.id} is listed as not covered, but marked on a test")
    if not DOCUMENT.exists() or DOCUMENT.read_text() != render(marks):
        found.append(f"{DOCUMENT.relative_to(ROOT)} is not current: run with --write")
    return found


class _Collector:
    """A plugin that remembers the marks of all tests."""

    def __init__(self) -> None:
        self.marks: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for id, name in marked(item).items():
                self.marks[id].append(name)


def collect_marks() -> Marks:
    """The marks of all tests of the project. Once in a process: pytest imports them."""
    collector, output = _Collector(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")],
            plugins=[collector],
        )
    if code != 0:
        raise SystemExit(f"the tests cannot be collected:\n{output.getvalue()[-4000:]}")
    return collector.marks


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.case_table")
    parser.add_argument("--write", action="store_true", help="write docs/field-cases.md")
    args = parser.parse_args(arguments)
    marks = collect_marks()
    if args.write:
        DOCUMENT.write_text(render(marks))
    found = problems(marks)
    print("\n".join(found) or f"{len(marks)} cases are shown by tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
