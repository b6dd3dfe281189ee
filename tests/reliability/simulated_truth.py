"""The expected content of a simulated index: entries that answers must have, may have, and must not have.

The reference model decides. Entries have numbers in the order in which they were made. For each root the module knows
the entries that were confirmed as durable. For the storage it knows the entries of each log record, decoded from the
objects by the format's codec. It also knows the entries that records state as expired or erased: no answer has these,
and all others must stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NoReturn

from tests.property.published import Mark, Published, mark
from tests.support.model import Answer, ModelEntry, OrderKey, ReferenceModel
from tiered_index.format.names import DATA_PREFIX, LOG_PREFIX, SEGMENTS_PREFIX
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.tombstones import Tombstone
from tiered_index.types import Lookup, QueryResult

__all__ = ["KEYS", "SOURCE", "TOPICS", "Failed", "Lost", "Truth", "Wrong"]

SOURCE = "log"
TOPICS = ("orders", "t")
KEYS = ("Aa", "BB", "y")
# the first two have one Java hash


class Failed(AssertionError):
    """The simulation has found something; `kind` as in the tally."""

    kind = "wrong"


class Wrong(Failed):
    """An answer, or a state, that must not be."""


class Lost(Failed):
    """Something durable is gone."""

    kind = "lost"


class _Graveyard:
    """Every object that ever was, for `Published`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, name: str) -> bytes:
        return self.objects[name]


