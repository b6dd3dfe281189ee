"""Records that link files: a change that another one overtakes is made again, and catalogs of others stay."""

import pytest
from msgspec import structs

from tests.support.log_records import GENESIS
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.names import CATALOG_PREFIX, linked_store
from tiered_index.format.segments.segment import ArchivedSegment, LinkedSegment
from tiered_index.service.jobs.segments import catalogs, linking
from tiered_index.service.jobs.segments.catalogs import names_removed_by, send_catalog
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.storage.memory import MemoryStorage

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
    session, send = index._session, catalogs.send_catalog
    calls = []

    def overtaken(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            linking.link(session.log, session.epoch, [], [first])
        return send(*arguments)

    monkeypatch.setattr(catalogs, "send_catalog", overtaken)
    linking.link(session.log, session.epoch, [], [second])
    # its own, that of the other change, and its own again
    assert (linked(index), len(calls)) == ([first, second], 3)


def test_a_link_that_is_refused_leaves_no_catalog(index, monkeypatch):
    """Another job gives the same offsets between the sending of the catalog and its record."""
    session, send = index._session, catalogs.send_catalog

    def overtaken(*arguments):
        sent = send(*arguments)
        monkeypatch.setattr(catalogs, "send_catalog", send)
        linking.link(session.log, session.epoch, [segment(0)], [])
        return sent

    monkeypatch.setattr(catalogs, "send_catalog", overtaken)
    with pytest.raises(StorageUnavailable, match="another job has added files"):
        linking.link(session.log, session.epoch, [segment(0)], [])
    assert [info.name for info in index.storage.list(CATALOG_PREFIX)] == [*session.log.state.catalogs]


def test_a_change_of_two_catalogs_leaves_the_one_between_them(index):
    segments = [segment(number) for number in range(3)]
    for each in segments:
        index.link([structs.replace(each, is_open=True)])
    index.link([], [segments[0]], [segments[2].place])
    assert linked(index) == [segments[0], structs.replace(segments[1], is_open=True)]
    with pytest.raises(InvalidArgument, match="no segment begins at"):
        index.link([], [segments[2]])


def test_a_change_of_files_removes_the_expired_segments_of_the_catalogs_that_it_replaces():
    """Their objects wait for a sweep as other removed ones do, though only the replaced catalog had their names."""
    log = StorageLog(MemoryStorage(), ManualClock(1_700_000_000_000))
    log.create(GENESIS)
    first, last = (
        ArchivedSegment(f"segments/s/{at:020d}/{1:020d}-{at:016x}.log", "s", at, 100, 1, 2, 152, 3) for at in (0, 100)
    )
    files = [structs.replace(segment(number), is_open=True) for number in range(2)]
    catalog, publication = send_catalog(log, [*files, first, last])
    publication.record("a catalog", lambda state: LogRecord(0, "archive", 0, "", 0, catalogs=(catalog,)))
    log.append("an expiry", None, lambda state: LogRecord(0, "expire", 0, "", 0, expired=Expired((), {"s": 100})))
    linking.link(log, 0, [], [segment(0)], [files[1].place])
    record = log.record(log.state.number)
    # the expired segment, and the file that has no row
    assert (record.kind, record.left_out, record.remove) == ("link", 2, (catalog.name,))
    assert {*names_removed_by(log, record)} == {catalog.name, first.name}
    # nothing else: a change without an expiry names the catalog alone
    linking.link(log, 0, [segment(2)], [])
    added = log.record(log.state.number)
    assert (added.kind, added.left_out, names_removed_by(log, added)) == ("link", 0, ())
    # a sweep has deleted the replaced catalog: its segments were left out long before
    log.storage.delete_many([catalog.name])
    assert names_removed_by(log, record) == (catalog.name,)
