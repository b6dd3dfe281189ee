"""One unreadable lease object excluded every writer permanently, though the lease is only advisory and the log's fences
decide.
"""

from __future__ import annotations

import json

import pytest

from tiered_index.errors import WriterFenced

NOW_MS = 1_700_000_000_000


def _changed(**changes):
    return lambda data: json.dumps(json.loads(data) | changes).encode()


DAMAGE = {
    "a flipped bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[:-5],
    "empty": lambda data: b"",
    "no text": lambda data: b"\xff\xff",
    "no object": lambda data: b"[]",
    "a field less": lambda data: data.replace(b"expires_ms", b"expires_m"),
    "nested deeply": lambda data: b"[" * 100_000,
    "an endless number": _changed(expires_ms=float("inf")),
    "a list for a number": _changed(pid=[]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_it_excludes_no_writer_and_fences_still_hold(open_index, open_reader, storage, caplog, damage):
    first = open_index("first")
    first.put("t", 0, "k", 1, 1, NOW_MS)
    first.seal()
    (lease,) = [info.name for info in storage.list("lease/")]
    storage.put(lease, damage(storage.get(lease)))
    second = open_index("second")
    assert [record.levelname for record in caplog.records if lease in record.getMessage()] == ["WARNING"]
    second.put("t", 0, "k", 2, 1, NOW_MS)
    second.seal()
    second.run_lifecycle()
    with pytest.raises(WriterFenced):
        first.run_lifecycle()
    result = open_reader().query("t", "k")
    assert (result.status, [item.offset for item in result]) == ("complete", [2])


def test_its_own_root_opens_again(open_index, storage):
    open_index().close()
    (lease,) = [info.name for info in storage.list("lease/")]
    storage.put(lease, b"{")
    for _ in range(2):
        service = open_index()
        assert not service.health()["problems"]
        service.close()
