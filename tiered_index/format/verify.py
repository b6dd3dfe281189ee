"""Proof of one compacted file with trailer: every byte against its checksum, every item against what the file says of itself.

`verify_compacted` believes nothing it hasn't checked and reports everything it finds, instead of stopping at the first defect. Memory:
24 bytes a slot, the filter and one run of items. Pure: reads through `read(position, length)`; one thread. SPEC.md sections 2, 4 and 6.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.file_check import FileCheck, Finding
from tiered_index.format.foreign import Read
from tiered_index.format.hashing import normal_hashes
from tiered_index.format.layout import HEADER_SIZE, SLOT_SIZE, Header
from tiered_index.format.trailer import Metadata, Trailer

__all__ = ["Finding", "SlotOf", "verify_compacted"]

Array = npt.NDArray[Any]
SlotOf = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.int64]]
"""Maps normal hashes to slots counted from the start of a shard's own slot table."""


def verify_compacted(read: Read, file_size: int, file: str, slot_of: SlotOf | None = None) -> list[Finding]:
    """Return all defects of a compacted file with trailer; an empty list is the proof that there are none.

    A shard needs `slot_of`; a whole file's slots are hash modulo slots. Where trailer or geometry can't be believed the list ends there.
    Raises `UnsupportedVersion` for a later format, `InvalidArgument` for a shard without `slot_of`, and what `read` raises.
    """
    check = _CompactedCheck(read, file_size, file)
    trailer = check.trailer()
    if trailer is None:
        return check.findings
    meta = trailer.metadata
    slots = meta.layout.slots
    if slot_of is None:
        if (meta.slot_base, meta.slot_range) != (slots, (0, slots)):
            raise InvalidArgument(f"{file} holds slots {meta.slot_range} of {meta.slot_base}: slot_of is needed to verify a shard")

        def slot_of(hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
            return hashes.astype(np.int64) % slots

    words = check.filter(trailer.tail)
    check.header(meta, Header(meta.layout.preset.end_magic, meta.begin_ms, meta.end_ms, meta.slots_in_use, meta.count))
    starts = check.slot_table(trailer)
    if starts is not None and check.directory(trailer, starts):
        check.runs(trailer, starts, slot_of, words)
    return check.findings


class _CompactedCheck(FileCheck):
    def slot_table(self, trailer: Trailer) -> Array | None:
        """Return where each slot's array starts, and at last the end of all, or None where the table contradicts itself."""
        meta, layout = trailer.metadata, trailer.metadata.layout
        data = self._bytes("slots", HEADER_SIZE, SLOT_SIZE * layout.slots)
        if data is None:
            return None
        if zlib.crc32(data) != meta.slots_crc32:
            self._add("slots", "CRC32 does not match", HEADER_SIZE)
        table = np.frombuffer(data, ">i4").reshape(-1, 2)
        lengths = table[:, 1].astype(np.int64)
        starts = np.append(table[:, 0].astype(np.int64), trailer.tail.position)
        broken = np.flatnonzero((np.diff(starts) != lengths) | (lengths < 0) | (lengths % layout.schema.item.itemsize != 0))
        if len(broken) or starts[0] != layout.items_position:
            slot = int(broken[0]) if len(broken) else 0
            at = HEADER_SIZE + SLOT_SIZE * slot
            self._add("slots", f"{max(len(broken), 1)} slots do not join their neighbour, first slot {slot}", at)
            return None
        in_use = int(np.count_nonzero(lengths))
        if in_use != meta.slots_in_use:
            self._add("slots", f"{in_use} slots are in use, the metadata says {meta.slots_in_use}")
        return starts

    def directory(self, trailer: Trailer, starts: Array) -> bool:
        """Return whether the groups are those of the slot table; reports in what they aren't."""
        groups = trailer.directory.groups
        first = np.append(groups["first_slot"].astype(np.int64), trailer.metadata.layout.slots)
        before = len(self.findings)
        for name, expected in (("offset", starts[first[:-1]]), ("length", np.diff(starts[first]))):
            if (groups[name].astype(np.int64) != expected).any():
                self._add("directory", f"groups' {name} contradicts the slot table")
        return len(self.findings) == before

    def runs(self, trailer: Trailer, starts: Array, slot_of: SlotOf, words: Array | None) -> None:
        """Check every run's bytes and, where they are sound, its items; `words` are the filter's."""
        meta = trailer.metadata
        for run, items, _, joined in self._sound_runs(trailer, words):
            lies_in = self._slots_at(run.offset, items, starts)
            wrong = slot_of(normal_hashes(items["key_hash"])) != lies_in
            self._report("slot", wrong, "lie in a slot that is not their hash's", run, items)
            if not meta.layout.preset.newest_first:
                self._order(run.offset + items.nbytes - joined.nbytes, joined, meta, starts)
        if self.whole and self.interval != (meta.second_min, meta.second_max):
            self._add("interval", f"seconds are {self.interval}, the metadata says {(meta.second_min, meta.second_max)}")

    def _slots_at(self, offset: int, items: Array, starts: Array) -> Array:
        """Return the slot that each of the items from byte `offset` on lies in, by position."""
        positions = offset + items.itemsize * np.arange(len(items), dtype=np.int64)
        return np.searchsorted(starts[:-1], positions, "right") - 1

    def _order(self, offset: int, items: Array, meta: Metadata, starts: Array) -> None:
        """Report neighbours within a slot that are not in the order (hash, second desc, offset desc, queue, further identity)."""
        slots = self._slots_at(offset, items, starts)
        columns = [items["key_hash"], ~items["time_diff_s"].astype(np.int64), ~items["offset"].astype(np.int64), items["queue_id"]]
        columns += [items[name] for name in meta.layout.schema.identity_extra]
        tied = slots[1:] == slots[:-1]
        wrong = np.zeros(len(tied), bool)
        for column in columns:
            wrong |= tied & (column[1:] < column[:-1])
            tied = tied & (column[1:] == column[:-1])
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            self._add("order", f"{int(wrong.sum())} items are out of order", offset + items.itemsize * (at + 1))
