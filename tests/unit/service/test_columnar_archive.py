"""One record of an archive is read by its offset, also if another record put another object in the place of its own."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tests.support.archived_records import encode_records
from tests.support.storage_faults import FaultStorage
from tiered_index.connectors.archive.columns import record_at
from tiered_index.connectors.files import row_archive
from tiered_index.connectors.files.rows import restart
from tiered_index.connectors.kafka import columns
from tiered_index.connectors.kafka.columns import SCHEMA, SIZE
from tiered_index.connectors.kafka.messages import KafkaMessages
from tiered_index.errors import CorruptFile, ObjectNotFound, UnsupportedVersion
from tiered_index.service.read.answers.messages import Search
from tiered_index.service.read.segments.archive import SegmentArchive

STORE = "kafka:c/t/0"
FORMATS = (columns.FORMAT, row_archive.FORMAT, restart._FORMAT)


def file_of(offsets):
    rows = [
        {"key": b"k", "value": b"v%d" % offset, "offset": offset, "timestamp": 1_000, "timestampType": 0}
        for offset in offsets
    ]
    schema = SCHEMA.append(pa.field(SIZE, pa.int64()))
    return encode_records(("t", 0), pa.Table.from_pylist([{**row, SIZE: 3} for row in rows], schema), ["key"])


@pytest.fixture
def erased(open_index, storage):
    """Return the archive of an index with offsets 0 to 3, and its state before offset 2 was erased."""
    index = open_index()
    assert index.archive_columns(STORE, 0, 4, file_of(range(4)))
    before, (segment,) = index.log_state, index.archived()
    assert index.replace_columns(segment, file_of((0, 1, 3)), 3, None)
    storage.delete_many([segment.name])
    return index.segment_archive, before


def test_a_record_is_read_by_its_offset(erased):
    archive, _ = erased
    search = Search(item=None)
    record = record_at(archive, STORE, 3, search)
    assert (record.row["value"].to_pylist(), search.read_from) == ([b"v3"], record.segment.name)
    assert len(record_at(archive, STORE, 2, search).row) == 0
    assert record_at(archive, STORE, 4, search) is None
    assert record_at(archive, "kafka:c/t/1", 3, search) is None


def test_each_request_for_a_record_is_counted(erased):
    archive, _ = erased
    counted = FaultStorage(archive.storage)
    once = replace(archive, storage=counted)
    for requests in (2, 1):
        search, before = Search(item=None), counted.calls()
        record_at(once, STORE, 1, search)
        assert (search.requests, counted.calls() - before) == (requests, requests)
        assert search.bytes > 0


def test_a_record_of_a_replaced_segment_is_read_from_its_successor(erased):
    archive, before = erased
    states = [before]

    def refresh():
        states[:] = [archive.state()]
        return states[0]

    stale = SegmentArchive(archive.storage, lambda: states[0], refresh)
    assert record_at(stale, STORE, 3, Search(item=None)).row["value"].to_pylist() == [b"v3"]


def test_a_record_whose_segments_are_replaced_time_and_again_is_an_error_and_never_missing(erased):
    archive, before = erased
    refreshed = []
    stale = SegmentArchive(archive.storage, lambda: before, lambda: refreshed.append(1) or archive.state())
    with pytest.raises(ObjectNotFound):
        record_at(stale, STORE, 3, Search(item=None))
    assert len(refreshed) > 4
    with pytest.raises(ObjectNotFound):
        KafkaMessages({None: stale}).at("t", 0, 3)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_files_of_another_version_or_other_columns_are_refused_by_name(form):
    records = form.schema.empty_table()
    assert form.decode(form.encode(records, {"more": "x"}), "f") == (records, form_notes(form) | {"more": "x"})
    later = replace(form, version=form.version + 1).encode(records)
    with pytest.raises(UnsupportedVersion, match=rf"f: {form.name} of version {form.version + 1}, .*: build the index"):
        form.decode(later, "f")
    for other in (replace(form, note="other"), replace(form, version="x")):
        with pytest.raises(CorruptFile, match=f"no {form.name}"):
            form.decode(other.encode(records), "f")
    less = records.drop_columns([form.schema.names[-1]])
    with pytest.raises(CorruptFile, match=f"no {form.name}"):
        form.decode(replace(form, texts=(), text_bytes=no_bytes).encode(less), "f")


def no_bytes(records):
    return np.zeros(len(records), np.int64)


def form_notes(form):
    return {form.note: str(form.version)}
