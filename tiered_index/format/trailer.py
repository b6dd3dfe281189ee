"""The trailer of compacted files and shards: ``[filter][directory][metadata][tail]``. SPEC.md section 6.

The directory has the place and the CRC32 of each *slot group* (the arrays of neighbouring slots, about 16 KiB). A group
of more than 256 KiB is cut into *blocks*, each with its own CRC32. A *run* is a block, or a group that is not cut. It
is the unit of reading and verifying. Pure; any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled_views, crc32
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.layout import HEADER_SIZE, MOST_ITEMS
from tiered_index.format.metadata import Metadata
from tiered_index.format.schema import row_form

if TYPE_CHECKING:
    from tiered_index.base._views import LocalFile

FORMAT_VERSION = 6
TAIL_MAGIC = b"TIXTAIL\n"
# 0 magic | 8 version | 12 reserved | 16 trailer position | 24 filter length | 32 directory length | 40 metadata length
# 48 filter CRC32 | 52 directory CRC32 | 56 metadata CRC32 | 60 CRC32 of bytes 0..59
_TAIL = struct.Struct(">8sIIQQQQIIII")
TAIL_SIZE = _TAIL.size
# Number of groups | number of blocks
_DIRECTORY = struct.Struct(">II")

# A slot group: items of slots [first_slot, the next group's first_slot); `offset` and `length` are in bytes. It has
# `blocks` rows in the block table, from `first_block` on; `blocks` is 0 unless the group is cut.
GROUP_DTYPE = np.dtype(
    [
        ("first_slot", ">u4"),
        ("count", ">u4"),
        ("offset", ">u8"),
        ("length", ">u4"),
        ("crc32", ">u4"),
        ("first_block", ">u4"),
        ("blocks", ">u4"),
    ]
)
_GROUP = struct.Struct(">IIQIIII")
# A block of a group of more than 256 KiB, with inclusive bounds of its hashes and epoch seconds.
BLOCK_DTYPE = np.dtype(
    [
        ("offset", ">u8"),
        ("length", ">u4"),
        ("count", ">u4"),
        ("crc32", ">u4"),
        ("hash_min", ">i4"),
        ("hash_max", ">i4"),
        ("second_min", ">i8"),
        ("second_max", ">i8"),
    ]
)

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Run:
    """A range to read and to verify: byte position in the file, length in bytes, CRC32, number of items.

    The seconds are inclusive bounds of a block's items; for a group they exclude nothing. Never change a run. It is not
    frozen, because a batch makes thousands, and frozen ones take four times as long to make.
    """

    offset: int
    length: int
    crc32: int
    count: int
    second_min: int = -(2**62)
    second_max: int = 2**62


@dataclass(slots=True)
class OpenBlock:
    """A row of the block table under construction. `add` its items piece by piece."""

    offset: int
    length: int = 0
    count: int = 0
    crc32: int = 0
    hash_min: int = 2**31 - 1
    hash_max: int = -(2**31)
    second_min: int = 2**63 - 1
    second_max: int = -(2**63)

    def add(self, data: memoryview, hashes: npt.NDArray[np.int32], seconds: npt.NDArray[np.int64]) -> None:
        """Append items: their bytes, normal hashes (n) and epoch seconds (n)."""
        self.length += len(data)
        self.count += len(hashes)
        self.crc32 = crc32(data, self.crc32)
        self.hash_min, self.hash_max = min(self.hash_min, int(hashes.min())), max(self.hash_max, int(hashes.max()))
        self.second_min = min(self.second_min, int(seconds.min()))
        self.second_max = max(self.second_max, int(seconds.max()))


def block_table(blocks: Iterable[OpenBlock]) -> Array:
    """Return the rows (`BLOCK_DTYPE`, n) of finished blocks."""
    return np.array([astuple(block) for block in blocks], BLOCK_DTYPE)


@dataclass(frozen=True)
class Directory:
    """Slot groups (`GROUP_DTYPE`, n) in order of slot, and the blocks (`BLOCK_DTYPE`, m) of those that are cut."""

    groups: Array
    blocks: Array

    @cached_property
    def _first_slots(self) -> npt.NDArray[np.int64]:
        # contiguous and native, because `searchsorted` on the table would convert the whole column at each call
        return self.groups["first_slot"].astype(np.int64)

    @cached_property
    def group_bytes(self) -> npt.NDArray[np.uint8]:
        """The rows of `groups` as bytes, which are faster to read than records."""
        return self.groups.view(np.uint8)

    def encode(self) -> bytes:
        """Return the directory's bytes."""
        return _DIRECTORY.pack(len(self.groups), len(self.blocks)) + self.groups.tobytes() + self.blocks.tobytes()

    @classmethod
    def decode(cls, data: bytes | memoryview, file: str) -> Directory:
        """Return the directory in `data`, which has passed its CRC. Raises `CorruptFile` if lengths disagree."""
        if len(data) < _DIRECTORY.size:
            raise CorruptFile(file, "directory too short", expected=_DIRECTORY.size, found=len(data))
        groups, blocks = _DIRECTORY.unpack_from(data)
        expected = _DIRECTORY.size + groups * GROUP_DTYPE.itemsize + blocks * BLOCK_DTYPE.itemsize
        if len(data) != expected:
            raise CorruptFile(file, "directory length does not match its counts", expected=expected, found=len(data))
        table = np.frombuffer(data, GROUP_DTYPE, groups, _DIRECTORY.size)
        return cls(table, np.frombuffer(data, BLOCK_DTYPE, blocks, _DIRECTORY.size + table.nbytes))

    def check(self, metadata: Metadata, end: int, file: str) -> None:
        """Raise `CorruptFile` unless groups and blocks cover the arrays of `metadata`, up to byte `end`, once."""
        groups, blocks = self.groups, self.blocks
        low, high = metadata.slot_range if metadata.is_shard else (0, metadata.layout.slots)
        size = None if metadata.packing is not None else metadata.layout.schema.item.itemsize
        first = self._first_slots
        if not len(groups) or first[0] != low or first[-1] >= high or (first[1:] <= first[:-1]).any():
            raise CorruptFile(file, f"directory's groups do not rise from slot {low} to {high}")
        begins, ends = _cover(groups, size, "groups", file)
        counts = groups["count"].astype(np.int64)
        CorruptFile.unless_equal(file, "the directory has another number of items", metadata.count, int(counts.sum()))
        first_item = HEADER_SIZE if size is None else end - size * metadata.count
        if begins[0] != first_item or ends[-1] != end or (begins[1:] != ends[:-1]).any():
            raise CorruptFile(file, "directory's groups do not cover the items, each once")
        cut = np.flatnonzero(groups["blocks"])
        number = groups["blocks"][cut].astype(np.int64)
        firsts = np.cumsum(number) - number
        if number.sum() != len(blocks) or (groups["first_block"][cut] != firsts).any():
            problem = "the directory's groups name other blocks than it has"
            raise CorruptFile(file, problem, expected=int(number.sum()), found=len(blocks))
        runs = np.concatenate((counts[groups["blocks"] == 0], blocks["count"].astype(np.int64)))
        if size is None and runs.max() > MOST_ITEMS:
            raise CorruptFile(file, f"directory has packed runs of more than {MOST_ITEMS} items")
        if not len(blocks):
            return
        if (np.add.reduceat(blocks["count"].astype(np.int64), firsts) != counts[cut]).any():
            raise CorruptFile(file, "the directory's blocks and groups differ in the number of items")
        starts, stops = _cover(blocks, size, "blocks", file)
        joined = starts[1:] == stops[:-1]
        joined[firsts[1:] - 1] = True
        if not joined.all() or (starts[firsts] != begins[cut]).any() or (stops[firsts + number - 1] != ends[cut]).any():
            raise CorruptFile(file, "directory's blocks do not cover their groups")
        if not blocks["count"].all() or (blocks["second_min"] > blocks["second_max"]).any():
            raise CorruptFile(file, "directory's blocks are empty, or end before they begin")

    def groups_of(self, slots: Array, first_slot: int, last_slot: int) -> npt.NDArray[np.int64]:
        """Return the group number (i64, n) of each of `slots` (n) in [first_slot, last_slot); -1: none with items."""
        numbers = np.searchsorted(self._first_slots, slots, "right") - 1
        there = (slots >= first_slot) & (slots < last_slot) & (numbers >= 0) & (self.groups["count"][numbers] > 0)
        return np.where(there, numbers, -1)

    def runs_at(self, numbers: Sequence[int]) -> list[Run]:
        """Return the runs of groups, by number, that are not cut."""
        runs = []
        for number in numbers:
            _, count, offset, length, crc32, _, _ = _GROUP.unpack_from(self.group_bytes.data, number * _GROUP.size)
            runs.append(Run(offset, length, crc32, count))
        return runs

    def runs_of(self, slots: Array, second_min: int, second_max: int) -> list[Run]:
        """Return the runs, by position, that have all items of `slots` (n) in the inclusive range of epoch seconds."""
        # One flag per group: marking many slots is much faster than sorting them. Flag 0 is for slots before the first
        # group.
        marked = np.zeros(len(self.groups) + 1, bool)
        marked[np.searchsorted(self._first_slots, slots, "right")] = True
        return self._runs_within(self.groups[marked[1:]], second_min, second_max)

    def runs_between(self, first_slot: int, last_slot: int, second_min: int, second_max: int) -> list[Run]:
        """Return the runs, by position, with all items of slots [first_slot, last_slot) in the inclusive epoch seconds.

        The first and the last run may have items of neighbouring slots, too.
        """
        low = max(0, int(np.searchsorted(self._first_slots, first_slot, "right")) - 1)
        high = int(np.searchsorted(self._first_slots, last_slot, "left"))
        return self._runs_within(self.groups[low:high], second_min, second_max)

    def all_runs(self) -> list[Run]:
        """Return every run of the file, by position: blocks of cut groups, and the other groups."""
        limits = np.iinfo(np.int64)
        return self._runs_within(self.groups, limits.min, limits.max)

    def _runs_within(self, groups: Array, second_min: int, second_max: int) -> list[Run]:
        """Return the runs of rows of the group table; of cut groups only blocks in the inclusive range of seconds."""
        whole = groups[(groups["blocks"] == 0) & (groups["count"] > 0)]
        runs = list(map(Run, *(whole[name].tolist() for name in ("offset", "length", "crc32", "count"))))
        cut = groups[groups["blocks"] > 0]
        for first, number in zip(cut["first_block"].tolist(), cut["blocks"].tolist(), strict=True):
            blocks = self.blocks[first : first + number]
            runs += _runs(blocks[(blocks["second_min"] <= second_max) & (blocks["second_max"] >= second_min)])
        return sorted(runs, key=attrgetter("offset")) if len(cut) else runs

    def blocks_of(self, group: int) -> tuple[Array, list[Run]]:
        """Return the blocks of a cut group by position: their rows of the block table, and their runs."""
        first = int(self.groups["first_block"][group])
        blocks = self.blocks[first : first + int(self.groups["blocks"][group])]
        return blocks, _runs(blocks)


