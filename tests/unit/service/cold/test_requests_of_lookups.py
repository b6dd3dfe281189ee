"""The requests of lookups: one per file with a known directory, none if a filter excludes the key or no range meets it.

If the directory is unknown, a lookup makes one request if the file lacks the key, otherwise two. Idle threads read
parts of a range with many gaps.
"""

import random

import pytest

from tests.support.cold_index import Read, cold_index
from tests.support.model import Answer
from tiered_index import Lookup
from tiered_index.service.read.caches.store import Filters
from tiered_index.service.read.files.cold_path import ColdPath


@pytest.fixture(scope="module", params=["native", "rocketmq"])
def index(request, tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=10, preset=request.param)


@pytest.fixture(autouse=True)
def _forget(request):
    if "index" in request.fixturenames:
        index = request.getfixturevalue("index")
        index.storage.reset()


def groups(index):
    """Return the reads of slot groups: object and range."""
    ends = {stored.name: stored.trailer_position for stored in index.stored}
    return [(r.name, r.start, r.length) for r in index.storage.reads if r.start < ends[r.name]]


def ends(index):
    """Return the range of each file that has its filter and its directory."""
    return [Read(o.name, o.trailer_position, o.size_bytes - o.trailer_position) for o in index.stored]


def absent_keys(index):
    """Return keys that the filters of all files exclude."""
    with index.reader(cache_slot_groups=False) as reader:
        reader.query("t", "all")
        keys = [f"absent{n}" for n in range(100)]
        return [key for key in keys if not reader.query("t", key).explain.requests]


@pytest.mark.parametrize("many", [False, True], ids=["query", "query_many"])
@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_the_first_lookup_of_an_absent_key_makes_one_request_per_file(index, tmp_path, many, local):
    """Directory and filter come by one range. Later lookups of absent keys make none."""
    absent = absent_keys(index)

    def ask(reader, keys):
        index.storage.reset()
        if not many:
            return [reader.query("t", key) for key in keys]
        return list(reader.query_many([Lookup(topic="t", key=key) for key in keys]))

    cache = tmp_path / "cache" if local else None
    with index.reader(cache_dir=cache) as reader:
        assert not any(map(len, ask(reader, absent[: 9 if many else 1])))
        assert sorted(index.storage.reads, key=str) == sorted(ends(index), key=str)
        ask(reader, absent[9:])
        assert index.storage.operations == []
    with index.reader(cache_dir=cache) as reader:
        (answer,) = ask(reader, ["k4-7"])
        assert [Answer.of(item) for item in answer] == index.expected("t", "k4-7")
        # a filter may admit a key that its file lacks
        assert 1 <= len(groups(index)) <= 2
        assert len(index.storage.reads) == len(groups(index)) + (0 if local else len(index.stored))


def test_large_filters_and_listings_of_topics_read_the_directory_alone(index):
    with index.reader(coalesce_gap_bytes=index.stored[0].filter_length - 1) as reader:
        index.storage.reset()
        assert len(reader.query("t", "absent")) == 0
        assert not set(index.storage.reads) & set(ends(index))
    with index.reader() as reader:
        index.storage.reset()
        reader.topics()
        assert {read.start for read in index.storage.reads} == {stored.directory_position for stored in index.stored}


@pytest.mark.usefixtures("large_filters")
def test_a_topic_that_a_known_file_does_not_hold_costs_nothing(index):
    with index.reader() as reader:
        reader.query("t", "all")
        index.storage.reset()
        answer = reader.query("elsewhere", "all")
        assert (len(answer), answer.status, index.storage.reads) == (0, "complete", [])
        assert {report.outcome for report in answer.explain.files} == {"skipped_topic"}


@pytest.mark.usefixtures("large_filters")
def test_keys_that_are_there_make_no_filter_due(index):
    begin_ms = index.stored[4].second_min * 1000
    with index.reader(cache_slot_groups=False, filter_after_probes=1) as reader:
        # no entry in another second does not mean that the file lacks the key
        for requests, end_ms in ((2, begin_ms + 39_000), (1, begin_ms), (1, begin_ms), (1, begin_ms + 39_000)):
            assert reader.query("t", "k4-7", begin_ms, end_ms).explain.requests == requests


