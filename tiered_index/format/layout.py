"""The geometry of index files: positions, magics and limits, the slot of each hash, and the order of entries by slot.

All numbers are big-endian. The slots of every map rise with `hash_rank`. So all files and tables of an index have the
same order, and tables are merged without a shuffle. Slots are filled about evenly, so entries are placed by counting.
Only entries that share a slot are sorted. SPEC.md sections 2 to 4 and 10. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from tiered_index.base.documents import reader_of
from tiered_index.base.kernels import compiled
from tiered_index.errors import ConfigError, CorruptFile
from tiered_index.format.keys.hashing import HashRule, normal_hashes
from tiered_index.format.schema import KEYED_SCHEMA, ROCKETMQ_SCHEMA, Schema, read_schema

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
# entries that are compared, or sorted by all of their columns, at a time
_PIECE = 1 << 16

HEADER_SIZE = 28
# 0 magic | 4 begin timestamp, ms | 12 end timestamp, ms | 20 slots in use | 24 items
_HEADER = struct.Struct(">IqqiI")
# Unsealed: i32 newest entry's index, i32 zero; compacted: i32 absolute byte position, i32 length in bytes
SLOT_SIZE = 8
# Slots hold byte positions as i32
_MAX_POSITION = 2**31 - 1
MOST_ITEMS = 1 << 14
"""Most items of a packed run: 256 KiB of unpacked items are fewer."""


class Preset(Enum):
    """A family of files: its magics, order within a slot, and default schema and geometry."""

    # Magics "TIXU" and "TIXC". Entries are by hash within a slot, and in answer order within a hash.
    native = "native", 0x54495855, 0x54495843, False, KEYED_SCHEMA, 1_000_000, 4_000_000
    # The same bytes as RocketMQ's (`IndexStoreFile`): within a slot the entry that was inserted last comes first.
    rocketmq = "rocketmq", 0xBCC50289, 0xBCC50285, True, ROCKETMQ_SCHEMA, 5_000_000, 20_000_000

    begin_magic: int
    end_magic: int
    newest_first: bool
    schema: Schema
    slots: int
    items: int

    def __new__(cls, name: str, *values: Any) -> Preset:
        """Return the preset whose stored value is its name."""
        preset = object.__new__(cls)
        preset._value_ = name
        preset.begin_magic, preset.end_magic, preset.newest_first, preset.schema, preset.slots, preset.items = values
        return preset


NATIVE, ROCKETMQ = Preset.native, Preset.rocketmq
PRESETS = {preset.name: preset for preset in Preset}
# The magic of shards of window tables, with any preset: "TIXS".
SHARD_MAGIC = 0x54495853
_MAGICS = {SHARD_MAGIC, *(magic for preset in PRESETS.values() for magic in (preset.begin_magic, preset.end_magic))}


class Header(NamedTuple):
    """The first 28 bytes of a file."""

    magic: int
    begin_ms: int
    end_ms: int
    slots_in_use: int
    items: int

    def pack(self) -> bytes:
        """Return the header's 28 bytes."""
        return _HEADER.pack(*self)


