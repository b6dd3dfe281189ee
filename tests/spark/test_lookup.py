"""Bulk lookups on Spark: rows in, answers out, as a reader's; bad keys, files that can't be read, an index that is
merged meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812

from tests.spark.entries import BEGIN_MS, DAY_MS, messages, states, sweep, write_parquet
from tests.support.cold_index import without_summary
from tiered_index import IndexConfig, IndexReader, IndexService, KeyedIndexItem, column
from tiered_index.cli.main import run
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    StorageError,
    StorageUnavailable,
)
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.merge.run import MergeOptions
from tiered_index.spark import build, look_up, lookup, merge
from tiered_index.spark.lookup import packing as lookup_packing
from tiered_index.spark.lookup import plan as lookup_plan
from tiered_index.spark.lookup.keys import keys_of, read_keys
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.opening import open_storage
from tiered_index.types import format_time, parse_time

KEYS = "topic string, key string, begin_ms long, end_ms long, id int"
ENTRY = ("topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash", "fingerprint")


@pytest.fixture(scope="module")
def index(spark, tmp_path_factory):
    """A storage with files of a live writer and tables that were built, and all that they hold."""
    folder = tmp_path_factory.mktemp("index")
    storage = f"file://{folder}/storage"
    table = messages(2_000, days=3)
    with IndexService.open(root=folder / "root", storage=storage, slots=64, items=700, background=False) as writer:
        writer.put_batch(table)
        writer.flush()
        writer.seal()
        writer.run_lifecycle()
    more = messages(400, seed=5)
    build(
        spark,
        write_parquet(more, folder / "m.parquet"),
        storage=storage,
        window="1d",
        config=IndexConfig(slots=64, items=100_000),
    )
    return storage


@pytest.fixture
def copied(index, tmp_path):
    """A copy of that storage, which a test may harm."""
    shutil.copytree(urlsplit(index).path, tmp_path / "storage")
    return f"file://{tmp_path}/storage"


ROWS = [
    ("orders", "key-0", None, None, 1),
    ("orders", "key-0", None, None, 2),
    ("orders", "key-0", BEGIN_MS, BEGIN_MS + DAY_MS, 3),
    ("orders", "key-7", None, BEGIN_MS + 2 * DAY_MS, 4),
    ("überweisung", "key-7", None, None, 5),
    ("orders", "nobody", None, None, 6),
    ("nowhere", "key-0", None, None, 7),
    *(("payments", f"key-{n}", None, None, 100 + n) for n in range(40)),
]


def check(storage, rows, max_count):
    """Assert that rows (of entries, with their id) are what a reader answers to `ROWS`."""
    found = {}
    for row in rows:
        found.setdefault(row["id"], []).append(row)
    assert sorted(found) == sorted(row[4] for row in ROWS)
    with IndexReader.open(storage) as reader:
        for topic, key, begin, end, number in ROWS:
            answer = reader.query(topic, key, begin, end, max_count=max_count)
            mine = sorted((row for row in found[number]), key=lambda row: row["position"] or 0)
            assert {(row["topic"], row["key"], row["status"], row["failed"]) for row in mine} == {
                (topic, key, answer.status, None)
            }
            entries = [tuple(row[name] for name in ENTRY) for row in mine if row["position"] is not None]
            assert entries == [tuple(getattr(item, name) for name in ENTRY) for item in answer]


def test_answers_are_a_readers(spark, index):
    told = []
    result = look_up(
        spark, spark.createDataFrame(ROWS, KEYS), storage=index, max_count=5, progress=lambda *said: told.append(said)
    )
    check(index, [row.asDict() for row in result.frame.collect()], 5)
    assert (result.rows, result.skipped_null, result.plans, result.failed) == (len(ROWS), 0, 1, ())
    # a repeated row is one lookup
    assert sum(result.statuses.values()) == len(ROWS) - 1 and set(result.statuses) == {"complete", "truncated"}
    objects = states(index).objects
    assert result.objects == len(objects) and result.log_number == states(index).number
    assert 2 * len(objects) <= result.requests < 10 * len(objects)
    assert 0 < result.bytes_read < sum(stored.size_bytes for stored in objects.values()) and result.cost_usd > 0
    assert {stage for stage, _, _ in told} == {"count", "search"}
    result.release()


@pytest.mark.parametrize("held", [1 << 21, 0], ids=["held", "shuffled"])
def test_many_keys(spark, index, monkeypatch, held):
    """More than go to the driver with what is told of them, or than it holds at all."""
    monkeypatch.setattr(lookup_packing, "_MOST_HELD", held)
    frame = spark.createDataFrame(ROWS, KEYS).coalesce(1)
    many = frame.unionAll(
        spark.range(7_000).selectExpr("'payments'", "concat('none-', id)", "NULL", "NULL", "-1")
    ).coalesce(1)
    result = look_up(spark, many, storage=index, max_count=5)
    rows = [row.asDict() for row in result.frame.collect()]
    check(index, [row for row in rows if row["id"] > 0], 5)
    none = [row for row in rows if row["id"] < 0]
    assert len(none) == 7_000 and {(row["status"], row["position"]) for row in none} == {("complete", None)}
    assert sum(result.statuses.values()) == len(ROWS) - 1 + 7_000
    # blocks are large, and Java's serialization holds many groups of them
    relation = result.kept._jdf.queryExecution().withCachedData()
    groups = relation.cacheBuilder().cachedColumnBuffers().collect()
    assert [group.numRows() for group in groups] == [1] * result.kept.count()
    result.release()


def test_columns_by_name_constants_timestamps_and_nested_entries(spark, index):
    frame = spark.createDataFrame([("key-0", "a"), ("key-1", "b")], "order_id string, `my id` string")
    frame = frame.withColumn("since", F.timestamp_millis(F.lit(BEGIN_MS + DAY_MS)))
    columns = {"key": "order_id", "begin_ms": "since", "topic": F.lit("orders")}
    rows = lookup(spark, frame, storage=index, columns=columns, nested=True, max_count=1000).collect()
    assert rows[0].__fields__ == ["order_id", "my id", "since", "topic", "status", "failed", "entries"]
    with IndexReader.open(index) as reader:
        for row in rows:
            answer = reader.query("orders", row.order_id, BEGIN_MS + DAY_MS, max_count=1000)
            assert [entry.offset for entry in row.entries] == [item.offset for item in answer]
    assert {row["my id"] for row in rows} == {"a", "b"}


def test_no_keys_and_no_files_in_range(spark, index):
    empty = look_up(spark, spark.createDataFrame([], KEYS), storage=index)
    assert (empty.frame.collect(), empty.rows, empty.requests, empty.statuses) == ([], 0, 0, {})
    early = look_up(spark, spark.createDataFrame([("orders", "key-0", 0, 1000, 1)], KEYS), storage=index, nested=True)
    (row,) = early.frame.collect()
    assert (row.status, row.entries, early.requests, early.objects) == ("complete", [], 0, 0)


def test_rows_with_nulls_are_named_or_counted(spark, index):
    frame = spark.createDataFrame(
        [("orders", "key-1", None, None, 1), ("orders", None, None, None, 2), (None, "k", None, None, 3)], KEYS
    )
    with pytest.raises(InvalidArgument, match=r"column 'topic' has 1 null[ ;]"):
        lookup(spark, frame, storage=index)
    with pytest.raises(InvalidArgument, match=r"column 'key' has 1 null[ ;]"):
        lookup(spark, frame.where("topic is not null"), storage=index)
    with pytest.raises(InvalidArgument, match=r"column 'order' \(key\) has 1 null[ ;]"):
        lookup(
            spark,
            frame.where("topic is not null").withColumnRenamed("key", "order"),
            storage=index,
            columns={"key": "order"},
        )
    result = look_up(spark, frame, storage=index, skip_null=True)
    assert (result.rows, result.skipped_null) == (1, 2)
    assert {row["id"] for row in result.frame.collect()} == {1}
    # of literals Spark asks for the question of rows that are left out
    literals = spark.sql("SELECT 'orders' AS topic, CAST(NULL AS string) AS key UNION ALL SELECT 'orders', 'key-1'")
    some = lookup(spark, literals, storage=index, skip_null=True, max_count=1).collect()
    assert [(row["key"], row["position"]) for row in some] == [("key-1", 0)]


@dataclass(frozen=True, kw_only=True)
class Told(KeyedIndexItem):
    status: int = column(">u2")
    Region: int = column(">u2")


def test_columns_of_entries_that_have_names_of_answers(spark, tmp_path, monkeypatch):
    storage = f"file://{tmp_path}/storage"
    config = IndexConfig(root=tmp_path / "root", storage=storage, slots=64, item_type=Told, background=False)
    with monkeypatch.context() as patch:
        # as an older version made it
        patch.setattr(Schema, "clashing", lambda *_: None)
        writer = IndexService.open(config)
    with writer:
        writer.put("orders", 0, "key-1", 1, 2, BEGIN_MS, status=3, Region=4)
        writer.seal()
        writer.run_lifecycle()
    keys = spark.createDataFrame([("orders", "key-1")], "topic string, key string")
    with pytest.raises(InvalidArgument, match=r"entries have a column 'status'.*nested"):
        lookup(spark, keys, storage=storage)
    [row] = lookup(spark, keys, storage=storage, nested=True).collect()
    assert (row.status, row.entries[0].status, row.entries[0].Region) == ("complete", 3, 4)
    with pytest.raises(InvalidArgument, match="entries have a column 'status'"):
        lookup(spark, keys.selectExpr("*", "1 AS region"), storage=storage)


def test_names_of_answers_are_taken_however_they_are_written(spark):
    with pytest.raises(InvalidArgument, match="column 'region' of the keys"):
        keys_of(spark.createDataFrame([], "topic string, key string, region int"), {}, ["Region"])


BAD = {
    "missing": ("topic string", {}, "column 'key' is missing; the keys have topic"),
    "missing_named": ("topic string, key string", {"key": "kye"}, r"column 'kye' \(key\) is missing"),
    "unknown": ("topic string, key string", {"offset": "key"}, "'offset' is not a field of a lookup"),
    "number": ("topic string, key int", {}, "column 'key' is int; text is needed"),
    "nested": ("topic string, key struct<id: string>", {}, "column 'key' is struct<id:string>; text is needed"),
    "list": ("topic string, key array<string>", {}, "column 'key' is array<string>; text is needed"),
    "decimal_bound": ("topic string, key string, begin_ms decimal(20,0)", {}, "'begin_ms' is decimal"),
    "date_bound": ("topic string, key string, at date", {"end_ms": "at"}, r"'at' \(end_ms\) is date; integers"),
    "fraction": ("topic string, key string, end_ms double", {}, "column 'end_ms' is double; integers"),
    "local time": ("topic string, key string, begin_ms timestamp_ntz", {}, "column 'begin_ms' is timestamp_ntz"),
    "clash": (
        "topic string, key string, Offset int",
        {},
        "column 'Offset' of the keys has the name of a column of answers",
    ),
    "twice": ("topic string, key string, a int, A int", {}, "two columns 'a'"),
    "key twice": ("topic string, key string, key string", {}, "two columns 'key'"),
}


def test_keys_that_no_lookup_takes(spark, index):
    with pytest.raises(InvalidArgument, match=r"topic .*not 5"):
        lookup(spark, spark.createDataFrame([], KEYS), storage=index, columns={"topic": 5})
    with pytest.raises(InvalidArgument, match="stream"):
        lookup(spark, spark.readStream.format("rate").load().selectExpr("'t' AS topic", "'k' AS key"), storage=index)


@pytest.mark.parametrize("case", BAD)
def test_bad_columns_are_named(spark, index, case):
    schema, columns, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        lookup(spark, spark.createDataFrame([], schema), storage=index, columns=columns)


def test_keys_of_nanoseconds_are_refused_with_what_to_write(spark, tmp_path):
    times = pa.array([BEGIN_MS * 10**6]).cast(pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"topic": ["t"], "key": ["k"], "begin_ms": times}), tmp_path / "keys.parquet")
    with pytest.raises(
        InvalidArgument, match=r"keys\.parquet: column 'begin_ms' has times in nanoseconds: write times in"
    ):
        read_keys(spark, str(tmp_path / "keys.parquet"), IndexConfig().s3)


def test_bad_calls_and_bad_rows(spark, index, tmp_path):
    def ask(rows=(("orders", "key-1", None, None, 1),), **options):
        return lookup(spark, spark.createDataFrame(list(rows), KEYS), **{"storage": index, **options})

    with pytest.raises(InvalidArgument, match="max_count"):
        ask(max_count=0)
    with pytest.raises(InvalidArgument, match="max_bytes"):
        ask(max_bytes=-1)
    with pytest.raises(TypeError, match="dry_run"):
        ask(dry_run=True)
    with pytest.raises(ConfigError, match="commit log"):
        ask(messages="archive")
    with pytest.raises(NotAnIndex):
        ask(storage=f"file://{tmp_path}/nothing")
    with pytest.raises(InvalidArgument, match=r"begin_ms 5000.*end_ms 4000"):
        ask([("orders", "key-1", 5000, 4000, 1)])
    with pytest.raises(InvalidArgument, match="column 'key': the key '' of topic 'orders' is 0 "):
        ask([("orders", "key-1", None, None, 1), ("orders", "", None, None, 1)])
    with pytest.raises(InvalidArgument, match=r"column 'k' \(key\).*'x{40}\.\.\.' of topic 'orders' is 40,000 "):
        lookup(
            spark,
            spark.createDataFrame([("orders", "x" * 40_000)], "topic string, k string"),
            storage=index,
            columns={"key": "k"},
        )
    with pytest.raises(BudgetExceeded, match="share of max_requests=3"):
        ask(max_requests=3)


def test_bounds_of_all_tasks(spark, index):
    frame = spark.createDataFrame(ROWS, KEYS)
    found = look_up(spark, frame, storage=index, max_count=5, max_requests=10_000, max_bytes=1 << 30)
    assert 0 < found.requests <= 10_000 and 0 < found.bytes_read <= 1 << 30
    check(index, [row.asDict() for row in found.frame.collect()], 5)
    found.release()


def test_a_source_that_changes_fails_and_is_no_short_answer(spark, index):
    def changing(batches):
        for batch in batches:
            yield batch.set_column(1, "key", pa.array([os.urandom(4).hex() for _ in range(len(batch))]))

    frame = spark.createDataFrame(ROWS[:4], KEYS)
    random = frame.mapInArrow(changing, KEYS)
    with pytest.raises(Exception, match="the keys change"):
        lookup(spark, random, storage=index).collect()


def test_a_file_that_is_denied(spark, copied):
    """The storage can't be read in one place: which object it is, is told; answers that don't need it are whole."""
    stored = next(stored for stored in states(copied).objects.values() if stored.shard is None)
    (path,) = Path(urlsplit(copied).path).rglob(stored.name.rpartition("/")[2])
    path.unlink()
    path.symlink_to(path)
    frame = spark.createDataFrame(ROWS, KEYS)
    with pytest.raises(StorageError, match=stored.name):
        lookup(spark, frame, storage=copied)
    result = look_up(spark, frame, storage=copied, allow_partial=True, nested=True)
    assert [file for file, _ in result.failed] == [stored.file_id]
    rows = {row.id: row for row in result.frame.collect()}
    assert {rows[1].status, rows[2].status} == {"partial"} and rows[1].failed[0].file == stored.file_id
    assert result.statuses["partial"] == len([row for row in rows.values() if row.status == "partial"]) - 1


def test_damage_is_told_by_slot_group(spark, copied):
    """One flipped bit makes the answers partial that need its slot group, and no other."""
    stored = max(states(copied).objects.values(), key=lambda one: one.count)
    (path,) = Path(urlsplit(copied).path).rglob(stored.name.rpartition("/")[2])
    data = bytearray(path.read_bytes())
    runs = parse_trailer(bytes(data), stored.name, len(data)).directory.all_runs()
    assert len(runs) > 1
    data[runs[0].offset] ^= 1
    path.write_bytes(data)
    # filters of a summary would spare a reader some of the groups that the job reads
    with open_storage(copied) as storage:
        without_summary(storage)
    frame = spark.createDataFrame(ROWS, KEYS)
    result = look_up(spark, frame, storage=copied, allow_partial=True, nested=True, max_count=1000)
    rows = {row.id: row for row in result.frame.collect()}
    with IndexReader.open(copied) as reader:
        alone = {
            number: reader.query(topic, key, begin, end, max_count=1000, allow_partial=True)
            for topic, key, begin, end, number in ROWS
        }
    statuses = {number: answer.status for number, answer in alone.items()}
    assert {number: row.status for number, row in rows.items()} == statuses
    assert {"partial", "complete"} == {*statuses.values()}
    assert {number: len(row.entries or ()) for number, row in rows.items()} == {n: len(a) for n, a in alone.items()}
    assert len(result.failed) == 1
    with pytest.raises(CorruptFile):
        look_up(spark, frame, storage=copied)


def test_an_index_that_is_merged_meanwhile_and_an_object_that_is_lost(spark, copied, monkeypatch):
    frame = spark.createDataFrame(ROWS, KEYS)
    before = states(copied)
    module = sys.modules[look_up.__module__]  # the package has a function of its name
    real, calls = module.plan_lookup, []

    def refreshing(*given, **more):
        plan = real(*given, **more)
        calls.append(plan.number)
        if len(calls) == 1:
            # between the plan and the reading of it
            assert merge(spark, storage=copied, window="30d", options=MergeOptions(shard_bytes=1 << 20)).jobs > 0
            sweep(copied)
        return plan

    monkeypatch.setattr(module, "plan_lookup", refreshing)
    result = look_up(spark, frame, storage=copied, max_count=5)
    assert calls == [before.number, states(copied).number] and result.plans == 2
    check(copied, [row.asDict() for row in result.frame.collect()], 5)
    monkeypatch.undo()
    name = max(states(copied).objects.values(), key=lambda stored: stored.count).name
    LocalStorage(Path(urlsplit(copied).path)).delete(name)
    with pytest.raises(CorruptFile, match="storage does not"):
        lookup(spark, frame, storage=copied)
    partial = look_up(spark, frame, storage=copied, allow_partial=True)
    assert [file for file, _ in partial.failed] == [name] and partial.statuses["partial"] > 0


def test_many_objects_that_are_lost_are_one_partial_answer(spark, copied, monkeypatch):
    """A task gives up at the first one, so that as many plans as objects would be needed, were they not listed."""
    frame = spark.createDataFrame([("orders", f"key-{n}") for n in range(50)], "topic string, key string")
    names = sorted(states(copied).objects)
    LocalStorage(Path(urlsplit(copied).path)).delete_many(names)
    monkeypatch.setattr(lookup_plan, "_TASKS_A_CORE", 1)
    found = look_up(spark, frame, storage=copied, allow_partial=True)
    named = sorted(stored.file_id if stored.shard is None else name for name, stored in states(copied).objects.items())
    assert sorted(file for file, _ in found.failed) == named and len(names) > found.tasks and found.plans == 2
    assert {row.status for row in found.frame.collect()} == {"partial"}
    found.release()


def test_answers_whose_blocks_spark_lost(spark, copied):
    """They are read anew.

    What a merge and a sweep removed meanwhile is an error: the rest would be a short answer, called complete.
    """
    found = look_up(spark, spark.createDataFrame(ROWS, KEYS), storage=copied, max_count=5)
    found.release()
    # another frame each time: one that was used has what it shuffled
    check(copied, [row.asDict() for row in found.frame.select("*").collect()], 5)
    assert merge(spark, storage=copied, window="30d", options=MergeOptions(shard_bytes=1 << 20)).jobs > 0
    assert sweep(copied) > 0
    with pytest.raises(Exception, match=r"StorageUnavailable: \S+ was removed"):
        found.frame.select("*").collect()
    with pytest.raises(StorageUnavailable, match="look up again"):
        found.statuses  # noqa: B018 - a property that runs a job


@pytest.fixture
def told(spark, index, capfd):
    """Runs the command, and returns the document that it prints."""

    def run_command(*arguments, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(["spark", "lookup", *arguments, "--storage", index, "--json", "--quiet"])
        captured = capfd.readouterr()
        assert ended.value.code == code, captured.err
        return json.loads(captured.out if not code else captured.err.splitlines()[-1])

    return run_command


def test_bounds_that_are_text(told, index, tmp_path):
    """All is text in CSV, whatever the column is called: milliseconds and ISO 8601 mean what they mean to other
    commands.
    """
    since = ["", str(BEGIN_MS + DAY_MS), format_time(BEGIN_MS + DAY_MS), "2023-11-16", "2023-11-16 08:00:00+08:00"]
    keys = tmp_path / "keys.csv"
    keys.write_text("order_id,since\n" + "".join(f"key-0,{text}\n" for text in since))
    arguments = (
        "--column",
        "key=order_id",
        "--column",
        "begin_ms=since",
        "--topic",
        "orders",
        "--max",
        "1000",
        "--nested",
    )
    told("--keys", str(keys), *arguments, "--out", str(tmp_path / "out"))
    rows = pq.read_table(tmp_path / "out").to_pylist()
    # null is no bound; the column itself is carried through
    assert sorted(row["since"] or "" for row in rows) == sorted(since)
    with IndexReader.open(index) as reader:
        for row in rows:
            answer = reader.query(
                "orders", "key-0", None if row["since"] is None else parse_time(row["since"]), max_count=1000
            )
            assert [entry["offset"] for entry in row["entries"]] == [item.offset for item in answer]
    assert len({len(row["entries"]) for row in rows}) > 1
    keys.write_text("order_id,begin_ms\nkey-0,2023-11-16\nkey-1,yesterday\n")
    error = told(
        "--keys", str(keys), "--column", "key=order_id", "--topic", "orders", "--out", str(tmp_path / "no"), code=2
    )["error"]["message"]
    assert (
        "column 'begin_ms': 'yesterday' is neither epoch milliseconds nor an ISO 8601 time" in error
        and "Spark" not in error
    )


def test_the_command(told, index, tmp_path):
    keys = tmp_path / "keys.ndjson"
    keys.write_text(
        "".join(
            json.dumps(dict(zip(("topic", "key", "begin_ms", "end_ms", "id"), row, strict=True))) + "\n" for row in ROWS
        )
    )
    out = tmp_path / "answers"
    done = told("--keys", str(keys), "--out", str(out), "--max", "5")
    assert (done["status"], sum(done["lookups"].values()), done["failed"]) == ("done", len(ROWS) - 1, [])
    check(index, pq.read_table(out).to_pylist(), 5)
    assert "exists already" in told("--keys", str(keys), "--out", str(out), code=2)["error"]["message"]
    # CSV in, Parquet objects of a storage out
    (tmp_path / "keys.csv").write_text("order_id,begin_ms\nkey-0,\nkey-1,0\n")
    arguments = ("--keys", str(tmp_path / "keys.csv"), "--column", "key=order_id", "--topic", "orders", "--nested")
    stored = f"sqlite:///{tmp_path}/out.db"
    assert told(*arguments, "--out", stored)["rows"] == 2
    assert "has objects already" in told(*arguments, "--out", stored, code=2)["error"]["message"]
    assert "no place for the answers" in told(*arguments, code=2)["error"]["message"]
    assert (
        "by --column and for all rows"
        in told(*arguments, "--column", "topic=order_id", "--out", str(tmp_path / "no"), code=2)["error"]["message"]
    )
    assert (
        "no such file"
        in told("--keys", str(tmp_path / "none.csv"), "--out", str(tmp_path / "no"), code=2)["error"]["message"]
    )
