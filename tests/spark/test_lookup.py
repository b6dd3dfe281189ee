"""Bulk lookups on Spark: the answers to rows equal a reader's, also with bad keys, unreadable files, and a merge
meanwhile.
"""

import itertools
import json
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.rocketmq.archived_store import index_log
from tests.spark.commands import outcome_of
from tests.spark.entries import BEGIN_MS, DAY_MS, TOPICS, messages, put_files, states, sweep
from tests.spark.in_process import build_here
from tests.support.damage import flip
from tests.support.store_writer import StoreWriter
from tests.support.toy_package import install_toys
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.base.units import format_time, parse_time
from tiered_index.connectors.registry import Registry
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.errors import BudgetExceeded, ConfigError, CorruptFile, InvalidArgument, NotAnIndex
from tiered_index.format.layout import PRESETS
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import audit, build, look_up, merge
from tiered_index.spark.lookup.answers import column_names
from tiered_index.spark.lookup.keys import keys_of
from tiered_index.spark.lookup.lookup import opened_index
from tiered_index.storage.local import LocalStorage

KEYS = "topic string, key string, begin_ms long, end_ms long, id int"
DIGITS = f"0x{b'key-0'.hex()}"
OF_ONE_HASH = [("t", "xAa"), ("t", "xBB"), ("orders", "xAa"), ("orders", "xBB")]
ENTRY = ("topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash", "fingerprint")


@pytest.fixture(scope="module")
def index(spark, tmp_path_factory):
    """A storage with files of a live writer, one of them of wrong clocks, and tables of builds in shards, some of them
    in parts of a giant key. Two keys of different topics have one hash, and "xAa" has that of "xBB".
    """
    folder = tmp_path_factory.mktemp("index")
    storage = f"file://{folder}/storage"
    table = messages(2_000, days=3)
    like = table.slice(0, 1).to_pylist()[0]
    times = (BEGIN_MS, BEGIN_MS + DAY_MS, BEGIN_MS - 400 * DAY_MS)
    odd = [
        {**like, "topic": topic, "key": key, "offset": n, "timestamp_ms": time}
        for n, (topic, key, time) in enumerate(itertools.product(("t", "orders"), ("xAa", "xBB"), times))
    ]
    put_files(storage, folder / "root", table, pa.Table.from_pylist(odd, table.schema), rows=700)
    build_here(storage, messages(1_000, seed=5), shards=3, piece_items=50)
    shards = [stored.shard for stored in states(storage).objects.values() if stored.shard is not None]
    assert 1 < len({(shard.slot_low, shard.slot_high) for shard in shards}) < len(shards)
    return storage


@pytest.fixture
def copied(index, tmp_path):
    """A copy of that storage, which a test may damage."""
    shutil.copytree(urlsplit(index).path, tmp_path / "storage")
    return f"file://{tmp_path}/storage"


ROWS = [
    ("orders", "key-0", None, None, 1),
    ("orders", "key-0", None, None, 2),
    ("orders", "key-0", BEGIN_MS, BEGIN_MS + DAY_MS, 3),
    ("orders", "key-7", None, BEGIN_MS + 2 * DAY_MS, 4),
    ("orders", "nobody", None, None, 5),
    # the digits of key-0, which are another key
    ("orders", DIGITS, None, None, 9),
    ("nowhere", "key-0", None, None, 6),
    ("orders", "xAa", BEGIN_MS - 500 * DAY_MS, BEGIN_MS, 7),
    ("t", "xAa", BEGIN_MS + DAY_MS - 2_000, BEGIN_MS + DAY_MS, 8),
    *((topic, key, None, None, 10 + n) for n, (topic, key) in enumerate([*OF_ONE_HASH, ("other", "xAa")])),
    *((topic, f"key-{n}", None, None, 100 * at + n) for at, topic in enumerate(TOPICS, 1) for n in range(15)),
]


