"""Leaves the slowest processes to longer runs: the log's code is the same on every storage."""

import pytest

_ANSWER = "before the answer to a record"
# the moments at which short runs stop a process; files: all
_STOPPED_SHORT = {"s3": ("before a record", _ANSWER), "sqlite": ("before a record",)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "moment" in params and params["moment"] not in _STOPPED_SHORT.get(
            params.get("uri", ""), (params["moment"],)
        ):
            item.add_marker(pytest.mark.slow)
        elif params.get("uri") == "s3" and (params.get("moment") == _ANSWER or "race_of_processes" in item.name):
            item.add_marker(pytest.mark.long)
