"""Bad sources and bad calls: a typed error that names what is wrong and what was expected, and nothing is published."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JNetworkError

from tests.spark.denying import DenyingAddress
from tests.spark.entries import BEGIN_MS, check, messages, states, write_parquet
from tests.support.store_writer import StoreWriter
from tiered_index import IndexConfig, IndexService
from tiered_index.cli.main import run
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.service.answers.validation import assigned_topic_id
from tiered_index.service.log.records import IndexDescriptor
from tiered_index.spark import build, merge
from tiered_index.spark import session as session_module
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.build.log_sources import SKIPPED, _entries
from tiered_index.spark.build.plan import CENSUS_COLUMNS, Census, WindowScale, count_batches, plan_build
from tiered_index.spark.build.shards import pack_batches, widened
from tiered_index.spark.build.sources import frame_of
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.frames import cleaned_up
from tiered_index.storage.opening import open_storage

PLAIN = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
BAD_FRAMES = {
    "missing": (
        "topic string, queue_id int, offset long, size int, timestamp_ms long",
        {},
        "column 'key' is missing; the source has",
    ),
    "missing_named": (None, {"key": "order_id"}, r"column 'order_id' \(key\) is missing"),
    "text_offset": (None, {"offset": "key"}, r"column 'key' \(offset\) has the type string, but must have integers"),
    "number_key": (None, {"key": "size"}, r"column 'size' \(key\) has the type int32, but must have text or a list"),
    "double_time": (
        "topic string, queue_id int, key string, offset long, size int, timestamp_ms double",
        {},
        "'timestamp_ms' has the type double, but must have times",
    ),
    "decimal_offset": (
        PLAIN.replace("offset long", "offset decimal(20,0)"),
        {},
        r"'offset' has the type decimal128\(20, 0\), but must have integers",
    ),
    "decimal_time": (
        PLAIN.replace("_ms long", "_ms decimal(20,0)"),
        {},
        r"'timestamp_ms' has the type decimal128\(20, 0\), but must have times",
    ),
    "date": (PLAIN.replace("_ms long", "_ms date"), {}, "'timestamp_ms' has the type date32.*, but must have times"),
    "nested_key": (
        PLAIN.replace("key string", "order struct<id: string>"),
        {"key": "order"},
        r"'order' \(key\) is a struct; .* as F\.col\('order\.id'\)$",
    ),
    "dotted_key": (
        PLAIN.replace("key string", "order struct<id: string>"),
        {"key": "order.id"},
        r"'order\.id' \(key\) is missing; .* as F\.col\('order\.id'\)$",
    ),
    "binary_key": (PLAIN.replace("key string", "key binary"), {}, "'key' has the type binary, but must have text"),
    "unknown_field": (None, {"kye": "key"}, "'kye' is not a field of an entry"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_columns_are_named_with_what_was_expected(spark, storage, config, case):
    schema, columns, message = BAD_FRAMES[case]
    frame = spark.createDataFrame([], schema or PLAIN)
    with pytest.raises(InvalidArgument, match=message):
        build(spark, frame, storage=storage, columns=columns, config=config)


ROW = {"topic": "t", "queue_id": 1, "key": "k", "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}
SCALE = WindowScale(86_400, 0, 2**40)


def look(rows):
    """Do to rows what a task does to them: count, then pack."""
    types = {"topic": pa.string(), "key": pa.string()}
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows], types.get(name, pa.int64())) for name in names})
    counted = [name for name in names if name in CENSUS_COLUMNS]
    looked_at = table.select(counted).append_column("has_key", pa.compute.is_valid(table["key"]))
    rows = [[batch.column(0)[0].as_py()] for batch in count_batches(looked_at.to_batches(), SCALE, 10)]
    genesis = IndexDescriptor("x", IndexConfig(slots=64, items=100).geometry(), "custom")
    plan = plan_build(Census.of(rows), genesis, SCALE, shards="auto", parallelism=2, sequence=0, max_windows=10)
    return list(pack_batches(table.to_batches(), plan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topic": None}, "column 'topic' has 1 null[ ;]"),
        ({"timestamp_ms": None}, "column 'timestamp_ms' has 1 null[ ;]"),
        ({"offset": None}, "column 'offset' has 1 null[ ;]"),
        ({"queue_id": -1}, "queue_id -1"),
        ({"size": 2**31}, "size 2147483648"),
        ({"topic": " "}, "topic is empty"),
        ({"key": ""}, "UTF-16 code units"),
        ({"timestamp_ms": -1}, "timestamp_ms -1 is outside"),
        ({"timestamp_ms": 253_402_300_800_000}, "timestamp_ms 253402300800000 is outside"),
    ],
)
def test_values_that_no_entry_can_have(change, message):
    assert len(look([ROW, {**ROW, "key": None}])) == 1
    with pytest.raises(InvalidArgument, match=message):
        look([ROW, {**ROW, **change}])


def test_a_bad_row_is_told_with_what_it_has():
    with pytest.raises(InvalidArgument, match=r"^a row \{'topic': 't', 'queue_id': -1, .*\}: queue_id -1 is outside"):
        look([ROW, {**ROW, "key": None}, {**ROW, "queue_id": -1}, {**ROW, "queue_id": -2}])


LISTED = {"key": pa.list_(pa.string()), "topic": pa.string()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": -5}, r"size -5 is outside"),
        ({"topic": None}, r"column 'topic' has 2 nulls"),
        ({"key": [""]}, r"key has 0 UTF-16 code units"),
        ({"key": ["a", "b"], "offset": -1}, r"offset -1 is outside"),
    ],
)
def test_a_bad_row_of_a_parquet_file_is_named(spark, storage, config, tmp_path, change, message):
    rows = [{**ROW, "key": [f"k{number}", "all"]} for number in range(10)]
    rows[3]["key"], rows[7] = [], {**rows[7], **change}
    columns = {name: pa.array([row[name] for row in rows], LISTED.get(name, pa.int64())) for name in ROW}
    pq.write_table(pa.table(columns), tmp_path / "m.parquet", row_group_size=4)
    with pytest.raises(InvalidArgument, match=rf"m\.parquet, row group 1, row 3: {message}"):
        build(spark, str(tmp_path / "m.parquet"), storage=storage, config=config)


def test_a_topic_id_is_optional_row_by_row():
    rows = [
        {**ROW, "topic": "a", "topic_id": 7},
        {**ROW, "topic": "b"},
        {**ROW, "topic": "a"},
        {**ROW, "topic": "b", "topic_id": 8},
    ]
    (blocks,) = look(rows)
    dtype = IndexConfig(slots=64, items=100).geometry().schema.item
    items = np.concatenate([widened(r["items"], r["widths"], r["least"], dtype) for r in blocks.to_pylist()])
    by_name = {name: assigned_topic_id(name) for name in "ab"}
    assert sorted(items["topic_id"].tolist()) == sorted([7, 8, *by_name.values()])
    with pytest.raises(InvalidArgument, match=r"topic id 7 of 'b'.*'a'"):
        look([rows[0], {**ROW, "topic": "b", "topic_id": 7}])


def test_clocks_that_are_all_wrong_make_few_windows():
    times = pa.array(range(0, 253_402_300_799_000, 253_402_300_799_000 // 200_000), pa.int64())
    table = pa.table(
        {"topic": pa.array(["t"] * len(times)), "timestamp_ms": times, "has_key": pa.array([True] * len(times))}
    )
    scale = WindowScale(60, BEGIN_MS // 1000, BEGIN_MS // 1000 + 86_400)
    census = Census.of(
        [[batch.column(0)[0].as_py()] for batch in count_batches(table.to_batches(10_000), scale, 1_000)]
    )
    assert census.quarantined == census.entries == len(times) and len(census.windows) == 118


def test_an_error_of_a_task_reaches_the_caller(spark, storage, config):
    frame = spark.createDataFrame([tuple({**ROW, "size": None}.values())], PLAIN)
    with pytest.raises(InvalidArgument, match=r"column 'size' has 1 null[ ;]"):
        build(spark, frame, storage=storage, config=config)


def test_a_bucket_that_tasks_may_not_use(spark, storage, config, tmp_path, monkeypatch):
    def deny(job, *operations):
        denying = partial(DenyingAddress, denied=operations, driver=os.getpid())
        monkeypatch.setattr(sys.modules[f"tiered_index.spark.build.{job}"], "StorageAddress", denying)

    table = messages(200)
    path = write_parquet(table, tmp_path / "m.parquet")
    deny("build", "put", "begin_upload")
    with pytest.raises(StorageMisconfigured, match=r"building .*AccessDenied.*s3:GetObject"):
        build(spark, path, storage=storage, config=config)
    with pytest.raises(NotAnIndex):
        states(storage)
    deny("build")
    build(spark, path, storage=storage, config=config)
    before = states(storage).number
    deny("merge", "get_range", "get_suffix", "get")
    with pytest.raises(StorageMisconfigured, match=r"merge.*AccessDenied"):
        merge(spark, storage=storage, window="30d")
    assert states(storage).number == before
    check(storage, table, keys=5)


def test_null_keys_make_no_entry_and_are_counted(spark, storage, config):
    schema = "topic string, queue_id int, key array<string>, offset long, size int, timestamp_ms long"
    keys = [["a"], [], None, [None], ["b", None, "a"]]
    frame = spark.createDataFrame([("t", 1, key, n, 1, BEGIN_MS) for n, key in enumerate(keys)], schema)
    result = build(spark, frame, storage=storage, config=config)
    assert (result.entries, result.without_key) == (3, 3)


def test_an_empty_source_and_one_without_keys(spark, storage, config, tmp_path):
    with pytest.raises(InvalidArgument, match="no entries"):
        build(spark, spark.createDataFrame([], PLAIN), storage=storage, config=config)
    keyless = spark.createDataFrame([("t", 1, None, 1, 1, BEGIN_MS)], PLAIN)
    with pytest.raises(InvalidArgument, match="none with a key"):
        build(spark, keyless, storage=storage, config=config)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidArgument, match="Parquet or NDJSON"):
        build(spark, tmp_path / "nothing", storage=storage, config=config)
    with pytest.raises(InvalidArgument, match="no such file"):
        build(spark, tmp_path / "missing.parquet", storage=storage, config=config)


def test_too_many_windows(spark, storage, config, tmp_path):
    path = write_parquet(messages(300, days=30), tmp_path / "m.parquet")
    with pytest.raises(InvalidArgument, match="choose longer windows"):
        build(spark, path, storage=storage, window="1h", max_windows=20, config=config)
    assert build(spark, path, storage=storage, window="1d", max_windows=30, config=config, dry_run=True).entries == 300


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"mode": "overwrite"}, InvalidArgument, "mode is error, append, replace"),
        ({"window": "a day"}, InvalidArgument, "a window is like 1h"),
        ({"window": "0d"}, InvalidArgument, "a window is like 1h"),
        ({"shards": 0}, InvalidArgument, "shards is 'auto' or"),
        ({"shards": "many"}, InvalidArgument, "shards is 'auto' or"),
        ({"storage": "memory://here"}, ConfigError, "one process's memory"),
        ({"storage": "ftp://there"}, ConfigError, "not a storage URI"),
    ],
)
def test_calls_that_are_wrong(spark, storage, config, call, error, message):
    frame = spark.createDataFrame([("t", 1, "k", 1, 1, BEGIN_MS)], PLAIN)
    with pytest.raises(error, match=message):
        build(spark, frame, **{"storage": storage, "config": config, **call})


def test_an_index_of_another_kind(spark, storage, config, tmp_path):
    path = write_parquet(messages(50), tmp_path / "m.parquet")
    build(spark, path, storage=storage, config=config)
    with pytest.raises(SchemaMismatch, match="64 slots"):
        build(spark, path, storage=storage, config=IndexConfig(slots=65), mode="append")
    with pytest.raises(SchemaMismatch, match="stores KeyedIndexItem"):
        build(spark, path, storage=storage, config=IndexConfig(preset="rocketmq"), mode="append")
    assert build(spark, path, storage=storage, config=IndexConfig(), mode="append").entries == 50
    assert {o.shard.slots.base for o in states(storage).objects.values()} == {64}
    with pytest.raises(NotAnIndex):
        merge(spark, storage=f"file://{tmp_path}/nothing-here")


def test_a_window_longer_than_what_would_replace_it(spark, storage, config, tmp_path):
    path = write_parquet(messages(50), tmp_path / "m.parquet")
    build(spark, path, storage=storage, window="30d", config=config)
    with pytest.raises(InvalidArgument, match="windows that are as long"):
        build(spark, path, storage=storage, window="1d", mode="replace", config=config)


def test_a_damaged_commit_log_fails_or_is_passed_over(spark, storage, tmp_path, capfd):
    with StoreWriter(tmp_path / "store", segment_bytes=1 << 20) as writer:
        puts = [writer.put("t", 0, b"body" * 20, keys=[f"k-{n}"], store_ms=BEGIN_MS + n * 1000) for n in range(100)]
    segment = next((tmp_path / "store" / "commitlog").iterdir())
    data = bytearray(segment.read_bytes())
    data[puts[50].offset + puts[50].size - 30] ^= 0xFF
    data[puts[50].offset : puts[50].offset + 4] = b"\xff\xff\xff\xff"
    segment.write_bytes(data)
    at = f"{segment}: .*at byte {puts[50].offset}"
    with pytest.raises(CorruptFile, match=at):
        build(spark, tmp_path / "store", storage=storage, config=IndexConfig(slots=64))
    assert not states_exist(storage)
    arguments = [
        "--source",
        f"{tmp_path}/store",
        "--storage",
        storage,
        "--set",
        "slots=64",
        "--skip-corrupt",
        "--quiet",
    ]
    planned = told(capfd, "build", *arguments, "--dry-run")
    assert re.search(rf"skipped ranges +1\n +skipped bytes +{puts[50].size} B\n", planned)
    built = json.loads(told(capfd, "build", *arguments, "--json"))
    assert (built["entries"], built["skipped_ranges"], built["skipped_bytes"]) == (99, 1, puts[50].size)
    (passed,) = built["skipped"]
    assert (passed["file"], passed["begin"], passed["end"]) == (str(segment), puts[50].offset, puts[51].offset)


def told(capfd, *arguments):
    """Return what a command prints."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(["spark", *arguments])
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err
    return printed.out


