"""What stress tests share: a disk that syncs nothing, a lowered switch interval, and services that are let go of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.census import begin_census
from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index import IndexService


@pytest.fixture(autouse=True)
def own_threads() -> None:
    """Have a census count the threads of the test itself only."""
    begin_census()


@pytest.fixture
def disk() -> UnsyncedDisk:
    return UnsyncedDisk()


@pytest.fixture
def open_index(tmp_path: Path, disk: UnsyncedDisk) -> Iterator[Callable[..., IndexService]]:
    """Open a writer at `tmp_path / root`; all are let go of at the end."""
    opened = []

    def make(root: str = "root", **settings: Any) -> IndexService:
        chosen = {"disk": disk, "slots": 7, "items": 64, "query_threads": 2, **settings}
        opened.append(IndexService.open(root=tmp_path / root, **chosen))
        return opened[-1]

    yield make
    for service in opened:
        service.abandon()
