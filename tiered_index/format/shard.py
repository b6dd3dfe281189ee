"""Shards of window tables: the arrays of a range of slots, and a trailer. SPEC.md section 10.

A shard is written in one pass from entries in their final order, with any preset. It has no slot table: the directory
says where a slot is. Its runs are packed (section 11). Pure. Memory: 8 bytes per entry for the
filter, some hundred bytes per slot group, and one run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import crc32
from tiered_index.errors import InvalidArgument
from tiered_index.format.compacted import BLOCK_BYTES, GROUP_BYTES
from tiered_index.format.keys.bloom import FilterBuilder, filter_hashes
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import (
    HEADER_SIZE,
    SHARD_MAGIC,
    Header,
    Layout,
    SlotMap,
    answer_order,
    hash_rank,
    offset_columns,
)
from tiered_index.format.metadata import Metadata, TopicStats, add_topic_stats, topic_stats
from tiered_index.format.packed import Packing, PackingOptions
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import GROUP_DTYPE, Directory, OpenBlock, block_table, build_trailer

Array = npt.NDArray[Any]
_MASK = (1 << 64) - 1
# runs that are packed together: their memory fits the cache
_TOGETHER = 64
_MIXED = 1 << 14
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def answer_sorted(
    items: Array, seconds: npt.NDArray[np.int64], slots: SlotMap, schema: Schema
) -> npt.NDArray[np.int64]:
    """Return the permutation (i64, n) that sorts items (n) by rank, and within a hash in answer order.

    `seconds` (n) are epoch seconds. Stable. Memory: 40 bytes per entry.
    """
    ranks = hash_rank(normal_hashes(items["key_hash"]), slots.base)
    return answer_order(ranks, seconds, lambda places: [places, *offset_columns(items[places], schema)])


def entry_checksum(items: Array, seconds: npt.NDArray[np.int64]) -> int:
    """Return the sum (u64) of a mixed hash of each entry: equal for the same entries in any order.

    It covers all columns except `time_diff_s`, which depends on the file. `seconds` (n, epoch seconds) replaces it.
    """
    checksum = 0
    # parts that fit the cache take half the time
    for at in range(0, len(items), _MIXED):
        checksum += int(entry_hashes(items[at : at + _MIXED], seconds[at : at + _MIXED]).sum(dtype=np.uint64))
    return checksum & _MASK


def entry_hashes(items: Array, seconds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the mixed hash (u64, n) of each entry. `entry_checksum` is their sum."""
    return mixed_columns((items[name] for name in items.dtype.names or () if name != "time_diff_s"), seconds)


