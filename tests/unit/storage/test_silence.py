"""A usage is silent if no response came for a while. Only the time in which requests are under way counts."""

import pytest

from tests.support.measuring import measured
from tiered_index.errors import ObjectNotFound, StorageUnavailable
from tiered_index.storage import metering
from tiered_index.storage.base import Call
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.metering import MeteredStorage, Usage

PATIENCE_S = 5.0


@pytest.fixture
def now(monkeypatch):
    """The present time, a list of one number."""
    time_s = [100.0]
    monkeypatch.setattr(metering.time, "monotonic", lambda: time_s[0])
    return time_s


class Request:
    """A range read that is under way until it `ends`, of a `usage`."""

    def __init__(self, usage, size=10):
        self.usage, self.call = usage, Call("get_range", "object", asked_bytes=size)
        self.begins()

    def begins(self):
        self.usage.begin(self.call)
        metering._enter([self.usage])

    def ends(self, *, is_heard=True):
        self.usage.end(self.call, read=10)
        metering._leave([self.usage], is_heard)


def test_a_request_without_a_response_is_silent_after_the_patience(now):
    usage = Usage()
    Request(usage)
    assert not usage.is_silent(PATIENCE_S)
    now[0] += PATIENCE_S - 0.1
    assert not usage.is_silent(PATIENCE_S)
    now[0] += 0.2
    assert usage.is_silent(PATIENCE_S)
    # another request, which began later, does not end the silence
    Request(usage)
    assert usage.is_silent(PATIENCE_S)


@pytest.mark.parametrize("is_heard", [True, False])
def test_only_a_response_to_any_request_ends_the_silence(now, is_heard):
    usage = Usage()
    Request(usage)
    other = Request(usage)
    for _ in range(4):
        now[0] += PATIENCE_S - 0.1
        # nobody looks meanwhile
        other.ends(is_heard=is_heard)
        other.begins()
    now[0] += 0.2
    assert usage.is_silent(PATIENCE_S) is not is_heard
    now[0] += PATIENCE_S
    assert usage.is_silent(PATIENCE_S)


def test_work_between_two_requests_is_not_silent(now):
    usage = Usage()
    request = Request(usage)
    request.ends()
    now[0] += 100
    assert not usage.is_silent(PATIENCE_S)
    # the next request gets its own patience
    request.begins()
    assert not usage.is_silent(PATIENCE_S)
    now[0] += PATIENCE_S + 0.1
    assert usage.is_silent(PATIENCE_S)


def test_each_mebibyte_of_a_response_gets_a_second_more(now):
    usage = Usage()
    Request(usage, 16 << 20)
    now[0] += PATIENCE_S + 15.9
    assert not usage.is_silent(PATIENCE_S)
    now[0] += 0.2
    assert usage.is_silent(PATIENCE_S)


def test_a_metered_storage_notes_calls_and_responses(now):
    seen, usage = [], Usage()

    class Watching(MemoryStorage):
        def get(self, name):
            now[0] += 1
            seen.append((usage.under_way, usage.since_s, usage.heard_s))
            if name == "away":
                raise StorageUnavailable("away")
            return super().get(name)

    storage = MeteredStorage(Watching("under-way"))
    storage.put("object", b"data")
    with measured(usage):
        storage.get("object")
        with pytest.raises(ObjectNotFound):
            storage.get("missing")
        with pytest.raises(StorageUnavailable):
            storage.get("away")
    # a missing object is a response, and an error of the connection is none
    assert seen == [(1, 100, 0), (1, 101, 101), (1, 102, 102)]
    assert (usage.under_way, usage.heard_s) == (0, 102)
