"""The archived messages of a log of any connector become entries and copies of another index."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tiered_index.connectors.archive.archiver import ColumnArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat
from tiered_index.connectors.archive.log import ColumnCopies, ColumnLog, logs_of
from tiered_index.connectors.source import no_entries
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.service.index import IndexService

STORE = "test:here/t/3"


def lacking_keys(table: Any, rules: Any) -> str:
    return "lacks keys"


FORMAT = ArchiveFormat("messages of a test", "test.messages", 1, pa.schema({**SHARED, "text": pa.binary()}), ("text",))


def table(*offsets: int, topic: str = "t") -> pa.Table:
    rows = [
        {"topic": topic, "offset": at, "timestamp": None if at == 1 else at * 1000, "keys": [f"k{at}", "all"]}
        | {"text": b"text %d" % at}
        for at in offsets
    ]
    return pa.Table.from_pylist(rows, FORMAT.schema)


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[list[IndexService]]:
    settings: dict[str, Any] = {"background": False, "environment": False, "slots": 97, "items": 5_000}
    opened = [
        IndexService.open(root=tmp_path / name, storage=f"memory://{tmp_path.name}-{name}", **settings)
        for name in ("first", "second")
    ]
    yield opened
    for index in opened:
        index.abandon()


@pytest.fixture
def log(indexes: list[IndexService]) -> ColumnLog:
    """A log with offsets 0 to 2, and 5 to 6; it has messages of another topic."""
    archiver = ColumnArchiver(indexes[0], FORMAT)
    archiver.send(STORE, 0, 3, pa.concat_tables([table(0, 1), table(2, topic="u")]))
    archiver.send(STORE, 5, 7, table(5, 6))
    archiver.name()
    (log,) = logs_of(FORMAT, "test:", indexes[0].segment_archive, lambda topic: topic == "t")
    return log


def test_each_file_becomes_entries_of_the_topics_that_are_asked_for(log: ColumnLog) -> None:
    assert (log.source, log.place, log.begin, log.is_left_out, len(log.segments)) == (STORE, ("t", 3), 0, False, 2)
    first, second = log.batches(None, skip_missing=True)
    assert (first.end, first.messages, first.skipped) == (3, 2, ())
    assert first.columns.to_pydict() == {
        "topic": ["t"] * 4,
        "queue_id": [3] * 4,
        "key": ["k0", "all", "k1", "all"],
        "offset": [0, 0, 1, 1],
        "size": [6] * 4,
        "timestamp_ms": [0, 0] + [log.segments[0].published_ms] * 2,
    }
    assert (second.end, second.messages) == (7, 2)
    (again,) = log.batches(6, skip_missing=True)
    assert (again.columns["offset"].to_pylist(), again.messages, again.skipped) == ([6, 6], 1, ())


def test_a_range_without_a_segment_is_missing(log: ColumnLog) -> None:
    with pytest.raises(CorruptFile, match="no archived file has offsets 3 to 4 of test:here/t/3"):
        list(log.batches(None))
    *_, second = log.batches(None, skip_missing=True)
    assert [(loss.kind, loss.begin, loss.end) for loss in second.skipped] == [("missing", 3, 5)]
    assert [batch.skipped for batch in log.batches(5)] == [()]


def test_a_file_that_is_lost_is_skipped_only_if_asked(log: ColumnLog) -> None:
    log.archive.storage.delete_many([log.segments[0].name])
    log.archive.tables._cache.clear()
    with pytest.raises(CorruptFile, match="does not have it"):
        list(log.batches(None, skip_missing=True))
    first, second = log.batches(None, skip_missing=True, skip_corrupt=True)
    assert [(loss.kind, loss.begin, loss.end) for loss in first.skipped] == [("corrupt", 0, 3)]
    assert (first.messages, len(first.columns), first.whole, second.messages) == (0, 0, None, 2)


def test_a_file_without_all_keys_is_refused_or_indexed_by_those_that_are_known(
    log: ColumnLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(log.form), "keys", lacking_keys)
    with pytest.raises(InvalidArgument, match=r"\.parquet lacks keys: ingest its rows as Parquet, by --key"):
        list(log.batches(5))
    (batch,) = log.batches(5, skip_missing=True)
    assert [loss.problem for loss in batch.skipped] == [f"{log.segments[1].name} lacks keys"]
    assert len(batch.columns) == 4


def test_files_are_copied_once_without_what_was_erased(log: ColumnLog, indexes: list[IndexService]) -> None:
    for copied in (3, 0):
        copies = ColumnCopies(indexes[1])
        assert not copies.can_wait
        for batch in log.batches(None, skip_missing=True):
            assert batch.whole is not None
            copies.add(FORMAT, batch.whole, np.isin(batch.whole.table.records["offset"].to_numpy(), [6]))
        assert copies.can_wait == (copied > 0)
        copies.name()
        assert copies.messages == copied
    whole, rest = indexes[1].archived()
    archive = indexes[1].segment_archive
    # offset 2 is of a topic that is not asked for
    assert [FORMAT.read(archive, copy).records["offset"].to_pylist() for copy in (whole, rest)] == [[0, 1], [5]]
    assert (whole.start, whole.end, rest.start, rest.end) == (0, 3, 5, 7)
    assert (whole.source, rest.source) == (None, (log.segments[1].crc32, log.segments[1].head_crc32))
    assert whole.published_ms == log.segments[0].published_ms


def test_a_log_of_which_only_entries_are_known_is_left_out(indexes: list[IndexService]) -> None:
    indexes[0].put_source_batch(no_entries(indexes[0]), STORE, 7)
    indexes[0].seal()
    indexes[0].run_lifecycle()
    indexes[0].flush()
    indexes[0].publish_positions({STORE: 7})
    (log,) = logs_of(FORMAT, "test:", indexes[0].segment_archive, bool)
    assert (log.store, log.is_left_out, list(log.batches(None))) == (STORE, True, [])
    assert logs_of(FORMAT, "other:", indexes[0].segment_archive, bool) == []
