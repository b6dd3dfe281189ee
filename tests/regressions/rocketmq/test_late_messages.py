"""Fault: a message older than its file's begin is never found by its own time.

RocketMQ: golden fault 2.
RocketMQ: a file's interval began with its first entry. A late message is before it, so a lookup around the message's
own store time never read the file. A lookup over all time found it.
Here: a file's interval is its true smallest and greatest second, from the first put on, after a restart, and in the
log.
"""

from __future__ import annotations

import pytest

T = 1_700_000_000_000
LATE_S = (1, 59, 3600, 90_000)


def test_each_late_message_is_found_around_its_own_time(life):
    for number in range(10):
        life.put("t", 0, "k", number, timestamp_ms=T + number * 1000)
    for number, late_s in enumerate(LATE_S):
        life.put("t", 1, "k", 100 + number, timestamp_ms=T - late_s * 1000)
    for state in life.through():
        if state != "buffered":
            (file,) = life.service.files()
            assert (file.second_min * 1000, file.second_max * 1000) == (T - max(LATE_S) * 1000, T + 9000)
        for number, late_s in enumerate(LATE_S):
            own_ms = T - late_s * 1000
            assert [answer.offset for answer in life.check("t", "k", own_ms, own_ms)] == [100 + number]
            life.check("t", "k", own_ms - 1000, own_ms + 1000)
        assert len(life.check("t", "k", None, T - 1)) == len(LATE_S)


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded"])
def test_it_is_still_found_after_a_crash(life, state):
    life.put("t", 0, "k", 1, timestamp_ms=T)
    life.put("t", 0, "k", 2, timestamp_ms=T - 3_600_000)
    life.bring(state)
    life.open()
    assert [answer.offset for answer in life.check("t", "k", T - 3_600_000, T - 1)] == [2]
    life.bring("storage")
    assert [answer.offset for answer in life.check("t", "k", T - 3_600_000, T - 1)] == [2]


def test_javas_late_entries(make_life, golden):
    """RocketMQ's own late entries, with a lookup of each second."""
    life = make_life(slots=16, items=64)
    calls = [call for call in golden("tiered/late/input.jsonl") if call["result"] == "SUCCESS"]
    begin_ms = calls[0]["timestamp"]
    assert sum(call["timestamp"] < begin_ms for call in calls) > 3
    for call in calls:
        life.put_call(call)
    for _ in life.through():
        for call in calls:
            answers = life.check(call["topic"], call["keys"][0], call["timestamp"], call["timestamp"])
            assert (call["queueId"], call["offset"]) in {(answer.queue_id, answer.offset) for answer in answers}