def test_a_batch_leaves_out_files_that_no_range_meets(index):
    within = [(stored.second_min * 1000, stored.second_max * 1000) for stored in (index.stored[0], index.stored[-1])]
    with index.reader() as reader:
        for requests in (4, 0):
            answers = reader.query_many([Lookup("t", "all", *span) for span in within])
            assert (answers.counts.tolist(), answers.explain.requests) == ([1, 1], requests)
            assert {report.outcome for report in answers.explain.files} == {"read", "skipped_time"}


def test_a_batch_tests_a_filter_only_for_the_lookups_that_a_view_leaves(index, monkeypatch):
    lookups = [("t", f"k{file}-{number}") for file in range(len(index.stored)) for number in range(10)]
    tested: list[int] = []
    excludes_many = Filters.excludes_many

    def counted(filters, stored, hashes, **more):
        tested.append(len(hashes))
        return excludes_many(filters, stored, hashes, **more)

    monkeypatch.setattr(Filters, "excludes_many", counted)
    with index.reader(cache_slot_groups=False) as reader:
        reader.query_many(lookups)
        # directories and filters were not known
        assert max(tested) == len(lookups)
        tested.clear()
        assert reader.query_many(lookups).counts.tolist() == [1] * len(lookups)
    # 10 of each file, and a few by chance
    assert max(tested) in range(1, 13)


ENTRIES = 120_000
GAP = 256 << 10
ASKED = [Lookup(topic="t", key=f"k0-{number}") for number in random.Random(3).sample(range(ENTRIES - 1), 100)]


@pytest.fixture(scope="module")
def gappy(tmp_path_factory):
    """A file with MiB of gaps between the slot groups of `ASKED`."""
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=1, entries=ENTRIES, slots=30_000)


def cost(gappy, lookups=ASKED, limits=None, **settings):
    """Return requests, bytes, and those between slot groups of one batch. Directories are known."""
    with gappy.reader(cache_slot_groups=False, **settings) as reader:
        reader.query("t", "k0-1")
        gappy.storage.reset()
        answers = reader.query_many(lookups, **(limits or {}))
        assert answers.counts.tolist() == [1] * len(lookups)
    explain = answers.explain
    assert (explain.requests, explain.bytes) == (len(gappy.storage.reads), gappy.storage.asked_bytes)
    return explain.requests, explain.bytes, sum(report.gap_bytes for report in explain.files)


def test_a_batch_of_few_of_a_files_keys_skips_its_largest_gaps(gappy):
    needed = cost(gappy, coalesce_gap_bytes=0)[1]
    requests, size, gaps = cost(gappy, coalesce_gap_bytes="price")
    assert (requests, size - gaps) == (1, needed)
    cuts = gaps // GAP
    assert 2 <= cuts < 31
    measured = cost(gappy)
    assert (measured[0], measured[1] - measured[2]) == (1 + cuts, needed)
    # each of these gaps is larger than the mean
    assert measured[1] < size - cuts * gaps / len(ASKED)


def test_a_batch_holds_no_bytes_between_the_slot_groups_that_it_asks_for(gappy, monkeypatch):
    """A thousand keys held 34 MB for 4 MB of slot groups."""
    needed, held = cost(gappy, coalesce_gap_bytes=0)[1], []
    verified = ColdPath.verified

    def held_after(*arguments):
        pieces = verified(*arguments)
        held.extend({id(piece.obj): len(piece.obj) for piece in pieces}.values())
        return pieces

    monkeypatch.setattr(ColdPath, "verified", held_after)
    assert cost(gappy, coalesce_gap_bytes="price")[2] > needed
    # without the lookup that made the directory known
    assert sum(held[1:]) == needed


def test_only_idle_threads_and_few_requests_of_a_bound_are_used(gappy):
    whole = cost(gappy, coalesce_gap_bytes="price")
    assert cost(gappy, query_threads=1) == whole
    assert cost(gappy, query_threads=3)[0] == 3
    assert cost(gappy, limits={"max_requests": 31}) == whole
    assert cost(gappy, limits={"max_requests": 64})[0] == 3
