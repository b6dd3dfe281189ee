"""What stress tests share: a disk that syncs nothing, a lowered switch interval, and services that are let go of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stress.census import begin_census
from tiered_index import IndexService
from tiered_index.storage.disk import Disk


class UnsyncedDisk(Disk):
    """The real file system without its syncs: no test here cuts the power."""

    def sync(self, descriptor: int) -> None:
        """Nothing."""

    def sync_folder(self, folder: Path) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def own_threads() -> None:
    """Have a census count the threads of the test itself only."""
    begin_census()


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Switch threads a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def disk() -> UnsyncedDisk:
    return UnsyncedDisk()


@pytest.fixture
def open_index(tmp_path: Path, disk: UnsyncedDisk) -> Iterator[Callable[..., IndexService]]:
    """Open a writer at `tmp_path / root`; all are let go of at the end."""
    opened = []

    def make(root: str = "root", **settings: Any) -> IndexService:
        opened.append(
            IndexService.open(
                root=tmp_path / root, **{"disk": disk, "slots": 7, "items": 64, "query_threads": 2, **settings}
            )
        )
        return opened[-1]

    yield make
    for service in opened:
        service.abandon()
