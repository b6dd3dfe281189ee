"""Entries with columns of a program's own."""

import tempfile
from dataclasses import dataclass

from tiered_index import IndexReader, IndexService, KeyedIndexItem, column


@dataclass(frozen=True, kw_only=True)
class TraceItem(KeyedIndexItem):
    region: int = column(">u2")
    duration_us: int = column(">u4")
    host: str = column("text", width=32)


folder = tempfile.TemporaryDirectory()

with IndexService.open(root=folder.name, storage="memory://traces", item_type=TraceItem) as index:
    own = {"region": 4, "duration_us": 1234, "host": "zürich-7"}
    index.put("spans", 3, "trace-77", offset=10, size=99, timestamp_ms=1_700_000_000_000, **own)
    index.seal()
    index.run_lifecycle()

with IndexReader.open("memory://traces") as reader:  # the class isn't needed to read
    (item,) = reader.query("spans", "trace-77")
    assert (item.region, item.duration_us, item.host) == (4, 1234, "zürich-7")

with IndexReader.open("memory://traces", item_type=TraceItem) as reader:  # type checkers know `region` then
    assert [item.region for page in reader.query_all("spans", "trace-77") for item in page] == [4]
    assert reader.query("spans", "trace-77").to_arrow()["duration_us"].to_pylist() == [1234]
