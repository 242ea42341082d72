"""What every test gets: the environment, DeepSpeed's helper, and skips that can be seen.

The environment is set here, at import, because torch and DeepSpeed read it when they are imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests import helpers as ``tests.dist.launch``, and so do the processes that they start.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests import case_table, read_back  # noqa: E402

_CONDITIONAL = ("gpu", "root", "slow")
_not_run: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    case_table.collected(items)
    reasons: dict[str, str | None] = {}
    for item in items:
        for marker in _CONDITIONAL:
            if item.get_closest_marker(marker) is None:
                continue
            # In the junit report, so that CI can tell which conditional tests really ran.
            item.user_properties.append(("marker", marker))
            if marker not in reasons:
                reasons[marker] = _why_not(marker, config)
            reason = reasons[marker]
            if reason is not None:
                _not_run[f"{marker}: {reason}"] += 1
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(marker: str, config: pytest.Config) -> str | None:
    """Why tests with this marker cannot run here, or None when they can."""
    if marker == "root":
        return None if os.geteuid() == 0 else "needs root"
    if marker == "slow":
        named = config.getoption("--slow") or "slow" in (config.getoption("-m") or "")
        return None if named else "slow; give --slow, or use scripts/test.sh --all"
    if importlib.util.find_spec("torch") is None:
        return "needs torch and a CUDA device"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    case_table.report(terminalreporter)
    for what, count in sorted(_not_run.items()):
        terminalreporter.write_line(f"NOT RUN HERE: {count} tests marked {what}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def deepspeed_helper() -> None:
    """DeepSpeed's just-in-time build, made before any test can race for it or be killed in it."""
    if importlib.util.find_spec("deepspeed") is None:
        return
    from scripts.prebuild_deepspeed import prebuild

    prebuild(Path(os.environ["TORCH_EXTENSIONS_DIR"]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


_PASSED = pytest.StashKey[bool]()


@pytest.fixture
def read_by_the_independent_reader(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[None]:
    """Reads every set that the test has committed, once it has passed."""
    yield
    damages = request.node.get_closest_marker("damages") is not None
    if request.node.stash.get(_PASSED, False) and not damages:
        read_back.check(tmp_path)
