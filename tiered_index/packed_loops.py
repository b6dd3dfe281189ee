"""Compiled loops over whole packed runs (`format/packed.py`), each one the same as the NumPy code there, to the byte.

A part of `loops`, which loads it; what is said there holds here. Columns are in their stored order: (bytes of the least
value in a run's header, less than 0 where that has a sign; place and bytes in an item).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, int64, njit, types, uint8, uint64, void

_WORDS = types.Array(uint64, 1, "C", readonly=True)
_NUMBERS = types.Array(int64, 1, "C", readonly=True)
_ROWS = types.Array(int64, 2, "C", readonly=True)
_MATRIX = types.Array(uint64, 2, "C", readonly=True)
_BYTES = types.Array(uint8, 2, "C", readonly=True)
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}


@njit(uint64(_WORDS, uint64, uint64), **_OPTIONS)
def bits_at(words, bit, mask):
    """Return the number that begins at a bit, its lowest bit first, as wide as `mask`; a word must follow it."""
    at, shift = bit >> uint64(6), bit & uint64(63)
    # the word behind goes above; two shifts, as none is by 64
    return (words[at] >> shift | words[at + uint64(1)] << uint64(1) << (uint64(63) - shift)) & mask


@njit(int64(_NUMBERS, int64), **_OPTIONS)
def line_at(line, offset):
    """Return the time of a line, its base, shift and seconds, at an offset."""
    above, shift = offset - line[0], uint64(line[1])
    point = min(max(above >> shift, 0), len(line) - 4)
    rise = line[point + 3] - line[point + 2]
    return ((above - (point << shift)) * rise >> shift) + line[point + 2]


@njit(boolean(_WORDS, _ROWS, _ROWS, _MATRIX, int64, int64, _ROWS, _NUMBERS, uint8[:, ::1]), **_OPTIONS)
def unpack_items(words, runs, widths, least, base, of_keys, columns, line, items):
    """Set all items of packed runs whose hashes are by rank; return whether marks and ranks are as they should be. A
    run is (items, keys, the bits where its keys, its marks and its items begin), with widths and least values of its
    columns, of which the first `of_keys` are stored once a key. A word must follow the runs.
    """
    quotients = (2**31 - 1) // base + 1
    masks, values = np.empty((2, len(columns)), np.uint64)
    to = 0
    for run in range(len(runs)):
        count, keys, keys_at, marks_at, items_at = runs[run]
        for column in range(len(columns)):
            width = uint64(widths[run, column])
            masks[column] = ~uint64(0) >> (uint64(64) - width) if width else uint64(0)
        rank, key, key_bit, bit = int64(least[run, 0]), 0, uint64(keys_at), uint64(items_at)
        if rank < 0:
            return False
        for item in range(count):
            mark = uint64(marks_at + item)
            if keys == count or words[mark >> uint64(6)] >> (mark & uint64(63)) & uint64(1):
                if key == keys:
                    return False
                key += 1
                rank += int64(bits_at(words, key_bit, masks[0]))
                values[0] = uint64(rank % quotients * base + rank // quotients)
                key_bit += uint64(widths[run, 0])
                for column in range(1, of_keys):
                    values[column] = bits_at(words, key_bit, masks[column]) + least[run, column]
                    key_bit += uint64(widths[run, column])
            elif item == 0:
                return False
            for column in range(of_keys, len(columns)):
                values[column] = bits_at(words, bit, masks[column]) + least[run, column]
                bit += uint64(widths[run, column])
            values[len(columns) - 1] += uint64(line_at(line, int64(values[len(columns) - 2])))
            for column in range(len(columns)):
                value, last = values[column], columns[column, 1] + columns[column, 2] - 1
                for byte in range(columns[column, 2]):
                    items[to, last - byte] = uint8(value)
                    value >>= uint64(8)
            to += 1
        if key < keys or rank >= quotients * base:
            return False
        # no mark stands behind those of the items
        for place in range(marks_at + count, items_at if keys < count else 0):
            if words[uint64(place) >> uint64(6)] >> (uint64(place) & uint64(63)) & uint64(1):
                return False
    return True


@njit(int64(uint64[:, ::1], int64, int64, int64, uint64[::1], uint64[::1], uint8[::1], int64), **_OPTIONS)
def _pack_rows(rows, count, first, stop, least, widths, packed, at):
    """Write rows of the columns [first, stop) from byte `at` on, less the least of each, in as many bits as its width,
    lowest bits first; return the byte behind.
    """
    bits, held = uint64(0), uint64(0)
    for row in range(count):
        for column in range(first, stop):
            value, left = rows[column, row] - least[column], widths[column]
            # at most 56 at once: with 7 that are held they are in 64
            while left:
                some = min(left, uint64(56))
                bits |= (value & ((uint64(1) << some) - uint64(1))) << held
                held, left, value = held + some, left - some, value >> some
                while held >= uint64(8):
                    packed[at] = uint8(bits)
                    bits, held, at = bits >> uint64(8), held - uint64(8), at + 1
    if held:
        packed[at] = uint8(bits)
        at += 1
    return at


@njit(void(_BYTES, _NUMBERS, int64, int64, _ROWS, _NUMBERS, uint8[::1], int64[::1]), **_OPTIONS)
def pack_items(data, starts, base, of_keys, columns, line, packed, ends):
    """Write the packed forms of runs, which begin at `starts`, the end last, one behind the other; set where each ends.
    `data` are their items' bytes. There must be room for 64 bits a column and item, marks and headers.
    """
    quotients = uint64((2**31 - 1) // base + 1)
    most = 0
    for run in range(len(ends)):
        most = max(most, starts[run + 1] - starts[run])
    of_items, keys = np.empty((len(columns), most), np.uint64), np.empty((of_keys, most), np.uint64)
    least, widths = np.empty(len(columns), np.uint64), np.empty(len(columns), np.uint64)
    is_new = np.empty(most + 8, np.uint8)
    at = 0
    for run in range(len(ends)):
        count, n = starts[run + 1] - starts[run], 0
        for item in range(count):
            new = item == 0
            for column in range(len(columns)):
                size, place, value = columns[column, 2], columns[column, 1], uint64(0)
                for byte in range(size):
                    value = value << uint64(8) | uint64(data[starts[run] + item, place + byte])
                if columns[column, 0] < 0:
                    shift = uint64(64 - 8 * size)
                    value = uint64(int64(value << shift) >> shift)
                of_items[column, item] = value
                new |= column < of_keys and of_items[column, item - 1] != value
            of_items[len(columns) - 1, item] -= uint64(line_at(line, int64(of_items[len(columns) - 2, item])))
            is_new[item] = new
            if new:
                for column in range(of_keys):
                    keys[column, n] = of_items[column, item]
                n += 1
        # steps from rank to rank, where these rise and no hash has a sign
        is_ranked, before, first = True, uint64(0), uint64(0)
        for key in range(n):
            value = keys[0, key]
            rank = value % uint64(base) * quotients + value // uint64(base)
            first = rank if key == 0 else first
            is_ranked &= int64(value) >= 0 and (key == 0 or rank >= before)
            before = rank
        if is_ranked:
            before = first
            for key in range(n):
                value = keys[0, key]
                rank = value % uint64(base) * quotients + value // uint64(base)
                keys[0, key] = rank - before
                before = rank
        packed[at] = uint8(is_ranked)
        for byte in range(4):
            packed[at + 1 + byte] = uint8(uint64(n) >> uint64(24 - 8 * byte))
        at += 5
        for column in range(len(columns)):
            rows, number = (keys, n) if column < of_keys else (of_items, count)
            # numbers with a sign are in order once their first bit is turned
            turned = uint64(1) << uint64(63) if columns[column, 0] < 0 else uint64(0)
            low = high = rows[column, 0] ^ turned
            for row in range(1, number):
                value = rows[column, row] ^ turned
                low, high = min(low, value), max(high, value)
            least[column], widths[column] = low ^ turned, uint64(0)
            while widths[column] < uint64(64) and (high - low) >> widths[column]:
                widths[column] += uint64(1)
            packed[at] = uint8(widths[column])
            value, size = first if column == 0 and is_ranked else least[column], abs(columns[column, 0])
            for byte in range(size):
                packed[at + size - byte] = uint8(value)
                value >>= uint64(8)
            at += 1 + size
        at = _pack_rows(keys, n, 0, of_keys, least, widths, packed, at)
        if n < count:
            is_new[count : count + 8] = 0
            for item in range(0, count, 8):
                marks = uint8(0)
                for bit in range(8):
                    marks |= is_new[item + bit] << uint8(bit)
                packed[at] = marks
                at += 1
        at = _pack_rows(of_items, count, of_keys, len(columns), least, widths, packed, at)
        ends[run] = at
