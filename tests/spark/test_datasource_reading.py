"""The data source `tiered_index` without a session: these tests make the calls of Spark's workers.

They cover options, schemas, requests and damage.
"""

import datetime as dt
from collections import Counter

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, InputPartition
from pyspark.sql.types import StructField, StructType

from tests.spark.entries import BEGIN_MS, DAY_MS, messages, put_files, states, stored_rows, sweep
from tests.spark.in_process import build_here
from tests.storage.scripted_server import error
from tests.support.counting_proxy import Action, counting_proxy
from tests.support.merging import BASE_MS, RegionItem
from tiered_index import IndexConfig, IndexService, hash_key
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    SchemaMismatch,
    StorageMisconfigured,
    StorageUnavailable,
)
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.datasource import reading
from tiered_index.spark.datasource.entries import EntrySource
from tiered_index.storage.opening import open_storage


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Tables of a day in shards, files, and all rows that were put."""
    folder = tmp_path_factory.mktemp("reading")
    uri, first, second = f"file://{folder}/storage", messages(2_000, days=2), messages(900, days=3, seed=2)
    put_files(uri, folder / "root", second, rows=350)
    build_here(uri, first, shards=3)
    assert len(states(uri).tables) == 2 and len(states(uri).objects) > 8
    return uri, first.to_pylist() + second.to_pylist()


def scan(uri, columns=None, **options):
    """Return the tables of a scan's partitions, as Spark's workers make them."""
    made = EntrySource(CaseInsensitiveDict({"path": uri, **options}))
    whole = made.schema()
    reader = made.reader(whole if columns is None else StructType([whole[name] for name in columns]))
    return [pa.Table.from_batches(batches) for part in reader.partitions() if (batches := list(reader.read(part)))]


def rows_of(tables):
    rows = [row for table in tables for row in table.to_pylist()]
    names = ("topic", "key_hash", "queue_id", "offset", "size")
    return Counter((*(r[name] for name in names), int(r["timestamp"].timestamp())) for r in rows)


def at(ms):
    return dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(milliseconds=ms)


MIDDLE = BEGIN_MS + DAY_MS
HOUR_LATER = MIDDLE + 3_600_500
SECOND_MS = messages(2_000, days=2)["timestamp_ms"][100].as_py() // 1000 * 1000
CASES = {
    "all": ({}, lambda r: True),
    "a second": (
        {"beginMs": f"{SECOND_MS}", "endMs": f"{SECOND_MS}"},
        lambda r: r["timestamp_ms"] // 1000 == SECOND_MS // 1000,
    ),
    "no topic": ({"topic": "nothing"}, lambda r: False),
    "topic and queues": (
        {"topic": "orders", "queues": "0, 3"},
        lambda r: r["topic"] == "orders" and r["queue_id"] in (0, 3),
    ),
    "after all time": ({"beginMs": f"{10**18}", "endMs": f"{10**18}"}, lambda r: False),
    "between": (
        {"beginMs": f"{MIDDLE}", "endMs": f"{HOUR_LATER}"},
        lambda r: MIDDLE // 1000 <= r["timestamp_ms"] // 1000 <= HOUR_LATER // 1000,
    ),
    "after": ({"beginMs": f"{MIDDLE + 500}"}, lambda r: r["timestamp_ms"] // 1000 >= MIDDLE // 1000),
}


@pytest.mark.parametrize("case", CASES)
def test_options_select_entries(written, case):
    """Each entry is in one partition, however they are cut."""
    uri, rows = written
    options, keep = CASES[case]
    whole, cut = scan(uri, **options), scan(uri, **options, maxPartitionBytes="10k")
    assert rows_of(whole) == rows_of(cut) == stored_rows(filter(keep, rows))
    assert options or (len(whole) == 1 and len(cut) > 8)


def test_a_giant_slot_is_cut_and_read_by_time(tmp_path):
    uri, count = f"file://{tmp_path}/storage", 30_000
    table = messages(count, days=2, hot=1)
    put_files(uri, tmp_path / "root", table)
    parts = scan(uri, maxPartitionBytes="40k")
    assert len(parts) == 4 and rows_of(parts) == stored_rows(table.to_pylist())
    assert max(map(len, parts)) < count // 2
    late = scan(uri, beginMs=f"{MIDDLE}")
    assert sum(map(len, late)) == sum(r["timestamp_ms"] // 1000 >= MIDDLE // 1000 for r in table.to_pylist())


def test_a_sweep_during_a_scan_ends_it_with_an_error(tmp_path):
    """The scan has read its first object when the later ones disappear. It fails, since it can't return all rows."""
    uri = f"file://{tmp_path}/storage"
    put_files(uri, tmp_path / "root", messages(900), rows=350)
    reader = EntrySource(CaseInsensitiveDict({"path": uri})).reader(EntrySource({"path": uri}).schema())
    [part] = reader.partitions()
    batches = reader.read(part)
    assert 0 < len(next(batches)) < 900
    with open_storage(uri) as storage:
        log = StorageLog(storage, SystemClock())
        log.open()
        assert merge(storage, log, SystemClock(), MergeOptions(min_age_s=0), threads=1).jobs
    assert sweep(uri) == 3
    with pytest.raises(StorageUnavailable, match=r"was removed .* load the index again"):
        list(batches)
    assert sum(map(len, scan(uri))) == 900


