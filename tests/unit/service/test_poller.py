"""One thread of the process reads the logs that lookups use before they would have to wait, and no others."""

import threading
import time

import pytest

from tests.support.cold_index import cold_index
from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage

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
