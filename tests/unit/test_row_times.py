"""Times of rows that are read together are those of rows that are read one by one."""

import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_index.errors import InvalidArgument
from tiered_index.sources.rows import RowMapping

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
SECONDS = st.integers(631_152_000, 4_102_444_799)


@st.composite
def times(draw):
    """Times of one unit, as numbers or texts in any mixture."""
    unit = draw(st.sampled_from(sorted(UNITS)))
    per = UNITS[unit]
    integers = SECONDS.map(lambda second: second * per)
    decimals = st.builds(lambda second, part: str(second * per + part), SECONDS, st.floats(0, 0.999))
    kinds = [integers, integers.map(str), decimals, st.one_of(integers, decimals)]
    return unit, draw(st.lists(kinds[draw(st.integers(0, 3))], min_size=1, max_size=20))


@settings(max_examples=300)
@given(times())
def test_numbers_are_the_same_times_together_and_one_by_one(case):
    unit, values = case
    alone = RowMapping(("k",), "at", unit)
    together = RowMapping(("k",), "at", unit).times_ms(values)
    assert together is not None
    assert together.tolist() == [alone.time_ms(value) for value in values]


@settings(max_examples=100)
@given(st.lists(st.floats(631_152_000, 4_102_444_799), min_size=1, max_size=20))
def test_a_column_of_floats_has_the_times_of_its_floats(values):
    mapping = RowMapping(("k",), "at")
    found = mapping.times_ms(pa.array(values, pa.float64()))
    assert found is not None and mapping.unit == "s"
    assert found.tolist() == [mapping.time_ms(value) for value in values]


@pytest.mark.parametrize(
    "values",
    [
        [1_700_000_000, None],
        ["1700000000", "2024-01-01T00:00:00Z"],
        [1_700_000_000, "yesterday"],
        [math.nan, 1.7e9],
        [10**30],
        ["1" * 30],
        [-5],
        [2**62],
    ],
)
def test_rows_with_a_bad_time_are_read_one_by_one(values):
    assert RowMapping(("k",), "at", "s").times_ms(values) is None


def test_a_float_that_is_no_number_is_a_bad_time():
    for value in (math.nan, math.inf, "1e999", "1" * 5000, -(10**400)):
        with pytest.raises(InvalidArgument):
            RowMapping(("k",), "at", "s").time_ms(value)
