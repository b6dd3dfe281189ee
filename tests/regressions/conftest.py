"""Small indexes on a memory storage and a disk that syncs nothing, and calls that run beside the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
SETTINGS = {"slots": 7, "items": 64, "background": False, "query_threads": 2}


class Beside:
    """A call in a thread of its own: `ended` says whether it is over, `error` and `value` what it came to."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float = 60.0) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self.value = act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error


def offsets(asked):
    """Return the offsets of a whole answer, in rising order."""
    result = asked.query("t", "k", max_count=1000)
    assert result.status == "complete"
    return sorted(item.offset for item in result)


@pytest.fixture
def beside():
    """Run a call in a thread of its own."""
    return Beside


@pytest.fixture
def clock():
    return ManualClock(NOW_MS)


@pytest.fixture
def storage():
    return MemoryStorage()


@pytest.fixture
def open_index(tmp_path, clock, storage):
    """Open a writer at `tmp_path / root`; all are let go of at the end."""
    opened = []

    def make(root="root", *, storage_backend=storage, disk=None, **settings):
        chosen = {
            "root": tmp_path / root,
            "storage_backend": storage_backend,
            "disk": disk or FaultDisk(),
            **SETTINGS,
            **settings,
        }
        opened.append(IndexService.open(clock=clock, **chosen))
        return opened[-1]

    yield make
    for service in opened:
        service.abandon()


@pytest.fixture
def open_reader(tmp_path, clock, storage):
    """Open a reader of the storage, or of `tmp_path / root` too; all are closed at the end."""
    opened = []

    def make(root=None, *, storage_backend=storage, **settings):
        folder = tmp_path / root if root is not None else None
        opened.append(
            IndexReader.open(
                root=folder, storage_backend=storage_backend, clock=clock, **{"query_threads": 2, **settings}
            )
        )
        return opened[-1]

    yield make
    for reader in opened:
        reader.close()


@pytest.fixture
def leave_compacted(open_index, storage):
    """Put `count` messages under key "k" to a fresh root, one a second, and leave them in one file that is compacted
    and not uploaded.
    """

    def make(root="root", *, count=1, begin_ms=NOW_MS, more=None, storage_backend=storage, **settings):
        faulty = FaultStorage(storage_backend)
        service = open_index(root, storage_backend=faulty, **settings)
        for number in range(1, count + 1):
            service.put("t", 0, "k", number, 1, begin_ms + number * 1000, **(more or {}))
        service.seal()
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()
        assert [handle.place for handle in service.files()] == ["compacted"]
        return service

    return make
