"""Leaves the slowest processes to longer runs: the log's code is the same on every storage."""

from __future__ import annotations

import pytest

_ANSWER = "before the answer to a record"
# the moments at which short runs stop a process; files: all
_STOPPED_SHORT = {"s3": ("before a record", _ANSWER), "sqlite": ("before a record",)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "moment" in given and given["moment"] not in _STOPPED_SHORT.get(given.get("uri", ""), (given["moment"],)):
            item.add_marker(pytest.mark.slow)
        elif given.get("uri") == "s3" and (given.get("moment") == _ANSWER or "race_of_processes" in item.name):
            item.add_marker(pytest.mark.long)
