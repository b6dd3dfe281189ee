"""Records that link files: a change that another one overtakes is made again, and catalogs of others stay."""

import pytest
from msgspec import structs

from tiered_index import IndexService
from tiered_index.errors import InvalidArgument
from tiered_index.format.names import linked_store
from tiered_index.format.segment import LinkedSegment
from tiered_index.service.jobs import linking

STORE = linked_store("t", 0)


def segment(number):
    return LinkedSegment(f"file:///{number}.log", STORE, number * 10, 10, "ndjson", 10, f"1-{number}-0-00000000", 5, 0)


@pytest.fixture
def index(tmp_path):
    with IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/objects") as opened:
        yield opened


def linked(index):
    return list(index.segment_archive.segments().of_log(STORE))


def test_a_change_that_another_one_overtakes_is_made_again(index, monkeypatch):
    first, second = segment(0), segment(1)
    index.link([structs.replace(first, is_open=True), structs.replace(second, is_open=True)])
    session, send = index._session, linking.send_catalog
    calls = []

    def overtaken(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            linking.link(session.log, session.epoch, [], [first])
        return send(*arguments)

    monkeypatch.setattr(linking, "send_catalog", overtaken)
    linking.link(session.log, session.epoch, [], [second])
    # its own, that of the other change, and its own again
    assert (linked(index), len(calls)) == ([first, second], 3)


def test_a_change_of_two_catalogs_leaves_the_one_between_them(index):
    segments = [segment(number) for number in range(3)]
    for each in segments:
        index.link([structs.replace(each, is_open=True)])
    index.link([], [segments[0]], [segments[2].place])
    assert linked(index) == [segments[0], structs.replace(segments[1], is_open=True)]
    with pytest.raises(InvalidArgument, match="no segment begins at"):
        index.link([], [segments[2]])
