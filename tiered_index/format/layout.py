"""Positions, magics and limits of index files. All numbers are big-endian. SPEC.md sections 2 to 4. Pure."""

from __future__ import annotations

import struct
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from tiered_index.base.documents import reader_of
from tiered_index.errors import ConfigError, CorruptFile
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.schema import KEYED_SCHEMA, ROCKETMQ_SCHEMA, Schema, read_schema

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
