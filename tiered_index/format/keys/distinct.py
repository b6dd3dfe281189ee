"""The distinct numbers of an array. Pure; any thread."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

N = TypeVar("N", bound=np.integer)


def distinct_numbers(numbers: npt.NDArray[N]) -> npt.NDArray[N]:
    """Return the distinct `numbers` (m of n), rising.

    NumPy's `unique` returns the same. From NumPy 2.3 on it hashes first, and takes ten times as long for half a million
    numbers.
    """
    ordered = np.sort(numbers)
    new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return ordered[new]
