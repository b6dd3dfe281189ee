"""What a task of a write does, and its driver, in this process: tables of windows from spooled batches, commits struck
at every request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.spark.entries import DAY_MS, messages
from tests.spark.in_process import GENESIS, SCALE, Address
from tests.support.later import Later
from tests.support.log_records import publish
from tests.support.model import Answer, ReferenceModel
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.errors import CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.lifecycle.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.merge import task as task_module
from tiered_index.spark.build import plan as plan_module
from tiered_index.spark.build import shards as shards_module
from tiered_index.spark.build.build import publish_batch, publish_tables
from tiered_index.spark.build.positions import BatchContent, MicroBatch
from tiered_index.spark.datasource import writing
from tiered_index.spark.datasource.writing import (
    EntryColumns,
    EntryStreamWriter,
    EntryWriter,
    PartitionJob,
    Written,
    write_tables,
)
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

TABLE = messages(2_000, days=3)
FIRST, SECOND = MicroBatch("spark:q", 0, BatchContent(2_000, 1)), MicroBatch("spark:q", 1, BatchContent(10, 2))


@pytest.fixture(autouse=True)
def uploads_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "_PART_BYTES", 500)


NOW_MS = SystemClock().now_ms()
# writers publish by that clock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


def job(storage: Storage, **more: Any) -> PartitionJob:
    return replace(PartitionJob(Address(storage), GENESIS, SCALE, 3, 100, NOW_MS), **more)  # type: ignore[arg-type]


def written(table: pa.Table, storage: Storage) -> Any:
    return list(write_tables(table.to_batches(300), job(storage)).shards)


def opened(storage: Storage, clock: ManualClock) -> StorageLog:
    log = StorageLog(storage, clock)
    log.create(GENESIS)
    return log


def left_over(storage: Storage, clock: ManualClock) -> int:
    log = StorageLog(storage, clock)
    log.open()
    found = find_orphans(Later(storage, 300 * 365 * DAY_MS / 1000), log)
    delete_orphans(storage, found)
    assert {info.name for info in storage.list("data/")} == set(log.state.objects)
    return len(found.objects) + len(found.uploads)


@pytest.mark.parametrize("small", [False, True])
def test_a_task_writes_a_table_for_each_window(
    monkeypatch: pytest.MonkeyPatch, clock: ManualClock, small: bool
) -> None:
    if small:  # several rounds of packing, pieces and hot keys that are spooled once more
        monkeypatch.setattr(shards_module, "_HELD_ITEMS", 256)
        monkeypatch.setattr(shards_module, "_BLOCK_ITEMS", 16)
        monkeypatch.setattr(plan_module, "PIECE_ITEMS", 100)
    storage = MemoryStorage()
    log = opened(storage, clock)
    shuffled = TABLE.take(pa.array(np.random.default_rng(1).permutation(len(TABLE))))
    shards = written(shuffled, storage)
    assert (len(shards) > 3) == small and len({shard.stored.shard.table for shard in shards}) == 3
    publish_tables(shards, "append", storage, log)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        for topic, key in (
            ("orders", "key-0"),
            *zip(TABLE["topic"].to_pylist()[:60:3], TABLE["key"].to_pylist()[:60:3], strict=True),
        ):
            model = ReferenceModel()
            for row in TABLE.filter((pc.field("topic") == topic) & (pc.field("key") == key)).to_pylist():
                model.put(topic, row["queue_id"], key, row["offset"], row["size"], row["timestamp_ms"])
            assert [Answer.of(item) for item in reader.query(topic, key, max_count=10_000)] == model.query(
                topic, key, max_count=None
            )
    assert left_over(storage, clock) == 0


def test_a_list_of_keys_is_an_entry_for_each_different_one() -> None:
    kinds = {"topic": pa.string(), "keys": pa.list_(pa.string()), "timestamp_ms": pa.timestamp("us", "UTC")}
    kinds |= {"size": pa.int32(), "offset": pa.int64(), "queue_id": pa.int16()}
    columns = EntryColumns.of(kinds, KEYED_SCHEMA)
    keys = pa.array([["a", "b", None, "a"], [], None, ["c"]], pa.list_(pa.string()))
    number = pa.array([0, 1, 2, 3])
    batch = pa.record_batch(
        {
            "topic": pa.array(list("wxyz")),
            "keys": keys,
            "timestamp_ms": number,
            "size": number,
            "offset": number,
            "queue_id": number,
        }
    )
    [entries] = columns.batches([batch.slice(3), batch.slice(0, 3)][1:])
    assert sorted(zip(entries["topic"].to_pylist(), entries["key"].to_pylist(), strict=True)) == [
        ("w", "a"),
        ("w", "b"),
    ]
    [entries] = columns.batches([batch.slice(1)])
    assert entries.to_pylist() == [{"topic": "z", "queue_id": 3, "key": "c", "offset": 3, "size": 3, "timestamp_ms": 3}]


BAD = {
    "null": ("size", pa.nulls(2_000, pa.int32()), "column 'size' has 300 nulls"),
    "no_topic": ("topic", pa.nulls(2_000, pa.string()), "column 'topic' has .* nulls in rows that have a key"),
    "no_time": (
        "timestamp_ms",
        pa.nulls(2_000, pa.int64()),
        "column 'timestamp_ms' has .* nulls in rows that have a key",
    ),
    "large": ("size", pa.array([1 << 40] * 2_000), "size 1099511627776 is outside"),
    "year": ("timestamp_ms", pa.array([1 << 50] * 2_000), "timestamp_ms 1125899906842624 is outside"),
}


@pytest.mark.parametrize("case", BAD)
def test_values_that_no_entry_has_are_refused_and_named(case: str) -> None:
    name, values, text = BAD[case]
    storage = MemoryStorage()
    with pytest.raises(InvalidArgument, match=text):
        written(TABLE.set_column(TABLE.schema.get_field_index(name), name, values), storage)
    assert not list(storage.list("data/")) and not list(storage.list_uploads())


def test_a_batch_is_in_the_log_once_and_what_came_again_is_taken_back(clock: ManualClock) -> None:
    storage = MemoryStorage()
    log = opened(storage, clock)
    assert publish_batch(written(TABLE, storage), FIRST, storage, log)
    objects = dict(log.state.objects)
    assert not publish_batch(written(TABLE, storage), FIRST, storage, StorageLog(storage, clock))
    assert publish_batch(written(TABLE.slice(0, 10), storage), SECOND, storage, log)
    # a driver that was held up while another one went on, or a checkpoint that was copied back: not known to hold the
    # same messages
    writer = a_writer(EntryStreamWriter, storage)
    with pytest.raises(InvalidArgument, match=r"micro-batch 1 .*0 comes now.*checkpoint"):
        writer.commit([Written(tuple(written(TABLE, storage)), "q", FIRST.content)], 0)
    assert (
        sum(stored.count for stored in log.refresh().objects.values()) == 2_010
        and objects.items() <= log.state.objects.items()
    )
    assert left_over(storage, clock) == 0


def test_a_batch_stays_published_when_its_objects_are_gone(clock: ManualClock) -> None:
    storage = MemoryStorage()
    log = StorageLog(storage, clock, checkpoint_every=1)
    log.create(GENESIS)
    publish_batch(written(TABLE, storage), FIRST, storage, log)
    publish(log, 0, remove=tuple(log.state.objects))
    fresh = StorageLog(storage, clock)
    assert not publish_batch(written(TABLE, storage), FIRST, storage, fresh)
    assert not fresh.refresh().objects and fresh.state.positions == {"spark:q": 0}


def test_two_drivers_publish_one_batch_at_once(clock: ManualClock) -> None:
    storage = FaultStorage(MemoryStorage())
    log = opened(storage, clock)
    mine, other = written(TABLE, storage), written(TABLE, storage)

    def first() -> None:
        assert publish_batch(other, FIRST, storage.inner, StorageLog(storage.inner, clock))

    state = log.refresh()
    assert not FIRST.is_in(state)
    original, done = storage.put_if_absent, []

    def raced(name: str, data: bytes) -> Any:
        if not done:
            done.append(first())
        return original(name, data)

    storage.put_if_absent = raced  # type: ignore[method-assign]
    assert not publish_batch(mine, FIRST, storage, log)
    assert set(log.state.objects) == {shard.stored.name for shard in other}
    assert left_over(storage, clock) == 0


class Killed(BaseException):
    """The driver's end."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["complete_upload", "head", "put_if_absent"])
