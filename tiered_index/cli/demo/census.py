"""The demo's count: is every entry of the stream in the storage's objects, and nothing else?

Entries are compared by what identifies them (topic, queue, offset, hash and fingerprint of the key), as sorted arrays. Hashes are computed
by the engine's own functions; that those are right is what the look-ups show. Memory: 16 bytes an entry, several times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.hashing import code_units, hash_batch
from tiered_index.service.files.compacted import CompactedFile
from tiered_index.service.reader import IndexReader
from tiered_index.testing.workload import TOPICS, Workload

__all__ = ["Census", "take_census"]

Array = npt.NDArray[Any]
_RUNS = 4096
_OFFSET_BITS = 48


@dataclass(frozen=True)
class Census:
    """`stored` counts entries in objects, `repeated` those that are there more than once (put again after a crash; one answer still)."""

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
    hashes, fingerprints = hash_batch(TOPICS, pairs >> 32, code_units([workload.keys[key] for key in pairs & 0xFFFFFFFF]))
    return _sorted(
        _where(workload.topic[of].astype(np.int64), workload.queue_id[of], workload.offset[of]), _what(hashes, fingerprints)[inverse]
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
