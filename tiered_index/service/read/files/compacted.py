"""Compacted files: on the local disk, in the storage, or in both.

The search is the same for both. If the local copy is damaged and the storage has the file, the search uses the storage.
Threads: any. Answers are copies; the map of a deleted file is closed with its last array.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import Call
from tiered_index.base.kernels import compiled_views, crc32
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import CorruptFile, SchemaMismatch, TieredIndexError
from tiered_index.format.keys.bloom import FILTER_BLOCK_BYTES
from tiered_index.format.keys.hashing import HASH_RULES, HashRule
from tiered_index.format.layout import HEADER_SIZE
from tiered_index.format.metadata import Metadata, NamedStats
from tiered_index.format.names import UPLOADED
from tiered_index.format.schema import Schema, row_form
from tiered_index.format.trailer import TAIL_SIZE, Run, Tail, Trailer, parse_trailer
from tiered_index.service.log.records import StoredObject
from tiered_index.service.read.answers.batch import LookupBatch, Matches, search_batch
from tiered_index.service.read.files.cold_path import ColdPath
from tiered_index.service.read.files.file_search import FileBytes, collected, search_file
from tiered_index.service.read.files.snapshot import LocalHandle, unmap
from tiered_index.service.read.files.spans import whole_runs
from tiered_index.service.root import disk_error
from tiered_index.storage.disk import map_file

Array = npt.NDArray[Any]
_VERIFY_RUNS = 256


class LocalBytes:
    """A compacted file on the local disk; `data` is a read-only map of it."""

    gap_bytes = 0

    def __init__(self, path: Path) -> None:
        self.file = str(path)
        try:
            with path.open("rb") as handle:
                self.data = map_file(handle.fileno(), path.parent)
        except ValueError as error:  # an empty file can't be mapped
            raise CorruptFile(self.file, "empty file", offset=0) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise disk_error(error, f"reading {path}") from error
        self.size_bytes = len(self.data)
        self.words: npt.NDArray[np.uint64] | None = np.frombuffer(self.data, np.uint64, self.size_bytes // 8)
        tail = Tail.decode(self.data[max(0, self.size_bytes - TAIL_SIZE) :], self.file, self.size_bytes)
        if tail.filter_length % FILTER_BLOCK_BYTES:
            problem = f"the filter is not made of blocks of {FILTER_BLOCK_BYTES} bytes"
            raise CorruptFile(self.file, problem, offset=tail.position, found=tail.filter_length)
        self._trailer = parse_trailer(self.data[tail.directory_position :], self.file, self.size_bytes)
        self._in_core: Any = None

    def trailer(self) -> Trailer:
        """Return the verified trailer."""
        return self._trailer

    def let_go(self) -> None:
        """Close the map."""
        self.words = self._in_core = None
        unmap(self.data)

    def in_core(self) -> Any:
        """Return the compiled core's `LocalFile` of this file; None: there is no core, or it can't search the file."""
        metadata, tail = self._trailer.metadata, self._trailer.tail
        core = compiled_views()
        if core is None or metadata.is_shard:
            return None
        packed = None if metadata.packing is None else metadata.packing.in_core
        if (packed is None) != (metadata.packing is None):
            return None
        if self._in_core is None:
            layout, ids = metadata.layout, metadata.ids_by_topic
            rule = HASH_RULES.index(layout.hash)
            made = core.LocalFile(
                row_form(layout.schema), self.data, ids, rule, metadata.begin_ms // 1000, layout.slots
            )
            of_filter = tail.position, tail.filter_length, tail.filter_crc32
            made.with_groups(self._trailer.directory.group_bytes, crc32, *of_filter)
            if packed is not None:
                made.with_packing(*packed)
            self._in_core = made
        return self._in_core

    def search(self, batch: LookupBatch) -> Matches:
        """Return the rows that answer each lookup, in any order."""
        metadata = self._trailer.metadata
        interval = metadata.second_min, metadata.second_max
        matches = search_batch(self.in_core(), batch, metadata.layout.schema, *interval)
        return collected(search_file(self, batch)) if matches is None else matches

    def verified(self, runs: Sequence[Run], damaged: dict[int, CorruptFile] | None = None) -> list[memoryview]:
        """Return each run's verified bytes in the map. See `FileBytes.verified`."""
        whole = memoryview(self.data)
        pieces = ((run, whole[run.offset : run.offset + run.length]) for run in runs)
        return [piece for _, piece in whole_runs(pieces, self.file, damaged)]


