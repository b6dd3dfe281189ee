# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Shared by the modules of the compiled core: texts, stored numbers, blocks of filters, packed runs."""
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_GET_LENGTH
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "core.h" nogil:
    uint32_t swapped32(uint32_t value)
    uint64_t swapped64(uint64_t value)
    uint32_t remainder32(uint32_t value, uint64_t inverse, uint32_t by)
    int SHORT_UNITS
    void set_short_powers(uint32_t java, uint32_t second)
    void short_sums(const uint8_t *end, int64_t count, uint32_t *java, uint32_t *second)
    int ones_of(uint64_t word)
    int first_one(uint64_t word)
    void prefetch(const void *place)
    int64_t read_cached(int descriptor, void *to, int64_t size, int64_t at) nogil
    int64_t read_whole(int descriptor, void *to, int64_t size, int64_t at) nogil
    void read_ahead(int descriptor, int64_t at, int64_t size) nogil
    double seconds_now()
    int file_state(const char *path, int is_itself, int may_lack, uint64_t *to)
    const uint32_t *SALTS
    const uint64_t *SUM_STARTS
    const uint64_t *SUM_FACTORS

cdef extern from "Python.h":
    int PyUnicode_KIND(object)


cdef enum:
    # The revision of both modules. Increase it with each incompatible change: `kernels` then rejects an old build.
    BUILD = 30
    # the places of these columns in an item of any schema
    OFFSET = 12
    TIME = 24
    # most items of a packed run
    MOST_ITEMS = 1 << 14


cdef inline uint32_t word_at(const uint8_t *place) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, place, 4)
    return swapped32(value)


cdef inline int64_t long_at(const uint8_t *place) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, place, 8)
    return <int64_t>swapped64(value)


cdef inline uint64_t normal_at(const uint8_t *place) noexcept nogil:
    """Return the normal form of the key's hash at a place."""
    cdef uint32_t value = word_at(place)
    return 0 if value == <uint32_t>0x80000000 else value


cdef inline uint32_t mixed32(uint32_t value) noexcept nogil:
    """Return the fingerprint of a sum: MurmurHash3's fmix32."""
    value = (value ^ value >> 16) * <uint32_t>0x85EBCA6B
    value = (value ^ value >> 13) * <uint32_t>0xC2B2AE35
    return value ^ value >> 16


cdef inline void add_units(str text, uint32_t *java, uint32_t *second) noexcept:
    """Add the UTF-16 code units of a text to Java's hash and to the sum of the fingerprint."""
    cdef Py_UCS4 unit
    cdef uint32_t a = java[0], b = second[0], value
    for unit in text:
        value = unit
        if value > 0xFFFF:
            value -= 0x10000
            a = a * 31 + (0xD800 | value >> 10)
            b = b * <uint32_t>0x9E3779B1 + (0xD800 | value >> 10)
            value = 0xDC00 | (value & 0x3FF)
        a = a * 31 + value
        b = b * <uint32_t>0x9E3779B1 + value
    java[0], second[0] = a, b


cdef inline bint is_text(value, Py_ssize_t most) except -1:
    """Return whether `value` is a plain text of 1 to `most` characters without surrogates."""
    if not PyUnicode_CheckExact(value) or not 0 < PyUnicode_GET_LENGTH(value) <= most:
        return False
    # characters of one byte are no surrogates
    if PyUnicode_KIND(value) > 1:
        for letter in <str>value:
            if 0xD800 <= letter < 0xE000:
                return False
    return True


cdef inline int fail(str text) except -1:
    raise ValueError(text)


cdef inline uint64_t filter_mix(uint64_t value) noexcept nogil:
    """Return the hash for filters, of a key's hash (upper 32 bits) and its fingerprint (lower 32 bits)."""
    value = (value ^ value >> 33) * <uint64_t>0xFF51AFD7ED558CCD
    value = (value ^ value >> 33) * <uint64_t>0xC4CEB9FE1A85EC53
    return value ^ value >> 33


cdef struct Bits:
    # the bits of one key in a block of a filter, and the place of that block, as a fraction of 2**32
    uint64_t[4] words
    uint64_t part


cdef inline void set_key_bits(Bits *bits, uint64_t mixed) noexcept nogil:
    cdef int number
    cdef uint32_t[8] words
    for number in range(8):
        words[number] = <uint32_t>1 << (<uint32_t>(<uint32_t>mixed * SALTS[number]) >> 27)
    memcpy(bits.words, words, 32)
    bits.part = mixed >> 32


cdef inline bint may_hold(const uint8_t *block, const Bits *bits) noexcept nogil:
    """Return whether a block of a filter has all bits of a key."""
    cdef uint64_t[4] words
    memcpy(words, block, 32)
    return not (
        ~words[0] & bits.words[0] | ~words[1] & bits.words[1]
        | ~words[2] & bits.words[2] | ~words[3] & bits.words[3]
    )


cdef struct Columns:
    Py_ssize_t count
    int64_t of_keys
    const int64_t *table
    const int64_t *line
    Py_ssize_t line_size
    # the topic ids that the runs number; none if they have the ids themselves
    const int32_t *topics
    uint64_t topic_count
    int64_t base
    int64_t header


cdef int64_t find_in_run(
    const uint64_t *words, Py_ssize_t word_count, int64_t begin, int64_t size, int64_t count, int64_t most,
    const int64_t *wanted, Py_ssize_t asked_count, const Columns *of, uint8_t *items, int64_t stride, int64_t room
) noexcept nogil
cdef int set_columns(
    Columns *of, const int64_t[:, ::1] columns, int64_t of_keys, const int64_t[::1] line, const int32_t[::1] topics,
    int64_t base, int64_t size
) except -1