def test_a_driver_killed_while_it_commits_a_batch(clock: ManualClock, operation: str, when: Any) -> None:
    inner = MemoryStorage()
    opened(inner, clock)
    shards = written(TABLE, inner)
    struck = FaultStorage(inner)
    struck.fail(operation, when=when, error=Killed)
    with pytest.raises(Killed):
        publish_batch(shards, FIRST, struck, StorageLog(struck, clock))
    was = (operation, when) == ("put_if_absent", "after")
    assert publish_batch(written(TABLE, inner), FIRST, inner, StorageLog(inner, clock)) != was
    log = StorageLog(inner, clock)
    assert sum(stored.count for stored in log.open().objects.values()) == 2_000
    assert left_over(inner, clock) == (0 if was else len(shards))


def a_writer(kind: Any, storage: Storage) -> Any:
    """Return a writer as it comes to `commit` and `abort`: without what Spark calls to make it."""
    writer = object.__new__(kind)
    writer._job, writer._columns, writer._mode = job(storage), None, "append"
    return writer


@pytest.mark.parametrize("kind", [EntryWriter, EntryStreamWriter])
def test_abort_takes_back_what_is_certainly_not_published(clock: ManualClock, kind: Any) -> None:
    storage = FaultStorage(MemoryStorage())
    opened(storage, clock)
    writer, number = a_writer(kind, storage), (0,) * (kind is EntryStreamWriter)
    writer.abort([Written(tuple(written(TABLE, storage)), "q", FIRST.content), None], *number)
    assert left_over(storage, clock) == 0
    with pytest.raises(StorageUnavailable, match="1 of 2 tasks"):
        writer.commit([Written((), "q", BatchContent()), None], *number)
    # the record is there, its answer is lost: Spark calls abort after such a commit
    messages = [Written(tuple(written(TABLE, storage)), "q", FIRST.content)]
    storage.fail("put_if_absent", when="after")
    with pytest.raises(StorageUnavailable):
        writer.commit(messages, *number)
    writer.abort(messages, *number)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert len(reader.query("orders", "key-0", max_count=10_000).items) == sum(
            key == "key-0" for key in TABLE["key"].to_pylist()
        )


