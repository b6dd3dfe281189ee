# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: embedsignature=True, auto_pickle=False
"""Compiled lookups in files. A view has the files of a catalog, the newest first; it never changes.

Call this through `tiered_index.base.kernels`. Every length, place and width that a file states is checked before use. If one
is wrong, the search declines the file. The caller then searches the file with Python code, which reports the damage.
"""
from array import array
from types import MemberDescriptorType
from zlib import crc32
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
cimport cython
from cpython.buffer cimport PyBUF_READ
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject, PyObject_GetItem, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.unicode cimport PyUnicode_1BYTE_DATA, PyUnicode_DecodeASCII
from libc.stdlib cimport calloc, free, labs, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy, memset
from tiered_index.base._core cimport (
    BUILD, MOST_ITEMS, OFFSET, SALTS, SUM_FACTORS, SUM_STARTS, TIME, Bits, Columns, add_units, fail, filter_mix,
    find_in_run, first_one, is_text, long_at, may_hold, mixed32, normal_at, prefetch, read_ahead, read_cached,
    read_whole, seconds_now, set_columns, set_key_bits, word_at,
)

cdef extern from "structmember.h":
    ctypedef struct PyMemberDef:
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member

cdef extern from "Python.h":
    object PyType_GenericAlloc(PyTypeObject *, Py_ssize_t)
    void PyObject_GC_UnTrack(void *)
    int PyUnicode_KIND(object)
    int PyObject_GenericSetAttr(object, object, object) except -1
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1

REVISION = BUILD

cdef enum:
    # how a file is searched
    ELSEWHERE = 0
    CHAINS = 1
    PLAIN = 2
    PACKED = 3
    # results of a search in place of 0; `DECLINED`: the caller has to search the file
    DECLINED = -1
    NO_MEMORY = -2
    # notes of `find` about a file in place of its number of rows
    AWAY = -1
    SKIPPED = -2
    BY_FILTER = -4
    BY_TOPIC = -5
    # its filter excluded the key before its range was asked, so the file is out of range or without rows; of a file in
    # a storage, it is out of range or `BY_FILTER`
    NOT_ASKED = -6
    NOT_READ = -7
    # in range, but all of its entries are hidden
    HIDDEN_FILE = -8
    # the caller has to search it: these and smaller numbers say why
    NO_SEARCH = -9
    NO_DIRECTORY = -10
    NO_GROUP = -11
    IN_BLOCKS = -12
    LONG_CHAIN = -13
    DAMAGED = -14
    # slow reads of directories in one lookup, after which it leaves the other files to the caller: they take less time
    # side by side, and quick ones more
    MOST_SLOW = 4
    SLOW_MICROSECONDS = 3000
    # states of an entry by its queue and offset
    SHOWN = 0
    HIDDEN = 1
    RETIRED = 2
    # numbers of a batch for each file: rows; of a file in a storage also reads, their bytes, lookups that are in range
    # and whose topic it has, and those of them that its filter did not exclude
    COUNTS = 5
    READS = 1
    READ_BYTES = 2
    IN_RANGE = 3
    SEARCHED = 4
    # rows begin with: second, key hash, topic, queue, offset, size
    ROW_QUEUE = 16
    ROW_OFFSET = 20
    ROW_EXTRA = 32
    ITEM_EXTRA = 28
    GROUP = 32
    GROUP_BYTES = 16384
    STEPS = 256
    SCANNED_A_STEP = 32
    # entries of an unsealed file whose greatest second is noted together: 1 << 8
    PEAK_BITS = 8
    AHEAD = 16
    # entries of a chain that are loaded ahead
    FOLLOWED = 8
    FEW = 32
    # most items that are made with an answer
    AT_ONCE = 16
    # lookups of a batch whose files are chosen together, and pairs of lookup and file, unless one lookup has more
    LOOKUPS = 64
    PAIRS = 1 << 16
    # most and fewest files in a `Slices`, and most files in one of half the size
    TOGETHER = 64
    FEWEST_TOGETHER = 16
    HALF_TOGETHER = 32
    # a set of at most 255 files needs no memory of its own
    FEW_WORDS = 4
    # most bytes of the slices of a view
    MOST_TOGETHER = 64 << 20
    # retired rows that are held before those behind the page are dropped
    HELD_RETIRED = 1 << 16


cdef struct File:
    int kind
    # how its keys are hashed: 0 by rule abs, 1 by mask, 2 by both
    int rule
    # whether the owner's `source` supplies its slot groups, from a storage
    bint stored
    bint is_shard
    # the filter's blocks, their number
    const uint8_t *filter
    uint64_t blocks
    # of a file in a storage: how many lookups and batches found it open
    int64_t uses
    int64_t second_min
    int64_t second_max
    # the file's bytes
    const uint8_t *data
    uint64_t size
    int64_t begin_s
    int64_t slots
    # of a shard: how base slots (`slots`) are split or joined, and its slots [low, high)
    int64_t split
    int64_t join
    int64_t slot_low
    int64_t slot_high
    # only of unsealed files
    const int32_t *heads
    int64_t items_at
    int64_t items
    # the greatest second of all entries up to the end of each block of 1 << PEAK_BITS; `peak`: of those before `known`
    int64_t *peaks
    int64_t peak
    int64_t known
    # only of compacted files: the rows of the directory; a sum of each group that matched its checksum, 0 for others
    const uint8_t *groups
    int64_t group_count
    uint64_t *group_sums
    Columns columns
    # a sum of each of the filter's blocks after the filter has matched its checksum
    uint32_t *sums
    bint filter_damaged
    # it is not in a memory map, and has matched its checksum
    bint filter_held
    # bytes that searches have read in vain before that
    uint64_t missed
    uint32_t filter_crc
    void *owner


cdef struct Place:
    # a file in a view: its seconds, unless it grows; its filter after that has matched its checksum, unless it is in a
    # storage
    File *file
    int64_t second_min
    int64_t second_max
    const uint8_t *filter
    const uint32_t *sums
    uint64_t blocks
    # a copy of `file.stored`: reading it needs no access to the file
    bint stored
    # an unsealed file: use the seconds of `file`
    bint grows
    # of a batch: the file has a filter that `filter` above does not have, by another hash rule
    bint asks_file


# in place of the fingerprint of an erased key: any
cdef uint64_t ANY_FINGERPRINT = <uint64_t>1 << 32


cdef struct HiddenRanges:
    # the hidden offsets of a queue, and those of them that are retired: sorted ranges [start, end) that do not touch
    int32_t queue
    int64_t count
    const int64_t *starts
    const int64_t *ends
    int64_t retired_count
    const int64_t *retired_starts
    const int64_t *retired_ends


cdef struct HiddenEntries:
    # the hidden entries of a topic, as `service/log/hidden.py` has them
    int64_t begin_s
    int64_t key_count
    const uint32_t *hashes
    const uint64_t *fingerprints
    const int64_t *key_begins
    int64_t queue_count
    const int32_t *queues
    const int64_t *queue_begins
    int64_t range_count
    HiddenRanges *ranges


cdef struct Asked:
    # entries that are hidden by their queue or offset; NULL: none
    const HiddenEntries *hidden
    uint32_t key_hash
    uint32_t shown_hash
    uint32_t fingerprint
    int64_t low
    int64_t high
    # the end of the page before: second, offset, queue
    bint has_after
    int64_t[3] after
    # ids of the topic; `id_count` less than 0: all topics
    const int32_t *ids
    int64_t id_count
    # wanted rows; one more shows that there are others; 0: all
    int64_t most


cdef struct Found:
    # sizes of a row's further columns; negative for bytes, which are not swapped
    const int64_t *extra
    Py_ssize_t extra_count
    int64_t item_size
    int64_t stride
    int64_t fingerprint_at
    uint8_t *rows
    int64_t count
    int64_t room
    # rows that match, but are retired; the number of matching rows that are hidden
    uint8_t *retired
    int64_t retired_count
    int64_t retired_room
    int64_t hidden_count
    uint8_t *items
    int64_t items_room
    # a copy of a packed slot group that is not in a map; the requests to storages
    uint8_t *group
    int64_t group_room
    int64_t requests
    int64_t request_bytes
    # entries of chains that were read
    int64_t steps
    # the caller's `Call`, for sources; NULL: none
    PyObject *call
    # why the last search declined
    int why


cdef inline int64_t row_long(const uint8_t *row, int64_t place) noexcept nogil:
    cdef int64_t value
    memcpy(&value, row + place, 8)
    return value


cdef inline int32_t row_word(const uint8_t *row, int64_t place) noexcept nogil:
    cdef int32_t value
    memcpy(&value, row + place, 4)
    return value


cdef inline int64_t begin_of(const HiddenEntries *hidden, uint32_t key_hash, uint32_t fingerprint) noexcept nogil:
    """Return the first second that counts of a key, by one hash."""
    cdef int64_t low = 0, high = hidden.key_count, middle, begin = hidden.begin_s
    while low < high:
        middle = (low + high) >> 1
        if hidden.hashes[middle] < key_hash:
            low = middle + 1
        else:
            high = middle
    while low < hidden.key_count and hidden.hashes[low] == key_hash:
        if hidden.fingerprints[low] == fingerprint or hidden.fingerprints[low] == ANY_FINGERPRINT:
            begin = max(begin, hidden.key_begins[low])
        low += 1
    return begin


cdef inline bint are_in(
    const int64_t *starts, const int64_t *ends, int64_t count, int64_t offset
) noexcept nogil:
    """Return whether one of sorted ranges has an offset."""
    cdef int64_t at = 0, half
    if count == 0 or offset < starts[0]:
        return False
    # `starts[at]` is at most `offset`; a sum in place of a branch, which nothing could foretell
    while count > 1:
        half = count >> 1
        at += half * (starts[at + half] <= offset)
        count -= half
    return offset < ends[at]


cdef inline int state_of(const HiddenEntries *hidden, int32_t queue, int64_t offset, int64_t second) noexcept nogil:
    """Return whether an entry is `SHOWN`, or `HIDDEN` or `RETIRED` by its queue or offset."""
    cdef int64_t low = 0, high = hidden.queue_count, middle
    cdef const HiddenRanges *ranges
    while low < high:
        middle = (low + high) >> 1
        if hidden.queues[middle] < queue:
            low = middle + 1
        else:
            high = middle
    if low < hidden.queue_count and hidden.queues[low] == queue and second < hidden.queue_begins[low]:
        return HIDDEN
    low, high = 0, hidden.range_count
    while low < high:
        middle = (low + high) >> 1
        if hidden.ranges[middle].queue < queue:
            low = middle + 1
        else:
            high = middle
    if low == hidden.range_count or hidden.ranges[low].queue != queue:
        return SHOWN
    ranges = &hidden.ranges[low]
    if not are_in(ranges.starts, ranges.ends, ranges.count, offset):
        return SHOWN
    return RETIRED if are_in(ranges.retired_starts, ranges.retired_ends, ranges.retired_count, offset) else HIDDEN


cdef int take(const uint8_t *item, int64_t begin_s, const Asked *asked, Found *found) noexcept nogil:
    """Add the row of an item with the key's hash, if it is an answer to the lookup."""
    cdef uint32_t topic = word_at(item + 4)
    cdef int64_t number, second, offset
    cdef int state
    if found.fingerprint_at and word_at(item + found.fingerprint_at) != asked.fingerprint:
        return 0
    if asked.id_count >= 0:
        number = 0
        while number < asked.id_count and <uint32_t>asked.ids[number] != topic:
            number += 1
        if number == asked.id_count:
            return 0
    second = <int64_t>(<uint64_t>begin_s + <uint64_t><int64_t><int32_t>word_at(item + TIME))
    if second < asked.low or second > asked.high:
        return 0
    offset = long_at(item + OFFSET)
    if asked.has_after:
        if second > asked.after[0] or (second == asked.after[0] and offset > asked.after[1]):
            return 0
        if second == asked.after[0] and offset == asked.after[1] and <int32_t>word_at(item + 8) <= asked.after[2]:
            return 0
    if asked.hidden != NULL:
        state = state_of(asked.hidden, <int32_t>word_at(item + 8), offset, second)
        if state != SHOWN:
            found.hidden_count += 1
            if state == HIDDEN:
                return 0
            return add_row(item, second, asked, found, &found.retired, &found.retired_count, &found.retired_room)
    return add_row(item, second, asked, found, &found.rows, &found.count, &found.room)


cdef inline int add_row(
    const uint8_t *item, int64_t second, const Asked *asked, const Found *found, uint8_t **rows, int64_t *count,
    int64_t *most
) noexcept nogil:
    """Add an item to `rows`, which have room for `most`."""
    cdef uint32_t topic = word_at(item + 4), word
    cdef int64_t offset = long_at(item + OFFSET), room, size, number
    cdef uint8_t *row
    if count[0] == most[0]:
        room = 2 * most[0] + 64
        row = <uint8_t *>realloc(rows[0], room * found.stride)
        if row == NULL:
            return NO_MEMORY
        rows[0], most[0] = row, room
    row = rows[0] + count[0] * found.stride
    memcpy(row, &second, 8)
    memcpy(row + 8, &asked.shown_hash, 4)
    memcpy(row + 12, &topic, 4)
    word = word_at(item + 8)
    memcpy(row + ROW_QUEUE, &word, 4)
    memcpy(row + ROW_OFFSET, &offset, 8)
    word = word_at(item + 20)
    memcpy(row + 28, &word, 4)
    item, row = item + ITEM_EXTRA, row + ROW_EXTRA
    for number in range(found.extra_count):
        size = found.extra[number]
        if size == 4:
            word = word_at(item)
            memcpy(row, &word, 4)
        elif size < 0:
            size = -size
            memcpy(row, item, size)
        else:
            for room in range(size):
                row[room] = item[size - 1 - room]
        item, row = item + size, row + size
    count[0] += 1
    return 0


cdef inline void drop_retired(Found *found, int64_t start, int64_t second) noexcept nogil:
    """Drop the retired rows from `start` on that are older than `second`."""
    cdef int64_t at = start, number
    cdef uint8_t *row
    for number in range(start, found.retired_count):
        row = found.retired + number * found.stride
        if row_long(row, 0) >= second:
            if at != number:
                memcpy(found.retired + at * found.stride, row, found.stride)
            at += 1
    found.retired_count = at


cdef inline int declined(Found *found, int why) noexcept nogil:
    """Return `DECLINED`, and note why."""
    found.why = why
    return DECLINED


