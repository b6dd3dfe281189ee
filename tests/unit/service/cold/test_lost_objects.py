"""Objects are missing. A lookup reads each file once and the log once, and `explain` shows each."""

import threading

import pytest

from tests.support.cold_index import cold_index
from tests.support.log_records import open_log, publish
from tests.support.model import Answer
from tiered_index import Fetched, Lookup, LostFile
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.log.records import LostObject
from tiered_index.service.read import scan

FILES = 12


@pytest.fixture
def index(tmp_path):
    return cold_index(tmp_path / "root", files=FILES, entries=3)


@pytest.fixture
def reader(index):
    """A reader that knows every directory and keeps no group."""
    with index.reader(query_threads=3, cache_slot_groups=False, filter_after_probes=10**6) as reader:
        reader.query("t", "all")
        index.storage.reset()
        yield reader


@pytest.fixture(params=["one", "many"])
def ask(request):
    """Return a function that looks up a key of all files, alone or in a batch. It allows partial answers."""
    if request.param == "one":
        return lambda reader: reader.query("t", "all", max_count=500, allow_partial=True)
    lookup = Lookup(topic="t", key="all", max_count=500)
    return lambda reader: reader.query_many([lookup], allow_partial=True)[0]


def lose(index, gone):
    for stored in gone:
        index.inner.delete_many([stored.name])


def remove(index, gone):
    """Remove files as a merge does: by a record, then from the storage."""
    if gone:
        log = open_log(index.inner)
        publish(log, log.state.epoch, remove=tuple(stored.name for stored in gone))
        lose(index, gone)


def rest(index, gone):
    """Return the answers of the other files."""
    within = [(stored.second_min, stored.second_max) for stored in gone]
    answers = index.expected("t", "all")
    return [answer for answer in answers if not any(low <= answer.timestamp_ms // 1000 <= high for low, high in within)]


def requests_of(result, outcome):
    return sum(report.requests for report in result.explain.files if report.outcome == outcome)


@pytest.mark.parametrize(("removed", "lost"), [(0, 1), (0, 5), (0, FILES), (2, 3)])
def test_lost_objects_cost_one_look_at_the_log_and_removed_ones_one_more_pass(index, reader, ask, removed, lost):
    gone, missing = index.stored[:removed], index.stored[removed:][::-1][:lost]
    remove(index, gone)
    lose(index, missing)
    result, again = ask(reader), FILES - removed if removed else 0
    assert ([Answer.of(item) for item in result], result.status) == (rest(index, [*gone, *missing]), "partial")
    assert {report.file for report in result.failed} == {stored.file_id for stored in missing}
    assert len(index.storage.reads) == FILES + again
    looks = len(index.storage.operations) - FILES - again
    spent = [requests_of(result, outcome) for outcome in ("outdated", "read", "failed", "refreshed")]
    assert spent == [FILES if removed else 0, FILES - removed - lost, lost, looks]
    assert removed or index.storage.operations == ["get_range"] * FILES + ["list"]
    assert result.explain.requests == sum(spent) and result.explain.files_read == FILES - removed - lost


def test_a_lookup_ends_though_the_log_changes_at_every_try(index, reader, ask, monkeypatch):
    """Else it would never end beside merges whose sweeps have no grace."""
    monkeypatch.setattr(scan, "_RESTARTS_S", 0)
    stored = {index_object.name: index_object for index_object in index.stored}
    removed, lock = [], threading.Lock()

    def gate(read):
        """Remove the first file that is read after each reading of the log."""
        with lock:
            if index.storage.operations.count("list") == len(removed):
                removed.append(read.name)
                remove(index, [stored[read.name]])

    index.storage.gate = gate
    with pytest.raises(StorageUnavailable, match="again and again"):
        ask(reader)
    # the lookup begins again once in any case
    assert len(removed) == 2


class Gone:
    """A source whose messages have all expired."""

    def fetch(self, items, topic, key):
        return [Fetched(item=item, state="expired") for item in items]


@pytest.fixture
def writer(index):
    with index.writer() as writer:
        yield writer


def test_every_answer_that_may_lack_entries_names_the_lost_object(index, writer, reader, ask):
    gone = index.stored[3]
    lose(index, [gone])
    assert ask(reader).status == "partial" and not ask(reader).lost
    (known,) = give_up(index.inner, open_log(index.inner), [gone.file_id])
    assert known == LostObject.of(gone)
    span = {"begin_ms": gone.second_min * 1000, "end_ms": gone.second_max * 1000}
    lost_file = LostFile(file=gone.file_id, entries=gone.count, **span)
    result = ask(reader)  # the lookup begins again, because the reader's log is behind
    assert ([Answer.of(item) for item in result], result.status) == (rest(index, [gone]), "complete")
    assert result.lost == (lost_file,)
    begin_ms, end_ms = lost_file.begin_ms - 1000, lost_file.end_ms + 1000
    ranges = [(begin_ms, begin_ms), (begin_ms, lost_file.begin_ms), (lost_file.end_ms, None), (end_ms, end_ms)]
    for number, (first, last) in enumerate(ranges):
        lost = (lost_file,) if number in (1, 2) else ()
        lookup = Lookup(topic="t", key="all", begin_ms=first, end_ms=last)
        assert reader.query("t", "all", first, last).lost == reader.query_many([lookup])[0].lost == lost
    assert result.to_dict()["lost"] == [lost_file.to_dict()]
    # The writer was open before, and a later reader begins at the checkpoint. Both name the lost object.
    with index.reader() as later:
        assert writer.query("t", "all").lost == later.query("t", "all").lost == (lost_file,)
        assert writer.log_state.lost == later.log_state.lost == {gone.name: known}
        assert later.topics().lost == later.messages("t", "all", source=Gone()).lost == (lost_file,)


def test_only_missing_objects_are_declared_lost_and_all_of_a_call_by_one_record(index):
    gone, log = index.stored[2:5], open_log(index.inner)
    before = log.state
    lose(index, gone)
    for wrong, problem in ((index.stored[0].file_id, "are whole"), ("0" * 15 + "-" + "0" * 12, "names no such")):
        with pytest.raises(InvalidArgument, match=problem):
            give_up(index.inner, log, [gone[0].name, wrong])
    assert open_log(index.inner).state == before
    assert give_up(index.inner, log, [stored.file_id for stored in gone]) == [LostObject.of(stored) for stored in gone]
    assert (log.state.number, log.state.lost.keys()) == (before.number + 1, {stored.name for stored in gone})
