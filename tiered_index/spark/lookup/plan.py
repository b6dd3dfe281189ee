"""The lookups of a bulk lookup as fixed-width records, and the plan: the objects of each task. Pure.

A lookup is 44 bytes: the hashes of a key and its other spellings, its topic and its time range. Equal lookups are
searched once, and answers are joined to rows by the record, without the text of the key. Every object belongs to one
task, so it is opened once. A task has shards of neighbouring slots, or files of neighbouring times, so that a lookup is
sent to few tasks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import HashRule, code_units, java_hash_batch, key_hashes
from tiered_index.format.schema import Schema
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.answers.batch import LookupBatch, ranked_spellings
from tiered_index.service.answers.rows import PreparedLookup
from tiered_index.service.cold.path import ColdSettings
from tiered_index.service.log.records import IndexDescriptor, StoredObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.prices import PriceTable
from tiered_index.types import MAX_KEY_UNITS, MAX_TIMESTAMP_MS, parse_time

_SHOWN = 40


def shown(text: str) -> str:
    """Return a text for a message, cut after 40 characters."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def values_of(texts: pa.Array, what: str) -> list[Any]:
    """Return the values of texts. Spark casts any bytes to text: raises `InvalidArgument`, which tells `what` it is."""
    try:
        return list(texts.to_pylist())
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what} has bytes that are not UTF-8") from error


def times_of(texts: pa.Array, column: str, *, end: bool) -> pa.Array:
    """Return the epoch milliseconds (i64, n) of texts, null for null, as `parse_time`.

    Raises `InvalidArgument`, which names the column.
    """
    encoded = texts.dictionary_encode()
    times = []
    for text in values_of(encoded.dictionary, f"column {column}"):
        try:
            times.append(parse_time(shown(text.strip()), end=end))
        except ValueError as error:
            raise InvalidArgument(f"column {column}: {error}") from error
    return pa.array(times, pa.int64()).take(encoded.indices)


