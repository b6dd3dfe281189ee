"""The write buffer has bounds, and a flush handles wild clocks. Files are sealed by age, and handles are released."""

import contextlib
import sys

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.rounds import upload
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.format import journal
from tiered_index.service.log.state import LogState
from tiered_index.service.read.files.snapshot import Catalog
from tiered_index.service.write.buffer import OpenChunk
from tiered_index.storage.memory import MemoryStorage

T = 1_700_000_000_000


def test_a_files_interval_grows_with_what_it_takes(open_index, clock, storage):
    """Late messages and whole windows inside a file are found at their own time.

    RocketMQ selects files only by their begin.
    """
    index = open_index("root", items=100)
    times = [T, T + 600_000, T - 900_000, T + 5_000, T - 1_800_000, T + 900_000]
    for number, timestamp_ms in enumerate(times):
        index.put("t", 0, "k", number, 1, timestamp_ms)
        if number != 3:
            index.flush()
    for state in ("unsealed", "uploaded"):
        for number, timestamp_ms in enumerate(times):
            for width in (0, 999, 2_000):
                window = (timestamp_ms - width, timestamp_ms + width)
                assert [i.offset for i in index.query("t", "k", *window)] == [number]
                # by the intervals also where the compiled core looks at every file
                assert [summary.topic for summary in index.topics(*window).topics] == ["t"]
                with IndexReader.open(root=index.config.root, storage_backend=storage, clock=clock) as reader:
                    assert [i.offset for i in reader.query("t", "k", *window)] == [number]
        assert len(index.query("t", "k", T - 1_800_000, T + 900_000)) == 6
        assert len(index.query("t", "k", T - 900_000, T + 600_000)) == 4
        assert len(index.query("t", "k", T + 900_001 + 1000)) == 0
        assert {handle.place for handle in index.files()} == {state}
        upload(index)


def test_names_and_positions_of_many_topics_and_sources_take_several_journal_records(open_index, monkeypatch):
    """Each file begins with the positions of all sources. One record for these stopped all flushes."""
    monkeypatch.setattr(journal, "_MAX_RECORD", 4096)
    index = open_index("root", items=100)
    names = [f"{number:03d}".ljust(100, "ж") for number in range(200)]
    for number, name in enumerate(names):
        index.put(name, 0, "k", number, 1, T, source=name[:20], source_position=number)
        if number % 20 == 19:
            index.flush()
    index.abandon()
    index = open_index("root", items=100)
    assert [[item.offset for item in index.query(topic, "k")] for topic in names] == [[n] for n in range(200)]
    assert sorted(index.durable_positions().values()) == list(range(200))


def test_a_file_is_sealed_by_age_and_not_before(open_index, clock):
    """With it, buffered entries. Also if the clock was set back."""
    index = open_index("root", seal_after_s=100)
    index.put("t", 0, "k", 1, 1, T)
    index.put("t", 0, "k", 2, 1, 0)
    index.flush()
    clock.advance(99)
    assert not index.run_lifecycle().any()
    clock.advance(1)
    index.put("t", 0, "k", 3, 1, T)
    progress = index.run_lifecycle()
    assert (progress.compacted, progress.uploaded) == (2, 2)
    assert sum(stored.count for stored in index.log_state.objects.values()) == 3
    assert not index.run_lifecycle().any()
    index.close()
    with open_index("root", clock=ManualClock(T + 86_400_000)) as index:
        index.put("t", 0, "k", 1, 1, T)
    index = open_index("root", seal_after_s=100)
    clock.advance(100)
    assert index.run_lifecycle().uploaded == 1


def test_local_copies_are_retired_by_age_or_by_bytes_oldest_first(open_index, clock):
    index = open_index(local_keep_s=100, local_keep_bytes=1500)  # one file has about 1,100 bytes
    for offset in range(3):
        index.put("t", 0, "k", offset, 1, T + offset)
        upload(index)
    places = [h.place for h in index.files()]
    assert places == ["storage", "storage", "uploaded"]
    clock.advance(100)
    index.run_lifecycle()
    assert {h.place for h in index.files()} == {"storage"}
    assert [i.offset for i in index.query("t", "k")] == [2, 1, 0]


# Positions


def test_positions_survive_every_file(open_index, storage):
    """This includes positions of empty batches, and of entries that all had wild clocks."""
    index = open_index("root", local_keep_s=0)
    index.put("t", 0, "k", 1, 1, 0, source="wild", source_position=7)
    index.flush()
    index.put("t", 0, "k", 2, 1, T, source="fine", source_position=8)
    index.seal()
    for _ in range(3):
        index.run_lifecycle()
    assert index.durable_positions() == {"wild": 7, "fine": 8}
    assert {h.place for h in index.files()} == {"storage"}
    index.abandon()
    index = open_index("root", local_keep_s=0)
    assert index.durable_positions() == {"wild": 7, "fine": 8}
    index.put_batch(batch(0), "empty", 9)
    index.flush()
    index.abandon()
    assert open_index("root").durable_positions() == {"wild": 7, "fine": 8, "empty": 9}