class Layout(Struct, frozen=True, dict=True):
    """The geometry of one file: `slots` hash slots and space for `items` entries. Entry 0 is never used.

    `hash` is the hash rule of its keys. In the layout of an index it is the rule of new files.
    """

    preset: Preset
    schema: Schema
    slots: Annotated[int, Meta(ge=1, le=2**28)]
    items: Annotated[int, Meta(ge=2, le=2**30)]
    hash: HashRule = "abs"

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 2**28:
            raise ConfigError(f"slots must be between 1 and {2**28}, not {self.slots}")
        if not 2 <= self.items <= 2**30:
            raise ConfigError(f"items must be between 2 and {2**30}, not {self.items}")
        if self.preset is ROCKETMQ and self.schema != ROCKETMQ_SCHEMA:
            raise ConfigError(
                f"preset rocketmq stores IndexItem only, not {self.schema.name}: RocketMQ could not read the file"
            )
        if self.hash != "abs" and self.preset is not ROCKETMQ:
            raise ConfigError(
                f"hash = {self.hash} is for preset rocketmq: set that, too, since {self.preset.name} has abs"
            )
        if self.compacted_size(self.capacity) > _MAX_POSITION:
            raise ConfigError(
                f"{self.slots:,} slots and {self.items:,} items of {self.schema.item.itemsize} bytes make a compacted "
                f"file of {self.compacted_size(self.capacity):,} bytes; the format's limit is {_MAX_POSITION:,}"
            )

    @property
    def capacity(self) -> int:
        """Most entries: one less than `items`, because index 0 ends every chain."""
        return self.items - 1

    @cached_property
    def items_position(self) -> int:
        """Byte position of entry 0 (unsealed) and of the first array (compacted)."""
        return HEADER_SIZE + SLOT_SIZE * self.slots

    @cached_property
    def unsealed_size(self) -> int:
        """The size of an unsealed file in bytes."""
        return self.items_position + self.schema.entry.itemsize * self.items

    def entry_position(self, index: int) -> int:
        """Return the byte position of entry `index` of an unsealed file."""
        return self.items_position + self.schema.entry.itemsize * index

    def compacted_size(self, count: int) -> int:
        """Return the bytes of header, slots and arrays of a compacted file of `count` entries, without the trailer."""
        return self.items_position + self.schema.item.itemsize * count

    def to_json(self) -> dict[str, Any]:
        """Return the layout as stored in journals and trailers; without the hash rule if that is ``abs``."""
        stored = {"preset": self.preset.name, "schema": self.schema.to_json(), "slots": self.slots, "items": self.items}
        return stored if self.hash == "abs" else {**stored, "hash": self.hash}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Layout:
        """Return the layout of a document of `to_json`. Raises `ConfigError` or `SchemaMismatch` if it is invalid."""
        try:
            layout: Layout = reader_of(Layout, read_schema)(document)
        # RecursionError: the document is nested as deeply as its parser allowed
        except (msgspec.ValidationError, RecursionError) as error:
            raise ConfigError(f"not a layout: {error}") from error
        return layout


def read_header(data: bytes | memoryview, file: str) -> Header:
    """Return the header at the start of `data`. Raises `CorruptFile` if `data` is too short or the magic is unknown."""
    if len(data) < HEADER_SIZE:
        raise CorruptFile(file, "shorter than a header", expected=HEADER_SIZE, found=len(data))
    header = Header(*_HEADER.unpack_from(data))
    if header.magic not in _MAGICS:
        raise CorruptFile(file, "wrong magic", offset=0, expected=[f"{m:#x}" for m in sorted(_MAGICS)])
    return header


