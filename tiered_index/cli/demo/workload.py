"""A synthetic stream of messages like a shop's (Zipf keys, daily rhythm, several topics and queues, late messages), and
the answers that lookups over it must give.

Everything follows from the seed. Times rise but for the late ones, whose store time lies up to hours before their
neighbours'. Offsets count by topic and queue. A message carries one key of the Zipf family, every fifth one a
customer's key beside it. Memory: about 100 bytes a message. Immutable once made; share it between threads freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TOPICS = ("orders", "payments", "shipments", "logins")
QUEUES = 4
# 2023-11-14T00:00:00Z.
BEGIN_MS = 1_699_920_000_000
_DAY_MS = 86_400_000
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
    def generate(cls, messages: int, *, days: int = 3, seed: int = 1) -> Workload:
        """Return `messages` messages over `days` days. Key 0 is the most frequent one."""
        rng = np.random.default_rng(seed)
        topic = rng.choice(len(TOPICS), messages, p=_TOPIC_SHARES).astype(np.int8)
        queue_id = rng.integers(0, QUEUES, messages, dtype=np.int32)
        timestamp_ms = _times(rng, messages, days)
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
        """How many entries the messages make."""
        return len(self.entry_key)


def _times(rng: np.random.Generator, count: int, days: int) -> Array:
    """Return rising times whose rate swings by the day between a fifth and nearly twice the mean."""
    span_ms = days * _DAY_MS
    even = np.sort(rng.random(count))
    # t + a sin(t) rises where a < 1, and its derivative is the inverse of the rate
    turns = 2 * np.pi * days
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


# (timestamp_ms of the second, queue_id, offset, size), in answer order: second descending, offset descending, queue
# ascending.
Answer = list[tuple[int, int, int, int]]


class ReferenceAnswers:
    """What every lookup over a `Workload`, put whole, must answer: `ReferenceModel` in sorted arrays.

    Entries are sorted once by (topic, key) and answer order; an answer is a slice of that. Nothing of the engine is
    used. Memory: some 60 bytes an entry. Immutable; any thread.
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
        """Return every answer; bounds are inclusive and compared by whole seconds. An unknown topic or key has none."""
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