def check(storage, rows, max_count):
    """Assert that rows (of entries, with their id) equal a reader's answers to `ROWS`."""
    rows_by_id = {}
    for row in rows:
        rows_by_id.setdefault(row["id"], []).append(row)
    assert sorted(rows_by_id) == sorted(row[4] for row in ROWS)
    with IndexReader.open(storage) as reader:
        for topic, key, begin, end, number in ROWS:
            answer = reader.query(topic, key, begin, end, max_count=max_count)
            mine = sorted(rows_by_id[number], key=lambda row: row["position"] or 0)
            said = {(row["topic"], row["key"], row["status"], row["failed"]) for row in mine}
            assert said == {(topic, key, answer.status, None)}
            entries = [tuple(row[name] for name in ENTRY) for row in mine if row["position"] is not None]
            assert entries == [tuple(getattr(item, name) for name in ENTRY) for item in answer]
            assert entries or key in ("nobody", DIGITS) or topic in ("nowhere", "other") or number in range(100, 400)


def offsets_by(name, rows):
    """The offsets of each answer in its order, by a column of the keys."""
    offsets = {}
    for row in sorted(rows, key=lambda row: row["position"] or 0):
        offsets.setdefault(row[name], []).extend([] if row["position"] is None else [row["offset"]])
    return offsets


def test_answers_are_a_readers(spark, index):
    frame = spark.createDataFrame(ROWS, KEYS)
    # more keys than one call of a task has
    none = spark.range(7_000).selectExpr("'payments'", "concat('none-', id)", "NULL", "NULL", "-1")
    result = look_up(spark, frame.coalesce(1).unionAll(none), storage=index, max_count=600)
    rows = [row.asDict() for row in result.frame.collect()]
    check(index, [row for row in rows if row["id"] > 0], 600)
    none = [row for row in rows if row["id"] < 0]
    assert len(none) == 7_000 and {(row["status"], row["position"]) for row in none} == {("complete", None)}
    assert (result.rows, result.skipped_null, result.failed) == (len(ROWS) + 7_000, 0, ())
    assert sum(result.statuses.values()) == len(ROWS) + 7_000 and set(result.statuses) == {"complete", "truncated"}
    state = states(index)
    assert result.objects == len(state.files) + len(state.tables) and result.log_number == state.number
    assert 2 * len(state.objects) <= result.requests and result.bytes_read > 0 and result.cost_usd > 0
    result.release()
    # tasks read the log, too
    late = spark.createDataFrame([("orders", "key-0", 2**42, None, 1)], KEYS)
    nothing = look_up(spark, late, storage=index)
    assert nothing.objects == 0 and nothing.requests > 0 and nothing.bytes_read > 0 and nothing.cost_usd > 0
    nothing.release()


def test_rows_with_nulls_are_named_or_counted(spark, index):
    frame = spark.createDataFrame(
        [("orders", "key-1", None, None, 1), ("orders", None, None, None, 2), (None, "k", None, None, 3)], KEYS
    )
    keyless = frame.where("topic is not null")
    for some, columns, named in (
        (frame, {}, "'topic'"),
        (keyless, {}, "'key'"),
        (keyless.withColumnRenamed("key", "order"), {"key": "order"}, r"'order' \(key\)"),
    ):
        with pytest.raises(InvalidArgument, match=rf"column {named} has nulls;"):
            look_up(spark, some, storage=index, columns=columns)
    result = look_up(spark, frame, storage=index, skip_null=True)
    assert (result.rows, result.skipped_null) == (1, 2)
    assert {row["id"] for row in result.frame.collect()} == {1}
    # for literals, Spark computes the question of rows that are left out, too
    literals = spark.sql("SELECT 'orders' AS topic, CAST(NULL AS string) AS key UNION ALL SELECT 'orders', 'key-1'")
    some = look_up(spark, literals, storage=index, skip_null=True, max_count=1).frame.collect()
    assert [(row["key"], row["position"]) for row in some] == [("key-1", 0)]
    # a row that is left out is not checked
    dated = spark.createDataFrame(
        [("orders", "key-1", "2023-11-14"), ("orders", None, "yesterday")], "t string, k string, at string"
    )
    columns = {"topic": "t", "key": "k", "begin_ms": "at"}
    some = look_up(spark, dated, storage=index, columns=columns, skip_null=True, max_count=1).frame.collect()
    assert [(row["k"], row["position"]) for row in some] == [("key-1", 0)]


