"""Rows out of items: stored ones and columns of a buffer are selected alike, the ends of the range included."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tiered_index.format.hashing import fingerprint, key_hash
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.answers.rows import PreparedLookup, select_items

BEGIN_S = 1_700_000_000
TOPICS = frozenset({7})


def question(second_min: int, second_max: int, after: tuple[int, ...] | None = None) -> PreparedLookup:
    hashes = key_hash("t", "k", "abs"), key_hash("t", "k", "mask"), fingerprint("t", "k")
    return PreparedLookup("t", "k", *hashes, BEGIN_S + second_min, BEGIN_S + second_max, 64, after)


def made(count: int) -> npt.NDArray[Any]:
    """Return `count` items of key "k", one a second, and beside each one of another fingerprint, another topic, another
    hash.
    """
    items = np.zeros(4 * count, KEYED_SCHEMA.item)
    items["key_hash"], items["fingerprint"], items["topic_id"] = key_hash("t", "k"), fingerprint("t", "k"), 7
    items["time_diff_s"] = items["offset"] = np.repeat(np.arange(count), 4)
    items["fingerprint"][1::4] ^= 1
    items["topic_id"][2::4] = 8
    items["key_hash"][3::4] ^= 1
    return items


@pytest.mark.parametrize("count", [1, 4, 5, 6, 100])
def test_both_ends_of_the_range_are_in_it(count: int) -> None:
    for low, high in ((0, count - 1), (1, count - 2), (count // 2, count // 2)):
        rows = select_items(made(count), BEGIN_S, question(low, high), TOPICS, KEYED_SCHEMA)
        assert sorted((rows["second"] - BEGIN_S).tolist()) == list(range(low, high + 1))
        assert rows["offset"].tolist() == (rows["second"] - BEGIN_S).tolist()


def test_items_and_columns_are_selected_alike() -> None:
    items = made(30)
    columns = {name: items[name].astype(items.dtype[name].newbyteorder("=")) for name in items.dtype.names or ()}
    columns["second"] = columns["time_diff_s"].astype(np.int64) + BEGIN_S
    for after in (None, (BEGIN_S + 20, 20, 0), (BEGIN_S + 20, 21, 0), (BEGIN_S + 20, 20, -1)):
        asked = question(3, 25, after)
        stored = select_items(items, BEGIN_S, asked, TOPICS, KEYED_SCHEMA)
        assert 16 < len(stored) < 24
        np.testing.assert_array_equal(stored, select_items(columns, None, asked, TOPICS, KEYED_SCHEMA))
