"""The lookups of a bulk lookup as fixed-width records: a key's hashes, its topic and its time range.

Pure; runs in tasks. A lookup is 28 bytes. Rows with equal lookups have equal answers, so a lookup is asked once for all
of them, and the record joins answers to rows without the key's text. Bounds of time that are text, as all is in CSV,
are parsed to epoch milliseconds by the rules of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.service.answers.batch import LookupBatch
from tiered_index.service.answers.rows import PreparedLookup
from tiered_index.types import MAX_KEY_UNITS, MAX_TIMESTAMP_MS, parse_time

__all__ = [
    "LOOKUP",
    "PackedBatch",
    "cells_of",
    "distinct",
    "lookups_of",
    "places_of",
    "records_of",
    "routes",
    "shown",
    "times_of",
]

_SHOWN = 40


def shown(text: str) -> str:
    """Return a text as errors show it: what is longer is cut, and is no time any more."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def times_of(texts: pa.Array, column: str) -> pa.Array:
    """Return the epoch milliseconds (i64, n) of texts, null for null.

    Raises `InvalidArgument` naming the column and what is no time.
    """
    encoded = texts.dictionary_encode()
    times = []
    for text in encoded.dictionary.to_pylist():
        try:
            times.append(parse_time(shown(text.strip())))
        except ValueError as error:
            raise InvalidArgument(f"column {column}: {error}") from error
    return pa.array(times, pa.int64()).take(encoded.indices)


