"""An index whose files are compacted by merges."""

import pytest

from tests.support.pending import fill

SPARK = {"compaction": "spark", "refresh_interval_s": 0, "compact_timeout_s": 600}


@pytest.fixture
def open_spark(open_index, faulty):
    def make(root="root", **settings):
        return open_index(root, **{"storage_backend": faulty, **SPARK, **settings})

    return make


@pytest.fixture
def upload(open_spark):
    """Return a function that opens an index and uploads a pending file with a message at each offset."""

    def make(*offsets, **settings):
        index = open_spark(**settings)
        fill(index, *offsets)
        index.run_lifecycle()
        return index

    return make