def mixed_columns(columns: Iterable[Array], seeds: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a hash (u64, n) of the bits of each row of the columns (n each), beginning with `seeds` (n)."""
    mixed = seeds.astype(np.uint64)
    for column in columns:
        for bits in _bits_of(column):
            mixed ^= bits
            mixed *= _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
    return mixed


def _bits_of(column: Array) -> list[npt.NDArray[np.uint64]]:
    """Return a column's bits as u64 columns (n each)."""
    if column.dtype.kind in "iu":
        return [column.astype(np.int64).view(np.uint64)]
    raw = np.frombuffer(np.ascontiguousarray(column).tobytes(), np.uint8).reshape(len(column), column.dtype.itemsize)
    padded = np.zeros((len(column), -(-raw.shape[1] // 8) * 8), np.uint8)
    padded[:, : raw.shape[1]] = raw
    return list(padded.view(np.uint64).T)


@dataclass
class _OpenGroup:
    first_slot: int
    # whether it is a slot of 16 KiB or more, which may be cut into blocks
    giant: bool
    runs: list[OpenBlock] = field(default_factory=list)
    crc32: int = 0


class ShardWriter:
    """Writes one shard: `begin`, then `add` for entries in their final order, then `finish`. One thread.

    - `slot_range`: the half-open range of slots that it may hold.
    - `begin_ms`: the times of items are relative to it.
    - `capacity`: a bound of the number of entries.
    - `packing`: the options of its packed runs.

    Only a slot of 16 KiB or more may be spread over several calls of `add`.
    """

    def __init__(
        self,
        layout: Layout,
        slots: SlotMap,
        slot_range: tuple[int, int],
        begin_ms: int,
        end_ms: int,
        capacity: int,
        packing: PackingOptions,
    ) -> None:
        self.layout, self.slots, self.slot_range = layout, slots, slot_range
        self.header = Header(SHARD_MAGIC, begin_ms, end_ms, 0, 0)
        self.count = 0
        self.slots_in_use = 0
        self.checksum = 0
        self.second_min, self.second_max = 2**63 - 1, -(2**63)
        self._begin_s = begin_ms // 1000
        self._item_size = layout.schema.item.itemsize
        self._per_block = BLOCK_BYTES // self._item_size
        self._filter = FilterBuilder(np.empty(capacity, np.uint64))
        self._options, self._packing = packing, Packing(layout.schema, slots.base, packing)
        self._topic_stats: list[TopicStats] = []
        # items of the run that is not complete yet
        self._gathered: list[Array] = []
        self._gathered_count = 0
        # runs that have ended, in order, with their items
        self._ended: list[tuple[_OpenGroup, list[Array]]] = []
        self._groups: list[_OpenGroup] = []
        self._last_slot = slot_range[0] - 1
        # the place of the last slot's items if they were not packed, from the start of the items
        self._last_start = -GROUP_BYTES
        self.position = HEADER_SIZE
        """Bytes so far, without the run that is not complete yet. After `finish` it is the place of the trailer."""

    @property
    def topic_ids(self) -> set[int]:
        """The topic ids of the items so far."""
        return {stats.topic_id for stats in self._topic_stats}

    def begin(self) -> bytes:
        """Return the header."""
        return self.header.pack()

    def add(self, items: Array) -> bytes:
        """Append compacted items (structured, n), and return the bytes of the runs that are now complete.

        Raises `InvalidArgument` for items that are out of order or outside `slot_range`, or that continue a slot of
        less than 16 KiB.
        """
        if not len(items):
            return b""
        hashes = normal_hashes(items["key_hash"])
        slots = self.slots.slots_of(hashes)
        seconds = items["time_diff_s"].astype(np.int64) + self._begin_s
        if int(slots[0]) < self._last_slot or int(slots[-1]) >= self.slot_range[1] or (np.diff(slots) < 0).any():
            raise InvalidArgument(
                f"items of slots {slots[0]}..{slots[-1]} don't follow slot {self._last_slot} of {self.slot_range}"
            )
        if int(slots[0]) == self._last_slot and not self._groups[-1].giant:
            raise InvalidArgument(
                f"slot {slots[0]} continues, but had less than {GROUP_BYTES} bytes in the piece before"
            )
        self.second_min = min(self.second_min, int(seconds.min()))
        self.second_max = max(self.second_max, int(seconds.max()))
        self.checksum = self.checksum + entry_checksum(items, seconds) & _MASK
        stats = topic_stats(items["topic_id"], items["size"], seconds)
        self._topic_stats = add_topic_stats([*self._topic_stats, *stats])
        self._filter.add(filter_hashes(items["key_hash"], items["fingerprint"] if self.layout.schema.keyed else None))
        for low, high, group in self._cut(slots):
            if group is not None:
                self._end_run()
                self._groups.append(group)
            self._gather(items[low:high])
        self.count += len(items)
        return self._write()

    def finish(
        self, file_id: str, writer: str, offset_space: str, topics: dict[int, str], more: dict[str, Any]
    ) -> bytes:
        """Return the last run and the trailer. `topics` has the names by id.

        Raises `InvalidArgument` for a shard without entries.
        """
        if not self.count:
            raise InvalidArgument("cannot write a shard without entries")
        self._end_run()
        last = self._write()
        metadata = Metadata(
            file_id=file_id,
            layout=self.layout,
            count=self.count,
            begin_ms=self.header.begin_ms,
            end_ms=self.header.end_ms,
            second_min=self.second_min,
            second_max=self.second_max,
            slots_in_use=self.slots_in_use,
            header_crc32=crc32(self.header.pack()),
            slots_crc32=0,
            topics=tuple(sorted(topics.items())),
            source_positions={},
            lane="main",
            offset_space=offset_space,
            slot_base=self.slots.base,
            slot_range=self.slot_range,
            writer=writer,
            more={
                **more,
                "slot_map": self.slots.to_json(),
                "checksum": f"{self.checksum:016x}",
                "topic_stats": list(map(astuple, self._topic_stats)),
                "packed": self._options.to_json(),
            },
        )
        return last + build_trailer(self.position, self._directory(), metadata, self._filter.build())

    def _cut(self, slots: npt.NDArray[np.int64]) -> list[tuple[int, int, _OpenGroup | None]]:
        """Return a (low, high, group) for the items of each group; `group` is None if an earlier call began it."""
        size, n = self._item_size, len(slots)
        firsts = np.flatnonzero(np.diff(slots, prepend=self._last_slot))
        starts = (self.count + firsts) * size
        lengths = np.diff(firsts, append=n) * size
        cut = np.diff(starts // GROUP_BYTES, prepend=self._last_start // GROUP_BYTES) != 0
        cut |= lengths >= GROUP_BYTES
        self.slots_in_use += len(firsts)
        if len(firsts):
            self._last_slot, self._last_start = int(slots[-1]), int(starts[-1])
        edges = firsts[cut].tolist()
        opened = map(_OpenGroup, slots[firsts[cut]].tolist(), (lengths[cut] >= GROUP_BYTES).tolist())
        pieces: list[tuple[int, int, _OpenGroup | None]] = (
            [] if edges and not edges[0] else [(0, edges[0] if edges else n, None)]
        )
        ends = [*edges[1:], n] if edges else []
        return pieces + list(zip(edges, ends, opened, strict=True))

    def _gather(self, items: Array) -> None:
        """Append items to the present run. A block of a giant slot ends when it is full."""
        giant, at = self._groups[-1].giant, 0
        while at < len(items):
            if giant and self._gathered_count == self._per_block:
                self._end_run()
            stop = min(len(items), at + self._per_block - self._gathered_count) if giant else len(items)
            self._gathered.append(items[at:stop])
            self._gathered_count += stop - at
            at = stop

    def _end_run(self) -> None:
        if self._gathered:
            self._ended.append((self._groups[-1], self._gathered))
            self._gathered, self._gathered_count = [], 0

    def _write(self) -> bytes:
        """Return the bytes of the complete runs."""
        ended, self._ended = self._ended, []
        return b"".join(self._encode(ended[at : at + _TOGETHER]) for at in range(0, len(ended), _TOGETHER))

    def _encode(self, ended: list[tuple[_OpenGroup, list[Array]]]) -> bytes:
        parts = [part.view(np.void) for _, gathered in ended for part in gathered]
        items = np.concatenate(parts).view(self.layout.schema.item)
        counts = [sum(map(len, gathered)) for _, gathered in ended]
        stops = list(accumulate(counts))
        written = self._packing.pack(items, counts)
        for (group, _), count, stop, data in zip(ended, counts, stops, written, strict=True):
            run = OpenBlock(self.position)
            if group.giant:
                part = items[stop - count : stop]
                seconds = part["time_diff_s"].astype(np.int64) + self._begin_s
                run.add(memoryview(data), normal_hashes(part["key_hash"]), seconds)
            else:
                run.length, run.count, run.crc32 = len(data), count, crc32(data)
            group.runs.append(run)
            group.crc32 = run.crc32 if len(group.runs) == 1 else crc32(data, group.crc32)
            self.position += len(data)
        return b"".join(written)

    def _directory(self) -> Directory:
        """Return the directory. A group of one run has no row in the block table."""
        groups = np.zeros(len(self._groups), GROUP_DTYPE)
        groups["first_slot"] = [group.first_slot for group in self._groups]
        groups["first_slot"][:1] = self.slot_range[0]
        groups["offset"] = [group.runs[0].offset for group in self._groups]
        groups["length"] = [sum(run.length for run in group.runs) for group in self._groups]
        groups["count"] = [sum(run.count for run in group.runs) for group in self._groups]
        groups["crc32"] = [group.crc32 for group in self._groups]
        cut = [group.runs if len(group.runs) > 1 else [] for group in self._groups]
        number = np.array([len(blocks) for blocks in cut], np.int64)
        groups["blocks"] = number
        groups["first_block"] = np.where(number > 0, np.cumsum(number) - number, 0)
        return Directory(groups, block_table(chain.from_iterable(cut)))
