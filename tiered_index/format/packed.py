"""Packed runs: the items of a slot group or block, each column in as many bits as it needs. SPEC.md section 11.

- Columns that the entries of a key share are stored once per key.
- A hash is stored as the step from the key before, because entries rise by `hash_rank`.
- A topic is stored as its number among the topics of the file, because their ids are far apart.
- A time is stored as its distance from a line through the file's offsets and times, because both grow together.

Unpacking returns the packed items byte for byte, in any order in which they were. The compiled core packs and unpacks.
`packed_numpy` does so without the core, and reports damage. Pure; any thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tiered_index.base.documents import Int32, reader_of
from tiered_index.base.kernels import compiled
from tiered_index.format import packed_numpy
from tiered_index.format.keys.distinct import distinct_numbers
from tiered_index.format.layout import MOST_ITEMS, Preset, SlotMap, hash_rank
from tiered_index.format.schema import Schema
from tiered_index.format.time_line import TimeLine

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
InCore = tuple[int, Int64, Int64, npt.NDArray[np.int32]]
"""The columns of keys, all columns, the line and the topics of a packing."""

# stored once per key, with the hash
_OF_KEYS = ("topic_id", "fingerprint")
# A list of topics must save this many bits for each: its id takes some 11 bytes of the metadata, and keys may have
# several entries
_BITS_PER_TOPIC = 512
# bytes saved of an item's 28, about: hash 2.5, topic and queue 7, offset 4, size 2.5, time 3
_SAVED = 19
# the compiled core has arrays of this many columns
_MOST_IN_CORE = 64
# runs that are unpacked together: their memory fits the cache
_TOGETHER = 64
# the same if nothing is copied
_MAPPED_TOGETHER = 1 << 12
# padding behind data of n bytes, from n % 8 on: then each word and the one behind it can be read
_PADDING = bytes(16)


def is_packed(preset: Preset, *, is_shard: bool) -> bool:
    """Return whether the runs of a file or shard are packed: of all but whole files that RocketMQ must read."""
    return is_shard or not preset.newest_first


def packed_bytes(schema: Schema, count: int) -> int:
    """Return an estimate of the bytes of `count` packed items."""
    return count * (schema.item.itemsize - _SAVED)


class PackingOptions(Struct, frozen=True):
    """The part of a file's packing that its metadata has.

    - `line`: estimates times from offsets.
    - `topics`: the rising ids of the topics that its runs number. Empty: the runs have the ids themselves.
    """

    line: TimeLine
    topics: tuple[int, ...] = ()

    @classmethod
    def of(cls, items: Array, topics: Iterable[int], most: int) -> PackingOptions:
        """Return the options for a file of `most` entries at most.

        `items` are those of the file, or a sample. `topics` has the ids of all its items, or none.
        """
        ids = tuple(sorted(topics))
        saved = (ids[-1] - ids[0]).bit_length() - (len(ids) - 1).bit_length() if ids else 0
        return cls(TimeLine.through(items), ids if saved * most >= _BITS_PER_TOPIC * len(ids) else ())

    def to_json(self) -> dict[str, Any]:
        """Return the options as stored."""
        return {**self.line.to_json(), **({"topics": self.topics} if self.topics else {})}


class StoredOptions(TimeLine, frozen=True):
    """Options as stored: the members of the line, and the topics."""

    topics: tuple[Int32, ...] = ()

    def __post_init__(self) -> None:
        if any(before >= after for before, after in itertools.pairwise(self.topics)):
            raise ValueError("The ids of `topics` do not rise")


def read_options(document: Any) -> PackingOptions:
    """Return the options of a metadata document. Raises `msgspec.ValidationError`."""
    stored: StoredOptions = reader_of(StoredOptions)(document)
    return PackingOptions(TimeLine(stored.base, stored.shift, stored.seconds), stored.topics)


class Packing:
    """The packing of the runs of one file. `base` is the number of base slots, which decides the `ranks` of hashes.

    A run has a header (`header_dtype`), its keys, marks at the first item of each key (unless each key has one item),
    and its items. `order` has the names of the columns. The first `of_keys` of them are stored once per key.
    """

    def __init__(self, schema: Schema, base: int, options: PackingOptions) -> None:
        self.schema, self.base, self.line, self.topics = schema, base, options.line, np.array(options.topics, np.int32)
        self.words, self.order, self.of_keys, self.header_dtype, self.for_loops = _columns_of(schema)
        self.quotients = SlotMap(base).quotients
        self.ranks = self.quotients * base

    @property
    def in_core(self) -> InCore | None:
        """The packing as the core's `LocalFile` takes it; None: the core can't search so many columns."""
        return self._in_core if len(self.for_loops) <= _MOST_IN_CORE else None

    @functools.cached_property
    def _in_core(self) -> InCore:
        line = np.array([self.line.base, self.line.shift, *self.line.seconds])
        return self.of_keys, self.for_loops, line, self.topics

    @property
    def _loops(self) -> ModuleType | None:
        """The compiled loops; None: use NumPy."""
        return None if self.in_core is None else compiled()

    def pack(self, items: Array, counts: Sequence[int]) -> list[bytes]:
        """Return packed runs. `items` (structured, n) are the items of all runs, `counts` the number in each (>= 1).

        Raises `packed_numpy.UnlistedTopic` for an item of another topic than those of the file.
        """
        if not counts:
            return []
        if (loops := self._loops) is None:
            stops = np.cumsum(counts).tolist()
            return [packed_numpy.pack(self, items[stop - n : stop]) for stop, n in zip(stops, counts, strict=True)]
        starts = np.cumsum([0, *counts])
        columns = self.for_loops
        # 64 bits per column and item, a mark, the rest of a byte behind keys, marks and items, and a word at the end
        room = len(items) * (8 * len(columns) + 1) + len(counts) * (self.header_dtype.itemsize + 3) + 8
        packed, ends = np.empty(room, np.uint8), np.empty(len(counts), np.int64)
        data = np.ascontiguousarray(items).view(np.uint8).reshape(len(items), -1)
        if not loops.pack_items(data, starts, self.base, *self._in_core, packed, ends):
            raise packed_numpy.UnlistedTopic
        stops = ends.tolist()
        whole = packed[: stops[-1]].tobytes()
        return [whole[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def ranks_of(self, hashes: npt.NDArray[np.int32]) -> Int64:
        """Return the distinct ranks (m), rising, of normal hashes (n). They are an argument of `unpack`."""
        return distinct_numbers(hash_rank(hashes, self.base).astype(np.int64))

    def find(
        self, data: bytes | memoryview, count: int, file: str, key_hash: int, words: UInt64 | None, at: int
    ) -> Array:
        """Return the items of one normal hash in one run, faster than `unpack`."""
        if (loops := self._loops) is not None:
            if words is None:
                words, at = _padded([data], len(data)), 0
            items = np.empty((min(count, MOST_ITEMS), self.schema.item.itemsize), np.uint8)
            matched = loops.find_one(
                *(words, at, len(data), count, key_hash, self.base, MOST_ITEMS), *(*self._in_core, items)
            )
            if matched >= 0:
                return np.ndarray(matched, self.schema.item, items)
        return self.unpack([data], np.array([count]), file, self.ranks_of(np.array([key_hash], np.int32)))[0]

    def unpack(
        self,
        pieces: Sequence[bytes | memoryview],
        counts: Int64,
        file: str,
        ranks: Int64 | None = None,
        mapped: tuple[UInt64, Int64] | None = None,
    ) -> tuple[Array, Int64]:
        """Return the items (structured, n, a new array) of runs (m) in order, and the number of items of each run (m).

        `pieces` has the bytes of each run, `counts` (m) its items. `ranks` (of `ranks_of`): only items of these hashes.
        `mapped`: the words of a file and the byte at which each run begins, so that runs needn't be copied. Raises
        `CorruptFile` for data that is not a packed run of that many items.
        """
        # pages that are never written take no memory
        items = np.empty((int(counts.sum()), self.schema.item.itemsize), np.uint8)
        of_runs = np.empty(len(pieces), np.int64)
        loops, total = self._loops, 0
        together = _TOGETHER if mapped is None or loops is None else _MAPPED_TOGETHER
        for start in range(0, len(pieces), together):
            some, unpacked = slice(start, start + together), -1
            if loops is not None:
                runs = np.empty((len(of_runs[some]), 3), np.int64)
                runs[:, 1], runs[:, 2] = list(map(len, pieces[some])), counts[some]
                if mapped is None:
                    ends = runs[:, 1].cumsum()
                    words, runs[:, 0] = _padded(pieces[some], int(ends[-1])), ends - runs[:, 1]
                else:
                    words, runs[:, 0] = mapped[0], mapped[1][some]
                unpacked = loops.find_items(
                    *(words, runs, ranks, self.base, MOST_ITEMS, *self._in_core), *(items[total:], of_runs[some])
                )
            if unpacked < 0:
                # the core accepts only sound runs whose hashes are by rank
                pieces_with_counts = zip(pieces[some], counts[some].tolist(), strict=True)
                parts = [packed_numpy.unpack(self, piece, count, file, ranks) for piece, count in pieces_with_counts]
                of_runs[some], unpacked = list(map(len, parts)), sum(map(len, parts))
                items[total : total + unpacked].reshape(-1)[:] = np.concatenate([part.view(np.uint8) for part in parts])
            total += unpacked
        return np.ndarray(total, self.schema.item, items), of_runs


def _padded(pieces: Sequence[bytes | memoryview], size: int) -> UInt64:
    """Return the data of all pieces (`size` bytes) as words, and at least one word behind them."""
    return np.frombuffer(b"".join([*pieces, _PADDING[size & 7 :]]), "<u8")


class _Columns(NamedTuple):
    """The columns of packed runs. `for_loops` (i64, columns x 3) is for the compiled core."""

    words: np.dtype[Any]
    order: tuple[str, ...]
    of_keys: int
    header_dtype: np.dtype[Any]
    for_loops: Int64


@functools.lru_cache(maxsize=64)
def _columns_of(schema: Schema) -> _Columns:
    words = _words_of(schema)
    names = words.names or ()
    keys = ["key_hash", *(name for name in names if name in _OF_KEYS)]
    rest = [name for name in names if name not in (*keys, "offset", "time_diff_s")]
    order = (*keys, *rest, "offset", "time_diff_s")
    # whether hashes are steps | keys | for each column its bits and its smallest value
    wide = ("key_hash", "offset", "time_diff_s")
    least = {name: ">i8" if name in wide else f">{words[name].str[1:]}" for name in order}
    columns = [pair for name in order for pair in ((f"width {name}", "u1"), (f"least {name}", least[name]))]
    header = np.dtype([("is_ranked", "u1"), ("keys", ">u4"), *columns])
    fields: Mapping[str, Any] = words.fields or {}
    sizes = [header[f"least {name}"] for name in order]
    signed = [dtype.itemsize if dtype.kind == "u" else -dtype.itemsize for dtype in sizes]
    places = [(fields[name][1], fields[name][0].itemsize) for name in order]
    for_loops = np.array([(size, *place) for size, place in zip(signed, places, strict=True)])
    for_loops.flags.writeable = False
    return _Columns(words, order, len(keys), header, for_loops)


def _words_of(schema: Schema) -> np.dtype[Any]:
    """Return a dtype of the same bytes whose columns are integers: also for floats, and for bytes in parts of <= 8."""
    names, formats, offsets = [], [], []
    for name, (dtype, at, *_) in (schema.item.fields or {}).items():
        if dtype.kind in "iu":
            sizes = [(name, dtype.str, at)]
        else:
            sizes, left = [], dtype.itemsize
            while left:
                size = min(8, 1 << left.bit_length() - 1)
                sizes.append((f"{name} {left}", f">u{size}", at + dtype.itemsize - left))
                left -= size
        for word, code, place in sizes:
            names.append(word)
            formats.append(code)
            offsets.append(place)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": schema.item.itemsize})
