"""The demo's checks: objects hold every entry of the stream and nothing else, and lookups give the expected answers.

Entries are compared by topic, queue, offset, hash and fingerprint of the key, as sorted arrays, with the engine's own
hashes; the lookups show that those are right. Memory: 16 bytes an entry, several times. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.cli.demo.workload import TOPICS, Answer, ReferenceAnswers, Workload
from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.reader import IndexReader
from tiered_index.types import Lookup, QueryResult

Array = npt.NDArray[Any]
_RUNS = 4096
_OFFSET_BITS = 48


@dataclass(frozen=True)
class Census:
    """Entries in objects; `repeated` are stored more than once, as a crash leaves them, and are one answer."""

    expected: int
    stored: int
    repeated: int
    lost: int
    strange: int


def take_census(reader: IndexReader, workload: Workload) -> Census:
    """Read every object that the log names and compare with what was put."""
    parts = [_entries_of(handle) for handle in reader.files() if isinstance(handle, CompactedFile)]
    stored = _sorted(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    found, expected = _distinct(stored), _distinct(_expected(workload))
    lost = strange = 0
    if found.shape != expected.shape or (found != expected).any():
        have, want = set(map(tuple, found.T.tolist())), set(map(tuple, expected.T.tolist()))
        lost, strange = len(want - have), len(have - want)
    return Census(expected.shape[1], stored.shape[1], stored.shape[1] - found.shape[1], lost, strange)


def _entries_of(file: CompactedFile) -> tuple[Array, Array]:
    assert file.stored is not None
    trailer = file.stored.trailer()
    meta = trailer.metadata
    numbers = {topic_id: TOPICS.index(name) for topic_id, name in meta.topics}
    wheres, whats = [], []
    runs = trailer.directory.all_runs()
    for start in range(0, len(runs), _RUNS):
        data = b"".join(file.stored.verified(runs[start : start + _RUNS]))
        items = np.frombuffer(data, meta.layout.schema.item)
        ids, inverse = np.unique(items["topic_id"], return_inverse=True)
        topic = np.array([numbers[int(topic_id)] for topic_id in ids], np.int64)[inverse]
        wheres.append(_where(topic, items["queue_id"], items["offset"]))
        whats.append(_what(items["key_hash"], items["fingerprint"]))
    return np.concatenate(wheres), np.concatenate(whats)


def _expected(workload: Workload) -> Array:
    of = workload.entry_message
    pairs, inverse = np.unique(workload.topic[of].astype(np.int64) << 32 | workload.entry_key, return_inverse=True)
    hashes, fingerprints = hash_batch(
        TOPICS, pairs >> 32, code_units([workload.keys[key] for key in pairs & 0xFFFFFFFF])
    )
    return _sorted(
        _where(workload.topic[of].astype(np.int64), workload.queue_id[of], workload.offset[of]),
        _what(hashes, fingerprints)[inverse],
    )


def _where(topic: Array, queue_id: Array, offset: Array) -> Array:
    return (topic << 8 | queue_id.astype(np.int64)) << _OFFSET_BITS | offset.astype(np.int64)


def _what(key_hash: Array, fingerprint: Array) -> Array:
    return key_hash.astype(np.uint64) << np.uint64(32) | fingerprint.astype(np.uint64)


def _sorted(where: Array, what: Array) -> Array:
    """Return the pairs as two rows of unsigned numbers, sorted."""
    pairs = np.stack((where.astype(np.uint64), what))
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
    """The lookups at one place, a page as one; `files` counts the index's files by state."""

    place: str
    files: dict[str, int] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    answers: int = 0
    requests: int = 0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)

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
    """Return `count` lookups; `tail_start` is the message from which on the stream is its newest part."""
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
    """Looks keys up and compares the answers; `done` has a `Measured` a place."""

    reference: ReferenceAnswers
    done: list[Measured] = field(default_factory=list)

    def check(
        self, place: str, files: dict[str, int], query: Query, lookups: list[Lookup], *, paged: Lookup | None = None
    ) -> Measured:
        """Make every lookup once, and `paged` page by page to its end."""
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
        found: Answer = []
        cursor: str | None = None
        while True:
            started_s = time.perf_counter()
            result = query(*arguments, max_count, cursor)
            measured.latencies_ms.append((time.perf_counter() - started_s) * 1000)
            measured.answers += len(result)
            measured.requests += result.explain.requests
            measured.bytes += result.explain.bytes
            found += [(item.timestamp_ms, item.queue_id, item.offset, item.size) for item in result]
            cursor = result.cursor
            if one_page or cursor is None:
                break
        right = found == (expected[:max_count] if one_page and result.status == "truncated" else expected)
        # a cut answer must be full, and say that it is cut
        if not right or result.status == "partial" or (result.status == "truncated" and len(result) < max_count):
            measured.wrong.append(f"{lookup}: {len(found)} answers ({result.status}), {len(expected)} expected")
