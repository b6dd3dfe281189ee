"""A lookup makes one request per file with a known directory, two if it is unknown, and none if a filter excludes the
key.
"""

import pytest

from tests.support.cold_index import Read, cold_index
from tests.support.model import Answer


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


def test_a_fresh_reader_pays_one_exact_range_more_a_file_once(made):
    with made.reader() as reader:
        made.storage.reset()
        first = reader.query("t", "all")
        assert [Answer.of(item) for item in first] == made.expected("t", "all")
        directories = [Read(o.name, o.directory_position, o.size_bytes - o.directory_position) for o in made.stored]
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


def test_a_topic_that_a_known_file_does_not_hold_costs_nothing(made):
    with made.reader() as reader:
        reader.query("t", "all")
        made.storage.reset()
        answer = reader.query("elsewhere", "all")
        assert (len(answer), answer.status, made.storage.reads) == (0, "complete", [])
        assert {report.outcome for report in answer.explain.files} == {"skipped_topic"}
