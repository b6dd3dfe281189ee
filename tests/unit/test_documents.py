"""Rows of stored JSON documents are checked together as they are one by one."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tiered_index.documents import Malformed, integer, list_of, rows_of, text, tuple_of

MEMBERS = integer(-3, 3), text()
VALUES = st.one_of(st.integers(-4, 4), st.text(max_size=2), st.booleans(), st.none(), st.floats(), st.just([]))
ROWS = st.one_of(VALUES, st.lists(st.one_of(VALUES, st.tuples(st.integers(-4, 4), VALUES).map(list)), max_size=4))


def outcome(check: Any, value: Any) -> Any:
    try:
        return check(value)
    except Malformed as error:
        return str(error)


@given(value=ROWS)
@example(value=[[1, "a"], [3, "b"], [-3, ""]])
@example(value=[[1, "a"], [True, "b"]])
@example(value=[[1, "a"], [4, "b"], [-4, "c"]])
@example(value=[[{}, "a"], [{}, "b"]])
@example(value=[])
def test_rows_are_checked_as_one_by_one(value: Any) -> None:
    assert outcome(rows_of(*MEMBERS), value) == outcome(list_of(tuple_of(*MEMBERS)), value)