def test_a_task_that_fails_takes_back_what_it_uploaded(clock: ManualClock) -> None:
    storage = FaultStorage(MemoryStorage())
    opened(storage, clock)
    storage.fail("upload_part", nth=5)
    with pytest.raises(StorageUnavailable):
        written(TABLE, storage)
    assert not list(storage.list("data/")) and not list(storage.list_uploads())
    with pytest.raises(InvalidArgument, match="more than 2 windows"):
        write_tables(TABLE.to_batches(), job(storage, max_windows=2))
    assert write_tables([], job(storage)).shards == ()


@pytest.mark.parametrize(
    ("lie", "what"), [({"read_checksum": 1}, "other entries"), ({"shards": ()}, "another number of entries")]
)
def test_tables_that_are_not_what_was_read_are_refused(monkeypatch: pytest.MonkeyPatch, lie: Any, what: str) -> None:
    storage = MemoryStorage()
    real = writing.write_blocks
    monkeypatch.setattr(writing, "write_blocks", lambda blocks, *more: replace(real(blocks, *more), **lie))
    with pytest.raises(CorruptFile, match=f"wrote {what} than it read"):
        written(TABLE, storage)
    assert bool(list(storage.list_uploads())) == ("shards" in lie)


def test_a_checkpoint_whose_index_is_gone_or_another_one_is_refused() -> None:
    """An empty first batch tells the index of its query; a later batch creates no index and joins no other one."""
    gone, other, own = MemoryStorage(), MemoryStorage(), MemoryStorage()
    a_writer(EntryStreamWriter, other).commit([Written(tuple(written(TABLE, other)), "p", FIRST.content)], 0)
    a_writer(EntryStreamWriter, own).commit([Written((), "q", BatchContent())], 0)
    for storage in (gone, other):
        message = Written(tuple(written(TABLE.slice(0, 10), storage)), "q", SECOND.content)
        before = {info.name for info in storage.list("log/")}
        with pytest.raises(InvalidArgument, match=r"no index that knows this query.* give a new checkpointLocation"):
            a_writer(EntryStreamWriter, storage).commit([message], 1)
        assert {info.name for info in storage.list("log/")} == before
        assert not {shard.stored.name for shard in message.shards} & {info.name for info in storage.list("data/")}
    a_writer(EntryStreamWriter, own).commit([Written((), "q", BatchContent())], 0)
    message = Written(tuple(written(TABLE.slice(0, 10), own)), "q", SECOND.content)
    a_writer(EntryStreamWriter, own).commit([message], 1)
    log = StorageLog(own, SystemClock())
    assert sum(stored.count for stored in log.open().objects.values()) == 10
    assert log.state.positions == {"spark:q": 1} and len(list(own.list("log/"))) == 3
