"""Threads, bounds and races of readers while an index does not answer."""

import contextlib
import sys
import threading
import time
import traceback
from functools import partial

import pytest

from tests.support.hanging import beside, until
from tests.support.several_indexes import Cluster, of, rows
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, IndexClosed, InvalidArgument, StorageUnavailable
from tiered_index.service.read import polled
from tiered_index.service.read.cold_path import RangeReadPool
from tiered_index.service.read.compacted import CompactedFile
from tiered_index.storage.memory import MemoryStorage

SHORT_S = 0.5


@pytest.fixture
def hangs(opened):
    """Return a function that lets calls of storages hang until the test ends."""
    made = []

    def hang(uri, operation, **how):
        made.append(of(opened, uri).hang(operation, **how))

    yield hang
    for one in made:
        one.release.set()


@pytest.fixture
def reading(monkeypatch):
    """Return a dict from URI to a call before each listing and whole GET of this storage, which may raise."""
    before = {}
    for name in ("get", "list"):
        real = getattr(MemoryStorage, name)

        def read(self, *args, real=real, **named):
            before.get(self.uri, lambda: None)()
            return real(self, *args, **named)

        monkeypatch.setattr(MemoryStorage, name, read)
    return before


def ask(reader, **how):
    return reader.query("t", "k", max_count=1000, allow_partial=True, **how)


def sources(answer):
    return {report.source for report in answer.failed}


def raises(error):
    raise error


def refused():
    time.sleep(SHORT_S)  # the retries
    raise StorageUnavailable("refused")


def brokers(tmp_path, prefix, count):
    made = Cluster(tmp_path)
    for number in range(count):
        made.add(f"{prefix}/broker-{number:02}", rows(number, 12))
    return made


@pytest.mark.parametrize(("count", "hanging", "threads"), [(3, 1, 1), (3, 1, 2), (20, 4, 8)])
def test_refreshes_of_the_others_do_not_queue_behind_those_that_hang(
    tmp_path, prefix, hangs, clock, count, hanging, threads
):
    made = brokers(tmp_path, prefix, count)
    aways = set(made.uris[:hanging])
    with made.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S, query_threads=threads) as reader:
        for away in aways:
            hangs(away, "list", name_prefix="log/")
        for _ in range(3):
            clock.advance(11)
            assert sources(ask(reader)) == aways
            assert isinstance(beside(reader.refresh)(), StorageUnavailable)


def test_four_of_twenty_whose_reads_hang_keep_no_thread_from_the_others(tmp_path, prefix, hangs, clock):
    made = brokers(tmp_path, prefix, 20)
    aways = set(made.uris[:4])
    others = [uri for uri in made.uris if uri not in aways]
    with made.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=4, block_cache_bytes=0) as reader:
        for away in aways:
            hangs(away, "get_range", times=None)
        # the searches of four shares take all four threads
        for _ in range(3):
            asking = beside(lambda: ask(reader))
            assert asking.ended(20 * SHORT_S)
            assert sources(asking.value) == aways
            assert made.answers(asking.value) == made.expected(others)
        # those of the threads that hang are replaced, and no more
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("tiered-index-query")]
        assert len(names) <= 8


def test_refreshes_that_leave_indexes_replace_the_threads_of_their_searches(tmp_path, prefix, hangs, clock):
    """The searches hang since earlier lookups, which have ended at their deadline."""
    made = brokers(tmp_path, prefix, 8)
    aways = set(made.uris[:4])
    settings = {"refresh_interval_s": 10, "source_timeout_s": SHORT_S, "query_threads": 4, "block_cache_bytes": 0}
    with made.reader(clock=clock, **settings) as reader:
        for away in aways:
            hangs(away, "get_range", times=None)
            hangs(away, "list", name_prefix="log/", times=None)
        for _ in range(4):
            # the rest of the searches has no thread
            assert sources(ask(reader, timeout_s=0.05)) >= aways
        clock.advance(11)
        assert isinstance(beside(reader.refresh)(), StorageUnavailable)
        asking = beside(lambda: ask(reader))
        assert asking.ended(20 * SHORT_S)
        assert sources(asking.value) == aways


