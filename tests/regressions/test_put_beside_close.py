"""A put that had passed its check when `close` began added its entries after the last flush and returned. The entries
were lost without an error.
"""

from __future__ import annotations

import threading
from collections import UserDict

import pytest

from tiered_index.errors import IndexClosed

NOW_MS = 1_700_000_000_000


class Gate:
    """Delays a put after its first checks."""

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()

    def wait(self):
        self.entered.set()
        assert self.release.wait(60)


class HeldBatch(UserDict):
    """A batch whose columns arrive slowly."""

    gate = None

    def __getitem__(self, name):
        self.gate.wait()
        return super().__getitem__(name)


def put_one(service, gate, monkeypatch):
    def keys():
        gate.wait()
        yield "k"

    return service.put("t", 0, keys(), 2, 1, NOW_MS)


def put_one_plain(service, gate, monkeypatch):
    chunk = service._buffer.open
    add = chunk.add

    def held(*arguments):
        gate.wait()
        return add(*arguments)

    monkeypatch.setattr(chunk, "add", held)
    return service.put("t", 0, "k", 2, 1, NOW_MS)


def put_batch(service, gate, monkeypatch):
    batch = HeldBatch(topic=["t"], queue_id=[0], key=["k"], offset=[2], size=[1], timestamp_ms=[NOW_MS])
    batch.gate = gate
    return service.put_batch(batch)


@pytest.mark.parametrize("put", [put_one, put_one_plain, put_batch])
def test_a_put_that_returned_is_flushed(open_index, beside, monkeypatch, put):
    service, gate = open_index(), Gate()
    service.put("t", 0, "k", 1, 1, NOW_MS)
    putting = beside(lambda: put(service, gate, monkeypatch))
    assert gate.entered.wait(60)
    closing = beside(service.close)
    closing.ended(0.1)
    gate.release.set()
    assert putting.ended()
    assert closing.ended()
    assert closing.error is None
    if putting.error is not None:
        assert isinstance(putting.error, IndexClosed), repr(putting.error)
        assert "closed" in str(putting.error)
        # a caller that skips bad messages must not skip this one
        assert not isinstance(putting.error, ValueError)
    kept = [2, 1] if putting.error is None else [1]
    assert [item.offset for item in open_index().query("t", "k")] == kept
