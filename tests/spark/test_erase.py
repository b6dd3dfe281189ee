"""`spark erase`: executors remove the same entries as `erase --now`, and the certificates agree.

Bulk lookups, the data source, merges and audits on Spark leave out erased and expired entries, as a reader does.
"""

import json
import shutil
from dataclasses import fields
from functools import partial

import pytest

from tests.rocketmq.archived_store import open_index, put
from tests.spark.commands import outcome_of
from tests.spark.entries import BEGIN_MS, DAY_MS
from tests.support.damage import flip_object
from tests.support.log_records import open_log, segments_of
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, IndexService, erase
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.base.retention import Retention
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.format.segments.archived import HEAD_BYTES
from tiered_index.service.jobs.expiry import record_expiry
from tiered_index.service.jobs.merge_run import MergeOptions, merge_index
from tiered_index.service.jobs.segments.catalogs import merge_catalogs
from tiered_index.service.read.segments.segments import Segments
from tiered_index.spark import audit, look_up, merge, register
from tiered_index.spark import erase as erase_on
from tiered_index.storage.local import LocalStorage

START_MS = 1_700_000_000_000
NOW_MS = START_MS + 3_600_000


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """An index of files, a window table and archived segments."""
    folder = tmp_path_factory.mktemp("origin")
    with StoreWriter(folder / "store", segment_bytes=HEAD_BYTES + 513) as writer:
        for n in range(240):
            keys = [f"k-{n % 9}", "all"]
            writer.put(("orders", "pay")[n % 4 == 0], n % 3, b"secret" * 1500, keys=keys, store_ms=START_MS + n * 1000)
    storage = LocalStorage(folder / "storage")
    with open_index(folder / "root", storage, clock=ManualClock(NOW_MS)) as index:
        for number, message in enumerate(CommitLogReader(folder / "store" / "commitlog").messages()):
            put(index, message)
            if number in (80, 160):
                index.seal()
                index.run_lifecycle()
                if number == 80:
                    merge_index(storage.uri, options=MergeOptions(min_age_s=0), clock=ManualClock(NOW_MS + 10**8))
        assert SegmentArchiver(index, "a-store", folder / "store" / "commitlog").run_once() >= 2
        index.seal()
        index.run_lifecycle()
    return folder / "storage"


def content(uri):
    """Return all entries, and the bytes of all archived segments by place, without the objects' names."""
    storage = LocalStorage(uri.removeprefix("file://"))
    with IndexReader.open(uri) as reader, reader.export() as batches:
        rows = sorted(json.dumps(row, default=str) for batch in batches for row in batch.to_pylist())
        segments = [(segment.place, storage.get(segment.name)) for segment in segments_of(reader.log_state)]
    return rows, sorted(segments)


def said(certificate):
    """Return the certificate without the names, which are new in each run."""
    known = {f.name: getattr(certificate, f.name) for f in fields(certificate) if f.name != "metrics"}
    sizes = "scanned_bytes", "deleted_bytes"
    return {
        name: sorted((file.file_id, file.count) for file in value) if name == "objects" else value
        for name, value in known.items()
        if name not in ("removed", *sizes)
    } | {"removed": len(certificate.removed)}


ASKED = {"key": {"keys": "k-3"}, "queue": {"queue_id": 1, "before_ms": START_MS + 100_000}}


@pytest.mark.parametrize("selection", [ASKED["key"], pytest.param(ASKED["queue"], marks=pytest.mark.long)], ids=ASKED)
def test_the_remaining_bytes_are_those_of_an_erasure_without_spark(spark, origin, tmp_path, selection):
    here, there = f"file://{tmp_path}/here", f"file://{tmp_path}/there"
    for name in ("here", "there"):
        shutil.copytree(origin, tmp_path / name)
    clock = ManualClock(NOW_MS)
    on_spark = partial(erase_on, spark, storage=there, topic="orders", clock=clock, **selection)
    planned = on_spark()
    assert planned.status == "planned" and content(there) == content(f"file://{origin}")
    expected = erase(here, "orders", yes=True, now=True, grace_s=0, clock=clock, **selection)
    done = on_spark(yes=True, grace_s=0)
    assert expected.status == "erased" and expected.messages_erased and expected.entries_removed
    assert said(done) == said(expected) and content(there) == content(here)
    assert done.metrics.requests["put"] > done.segments_rewritten > 0
    again = on_spark(yes=True, grace_s=0)
    assert (again.status, again.entries, again.messages_erased) == ("erased", 0, 0)


