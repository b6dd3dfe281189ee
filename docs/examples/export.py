"""Export the entries of an index as Arrow batches, and put them into another index."""

import tempfile
from pathlib import Path

import pyarrow as pa

from tiered_index import IndexReader, IndexService

folder = tempfile.TemporaryDirectory()
root = Path(folder.name)

with IndexService.open(root=root / "one", storage="memory://one", slots=100, items=1000) as index:
    for n in range(100):
        index.put("orders", 0, f"order-{n}", offset=n, size=100, timestamp_ms=1_700_000_000_000 + n * 1000)
    index.seal()
    index.run_lifecycle()
    with index.export("orders", begin_ms=1_700_000_010_000) as export:
        table = pa.Table.from_batches(export, export.schema)
    assert len(table) == export.entries == 90
    with IndexService.open(root=root / "two", storage="memory://two", slots=100, items=1000) as copy:
        copy.put_batch(table)
        assert copy.query("orders", "order-50").items == index.query("orders", "order-50").items
        with copy.export() as again:
            assert sum(map(len, again)) == 90 and again.checksum == export.checksum

with IndexReader.open("memory://one") as reader:
    assert reader.files_table()["entries"].to_pylist() == [100]
    (row,) = reader.du().to_pylist()
    assert (row["topic"], row["state"], row["entries"]) == ("orders", "storage", 100)
