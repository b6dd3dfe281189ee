"""Fault: recovery loses a file's end timestamp.

RocketMQ #10656; golden fault 3.
RocketMQ: reopening an index file read the begin timestamp into the end timestamp and wrote it back into the header.
Later uploads had a wrong maximum permanently.
Here: a restart in any state, clean or not, changes no interval: not the file's, not its header's, not the log's.
"""

from __future__ import annotations

import struct

import pytest

T = 1_700_000_000_000
LAST = 99


@pytest.fixture
def written(make_life):
    life = make_life(items=201)
    for offset in range(200):
        life.put("t", 0, "k", offset, timestamp_ms=T + offset * 500)
    return life


def check(life):
    """Check that a lookup of the last second alone finds it, and that every stored interval is right."""
    last_ms = T + LAST * 1000
    assert len(life.check("t", "k", last_ms, None)) == 2
    assert life.check("t", "k", last_ms + 1000, None) == []
    (file,) = life.service.files()
    assert (file.second_min * 1000, file.second_max * 1000) == (T, last_ms)
    for stored in life.service.log_state.objects.values():
        assert (stored.second_min * 1000, stored.second_max * 1000) == (T, last_ms)
        assert struct.unpack(">qq", life.storage.get_range(stored.name, 4, 16)) == (T, last_ms)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded", "storage"])
def test_a_restart_in_any_state_keeps_it(written, state, clean):
    written.bring(state)
    for _ in range(2):
        check(written)
        if clean:
            written.service.close()
        written.open()
    check(written)
    written.bring("storage")
    check(written)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_an_active_file_continues_from_its_true_end(written, clean):
    """After a restart, Java's end timestamp was the file's begin, so an older entry became the end."""
    written.bring("unsealed")
    if clean:
        written.service.close()
    written.open(items=301)
    written.put("t", 0, "another", 1000, timestamp_ms=T + 1000)
    for _ in written.through():
        assert len(written.check("t", "k", T + LAST * 1000, None)) == 2
        assert [answer.offset for answer in written.check("t", "another")] == [1000]
        assert max(file.second_max for file in written.service.files()) * 1000 == T + LAST * 1000