# `topic` is a place in the plan's topics, `java_hash` the hash before either hash rule, `fingerprint` 0 if the index
# has none; seconds are inclusive. The fields of `SPELLINGS` have the bits in which hash and fingerprint of another
# spelling of the key differ from its own; 0: it has no such spelling.
SPELLINGS = (("hash_bits_1", "fingerprint_bits_1"), ("hash_bits_2", "fingerprint_bits_2"))
LOOKUP = np.dtype(
    [
        *(("topic", "<u4"), ("java_hash", "<i4"), ("fingerprint", "<u4"), ("second_min", "<i8"), ("second_max", "<i8")),
        *((name, kind) for names in SPELLINGS for name, kind in zip(names, ("<i4", "<u4"), strict=True)),
    ]
)
_RAW = np.dtype((np.void, LOOKUP.itemsize))
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class PackedBatch(LookupBatch):
    """Lookups (n) to search: records, the plan's `topics`, one `max_count`, and their numbers `places` (n).

    Keys are hashed by `rule`; entries that `expired` erased are left out.
    """

    def __init__(
        self,
        lookups: Array,
        topics: Sequence[str],
        max_count: int,
        places: Int64 | None = None,
        rule: HashRule = "abs",
        expired: Expired = NOTHING,
        *,
        allow_partial: bool = False,
    ) -> None:
        self.packed = lookups
        self.allow_partial = allow_partial
        self.places = np.arange(len(lookups)) if places is None else places
        # the text of a key is not known
        self.lookups = self.others = ()
        if len(lookups) and (lookups["topic"] == lookups["topic"][0]).all():
            # the common case, many times as fast as `np.unique`
            used, index = lookups["topic"][:1], np.zeros(len(lookups), np.int64)
        else:
            has = np.zeros(len(topics), bool)
            has[lookups["topic"]] = True
            used, index = np.flatnonzero(has), (np.cumsum(has) - 1)[lookups["topic"]]
        self.topics = [topics[place] for place in used.tolist()]
        self.topic_index = index.astype(np.int64, copy=False)
        self.java_hash = lookups["java_hash"].astype(np.int32)
        self.key_hash = key_hashes(self.java_hash, rule)
        self.fingerprint = lookups["fingerprint"].astype(np.uint32)
        self.second_min = lookups["second_min"].astype(np.int64)
        self.second_max = lookups["second_max"].astype(np.int64)
        self.max_count = np.full(len(lookups), max_count, np.int64)
        self._plan_topics = topics
        self._most = max_count
        self._rule = rule
        self._expired, self.queues = expired, {}
        if expired.tombstones and len(lookups):
            kept = self.without(expired)
            self.second_min, self.queues = kept.second_min, kept.queues

    def __len__(self) -> int:
        return len(self.packed)

    def under(self, rule: HashRule) -> tuple[Self, ...]:
        """As `LookupBatch.under`; a further batch has only the lookups whose hash or spelling differs."""
        spelled = [self._under(rule)]
        for spelling in SPELLINGS:
            if len(places := with_spelling(self.packed, spelling)):
                other = self._made(as_spelled(self.packed[places], spelling), self.places[places], self._rule)
                spelled.append(other._under(rule))
        return tuple(itertools.chain.from_iterable(spelled))

    def _under(self, rule: HashRule) -> tuple[Self, ...]:
        if rule == "abs":
            return (self,)
        masked = self._made(self.packed, self.places, "mask")
        return (masked,) if rule == "mask" else (self, masked.part(masked.key_hash != self.key_hash))

    def part(self, places: Any) -> Self:
        """Return the lookups at `places` as a batch, this one if a mask selects all."""
        if isinstance(places, np.ndarray) and places.dtype == np.bool_ and places.all():
            return self
        return self._made(self.packed[places], self.places[places], self._rule)

    def _made(self, lookups: Array, places: Int64, rule: HashRule) -> Self:
        given = lookups, self._plan_topics, self._most, places, rule, self._expired
        return type(self)(*given, allow_partial=self.allow_partial)

    def prepared(self, place: int) -> PreparedLookup:
        """Return one lookup for a search of its own, which does not need the key's text."""
        names = ("fingerprint", "second_min", "second_max")
        fingerprint, second_min, second_max = (int(self.packed[name][place]) for name in names)
        topic, key_hash = self.topics[int(self.topic_index[place])], int(self.key_hash[place])
        found = PreparedLookup(topic, "", key_hash, key_hash, fingerprint, second_min, second_max, self._most)
        return found.without(self._expired)


