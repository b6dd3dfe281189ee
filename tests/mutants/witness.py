"""A pytest plugin that goes into every copy of the tree and reports to a file what happened there: which tests passed,
which failed in what phase, and where the package under test came from. It imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]

_passed: list[str] = []
_failed: list[tuple[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note one phase of one test."""
    if report.failed:
        _failed.append((report.nodeid, report.when or ""))
    elif report.passed and report.when == "call":
        _passed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write the report."""
    package = sys.modules.get(os.environ["MUTANTS_PACKAGE"])
    origin = getattr(package, "__file__", None)
    Path(os.environ["MUTANTS_REPORT"]).write_text(json.dumps({"origin": origin, "passed": _passed, "failed": _failed}))
