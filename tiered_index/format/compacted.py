"""Compaction: rewrites a sealed file's chains as one contiguous array per slot, and adds a trailer.

Memory:

- 12 bytes per entry, 24 per slot, and one piece of less than 2 * `CHUNK` items
- native order: 12 bytes per entry of the largest slot, if that has more than `CHUNK` entries; 48 if it must be sorted
- at the end, for the filter: 16 bytes per entry and 16 per slot

Pure; one thread. SPEC.md sections 4, 6 and 11. It follows RocketMQ's `IndexStoreFile.compactToNewFile`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled, crc32
from tiered_index.errors import InvalidArgument
from tiered_index.format.keys.bloom import FilterBuilder, filter_hashes
from tiered_index.format.keys.distinct import distinct_numbers
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import HEADER_SIZE, Header, Layout, by_slot, order_chunk, order_giant, pieces_of
from tiered_index.format.metadata import (
    Metadata,
    Positions,
    Predecessor,
    Topics,
    TopicStats,
    add_topic_stats,
    topic_stats,
)
from tiered_index.format.packed import Packing, PackingOptions, is_packed
from tiered_index.format.schema import Schema
from tiered_index.format.topic_documents import Documents, stored_documents
from tiered_index.format.trailer import GROUP_DTYPE, Directory, OpenBlock, block_table, build_trailer

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
# Items gathered at a time (2 MiB of native items): they fit the CPU cache and hold the interpreter lock only briefly
CHUNK = 1 << 16
# A slot group ends before the slot whose array starts 16 KiB or more after the previous multiple of 16 KiB
GROUP_BYTES = 16 * 1024
# Entries whose statistics are made at a time
_COUNTED = 1 << 22
# A group longer than this is cut into blocks of at most this many bytes
BLOCK_BYTES = 256 * 1024


class Compaction:
    """The compacted form of one file's entries.

    `entries` (structured, n) are verified entries in order of insertion, in a memory map or in memory. `begin_ms` and
    `end_ms` are those of the header. Packed files (`is_packed`) have no slot table. `filter_` is the result of
    `filter_of` for the entries, if it is known. Raises `InvalidArgument` for no entries.
    """

    def __init__(self, entries: Array, layout: Layout, begin_ms: int, end_ms: int, *, filter_: bytes = b"") -> None:
        n = len(entries)
        if not n:
            raise InvalidArgument("cannot compact a file without entries")
        self._entries = entries
        self.layout = layout
        self.count = n
        stats: list[TopicStats] = []
        for start in range(0, n, _COUNTED):
            rows = entries[start : start + _COUNTED]
            stats += topic_stats(rows["topic_id"], rows["size"], rows["time_diff_s"])
        begin_s = begin_ms // 1000
        self._topic_stats = [
            replace(topic, second_min=begin_s + topic.second_min, second_max=begin_s + topic.second_max)
            for topic in add_topic_stats(stats)
        ]
        # used twice, because new pages cost time
        self._room = np.empty(n, np.uint64)
        self._order, counts = by_slot(entries, layout.slots, self._room)
        self._counts = counts
        self._first = np.cumsum(counts)
        self._first -= counts
        if not layout.preset.newest_first:
            # sorted here because pieces may cut these slots; other slots are sorted piece by piece
            for slot in np.flatnonzero(counts > CHUNK):
                order_giant(entries, self._order[self._first[slot] : self._first[slot] + counts[slot]], layout)
        self.slots_in_use = int(np.count_nonzero(counts))
        self.header = Header(layout.preset.end_magic, begin_ms, end_ms, self.slots_in_use, n)
        self.second_min = min(topic.second_min for topic in self._topic_stats)
        self.second_max = max(topic.second_max for topic in self._topic_stats)
        ids = [topic.topic_id for topic in self._topic_stats]
        self._options = PackingOptions.of(entries, ids, n) if is_packed(layout.preset, is_shard=False) else None
        self.directory: Directory | None = None
        self.filter_bytes = filter_

    def slot_table(self) -> memoryview:
        """Return the slot table's bytes: position and length of each slot's array, even if it is empty."""
        table = np.empty((self.layout.slots, 2), ">i4")
        item_size = self.layout.schema.item.itemsize
        table[:, 0] = self._first * item_size + self.layout.items_position
        table[:, 1] = self._counts * item_size
        return memoryview(table.reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def arrays(self) -> Iterator[memoryview | bytes]:
        """Yield the bytes of the arrays, less than 2 * `CHUNK` items at a time. Call it once.

        At the end it sets `directory` and `filter_bytes`.
        """
        held = None if self.filter_bytes else FilterBuilder(self._room)
        del self._room
        yield from self._written(self._ordered(held))
        # frees 4 bytes per entry before the filter is built
        del self._order
        if held is not None:
            self.filter_bytes = held.build()

    def pieces(self, **about: Any) -> Iterator[bytes | memoryview]:
        """Yield the whole file: header, slot table, arrays and trailer. `about` has further fields of the metadata."""
        header, slots_crc32 = self.header.pack(), 0
        more = {**about.pop("more", {}), "topic_stats": list(map(astuple, self._topic_stats))}
        yield header
        if self._options is None:
            table = self.slot_table()
            slots_crc32 = crc32(table)
            yield table
            del table
        else:
            more["packed"] = self._options.to_json()
        yield from self.arrays()
        assert self.directory is not None
        metadata = Metadata(
            layout=self.layout,
            count=self.count,
            begin_ms=self.header.begin_ms,
            end_ms=self.header.end_ms,
            second_min=self.second_min,
            second_max=self.second_max,
            slots_in_use=self.slots_in_use,
            header_crc32=crc32(header),
            slots_crc32=slots_crc32,
            more=more,
            **{"slot_base": self.layout.slots, "slot_range": (0, self.layout.slots), **about},
        )
        last = self.directory.groups[-1]
        yield build_trailer(int(last["offset"]) + int(last["length"]), self.directory, metadata, self.filter_bytes)

    def _ordered(self, held: FilterBuilder | None) -> Iterator[Array]:
        """Yield the items in the order of the file, in pieces of less than 2 * `CHUNK`. `held` gets their keys.

        Other threads run between pieces.
        """
        for start, stop, is_giant in pieces_of(self._first, self._counts, self.count, CHUNK):
            order, is_ordered = self._order[start:stop], is_giant or self.layout.preset.newest_first
            items = None if is_ordered else self._gathered(order, held, self.layout.slots)
            if items is None:
                items = self._gathered(order, held)
                assert items is not None
                if not is_ordered:
                    items = items.take(order_chunk(items, self.layout))
            yield items

    def _gathered(self, order: npt.NDArray[np.int32], held: FilterBuilder | None, slots: int = 0) -> Array | None:
        """Return the items of the entries `order`. `held` gets their keys.

        `slots`: these are whole slots, to be sorted for the order of the file. None: only `order_chunk` can sort them.
        """
        schema = self.layout.schema
        if (loops := compiled()) is not None:
            fingerprint = schema.item.fields["fingerprint"][1] if schema.keyed and schema.item.fields else -1
            rows = np.empty((len(order), schema.item.itemsize), np.uint8)
            hashes = np.empty(0 if held is None else len(order), np.uint64)
            entries = self._entries.view(np.uint8)
            count = loops.gather(entries, self._entries.itemsize, order, slots, fingerprint, rows, hashes)
            if count < 0:
                return None
            if held is not None:
                held.add(hashes[:count], are_distinct=slots > 0)
            return np.ndarray(len(order), schema.item, rows)
        if slots:
            return None
        # `take` on a void dtype copies whole records
        picked = self._entries.view(np.dtype((np.void, schema.entry.itemsize))).take(order)
        rows = np.ascontiguousarray(picked.view(np.uint8).reshape(len(order), -1)[:, : schema.item.itemsize])
        items = np.ndarray(len(order), schema.item, rows)
        if held is not None:
            held.add(filter_hashes(items["key_hash"], items["fingerprint"] if schema.keyed else None))
        return items

    def _written(self, pieces: Iterator[Array]) -> Iterator[bytes | memoryview]:
        """Yield the runs of each piece, packed or plain. Sets `directory`.

        The items behind the last whole run of a piece wait for the next piece.
        """
        schema, options = self.layout.schema, self._options
        packing = None if options is None else Packing(schema, self.layout.slots, options)
        groups, owners, begins = self._runs()
        ends, blocks_of = np.append(begins[1:], self.count), groups["blocks"].tolist()
        lengths, crc32s, blocks = [0] * len(groups), [0] * len(groups), []
        begin = self.layout.items_position if packing is None else HEADER_SIZE
        position, low = begin, 0
        waiting = np.empty(0, schema.item)
        for piece in pieces:
            items = np.concatenate([waiting.view(np.void), piece.view(np.void)]).view(schema.item)
            start = int(begins[low])
            high = int(np.searchsorted(ends, start + len(items), "right"))
            counts = (ends[low:high] - begins[low:high]).tolist()
            stops = (ends[low:high] - start).tolist()
            end = stops[-1] if stops else 0
            written: Sequence[bytes | memoryview]
            if packing is not None:
                written = packing.pack(items[:end], counts)
                yield b"".join(written)
            else:
                flat = memoryview(items[:end].view(np.uint8))  # type: ignore[arg-type]
                sizes = [schema.item.itemsize * stop for stop in (0, *stops)]
                written = [flat[start:stop] for start, stop in itertools.pairwise(sizes)]
                yield flat
            for owner, count, stop, data in zip(owners[low:high].tolist(), counts, stops, written, strict=True):
                if blocks_of[owner]:
                    part = items[stop - count : stop]
                    seconds = part["time_diff_s"].astype(np.int64) + self.header.begin_ms // 1000
                    blocks.append(OpenBlock(position))
                    blocks[-1].add(memoryview(data), normal_hashes(part["key_hash"]), seconds)
                crc32s[owner] = crc32(data, crc32s[owner])
                lengths[owner] += len(data)
                position += len(data)
            low, waiting = high, items[end:]
        groups["length"], groups["crc32"] = lengths, crc32s
        groups["offset"] = begin + np.cumsum([0, *lengths[:-1]])
        self.directory = Directory(groups, block_table(blocks))

    def _runs(self) -> tuple[Array, Int64, Int64]:
        """Return the group table without places and CRCs, each run's group (i64, m), and its first item (i64, m)."""
        # A group starts where floor(start / 16 KiB) changes, and at each slot of 16 KiB or more. So a giant slot shares
        # no group with others.
        item_size = self.layout.schema.item.itemsize
        borders = np.arange(GROUP_BYTES, self.count * item_size + 1, GROUP_BYTES)
        behind = np.searchsorted(self._first, -(-borders // item_size))
        large = np.flatnonzero(self._counts >= -(-GROUP_BYTES // item_size))
        first_slots = distinct_numbers(np.concatenate(([0], behind[behind < self.layout.slots], large)))
        firsts = self._first[first_slots]
        counts = np.diff(firsts, append=self.count)
        groups = np.zeros(len(firsts), GROUP_DTYPE)
        groups["first_slot"], groups["count"] = first_slots, counts
        per_block = BLOCK_BYTES // item_size
        runs = -(-counts // per_block)
        blocks = np.where(runs > 1, runs, 0)
        groups["blocks"], groups["first_block"] = blocks, np.where(runs > 1, np.cumsum(blocks) - blocks, 0)
        owners = np.repeat(np.arange(len(groups)), runs)
        return groups, owners, firsts[owners] + per_block * (np.arange(len(owners)) - (np.cumsum(runs) - runs)[owners])


def filter_of(entries: Array, schema: Schema) -> bytes:
    """Return the filter of the keys of entries: that of their compacted file. Memory: 16 bytes per entry."""
    held = FilterBuilder(np.empty(len(entries), np.uint64))
    for start in range(0, len(entries), CHUNK):
        part = entries[start : start + CHUNK]
        held.add(filter_hashes(part["key_hash"], part["fingerprint"] if schema.keyed else None))
    return held.build()


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    """The parts of a sealed file, other than its entries, that compaction needs.

    Times are epoch milliseconds. `created_ms` is the time when the file was created. `log_number` is the number of a
    log record before all records that name the file.
    """

    file_id: str
    layout: Layout
    begin_ms: int
    end_ms: int
    lane: str
    sequence: int
    predecessor: Predecessor | None
    created_ms: int
    offset_space: str
    topics: Topics
    positions: Positions
    writer: str
    log_number: int
    documents: Documents

    def compacted(self, entries: npt.NDArray[Any], filter_: bytes = b"") -> Iterator[bytes | memoryview]:
        """Yield the compacted file in pieces, the trailer last. `entries` and `filter_` are those of `Compaction`."""
        times = self.begin_ms, self.end_ms
        return Compaction(entries, self.layout, *times, filter_=filter_).pieces(
            file_id=self.file_id,
            topics=self.topics,
            source_positions=self.positions,
            lane=self.lane,
            offset_space=self.offset_space,
            writer=self.writer,
            more={name: getattr(self, name) for name in _MORE}
            | ({"documents": stored_documents(self.documents)} if self.documents else {}),
        )


# Fields of the metadata that only whole files have
_MORE = ("sequence", "predecessor", "created_ms", "log_number")
