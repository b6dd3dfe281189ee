"""Digests of both sides, range by range: what differs is told, whatever is there more than once. No Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiered_index.spark.audit.entries import INDEX, SOURCE
from tiered_index.spark.audit.matching import DIGEST, _compared, _cut, compare_range


def digests(entries: Any, topic: int = 1) -> Any:
    made = np.empty(len(entries), DIGEST)
    made["entry"], made["topic"] = entries, topic
    return made


@pytest.mark.parametrize("topic", [1, 0], ids=["topics known", "no table of topics"])
def test_a_range_differs_where_one_side_has_what_the_other_lacks(topic: int) -> None:
    rng = np.random.default_rng(7)
    same = rng.integers(0, 2**64, 1_000, np.uint64)
    source = digests(np.concatenate([same, same[:50], [np.uint64(3)]]))
    index = digests(rng.permutation(np.concatenate([same, same[20:90], [np.uint64(9)]])), topic)
    assert compare_range(digests(same), digests(rng.permutation(same), topic))[:2] == (1_000, 1_000)
    assert not len(compare_range(digests(same), digests(rng.permutation(same), topic))[2])
    of_source, of_index, differing = compare_range(source, index)
    assert (of_source, of_index, differing.tolist()) == (1_001, 1_001, [3, 9])


def test_an_entry_under_another_topic_differs() -> None:
    index = digests([1, 2, 3, 4])
    index["topic"][2] = 5
    assert compare_range(digests([1, 2, 3, 4]), index)[2].tolist() == [3]


def test_what_is_cut_is_compared_whole_and_too_much_is_not_told() -> None:
    rng = np.random.default_rng(8)
    same = rng.integers(0, 2**64, 5_000, np.uint64)
    alone = rng.integers(0, 2**64, 40, np.uint64)
    blocks = [
        *(_cut(digests(part), SOURCE, 6, 1) for part in np.array_split(np.concatenate([same, alone]), 3)),
        *(_cut(digests(part), INDEX, 6, 1) for part in np.array_split(same[::-1], 2)),
    ]
    rows = sorted((block.slice(row, 1) for block in blocks for row in range(len(block))), key=lambda r: r[1][0].as_py())
    found = _compared(rows, 40)
    assert (found.source, found.index) == (5_040, 5_000)
    assert found.differing is not None and found.differing.tolist() == sorted(alone.tolist())
    assert _compared(rows, 39).differing is None
