"""Bad sources and bad calls: a typed error names the fault and the expected value, and nothing is published."""

import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors.exceptions.captured import PythonException

from tests.integration.cli.command_lines import run_here
from tests.spark.commands import outcome_of
from tests.spark.entries import BEGIN_MS, check, messages, states, total, write_parquet
from tests.spark.in_process import planned
from tests.storage.scripted_server import error as error_answer
from tests.support.counting_proxy import Action, counting_proxy
from tests.support.store_writer import StoreWriter
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.format.keys.hashing import assigned_topic_id
from tiered_index.spark import build, merge
from tiered_index.spark import session as session_module
from tiered_index.spark.failures import show_sentences_first, typed_errors
from tiered_index.spark.frames import cleaned_up
from tiered_index.spark.writing.linked import RowsOfFiles, link_files
from tiered_index.spark.writing.shards import pack_batches

PLAIN = "topic string, queue_id int, key string, offset long, size int, timestamp_ms long"
NESTED = PLAIN.replace("key string", "order struct<id: string>")
BAD_FRAMES = [
    (PLAIN, {"key": "order_id"}, r"column 'order_id' \(key\) is missing; the source has"),
    (PLAIN, {"offset": "key"}, r"column 'key' \(offset\) has the type string, but must have integers: cast it"),
    (PLAIN.replace("_ms long", "_ms date"), {}, "'timestamp_ms' has the type date32.*, but must have times"),
    (NESTED, {"key": "order"}, r"'order' \(key\) is a struct; .* as F\.col\('order\.id'\)$"),
    (NESTED, {"key": "order.id"}, r"'order\.id' \(key\) is missing; .* as F\.col\('order\.id'\)$"),
    (PLAIN.replace("key string", "key binary"), {}, "'key' has the type binary, but must have text"),
    (PLAIN.replace("key string", "key decimal(9,2)"), {}, r"'key' has the type decimal128\(9, 2\), .* text: cast it"),
    (PLAIN, {"kye": "key"}, "'kye' is not a field of an entry"),
]


def test_columns_are_named_with_what_was_expected(spark, storage, config):
    for schema, columns, message in BAD_FRAMES:
        with pytest.raises(InvalidArgument, match=message):
            build(spark, spark.createDataFrame([], schema), storage=storage, columns=columns, config=config)


ROW = {"topic": "t", "queue_id": 1, "key": "k", "offset": 1, "size": 1, "timestamp_ms": BEGIN_MS}


def look(rows):
    """Process rows as a task does: count, then pack."""
    types = {"topic": pa.string(), "key": pa.string()}
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: pa.array([row.get(name) for row in rows], types.get(name, pa.int64())) for name in names})
    return list(pack_batches(table.to_batches(), planned(table)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topic": None}, "column 'topic' has 1 null[ ;]"),
        ({"queue_id": -1}, r"^a row \{'topic': 't', 'queue_id': -1, .*\}: queue_id -1 is outside"),
        ({"size": 2**31}, "size 2147483648"),
        ({"topic": " "}, "topic is empty"),
        ({"key": ""}, "UTF-16 code units"),
        ({"timestamp_ms": 253_402_300_800_000}, "timestamp_ms 253402300800000 is outside"),
    ],
)
def test_values_that_no_entry_can_have(change, message):
    assert len(look([ROW, {**ROW, "key": None}])) == 1
    with pytest.raises(InvalidArgument, match=message):
        look([ROW, {**ROW, **change}])


@pytest.mark.parametrize(("column", "texts"), [("topic", [b"ok", b"\xff"]), ("key", [b"ok", b"a\xe2\x82", b"\xacb"])])
def test_bytes_that_are_not_utf_8_are_named_with_their_row(column, texts):
    """Spark casts any bytes to text; two neighbours can even be UTF-8 together."""
    count = len(texts)
    offsets = pa.py_buffer(np.cumsum([0, *map(len, texts)]).astype(np.int32))
    wrong = pa.StringArray.from_buffers(count, offsets, pa.py_buffer(b"".join(texts)))
    table = pa.table({name: [value] * count for name, value in ROW.items()} | {column: wrong})
    with pytest.raises(InvalidArgument, match=rf"^a row \{{.*'{column}': b'{re.escape(str(texts[1])[2:-1])}'.*\}}: "):
        list(pack_batches(table.to_batches(), planned(table)))


