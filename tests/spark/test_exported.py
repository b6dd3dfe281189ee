"""Spark opens what `export` writes as an ordinary table."""

from __future__ import annotations

import pyarrow.parquet as pq

from tiered_index import IndexService, hash_key


def test_an_exported_file_is_a_table(spark, tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/s", slots=10, items=200) as index:
        for n in range(100):
            index.put("orders", 0, f"order-{n}", n, 10, 1_700_000_000_000 + n * 1000)
        with index.export() as export, pq.ParquetWriter(tmp_path / "entries.parquet", export.schema) as writer:
            for batch in export:
                writer.write_batch(batch)
        item = index.query("orders", "order-7")[0]
    entries = spark.read.parquet(str(tmp_path / "entries.parquet"))
    assert ", ".join(" ".join(column) for column in entries.dtypes) == (
        "topic string, topic_id int, queue_id int, offset bigint, size int, timestamp_ms bigint, key_hash int, "
        "fingerprint bigint"
    )
    (row,) = entries.where(f"topic = 'orders' AND key_hash = {hash_key('orders', 'order-7')}").collect()
    assert row.asDict() == {name: value for name, value in item.to_dict().items() if name != "source"}
    assert entries.count() == 100
