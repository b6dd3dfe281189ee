"""Proof of one shard of a window table: every byte against its checksum, every item against what the shard says of itself.

As `verify` for compacted files, without a slot table: the directory alone says where a slot lies. Memory: the trailer, the filter and one
run of items. Pure: reads through `read(position, length)`; one thread. SPEC.md sections 6 and 10.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.format.file_check import FileCheck, Finding
from tiered_index.format.foreign import Read
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.layout import SHARD_MAGIC, Header
from tiered_index.format.shard import answer_sorted, entry_checksum
from tiered_index.format.trailer import Metadata, Trailer

__all__ = ["verify_shard"]

Array = npt.NDArray[Any]


def verify_shard(read: Read, file_size: int, file: str) -> list[Finding]:
    """Return all defects of a shard; an empty list is the proof that there are none.

    Where trailer or directory can't be believed the list ends there. Raises `UnsupportedVersion` for a later format, what `read` raises.
    """
    check = _ShardCheck(read, file_size, file)
    trailer = check.trailer()
    if trailer is None or not check.metadata(trailer.metadata):
        return check.findings
    meta = trailer.metadata
    words = check.filter(trailer.tail)
    check.header(meta, Header(SHARD_MAGIC, meta.begin_ms, meta.end_ms, 0, 0))
    check.items(trailer, words)
    return check.findings


class _ShardCheck(FileCheck):
    def metadata(self, meta: Metadata) -> bool:
        """Return whether it is a shard's metadata and its times are those of its window; reports what isn't."""
        before = len(self.findings)
        missing = [name for name in ("slot_map", "window_s", "checksum") if name not in meta.more]
        if missing:
            self._add("metadata", f"no {missing[0]}: this is no shard")
            return False
        window_s = meta.more["window_s"]
        if meta.begin_ms % 1000 or meta.end_ms != meta.begin_ms + 1000 * window_s - 1:
            self._add("metadata", f"header's times {meta.begin_ms}..{meta.end_ms} are not those of a window of {window_s} s")
        begin_s = meta.begin_ms // 1000
        if not begin_s <= meta.second_min <= meta.second_max < begin_s + window_s:
            self._add("interval", f"seconds {meta.second_min}..{meta.second_max} are not within the window of {window_s} s from {begin_s}")
        return len(self.findings) == before

    def items(self, trailer: Trailer, words: Array | None) -> None:
        """Check every run's bytes and, where they are sound, its items; `words` are the filter's."""
        meta = trailer.metadata
        starts = trailer.directory.groups["offset"].astype(np.int64)
        first = np.append(trailer.directory.groups["first_slot"].astype(np.int64), meta.slot_range[1])
        checksum, slots_in_use, last_slot = 0, 0, -1
        for run, items, seconds, joined in self._sound_runs(trailer, words):
            checksum += entry_checksum(items, seconds)
            slots = meta.slot_map.slots_of(normal_hashes(items["key_hash"]))
            slots_in_use += int(np.count_nonzero(np.diff(slots, prepend=last_slot)))
            last_slot = int(slots[-1])
            group = int(np.searchsorted(starts, run.offset, "right")) - 1
            wrong = (slots < first[group]) | (slots >= first[group + 1])
            self._report("slot", wrong, "lie in a slot group that is not their hash's", run, items)
            self._order(run.offset + items.nbytes - joined.nbytes, joined, meta)
        if not self.whole:
            return
        for part, name, found, said in (
            ("interval", "seconds are", self.interval, (meta.second_min, meta.second_max)),
            ("metadata", "slots in use are", slots_in_use, meta.slots_in_use),
            ("checksum", "the entries' sum is", f"{checksum % 2**64:016x}", meta.more["checksum"]),
        ):
            if found != said:
                self._add(part, f"{name} {found}, the metadata says {said}")

    def _order(self, offset: int, items: Array, meta: Metadata) -> None:
        """Report items that do not stand in a shard's order: one that a stable sort would move."""
        seconds = items["time_diff_s"].astype(np.int64)
        order = answer_sorted(items, seconds, meta.slot_map, meta.layout.schema)
        wrong = np.flatnonzero(order != np.arange(len(items)))
        if len(wrong):
            self._add("order", f"{len(wrong)} items are out of order", offset + items.itemsize * int(wrong[0]))