def test_a_bad_row_of_a_parquet_file_is_named(spark, storage, config, tmp_path):
    rows = [{**ROW, "key": [f"k{number}", "all"]} for number in range(10)]
    rows[3]["key"], rows[7]["size"] = [], -1
    types = {"key": pa.list_(pa.string()), "topic": pa.string()}
    columns = {name: pa.array([row[name] for row in rows], types.get(name, pa.int64())) for name in ROW}
    pq.write_table(pa.table(columns), tmp_path / "m.parquet", row_group_size=4)
    with pytest.raises(InvalidArgument, match=r"m\.parquet, row 8: size -1 is outside"):
        build(spark, str(tmp_path / "m.parquet"), storage=storage, config=config)
    (tmp_path / "m.parquet").write_bytes(b"PAR1 this is none PAR1")
    with pytest.raises(CorruptFile, match=r"m\.parquet"):
        build(spark, tmp_path / "m.parquet", storage=storage, config=config)


def test_a_topic_id_is_optional_row_by_row():
    rows = [
        {**ROW, "topic": "a", "topic_id": 7},
        {**ROW, "topic": "b"},
        {**ROW, "topic": "a"},
        {**ROW, "topic": "b", "topic_id": 8},
    ]
    (blocks,) = look(rows)
    dtype = IndexConfig(slots=64, items=100).geometry().schema.item
    items = np.concatenate([np.frombuffer(cell, dtype) for cell in blocks.column("items").to_pylist()])
    by_name = {name: assigned_topic_id(name) for name in "ab"}
    assert sorted(items["topic_id"].tolist()) == sorted([7, 8, *by_name.values()])
    with pytest.raises(InvalidArgument, match=r"topic id 7 of 'b'.*'a'"):
        look([rows[0], {**ROW, "topic": "b", "topic_id": 7}])


def test_a_bucket_that_tasks_may_not_use(spark, s3, config, tmp_path):
    table, bucket = messages(200), s3.new_bucket()
    path = write_parquet(table, tmp_path / "m.parquet")

    def denies(method):
        denied = Action(answer=error_answer(403, "AccessDenied"))
        return lambda request: denied if request.method == method and "/data/" in request.key else None

    with counting_proxy(s3.endpoint_url) as proxy:
        uri = f"s3://{bucket}/index?endpoint_url={proxy.endpoint_url}"
        proxy.fault = denies("PUT")
        with pytest.raises(StorageMisconfigured, match=r"building .*AccessDenied.*s3:GetObject"):
            build(spark, path, storage=uri, config=config)
        proxy.fault = None
        with pytest.raises(NotAnIndex):
            states(uri)
        build(spark, path, storage=uri, config=config)
        before = states(uri).number
        proxy.fault = denies("GET")
        with pytest.raises(StorageMisconfigured, match=r"merge.*AccessDenied"):
            merge(spark, storage=uri, window="30d")
        proxy.fault = None
        assert states(uri).number == before
        check(uri, table, keys=5)


def test_an_empty_source_and_one_without_keys(spark, storage, config, tmp_path):
    with pytest.raises(InvalidArgument, match="no entries"):
        build(spark, spark.createDataFrame([], PLAIN), storage=storage, config=config)
    keyless = spark.createDataFrame([("t", 1, None, 1, 1, BEGIN_MS)], PLAIN)
    with pytest.raises(InvalidArgument, match="none with a key"):
        build(spark, keyless, storage=storage, config=config)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidArgument, match="nothing: no file that has data"):
        build(spark, tmp_path / "nothing", storage=storage, config=config)


def test_an_index_of_another_kind_and_a_window_shorter_than_what_it_would_replace(spark, storage, config, tmp_path):
    path = write_parquet(messages(50), tmp_path / "m.parquet")
    build(spark, path, storage=storage, window="30d", config=config)
    with pytest.raises(InvalidArgument, match="windows that are as long"):
        build(spark, path, storage=storage, window="1d", mode="replace", config=config)
    with pytest.raises(SchemaMismatch, match="64 slots"):
        build(spark, path, storage=storage, config=IndexConfig(slots=65), mode="append")
    with pytest.raises(SchemaMismatch, match="stores KeyedIndexItem"):
        build(spark, path, storage=storage, config=IndexConfig(preset="rocketmq"), mode="append")
    assert build(spark, path, storage=storage, config=IndexConfig(), mode="append").entries == 50
    assert {o.shard.slots.base for o in states(storage).objects.values()} == {64}
    with pytest.raises(InvalidArgument, match="choose longer windows"):
        build(spark, path, storage=storage, window="1h", max_windows=20, mode="append")
    with pytest.raises(NotAnIndex):
        merge(spark, storage=f"file://{tmp_path}/nothing-here")


