"""The tasks and the driver of a write, in this process.

Tests cover tables of windows from spooled batches, commits with a fault at every request, and the check of repeated
micro-batches. A repeated micro-batch has the same rows as the published one of its number.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from tests.spark.entries import check_answers, messages
from tests.spark.in_process import GENESIS, SCALE, Address, build_here, count, left_over, opened
from tests.support.log_records import open_log
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.errors import ConfigError, CorruptFile, InvalidArgument, SchemaMismatch, StorageUnavailable
from tiered_index.format.keys.hashing import assigned_topic_id, code_units, hash_batch
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.log.log import Checkpoints, StorageLog
from tiered_index.service.log.records import IndexDescriptor, LogRecord, StreamBatch
from tiered_index.spark.datasource import writing
from tiered_index.spark.datasource.options import DataSourceOptions
from tiered_index.spark.datasource.rows import RowWriter, WrittenRows
from tiered_index.spark.datasource.writing import EntryColumns, EntryStreamWriter, EntryWriter, PartitionJob, Written
from tiered_index.spark.writing import plan as plan_module
from tiered_index.spark.writing import shards as shards_module
from tiered_index.spark.writing.build import publish_batch, publish_tables
from tiered_index.spark.writing.positions import BatchContent, MicroBatch
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

TABLE = messages(2_000, days=3)
FIRST, SECOND = MicroBatch("spark:q", 0, BatchContent(2_000, 1)), MicroBatch("spark:q", 1, BatchContent(10, 2))


NOW_MS = SystemClock().now_ms()
# writers publish by that clock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


def job(storage: Storage, **more: Any) -> PartitionJob:
    return replace(PartitionJob(Address(storage), GENESIS, SCALE, 3, 100, NOW_MS), **more)  # type: ignore[arg-type]


def written(table: pa.Table, storage: Storage) -> Any:
    return list(writing.write_tables(table.to_batches(300), job(storage)).shards)


@pytest.mark.parametrize("small", [False, True])
def test_a_task_writes_a_table_for_each_window(monkeypatch, clock, small):
    if small:  # several rounds of packing, and pieces and hot keys that are spooled again
        monkeypatch.setattr(shards_module, "_HELD_ITEMS", 256)
        monkeypatch.setattr(shards_module, "_BLOCK_ITEMS", 16)
        monkeypatch.setattr(plan_module, "PIECE_ITEMS", 100)
    storage = MemoryStorage()
    log = opened(storage, clock)
    shuffled = TABLE.take(pa.array(np.random.default_rng(1).permutation(len(TABLE))))
    shards = written(shuffled, storage)
    assert (len(shards) > 3) == small and len({shard.stored.shard.table for shard in shards}) == 3
    publish_tables(shards, "append", log)
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        check_answers(reader, TABLE)
    assert left_over(storage, clock) == 0


def test_a_batch_is_in_the_log_once_and_its_repeat_is_deleted(clock: ManualClock) -> None:
    storage = MemoryStorage()
    log = opened(storage, clock)
    assert publish_batch(written(TABLE, storage), FIRST, log)
    objects = dict(log.state.objects)
    assert not publish_batch(written(TABLE, storage), FIRST, StorageLog(storage, clock))
    assert publish_batch(written(TABLE.slice(0, 10), storage), SECOND, log)
    # a driver that was stopped while another one continued, or a copied checkpoint: nothing shows that the messages are
    # the same
    writer = a_writer(EntryStreamWriter, storage)
    with pytest.raises(InvalidArgument, match=r"micro-batch 0 .*older than its last published one, 1.*checkpoint"):
        writer.commit([Written(tuple(written(TABLE, storage)), "q", FIRST.content)], 0)
    assert count(storage, clock) == 2_010 and objects.items() <= log.refresh().objects.items()
    assert left_over(storage, clock) == 0


def test_two_drivers_publish_one_batch_at_once(clock: ManualClock) -> None:
    storage = FaultStorage(MemoryStorage())
    log = opened(storage, clock)
    mine, other = written(TABLE, storage), written(TABLE, storage)

    assert not FIRST.is_in(log.refresh())
    original = storage.put_if_absent

    def raced(name: str, data: bytes) -> Any:
        storage.put_if_absent = original  # type: ignore[method-assign]
        assert publish_batch(other, FIRST, StorageLog(storage.inner, clock))
        return original(name, data)

    storage.put_if_absent = raced  # type: ignore[method-assign]
    assert not publish_batch(mine, FIRST, log)
    assert set(log.state.objects) == {shard.stored.name for shard in other}
    assert left_over(storage, clock) == 0


def a_writer(kind: Any, storage: Storage, **more: Any) -> Any:
    """Return a writer, made without Spark."""
    writer = object.__new__(kind)
    columns = EntryColumns.of({field.name: field.type for field in TABLE.schema}, KEYED_SCHEMA)
    writer._job, writer._columns, writer._mode = job(storage, **more), columns, "append"
    return writer


@pytest.mark.parametrize("kind", [EntryWriter, EntryStreamWriter])
def test_abort_deletes_only_tables_that_are_certainly_not_published(clock: ManualClock, kind: Any) -> None:
    storage = FaultStorage(MemoryStorage())
    opened(storage, clock)
    writer, number = a_writer(kind, storage), (0,) * (kind is EntryStreamWriter)
    writer.abort([Written(tuple(written(TABLE, storage)), "q", FIRST.content), None], *number)
    assert left_over(storage, clock) == 0
    with pytest.raises(StorageUnavailable, match="1 of 2 tasks"):
        writer.commit([Written((), "q", BatchContent()), None], *number)
    # the record is there but the response was lost: Spark calls abort after such a commit
    messages = [Written(tuple(written(TABLE, storage)), "q", FIRST.content)]
    storage.fail("put_if_absent", when="after")
    with pytest.raises(StorageUnavailable):
        writer.commit(messages, *number)
    writer.abort(messages, *number)
    assert count(storage, clock) == 2_000 and left_over(storage, clock) == 0


def test_rows_of_files_are_not_published_without_the_result_of_a_task() -> None:
    with pytest.raises(StorageUnavailable, match="1 of 2 tasks"):
        RowWriter.__new__(RowWriter).commit([WrittenRows((), None, BatchContent()), None])


def test_a_task_that_fails_deletes_its_uploads(clock: ManualClock) -> None:
    storage = FaultStorage(MemoryStorage())
    opened(storage, clock)
    storage.fail("write", nth=5)
    with pytest.raises(StorageUnavailable):
        written(TABLE, storage)
    assert not list(storage.list("data/"))
    with pytest.raises(InvalidArgument, match="more than 2 windows"):
        writing.write_tables(TABLE.to_batches(), job(storage, max_windows=2))
    assert writing.write_tables([], job(storage)).shards == ()


@pytest.mark.parametrize(
    ("lie", "what"), [({"read_checksum": 1}, "other entries"), ({"shards": ()}, "another number of entries")]
)
def test_tables_that_are_not_what_was_read_are_refused(monkeypatch: pytest.MonkeyPatch, lie: Any, what: str) -> None:
    storage = MemoryStorage()
    real = writing.write_blocks
    monkeypatch.setattr(writing, "write_blocks", lambda blocks, *more: replace(real(blocks, *more), **lie))
    with pytest.raises(CorruptFile, match=f"wrote {what} than it read"):
        written(TABLE, storage)
    assert bool(list(storage.list("data/"))) == ("shards" in lie)


def test_a_checkpoint_whose_index_is_gone_or_another_one_is_refused() -> None:
    """An empty first batch names the query in the index. A later batch creates no index and joins no other index."""
    gone, other, own = MemoryStorage(), MemoryStorage(), MemoryStorage()
    a_writer(EntryStreamWriter, other).commit([Written(tuple(written(TABLE, other)), "p", FIRST.content)], 0)
    a_writer(EntryStreamWriter, own).commit([Written((), "q", BatchContent())], 0)
    for storage in (gone, other):
        message = Written(tuple(written(TABLE.slice(0, 10), storage)), "q", SECOND.content)
        before = {info.name for info in storage.list("log/")}
        with pytest.raises(InvalidArgument, match=r"has no micro-batch of this query.* set a new checkpointLocation"):
            a_writer(EntryStreamWriter, storage).commit([message], 1)
        assert {info.name for info in storage.list("log/")} == before
        assert not {shard.stored.name for shard in message.shards} & {info.name for info in storage.list("data/")}
    a_writer(EntryStreamWriter, own).commit([Written((), "q", BatchContent())], 0)
    message = Written(tuple(written(TABLE.slice(0, 10), own)), "q", SECOND.content)
    a_writer(EntryStreamWriter, own).commit([message], 1)
    assert open_log(own).state.positions == {"spark:q": 1}
    assert count(own, SystemClock()) == 10 and len(list(own.list("log/"))) == 3


FEW = messages(400, days=3)
# two topics that have the same id by name
SAME_IDS = ("topic-3985819", "topic-4420602")


class _Task:
    """Replaces Spark's TaskContext."""

    @staticmethod
    def get() -> Any:
        return _Task

    @staticmethod
    def getLocalProperty(name: str) -> str:  # noqa: N802 - Spark's name
        return "q"