def _cover(table: Array, size: int | None, what: str, file: str) -> tuple[Array, Array]:
    """Return the begin and the end of each row of a table (i64, n each). `size`: bytes of an item; None: packed.

    Raises `CorruptFile` for a length that contradicts the number of items.
    """
    lengths = table["length"].astype(np.int64)
    others = (lengths > 0) != (table["count"] > 0) if size is None else lengths != table["count"] * np.int64(size)
    if (table["offset"] > 2**62).any() or others.any():
        raise CorruptFile(file, f"directory's {what} are not as long as the items that they count")
    begins = table["offset"].astype(np.int64)
    return begins, begins + lengths


def _runs(table: Array) -> list[Run]:
    """Return the runs of the rows of the block table."""
    names = ("offset", "length", "crc32", "count", "second_min", "second_max")
    return list(map(Run, *(table[name].tolist() for name in names)))


class Tail(NamedTuple):
    """The last 64 bytes of a file."""

    position: int
    filter_length: int
    directory_length: int
    metadata_length: int
    filter_crc32: int
    directory_crc32: int
    metadata_crc32: int

    @property
    def file_size(self) -> int:
        """The size of the whole file in bytes, with the tail."""
        return self.position + self.filter_length + self.directory_length + self.metadata_length + TAIL_SIZE

    @property
    def directory_position(self) -> int:
        """The byte position of the directory. Directory, metadata and tail are contiguous, to the end of the file."""
        return self.position + self.filter_length

    def encode(self) -> bytes:
        """Return the tail's bytes."""
        body = _TAIL.pack(TAIL_MAGIC, FORMAT_VERSION, 0, *self, 0)[:-4]
        return body + crc32(body).to_bytes(4, "big")

    @classmethod
    def decode(cls, data: bytes | memoryview, file: str, file_size: int) -> Tail:
        """Return the tail at the end of `data`, the last bytes of a file of `file_size` bytes.

        Raises `CorruptFile` for a missing magic, a wrong CRC, or lengths that contradict `file_size`. Raises
        `UnsupportedVersion` for another version.
        """
        if len(data) < TAIL_SIZE:
            raise CorruptFile(file, "too short for a trailer", expected=TAIL_SIZE, found=len(data))
        raw = bytes(data[-TAIL_SIZE:])
        start = file_size - TAIL_SIZE
        magic, version, reserved, *values, crc = _TAIL.unpack(raw)
        if magic != TAIL_MAGIC:
            raise CorruptFile(file, "no trailer", offset=start, expected=TAIL_MAGIC, found=magic)
        actual = crc32(raw[:-4])
        if actual != crc:
            raise CorruptFile(file, "trailer's CRC32 does not match", offset=start, expected=crc, found=actual)
        UnsupportedVersion.unless_read(file, "trailer", FORMAT_VERSION, version, offset=start + 8)
        CorruptFile.unless_equal(file, "trailer's reserved bytes are not zero", 0, reserved, offset=start + 12)
        tail = cls(*values)
        if tail.file_size != file_size:
            raise CorruptFile(
                file, "trailer's lengths do not add up to the file's size", expected=tail.file_size, found=file_size
            )
        return tail


