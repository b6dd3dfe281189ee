"""A reader looks up in stored files. The core's answers and costs equal those of the search file by file."""

import contextlib
import dataclasses
import errno
import os
import random
import tempfile
import time
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest

import tiered_index
from tests.support.cases import each
from tests.support.core import compiled_core, using
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.errors import TieredIndexError
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.tombstones import Tombstone
from tiered_index.service.read.files.file_view import StoredSource
from tiered_index.storage.local import LocalStorage

T_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
KEYS = 300
CACHED = {"filter_after_probes": 1, "cache_dir": "cache"}


@pytest.fixture(scope="module", params=["files", "tables", "rocketmq"])
def store(request):
    """The folder of an index, which has its files or window tables in a subfolder."""
    compiled_core()
    # on a disk: a file system in memory can't tell whether bytes are in memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        fill(path, request.param)
        yield path


def fill(folder, kind):
    random_ = random.Random(7)
    preset = "rocketmq" if kind == "rocketmq" else "native"
    uri = (folder / "storage").as_uri()
    settings = {"preset": preset, "slots": 40, "items": 4_000, "max_late_s": 10**9}
    with IndexService.open(root=folder / "root", storage=uri, environment=False, **settings) as index:
        for file in range(5):
            for _ in range(500):
                key, topic = random_.randrange(KEYS), random_.choice("ab") if file else "a"
                at_ms = T_MS + (file // 2) * HOUR_MS + random_.randrange(HOUR_MS)
                index.put(topic, random_.randrange(3), f"k{key}", random_.randrange(10**9), 7, at_ms)
            index.seal()
        index.run_lifecycle()
    if kind == "tables":
        assert tiered_index.merge(uri, window="1h").tables > 1


def answer_of(reader, lookup):
    """Return everything that an answer says, or the error."""
    try:
        answer = reader.query(**lookup)
    except TieredIndexError as error:
        return {"error": (type(error), str(error))}
    shared = ("requests", "bytes", "cost_usd")
    of_file = attrgetter(*shared, "file", "place", "outcome", "matched", "begin_ms", "end_ms")
    costs = attrgetter(*shared, "files_read", "files_cached", "files_skipped")
    files = sorted(map(of_file, answer.explain.files))
    document = {"items": answer.items, "status": (answer.status, answer.cursor, answer.failed), "seen": answer.seen}
    return document | {"files": files, "costs": costs(answer.explain)}


def lookups(seed, count):
    random_ = random.Random(seed)
    drawn = []
    for _ in range(count):
        lookup = {"topic": random_.choice("abbc"), "key": f"k{random_.randrange(2 * KEYS)}"}
        if random_.random() < 0.3:
            begin_ms = T_MS + random_.randrange(-1, 3) * HOUR_MS + random_.randrange(HOUR_MS)
            lookup |= {"begin_ms": begin_ms, "end_ms": begin_ms + random_.randrange(2 * HOUR_MS)}
        drawn.append(lookup)
    return drawn


def open_reader(store, **settings):
    uri = (store / "storage").as_uri()
    return IndexReader.open(uri, environment=False, refresh_interval_s=10**6, query_threads=1, **settings)


def told_by_both(core_reader, file_reader, ask, *arguments, **more):
    """Return what the core and the search file by file say."""
    with using(None):
        expected = ask(file_reader, *arguments, **more)
    return ask(core_reader, *arguments, **more), expected


def pages_of_one(reader, lookup):
    return list(reader.query_all(**lookup, max_count=1))


SETTINGS = [{}, *each(filter_after_probes=[1], cache_slot_groups=[False], read_cache_bytes=[0]), CACHED]


@pytest.fixture(params=SETTINGS, ids=str)
def both(request, store, tmp_path):
    """Two readers of equal settings: one for the core, one for the search file by file."""
    caches = [{"cache_dir": tmp_path / name} if "cache_dir" in request.param else {} for name in ("one", "other")]
    with (
        open_reader(store, **request.param | caches[0]) as core_reader,
        open_reader(store, **request.param | caches[1]) as file_reader,
    ):
        yield core_reader, file_reader, request.param


def test_answers_costs_and_pages_are_those_of_the_search_file_by_file(both):
    core_reader, file_reader, settings = both
    for lookup in lookups(1, 20 if "read_cache_bytes" in settings else 150):
        of_core, expected = told_by_both(core_reader, file_reader, answer_of, lookup)
        assert of_core == expected
    if settings.get("cache_slot_groups", True):
        assert core_reader.storage.total.requests == file_reader.storage.total.requests
        assert core_reader.storage.total.bytes_read == file_reader.storage.total.bytes_read
    # the number of lookups that the core answered
    assert core_reader._engine.plain.complete > 70 or "read_cache_bytes" in settings
    for lookup in lookups(2, 30):
        pages, expected = told_by_both(core_reader, file_reader, pages_of_one, lookup)
        # the first file that is read decides whether the page is proven to be the last
        assert [page.items for page in pages if page.items] == [page.items for page in expected if page.items]
        assert pages[0].seen == expected[0].seen


def test_lookups_with_limits_are_those_of_the_search_file_by_file(store):
    with open_reader(store) as core_reader, open_reader(store) as file_reader:
        for number, lookup in enumerate(lookups(5, 120)):
            # too few for some lookups, until the caches have more
            limited = lookup | {"max_requests": number % 4 * 2, "allow_partial": number % 8 > 3}
            of_core, expected = told_by_both(core_reader, file_reader, answer_of, limited)
            # without the times of failed files
            for answer in (expected, of_core):
                if "error" not in answer:
                    status, cursor, failed = answer["status"]
                    answer["status"] = status, cursor, sorted((report.file, report.error) for report in failed)
            assert of_core == expected
        # the core reads nothing for such a lookup, because nobody would bound it
        assert core_reader.storage.total.requests == file_reader.storage.total.requests
        assert core_reader.storage.total.bytes_read == file_reader.storage.total.bytes_read


def told_of_all(reader, batch, **limits):
    """Return everything that a batch says but its cost, or the error."""
    try:
        answers = reader.query_many(batch, **limits)
    except TieredIndexError as error:
        return (type(error), str(error))
    of_file = attrgetter("file", "place", "outcome", "error")
    return [
        (answer.items, answer.status, answer.cursor, list(map(of_file, answer.failed)), answer.seen)
        for answer in answers
    ]


def batches(seed, count):
    """Return batches of lookups, with different numbers of wanted entries."""
    random_ = random.Random(seed)
    return [
        [Lookup(**lookup, max_count=random_.choice([1, 3, 64])) for lookup in lookups(seed + number, 60)]
        for number in range(count)
    ]


def forget_pages(store):
    """Drop a store's objects from the page cache, so that reading them takes time."""
    for path in (store / "storage").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_batches_are_those_of_the_search_file_by_file(both, store):
    core_reader, file_reader, settings = both
    for number, batch in enumerate(batches(20, 3 if "read_cache_bytes" in settings else 8)):
        if number % 3 == 2:
            # the core then reads ahead
            forget_pages(store)
        of_core, expected = told_by_both(core_reader, file_reader, told_of_all, batch)
        assert of_core == expected == told_of_all(core_reader, batch, max_requests=1_000)
    if "read_cache_bytes" in settings:
        return
    # one report a file, with the requests of the storage
    before = core_reader.storage.total.requests, core_reader.storage.total.bytes_read
    explain = core_reader.query_many([Lookup(topic, f"k{key}") for topic in "ab" for key in range(KEYS)]).explain
    after = core_reader.storage.total.requests, core_reader.storage.total.bytes_read
    assert [explain.requests, explain.bytes] == [now - then for now, then in zip(after, before, strict=True)]
    assert len({report.file for report in explain.files}) == len(explain.files) > 1


@pytest.mark.parametrize("harm", ["changed", "cut", "deleted", "link"])
def test_damage_of_an_object_is_reported_as_before(store, tmp_path, harm):
    objects = sorted((store / "storage").rglob("*.index"), key=lambda path: path.stat().st_size)
    path = objects[-1]
    whole = path.read_bytes()
    settings = {"cache_slot_groups": False}
    with open_reader(store, **settings) as core_reader, open_reader(store, **settings) as file_reader:
        for lookup in lookups(4, 60):
            told_by_both(core_reader, file_reader, answer_of, lookup)
        all_lookups = [Lookup(topic, f"k{key}") for topic in "ab" for key in range(KEYS)]
        sound = core_reader.query_many(all_lookups).explain.requests
        try:
            path.unlink()
            if harm == "link":
                (tmp_path / "elsewhere").write_bytes(whole)
                path.symlink_to(tmp_path / "elsewhere")
            elif harm == "cut":
                path.write_bytes(whole[: len(whole) // 2])
            elif harm == "changed":
                path.write_bytes(whole[:400] + bytes(b ^ 1 for b in whole[400:440]) + whole[440:])
            for batch in batches(30, 3):
                for partial in (False, True):
                    of_core, expected = told_by_both(
                        core_reader, file_reader, told_of_all, batch, allow_partial=partial
                    )
                    assert of_core == expected
            answers = [told_by_both(core_reader, file_reader, answer_of, lookup) for lookup in lookups(5, 60)]
            assert any("error" in expected for _, expected in answers)
            for of_core, expected in answers:
                assert of_core.get("error") == expected.get("error")
                assert of_core.get("items") == expected.get("items")
            if harm == "changed":
                # a damaged slot group is read a few times, and not once for each of its keys
                harmed = core_reader.query_many(all_lookups, allow_partial=True)
                assert harmed.failed and harmed.explain.requests <= sound + 8
        finally:
            path.unlink(missing_ok=True)
            path.write_bytes(whole)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_of_a_block_read_is_raised(store, raised, monkeypatch):
    """Ctrl-C, or another error of a signal handler, ends a lookup during a block read. The next lookup works."""
    with open_reader(store) as reader:
        lookup = {"topic": "b", "key": "k1"}
        answer = reader.query(**lookup).items
        assert answer

        def interrupted(*_):
            raise raised("between two bytes")

        with monkeypatch.context() as patched:
            patched.setattr(StoredSource, "block", interrupted)
            with pytest.raises(raised, match="between two bytes"):
                reader.query(**lookup)
        assert reader.query(**lookup).items == answer


@pytest.mark.parametrize("ask", ["query", "query_many"])
def test_a_file_that_can_not_be_looked_at_is_a_typed_error(store, monkeypatch, ask):
    """A mounted file system lost the file after it was opened. No descriptor stays open."""
    with open_reader(store, cache_slot_groups=False) as reader:
        pairs = [("a", f"k{key}") for key in range(KEYS)]
        reader.query_many(pairs)

        def stale(*_):
            raise OSError(errno.ESTALE, "stale")

        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched, contextlib.suppress(TieredIndexError):
            patched.setattr(os, "fstat", stale)
            assert reader.query_many(pairs) if ask == "query_many" else reader.query(*pairs[1])
        assert len(os.listdir("/proc/self/fd")) <= before


def put_and_upload(index, number):
    index.put("a", 0, "key", number, 7, T_MS + 1000 * number)
    index.seal()
    index.run_lifecycle()


def test_entries_put_during_a_lookup_are_not_seen_without_those_put_before_them(open_index, monkeypatch):
    index = open_index(local_keep_s=0, cache_slot_groups=False)
    put_and_upload(index, 0)
    put_flushed(index, 1)
    assert [item.offset for item in index.query("a", "key")] == [1, 0]
    prepare = index._engine.prepare

    def prepare_late(*arguments):
        # after the core's search, before the rest of the files
        put_flushed(index, 2)
        index.put("a", 0, "key", 3, 7, T_MS + 3000)
        return prepare(*arguments)

    monkeypatch.setattr(index._engine, "prepare", prepare_late)
    # the lookup began before both
    assert [item.offset for item in index.query("a", "key")] == [1, 0]
    monkeypatch.undo()
    assert [item.offset for item in index.query("a", "key")] == [3, 2, 1, 0]


def test_entries_that_a_record_hides_after_the_search_of_a_view_are_not_in_the_answer(open_index, storage, monkeypatch):
    index = open_index(local_keep_s=0)
    put_and_upload(index, 0)
    put_and_upload(index, 1)
    with IndexReader.open(storage_backend=storage, environment=False, refresh_interval_s=1e9) as reader:
        # the core then has the rows of one file, and leaves the other one
        for _ in range(2):
            assert [item.offset for item in reader.query("a", "key", end_ms=T_MS)] == [0]
        catalog, prepare = reader._views[0].catalog, reader._engine.prepare
        state = catalog.snapshot.state
        expired = Expired(tombstones=(Tombstone.of("a", T_MS + HOUR_MS, key="key"),))

        def prepare_late(*arguments):
            # after the core's search, before the lookup takes its snapshot
            catalog.show(dataclasses.replace(state, expired=expired), catalog.snapshot.as_of_s)
            return prepare(*arguments)

        monkeypatch.setattr(reader._engine, "prepare", prepare_late)
        assert [item.offset for item in reader.query("a", "key")] == []


def test_files_that_come_after_the_search_of_a_view_are_in_the_answer(open_index, storage, clock, monkeypatch):
    index = open_index(local_keep_s=0)
    put_and_upload(index, 0)
    with IndexReader.open(storage_backend=storage, clock=clock, cache_slot_groups=False, environment=False) as reader:
        assert [item.offset for item in reader.query("a", "key")] == [0]
        prepare = reader._engine.prepare

        def prepare_late(*arguments):
            # after the core's search, before the lookup takes its files
            put_and_upload(index, 1)
            clock.advance(61)
            return prepare(*arguments)

        monkeypatch.setattr(reader._engine, "prepare", prepare_late)
        assert [item.offset for item in reader.query("a", "key")] == [1, 0]


def put_flushed(index, number):
    index.put("a", 0, "key", number, 7, T_MS + 1000 * number)
    index.flush()


def test_a_lookup_may_add_files_while_a_refresh_forgets_others(store):
    with open_reader(store) as reader:
        for lookup in lookups(7, 60):
            reader.query(**lookup)
        cold = reader._cold_paths[0]
        known, other = next(iter(cold.core_files)), next(iter(cold.core_files.values()))

        class Named:
            """The names in the log. Another thread adds a file between two questions."""

            def __contains__(self, name):
                cold.core_files.setdefault("added", other)
                return name == known

        assert len(cold.core_files) > 1
        cold.forget_unnamed(Named())
        assert list(cold.core_files) == [known, "added"]


def test_a_file_that_two_threads_open_is_opened_once(store):
    """A second opening changes nothing, because lookups of the first one may still run."""
    with open_reader(store) as reader:
        first = [reader.query(**lookup).items for lookup in lookups(6, 60)]
        cold = reader._cold_paths[0]
        files = [file for file in cold.core_files.values() if file.is_open]
        assert files
        before = cold.caches.size_bytes
        for view in [reader._views[0].catalog.snapshot.present_view]:
            for handle in view.handles:
                for stored in [handle.stored.stored] if hasattr(handle, "stored") else handle.shards:
                    trailer = cold.trailer(stored)
                    metadata, groups = trailer.metadata, trailer.directory.group_bytes
                    slots = metadata.slot_map.base
                    assert not cold.core_files[stored.name].opened({}, 0, slots, groups, stored.size_bytes)
        assert cold.caches.size_bytes == before
        assert [reader.query(**lookup).items for lookup in lookups(6, 60)] == first


def reasons(answer):
    """Return why the core did not search files that were read, with their number."""
    return Counter(report.not_in_core for report in answer.explain.files if report.outcome == "read")


def test_explain_says_why_the_core_did_not_search_a_file(store):
    lookup = {"topic": "a", "key": "k1"}
    with open_reader(store) as reader:
        with using(None):
            assert set(reasons(reader.query(**lookup))) == {"no_core"}
        assert set(reasons(reader.query(**lookup))) == {None}
        # the core has no deadline while it searches for many lookups
        timed = reader.query_many([("a", "k1"), ("a", "k2")], timeout_s=60)
        assert set(reasons(timed)) == {"bounds"}
    with open_reader(store, cache_slot_groups=False) as reader:
        # requests are counted, so the core makes none
        assert set(reasons(reader.query(**lookup, max_requests=1_000))) == {"directory"}
        assert set(reasons(reader.query(**lookup, max_requests=1_000))) == {"slot_group"}
        assert set(reasons(reader.query(**lookup))) == {None}


@pytest.fixture(scope="module")
def six_files():
    """The URI of a folder with six files, which have one key."""
    compiled_core()
    with tempfile.TemporaryDirectory() as folder:
        uri = (Path(folder) / "storage").as_uri()
        with IndexService.open(
            root=Path(folder) / "root", storage=uri, environment=False, slots=40, items=400
        ) as index:
            for number in range(6):
                index.put("t", 0, "key", number, 7, T_MS + number * HOUR_MS)
                index.seal()
            index.run_lifecycle()
        yield uri


ASK = {
    "query": lambda reader: reader.query("t", "key"),
    "query_many": lambda reader: reader.query_many([("t", "key"), ("t", "none")]),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_the_core_reads_the_directories_of_files_in_a_folder(six_files, ask):
    with IndexReader.open(six_files, environment=False) as reader:
        answer = ask(reader)
        assert reasons(answer) == {None: 6}
        # the directory, then the slot group
        assert [report.requests for report in answer.explain.files] == [2] * 6
        assert answer.explain.requests == 12
        again = ask(reader)
        assert (reasons(again), again.explain.requests) == ({None: 6}, 0 if ask is ASK["query"] else 6)


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_the_core_leaves_directories_that_are_read_slowly_to_be_read_side_by_side(six_files, ask, monkeypatch):
    original = LocalStorage.open_now

    def slow(self, name, size_bytes):
        time.sleep(0.01)
        return original(self, name, size_bytes)

    monkeypatch.setattr(LocalStorage, "open_now", slow)
    with IndexReader.open(six_files, environment=False) as reader:
        answer = ask(reader)
    assert reasons(answer) == {None: 4, "directory": 2}
    assert [report.requests for report in answer.explain.files] == [2] * 6
