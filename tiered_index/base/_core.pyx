# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: embedsignature=True, auto_pickle=False
"""Compiled loops over entries. Each returns the same bytes as the NumPy code beside its call.

Call them through `tiered_index.base.kernels`. Every loop over arrays releases the interpreter lock. It checks the sizes of
its arguments before it reads them. Arithmetic is modulo 2**64. `data` is bytes of entries or items of `size` bytes
each; their first column is the key's hash. Stored numbers are big-endian.
"""
from libc.stdint cimport INT32_MAX, INT64_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_GetItem, PyDict_SetItem
from cpython.list cimport PyList_Append, PyList_CheckExact, PyList_SetSlice
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.sequence cimport PySequence_Fast_GET_SIZE, PySequence_Fast_ITEMS
from cpython.tuple cimport PyTuple_CheckExact
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_GET_LENGTH
from libc.stdlib cimport calloc, free, labs, malloc, qsort
from libc.string cimport memcmp, memcpy

REVISION = BUILD

ctypedef fused Unit:
    uint8_t
    uint16_t

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1
    void *PyUnicode_DATA(object)

cdef enum:
    TABLE = 1 << 13
    # bytes of a message's row without further columns, and its bytes in memory without the key
    MESSAGE = 28
    ROW_BYTES = 160
    # bytes of a mark, and most keys of a message that are compared one by one
    MARK = 24
    COMPARED_KEYS = 32
    # most files whose states are told at once, and the numbers of a state
    STATES = 64
    STATE = 4
    # the place of the topic among the columns of packed runs
    TOPIC_COLUMN = 1
    # slots that are counted together: their entries fit the CPU's cache
    PART = 1 << 12
    # entries that are read ahead
    AHEAD = 24
    # fingerprints of one hash that are compared
    MARKS = 16
    # entries that are written together: they fit the CPU's nearest cache
    ROWS_AT_ONCE = 256


# the powers 255 to 0 of 31 (Java's hash) and of 0x9E3779B1 (the fingerprint), modulo 2**32
cdef uint32_t[256] FALLING_31
cdef uint32_t[256] FALLING_GOLDEN

cdef int set_powers() except -1:
    cdef int place
    FALLING_31[255] = FALLING_GOLDEN[255] = 1
    for place in range(254, -1, -1):
        FALLING_31[place] = FALLING_31[place + 1] * 31
        FALLING_GOLDEN[place] = FALLING_GOLDEN[place + 1] * <uint32_t>0x9E3779B1
    set_short_powers(31, 0x9E3779B1)
    return 0


set_powers()


def hash_rows(
    const Unit[::1] units,
    const int64_t[::1] offsets,
    const int64_t[:] topic_index,
    const uint32_t[::1] java_of_topic,
    const uint32_t[::1] second_of_topic,
    uint32_t[::1] java,
    uint32_t[::1] second,
):
    """Write Java's hash of each row's topic#key to `java`, and the fingerprint to `second` unless that is empty.

    Row n has the units from `offsets[n]` to `offsets[n + 1]`. `java_of_topic` and `second_of_topic` are the sums of
    topic#. Raises `ValueError` if offsets or topics are out of range.
    """
    cdef Py_ssize_t rows = java.shape[0], row
    cdef int64_t at, stop, topic, power, last = units.shape[0]
    cdef uint32_t a, b
    cdef bint both = second.shape[0] > 0, wrong = False
    if offsets.shape[0] <= rows or topic_index.shape[0] < rows or (both and second.shape[0] < rows):
        fail("there are fewer offsets or topics than rows")
    with nogil:
        for row in range(rows):
            at, stop, topic = offsets[row], offsets[row + 1], topic_index[row]
            if at < 0 or stop < at or stop > last or topic < 0 or topic >= java_of_topic.shape[0]:
                wrong = True
                break
            a, b = java_of_topic[topic], second_of_topic[topic]
            if stop - at < 256:
                # each unit times its power: no product depends on the one before
                power = 256 - (stop - at)
                a *= FALLING_31[power - 1]
                if both:
                    b *= FALLING_GOLDEN[power - 1]
                    if Unit is uint8_t and stop - at <= SHORT_UNITS <= stop:
                        short_sums(&units[0] + stop, stop - at, &a, &b)
                        at = stop
                    while at < stop:
                        a += <uint32_t>units[at] * FALLING_31[power]
                        b += <uint32_t>units[at] * FALLING_GOLDEN[power]
                        at += 1
                        power += 1
                else:
                    while at < stop:
                        a += <uint32_t>units[at] * FALLING_31[power]
                        at += 1
                        power += 1
            else:
                while at < stop:
                    a = a * 31 + <uint32_t>units[at]
                    b = b * <uint32_t>0x9E3779B1 + <uint32_t>units[at]
                    at += 1
            java[row] = a
            if both:
                second[row] = mixed32(b)
    if wrong:
        fail("a row's units or topic are not there")


def hash_key(str key not None, uint32_t java, uint32_t second):
    """Return Java's hash of one topic#key, with its fingerprint in the upper 32 bits, given the sums of topic#."""
    add_units(key, &java, &second)
    return <uint64_t>java | <uint64_t>mixed32(second) << 32


def insert(const int32_t[::1] hashes, int64_t slots, int64_t first, int32_t[::1] heads, int32_t[::1] previous):
    """Insert rows, numbered from `first`, into the chains of `heads`. Return the number of slots that were empty."""
    cdef Py_ssize_t rows = hashes.shape[0], row
    cdef uint32_t slot, by = <uint32_t>slots
    cdef uint64_t inverse
    cdef int64_t fresh = 0
    cdef int32_t before
    if not 0 < slots <= min(heads.shape[0], INT32_MAX) or previous.shape[0] < rows:
        fail("there are fewer heads than slots, or less room than rows")
    inverse = UINT64_MAX // by + 1
    with nogil:
        for row in range(rows):
            slot = remainder32(<uint32_t>hashes[row], inverse, by)
            before = heads[slot]
            heads[slot] = <int32_t>(first + row)
            fresh += before == 0
            previous[row] = before
    return fresh


cdef struct Values:
    # one column of rows, and its place in an entry
    const uint8_t *data
    int64_t stride
    int64_t width
    int64_t place
    bint is_number


