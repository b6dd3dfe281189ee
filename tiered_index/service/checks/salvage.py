"""Makes a new object of the intact parts of a damaged one: the runs that match their CRC32.

If only the filter, the header or the slot table is damaged, the new object has every entry. Memory: for a file about 70
bytes per entry; for a shard 8 bytes per entry and a window of 8 MiB. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index._version import __version__
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.compacted import SealedFile
from tiered_index.format.foreign import Read
from tiered_index.format.packed import read_options
from tiered_index.format.shard import ShardWriter
from tiered_index.format.trailer import TAIL_SIZE, Run, Tail, Trailer, parse_trailer
from tiered_index.kernels import crc32
from tiered_index.service.checks.report import Missing
from tiered_index.service.cold.path import spans_of
from tiered_index.service.lifecycle.publication import stored_file, unlike
from tiered_index.service.log.records import LostObject, StoredObject
from tiered_index.storage.base import Storage

Array = npt.NDArray[Any]
_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class Salvage:
    """The intact part of `old`: the entries of `runs`. `kept` describes it for a log record, and `lost` the rest."""

    storage: Storage
    old: StoredObject
    trailer: Trailer
    runs: Sequence[Run]
    kept: StoredObject
    lost: LostObject | None

    @property
    def missing(self) -> Missing | None:
        """The entries that answers lack permanently."""
        if self.lost is None:
            return None
        topics = tuple(sorted(name for _, name in self.trailer.metadata.topics))
        return replace(Missing.of(self.lost), topics=topics or None)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the new object's bytes. Raises `CorruptFile` if a run no longer verifies."""
        return self._file() if self.old.shard is None else self._shard()

    def _items(self) -> Iterator[Array]:
        for run, data in _sound(self.storage, self.old.name, self.runs):
            if data is None:
                raise CorruptFile(self.old.name, "a run that verified before no longer does", offset=run.offset)
            yield self.trailer.metadata.items_of(data, run.count, self.old.name)

    def _file(self) -> Iterator[bytes | memoryview]:
        metadata = self.trailer.metadata
        entries = np.zeros(self.kept.count, metadata.layout.schema.entry)
        at = 0
        for items in self._items():
            for name in items.dtype.names or ():
                entries[name][at : at + len(items)] = items[name]
            at += len(items)
        kept, old = self.kept, self.old
        sealed = SealedFile.of(metadata, count=kept.count, sequence=old.sequence, created_ms=old.published_ms)
        # reversed, because slots in order "newest first" begin with the entry that was put last
        yield from sealed.compacted(entries[::-1].copy())

    def _shard(self) -> Iterator[bytes | memoryview]:
        metadata, shard = self.trailer.metadata, self.old.part
        packing = read_options(metadata.more["packed"]) if "packed" in metadata.more else None
        slots = shard.slot_low, shard.slot_high
        more = {name: metadata.more[name] for name in ("table", "window_s", "sequence")}
        count = self.kept.count
        writer = ShardWriter(metadata.layout, shard.slots, slots, metadata.begin_ms, metadata.end_ms, count, packing)
        yield writer.begin()
        used: set[int] = set()
        for items in self._items():
            used.update(np.unique(items["topic_id"]).tolist())
            yield writer.add(items)
        names = {topic_id: name for topic_id, name in metadata.topics if topic_id in used}
        yield writer.finish(metadata.file_id, f"tiered_index {__version__}", metadata.offset_space, names, more)


def salvage(storage: Storage, stored: StoredObject) -> Salvage | None:
    """Return the part of an object that still verifies. Raises the errors of the storage.

    Return None if there is no such part, or if the object contradicts its record.
    """
    try:
        trailer = trailer_of(partial(storage.get_range, stored.name), stored.name, stored.size_bytes)
        metadata = trailer.metadata
        if unlike(stored, stored_file(stored.name, trailer, stored.size_bytes, 0, stored.origin)) is not None:
            return None
        runs: list[Run] = []
        bad: list[Run] = []
        second_min, second_max = stored.second_max, stored.second_min
        for run, data in _sound(storage, stored.name, trailer.directory.all_runs()):
            if data is None:
                bad.append(run)
                continue
            runs.append(run)
            seconds = metadata.items_of(data, run.count, stored.name)["time_diff_s"].astype(np.int64)
            second_min = min(second_min, int(seconds.min()) + metadata.begin_ms // 1000)
            second_max = max(second_max, int(seconds.max()) + metadata.begin_ms // 1000)
    except (CorruptFile, InvalidArgument, ObjectNotFound):
        return None
    if not runs:
        return None
    kept = replace(stored, count=sum(run.count for run in runs), second_min=second_min, second_max=second_max)
    return Salvage(storage, stored, trailer, runs, kept, _lost(stored, trailer, bad) if bad else None)


def trailer_of(read: Read, name: str, size: int) -> Trailer:
    """Return the verified trailer of a file of `size` bytes. Raises `CorruptFile`, and the errors of `read`."""
    begin = max(0, size - TAIL_SIZE)
    position = Tail.decode(read(begin, size - begin), name, size).directory_position
    return parse_trailer(read(position, size - position), name, size)


def _sound(storage: Storage, name: str, runs: Sequence[Run]) -> Iterator[tuple[Run, memoryview | None]]:
    """Yield each run with its bytes, or with None if they don't match their CRC32."""
    for span in spans_of(runs, 0, _WINDOW_BYTES):
        for run, data in span.pieces(storage.get_range(name, span.start, span.length)):
            yield run, data if len(data) == run.length and crc32(data) == run.crc32 else None


def _lost(stored: StoredObject, trailer: Trailer, bad: Sequence[Run]) -> LostObject:
    """Describe the lost runs for a log record: for a shard with their slots, for blocks with their seconds."""
    lost = replace(
        LostObject.of(stored),
        count=sum(run.count for run in bad),
        second_min=max(stored.second_min, min(run.second_min for run in bad)),
        second_max=min(stored.second_max, max(run.second_max for run in bad)),
    )
    if lost.shard is None:
        return lost
    groups = trailer.directory.groups
    offsets = groups["offset"].astype(np.int64)
    first, last = (int(np.searchsorted(offsets, run.offset, "right")) - 1 for run in (bad[0], bad[-1]))
    firsts = [*groups["first_slot"].tolist(), lost.shard.slot_high]
    return replace(lost, shard=replace(lost.shard, slot_low=firsts[first], slot_high=firsts[last + 1]))