class StorageBytes:
    """A compacted file in the storage, read by the cold path."""

    def __init__(self, cold: ColdPath, stored: StoredObject) -> None:
        self.file = stored.name
        self.stored = stored
        self.cold = cold
        self.words = None
        self.gap_bytes = cold.settings.coalesce_gap_bytes

    def bound(self, call: Call) -> StorageBytes:
        """Return the file for the requests of `call`."""
        return StorageBytes(self.cold.bound(call), self.stored)

    def trailer(self) -> Trailer:
        """Return the verified trailer, fetched unless it is in a cache. Raises `MissingObject`."""
        return self.cold.trailer(self.stored)

    def trailer_of(self, schema: Schema) -> Trailer:
        """Return the trailer. Raises `SchemaMismatch` if the entries have another schema."""
        trailer = self.trailer()
        if (stored_schema := trailer.metadata.layout.schema) != schema:
            raise SchemaMismatch(f"{self.file} stores {stored_schema.name} entries, the index {schema.name}")
        return trailer

    def verified(self, runs: Sequence[Run], damaged: dict[int, CorruptFile] | None = None) -> list[memoryview]:
        """See `FileBytes.verified`. Raises `CorruptFile` and `MissingObject`."""
        return self.cold.verified(self.stored, runs, damaged)

    def search(self, batch: LookupBatch, away: npt.NDArray[np.bool_] | None = None) -> Matches:
        """Return the rows that answer each lookup except those in `away` (bool, n), in any order.

        A lookup of the whole file that finds nothing counts as a miss. `away`: by default a result of `away`.
        """
        cold, stored = self.cold, self.stored
        if away is None and not batch.is_one:
            away = self.away(batch)
        if self.lacks(batch) if away is None else away.all():
            return Matches.lacking()
        if cold.prepare_search(stored):
            is_excluded = cold.filters.excludes_many(stored, batch.filter_hashes(keyed=cold.keyed), again=True)
            away = is_excluded if away is None else away | is_excluded
        matches = collected(search_file(self, batch, away))
        if batch.is_one and len(matches.rows):
            return matches
        missed = (batch.second_min <= stored.second_min) & (batch.second_max >= stored.second_max)
        if away is not None:
            missed &= ~away
        missed[matches.lookups] = False
        # a page does not show what the file lacks
        missed[list(batch.after)] = False
        for lacking, _ in matches.damage:
            missed[lacking] = False
        if missed.any():
            first = int(missed.argmax())
            if not self.lacks_topic(batch.topics[int(batch.topic_index[first])]):
                cold.filters.record_miss(stored)
        return matches

    def away(self, batch: LookupBatch) -> npt.NDArray[np.bool_]:
        """Return which lookups (bool, n) have no answer in the file, by their range or a cached filter."""
        away = (batch.second_min > self.stored.second_max) | (batch.second_max < self.stored.second_min)
        here = np.flatnonzero(~away)
        away[here] = self.cold.filters.excludes_many(
            self.stored, batch.filter_hashes(keyed=self.cold.keyed, numbers=here)
        )
        return away

    def lacks(self, batch: LookupBatch) -> bool:
        """Return whether the file has no answer, by the ranges of the lookups or a cached filter."""
        if not batch.is_one:
            return bool(self.away(batch).all())
        stored, (key_hash, fingerprint, second_min, second_max) = self.stored, batch.first
        if second_min > stored.second_max or second_max < stored.second_min:
            return True
        if stored.name in batch.passed:
            return False
        if self.cold.filters.excludes(stored, key_hash, fingerprint if self.cold.keyed else 0):
            return True
        batch.passed.add(stored.name)
        return False

    def lacks_topic(self, topic: str) -> bool:
        """Return whether the file is known, without a request, to lack `topic`."""
        trailer = self.cold.known_trailer(self.stored)
        return trailer is not None and topic not in trailer.metadata.topic_names

    @property
    def known_topics(self) -> frozenset[str] | None:
        """The names of the file's topics; None: not known without a request."""
        trailer = self.cold.known_trailer(self.stored)
        return trailer.metadata.topic_names if trailer is not None else None