def test_the_logs_positions_never_run_ahead_of_entries_in_quarantine(open_index):
    """After the loss of this host the next writer continues from the log's positions."""
    for wild_first in (True, False):
        index = open_index(storage_backend=MemoryStorage(), items=4, local_keep_s=0)
        if not wild_first:
            index.put("t", 0, "k", 1, 1, T)
            index.flush()
        index.put("t", 0, "k", 0, 1, 0, source="s", source_position=1)
        index.flush()
        last = 4 if wild_first else 3  # these entries fill the main file exactly
        for offset in range(2, last + 1):
            index.put("t", 0, "k", offset, 1, T, source="s", source_position=offset)
        index.flush()
        index.run_lifecycle()  # the full main file is uploaded, and the quarantine file still accepts entries
        assert [o.lane for o in index.log_state.objects.values()] == ["main"]
        assert index.log_state.positions == {}
        upload(index)
        assert index.log_state.positions == {"s": last}


def test_a_local_copy_stays_while_it_alone_says_a_position(open_index):
    index = open_index("root", items=4, local_keep_s=0)
    index.put("t", 0, "k", 0, 1, 0)
    for offset in range(1, 4):
        index.put("t", 0, "k", offset, 1, T, source="s", source_position=offset)
    index.flush()
    # The upload has no positions, because the quarantine file waits. No other local file has position 3.
    index.run_lifecycle()
    assert [h.place for h in index.files() if h.lane == "main"] == ["uploaded"]
    index.abandon()
    index = open_index("root", items=4, local_keep_s=0)
    assert index.durable_position("s") == 3
    upload(index)
    assert index.log_state.positions == {"s": 3}
    assert {h.place for h in index.files()} == {"storage"}


def test_positions_never_decrease(open_index):
    index = open_index("root")
    for offset, position in enumerate((10, 4)):
        index.put("t", 0, "k", offset, 1, T, source="s", source_position=position)
        # the lookup closes the chunk, and merges it with the one before
        assert len(index.query("t", "k")) == offset + 1
    index.put("t", 0, "k", 2, 1, T, source="other", source_position=2)
    assert index.durable_positions() == {}
    index.flush()
    index.put("t", 0, "k", 3, 1, T, source="s", source_position=5)
    index.flush()
    assert index.durable_positions() == {"s": 10, "other": 2}
    index.abandon()
    index = open_index("root")
    assert index.durable_position("s") == 10
    upload(index)
    assert index.log_state.positions == {"s": 10, "other": 2}


# The catalog


class _Handle:
    place = "unsealed"
    sequence = 1
    is_local = True
    lane = "main"

    def __init__(self, file_id, second_min, second_max):
        self.file_id, self.second_min, self.second_max = file_id, second_min, second_max

    def search(self, question, call):
        raise NotImplementedError


def test_what_a_running_query_may_need_is_kept():
    catalog, gone = Catalog(), []
    old, new = _Handle("f", 5, 9), _Handle("f", 5, 9)
    catalog.put(old)
    first = catalog.reading()
    first.__enter__()
    catalog.put(new, lambda: gone.append("old"))
    assert catalog.snapshot.overlapping(0, 10) == [new]
    catalog.reclaim()
    assert gone == []
    second = catalog.reading()
    second.__enter__()  # this reading began after the removal, so it does not delay it
    catalog.remove("f", lambda: gone.append("new"))
    first.__exit__(None, None, None)
    catalog.reclaim()
    assert gone == ["old"]
    second.__exit__(None, None, None)
    catalog.reclaim()
    assert gone == ["old", "new"]
    assert catalog.all() == []


def test_a_snapshot_stays_as_it_was_taken():
    catalog = Catalog()
    catalog.put(_Handle("file", 0, 10))
    catalog.put(_Handle("beside", 4, 6))
    with catalog.reading() as before:
        with catalog.changing(LogState(number=7), 5.0):
            catalog.put(_Handle("table", 5, 10))
            catalog.remove("file")
            # the change is seen whole or not at all
            assert catalog.snapshot is before
        after = catalog.snapshot
        assert (after.state.number, after.as_of_s) == (7, 5.0)
        assert {handle.file_id for handle in after.overlapping(0, 10)} == {"table", "beside"}
        catalog.remove("beside")
        catalog.reclaim()
        assert {handle.file_id for handle in before.overlapping(0, 10)} == {"file", "beside"}
        assert (before.state.number, before.view(len)) == (0, 2)
    catalog.reclaim()
    # no lookup needs the removed files any more
    assert len(catalog._list.overlapping(-100, 100)) == 1


