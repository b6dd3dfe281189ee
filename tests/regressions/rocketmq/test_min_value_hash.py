"""Fault: a key whose hash is Integer.MIN_VALUE.

RocketMQ #10462, #10471; golden fault 6.
RocketMQ: `Math.abs` leaves Integer.MIN_VALUE negative, so the slot's position is before the table. The result was an
error, or a write inside the header and a lost entry while SUCCESS was returned.
Here: such a hash is 0. The entry is found in every state, and header and neighbours stay intact, with any number of
slots.
"""

from __future__ import annotations

import struct

import pytest

from tiered_index import hash_key
from tiered_index.format.hashing import java_string_hash

T = 1_700_000_000_000
TOPIC = "TopicTest"
BAD = ("boxvajrkywm", "euuudrqcyle")
NEIGHBOURS = ("n0", "n1", "n2", "n3", "after")


def test_these_keys_have_that_hash():
    for key in BAD:
        assert java_string_hash(f"{TOPIC}#{key}") == -(2**31)
        assert hash_key(TOPIC, key) == 0


@pytest.mark.parametrize("slots", [1, 16, 31, 5000])
@pytest.mark.parametrize("batched", [False, True], ids=["put", "put_batch"])
def test_it_is_found_and_other_entries_are_unharmed(make_life, slots, batched):
    life = make_life(slots=slots, items=40)
    keys = [*NEIGHBOURS, BAD[0], *NEIGHBOURS, BAD[1], BAD[0], *NEIGHBOURS]
    rows = [(TOPIC, 0, key, number, 10, T + number * 1000) for number, key in enumerate(keys)]
    if batched:
        life.put_batch(rows)
    else:
        assert [life.put(*row) for row in rows] == [1] * len(rows)
    for state in life.through():
        for key in (*BAD, *NEIGHBOURS):
            assert life.check(TOPIC, key)
        if state != "buffered":
            (file,) = life.service.files()
            assert (file.second_min * 1000, file.second_max * 1000) == (T, T + (len(keys) - 1) * 1000)
        if state in ("unsealed", "uploaded"):
            life.open()  # the disk has the same
            for key in (*BAD, *NEIGHBOURS):
                life.check(TOPIC, key)
    (stored,) = life.service.log_state.objects.values()
    _, begin_ms, end_ms, used, items = struct.unpack(">iqqii", life.storage.get_range(stored.name, 0, 28))
    assert (begin_ms, end_ms) == (T, T + (len(keys) - 1) * 1000)
    assert used == len({hash_key(TOPIC, key) % slots for key in keys})
    assert items == len(keys)


@pytest.mark.parametrize("case", ["minvalue_slots16", "minvalue_slots31", "minvalue_slots101", "minvalue_slots5000"])
def test_entries_that_java_lost_or_refused(make_life, golden, case):
    """RocketMQ's own puts, including those that it answered with an error: each entry is found."""
    (meta,) = golden(f"tiered/{case}/meta.json")
    life = make_life(slots=meta["slots"], items=meta["items"])
    calls = golden(f"tiered/{case}/input.jsonl")
    for call in calls:
        made = life.put_call(call)
        assert made == len(call["keys"])
    keys = sorted({(call["topic"], key) for call in calls for key in call["keys"]})
    assert any(call["result"] != "SUCCESS" for call in calls) == (case in ("minvalue_slots101", "minvalue_slots5000"))
    for _ in life.through():
        for topic, key in keys[:: len(keys) // 20 or 1] + [(TOPIC, key) for key in BAD]:
            found = {(answer.queue_id, answer.offset) for answer in life.check(topic, key)}
            assert found >= {
                (call["queueId"], call["offset"]) for call in calls if call["topic"] == topic and key in call["keys"]
            }