class Truth:
    """All that was ever put, and the log. `checked` counts answers, `stated` records of what is gone."""

    def __init__(self, *, keyed: bool, now_ms: Callable[[], int]) -> None:
        self.keyed = keyed
        self._now_ms = now_ms
        self.checked = self.stated = 0
        self.entries: list[ModelEntry] = []
        self.marks: list[Mark] = []
        self.messages: list[tuple[int, ...]] = []  # numbers of entries, by position in the source
        self.begun: set[int] = set()  # entries that somebody has begun to put
        self.puts: Counter[Mark] = Counter()  # how often
        self.state = LogState()
        self.failure: Failed | None = None
        # after a write that failed, what it wrote and what was written instead may both come to light
        self.may_double = False
        self.grace_s = 0.0  # how long the bytes of what a record removed stay, whoever's clock it was
        self._removed_ms: dict[str, int] = {}
        self._expired: list[Expired] = [NOTHING]  # by the record's number
        self._by_mark: dict[Mark, list[int]] = defaultdict(list)
        self._appended_ms: list[int] = []  # when each record was
        self._named: Counter[Mark] = Counter()  # entries of the objects that the log names
        self._states: dict[int, frozenset[int]] = {}
        self._graveyard = _Graveyard()
        self._here: set[str] = set()
        self._published = Published(self._graveyard, KEYS, keyed=keyed)

    def kept_state(self) -> Callable[[], None]:
        """Return what puts the storage's truth back to what it is now: its objects were restored."""
        state, here, named = self.state, set(self._here), Counter(self._named)
        expired, appended_ms, removed_ms = list(self._expired), list(self._appended_ms), dict(self._removed_ms)

        def restore() -> None:
            self.state, self._here, self._named, self._states = state, here, named, {}
            self._expired, self._appended_ms, self._removed_ms = expired, appended_ms, removed_ms

        return restore

    # What was put

    def make(self, topic: str, keys: Iterable[str], queue_id: int, offset: int, size: int, timestamp_ms: int) -> int:
        """Add a message to the source; return its position."""
        fresh = [ModelEntry(topic, key, queue_id, offset, size, timestamp_ms // 1000) for key in keys]
        self.messages.append(tuple(range(len(self.entries), len(self.entries) + len(fresh))))
        for entry in fresh:
            marked = mark(entry, keyed=self.keyed)
            self._by_mark[marked].append(len(self.entries))
            self.entries.append(entry)
            self.marks.append(marked)
        return len(self.messages) - 1

    def begin(self, position: int) -> None:
        """A message is about to be put, once more or for the first time."""
        self.begun.update(self.messages[position])
        self.puts.update(self.marks[number] for number in self.messages[position])

    def up_to(self, position: int | None) -> set[int]:
        """Return the entries of all messages up to a position of the source."""
        return (
            set() if position is None else {number for message in self.messages[: position + 1] for number in message}
        )

    def fail(self, failure: Failed) -> NoReturn:
        """Raise a failure, and remember the first: it may be raised within the engine, in a thread whose errors
        somebody takes.
        """
        self.failure = self.failure or failure
        raise failure

    # What is stored

    def stored(self, name: str, data: bytes) -> None:
        """An object came into being."""
        if name.startswith((DATA_PREFIX, SEGMENTS_PREFIX)):
            if name in self._here:
                self.fail(Wrong(f"{name} was written a second time"))
            self._here.add(name)
            self._graveyard.objects[name] = data
        elif name.startswith(LOG_PREFIX):
            self._appended(name, data)

    def bytes_of(self, name: str) -> bytes:
        """Return what an object held, whether it is there or not."""
        return self._graveyard.get(name)

    def deleted(self, name: str) -> None:
        """An object is gone."""
        self._here.discard(name)
        age_s = (self._now_ms() - self._removed_ms.get(name, -(2**60))) / 1000
        if age_s < self.grace_s:
            self.fail(Wrong(f"{name} was deleted {age_s:.0f} s after a record removed it"))
        if name in self.state.objects or name in self.state.archive or name.startswith(LOG_PREFIX):
            self.fail(Lost(f"{name} was deleted, which the log names"))

    def _appended(self, name: str, data: bytes) -> None:
        record = LogRecord.decode(data, name)
        if record.kind not in ("fence", "create") and 0 < record.epoch < self.state.epoch:
            self.fail(
                Wrong(f"{name}: a writer of epoch {record.epoch} published behind the fence of {self.state.epoch}")
            )
        before, self.state = self.state, self.state.apply(record, name)
        self._appended_ms.append(self._now_ms())
        self._expired.append(self.state.expired)
        self.stated += self.state.expired != before.expired
        self._removed_ms |= dict.fromkeys(record.remove, self._now_ms())
        for stored in (*record.add, *record.archive):
            if stored.name not in self._here:
                self.fail(Lost(f"{name} names {stored.name}, which isn't there"))
        added = Counter(m for stored in record.add for m in self._marks_of(stored))
        removed = Counter(
            m for gone in record.remove if gone in before.objects for m in self._marks_of(before.objects[gone])
        )
        gone = self._gone(self.state.expired)
        if lost := [m for m in removed - added if not gone.has_expired(self.entries[self._by_mark[m][0]])]:
            self.fail(Lost(f"{name} removes what nothing else holds: {lost}"))
        self._named += added
        self._named -= removed
        if not self.may_double and self._named - self.puts:
            self.fail(Wrong(f"{name} names more than was put: {self._named - self.puts}"))
        position = self.state.positions.get(SOURCE)
        if position is not None and record.positions:
            missing = [n for n in self.kept(self.up_to(position)) if not self._named[self.marks[n]]]
            if missing:
                self.fail(Lost(f"{name}: the position {position} runs ahead of entries {missing}"))

    def kept(self, numbers: Iterable[int], expired: Expired | None = None) -> set[int]:
        """Return those of some entries that are not gone by `expired` (None: as the log says by now)."""
        gone = self._gone(self.state.expired if expired is None else expired)
        return {n for n in numbers if not gone.has_expired(self.entries[n])}

    def _gone(self, expired: Expired) -> ReferenceModel:
        """Return a model without entries that knows what has expired."""
        model = ReferenceModel(keyed=self.keyed)
        for horizon in expired.horizons:
            model.expire(horizon.before_ms, dict(horizon.topics))
        for stone in expired.tombstones:
            model.erase(stone.topic, stone.before_ms, key=self._key_of(stone), queue_id=stone.queue_id)
        return model

    def _key_of(self, stone: Tombstone) -> str | None:
        """Return the key that a tombstone is about, or one that is taken for it; None: it is about all keys."""
        if not stone.hashes:
            return None
        (key, *_) = [
            key for key in KEYS if stone == Tombstone.of(stone.topic, stone.before_ms, key=key, keyed=self.keyed)
        ]
        return key

    def number_at(self, ms: int) -> int:
        """Return the number of the last record that was there by then."""
        return bisect_right(self._appended_ms, ms)

    def named_by(self, state: LogState) -> frozenset[int]:
        """Return the entries of all that the log names at a position."""
        if state.number not in self._states:
            marks = {m for stored in state.objects.values() for m in self._marks_of(stored)}
            self._states[state.number] = frozenset(n for m in marks for n in self._by_mark[m])
        return self._states[state.number]

    def _marks_of(self, stored: StoredObject) -> list[Mark]:
        marks = [mark(entry, keyed=self.keyed) for entry in self._published.entries(stored)]
        if unknown := [m for m in marks if m not in self._by_mark]:
            self.fail(Wrong(f"{stored.name} holds what nobody put: {unknown}"))
        return marks

    # What is answered

    def check(
        self,
        result: QueryResult,
        must: Iterable[int],
        may: Iterable[int],
        topic: str,
        key: str,
        limits: tuple[int | None, int | None],
        count: int,
        after: OrderKey | None,
        since: int,
        until: int | None = None,
    ) -> set[int]:
        """Check an answer: all of `must`, of `may` what it will, as the model orders and cuts them, without what one
        of the log records `since` to `until` (None: the last) says is gone. Return the entries that it holds.
        """
        self.checked += 1
        shown = {(item.queue_id, item.offset, item.timestamp_ms // 1000, item.size) for item in result}
        asked = Lookup(topic=topic, key=key, begin_ms=limits[0], end_ms=limits[1], max_count=count)
        marked = mark(ModelEntry(topic, key, 0, 0, 0, 0), keyed=self.keyed)[:3]
        hits = {
            n
            for n in may
            if self.marks[n][:3] == marked and ((e := self.entries[n]).queue_id, e.offset, e.second, e.size) in shown
        }
        known = self._expired[since : (self.state.number if until is None else until) + 1]
        views = [known[0], *(following for one, following in pairwise(known) if following != one)]
        if result.status == "partial":
            there = self._model(hits, topic, views[0]).query(topic, key, *limits, None, after)
            if not result.failed or not {Answer.of(item) for item in result} <= set(there):
                self.fail(Wrong(f"a partial answer holds more than {there}"))
            return set()
        chosen = hits.union(must)
        problems = [self._model(chosen, topic, view).problem_with(result, asked, after=after) for view in views]
        if None not in problems:
            kind, what = problems[-1]  # type: ignore[misc]
            self.fail((Lost if kind == "lost" else Wrong)(what))
        return hits

    def _model(self, numbers: Iterable[int], topic: str, expired: Expired) -> ReferenceModel:
        model = self._gone(expired)
        model.entries = [entry for entry in (self.entries[n] for n in sorted(numbers)) if entry.topic == topic]
        return model


def order_key_of(result: QueryResult, before: OrderKey | None) -> OrderKey | None:
    """Return where the page behind this one begins."""
    return ReferenceModel().order_key_of(Answer.of(result.items[-1])) if result.items else before
