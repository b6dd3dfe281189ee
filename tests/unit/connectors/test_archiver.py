"""The writer of the columnar archive: every record is archived once, whatever fails meanwhile."""

import pyarrow as pa
import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.connectors.archive.archiver import ColumnArchiver, archived_end
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.memory import MemoryStorage

FORM = ArchiveFormat("archived words", "tiered_index.words", 1, pa.schema({**SHARED, "word": pa.string()}), ("word",))
STORE, OTHER = "words:-/t/0", "words:-/t/1"


@pytest.fixture
def storage():
    return FaultStorage(MemoryStorage())


@pytest.fixture
def index(storage, tmp_path):
    settings = {"slots": 97, "items": 5_000, "background": False, "environment": False}
    service = IndexService.open(root=tmp_path / "root", storage_backend=storage, **settings)
    yield service
    service.abandon()


def words(begin, end, text="word"):
    offsets = list(range(begin, end))
    columns = {"topic": ["t"] * len(offsets), "offset": offsets, "timestamp": [1_000 + each for each in offsets]}
    keys = [[f"k{each}"] for each in offsets]
    return pa.table({**columns, "keys": keys, "word": [f"{text} {each}" for each in offsets]}, FORM.schema)


def archived(index, store=STORE):
    """Each archived segment of a store: its offsets, and those of its records."""
    archive = index.segment_archive
    archive.refresh()
    records = {segment: FORM.read(archive, segment).records["offset"].to_pylist() for segment in archive.segments()}
    return [(each.start, each.end, offsets) for each, offsets in records.items() if each.store == store]


def test_records_that_wait_become_one_file_of_each_log_by_one_record(index):
    archiver = ColumnArchiver(index, FORM)
    for begin in (0, 10):
        for store in (STORE, OTHER):
            archiver.add(store, begin, begin + 10, words(begin, begin + 5))
    waiting = [words(begin, begin + 5).nbytes for begin in (0, 10)]
    assert archiver.size_bytes == 2 * sum(waiting)
    before = index.segment_archive.refresh().number
    assert (archiver.archive(), archiver.archived, archiver.size_bytes) == (2, 2, 0)
    assert index.segment_archive.refresh().number == before + 1
    offsets = [*range(5), *range(10, 15)]
    assert archived(index) == archived(index, OTHER) == [(0, 20, offsets)]
    (segment,) = index.segment_archive.segments().of(STORE)
    assert (segment.rows, segment.times) == (10, (1_000, 1_014))


def test_a_log_begins_at_its_first_record_and_goes_on_without_gaps(index):
    archiver = ColumnArchiver(index, FORM)
    archiver.add(STORE, 7, 10, words(8, 10))
    archiver.archive()
    # offsets without a record, such as those that were skipped
    archiver.add(STORE, 15, 20, words(0, 0))
    assert (archiver.archive(), archiver.end(STORE)) == (0, 20)
    archiver.add(STORE, 20, 30, words(20, 30))
    archiver.archive()
    assert archived(index) == [(7, 10, [8, 9]), (10, 30, [*range(20, 30)])]


def test_archived_records_are_left_out_when_a_source_reads_them_again(index):
    archiver = ColumnArchiver(index, FORM)
    archiver.add(STORE, 0, 10, words(0, 10))
    archiver.archive()
    again = ColumnArchiver(index, FORM)
    assert again.end(STORE) == 10
    again.add(STORE, 5, 12, words(5, 12))
    again.archive()
    assert archived(index) == [(0, 10, [*range(10)]), (10, 12, [10, 11])]
    again.add(STORE, 3, 8, words(3, 8))
    assert (again.size_bytes, again.archive()) == (0, 0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("prefix", "nth"), [("segments/", 1), ("segments/", 2), ("log/", 1)])
def test_records_of_a_failed_round_are_added_again_and_archived_once(index, storage, when, prefix, nth):
    archiver = ColumnArchiver(index, FORM)
    archiver.add(STORE, 0, 3, words(0, 3))
    archiver.archive()
    storage.fail("put_if_absent" if prefix == "log/" else "*", nth=nth, when=when, name_prefix=prefix)
    failures = 0
    for _ in range(2):
        for store in (STORE, OTHER):
            begin = archiver.end(store)
            archiver.add(store, begin, 6, words(begin, 6))
        try:
            archiver.archive()
        except StorageUnavailable:
            failures += 1
            archiver.begin_again()
    storage.clear()
    assert (archiver.size_bytes, failures) == (0, 1)
    of_stores = {store: archived(index, store) for store in (STORE, OTHER)}
    all_offsets = {
        store: [offset for *_, offsets in ranges for offset in offsets] for store, ranges in of_stores.items()
    }
    assert all_offsets == {STORE: [*range(6)], OTHER: [*range(6)]}


def test_sent_files_are_no_part_of_the_archive_until_they_are_named(index):
    archiver = ColumnArchiver(index, FORM)
    assert archiver.send(STORE, 0, 5, words(0, 5)) and archiver.waits and not archiver.is_full
    assert (archiver.end(STORE), archived(index)) == (5, [])
    assert archived_end(index.segment_archive.segments(), STORE) is None
    archiver.begin_again()
    assert archiver.name() == archiver.end(STORE) == 0
    assert archiver.send(STORE, 0, 5, words(0, 5)) and archiver.name() == 1 and not archiver.waits
    assert archived(index) == [(0, 5, [*range(5)])]
    assert not archiver.send(STORE, 0, 5, words(0, 5))


def test_a_record_names_at_most_256_files(index):
    archiver, sent = ColumnArchiver(index, FORM), 0
    while not archiver.is_full:
        archiver.send(f"words:-/t/{sent}", 0, 1, words(0, 1))
        sent += 1
    assert sent == 256 == archiver.name()
