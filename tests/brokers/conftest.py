"""Tests on real brokers: `make test-brokers`. The tests of one broker share it, and run in one worker of pytest.

A module whose tests start brokers of their own has a group of its own (`xdist_group`), so that workers end together.
"""

from pathlib import Path

import pytest

from tests.brokers.jars import is_required

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests here, and keep those of each broker together."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.brokers)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.path.relative_to(_HERE).parts[0]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """Make a skipped test a failed one if brokers are required."""
    report = (yield).get_result()
    if report.skipped and is_required() and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped, and brokers are required here"
