/* The parts of the compiled core that are simpler in C than in Cython: byte order, bits, and tables of constants. */
#ifndef TIERED_INDEX_CORE_H
#define TIERED_INDEX_CORE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static inline uint32_t swapped32(uint32_t value) { return __builtin_bswap32(value); }
static inline uint64_t swapped64(uint64_t value) { return __builtin_bswap64(value); }
/* value % by, by two multiplications; inverse is UINT64_MAX / by + 1 (Lemire, "Faster remainder by direct computation") */
static inline uint32_t remainder32(uint32_t value, uint64_t inverse, uint32_t by) {
    return (uint32_t)((unsigned __int128)(inverse * value) * by >> 64);
}
static inline int ones_of(uint64_t word) { return __builtin_popcountll(word); }
/* the place of the lowest one; undefined for 0 */
static inline int first_one(uint64_t word) { return __builtin_ctzll(word); }
/* without the empty statement, compilers remove calls of a function that only prefetches */
static inline void prefetch(const void *place) {
    __builtin_prefetch(place);
    __asm__ volatile("");
}
static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Read bytes of a file that the operating system has in memory. Returns their number; -1: none, or it can't tell. */
static inline int64_t read_cached(int descriptor, void *to, int64_t size, int64_t at) {
#ifdef RWF_NOWAIT
    struct iovec part = {to, (size_t)size};
    return preadv2(descriptor, &part, 1, at, RWF_NOWAIT);
#else
    (void)descriptor, (void)to, (void)size, (void)at;
    return -1;
#endif
}

/* Begin to read bytes of a file into the memory of the operating system. */
static inline void read_ahead(int descriptor, int64_t at, int64_t size) {
#ifdef POSIX_FADV_WILLNEED
    (void)posix_fadvise(descriptor, at, size, POSIX_FADV_WILLNEED);
#else
    (void)descriptor, (void)at, (void)size;
#endif
}
/* Read bytes of a file. Returns their number, or -1. */
static inline int64_t read_whole(int descriptor, void *to, int64_t size, int64_t at) {
    return pread(descriptor, to, (size_t)size, at);
}

/* Tell inode, size, and the times of modification and change (ns) of a file; zeros: it is not there. Returns 0 on failure. */
static inline int file_state(const char *path, int is_itself, int may_lack, uint64_t *to) {
#ifdef __APPLE__
#define NS_OF(which) (uint64_t)found.st_##which##timespec.tv_sec * 1000000000 + (uint64_t)found.st_##which##timespec.tv_nsec
#else
#define NS_OF(which) (uint64_t)found.st_##which##tim.tv_sec * 1000000000 + (uint64_t)found.st_##which##tim.tv_nsec
#endif
    struct stat found;
    int failed = is_itself ? lstat(path, &found) : stat(path, &found);
    if (failed && (!may_lack || errno != ENOENT))
        return 0;
    to[0] = failed ? 0 : (uint64_t)found.st_ino, to[1] = failed ? 0 : (uint64_t)found.st_size;
    to[2] = failed ? 0 : NS_OF(m), to[3] = failed ? 0 : NS_OF(c);
    return 1;
}

/* The sums of hash_rows for up to 16 units of a byte, all at once. The 16 bytes before `end` must be readable. */
#ifdef __SSE2__
#include <emmintrin.h>
#define SHORT_UNITS 16
static const uint8_t SHORT_MASK[32] = {[16 ... 31] = 0xFF};
/* of both multipliers: the lower halves of the powers, as signed numbers, and the upper halves of the rest */
static int16_t SHORT_POWERS[2][2][16];
static inline void set_short_powers(uint32_t java, uint32_t second) {
    uint32_t multipliers[2] = {java, second};
    for (int of = 0; of < 2; of++) {
        uint32_t power = 1;
        for (int place = 15; place >= 0; place--, power *= multipliers[of]) {
            int16_t low = (int16_t)(uint16_t)power;
            SHORT_POWERS[of][0][place] = low;
            SHORT_POWERS[of][1][place] = (int16_t)(uint16_t)((power - (uint32_t)(int32_t)low) >> 16);
        }
    }
}
static inline __m128i short_sum(__m128i low, __m128i high, int16_t powers[2][16]) {
    __m128i sums[2];
    for (int half = 0; half < 2; half++)
        sums[half] = _mm_add_epi32(_mm_madd_epi16(low, _mm_loadu_si128((__m128i *)powers[half])),
                                   _mm_madd_epi16(high, _mm_loadu_si128((__m128i *)(powers[half] + 8))));
    return _mm_add_epi32(sums[0], _mm_slli_epi32(sums[1], 16));
}
static inline void short_sums(const uint8_t *end, int64_t count, uint32_t *java, uint32_t *second) {
    __m128i zero = _mm_setzero_si128(), mask = _mm_loadu_si128((const __m128i *)(SHORT_MASK + count));
    __m128i units = _mm_and_si128(_mm_loadu_si128((const __m128i *)(end - 16)), mask);
    __m128i low = _mm_unpacklo_epi8(units, zero), high = _mm_unpackhi_epi8(units, zero);
    __m128i of_java = short_sum(low, high, SHORT_POWERS[0]), of_second = short_sum(low, high, SHORT_POWERS[1]);
    __m128i both = _mm_add_epi32(_mm_unpacklo_epi32(of_java, of_second), _mm_unpackhi_epi32(of_java, of_second));
    both = _mm_add_epi32(both, _mm_shuffle_epi32(both, 0x4E));
    *java += (uint32_t)_mm_cvtsi128_si32(both);
    *second += (uint32_t)_mm_cvtsi128_si32(_mm_shuffle_epi32(both, 1));
}
#else
#define SHORT_UNITS 0
static inline void set_short_powers(uint32_t java, uint32_t second) { (void)java, (void)second; }
static inline void short_sums(const uint8_t *end, int64_t count, uint32_t *java, uint32_t *second) {
    (void)end, (void)count, (void)java, (void)second;
}
#endif

/* for sum_of in _views.pyx: arbitrary numbers; the factors must be odd */
static const uint64_t SUM_STARTS[8] = {
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5, 0x85EBCA77C2B2AE63, 0xFF51AFD7ED558CCD,
    0x94D049BB133111EB, 0xBF58476D1CE4E5B9,
};
static const uint64_t SUM_FACTORS[8] = {
    0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9FB21C651E98DF25, 0xD6E8FEB86659FD93, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3,
    0x589965CC75374CC3, 0x1D8E4E27C47D124F,
};

/* of filters, the same as in `format/bloom.py` */
static const uint32_t SALTS[8] = {0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31};

#endif
