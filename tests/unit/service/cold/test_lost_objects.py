"""Lookups over objects that are gone: each file is read once, the log once, and the account says which was which."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cold_index import ColdIndex, Read, cold_index
from tiered_index import IndexReader, Lookup, QueryResult
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import StoredObject
from tiered_index.service.lookup import query
from tiered_index.testing.model import Answer

FILES = 12
Ask = Callable[[IndexReader], QueryResult]


@pytest.fixture
def made(tmp_path: Path) -> ColdIndex:
    return cold_index(tmp_path / "root", files=FILES, entries=3)


@pytest.fixture
def reader(made: ColdIndex) -> Iterator[IndexReader]:
    """A reader that knows every directory and keeps no group."""
    with made.reader(query_threads=3, block_cache_bytes=0, filter_after_probes=10**6) as reader:
        reader.query("t", "all")
        made.storage.reset()
        yield reader


@pytest.fixture(params=["one", "many"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Ask for a key that all files hold, alone or in a batch; partial answers are welcome."""
    if request.param == "one":
        return lambda reader: reader.query("t", "all", max_count=500, allow_partial=True)
    asked = Lookup(topic="t", key="all", max_count=500)
    return lambda reader: reader.query_many([asked], allow_partial=True)[0]


def lose(made: ColdIndex, gone: list[StoredObject]) -> None:
    for stored in gone:
        made.inner.delete(stored.name)


def remove(made: ColdIndex, gone: list[StoredObject]) -> None:
    """Remove files as a merge does: by a record, then for good."""
    log = StorageLog(made.inner, ManualClock(0))
    log.open()
    log.publish(log.state.epoch, (), remove=tuple(stored.name for stored in gone))
    lose(made, gone)


def rest(made: ColdIndex, gone: list[StoredObject]) -> list[Answer]:
    """Return the answers that other files hold."""
    within = [(stored.second_min, stored.second_max) for stored in gone]
    answers = made.expected("t", "all")
    return [answer for answer in answers if not any(low <= answer.timestamp_ms // 1000 <= high for low, high in within)]


def requests_of(result: QueryResult, outcome: str) -> int:
    return sum(report.requests for report in result.explain.files if report.outcome == outcome)


@pytest.mark.parametrize("count", [1, 5, FILES])
def test_any_number_of_lost_objects_costs_one_pass_and_one_look_at_the_log(
    made: ColdIndex, reader: IndexReader, ask: Ask, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(query, "LOG_RETRIES", 1)
    gone = made.stored[::2][:count] if count < FILES else made.stored
    lose(made, gone)
    result = ask(reader)
    assert ([Answer.of(item) for item in result], result.status) == (rest(made, gone), "partial")
    assert {report.file for report in result.failed} == {stored.file_id for stored in gone}
    assert len(made.storage.reads) == FILES
    assert made.storage.operations == ["get_range"] * FILES + ["list"]
    assert (requests_of(result, "read"), requests_of(result, "failed")) == (FILES - count, count)
    assert [(report.file, report.requests) for report in result.explain.files if report.outcome == "refreshed"] == [
        ("log", 1)
    ]
    assert result.explain.requests == FILES + 1


def test_a_file_that_a_record_removed_makes_one_more_pass_whose_rows_say_so(
    made: ColdIndex, reader: IndexReader, ask: Ask
) -> None:
    gone, lost = made.stored[2:4], made.stored[5:8]
    remove(made, gone)
    lose(made, lost)
    result = ask(reader)
    assert ([Answer.of(item) for item in result], result.status) == (rest(made, [*gone, *lost]), "partial")
    assert {report.file for report in result.failed} == {stored.file_id for stored in lost}
    first, second = FILES, FILES - len(gone)
    assert len(made.storage.reads) == first + second
    log = len(made.storage.operations) - first - second
    assert requests_of(result, "outdated") == first
    assert requests_of(result, "read") + requests_of(result, "failed") == second
    assert requests_of(result, "refreshed") == log
    assert result.explain.requests == len(made.storage.operations)
    assert result.explain.files_read == second - len(lost)


def test_pages_of_a_batch_tell_what_was_given_up_once(made: ColdIndex, reader: IndexReader) -> None:
    cursor = reader.query("t", "all", max_count=1).cursor
    gone = made.stored[2:4]
    asked = [
        Lookup(topic="t", key="all", cursor=cursor),
        Lookup(topic="t", key="all"),
        Lookup(topic="t", key="all", cursor=cursor),
    ]
    remove(made, gone)
    made.storage.reset()
    results = reader.query_many(asked)
    answers = rest(made, gone)
    assert [[Answer.of(item) for item in result] for result in results] == [answers[1:], answers, answers[1:]]
    assert {result.status for result in results} == {"complete"}
    explain = results.explain
    assert explain.requests == len(made.storage.operations) == sum(report.requests for report in explain.files)
    rows = {
        outcome: sum(r.requests for r in explain.files if r.outcome == outcome) for outcome in ("outdated", "refreshed")
    }
    assert rows["refreshed"] == sum(operation in ("list", "get") for operation in made.storage.operations)
    # the first page's pass, or as much of it as was made before an object was missed
    assert 0 < rows["outdated"] <= FILES


def test_a_lost_object_is_an_error_at_once_where_no_partial_answer_will_do(
    made: ColdIndex, reader: IndexReader
) -> None:
    gone = made.stored[-1]
    lose(made, [gone])
    with pytest.raises(CorruptFile, match="storage does not") as caught:
        reader.query("t", "all", max_count=500)
    assert caught.value.file == gone.name
    assert made.storage.operations.count("list") == 1


def test_a_log_that_moves_on_for_ever_ends_the_lookup(
    made: ColdIndex, reader: IndexReader, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "LOG_RETRIES", 3)
    stored = {one.name: one for one in made.stored}
    removed: list[str] = []
    lock = threading.Lock()

    def gate(read: Read) -> None:
        """Remove the first file that is read after each look at the log."""
        with lock:
            if made.storage.operations.count("list") == len(removed):
                removed.append(read.name)
                remove(made, [stored[read.name]])

    made.storage.gate = gate
    with pytest.raises(StorageUnavailable, match="3 tries"):
        ask(reader)
    assert len(removed) == 3
