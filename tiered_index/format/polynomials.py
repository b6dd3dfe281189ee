"""Polynomials over strings modulo 2**32, for many strings at once: sum(unit[i] * m**(length-1-i)) of each string, for each multiplier m.

Two ways, chosen block by block; both are exact.

- *Matrix*: strings of ASCII and of like lengths are set right-aligned into rows of zeros, and one product of that matrix with the powers
  gives all sums. In f64 every partial sum is an integer below 127 * 2**32 * 256 < 2**53, so nothing is rounded in any order.
- *Running sums*: with c the running sum of unit[i] * m**-i over a block, a string at [s, e) has the value (c[e] - c[s]) * m**(e-1).

Pure functions, safe under threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["polynomials", "power_at"]

_BLOCK = 1 << 16
# code units summed at a time; the tables of powers stay within the cache
_WIDEST = 256
# units of the widest row of a matrix
_CELLS = 1 << 16
# cells of one product: within the cache, and too few for a BLAS library to wake its threads

UInt32 = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]


def polynomials(units: npt.NDArray[Any], offsets: Int64, multipliers: Sequence[int]) -> list[UInt32]:
    """Return the values (u32, n) of n strings for each multiplier.

    `units` are u8 (ASCII only) or u16 code units, `offsets` (n + 1, never falling) say where in them each string begins and ends.
    Memory beyond the result: some 24 bytes a cell of `_CELLS`, or 8 a unit of `_BLOCK`, and 4 bytes a unit of the strings.
    """
    count = len(offsets) - 1
    total = int(offsets[-1] - offsets[0])
    if units.dtype == np.uint8 and total:
        width = -(-int(np.diff(offsets).max()) // 8) * 8
        if width <= _WIDEST and count * width <= 2 * total + 1024:
            return _by_matrix(units, offsets, multipliers, width)
    return _by_running_sums(units, offsets, multipliers)


@cache
def _weights(multipliers: tuple[int, ...], width: int) -> npt.NDArray[np.float64]:
    """Return the powers that units in a row of `width` are multiplied with, one column a multiplier."""
    return np.array([[pow(m, width - 1 - i, 1 << 32) for m in multipliers] for i in range(width)], np.float64)


@cache
def _masks(width: int) -> npt.NDArray[Any]:
    """Return, for each length from 0 to `width`, a row of which just the last `length` bytes are all ones; as void records."""
    kept = np.arange(width) >= width - np.arange(width + 1)[:, None]
    return (kept * np.uint8(255)).view(f"V{width}").reshape(-1)


def _by_matrix(units: npt.NDArray[Any], offsets: Int64, multipliers: Sequence[int], width: int) -> list[UInt32]:
    """Hash strings of at most `width` ASCII units, a multiple of 8.

    A window of `width` bytes that ends where the string does is gathered whole; what in it belongs to earlier strings is masked.
    """
    base, count = int(offsets[0]), len(offsets) - 1
    padded = np.zeros(width + int(offsets[-1]) - base, np.uint8)
    padded[width:] = units[base : int(offsets[-1])]
    windows = np.ndarray((len(padded) - width + 1,), f"V{width}", padded, 0, (1,))
    rows = windows[offsets[1:] - base]
    kept = _masks(width).take(np.diff(offsets))
    words = rows.view(np.uint64)
    words &= kept.view(np.uint64)
    matrix = rows.view(np.uint8).reshape(count, width)
    weights = _weights(tuple(multipliers), width)
    sums = np.empty((count, len(multipliers)))
    step = _CELLS // width
    for start in range(0, count, step):
        np.dot(matrix[start : start + step].astype(np.float64), weights, out=sums[start : start + step])
    # modulo 2**32 is the lower half of the integer
    return [np.ascontiguousarray(column).astype(np.int64).astype(np.uint32) for column in sums.T]


@cache
def _powers(multiplier: int) -> tuple[UInt32, UInt32]:
    """Return multiplier**j and multiplier**-j modulo 2**32 for j in 0.._BLOCK."""
    tables = []
    for base in (multiplier, pow(multiplier, -1, 1 << 32)):
        # doubling: the second half is the first half times base**(half)
        table = np.ones(_BLOCK + 1, np.uint32)
        filled = 1
        while filled < len(table):
            step = min(filled, len(table) - filled)
            table[filled : filled + step] = table[:step] * np.uint32(pow(base, filled, 1 << 32))
            filled += step
        tables.append(table)
    return tables[0], tables[1]


def power_at(multiplier: int, exponents: Int64) -> UInt32:
    """Return multiplier**exponent modulo 2**32 of each exponent, none negative."""
    powers, _ = _powers(multiplier)
    if not len(exponents) or (longest := int(exponents.max())) <= _BLOCK:
        return powers[exponents]
    # m**e = m**(e mod block) * (m**block)**(e div block)
    blocks = np.array([pow(multiplier, _BLOCK * j, 1 << 32) for j in range(longest // _BLOCK + 1)], np.uint32)
    return powers[exponents % _BLOCK] * blocks[exponents // _BLOCK]


def _by_running_sums(units: npt.NDArray[Any], offsets: Int64, multipliers: Sequence[int]) -> list[UInt32]:
    """Hash strings of any units and lengths: three passes over the units instead of a loop over strings."""
    count = len(offsets) - 1
    results = [np.zeros(count, np.uint32) for _ in multipliers]
    wide = np.empty(_BLOCK, np.uint32)
    running = np.zeros(_BLOCK + 1, np.uint32)
    first = 0
    while first < count:
        base = int(offsets[first])
        last = min(int(np.searchsorted(offsets, base + _BLOCK, "right")) - 1, count)
        if last <= first:  # one string longer than a block
            for out, multiplier in zip(results, multipliers, strict=True):
                out[first] = _long_polynomial(units[base : int(offsets[first + 1])], multiplier)
            first += 1
            continue
        stop = int(offsets[last]) - base
        local = offsets[first : last + 1] - base
        ends = np.maximum(local[1:] - 1, 0)
        wide[:stop] = units[base : base + stop]
        sums = running[1 : stop + 1]
        for out, multiplier in zip(results, multipliers, strict=True):
            powers, inverse = _powers(multiplier)
            np.multiply(wide[:stop], inverse[:stop], out=sums)
            np.cumsum(sums, out=sums)
            at = running[local]
            out[first:last] = (at[1:] - at[:-1]) * powers[ends]
        first = last
    return results


def _long_polynomial(units: npt.NDArray[Any], multiplier: int) -> int:
    value = 0
    for start in range(0, len(units), _BLOCK):
        part = units[start : start + _BLOCK]
        piece = int(_by_running_sums(part, np.array([0, len(part)]), (multiplier,))[0][0])
        value = (value * pow(multiplier, len(part), 1 << 32) + piece) & 0xFFFFFFFF
    return value