def test_a_folder_in_a_table_of_delta_or_iceberg_is_refused(tmp_path):
    """A partition's folder has files of old versions, too, and rows that a deletion vector removes."""
    delta, iceberg = tmp_path / "delta", tmp_path / "iceberg"
    part = delta / "topic=007" / "at=2023-11-14 22%3A00%3A00" / "part-00000.c000.zstd.parquet"
    metadata = delta / "_delta_log" / "00000000000000000000.json", iceberg / "metadata" / "v1.metadata.json"
    for file in (part, *metadata, data := iceberg / "data" / part.name):
        file.parent.mkdir(parents=True)
        write_parquet(messages(10), file) if file.suffix == ".parquet" else file.write_text("{}")
    index = ("--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/storage")
    of_rows = ("--topic", "orders", "--key", "key", "--time", "timestamp_ms")
    globs = delta / "topic=007" / "*" / "*.parquet", iceberg / "**" / "*.parquet"
    for place in (delta / "topic=007", part.parent, iceberg, iceberg / "data", *globs):
        for more in ((), of_rows):
            done = run_here("spark", "build", "--source", str(place), *index[2:], "--quiet", *more)
            assert done.code == 2 and "is a table (" in done.err and "Spark's reader of its" in done.err, done.err
            if more or place not in globs:
                assert "is a table (" in run_here("ingest", str(place), *index, *more).err
    for file in (part, data):
        for more in ((), of_rows):
            assert "is a table (" in run_here("ingest", str(file), *index, *more).err
    assert not (tmp_path / "storage").exists()


def test_a_damaged_commit_log_fails_the_build_or_is_skipped(spark, storage, tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=8_000) as writer:
        writer.put("TBW102", 0, keys="k-0", store_ms=BEGIN_MS)  # RocketMQ's own topic, which `ingest` also leaves out
        puts = [writer.put("t", 0, b"body" * 20, keys=[f"k-{n}"], store_ms=BEGIN_MS + n * 1000) for n in range(100)]
    segments = sorted((tmp_path / "store" / "commitlog").iterdir())
    segment = max(path for path in segments if int(path.name) <= puts[50].offset)
    at = puts[50].offset - int(segment.name)
    assert len(segments) > 2 and at + puts[50].size + puts[51].size < 7_000
    data = bytearray(segment.read_bytes())
    data[at + puts[50].size - 30] ^= 0xFF
    data[at : at + 4] = b"\xff\xff\xff\xff"
    segment.write_bytes(data)
    at = f"{segment}: .*at byte {at}"
    with pytest.raises(CorruptFile, match=at):
        build(spark, tmp_path / "store", storage=storage, config=IndexConfig(slots=64))
    with pytest.raises(InvalidArgument, match="a commit log has its own fields; to map others, read it as a DataFrame"):
        build(spark, tmp_path / "store", storage=storage, columns={"key": "topic"}, config=IndexConfig(slots=64))
    with pytest.raises(NotAnIndex):
        states(storage)
    command = f"--source {tmp_path}/store --storage {storage} --set slots=64 --skip-corrupt --quiet"
    planned = run_here("spark", "build", *command.split(), "--dry-run")
    assert re.search(rf"skipped ranges +1\n +skipped bytes +{puts[50].size} B\n", planned.out)
    built = run_here("spark", "build", *command.split(), "--json").document
    assert (built["entries"], built["skipped_ranges"], built["skipped_bytes"]) == (99, 1, puts[50].size)
    (passed,) = built["skipped"]
    assert (passed["file"], passed["begin"], passed["end"]) == (str(segment), puts[50].offset, puts[51].offset)
    assert states(storage).genesis.offset_space == "commitlog"
    assert {topic: made.document.connector for topic, made in states(storage).documents.items()} == {"t": "rocketmq"}
    with IndexReader.open(storage) as reader:
        times_by_number = {n: [item.timestamp_ms for item in reader.query("t", f"k-{n}")] for n in (0, 50, 99)}
    assert times_by_number == {0: [BEGIN_MS], 50: [], 99: [BEGIN_MS + 99_000]}


