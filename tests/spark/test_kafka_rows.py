"""Rows of Kafka become the entries that `ingest` makes of the same records: by a build, and by a stream.

The rows are those of archived records, which have the columns of Spark's Kafka source. `tests/brokers` has tests of the
source itself, whose jar is on Maven.

The programs of docs/kafka.md on the archive run here, too: DuckDB opens it, and Spark builds an index of another field.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spark.pages import DOCS, programs, section
from tiered_index import IndexReader, IndexService
from tiered_index.kafka.archive import encode_records
from tiered_index.kafka.columns import RecordColumns
from tiered_index.kafka.keys import RecordKeys
from tiered_index.kafka.messages import KafkaMessages
from tiered_index.kafka.record import KafkaRecord, TimestampType
from tiered_index.spark import build, register

T = 1_762_000_000_000
KEYS = ("key", "header:trace", "json:order.id")
RECORDS = [
    KafkaRecord("orders", 0, 0, b"customer-1", b'{"order": {"id": "o-1"}}', (("trace", b"t-1"), ("n", None)), T),
    KafkaRecord("orders", 0, 1, b"customer-1", b"no json", (("trace", b"t-2"), ("trace", b"t-3")), T + 1000),
    KafkaRecord("orders", 0, 2, None, b'{"order": {"id": 4711}}', (), T + 2000),
    KafkaRecord("orders", 0, 5, b"customer-2", None, (("other", b"t-1"),), T + 3000),
    KafkaRecord("orders", 0, 6, b"o-1", b'{"order": {"id": "o-1"}}', (), T + 4000),
    KafkaRecord("orders", 0, 7, b"", b"{}", (), T + 5000),
    KafkaRecord("orders", 0, 8, None, None, (), T + 6000),
    KafkaRecord("orders", 0, 9, b"\xff\x0a", b"{}", (("trace", b"\xe2\x82"),), T + 7000),
    KafkaRecord("orders", 0, 10, (42).to_bytes(8, "big"), None, (("trace", b"a\tb"),), T + 8000),
]
ASKED = ["customer-1", "customer-2", "t-1", "t-2", "t-3", "o-1", "4711", "", "n", "none", "0xff0a", "0xe282"]
ASKED += ["0x000000000000002a", "0x610962"]


@pytest.fixture(scope="module")
def recipe():
    """The schema and the mapping of the example."""
    program = (DOCS / "examples/spark_kafka.py").read_text().partition("spark = open_session()")[0]
    names: dict[str, object] = {}
    exec(compile(program, "spark_kafka.py", "exec"), names)
    return names["KAFKA"], names["entries_of"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The answers of an index with each record under the follower's keys."""
    keys, root = RecordKeys(KEYS), tmp_path_factory.mktemp("followed")
    with IndexService.open(root=root, storage=(root / "storage").as_uri(), slots=97, items=1000) as index:
        for one in RECORDS:
            if found := keys.of(one):
                index.put(one.topic, one.partition, found, one.offset, one.size, one.timestamp_ms)
        return answers(index)


def answers(index):
    found = {}
    for key in filter(None, ASKED):
        items = index.query("orders", key).items
        found[key] = [(item.queue_id, item.offset, item.size, item.timestamp_ms) for item in items]
    # a lookup tries further spellings of a key: the stored one is that of `ingest`
    with index.export() as batches:
        stored = sorted((row["offset"], row["fingerprint"]) for batch in batches for row in batch.to_pylist())
    return found, stored


@pytest.fixture
def archived(tmp_path):
    clocked = [KafkaRecord(*(getattr(one, n) for n in one.__slots__[:-1]), TimestampType.CREATE) for one in RECORDS]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "part.parquet").write_bytes(
        encode_records(("orders", 0), RecordColumns.of_records(clocked), KEYS)
    )
    return str(tmp_path / "records")


def test_a_build_of_rows_answers_as_the_follower(spark, archived, recipe, expected, tmp_path):
    found = {field.name: field.dataType for field in spark.read.parquet(archived).schema}
    # the columns of Spark's Kafka source
    assert found == {field.name: field.dataType for field in spark.createDataFrame([], recipe[0]).schema}
    rows, uri = spark.read.schema(recipe[0]).parquet(archived), f"file://{tmp_path}/index"
    build(spark, recipe[1](rows), storage=uri, window="1d")
    with IndexReader.open(uri) as reader:
        assert answers(reader) == expected
    assert (sum(map(len, expected[0].values())), len(expected[1])) == (13, 13)


@pytest.mark.long
def test_a_stream_of_rows_answers_as_the_follower(spark, archived, recipe, expected, tmp_path):
    register(spark)
    uri = Path(tmp_path / "index").as_uri()
    rows = spark.readStream.schema(recipe[0]).parquet(archived)
    sink = recipe[1](rows).writeStream.format("tiered_index").options(window="1d", slots=1000)
    sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    sink.start(uri).awaitTermination()
    with IndexReader.open(uri) as reader:
        assert answers(reader) == expected


MANY, BEGIN_MS = 300, 1_700_006_400_000


def records(partition):
    for n in range(MANY):
        value = json.dumps({"customer": f"c{n % 100}", "n": n}).encode() if n % 10 else None
        headers = (("h", b"v"), ("empty", None)) if n % 3 else ()
        time = (BEGIN_MS + n, TimestampType.CREATE)
        yield KafkaRecord("orders", partition, n, b"k%d" % n, value, headers, *time)


def test_the_programs_of_the_page_open_the_archive(spark, tmp_path, capsys):
    uri, built = (tmp_path / "index").as_uri(), (tmp_path / "built").as_uri()
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=97, items=5_000) as index:
        for partition in range(2):
            file = encode_records(("orders", partition), RecordColumns.of_records(list(records(partition))), ("key",))
            assert index.archive_columns(f"kafka:cluster/orders/{partition}", 0, MANY, file)
    namespace = {}
    for program in programs(section("kafka.md", "Open the archive with DuckDB or Spark")):
        for place, own in (("s3://bucket/index", uri), ("s3://bucket/by-customer", built)):
            program = program.replace(f'"{place}"', repr(own))
        exec(compile(program, "docs/kafka.md", "exec"), namespace)
    assert str(MANY - 1) in capsys.readouterr().out
    with IndexReader.open(built) as reader, IndexReader.open(uri) as archive:
        source = KafkaMessages(archive.segment_archives, keys=("json:customer",))
        found = reader.messages("orders", "c7", source=source).messages
        assert sorted((one.message.partition, one.message.offset) for one in found) == [
            (partition, n) for partition in range(2) for n in (7, 107, 207)
        ]
        assert reader.query("orders", "c10").items == ()
