"""Fixtures of stress tests: a disk that syncs nothing, a lowered switch interval, and services that are closed at the
end.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.census import begin_census
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index import IndexService


@pytest.fixture(autouse=True)
def own_threads() -> None:
    """Make a census count only the threads of this test."""
    begin_census()


@pytest.fixture
def disk() -> UnsyncedDisk:
    return UnsyncedDisk()


@pytest.fixture
def open_index(tmp_path: Path, disk: UnsyncedDisk) -> Iterator[Callable[..., IndexService]]:
    """Open a writer at `tmp_path / root`; all are closed at the end."""
    opened = []

    def make(root: str = "root", **settings: Any) -> IndexService:
        chosen = {"disk": disk, "slots": 7, "items": 64, "query_threads": 2, **settings}
        opened.append(IndexService.open(root=tmp_path / root, **chosen))
        return opened[-1]

    yield make
    for service in opened:
        service.abandon()
