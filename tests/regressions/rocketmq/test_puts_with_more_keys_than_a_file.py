"""Fault: a put with more keys than a file holds returns SUCCESS and indexes nothing.

RocketMQ: golden fault 7.
RocketMQ: a put whose keys don't all fit was refused by the file as full, and by each new file as well. After four files
the service answered SUCCESS.
Here: such a put fills as many files as it needs. If it can't be accepted, it raises and changes nothing.
"""

from __future__ import annotations

import pytest

from tiered_index.errors import BackPressure

T = 1_700_000_000_000


@pytest.mark.parametrize("items", [4, 30])
@pytest.mark.parametrize("already", [0, 3])
def test_every_key_is_indexed(make_life, items, already):
    life = make_life(items=items)
    for offset in range(already):
        life.put("t", 0, "before", offset, timestamp_ms=T)
    keys = [f"key-{number:03d}" for number in range(30)]
    assert life.put("t", 0, keys, 100, timestamp_ms=T + 1000) == 30
    life.put("t", 0, "after", 101, timestamp_ms=T + 2000)
    files = -(-(already + 31) // (items - 1))
    for state in life.through():
        assert len(life.service.files()) == (0 if state == "buffered" else files)
        for key in keys[::7]:
            assert [answer.offset for answer in life.check("t", key)] == [100]
        assert len(life.check("t", "before")) == already
        assert len(life.check("t", "after")) == 1
    assert sum(stored.count for stored in life.service.log_state.objects.values()) == already + 31


def test_a_put_at_the_end_of_a_file_as_java_refused_it(make_life, golden):
    """RocketMQ refused puts across a file's end as FILE_FULL. Here they continue in the next file."""
    (meta,) = golden("tiered/multikey_full/meta.json")
    calls = golden("tiered/multikey_full/input.jsonl")
    refused = [call for call in calls if call["result"] == "FILE_FULL"]
    assert refused
    assert any(len(call["keys"]) > 1 for call in refused)
    life = make_life(slots=meta["slots"], items=meta["items"])
    for call in calls:
        made = life.put_call(call)
        assert made == len(set(call["keys"]))
    for _ in life.through():
        for call in refused:
            for key in call["keys"]:
                found = {(answer.queue_id, answer.offset) for answer in life.check(call["topic"], key, max_count=1000)}
                assert (call["queueId"], call["offset"]) in found


def test_one_that_is_larger_than_the_buffer_waits_for_an_empty_one_or_is_refused(make_life):
    life = make_life(items=8, buffer_max_entries=10)
    keys = [f"key-{number:03d}" for number in range(30)]
    life.put("t", 0, "before", 1, timestamp_ms=T)
    with pytest.raises(BackPressure):
        life.service.put("t", 0, keys, 2, 10, T)
    assert all(life.check("t", key) == [] for key in keys)
    life.bring("unsealed")
    assert life.put("t", 0, keys, 2, timestamp_ms=T) == 30
    for _ in life.through():
        assert all(len(life.check("t", key)) == 1 for key in keys[::5])
