"""What was put and what was acknowledged: every answer must lie between the two.

An entry is noted as offered before its put begins and as acknowledged after it returned. An answer holds at least what
was acknowledged before the lookup began and at most what was offered when it ended, in answer order and each once.
Threads: any number of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexItem, QueryResult
from tiered_index.format.hashing import key_hash
from tiered_index.types import Lookup

__all__ = ["ALL", "Ledger", "Message", "Row"]

ALL = 10**6
Row = tuple[int, int, int, int]
"""(-second, -offset, queue_id, size): rises in answer order."""
Name = tuple[str, str]
"""(topic, key)"""


@dataclass(frozen=True)
class Message:
    """One message; `keys` may repeat a key."""

    topic: str
    queue_id: int
    keys: tuple[str, ...]
    offset: int
    size: int
    timestamp_ms: int

    @property
    def row(self) -> Row:
        return (-(self.timestamp_ms // 1000), -self.offset, self.queue_id, self.size)

    @property
    def arguments(self) -> tuple[str, int, tuple[str, ...], int, int, int]:
        return (self.topic, self.queue_id, self.keys, self.offset, self.size, self.timestamp_ms)


@dataclass
class _Key:
    offered: list[Row] = field(default_factory=list)
    acknowledged: list[Row] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


class Ledger:
    """Lists that only grow, one a key: their lengths are a moment in time."""

    def __init__(self) -> None:
        self._keys: dict[Name, _Key] = {}

    def _of(self, topic: str, key: str) -> _Key:
        # in one step: with a `defaultdict` two threads that met a new key at once had a `_Key` each, and one was lost
        return self._keys.setdefault((topic, key), _Key())

    @property
    def names(self) -> list[Name]:
        """Every topic and key that was offered so far."""
        return list(self._keys)

    @property
    def entries(self) -> int:
        """How many entries were acknowledged."""
        return sum(len(key.acknowledged) for key in list(self._keys.values()))

    @property
    def rows(self) -> set[tuple[Name, Row]]:
        """What was acknowledged, each once."""
        return {(name, row) for name, key in list(self._keys.items()) for row in key.acknowledged}

    def offer(self, messages: Iterable[Message]) -> None:
        """Note that a put of these begins."""
        for message in messages:
            for key in dict.fromkeys(message.keys):
                self._of(message.topic, key).offered.append(message.row)

    def acknowledge(self, messages: Iterable[Message]) -> None:
        """Note that the put has returned."""
        for message in messages:
            for key in dict.fromkeys(message.keys):
                self._of(message.topic, key).messages.append(message)
                self._of(message.topic, key).acknowledged.append(message.row)

    def moment(self, topic: str, key: str) -> int:
        """Return what a lookup that begins now must find."""
        return len(self._of(topic, key).acknowledged)

    def check(self, lookup: Lookup, result: QueryResult, since: int, after: Row | None = None) -> list[Row]:
        """Check one page that was asked for at the moment `since` and lies behind `after`; return its rows."""
        key = self._of(lookup.topic, lookup.key)
        known, possible = key.acknowledged[:since], set(key.offered)
        rows = [row_of(item) for item in result]
        where = f"{lookup} with {len(known)} acknowledged: {len(rows)} rows, {result.status}"
        assert result.status in ("complete", "truncated"), where
        assert (result.cursor is not None) == (result.status == "truncated"), where
        assert len(rows) == lookup.max_count if result.status == "truncated" else len(rows) <= lookup.max_count, where
        ranks = [row[:3] for row in rows]
        assert all(one < other for one, other in pairwise(ranks)), f"out of order or twice: {where}"
        assert after is None or not rows or rows[0] > after, f"before its cursor: {where}"
        strange = [row for row in rows if row not in possible or not _within(row, lookup)]
        assert not strange, f"never put: {strange[:3]} in {where}"
        found = set(rows)
        missing = [
            row
            for row in known
            if row not in found
            and _within(row, lookup)
            and (after is None or row > after)
            and (result.status == "complete" or row < rows[-1])
        ]
        assert not missing, f"{len(missing)} missing, such as {missing[:3]}: {where}"
        return rows

    def check_pages(self, ask: Callable[..., QueryResult], lookup: Lookup) -> int:
        """Ask page after page with cursors and check that all pages together are one answer; return how many pages that
        took.
        """
        since, after, cursor, pages = self.moment(lookup.topic, lookup.key), None, None, 0
        while True:
            result = ask(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms, lookup.max_count, cursor)
            rows = self.check(lookup, result, since, after)
            pages += 1
            after = rows[-1] if rows else after
            cursor = result.cursor
            if cursor is None:
                return pages
            assert pages <= len(self._of(lookup.topic, lookup.key).offered) + 1, "pages without end"

    def check_whole(self, ask: Callable[..., QueryResult]) -> int:
        """At rest: every key answers as the model does, refused puts being none of it; return how many entries were
        compared.
        """
        names = self.names
        assert len({key_hash(*name) for name in names}) == len(names), (
            "keys of one hash would answer for each other in preset rocketmq"
        )
        compared = 0
        for topic, key in names:
            model = ReferenceModel()
            for message in self._of(topic, key).messages:
                model.put(message.topic, message.queue_id, key, message.offset, message.size, message.timestamp_ms)
            expected = model.query(topic, key, max_count=None)
            result = ask(topic, key, max_count=ALL)
            assert result.status == "complete", (topic, key)
            assert [Answer.of(item) for item in result] == expected, (topic, key)
            compared += len(expected)
        return compared


def row_of(item: IndexItem) -> Row:
    """Return an answer as the ledger writes it."""
    return (-(item.timestamp_ms // 1000), -item.offset, item.queue_id, item.size)


def _within(row: Row, lookup: Lookup) -> bool:
    second = -row[0]
    low, high = lookup.begin_ms, lookup.end_ms
    return (low is None or second >= low // 1000) and (high is None or second <= high // 1000)
