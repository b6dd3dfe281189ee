"""The expected content of a simulated index: entries that answers must have, may have, and must not have.

The reference model decides. Entries have numbers in the order in which they were made. For each root the module knows
the entries that were confirmed as durable. For the storage it knows the entries of each log record, decoded from the
objects by the format's codec. It also knows the entries that records state as expired or erased: no answer has these,
and all others must stay.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NoReturn

from tests.property.published import Mark, Published, mark
from tests.support.model import Answer, ModelEntry, OrderKey, ReferenceModel
from tiered_index.format.names import CATALOG_PREFIX, DATA_PREFIX, LOG_PREFIX, SEGMENTS_PREFIX
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.records import LogRecord, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.service.log.tombstones import Tombstone
from tiered_index.service.read.segments.segments import Segments
from tiered_index.types import Lookup, QueryResult

SOURCE = "log"
TOPICS = ("orders", "t")
# the first two have the same Java hash
KEYS = ("Aa", "BB", "y")


class Failed(AssertionError):
    """A failure that the simulation has found. `kind`: see `Tally`."""

    kind = "wrong"


class Wrong(Failed):
    """A wrong answer or state."""


class Lost(Failed):
    """A durable entry or object is lost."""

    kind = "lost"


class _Graveyard:
    """The bytes of all objects, also of deleted ones, for `Published` and `Segments`."""

    uri = "memory://graveyard"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, name: str) -> bytes:
        return self.objects[name]

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        return self.objects[name][offset : offset + length]


class Truth:
    """All entries of puts, and the log. `checked` counts answers, `stated` records of expiry and erasure."""

    def __init__(self, *, keyed: bool, now_ms: Callable[[], int]) -> None:
        self.keyed = keyed
        self._now_ms = now_ms
        self.checked = self.stated = 0
        self.entries: list[ModelEntry] = []
        self.marks: list[Mark] = []
        self.messages: list[tuple[int, ...]] = []  # numbers of entries, by position in the source
        self.begun: set[int] = set()  # entries whose put has begun
        self.puts: Counter[Mark] = Counter()  # number of puts
        self.state = LogState()
        self.failure: Failed | None = None
        # after a failed write, its entries and those of the repeated write may both be found
        self.may_double = False
        self.grace_s = 0.0  # least time between a record that removes an object and the deletion, by any clock
        self._removed_ms: dict[str, int] = {}
        self._expired: list[Expired] = [NOTHING]  # by the record's number
        self._by_mark: dict[Mark, list[int]] = defaultdict(list)
        self._appended_ms: list[int] = []  # time of each record
        self._named: Counter[Mark] = Counter()  # entries of the objects that the log names
        self._states: dict[int, frozenset[int]] = {}
        self._graveyard = _Graveyard()
        self._here: set[str] = set()
        self._published = Published(self._graveyard, KEYS, keyed=keyed)

    def kept_state(self) -> Callable[[], None]:
        """Return a function that restores the present truth of the storage, after its objects were restored."""
        state, here, named = self.state, set(self._here), Counter(self._named)
        expired, appended_ms, removed_ms = list(self._expired), list(self._appended_ms), dict(self._removed_ms)

        def restore() -> None:
            self.state, self._here, self._named, self._states = state, here, named, {}
            self._expired, self._appended_ms, self._removed_ms = expired, appended_ms, removed_ms

        return restore

    # Puts

    def make(self, topic: str, keys: Iterable[str], queue_id: int, offset: int, size: int, timestamp_ms: int) -> int:
        """Add a message to the source. Return its position."""
        fresh = [ModelEntry(topic, key, queue_id, offset, size, timestamp_ms // 1000) for key in keys]
        self.messages.append(tuple(range(len(self.entries), len(self.entries) + len(fresh))))
        for entry in fresh:
            marked = mark(entry, keyed=self.keyed)
            self._by_mark[marked].append(len(self.entries))
            self.entries.append(entry)
            self.marks.append(marked)
        return len(self.messages) - 1

    def begin(self, position: int) -> None:
        """Note that the put of a message begins, also a repeated one."""
        self.begun.update(self.messages[position])
        self.puts.update(self.marks[number] for number in self.messages[position])

    def up_to(self, position: int | None) -> set[int]:
        """Return the entries of all messages up to a position of the source."""
        before = [] if position is None else self.messages[: position + 1]
        return {number for message in before for number in message}

    def fail(self, failure: Failed) -> NoReturn:
        """Raise a failure, and keep the first one.

        The engine may catch it, if it is raised in one of its threads.
        """
        self.failure = self.failure or failure
        raise failure

    # The storage

    def stored(self, name: str, data: bytes) -> None:
        """Note a new object."""
        if name.startswith((DATA_PREFIX, SEGMENTS_PREFIX, CATALOG_PREFIX)):
            if name in self._here:
                self.fail(Wrong(f"{name} was written a second time"))
            self._here.add(name)
            self._graveyard.objects[name] = data
        elif name.startswith(LOG_PREFIX):
            self._appended(name, data)

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of an object, also of a deleted one."""
        return self._graveyard.get(name)

    def segments(self, state: LogState | None = None) -> Segments:
        """Return the archived segments in a state of the log (None: the present one), also those in catalogs."""
        return Segments(self.state if state is None else state, self._graveyard)

    def deleted(self, name: str) -> None:
        """Note the deletion of an object."""
        self._here.discard(name)
        age_s = (self._now_ms() - self._removed_ms.get(name, -(2**60))) / 1000
        if age_s < self.grace_s:
            self.fail(Wrong(f"{name} was deleted {age_s:.0f} s after a record removed it"))
        is_named = self.state.names(name) or self.segments().names_object(name)
        if is_named or name.startswith(LOG_PREFIX):
            self.fail(Lost(f"{name} was deleted, which the log names"))

    def _appended(self, name: str, data: bytes) -> None:
        record = LogRecord.decode(data, name)
        epoch, fence = record.epoch, self.state.epoch
        if record.kind not in ("fence", "create") and 0 < epoch < fence:
            self.fail(Wrong(f"{name}: a writer of epoch {epoch} published behind the fence of {fence}"))
        before, self.state = self.state, self.state.apply(record, name)
        self._appended_ms.append(self._now_ms())
        self._expired.append(self.state.expired)
        self.stated += self.state.expired != before.expired
        self._removed_ms |= dict.fromkeys(record.remove, self._now_ms())
        listed = [stored for stored in record.catalogs if stored.data is None]
        inline = Segments(LogState(catalogs={stored.name: stored for stored in record.catalogs if stored.data}))
        for stored in (*record.add, *inline, *listed):
            if stored.name not in self._here:
                self.fail(Lost(f"{name} names {stored.name}, which isn't there"))
        added = Counter(m for stored in record.add for m in self._marks_of(stored))
        removed_objects = [before.objects[gone] for gone in record.remove if gone in before.objects]
        removed = Counter(m for stored in removed_objects for m in self._marks_of(stored))
        gone = self._gone(self.state.expired)
        if lost := [m for m in removed - added if not gone.has_expired(self.entries[self._by_mark[m][0]])]:
            self.fail(Lost(f"{name} removes what nothing else holds: {lost}"))
        self._named += added
        self._named -= removed
        if not self.may_double and self._named - self.puts:
            self.fail(Wrong(f"{name} names more than was put: {self._named - self.puts}"))
        position = self.state.positions.get(SOURCE)
        if position is not None and record.positions:
            missing = [n for n in self.unexpired(self.up_to(position)) if not self._named[self.marks[n]]]
            if missing:
                self.fail(Lost(f"{name}: the position {position} is ahead of entries {missing}"))

    def unexpired(self, numbers: Iterable[int], expired: Expired | None = None) -> set[int]:
        """Return the `numbers` of entries that `expired` does not hide (None: the present state of the log)."""
        gone = self._gone(self.state.expired if expired is None else expired)
        return {n for n in numbers if not gone.has_expired(self.entries[n])}

    def _gone(self, expired: Expired) -> ReferenceModel:
        """Return a model without entries, with the horizons and tombstones of `expired`."""
        model = ReferenceModel(keyed=self.keyed)
        for horizon in expired.horizons:
            model.expire(horizon.before_ms, dict(horizon.topics))
        for stone in expired.tombstones:
            model.erase(stone.topic, stone.before_ms, key=self._key_of(stone), queue_id=stone.queue_id)
        return model

    def _key_of(self, stone: Tombstone) -> str | None:
        """Return the key of a tombstone, or one with equal hashes. None: it hides all keys."""
        if not stone.hashes:
            return None
        about = (stone.topic, stone.before_ms)
        return next(key for key in KEYS if stone == Tombstone.of(*about, key=key, keyed=self.keyed))

    def number_at(self, ms: int) -> int:
        """Return the number of the last record at a time."""
        return bisect_right(self._appended_ms, ms)

    def named_by(self, state: LogState) -> frozenset[int]:
        """Return the entries of all objects that the log names in a state."""
        if state.number not in self._states:
            marks = {m for stored in state.objects.values() for m in self._marks_of(stored)}
            self._states[state.number] = frozenset(n for m in marks for n in self._by_mark[m])
        return self._states[state.number]

    def _marks_of(self, stored: StoredObject) -> list[Mark]:
        marks = [mark(entry, keyed=self.keyed) for entry in self._published.entries(stored)]
        if unknown := [m for m in marks if m not in self._by_mark]:
            self.fail(Wrong(f"{stored.name} holds what nobody put: {unknown}"))
        return marks

    # Answers

    def check(
        self,
        lookup: Lookup,
        result: QueryResult,
        must: Iterable[int],
        may: Iterable[int],
        after: OrderKey | None,
        since: int,
        until: int | None = None,
    ) -> set[int]:
        """Check an answer against the model, and return its entries.

        It must have all entries of `must`, and may have those of `may`, in the model's order and number. One of the log
        records `since` to `until` (None: the last) decides which entries have expired or were erased.
        """
        self.checked += 1
        shown = {(item.queue_id, item.offset, item.timestamp_ms // 1000, item.size) for item in result}
        marked = mark(ModelEntry(lookup.topic, lookup.key, 0, 0, 0, 0), keyed=self.keyed)[:3]
        possible = [(n, self.entries[n]) for n in may if self.marks[n][:3] == marked]
        hits = {n for n, e in possible if (e.queue_id, e.offset, e.second, e.size) in shown}
        known = self._expired[since : (self.state.number if until is None else until) + 1]
        views = [known[0], *(following for earlier, following in pairwise(known) if following != earlier)]
        if result.status == "partial":
            limits = (lookup.begin_ms, lookup.end_ms)
            there = self._model(hits, lookup.topic, views[0]).query(lookup.topic, lookup.key, *limits, None, after)
            if not result.failed or not {Answer.of(item) for item in result} <= set(there):
                self.fail(Wrong(f"a partial answer holds more than {there}"))
            return set()
        chosen = hits.union(must)
        problems = [self._model(chosen, lookup.topic, view).problem_with(result, lookup, after=after) for view in views]
        if None not in problems:
            kind, what = problems[-1]  # type: ignore[misc]
            self.fail((Lost if kind == "lost" else Wrong)(what))
        return hits

    def _model(self, numbers: Iterable[int], topic: str, expired: Expired) -> ReferenceModel:
        model = self._gone(expired)
        model.entries = [entry for entry in (self.entries[n] for n in sorted(numbers)) if entry.topic == topic]
        return model


def order_key_of(result: QueryResult, before: OrderKey | None) -> OrderKey | None:
    """Return the begin of the next page."""
    return ReferenceModel().order_key_of(Answer.of(result.items[-1])) if result.items else before