cdef void write_column(uint8_t *entries, int64_t size, const Values *of, Py_ssize_t begin, Py_ssize_t rows) noexcept nogil:
    """Write a column of some rows to their entries, numbers big-endian."""
    cdef Py_ssize_t row
    cdef int64_t byte, width = of.width, stride = of.stride
    cdef const uint8_t *data = of.data + begin * stride
    cdef uint8_t *to = entries + of.place
    cdef uint32_t word
    cdef uint64_t longer
    if of.is_number and width == 4:
        for row in range(rows):
            memcpy(&word, data + row * stride, 4)
            word = swapped32(word)
            memcpy(to + row * size, &word, 4)
    elif of.is_number and width == 8:
        for row in range(rows):
            memcpy(&longer, data + row * stride, 8)
            longer = swapped64(longer)
            memcpy(to + row * size, &longer, 8)
    else:
        for row in range(rows):
            for byte in range(width):
                to[row * size + byte] = data[row * stride + (width - 1 - byte if of.is_number else byte)]


def write_entries(
    uint8_t[:, ::1] entries, Py_ssize_t first, list columns not None, const int64_t[:, ::1] places,
    const int64_t[:] times, int64_t unit_ms, int64_t begin_ms, int64_t time_place,
):
    """Write the columns of rows, from number `first` on, as entries. A column has the bytes of its values, in native order.

    `places` has the place of each column in an entry, and 1 for numbers. `time_place` is that of the seconds from
    `begin_ms` to `times`, which are in units of `unit_ms`; truncated toward zero.
    """
    cdef Py_ssize_t rows = entries.shape[0], size = entries.shape[1], count = len(columns), begin, column, row, part
    cdef const uint8_t[:, :] values
    cdef Values *table
    cdef uint32_t word
    if places.shape[0] < count or places.shape[1] != 2:
        fail("there are fewer places than columns")
    if not 0 <= first <= times.shape[0] - rows or not 0 <= time_place <= size - 4:
        fail("there are fewer times than rows, or no place for them")
    if not rows:
        return
    table = <Values *>malloc(max(count, 1) * sizeof(Values))
    if table == NULL:
        raise MemoryError
    try:
        for column in range(count):
            # the list keeps the memory
            values = columns[column]
            if values.shape[0] < first + rows or not values.shape[1] or (values.shape[1] > 1 and values.strides[1] != 1):
                fail("a column has fewer rows, or its bytes are apart")
            if not 0 <= places[column, 0] <= size - values.shape[1]:
                fail("a column is not in the entry")
            table[column].data, table[column].stride, table[column].width = &values[0, 0], values.strides[0], values.shape[1]
            table[column].place, table[column].is_number = places[column, 0], places[column, 1] != 0
        with nogil:
            begin = 0
            while begin < rows:
                part = min(rows - begin, ROWS_AT_ONCE)
                for column in range(count):
                    write_column(&entries[begin, 0], size, &table[column], first + begin, part)
                for row in range(begin, begin + part):
                    word = swapped32(<uint32_t>((times[first + row] * unit_ms - begin_ms) // 1000))
                    memcpy(&entries[row, time_place], &word, 4)
                begin += part
    finally:
        free(table)


def place_by_slot(
    const uint8_t[::1] data, int64_t size, int64_t slots, uint64_t[::1] placed, int32_t[::1] order, int64_t[::1] counts
):
    """Write the numbers of entries to `order` by slot, the newest first, and the entries of each slot to `counts`.

    Entries are first placed in `placed` by parts of neighbouring slots. Each part is then counted and placed in the
    CPU's cache.
    """
    cdef Py_ssize_t rows = order.shape[0], row, at, begin, end
    cdef int64_t parts, part, slot, low, number
    cdef int64_t[PART] places
    cdef int64_t *cursors
    if size < OFFSET or rows > min(data.shape[0] // size, INT32_MAX) or placed.shape[0] < rows:
        fail("there are fewer bytes or places than entries")
    if not 0 < slots <= min(counts.shape[0], INT32_MAX):
        fail("there are fewer counts than slots")
    parts = (slots - 1) // PART + 1
    cursors = <int64_t *>calloc(parts, 8)
    if cursors == NULL:
        raise MemoryError
    with nogil:
        for row in range(rows):
            order[row] = <int32_t>(<uint32_t>normal_at(&data[row * size]) % <uint32_t>slots)
            cursors[order[row] // PART] += 1
        at = 0
        for part in range(parts):
            number, cursors[part] = cursors[part], at
            at += number
        for row in range(rows - 1, -1, -1):
            part = order[row] // PART
            placed[cursors[part]] = <uint64_t>order[row] << 32 | <uint64_t>row
            cursors[part] += 1
        begin = 0
        for part in range(parts):
            low, end = part * PART, cursors[part]
            for slot in range(PART):
                places[slot] = 0
            for at in range(begin, end):
                places[(placed[at] >> 32) & (PART - 1)] += 1
            at = begin
            for slot in range(min(PART, slots - low)):
                number, places[slot] = places[slot], at
                counts[low + slot] = number
                at += number
            for at in range(begin, end):
                slot = (placed[at] >> 32) & (PART - 1)
                order[places[slot]] = <int32_t>placed[at]
                places[slot] += 1
            begin = end
        free(cursors)


cdef inline void write_item(uint8_t *item, const uint8_t *entry, int64_t width) noexcept nogil:
    if width == 32:
        # faster than a copy of any length
        memcpy(item, entry, 32)
    else:
        memcpy(item, entry, width)


def gather(
    const uint8_t[::1] data,
    int64_t size,
    int32_t[::1] order,
    int64_t slots,
    int64_t fingerprint,
    uint8_t[:, ::1] items,
    uint64_t[::1] hashes,
):
    """Write the items of the entries `order` to `items`, and the filter hashes of their keys to `hashes`.

    `fingerprint` is its place in an item; -1: there is none. `hashes` may be empty: then none are written.

    - `slots` is 0: `order` stays. Hashes are written without repeats of their neighbours.
    - `slots` > 0: `order` has whole slots. It is sorted by rank within each slot. Hashes are distinct.

    Return the number of hashes, or -1 if this sort is not enough or would be slow. It is not enough if items of a hash
    are not in answer order, or if a hash has many fingerprints or is not normal. It is slow if slots have many items.
    After -1, items and hashes are undefined. `order` keeps its entries, and the order of those with one hash.
    """
    cdef Py_ssize_t rows = order.shape[0], number, place, begin, found = 0, left = 16 * order.shape[0]
    cdef int64_t width = items.shape[1], entries
    cdef uint64_t value, above, slot = 0, by = slots
    cdef uint32_t mark = 0
    cdef uint32_t[MARKS] marks
    cdef int32_t one, other, moved
    cdef int known = 0, at
    cdef const uint8_t *entry
    cdef const uint8_t *before
    cdef bint right = True, hashing = hashes.shape[0] > 0
    cdef uint64_t *quotients
    if not TIME + 4 <= width <= size or slots < 0 or fingerprint > width - 4:
        fail("an item is no part of an entry, or has no fingerprint there")
    if items.shape[0] < rows or (hashing and hashes.shape[0] < rows):
        fail("there is less room than entries")
    entries = data.shape[0] // size
    for number in range(rows):
        if not 0 <= order[number] < entries:
            fail("an entry is not there")
    quotients = <uint64_t *>malloc(8 * rows + 8)
    if quotients == NULL:
        raise MemoryError
    with nogil:
        number = 0
        while right and number < rows:
            # the entries of one slot are sorted while the next ones come from memory
            begin = number
            while number < rows:
                if number + AHEAD < rows:
                    entry = &data[order[number + AHEAD] * size]
                    prefetch(entry)
                    prefetch(entry + width - 1)
                value = normal_at(&data[order[number] * size])
                if not slots:
                    number += 1
                    break
                above = value // by
                value -= above * by
                if number == begin:
                    slot = value
                elif value != slot:
                    break
                place, moved = number, order[number]
                while place > begin and quotients[place - 1] > above:
                    quotients[place], order[place] = quotients[place - 1], order[place - 1]
                    place -= 1
                quotients[place], order[place] = above, moved
                left -= number - place
                number += 1
                if left < 0 or above * by + slot > <uint64_t>INT32_MAX:
                    right = False
                    break
            for place in range(begin, number if right else begin):
                entry = &data[order[place] * size]
                write_item(&items[place, 0], entry, width)
                if not slots or place == begin or quotients[place] != quotients[place - 1]:
                    known = 0
                else:
                    before = &items[place - 1, 0]
                    one, other = <int32_t>word_at(before + TIME), <int32_t>word_at(entry + TIME)
                    right &= one > other or (one == other and long_at(before + OFFSET) > long_at(entry + OFFSET))
                if hashing:
                    if fingerprint >= 0:
                        mark = word_at(entry + fingerprint)
                    at = 0
                    while at < known and marks[at] != mark:
                        at += 1
                    if at < known:
                        continue
                    if known == MARKS:
                        right = False
                        break
                    marks[known] = mark
                    known += 1
                    value = filter_mix(normal_at(entry) << 32 | mark)
                    if slots or not found or hashes[found - 1] != value:
                        hashes[found] = value
                        found += 1
        free(quotients)
    return found if right else -1


cdef int by_value(const void *one, const void *other) noexcept nogil:
    cdef uint64_t a = (<const uint64_t *>one)[0], b = (<const uint64_t *>other)[0]
    return (a > b) - (a < b)


def distinct(const uint64_t[::1] hashes, uint64_t[::1] found):
    """Write the distinct hashes to `found`, grouped by their first bits. Return their number."""
    cdef Py_ssize_t rows = hashes.shape[0], number, begin, end, count = 0
    cdef uint64_t part, parts, value, first, last, place
    cdef uint64_t *table
    cdef int64_t *ends
    cdef int bits = 0
    cdef bint few, is_new
    if found.shape[0] < rows:
        fail("there is less room than hashes")
    while (rows >> bits) > TABLE // 4:
        bits += 1
    parts = <uint64_t>1 << bits
    ends = <int64_t *>calloc(2 * parts + 1, 8)
    table = <uint64_t *>malloc(8 * TABLE)
    if ends == NULL or table == NULL:
        free(ends)
        free(table)
        raise MemoryError
    cdef int64_t *cursors = ends + parts + 1
    with nogil:
        for number in range(rows):
            ends[(hashes[number] >> (64 - bits) if bits else 0) + 1] += 1
        for part in range(parts):
            ends[part + 1] += ends[part]
        memcpy(cursors, ends, 8 * parts)
        for number in range(rows):
            part = hashes[number] >> (64 - bits) if bits else 0
            found[cursors[part]] = hashes[number]
            cursors[part] += 1
        for part in range(parts):
            begin, end = ends[part], ends[part + 1]
            if begin == end:
                continue
            few = end - begin <= TABLE // 2
            if few:
                # the first hash marks a free place: it needs no place itself
                for number in range(TABLE):
                    table[number] = found[begin]
            else:
                # probably many repeats of few hashes
                qsort(&found[begin], end - begin, 8, by_value)
            first = last = found[begin]
            found[count] = first
            count += 1
            for number in range(begin + 1, end):
                value = found[number]
                if few:
                    place = value & (TABLE - 1)
                    while table[place] != first and table[place] != value:
                        place = (place + 1) & (TABLE - 1)
                    is_new = value != first and table[place] != value
                    table[place] = value
                else:
                    is_new = value != last
                    last = value
                if is_new:
                    found[count] = value
                    count += 1
        free(ends)
        free(table)
    return count


def set_bits(const uint64_t[::1] hashes, uint32_t[:, ::1] words):
    """Set the bits of hashes in a filter."""
    cdef Py_ssize_t number, rows = hashes.shape[0]
    cdef uint64_t block, blocks = words.shape[0]
    cdef uint32_t low
    cdef int word
    if words.shape[1] != 8 or (rows and not blocks):
        fail("a filter has blocks of 8 words")
    with nogil:
        for number in range(rows):
            if number + AHEAD < rows:
                block = (hashes[number + AHEAD] >> 32) * blocks >> 32
                # a block may have parts of two cache lines
                prefetch(&words[block, 0])
                prefetch(&words[block, 7])
            block = (hashes[number] >> 32) * blocks >> 32
            low = <uint32_t>hashes[number]
            for word in range(8):
                words[block, word] |= <uint32_t>1 << (<uint32_t>(low * SALTS[word]) >> 27)


def filter_hash(uint64_t value):
    """Return the hash for filters. See `filter_mix`."""
    return filter_mix(value)


def block_may_hold(bytes block not None, uint32_t low):
    """Return whether a block of a filter has all bits of a hash, given the lower half of the hash."""
    cdef Bits bits
    if len(block) != 32:
        fail("a block has 8 words")
    set_key_bits(&bits, low)
    return bool(may_hold(<const uint8_t *>block, &bits))


def match(
    const int32_t[::1] stored,
    const int32_t[::1] wanted,
    const int64_t[::1] starts,
    int64_t[::1] items,
    int64_t[::1] first,
    int64_t[::1] counts,
):
    """Find the stored hashes that occur in the sorted `wanted`. Return their number.

    Written for each: its place in `stored` to `items`, its first place in `wanted` to `first`, and the number of its
    places there to `counts`. `starts` has the places in `wanted` at which the parts of equal first bits begin.
    """
    cdef Py_ssize_t item, found = 0, parts = starts.shape[0] - 1, number
    cdef int64_t place, end, begin
    cdef int shift = 31
    cdef int32_t value
    if min(items.shape[0], first.shape[0], counts.shape[0]) < stored.shape[0] or parts < 1:
        fail("there is less room than hashes")
    while shift and <int64_t>1 << (31 - shift) < parts:
        shift -= 1
    for number in (0, parts):
        if not 0 <= starts[number] <= wanted.shape[0]:
            fail("a part is not there")
    if <int64_t>1 << (31 - shift) > parts:
        fail("there are fewer parts than first bits")
    with nogil:
        for item in range(stored.shape[0]):
            value = stored[item]
            if value < 0:
                continue
            place, end = starts[value >> shift], starts[(value >> shift) + 1]
            while place < end and wanted[place] < value:
                place += 1
            if place < end and wanted[place] == value:
                begin = place
                while place < end and wanted[place] == value:
                    place += 1
                items[found], first[found], counts[found] = item, begin, place - begin
                found += 1
    return found


# Packed runs. A row of `columns`, in stored order, is: the bytes of the least value in a run's header (negative if that
# has a sign), the place in an item, the bytes in an item. `topics` are the rising ids that the runs number; if there are
# none, the runs have the ids themselves.


cdef inline uint64_t ones(uint64_t width) noexcept nogil:
    """Return a number of `width` ones; `width` is 0 to 64."""
    return ~<uint64_t>0 >> (64 - width) if width else 0


cdef inline uint64_t bits_at(const uint64_t *words, uint64_t bit, uint64_t mask) noexcept nogil:
    """Return the number that begins at a bit, lowest bit first, as wide as `mask`.

    The word behind it must be readable, unless the number has no bits.
    """
    cdef uint64_t at = bit >> 6, shift = bit & 63
    # the next word supplies the upper bits; two shifts, because a shift by 64 is undefined
    return (words[at] >> shift | words[at + (mask != 0)] << 1 << (63 - shift)) & mask


cdef inline int64_t line_at(const int64_t *line, Py_ssize_t size, int64_t offset) noexcept nogil:
    """Return the time at an offset by a time line (base, shift, seconds...)."""
    cdef int64_t above = <int64_t>(<uint64_t>offset - <uint64_t>line[0])
    cdef int shift = <int>line[1]
    cdef int64_t point = min(max(above >> shift, 0), size - 4)
    cdef uint64_t rise = <uint64_t>(line[point + 3] - line[point + 2])
    above = <int64_t>((<uint64_t>above - (<uint64_t>point << shift)) * rise)
    return <int64_t>(<uint64_t>(above >> shift) + <uint64_t>line[point + 2])


cdef inline void write_columns(
    uint8_t *item, const uint64_t *values, const int64_t *columns, Py_ssize_t count
) noexcept nogil:
    """Write the values of an item's columns, big-endian."""
    cdef Py_ssize_t column, byte
    cdef uint64_t value
    cdef uint8_t *last
    for column in range(count):
        value = values[column]
        last = item + columns[3 * column + 1] + columns[3 * column + 2] - 1
        for byte in range(columns[3 * column + 2]):
            last[-byte] = <uint8_t>value
            value >>= 8


cdef int check_columns(
    const int64_t[:, ::1] columns, int64_t of_keys, const int64_t[::1] line, const int32_t[::1] topics, int64_t size
) except -1:
    """Check that `columns`, `line` and `topics` are safe for the loops; items have `size` bytes."""
    cdef Py_ssize_t column
    if columns.shape[1] != 3 or not 0 < of_keys <= columns.shape[0] - 2 or line.shape[0] < 4 or not 0 <= line[1] < 63:
        fail("columns or line are not as they are stored")
    if topics.shape[0] and of_keys <= TOPIC_COLUMN:
        fail("keys have no topic")
    for column in range(columns.shape[0]):
        if not 1 <= columns[column, 2] <= 8 or not 1 <= labs(columns[column, 0]) <= 8:
            fail("a column has 1 to 8 bytes")
        if columns[column, 1] < 0 or columns[column, 1] + columns[column, 2] > size:
            fail("a column is no part of an item")
    return 0


cdef int64_t pack_rows(
    const uint64_t *rows, int64_t stride, int64_t count, int64_t first, int64_t stop, const uint64_t *least,
    const uint64_t *widths, uint8_t *packed, int64_t at
) noexcept nogil:
    """Write rows of the columns [first, stop) from byte `at` on. Return the byte behind them.

    A value is stored less the least of its column, in as many bits as the column's width, lowest bits first. The 8
    bytes behind the rows must be writable.
    """
    cdef uint64_t bits = 0, held = 0, value, width
    cdef int64_t row, column, used = 0
    # columns without bits are left out
    cdef int64_t[64] columns
    for column in range(first, stop):
        if widths[column]:
            columns[used] = column
            used += 1
    for row in range(count):
        for column in range(used):
            value = rows[columns[column] * stride + row] - least[columns[column]]
            width = widths[columns[column]]
            # at most 56 at a time: with the 7 that are held they fit 64 bits
            if width > 56:
                bits |= (value & ones(56)) << held
                memcpy(packed + at, &bits, 8)
                bits, at = bits >> 56, at + 7
                width, value = width - 56, value >> 56
            bits |= value << held
            held += width
            # the next value writes the byte with the held bits again
            memcpy(packed + at, &bits, 8)
            at += held >> 3
            bits >>= held & 56
            held &= 7
    return at + (held > 0)


cdef inline uint64_t number_at(const uint8_t *place, int64_t size) noexcept nogil:
    """Return the big-endian number of `size` bytes."""
    cdef uint64_t value = 0
    cdef int64_t byte
    for byte in range(size):
        value = value << 8 | place[byte]
    return value


cdef void read_column(
    const uint8_t *place, int64_t stride, int64_t count, int64_t size, bint signed, uint64_t *rows
) noexcept nogil:
    """Read the big-endian numbers of `size` bytes that are `stride` bytes apart."""
    cdef int64_t item
    cdef int spare = <int>(64 - 8 * size)
    if size == 4 and signed:
        for item in range(count):
            rows[item] = <uint64_t><int64_t><int32_t>word_at(place + item * stride)
    elif size == 4:
        for item in range(count):
            rows[item] = word_at(place + item * stride)
    elif size == 8:
        for item in range(count):
            rows[item] = <uint64_t>long_at(place + item * stride)
    else:
        for item in range(count):
            rows[item] = number_at(place + item * stride, size)
            if signed:
                rows[item] = <uint64_t>(<int64_t>(rows[item] << spare) >> spare)


cdef int64_t number_of(const int32_t *topics, int64_t count, int32_t topic) noexcept nogil:
    """Return the place of a topic among rising ids; -1 if it is not there."""
    cdef int64_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) >> 1
        if topics[middle] < topic:
            low = middle + 1
        else:
            high = middle
    return low if low < count and topics[low] == topic else -1


def pack_items(
    const uint8_t[:, ::1] data,
    const int64_t[::1] starts,
    int64_t base,
    int64_t of_keys,
    const int64_t[:, ::1] columns,
    const int64_t[::1] line,
    const int32_t[::1] topics,
    uint8_t[::1] packed,
    int64_t[::1] ends,
):
    """Write packed runs one after the other to `packed`, and the end of each to `ends`.

    `data` has the bytes of the items. `starts` has the first item of each run, then the end of the last. `packed` must
    have space for headers, marks, 64 bits per column and item, and a word. Return whether `topics` has each item's
    topic.
    """
    cdef Py_ssize_t runs = ends.shape[0], run, column, width_of = columns.shape[0], room = 8
    cdef int64_t most = 0, count, item, n, at = 0, key, byte, size, number, header = 5, bit
    cdef uint64_t quotients, value, before, first, rank, turned, low, high, width
    cdef int32_t topic
    cdef uint64_t[64] least
    cdef uint64_t[64] widths
    cdef uint64_t *values
    cdef uint64_t *ranks
    cdef uint64_t *rows
    cdef uint8_t *is_new
    cdef uint8_t marks
    cdef bint is_ranked, has_all = True
    # numbers of some topics, by the lower bits of their ids; -1: unknown
    cdef int32_t[256] known_ids
    cdef int64_t[256] known
    check_columns(columns, of_keys, line, topics, data.shape[1])
    if width_of > 64 or starts.shape[0] != runs + 1 or base <= 0 or starts[0] != 0:
        fail("runs are not as they are stored")
    for column in range(width_of):
        header += 1 + labs(columns[column, 0])
    for run in range(runs):
        if not 0 <= starts[run] < starts[run + 1] <= data.shape[0]:
            fail("a run has one item at least, and its items are there")
        count = starts[run + 1] - starts[run]
        most = max(most, count)
        room += count * (8 * width_of + 1) + header + 3
    if packed.shape[0] < room:
        fail("there is less room than packed items may take")
    values = <uint64_t *>malloc(8 * (width_of + 1) * most)
    is_new = <uint8_t *>malloc(most + 8)
    if values == NULL or is_new == NULL:
        free(values)
        free(is_new)
        raise MemoryError
    ranks = values + width_of * most
    quotients = <uint64_t>0x7FFFFFFF // <uint64_t>base + 1
    for item in range(256):
        known_ids[item], known[item] = 0, -1
    with nogil:
        for run in range(runs):
            count = starts[run + 1] - starts[run]
            is_new[0] = 1
            for item in range(1, count + 8):
                is_new[item] = 0
            for column in range(width_of):
                rows = values + column * most
                read_column(
                    &data[starts[run], columns[column, 1]], data.shape[1], count, columns[column, 2],
                    columns[column, 0] < 0, rows,
                )
                if column < of_keys:
                    for item in range(1, count):
                        is_new[item] |= rows[item] != rows[item - 1]
            rows = values + (width_of - 1) * most
            for item in range(count):
                rows[item] -= <uint64_t>line_at(&line[0], line.shape[0], <int64_t>rows[item - most])
            n = 0
            for item in range(count):
                n += is_new[item]
            for column in range(of_keys if n < count else 0):
                # a key's items have the same values, so each may be written to the key's place
                rows, key = values + column * most, 0
                for item in range(count):
                    rows[key] = rows[item]
                    key += is_new[item + 1]
            if topics.shape[0]:
                rows = values + TOPIC_COLUMN * most
                for key in range(n):
                    topic = <int32_t>rows[key]
                    number = topic & 255
                    if known[number] < 0 or known_ids[number] != topic:
                        known_ids[number], known[number] = topic, number_of(&topics[0], topics.shape[0], topic)
                        has_all &= known[number] >= 0
                    rows[key] = <uint64_t>known[number]
            # keys become steps from rank to rank, if ranks rise and no hash is negative
            is_ranked, before = True, 0
            for key in range(n):
                value = values[key]
                rank = value % <uint64_t>base * quotients + value // <uint64_t>base
                is_ranked &= <int64_t>value >= 0 and rank >= before
                ranks[key] = before = rank
            first = ranks[0]
            if is_ranked:
                before = first
                for key in range(n):
                    values[key], before = ranks[key] - before, ranks[key]
            packed[at] = is_ranked
            for byte in range(4):
                packed[at + 1 + byte] = <uint8_t>(n >> (24 - 8 * byte))
            at += 5
            for column in range(width_of):
                rows, number = values + column * most, n if column < of_keys else count
                # inverting the first bit makes signed numbers compare as unsigned ones
                turned = <uint64_t>1 << 63 if columns[column, 0] < 0 else 0
                low = high = rows[0] ^ turned
                for item in range(1, number):
                    value = rows[item] ^ turned
                    low, high = min(low, value), max(high, value)
                width = 0
                while width < 64 and (high - low) >> width:
                    width += 1
                least[column], widths[column] = low ^ turned, width
                packed[at] = <uint8_t>width
                value, size = first if column == 0 and is_ranked else least[column], labs(columns[column, 0])
                for byte in range(size):
                    packed[at + size - byte] = <uint8_t>value
                    value >>= 8
                at += 1 + size
            at = pack_rows(values, most, n, 0, of_keys, least, widths, &packed[0], at)
            if n < count:
                item = 0
                while item < count:
                    marks = 0
                    for bit in range(8):
                        marks |= is_new[item + bit] << bit
                    packed[at] = marks
                    at += 1
                    item += 8
            at = pack_rows(values, most, count, of_keys, width_of, least, widths, &packed[0], at)
            ends[run] = at
        free(values)
        free(is_new)
    return has_all


cdef inline int64_t marked(const uint64_t *words, uint64_t bit, int64_t count, int64_t number) noexcept nogil:
    """Return the place of mark `number` (from 0) among `count` bits; `count` if there are fewer marks."""
    cdef int64_t at = 0, held
    cdef uint64_t word
    while at < count:
        word = bits_at(words, bit + at, ones(min(count - at, 64)))
        held = ones_of(word)
        if number < held:
            while number:
                word &= word - 1
                number -= 1
            return at + first_one(word)
        number -= held
        at += 64
    return count


cdef inline uint64_t short_at(const uint8_t *data, uint64_t bit, uint64_t mask) noexcept nogil:
    """Return a number of up to 57 bits. The 8 bytes from its first byte on must be readable."""
    cdef uint64_t word
    memcpy(&word, data + (bit >> 3), 8)
    return word >> (bit & 7) & mask


cdef int64_t find_in_run(
    const uint64_t *words, Py_ssize_t word_count, int64_t begin, int64_t size, int64_t count, int64_t most,
    const int64_t *wanted, Py_ssize_t asked_count, const Columns *of, uint8_t *items, int64_t stride, int64_t room
) noexcept nogil:
    """Write the items of one packed run whose key's rank is among the rising `wanted`; all if `asked_count` is -1.

    Return their number, or -1 if the run is malformed, its hashes are not by rank or such a key has no topic, or -2 if
    `room` is too small.
    """
    cdef int64_t quotients = <int64_t>0x7FFFFFFF // of.base + 1
    cdef int64_t keys, key_bits = 0, item_bits = 0, marks_at, items_at, rank, asked, key, first, item, total = 0
    cdef int64_t stop = 0
    cdef Py_ssize_t column, low = 0, high = asked_count, middle
    cdef uint64_t[64] widths
    cdef uint64_t[64] masks
    cdef uint64_t[64] least
    cdef uint64_t[64] values
    cdef uint64_t value, at, bit, marks
    cdef int64_t bytes_of, mark_bits
    cdef const uint8_t *data
    cdef const uint8_t *place
    cdef bint whole = asked_count < 0
    if begin < 0 or size < of.header or begin > 8 * (word_count - 1) - size or not 0 < count <= most:
        return -1
    data = <const uint8_t *>words + begin
    keys, place = number_at(data + 1, 4), data + 5
    for column in range(of.count):
        bytes_of = of.table[3 * column]
        widths[column] = place[0]
        value = number_at(place + 1, labs(bytes_of))
        place += 1 + labs(bytes_of)
        if bytes_of < 0:
            value = <uint64_t>(<int64_t>(value << (64 + 8 * bytes_of)) >> (64 + 8 * bytes_of))
        if widths[column] > <uint64_t>(64 if column else 32):
            return -1
        least[column], masks[column] = value, ones(widths[column])
        if column < of.of_keys:
            key_bits += widths[column]
        else:
            item_bits += widths[column]
    rank = <int64_t>least[0]
    if data[0] != 1 or not -<int64_t>0x80000000 <= rank < quotients * of.base or not 0 < keys <= count:
        return -1
    marks_at = begin + of.header + (keys * key_bits + 7 >> 3)
    items_at = marks_at + (count + 7 >> 3 if keys < count else 0)
    if items_at + (count * item_bits + 7 >> 3) != begin + size:
        return -1
    marks = 8 * marks_at
    if keys < count:
        mark_bits = 8 * (items_at - marks_at)
        if (
            marked(words, marks, count, 0) != 0
            or marked(words, marks, count, keys - 1) == count
            or marked(words, marks, mark_bits, keys) != mark_bits
        ):
            return -1
    while low < high:
        middle = (low + high) >> 1
        if wanted[middle] < rank:
            low = middle + 1
        else:
            high = middle
    asked = wanted[low] if low < asked_count else INT64_MAX
    bit, key = 8 * <uint64_t>of.header, 0
    while key < keys:
        # skip four keys at a time if their last rank is below the next wanted one
        while not whole and key + 4 <= keys:
            value = short_at(data, bit, masks[0]) + short_at(data, bit + key_bits, masks[0])
            value += short_at(data, bit + 2 * key_bits, masks[0]) + short_at(data, bit + 3 * key_bits, masks[0])
            if rank + <int64_t>value >= asked:
                break
            rank, bit, key = rank + <int64_t>value, bit + 4 * key_bits, key + 4
        if key == keys:
            break
        rank += <int64_t>short_at(data, bit, masks[0])
        while asked < rank and not whole:
            low += 1
            asked = wanted[low] if low < asked_count else INT64_MAX
        if whole or asked == rank:
            if keys < count:
                # this key's items begin where those of the key before end
                first = stop if whole else marked(words, marks, count, key)
                stop = first + 1 + marked(words, marks + first + 1, count - first - 1, 0)
            else:
                first, stop = key, key + 1
            if rank < 0:
                return -1
            if total + stop - first > room:
                return -2
            values[0] = rank % quotients * of.base + rank // quotients
            at = 8 * <uint64_t>begin + bit + widths[0]
            for column in range(1, of.of_keys):
                values[column] = bits_at(words, at, masks[column]) + least[column]
                at += widths[column]
            if of.topic_count:
                if values[TOPIC_COLUMN] >= of.topic_count:
                    return -1
                values[TOPIC_COLUMN] = <uint64_t><int64_t>of.topics[values[TOPIC_COLUMN]]
            for item in range(first, stop):
                at = 8 * items_at + item * item_bits
                for column in range(of.of_keys, of.count):
                    values[column] = bits_at(words, at, masks[column]) + least[column]
                    at += widths[column]
                values[of.count - 1] += <uint64_t>line_at(of.line, of.line_size, <int64_t>values[of.count - 2])
                write_columns(items + total * stride, values, of.table, of.count)
                total += 1
        bit, key = bit + key_bits, key + 1
    return -1 if rank >= quotients * of.base else total


cdef int set_columns(
    Columns *of, const int64_t[:, ::1] columns, int64_t of_keys, const int64_t[::1] line, const int32_t[::1] topics,
    int64_t base, int64_t size
) except -1:
    cdef Py_ssize_t column
    check_columns(columns, of_keys, line, topics, size)
    if columns.shape[0] > 64 or base <= 0:
        fail("runs are not as they are stored")
    of.count, of.of_keys, of.base, of.header = columns.shape[0], of_keys, base, 5
    of.table, of.line, of.line_size = &columns[0, 0], &line[0], line.shape[0]
    of.topics, of.topic_count = &topics[0] if topics.shape[0] else NULL, <uint64_t>topics.shape[0]
    for column in range(of.count):
        of.header += 1 + labs(columns[column, 0])
    return 0


def find_items(
    const uint64_t[::1] words,
    const int64_t[:, ::1] runs,
    const int64_t[::1] wanted,
    int64_t base,
    int64_t most,
    int64_t of_keys,
    const int64_t[:, ::1] columns,
    const int64_t[::1] line,
    const int32_t[::1] topics,
    uint8_t[:, ::1] items,
    int64_t[::1] counts,
):
    """Write the items of packed runs whose key's rank is among the rising `wanted`; all if `wanted` is None.

    Items are in the order of the runs; `counts` gets the number of each run. Return the number of all, or -1 if a run
    is malformed, its hashes are not by rank, or `items` is too small. A run is (begin, bytes, items) with at most
    `most` items. A word must follow the runs.
    """
    cdef Py_ssize_t run, asked_count = -1 if wanted is None else wanted.shape[0]
    cdef int64_t total = 0, found = 0
    cdef Columns of
    set_columns(&of, columns, of_keys, line, topics, base, items.shape[1])
    if runs.shape[1] != 3 or counts.shape[0] < runs.shape[0] or not words.shape[0]:
        fail("there are fewer counts than runs, or no words")
    with nogil:
        for run in range(runs.shape[0]):
            found = find_in_run(
                &words[0], words.shape[0], runs[run, 0], runs[run, 1], runs[run, 2], most,
                &wanted[0] if asked_count > 0 else NULL, asked_count, &of,
                &items[total, 0] if total < items.shape[0] else NULL, items.shape[1], items.shape[0] - total,
            )
            if found < 0:
                break
            counts[run] = found
            total += found
    return -1 if found < 0 else total


def find_one(
    const uint64_t[::1] words,
    int64_t begin,
    int64_t size,
    int64_t count,
    int64_t key_hash,
    int64_t base,
    int64_t most,
    int64_t of_keys,
    const int64_t[:, ::1] columns,
    const int64_t[::1] line,
    const int32_t[::1] topics,
    uint8_t[:, ::1] items,
):
    """Write the items of one normal hash in one run. Return as `find_items`; -2 if `items` is too small."""
    cdef int64_t wanted
    cdef Columns of
    set_columns(&of, columns, of_keys, line, topics, base, items.shape[1])
    if not words.shape[0] or key_hash < 0:
        fail("there are no words, or the hash is not normal")
    wanted = key_hash % base * (<int64_t>0x7FFFFFFF // base + 1) + key_hash // base
    return find_in_run(
        &words[0], words.shape[0], begin, size, count, most, &wanted, 1, &of,
        &items[0, 0] if items.shape[0] else NULL, items.shape[1], items.shape[0],
    )


def file_states(tuple paths not None, Py_ssize_t folders):
    """Return the states of files as `root_view.states_of`; None: it has to be asked, because of their number or an error.
    """
    cdef const char *names[STATES]
    cdef uint64_t[STATES * STATE] states
    cdef Py_ssize_t count = len(paths), number
    cdef bint is_told = True
    if count > STATES:
        return None
    for number in range(count):
        names[number] = PyBytes_AS_STRING(<bytes?>paths[number])
    # without the lock, because a remote disk may take long
    with nogil:
        for number in range(count):
            if not file_state(names[number], 0 < number < folders, number >= folders, &states[STATE * number]):
                is_told = False
                break
    return PyBytes_FromStringAndSize(<char *>states, 8 * STATE * count) if is_told else None


cdef inline bint is_same(first, second) noexcept:
    """Return whether two plain texts are equal."""
    cdef Py_ssize_t units = PyUnicode_GET_LENGTH(first)
    cdef int kind = PyUnicode_KIND(first)
    if units != PyUnicode_GET_LENGTH(second) or kind != PyUnicode_KIND(second):
        return False
    return not memcmp(PyUnicode_DATA(first), PyUnicode_DATA(second), units * kind)


@cython.final
cdef class PutRows:
    """The compiled `writing.buffer.PutRows`.

    Each method is atomic for other threads and signal handlers, because it runs no Python code.
    """
    cdef readonly list keys
    cdef readonly bytearray data
    cdef readonly int64_t size_bytes
    # of the marks
    cdef dict sources, positions
    cdef bytearray numbers
    cdef dict topics
    cdef int64_t row_size, room, room_bytes, longest_key, last_ms
    cdef bint takes

    def __init__(
        self, dict topics not None, int64_t row_size, marks not None, int64_t rows, int64_t room, int64_t room_bytes,
        int64_t longest_key, int64_t last_ms,
    ):
        if row_size < MESSAGE or rows < 0 or rows > 1 << 31 or row_size > 1 << 20:
            fail("a row has its message, and a chunk has rows")
        self.sources, self.positions, self.numbers = marks.sources, marks.positions, marks.numbers
        self.topics, self.row_size, self.keys, self.data = topics, row_size, [], bytearray(rows * row_size)
        self.room, self.room_bytes, self.longest_key, self.last_ms = min(room, rows), room_bytes, longest_key, last_ms
        self.takes = row_size == MESSAGE

    cdef int mark(self, source, number, position, int64_t place) except -1:
        """Add the mark of a message, whose entries are the last ones, as `Marks.add`; `place` is the position."""
        cdef int overflow = 0
        cdef int64_t count = len(self.keys), of_source = PyLong_AsLongLongAndOverflow(number, &overflow)
        cdef Py_ssize_t size = len(self.numbers)
        cdef PyObject *known = PyDict_GetItem(self.positions, source)
        cdef char *numbers
        PyByteArray_Resize(self.numbers, size + MARK)
        numbers = PyByteArray_AS_STRING(self.numbers) + size
        memcpy(numbers, &count, 8)
        memcpy(numbers + 8, &of_source, 8)
        memcpy(numbers + 16, &place, 8)
        if known == NULL or place > PyLong_AsLongLongAndOverflow(<object>known, &overflow):
            PyDict_SetItem(self.positions, source, position)
        return 0

    def add(self, topic, queue_id, keys, offset, size, timestamp_ms, source=None, position=None):
        """Add a message. Return the number of its entries; 0: nothing was added, because it is not plain, or no space.

        A plain message has one key, or a list or tuple of a few different ones. Its source, if it has one, is that of an
        earlier message here.
        """
        cdef int overflow = 0
        cdef long long queue, place, length, time, reached = 0
        cdef int64_t count = len(self.keys), bytes_of = 0, second
        cdef int32_t word
        cdef Py_ssize_t entries = 1, number, earlier
        cdef bint is_one = PyUnicode_CheckExact(keys)
        cdef PyObject *topic_id
        cdef PyObject *of_source = NULL
        cdef PyObject **several
        cdef char[MESSAGE] row
        cdef char *rows
        if not self.takes or not PyUnicode_CheckExact(topic):
            return 0
        if is_one:
            if not is_text(keys, self.longest_key):
                return 0
            bytes_of = PyUnicode_GET_LENGTH(keys)
        else:
            if not (PyList_CheckExact(keys) or PyTuple_CheckExact(keys)):
                return 0
            entries, several = PySequence_Fast_GET_SIZE(keys), PySequence_Fast_ITEMS(keys)
            if not 0 < entries <= COMPARED_KEYS:
                return 0
            for number in range(entries):
                if not is_text(<object>several[number], self.longest_key):
                    return 0
                for earlier in range(number):
                    if is_same(<object>several[earlier], <object>several[number]):
                        return 0
                bytes_of += PyUnicode_GET_LENGTH(<object>several[number])
        bytes_of += entries * ROW_BYTES
        if count + entries > self.room or self.size_bytes + bytes_of > self.room_bytes:
            return 0
        topic_id = PyDict_GetItem(self.topics, topic)
        if topic_id == NULL or not (PyLong_CheckExact(queue_id) and PyLong_CheckExact(offset)):
            return 0
        if not (PyLong_CheckExact(size) and PyLong_CheckExact(timestamp_ms)):
            return 0
        if source is not None or position is not None:
            if not (PyUnicode_CheckExact(source) and PyLong_CheckExact(position)):
                return 0
            of_source = PyDict_GetItem(self.sources, source)
            if of_source == NULL:
                return 0
            reached = PyLong_AsLongLongAndOverflow(position, &overflow)
            if overflow or reached < 0:
                return 0
        queue = PyLong_AsLongLongAndOverflow(queue_id, &overflow)
        if overflow or not 0 <= queue < INT32_MAX:
            return 0
        place = PyLong_AsLongLongAndOverflow(offset, &overflow)
        if overflow or place < 0:
            return 0
        length = PyLong_AsLongLongAndOverflow(size, &overflow)
        if overflow or not 0 <= length <= INT32_MAX:
            return 0
        time = PyLong_AsLongLongAndOverflow(timestamp_ms, &overflow)
        if overflow or not 0 <= time <= self.last_ms:
            return 0
        word = <int32_t>PyLong_AsLongLongAndOverflow(<object>topic_id, &overflow)
        memcpy(row, &word, 4)
        word = <int32_t>queue
        memcpy(row + 4, &word, 4)
        memcpy(row + 8, &place, 8)
        word = <int32_t>length
        memcpy(row + 16, &word, 4)
        second = time // 1000
        memcpy(row + 20, &second, 8)
        rows = PyByteArray_AS_STRING(self.data) + count * MESSAGE
        for number in range(entries):
            memcpy(rows + number * MESSAGE, row, MESSAGE)
        if is_one:
            PyList_Append(self.keys, keys)
        else:
            PyList_SetSlice(self.keys, count, count, keys)
        self.size_bytes += bytes_of
        if of_source != NULL:
            # after the entries: without memory for it, their source sends them again
            self.mark(source, <object>of_source, position, reached)
        return entries

    def extend(self, list keys not None, bytes row not None, int64_t size_bytes, str source=None, position=None):
        """Add a copy of the packed row for each key, and the position of their source.

        False: nothing was added, because there is no space.
        """
        cdef int64_t count = len(self.keys), number
        if len(row) != self.row_size or count + len(keys) > len(self.data) // self.row_size:
            return False
        for number in range(len(keys)):
            memcpy(
                PyByteArray_AS_STRING(self.data) + (count + number) * self.row_size, PyBytes_AS_STRING(row), self.row_size
            )
        self.keys += keys
        self.size_bytes += size_bytes
        if source is not None and position is not None:
            self.mark(source, self.sources.setdefault(source, len(self.sources)), position, position)
        return True

    def close(self):
        """Make all further calls of `add` return 0."""
        self.takes = False