cdef int search_chain(const File *file, const Asked *asked, Found *found) noexcept nogil:
    """Add the rows of an unsealed file, at least the newest `most` + 1.

    `DECLINED`: the chain is too long, or does not lead to older entries.
    """
    cdef int64_t index = file.heads[asked.key_hash % <uint64_t>file.slots], older, step = 0
    cdef int64_t limit = max(<int64_t>STEPS, 1 + file.items // SCANNED_A_STEP)
    # the search ends where all earlier entries of the file are older than `oldest`
    cdef int64_t oldest = asked.low, before = found.count, enough = before + asked.most + 1
    cdef const uint8_t *entry
    cdef Found part
    if not asked.most:
        enough = <int64_t>1 << 62
    while index > 0:
        if index >= file.items:
            return declined(found, DAMAGED)
        if file.peaks[index >> PEAK_BITS] < oldest:
            return 0
        if step == limit:
            return declined(found, LONG_CHAIN)
        entry = file.data + file.items_at + index * (found.item_size + 4)
        older = <int32_t>word_at(entry + found.item_size)
        if normal_at(entry) == asked.key_hash and take(entry, file.begin_s, asked, found) < 0:
            return NO_MEMORY
        if older >= index or older < 0:
            return declined(found, DAMAGED)
        index, step = older, step + 1
        found.steps += 1
        if found.count >= enough:
            part = found[0]
            part.rows, part.count = found.rows + before * found.stride, found.count - before
            if order_rows(&part, asked.most + 1) < 0:
                # two rows may be one answer, so all are needed
                enough, oldest = <int64_t>1 << 62, asked.low
            else:
                oldest = max(asked.low, row_long(part.rows + asked.most * part.stride, 0))
                found.count = before + part.count
                enough = found.count + asked.most + 1
    return 0


cdef inline int64_t near_group(const File *file, int64_t slot) noexcept nogil:
    """Return a group near the one of a slot, because slots are filled about evenly."""
    cdef int64_t near = (slot - file.slot_low) * file.group_count // (file.slot_high - file.slot_low)
    return min(near, file.group_count - 1)


cdef inline int64_t group_of(const File *file, int64_t slot) noexcept nogil:
    """Return the last group that begins at or before a slot; -1: none."""
    cdef int64_t low = -1, high = file.group_count, step = 1, near = near_group(file, slot)
    if <int64_t>word_at(file.groups + GROUP * near) <= slot:
        low = near
        while low + step < high and <int64_t>word_at(file.groups + GROUP * (low + step)) <= slot:
            low, step = low + step, 2 * step
        high = min(high, low + step)
    else:
        high = near
        while high - step > low and <int64_t>word_at(file.groups + GROUP * (high - step)) > slot:
            high, step = high - step, 2 * step
        low = max(low, high - step)
    while high - low > 1:
        near = (low + high) >> 1
        if <int64_t>word_at(file.groups + GROUP * near) <= slot:
            low = near
        else:
            high = near
    return low


cdef uint64_t sum_of(const uint8_t *data, int64_t size) noexcept nogil:
    """Return a sum of bytes, never 0, which is faster than a CRC32: each word changes one of eight lanes."""
    cdef uint64_t[8] lanes
    cdef uint64_t[8] words
    cdef int64_t at = 0
    cdef int lane
    cdef uint64_t total = <uint64_t>size
    for lane in range(8):
        lanes[lane] = SUM_STARTS[lane]
    while at < size:
        if size - at < 64:
            for lane in range(8):
                words[lane] = 0
            memcpy(words, data + at, size - at)
        else:
            memcpy(words, data + at, 64)
        for lane in range(8):
            lanes[lane] = (lanes[lane] ^ words[lane]) * SUM_FACTORS[lane]
        at += 64
    # fold the upper bits down, because a multiplication does not
    for lane in range(8):
        total += (lanes[lane] ^ lanes[lane] >> 32) * (SUM_STARTS[lane] | 1)
    return filter_mix(total) | 1


cdef inline uint32_t sum_of_block(const uint8_t *block) noexcept nogil:
    """Return the sum of a filter's block."""
    cdef uint64_t[4] words
    memcpy(words, block, 32)
    words[0] = words[0] * SUM_FACTORS[0] + words[1] * SUM_FACTORS[1]
    return <uint32_t>(filter_mix(words[0] + words[2] * SUM_FACTORS[2] + words[3] * SUM_FACTORS[3]) >> 32)


cdef inline int64_t slot_of(const File *file, uint32_t key_hash) noexcept nogil:
    """Return the slot of a normal hash, as `SlotMap.slot_of` does."""
    cdef int64_t above = key_hash // <uint64_t>file.slots, base_slot = key_hash % <uint64_t>file.slots
    if file.join > 1:
        return base_slot // file.join
    if file.split == 1:
        return base_slot
    return base_slot * file.split + above * file.split // (<int64_t>0x7FFFFFFF // file.slots + 1)


cdef inline bint is_whole(const File *file, const uint8_t *group) noexcept nogil:
    """Return whether a slot group is one range of the file, and not cut into blocks."""
    cdef int64_t begin = long_at(group + 8)
    return not word_at(group + 28) and 0 <= begin <= <int64_t>file.size and word_at(group + 16) <= file.size - begin


cdef inline bint has_slot(const File *file, int64_t slot) noexcept nogil:
    """Return whether a compacted file has groups, and its slots include this one."""
    return file.group_count > 0 and file.slot_low <= slot < file.slot_high


cdef inline void load_row(const File *file, uint32_t key_hash) noexcept nogil:
    """Load the directory's row of a key's group, or a row near it, into the processor's cache."""
    cdef int64_t slot = slot_of(file, key_hash)
    if has_slot(file, slot):
        prefetch(file.groups + GROUP * near_group(file, slot))


cdef inline void load_group(const File *file, uint32_t key_hash) noexcept nogil:
    """Load a key's group, at most `GROUP_BYTES`, into the processor's cache."""
    cdef int64_t slot = slot_of(file, key_hash), number, at
    cdef const uint8_t *group
    if not has_slot(file, slot):
        return
    number = group_of(file, slot)
    if number < 0:
        return
    group = file.groups + GROUP * number
    prefetch(&file.group_sums[number])
    if word_at(group + 4) and is_whole(file, group):
        for at in range(0, min(<int64_t>word_at(group + 16), <int64_t>GROUP_BYTES), 64):
            prefetch(file.data + long_at(group + 8) + at)


cdef int search_group(File *file, const Asked *asked, Found *found) except -9 nogil:
    """Add the rows of a compacted file. `DECLINED`: the slot group is cut into blocks, damaged or not sorted."""
    cdef int64_t slot = slot_of(file, asked.key_hash), number, begin, size, count
    cdef const uint8_t *group
    cdef uint64_t sum
    if not has_slot(file, slot):
        return 0
    number = group_of(file, slot)
    if number < 0:
        return 0
    group = file.groups + GROUP * number
    count, begin, size = word_at(group + 4), long_at(group + 8), word_at(group + 16)
    if not count:
        return 0
    if not is_whole(file, group):
        return declined(found, IN_BLOCKS)
    if file.stored:
        return search_stored(file, group, begin, size, count, asked, found)
    # on each search, because mapped bytes may have changed since their checksum was verified
    sum = sum_of(file.data + begin, size)
    if file.group_sums[number] != sum:
        if file.group_sums[number] or not matches(file.owner, file.data + begin, size, word_at(group + 20)):
            return declined(found, DAMAGED)
        file.group_sums[number] = sum
    return search_items(file, file.data, file.size, begin, size, count, asked, found)


cdef int make_group(Found *found, int64_t size) noexcept nogil:
    """Make room for a copy of a slot group, which is whole words and one behind them."""
    cdef uint8_t *room
    if size + 16 > found.group_room:
        room = <uint8_t *>realloc(found.group, 2 * size + 64)
        if room == NULL:
            return NO_MEMORY
        found.group, found.group_room = room, 2 * size + 64
    memset(found.group + size, 0, 16)
    return 0


cdef int search_stored(
    File *file, const uint8_t *group, int64_t begin, int64_t size, int64_t count, const Asked *asked, Found *found
) except -9 with gil:
    """Search a group from a cache or the storage, as `search_group` does. Raises if the read is interrupted."""
    cdef bytes held
    cdef const uint8_t *data
    call = None if found.call == NULL else <object>found.call
    got = (<LocalFile>file.owner).source.block(begin, size, word_at(group + 20), call)
    if got is None:
        return declined(found, NO_GROUP)
    if type(got) is tuple:
        # the read took a request
        found.requests += 1
        found.request_bytes += size
        got = (<tuple>got)[0]
    held = got
    if len(held) != size:
        return declined(found, DAMAGED)
    data = <const uint8_t *>held
    if file.kind == PACKED:
        if make_group(found, size) < 0:
            return NO_MEMORY
        memcpy(found.group, data, size)
        data = found.group
    return search_items(file, data, size + 16 if file.kind == PACKED else size, 0, size, count, asked, found)


cdef int search_items(
    File *file, const uint8_t *data, int64_t data_size, int64_t begin, int64_t size, int64_t count, const Asked *asked,
    Found *found
) noexcept nogil:
    """Add the rows of a slot group at `begin` of data. Its bytes have matched their checksum."""
    cdef int64_t item, wanted, got
    cdef const uint8_t *place
    cdef uint8_t *room
    if file.kind == PLAIN:
        if size != count * found.item_size:
            return declined(found, DAMAGED)
        for item in range(count):
            place = data + begin + item * found.item_size
            if normal_at(place) == asked.key_hash and take(place, file.begin_s, asked, found) < 0:
                return NO_MEMORY
        return 0
    wanted = asked.key_hash % file.slots * (<int64_t>0x7FFFFFFF // file.slots + 1) + asked.key_hash // file.slots
    while True:
        got = find_in_run(
            <const uint64_t *>data, data_size >> 3, begin, size, count, MOST_ITEMS, &wanted, 1, &file.columns,
            found.items, found.item_size, found.items_room,
        )
        if got != -2:
            break
        room = <uint8_t *>realloc(found.items, (4 * found.items_room + FEW) * found.item_size)
        if room == NULL:
            return NO_MEMORY
        found.items, found.items_room = room, 4 * found.items_room + FEW
    for item in range(got):
        if take(found.items + item * found.item_size, file.begin_s, asked, found) < 0:
            return NO_MEMORY
    return declined(found, DAMAGED) if got < 0 else 0


cdef inline int in_order(const uint8_t *a, const uint8_t *b) noexcept nogil:
    """Compare two rows by answer order: less than 0 if `a` comes first."""
    cdef int64_t left = row_long(a, 0), right = row_long(b, 0)
    if left == right:
        left, right = row_long(a, ROW_OFFSET), row_long(b, ROW_OFFSET)
    if left == right:
        right, left = row_word(a, ROW_QUEUE), row_word(b, ROW_QUEUE)
    return (left < right) - (left > right)


cdef int by_order(const void *a, const void *b) noexcept nogil:
    return in_order(<const uint8_t *>a, <const uint8_t *>b)


cdef int by_identity(const void *a, const void *b) noexcept nogil:
    cdef const uint8_t *one = (<const uint8_t **>a)[0]
    cdef const uint8_t *other = (<const uint8_t **>b)[0]
    cdef int64_t x = row_long(one, ROW_OFFSET), y = row_long(other, ROW_OFFSET)
    if x == y:
        x, y = row_word(one, ROW_QUEUE), row_word(other, ROW_QUEUE)
    return (x > y) - (x < y)


cdef int order_rows(Found *found, int64_t most) noexcept nogil:
    """Sort rows into answer order and keep the first `most`. `DECLINED`: two of them may be one answer."""
    cdef int64_t n = found.count, stride = found.stride, item, other
    cdef uint8_t *rows = found.rows
    cdef const uint8_t **places
    cdef bint falling = True, sorted_ = True
    for item in range(1, n):
        if in_order(rows + (item - 1) * stride, rows + item * stride) >= 0:
            sorted_ = False
            break
    if not sorted_:
        qsort(rows, n, stride, by_order)
    for item in range(1, n):
        if row_long(rows + (item - 1) * stride, ROW_OFFSET) <= row_long(rows + item * stride, ROW_OFFSET):
            # while offsets fall, no two rows have the same identity
            falling = False
            break
    if not falling and n <= FEW:
        for item in range(1, n):
            for other in range(item):
                if row_long(rows + item * stride, ROW_OFFSET) == row_long(rows + other * stride, ROW_OFFSET):
                    if row_word(rows + item * stride, ROW_QUEUE) == row_word(rows + other * stride, ROW_QUEUE):
                        return DECLINED
    elif not falling:
        places = <const uint8_t **>malloc(n * sizeof(uint8_t *))
        if places == NULL:
            return NO_MEMORY
        for item in range(n):
            places[item] = rows + item * stride
        qsort(places, n, sizeof(uint8_t *), by_identity)
        for item in range(1, n):
            if by_identity(&places[item - 1], &places[item]) == 0:
                free(places)
                return DECLINED
        free(places)
    found.count = min(n, most)
    return 0


cdef int matches(void *owner, const uint8_t *data, int64_t size, uint32_t crc) noexcept with gil:
    """Return whether bytes match their checksum."""
    try:
        return (<LocalFile>owner).crc32(PyMemoryView_FromMemory(<char *>data, size, PyBUF_READ)) == crc
    except BaseException:
        # an interrupt, or no memory: the caller's own search of the file meets it again
        return 0


cdef inline bint excludes(
    const uint8_t *filter, const uint32_t *sums, uint64_t blocks, const Bits *bits
) noexcept nogil:
    """Return whether a filter excludes a key, and has not changed since it matched its checksum."""
    cdef uint64_t number = bits.part * blocks >> 32
    if may_hold(filter + 32 * number, bits):
        return False
    # a block that has changed in the map excludes nothing; a filter outside a map has no sums
    return sums == NULL or sums[number] == sum_of_block(filter + 32 * number)


cdef inline bint knows_filter(const File *file) noexcept nogil:
    """Return whether a file has a filter that has matched its checksum."""
    return file.sums != NULL or (file.filter_held and file.filter != NULL)


cdef inline bint knows(Place *place) noexcept nogil:
    """Return whether a place in a view has its local file's filter; it is taken from the file if that uses rule abs."""
    cdef const File *file = place.file
    if place.filter == NULL and file.rule == 0 and knows_filter(file):
        place.blocks, place.sums, place.filter = file.blocks, file.sums, file.filter
    return place.filter != NULL


cdef void check_filter(File *file) noexcept nogil:
    """Verify the checksum of a filter. If it matches, the filter excludes keys from now on."""
    cdef uint64_t number
    cdef uint32_t *sums = <uint32_t *>malloc(4 * file.blocks)
    if sums == NULL:
        return
    # sums are taken before the checksum, so that a change in between is noticed
    for number in range(file.blocks):
        sums[number] = sum_of_block(file.filter + 32 * number)
    if matches(file.owner, file.filter, 32 * file.blocks, file.filter_crc) and file.sums == NULL:
        file.sums = sums
    else:
        file.filter_damaged = file.sums == NULL
        free(sums)


cdef inline int search_items_of(File *file, Asked *asked, Found *found) except -9 nogil:
    """Add the rows of a file by one hash of the key, without a filter."""
    cdef int64_t before = found.count, retired = found.retired_count
    cdef int done = search_chain(file, asked, found) if file.kind == CHAINS else search_group(file, asked, found)
    if done < 0:
        found.count, found.retired_count = before, retired
    return done


cdef int search_in(File *file, Asked *asked, Found *found, bint checks) except -9 nogil:
    """Add the rows of a file by one hash of the key. If `checks`, this may verify the filter's checksum."""
    cdef uint64_t mixed
    cdef Bits bits
    cdef int64_t before = found.count
    cdef int done
    if knows_filter(file):
        mixed = filter_mix(<uint64_t>asked.key_hash << 32 | (asked.fingerprint if found.fingerprint_at else 0))
        set_key_bits(&bits, mixed)
        if excludes(file.filter, file.sums, file.blocks, &bits):
            return 0
    done = search_items_of(file, asked, found)
    if checks and file.blocks and not knows_filter(file) and not file.filter_damaged and found.count == before:
        # verify the filter after searches have read as many bytes in vain as it has
        file.missed += GROUP_BYTES
        if file.missed >= 32 * file.blocks:
            check_filter(file)
    return done


cdef inline void set_bit_numbers(int *numbers, uint64_t mixed) noexcept nogil:
    """Write the number of the bit that a key has in each of the eight words of a filter's block."""
    cdef int word
    for word in range(8):
        numbers[word] = 32 * word + <int>(<uint32_t>(<uint32_t>mixed * SALTS[word]) >> 27)


cdef void transpose(uint64_t *rows) noexcept nogil:
    """Exchange bit m of row n and bit n of row m, of 64 rows."""
    cdef int step = 32, row
    cdef uint64_t mask = 0xFFFFFFFF, changed
    while step:
        row = 0
        while row < 64:
            changed = (rows[row] >> step ^ rows[row | step]) & mask
            rows[row] ^= changed << step
            rows[row | step] ^= changed
            row = ((row | step) + 1) & ~step
        step >>= 1
        mask ^= mask << step


cdef inline Py_ssize_t following(const uint64_t *set_, Py_ssize_t number, Py_ssize_t count) noexcept nogil:
    """Return the first member of a set from `number` on; `count`: none. NULL is the set of all numbers."""
    cdef uint64_t word
    if set_ == NULL or number >= count:
        return number
    word = set_[number >> 6] >> (number & 63)
    if word:
        return number + first_one(word)
    number = (number >> 6) + 1
    while number << 6 < count:
        if set_[number]:
            return (number << 6) + first_one(set_[number])
        number += 1
    return count


@cython.final
cdef class Slices:
    """The filters of up to `TOGETHER` files, bit-sliced: a word for each bit of a block says which files have the bit.

    A word has 8 bytes, or 4 for up to `HALF_TOGETHER` files. It has as many blocks as the largest filter. One of its
    blocks covers at most two blocks of a smaller filter, and has the bits of both. It is a copy, so later changes of a
    map do not matter.
    """
    cdef uint8_t *words
    cdef uint64_t blocks
    cdef int files
    cdef int word_size

    def __dealloc__(self):
        free(self.words)

    cdef int make(self, const Place *const *places, int count) except -1:
        """Make it of the filters of places in a view, sorted by size. They have matched their checksums."""
        cdef uint64_t blocks = places[count - 1].blocks, block, first, last, at, number
        cdef uint64_t[4] words
        # a quarter of a block is a word: 64 files of the first quarter, then of the next
        cdef uint64_t[256] rows
        cdef const Place *place
        cdef int file, quarter
        cdef int word_size = size_of_word(count)
        self.words = <uint8_t *>malloc(256 * word_size * blocks)
        if self.words == NULL:
            raise MemoryError
        self.blocks, self.files, self.word_size = blocks, count, word_size
        with nogil:
            for block in range(blocks):
                # the fractions of 2**32 that are in this block
                first, last = ((block << 32) + blocks - 1) // blocks, ((block + 1 << 32) + blocks - 1) // blocks - 1
                for file in range(TOGETHER):
                    for quarter in range(4):
                        rows[64 * quarter + file] = 0
                    if file >= count:
                        continue
                    place = places[file]
                    number = first * place.blocks >> 32
                    at = last * place.blocks >> 32
                    while number <= at:
                        memcpy(words, place.filter + 32 * number, 32)
                        if place.sums != NULL and place.sums[number] != sum_of_block(<const uint8_t *>words):
                            # a changed block excludes nothing
                            memset(words, 0xFF, 32)
                        for quarter in range(4):
                            rows[64 * quarter + file] |= words[quarter]
                        number += 1
                for quarter in range(4):
                    transpose(&rows[64 * quarter])
                for number in range(256):
                    memcpy(self.words + (256 * block + number) * word_size, &rows[number], word_size)
        return 0


cdef inline int size_of_word(Py_ssize_t files) noexcept nogil:
    return 4 if files <= HALF_TOGETHER else 8


@cython.final
cdef class Together:
    """The slices of a view. It never changes.

    - `alone`: the files that are in no slice, and `full`: those in a slice that is full, both as sets of numbers.
    - `present` and `numbers`, for each slice: which of its files are in the view, and their numbers there.
    """
    cdef list held
    cdef Py_ssize_t count
    cdef Py_ssize_t words
    cdef const uint8_t **slices
    cdef uint64_t *blocks
    cdef int *word_sizes
    cdef uint64_t *present
    cdef int32_t *numbers
    cdef uint64_t *alone
    cdef uint64_t *full

    def __dealloc__(self):
        free(self.full)
        free(self.slices)
        free(self.blocks)
        free(self.word_sizes)
        free(self.present)
        free(self.numbers)
        free(self.alone)

    cdef void load(self, uint64_t mixed) noexcept nogil:
        """Load the words that `ask` reads into the processor's cache."""
        cdef int[8] bits
        cdef Py_ssize_t number
        cdef int bit
        cdef const uint8_t *block
        cdef uint64_t part = mixed >> 32
        set_bit_numbers(bits, mixed)
        for number in range(self.count):
            block = self.slices[number] + 256 * self.word_sizes[number] * (part * self.blocks[number] >> 32)
            for bit in range(8):
                prefetch(block + bits[bit] * self.word_sizes[number])

    cdef void ask(self, uint64_t mixed, uint64_t *set_) noexcept nogil:
        """Write the set of files that may have a key: those in no slice, and those whose filters have the key."""
        cdef int[8] bits
        cdef Py_ssize_t number, place
        cdef const uint64_t *block
        cdef const uint32_t *half
        cdef uint64_t may_have
        cdef uint64_t part = mixed >> 32
        set_bit_numbers(bits, mixed)
        memcpy(set_, self.alone, 8 * self.words)
        for number in range(self.count):
            block = <const uint64_t *>(
                self.slices[number] + 256 * self.word_sizes[number] * (part * self.blocks[number] >> 32)
            )
            may_have = self.present[number]
            if self.word_sizes[number] == 8:
                may_have &= block[bits[0]] & block[bits[1]] & block[bits[2]] & block[bits[3]]
                may_have &= block[bits[4]] & block[bits[5]] & block[bits[6]] & block[bits[7]]
            else:
                half = <const uint32_t *>block
                may_have &= half[bits[0]] & half[bits[1]] & half[bits[2]] & half[bits[3]]
                may_have &= half[bits[4]] & half[bits[5]] & half[bits[6]] & half[bits[7]]
            while may_have:
                place = self.numbers[TOGETHER * number + first_one(may_have)]
                set_[place >> 6] |= <uint64_t>1 << (place & 63)
                may_have &= may_have - 1


cdef int by_blocks(const void *a, const void *b) noexcept nogil:
    cdef uint64_t left = (<const Place *const *>a)[0].blocks, right = (<const Place *const *>b)[0].blocks
    return (left > right) - (left < right)


@cython.final
cdef class RowForm:
    """The layout of rows and items behind their first columns.

    `extra` has the sizes of further columns, negative for bytes. `fingerprint_at` is the place of the key's fingerprint
    in an item; 0: it has none.
    """
    cdef const int64_t[::1] extra
    cdef int64_t item_size
    cdef int64_t fingerprint_at

    def __init__(self, extra, int64_t fingerprint_at):
        cdef Py_ssize_t number
        self.extra, self.fingerprint_at, self.item_size = extra, fingerprint_at, ITEM_EXTRA
        for number in range(self.extra.shape[0]):
            if not 1 <= labs(self.extra[number]) <= 1 << 20:
                fail("a column has bytes")
            self.item_size += labs(self.extra[number])
        if fingerprint_at < 0 or fingerprint_at > self.item_size - 4:
            fail("the fingerprint is no part of an item")

    cdef Found found(self) noexcept:
        """Return an empty result."""
        cdef Found found
        found.extra, found.extra_count = &self.extra[0] if self.extra.shape[0] else NULL, self.extra.shape[0]
        found.item_size, found.stride = self.item_size, self.item_size + 4
        found.fingerprint_at = self.fingerprint_at
        found.rows, found.count, found.room, found.items, found.items_room = NULL, 0, 0, NULL, 0
        found.retired, found.retired_count, found.retired_room, found.hidden_count = NULL, 0, 0, 0
        found.group, found.group_room, found.requests, found.request_bytes, found.steps = NULL, 0, 0, 0, 0
        found.call = NULL
        return found

    cdef bint equals(self, RowForm other) noexcept:
        cdef Py_ssize_t number
        if self.fingerprint_at != other.fingerprint_at or self.extra.shape[0] != other.extra.shape[0]:
            return False
        for number in range(self.extra.shape[0]):
            if self.extra[number] != other.extra[number]:
                return False
        return True


@cython.final
cdef class HiddenOf:
    """The hidden entries of one topic: a first second, erased keys and queues, and hidden offsets. It never changes.

    `hashes`, `fingerprints` (1 << 32: any) and `key_begins` have a row for each erased key, sorted by hash. `queues`
    and `queue_begins` have each erased queue, sorted. `ranges` has a tuple for each queue with hidden offsets, sorted:
    queue, starts and ends of all, starts and ends of the retired ones. All arrays are contiguous.
    """
    cdef HiddenEntries entries
    # whether an entry may be hidden by its queue or offset
    cdef bint by_row
    # what the pointers point into
    cdef list kept

    def __init__(
        self, int64_t begin_s, const uint32_t[::1] hashes, const uint64_t[::1] fingerprints,
        const int64_t[::1] key_begins, const int32_t[::1] queues, const int64_t[::1] queue_begins, list ranges not None
    ):
        cdef Py_ssize_t number, count = hashes.shape[0]
        cdef HiddenRanges *of_queue
        if self.kept is not None:
            fail("it never changes")
        self.kept = [hashes, fingerprints, key_begins, queues, queue_begins]
        if fingerprints.shape[0] != count or key_begins.shape[0] != count:
            fail("each erased key has a hash, a fingerprint and a second")
        if queue_begins.shape[0] != queues.shape[0]:
            fail("each erased queue has a second")
        for number in range(1, count):
            if hashes[number] < hashes[number - 1]:
                fail("erased keys are sorted")
        for number in range(1, queues.shape[0]):
            if queues[number] <= queues[number - 1]:
                fail("erased queues are sorted")
        self.entries.begin_s, self.entries.key_count, self.entries.queue_count = begin_s, count, queues.shape[0]
        if count:
            self.entries.hashes, self.entries.fingerprints = &hashes[0], &fingerprints[0]
            self.entries.key_begins = &key_begins[0]
        if queues.shape[0]:
            self.entries.queues, self.entries.queue_begins = &queues[0], &queue_begins[0]
        self.entries.ranges = <HiddenRanges *>calloc(len(ranges) + 1, sizeof(HiddenRanges))
        if self.entries.ranges == NULL:
            raise MemoryError
        for number in range(len(ranges)):
            queue, starts, ends, retired_starts, retired_ends = ranges[number]
            of_queue = &self.entries.ranges[number]
            of_queue.queue = queue
            if number and of_queue.queue <= self.entries.ranges[number - 1].queue:
                fail("queues with hidden offsets are sorted")
            of_queue.count = self.keep(starts, ends, &of_queue.starts, &of_queue.ends)
            of_queue.retired_count = self.keep(
                retired_starts, retired_ends, &of_queue.retired_starts, &of_queue.retired_ends
            )
            self.entries.range_count = number + 1
        self.by_row = self.entries.queue_count > 0 or self.entries.range_count > 0

    def __dealloc__(self):
        free(self.entries.ranges)

    cdef int64_t keep(
        self, const int64_t[::1] starts, const int64_t[::1] ends, const int64_t **first, const int64_t **last
    ) except -1:
        """Keep sorted ranges, and return their number."""
        cdef Py_ssize_t number, count = starts.shape[0]
        if ends.shape[0] != count:
            fail("each range has a start and an end")
        for number in range(count):
            if starts[number] >= ends[number] or (number and starts[number] <= ends[number - 1]):
                fail("ranges are sorted, and neither empty nor joined")
        self.kept += [starts, ends]
        if count:
            first[0], last[0] = &starts[0], &ends[0]
        return count


cdef int64_t open_file(LocalFile local, call, int *slow) except -2:
    """Open a file in a storage, as `source.open` does. Count a `slow` read; after `MOST_SLOW` there are no further ones."""
    cdef double begun = seconds_now()
    cdef int64_t read_bytes = local.source.open(local, call, slow[0] < MOST_SLOW)
    if read_bytes > 0 and (seconds_now() - begun) * 1e6 > SLOW_MICROSECONDS:
        slow[0] += 1
    return read_bytes


cdef inline const HiddenEntries *entries_of(HiddenOf hidden) noexcept:
    """Return what is hidden; NULL: nothing."""
    return NULL if hidden is None else &hidden.entries


@cython.final
cdef class OpenFile:
    """What searches of a file in a storage need: its directory, and its filter, if that is in memory. It never changes.

    A search holds it until its end. So the file may be closed meanwhile, and the last search frees the memory.
    """
    cdef File file
    cdef object ids, groups, packing
    cdef bytes filter

    cdef OpenFile with_filter(self, bytes filter):
        """Return a copy with a filter; None: without one."""
        cdef OpenFile made = OpenFile.__new__(OpenFile)
        made.file, made.ids, made.groups, made.packing, made.filter = (
            self.file, self.ids, self.groups, self.packing, filter
        )
        made.file.filter, made.file.blocks, made.file.filter_held = NULL, 0, filter is not None
        if filter is not None:
            made.file.filter, made.file.blocks = <const uint8_t *>filter, len(filter) // 32
        return made


@cython.final
cdef class LocalFile:
    """One file. It keeps the file's buffers alive. `ids` has the ids of each topic; None: the file names no topics.

    `rule` is the hash rule of its keys: 0 for abs, 1 for mask, 2 for both. `data` is None for a file in a storage,
    whose slot groups a `source` returns (`from_source`).
    """
    cdef File file
    cdef RowForm form
    cdef object crc32
    cdef object ids
    cdef object source
    # of a file in a storage; None: it is closed. `file.filter` is that of `open_file`
    cdef OpenFile open_file
    # of an unsealed file
    cdef bytes held_filter
    # its slices, and its number there
    cdef Slices slices
    cdef int bit
    # what the pointers in `file` point into; objects take less memory than typed memoryviews
    cdef object data, groups, heads, packing

    def __init__(self, RowForm form not None, data, dict ids, int rule, int64_t begin_s, int64_t slots):
        cdef const uint8_t[::1] whole
        self.form, self.ids = form, ids
        if not 0 < slots <= 0x7FFFFFFF:
            fail("a file has slots")
        if data is not None:
            # so that a memory map can't be closed
            self.data = memoryview(data)
            whole = self.data
            if not whole.shape[0] or <uint64_t>&whole[0] & 7:
                fail("a file has bytes, which are aligned")
            self.file.data, self.file.size = &whole[0], whole.shape[0]
        self.file.rule, self.file.begin_s, self.file.slots = rule, begin_s, slots
        self.file.split, self.file.join, self.file.slot_low, self.file.slot_high = 1, 1, 0, slots
        self.file.owner = <void *>self

    def from_source(self, source, int64_t second_min, int64_t second_max, tuple slots=None):
        """Make this a file in a storage with entries from `second_min` to `second_max`, and return it.

        `slots` are split, join, low and high of a shard. Methods of `source`, where `call` is that of the lookup:

        - `open(file, call, reads)`: call `opened` and `with_filter`, by what is in memory, or if it `reads` also by one
          read of the local disk. Return the bytes read; -1: the caller of the lookup has to search.
        - `block(at, size, crc32, call)`: return the verified bytes of a slot group, in a tuple if that took a request.
          None: the caller of the lookup has to search.
        - `miss(hash, call)`: note a search that found nothing, by the hash for filters.
        - `open_now()`: return an object with a `descriptor` of the file, and with `close(reads, bytes)`. None: the
          caller has to search.
        - `crc32`: a function.
        """
        if self.file.data != NULL or self.source is not None:
            fail("it is a file of another kind")
        if slots is not None:
            self.file.split, self.file.join, self.file.slot_low, self.file.slot_high = slots
            self.file.is_shard = True
            if not 0 < self.file.split <= <int64_t>1 << 31 or not 0 < self.file.join <= <int64_t>1 << 31:
                fail("slots are split or joined")
            # a directory has slots as numbers of 32 bits
            if not 0 <= self.file.slot_low < self.file.slot_high <= <int64_t>1 << 32:
                fail("a shard has slots")
        self.source, self.crc32, self.file.stored = source, source.crc32, True
        self.file.second_min, self.file.second_max = second_min, second_max
        return self

    def opened(self, dict ids, int64_t begin_s, int64_t slots, groups, int64_t size, tuple packing=None):
        """Open a file in a storage, without its filter. Return false if it was open before.

        `ids` are its topics, `slots` its base slots, `groups` the rows of its directory, `size` its bytes, `packing`
        the arguments of `with_packing`.
        """
        cdef const uint8_t[::1] rows = groups
        cdef OpenFile made
        if not self.file.stored or not 0 < slots <= 0x7FFFFFFF or size < 0:
            fail("a file in a storage has slots")
        if self.file.is_shard and slots != self.file.slots:
            fail("a shard has other slots than its table")
        if not rows.shape[0] or rows.shape[0] % GROUP:
            fail("a directory has groups")
        if self.open_file is not None:
            return False
        made = OpenFile.__new__(OpenFile)
        made.file = self.file
        if packing is not None:
            of_keys, columns, line, topics = packing
            made.packing = columns, line, topics
            set_columns(&made.file.columns, columns, of_keys, line, topics, slots, self.form.item_size)
        made.ids, made.file.begin_s, made.file.size, made.groups = ids, begin_s, size, groups
        made.file.group_count, made.file.groups = rows.shape[0] // GROUP, &rows[0]
        if not self.file.is_shard:
            made.file.slots = made.file.slot_high = slots
        made.file.kind = PLAIN if packing is None else PACKED
        if self.open_file is not None:
            # another thread came first
            return False
        self.open_file = made
        return True

    def close(self):
        """Close a file in a storage. The searches that run now keep what they use until they end."""
        self.file.filter, self.file.blocks = NULL, 0
        self.open_file = None

    def with_filter(self, bytes held):
        """Set the filter, which has matched its checksum: of a file in a storage that is open, or of a sealed file.

        None: a file in a storage no longer has it.
        """
        cdef OpenFile before = self.open_file, made
        if not (self.file.stored or (self.file.kind == CHAINS and held is not None)):
            fail("the file is in a storage, or sealed")
        if held is not None and (not len(held) or len(held) % 32):
            fail("a filter has blocks")
        if self.file.stored:
            if before is None:
                return
            made = before.with_filter(held)
            # another thread may have closed it
            if self.open_file is before:
                self.file.filter, self.file.blocks = made.file.filter, made.file.blocks
                self.open_file = made
        elif self.held_filter is None:
            self.held_filter, self.file.blocks, self.file.filter_held = held, len(held) // 32, True
            self.file.filter = <const uint8_t *>held

    @property
    def is_open(self):
        """Whether it can be searched."""
        return self.file.kind != ELSEWHERE or self.open_file is not None

    @property
    def has_filter(self):
        """Whether a filter excludes keys."""
        return self.file.filter != NULL

    @property
    def uses(self):
        """The number of lookups and batches that found a file in a storage open, in their range."""
        return self.file.uses

    @property
    def size_bytes(self):
        """The bytes of a stored file's directory and filter in memory."""
        cdef OpenFile held = self.open_file
        return 0 if held is None else GROUP * held.file.group_count + 32 * held.file.blocks

    def __dealloc__(self):
        free(self.file.group_sums)
        free(self.file.sums)
        free(self.file.peaks)

    def with_chains(self, heads, int64_t items_at, int64_t items):
        """Make this an unsealed file with space for `items` entries, and return it."""
        cdef int64_t entry_size = self.form.item_size + 4, number
        cdef const int32_t[::1] rows = heads
        if self.file.kind:
            fail("it is a file of another kind")
        self.heads = heads
        if rows.shape[0] < self.file.slots or items_at < 0 or items < 0:
            fail("there are fewer heads than slots, or less than no items")
        if items_at > <int64_t>self.file.size or items > (<int64_t>self.file.size - items_at) // entry_size:
            fail("a file is smaller than its entries")
        self.file.peaks = <int64_t *>malloc(8 * ((items >> PEAK_BITS) + 1))
        if self.file.peaks == NULL:
            raise MemoryError
        # the seconds of entries are unknown until `appended`
        for number in range((items >> PEAK_BITS) + 1):
            self.file.peaks[number] = INT64_MAX
        self.file.peak, self.file.known = INT64_MIN, 1
        self.file.heads, self.file.items_at, self.file.items = &rows[0], items_at, items
        self.file.kind = CHAINS
        return self

    def within(self, int64_t second_min, int64_t second_max):
        """Set the first and last second of an unsealed file, before entries that widen them are in its chains."""
        self.file.second_min, self.file.second_max = second_min, second_max

    def appended(self, int64_t first, const int64_t[::1] seconds):
        """Note the seconds of an unsealed file's entries from number `first` on, before they are in its chains.

        A lookup can then stop at entries that are older than its answer.
        """
        cdef Py_ssize_t number
        cdef int64_t peak
        if self.file.kind != CHAINS or first < 1 or seconds.shape[0] > self.file.items - first:
            fail("an unsealed file has room for its entries")
        if seconds.shape[0] and <uint64_t>&seconds[0] & 7:
            fail("seconds are aligned")
        peak = self.file.peak if first == self.file.known else INT64_MAX
        with nogil:
            for number in range(seconds.shape[0]):
                peak = max(peak, seconds[number])
                self.file.peaks[(first + number) >> PEAK_BITS] = peak
        self.file.peak, self.file.known = peak, first + seconds.shape[0]

    def with_groups(self, groups, crc32, int64_t filter_at, int64_t filter_size, uint32_t filter_crc):
        """Make this a compacted file of plain items, given the groups of its directory and its filter. Return it."""
        cdef const uint8_t[::1] rows = groups
        cdef int64_t size = <int64_t>self.file.size
        if self.file.kind:
            fail("it is a file of another kind")
        self.groups, self.crc32 = groups, crc32
        self.file.group_count = rows.shape[0] // GROUP
        if not self.file.group_count or rows.shape[0] % GROUP or filter_size < 0 or filter_size % 32:
            fail("a directory has groups, and a filter has blocks")
        if filter_at < 0 or filter_at > size or filter_size > size - filter_at:
            fail("a file is smaller than its filter")
        self.file.groups = &rows[0]
        self.file.group_sums = <uint64_t *>calloc(self.file.group_count, 8)
        if self.file.group_sums == NULL:
            raise MemoryError
        self.file.filter, self.file.blocks = self.file.data + filter_at, filter_size // 32
        self.file.filter_crc = filter_crc
        self.file.kind = PLAIN
        return self

    def with_packing(self, int64_t of_keys, columns, line, topics):
        """Make this a file of packed items, with the arguments of `find_items`. Return it."""
        if self.file.kind != PLAIN:
            fail("packed items lie in groups")
        self.packing = columns, line, topics
        set_columns(&self.file.columns, columns, of_keys, line, topics, self.file.slots, self.form.item_size)
        self.file.kind = PACKED
        return self


cdef object new = object.__new__


@cython.final
cdef class ItemForm:
    """Makes items of `kind` without calling its constructor. All fields are slots, in the order of `IndexItem`.

    If `keyed`, the last field is the fingerprint.
    """
    cdef object kind
    cdef Py_ssize_t count
    cdef int64_t stride
    cdef Py_ssize_t[9] places

    def __init__(self, kind not None, bint keyed):
        cdef Py_ssize_t number
        names = ("topic", "topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash", "source", "fingerprint")
        self.kind, self.count, self.stride = kind, 8 + keyed, ROW_EXTRA + 4 * keyed
        slots = kind.__basicsize__ - object.__basicsize__
        if kind.__dictoffset__ or kind.__itemsize__ or slots != self.count * <Py_ssize_t>sizeof(PyObject *):
            fail("items have slots for their fields, and nothing else")
        for number in range(self.count):
            member = getattr(kind, names[number])
            if type(member) is not MemberDescriptorType:
                fail("a field of the items has no slot")
            self.places[number] = (<PyMemberDescrObject *>member).d_member.offset

    def items(self, topic, rows, sources=None):
        """Return rows, a contiguous structured array of the schema's `row`, as items. `sources`: the URI of each."""
        cdef const uint8_t[::1] data = memoryview(rows).cast("B") if len(rows) else b""
        if data.shape[0] != self.stride * len(rows):
            fail("the rows have columns that the items have not")
        if sources is not None and len(sources) != len(rows):
            fail("each row has a source")
        return self.make(topic, &data[0] if data.shape[0] else NULL, len(rows), sources)

    cdef list documents(self, topic, const uint8_t *row, int64_t count):
        """Return rows as `IndexItem.to_dict` returns their items. They have no source."""
        cdef int64_t number
        cdef dict document
        cdef list made = []
        for number in range(count):
            document = {
                "topic": topic,
                "topic_id": row_word(row, 12),
                "queue_id": row_word(row, ROW_QUEUE),
                "offset": row_long(row, ROW_OFFSET),
                "size": row_word(row, 28),
                "timestamp_ms": row_long(row, 0) * 1000,
                "key_hash": row_word(row, 8),
            }
            if self.count > 8:
                document["fingerprint"] = <uint32_t>row_word(row, ROW_EXTRA)
            made.append(document)
            row += self.stride
        return made

    cdef tuple make(self, topic, const uint8_t *row, int64_t count, sources):
        cdef int64_t number
        cdef list made = []
        for number in range(count):
            made.append(self.made(topic, row, None if sources is None else sources[number]))
            row += self.stride
        return tuple(made)

    cdef inline made(self, topic, const uint8_t *row, source):
        """Return one row as an item."""
        item = PyType_GenericAlloc(<PyTypeObject *>self.kind, 0)
        self.put(item, 0, topic)
        self.put(item, 1, row_word(row, 12))
        self.put(item, 2, row_word(row, ROW_QUEUE))
        self.put(item, 3, row_long(row, ROW_OFFSET))
        self.put(item, 4, row_word(row, 28))
        self.put(item, 5, row_long(row, 0) * 1000)
        self.put(item, 6, row_word(row, 8))
        self.put(item, 7, source)
        if self.count > 8:
            self.put(item, 8, <uint32_t>row_word(row, ROW_EXTRA))
        # it refers only to text and numbers, so it is in no cycle
        PyObject_GC_UnTrack(<void *>item)
        return item

    cdef inline void put(self, item, Py_ssize_t field, value) noexcept:
        """Set a field of a new item."""
        Py_INCREF(value)
        (<PyObject **>(<char *><void *>item + self.places[field]))[0] = <PyObject *>value


@cython.final
@cython.freelist(8)
cdef class ViewRows:
    """The first rows of a view for a lookup: at most `max_count` + 1, in answer order, each answer once.

    - `handles`: the files of the view.
    - `skipped`: skipped files may have more rows.
    - `knows_topic`: a file in range has the topic, or may have it.
    - `has_left`: the caller has to search some files.
    - `about`: the value that the caller gave.

    It can be the `_later` of an answer; `fields` then makes the fields of the answer.
    """
    cdef readonly list handles
    cdef object fields
    cdef ItemForm plain_items
    cdef readonly object topic, key, about
    # the hidden entries of the topic; None: there are none
    cdef readonly HiddenOf hidden
    cdef readonly uint32_t key_hash, masked_hash
    cdef readonly int64_t second_min, second_max, max_count
    cdef readonly bint skipped, knows_topic, has_left
    cdef readonly double elapsed_ms
    cdef double started
    cdef Found found
    cdef int32_t *noted
    # `seconds` of the view, and the seconds of the lookup
    cdef bytes seconds
    cdef int64_t low, high
    # requests and bytes of each file that has any
    cdef dict spent

    def __dealloc__(self):
        free(self.found.rows)
        free(self.found.retired)
        free(self.noted)

    def field(self, str name not None):
        """See `LaterFields.field`."""
        if name == "items" and self.plain_items is not None:
            return self.items(self.plain_items)
        return self.fields.field(self, name)

    def table(self):
        """See `LaterFields.table`."""
        return self.fields.table(self)

    def items(self, ItemForm form not None):
        """Return the rows as items."""
        if self.found.stride != form.stride:
            fail("the rows have columns that the items have not")
        return form.make(self.topic, self.found.rows, min(self.found.count, self.max_count), None)

    def documents(self):
        """See `LaterFields.documents`."""
        if self.plain_items is None:
            return None
        if self.found.stride != self.plain_items.stride:
            fail("the rows have columns that the items have not")
        return self.plain_items.documents(self.topic, self.found.rows, min(self.found.count, self.max_count))

    def __len__(self):
        return self.found.count

    @property
    def has_more(self):
        """Whether there are more than `max_count` rows, or may be."""
        return self.skipped or self.found.count > self.max_count

    @property
    def rows(self):
        """The bytes of the rows."""
        return PyByteArray_FromStringAndSize(<char *>self.found.rows, self.found.count * self.found.stride)

    @property
    def retired(self):
        """The bytes of the rows that match, but are retired: those up to the end of the page, and some others."""
        cdef Py_ssize_t size = self.found.retired_count * self.found.stride
        return PyByteArray_FromStringAndSize(<char *>self.found.retired, size) if size else b""

    @property
    def spent_by(self):
        """(requests, bytes) by the number of a file, for files with requests."""
        return self.spent or {}

    @property
    def notes(self):
        """For each file its number of rows, or one of these:

        - `AWAY` (-1): it is out of range.
        - `SKIPPED` (-2): `max_count` rows are newer.
        - `BY_FILTER` (-4): its filter excludes the key; only for files in a storage.
        - `BY_TOPIC` (-5): it does not have the topic; only for files in a storage.
        - `HIDDEN_FILE` (-8): all of its entries are hidden, by their times.
        - `NO_SEARCH` (-9): the caller has to search it, because the core has no search for such a file.
        - less than -9: it has to search it for another reason (`Why` in `service/read/files/file_view.py`).
        """
        return [self.note_of(number) for number in range(len(self.handles))]

    cdef int leave(self, Py_ssize_t number, int why) except -1:
        """Leave a file to the caller."""
        self.noted[number], self.has_left = why, True
        return 0

    cdef int spend(self, Py_ssize_t number, int64_t requests, int64_t size_bytes) except -1:
        """Count requests for a file."""
        before = (self.spent or {}).get(number, (0, 0))
        if self.spent is None:
            self.spent = {}
        self.spent[number] = before[0] + requests, before[1] + size_bytes
        return 0

    @property
    def steps(self):
        """The number of entries of chains that were read."""
        return self.found.steps

    cdef int64_t note_of(self, Py_ssize_t number) noexcept:
        cdef const int64_t *seconds
        cdef int32_t note = self.noted[number]
        if note != NOT_ASKED and note != NOT_READ:
            return note
        seconds = <const int64_t *><const char *>self.seconds
        if seconds[2 * number] > self.high or seconds[2 * number + 1] < self.low:
            return AWAY
        return 0 if note == NOT_ASKED else BY_FILTER


@cython.final
cdef class View:
    """The files of a catalog, for lookups. `files` has (`LocalFile` or None, first second, last second) for each.

    `handles` has the caller's object for each file. Growing files come first, the others by last second, newest first.
    """
    cdef list files
    cdef list handles
    cdef Place *places
    cdef Py_ssize_t count
    cdef RowForm form
    # the first and last second of each file when the view was made
    cdef bytes seconds
    # None: there are no slices. `fresh`: the number of files that have got a filter since
    cdef Together together
    cdef Py_ssize_t fresh

    def __init__(self, RowForm form not None, list files not None, list handles not None):
        cdef Py_ssize_t number
        cdef LocalFile local
        self.form, self.files, self.handles, self.count = form, files, handles, len(files)
        if len(handles) != self.count:
            fail("there are as many files as handles")
        self.places = <Place *>calloc(self.count + 1, sizeof(Place))
        if self.places == NULL:
            raise MemoryError
        for number in range(self.count):
            known, self.places[number].second_min, self.places[number].second_max = files[number]
            if known is None:
                continue
            local = known
            if not (local.file.kind or local.file.stored) or not local.form.equals(form):
                fail("a file has items of another form")
            self.places[number].file, self.places[number].stored = &local.file, local.file.stored
            self.places[number].grows = local.file.kind == CHAINS
        self.seconds = array("q", [each for _, first, last in files for each in (first, last)]).tobytes()
        if self.count >= FEWEST_TOGETHER:
            self.join()

    def __dealloc__(self):
        free(self.places)

    @property
    def bytes_together(self):
        """The bytes of the slices."""
        cdef Py_ssize_t number
        cdef uint64_t total = 0
        if self.together is not None:
            for number in range(self.together.count):
                total += 256 * self.together.word_sizes[number] * self.together.blocks[number]
        return total

    cdef int join(self) except -1:
        """Use the existing slices of the files, unless most files of a slice are no longer in the view."""
        cdef dict members = {}
        cdef Together made = Together.__new__(Together)
        cdef LocalFile local
        cdef Slices slices
        cdef Py_ssize_t number, at
        cdef list held = []
        for number in range(self.count):
            local = (<tuple>self.files[number])[0]
            if local is not None and local.slices is not None:
                members.setdefault(local.slices, []).append(number)
        for slices, numbers in members.items():
            if 2 * len(numbers) >= slices.files:
                held.append(slices)
        if not held:
            self.together = None
            return 0
        made.held, made.count, made.words = held, len(held), (self.count >> 6) + 1
        made.slices = <const uint8_t **>malloc(sizeof(uint8_t *) * made.count)
        made.blocks = <uint64_t *>malloc(8 * made.count)
        made.word_sizes = <int *>malloc(sizeof(int) * made.count)
        made.present = <uint64_t *>calloc(made.count, 8)
        made.numbers = <int32_t *>malloc(4 * TOGETHER * made.count)
        made.alone = <uint64_t *>malloc(8 * made.words)
        made.full = <uint64_t *>calloc(made.words, 8)
        if made.slices == NULL or made.blocks == NULL or made.present == NULL or made.numbers == NULL:
            raise MemoryError
        if made.alone == NULL or made.full == NULL or made.word_sizes == NULL:
            raise MemoryError
        memset(made.alone, 0xFF, 8 * made.words)
        if self.count & 63:
            made.alone[made.words - 1] = (<uint64_t>1 << (self.count & 63)) - 1
        else:
            made.alone[made.words - 1] = 0
        for at in range(made.count):
            slices = held[at]
            made.slices[at], made.blocks[at], made.word_sizes[at] = slices.words, slices.blocks, slices.word_size
            for each in members[slices]:
                number = each
                local = (<tuple>self.files[number])[0]
                made.present[at] |= <uint64_t>1 << local.bit
                made.numbers[TOGETHER * at + local.bit] = number
                made.alone[number >> 6] &= ~(<uint64_t>1 << (number & 63))
                if len(members[slices]) == TOGETHER:
                    made.full[number >> 6] |= <uint64_t>1 << (number & 63)
        # last, because other threads may use the former one
        self.together = made
        return 0

    cdef int gather(self) except -1:
        """Make slices of filters of similar size: of files that are in no slice, or in a slice that is not full."""
        cdef const Place **places = <const Place **>malloc(sizeof(Place *) * (self.count + 1))
        cdef Py_ssize_t number, count = 0, start = 0, of_slice
        cdef uint64_t size = 0
        cdef Together together = self.together
        cdef Place *place
        cdef LocalFile local
        cdef Slices slices
        if places == NULL:
            raise MemoryError
        try:
            self.fresh = 0
            for number in range(self.count):
                place = &self.places[number]
                if place.file == NULL or place.stored or place.grows:
                    continue
                if together is not None and together.full[number >> 6] >> (number & 63) & 1:
                    size += 32 * place.file.blocks
                elif knows(place):
                    places[count] = place
                    count += 1
            qsort(places, count, sizeof(Place *), by_blocks)
            while start + FEWEST_TOGETHER <= count:
                of_slice = min(count - start, TOGETHER)
                while of_slice >= FEWEST_TOGETHER and places[start + of_slice - 1].blocks > 2 * places[start].blocks:
                    of_slice -= 1
                if of_slice < FEWEST_TOGETHER:
                    start += 1
                    continue
                size += 256 * size_of_word(of_slice) * places[start + of_slice - 1].blocks
                if size > MOST_TOGETHER:
                    break
                slices = Slices.__new__(Slices)
                slices.make(&places[start], <int>of_slice)
                for number in range(of_slice):
                    local = (<tuple>self.files[places[start + number] - self.places])[0]
                    local.slices, local.bit = slices, <int>number
                start += of_slice
        finally:
            free(places)
        self.join()
        return 0

    def find(
        self, topic, uint32_t key_hash, uint32_t masked_hash, uint32_t fingerprint, int64_t low,
        int64_t high, int64_t most, tuple after=None, HiddenOf hidden=None, call=None,
    ):
        """Return the newest rows of a lookup, whose `call` the sources of files get. `low` and `high` are inclusive seconds.

        `after` is the end of the page before: second, offset and queue. `hidden` entries of the topic are left out.
        Return None if two rows may be one answer: the caller then has to search all files. Raises `MemoryError`.
        """
        cdef ViewRows rows
        if most < 1 or most >= <int64_t>1 << 60:
            fail("a lookup asks for one row at least")
        rows = self.begun(topic, key_hash, masked_hash, low, high, most, hidden)
        # nobody needs it for a later page
        rows.knows_topic = after is not None
        return rows if self.seek(rows, fingerprint, after, call) else None

    cdef ViewRows begun(
        self, topic, uint32_t key_hash, uint32_t masked_hash, int64_t low, int64_t high, int64_t most, HiddenOf hidden
    ):
        cdef ViewRows rows = ViewRows.__new__(ViewRows)
        rows.hidden = hidden
        rows.topic, rows.key_hash, rows.masked_hash, rows.handles = topic, key_hash, masked_hash, self.handles
        rows.second_min, rows.second_max, rows.max_count = low, high, most
        rows.found, rows.started = self.form.found(), seconds_now()
        rows.noted = <int32_t *>malloc(4 * self.count + 4)
        if rows.noted == NULL:
            raise MemoryError
        return rows

    cdef void choose(
        self, uint64_t *may, const uint64_t *alone, const Bits *bits, int64_t low, int64_t high, int32_t *noted
    ) noexcept nogil:
        """Take the files out of a set that are out of range, or whose filters exclude a key.

        `alone`: those in no slice (NULL: all).

        A slice has passed the others, but a block of it can have the bits of two blocks of a filter. This loads blocks
        of up to 64 filters before it reads one, so that memory answers many reads at a time. Files that may still grow
        stay in the set, and shards, since another shard of their table may have the slot. The caller holds the
        interpreter's lock, so that no filter of a stored file goes meanwhile.
        """
        cdef Place *place
        cdef File *file
        cdef const uint8_t *filter
        cdef uint64_t left, rest, block
        cdef Py_ssize_t word
        for word in range((self.count >> 6) + 1):
            rest = left = may[word]
            while rest:
                place = &self.places[(word << 6) + first_one(rest)]
                file, filter, block = place.file, place.filter, place.blocks
                if place.stored:
                    if not file.is_shard and file.rule == 0:
                        filter, block = file.filter, file.blocks
                elif filter == NULL and file != NULL and knows(place):
                    self.fresh += not place.grows and (alone == NULL or (alone[word] & rest & (~rest + 1)) != 0)
                    filter, block = place.filter, place.blocks
                if not place.grows and (place.second_min > high or place.second_max < low):
                    may[word] ^= rest & (~rest + 1)
                    left ^= rest & (~rest + 1)
                elif filter == NULL or place.grows:
                    left ^= rest & (~rest + 1)
                else:
                    block = bits.part * block >> 32
                    prefetch(filter + 32 * block)
                    if place.sums != NULL:
                        prefetch(&place.sums[block])
                rest &= rest - 1
            while left:
                place = &self.places[(word << 6) + first_one(left)]
                file = place.file
                if not place.stored:
                    if excludes(place.filter, place.sums, place.blocks, bits):
                        may[word] ^= left & (~left + 1)
                elif excludes(file.filter, NULL, file.blocks, bits):
                    may[word] ^= left & (~left + 1)
                    noted[place - self.places] = NOT_READ
                    file.uses += 1
                left &= left - 1

    cdef Py_ssize_t load(
        self, Py_ssize_t number, const uint64_t *may, const Asked *asked, const Bits *bits, int64_t low
    ) noexcept nogil:
        """Load the parts of the next `AHEAD` files that a lookup reads into the processor's cache.

        It takes each step in all files before the next step, so that memory answers many reads at a time. It loads no
        more groups than wanted rows, and none of files before `low`. Return the number of the first file behind them.
        """
        cdef (Place *)[AHEAD] places
        cdef Place *place
        cdef File *file
        cdef int64_t index, first, last, item_size = self.form.item_size
        cdef uint32_t key_hash = asked.key_hash
        cdef Py_ssize_t count = 0, at, live = 0
        while number < self.count and count < AHEAD:
            place = &self.places[number]
            file = place.file
            if place.filter == NULL and file != NULL and file.kind == CHAINS:
                prefetch(&file.heads[key_hash % <uint64_t>file.slots])
            places[count] = place
            count += 1
            number = following(may, number + 1, self.count)
        for at in range(count):
            place = places[at]
            file = place.file
            if file == NULL or place.stored or file.rule != 0:
                continue
            first, last = place.second_min, place.second_max
            if place.grows:
                first, last = file.second_min, file.second_max
            if first > asked.high or last < low:
                continue
            if place.filter != NULL and not may_hold(place.filter + 32 * (bits.part * place.blocks >> 32), bits):
                continue
            if file.kind == CHAINS:
                index = file.heads[key_hash % <uint64_t>file.slots]
                if 0 < index < file.items:
                    prefetch(file.data + file.items_at + index * (item_size + 4))
            elif live < asked.most and (file.kind == PACKED or file.kind == PLAIN):
                load_row(file, key_hash)
                places[live] = place
                live += 1
        for at in range(live):
            load_group(places[at].file, key_hash)
        return number

    cdef bint seek(self, ViewRows rows, uint32_t fingerprint, tuple after, call) except -1:
        """Search for `find`. Return false if two rows may be one answer."""
        cdef Py_ssize_t number = -1, ahead = 0
        cdef int64_t cutoff = 0, before, first, last, requests, request_bytes, slot, read_bytes
        cdef int slow = 0
        cdef int64_t most = rows.max_count, low = rows.second_min, high = rows.second_max
        # the first second that counts, by each hash; before `shown` none does
        cdef int64_t[2] lows
        cdef int64_t shown = low, retired, left_out
        cdef const HiddenEntries *hidden = entries_of(rows.hidden)
        cdef bint has_cutoff = False, opened
        cdef int done = 0, rule
        cdef uint32_t key_hash = rows.key_hash, masked_hash = rows.masked_hash
        cdef uint64_t block
        cdef Bits bits, masked_bits
        cdef int32_t only = 0
        cdef int32_t *many = NULL
        cdef Place *place
        cdef File *file
        cdef LocalFile local
        cdef OpenFile held
        cdef Asked asked
        cdef Found *found = &rows.found
        cdef Together together
        # the set of files to search
        cdef uint64_t[FEW_WORDS] few
        cdef uint64_t *may = few
        cdef Py_ssize_t words = (self.count >> 6) + 1
        found.call = <PyObject *>call
        if self.fresh >= FEWEST_TOGETHER:
            self.gather()
        together = self.together
        asked.most = most
        asked.shown_hash, asked.fingerprint, asked.low, asked.high = key_hash, fingerprint, low, high
        asked.hidden, lows[0], lows[1] = NULL, low, low
        if hidden != NULL:
            lows[0] = max(low, begin_of(hidden, key_hash, fingerprint))
            lows[1] = lows[0] if key_hash == masked_hash else max(low, begin_of(hidden, masked_hash, fingerprint))
            shown = min(lows[0], lows[1])
            if rows.hidden.by_row:
                asked.hidden = hidden
        asked.has_after = after is not None
        if after is not None:
            asked.after[0], asked.after[1], asked.after[2] = after
        block = filter_mix(<uint64_t>key_hash << 32 | (fingerprint if found.fingerprint_at else 0))
        set_key_bits(&bits, block)
        try:
            if words > FEW_WORDS:
                may = <uint64_t *>malloc(8 * words)
                if may == NULL:
                    raise MemoryError
            rows.seconds, rows.low, rows.high = self.seconds, low, high
            for number in range(self.count):
                rows.noted[number] = NOT_ASKED
            number = -1
            if together is not None:
                together.ask(block, may)
                self.choose(may, together.alone, &bits, low, high, rows.noted)
            else:
                memset(may, 0xFF, 8 * words)
                may[words - 1] = (<uint64_t>1 << (self.count & 63)) - 1
                self.choose(may, NULL, &bits, low, high, rows.noted)
            while True:
                number = following(may, number + 1, self.count)
                if number >= self.count:
                    break
                if number >= ahead:
                    asked.key_hash = key_hash
                    ahead = self.load(number, may, &asked, &bits, cutoff if has_cutoff else shown)
                place = &self.places[number]
                file, first, last = place.file, place.second_min, place.second_max
                if place.grows:
                    first, last = file.second_min, file.second_max
                if first > high or last < low:
                    rows.noted[number] = AWAY
                    continue
                if last < shown and file != NULL:
                    rows.noted[number] = HIDDEN_FILE
                    continue
                if has_cutoff and last < cutoff:
                    rows.noted[number], rows.skipped = SKIPPED, True
                    continue
                if file == NULL:
                    rows.leave(number, NO_SEARCH)
                    continue
                rows.noted[number] = 0
                local = <LocalFile>(<tuple>self.files[number])[0]
                known_ids = local.ids
                if place.stored:
                    held = local.open_file
                    known_ids = None if held is None else held.ids
                    if file.is_shard:
                        slot = slot_of(file, masked_hash if file.rule == 1 else key_hash)
                        if slot < file.slot_low or slot >= file.slot_high:
                            rows.noted[number] = AWAY
                            if not rows.knows_topic:
                                # or that is not known
                                rows.knows_topic = known_ids is None or rows.topic in <dict>known_ids
                            continue
                    opened = held is not None
                    file.uses += opened
                    if not opened or held.file.filter == NULL:
                        read_bytes = open_file(local, call, &slow)
                        opened, held = read_bytes >= 0, local.open_file
                        if read_bytes > 0:
                            rows.spend(number, 1, read_bytes)
                        known_ids = None if held is None else held.ids
                    # another thread may have closed it
                    if not opened or held is None or (
                        file.is_shard and (file.second_min > high or file.second_max < low)
                    ):
                        rows.leave(number, NO_DIRECTORY)
                        continue
                    # from here on by `held`, which does not change
                    file = &held.file
                if not rows.knows_topic:
                    rows.knows_topic = known_ids is None or rows.topic in <dict>known_ids
                if place.filter != NULL and excludes(place.filter, place.sums, place.blocks, &bits):
                    continue
                if place.stored and file.rule == 0 and file.filter != NULL:
                    if excludes(file.filter, NULL, file.blocks, &bits):
                        rows.noted[number] = BY_FILTER
                        continue
                if place.stored and file.rule == 1 and file.filter != NULL:
                    block = <uint64_t>masked_hash << 32 | (fingerprint if found.fingerprint_at else 0)
                    set_key_bits(&masked_bits, filter_mix(block))
                    if excludes(file.filter, NULL, file.blocks, &masked_bits):
                        rows.noted[number] = BY_FILTER
                        continue
                asked.ids, asked.id_count = NULL, -1
                if known_ids is not None:
                    ids = (<dict>known_ids).get(rows.topic)
                    if ids is None:
                        if file.stored and not file.is_shard:
                            rows.noted[number] = BY_TOPIC
                        continue
                    asked.id_count = len(ids)
                    if asked.id_count == 1:
                        for only in ids:
                            asked.ids = &only
                    else:
                        free(many)
                        many = <int32_t *>malloc(4 * asked.id_count + 4)
                        if many == NULL:
                            raise MemoryError
                        before = 0
                        for each in ids:
                            many[before], before = each, before + 1
                        asked.ids = many
                before, requests, request_bytes = found.count, found.requests, found.request_bytes
                retired, left_out = found.retired_count, found.hidden_count
                for rule in range(2):
                    # by rule abs, then by rule mask; only once if both hashes are equal
                    if rule == 0 and file.rule == 1 and masked_hash != key_hash:
                        continue
                    if rule == 1 and (file.rule == 0 or masked_hash == key_hash):
                        continue
                    asked.key_hash, asked.low = masked_hash if rule else key_hash, lows[rule]
                    done = search_in(file, &asked, found, True)
                    if done < 0:
                        break
                if done == NO_MEMORY:
                    raise MemoryError
                if done == DECLINED:
                    found.count, found.retired_count, done = before, retired, 0
                    rows.leave(number, found.why)
                    continue
                if found.requests > requests:
                    rows.spend(number, found.requests - requests, found.request_bytes - request_bytes)
                rows.noted[number] = <int32_t>min(found.count - before, 0x7FFFFFFF)
                if file.stored and found.count == before and found.hidden_count == left_out and after is None:
                    if lows[file.rule == 1] <= file.second_min and high >= file.second_max:
                        block = <uint64_t>(masked_hash if file.rule == 1 else key_hash) << 32
                        block = filter_mix(block | (fingerprint if found.fingerprint_at else 0))
                        local.source.miss(block, call)
                if found.count > before and found.count >= most:
                    done = order_rows(found, most + 1)
                    if done == DECLINED:
                        return False
                    if done < 0:
                        raise MemoryError
                    has_cutoff, cutoff = True, row_long(found.rows + (most - 1) * found.stride, 0)
                if has_cutoff and found.retired_count - retired > 0 and found.retired_count > HELD_RETIRED:
                    drop_retired(found, 0, cutoff)
            if not has_cutoff and found.count > 1:
                done = order_rows(found, most + 1)
                if done == DECLINED:
                    return False
                if done < 0:
                    raise MemoryError
            number = 0
            while not rows.knows_topic and number < self.count:
                # files that were not searched may have it; the caller asks those that it has to search
                if AWAY > rows.note_of(number) > NO_SEARCH or rows.note_of(number) >= 0:
                    local = <LocalFile>(<tuple>self.files[number])[0]
                    if local is not None:
                        held = local.open_file
                        known_ids = local.ids if held is None else held.ids
                        rows.knows_topic = known_ids is None or rows.topic in <dict>known_ids
                number += 1
            return True
        finally:
            found.call = NULL
            if may != few:
                free(may)
            free(many)
            free(found.items)
            free(found.group)
            found.items, found.items_room, found.group, found.group_room = NULL, 0, NULL, 0


cdef struct Part:
    # results of a batch: rows, the lookup of each; pairs of file and lookup that are left
    Found found
    int64_t *owners
    int64_t owners_room
    int64_t *left
    int64_t left_count
    int64_t left_room
    # of each file, see `COUNTS`
    int64_t *counts
    # the lookup of each retired row
    int64_t *retired_owners
    int64_t retired_room
    int64_t retired_done


cdef int by_first(const void *a, const void *b) noexcept nogil:
    cdef int64_t left = (<const int64_t *>a)[0], right = (<const int64_t *>b)[0]
    return (left > right) - (left < right)


cdef inline int make_room(int64_t **numbers, int64_t *room, int64_t wanted) noexcept nogil:
    """Grow an array to at least `wanted` numbers."""
    cdef int64_t *made
    if wanted > room[0]:
        made = <int64_t *>realloc(numbers[0], 8 * (2 * wanted + FEW))
        if made == NULL:
            return NO_MEMORY
        numbers[0], room[0] = made, 2 * wanted + FEW
    return 0


@cython.final
cdef class ViewBatch:
    """Many lookups in the files of a view. `find` searches for some of them, and may run in several threads.

    A lookup has the number of its topic in `topics`, normal hashes by the rules abs and mask, and inclusive seconds.
    `after` (i64, n x 3) has the end of the page before: second, offset and queue. The greatest second (or None in place
    of all) stands for a lookup that begins at its newest row.
    With `stored` it also searches files in a storage that is a local folder.
    `hidden` has a `HiddenOf`, or None, for each topic; an empty list, or None: nothing is hidden.
    """
    cdef View view
    # of each topic; NULL: none. `lows`: the first second that counts of each lookup, by the rules abs and mask
    cdef list hidden
    cdef const HiddenEntries **hidden_of
    cdef int64_t *lows
    # the files in a storage to search, and their numbers; ~ number of a closed shard: lookups of its slots are left.
    # `open_files` keeps what they need
    cdef list open_files
    cdef File **stored
    cdef Py_ssize_t stored_count
    cdef int32_t *stored_numbers
    # the numbers of the files that the caller has to search for all lookups
    cdef readonly list left
    # the files whose directories were read: their numbers, and the bytes
    cdef list directories
    cdef Together together
    cdef Place *places
    cdef Py_ssize_t count
    cdef const int64_t[::1] topic_index
    cdef const int32_t[::1] key_hash
    cdef const int32_t[::1] masked_hash
    cdef const uint32_t[::1] fingerprint
    cdef const int64_t[::1] low
    cdef const int64_t[::1] high
    cdef const int64_t[::1] most
    # `ranges` of a file: begin (-1: it names no topics) and end in `topics`, which has pairs: a topic's number, and the
    # begin of its ids in `ids`
    cdef int64_t *ranges
    cdef int64_t *topics
    cdef int32_t *ids
    # the end of the page before of each lookup: second, offset and queue
    cdef bint has_after
    cdef const int64_t[:, ::1] after

    def __init__(
        self, View view not None, list topics not None, topic_index, key_hash, masked_hash, fingerprint, low, high,
        most, bint stored=False, after=None, list hidden=None,
    ):
        cdef Py_ssize_t number, count, topic_count = len(topics)
        cdef Place *place
        self.has_after = after is not None
        self.view, self.count = view, view.count
        self.topic_index, self.key_hash, self.masked_hash = topic_index, key_hash, masked_hash
        self.fingerprint, self.low, self.high, self.most = fingerprint, low, high, most
        count = self.topic_index.shape[0]
        if min(self.key_hash.shape[0], self.masked_hash.shape[0], self.fingerprint.shape[0]) < count:
            fail("there are fewer hashes than lookups")
        if min(self.low.shape[0], self.high.shape[0], self.most.shape[0]) < count:
            fail("there are fewer bounds than lookups")
        if self.has_after:
            self.after = after
            if self.after.shape[0] < count or self.after.shape[1] != 3:
                fail("there are fewer ends of pages than lookups, or they do not have three numbers")
        for number in range(count):
            if self.key_hash[number] < 0 or self.masked_hash[number] < 0 or self.most[number] < 0:
                fail("a lookup has no normal hash, or asks for less than no rows")
            if self.topic_index[number] < 0 or self.topic_index[number] >= topic_count:
                fail("a lookup has no topic")
        if hidden:
            # a copy, because searches use it without the interpreter's lock
            self.hide(hidden[:], topic_count, count)
        for number in range(self.count):
            place = &view.places[number]
            if place.file == NULL or place.stored:
                continue
            if place.file.sums == NULL and not (place.file.filter_held or place.file.filter_damaged):
                if place.file.blocks and count * GROUP_BYTES >= 32 * <int64_t>place.file.blocks:
                    check_filter(place.file)
            if place.filter == NULL and knows(place):
                view.fresh += 1
        if view.fresh >= FEWEST_TOGETHER:
            view.gather()
        self.together = view.together
        self.places = <Place *>malloc(sizeof(Place) * (self.count + 1))
        self.ranges = <int64_t *>malloc(16 * (self.count + 1))
        self.stored = <File **>malloc(sizeof(File *) * (self.count + 1))
        self.stored_numbers = <int32_t *>malloc(4 * (self.count + 1))
        if self.places == NULL or self.ranges == NULL or self.stored == NULL or self.stored_numbers == NULL:
            raise MemoryError
        memcpy(self.places, view.places, sizeof(Place) * self.count)
        self.left, self.open_files, self.directories = [], [], []
        self.name_topics(topics, stored and count > 0)

    cdef int hide(self, list hidden, Py_ssize_t topic_count, Py_ssize_t count) except -1:
        """Set what is hidden of each topic, and the first second that counts of each lookup."""
        cdef Py_ssize_t number
        cdef const HiddenEntries *of
        cdef HiddenOf known
        if len(hidden) != topic_count:
            fail("each topic has hidden entries, or none")
        self.hidden = hidden
        self.hidden_of = <const HiddenEntries **>calloc(topic_count + 1, sizeof(HiddenEntries *))
        self.lows = <int64_t *>malloc(16 * count + 16)
        if self.hidden_of == NULL or self.lows == NULL:
            raise MemoryError
        for number in range(topic_count):
            known = hidden[number]
            self.hidden_of[number] = entries_of(known)
        for number in range(count):
            self.lows[2 * number] = self.lows[2 * number + 1] = self.low[number]
            of = self.hidden_of[self.topic_index[number]]
            if of != NULL:
                self.lows[2 * number] = max(
                    self.low[number], begin_of(of, <uint32_t>self.key_hash[number], self.fingerprint[number])
                )
                self.lows[2 * number + 1] = max(
                    self.low[number], begin_of(of, <uint32_t>self.masked_hash[number], self.fingerprint[number])
                )
        return 0

    cdef int name_topics(self, list topics, bint stored) except -1:
        """Set `ranges`, `topics` and `ids`: the ids of each topic in each file. Choose the files to search."""
        cdef Py_ssize_t number, known = 0, id_count = 0
        cdef int slow = 0 if stored else MOST_SLOW
        cdef int64_t read_bytes
        cdef int64_t low = INT64_MAX, high = INT64_MIN
        cdef int64_t topics_room = 0, ids_room = 0
        cdef int32_t *room
        cdef Place *place
        cdef LocalFile local
        cdef OpenFile held
        cdef dict of_topics, where = {topic: number for number, topic in enumerate(topics)}
        for number in range(self.topic_index.shape[0] if stored else 0):
            low, high = min(low, self.low[number]), max(high, self.high[number])
        for number in range(self.count):
            place = &self.places[number]
            self.ranges[2 * number] = -1
            if place.file == NULL:
                self.left.append(number)
                continue
            if place.stored and place.file.second_min <= high and place.file.second_max >= low:
                local = <LocalFile>(<tuple>self.view.files[number])[0]
                place.file.uses += local.open_file is not None
                read_bytes = open_file(local, None, &slow)
                held = local.open_file
                # another thread may have closed it
                opened = read_bytes >= 0 and held is not None
                if read_bytes > 0:
                    self.directories.append((number, read_bytes))
                if opened or place.file.is_shard:
                    self.stored[self.stored_count] = &held.file if opened else place.file
                    self.open_files.append(held)
                    self.stored_numbers[self.stored_count] = <int32_t>(number if opened else ~number)
                    self.stored_count += 1
                else:
                    self.left.append(number)
                if not opened:
                    place.file = NULL
                    continue
            elif place.stored:
                # out of range, unless the caller searches all
                place.file = NULL
                if not stored:
                    self.left.append(number)
                continue
            if place.grows:
                place.second_min, place.second_max = place.file.second_min, place.file.second_max
            place.asks_file = place.filter == NULL and knows_filter(place.file)
            local = <LocalFile>(<tuple>self.view.files[number])[0]
            known_ids = local.ids
            if place.stored:
                # searched by itself
                place.file, known_ids = NULL, held.ids
            if known_ids is None:
                continue
            of_topics, self.ranges[2 * number] = known_ids, known
            wanted = range(len(topics))
            if len(of_topics) < len(topics):
                # a copy, because a growing file may get topics in another thread
                wanted = sorted([where[topic] for topic in tuple(of_topics) if topic in where])
            for topic in wanted:
                meant = of_topics.get(topics[topic])
                if not meant:
                    continue
                if make_room(&self.topics, &topics_room, 2 * known + 4) < 0:
                    raise MemoryError
                self.topics[2 * known], self.topics[2 * known + 1] = topic, id_count
                known += 1
                if id_count + len(meant) > ids_room:
                    ids_room = 2 * (id_count + len(meant)) + FEW
                    room = <int32_t *>realloc(self.ids, 4 * ids_room)
                    if room == NULL:
                        raise MemoryError
                    self.ids = room
                for each in meant:
                    self.ids[id_count], id_count = each, id_count + 1
            self.ranges[2 * number + 1] = known
            # the end of the last topic's ids
            if make_room(&self.topics, &topics_room, 2 * known + 4) < 0:
                raise MemoryError
            self.topics[2 * known], self.topics[2 * known + 1] = -1, id_count
            known += 1
        return 0

    def __dealloc__(self):
        free(self.places)
        free(self.ranges)
        free(self.topics)
        free(self.ids)
        free(self.stored)
        free(self.stored_numbers)
        free(self.hidden_of)
        free(self.lows)

    def find(self, Py_ssize_t start, Py_ssize_t stop):
        """Search the files for the lookups from `start` up to `stop`. Raises `MemoryError`.

        Returns six byte arrays:

        - the lookup (i64) of each row
        - the rows, at most `most` + 1 per file and lookup
        - pairs (file, lookup), both i64, that the caller has to search
        - five numbers (i64) of each file: rows, and the next ones only of a file in a storage: reads, their bytes,
          lookups that are in range and whose topic it has, and those of them that its filter did not exclude
        - the lookup (i64) of each retired row that matches
        - these rows: those up to the end of the page, and some others
        """
        cdef Part part
        cdef int done
        cdef int64_t *pairs = NULL
        cdef int64_t read_bytes
        cdef Py_ssize_t position, number
        part.found, part.owners, part.owners_room = self.view.form.found(), NULL, 0
        part.left, part.left_count, part.left_room = NULL, 0, 0
        part.retired_owners, part.retired_room, part.retired_done = NULL, 0, 0
        if start < 0 or stop > self.topic_index.shape[0]:
            fail("there are fewer lookups")
        part.counts = <int64_t *>calloc(self.count + 1, 8 * COUNTS)
        try:
            if part.counts == NULL:
                raise MemoryError
            with nogil:
                done = self.search(start, stop, &part)
            if done < 0:
                raise MemoryError
            if self.stored_count:
                pairs = <int64_t *>malloc(16 * (stop - start) + 16)
                if pairs == NULL:
                    raise MemoryError
            for position in range(self.stored_count):
                self.search_stored_file(self.stored_numbers[position], self.stored[position], start, stop, pairs, &part)
            if not start:
                # with one part of the batch
                for number, read_bytes in self.directories:
                    part.counts[COUNTS * number + READS] += 1
                    part.counts[COUNTS * number + READ_BYTES] += read_bytes
            return (
                PyByteArray_FromStringAndSize(<char *>part.owners, 8 * part.found.count),
                PyByteArray_FromStringAndSize(<char *>part.found.rows, part.found.count * part.found.stride),
                PyByteArray_FromStringAndSize(<char *>part.left, 16 * part.left_count),
                PyByteArray_FromStringAndSize(<char *>part.counts, 8 * COUNTS * self.count),
                PyByteArray_FromStringAndSize(<char *>part.retired_owners, 8 * part.found.retired_count),
                PyByteArray_FromStringAndSize(
                    <char *>part.found.retired, part.found.retired_count * part.found.stride
                ),
            )
        finally:
            free(part.owners)
            free(part.left)
            free(part.counts)
            free(pairs)
            free(part.retired_owners)
            free(part.found.rows)
            free(part.found.retired)
            free(part.found.items)
            free(part.found.group)

    def chosen(self):
        """Return the pairs (slot group, lookup), both i64, by group, that the only file, in a storage, may answer.

        It must be open. Its filter excludes lookups, if it has one. Raises `MemoryError`.
        """
        cdef Part part
        cdef File *file
        cdef int64_t *pairs
        cdef int64_t at
        cdef Py_ssize_t pair, count, kept = 0, lookups = self.topic_index.shape[0]
        if self.count == 1 and not self.stored_count:
            # no lookup is in range
            return bytearray()
        if self.count != 1 or self.stored_count != 1 or self.stored_numbers[0] < 0:
            fail("the view has one open file in a storage")
        file = self.stored[0]
        pairs = <int64_t *>malloc(16 * lookups + 16)
        part.counts = <int64_t *>calloc(1, 8 * COUNTS)
        try:
            if pairs == NULL or part.counts == NULL:
                raise MemoryError
            with nogil:
                count = self.choose(0, file, 0, lookups, pairs, &part)
                for pair in range(count):
                    at = group_of(file, pairs[2 * pair])
                    if at >= 0 and word_at(file.groups + GROUP * at + 4):
                        pairs[2 * kept], pairs[2 * kept + 1] = at, pairs[2 * pair + 1]
                        kept += 1
            return PyByteArray_FromStringAndSize(<char *>pairs, 16 * kept)
        finally:
            free(pairs)
            free(part.counts)

    def picked(self, list pieces not None, const int64_t[::1] counts, const int64_t[::1] starts, lookups):
        """Return the lookup (i64) of each row, and the rows, of runs of the only file, in a storage; then these two of
        the retired rows that match.

        `pieces` are the runs' verified bytes, `counts` their numbers of items. Run m is searched for `lookups` (i64)
        from `starts[m]` up to `starts[m + 1]`, at most `most` + 1 rows for each. None: a run is not sound. Raises
        `MemoryError`.
        """
        cdef Part part
        cdef File *file
        cdef const int64_t[::1] asking = lookups
        cdef const uint8_t[::1] piece
        cdef const uint8_t *data
        cdef Py_ssize_t run, place, runs = len(pieces)
        cdef int64_t size
        cdef int done = 0
        if self.count != 1 or self.stored_count != 1 or self.stored_numbers[0] < 0:
            fail("the view has one open file in a storage")
        if counts.shape[0] < runs or starts.shape[0] < runs + 1 or (runs and starts[0] < 0):
            fail("each run has a number of items and a first lookup")
        for run in range(runs):
            if starts[run + 1] < starts[run] or starts[run + 1] > asking.shape[0]:
                fail("a run is searched for lookups")
        for place in range(asking.shape[0]):
            if not 0 <= asking[place] < self.topic_index.shape[0]:
                fail("there are fewer lookups")
        file = self.stored[0]
        part.found, part.owners, part.owners_room = self.view.form.found(), NULL, 0
        part.left, part.left_count, part.left_room = NULL, 0, 0
        part.retired_owners, part.retired_room, part.retired_done = NULL, 0, 0
        part.counts = <int64_t *>calloc(1, 8 * COUNTS)
        try:
            if part.counts == NULL:
                raise MemoryError
            for run in range(runs):
                piece = pieces[run]
                size = piece.shape[0]
                if not size:
                    return None
                data = &piece[0]
                if file.kind == PACKED:
                    if make_group(&part.found, size) < 0:
                        raise MemoryError
                    memcpy(part.found.group, data, size)
                    data = part.found.group
                with nogil:
                    done = self.pick(file, data, size, counts[run], asking, starts[run], starts[run + 1], &part)
                if done < 0:
                    raise MemoryError
                if part.left_count:
                    return None
            return (
                PyByteArray_FromStringAndSize(<char *>part.owners, 8 * part.found.count),
                PyByteArray_FromStringAndSize(<char *>part.found.rows, part.found.count * part.found.stride),
                PyByteArray_FromStringAndSize(<char *>part.retired_owners, 8 * part.found.retired_count),
                PyByteArray_FromStringAndSize(
                    <char *>part.found.retired, part.found.retired_count * part.found.stride
                ),
            )
        finally:
            free(part.owners)
            free(part.left)
            free(part.counts)
            free(part.retired_owners)
            free(part.found.rows)
            free(part.found.retired)
            free(part.found.items)
            free(part.found.group)

    cdef int pick(
        self, File *file, const uint8_t *data, int64_t size, int64_t count, const int64_t[::1] lookups,
        int64_t start, int64_t stop, Part *part
    ) noexcept nogil:
        """Search one run for some lookups, for `picked`."""
        cdef int64_t place, before, room = size + 16 if file.kind == PACKED else size
        cdef Py_ssize_t lookup
        cdef Asked asked
        cdef int done
        for place in range(start, stop):
            lookup, before = lookups[place], part.found.count
            if not self.ask(0, lookup, &asked):
                continue
            self.by_rule(lookup, 0, &asked)
            done = search_items(file, data, room, 0, size, count, &asked, &part.found)
            if done == NO_MEMORY or self.end(0, lookup, asked.most, before, done, part) < 0:
                return NO_MEMORY
        return 0

    cdef int search(self, Py_ssize_t start, Py_ssize_t stop, Part *part) except -9 nogil:
        """Search for `find`."""
        cdef Py_ssize_t size = min(<Py_ssize_t>LOOKUPS, max(<Py_ssize_t>1, PAIRS // (self.count + 1)))
        # pairs of lookup and file to search, one lookup after the other
        cdef int32_t *pairs = <int32_t *>malloc(8 * size * (self.count + 1))
        cdef uint64_t *may = NULL
        cdef int done = 0
        if self.together is not None:
            may = <uint64_t *>malloc(8 * self.together.words)
        if pairs == NULL or (may == NULL and self.together is not None):
            done = NO_MEMORY
        while start < stop and done == 0:
            done = self.search_some(start, min(start + size, stop), pairs, may, part)
            start += size
        free(pairs)
        free(may)
        return done

    cdef int search_some(
        self, Py_ssize_t start, Py_ssize_t stop, int32_t *pairs, uint64_t *may, Part *part
    ) except -9 nogil:
        cdef uint64_t mixed
        cdef uint64_t[LOOKUPS] mixes
        cdef Bits[LOOKUPS] bits
        cdef Py_ssize_t lookup, number, count = 0, pair, live
        cdef bint keyed = self.view.form.fingerprint_at > 0
        cdef int done
        for lookup in range(start, stop):
            mixed = <uint64_t><uint32_t>self.key_hash[lookup] << 32
            mixed = filter_mix(mixed | (self.fingerprint[lookup] if keyed else 0))
            mixes[lookup - start] = mixed
            set_key_bits(&bits[lookup - start], mixed)
            if may != NULL:
                # those of all lookups first, so that memory answers many reads at a time
                self.together.load(mixed)
        for lookup in range(start, stop):
            if may != NULL:
                self.together.ask(mixes[lookup - start], may)
            number = following(may, 0, self.count)
            while number < self.count:
                pairs[2 * count], pairs[2 * count + 1] = <int32_t>(lookup - start), <int32_t>number
                count += 1
                number = following(may, number + 1, self.count)
        while count > 0:
            live = self.live_pairs(start, pairs, min(<Py_ssize_t>LOOKUPS, count), bits)
            self.follow_chains(start, pairs, live)
            for pair in range(live):
                done = self.search_pair(pairs[2 * pair + 1], start + pairs[2 * pair], part)
                if done < 0:
                    return done
            pairs, count = pairs + 2 * LOOKUPS, count - LOOKUPS
        return 0

    cdef Py_ssize_t live_pairs(
        self, Py_ssize_t start, int32_t *pairs, Py_ssize_t count, const Bits *bits
    ) noexcept nogil:
        """Move the pairs that no filter excludes to the front, and return their number. Load their slot groups.

        See `View.load`.
        """
        cdef Place *place
        cdef const Bits *of_key
        cdef Py_ssize_t pair, live = 0, first, lookup
        cdef uint64_t block
        for pair in range(count):
            place = &self.places[pairs[2 * pair + 1]]
            if place.filter != NULL:
                block = bits[pairs[2 * pair]].part * place.blocks >> 32
                prefetch(place.filter + 32 * block)
                if place.sums != NULL:
                    prefetch(&place.sums[block])
        for pair in range(count):
            place, of_key = &self.places[pairs[2 * pair + 1]], &bits[pairs[2 * pair]]
            if place.file == NULL:
                continue
            if place.filter != NULL and excludes(place.filter, place.sums, place.blocks, of_key):
                continue
            pairs[2 * live], pairs[2 * live + 1] = pairs[2 * pair], pairs[2 * pair + 1]
            live += 1
        for first in range(2):
            for pair in range(live):
                place, lookup = &self.places[pairs[2 * pair + 1]], start + pairs[2 * pair]
                if place.file.rule != 0 or not (place.file.kind == PACKED or place.file.kind == PLAIN):
                    continue
                if self.low[lookup] > place.second_max or self.high[lookup] < place.second_min:
                    continue
                if first == 0:
                    load_row(place.file, <uint32_t>self.key_hash[lookup])
                else:
                    load_group(place.file, <uint32_t>self.key_hash[lookup])
        return live

    cdef void follow_chains(self, Py_ssize_t start, const int32_t *pairs, Py_ssize_t count) noexcept nogil:
        """Load the first entries of the chains of up to `LOOKUPS` pairs into the processor's cache.

        It takes one step in all chains, then the next step in all, so that memory answers many reads at a time.
        """
        cdef (File *)[LOOKUPS] files
        cdef int64_t[LOOKUPS] indexes
        cdef const uint8_t *entry
        cdef Place *place
        cdef File *file
        cdef Py_ssize_t pair, step, lookup, live = 0
        cdef int64_t item_size = self.view.form.item_size
        for pair in range(count):
            place, lookup = &self.places[pairs[2 * pair + 1]], start + pairs[2 * pair]
            # with a filter, a key is mostly in no chain
            if not place.grows or place.filter != NULL or place.asks_file:
                continue
            if self.low[lookup] > place.second_max or self.high[lookup] < place.second_min:
                continue
            files[live], indexes[live] = place.file, <uint32_t>self.key_hash[lookup] % <uint64_t>place.file.slots
            prefetch(&place.file.heads[indexes[live]])
            live += 1
        for step in range(FOLLOWED):
            count, live = live, 0
            for pair in range(count):
                file = files[pair]
                if step:
                    entry = file.data + file.items_at + indexes[pair] * (item_size + 4)
                    indexes[pair] = <int32_t>word_at(entry + item_size)
                else:
                    indexes[pair] = file.heads[indexes[pair]]
                if not 0 < indexes[pair] < file.items:
                    continue
                entry = file.data + file.items_at + indexes[pair] * (item_size + 4)
                prefetch(entry)
                prefetch(entry + item_size)
                files[live], indexes[live] = file, indexes[pair]
                live += 1

    cdef inline int64_t low_of(self, Py_ssize_t lookup, int rule) noexcept nogil:
        """Return the first second that counts of a lookup by a hash rule."""
        return self.low[lookup] if self.lows == NULL else self.lows[2 * lookup + rule]

    cdef inline void by_rule(self, Py_ssize_t lookup, int rule, Asked *asked) noexcept nogil:
        """Set the hash of a lookup by a rule (0 for abs, 1 for mask), and what is hidden of it, after `ask`."""
        cdef const HiddenEntries *of
        asked.key_hash = <uint32_t>(self.masked_hash[lookup] if rule else self.key_hash[lookup])
        if self.lows != NULL:
            asked.low = self.lows[2 * lookup + rule]
            of = self.hidden_of[self.topic_index[lookup]]
            if of != NULL and (of.queue_count or of.range_count):
                asked.hidden = of

    cdef bint ask(self, Py_ssize_t number, Py_ssize_t lookup, Asked *asked) noexcept nogil:
        """Set what a lookup asks of a file. Return false if the file lacks the topic."""
        cdef int64_t at = self.ranges[2 * number], end = self.ranges[2 * number + 1], middle
        asked.low, asked.high = self.low[lookup], self.high[lookup]
        asked.hidden = NULL
        asked.most = min(self.most[lookup], <int64_t>1 << 60)
        asked.shown_hash, asked.fingerprint = <uint32_t>self.key_hash[lookup], self.fingerprint[lookup]
        # a lookup that continues no page has a second that no entry has
        asked.has_after = self.has_after and self.after[lookup, 0] < INT64_MAX
        asked.ids, asked.id_count = NULL, -1
        if asked.has_after:
            asked.after[0], asked.after[1] = self.after[lookup, 0], self.after[lookup, 1]
            asked.after[2] = self.after[lookup, 2]
        if at >= 0:
            while end - at > 1:
                middle = (at + end) >> 1
                if self.topics[2 * middle] <= self.topic_index[lookup]:
                    at = middle
                else:
                    end = middle
            if at == end or self.topics[2 * at] != self.topic_index[lookup]:
                return False
            asked.ids = self.ids + self.topics[2 * at + 1]
            asked.id_count = self.topics[2 * at + 3] - self.topics[2 * at + 1]
        return True

    cdef int search_pair(self, Py_ssize_t number, Py_ssize_t lookup, Part *part) except -9 nogil:
        """Add the rows of a local file for a lookup."""
        cdef Place *place = &self.places[number]
        cdef Found *found = &part.found
        cdef Asked asked
        cdef int64_t before = found.count
        cdef uint32_t key_hash = <uint32_t>self.key_hash[lookup], masked_hash = <uint32_t>self.masked_hash[lookup]
        cdef int rule, done = 0, kind = place.file.rule
        if max(self.low[lookup], place.second_min) > min(self.high[lookup], place.second_max):
            return 0
        if not self.ask(number, lookup, &asked):
            return 0
        for rule in range(2):
            # the hash rules, as in `View.seek`
            if (rule == 0 and kind == 1 and masked_hash != key_hash) or (
                rule == 1 and (kind == 0 or masked_hash == key_hash)
            ):
                continue
            self.by_rule(lookup, rule, &asked)
            if place.asks_file:
                done = search_in(place.file, &asked, found, False)
            else:
                done = search_items_of(place.file, &asked, found)
            if done < 0:
                break
        return self.end(number, lookup, asked.most, before, done, part)

    cdef int end(
        self, Py_ssize_t number, Py_ssize_t lookup, int64_t most, int64_t before, int done, Part *part
    ) noexcept nogil:
        """Keep the rows from `before` on, or leave the file to the caller if `done` says so."""
        cdef Found *found = &part.found
        cdef Found ordered
        if done == 0 and found.count - before > most:
            ordered = found[0]
            ordered.rows, ordered.count = found.rows + before * found.stride, found.count - before
            done = order_rows(&ordered, min(most, ordered.count) + 1)
            found.count = before + ordered.count
            if done == 0 and found.retired_count > part.retired_done:
                # those behind the page, which further files only shorten
                drop_retired(found, part.retired_done, row_long(found.rows + (found.count - 1) * found.stride, 0))
        if done == DECLINED:
            found.count, found.retired_count, done = before, part.retired_done, 0
            if make_room(&part.left, &part.left_room, 2 * part.left_count + 2) < 0:
                return NO_MEMORY
            part.left[2 * part.left_count], part.left[2 * part.left_count + 1] = number, lookup
            part.left_count += 1
        if done < 0 or make_room(&part.owners, &part.owners_room, found.count) < 0:
            return NO_MEMORY
        if make_room(&part.retired_owners, &part.retired_room, found.retired_count) < 0:
            return NO_MEMORY
        while part.retired_done < found.retired_count:
            part.retired_owners[part.retired_done] = lookup
            part.retired_done += 1
        part.counts[COUNTS * number] += found.count - before
        while before < found.count:
            part.owners[before] = lookup
            before += 1
        return 0

    cdef int search_stored_file(
        self, Py_ssize_t number, File *file, Py_ssize_t start, Py_ssize_t stop, int64_t *pairs, Part *part
    ) except -1:
        """Search a file in a storage. `pairs` has room for a slot and a lookup of each lookup."""
        cdef Py_ssize_t count
        cdef bint is_closed = number < 0
        cdef const int64_t *counts
        cdef int64_t missed = -1
        cdef int descriptor = -1, done
        if is_closed:
            number = ~number
        counts = part.counts + COUNTS * number
        with nogil:
            count = self.choose(number, file, start, stop, pairs, part)
        if not count:
            return 0
        source = (<LocalFile>file.owner).source
        opened = None if is_closed else source.open_now()
        try:
            if opened is not None:
                descriptor = opened.descriptor
            with nogil:
                done = self.read_groups(number, file, descriptor, pairs, count, &missed, part)
        finally:
            if opened is not None:
                opened.close(counts[READS], counts[READ_BYTES])
        if done < 0:
            raise MemoryError
        if missed >= 0:
            source.miss(self.mixed(file, missed), None)
        return 0

    cdef inline uint64_t mixed(self, const File *file, Py_ssize_t lookup) noexcept nogil:
        """Return the hash of a lookup for filters."""
        cdef uint64_t upper = <uint32_t>(self.masked_hash[lookup] if file.rule == 1 else self.key_hash[lookup])
        return filter_mix(upper << 32 | (self.fingerprint[lookup] if self.view.form.fingerprint_at else 0))

    cdef Py_ssize_t choose(
        self, Py_ssize_t number, const File *file, Py_ssize_t start, Py_ssize_t stop, int64_t *pairs, Part *part
    ) noexcept nogil:
        """Write the pairs of slot and lookup that a file may answer, by slot, and return their number."""
        cdef const uint8_t *filter = file.filter if file.kind else NULL
        cdef Py_ssize_t lookup, pair, chosen, count = 0
        cdef int64_t slot
        cdef Asked asked
        cdef Bits bits
        for lookup in range(start, stop):
            if self.low_of(lookup, file.rule == 1) > file.second_max or self.high[lookup] < file.second_min:
                continue
            slot = slot_of(file, <uint32_t>(self.masked_hash[lookup] if file.rule == 1 else self.key_hash[lookup]))
            if slot < file.slot_low or slot >= file.slot_high or not self.ask(number, lookup, &asked):
                continue
            pairs[2 * count], pairs[2 * count + 1] = slot, lookup
            count += 1
            if filter != NULL:
                prefetch(filter + 32 * ((self.mixed(file, lookup) >> 32) * file.blocks >> 32))
        part.counts[COUNTS * number + IN_RANGE] += count
        chosen = count
        if filter != NULL:
            chosen = 0
            for pair in range(count):
                set_key_bits(&bits, self.mixed(file, pairs[2 * pair + 1]))
                if not excludes(filter, NULL, file.blocks, &bits):
                    pairs[2 * chosen], pairs[2 * chosen + 1] = pairs[2 * pair], pairs[2 * pair + 1]
                    chosen += 1
        part.counts[COUNTS * number + SEARCHED] += chosen
        qsort(pairs, chosen, 16, by_first)
        return chosen

    cdef int read_groups(
        self, Py_ssize_t number, File *file, int descriptor, int64_t *pairs, Py_ssize_t count, int64_t *missed,
        Part *part
    ) except -9 nogil:
        """Search the slot groups of pairs. Leave those to the caller that are damaged or in blocks.

        Groups that the operating system has in memory come first. Meanwhile it reads the others ahead. `missed` becomes
        a lookup of the file's whole range without rows, if there is one.
        """
        cdef Py_ssize_t waiting = self.read_some(number, file, descriptor, pairs, count, False, missed, part)
        if waiting > 0:
            waiting = self.read_some(number, file, descriptor, pairs, waiting, True, missed, part)
        return <int>waiting

    cdef Py_ssize_t read_some(
        self, Py_ssize_t number, File *file, int descriptor, int64_t *pairs, Py_ssize_t count, bint waits,
        int64_t *missed, Part *part
    ) except -9 nogil:
        """As `read_groups`. Unless it `waits`, put the pairs first that need a wait, and return their number."""
        cdef Found *found = &part.found
        cdef Py_ssize_t pair, lookup, waiting = 0
        cdef int64_t held = -1, missing = -1, damaged = -1, at, begin, size, before, got, left_out
        cdef const uint8_t *group
        cdef Asked asked
        cdef int done
        for pair in range(count):
            lookup, before, left_out = pairs[2 * pair + 1], found.count, found.hidden_count
            if descriptor < 0:
                if self.end(number, lookup, 0, before, DECLINED, part) < 0:
                    return NO_MEMORY
                continue
            self.ask(number, lookup, &asked)
            self.by_rule(lookup, file.rule == 1, &asked)
            at, done = group_of(file, pairs[2 * pair]), 0
            group = file.groups + GROUP * at
            if at >= 0 and word_at(group + 4):
                begin, size = long_at(group + 8), word_at(group + 16)
                if at == damaged or not is_whole(file, group):
                    done = DECLINED
                elif held != at:
                    held, got = -1, -1
                    if make_group(found, size) < 0:
                        return NO_MEMORY
                    if waits:
                        got = read_whole(descriptor, found.group, size, begin)
                    elif missing != at:
                        got = read_cached(descriptor, found.group, size, begin)
                    if got != size and not waits:
                        if missing != at:
                            read_ahead(descriptor, begin, size)
                        missing, pairs[2 * waiting], pairs[2 * waiting + 1] = at, pairs[2 * pair], lookup
                        waiting += 1
                        continue
                    if got != size:
                        done, damaged = DECLINED, at
                    else:
                        part.counts[COUNTS * number + READS] += 1
                        part.counts[COUNTS * number + READ_BYTES] += size
                        if matches(file.owner, found.group, size, word_at(group + 20)):
                            held = at
                        else:
                            done, damaged = DECLINED, at
                if done == 0:
                    done = search_items(
                        file, found.group, size + 16 if file.kind == PACKED else size, 0, size, word_at(group + 4),
                        &asked, found,
                    )
            if done == NO_MEMORY:
                return NO_MEMORY
            if done == 0 and found.count == before and found.hidden_count == left_out and not asked.has_after:
                if asked.low <= file.second_min and asked.high >= file.second_max:
                    missed[0] = lookup
            if self.end(number, lookup, asked.most, before, done, part) < 0:
                return NO_MEMORY
        return waiting


@cython.final
cdef class Answers:
    """Answers plain lookups: those that need only the files of a view, and have no budget.

    An answer is a `kind`. Its `_later` is a `ViewRows`, whose `fields` makes the answer's fields on first access. Its
    `plain_items` is the `ItemForm` of the items; None: it makes them, too.
    `complete` and `truncated` count the answers. A topic has at most `most_topic` characters, a key at most `most_key`,
    and a time is at most `last_millisecond`.
    """
    cdef readonly int64_t complete, truncated
    cdef object kind, fields
    cdef ItemForm plain_items
    cdef Py_ssize_t most_topic, most_key
    cdef int64_t last_millisecond

    def __init__(self, kind, fields, Py_ssize_t most_topic, Py_ssize_t most_key, int64_t last_millisecond):
        self.fields, self.plain_items = fields, fields.plain_items
        self.kind, self.most_topic, self.most_key, self.last_millisecond = kind, most_topic, most_key, last_millisecond

    def find(
        self, View view not None, about, topic, key, begin_ms, end_ms, max_count, bint has_topics=True,
        tuple after=None, hidden=None, call=None,
    ):
        """Return the answer to a lookup, or its `ViewRows` if the caller has to search some files.

        None: the caller has to check the arguments, or to search all files. `after` is the end of the page before:
        second, offset and queue. Without `has_topics` the result is also None if the view has neither rows nor the
        topic. `hidden[topic].core` is the `HiddenOf` of a topic, or None. The sources of files get `call`.
        """
        cdef ViewRows rows = self.searched(
            view, about, topic, key, begin_ms, end_ms, max_count, has_topics, after, hidden, call
        )
        if rows is None or rows.has_left:
            return rows
        result = new(self.kind)
        PyObject_GenericSetAttr(result, "_later", rows)
        if rows.found.count <= AT_ONCE and (self.plain_items is not None or not rows.found.count):
            # a first access through `__getattr__` takes longer than making a few
            PyObject_GenericSetAttr(result, "items", rows.items(self.plain_items) if rows.found.count else ())
        if rows.skipped or rows.found.count > rows.max_count:
            self.truncated += 1
        else:
            self.complete += 1
        rows.elapsed_ms = (seconds_now() - rows.started) * 1000
        return result

    def rows(
        self, View view not None, about, topic, key, begin_ms, end_ms, max_count, tuple after=None, hidden=None,
        call=None,
    ):
        """As `find`, for one of several indexes: return the `ViewRows`, and count nothing."""
        cdef ViewRows rows = self.searched(
            view, about, topic, key, begin_ms, end_ms, max_count, True, after, hidden, call
        )
        if rows is not None:
            rows.elapsed_ms = (seconds_now() - rows.started) * 1000
        return rows

    cdef ViewRows searched(
        self, View view, about, topic, key, begin_ms, end_ms, max_count, bint has_topics, tuple after, hidden, call
    ):
        """Return the rows of a lookup; None: as for `find`."""
        cdef ViewRows rows
        cdef uint32_t java = 0, second = 0, masked, key_hash
        cdef int64_t low, high, most
        if not is_text(topic, self.most_topic) or not is_text(key, self.most_key):
            return None
        # exclude topics of only blanks, and leave unusual first letters to the caller
        if not 32 < <Py_UCS4>(<str>topic)[0] < 127:
            return None
        most = number_of(max_count, 0)
        low, high = number_of(begin_ms, 0), number_of(end_ms, self.last_millisecond)
        if most < 1 or low < 0 or high < low:
            return None
        low, high = low // 1000, high // 1000
        add_units(topic, &java, &second)
        java, second = java * 31 + 35, second * <uint32_t>0x9E3779B1 + 35
        add_units(key, &java, &second)
        masked = java & 0x7FFFFFFF
        key_hash = masked if java == masked else -java & 0x7FFFFFFF
        if view.together is not None:
            # memory answers while the rows are made
            view.together.load(filter_mix(<uint64_t>key_hash << 32 | (mixed32(second) if view.form.fingerprint_at else 0)))
        rows = view.begun(
            topic, key_hash, masked, low, high if after is None else min(high, <int64_t>after[0]), most,
            None if hidden is None else PyObject_GetItem(hidden, topic).core,
        )
        # nobody needs it for a later page
        rows.knows_topic = after is not None
        if not view.seek(rows, mixed32(second), after, call):
            return None
        if rows.has_left:
            return rows
        if not has_topics and not rows.found.count and not rows.knows_topic:
            return None
        rows.key, rows.second_max, rows.about = key, high, about
        rows.fields, rows.plain_items = self.fields, self.plain_items
        return rows


def merged_items(list parts not None, list sources not None, ItemForm form not None, int64_t most):
    """Return the first `most` rows of several indexes in one answer order, as items.

    `parts` has the `ViewRows` of each index, `sources` its URI. At equal places, an earlier index comes first.
    """
    cdef Py_ssize_t number, best, count = len(parts)
    cdef const uint8_t *row
    cdef const uint8_t **heads
    cdef const uint8_t **ends
    cdef ViewRows rows
    cdef list made = []
    if len(sources) != count:
        fail("each index has a URI")
    heads = <const uint8_t **>malloc(2 * (count + 1) * sizeof(uint8_t *))
    if heads == NULL:
        raise MemoryError
    ends = heads + count
    try:
        for number in range(count):
            rows = parts[number]
            if rows.found.count and rows.found.stride != form.stride:
                fail("the rows have columns that the items have not")
            heads[number] = rows.found.rows
            ends[number] = heads[number] + rows.found.count * form.stride
        while len(made) < most:
            best = -1
            for number in range(count):
                if heads[number] != ends[number] and (best < 0 or in_order(heads[number], heads[best]) < 0):
                    best = number
            if best < 0:
                break
            made.append(form.made(rows.topic, heads[best], sources[best]))
            heads[best] += form.stride
    finally:
        free(heads)
    return tuple(made)


def cursor_parts(cursor, Py_ssize_t columns):
    """Return the digest and the order key of a cursor, as `encode_cursor` writes them, with `columns` numbers.

    None: the caller has to decode the cursor, because it is not like that, or a number has more than 64 bits.
    """
    cdef uint8_t data[256]
    cdef const uint8_t *text
    cdef Py_ssize_t at, place, size = 0, length
    cdef uint32_t bits = 0
    cdef int held = 0, value
    cdef uint64_t number
    cdef bint is_negative
    cdef list key = []
    if not is_text(cursor, 256) or PyUnicode_KIND(cursor) != 1:
        return None
    text, length = <const uint8_t *>PyUnicode_1BYTE_DATA(cursor), len(<str>cursor)
    for at in range(length):
        value = digit_of(text[at])
        if value < 0:
            return None
        bits, held = bits << 6 | <uint32_t>value, held + 6
        if held >= 8:
            held -= 8
            data[size], size = <uint8_t>(bits >> held & 255), size + 1
    # what is left of the last character is 0
    if length % 4 == 1 or bits & ((1 << held) - 1) or size < 26:
        return None
    if memcmp(data + 4, <const char *>b'[1,"', 4) or data[24] != 34:
        return None
    for at in range(8, 24):
        if not (48 <= data[at] < 58 or 97 <= data[at] < 103):
            return None
    place = 25
    while place < size and data[place] == 44:
        place += 1
        is_negative = place < size and data[place] == 45
        place += is_negative
        at, number = place, 0
        while place < size and place < at + 19 and 48 <= data[place] < 58:
            number, place = number * 10 + data[place] - 48, place + 1
        if place == at or number > INT64_MAX or (data[at] == 48 and (place > at + 1 or is_negative)):
            return None
        key.append(-<int64_t>number if is_negative else <int64_t>number)
    if place != size - 1 or data[place] != 93 or len(key) != columns:
        return None
    checksum = <uint32_t>data[0] << 24 | <uint32_t>data[1] << 16 | <uint32_t>data[2] << 8 | data[3]
    if crc32(PyBytes_FromStringAndSize(<char *>data + 4, size - 4)) != checksum:
        return None
    return PyUnicode_DecodeASCII(<char *>data + 8, 16, NULL), tuple(key)


cdef inline int digit_of(uint8_t letter) noexcept nogil:
    """Return the value of a digit of base64 for URLs; -1: it is none."""
    if 65 <= letter < 91:
        return letter - 65
    if 97 <= letter < 123:
        return letter - 71
    if 48 <= letter < 58:
        return letter + 4
    return 62 if letter == 45 else 63 if letter == 95 else -1


cdef inline int64_t number_of(value, int64_t otherwise) except? -2:
    """Return `value` if it is an int from 0 to 2**60 - 1, `otherwise` if it is None, and else -1."""
    cdef int64_t number
    cdef int overflow = 0
    if value is None:
        return otherwise
    if type(value) is not int:
        return -1
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    return number if not overflow and 0 <= number < <int64_t>1 << 60 else -1