def test_damage_at_the_end_of_a_segment_is_counted_once(tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=20_000) as writer:
        for n in range(400):
            writer.put("t", 0, b"body" * 20, keys=[f"k-{n}"], store_ms=BEGIN_MS + n * 1000)
    log = CommitLogReader(tmp_path / "store" / "commitlog", check_crc=True)
    first, second, third = log.segments()[:3]
    for segment, begin, end in ((first, first.file_size - 3_000, first.file_size), (second, 0, 2_000)):
        data = bytearray(segment.path.read_bytes())
        data[begin:end] = b"\xff" * (end - begin)
        segment.path.write_bytes(data)
    skipped = {}
    for segment in (first, second, third):
        rows = [row for batch in _entries(log, segment.start, segment.end, True) for row in batch.to_pylist()]
        assert all(segment.start <= row["offset"] < segment.end for row in rows if row["key"])
        skipped[segment.start] = [json.loads(row[SKIPPED]) for row in rows if row[SKIPPED]]
    (end,), (begin,) = skipped[first.start], skipped[second.start]
    assert end[1] <= first.end - 3_000 and end[2] == first.end
    assert begin[1] == second.start and begin[2] >= second.start + 2_000
    assert not skipped[third.start]
    second.path.unlink()
    # a gap behind the segment is not its own: what was passed over at its end is told all the same
    rows = [row for batch in _entries(log, first.start, first.end, True) for row in batch.to_pylist()]
    assert [json.loads(row[SKIPPED]) for row in rows if row[SKIPPED]] == [end]


