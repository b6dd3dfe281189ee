"""Traffic of several threads on one index: messages of one to four keys, batches larger than a file, late times and bad
clocks, and lookups of every kind, each checked by the model's moments. Everything follows from seeds.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pyarrow as pa

from tests.support.model import Message, Moments
from tiered_index import IndexService
from tiered_index.types import Lookup

__all__ = ["ALL", "KEYS", "NOW_MS", "TOPICS", "Source", "batch_of", "look", "put"]

ALL = 10**6
NOW_MS = 1_700_000_000_000
TOPICS = ("orders", "payments", "сообщения")
KEYS = tuple(f"k{number}" for number in range(9))
SPAN_S = 3_000
_KINDS = ("whole", "some", "pages", "many")
_BAD_CLOCK_MS = 5_000


class Source:
    """Messages of one writer: times rise by and by, one in five is late, one in a hundred has a bad clock."""

    def __init__(self, seed: int, number: int, bad_clocks: bool = True) -> None:
        self.rng = random.Random(1000 * seed + number)
        self._offsets = itertools.count(number * 10**9)
        self._bad_clocks = bad_clocks
        self._second = 0.0

    def message(self) -> Message:
        """Return the next one."""
        rng = self.rng
        self._second += rng.random()
        late = rng.randrange(SPAN_S) if rng.random() < 0.2 else 0
        timestamp_ms = NOW_MS + int(1000 * (self._second - late))
        if self._bad_clocks and rng.random() < 0.01:
            timestamp_ms = _BAD_CLOCK_MS + 1000 * rng.randrange(50)
        keys = [rng.choice(KEYS) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
        return Message(
            rng.choice(TOPICS), rng.randrange(4), tuple(keys), next(self._offsets), rng.randrange(1, 5000), timestamp_ms
        )

    def messages(self, count: int) -> list[Message]:
        """Return the next `count`."""
        return [self.message() for _ in range(count)]


def batch_of(messages: list[Message], *, arrow: bool) -> Any:
    """Return messages as `put_batch` takes them, one row a key."""
    rows = [
        (m.topic, m.queue_id, key, m.offset, m.size, m.timestamp_ms) for m in messages for key in dict.fromkeys(m.keys)
    ]
    names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return pa.record_batch(columns) if arrow else columns


def put(service: IndexService, moments: Moments, messages: list[Message]) -> None:
    """Put messages, one alone and several as one batch."""
    moments.offer(messages)
    if len(messages) == 1:
        service.put(*messages[0].arguments)
    else:
        service.put_batch(batch_of(messages, arrow=len(messages) % 2 == 0))
    moments.acknowledge(messages)


def look(index: Any, moments: Moments, rng: random.Random, seen: Counter[str]) -> None:
    """Look something up in one of four ways, and check the answer."""
    kind = rng.choice(_KINDS)
    seen[kind] += 1
    seen["lookups"] += 1
    if kind == "many":
        asked = [_lookup(rng, ALL if rng.random() < 0.5 else rng.randrange(1, 40)) for _ in range(rng.randrange(1, 12))]
        since = [moments.moment(q.topic, q.key) for q in asked]
        answers = index.query_many(asked)
        assert len(answers) == len(asked)
        for q, begun, result in zip(asked, since, answers, strict=True):
            moments.check(q, result, begun)
    elif kind == "pages":
        lookup = _lookup(rng, rng.randrange(8, 80))
        moments.check_pages(index.query, lookup)
    else:
        lookup = _lookup(rng, ALL if kind == "whole" else rng.randrange(1, 40))
        since = moments.moment(lookup.topic, lookup.key)
        moments.check(
            lookup, index.query(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms, lookup.max_count), since
        )


def _lookup(rng: random.Random, max_count: int) -> Lookup:
    begin_ms = end_ms = None
    if rng.random() < 0.5:
        begin_ms = NOW_MS + 1000 * rng.randrange(-SPAN_S, SPAN_S)
        end_ms = begin_ms + 1000 * rng.choice((0, 10, 500, 5000))
    return Lookup(topic=rng.choice(TOPICS), key=rng.choice(KEYS), begin_ms=begin_ms, end_ms=end_ms, max_count=max_count)
