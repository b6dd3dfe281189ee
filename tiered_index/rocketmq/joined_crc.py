"""The CRC-32 of two stretches of bytes that follow each other, from the CRC-32 of each. Pure.

A CRC is a polynomial over GF(2) modulo a fixed one, and n bytes behind multiply it by x^(8n). Source: zlib's `crc32_combine`.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["joined_crc"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X8 = 1 << 23
# the bits are reflected: the highest is x^0


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of a stretch with CRC `first` and the `second_bytes` bytes with CRC `second` behind it."""
    return _times(_power(second_bytes), first) ^ second


def _times(one: int, other: int) -> int:
    """Return the product of two polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _power(count: int) -> int:
    """Return x^(8 * count)."""
    power, square = _ONE, _X8
    while count:
        if count & 1:
            power = _times(power, square)
        square = _times(square, square)
        count >>= 1
    return power