def states_exist(storage):
    try:
        return bool(states(storage).objects)
    except NotAnIndex:
        return False


def test_a_file_that_is_no_parquet_and_lines_that_are_no_json(spark, storage, config, tmp_path):
    (tmp_path / "m.parquet").write_bytes(b"PAR1 this is none PAR1")
    with pytest.raises(CorruptFile, match=r"m\.parquet"):
        build(spark, tmp_path / "m.parquet", storage=storage, config=config)
    (tmp_path / "m.ndjson").write_text('{"topic": "t", "keys": ["a"]}\nthis is no line\n')
    with pytest.raises(InvalidArgument, match=r"m\.ndjson, line 1: 'queue_id' is missing"):
        build(spark, tmp_path / "m.ndjson", storage=storage, config=config)


def rows_of(spark):
    return spark.createDataFrame(messages(50).to_pandas())


def test_a_source_that_changes_between_the_looks(spark, storage, config):
    def some(batches):
        for batch in batches:
            yield batch.slice(os.urandom(1)[0] + int.from_bytes(os.urandom(2)))

    rows = messages(80_000, days=1, hot=0).to_pandas()
    frame = spark.createDataFrame(rows).coalesce(1)
    frame = frame.mapInArrow(some, frame.schema)
    with pytest.raises(InvalidArgument, match="changes"):
        build(spark, frame, storage=storage, config=config)
    with pytest.raises(NotAnIndex):
        states(storage)  # nor does a later build meet the slots of one that failed
    assert build(spark, rows_of(spark), storage=storage, config=IndexConfig(slots=65)).entries == 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "often"), "mode is error, append, replace, replace-all, not 'often'"),
        (("--shards", "0"), "shards is 'auto' or how many a window has, not 0"),
        (("--window", "fortnight"), "fortnight"),
        (("--column", "kye=key"), "columns: 'kye' is not a field of an entry"),
        (("--constant", "part=5"), "columns: 'part' is not a field of an entry"),
        (("--column", "key=order"), "column 'order' (key) is missing; the source has topic, queue_id, key, "),
        (("--source", "{folder}/none.parquet"), "none.parquet: no such file or folder"),
        (("--source", "{folder}/rows.csv"), "files are all parquet (.parquet) or all ndjson"),
        (("--set", "slots=7"), "slots"),
        (("--storage", "memory://here"), "memory:// is one process's memory"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_arguments_of_a_build_are_checked_before_spark_starts(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(session_module, "open_session", lambda *_, **__: pytest.fail("Spark was started"))
    storage = f"file://{tmp_path}/storage"
    with IndexService.open(root=tmp_path / "root", storage=storage, slots=64, items=1_000, background=False):
        pass
    source = write_parquet(messages(10), tmp_path / "m.parquet")
    (tmp_path / "rows.csv").write_text("topic\n")
    given = {"--source": str(source), "--storage": storage, "--set": "slots=64"}
    given[arguments[0]] = arguments[1].format(folder=tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(["spark", "build", *(part for pair in given.items() for part in pair), "--json"])
    assert ended.value.code == 2 and message in json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--source", "{folder}/none.parquet"), "none.parquet: no such file or folder"),
        (("--source", "{folder}/m.parquet", "--column", "key=order"), "column 'order' (key) is missing"),
        (("--source", "{folder}/m.parquet", "--constant", "part=5"), "'part' is not a field of an entry"),
    ],
    ids=["source", "column", "constant"],
)
def test_arguments_of_an_audit_are_checked_before_spark_starts(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(session_module, "open_session", lambda *_, **__: pytest.fail("Spark was started"))
    storage = f"file://{tmp_path}/storage"
    with IndexService.open(root=tmp_path / "root", storage=storage, slots=64, items=1_000, background=False):
        pass
    write_parquet(messages(10), tmp_path / "m.parquet")
    with pytest.raises(SystemExit) as ended:
        run(["spark", "audit", "--storage", storage, *(one.format(folder=tmp_path) for one in arguments), "--json"])
    assert ended.value.code == 2 and message in json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["message"]


@pytest.mark.parametrize("where", ["stored", "local"])
def test_times_in_parquet(spark, tmp_path, where):
    """Spark takes microseconds from Python, whatever the file has."""
    uri = f"sqlite:///{tmp_path}/messages.db" if where == "stored" else f"file://{tmp_path}/files"
    for unit in ("ms", "us", "ns"):
        times = pa.array([BEGIN_MS, None], pa.timestamp("ms", "UTC")).cast(pa.timestamp(unit, "UTC"))
        buffer = io.BytesIO()
        pq.write_table(pa.table({"at": times, "n": [1, 2]}), buffer)
        with open_storage(uri) as stored:
            stored.put("m.parquet", buffer.getvalue())
        if unit == "ns":
            with pytest.raises(
                InvalidArgument, match=r"m\.parquet: column 'at' has times in nanoseconds: write times in"
            ):
                frame_of(spark, uri, StorageAddress)
        else:
            rows = frame_of(spark, uri, StorageAddress).selectExpr("n", "unix_millis(at)").collect()
            assert sorted(map(tuple, rows)) == [(1, BEGIN_MS), (2, None)]


def test_missing_java_and_missing_pyspark(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="install Java 17 or 21"):
        session_module.check_java()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(ConfigError, match="is Java 11"):
        session_module.check_java()
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['pyspark'] = None; sys.modules['pyspark.errors'] = None\n"
            "from tiered_index.cli.main import run; run(sys.argv[1:])",
            "spark",
            "merge",
            "--storage",
            "file:///nowhere/at/all",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        timeout=60,
    )
    assert run.returncode == 2
    assert "pip install '.[spark]' in a clone" in run.stderr


def test_errors_of_tasks_keep_their_class_and_their_text():
    text = (
        "tiered_index.rocketmq.log.commitlog.MissingOffsets: store: deleted before they were read: commit log "
        "offsets 0 to 9"
    )
    with pytest.raises(CorruptFile, match="store: deleted before"), typed_errors("reading"):
        raise RuntimeError(text)
    text = (
        "org.apache.spark.SparkException: Job aborted\nTraceback\ntiered_index.errors.CorruptFile: data/x: bad at "
        "byte 4\n\tat org"
    )
    with pytest.raises(CorruptFile, match=r"at byte 4 \(reading\)") as caught, typed_errors("reading"):
        raise RuntimeError(text)
    assert caught.value.file == "data/x"
    with pytest.raises(InvalidArgument, match="reading: no such thing"), typed_errors("reading"):
        raise RuntimeError(text.replace("CorruptFile: data/x: bad at byte 4", "InvalidArgument: no such thing"))
    with pytest.raises(RuntimeError, match="nothing of ours"), typed_errors("reading"):
        raise RuntimeError("nothing of ours")


def test_the_end_of_the_jvm_is_an_error_of_its_own():
    class WithoutText(Exception):  # as py4j's errors, whose text the JVM has
        def __str__(self) -> str:
            raise Py4JNetworkError("Answer from Java side is empty")

    for error in (WithoutText(), Py4JNetworkError("none"), ConnectionRefusedError(111, "Connection refused")):
        with pytest.raises(StorageUnavailable, match=r"^reading: Spark's JVM ended.*spark\.driver\.memory"):
            with typed_errors("reading"):
                raise error


def test_an_error_of_a_job_hides_one_of_cleaning_up():
    def clean() -> None:
        raise ConnectionRefusedError("Spark ended")

    with pytest.raises(ValueError, match="the first"), cleaned_up(clean):
        raise ValueError("the first")
    with pytest.raises(ConnectionRefusedError), cleaned_up(clean):
        pass
