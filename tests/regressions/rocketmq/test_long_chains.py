"""Fault: chains are cut at 512 and 1,024 items.

RocketMQ: golden fault 10 (its second half).
RocketMQ: a hot lookup read at most 512 items of a slot, a cold one at most 1,024. Items of other keys in the slot
counted too, so older messages were never found.
Here: no limit. All entries of a key are found, regardless of other keys in its slot, at once or page by page.
"""

from __future__ import annotations

import pytest

T = 1_700_000_000_000
CAPS = (512, 1024)


def pages(ask, topic, key, max_count):
    found, cursor = [], None
    while True:
        page = ask(topic, key, max_count=max_count, cursor=cursor)
        found += [item.offset for item in page]
        cursor = page.cursor
        if cursor is None:
            return found


def test_a_key_with_more_entries_than_the_caps(make_life):
    life = make_life(items=2000)
    life.put_batch([("t", 0, "k", number, 10, T + number * 1000) for number in range(1500)])
    for _ in life.through():
        for max_count in (513, 1025, 1501):
            assert len(life.check("t", "k", max_count=max_count)) == min(max_count, 1500)
        # the oldest are at the chain's end
        assert [answer.offset for answer in life.check("t", "k", None, T + 2_999)] == [2, 1, 0]
        for _, ask in life.asking()[::3]:
            assert pages(ask, "t", "k", 700) == list(range(1499, -1, -1))


@pytest.mark.parametrize("others", [255, 256, *(cap + step for cap in CAPS for step in (-1, 0, 1))])
def test_other_keys_of_the_slot_hide_nothing(make_life, others):
    """All keys have one slot, and newer items of other keys come before those of the lookup."""
    life = make_life(slots=1, items=2000)
    life.put_batch([("t", 0, "k", number, 10, T + number * 1000) for number in range(5)])
    life.put_batch(
        [("t", 0, f"other-{number % 50}", 10 + number, 10, T + (5 + number) * 1000) for number in range(others)]
    )
    for _ in life.through():
        assert [answer.offset for answer in life.check("t", "k")] == [4, 3, 2, 1, 0]
        assert [answer.offset for answer in life.check("t", "k", max_count=2)] == [4, 3]
        assert life.check("t", "none") == []


@pytest.mark.parametrize("case", [pytest.param("cap_same_key_1500", marks=pytest.mark.long), "cap_collision_hides"])
def test_entries_that_java_did_not_find(make_life, golden, case):
    (meta,) = golden(f"tiered/{case}/meta.json")
    life = make_life(slots=meta["slots"], items=meta["items"])
    calls = golden(f"tiered/{case}/input.jsonl")
    life.put_batch(
        [(c["topic"], c["queueId"], key, c["offset"], c["size"], c["timestamp"]) for c in calls for key in c["keys"]]
    )
    questions = [
        (q["topic"], q["key"], q["maxCount"], len(q["unsealed"]), len(q["compacted"]))
        for q in golden(f"tiered/{case}/queries.jsonl")
    ]
    short = 0
    for _ in life.through():
        for topic, key, max_count, hot, cold in questions:
            found = len(life.check(topic, key, max_count=max_count))
            assert found == min(max_count, sum(call["topic"] == topic and key in call["keys"] for call in calls))
            short += found > min(hot, cold)
    assert short
