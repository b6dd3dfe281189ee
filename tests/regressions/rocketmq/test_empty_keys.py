"""Fault: a double space in a message's KEYS indexes the empty key.

RocketMQ: golden fault 12.
RocketMQ: KEYS were split at each single space, so two spaces in a row made an empty key, and `topic#` was indexed.
Here: every call with an empty key is refused, from any source. It indexes nothing, and a lookup of the empty key is
refused, too.
"""

from __future__ import annotations

import pytest

from tests.support.batches import batch
from tiered_index.errors import InvalidArgument

T = 1_700_000_000_000
DOUBLE = "red  blue"


@pytest.fixture
def written(life):
    """The entries from before. They must be the only ones afterwards."""
    life.put("t", 0, ("red", "blue"), 1, timestamp_ms=T)
    return life


def only_what_was_there(life):
    for _ in life.through():
        for key in ("red", "blue"):
            assert [answer.offset for answer in life.check("t", key)] == [1]
        for _, ask in life.asking():
            with pytest.raises(InvalidArgument, match="key is empty"):
                ask("t", "")
    assert sum(stored.count for stored in life.service.log_state.objects.values()) == 2


@pytest.mark.parametrize("keys", ["", [""], DOUBLE.split(" "), ["", "red"], ["red", ""]], ids=repr)
def test_put_refuses_it_and_the_keys_beside_it(written, keys):
    for given in (keys, keys if isinstance(keys, str) else iter(keys)):
        with pytest.raises(InvalidArgument, match="key is empty"):
            written.service.put("t", 0, given, 2, 10, T + 1000)
    only_what_was_there(written)


@pytest.mark.parametrize("row", [0, 2])
def test_put_batch_names_the_row_and_takes_none(written, row):
    keys = ["red", "blue", "red"]
    keys[row] = ""
    with pytest.raises(InvalidArgument, match=f"row {row}"):
        written.service.put_batch(batch(3, key=keys, offset=[2, 3, 4]))
    only_what_was_there(written)


def test_a_key_with_spaces_is_one_key(written):
    """`put` does not split keys."""
    written.put("t", 0, DOUBLE, 5, timestamp_ms=T)
    written.put("t", 0, " ", 6, timestamp_ms=T)
    for _ in written.through():
        assert [answer.offset for answer in written.check("t", DOUBLE)] == [5]
        assert [answer.offset for answer in written.check("t", " ")] == [6]
        assert [answer.offset for answer in written.check("t", "red")] == [1]
