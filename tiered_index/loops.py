"""Loops compiled by numba, each one the same as the NumPy code where it is called, to the byte.

Loaded by `kernels` only. Each is compiled for its one signature when this module is loaded, from numba's cache where
that has it, and lets other threads run. Numbers are computed modulo 2**64. `data` are bytes of entries or items of
`size` bytes each, of which the key's hash is the first column; stored numbers are big-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, int32, int64, njit, types, uint8, uint16, uint32, uint64, void

from tiered_index.packed_loops import find_items as find_items
from tiered_index.packed_loops import find_one as find_one
from tiered_index.packed_loops import pack_items as pack_items
from tiered_index.packed_loops import unpack_items as unpack_items

_IN = {kind: types.Array(kind, 1, "C", readonly=True) for kind in (int32, int64, uint8, uint16, uint32, uint64)}
_IN_MATRIX = types.Array(uint64, 2, "C", readonly=True)
_IN_ROWS = types.Array(int64, 2, "C", readonly=True)
_BYTES = types.Bytes(uint8, 1, "C", readonly=True)
_I32, _I64, _U64 = int32[::1], int64[::1], uint64[::1]
# where every schema has these columns
_OFFSET, _TIME = uint64(12), uint64(24)
_OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}


@njit(uint64(_IN[uint8], uint64), **_OPTIONS)
def _word(data, at):
    """Return the 4 bytes at a place as a number."""
    return (
        uint64(data[at]) << uint64(24)
        | uint64(data[at + uint64(1)]) << uint64(16)
        | uint64(data[at + uint64(2)]) << uint64(8)
        | uint64(data[at + uint64(3)])
    )


@njit(uint64(_IN[uint8], uint64), **_OPTIONS)
def _normal(data, at):
    """Return the key's hash at a place, made normal."""
    value = _word(data, at)
    return uint64(0) if value == uint64(0x80000000) else value


@njit(int64(_IN[uint8], uint64), **_OPTIONS)
def _long(data, at):
    """Return the 8 bytes at a place as a number."""
    return int64(_word(data, at) << uint64(32) | _word(data, at + uint64(4)))


@njit(uint32(uint32), **_OPTIONS)
def _mixed(value):
    """Return a fingerprint's sum, mixed."""
    value = uint32(value ^ value >> uint32(16))
    value = uint32(value * uint32(0x85EBCA6B))
    value = uint32(value ^ value >> uint32(13))
    value = uint32(value * uint32(0xC2B2AE35))
    return uint32(value ^ value >> uint32(16))


@njit(
    [void(_IN[kind], _IN[int64], _IN[int64], *4 * [_IN[uint32]], uint32[::1], uint32[::1]) for kind in (uint8, uint16)],
    **_OPTIONS,
)
def hash_rows(units, offsets, topic_index, java_of_topic, second_of_topic, java_powers, second_powers, java, second):
    """Set Java's hash of each row's topic#key, and its fingerprint unless `second` is empty. `java_of_topic` and
    `second_of_topic` are the sums of topic#, the powers fall from 255 to 0.
    """
    for row in range(len(java)):
        a, b = java_of_topic[topic_index[row]], second_of_topic[topic_index[row]]
        begin, end = uint64(offsets[row]), uint64(offsets[row + 1])
        if end - begin < uint64(256):
            # each unit times its power, and what stands before them as one more: sums that no product waits for
            power = uint64(256) - (end - begin)
            a = uint32(a * java_powers[power - uint64(1)])
            b = uint32(b * second_powers[power - uint64(1)])
            for at in range(begin, end):
                a = uint32(a + uint32(units[at]) * java_powers[power + (at - begin)])
                b = uint32(b + uint32(units[at]) * second_powers[power + (at - begin)])
        else:
            for at in range(begin, end):
                a = uint32(a * uint32(31) + uint32(units[at]))
                b = uint32(b * uint32(0x9E3779B1) + uint32(units[at]))
        java[row] = uint32(a)
        if len(second):
            second[row] = _mixed(b)


@njit(int64(_BYTES, int64, int64), **_OPTIONS)
def hash_key(units, a, b):
    """Return Java's hash of one topic#key in ASCII, and 32 bits higher its fingerprint, given the sums of topic#."""
    java, second = uint32(a), uint32(b)
    for unit in units:
        java = uint32(java * uint32(31) + uint32(unit))
        second = uint32(second * uint32(0x9E3779B1) + uint32(unit))
    return int64(uint64(java) | uint64(_mixed(second)) << uint64(32))


@njit(int64(_IN[int32], int64, int64, _I32, _I32, _I64, _I32), **_OPTIONS)
def insert(hashes, slots, first, heads, previous, slot_of, values):
    """Insert rows from index `first` on into the chains of `heads`; return how many slots were empty."""
    fresh = 0
    for row in range(len(hashes)):
        slot = int64(uint64(uint32(hashes[row])) % uint64(slots))
        before = heads[slot]
        heads[slot] = first + row
        fresh += before == 0
        previous[row] = before
        slot_of[row] = slot
    for row in range(len(hashes)):
        values[row] = heads[slot_of[row]]
    return fresh


