"""Packed runs in plain NumPy: the reference and substitute of the compiled core. It also reports damage.

It handles one run at a time, bit by bit. Memory: about 100 bytes per item of a run. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.keys.hashing import normal_hashes
from tiered_index.format.layout import MOST_ITEMS, hash_rank
from tiered_index.format.schema import Schema
from tiered_index.format.time_line import TimeLine

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


class PackedLayout(Protocol):
    """The packing of the runs of one file: `packed.Packing`."""

    schema: Schema
    base: int
    line: TimeLine
    topics: npt.NDArray[np.int32]
    words: np.dtype[Any]
    order: tuple[str, ...]
    of_keys: int
    header_dtype: np.dtype[Any]
    quotients: int
    ranks: int


class UnlistedTopic(InvalidArgument):
    """An item has another topic id than those that its file numbers."""

    def __init__(self) -> None:
        super().__init__("an entry has a topic id without a name: restore the file that verify --deep names")


def unpack(packing: PackedLayout, data: bytes | memoryview, count: int, file: str, ranks: Int64 | None) -> Array:
    """Return the items of one run, as `Packing.unpack` does."""
    dtype, of_keys = packing.header_dtype, packing.of_keys
    if len(data) < dtype.itemsize:
        raise CorruptFile(file, "a packed run is too short", expected=dtype.itemsize, found=len(data))
    is_ranked, keys, *about = np.frombuffer(data, dtype, 1).item()
    widths, least = about[::2], about[1::2]
    marks_at = dtype.itemsize + (keys * sum(widths[:of_keys]) + 7 >> 3)
    items_at = marks_at + (count + 7 >> 3 if keys < count else 0)
    end = items_at + (count * sum(widths[of_keys:]) + 7 >> 3)
    if is_ranked > 1 or not 0 < keys <= count <= MOST_ITEMS or max(widths) > 64 or len(data) != end:
        raise CorruptFile(file, f"not a packed run of {count} items", expected=end, found=len(data))
    key_bits = _bits(data[dtype.itemsize : marks_at], keys * sum(widths[:of_keys])).reshape(keys, sum(widths[:of_keys]))
    codes = _numbers(key_bits[:, : widths[0]]).view(np.int64)
    # ranks are stored as steps from the rank before
    codes = (np.cumsum(codes) if is_ranked else codes) + least[0]
    limit = packing.ranks if is_ranked else 2**31
    if widths[0] > 32 or not -(2**31) <= least[0] < limit or (codes >= limit).any():
        raise CorruptFile(file, "a packed run has hashes of more than 32 bits")
    first_items = np.arange(count)
    if keys < count:
        first_items = np.flatnonzero(_bits(data[marks_at:items_at]))
        if len(first_items) != keys or first_items[0] or first_items[-1] >= count:
            raise CorruptFile(file, f"a packed run's number of keys differs from the {keys} of its header")
    slots, above = np.divmod(codes, packing.quotients)
    hashes = above * packing.base + slots if is_ranked else codes
    key_of = np.repeat(np.arange(keys), np.diff(first_items, append=count))
    places = np.arange(count)
    if ranks is not None:
        hash_ranks = codes if is_ranked else hash_rank(normal_hashes(hashes), packing.base).view(np.int64)
        places = np.flatnonzero(np.isin(hash_ranks, ranks)[key_of])
    item_bits = _bits(data[items_at:], count * sum(widths[of_keys:])).reshape(count, sum(widths[of_keys:]))
    bits = np.concatenate([key_bits[key_of[places]], item_bits[places]], axis=1)
    ends = np.cumsum(widths).tolist()
    columns = [hashes[key_of[places]].view(np.uint64)]
    for width, end, smallest in zip(widths[1:], ends[1:], least[1:], strict=True):
        columns.append(_numbers(bits[:, end - width : end]) + np.uint64(smallest % 2**64))
    if len(packing.topics):
        if len(places) and columns[1].max() >= len(packing.topics):
            raise CorruptFile(file, f"a packed run has more than the {len(packing.topics)} topics of its file")
        columns[1] = packing.topics[columns[1].astype(np.int64)].astype(np.int64).view(np.uint64)
    offsets, seconds = (column.view(np.int64) for column in columns[-2:])
    columns[-1] = (seconds + packing.line.at(offsets)).view(np.uint64)
    items = np.empty(len(places), packing.schema.item)
    words = items.view(packing.words)
    for name, column in zip(packing.order, columns, strict=True):
        words[name] = column
    return items


def _bits(data: bytes | memoryview, count: int | None = None) -> Array:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")


def _numbers(bits: Array) -> UInt64:
    """Return the numbers (u64, n) of rows of bits (n x up to 64), the lowest bit first."""
    wide = np.zeros((len(bits), 64), np.uint8)
    wide[:, : bits.shape[1]] = bits
    return np.packbits(wide, axis=1, bitorder="little").view("<u8")[:, 0]


def pack(packing: PackedLayout, items: Array) -> bytes:
    """Return one packed run, as `Packing.pack` does."""
    words = items.view(packing.words)
    columns: list[Array] = [
        words[name].astype(np.int64 if words[name].dtype.kind == "i" else np.uint64) for name in packing.order
    ]
    columns[-1] = columns[-1] - packing.line.at(columns[-2])
    if len(packing.topics):
        ids, columns[1] = columns[1], np.searchsorted(packing.topics, columns[1])
        if (packing.topics[columns[1].clip(0, len(packing.topics) - 1)] != ids).any():
            raise UnlistedTopic
    new = np.arange(len(items)) == 0
    for column in columns[: packing.of_keys]:
        new[1:] |= column[1:] != column[:-1]
    hashes, *others = (column[new] for column in columns[: packing.of_keys])
    ranks = hash_rank(normal_hashes(hashes), packing.base).astype(np.int64)
    steps = np.diff(ranks, prepend=ranks[0])
    is_ranked = bool(min(steps.min(), hashes.min()) >= 0)
    about, key_rows = _rows([steps if is_ranked else hashes, *others])
    if is_ranked:
        about[1] = int(ranks[0])
    about_items, item_rows = _rows(columns[packing.of_keys :])
    header = np.array((is_ranked, len(hashes), *about, *about_items), packing.header_dtype).tobytes()
    marks = b"" if len(hashes) == len(items) else np.packbits(new, bitorder="little").tobytes()
    return header + key_rows + marks + item_rows


def _rows(columns: Sequence[Array]) -> tuple[list[int], bytes]:
    """Return a list with the bits and the least value of each column, and the bytes of the rows, bit by bit."""
    about: list[int] = []
    bits = []
    for column in columns:
        least = column.min()
        width = (int(column.max()) - int(least)).bit_length()
        about += [width, int(least)]
        values = (column - least).view(np.uint8).reshape(-1, 8)
        bits.append(np.unpackbits(values, axis=1, count=width, bitorder="little"))
    return about, np.packbits(np.concatenate(bits, axis=1), bitorder="little").tobytes()
