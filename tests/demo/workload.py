"""A synthetic stream of messages like a shop's, the right answers of lookups over it, and checks of an index of it.

The stream has Zipf keys, a daily rhythm, several topics and queues, and late messages. Everything follows from the
seed. Times rise, except those of late messages, whose store time is up to hours before their neighbours'. Offsets count
by topic and queue. A message has one key of the Zipf family, and every fifth one also a customer's key. Memory: about
100 bytes per message. A stream never changes, so threads may share it.

The checks prove that an index has every entry and nothing else. They compare entries by topic, queue, offset and hash
of the key, as sorted arrays, with the engine's own hashes. The lookups show that those are right. Memory: 16 bytes per
entry, several times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.files.rows.columns import entry_columns
from tiered_index.format.keys.hashing import code_units, hash_batch
from tiered_index.service.reader import IndexReader
from tiered_index.types import Lookup, QueryResult

TOPICS = ("orders", "payments", "shipments", "logins")
QUEUES = 4
# 2023-11-14T00:00:00Z.
BEGIN_MS = 1_699_920_000_000
_DAYS, _DAY_MS = 3, 86_400_000
_TOPIC_SHARES = (0.5, 0.25, 0.15, 0.1)
_ZIPF_EXPONENT = 0.9
_LATE_SHARE = 0.01
_LATE_MEAN_MS = 2 * 3_600_000
_CUSTOMER_SHARE = 0.2

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Workload:
    """n messages and m entries, with the times in epoch milliseconds and the sizes in bytes.

    Of the messages: `topic` (i8, n; places in `TOPICS`), `queue_id` and `size` (i32, n), `offset` and `timestamp_ms`
    (i64, n), `late` (bool, n). Of the entries: `entry_message` (i64, m, rising) and `entry_key` (i64, m; places in
    `keys`).
    """

    topic: Array
    queue_id: Array
    offset: Array
    size: Array
    timestamp_ms: Array
    late: Array
    entry_message: Array
    entry_key: Array
    keys: tuple[str, ...]

    @classmethod
    def generate(cls, messages: int, *, seed: int = 1) -> "Workload":
        """Return `messages` messages of three days. Key 0 is the most frequent one."""
        rng = np.random.default_rng(seed)
        topic = rng.choice(len(TOPICS), messages, p=_TOPIC_SHARES).astype(np.int8)
        queue_id = rng.integers(0, QUEUES, messages, dtype=np.int32)
        timestamp_ms = _times(rng, messages)
        late = rng.random(messages) < _LATE_SHARE
        delay_ms = rng.exponential(_LATE_MEAN_MS, messages).astype(np.int64)
        timestamp_ms = np.where(late, np.maximum(timestamp_ms - delay_ms, BEGIN_MS), timestamp_ms)
        orders, customers = max(100, messages // 10), max(20, messages // 50)
        first = _zipf(rng, messages, orders)
        has_customer = rng.random(messages) < _CUSTOMER_SHARE
        counts = 1 + has_customer.astype(np.int64)
        entry_message = np.repeat(np.arange(messages), counts)
        entry_key = np.repeat(first, counts)
        second = np.flatnonzero(np.diff(entry_message, prepend=-1) == 0)
        entry_key[second] = orders + rng.integers(0, customers, len(second))
        keys = tuple(f"order-{i:07d}" for i in range(orders)) + tuple(f"customer-{i:06d}" for i in range(customers))
        return cls(
            topic,
            queue_id,
            _offsets(topic.astype(np.int64) * QUEUES + queue_id),
            rng.integers(100, 4000, messages, dtype=np.int32),
            timestamp_ms,
            late,
            entry_message,
            entry_key,
            keys,
        )

    def __len__(self) -> int:
        return len(self.topic)

    @property
    def entries(self) -> int:
        """The number of entries of the messages."""
        return len(self.entry_key)


def _times(rng: np.random.Generator, count: int) -> Array:
    """Return rising times. Their rate changes over the day, between a fifth and nearly twice the mean."""
    span_ms = _DAYS * _DAY_MS
    even = np.sort(rng.random(count))
    # t + a sin(t) rises if a < 1, and its derivative is the inverse of the rate
    turns = 2 * np.pi * _DAYS
    return (BEGIN_MS + span_ms * (even + 0.8 * np.sin(turns * even) / turns)).astype(np.int64)


def _zipf(rng: np.random.Generator, count: int, keys: int) -> Array:
    """Return keys 0..keys-1, key r with probability proportional to (r + 1) ** -exponent."""
    weights = np.cumsum(np.arange(1, keys + 1, dtype=np.float64) ** -_ZIPF_EXPONENT)
    keys_drawn: Array = np.searchsorted(weights, rng.random(count) * weights[-1]).clip(max=keys - 1)
    return keys_drawn


def _offsets(group: Array) -> Array:
    """Return each message's number within its group, counted from 0 in order."""
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], group[order])
    offsets = np.empty(len(group), np.int64)
    offsets[order] = np.arange(len(group)) - starts
    return offsets