@pytest.mark.parametrize("change", ["put", "extend", "put lower"])
def test_a_file_is_visible_at_every_moment_of_a_change(change):
    """A lookup at any line of the change, where the thread may be switched, finds the file."""
    catalog = Catalog()
    for number in range(6):
        catalog.put(_Handle(f"f{number}", number, number + 10))
    tested = catalog.get("f3")
    meetings = []

    def look(frame, event, arg):
        if not frame.f_code.co_filename.endswith(("service/read/files/snapshot.py", "service/read/files/skiplist.py")):
            return None
        with catalog.reading() as snapshot:
            meetings.append("f3" in {handle.file_id for handle in snapshot.overlapping(4, 12)})
        return look

    if change == "extend":
        tested.second_min, tested.second_max = 1, 30
    low = 2 if change == "put lower" else 3
    before = sys.gettrace()
    sys.settrace(look)
    try:
        if change == "extend":
            catalog.extend(tested)
        else:
            catalog.put(_Handle("f3", low, 13))
    finally:
        sys.settrace(before)
    assert len(meetings) > 20
    assert all(meetings)


def test_a_flush_of_several_rounds_writes_all_that_was_put(open_index):
    """A round takes 512 Ki entries, so a flush of a large buffer needs several rounds."""
    count, puts = 120_000, 5
    index = open_index("root", items=10**6, buffer_max_entries=2 * 10**6, buffer_max_bytes=1 << 30)
    for number in range(puts):
        offsets = np.arange(number * count, (number + 1) * count)
        index.put_batch(batch(count, offset=offsets, key="k"), source="s", source_position=number)
    index.flush()
    assert index.health()["buffered_entries"] == 0
    assert index.durable_position("s") == puts - 1
    assert sum(handle.count for handle in index.files()) == puts * count
    assert [item.offset for item in index.query("t", "k", max_count=3)] == [puts * count - n for n in (1, 2, 3)]


def test_a_position_alone_outlives_the_file_it_was_put_to(open_index):
    """If an entry's time does not fit a file with positions but no entries, the writer drops the file.

    The next journal takes over the positions.
    """
    index = open_index("root", max_early_s=1e12)
    index.put_batch(batch(0), "s", 9)
    index.flush()
    index.put("t", 0, "k", 1, 1, 253_402_300_799_000)
    index.flush()
    assert len(list((index.config.root / "unsealed").glob("[0-9]*.journal"))) == 1
    index.abandon()
    assert open_index("root").durable_positions() == {"s": 9}


def test_positions_alone_move_to_another_journal_once_there_are_many(open_index, clock):
    index = open_index("root", seal_after_s=100)
    for position in range(1, many := 4_100):
        index.put_batch(batch(0), "s", position)
        index.flush()
    folder = index.config.root / "unsealed"
    (before,) = folder.glob("[0-9]*.journal")
    clock.advance(100)
    index.run_lifecycle()
    assert index.durable_positions() == {"s": many - 1}
    index.put_batch(batch(0), "s", many)
    index.flush()
    (after,) = folder.glob("[0-9]*.journal")
    assert after.name != before.name
    index.abandon()
    assert open_index("root").durable_positions() == {"s": many}


def test_other_threads_see_a_chunk_only_after_its_space_is_free(index, monkeypatch):
    """An array over its rows, of a lookup that merges chunks, made the put or the flush fail with a `BufferError`."""
    trim, seen = OpenChunk.trim, []

    def trimmed(chunk):
        seen.append([ready.content is chunk for ready in index._buffer._ready])
        trim(chunk)

    monkeypatch.setattr(OpenChunk, "trim", trimmed)
    for offset in range(3):
        index.put("t", 0, "k", offset, 1, T)
        assert len(index.query("t", "k")) == offset + 1
    assert len(seen) == 3 and not any(map(any, seen))


@pytest.mark.parametrize("times", [(T, 0), (0, T, 0)], ids=["a main file", "a younger main file"])
def test_the_logs_positions_never_run_ahead_of_main_entries(index, times):
    """The upload of a quarantine file says nothing about entries of the main file put before or in between."""
    for offset, timestamp_ms in enumerate(times, 1):
        index.put("t", 0, "k", offset, 1, timestamp_ms, source="s", source_position=offset)
        index.flush()
    appender = index._flusher.quarantine
    appender.roll()
    index.run_lifecycle()
    assert [o.lane for o in index.log_state.objects.values()] == ["quarantine"]
    assert index.log_state.positions == {}
    upload(index, rounds=2)
    assert index.log_state.positions["s"] >= 1
    index.put("t", 0, "k", 9, 1, T)
    upload(index)
    assert index.log_state.positions == {"s": len(times)}


def test_a_change_that_fails_half_way_keeps_each_entry_and_the_earlier_state():
    catalog = Catalog()
    catalog.put(_Handle("file", 0, 10))
    with contextlib.suppress(MemoryError), catalog.changing(LogState(number=7), 5.0):
        catalog.put(_Handle("table", 0, 10))
        raise MemoryError
    snapshot = catalog.snapshot
    assert {handle.file_id for handle in snapshot.overlapping(0, 10)} == {"file", "table"}
    assert snapshot.state.number == 0
