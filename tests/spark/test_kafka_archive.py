"""The programs of docs/kafka.md on the archive: DuckDB opens it, and Spark builds an index of another field.

`test_docs.py` has the entries of records, `tests/brokers` Spark's Kafka source, whose jar is on Maven.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from tests.spark.pages import programs, section
from tiered_index import IndexReader, IndexService
from tiered_index.kafka.archive import encode_records
from tiered_index.kafka.columns import SCHEMA, SIZE
from tiered_index.kafka.messages import KafkaMessages

MANY, BEGIN_MS = 300, 1_700_006_400_000


def records(partition):
    rows = []
    for n in range(MANY):
        value = json.dumps({"customer": f"c{n % 100}", "n": n}).encode() if n % 10 else None
        row = {"key": b"k%d" % n, "value": value, "topic": "orders", "partition": partition, "offset": n}
        row |= {"timestamp": BEGIN_MS + n, "timestampType": 0}
        row["headers"] = [{"key": "h", "value": b"v"}, {"key": "empty", "value": None}] if n % 3 else None
        rows.append(row | {SIZE: len(row["key"]) + len(value or b"") + (len("hvempty") if n % 3 else 0)})
    return pa.Table.from_pylist(rows, SCHEMA.append(pa.field(SIZE, pa.int64())))


@pytest.mark.long
def test_the_programs_of_the_page_open_the_archive(spark, tmp_path, capsys):
    uri, built = (tmp_path / "index").as_uri(), (tmp_path / "built").as_uri()
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=97, items=5_000) as index:
        for partition in range(2):
            file = encode_records(("orders", partition), records(partition), ("key",))
            assert index.archive_columns(f"kafka:cluster/orders/{partition}", 0, MANY, file)
    namespace = {}
    for program in programs(section("kafka.md", "Open the archive with DuckDB or Spark")):
        for place, own in (("s3://bucket/index", uri), ("s3://bucket/by-customer", built)):
            program = program.replace(f'"{place}"', repr(own))
        exec(compile(program, "docs/kafka.md", "exec"), namespace)
    assert str(MANY - 1) in capsys.readouterr().out
    with IndexReader.open(built) as reader, IndexReader.open(uri) as archive:
        source = KafkaMessages(archive.segment_archives, keys=("json:customer",))
        fetched_records = reader.messages("orders", "c7", source=source).messages
        assert sorted((fetched.message.partition, fetched.message.offset) for fetched in fetched_records) == [
            (partition, n) for partition in range(2) for n in (7, 107, 207)
        ]
        assert reader.query("orders", "c10").items == ()
