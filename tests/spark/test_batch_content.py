"""What tells a micro-batch that comes again from another one of its number: in this process, without a session."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.spark.entries import messages
from tests.spark.in_process import GENESIS, SCALE, Address
from tiered_index.clock import SystemClock
from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.answers.validation import assigned_topic_id
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, StreamBatch
from tiered_index.spark.build import build as build_module
from tiered_index.spark.datasource.writing import EntryColumns, EntryStreamWriter, PartitionJob, Written
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

TABLE = messages(400, days=3)


class _Task:
    """Stands for Spark's TaskContext."""

    @staticmethod
    def get() -> Any:
        return _Task

    @staticmethod
    def getLocalProperty(name: str) -> str:  # noqa: N802 - Spark's name
        return "q"


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_index.spark.datasource.writing.TaskContext", _Task)


def a_writer(storage: Storage, table: pa.Table, **more: Any) -> Any:
    """Return a writer without what Spark calls to make it."""
    writer: Any = object.__new__(EntryStreamWriter)
    job = PartitionJob(Address(storage), GENESIS, SCALE, 3, 100, SystemClock().now_ms())  # type: ignore[arg-type]
    columns = EntryColumns.of({field.name: field.type for field in table.schema}, KEYED_SCHEMA)
    writer._job, writer._columns = replace(job, **more), columns
    return writer


def run(storage: Storage, number: int, parts: list[pa.Table], **more: Any) -> list[Written]:
    """Write each part by a task, commit, and return the tasks' messages."""
    writer = a_writer(storage, parts[0], **more)
    told = [writer.write(iter(part.to_batches(70))) for part in parts]
    writer.commit(told, number)
    return told


def an_index() -> tuple[Storage, StorageLog]:
    storage = MemoryStorage()
    log = StorageLog(storage, SystemClock())
    log.create(GENESIS)
    # the query's first batch
    log.append("a batch", None, lambda state: LogRecord(0, "positions", 0, "", 0, positions={"spark:q": 0}))
    return storage, log


def same_name_ids() -> tuple[str, str]:
    """Return two topics whose ids by name are the same."""
    known: dict[int, str] = {}
    for number in itertools.count():
        name = f"topic-{number}"
        if (topic_id := assigned_topic_id(name)) in known:
            return known[topic_id], name
        known[topic_id] = name
    raise AssertionError


def named(*topics: str) -> pa.Table:
    """Return the messages with `topics` in turn."""
    values = list(itertools.islice(itertools.cycle(topics), len(TABLE)))
    return TABLE.set_column(TABLE.schema.get_field_index("topic"), "topic", pa.array(values))


def test_the_same_rows_are_a_repeat_however_they_are_cut() -> None:
    storage, log = an_index()
    first, second = same_name_ids()
    assert first != second
    whole = named(first, second)
    shuffled = whole.take(pa.array(np.random.default_rng(1).permutation(len(whole))))
    # a task that meets one of the two topics gives it the id that the other has elsewhere
    by_topic = [whole.filter(pa.compute.equal(whole["topic"], name)) for name in (first, second)]
    run(storage, 4, [whole])
    before = log.refresh()
    for parts, more in (
        ([whole], {}),
        (by_topic, {}),
        ([shuffled.slice(0, 90), shuffled.slice(0, 0), shuffled.slice(90)], {}),
        ([shuffled], {"scale": replace(SCALE, window_s=3_600)}),
        ([whole], {"scale": replace(SCALE, plausible_max=10**9 + 5)}),
    ):
        told = run(storage, 4, parts, **more)
        assert sum(part.content.entries for part in told) == 400 and all(
            part.shards for part in told if part.content.entries
        )
        assert log.refresh() == before and {info.name for info in storage.list("data/")} == set(before.objects)


def test_the_checksum_is_the_one_of_the_specification() -> None:
    storage, log = an_index()
    run(storage, 4, [TABLE.slice(0, 50)])
    total, mask = 0, 2**64 - 1
    for row in TABLE.slice(0, 50).to_pylist():
        prints = hash_batch([row["topic"]], np.array([0]), code_units([row["key"]]))
        x = row["timestamp_ms"] // 1000
        for value in (prints[0][0], row["queue_id"], row["offset"], row["size"], prints[1][0]):
            x = (x ^ int(value) & mask) * 0x9E3779B97F4A7C15 & mask
            x ^= x >> 29
        total += x
    assert log.refresh().batches == {"spark:q": StreamBatch(4, 50, total & mask)}


ROW = TABLE.slice(7, 1).to_pylist()[0]
OTHERS = {
    "more": pa.concat_tables([TABLE, messages(30, seed=2)]),
    "fewer": TABLE.slice(0, 399),
    "topic": {"topic": "elsewhere"},
    "key": {"key": "of nobody"},
    "queue": {"queue_id": ROW["queue_id"] + 1},
    "size": {"size": ROW["size"] + 1},
    "offset": {"offset": ROW["offset"] + 1},
    "second": {"timestamp_ms": ROW["timestamp_ms"] + 1_000},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_rows_under_the_last_number_are_refused_and_taken_back(case: str) -> None:
    """As from a checkpoint one batch older than the index: that batch is planned anew, up to where the source ends
    now.
    """
    storage, log = an_index()
    run(storage, 4, [TABLE])
    before, change = log.refresh(), OTHERS[case]
    if isinstance(change, dict):
        changed = pa.Table.from_pylist([{**ROW, **change}], TABLE.schema)
        change = pa.concat_tables([TABLE.slice(0, 7), changed, TABLE.slice(8)])
    with pytest.raises(InvalidArgument, match=r"micro-batch 4 .*400 entries.*checkpoint"):
        run(storage, 4, [change])
    assert log.refresh() == before and {info.name for info in storage.list("data/")} == set(before.objects)
    run(storage, 5, [change])
    assert log.refresh().batches["spark:q"].entries == len(change) and log.state.positions == {"spark:q": 5}


@pytest.mark.parametrize("earlier", [{}, {"spark:q": 3}])
def test_a_batch_that_no_record_tells_of_is_known_by_its_number(
    monkeypatch: pytest.MonkeyPatch, earlier: dict[str, int]
) -> None:
    """Records of earlier versions don't say what a batch held; they may stand behind ones that do."""
    storage, log = an_index()
    for number in earlier.values():
        run(storage, number, [TABLE.slice(0, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "LogRecord", lambda *fields, batches: LogRecord(*fields))
        run(storage, 4, [TABLE])
    before = log.refresh()
    assert before.positions == {"spark:q": 4} and {s: told.number for s, told in before.batches.items()} == earlier
    run(storage, 4, [OTHERS["more"]])
    assert log.refresh() == before
    run(storage, 5, [TABLE])
    assert log.refresh().batches["spark:q"].number == 5
