"""The reference model: the right answers of an index, from plain lists. Tests compare answers with it.

`ReferenceModel` keeps every entry, and compares each one with a lookup. It has no files and no state but the list. So
an engine must give equal answers at every step: after buffering, flushing, compacting, uploading and merging.
`ReferenceModel.problem_with` checks an answer that may or may not have some entries.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from math import inf
from typing import Any

from tiered_index.format.keys.hashing import fingerprint, key_hash
from tiered_index.types import IndexItem, Lookup, QueryResult

# (second, offset, queue_id, further identity columns): the end of a page.
OrderKey = tuple[int, int, int, tuple[int, ...]]
# ("lost" or "wrong", a sentence)
Problem = tuple[str, str]


@dataclass(frozen=True)
class ModelEntry:
    """One message under one key. `second` is the store time in whole epoch seconds."""

    topic: str
    key: str
    queue_id: int
    offset: int
    size: int
    second: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One answer, comparable with an `IndexItem` through `Answer.of`."""

    topic: str
    queue_id: int
    offset: int
    size: int
    timestamp_ms: int
    key_hash: int
    extra: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, item: IndexItem, extra: Iterable[str] = ()) -> "Answer":
        """Return an engine's answer with the fields of the model. `extra` names columns whose values callers give."""
        more = tuple((name, getattr(item, name)) for name in extra)
        return cls(item.topic, item.queue_id, item.offset, item.size, item.timestamp_ms, item.key_hash, more)