@njit(
    int64(_IN[uint8], int64, int64, int64, int64, _IN[int32], int64, _IN[int32], _IN[int64], int64, _I64, _I64),
    **_OPTIONS,
)
def walk_chains(data, begin, size, previous, entries, heads, slots, hashes, wanted, limit, items, lookups):
    """Set which entries have the hash of one of the `wanted` of `hashes`, and which one's; return how many, -1 where a
    chain has more than `limit` entries or runs backwards, -2 where there is no room. Entry 0 would be at byte `begin`,
    and `previous` is where an entry names the one before it in its chain.
    """
    going, at_entry = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
    left = 0
    for number in range(len(wanted)):
        head = int64(heads[uint64(uint32(hashes[wanted[number]])) % uint64(slots)])
        going[left], at_entry[left] = wanted[number], head
        left += head > 0
    found = 0
    for _ in range(limit):
        if not left:
            return found
        if found + left > len(items):
            return -2
        # side by side and without branches, so that the memory's answers are not waited for one by one
        still, wrong = 0, False
        for number in range(left):
            lookup, index = going[number], at_entry[number]
            known = index < entries
            at = uint64(begin + size * (index if known else 0))
            items[found], lookups[found] = index, lookup
            found += _normal(data, at) == uint64(uint32(hashes[lookup]))
            older = int64(int32(_word(data, at + uint64(previous))))
            wrong |= (older >= index) | (older < 0) | (not known)
            going[still], at_entry[still] = lookup, older
            still += older > 0
        if wrong:
            return -1
        left = still
    return -1 if left else found


@njit(int64(_IN[uint8], int64, int64, int64, int64, int64, int64, _I64), **_OPTIONS)
def walk_chain(data, begin, size, previous, entries, index, key_hash, items):
    """Set which entries of a chain from entry `index` on have a hash, the newest first, as `walk_chains` finds them;
    return how many, -1 where it has more entries than there is room, or runs backwards.
    """
    found = 0
    for _ in range(len(items)):
        if index <= 0:
            return found
        if index >= entries:
            return -1
        at = uint64(begin + size * index)
        items[found] = index
        found += _normal(data, at) == uint64(key_hash)
        older = int64(int32(_word(data, at + uint64(previous))))
        if older >= index or older < 0:
            return -1
        index = older
    return found if index <= 0 else -1


@njit(void(_IN[uint8], int64, int64, uint32[::1], _I64), **_OPTIONS)
def count_slots(data, size, slots, slot_of, counts):
    """Set the slot of each entry, and add it to its slot's count."""
    for row in range(len(slot_of)):
        slot = _normal(data, uint64(row * size)) % uint64(slots)
        slot_of[row] = uint32(slot)
        counts[slot] += 1


@njit(void(_IN[uint32], _I32, _I32), **_OPTIONS)
def newest_first(slots, cursors, order):
    """Set entry numbers by slot, the newest first; `cursors` say where each slot begins."""
    for row in range(len(slots) - 1, -1, -1):
        place = cursors[slots[row]]
        cursors[slots[row]] = place + 1
        order[place] = row


