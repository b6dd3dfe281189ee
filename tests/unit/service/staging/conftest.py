"""An index whose files are compacted by jobs."""

from __future__ import annotations

import pytest

SPARK = {"compaction": "spark", "refresh_interval_s": 0, "compact_timeout_s": 600}


@pytest.fixture
def open_spark(open_index, faulty):
    def make(root="root", **settings):
        return open_index(root, **{"storage_backend": faulty, **SPARK, **settings})

    return make
