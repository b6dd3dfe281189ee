"""Fault: a put with several keys is left half written, and each retry indexes its first keys again.

RocketMQ: golden fault 6 (its second half).
RocketMQ: a put wrote key by key. If one failed (the MIN_VALUE hash), the keys before it stayed. The service tried the
whole message again three times and answered SUCCESS: `x1` three times, `x2` not at all.
Here: a call is accepted whole or refused whole, and entries with the same identity are one answer.
"""

from __future__ import annotations

import pytest

from tiered_index.errors import InvalidArgument

T = 1_700_000_000_000
TOPIC = "TopicTest"
BAD = "boxvajrkywm"  # its hash is Integer.MIN_VALUE
KEYS = ("x1", BAD, "x2")


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": ("x1", BAD, "x2", "")},
        {"keys": ("x1", "x2", "x" * 40_000)},
        {"keys": ("x1", None, "x2")},
        {"offset": -1},
        {"size": 2**31},
        {"timestamp_ms": -1},
        {"source": "log"},
    ],
    ids=str,
)
def test_a_refused_call_leaves_no_key_behind(life, wrong):
    message = {"topic": TOPIC, "queue_id": 0, "keys": KEYS, "offset": 7, "size": 1, "timestamp_ms": T, **wrong}
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            life.service.put(**message)
    for key in KEYS:
        life.check(TOPIC, key)  # the model has no entry
    assert life.put(TOPIC, 0, KEYS, 8, timestamp_ms=T) == 3
    for _ in life.through():
        for key in KEYS:
            assert [answer.offset for answer in life.check(TOPIC, key)] == [8]
    assert [stored.count for stored in life.service.log_state.objects.values()] == [3]


def test_a_message_put_again_is_one_answer(life):
    """A caller who does not know whether a put was durable repeats it: in the buffer, in the same file, in the next
    one.
    """
    for _ in range(2):
        life.put(TOPIC, 0, KEYS, 1, timestamp_ms=T)
    life.bring("unsealed")
    life.put(TOPIC, 0, KEYS, 1, timestamp_ms=T)
    life.service.seal()
    life.put(TOPIC, 0, KEYS, 1, timestamp_ms=T)
    for _ in life.through():
        assert len(life.service.files()) == 2
        for key in KEYS:
            assert [answer.offset for answer in life.check(TOPIC, key)] == [1]
            assert len(life.check(TOPIC, key, max_count=1)) == 1
