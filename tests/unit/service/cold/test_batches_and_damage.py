"""What batches read in vain counts towards a filter; requests of a damaged local copy stand in its own row of
explain.
"""

from __future__ import annotations

import numpy as np

from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.storage.memory import MemoryStorage

BASE_MS = 1_700_000_000_000


def put(service, count):
    service.put_batch(
        {
            "topic": ["t"] * count,
            "queue_id": np.zeros(count, int),
            "key": [f"k{i}" for i in range(count)],
            "offset": np.arange(count),
            "size": np.full(count, 7),
            "timestamp_ms": BASE_MS + np.arange(count) * 1000,
        }
    )


def test_a_reader_that_only_asks_batches_learns_the_filter(tmp_path):
    storage = MemoryStorage()
    with IndexService.open(
        root=tmp_path, storage_backend=storage, slots=100, items=2001, local_keep_s=0, background=False
    ) as service:
        put(service, 2000)
        service.seal()
        service.run_lifecycle()
    with IndexReader.open(storage_backend=storage, filter_after_probes=1) as reader:
        absent = [[Lookup(topic="t", key=f"absent{batch}-{i}") for i in range(5)] for batch in range(3)]
        asked = [reader.query_many(lookups).explain for lookups in absent]
        assert asked[0].requests >= 2  # the directory, and the groups in vain
        assert asked[1].requests <= 2  # the filter, and what it can't exclude
        assert sum(explain.requests for explain in asked[2:]) == 0
        assert asked[2].files[0].outcome == "skipped_filter"
        assert reader.query_many([Lookup(topic="t", key="k7")]).counts.tolist() == [1]


def test_requests_for_a_damaged_copy_are_its_own(tmp_path):
    storage = MemoryStorage()
    with IndexService.open(
        root=tmp_path, storage_backend=storage, slots=100, items=2001, local_keep_s=10**6, background=False
    ) as service:
        put(service, 2000)
        service.seal()
        service.run_lifecycle()
        (path,) = (tmp_path / "uploaded").iterdir()
        data = bytearray(path.read_bytes())
        data[28 + 800 : -3000] = bytes(len(data) - 28 - 800 - 3000)
        path.write_bytes(data)
        answer = service.query("t", "k7")
        assert [item.offset for item in answer] == [7]
        (report,) = answer.explain.files
        assert report.requests == answer.explain.requests > 0
    with IndexReader.open(root=tmp_path, storage_backend=storage) as reader:
        answer = reader.query("t", "k7")
        (report,) = [report for report in answer.explain.files if report.file != "log"]
        assert report.requests > 0
        assert sum(report.requests for report in answer.explain.files) == answer.explain.requests
