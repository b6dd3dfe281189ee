"""Merge six hourly files into a table of a day."""

import tempfile

from tiered_index import IndexReader, IndexService, merge

uri = "file://" + tempfile.mkdtemp()
with IndexService.open(
    root=tempfile.mkdtemp(), storage=uri, slots=100, items=1000, local_keep_s=0, max_late_s=10**10
) as index:
    for hour in range(6):
        index.put("orders", 0, "order-4711", offset=hour, size=512, timestamp_ms=1_700_006_400_000 + hour * 3_600_000)
        index.seal()
        index.run_lifecycle()

report = merge(uri, window="1d")  # `--min-age` and others: options=MergeOptions(min_age_s=3600)
assert (report.sources, report.tables, report.entries) == (6, 1, 6)
with IndexReader.open(uri) as reader:
    assert [item.offset for item in reader.query("orders", "order-4711")] == [5, 4, 3, 2, 1, 0]
    assert reader.query("orders", "order-4711").explain.files_read == 1
