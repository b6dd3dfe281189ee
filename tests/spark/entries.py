"""Messages for builds and merges, the model's answers about them, and checks that a reader gives the same answers."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.property.published import Published, mark
from tests.support.later import Later
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader, IndexService, hash_key
from tiered_index.base.clock import SystemClock
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

BEGIN_MS = 1_699_920_000_000
"""2023-11-14T00:00:00Z."""
DAY_MS = 86_400_000
TOPICS = ("orders", "payments", "überweisung")
_MOST_SWEEPS = 20


def messages(count: int, *, seed: int = 1, days: int = 2, begin_ms: int = BEGIN_MS, hot: float = 0.3) -> pa.Table:
    """Return messages of one key each over some days; the fraction `hot` of them share one key."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, days * DAY_MS, count)) + begin_ms
    keys = np.where(rng.random(count) < hot, 0, rng.integers(1, max(2, count // 20), count))
    topic = np.where(keys == 0, 0, rng.integers(0, len(TOPICS), count))
    return pa.table(
        {
            "topic": pa.array(np.array(TOPICS)[topic]),
            "queue_id": rng.integers(0, 4, count).astype(np.int32),
            "key": pa.array([f"key-{key}" for key in keys]),
            "offset": np.arange(count) + seed * 10_000_000,
            "size": rng.integers(100, 10_000, count).astype(np.int32),
            "timestamp_ms": times,
        }
    )


def write_parquet(table: pa.Table, path: Path, *, group_rows: int = 700) -> str:
    """Write a file of several row groups; return its path."""
    pq.write_table(table, path, row_group_size=group_rows)
    return str(path)


def put_files(uri: str, root: Path, *tables: pa.Table, rows: int = 1_000_000, **settings: Any) -> None:
    """Put tables as a writer does, into files of the given number of rows."""
    chosen = {"slots": 64, "items": 100_000, "background": False, **settings}
    with IndexService.open(root=root, storage=uri, **chosen) as index:
        for batch in (batch for table in tables for batch in table.to_batches(rows)):
            index.put_batch(batch)
            index.flush()
            index.seal()
        index.run_lifecycle()


def check(storage: str, *tables: pa.Table, keys: int = 40, pages: int = 7) -> None:
    """Assert that a reader of `storage` passes `check_answers`."""
    with IndexReader.open(storage) as reader:
        check_answers(reader, *tables, keys=keys, pages=pages)


def check_answers(reader: IndexReader, *tables: pa.Table, keys: int = 40, pages: int = 7) -> None:
    """Assert that a reader's answers equal the model's: whole, by ranges and by pages, for the hot key, too."""
    models: dict[tuple[str, str], ReferenceModel] = {}
    for row in joined(tables).to_pylist():
        model = models.setdefault((row["topic"], row["key"]), ReferenceModel())
        model.put(row["topic"], row["queue_id"], row["key"], row["offset"], row["size"], row["timestamp_ms"])
    pairs = sorted(models, key=lambda pair: -len(models[pair].entries))
    for topic, key in pairs[:5] + pairs[5 :: max(1, len(pairs) // keys)]:
        model = models[topic, key]
        whole = reader.query(topic, key, max_count=1_000_000)
        assert whole.status == "complete"
        assert [Answer.of(item) for item in whole.items] == model.query(topic, key, max_count=None)
        times = sorted(entry.second * 1000 for entry in model.entries)
        low, high = times[len(times) // 4], times[3 * len(times) // 4]
        ranged = reader.query(topic, key, low, high, max_count=pages)
        assert [Answer.of(item) for item in ranged.items] == model.query(topic, key, low, high, max_count=pages)
    assert not reader.query("orders", "nobody's").items


def check_stored(storage: str, *tables: pa.Table) -> None:
    """Assert that the objects that the log names have the entries of the tables, each as often, and no others."""
    model = ReferenceModel()
    for row in joined(tables).to_pylist():
        model.put(row["topic"], row["queue_id"], row["key"], row["offset"], row["size"], row["timestamp_ms"])
    with open_storage(storage) as opened:
        published = Published(opened, sorted({entry.key for entry in model.entries}), keyed=True)
        objects = states(storage).objects.values()
        stored_entries = Counter(mark(entry, keyed=True) for stored in objects for entry in published.entries(stored))
    assert stored_entries == Counter(mark(entry, keyed=True) for entry in model.entries)


def states(storage: str) -> Any:
    """Return the state of the log."""
    with open_storage(storage) as opened:
        return StorageLog(opened, SystemClock()).open()


def total(storage: str) -> int:
    """Return the number of entries that the log states."""
    return sum(stored.count for stored in states(storage).objects.values())


def sweep(storage: str) -> int:
    """Delete the objects that no record names, as if two days had passed; return their number.

    Afterwards the storage has only named objects.

    Spark may give up a task because its job failed or another attempt was faster. Such a task can continue for a
    moment, and this call also deletes its uploads. The task ends when it notices that its upload is gone.
    """
    with open_storage(storage) as opened:
        log = StorageLog(opened, SystemClock())
        log.open()
        swept = 0
        for _ in range(_MOST_SWEEPS):
            orphans = find_orphans(Later(opened, 2 * DAY_MS / 1000), log)
            delete_orphans(opened, orphans)
            swept += len(orphans.objects)
            left, unfinished = {info.name for info in opened.list("data/")}, opened.purge(0)
            named = {stored.name for stored in log.state.objects.values()}
            if left <= named and not unfinished:
                break
        assert left == named
        assert not unfinished
        return swept


def joined(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the tables, concatenated."""
    return pa.concat_tables(list(tables))


def stored_rows(rows: Iterable[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """Return the values that an index stores of messages: topic, hash, queue, offset, size, second."""
    return Counter(
        (r["topic"], hash_key(r["topic"], r["key"]), r["queue_id"], r["offset"], r["size"], r["timestamp_ms"] // 1000)
        for r in rows
    )


def has_slot_of(stored, *hashes):
    """Return whether a shard has the slot of one of these hashes."""
    shard = stored.shard
    return any(shard.slot_low <= shard.slots.slot_of(key_hash) < shard.slot_high for key_hash in hashes)