def lookups_of(
    topics: pa.Array,
    keys: pa.Array,
    begins: pa.Array,
    ends: pa.Array,
    places: Mapping[str, int],
    *,
    keyed: bool,
    column: str = "'key'",
) -> Array:
    """Return the lookups (n) of n rows; null: no bound, `places` are those of the topics, `column` is for messages.

    Raises `InvalidArgument` for invalid keys and ranges, and for an unknown topic.
    """
    found = np.zeros(len(keys), LOOKUP)
    if not len(found):
        return found
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if fresh := [name for name in names if name not in places]:
        raise InvalidArgument(
            f"the keys change while they are read: topic {fresh[0]!r} is new; look up from a copy that does not change"
        )
    index = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    units = code_units(keys.cast(pa.large_string()))
    for row in np.flatnonzero((units.lengths == 0) | (units.lengths > MAX_KEY_UNITS))[:1].tolist():
        key = f"{shown(keys[row].as_py())!r} of topic {shown(topics[row].as_py())!r}"
        long = f"{int(units.lengths[row]):,} UTF-16 code units long; 1..{MAX_KEY_UNITS:,} are allowed"
        raise InvalidArgument(f"column {column}: the key {key} is {long}")
    found["topic"] = np.array([places[name] for name in names], np.uint32)[index]
    found["java_hash"], fingerprints = java_hash_batch(names, index, units, fingerprints=keyed)
    if keyed:
        found["fingerprint"] = fingerprints
    ranked = ranked_spellings(lambda row: str(keys[row].as_py()), units)
    for (hash_bits, fingerprint_bits), (rows, texts) in zip(SPELLINGS, ranked, strict=False):
        hashes, fingerprints = java_hash_batch(names, index[rows], texts, fingerprints=keyed)
        found[hash_bits][rows] = found["java_hash"][rows] ^ hashes
        if keyed:
            found[fingerprint_bits][rows] = found["fingerprint"][rows] ^ fingerprints
    low = pc.fill_null(begins, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    high = pc.fill_null(ends, MAX_TIMESTAMP_MS).to_numpy(zero_copy_only=False).astype(np.int64)
    for row in np.flatnonzero(low > high)[:1].tolist():
        raise InvalidArgument(f"begin_ms {low[row]} is after end_ms {high[row]}, for key {keys[row].as_py()!r:.60}")
    found["second_min"], found["second_max"] = low // 1000, high // 1000
    return found


def with_spelling(lookups: Array, spelling: tuple[str, str]) -> Int64:
    """Return the places (i64, m) of the lookups whose key has this other spelling, one of `SPELLINGS`."""
    hash_bits, fingerprint_bits = spelling
    return np.flatnonzero((lookups[hash_bits] != 0) | (lookups[fingerprint_bits] != 0))


def as_spelled(lookups: Array, spelling: tuple[str, str]) -> Array:
    """Return lookups (n) by another spelling alone, one of `SPELLINGS`."""
    hash_bits, fingerprint_bits = spelling
    made = lookups.copy()
    made["java_hash"] ^= made[hash_bits]
    made["fingerprint"] ^= made[fingerprint_bits]
    for names in SPELLINGS:
        for name in names:
            made[name] = 0
    return made


def kept(lookups: Array, kept_from: Sequence[int]) -> Array:
    """Return the lookups (n) with ranges that begin at or after their topic's second in `kept_from` (may be empty)."""
    if kept_from:
        lookups = lookups.copy()
        lookups["second_min"] = np.maximum(lookups["second_min"], np.array(kept_from, np.int64)[lookups["topic"]])
    return lookups


def distinct(lookups: Array) -> Array:
    """Return the distinct lookups (n, dtype `LOOKUP`), ordered by hash and fingerprint, then by bytes."""
    # 64-bit numbers sort many times as fast as records; only lookups with equal numbers are sorted as records
    numbers = _numbers(lookups)
    order = np.argsort(numbers)
    lookups, numbers = np.ascontiguousarray(lookups)[order], numbers[order]
    shared = _shared(numbers)
    if not shared.any():
        return lookups
    once = np.unique(lookups[shared].view(_RAW)).view(LOOKUP)
    lookups = np.concatenate((lookups[~shared].view(_RAW), once.view(_RAW))).view(LOOKUP)
    return lookups[np.argsort(_numbers(lookups), kind="stable")]


def places_of(asked: Array, lookups: Array) -> Int64:
    """Return the place (i64, m) of each of `lookups` (m) in `asked`, a result of `distinct`.

    Raises `InvalidArgument` for a lookup that is not in it.
    """
    known, numbers = _numbers(asked), _numbers(lookups)
    raw, wanted = asked.view(_RAW), np.ascontiguousarray(lookups).view(_RAW)
    # a missing lookup gets the place of another one, which the comparison below finds
    places = np.minimum(np.searchsorted(known, numbers), len(asked) - 1)
    shared = np.flatnonzero(_shared(known))
    if len(shared) and len(places):
        among = shared[np.argsort(raw[shared])]
        several = np.flatnonzero(np.isin(places, shared))
        places[several] = among[np.minimum(np.searchsorted(raw[among], wanted[several]), len(among) - 1)]
    if len(places) and (not len(raw) or (raw[places] != wanted).any()):
        raise InvalidArgument("the keys change while they are read; look up from a copy that does not change")
    return places.astype(np.int64)


def _numbers(lookups: Array) -> npt.NDArray[np.uint64]:
    """Return hash and fingerprint of lookups as numbers (u64, n)."""
    if not len(lookups):
        return np.zeros(0, np.uint64)  # an empty array may have another dtype
    numbers: npt.NDArray[np.uint64] = lookups["java_hash"].astype(np.uint64) << np.uint64(32) | lookups["fingerprint"]
    return numbers


def _shared(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which of sorted numbers occur more than once (bool, n)."""
    shared = np.zeros(len(numbers), bool)
    same = numbers[1:] == numbers[:-1]
    shared[1:] |= same
    shared[:-1] |= same
    return shared


def routes(lookups: Array, count: int) -> Int64:
    """Return the one of `count` places for each lookup (i64, n); ranges of one key have different places."""
    mixed = lookups["java_hash"].astype(np.uint64)
    for name in ("topic", "second_min", "second_max"):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= lookups[name].astype(np.uint64)
        mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(32)) % np.uint64(count)).astype(np.int64)


def records_of(column: Any, dtype: np.dtype[Any] = LOOKUP) -> Array:
    """Return the concatenated cells of a binary column as records (n, `dtype`)."""
    data = b"".join(cell for cell in column.to_pylist() if cell is not None)
    return np.frombuffer(data, dtype)


_TASKS_A_CORE = 3
_LOOKUPS_A_PARTITION, _LEAST_A_PARTITION = 8_000, 100
# Entries of a partition if each lookup has `max_count`.
_ROWS_A_PARTITION = 1 << 19
_MOST_PARTITIONS = 10_000
_ROWS_AN_ANSWERER = 1_000_000
_ANSWERERS_A_CORE = 2


@dataclass(frozen=True, slots=True)
class Target:
    """A stored object, and its half-open range of base slots."""

    stored: StoredObject
    base_low: int
    base_high: int

    @classmethod
    def of(cls, stored: StoredObject, base: int) -> Target:
        """Return the target of an object; `base` is the number of base slots."""
        if stored.shard is None:
            return cls(stored, 0, base)
        slots, low, high = stored.shard.slots, stored.shard.slot_low, stored.shard.slot_high
        if slots.join > 1:
            return cls(stored, low * slots.join, min(base, high * slots.join))
        return cls(stored, low // slots.split, -(-high // slots.split))

    def holds(self, base_slots: Sequence[Int64], lookups: Array) -> npt.NDArray[np.bool_]:
        """Return for which lookups (bool, n) the object may have answers; `base_slots` as `LookupPlan.base_slots`."""
        stored = self.stored
        inside = (lookups["second_min"] <= stored.second_max) & (lookups["second_max"] >= stored.second_min)
        if stored.shard is not None:
            slots = base_slots if stored.hash == "both" else base_slots[stored.hash == "mask" :][:1]
            held = [((of >= self.base_low) & (of < self.base_high)).any(axis=0) for of in slots]
            inside &= reduce(operator.or_, held)
        return inside


@dataclass(frozen=True)
class LookupPlan:
    """The plan of a lookup, for every task.

    `lost` are objects that the log names and the storage lacks; `kept_from` is each topic's first epoch second that has
    not expired, empty if none has; `expired` also has the erased entries. Lookups are divided into `partitions`, which
    bound memory: `answerers` tasks answer many of them, one at a time, since a Python task costs about 60 ms. `asked`
    are the distinct lookups (n), identified in blocks by their places; None: too many, and tasks exchange them.
    """

    number: int
    genesis: IndexDescriptor
    topics: tuple[str, ...]
    tasks: tuple[tuple[Target, ...], ...]
    partitions: int
    answerers: int
    max_count: int
    allow_partial: bool
    settings: ColdSettings
    prices: PriceTable
    lost: frozenset[str] = field(default_factory=frozenset)
    kept_from: tuple[int, ...] = ()
    expired: Expired = NOTHING
    asked: Array | None = field(default=None, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        """The schema of the index's entries."""
        return self.genesis.layout.schema

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each topic in `topics`."""
        return {topic: place for place, topic in enumerate(self.topics)}

    @cached_property
    def _rules(self) -> tuple[HashRule, ...]:
        rules = {target.stored.hash for task in self.tasks for target in task}
        return ("abs",) if rules <= {"abs"} else ("abs", "mask")

    def base_slots(self, lookups: Array) -> list[Int64]:
        """Return the base slots of lookups (i64, spellings x n) by hash rule abs and, if an object uses it, by mask.

        The first row has those of the keys as given. There are as many rows as some lookup needs.
        """
        java, slots = [lookups["java_hash"]], self.genesis.layout.slots
        java += [java[0] ^ lookups[one[0]] for one in SPELLINGS if len(with_spelling(lookups, one))]
        return [key_hashes(np.stack(java), rule).astype(np.int64) % slots for rule in self._rules]

    def wanted(self, task: int, lookups: Array, base_slots: Sequence[Int64]) -> npt.NDArray[np.bool_]:
        """Return for which lookups (bool, n) a task may have answers."""
        mask = np.zeros(len(lookups), bool)
        for target in self.tasks[task]:
            mask |= target.holds(base_slots, lookups)
        return mask

    def partitions_of(self, names: Array) -> Int64:
        """Return the partition (i64, n) of lookups, which are identified as in blocks."""
        if self.asked is None:
            return routes(names, self.partitions)
        return names * self.partitions // len(self.asked)

    def partition(self, number: int) -> slice:
        """Return the slice of `asked` that a partition has."""
        assert self.asked is not None
        low, high = (-(-part * len(self.asked) // self.partitions) for part in (number, number + 1))
        return slice(low, high)


def plan_lookup(
    state: LogState,
    topics: Sequence[str],
    seconds: tuple[int, int],
    rows: int,
    *,
    parallelism: int,
    max_count: int,
    allow_partial: bool,
    settings: ColdSettings,
    prices: PriceTable,
    lost: frozenset[str] = frozenset(),
) -> LookupPlan:
    """Return the plan for `rows` rows with ranges within `seconds` (inclusive)."""
    genesis = state.genesis
    assert genesis is not None
    found = [
        Target.of(stored, genesis.layout.slots)
        for stored in state.objects.values()
        if stored.second_min <= seconds[1] and stored.second_max >= seconds[0]
    ]
    # the base slots of every file begin at 0, so files are ordered by time
    found.sort(key=lambda t: (t.base_low, t.stored.second_min, t.stored.name))
    shards = [target for target in found if target.stored.shard is not None]
    files = [target for target in found if target.stored.shard is None]
    total = sum(target.stored.size_bytes for target in found)
    share = max(1, -(-total // (_TASKS_A_CORE * max(1, parallelism))))
    tasks = (*_dealt(shards, share), *_dealt(files, share)) or ((),)
    lookups = max(_LEAST_A_PARTITION, min(_LOOKUPS_A_PARTITION, _ROWS_A_PARTITION // max_count))
    partitions = max(1, min(_MOST_PARTITIONS, -(-rows // lookups), rows))
    answerers = min(partitions, max(_ANSWERERS_A_CORE * max(1, parallelism), -(-rows // _ROWS_AN_ANSWERER)))
    made = LookupPlan(
        state.number, genesis, tuple(topics), tasks, partitions, answerers, max_count, allow_partial, settings, prices
    )
    kept_from = tuple([state.expired.before_ms(topic) // 1000 for topic in topics])
    return replace(made, lost=lost, kept_from=kept_from if any(kept_from) else (), expired=state.expired)


def _dealt(targets: Sequence[Target], share: int) -> list[tuple[Target, ...]]:
    """Return runs of neighbouring targets, each of about `share` bytes."""
    tasks: list[tuple[Target, ...]] = []
    task: list[Target] = []
    size = 0
    for target in targets:
        if task and size + target.stored.size_bytes // 2 >= share:
            tasks.append(tuple(task))
            task, size = [], 0
        task.append(target)
        size += target.stored.size_bytes
    return [*tasks, tuple(task)] if task else tasks