@njit(boolean(_IN[uint8], int64, int64, _I64), **_OPTIONS)
def order_slots(data, size, slots, order):
    """Sort `order`, the items of whole slots, by rank within each slot; return whether items of one hash are in answer
    order, too. False also where slots are so full that sorting them this way would take long.
    """
    ranks = np.empty(len(order), np.uint64)
    quotients = uint64((2**31 - 1) // slots + 1)
    left = 16 * len(order)
    for number in range(len(order)):
        value = _normal(data, uint64(number * size))
        rank = value % uint64(slots) * quotients + value // uint64(slots)
        place = number
        while place and ranks[place - 1] > rank:
            ranks[place], order[place] = ranks[place - 1], order[place - 1]
            place -= 1
        ranks[place], order[place] = rank, number
        left -= number - place
        if left < 0:
            return False
    for place in range(1, len(order)):
        if ranks[place] == ranks[place - 1]:
            before, after = uint64(order[place - 1] * size), uint64(order[place] * size)
            one, other = int32(_word(data, before + _TIME)), int32(_word(data, after + _TIME))
            if one < other:
                return False
            if one == other and _long(data, before + _OFFSET) <= _long(data, after + _OFFSET):
                return False
    return True


_TABLE = 1 << 13


@njit(int64(_IN[uint64], _U64), **_OPTIONS)
def distinct(hashes, found):
    """Set the distinct ones of hashes, by their first bits; return how many there are."""
    bits = 0
    while (len(hashes) >> bits) > _TABLE // 4:
        bits += 1
    shift = uint64(64 - bits) if bits else uint64(0)
    ends = np.zeros((1 << bits) + 1, np.int64)
    for number in range(len(hashes)):
        ends[(hashes[number] >> shift) + 1 if bits else 1] += 1
    for part in range(1 << bits):
        ends[part + 1] += ends[part]
    cursors = ends[:-1].copy()
    for number in range(len(hashes)):
        part = hashes[number] >> shift if bits else uint64(0)
        found[cursors[part]] = hashes[number]
        cursors[part] += 1
    count = 0
    table = np.empty(_TABLE, np.uint64)
    for part in range(1 << bits):
        begin, end = ends[part], ends[part + 1]
        if begin == end:
            continue
        few = end - begin <= _TABLE // 2
        if few:
            # a place is free while it has the first one, which needs none
            table[:] = found[begin]
        else:
            # repeats of some, mostly
            found[begin:end].sort()
        first = last = found[begin]
        found[count] = first
        count += 1
        for number in range(begin + 1, end):
            value = found[number]
            if few:
                place = value & uint64(_TABLE - 1)
                while table[place] != first and table[place] != value:
                    place = (place + uint64(1)) & uint64(_TABLE - 1)
                new = value != first and table[place] != value
                table[place] = value
            else:
                new = value != last
                last = value
            if new:
                found[count] = value
                count += 1
    return count


@njit(void(_IN[uint64], _IN[uint32], uint32[:, ::1]), **_OPTIONS)
def set_bits(hashes, salts, words):
    """Set the bits of hashes in a filter."""
    for number in range(len(hashes)):
        block = (hashes[number] >> uint64(32)) * uint64(len(words)) >> uint64(32)
        low = hashes[number] & uint64(0xFFFFFFFF)
        for word in range(8):
            bit = (low * uint64(salts[word]) & uint64(0xFFFFFFFF)) >> uint64(27)
            words[block, word] |= uint32(uint64(1) << bit)


@njit(uint64(int64), **_OPTIONS)
def filter_hash(value):
    """Return what filters hold for a key's hash and, in the lower 32 bits, its fingerprint."""
    mixed = uint64(value)
    mixed = (mixed ^ mixed >> uint64(33)) * uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ mixed >> uint64(33)) * uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ mixed >> uint64(33)


@njit(boolean(_BYTES, int64, _IN[uint32]), **_OPTIONS)
def block_may_hold(block, low, salts):
    """Return whether the bits of the lower half of a hash are all set in a block of a filter."""
    for number in range(8):
        word = uint64(0)
        for byte in range(4):
            word |= uint64(block[4 * number + byte]) << uint64(8 * byte)
        bit = (uint64(low) * uint64(salts[number]) & uint64(0xFFFFFFFF)) >> uint64(27)
        if not word >> bit & uint64(1):
            return False
    return True


@njit(int64(_IN[int32], _IN[int32], _IN[int64], _I64, _I64, _I64), **_OPTIONS)
def match(stored, wanted, starts, items, first, counts):
    """Set which stored hashes occur in the sorted `wanted`, and of each its first place there and how often it does;
    return how many. `starts` says where in `wanted` each of the first bits begin.
    """
    shift = uint64(31)
    while uint64(1) << (uint64(31) - shift) < uint64(len(starts) - 1):
        shift -= uint64(1)
    found = 0
    for item in range(len(stored)):
        value = stored[item]
        if value < 0:
            continue
        part = uint64(value) >> shift
        place, end = starts[part], starts[part + uint64(1)]
        while place < end and wanted[place] < value:
            place += 1
        if place < end and wanted[place] == value:
            begin = place
            while place < end and wanted[place] == value:
                place += 1
            items[found], first[found], counts[found] = item, begin, place - begin
            found += 1
    return found


@njit(void(_IN[uint8], int64, _IN[int64], _IN[uint64], int64, int64, uint64[:, ::1], int64), **_OPTIONS)
def unpack_bits(packed, begin, widths, least, start, stop, columns, to):
    """Set columns, from place `to` on, to rows [start, stop) of packed columns, row 0 from bit `begin` on; 8
    bytes must follow them.
    """
    row_bits = widths.sum()
    bit = uint64(begin + start * row_bits)
    for place in range(to, to + stop - start):
        for column in range(len(widths)):
            value, done = uint64(0), uint64(0)
            left = uint64(widths[column])
            while left:
                some = min(left, uint64(56))
                at, word = bit >> uint64(3), uint64(0)
                for byte in range(uint64(8)):
                    word |= uint64(packed[at + byte]) << (byte << uint64(3))
                value |= (word >> (bit & uint64(7)) & ((uint64(1) << some) - uint64(1))) << done
                bit, done, left = bit + some, done + some, left - some
            columns[column, place] = value + least[column]