@dataclass(frozen=True)
class Trailer:
    """A file's verified directory, metadata and tail."""

    tail: Tail
    directory: Directory
    metadata: Metadata
    # the result of `core_view`
    _view: Any = field(default=None, init=False, repr=False, compare=False)

    def core_view(self) -> Any:
        """Return the compiled core's `View` of the file, whose runs the caller reads. Any thread.

        None: there is no core, or it can't search the file.
        """
        if (core := compiled_views()) is None:
            return None
        if self._view is None:
            metadata = self.metadata
            slots = metadata.slot_map
            # a batch is searched by one hash of each key, whatever the rule
            file = core.LocalFile(row_form(metadata.layout.schema), None, None, 0, 0, slots.base)
            of_shard = (slots.split, slots.join, *metadata.slot_range) if metadata.is_shard else None
            interval = metadata.second_min, metadata.second_max
            file.from_source(_OpenSource, *interval, of_shard)
            if self.give_to(file) is None:
                return None
            object.__setattr__(self, "_view", core.View(row_form(metadata.layout.schema), [(file, *interval)], [file]))
        return self._view

    def give_to(self, file: LocalFile) -> bool | None:
        """Give the compiled core's file its directory. Return whether it was closed; None: the core can't search it."""
        metadata, packed = self.metadata, None
        if metadata.packing is not None and (packed := metadata.packing.in_core) is None:
            return None
        begin_s, slots, groups = metadata.begin_ms // 1000, metadata.slot_map.base, self.directory.group_bytes
        try:
            return file.opened(metadata.ids_by_topic, begin_s, slots, groups, self.tail.file_size, packed)
        except ValueError:  # invalid values: the search by NumPy reports them
            return None


