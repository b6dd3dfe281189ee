"""Fault: an empty file compacts to 0 bytes and "uploads" well.

RocketMQ: golden fault 11.
RocketMQ: the compaction of a file without entries wrote nothing. The 0 bytes were uploaded, and the file counted as
uploaded.
Here: a file without entries is never sealed, compacted, uploaded or named in the log. An empty file from elsewhere is
damage, never an empty answer.
"""

from __future__ import annotations

import pytest

from tiered_index.errors import CorruptFile, StorageUnavailable

T = 1_700_000_000_000


def nothing_published(life):
    assert not list(life.storage.list("data/"))
    assert not life.service.log_state.objects
    assert not life.service.files()
    assert not list(life.root.glob("compacted/*")) + list(life.root.glob("uploaded/*"))


def test_nothing_put_is_nothing_published(life):
    for _ in range(3):
        life.service.flush()
        life.service.seal()
        progress = life.service.run_lifecycle()
        assert not progress.any()
        nothing_published(life)
        life.clock.advance(100_000)  # long past sealing by age
        life.service.run_lifecycle()
        life.service.close()
        life.open()
        nothing_published(life)
    assert life.check("t", "k") == []


def test_empty_batches_and_positions_alone_make_no_file_of_entries(life):
    empty = {name: [] for name in ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")}
    for position in range(1, 4):
        assert life.service.put_batch(empty, source="log", source_position=position) == 0
        assert life.service.put("t", 0, [], position, 1, T) == 0
        life.service.seal()
        life.service.run_lifecycle()
        assert life.service.durable_position("log") == position
        nothing_published(life)
        life.service.close()
        life.open()
        assert life.service.durable_position("log") == position
    life.put("t", 0, "k", 1, timestamp_ms=T)
    for _ in life.through():
        assert len(life.check("t", "k")) == 1
        assert len(life.service.files()) <= 1
        assert life.service.durable_position("log") == 3


def test_a_file_that_was_begun_and_got_no_entry(life):
    """Its first write failed, so it has no entries. They are written to another file."""
    life.put("t", 0, "k", 1, timestamp_ms=T)
    life.disk.fail("pwrite", nth=3, times=2)
    with pytest.raises(StorageUnavailable):
        life.service.flush()
    life.disk.clear()
    for _ in life.through():
        assert len(life.check("t", "k")) == 1
    (stored,) = life.service.log_state.objects.values()
    assert (stored.count, len(list(life.storage.list("data/")))) == (1, 1)
    assert all(info.size_bytes for info in life.storage.list("data/"))


@pytest.mark.parametrize("state", ["compacted", "uploaded"])
def test_an_empty_file_of_another_hand_is_damage(life, state):
    life.put("t", 0, "k", 1, timestamp_ms=T)
    life.bring(state)
    (file,) = life.service.files()
    life.crash()
    (life.root / state / f"{file.file_id}.index").write_bytes(b"")
    life.open()
    if state == "uploaded":
        life.check("t", "k")  # the storage has it
        return
    for _, ask in life.asking():
        with pytest.raises(CorruptFile):
            ask("t", "k")
        assert ask("t", "k", allow_partial=True).status == "partial"
    life.service.run_lifecycle()
    assert not list(life.storage.list("data/"))
    assert not life.service.log_state.objects
