"""A page or a batch makes no request for files before the cursor or outside the ranges.

A key that is found does not make a filter due.
"""

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.pages import pages_of
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.storage.memory import MemoryStorage

BASE_MS = 1_700_000_000_000
FILES, HOUR_MS = 40, 3_600_000


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """An index of 40 files of an hour each. The key "all" is once in every file, and each has 200 keys of its own."""
    storage = MemoryStorage()
    root = tmp_path_factory.mktemp("root")
    settings = {"slots": 50, "items": 202, "local_keep_s": 0, "background": False}
    with IndexService.open(root=root, storage_backend=storage, **settings) as service:
        for number in range(FILES):
            keys, numbers = ["all", *(f"k{number}-{i}" for i in range(200))], np.arange(201)
            times = BASE_MS + number * HOUR_MS + numbers * 1000
            service.put_batch(batch(201, key=keys, offset=numbers + number * 1000, timestamp_ms=times))
            service.seal()
            service.run_lifecycle()
    return storage


def hour_of(number, key):
    """Return the lookup of a file's key in that file's hour."""
    begin_ms = BASE_MS + number * HOUR_MS
    return Lookup(topic="t", key=f"k{number}-{key}", begin_ms=begin_ms, end_ms=begin_ms + HOUR_MS - 1)


def test_pages_together_cost_one_request_a_file(storage):
    settings = {"block_cache_bytes": 0, "filter_after_probes": 3, "query_threads": 1}
    with IndexReader.open(storage_backend=storage, **settings) as reader:
        # read every directory
        reader.query_many([Lookup(topic="t", key=f"k{number}-0") for number in range(FILES)])
        pages = list(pages_of(reader.query, "t", "all", max_count=5))
        assert [item.offset for page in pages for item in page] == [n * 1000 for n in reversed(range(FILES))]
        # the file of the last answer is read again, for entries of the same second
        assert sum(page.explain.requests for page in pages) <= FILES + FILES // 5 + 5


def test_a_batch_leaves_out_files_that_no_range_meets(storage):
    ends = [hour_of(number, 5) for number in (0, FILES - 1)]
    with IndexReader.open(storage_backend=storage, filter_after_probes=1) as reader:
        answers = reader.query_many(ends)
        assert answers.counts.tolist() == [1, 1]
        assert answers.explain.requests == 4
        assert {report.outcome for report in answers.explain.files} == {"read", "skipped_time"}
        assert reader.query_many(ends).explain.requests == 0


def test_keys_that_are_there_make_no_filter_due(storage):
    ranges = [hour_of(number, 7) for number in range(FILES)]
    with IndexReader.open(storage_backend=storage, block_cache_bytes=0, filter_after_probes=1) as reader:
        assert reader.query_many(ranges).explain.requests == 2 * FILES
        assert reader.query_many(ranges).explain.requests == FILES
        for lookup in ranges[:10]:
            assert reader.query("t", lookup.key, lookup.begin_ms, lookup.end_ms).explain.requests == 1
            # no entry in another second does not mean that the file lacks the key
            assert reader.query("t", lookup.key, lookup.begin_ms, lookup.begin_ms).explain.requests == 1
            assert reader.query("t", lookup.key, lookup.begin_ms, lookup.end_ms).explain.requests == 1