class ReferenceModel:
    """All entries of puts. One thread.

    `keyed`: entries have the key's fingerprint (preset ``native``). Without it, answers have entries of all keys of a
    topic with an equal hash. `extra` names the further columns in order of declaration, `identity` those of them that
    belong to the identity.
    """

    def __init__(self, *, keyed: bool = True, extra: Iterable[str] = (), identity: Iterable[str] = ()) -> None:
        self.keyed = keyed
        self.extra = tuple(extra)
        self.identity = tuple(identity)
        self.entries: list[ModelEntry] = []
        # each with times by pattern of topics
        self.expiries: list[tuple[int, dict[str, int]]] = []
        # topic, time, key and queue (None: any)
        self.erasures: list[tuple[str, int, str | None, int | None]] = []

    def expire(self, before_ms: int, topics: Mapping[str, int] | None = None) -> None:
        """Expire entries before `before_ms`.

        For a topic that matches patterns: entries before the earliest of their times.
        """
        self.expiries.append((before_ms, dict(topics or {})))

    def erase(self, topic: str, before_ms: int, *, key: str | None = None, queue_id: int | None = None) -> None:
        """Erase the entries of a topic, key or queue before `before_ms`."""
        self.erasures.append((topic, before_ms, key, queue_id))

    def has_expired(self, entry: ModelEntry) -> bool:
        """Return whether an entry has expired or was erased."""
        for topic, before_ms, key, queue_id in self.erasures:
            if (
                (entry.topic, queue_id) == (topic, entry.queue_id if queue_id is not None else None)
                and entry.second * 1000 < before_ms
                and (key is None or _taken_for_one(topic, entry.key, key, self.keyed))
            ):
                return True
        for before_ms, topics in self.expiries:
            own = [ms for pattern, ms in topics.items() if entry.topic == pattern or fnmatchcase(entry.topic, pattern)]
            if entry.second * 1000 < min(own, default=before_ms):
                return True
        return False

    def put(
        self,
        topic: str,
        queue_id: int,
        keys: str | Iterable[str],
        offset: int,
        size: int,
        timestamp_ms: int,
        **extra: Any,
    ) -> list[ModelEntry]:
        """Add an entry for each distinct key of a message. Return the entries."""
        names = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
        fresh = [ModelEntry(topic, key, queue_id, offset, size, timestamp_ms // 1000, dict(extra)) for key in names]
        self.entries += fresh
        return fresh

    def query(
        self,
        topic: str,
        key: str,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        max_count: int | None = 64,
        after: OrderKey | None = None,
    ) -> list[Answer]:
        """Return the first `max_count` (None: all) answers strictly after the order key `after`.

        The range is compared by whole seconds. Entries of one identity are one answer: the newest one after `after`. So
        an identity with two different seconds may be on two pages.
        """
        matching = [e for e in self.matching(topic, key, begin_ms, end_ms) if not self.has_expired(e)]
        if after is not None:
            matching = [entry for entry in matching if _rank(self.order_key(entry)) > _rank(after)]
        newest: dict[tuple[Any, ...], ModelEntry] = {}
        for entry in matching:
            identity = (entry.queue_id, entry.offset, *(entry.extra[name] for name in self.identity))
            if identity not in newest or self._preference(entry) > self._preference(newest[identity]):
                newest[identity] = entry
        ordered = sorted(newest.values(), key=lambda entry: _rank(self.order_key(entry)))
        return [self._answer(entry, topic, key) for entry in ordered[:max_count]]

    def problem_with(
        self, result: QueryResult, lookup: Lookup, may: Iterable[ModelEntry] = (), after: OrderKey | None = None
    ) -> Problem | None:
        """Return the fault of the page after `after`, or None.

        The page must have all entries of this model, and may have those of `may`, in answer order and each once.
        """
        truncated = result.status == "truncated"
        if not truncated and result.status != "complete":
            return "wrong", f"{lookup} is {result.status}"
        if (result.cursor is not None) != truncated or (truncated and len(result) < lookup.max_count):
            return "wrong", f"{lookup} is {result.status} with {len(result)} entries and cursor {result.cursor}"
        return self.difference(
            [Answer.of(item, self.extra) for item in result], lookup, may, after, truncated=truncated
        )

    def difference(
        self,
        answers: list[Answer],
        lookup: Lookup,
        may: Iterable[ModelEntry] = (),
        after: OrderKey | None = None,
        *,
        truncated: bool,
    ) -> Problem | None:
        """Do as `problem_with`, for the entries of a page only."""
        places = {(answer.queue_id, answer.offset, answer.size, answer.timestamp_ms) for answer in answers}
        shown = copy(self)
        shown.entries = self.entries + [e for e in may if (e.queue_id, e.offset, e.size, e.second * 1000) in places]
        expected = shown.query(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms, None, after)
        page = expected[: len(answers)] if truncated else expected
        if answers == page and len(answers) <= lookup.max_count:
            return None
        missing, strange = [a for a in page if a not in answers], [a for a in answers if a not in expected]
        what = f"{len(missing)} missing, {missing[:3]}, {len(strange)} strange, {strange[:3]}"
        kind = "lost" if missing and not strange else "wrong"
        return kind, f"{what}: {lookup} after {after}: {len(answers)} found, truncated {truncated}"

    def order_key(self, entry: ModelEntry) -> OrderKey:
        """Return an entry's place in answer order."""
        return (entry.second, entry.offset, entry.queue_id, tuple(entry.extra[name] for name in self.identity))

    def order_key_of(self, answer: Answer) -> OrderKey:
        """Return an answer's place in answer order. The next page starts after it."""
        identity = tuple(dict(answer.extra)[name] for name in self.identity)
        return answer.timestamp_ms // 1000, answer.offset, answer.queue_id, identity

    def matching(self, topic: str, key: str, begin_ms: int | None, end_ms: int | None) -> list[ModelEntry]:
        """Return the entries of a key in a range, whether they have expired or not."""
        low = -inf if begin_ms is None else begin_ms // 1000
        high = inf if end_ms is None else end_ms // 1000
        return [
            entry
            for entry in self.entries
            if entry.topic == topic
            and low <= entry.second <= high
            and (entry.key == key or _taken_for_one(topic, entry.key, key, self.keyed))
        ]

    def _preference(self, entry: ModelEntry) -> tuple[Any, ...]:
        """Return the order of entries with one identity: the newest second, then the greater values."""
        return (entry.second, entry.size, *(entry.extra[name] for name in self.extra))

    def _answer(self, entry: ModelEntry, topic: str, key: str) -> Answer:
        extra = tuple((name, entry.extra[name]) for name in self.extra)
        return Answer(topic, entry.queue_id, entry.offset, entry.size, entry.second * 1000, key_hash(topic, key), extra)


@lru_cache(maxsize=1 << 16)
def _taken_for_one(topic: str, first: str, other: str, keyed: bool) -> bool:
    if key_hash(topic, first) != key_hash(topic, other):
        return False
    return not keyed or fingerprint(topic, first) == fingerprint(topic, other)


def _rank(key: OrderKey) -> tuple[Any, ...]:
    """Second descending, offset descending, queue_id ascending, further identity columns ascending."""
    second, offset, queue_id, extra = key
    return (-second, -offset, queue_id, extra)
