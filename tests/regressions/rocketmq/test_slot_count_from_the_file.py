"""Fault: a file is read with the slot count of the configuration instead of its own.

RocketMQ: golden fault 5.
RocketMQ: slots and items came from the broker's configuration, never from the stored file. After a change of settings
old files failed ("read position illegal") or answered wrong.
Here: every file has its own geometry, and a reader needs none. A writer with another slot count is refused and changes
nothing. Files with different numbers of items can be in one index.
"""

from __future__ import annotations

import pytest

from tiered_index import IndexReader
from tiered_index.errors import SchemaMismatch

T = 1_700_000_000_000
KEYS = tuple(f"k{number}" for number in range(12))


@pytest.fixture
def written(make_life):
    life = make_life(slots=32, items=31)
    for number in range(60):
        life.put("t", 0, KEYS[number % len(KEYS)], number, timestamp_ms=T + number * 1000)
    return life


def check(life):
    for key in KEYS:
        assert life.check("t", key)


def content(life):
    files = (path for path in life.root.rglob("[!.]*") if path.is_file() and path.name != "lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("state", ["unsealed", "compacted", "uploaded", "storage"])
def test_a_changed_setting_is_refused_and_touches_nothing_and_none_is_needed(written, state, monkeypatch):
    """The defaults of both presets are in the millions, and the geometry in the files counts."""
    written.bring(state)
    written.service.close()
    before = content(written)
    for slots in (64, 31, 1):
        with pytest.raises(SchemaMismatch, match="32 slots"):
            written.open(slots=slots)
        assert content(written) == before
    for settings in ({}, {"slots": ..., "items": ..., "preset": ...}):
        written.open(**settings)
        written.bring(state)
        check(written)
    # a reader ignores the settings of new files
    monkeypatch.setenv("TIERED_INDEX_SLOTS", "64")
    monkeypatch.setenv("TIERED_INDEX_ITEMS", "100")
    with IndexReader.open(root=written.root, storage_backend=written.storage, clock=written.clock) as reader:
        assert [item.offset for item in reader.query("t", "k3")] == [51, 39, 27, 15, 3]


def test_every_key_of_a_large_file_is_in_its_own_slot(make_life):
    """Many slots, and more entries than one read has: a wrong slot count leads to the wrong place."""
    life = make_life(slots=32, items=2001)
    life.put_batch([("t", 0, f"key-{number % 200}", number, 10, T + number * 1000) for number in range(2000)])
    for state in life.through():
        if state != "buffered":
            (file,) = life.service.files()
            assert file.count == 2000
        for number in range(0, 200, 40):
            assert len(life.check("t", f"key-{number}")) == 10
        if state in ("unsealed", "uploaded"):
            life.service.close()
            life.open(slots=..., items=..., preset=...)


def test_files_of_several_sizes_answer_side_by_side(written):
    written.bring("unsealed")
    for number, items in enumerate((11, 2, 200)):
        written.service.close()
        written.open(items=items)
        for more in range(15):
            offset = 100 * (number + 1) + more
            written.put("t", 0, KEYS[more % len(KEYS)], offset, timestamp_ms=T + offset * 1000)
        written.service.flush()
    assert {file.layout.items for file in written.service.files()} == {31, 11, 2, 200}
    for _ in written.through():
        check(written)
