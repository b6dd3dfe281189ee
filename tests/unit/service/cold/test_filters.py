"""The writer keeps filters. Readers fetch a large filter after misses, into memory or a local cache.

A damaged or wrong filter changes no answer. If the cache has no room for all filters, one replaces others only after
enough misses.
"""

import shutil

import pytest

from tests.support.cold_index import Read, cold_index, gone, spoiled
from tests.support.hanging import until
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tiered_index import Lookup
from tiered_index.errors import CorruptFile, IndexClosed, InvalidArgument, ObjectNotFound, StorageUnavailable
from tiered_index.format.keys.bloom import block_may_hold, block_number, filter_hash
from tiered_index.format.keys.hashing import fingerprint, key_hash
from tiered_index.service.read.caches import store as filters_module
from tiered_index.service.read.caches.disk import CacheFolder

pytestmark = pytest.mark.usefixtures("large_filters")
FILES = 3
PROBES = 4


@pytest.fixture(scope="module", params=["native", pytest.param("rocketmq", marks=pytest.mark.long)])
def index(request, tmp_path_factory):
    """Files of one slot group each, so that a lookup of an absent key reads it."""
    return cold_index(
        tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=200, slots=50, preset=request.param
    )


@pytest.fixture(autouse=True)
def _forget(request):
    if "index" in request.fixturenames:
        index = request.getfixturevalue("index")
        index.storage.reset()