@dataclass
class CompactedFile:
    """The handle of a compacted file. `local` and `stored` are its bytes; the local ones are preferred.

    `folder` is the folder of the local copy, or None. A copy in ``uploaded`` has no `stored` only if the storage was
    unavailable.
    """

    file_id: str
    second_min: int
    second_max: int
    sequence: int
    count: int
    lane: str
    hash: HashRule
    folder: str | None = None
    local: LocalBytes | None = None
    stored: StorageBytes | None = None

    @property
    def place(self) -> str:
        """``compacted`` (only local), ``uploaded`` (a local copy of a stored file) or ``storage``."""
        return self.folder or "storage"

    @property
    def is_local(self) -> bool:
        """Whether a search needs no request."""
        return self.local is not None

    @property
    def fallback(self) -> CompactedFile | None:
        """See `Handle.fallback`."""
        return replace(self, local=None) if self.local is not None and self.stored is not None else None

    @property
    def known_topics(self) -> frozenset[str] | None:
        """See `Handle.known_topics`."""
        if self.local is not None:
            return self.local.trailer().metadata.topic_names
        return self.stored.known_topics if self.stored is not None else None

    def excludes(self, batch: LookupBatch) -> str | None:
        """See `Handle.excludes`."""
        if self.local is not None or self.stored is None:
            return None
        if not batch.overlaps(self.second_min, self.second_max):
            return "time"
        if self.stored.lacks(batch):
            return "filter"
        return "topic" if all(map(self.stored.lacks_topic, batch.topics)) else None

    def search(self, batch: LookupBatch, call: Call) -> Matches:
        """Return the rows that answer each lookup, in any order."""
        if self.local is not None:
            matches = self.local.search(batch)
            if matches.damage and self.stored is not None:
                # the storage has the damaged parts
                raise matches.damage[0][1]
            return matches
        assert self.stored is not None
        return self.stored.bound(call).search(batch)

    def topic_stats(self, call: Call) -> NamedStats:
        """See `Handle.topic_stats`."""
        if self.local is None and self.stored is not None:
            return self.stored.bound(call).trailer().metadata.stats_by_topic()
        return self.metadata().stats_by_topic()

    def is_left_over(self, files: Container[str]) -> bool:
        """Return whether this is only a local copy of a published file that is no longer in the log's `files`.

        The table into which it was merged has its entries.
        """
        return self.file_id not in files and (self.stored is not None or self.folder == UPLOADED)

    def let_go(self) -> None:
        """Close the local copy's map."""
        if self.local is not None:
            self.local.let_go()

    def metadata(self) -> Metadata:
        """Return the file's metadata."""
        source: FileBytes | None = self.local or self.stored
        assert source is not None
        return source.trailer().metadata


def open_local(path: Path, stored: StorageBytes | None = None) -> CompactedFile:
    """Open a compacted file on the local disk. Raises `CorruptFile` and `FileNotFoundError`."""
    local = LocalBytes(path)
    metadata = local.trailer().metadata
    CorruptFile.unless_equal(str(path), "the file's id differs from its name", path.stem, metadata.file_id)
    interval, sequence = (metadata.second_min, metadata.second_max), int(metadata.more.get("sequence", 0))
    rule = metadata.layout.hash
    return CompactedFile(
        metadata.file_id, *interval, sequence, metadata.count, metadata.lane, rule, path.parent.name, local, stored
    )


def open_stored(cold: ColdPath, stored: StoredObject) -> CompactedFile:
    """Return the handle of a file in the storage, without reading it."""
    interval, source = (stored.second_min, stored.second_max), StorageBytes(cold, stored)
    return CompactedFile(
        stored.file_id, *interval, stored.sequence, stored.count, stored.lane, stored.hash, stored=source
    )


@dataclass(eq=False)
class DamagedFile(LocalHandle):
    """A file that can't be read. Each lookup that needs it fails or reports it. Unknown seconds cover all times."""

    file_id: str
    place: str
    error: TieredIndexError
    second_min: int = 0
    second_max: int = MAX_TIMESTAMP_MS // 1000
    sequence = 0
    lane = "main"

    def search(self, batch: LookupBatch, call: Call) -> Matches:
        """Raise the error that made the file unreadable."""
        raise copy.copy(self.error)  # a copy, because each raise adds frames to an error's traceback

    def topic_stats(self, call: Call) -> NamedStats:
        """Raise the error that made the file unreadable."""
        raise copy.copy(self.error)


def verify_runs(file: CompactedFile) -> None:
    """Check every array of a local compacted file against its CRC32. Raises `CorruptFile`."""
    assert file.local is not None
    runs = file.local.trailer().directory.all_runs()
    for start in range(0, len(runs), _VERIFY_RUNS):
        file.local.verified(runs[start : start + _VERIFY_RUNS])


def verify_tables(file: CompactedFile) -> None:
    """Check header, slot table and filter of a local compacted file, which lookups don't read. Raises `CorruptFile`."""
    assert file.local is not None
    trailer = file.local.trailer()
    metadata, tail = trailer.metadata, trailer.tail
    parts = [
        ("header", 0, HEADER_SIZE, metadata.header_crc32),
        ("filter", tail.position, tail.directory_position, tail.filter_crc32),
    ]
    if metadata.packing is None:
        parts.append(("slot table", HEADER_SIZE, metadata.layout.items_position, metadata.slots_crc32))
    for name, start, stop, expected in parts:
        with memoryview(file.local.data) as whole, whole[start:stop] as piece:
            computed = zlib.crc32(piece)
        CorruptFile.unless_equal(file.local.file, f"{name} does not match its CRC32", expected, computed, offset=start)