def test_lookups_with_a_very_short_timeout_leave_a_hanging_index(cluster, hangs, clock):
    away = cluster.uris[1]
    with cluster.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=2) as reader:
        hangs(away, "get_range", times=None)
        end_s = time.monotonic() + 3 * SHORT_S
        while time.monotonic() < end_s:
            answer = ask(reader, timeout_s=SHORT_S / 10)
        assert sources(answer) == {away}
        assert cluster.answers(answer) == cluster.expected([uri for uri in cluster.uris if uri != away])


def test_a_refresh_that_waits_for_another_one_is_not_silent(cluster, reading, clock):
    slow = cluster.uris[1]
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S) as reader:
        for number in range(8):
            cluster.add(slow, rows(200 + number, 2))
        reading[slow] = lambda: time.sleep(SHORT_S / 3)
        clock.advance(11)
        asking = beside(lambda: ask(reader))
        time.sleep(SHORT_S / 3)
        # waits for the lock of the first one
        assert not isinstance(beside(reader.refresh)(), Exception)
        assert cluster.answers(asking()) == cluster.expected()


def test_answers_while_an_index_is_away_keep_no_frames(cluster, hangs, clock):
    """Each raise of one error would add the frames of its lookup to the error's traceback."""
    away = cluster.uris[1]
    with cluster.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=8) as reader:
        hangs(away, "get_range", times=None)
        sizes = []
        for _ in range(20):
            assert sources(ask(reader)) == {away}
            with pytest.raises(StorageUnavailable, match="did not answer"):
                reader.query("t", "k")
            (view,) = [view for view in reader._views if view.storage.uri == away]
            sizes.append(len(list(traceback.walk_tb(view._away.__traceback__))))
        assert sizes[-1] == sizes[0]


def test_a_damaged_log_does_not_hide_known_entries(cluster, reading, clock, monkeypatch):
    damaged = cluster.uris[1]
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=10 * SHORT_S) as reader:
        monkeypatch.setattr(polled, "BRIEF_S", 0.0)
        reading[damaged] = lambda: raises(CorruptFile("log/7", "damaged"))
        clock.advance(11)
        answer = ask(reader)
        assert sources(answer) == {damaged}
        assert cluster.answers(answer) == cluster.expected()


def test_an_opening_that_gets_responses_is_awaited(cluster, reading, clock):
    slow = cluster.uris[1]
    for number in range(8):
        cluster.add(slow, rows(100 + number, 2))
    reading[slow] = lambda: time.sleep(SHORT_S * 0.8)
    begun = time.monotonic()
    with cluster.reader(clock=clock, source_timeout_s=SHORT_S) as reader:
        assert time.monotonic() - begun > SHORT_S
        assert set(reader.sources) == {*cluster.uris}


@pytest.mark.parametrize("how", ["decoding", "another lookup reads"])
def test_a_search_is_not_left_while_nobody_waits_for_a_response(cluster, opened, clock, how, monkeypatch):
    """A search may decode for long, or wait for the read of another lookup, which gets its response late."""
    busy = cluster.uris[1]
    with cluster.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=8) as reader:
        if how == "decoding":
            real = CompactedFile.search

            def search(self, batch):
                found = real(self, batch)
                time.sleep(3 * SHORT_S if self.stored.cold.storage.uri == busy else 0)
                return found

            monkeypatch.setattr(CompactedFile, "search", search)
            asking = [beside(lambda: ask(reader))]
        else:
            of(opened, busy).meanwhile("get_range", partial(time.sleep, SHORT_S * 0.9), times=None)
            asking = [beside(lambda: ask(reader)) for _ in range(4)]
        for answer in asking:
            assert cluster.answers(answer()) == cluster.expected()


def test_lookups_with_a_short_timeout_also_leave_a_hanging_index(cluster, hangs, clock):
    with cluster.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=8) as reader:
        hangs(cluster.uris[1], "get_range", times=None)
        took = []
        for _ in range(10):
            begun = time.monotonic()
            assert sources(ask(reader, timeout_s=0.4)) == {cluster.uris[1]}
            took.append(time.monotonic() - begun)
        assert took[-1] < 0.3