def held(index, key):
    """Return for each file, oldest first, whether its stored filter admits a key."""
    answers = []
    for stored in index.stored:
        hash64 = filter_hash(key_hash("t", key, stored.hash), fingerprint("t", key) if index.model.keyed else 0)
        data = index.inner.get_range(stored.name, stored.trailer_position, stored.filter_length)
        at = 32 * block_number(hash64, len(data) // 32)
        answers.append(block_may_hold(data[at : at + 32], hash64))
    return answers


@pytest.fixture(scope="module")
def absent(index):
    """Keys that every filter excludes."""
    return [key for key in (f"absent{n}" for n in range(400)) if not any(held(index, key))][:200]


@pytest.fixture(scope="module")
def mistaken(index):
    """An absent key that one filter admits."""
    return next(key for key in (f"nowhere{n}" for n in range(5000)) if sum(held(index, key)) == 1)


def filter_reads(index):
    places = {Read(o.name, o.trailer_position, o.filter_length) for o in index.stored}
    return [read.name for read in index.storage.reads if read in places]


def check_present(index, reader):
    for key in ("all", *(f"k{file}-{n}" for file in range(FILES) for n in range(0, 199, 23))):
        assert [Answer.of(item) for item in reader.query("t", key)] == index.expected("t", key), key


def test_the_writer_keeps_the_filters_that_it_uploads(index, absent):
    """The files have no local copies, and the writer was opened again."""
    with index.writer() as writer:
        index.storage.reset()
        for key in absent:
            answer = writer.query("t", key)
            assert (len(answer), answer.status, answer.explain.requests) == (0, "complete", 0)
            assert [report.outcome for report in answer.explain.files] == ["skipped_filter"] * FILES
        assert all(writer.fetch_filter(stored.file_id) for stored in index.stored)
        assert index.storage.operations == []
        for n in range(0, 199, 23):
            index.storage.reset()
            assert len(writer.query("t", f"k1-{n}")) == 1
            # no directory, because the writer keeps it, too
            assert len(index.storage.reads) <= sum(held(index, f"k1-{n}"))


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_a_reader_fetches_a_filter_after_probes_in_vain(index, absent, mistaken, tmp_path, local):
    cache = tmp_path / "cache" if local else None
    with index.reader(filter_after_probes=PROBES, cache_dir=cache, cache_slot_groups=False) as reader:
        for number, key in enumerate(absent):
            index.storage.reset()
            answer = reader.query("t", key)
            assert (len(answer), answer.status) == (0, "complete")
            if number < PROBES:
                assert filter_reads(index) == [] and answer.explain.requests == FILES * (2 if number == 0 else 1)
            elif number == PROBES:
                # the filter is read in place of the group, not in addition
                assert answer.explain.requests == FILES
                assert sorted(filter_reads(index)) == sorted(o.name for o in index.stored)
            else:
                assert index.storage.operations == []
                assert {report.outcome for report in answer.explain.files} == {"skipped_filter"}
        check_present(index, reader)
        # a filter that admits a key in vain is not fetched again and again
        index.storage.reset()
        for _ in range(2 * PROBES):
            answer = reader.query("t", mistaken)
            assert (len(answer), answer.explain.requests) == (0, 1)
        assert filter_reads(index) == []


def test_a_damaged_filter_is_passed_over(index, absent):
    """Lookups read the files in place of the filter."""
    stored = index.stored[1]
    size = stored.filter_length
    for at in (stored.trailer_position + n for n in (0, 7, size // 2, size - 1)):
        with spoiled(index, stored.name, lambda data, at=at: data.__setitem__(at, 255 ^ data[at])):
            with index.reader(filter_after_probes=1, cache_slot_groups=False) as reader:
                for key in absent[:4]:
                    answer = reader.query("t", key)
                    assert (len(answer), answer.status) == (0, "complete")
                check_present(index, reader)
                outcomes = {report.file: report.outcome for report in reader.query("t", absent[9]).explain.files}
                assert outcomes[stored.file_id] == "read" and set(outcomes.values()) == {"read", "skipped_filter"}


def test_a_filter_that_cannot_be_fetched_fails_no_lookup(index, absent):
    faulty = FaultStorage(index.inner)
    with index.reader(storage=faulty, filter_after_probes=1, cache_slot_groups=False) as reader:
        reader.query("t", absent[0])
        for stored in index.stored:
            faulty.fail("get_range", name_prefix=stored.name)  # the next read of each file is of its filter
        answer = reader.query("t", absent[1])
        assert (len(answer), answer.status) == (0, "complete")
        # the next lookup for which the filter is due tries again
        faulty.clear()
        reader.query("t", absent[2])
        assert reader.query("t", absent[3]).explain.requests == 0


@pytest.mark.parametrize("limits", [{"timeout_s": 10.0}, {"max_requests": 5}], ids=["deadline", "requests"])
def test_a_lookup_with_limits_has_the_filter_fetched_for_later_lookups(index, absent, limits):
    stored = index.stored[0]
    second = stored.second_min * 1000, stored.second_max * 1000
    with index.reader(filter_after_probes=2, cache_slot_groups=False) as reader:
        costs = [reader.query("t", key, *second, **limits).explain.requests for key in absent[:3]]
        assert costs[1:] == [1, 1]  # no lookup counts the fetch
        until(lambda: reader.query("t", absent[3], *second, **limits).explain.requests == 0)


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_a_filter_is_fetched_on_demand(index, absent, tmp_path, local):
    cache = tmp_path / "cache" if local else None
    with index.reader(filter_after_probes=10**6, cache_dir=cache, cache_slot_groups=False) as reader:
        reader.query("t", "all")
        for stored in index.stored:
            index.storage.reset()
            assert reader.fetch_filter(stored.file_id) is reader.fetch_filter(stored.file_id) is True
            assert index.storage.reads == [Read(stored.name, stored.trailer_position, stored.filter_length)]
        index.storage.reset()
        for key in absent[:20]:
            answer = reader.query("t", key)
            assert (len(answer), answer.status, answer.explain.requests) == (0, "complete", 0)
        check_present(index, reader)
    with pytest.raises(IndexClosed, match="closed"):
        reader.fetch_filter(index.stored[0].file_id)


def test_a_filter_on_demand_that_cannot_be_fetched_raises_the_error(index):
    stored = index.stored[0]
    faulty = FaultStorage(index.inner)
    with index.reader(storage=faulty) as reader:
        for unknown in ("nowhere", "", stored.name, None, ["k"]):
            with pytest.raises(InvalidArgument):
                reader.fetch_filter(unknown)
        assert faulty.calls("get_range") == 0
        with spoiled(index, stored.name, lambda data: data.__setitem__(stored.trailer_position, 255)):
            with pytest.raises(CorruptFile, match=f"{stored.name}.*filter's CRC32"):
                reader.fetch_filter(stored.file_id)
        faulty.fail("get_range", name_prefix=stored.name)
        with pytest.raises(StorageUnavailable):
            reader.fetch_filter(stored.file_id)
        faulty.clear()
        with gone(index, stored.name), pytest.raises(ObjectNotFound):
            reader.fetch_filter(stored.file_id)
        assert reader.fetch_filter(stored.file_id)


MANY_FILES = 12
ROOM = 4
MANY_PROBES = 3


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("root"), files=MANY_FILES, entries=6000, slots=6000)


def crowded_reader(crowded, cache, storage=None):
    """Return a reader with room for the filters of four files, in memory or on the disk."""
    size = crowded.stored[0].filter_length
    directory = crowded.stored[0].size_bytes - crowded.stored[0].directory_position
    settings = {"read_cache_bytes": MANY_FILES * directory + ROOM * size + size // 2}
    if cache is not None:
        settings["cache_max_bytes"] = int((ROOM * size * 1.01 + MANY_FILES * directory * 1.1 + size / 2) / 0.9)
    settings |= {"cache_dir": cache, "filter_after_probes": MANY_PROBES, "cache_slot_groups": False}
    return crowded.reader(storage, **settings)


def ask(crowded, reader, first, stop, count, name):
    """Look up `count` absent keys in the files from `first` to before `stop`.

    Return the names of the objects whose filters were fetched, and the number of requests.
    """
    crowded.storage.reset()
    span = crowded.stored[first].second_min * 1000, crowded.stored[stop - 1].second_max * 1000
    for number in range(count):
        assert len(reader.query("t", f"{name}{number}", *span)) == 0
    places = {Read(o.name, o.trailer_position, o.filter_length) for o in crowded.stored}
    return [read.name for read in crowded.storage.reads if read in places], len(crowded.storage.reads)


@pytest.mark.parametrize("misses", [20, 1600])
@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_filters_in_place_of_others_cost_no_more_bytes_than_misses(crowded, tmp_path, monkeypatch, local, misses):
    """The test looks up in two groups of files in turn. Each group has as many filters as fit."""
    # otherwise this small filter has only half the bytes of a miss; one of 20,000,000 keys costs as much as 1,600
    monkeypatch.setattr(filters_module, "_MISS_BYTES", crowded.stored[0].filter_length / misses)
    with crowded_reader(crowded, tmp_path / "cache" if local else None) as reader:
        ask(crowded, reader, 0, MANY_FILES, 1, "directories")
        fetched, reads = 0, MANY_FILES
        for turn in range(24):
            first = turn % 2 * ROOM
            of_turn, requests = ask(crowded, reader, first, first + ROOM, 2 * MANY_PROBES, f"turn{turn}-")
            fetched, reads = fetched + len(of_turn), reads + requests - len(of_turn)
            # a false positive of a cached filter is not a miss, so these counts are upper bounds
            assert ROOM <= fetched <= ROOM + reads / misses
            assert fetched <= reads / MANY_PROBES
        assert (fetched > ROOM) is (misses == 20)


@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_a_filter_of_more_than_a_quarter_of_its_cache_is_not_fetched(index, absent, tmp_path, local):
    length = max(stored.filter_length for stored in index.stored)
    cache = tmp_path / "cache" if local else None
    settings = {"cache_dir": cache, "filter_after_probes": 1, "cache_slot_groups": False}
    for more, requests in ((4, 0), (4 - 2 / length, FILES)):
        with index.reader(read_cache_bytes=int(more * length), **settings) as reader:
            index.storage.reset()
            for key in absent[:6]:
                answer = reader.query("t", key)
                assert (len(answer), answer.status) == (0, "complete")
            assert answer.explain.requests >= requests and bool(filter_reads(index)) is (requests == 0)
            assert reader.fetch_filter(index.stored[0].file_id) is (requests == 0)
            check_present(index, reader)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_a_cached_filter_is_read_once_from_the_disk_and_whole(index, absent, tmp_path, monkeypatch):
    with index.reader(cache_dir=tmp_path / "cache", filter_after_probes=1) as reader:
        assert all(reader.fetch_filter(stored.file_id) for stored in index.stored)
    read, lengths = CacheFolder.read, []

    def noted(folder, name, kind, length):
        lengths.extend([length] if kind == "filter" else [])
        return read(folder, name, kind, length)

    monkeypatch.setattr(CacheFolder, "read", noted)
    with index.reader(cache_dir=tmp_path / "cache", filter_after_probes=10**6) as reader:
        index.storage.reset()
        for key in absent[:20]:
            assert (len(reader.query("t", key)), index.storage.operations) == (0, [])
        many = reader.query_many([Lookup("t", key) for key in absent[20:60]])
        assert not any(map(len, many)) and index.storage.operations == []
        assert sorted(lengths) == sorted(stored.filter_length for stored in index.stored)
        check_present(index, reader)


def test_the_filters_request_also_reports_a_lost_object(index, absent):
    name = index.stored[2].name
    with index.reader(filter_after_probes=1) as reader:
        reader.query("t", absent[0])
        with gone(index, name), pytest.raises(CorruptFile, match=name):
            reader.query("t", absent[1])