def test_a_segment_that_is_missing_between_others_fails_the_build_or_is_named(spark, storage, tmp_path):
    """It built an index without the messages of another disk, and did not say so."""
    with StoreWriter(tmp_path / "store", segment_bytes=8_000) as writer:
        puts = [writer.put("t", 0, b"body" * 20, keys=[f"k-{n}"], store_ms=BEGIN_MS + n * 1000) for n in range(100)]
    segment = sorted((tmp_path / "store" / "commitlog").iterdir())[1]
    segment.unlink()
    with pytest.raises(MissingOffsets, match=r"no segment has them: .*: commit log offsets 8,000 to 15,999"):
        build(spark, tmp_path / "store", storage=storage, config=IndexConfig(slots=64))
    built = build(spark, tmp_path / "store", storage=storage, config=IndexConfig(slots=64), skip_corrupt=True)
    assert built.entries == sum(not 8_000 <= put.offset < 16_000 for put in puts) > 0
    assert [passed[1:3] for passed in built.skipped] == [(8_000, 16_000)]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_topic_of_another_connector_is_refused_before_tables_are_written(spark, storage, config, tmp_path, dry_run):
    with IndexService.open(root=tmp_path / "root", storage=storage, offset_space="commitlog") as index:
        index.describe_topics(["t"], document_of("kafka"))
        index.put("t", 0, "k", 1, 1, BEGIN_MS)
        index.seal()
        index.run_lifecycle()
    with StoreWriter(tmp_path / "store", segment_bytes=8_000) as writer:
        writer.put("t", 0, b"body", keys=["k"], store_ms=BEGIN_MS)
    (tmp_path / "rows.ndjson").write_text('{"id": "k", "timestamp": 1700000000}\n')
    before = sorted((tmp_path / "storage").rglob("*"))
    with pytest.raises(InvalidArgument, match="topic 't' has entries of the connector 'kafka'"):
        build(spark, tmp_path / "store", storage=storage, mode="append", dry_run=dry_run)
    with pytest.raises(InvalidArgument, match="topic 't' has entries of the connector 'kafka'"):
        rows = RowsOfFiles(("id",), "timestamp", None, "t")
        link_files(spark, [str(tmp_path / "rows.ndjson")], rows, storage=storage, dry_run=dry_run)
    assert sorted((tmp_path / "storage").rglob("*")) == before


@pytest.mark.long
def test_damage_at_the_ends_of_segments_is_counted_once(spark, storage, tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=20_000) as writer:
        for n in range(400):
            writer.put("t", 0, b"body" * 20, keys=[f"k-{n}"], store_ms=BEGIN_MS + n * 1000)
    first, second = CommitLogReader(tmp_path / "store" / "commitlog", check_crc=True).segments()[:2]
    for segment, begin, end in ((first, first.file_size - 3_000, first.file_size), (second, 0, 2_000)):
        data = bytearray(segment.path.read_bytes())
        data[begin:end] = b"\xff" * (end - begin)
        segment.path.write_bytes(data)
    config = IndexConfig(slots=64, items=1_000)
    result = build(spark, tmp_path / "store", storage=storage, config=config, skip_corrupt=True)
    end, begin = sorted(result.skipped, key=lambda skipped_range: skipped_range[1])
    assert (end[0], begin[0]) == (str(first.path), str(second.path))
    assert end[1] <= first.end - 3_000 and end[2] == first.end
    assert begin[1] == second.start and begin[2] >= second.start + 2_000
    assert result.skipped_bytes == end[2] - end[1] + begin[2] - begin[1]


