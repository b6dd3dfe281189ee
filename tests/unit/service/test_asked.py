"""What a batch is asked says the same as columns and as lookups."""

import numpy as np
import pytest

from tiered_index import Lookup
from tiered_index.errors import InvalidArgument
from tiered_index.service.answers.asked import LookupColumns, check_lookups
from tiered_index.service.answers.batch import LookupBatch

LOOKUPS = [
    Lookup(topic="t", key="a", begin_ms=1_999, max_count=2**63),
    Lookup(topic="u", key="é", end_ms=5_000, max_count=3, cursor="c"),
    Lookup(topic="t", key="𝄞", begin_ms=0, end_ms=2**70),
]


def test_columns_are_the_lookups_they_were_made_of():
    columns = LookupColumns.of(LOOKUPS)
    assert list(columns) == columns[:] == LOOKUPS and columns[1:] == LOOKUPS[1:] and columns[-1] == LOOKUPS[-1]
    assert columns.counts_of_topics() == {"t": 2**63 + 64, "u": 3}
    assert LookupColumns.of(LOOKUPS[::2]).counts_of_topics() == {"t": 2**63 + 64}
    assert check_lookups(columns) is columns
    one, other = LookupBatch(LOOKUPS), LookupBatch(columns)
    assert (one.topics, one.continued) == (other.topics, other.continued) == (["t", "u"], [1])
    for name in ("topic_index", "second_min", "second_max", "max_count", "key_hash", "fingerprint"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("topic", [], "topic must be text, not list"),
        ("topic", " ", "topic is empty"),
        ("key", 7, "a key must be text, not int"),
        ("key", "", "a key is empty"),
        ("begin_ms", True, "lookup 1: begin_ms must be an integer, not True"),
        ("begin_ms", 10**15, "lookup 1: begin_ms .* is after end_ms"),
        ("max_count", None, "lookup 1: max_count must be an integer, not None"),
        ("max_count", 0, "lookup 1: max_count must be at least 1, not 0"),
    ],
)
def test_what_is_wrong_is_named(field, value, said):
    lookups = [LOOKUPS[0], Lookup(**{"topic": "t", "key": "k", field: value})]
    for asked in (lookups, LookupColumns.of(lookups)):
        with pytest.raises(InvalidArgument, match=said):
            LookupBatch(asked)
