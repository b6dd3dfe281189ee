"""The cache in memory: what it drops, how many bytes it has, and that lookups stay right while it drops files.

The core's files are searched by what the cache has, so a dropped file is closed while lookups of other threads run.
"""

import gc
import random
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cold_index import BASE_MS, cold_index
from tests.support.model import Answer
from tiered_index import IndexReader, Lookup
from tiered_index.base.kernels import compiled_views
from tiered_index.service.read.caches.store import ReadCache
from tiered_index.storage.opening import open_storage

FILES, ENTRIES = 24, 300
MOST = 100


class File:
    """Stands for a file of the compiled core."""

    def __init__(self):
        self.uses, self.is_open = 0, True

    def close(self):
        self.is_open = False


class SegmentedModel:
    """The same rules, with a list of keys for each segment, the one used longest ago first."""

    def __init__(self):
        self.once, self.again, self.sizes, self.unseen = [], [], {}, Counter()
        self.uses = Counter()
        self.hits = self.misses = self.evictions = 0

    def total(self, keys):
        return sum(self.sizes[key] for key in keys)

    def noticed(self, key):
        uses = self.unseen.pop(key, 0)
        self.hits += uses
        self.uses[key] += uses
        return uses > 0

    def use(self, key):
        if key in self.again:
            self.again.remove(key)
            self.again.append(key)
            return
        while self.total(self.again) + self.sizes[key] > MOST * 3 // 4:
            oldest = self.again.pop(0)
            self.noticed(oldest)
            if self.uses[oldest] > self.uses[key]:
                self.uses[oldest] //= 2
                self.again.append(oldest)
                self.once.remove(key)
                self.once.append(key)
                return
            self.uses[oldest] = 0
            self.once.append(oldest)
        self.once.remove(key)
        self.again.append(key)

    def get(self, key):
        if key not in self.sizes:
            self.misses += 1
            return False
        self.hits += 1
        self.uses[key] += 1
        self.use(key)
        return True

    def put(self, key, size):
        if key in self.sizes or size * 4 > MOST:
            return
        chances = len(self.once)
        while self.total(self.sizes) + size > MOST:
            chances -= 1
            if chances >= 0 and self.noticed(self.once[0]):
                self.use(self.once[0])
                continue
            dropped = self.once.pop(0)
            self.noticed(dropped)
            del self.sizes[dropped], self.uses[dropped]
            self.evictions += 1
        self.sizes[key] = size
        self.once.append(key)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.integers(0, 15)),
        st.tuples(st.just("put"), st.integers(0, 15), st.integers(1, 30)),
        st.tuples(st.just("core"), st.integers(0, 15), st.integers(1, 3)),
    ),
    max_size=80,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_the_cache_drops_what_a_model_of_two_lists_drops(steps):
    cache, model = ReadCache(MOST), SegmentedModel()
    kind, files = cache.directories, {}
    for name, key, *more in steps:
        if name == "get":
            assert (kind.get(key) is not None) == model.get(key)
        elif name == "put":
            value = SimpleNamespace(key=key)
            was_cached = key in model.sizes
            assert kind.put(key, value, *more) is (more[0] * 4 <= MOST)
            model.put(key, *more)
            if not was_cached and key in model.sizes:
                files[key] = File()
                assert kind.attach(key, value, files[key])
                model.hits += 1
                model.uses[key] += 1
                model.use(key)
        elif key in model.sizes:
            files[key].uses += more[0]
            model.unseen[key] += more[0]
        assert {known for known in range(16) if kind.peek(known) is not None} == set(model.sizes)
        assert cache.size_bytes == kind.size_bytes == model.total(model.sizes) <= MOST
        # what the cache has dropped, the core has no more
        assert all(file.is_open is (known in model.sizes) for known, file in files.items())
    assert (kind.misses, kind.evictions, len(kind)) == (model.misses, model.evictions, len(model.sizes))
    # also the uses that the cache has not looked at
    assert kind.use().hits == model.hits + sum(model.unseen.values())


def test_all_kinds_share_the_bound_and_a_large_value_is_not_cached():
    cache = ReadCache(MOST)
    assert cache.slot_groups.put(("i", "o", 0), b"", 25) and not cache.slot_groups.put(("i", "o", 1), b"", 26)
    for number in range(4):
        assert cache.filters.put(("i", str(number)), b"", 25)
    assert len(cache.slot_groups) == 0 and cache.slot_groups.evictions == 1
    assert cache.size_bytes == MOST and not cache.has_room(1)
    cache.clear()
    assert cache.size_bytes == 0 == len(cache.filters) and cache.has_room(MOST)


def test_values_that_are_used_often_stay_while_others_are_used_in_turn():
    """Others are used again, too, but less often."""
    cache = ReadCache(MOST)

    def ask(name):
        if cache.directories.get(("i", name)) is None:
            cache.directories.put(("i", name), SimpleNamespace(), 5)
            return False
        return True

    stayed = []
    for turn in range(30):
        stayed += [ask(f"hot {hot}") for _ in range(3) for hot in range(10)]
        for number in range(40):
            ask(f"{number if turn % 2 else 39 - number}")
    assert sum(stayed[300:]) == 600


def test_a_value_that_is_dropped_before_it_is_attached_is_not_attached():
    cache, file, value = ReadCache(MOST), File(), SimpleNamespace()
    cache.directories.put(("i", "o"), value, 5)
    cache.clear()
    assert not cache.directories.attach(("i", "o"), value, file)
    cache.directories.put(("i", "o"), SimpleNamespace(), 5)
    assert not cache.directories.attach(("i", "o"), value, file)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=ENTRIES, slots=40)