def run(storage: Storage, number: int, parts: list[pa.Table], **more: Any) -> list[Written]:
    """Write each part by a task, and commit; return the tasks' messages."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "TaskContext", _Task)
        writer = a_writer(EntryStreamWriter, storage, **more)
        told = [writer.write(iter(part.to_batches(70))) for part in parts]
    writer.commit(told, number)
    return told


def an_index() -> tuple[Storage, StorageLog]:
    storage = MemoryStorage()
    log = opened(storage, SystemClock())
    # the query's first batch
    log.append("a batch", None, lambda state: LogRecord(0, "positions", 0, "", 0, positions={"spark:q": 0}))
    return storage, log


def named(*topics: str) -> pa.Table:
    """Return the messages, with `topics` in turn."""
    values = list(itertools.islice(itertools.cycle(topics), len(FEW)))
    return FEW.set_column(FEW.schema.get_field_index("topic"), "topic", pa.array(values))


def test_the_same_rows_are_a_repeat_however_they_are_cut() -> None:
    storage, log = an_index()
    assert len({assigned_topic_id(name) for name in SAME_IDS}) == 1
    whole = named(*SAME_IDS)
    shuffled = whole.take(pa.array(np.random.default_rng(1).permutation(len(whole))))
    # a task that reads one of the two topics gives it the id that the other topic has in another task
    by_topic = [whole.filter(pa.compute.equal(whole["topic"], name)) for name in SAME_IDS]
    run(storage, 4, [whole])
    before = log.refresh()
    for parts, more in (
        ([whole], {}),
        (by_topic, {}),
        ([shuffled.slice(0, 90), shuffled.slice(0, 0), shuffled.slice(90)], {}),
        ([shuffled], {"scale": replace(SCALE, window_s=21_600)}),
        ([whole], {"scale": replace(SCALE, plausible_max=10**9 + 5)}),
    ):
        told = run(storage, 4, parts, **more)
        assert sum(part.content.entries for part in told) == 400
        assert all(part.shards for part in told if part.content.entries)
        assert log.refresh() == before and {info.name for info in storage.list("data/")} == set(before.objects)


def test_the_checksum_is_the_one_of_the_specification() -> None:
    storage, log = an_index()
    run(storage, 4, [FEW.slice(0, 50)])
    total, mask = 0, 2**64 - 1
    for row in FEW.slice(0, 50).to_pylist():
        prints = hash_batch([row["topic"]], np.array([0]), code_units([row["key"]]))
        x = row["timestamp_ms"] // 1000
        for value in (prints[0][0], row["queue_id"], row["offset"], row["size"], prints[1][0]):
            x = (x ^ int(value) & mask) * 0x9E3779B97F4A7C15 & mask
            x ^= x >> 29
        total += x
    assert log.refresh().batches == {"spark:q": StreamBatch(4, 50, total & mask)}


ROW = FEW.slice(7, 1).to_pylist()[0]
OTHERS = {
    "more": pa.concat_tables([FEW, messages(30, seed=2)]),
    "fewer": FEW.slice(0, 399),
    "key": {"key": "of nobody"},
    "size": {"size": ROW["size"] + 1},
    "offset": {"offset": ROW["offset"] + 1},
    "second": {"timestamp_ms": ROW["timestamp_ms"] + 1_000},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_rows_under_the_last_number_are_refused_and_deleted(case: str) -> None:
    """A checkpoint one batch older than the index does this: Spark plans that batch again, up to the source's present
    end.
    """
    storage, log = an_index()
    run(storage, 4, [FEW])
    before, change = log.refresh(), OTHERS[case]
    if isinstance(change, dict):
        changed = pa.Table.from_pylist([{**ROW, **change}], FEW.schema)
        change = pa.concat_tables([FEW.slice(0, 7), changed, FEW.slice(8)])
    with pytest.raises(InvalidArgument, match=r"micro-batch 4 .*400 entries.*checkpoint"):
        run(storage, 4, [change])
    assert log.refresh() == before and {info.name for info in storage.list("data/")} == set(before.objects)
    run(storage, 5, [change])
    assert log.refresh().batches["spark:q"].entries == len(change) and log.state.positions == {"spark:q": 5}


WITHOUT_QUEUE = {"topic": "string", "key": "string", "offset": "long", "size": "integer", "timestamp_ms": "long"}
KINDS = {**WITHOUT_QUEUE, "queue_id": "integer"}


def prepare(uri: str, columns: dict[str, str] = KINDS, **options: str) -> None:
    schema = StructType()
    for name, kind in columns.items():
        schema.add(name, kind)
    writing.prepared(
        DataSourceOptions("tiered_index", {"path": uri, **options}, writing.WRITE_OPTIONS), schema, streams=False
    )


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "missing": ({"columns": WITHOUT_QUEUE}, InvalidArgument, "column 'queue_id' is missing; the DataFrame has"),
    "no_option": ({"slot": "3"}, InvalidArgument, r"'slot'.*slots"),
    "no_items": ({"items": "0"}, ConfigError, "items must be at least 2"),
    "items": ({"items": "77"}, SchemaMismatch, "with 100,000 items a file, not 77"),
    "offset_space": ({"offsetSpace": "commitlog"}, SchemaMismatch, "'custom', not in 'commitlog'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_are_not_the_indexs_are_refused(storage: str, tmp_path: Path, case: str) -> None:
    options, kind, text = WRONG[case]
    build_here(storage)
    with pytest.raises(kind, match=text):
        prepare(storage, **options)
    if kind is not SchemaMismatch:
        with pytest.raises(kind, match=text):
            prepare(f"file://{tmp_path}/new", **options)
        assert not (tmp_path / "new" / "log").exists()
    prepare(storage, slots="64", items="100000", preset="native", offsetSpace="custom", window="1h")
    prepare(storage)


def test_an_index_that_was_made_meanwhile_with_another_schema_is_refused(clock: ManualClock) -> None:
    storage = MemoryStorage()
    shards = written(TABLE, storage)
    geometry = IndexConfig(slots=64, items=100_000, preset="rocketmq").geometry()
    StorageLog(storage, clock).create(IndexDescriptor("another", geometry, "custom"))
    with pytest.raises(SchemaMismatch, match="stores IndexItem"):
        a_writer(EntryStreamWriter, storage).commit([Written(tuple(shards), "q", FIRST.content)], 0)
    assert count(storage, clock) == 0 and left_over(storage, clock) == 0


def test_tables_that_a_record_names_are_not_deleted_whatever_fails_behind_it(monkeypatch, clock: ManualClock) -> None:
    storage = MemoryStorage()
    opened(storage, clock)

    def fails(*_: Any) -> None:
        raise InvalidArgument("after the record")

    monkeypatch.setattr(Checkpoints, "write", fails)
    with pytest.raises(InvalidArgument, match="after the record"):
        a_writer(EntryWriter, storage).commit([Written(tuple(written(TABLE, storage)), None, BatchContent())])
    # `left_over` asserts that the objects are those that the log names
    assert count(storage, clock) == 2_000 and left_over(storage, clock) == 0