def message_table(workload: Workload, start: int, stop: int) -> pa.Table:
    """Return messages [start, stop) as `tiered-index ingest` reads them, with keys as lists."""
    low, high = np.searchsorted(workload.entry_message, (start, stop))
    ends = np.searchsorted(workload.entry_message[low:high], np.arange(start, stop + 1)).astype(np.int32)
    keys = pa.array(workload.keys).take(pa.array(workload.entry_key[low:high]))
    of = slice(start, stop)
    return pa.table(
        {
            "topic": pa.DictionaryArray.from_arrays(pa.array(workload.topic[of]), pa.array(TOPICS)),
            "queue_id": workload.queue_id[of],
            "offset": workload.offset[of],
            "size": workload.size[of],
            "timestamp_ms": workload.timestamp_ms[of],
            "keys": pa.ListArray.from_arrays(pa.array(ends), keys),
        }
    )


def entry_batch(workload: Workload, start: int, stop: int) -> pa.RecordBatch:
    """Return the entries of messages [start, stop) as `IndexService.put_batch` takes them."""
    return entry_columns(message_table(workload, start, stop))


# (timestamp_ms of the second, queue_id, offset, size), in answer order: second descending, offset descending, queue
# ascending.
Answer = list[tuple[int, int, int, int]]


class ReferenceAnswers:
    """The right answers of every lookup over a whole `Workload`: `ReferenceModel` in sorted arrays.

    Entries are sorted once by (topic, key) and answer order. An answer is a slice of that. The code uses nothing of the
    engine. Memory: about 60 bytes per entry. Immutable; any thread.
    """

    def __init__(self, workload: Workload) -> None:
        of = workload.entry_message
        second = workload.timestamp_ms[of] // 1000
        self._topics = {name: number for number, name in enumerate(TOPICS)}
        self._keys = {key: number for number, key in enumerate(workload.keys)}
        group = workload.topic[of].astype(np.int64) * len(workload.keys) + workload.entry_key
        order = np.lexsort((workload.queue_id[of], -workload.offset[of], -second, group))
        self._group, self._second = group[order], second[order]
        of = of[order]
        self._queue, self._offset, self._size = workload.queue_id[of], workload.offset[of], workload.size[of]

    def answer(self, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None) -> Answer:
        """Return every answer. Bounds are inclusive, by whole seconds. An unknown topic or key has no answers."""
        if topic not in self._topics or key not in self._keys:
            return []
        group = self._topics[topic] * len(self._keys) + self._keys[key]
        low, high = np.searchsorted(self._group, (group, group + 1))
        rows = np.arange(low, high)
        seconds = self._second[low:high]
        if begin_ms is not None:
            rows, seconds = rows[seconds >= begin_ms // 1000], seconds[seconds >= begin_ms // 1000]
        if end_ms is not None:
            rows = rows[seconds <= end_ms // 1000]
        columns = (self._second[rows] * 1000, self._queue[rows], self._offset[rows], self._size[rows])
        return list(zip(*(column.tolist() for column in columns), strict=True))


_OFFSET_BITS = 48


@dataclass(frozen=True)
class Census:
    """Entries in objects. `repeated` are stored more than once, as a crash leaves them, and are one answer."""

    expected: int
    stored: int
    repeated: int
    lost: int
    unexpected: int


def take_census(reader: IndexReader, workload: Workload) -> Census:
    """Read every entry of the index, and compare them with those that were put."""
    with reader.export() as batches:
        rows = pa.Table.from_batches(list(batches), batches.schema)
    topic = pc.fill_null(pc.index_in(rows["topic"].cast(pa.string()), pa.array(TOPICS)), len(TOPICS))
    stored = _pairs(*(column.to_numpy() for column in (topic, rows["queue_id"], rows["offset"], rows["key_hash"])))
    of, names = workload.entry_message, [workload.keys[key] for key in workload.entry_key.tolist()]
    hashes, _ = hash_batch(TOPICS, workload.topic[of], code_units(names))
    distinct, expected = (
        _distinct(stored),
        _distinct(_pairs(workload.topic[of], workload.queue_id[of], workload.offset[of], hashes)),
    )
    lost = unexpected = 0
    if distinct.shape != expected.shape or (distinct != expected).any():
        have, want = set(map(tuple, distinct.T.tolist())), set(map(tuple, expected.T.tolist()))
        lost, unexpected = len(want - have), len(have - want)
    return Census(expected.shape[1], stored.shape[1], stored.shape[1] - distinct.shape[1], lost, unexpected)


def _pairs(topic: Array, queue_id: Array, offset: Array, key_hash: Array) -> Array:
    """Return the places and hashes of entries as two rows of numbers, sorted."""
    where = (topic.astype(np.int64) << 8 | queue_id) << _OFFSET_BITS | offset
    pairs = np.stack((where, key_hash.astype(np.int64)))
    return pairs[:, np.lexsort(pairs[::-1])]


def _distinct(pairs: Array) -> Array:
    if not pairs.shape[1]:
        return pairs
    return pairs[:, np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))]


