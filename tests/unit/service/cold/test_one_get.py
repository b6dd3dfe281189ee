"""A lookup makes one request per file with a known directory, and none if a filter excludes the key.

If the directory is unknown, it makes one request if the file lacks the key, otherwise two.
"""

import pytest

from tests.support.cold_index import Read, cold_index, spoiled
from tests.support.model import Answer
from tiered_index import Lookup


@pytest.fixture(scope="module", params=["native", "rocketmq"])
def made(request, tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=10, preset=request.param)


@pytest.fixture(autouse=True)
def _forget(made):
    made.storage.reset()


def groups(made):
    """Return the reads of slot groups: object and range."""
    ends = {stored.name: stored.trailer_position for stored in made.stored}
    return [(r.name, r.start, r.length) for r in made.storage.reads if r.start < ends[r.name]]


def ends(made):
    """Return the range of each file that has its filter and its directory."""
    return [Read(o.name, o.trailer_position, o.size_bytes - o.trailer_position) for o in made.stored]


def absent_keys(made):
    """Return keys that the filters of all files exclude."""
    with made.reader(block_cache_bytes=0) as reader:
        reader.query("t", "all")
        keys = [f"absent{n}" for n in range(100)]
        return [key for key in keys if not reader.query("t", key).explain.requests]


@pytest.mark.parametrize("many", [False, True], ids=["query", "query_many"])
@pytest.mark.parametrize("local", [False, True], ids=["memory", "cache_dir"])
def test_the_first_lookup_of_an_absent_key_makes_one_request_per_file(made, tmp_path, many, local):
    """Directory and filter come by one range. Later lookups of absent keys make none."""
    absent = absent_keys(made)

    def ask(reader, keys):
        made.storage.reset()
        if not many:
            return [reader.query("t", key) for key in keys]
        return list(reader.query_many([Lookup(topic="t", key=key) for key in keys]))

    cache = tmp_path / "cache" if local else None
    with made.reader(cache_dir=cache) as reader:
        assert not any(map(len, ask(reader, absent[: 9 if many else 1])))
        assert sorted(made.storage.reads, key=str) == sorted(ends(made), key=str)
        ask(reader, absent[9:])
        assert made.storage.operations == []
    with made.reader(cache_dir=cache) as reader:
        (found,) = ask(reader, ["k4-7"])
        assert [Answer.of(item) for item in found] == made.expected("t", "k4-7")
        # a filter may admit a key that its file lacks
        assert 1 <= len(groups(made)) <= 2
        assert len(made.storage.reads) == len(groups(made)) + (0 if local else len(made.stored))


def test_a_filter_larger_than_a_gap_does_not_come_with_the_directory(made):
    with made.reader(coalesce_gap_bytes=made.stored[0].filter_length - 1) as reader:
        made.storage.reset()
        assert len(reader.query("t", "absent")) == 0
        assert not set(made.storage.reads) & set(ends(made))


def test_a_listing_of_topics_reads_no_filter(made):
    with made.reader() as reader:
        made.storage.reset()
        reader.topics()
        assert {read.start for read in made.storage.reads} == {stored.directory_position for stored in made.stored}


def test_a_damaged_filter_that_comes_with_its_directory_is_ignored(made):
    spoilt = made.stored[3]

    def spoil(data):
        for at in range(spoilt.trailer_position, spoilt.directory_position):
            data[at] ^= 0xFF

    with made.reader() as reader, spoiled(made, spoilt.name, spoil):
        for key in ("k3-7", "all", "absent"):
            assert [Answer.of(item) for item in reader.query("t", key)] == made.expected("t", key)


def test_a_fresh_reader_pays_one_exact_range_more_a_file_once(made):
    with made.reader() as reader:
        made.storage.reset()
        first = reader.query("t", "all")
        assert [Answer.of(item) for item in first] == made.expected("t", "all")
        directories = ends(made)
        reads = list(made.storage.reads)
        assert sorted(r.name for r in reads) == sorted(2 * [o.name for o in made.stored])
        assert [r for r in reads if r in directories] and all(directory in reads for directory in directories)
        assert (first.explain.requests, first.explain.bytes) == (20, made.storage.asked_bytes)
        assert made.storage.operations == ["get_range"] * 20
        made.storage.reset()
        # another key is in other groups, and the files' directories are known
        for file in (0, 9, 4):
            made.storage.reset()
            found = reader.query("t", f"k{file}-7")
            assert [Answer.of(item) for item in found] == made.expected("t", f"k{file}-7")
            touched = [(report.file, report.requests) for report in found.explain.files if report.requests]
            assert all(requests == 1 for _, requests in touched)
            assert len(groups(made)) == len(made.storage.reads) == found.explain.requests
            assert len(set(groups(made))) == len(groups(made))


@pytest.mark.usefixtures("large_filters")
def test_a_topic_that_a_known_file_does_not_hold_costs_nothing(made):
    with made.reader() as reader:
        reader.query("t", "all")
        made.storage.reset()
        answer = reader.query("elsewhere", "all")
        assert (len(answer), answer.status, made.storage.reads) == (0, "complete", [])
        assert {report.outcome for report in answer.explain.files} == {"skipped_topic"}
