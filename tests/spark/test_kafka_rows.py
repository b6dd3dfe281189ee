"""Rows of Kafka become the entries that `ingest` makes of the same records: by a build, and by a stream.

The rows are those of archived records, which have the columns of Spark's Kafka source. That source itself is a jar from
Maven, which no test has.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.spark.pages import programs, section
from tiered_index import IndexReader, IndexService
from tiered_index.kafka.archive import encode_records
from tiered_index.kafka.keys import Keys
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
]
ASKED = ["customer-1", "customer-2", "t-1", "t-2", "t-3", "o-1", "4711", "", "n", "none"]


@pytest.fixture(scope="module")
def recipe():
    """The schema and the mapping of the page."""
    program = ast.parse(programs(section("spark-sql.md", "Streams into an index"))[1])
    wanted = ("HEADERS", "KAFKA", "size_of", "entries_of")
    program.body = [
        one
        for one in program.body
        if isinstance(one, (ast.Import, ast.ImportFrom))
        or getattr(one, "name", None) in wanted
        or (isinstance(one, ast.Assign) and getattr(one.targets[0], "id", None) in wanted)
    ]
    names: dict[str, object] = {}
    exec(compile(program, "docs/spark-sql.md", "exec"), names)
    return names["KAFKA"], names["entries_of"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The answers of an index that has each record by the keys that the follower takes."""
    keys, root = Keys(KEYS), tmp_path_factory.mktemp("followed")
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
    return found


@pytest.fixture
def archived(tmp_path):
    clocked = [KafkaRecord(*(getattr(one, n) for n in one.__slots__[:-1]), TimestampType.CREATE) for one in RECORDS]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "part.parquet").write_bytes(encode_records(clocked, KEYS))
    return str(tmp_path / "records")


def test_archived_records_have_the_columns_of_kafka(spark, archived, recipe):
    schema = spark.createDataFrame([], recipe[0]).schema
    found = {field.name: field.dataType for field in spark.read.parquet(archived).schema}
    assert found == {field.name: field.dataType for field in schema}


def test_a_build_of_rows_answers_as_the_follower(spark, archived, recipe, expected, tmp_path):
    rows, uri = spark.read.schema(recipe[0]).parquet(archived), f"file://{tmp_path}/index"
    build(spark, recipe[1](rows), storage=uri, window="1d")
    with IndexReader.open(uri) as reader:
        assert answers(reader) == expected
    assert sum(map(len, expected.values())) == 9


def test_a_stream_of_rows_answers_as_the_follower(spark, archived, recipe, expected, tmp_path):
    register(spark)
    uri = Path(tmp_path / "index").as_uri()
    rows = spark.readStream.schema(recipe[0]).parquet(archived)
    sink = recipe[1](rows).writeStream.format("tiered_index").options(window="1d", slots=1000)
    sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    sink.start(uri).awaitTermination()
    with IndexReader.open(uri) as reader:
        assert answers(reader) == expected
