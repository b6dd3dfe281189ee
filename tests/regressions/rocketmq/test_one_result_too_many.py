"""Fault: a lookup returns one result more than its maximum.

RocketMQ #10471; golden fault 10 (its first half).
RocketMQ: a hot lookup compared its count with the maximum before it added one more: `maxCount` 1 returned 2.
Here: the answer is the first `max_count` of a fixed order, in every state: never more, and never fewer while more
exist. The next page continues after the last answer.
"""

from __future__ import annotations

import pytest

T = 1_700_000_000_000
COUNT = 12


@pytest.fixture(params=[20, 5], ids=["one file", "several files"])
def written(make_life, request):
    life = make_life(items=request.param)
    for number in range(COUNT):
        # two per second, so that a maximum can fall between equals
        life.put("t", number % 3, "k", number, timestamp_ms=T + number // 2 * 1000)
        if number % 2:
            life.put("t", 0, "another", number, timestamp_ms=T + number * 1000)
    return life


def test_exactly_as_many_as_asked_for(written):
    for _ in written.through():
        for max_count in (*range(1, COUNT + 2), 2**31):
            answers = written.check("t", "k", max_count=max_count)
            assert len(answers) == min(max_count, COUNT)
        # a window with fewer entries, with exactly as many, and with more
        for max_count in (3, 4, 5):
            assert len(written.check("t", "k", T + 1000, T + 2999, max_count)) == min(max_count, 4)