BAD = [
    ("topic string", {}, "column 'key' is missing; the keys have topic"),
    ("topic string, key string", {"key": "kye"}, r"column 'kye' \(key\) is missing"),
    ("topic string, key string", {"offset": "key"}, "'offset' is not a field of a lookup"),
    ("topic string, key string", {"topic": 5}, r"topic .*not 5"),
    ("topic string, key decimal(9,2)", {}, r"column 'key' is decimal\(9,2\); text is needed: cast it"),
    ("topic string, key int", {}, "column 'key' is int; text is needed"),
    ("topic string, key array<string>", {}, "column 'key' is array<string>; text is needed"),
    ("topic string, key string, at date", {"end_ms": "at"}, r"'at' \(end_ms\) is date; integers"),
    ("topic string, key string, begin_ms timestamp_ntz", {}, "column 'begin_ms' is timestamp_ntz"),
    ("topic string, key string, Offset int", {}, "'Offset' of the keys has the name of a column of answers"),
    ("topic string, key string, a int, A int", {}, "two columns 'a'"),
]


def test_bad_columns_are_named(spark, index):
    for schema, columns, message in BAD:
        with pytest.raises(InvalidArgument, match=message):
            look_up(spark, spark.createDataFrame([], schema), storage=index, columns=columns)
    stream = spark.readStream.format("rate").load().selectExpr("'t' AS topic", "'k' AS key")
    with pytest.raises(InvalidArgument, match="stream"):
        look_up(spark, stream, storage=index)
    taken = column_names(PRESETS["native"].schema, messages="archive")
    for name in ("_lookup", "OFFSET"):
        with pytest.raises(InvalidArgument, match=f"column '{name}' of the keys"):
            keys_of(spark.createDataFrame([], f"topic string, key string, {name} string"), {}, taken)


def test_bad_calls_and_bad_rows(spark, index, tmp_path):
    row = ("orders", "key-1", None, None, 1)
    for rows, options, error, message in (
        ([row], {"max_count": 0}, InvalidArgument, "max_count"),
        ([row], {"dry_run": True}, TypeError, "dry_run"),
        ([row], {"messages": "archive"}, ConfigError, "the index has no archived messages"),
        ([row], {"messages": str(tmp_path)}, ConfigError, "offsets are in 'custom'.* RocketMQ .* in 'commitlog'"),
        ([row], {"storage": f"file://{tmp_path}/nothing"}, NotAnIndex, "nothing"),
        ([("orders", "key-1", 5000, 4000, 1)], {}, InvalidArgument, r"begin_ms 5000.*end_ms 4000"),
        ([row, ("orders", "", None, None, 1)], {}, InvalidArgument, "columns 'topic' and 'key': a key is empty"),
    ):
        with pytest.raises(error, match=message):
            look_up(spark, spark.createDataFrame(rows, KEYS), **{"storage": index, **options})
    long = spark.createDataFrame([("orders", "x" * 40_000)], "topic string, k string")
    with pytest.raises(InvalidArgument, match=r"column.* 'k' \(key\): key 'x{40}'\.\.\. has 40,000 "):
        look_up(spark, long, storage=index, columns={"key": "k"})


