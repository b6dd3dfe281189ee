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


@njit(uint64(_WORDS, uint64, int64), **_OPTIONS)
def _number(words, at, size):
    """Return the big-endian number of `size` bytes at byte `at` of little-endian words."""
    value = uint64(0)
    for _ in range(size):
        value = value << uint64(8) | words[at >> uint64(3)] >> ((at & uint64(7)) << uint64(3)) & uint64(255)
        at += uint64(1)
    return value


@njit(uint64(uint64), **_OPTIONS)
def _ones(word):
    """Return how many bits are set."""
    word -= word >> uint64(1) & uint64(0x5555555555555555)
    word = (word & uint64(0x3333333333333333)) + (word >> uint64(2) & uint64(0x3333333333333333))
    word = (word + (word >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
    return (word * uint64(0x0101010101010101)) >> uint64(56)


@njit(int64(_WORDS, uint64, int64, int64), **_OPTIONS)
def _marked(words, bit, count, number):
    """Return the place of mark `number` of `count` bits; `count` where there are fewer marks."""
    for at in range(0, count, 64):
        word = bits_at(words, bit + uint64(at), ~uint64(0) >> uint64(max(0, 64 + at - count)))
        ones = int64(_ones(word))
        if number >= ones:
            number -= ones
            continue
        for place in range(at, at + 64):
            number -= int64(word & uint64(1))
            if number < 0:
                return place
            word >>= uint64(1)
    return count


@njit(int64(_WORDS, _ROWS, _NUMBERS, int64, int64, int64, _ROWS, _NUMBERS, uint8[:, ::1], int64[::1]), **_OPTIONS)
def find_items(words, runs, wanted, base, most, of_keys, columns, line, items, counts):
    """Set the items of packed runs whose key's rank is among the rising `wanted`, as they stand there, and how many
    each run has; return how many there are, or -1 where a run is not as it should be or its hashes are not by rank.
    A run is (begin, bytes, items, of which it has at most `most`), a column, of which the first `of_keys` are stored
    once a key, (bytes of its least value, less than 0 where that has a sign; place and bytes in an item). There must be
    room for all items of the runs, and a word behind them.
    """
    quotients = (2**31 - 1) // base + 1
    header = 5 + len(columns) + np.abs(columns[:, 0]).sum()
    widths, masks, least, values = np.empty((4, len(columns)), np.uint64)
    total = 0
    for run in range(len(runs)):
        begin, size, count = runs[run]
        counts[run] = 0
        if begin < 0 or size < header or begin + size > 8 * len(words) - 8:
            return -1
        keys = int64(_number(words, uint64(begin + 1), 4))
        at, key_bits, item_bits = uint64(begin + 5), 0, 0
        for column in range(len(columns)):
            width, value = _number(words, at, 1), _number(words, at + uint64(1), abs(columns[column, 0]))
            at += uint64(1 + abs(columns[column, 0]))
            if columns[column, 0] < 0:
                shift = uint64(64 + 8 * columns[column, 0])
                value = uint64(int64(value << shift) >> shift)
            if width > (64 if column else 32):
                return -1
            widths[column], least[column] = width, value
            masks[column] = ~uint64(0) >> (uint64(64) - width) if width else uint64(0)
            if column < of_keys:
                key_bits += int64(width)
            else:
                item_bits += int64(width)
        marks_at = begin + header + (keys * key_bits + 7 >> 3)
        items_at = marks_at + (count + 7 >> 3 if keys < count else 0)
        rank = int64(least[0])
        if _number(words, uint64(begin), 1) != 1 or not -(2**31) <= rank < quotients * base:
            return -1
        if not 0 < keys <= count <= most or items_at + (count * item_bits + 7 >> 3) != begin + size:
            return -1
        marks = uint64(8 * marks_at)
        if keys < count and (
            _marked(words, marks, count, 0) != 0
            or _marked(words, marks, count, keys - 1) == count
            or _marked(words, marks, 8 * (items_at - marks_at), keys) != 8 * (items_at - marks_at)
        ):
            return -1
        low, high = 0, len(wanted)
        while low < high:
            middle = (low + high) >> 1
            if wanted[middle] < rank:
                low = middle + 1
            else:
                high = middle
        asked = wanted[low] if low < len(wanted) else np.iinfo(np.int64).max
        bit, step, mask = uint64(8 * (begin + header)), uint64(key_bits), masks[0]
        for key in range(keys):
            rank += int64(bits_at(words, bit, mask))
            while asked < rank:
                low += 1
                asked = wanted[low] if low < len(wanted) else np.iinfo(np.int64).max
            if asked == rank:
                first, stop = key, key + 1
                if keys < count:
                    first, stop = _marked(words, marks, count, key), _marked(words, marks, count, key + 1)
                slot, above = rank // quotients, rank % quotients
                values[0] = uint64(above * base + slot)
                at = bit + widths[0]
                for column in range(1, of_keys):
                    values[column] = bits_at(words, at, masks[column]) + least[column]
                    at += widths[column]
                counts[run] += stop - first
                for item in range(first, stop):
                    at = uint64(8 * items_at + item * item_bits)
                    for column in range(of_keys, len(columns)):
                        values[column] = bits_at(words, at, masks[column]) + least[column]
                        at += widths[column]
                    values[len(columns) - 1] += uint64(line_at(line, int64(values[len(columns) - 2])))
                    for column in range(len(columns)):
                        to, value = columns[column, 1] + columns[column, 2], values[column]
                        for byte in range(columns[column, 2]):
                            items[total + item - first, to - 1 - byte] = uint8(value)
                            value >>= uint64(8)
                total += stop - first
            bit += step
        if rank >= quotients * base:
            return -1
    return total


@njit(int64(_WORDS, int64, int64, int64, int64, int64, int64, int64, _ROWS, _NUMBERS, uint8[:, ::1]), **_OPTIONS)
def find_one(words, begin, size, count, key_hash, base, most, of_keys, columns, line, items):
    """Do as `find_items` for one normal hash in one run: arrays made here cost less than a caller's."""
    runs, wanted, counts = np.empty((1, 3), np.int64), np.empty(1, np.int64), np.empty(1, np.int64)
    runs[0, 0], runs[0, 1], runs[0, 2] = begin, size, count
    wanted[0] = key_hash % base * ((2**31 - 1) // base + 1) + key_hash // base
    return find_items(words, runs, wanted, base, most, of_keys, columns, line, items, counts)