class SlotMap(Struct, frozen=True):
    """Maps hashes to slots: each base slot is split into `split` slots, or `join` neighbours are joined to one.

    At least one of `split` and `join` is 1.
    """

    base: Annotated[int, Meta(ge=1, le=2**28)]
    split: Annotated[int, Meta(ge=1, le=2**31)] = 1
    join: Annotated[int, Meta(ge=1, le=2**28)] = 1

    def __post_init__(self) -> None:
        if self.base < 1 or self.split < 1 or self.join < 1 or (self.split > 1 and self.join > 1):
            raise ConfigError(f"impossible slot map: base {self.base}, split {self.split}, join {self.join}")
        if self.split > self.quotients:
            raise ConfigError(f"{self.base} base slots can be split by at most {self.quotients}, not by {self.split}")

    @property
    def quotients(self) -> int:
        """Q: the most different hashes of a base slot."""
        return (2**31 - 1) // self.base + 1

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.base * self.split if self.join == 1 else -(-self.base // self.join)

    def slots_of(self, hashes: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the slots (i64, n) of normal hashes (n), which are 0 to 2**31 - 1."""
        above, base_slots = divided(hashes, self.base)
        return self._slot(above.astype(np.int64), base_slots.astype(np.int64))  # type: ignore[no-any-return]

    def slot_of(self, key_hash: int) -> int:
        """Return the slot of one normal hash."""
        return self._slot(*divmod(key_hash, self.base))  # type: ignore[no-any-return]

    def _slot(self, above: Any, base_slot: Any) -> Any:
        if self.join > 1:
            return base_slot // self.join
        return base_slot if self.split == 1 else base_slot * self.split + above * self.split // self.quotients

    def slots_of_base(self, low: int, high: int) -> tuple[int, int]:
        """Return the half-open range of slots that hold the base slots [low, high), and perhaps others if joined."""
        if self.join > 1:
            return low // self.join, -(-high // self.join)
        return low * self.split, high * self.split

    def to_json(self) -> dict[str, Any]:
        """Return the map as stored."""
        return {"base": self.base, "split": self.split, "join": self.join}

    @classmethod
    def for_count(cls, base: int, count: int) -> SlotMap:
        """Return the map with about 4 entries per slot for `count` entries."""
        wanted = max(1, count // 4)
        if wanted >= base:
            return cls(base, split=min(wanted // base, (2**31 - 1) // base + 1))
        # powers of two, so that a border between slots of one map is also a border of any map with fewer joined slots
        return cls(base, join=1 << (base // wanted).bit_length() - 1)


def by_slot(entries: Array, slots: int, room: UInt64) -> tuple[npt.NDArray[np.int32], Int64]:
    """Return entry numbers (i32, n) by slot, newest first within a slot, and the entries of each slot (i64, `slots`).

    `entries` (structured, n) are in order of insertion. The core uses `room` (n). Memory: 4 bytes per entry; in NumPy
    20.
    """
    if (loops := compiled()) is None:
        slot_of = normal_hashes(entries["key_hash"]).view(np.uint32) % np.uint32(slots)
        order = (len(slot_of) - 1 - np.argsort(slot_of[::-1], kind="stable")).astype(np.int32)
        return order, np.bincount(slot_of, minlength=slots)
    order, counts = np.empty(len(entries), np.int32), np.empty(slots, np.int64)
    loops.place_by_slot(entries.view(np.uint8), entries.itemsize, slots, room, order, counts)
    return order, counts


def hash_rank(hashes: npt.NDArray[np.int32], slots: int) -> npt.NDArray[np.uint64]:
    """Return the rank (u64, n) of normal hashes (n): hash % slots * q + hash // slots, q = (2**31 - 1) // slots + 1."""
    above, slot = divided(hashes, slots)
    return (slot * np.uint32((2**31 - 1) // slots + 1) + above).astype(np.uint64)


def divided(hashes: npt.NDArray[np.int32], slots: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return quotient and remainder (u32, n each) of normal hashes (n) by the number of slots.

    NumPy's `//` of unsigned numbers takes a tenth of the time of its `divmod` and `%`.
    """
    unsigned, by = hashes.astype(np.uint32), np.uint32(slots)
    above = unsigned // by
    return above, unsigned - above * by


def pieces_of(starts: Int64, counts: Int64, total: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield ranges (start, stop, is_giant) that cover `total` places, each less than 2 * `size` long.

    A slot of more than `size` entries is a giant: ranges end at its borders and may end within it. No other slot is
    cut. `starts` and `counts` have the first place and the number of entries of each slot.
    """
    giants = np.flatnonzero(counts > size)
    targets = np.arange(size, total, size)
    slots = np.searchsorted(starts, targets, "right") - 1
    cuts = np.where(counts[slots] > size, targets, starts[slots])
    edges = np.unique(np.concatenate((cuts, starts[giants], starts[giants] + counts[giants], [0, total])))
    slots = np.searchsorted(starts, edges[:-1], "right") - 1
    yield from zip(edges[:-1].tolist(), edges[1:].tolist(), (counts[slots] > size).tolist(), strict=True)


def order_chunk(items: Array, layout: Layout) -> Int64:
    """Return the permutation (i64, n) for the order of a file, of items of whole slots, newest first in each."""
    ranks, differences = hash_rank(normal_hashes(items["key_hash"]), layout.slots), items["time_diff_s"]
    # among equal entries, the one that was put first comes first
    return answer_order(
        ranks, differences.astype(np.int64), lambda places: [~places, *offset_columns(items[places], layout.schema)]
    )


def order_giant(entries: Array, numbers: npt.NDArray[np.int32], layout: Layout) -> None:
    """Sort one slot's entry numbers (i32, n, newest first) in place, by hash and in answer order.

    Entries of a key that were put in the order of their times and offsets are sorted already. They are only compared,
    in pieces. Memory: 12 bytes per entry; 48 per entry of a key whose entries must be sorted, and one piece.
    """
    above = np.empty(len(numbers), np.uint32)
    for at in range(0, len(numbers), _PIECE):
        hashes = normal_hashes(entries["key_hash"][numbers[at : at + _PIECE]])
        above[at : at + _PIECE] = divided(hashes, layout.slots)[0]
    if (above[1:] < above[:-1]).any():
        order = np.argsort(above, kind="stable")
        numbers[:], above = numbers[order], above[order]
        del order
    ends = np.append(np.flatnonzero(above[1:] != above[:-1]) + 1, len(numbers))
    del above
    begin = 0
    for end in ends.tolist():
        run = numbers[begin:end]
        if not _is_ordered(entries, run, layout):
            seconds = entries["time_diff_s"][run].astype(np.int64)
            ranks = np.broadcast_to(np.uint64(0), len(run))
            run[:] = run[answer_order(ranks, seconds, partial(_columns_of, entries, run, layout))]
        begin = end


def _columns_of(entries: Array, numbers: Array, layout: Layout, places: Int64) -> list[Array]:
    """Return the columns that order the entries with some of `numbers` if their seconds are equal."""
    picked = numbers[places]
    names = [*layout.schema.identity_extra, "queue_id", "offset"]
    columns = {name: entries[name][picked] for name in names}
    return [picked, *offset_columns(columns, layout.schema)]


def _is_ordered(entries: Array, numbers: Array, layout: Layout) -> bool:
    """Return whether entries of one hash are in answer order."""
    for at in range(0, len(numbers) - 1, _PIECE):
        piece = numbers[at : at + _PIECE + 1]
        seconds = entries["time_diff_s"][piece].astype(np.int64)
        equal = np.ones(len(piece) - 1, bool)
        for column in reversed([*_columns_of(entries, piece, layout, np.arange(len(piece))), -seconds]):
            if (equal & (column[1:] < column[:-1])).any():
                return False
            equal &= column[1:] == column[:-1]
    return True


def answer_order(ranks: npt.NDArray[np.uint64], seconds: Int64, more: Callable[[Int64], Sequence[Array]]) -> Int64:
    """Return the permutation (i64, n) that sorts by rank (`hash_rank`, n), second (n, newest first), then `more`.

    `more(places)` returns further columns for the rows at some places (i64), the most significant one last. It is
    called only for rows whose rank and second are equal. Memory: 32 bytes per row, and one piece of those.
    """
    if not len(ranks):
        return np.zeros(0, np.int64)
    # seconds that are too old for 32 bits are equal here, and sorted below
    keys = (int(seconds.max()) - seconds).clip(0, int(_LOW)).astype(np.uint64)
    keys |= ranks << _SHIFT
    # a stable sort merges sorted runs, as a merge of files has them; it is the slower one for other keys
    falls = np.count_nonzero(keys[1:] < keys[:-1])
    order = np.argsort(keys, kind="stable" if falls < len(keys) >> 4 else None)
    keys = keys[order]
    equal = keys[1:] == keys[:-1]
    if equal.any():
        tied = np.zeros(len(keys), bool)
        tied[1:] |= equal
        tied[:-1] |= equal
        places = np.flatnonzero(tied)
        begins = np.flatnonzero(np.append(True, keys[places[1:]] != keys[places[:-1]]))
        # in pieces of whole runs of equal keys
        cuts = [0, *begins[np.flatnonzero(np.diff(begins // _PIECE)) + 1].tolist(), len(places)]
        for low, high in pairwise(cuts):
            part = places[low:high]
            picked = order[part]
            order[part] = picked[np.lexsort([*more(picked), -seconds[picked], keys[part]])]
    return order


def offset_columns(items: Array | dict[str, Array], schema: Schema) -> list[Array]:
    """Return the columns that order items of the same second, the most significant one last."""
    columns = [items[name].astype(items[name].dtype.newbyteorder("=")) for name in reversed(schema.identity_extra)]
    return [*columns, items["queue_id"].astype(np.int32), ~items["offset"].astype(np.int64)]