def test_the_command_answers_as_without_spark(spark, origin, tmp_path):
    shutil.copytree(origin, tmp_path / "index")
    uri = f"file://{tmp_path}/index"
    done = outcome_of(f"erase --topic orders --key k-3 --grace 0 --yes --storage {uri}").document
    assert (done["status"], done["scan"]["remaining"]) == ("erased", [])
    assert done["requests"] == done["metrics"]["requests"] and done["cost_usd"] > 0
    with IndexReader.open(uri) as reader:
        assert not len(reader.query("orders", "k-3")) and len(reader.query("orders", "k-4"))


@pytest.mark.long
def test_an_audit_checks_archived_segments_of_catalogs(spark, origin, tmp_path):
    shutil.copytree(origin, tmp_path / "copy")
    storage = LocalStorage(tmp_path / "copy")
    log = open_log(storage, SystemClock())
    assert merge_catalogs(log) == 1 and not log.state.inline
    name = [segment.name for segment in Segments(log.state, storage)][-1]
    flip_object(storage, name, 100)
    assert {finding.file for finding in audit(spark, storage=storage.uri).report.findings} == {name}


HOUR_MS = 3_600_000
COUNT = 96
# topic, queue_id, key, offset, size and time
PUT_ROWS = [
    (("orders", "debug")[n % 2], n // 2 % 2, f"k{n // 2 % 3}", n, 1, BEGIN_MS + n // 2 * HOUR_MS) for n in range(COUNT)
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Two days of two topics. Half a day of one topic has expired, and one key was erased. A day of the other topic has
    expired, and some hours more of one queue were erased.
    """
    folder = tmp_path_factory.mktemp("index")
    storage = f"file://{folder}/storage"
    with IndexService.open(root=folder / "root", storage=storage, slots=64, items=700, background=False) as writer:
        for row in PUT_ROWS:
            writer.put(*row)
        writer.seal()
        writer.run_lifecycle()
    rule = Retention(age_s=36 * 3600, topics={"debug": 24 * 3600})
    log = open_log(LocalStorage(folder / "storage"), SystemClock())
    record_expiry(log, rule, BEGIN_MS + 2 * DAY_MS)
    assert erase(storage, "orders", keys="k1", yes=True).status == "hidden"
    assert erase(storage, "debug", queue_id=1, before_ms=BEGIN_MS + 30 * HOUR_MS, yes=True).status == "hidden"
    return storage


def is_kept(topic, queue, key, offset, size, time_ms):
    hour = (time_ms - BEGIN_MS) // HOUR_MS
    return hour >= (30 if queue else 24) if topic == "debug" else hour >= 12 and key != "k1"


def test_answers_tables_and_audits(spark, index):
    schema = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
    source = spark.createDataFrame(PUT_ROWS, schema)
    keys = source.select("topic", "key").distinct()
    register(spark)
    kept_rows = [row for row in PUT_ROWS if is_kept(*row)]
    offsets = [row[3] for row in kept_rows]

    result = look_up(spark, keys, storage=index)
    assert sorted(row.offset for row in result.frame.collect() if row.offset is not None) == offsets
    assert result.expired_before_ms == BEGIN_MS + DAY_MS
    assert sorted(row.offset for row in spark.read.format("tiered_index").load(index).collect()) == offsets
    looked_up = spark.sql(f"SELECT * FROM tiered_index_lookup('{index}', 'debug', 'k1')")
    assert sorted(row.offset for row in looked_up.collect()) == [
        row[3] for row in kept_rows if row[0::2][:2] == ("debug", "k1")
    ]
    audited = audit(spark, storage=index, source=source)
    assert not sum(audited.differences.counts.values())
    report = merge(spark, storage=index)
    assert (report.entries, report.expired) == (COUNT, COUNT - len(kept_rows))
    with IndexReader.open(index) as reader:
        assert sum(topic.entries for topic in reader.topics().topics) == len(kept_rows)
    audited = audit(spark, storage=index, source=source)
    assert not audited.report.findings and not sum(audited.differences.counts.values())
