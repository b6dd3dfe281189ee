"""The data source `rocketmq_commitlog`: the messages of a store and of an archive."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.datasource import InputPartition

from tests.spark.entries import BEGIN_MS, states
from tests.support.damage import flip
from tests.support.store_writer import StoreWriter
from tests.support.stored_messages import compress
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver, closed_segments
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.layout import TRANSACTION_PREPARED
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, SchemaMismatch
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.format.segments.archived import PIECE_BYTES
from tiered_index.spark import build, register
from tiered_index.spark.datasource import messages as module
from tiered_index.spark.datasource.messages import CommitLogDataSource
from tiered_index.spark.writing.log_sources import Stretch
from tiered_index.spark.writing.sources import entry_frame

SEGMENT = 20_000


def fill(folder, count=300, first=0, **settings):
    """Write messages from number `first` on into a store."""
    with StoreWriter(folder, segment_bytes=SEGMENT, **settings) as writer:
        puts = []
        for n in range(first, first + count):
            more = {"keys": [f"k-{n}", "all"], "tags": "tag", "uniq_key": f"u-{n}", "born_ms": BEGIN_MS - 5}
            puts.append(writer.put("orders", n % 3, b"body %d" % n, store_ms=BEGIN_MS + n * 1000, **more))
        return puts


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled") / "store"
    fill(folder)
    return folder


@pytest.fixture
def store(filled, tmp_path):
    return Path(shutil.copytree(filled, tmp_path / "store"))


def segments(store):
    return CommitLogReader(store / "commitlog").segments()


def source(path, **options):
    return CommitLogDataSource({"path": str(path), **options})


def batch(path, **options):
    """Return the rows of each partition."""
    made = source(path, **options)
    reader = made.reader(made.schema())
    return [
        pa.Table.from_batches(batches).to_pylist()
        for part in reader.partitions()
        if (batches := list(reader.read(part)))
    ]


def rows_of(parts):
    return [row for rows in parts for row in rows]


def messages_of(store):
    return list(CommitLogReader(store / "commitlog").messages())


def test_every_message_is_a_row(filled):
    parts = batch(filled)
    assert len(parts) == len(segments(filled)) > 2
    rows, messages = rows_of(parts), messages_of(filled)
    assert len(rows) == 300
    for row, message in zip(rows, messages, strict=True):
        same = {name: getattr(message, name) for name in ("topic", "queue_id", "queue_offset", "physical_offset")}
        same |= {"store_size": message.size, "visible": True, "keys": list(message.index_keys), "tags": "tag"}
        assert {name: row[name] for name in same} == same
        assert row["store_timestamp"].timestamp() * 1000 == message.store_ms
        assert (dict(row["properties"]), row["body"]) == (message.properties, message.raw_body)
    bodiless = [{name: value for name, value in row.items() if name != "body"} for row in rows]
    assert rows_of(batch(f"file://{filled}", body="none")) == bodiless
    assert list(source(filled).reader(source(filled).schema()).read(InputPartition(None))) == []


def test_damage_is_named_or_skipped(store):
    message = messages_of(store)[40]
    path = next(s.path for s in segments(store) if s.start <= message.physical_offset < s.end)
    data = bytearray(path.read_bytes())
    at = message.physical_offset - int(path.name)
    data[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=path.name) as caught:
        batch(store)
    assert (caught.value.file, caught.value.offset) == (str(path), at)
    assert [row["physical_offset"] for row in rows_of(batch(store, skipCorrupt="true"))] == [
        m.physical_offset for m in CommitLogReader(store / "commitlog").messages(skip_corrupt=True)
    ]
    segments(store)[1].path.unlink()
    with pytest.raises(MissingOffsets, match="no segment"):
        batch(store)
    assert len(rows_of(batch(store, skipCorrupt="true"))) < 299


@pytest.fixture(scope="module")
def archived(filled, tmp_path_factory):
    """The folder of an index that has archived the closed segments of the store, and those segments."""
    folder, log = tmp_path_factory.mktemp("archived"), filled / "commitlog"
    settings = {"slots": 64, "background": False, "offset_space": "commitlog"}
    with IndexService.open(root=folder / "root", storage=f"file://{folder}/storage", **settings) as index:
        SegmentArchiver(index, "broker", log).run_once()
        return folder / "storage", closed_segments(log)


def test_segments_of_an_archive(filled, archived, tmp_path):
    folder, closed = archived
    shutil.copytree(folder, tmp_path / "storage")
    archive = f"archive:file://{tmp_path}/storage"
    expected = [row for row in rows_of(batch(filled)) if row["physical_offset"] < closed[-1].end]
    assert rows_of(batch(archive)) == rows_of(batch(archive, store="broker")) == expected and len(expected) < 300
    files = (path for path in (tmp_path / "storage").rglob("*") if path.is_file())
    flip(next(path for path in files if b"body 0" in path.read_bytes()[:400]), 300)
    with pytest.raises(CorruptFile, match="piece of an archived segment"):
        batch(archive)
    behind = [row for row in expected if row["physical_offset"] >= closed[0].start + PIECE_BYTES]
    assert rows_of(batch(archive, skipCorrupt="true")) == behind
    with pytest.raises(InvalidArgument, match=r"'other'.*'broker'"):
        batch(archive, store="other")


def entries_of(uri):
    with IndexReader.open(uri) as reader, reader.export() as batches:
        return sorted(tuple(map(str, row.values())) for batch in batches for row in batch.to_pylist())


@pytest.mark.long
def test_a_build_of_an_archive_has_the_entries_of_the_log_and_none_of_damaged_pieces(spark, filled, archived, tmp_path):
    folder, closed = archived
    shutil.copytree(folder, tmp_path / "storage")
    shutil.copytree(filled, tmp_path / "store")
    for segment in segments(tmp_path / "store")[len(closed) :]:
        segment.path.unlink()
    source, config = f"archive:file://{tmp_path}/storage?store=broker", IndexConfig(slots=64, items=10_000)
    local, remote, part = (f"file://{tmp_path}/{name}" for name in ("local", "remote", "part"))
    build(spark, tmp_path / "store", storage=local, config=config)
    build(spark, source, storage=remote, config=config)
    assert entries_of(remote) == entries_of(local) and states(remote).genesis.offset_space == "commitlog"
    files = (path for path in (tmp_path / "storage").rglob("*") if path.is_file())
    flip(next(path for path in files if b"body 0" in path.read_bytes()[:1_000]), 300)
    with pytest.raises(CorruptFile, match="CRC32"):
        build(spark, source, storage=part, config=config)
    result = build(spark, source, storage=part, config=config, skip_corrupt=True)
    # the damaged piece, with the message that crosses its end
    [(_, begin, end, _)] = result.skipped
    assert begin == closed[0].start and PIECE_BYTES <= end - begin == result.skipped_bytes < closed[0].file_size
    assert 0 < result.entries < len(entries_of(local)) and {*entries_of(part)} < {*entries_of(local)}


def test_bad_options_and_places(filled, tmp_path):
    known = "path, body, skipCorrupt, store"
    for options, message in (
        ({"bodies": "none"}, f"unknown option 'bodies'; the options are {known}"),
        ({"body": "half"}, "body is plain or stored or none"),
        ({"skipCorrupt": "yes"}, "skipCorrupt is false or true"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            source(filled, **options).schema()
    with pytest.raises(ConfigError, match="memory://"):
        source("archive:memory://x").schema()
    with pytest.raises(InvalidArgument, match="no such folder"):
        batch(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="commitlog/"):
        batch(tmp_path)
    with pytest.raises(SchemaMismatch, match=r"'size'.*no such column"):
        source(filled).reader(source(filled).schema().add("size", "integer")).partitions()


AS_ENTRIES = {"key": "keys", "offset": "physical_offset", "size": "store_size", "timestamp_ms": "store_timestamp"}


def test_rows_are_what_a_build_takes(spark, tmp_path):
    register(spark)
    fill(tmp_path / "store", 250)
    rows = spark.read.format("rocketmq_commitlog").load(str(tmp_path / "store"))
    entries = entry_frame(rows.filter("visible"), AS_ENTRIES, KEYED_SCHEMA).withColumn(
        "timestamp_ms", F.unix_millis("timestamp_ms")
    )
    names = ["topic", "queue_id", "key", "offset", "size", "timestamp_ms"]
    batches = [read.columns.select(names) for read in CommitLogReader(tmp_path / "store" / "commitlog").batches()]
    expected = [tuple(row.values()) for record_batch in batches for row in record_batch.to_pylist()]
    taken = list(map(tuple, entries.select(*names).collect()))
    assert sorted(taken) == sorted(expected) and len(taken) == 750


def test_bodies_that_are_compressed_or_broken(tmp_path):
    packed, flags = compress(b"x" * 500, "zlib")
    with StoreWriter(tmp_path / "s", segment_bytes=SEGMENT) as writer:
        for n in range(3):
            writer.put("t", 0, packed[:-5] if n == 1 else packed, keys="a", store_ms=BEGIN_MS, sys_flag=flags)
        writer.put("t", 0, b"half", keys="b", store_ms=BEGIN_MS, sys_flag=TRANSACTION_PREPARED)
    with pytest.raises(CorruptFile, match="zlib body"):
        batch(tmp_path / "s")
    rows = rows_of(batch(tmp_path / "s", skipCorrupt="true"))
    assert [len(row["body"] or b"") for row in rows] == [500, 0, 500, 4]
    assert [row["visible"] for row in rows] == [True, True, True, False]
    assert rows_of(batch(tmp_path / "s", body="stored"))[0]["body"] == packed


def test_a_host_without_the_log_is_an_error_and_no_empty_log(tmp_path):
    settings = module.MessageSettings.of("rocketmq_commitlog", {"path": str(tmp_path)})
    with pytest.raises(InvalidArgument, match=r"has no segment on this host .*same files on every executor"):
        list(module.read_stretch(Stretch(0, 1 << 30, str(tmp_path / "commitlog")), settings, settings.columns))