def test_a_source_that_changes_between_the_looks(spark, storage, config, tmp_path):
    seen = tmp_path / "seen"

    def fewer(batches):
        for batch in batches:
            yield batch.slice(seen.exists())
        seen.touch()

    frame = spark.createDataFrame(messages(50)).coalesce(1)
    with pytest.raises(InvalidArgument, match="changes"):
        build(spark, frame.mapInArrow(fewer, frame.schema), storage=storage, config=config)
    with pytest.raises(NotAnIndex):
        states(storage)  # a later build does not find the slots of the failed one
    assert not [*tmp_path.rglob("*.index")]
    assert build(spark, frame, storage=storage, config=IndexConfig(slots=65)).entries == 50


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("build --mode often", "mode is error, append, replace, replace-all, not 'often'"),
        ("build --window fortnight", "fortnight"),
        ("build --column kye=key", "columns: 'kye' is not a field of an entry"),
        ("build --source {folder}/none.parquet", "none.parquet: No such file or directory"),
        ("build --source {folder}/rows.csv", "rows.csv: column 'queue_id' is missing; it has topic"),
        ("build --storage memory://here", "memory:// is one process's memory"),
        ("audit --source {folder}/none.parquet", "none.parquet: No such file or directory"),
        ("audit --column key=order", "give a column 'order' (key); it has"),
        ("audit --constant part=5", "'part' is not a field of an entry"),
        ("audit --constant size=much", "size=much"),
        ("audit --begin 2030-01-01 --end 2029-01-01", "--begin 2030-01-01T00:00:00Z is after --end 2029-01-01T23:59"),
    ],
)
def test_arguments_are_checked_before_spark_starts(tmp_path, monkeypatch, command, message):
    monkeypatch.setattr(session_module, "open_session", lambda *_, **__: pytest.fail("Spark was started"))
    storage = f"file://{tmp_path}/storage"
    with IndexService.open(root=tmp_path / "root", storage=storage, slots=64, items=1_000, background=False):
        pass
    source = write_parquet(messages(10), tmp_path / "m.parquet")
    (tmp_path / "rows.csv").write_text("topic\n")
    job, *options = command.format(folder=tmp_path).split()
    arguments = {"--source": source, "--storage": storage, **dict(zip(options[::2], options[1::2], strict=True))}
    options = " ".join(f"{name} {value}" for name, value in arguments.items())
    assert message in outcome_of(f"{job} {options}", code=2).error["message"]


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
    without = "import sys; sys.modules['pyspark'] = None; sys.modules['pyspark.errors'] = None\n"
    program = f"{without}from tiered_index.cli.main import run; run(sys.argv[1:])"
    command = [sys.executable, "-c", program, "merge", "--master", "local", "--storage", "file:///nowhere/at/all"]
    environment = {**os.environ, "COLUMNS": "200"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert ended.returncode == 2
    assert "pip install '.[spark]' in a clone" in ended.stderr


def test_errors_of_tasks_keep_their_class_and_their_text():
    gone = "store: deleted before they were read: commit log offsets 0 to 9"
    with pytest.raises(CorruptFile, match="store: deleted before"), typed_errors("reading"):
        raise RuntimeError(f"tiered_index.connectors.rocketmq.log.commitlog.MissingOffsets: {gone}")
    aborted = "org.apache.spark.SparkException: Job aborted\nTraceback\ntiered_index.errors."
    with pytest.raises(CorruptFile, match=r"at byte 4 \(reading\)") as caught, typed_errors("reading"):
        raise RuntimeError(f"{aborted}CorruptFile: data/x: bad at byte 4\n\tat org")
    assert caught.value.file == "data/x"
    with pytest.raises(InvalidArgument, match="reading: no such thing"), typed_errors("reading"):
        raise RuntimeError(f"{aborted}InvalidArgument: no such thing\n\tat org")
    with pytest.raises(RuntimeError, match="nothing of ours"), typed_errors("reading"):
        raise RuntimeError("nothing of ours")


def test_texts_of_sparks_errors_begin_with_the_sentence_of_the_error_that_was_raised(spark):
    """Errors of other code, and of our own bugs, keep their text with its trace."""
    show_sentences_first(spark)
    heading, trace = "An exception was thrown:\n", 'Traceback (most recent call last):\n  File "f.py", line 1, in f\n'
    then = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    ours, others = "tiered_index.errors.InvalidArgument: no such thing", "ValueError: no number"
    bug = f"{heading}{trace}AttributeError: module 'tiered_index.errors' has no attribute 'Nothing'"
    caused, causing = (f"{heading}{trace}{a}{then}{trace}{b}" for a, b in ((others, ours), (ours, others)))
    shown = [str(PythonException(text, "")) for text in (f"{heading}{trace}{ours}", caused, causing, bug)]
    assert shown == [ours, ours, causing, bug]


def test_the_end_of_the_jvm_is_an_error_of_its_own():
    class WithoutText(Exception):  # as py4j's errors, whose text is in the JVM
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


@pytest.mark.long
def test_a_malformed_source_of_archived_segments_is_named(spark, storage, config, tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/old", background=False):
        pass
    archive = f"archive:file://{tmp_path}/old"
    for source, error, message in (
        ("archive:/tmp", InvalidArgument, "given as archive:STORAGE-URI"),
        (f"{archive}?store=", InvalidArgument, "give store= once"),
        (f"{archive}?store=a&store=b", InvalidArgument, "give store= once"),
        (f"{archive}?store=nobody", InvalidArgument, "nobody"),
        ([archive, str(tmp_path)], InvalidArgument, "be mixed with files"),
        (f"archive:file://{tmp_path}/none", NotAnIndex, "none"),
    ):
        with pytest.raises(error, match=message):
            build(spark, source, storage=storage, config=config)
    with pytest.raises(NotAnIndex):
        total(storage)
