"""Silence is measured from the last response, and only while requests are under way."""

import pytest

from tiered_index.errors import ObjectNotFound
from tiered_index.service.threads import silence as silence_module
from tiered_index.service.threads.silence import Silence
from tiered_index.storage.base import Call
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage, Usage

PATIENCE_S = 5.0


class Request:
    """A range read that is under way until `ends`."""

    def __init__(self, size=10):
        self.usage, self.call = Usage(), Call("get_range", "object", asked_bytes=size)
        self.usage.begin(self.call)
        self.usage.under_way += 1

    def ends(self, *, read=10):
        self.usage.end(self.call, read=read)
        self.usage.under_way -= 1


@pytest.fixture
def now(monkeypatch):
    """The present time, a list of one number."""
    time_s = [100.0]
    monkeypatch.setattr(silence_module.time, "monotonic", lambda: time_s[0])
    return time_s


def test_a_request_without_a_response_is_silent_after_the_patience(now):
    silence, request = Silence(), Request()
    assert not silence.lasts([(100.0, request.usage)], PATIENCE_S)
    now[0] += PATIENCE_S - 0.1
    assert not silence.lasts([(100.0, request.usage)], PATIENCE_S)
    now[0] += 0.2
    assert silence.lasts([(100.0, request.usage)], PATIENCE_S)
    # another part of the work, which began later, does not end the silence
    assert silence.lasts([(100.0, request.usage), (now[0], Request().usage)], PATIENCE_S)


def test_a_response_to_any_part_ends_the_silence(now):
    silence, one, other = Silence(), Request(), Request()
    work = [(100.0, one.usage), (100.0, other.usage)]
    for _ in range(4):
        assert not silence.lasts(work, PATIENCE_S)
        now[0] += PATIENCE_S - 0.1
        other.ends()
        other.usage.begin(other.call)
        other.usage.under_way += 1
    now[0] += 0.2
    assert not silence.lasts(work, PATIENCE_S)
    now[0] += PATIENCE_S + 0.1
    assert silence.lasts(work, PATIENCE_S)
    silence.heard()
    assert not silence.lasts(work, PATIENCE_S)


def test_work_without_a_request_under_way_is_not_silent(now):
    silence, request = Silence(), Request()
    request.ends()
    now[0] += 100
    assert not silence.lasts([(100.0, request.usage)], PATIENCE_S)
    assert not silence.lasts([], PATIENCE_S)


def test_silence_begins_with_the_oldest_part_of_the_work(now):
    silence = Silence()
    now[0] += 1000
    request = Request()
    assert not silence.lasts([(now[0], request.usage)], PATIENCE_S)
    assert silence.lasts([(now[0] - PATIENCE_S - 1, request.usage)], PATIENCE_S)


def test_each_mebibyte_of_a_response_gets_a_second_more(now):
    silence, request = Silence(), Request(16 << 20)
    now[0] += PATIENCE_S + 15.9
    assert not silence.lasts([(100.0, request.usage)], PATIENCE_S)
    now[0] += 0.2
    assert silence.lasts([(100.0, request.usage)], PATIENCE_S)


def test_a_metered_storage_counts_calls_under_way():
    seen, usage = [], Usage()

    class Watching(MemoryStorage):
        def get(self, name):
            seen.append(usage.under_way)
            return super().get(name)

    storage = MeteredStorage(Watching("under-way"))
    storage.put("object", b"data")
    with storage.measure(usage):
        storage.get("object")
        with pytest.raises(ObjectNotFound):
            storage.get("missing")
    assert (seen, usage.under_way) == ([1, 1], 0)
