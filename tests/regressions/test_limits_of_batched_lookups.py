"""`query_many` took ranges and counts that `query` refuses, and answered them with nothing or with something else."""

from __future__ import annotations

import itertools

import pytest

from tiered_index import Lookup
from tiered_index.errors import InvalidArgument

NOW_MS = 1_700_000_000_000
REFUSED = [{"end_ms": -5}, {"begin_ms": 2**70}, {"begin_ms": 253_402_300_800_000}, {"begin_ms": 2**69, "max_count": 5}]


@pytest.fixture
def index(open_index):
    service = open_index()
    for number in range(3):
        service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)
    return service


@pytest.mark.parametrize("neighbours", [0, 1])
@pytest.mark.parametrize("question", REFUSED, ids=str)
def test_what_one_lookup_refuses_a_batch_refuses(index, question, neighbours):
    with pytest.raises(InvalidArgument) as alone:
        index.query("t", "k", **question)
    plain = [Lookup(topic="t", key="k")] * neighbours
    with pytest.raises(InvalidArgument) as batched:
        index.query_many([*plain, Lookup(topic="t", key="k", **question)])
    assert str(alone.value) in str(batched.value)


def test_both_answer_and_refuse_alike(index):
    times = [None, -(2**70), -5, 0, NOW_MS, NOW_MS + 999, NOW_MS + 2000, 2**63 - 1, 2**63, 2**70]
    for begin_ms, end_ms, max_count in itertools.product(times, times, [True, 0, 1, 2, 2**31, 2**63, 2**70]):
        answers = []
        for ask in (
            index.query,
            lambda *q: index.query_many([Lookup(topic="t", key="k", begin_ms=q[2], end_ms=q[3], max_count=q[4])])[0],
        ):
            try:
                result = ask("t", "k", begin_ms, end_ms, max_count)
                answers.append((result.status, result.items, result.cursor))
            except InvalidArgument:
                answers.append("refused")
        assert answers[0] == answers[1], (begin_ms, end_ms, max_count)
