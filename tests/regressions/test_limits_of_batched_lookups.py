"""`query_many` accepted ranges and counts that `query` refuses, and returned empty or wrong answers."""

from __future__ import annotations

import itertools

import pytest

from tiered_index import Lookup
from tiered_index.errors import InvalidArgument

NOW_MS = 1_700_000_000_000


@pytest.fixture
def index(open_index):
    service = open_index()
    for number in range(3):
        service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
    return service


@pytest.mark.parametrize("neighbours", [0, 1])
def test_both_answer_and_refuse_alike(index, neighbours):
    plain = [Lookup(topic="t", key="k")] * neighbours
    times = [None, -(2**70), -5, 0, NOW_MS, NOW_MS + 999, NOW_MS + 2000, 253_402_300_800_000, 2**63 - 1, 2**63, 2**70]
    for begin_ms, end_ms, max_count in itertools.product(times, times, [True, 0, 1, 2, 2**31, 2**63, 2**70]):
        question = {"begin_ms": begin_ms, "end_ms": end_ms, "max_count": max_count}
        outcomes = []
        for several in (False, True):
            try:
                if several:
                    result = index.query_many([*plain, Lookup(topic="t", key="k", **question)])[neighbours]
                else:
                    result = index.query("t", "k", **question)
                outcomes.append((result.status, result.items, result.cursor))
            except InvalidArgument as error:
                outcomes.append(str(error))
        alone, batched = outcomes
        assert alone == batched or (isinstance(alone, str) and alone in batched), question
