"""Finds erased entries in stored objects, by reading their bytes. Threads: any.

First the topic table of an object is read. If the object may have erased entries, the slots of erased keys are read, or
all slots if a topic or a queue was erased. Each run is checked against its CRC32.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import StoredObject
from tiered_index.service.log.tombstones import Tombstone, Tombstones
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.files.compacted import StorageBytes
from tiered_index.service.read.files.file_search import scan_runs
from tiered_index.storage.base import Storage
from tiered_index.types import no_progress

_READERS = 8
_WINDOW_BYTES = 16 << 20
_ALL_TIME = (-(2**62), 2**62)

Found = Mapping[str, "ScannedObject"]
"""The result for each object, by name."""
FindHidden = Callable[[Storage, Iterable[StoredObject], Tombstones, Schema, Callable[[int, int], None]], Found]
"""A function like `find_hidden`, which may use other processes."""


@dataclass(frozen=True, slots=True)
class ScannedObject:
    """The result for one object: of `looked_at` entries, `hidden` ones are erased.

    `may_have_topic` is false if the object's topic table excludes the topics. `topics` are the names in the table.
    `keys` are the erased keys that entries have, as hash and fingerprint (None without fingerprints), and `places` the
    queues and offsets of these entries. `problem` says
    why the result is unknown; None: it is known.
    """

    hidden: int = 0
    looked_at: int = 0
    read_bytes: int = 0
    problem: str | None = None
    may_have_topic: bool = True
    topics: frozenset[str] = frozenset()
    keys: frozenset[tuple[int, int | None]] = frozenset()
    places: frozenset[tuple[int, int]] = frozenset()


def find_hidden(
    storage: Storage,
    objects: Iterable[StoredObject],
    stones: Tombstones,
    schema: Schema,
    progress: Callable[[int, int], None] = no_progress,
) -> Found:
    """Return the hidden entries of each object. `progress` gets the numbers of finished and of all objects.

    Raises the errors of the storage.
    """
    stored = list(objects)
    settings = ColdSettings(query_threads=_READERS, cache_slot_groups=False, coalesce_gap_bytes=0)
    scanned: dict[str, ScannedObject] = {}
    with (
        contextlib.closing(ColdPath(storage, keyed=schema.keyed, settings=settings)) as cold,
        ThreadPoolExecutor(_READERS, "tiered-index-erase") as pool,
    ):
        for named, scan in zip(
            stored, pool.map(lambda named: _scanned(cold, named, stones, schema), stored), strict=True
        ):
            scanned[named.name] = scan
            progress(len(scanned), len(stored))
    return scanned


def _scanned(cold: ColdPath, stored: StoredObject, stones: Tombstones, schema: Schema) -> ScannedObject:
    mine = [stone for stone in stones if stored.second_min * 1000 < stone.before_ms]
    if not mine:
        return ScannedObject()
    try:
        source = StorageBytes(cold, stored)
        trailer = source.trailer_of(schema)
        names = dict(trailer.metadata.topics)
        known = trailer.metadata.topic_names
        tombstones = tuple([stone for stone in mine if stone.topic in known])
        hashes, expired = _hashes(tombstones), Expired(tombstones=tombstones)
        hidden = looked_at = read_bytes = 0
        keys: set[tuple[int, int | None]] = set()
        places: set[tuple[int, int]] = set()
        begin_s = trailer.metadata.begin_ms // 1000
        for window, items in scan_runs(source, _runs(trailer, tombstones, hashes), _WINDOW_BYTES):
            seconds = items["time_diff_s"].astype(np.int64) + begin_s
            gone = items[~expired.keeps(items, seconds, names)]
            hidden += len(gone)
            if len(hashes):
                prints = gone["fingerprint"].tolist() if schema.keyed else itertools.repeat(None)
                keys.update(zip(normal_hashes(gone["key_hash"]).tolist(), prints, strict=False))
                places.update(zip(gone["queue_id"].tolist(), gone["offset"].tolist(), strict=True))
            looked_at += len(items)
            read_bytes += sum(run.length for run in window)
    except (CorruptFile, ObjectNotFound) as error:
        return ScannedObject(problem=str(error))
    return ScannedObject(
        hidden, looked_at, read_bytes, None, bool(tombstones), known, frozenset(keys), frozenset(places)
    )


def _hashes(stones: Iterable[Tombstone]) -> npt.NDArray[np.int32]:
    """Return the hashes (i32, n) of all erased keys, in order."""
    return np.unique(np.array([key_hash for stone in stones for key_hash in stone.hashes], np.int32))


def _runs(trailer: Trailer, stones: Sequence[Tombstone], hashes: npt.NDArray[np.int32]) -> Iterator[Run]:
    """Yield the runs that may have hidden entries."""
    if any(not stone.hashes for stone in stones):
        yield from trailer.directory.all_runs()
    elif len(hashes):
        low, high = trailer.metadata.slot_range
        slots = np.unique(trailer.metadata.slot_map.slots_of(hashes))
        yield from trailer.directory.runs_of(slots[(slots >= low) & (slots < high)], *_ALL_TIME)