def test_further_columns_some_columns_and_a_schema_of_the_user_in_other_letters(tmp_path):
    uri = f"file://{tmp_path}/storage"
    settings = IndexConfig(root=tmp_path / "root", storage=uri, slots=64, item_type=RegionItem, background=False)
    with IndexService.open(settings, clock=ManualClock(BASE_MS)) as index:
        index.put("t", 1, "k", 5, 9, BASE_MS, region=7, price=2.5, tag=b"ab")
        index.seal()
        index.run_lifecycle()
    (table,) = scan(uri)
    stored = {"topic": "t", "key_hash": hash_key("t", "k"), "queue_id": 1, "offset": 5, "size": 9}
    stored |= {"timestamp": at(BASE_MS // 1000 * 1000), "region": 7, "price": 2.5, "tag": b"ab\0\0"}
    assert table.to_pylist() == [stored]
    assert scan(uri, columns=["price", "topic"])[0].to_pylist() == [{"price": 2.5, "topic": "t"}]
    made = EntrySource({"path": uri, "topic": "t"})
    kinds = {column.name: column.dataType for column in made.schema()}
    names = ("REGION", "Offset", "Topic", "TimeStamp")
    reader = made.reader(StructType([StructField(name, kinds[name.lower()]) for name in names]))
    [record_batch] = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert record_batch.to_pylist() == [{name: stored[name.lower()] for name in names}]


def test_bad_options_and_places(written, tmp_path):
    uri, _ = written

    def refused(error, message, place=uri, **options):
        with pytest.raises(error, match=message):
            scan(place, **options)

    others = "of writes window, .*offsetSpace; of writes of rows of files keys, .*; of streams .*checkpointLocation"
    known = f"path, topic, queues, beginMs, endMs, maxPartitionBytes; {others}"
    refused(InvalidArgument, f"unknown option 'begin', 'x'; the options are {known}", begin="1", x="2")
    refused(InvalidArgument, "beginMs is an integer, not 'x'", beginMs="x")
    refused(InvalidArgument, "is after end_ms", beginMs="2", endMs="1")
    refused(InvalidArgument, "maxPartitionBytes is a number of bytes", maxPartitionBytes="0")
    refused(InvalidArgument, "CREATE TEMPORARY VIEW entries USING tiered_index OPTIONS", owner="somebody")
    refused(InvalidArgument, "option queues is integers like 0,3, not '0;3'", queues="0;3")
    refused(InvalidArgument, "topic is empty", topic=" ")
    refused(InvalidArgument, r"no path is given: .*save\(URI\).* saveAsTable pass no path", place="")
    refused(InvalidArgument, "one path is read at a time", paths='["a"]')
    refused(NotAnIndex, "holds no tiered index", place=f"file://{tmp_path}")
    refused(ConfigError, "one process's memory", place="memory://x")
    with pytest.raises(SchemaMismatch, match="column 'key' was requested as string, and there is no such column"):
        EntrySource({"path": uri}).reader(StructType().add("key", "string")).partitions()
    with pytest.raises(SchemaMismatch, match=r"'offset'.*int.*bigint"):
        EntrySource({"path": uri}).reader(StructType().add("offset", "integer")).partitions()
    assert list(EntrySource({"path": uri}).reader(StructType()).read(InputPartition(None))) == []


@pytest.fixture(scope="module")
def in_s3(s3, tmp_path_factory):
    """An index of three files in a bucket, behind a counting proxy: its URI, the rows that were put, the proxy, the
    files.
    """
    bucket, table = s3.new_bucket(), messages(900)
    with counting_proxy(s3.endpoint_url) as proxy:
        uri = f"s3://{bucket}/index?endpoint_url={proxy.endpoint_url}"
        put_files(uri, tmp_path_factory.mktemp("in-s3"), table, rows=300)
        files = [f"{bucket}/index/{name}" for name in states(uri).objects]
        yield uri.replace("s3", "s3a", 1), table.to_pylist(), proxy, files


@pytest.fixture
def stored(in_s3):
    in_s3[2].reset()
    return in_s3


def test_a_scan_reads_a_directory_and_a_range_of_the_files_of_its_time(stored):
    uri, rows, proxy, files = stored
    assert len(files) == 3
    assert rows_of(scan(uri)) == stored_rows(rows)
    counts = proxy.counts()
    assert {key: count.requests for (method, ranged, key), count in counts.items() if ranged} == dict.fromkeys(files, 2)
    proxy.reset()
    last = max(r["timestamp_ms"] for r in rows)
    assert len(scan(uri, beginMs=f"{last}")) == 1
    assert sum(count.requests for (_, ranged, _), count in proxy.counts().items() if ranged) == 2


def test_damage_and_denial_name_the_object(stored):
    uri, _, proxy, files = stored
    proxy.fault = lambda request: Action(flip_byte=0) if request.ranged and request.key == files[1] else None
    with pytest.raises(CorruptFile, match=files[1].partition("/index/")[2]):
        scan(uri)
    proxy.fault = lambda request: Action(answer=error(403, "AccessDenied")) if request.key == files[2] else None
    with pytest.raises(StorageMisconfigured, match=files[2].partition("/index/")[2]):
        scan(uri)


def test_a_scan_of_too_many_tasks_is_refused(written, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_TASKS", 3)
    with pytest.raises(InvalidArgument, match=r"maxPartitionBytes is 1,024 bytes, .* more than 3 tasks .* such as 64m"):
        scan(written[0], maxPartitionBytes="1k")
