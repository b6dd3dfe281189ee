"""What was erased is left out by bulk lookups, the data source, merges and audits on Spark, as by a reader."""

from __future__ import annotations

import pytest

from tests.spark.entries import BEGIN_MS
from tiered_index import IndexReader, IndexService, erase
from tiered_index.spark import audit, look_up, merge, register

HOUR_MS = 3_600_000
ROWS = [(topic, n % 2, f"k{n % 3}", BEGIN_MS + n * HOUR_MS) for n in range(24) for topic in ("orders", "debug")]
UNTIL_MS = BEGIN_MS + 12 * HOUR_MS


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A day of two topics: of one a key was erased, of the other half a day of a queue."""
    folder = tmp_path_factory.mktemp("index")
    storage = f"file://{folder}/storage"
    with IndexService.open(root=folder / "root", storage=storage, slots=64, items=700, background=False) as writer:
        for number, (topic, queue, key, time_ms) in enumerate(ROWS):
            writer.put(topic, queue, key, number, 1, time_ms)
        writer.seal()
        writer.run_lifecycle()
    assert erase(storage, "orders", keys="k1", yes=True).status == "hidden"
    assert erase(storage, "debug", queue_id=1, before_ms=UNTIL_MS, yes=True).status == "hidden"
    return storage


def kept():
    return [
        (number, *row)
        for number, row in enumerate(ROWS)
        if row[0::2][:2] != ("orders", "k1") and not (row[:2] == ("debug", 1) and row[3] < UNTIL_MS)
    ]


def test_answers_tables_and_audits(spark, index):
    keys = spark.createDataFrame(
        [(t, f"k{n}") for t in ("orders", "debug") for n in range(3)], "topic string, key string"
    )
    source = spark.createDataFrame(
        [(topic, queue, key, n, 1, ms) for n, (topic, queue, key, ms) in enumerate(ROWS)],
        "topic string, queue_id int, key string, offset long, size int, timestamp_ms long",
    )
    register(spark)
    offsets = sorted(row[0] for row in kept())

    found = look_up(spark, keys, storage=index).frame.collect()
    assert sorted(row.offset for row in found if row.offset is not None) == offsets
    assert sorted(row.offset for row in spark.read.format("tiered_index").load(index).collect()) == offsets
    one = spark.read.format("tiered_index").option("topic", "debug").option("key", "k1").load(index)
    asked = sorted(row[0] for row in kept() if row[1] == "debug" and row[3] == "k1")
    assert sorted(row.offset for row in one.collect()) == asked
    audited = audit(spark, storage=index, source=source)
    assert audited.differences is not None and not sum(audited.differences.counts.values())
    report = merge(spark, storage=index)
    assert (report.entries, report.expired) == (48, 48 - len(offsets))
    with IndexReader.open(index) as reader:
        assert sum(topic.entries for topic in reader.topics().topics) == len(offsets)
    assert not audit(spark, storage=index, source=source).report.findings