class _OpenSource:
    """The source of a file whose directory the core has, and whose runs the caller reads."""

    crc32 = staticmethod(crc32)

    @staticmethod
    def open(_file: Any, _call: object, _reads: bool) -> int:
        """See `LocalFile.from_source`."""
        return 0


def build_trailer(position: int, directory: Directory, metadata: Metadata, filter_bytes: bytes = b"") -> bytes:
    """Return the trailer's bytes for arrays that end at byte `position`."""
    parts = (filter_bytes, directory.encode(), metadata.encode())
    lengths = [len(part) for part in parts]
    tail = Tail(position, *lengths, *[crc32(part) for part in parts])
    return b"".join((*parts, tail.encode()))


def parse_trailer(data: bytes | memoryview, file: str, file_size: int) -> Trailer:
    """Verify and return the trailer in a file's last bytes. Raises `CorruptFile` and `UnsupportedVersion`."""
    tail = Tail.decode(data, file, file_size)
    needed = file_size - tail.directory_position
    if len(data) < needed:
        raise CorruptFile(file, "trailer is cut off", offset=tail.directory_position, expected=needed, found=len(data))
    view = memoryview(data)[len(data) - needed :]
    directory, metadata = view[: tail.directory_length], view[tail.directory_length : -TAIL_SIZE]
    for name, part, crc, offset in (
        ("directory", directory, tail.directory_crc32, tail.directory_position),
        ("metadata", metadata, tail.metadata_crc32, tail.directory_position + tail.directory_length),
    ):
        if (actual := crc32(part)) != crc:
            raise CorruptFile(file, f"{name}'s CRC32 does not match", offset=offset, expected=crc, found=actual)
    trailer = Trailer(tail, Directory.decode(directory, file), Metadata.decode(metadata, file))
    if (end := trailer.metadata.end_of_items()) not in (tail.position, None):
        problem = f"metadata's geometry and {trailer.metadata.count} items end elsewhere"
        raise CorruptFile(file, problem, expected=tail.position, found=end)
    trailer.directory.check(trailer.metadata, tail.position, file)
    return trailer