# `topic` is the place in the plan's list, `fingerprint` 0 where the index has none, seconds are inclusive.
LOOKUP = np.dtype(
    [("topic", "<u4"), ("key_hash", "<i4"), ("fingerprint", "<u4"), ("second_min", "<i8"), ("second_max", "<i8")]
)
_RAW = np.dtype((np.void, LOOKUP.itemsize))
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class PackedBatch(LookupBatch):
    """Lookups (n) as a search takes them.

    `packed` are their records, `topics` the plan's, `max_count` is one for all, `places` (n) are the lookups' numbers.
    """

    def __init__(self, lookups: Array, topics: Sequence[str], max_count: int, places: Int64 | None = None) -> None:
        self.packed = lookups
        self.places = np.arange(len(lookups)) if places is None else places
        self.lookups = ()
        if len(lookups) and (lookups["topic"] == lookups["topic"][0]).all():
            self.topics = [topics[int(lookups["topic"][0])]]
            self.topic_index = np.zeros(len(lookups), np.int64)
        else:
            used, index = np.unique(lookups["topic"], return_inverse=True)
            self.topics = [topics[place] for place in used.tolist()]
            self.topic_index = index.astype(np.int64)
        self.key_hash = lookups["key_hash"].astype(np.int32)
        self.fingerprint = lookups["fingerprint"].astype(np.uint32)
        self.second_min = lookups["second_min"].astype(np.int64)
        self.second_max = lookups["second_max"].astype(np.int64)
        self.max_count = np.full(len(lookups), max_count, np.int64)
        self._plan_topics = topics
        self._most = max_count

    def __len__(self) -> int:
        return len(self.packed)

    def part(self, places: Any) -> PackedBatch:
        """Return the lookups at `places` as a batch of their own; where a mask takes all, this one."""
        if isinstance(places, np.ndarray) and places.dtype == np.bool_ and places.all():
            return self
        return PackedBatch(self.packed[places], self._plan_topics, self._most, self.places[places])

    def prepared(self, place: int) -> PreparedLookup:
        """Return one lookup as a search takes it alone; a key's text plays no part in that."""
        _, key_hash, fingerprint, second_min, second_max = self.packed[place].item()
        topic = self.topics[int(self.topic_index[place])]
        return PreparedLookup(topic, "", key_hash, fingerprint, second_min, second_max, self._most)


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
    """Return the lookups (n) of n rows; a null bound is none.

    `places` are the plan's topics, `column` is what errors call that of keys.

    Raises `InvalidArgument` for keys and ranges that no lookup can have, and for a topic that was not there when topics
    were counted.
    """
    found = np.zeros(len(keys), LOOKUP)
    if not len(found):
        return found
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if fresh := [name for name in names if name not in places]:
        raise InvalidArgument(
            f"the keys change while they are read: topic {fresh[0]!r} is new; look up from a copy that stands still"
        )
    index = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    units = code_units(keys.cast(pa.large_string()))
    for row in np.flatnonzero((units.lengths == 0) | (units.lengths > MAX_KEY_UNITS))[:1].tolist():
        key = f"{shown(keys[row].as_py())!r} of topic {shown(topics[row].as_py())!r}"
        long = f"{int(units.lengths[row]):,} UTF-16 code units long; 1..{MAX_KEY_UNITS:,} are allowed"
        raise InvalidArgument(f"column {column}: the key {key} is {long}")
    found["topic"] = np.array([places[name] for name in names], np.uint32)[index]
    found["key_hash"], fingerprints = hash_batch(names, index, units, fingerprints=keyed)
    if keyed:
        found["fingerprint"] = fingerprints
    low = pc.fill_null(begins, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    high = pc.fill_null(ends, MAX_TIMESTAMP_MS).to_numpy(zero_copy_only=False).astype(np.int64)
    for row in np.flatnonzero(low > high)[:1].tolist():
        raise InvalidArgument(f"begin_ms {low[row]} is after end_ms {high[row]}, for key {keys[row].as_py()!r:.60}")
    found["second_min"], found["second_max"] = low // 1000, high // 1000
    return found


def distinct(lookups: Array) -> Array:
    """Return each lookup once (n, dtype `LOOKUP`), in the order of hash and fingerprint, then of their bytes.

    Numbers of 64 bits are sorted many times as fast as records, and nearly all lookups differ in them; the others are
    sorted as records.
    """
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
    """Return where each of `lookups` (m) stands among `asked`, which `distinct` returned."""
    known, numbers = _numbers(asked), _numbers(lookups)
    raw, wanted = asked.view(_RAW), np.ascontiguousarray(lookups).view(_RAW)
    # one that is not there is compared with another one
    places = np.minimum(np.searchsorted(known, numbers), len(asked) - 1)
    shared = np.flatnonzero(_shared(known))
    if len(shared) and len(places):
        among = shared[np.argsort(raw[shared])]
        several = np.flatnonzero(np.isin(places, shared))
        places[several] = among[np.minimum(np.searchsorted(raw[among], wanted[several]), len(among) - 1)]
    if len(places) and (not len(raw) or (raw[places] != wanted).any()):
        raise InvalidArgument("the keys change while they are read; look up from a copy that stands still")
    return places.astype(np.int64)


def _numbers(lookups: Array) -> npt.NDArray[np.uint64]:
    """Return hash and fingerprint (u64, n), which order lookups as the hash does."""
    if not len(lookups):
        return np.zeros(0, np.uint64)  # of whatever type
    numbers: npt.NDArray[np.uint64] = lookups["key_hash"].astype(np.uint64) << np.uint64(32) | lookups["fingerprint"]
    return numbers


def _shared(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which of ordered numbers (bool, n) are there more than once."""
    shared = np.zeros(len(numbers), bool)
    same = numbers[1:] == numbers[:-1]
    shared[1:] |= same
    shared[:-1] |= same
    return shared


def routes(lookups: Array, count: int) -> Int64:
    """Return which of `count` places (i64, n) a lookup belongs to; the ranges of a key belong to many."""
    mixed = lookups["key_hash"].astype(np.uint64)
    for name in ("topic", "second_min", "second_max"):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= lookups[name].astype(np.uint64)
        mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(32)) % np.uint64(count)).astype(np.int64)


def cells_of(packed: Array, starts: Int64) -> pa.Array:
    """Return runs of records, each from one of `starts` (i64, n) up to the next, as a binary column.

    Less than 2 GiB.
    """
    data = np.ascontiguousarray(packed)
    offsets = (np.append(starts, len(data)) * data.dtype.itemsize).astype(np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data.view(np.uint8))]
    )


def records_of(column: Any, dtype: np.dtype[Any] = LOOKUP) -> Array:
    """Return what the cells of a binary column hold, one behind the other (n, `dtype`)."""
    data = b"".join(cell for cell in column.to_pylist() if cell is not None)
    return np.frombuffer(data, dtype)
