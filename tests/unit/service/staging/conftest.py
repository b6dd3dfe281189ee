"""An index whose files are compacted by jobs."""

import pytest

from tests.support.staging import fill

SPARK = {"compaction": "spark", "refresh_interval_s": 0, "compact_timeout_s": 600}


@pytest.fixture
def open_spark(open_index, faulty):
    def make(root="root", **settings):
        return open_index(root, **{"storage_backend": faulty, **SPARK, **settings})

    return make


@pytest.fixture
def stage(open_spark):
    """Return a function that opens an index and stages a file with a message at each offset."""

    def make(*offsets, **settings):
        index = open_spark(**settings)
        fill(index, *offsets)
        index.run_lifecycle()
        return index

    return make