def test_messages_are_read_at_an_address_of_any_connector_but_files(index, tmp_path, monkeypatch):
    install_toys(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # the registry of the process reads entry points once
    monkeypatch.setattr("tiered_index.spark.lookup.messages.CONNECTORS", Registry())
    _, _, names = opened_index(index, IndexConfig(), max_count=1, messages="toy:3")
    assert "message_body" in names
    for address in ("nobody:3", f"{tmp_path}/toy_connectors.py", "s3://bucket/file"):
        with pytest.raises(ConfigError, match=rf"the folder of a RocketMQ store, or .* not '{address}'"):
            opened_index(index, IndexConfig(), max_count=1, messages=address)


@pytest.mark.long
def test_keys_with_a_collation_are_those_that_were_written(spark, tmp_path):
    """Keys that a collation takes for equal are different keys, for builds, audits and lookups."""
    uri, other = f"file://{tmp_path}/index", f"file://{tmp_path}/other"
    lists = spark.range(1).selectExpr("array('a' COLLATE UTF8_LCASE, 'A' COLLATE UTF8_LCASE, null) AS key")
    fields = "'t' AS topic", "1 AS queue_id", "5L AS offset", "9 AS size", f"{BEGIN_MS} AS timestamp_ms"
    assert build(spark, lists.selectExpr("*", *fields), storage=uri).entries == 2
    source = spark.range(1).selectExpr("'a' COLLATE UTF8_LCASE AS key", *fields)
    assert build(spark, source, storage=other).entries == 1
    assert audit(spark, source, storage=other).status == "ok"
    keys = spark.sql("SELECT 't' AS topic, key COLLATE UTF8_LCASE AS key FROM VALUES ('a'), ('A') AS keys(key)")
    for storage, offset_by_key in ((uri, {"a": 5, "A": 5}), (other, {"a": 5, "A": None})):
        # PySpark 4.0 collects no rows that have a column with a collation
        rows = look_up(spark, keys, storage=storage).frame.selectExpr("CAST(key AS STRING) AS key", "offset").collect()
        assert {row.key: row.offset for row in rows} == offset_by_key


@pytest.mark.long
def test_text_that_is_not_utf_8_is_named(spark, index):
    for name, named in (("key", "a key"), ("begin_ms", "column 'begin_ms'")):
        columns = {"topic": "'orders'", "key": "'key-1'", "begin_ms": "'0'"} | {name: "CAST(x'ff41' AS STRING)"}
        keys = spark.range(1).selectExpr(*(f"{text} AS {other}" for other, text in columns.items()))
        with pytest.raises(InvalidArgument, match=f"{named} has bytes that are not UTF-8"):
            look_up(spark, keys, storage=index)


def test_damage_is_reported_by_slot_group(spark, copied):
    """One flipped bit makes those answers partial that need its slot group, and no others."""
    stored = max(states(copied).objects.values(), key=lambda shard: shard.count)
    (path,) = Path(urlsplit(copied).path).rglob(stored.name.rpartition("/")[2])
    data = path.read_bytes()
    runs = parse_trailer(data, stored.name, len(data)).directory.all_runs()
    assert len(runs) > 1
    flip(path, runs[0].offset)
    frame = spark.createDataFrame(ROWS, KEYS)
    result = look_up(spark, frame, storage=copied, allow_partial=True, max_count=1000)
    rows = result.frame.collect()
    with IndexReader.open(copied, coalesce_gap_bytes=0) as reader:
        alone = {row[4]: reader.query(*row[:4], max_count=1000, allow_partial=True) for row in ROWS}
    statuses = {number: answer.status for number, answer in alone.items()}
    status_by_id = {row.id: row.status for row in rows}
    # a filter excludes keys of the slot group that the object does not have
    assert all(status_by_id[number] in (status, "complete") for number, status in statuses.items())
    assert {"partial", "complete"} == {*status_by_id.values()}
    counts = {number: len(offsets) for number, offsets in offsets_by("id", rows).items()}
    assert counts == {number: len(answer) for number, answer in alone.items()}
    assert len(result.failed) == 1
    with pytest.raises(CorruptFile):
        look_up(spark, frame, storage=copied)


def test_a_lookup_costs_no_more_than_its_bounds(spark, index):
    frame = spark.createDataFrame(ROWS, KEYS)
    whole = look_up(spark, frame, storage=index)
    for name, spent in (("max_requests", whole.requests), ("max_bytes", whole.bytes_read)):
        # each task has an equal share
        assert look_up(spark, frame, storage=index, **{name: whole.tasks * spent}).statuses == whole.statuses
        little = {name: spent // 2}
        with pytest.raises(BudgetExceeded, match=name):
            look_up(spark, frame, storage=index, **little)
        bounded = look_up(spark, frame, storage=index, allow_partial=True, **little)
        assert bounded.statuses["partial"]
        assert (bounded.requests if name == "max_requests" else bounded.bytes_read) <= spent // 2
        with pytest.raises(InvalidArgument, match=f"{name} must be a whole number"):
            look_up(spark, frame, storage=index, **{name: -1})
    # also of the parts of one task together
    frame = spark.createDataFrame([("orders", "key-7", None, None, number) for number in range(1_100)], KEYS)
    whole = look_up(spark, frame, storage=index, max_count=512)
    share = whole.requests // 2
    half = look_up(spark, frame, storage=index, max_count=512, allow_partial=True, max_requests=whole.tasks * share)
    assert half.statuses["partial"] and half.requests <= share


def test_an_index_that_is_merged_meanwhile_and_objects_that_are_lost(spark, copied):
    frame = spark.createDataFrame(ROWS, KEYS)
    result = look_up(spark, frame, storage=copied, max_count=1000)
    assert merge(spark, storage=copied, window="30d", options=MergeOptions(shard_bytes=1 << 20)).jobs > 0
    assert sweep(copied) > 0
    check(copied, [row.asDict() for row in result.frame.collect()], 1000)
    # as if Spark had lost the rows: tasks look them up again, in the objects of now
    result.release()
    check(copied, [row.asDict() for row in result.frame.select("*").collect()], 1000)
    cached = look_up(spark, frame, storage=copied, max_count=1000)
    LocalStorage(Path(urlsplit(copied).path)).delete_many(sorted(states(copied).objects))
    # the answers are cached
    assert cached.frame.where("position is not null").count() > 0
    cached.release()
    with pytest.raises(CorruptFile, match="storage does not"):
        look_up(spark, frame, storage=copied)
    partial = look_up(spark, frame, storage=copied, allow_partial=True)
    assert {file for file, _ in partial.failed} <= {*states(copied).files, *states(copied).tables}
    assert partial.failed and partial.statuses["partial"] > 0, partial.failed
    assert all(why.startswith("no object") for _, why in partial.failed)
    partial.release()


@pytest.mark.long
def test_bounds_that_are_text(spark, index, tmp_path):
    """All columns of CSV are text, whatever their names: milliseconds and ISO 8601 mean the same as in other
    commands.
    """
    since = ["", str(BEGIN_MS + DAY_MS), format_time(BEGIN_MS + DAY_MS), "2023-11-16", "2023-11-16 08:00:00+08:00"]
    keys = tmp_path / "keys.csv"
    keys.write_text("order_id,since\n" + "".join(f"key-0,{text}\n" for text in since))
    command = f"lookup --storage {index} --keys {keys} --column key=order_id --topic orders"
    outcome_of(f"{command} --column begin_ms=since --max 1000 --out {tmp_path}/out")
    rows = pq.read_table(tmp_path / "out").to_pylist()
    # null is no bound; the column itself stays in the rows
    offsets = offsets_by("since", rows)
    assert sorted(text or "" for text in offsets) == sorted(since)
    with IndexReader.open(index) as reader:
        for text, text_offsets in offsets.items():
            answer = reader.query("orders", "key-0", None if text is None else parse_time(text), max_count=1000)
            assert text_offsets == [item.offset for item in answer]
    assert len({len(text_offsets) for text_offsets in offsets.values()}) > 1
    keys.write_text("order_id,begin_ms\nkey-0,2023-11-16\nkey-1,yesterday\n")
    error = outcome_of(f"{command} --out {tmp_path}/no", code=2).error["message"]
    assert "column 'begin_ms': 'yesterday' is neither epoch milliseconds nor an ISO 8601 time" in error
    assert "Spark" not in error


def test_the_command(spark, index, tmp_path):
    keys, out, stored = tmp_path / "keys.ndjson", tmp_path / "answers", f"sqlite:///{tmp_path}/out.db"
    rows = [dict(zip(("topic", "key", "begin_ms", "end_ms", "id"), row, strict=True)) for row in ROWS]
    keys.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lookup = f"lookup --storage {index} --keys"
    done = outcome_of(f"{lookup} {keys} --out {out} --max 5").document
    assert (done["status"], sum(done["lookups"].values()), done["failed"]) == ("done", len(ROWS), [])
    check(index, pq.read_table(out).to_pylist(), 5)
    # CSV as input, Parquet objects of a storage as output
    (tmp_path / "keys.csv").write_text("order_id,begin_ms\nkey-0,\nkey-1,0\n")
    of_csv = f"{lookup} {tmp_path}/keys.csv --column key=order_id --topic orders"
    assert outcome_of(f"{of_csv} --out {stored}").document["rows"] == 2
    for command, message in (
        (f"{lookup} {keys} --out {out}", "exists already"),
        (f"{of_csv} --out {stored}", "has objects already"),
        (f"{of_csv} --out sqlite:///{tmp_path}/answers.ndjson", "answers in a storage are Parquet"),
        (of_csv, "no folder for the answers"),
        (f"{of_csv} --column topic=order_id --out {tmp_path}/no", "by --column and for all rows"),
        (f"{lookup} {tmp_path}/none.csv --out {tmp_path}/no", "none.csv: No such file"),
    ):
        assert message in outcome_of(command, code=2).error["message"]


@pytest.mark.long
def test_messages_are_joined(spark, tmp_path):
    storage, store = f"file://{tmp_path}/storage", tmp_path / "store"
    with StoreWriter(store, segment_bytes=1 << 12) as writer:
        for n in range(120):
            writer.put("t", 0, b"body %d" % n, keys=[f"k{n % 10}"], tags="tag", store_ms=BEGIN_MS + n * 1000)
    settings = {"slots": 97, "items": 5_000, "background": False, "offset_space": "commitlog", "max_late_s": 1e10}
    with IndexService.open(root=tmp_path / "root", storage=storage, **settings) as index:
        messages = {m.physical_offset: m for m in index_log(index, store)}
        index.seal()
        index.run_lifecycle()
        archiver = SegmentArchiver(index, "here", store / "commitlog")
        archiver.run_once()
        archived = [*index.segment_archive.segments().of("here")][-1].end
    frame = spark.createDataFrame([("t", "k3"), ("t", "k4"), ("t", "none")], "topic string, key string")
    rows = look_up(spark, frame, storage=storage, messages=str(store), max_count=6).frame.collect()
    assert len(rows) == 13
    for row in rows:
        if row.position is None:
            assert (row.key, row.message_state, row.message_body) == ("none", None, None)
            continue
        message = messages[row.offset]
        assert (row.message_state, bytes(row.message_body), row.message_tags) == ("local", message.body(), "tag")
        assert row.message_properties == dict(message.properties) and row.key in message.index_keys
    answered = look_up(spark, frame, storage=storage, messages="archive").frame.where("position is not null").collect()
    assert {row.message_state for row in answered} <= {"archived", "missing"} and archived > 0
    for row in answered:
        assert row.message_state == ("archived" if row.offset < archived else "missing")
        assert row.message_body == (messages[row.offset].body() if row.offset < archived else None)
    with pytest.raises(ConfigError, match="is not a RocketMQ store"):
        look_up(spark, frame, storage=storage, messages=str(tmp_path))


@pytest.mark.long
def test_rows_of_files_are_joined(spark, tmp_path):
    """Messages of any connector are: the index says which one put a topic."""
    (tmp_path / "a.ndjson").write_text("".join(f'{{"k": "k{n}", "at": {BEGIN_MS + n * 1000}}}\n' for n in range(9)))
    storage = f"file://{tmp_path}/storage"
    of_rows = ("--topic", "t", "--key", "k", "--time", "at", "--root", tmp_path / "root", "--storage", storage)
    assert run_here("ingest", tmp_path / "a.ndjson", *of_rows, "--wait").code == 0
    frame = spark.createDataFrame([("t", "k3")], "topic string, key string")
    (row,) = look_up(spark, frame, storage=storage, messages="archive").frame.collect()
    assert (row.message_state, json.loads(row.message_body)["k"], row.message_tags) == ("local", "k3", None)
