"""`distinct` returns the distinct numbers of an array, as NumPy does."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from tiered_index.format.distinct import distinct_numbers


@pytest.mark.parametrize("dtype", ["i8", "u8", "i4", ">u4"])
def test_they_are_those_of_numpy(dtype: str) -> None:
    @given(numbers=arrays(dtype, (30,)))
    def check(numbers: npt.NDArray[np.int64]) -> None:
        for some in (numbers, numbers[:1], numbers[:0], np.concatenate([numbers, numbers])):
            found = distinct_numbers(some)
            assert found.dtype == some.dtype
            assert found.tolist() == np.unique(some).tolist()

    check()
