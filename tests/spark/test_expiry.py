"""What has expired is left out by bulk lookups, the data source, merges and audits on Spark, as by a reader."""

from __future__ import annotations

import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS
from tiered_index import IndexReader, IndexService
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.retention import Retention
from tiered_index.service.lifecycle.expiry import record_expiry
from tiered_index.service.log.log import StorageLog
from tiered_index.spark import audit, look_up, merge, register
from tiered_index.storage.local.storage import LocalStorage

HOUR_MS = 3_600_000
ROWS = [(topic, BEGIN_MS + hour * HOUR_MS) for hour in range(48) for topic in ("orders", "debug")]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Two days of two topics, of which half a day and a day have expired."""
    folder = tmp_path_factory.mktemp("index")
    storage = f"file://{folder}/storage"
    with IndexService.open(root=folder / "root", storage=storage, slots=64, items=700, background=False) as writer:
        for number, (topic, time_ms) in enumerate(ROWS):
            writer.put(topic, 0, f"k{number % 3}", number, 1, time_ms)
        writer.seal()
        writer.run_lifecycle()
    log = StorageLog(LocalStorage(folder / "storage"), SystemClock())
    log.open()
    rule = Retention(age_s=36 * 3600, topics={"debug": 24 * 3600})
    record_expiry(log, rule, ManualClock(BEGIN_MS + 2 * DAY_MS))
    return storage


def kept(rows=ROWS):
    return sorted((topic, ms) for topic, ms in rows if ms >= BEGIN_MS + (24 if topic == "debug" else 12) * HOUR_MS)


def test_answers_tables_and_audits(spark, index):
    keys = spark.createDataFrame(
        [(t, f"k{n}") for t in ("orders", "debug") for n in range(3)], "topic string, key string"
    )
    source = spark.createDataFrame(
        [(topic, 0, f"k{n % 3}", n, 1, ms) for n, (topic, ms) in enumerate(ROWS)],
        "topic string, queue_id int, key string, offset long, size int, timestamp_ms long",
    )
    register(spark)

    result = look_up(spark, keys, storage=index)
    found = sorted((row.topic, row.timestamp_ms) for row in result.frame.collect() if row.offset is not None)
    assert (found, result.expired_before_ms) == (kept(), BEGIN_MS + DAY_MS)
    read = spark.read.format("tiered_index").load(index)
    assert sorted((row.topic, round(row.timestamp.timestamp() * 1000)) for row in read.collect()) == kept()
    one = spark.read.format("tiered_index").option("topic", "debug").option("key", "k1").load(index)
    asked = [row for row in kept() if row[0] == "debug" and ROWS.index(row) % 3 == 1]
    assert one.count() == len(asked) > 0
    report = merge(spark, storage=index)
    assert (report.entries, report.expired) == (96, 36)
    audited = audit(spark, storage=index, source=source)
    assert not audited.report.findings
    assert audited.differences is not None and not sum(audited.differences.counts.values())
    with IndexReader.open(index) as reader:
        assert sum(topic.entries for topic in reader.topics().topics) == len(kept())