@pytest.fixture(scope="module")
def folder(index, tmp_path_factory):
    """The URI of a folder with the same objects, which the core reads by itself."""
    uri = (tmp_path_factory.mktemp("folder") / "storage").as_uri()
    with open_storage(uri) as storage:
        for stored in list(index.inner.list()):
            storage.put(stored.name, index.inner.get(stored.name))
    return uri


def bytes_of(index, number=0):
    stored = index.stored[number]
    return stored.size_bytes - stored.directory_position + stored.filter_length


@pytest.mark.parametrize("in_folder", [False, True], ids=["memory", "folder"])
def test_lookups_of_threads_stay_right_while_the_cache_drops_files(index, folder, in_folder):
    """Room for 6 files of 24. Threads ask for one key or many, and another one closes files."""
    limit = 6 * max(map(bytes_of, [index] * FILES, range(FILES)))
    keys = [f"k{file}-{n}" for file in range(FILES) for n in range(0, ENTRIES - 1, 37)] + ["absent", "nobody"]
    expected = {key: index.expected("t", key) for key in keys}
    over = []
    done = threading.Event()
    settings = {"read_cache_bytes": limit, "filter_after_probes": 1, "refresh_interval_s": 10**6}
    with IndexReader.open(folder, **settings) if in_folder else index.reader(**settings) as reader:
        cold = reader._cold_paths[0]

        def watch():
            while not done.is_set():
                for name, file in list(cold.core_files.items()):
                    if cold.caches.size_bytes > limit:
                        over.append(cold.caches.size_bytes)
                    if hash(name) % 5 == 0:
                        # as the cache does when it drops the directory
                        file.close()

        def ask(seed):
            random_ = random.Random(seed)
            for turn in range(20):
                key = random_.choice(keys)
                begin = BASE_MS + random_.randrange(FILES) * 10_000_000
                assert [Answer.of(item) for item in reader.query("t", key)] == expected[key], key
                some = index.expected("t", key, begin_ms=begin)
                assert [Answer.of(item) for item in reader.query("t", key, begin)] == some, key
                if turn % 5 == 0:
                    chosen = random_.sample(keys, 20)
                    answers = reader.query_many([Lookup("t", each_key) for each_key in chosen])
                    assert [[Answer.of(item) for item in answer] for answer in answers] == [
                        expected[each_key] for each_key in chosen
                    ]

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(6) as pool:
                list(pool.map(ask, range(6)))
        finally:
            done.set()
            watcher.join()
        uses = reader.cache_use()
        assert uses["directories"].evictions > FILES and uses["filters"].evictions > 0
        assert not over and sum(use.size_bytes for use in uses.values()) == cold.caches.size_bytes <= limit


@pytest.mark.skipif(compiled_views() is None, reason="needs the compiled core")
def test_a_file_that_the_cache_drops_is_closed_and_its_bytes_are_freed(index):
    with index.reader(cache_slot_groups=False) as reader:
        for _ in range(3):
            for file in range(FILES):
                assert len(reader.query("t", f"k{file}-1")) == 1
        cold = reader._cold_paths[0]
        caches, files = cold.caches, list(cold.core_files.values())
        assert len(files) == FILES and all(file.is_open and file.has_filter for file in files)
        assert sum(file.size_bytes for file in files) <= caches.size_bytes
        key = (cold._index_id, index.stored[0].name)
        # an object of a filter refers to nothing, so count the references in its place
        filter_bytes, directory = caches.filters.peek(key), weakref.ref(caches.directories.peek(key).directory.groups)
        # those of the cache, of the core, and of this test
        assert sys.getrefcount(filter_bytes) - 2 == 2
        caches.clear()
        gc.collect()
        assert sys.getrefcount(filter_bytes) - 2 == 0 and directory() is None
        assert not any(file.is_open or file.has_filter or file.size_bytes for file in files)
        assert caches.size_bytes == 0
        # and lookups read them again
        assert len(reader.query("t", "k0-1")) == 1


def test_explain_and_the_use_of_the_cache_count_what_it_saved(index):
    with index.reader() as reader:
        first, again = (reader.query("t", "all", max_count=FILES) for _ in range(2))
        assert (first.explain.files_read, first.explain.files_cached) == (FILES, 0)
        before = reader.cache_use()
        third = reader.query("t", "all", max_count=FILES)
        after = reader.cache_use()
        for answer in (again, third):
            assert (answer.explain.files_read, answer.explain.files_cached, answer.explain.requests) == (
                FILES,
                FILES,
                0,
            )
            assert answer.explain.to_dict()["files_cached"] == FILES
        hits = {name: after[name].hits - before[name].hits for name in after}
        assert hits["directories"] == hits["filters"] == hits["slot_groups"] == FILES
        assert all(after[name].misses == before[name].misses for name in after)


def test_a_hot_range_stays_in_the_cache_while_other_lookups_ask_all_files(index):
    """Room for 8 files of 24; three are hot."""
    limit = 8 * max(map(bytes_of, [index] * FILES, range(FILES)))
    hot = BASE_MS, BASE_MS + 3 * 10_000_000 - 1
    costs = []
    with index.reader(read_cache_bytes=limit, cache_slot_groups=False) as reader:
        for turn in range(40):
            assert len(reader.query("t", f"nobody {turn}")) == 0
            for number in range(6):
                answer = reader.query("t", f"k{number % 3}-{turn}", *hot)
                assert len(answer) == 1
                # a slot group, and those of filters that err: nothing that the cache should have
                costs.append(answer.explain.requests - sum(file.outcome == "read" for file in answer.explain.files))
        assert sum(costs[60:]) == 0
        # the other lookups have to read files
        assert reader.cache_use()["directories"].evictions > 100