def test_an_index_whose_log_answers_but_not_its_files_delays_one_lookup_a_pause(cluster, hangs, clock):
    away = cluster.uris[1]
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S, query_threads=8) as reader:
        hangs(away, "get_range", times=None)
        for _ in range(3):
            took = []
            for _ in range(4):
                begun = time.monotonic()
                assert sources(ask(reader)) == {away}
                took.append(time.monotonic() - begun)
            # it is searched again after the pause, and a read of its log
            assert sum(took) < 2 * SHORT_S

            def is_back():
                clock.advance(2)
                assert sources(ask(reader)) == {away}
                time.sleep(SHORT_S / 4)
                return [view.away for view in reader._views if view.name == away] == [None]

            # a read of the log that ends before the search begins lets it search, and it leaves the index again
            until(is_back)


@pytest.mark.parametrize("since", ["the opening", "later"])
def test_an_index_that_refuses_after_retries_delays_only_one_lookup(cluster, reading, clock, since):
    away = cluster.uris[1]
    if since == "the opening":
        reading[away] = refused
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=4 * SHORT_S) as reader:
        reading[away] = refused
        clock.advance(11)
        took = []
        for _ in range(6):
            begun = time.monotonic()
            clock.advance(0.01)
            assert sources(ask(reader)) == {away}
            took.append(time.monotonic() - begun)
        assert sum(took[1:]) < 2 * SHORT_S


def test_an_opening_with_one_thread_passes_a_hanging_index(cluster, opened, reading, clock):
    release = threading.Event()
    reading[cluster.uris[0]] = lambda: release.wait(60)
    opening = beside(lambda: cluster.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=1))
    try:
        assert opening.ended(6 * SHORT_S)
        assert sources(ask(opening.value)) == {cluster.uris[0]}
    finally:
        release.set()
        opening().close()


def test_an_index_that_is_adopted_during_a_close_is_closed(cluster, opened, reading, clock):
    reading[cluster.uris[2]] = refused
    reader = cluster.reader(clock=clock)
    real = reader._engine.read_of

    def read_of(names):
        reader.close()  # as another thread may
        real(names)

    reader._engine.read_of = read_of
    reading.clear()
    with pytest.raises(IndexClosed):
        reader.refresh()
    assert all(storage.closed for storage in opened)


def test_bounds_of_lookups_do_not_prevent_a_late_opening(cluster, reading, clock):
    def refuse():
        raise StorageUnavailable("refused")

    reading[cluster.uris[2]] = refuse
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader:
        reading.clear()
        for _ in range(6):
            clock.advance(12)
            ask(reader, max_requests=6)
        assert len(reader.sources) == 3


def test_one_index_twice_is_refused_even_if_it_does_not_answer(cluster, reading, clock):
    reading[cluster.uris[2]] = refused
    with pytest.raises(InvalidArgument, match="given twice"):
        cluster.reader([*cluster.uris, cluster.uris[2]], clock=clock)


def test_an_interrupt_at_any_line_loses_no_place(cluster, clock):
    codes = {RangeReadPool.place.__wrapped__.__code__, RangeReadPool.give_back.__code__}
    # one file, which is read in the caller's thread
    uri = f"{cluster.uris[0]}-single"
    cluster.add(uri, rows(5, 5, seconds=1))
    with IndexReader.open(uri, clock=clock, block_cache_bytes=0) as reader:
        reader._whole_view = lambda *_: None
        pool = reader._views[0].cold._range_reads
        at, seen = 0, 0
        while seen == at:
            at, seen = at + 1, 0

            def tracer(frame, event, arg):
                return local if frame.f_code in codes else None

            def local(frame, event, arg, at=at):
                nonlocal seen
                if event == "line":
                    seen += 1
                    if seen == at:
                        raise KeyboardInterrupt
                return local

            sys.settrace(tracer)
            with contextlib.suppress(KeyboardInterrupt):
                reader.query("t", "k", max_count=1000)
            sys.settrace(None)
            assert not pool._held
            assert pool._free.acquire(blocking=False)
            pool._free.release()
        assert at > 6
