"""One thread of the process reads the logs that lookups use before they would have to wait, and no others."""

import threading
import time

import pytest

from tests.support.cold_index import cold_index
from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageUnavailable

INTERVAL_S = 1.0


def is_running():
    return any(thread.name == "tiered-index-poller" for thread in threading.enumerate())


@pytest.fixture
def index(tmp_path):
    return cold_index(tmp_path / "root", files=2)


def test_a_log_is_read_ahead_only_for_lookups_that_came_since_the_last_read(index):
    until(lambda: not is_running())
    storage = FaultStorage(index.inner)
    with index.reader(storage, refresh_interval_s=INTERVAL_S) as reader:
        reader.query("t", "all")
        opened = storage.calls("list")
        time.sleep(INTERVAL_S)
        assert storage.calls("list") == opened and not is_running()
        # this lookup reads the log, and none came since
        reader.query("t", "all")
        assert is_running()
        time.sleep(INTERVAL_S)
        assert storage.calls("list") == opened + 1
        reader.query("t", "all")
        reader.query("t", "all")
        assert storage.calls("list") == opened + 2
        index.add(2)
        # before a lookup has to wait
        until(lambda: storage.calls("list") == opened + 3 and reader._views[0].under_way is None)
        assert len(reader.query("t", "all", max_count=100)) == len(index.expected("t", "all"))
        assert storage.calls("list") == opened + 3
    until(lambda: not is_running())


def test_a_log_that_can_not_be_read_is_read_less_and_less_often(index, clock):
    storage = FaultStorage(index.inner)
    with index.reader(storage, clock=clock, refresh_interval_s=INTERVAL_S) as reader:
        view = reader._views[0]
        storage.fail("list", times=None)
        pauses = []
        for _ in range(6):
            clock.advance(20)
            with pytest.raises(StorageUnavailable):
                reader.query("t", "all")
            pauses.append(view._left_s())
        assert pauses == [1, 2, 4, 8, 10, 10]
        storage.clear()
        clock.advance(20)
        assert reader.query("t", "all").status == "complete"
        # shortly before lookups need it
        assert view._left_s() == pytest.approx(0.9 * INTERVAL_S)
