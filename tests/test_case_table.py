"""Every due case from the field is shown by a test, and the document says which."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.case_table import DOCUMENT, ROOT, cases, due_kinds, problems, render

pytest_plugins = ["pytester"]


def test_every_due_case_is_marked_on_a_test_and_the_document_is_current() -> None:
    """In a process of its own: it collects all tests."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.case_table"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_list_is_whole() -> None:
    listed = cases().values()
    assert len(listed) == 129
    assert set(due_kinds()) < {case.kind for case in listed}
    assert all(case.url.startswith("https://github.com/") for case in listed)
    assert all(case.symptom and case.right and "|" not in case.symptom for case in listed)


def test_what_disagrees_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {id: ["test_x.py::test_y"] for id, c in cases().items() if not c.not_covered}
    del marks["B80"]
    marks["B86"] = marks["B999"] = ["test_x.py::test_z"]
    told = "\n".join(problems(marks))
    assert "B80 (scheduler) is due" in told
    assert "B86 is listed as not covered" in told
    assert "B999 is marked on a test, but not listed" in told
    assert f"{DOCUMENT.name} is not current" in told


def test_the_document_links_reports_and_tests() -> None:
    text = render({"B80": ["test_x.py::test_y", "test_x.py::test_y"]})
    (line,) = [line for line in text.splitlines() if line.startswith("| [B80]")]
    assert line.count("test_y") == 1 and "[test_x](../tests/test_x.py)" in line
    assert "deepspeedai/DeepSpeed/issues/4344" in line


def test_the_table_at_the_end_counts_results_by_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from tests import case_table

        def pytest_configure(config):
            config.addinivalue_line("markers", "case(id, ...): x")

        def pytest_collection_modifyitems(items):
            case_table.collected(items)

        def pytest_terminal_summary(terminalreporter):
            case_table.report(terminalreporter)
        """
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.case("B80", "B242")
        @pytest.mark.parametrize("n", [1, 2, 3])
        def test_a(n):
            assert n < 3

        def test_b():
            pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    name = next(pytester.path.glob("test_*.py")).name
    for id in ("B80", "B242"):
        result.stdout.re_match_lines([rf"scheduler +{id} +{name}::test_a +2 passed, failed"])
    result.stdout.no_re_match_line(r"scheduler.*test_b")
