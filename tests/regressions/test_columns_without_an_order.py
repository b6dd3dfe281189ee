"""A batch accepted a set, a text or a dict as a column. Rows got values in a random order, or one letter each."""

from __future__ import annotations

import pytest

from tests.support.batches import batch
from tiered_index.errors import InvalidArgument

GOOD = {name: list(values) for name, values in batch(2, queue_id=[1, 2], key=["k", "l"], offset=[1, 2]).items()}
BAD = {
    "a set": lambda values: {values[0], values[0] * 2},
    "a frozenset": lambda values: frozenset((values[0], values[0] * 2)),
    "a text": lambda values: "kl",
    "text of other letters": lambda values: "kł",
    "bytes": lambda values: b"kl",
    "a dict": lambda values: dict.fromkeys(("k", "l"), values[0]),
    "a dict of numbers": lambda values: dict.fromkeys((1, 2), values[0]),
}


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_a_column_that_is_no_sequence_is_refused(open_index, make):
    service = open_index()
    for column, values in GOOD.items():
        with pytest.raises(InvalidArgument, match=column):
            service.put_batch({**GOOD, column: make(values)})
        assert service.health()["buffered_entries"] == 0
    service.put_batch(GOOD)
    service.put_batch({name: tuple(values) for name, values in GOOD.items()})
    for key, queue_id, offset in (("k", 1, 1), ("l", 2, 2)):
        assert [(item.queue_id, item.offset) for item in service.query("t", key)] == [(queue_id, offset)]