_MAX_COUNT = 256
_MINUTE_MS = 60_000

Query = Callable[..., QueryResult]


@dataclass
class Measured:
    """The lookups at one place, with all pages of a lookup as one. `files` counts the index's files by state."""

    place: str
    files: dict[str, int] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    answers: int = 0
    requests: int = 0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def timed(self, query: Query, *arguments: Any, **how: Any) -> QueryResult:
        """Run a lookup, and record its cost."""
        started_s = time.perf_counter()
        result = query(*arguments, **how)
        self.latencies_ms.append((time.perf_counter() - started_s) * 1000)
        self.answers += len(result)
        self.requests += result.explain.requests
        self.bytes += result.explain.bytes
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return the figures JSON-ready."""
        count = len(self.latencies_ms)
        return {
            "place": self.place,
            "files": self.files,
            "lookups": count,
            "answers": self.answers,
            "wrong": len(self.wrong),
            "p50_ms": round(float(np.percentile(self.latencies_ms, 50)), 3),
            "p99_ms": round(float(np.percentile(self.latencies_ms, 99)), 3),
            "requests_per_lookup": round(self.requests / count, 2),
            "bytes_per_lookup": round(self.bytes / count),
        }


def lookups_of(workload: Workload, tail_start: int, count: int, seed: int) -> list[Lookup]:
    """Return `count` lookups. The stream's newest part begins at message `tail_start`."""
    rng = np.random.default_rng(seed)
    newest_ms = int(np.median(workload.timestamp_ms[tail_start:]))
    late = np.flatnonzero(workload.late[workload.entry_message])
    lookups = []
    for kind in rng.choice(4, count, p=(0.4, 0.3, 0.2, 0.1)):
        if kind == 3 or (kind == 2 and not len(late)):
            topic, key = TOPICS[rng.integers(len(TOPICS))], f"absent-{rng.integers(1 << 40)}"
            lookups.append(Lookup(topic=topic, key=key, max_count=_MAX_COUNT))
            continue
        low = int(np.searchsorted(workload.entry_message, tail_start)) if kind == 1 else 0
        entry = int(rng.choice(late)) if kind == 2 else int(rng.integers(low, workload.entries))
        message = int(workload.entry_message[entry])
        topic, key = TOPICS[workload.topic[message]], workload.keys[workload.entry_key[entry]]
        stored_ms = int(workload.timestamp_ms[message])
        begin_ms, end_ms = {1: (newest_ms, None), 2: (max(0, stored_ms - _MINUTE_MS), stored_ms + _MINUTE_MS)}.get(
            int(kind), (None, None)
        )
        lookups.append(Lookup(topic=topic, key=key, begin_ms=begin_ms, end_ms=end_ms, max_count=_MAX_COUNT))
    return lookups


@dataclass
class LookupChecks:
    """Looks keys up and compares the answers; `done` has one `Measured` per place."""

    reference: ReferenceAnswers
    done: list[Measured] = field(default_factory=list)

    def check(
        self, place: str, files: dict[str, int], query: Query, lookups: list[Lookup], *, paged: Lookup | None = None
    ) -> Measured:
        """Run every lookup once, and `paged` page by page to its end."""
        measured = Measured(place, files)
        for lookup in lookups:
            self._check(measured, query, lookup, one_page=True)
        if paged is not None:
            self._check(measured, query, paged, one_page=False)
        self.done.append(measured)
        return measured

    def _check(self, measured: Measured, query: Query, lookup: Lookup, *, one_page: bool) -> None:
        arguments, max_count = (lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms), lookup.max_count
        expected = self.reference.answer(*arguments)
        answer: Answer = []
        cursor: str | None = None
        while True:
            result = measured.timed(query, *arguments, max_count, cursor)
            answer += [(item.timestamp_ms, item.queue_id, item.offset, item.size) for item in result]
            cursor = result.cursor
            if one_page or cursor is None:
                break
        right = answer == (expected[:max_count] if one_page and result.status == "truncated" else expected)
        # a cut answer must be full, and must report the cut
        if not right or result.status == "partial" or (result.status == "truncated" and len(result) < max_count):
            measured.wrong.append(f"{lookup}: {len(answer)} answers ({result.status}), {len(expected)} expected")
