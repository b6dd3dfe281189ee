"""The summary has directories and filters of many files in one object. It saves requests and never changes answers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cold_index import BASE_MS, Recorder, cold_index, columns, gone, put, spoiled
from tests.support.hanging import until
from tests.support.log_records import open_log
from tests.support.merging import BASE_MS as MERGED_MS
from tests.support.merging import DAY_S, HOUR_MS, HOUR_S
from tests.support.model import Answer
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, Lookup
from tiered_index.clock import ManualClock
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageUnavailable
from tiered_index.format.names import CHECKPOINT_PREFIX, is_summary
from tiered_index.service.checks.checks import check_storage
from tiered_index.service.checks.report import Report
from tiered_index.service.cold import path as path_module
from tiered_index.service.erasure.erase import EraseRequest, erase
from tiered_index.service.log import log as log_module
from tiered_index.service.log import summary as summary_module
from tiered_index.service.log.log import LIST_EVERY_S, StorageLog
from tiered_index.service.log.records import LogRecord
from tiered_index.service.log.summary import Index, Summary, decode, encode
from tiered_index.storage.memory import MemoryStorage

FILES = 40


def summaries(storage):
    return [info.name for info in storage.list(CHECKPOINT_PREFIX) if is_summary(info.name)]


def summarise(storage):
    """Write the summary of all files of an index. Return its name."""
    log = StorageLog(storage, ManualClock())
    state = log.open()
    log._checkpoints.summary.renew(state)
    (name,) = summaries(storage)
    return name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files of an hour each, with their summary. The key "all" is in each file."""
    made = cold_index(tmp_path_factory.mktemp("cold") / "root", files=FILES, entries=20)
    summarise(made.inner)
    return made


@pytest.fixture
def opened(made):
    readers = []

    def open_reader():
        made.storage.gate = None
        made.storage.reset()
        readers.append(made.reader())
        return readers[-1]

    yield open_reader
    for reader in readers:
        reader.close()


def check(made, reader):
    for key in ("all", "k0-3", f"k{FILES - 1}-0", "absent"):
        answer = reader.query("t", key, max_count=1000)
        assert ([Answer.of(item) for item in answer], answer.status) == (made.expected("t", key), "complete")


def test_a_fresh_reader_asks_for_no_files_directory(made, opened):
    reader = opened()
    assert sorted(made.storage.operations) == ["get", "get", "list", "list"]
    assert reader.query("t", "k7-3").explain.requests == 1
    assert reader.query("t", "absent").explain.requests == 0
    assert reader.query("t", "all", max_count=FILES).explain.requests == FILES - 1
    check(made, reader)


def test_directories_do_not_keep_the_summary_in_memory(made, opened):
    caches = opened()._parts.caches
    kept = [trailer.directory for trailer, _ in caches.directories._entries.values()]
    assert len(kept) == FILES
    assert all(table.base is None for directory in kept for table in (directory.groups, directory.blocks))


def test_a_fresh_reader_and_its_first_lookup_take_three_round_trips(made):
    """Requests that may run in parallel wait for each other, so a reader that sent them one by one would fail."""
    together = threading.Barrier(3)
    order = []

    class Rounds(Recorder):
        def get(self, name):
            order.append("read")
            together.wait(60)
            return super().get(name)

        def list(self, prefix="", *, start_after=""):
            order.append("list" if prefix == CHECKPOINT_PREFIX else "read")
            if prefix != CHECKPOINT_PREFIX:
                together.wait(60)
            return super().list(prefix, start_after=start_after)

        def get_range(self, name, start, length):
            order.append("group")
            return super().get_range(name, start, length)

    with made.reader(Rounds(made.inner)) as reader:
        assert len(reader.query("t", "k7-3")) == 1
    assert order == ["list", "read", "read", "read", "group"]


def test_a_large_summary_is_read_after_some_directories(made, opened, monkeypatch):
    monkeypatch.setattr(log_module, "EAGER_BYTES", 0)
    reader = opened()
    assert sorted(made.storage.operations) == ["get", "list", "list"]
    hour = {"begin_ms": BASE_MS, "end_ms": BASE_MS + 60_000}
    assert reader.query("t", "k0-3", **hour).explain.requests == 2
    made.storage.reset()
    answer = reader.query("t", "absent")
    assert answer.explain.requests == len(made.storage.operations) <= 7
    assert made.storage.operations.count("get") == 1
    assert reader.query("t", "absent too").explain.requests == 0
    assert reader.query("t", "k7-3").explain.requests == 1
    check(made, reader)


def test_lookups_leave_a_summary_that_hangs(made, monkeypatch):
    """One lookup reads the summary and hangs. The others wait for it once, then read the directories of their files."""
    monkeypatch.setattr(log_module, "EAGER_BYTES", 0)
    monkeypatch.setattr(path_module, "_SUMMARY_WAIT_S", 0.2)
    asked, goes_on = threading.Event(), threading.Event()

    class Hanging(Recorder):
        def get(self, name):
            if is_summary(name):
                asked.set()
                assert goes_on.wait(60)
            return super().get(name)

    with made.reader(Hanging(made.inner)) as reader, ThreadPoolExecutor(4) as pool:
        hung = pool.submit(reader.query, "t", "absent")
        try:
            assert asked.wait(60)
            found = [pool.submit(reader.query, "t", key) for key in ("k7-3", "k8-3", "k9-3")]
            assert [len(one.result(60)) for one in found] == [1, 1, 1]
            assert not hung.done()
        finally:
            goes_on.set()
        assert not hung.result(60).items


def test_batches_and_bounded_lookups_over_a_large_summary(made, opened, monkeypatch):
    monkeypatch.setattr(log_module, "EAGER_BYTES", 0)
    reader = opened()
    with pytest.raises(BudgetExceeded):
        reader.query("t", "k0-3", max_requests=5)
    # a lookup with limits does not count the summary, because another thread reads it for later lookups
    until(lambda: reader._cold_paths[0]._has_summary)
    assert made.storage.operations[3:].count("get") == 1
    answers = reader.query_many([Lookup(topic="t", key=key) for key in ("k3-1", "all", "absent")], timeout_s=600)
    assert answers.counts.tolist() == [1, FILES, 0]
    assert made.storage.operations[3:].count("get") == 1
    check(made, reader)


@given(at=st.integers(0, 10**6), bit=st.none() | st.integers(0, 7))
@settings(max_examples=25)
def test_a_damaged_summary_costs_requests_and_no_answer(made, at, bit):
    """A bit of the summary is flipped, or it is cut."""
    (name,) = summaries(made.inner)

    def change(data):
        if bit is None:
            del data[at % len(data) :]
        else:
            data[at % len(data)] ^= 1 << bit

    with spoiled(made, name, change), made.reader() as reader:
        check(made, reader)


@pytest.mark.parametrize("kind", ["swapped", "of no object", "other filter", "other position", "nothing"])
def test_the_summary_of_a_file_is_checked_against_the_log(made, kind):
    (name,) = summaries(made.inner)
    parts = {of: (position, bytes(part)) for of, (position, part) in decode(made.inner.get(name), name).items()}
    assert set(parts) == {stored.name for stored in made.stored}
    names = list(parts)
    if kind == "swapped":
        wrong = dict(zip(names, [*list(parts.values())[1:], parts[names[0]]], strict=True))
    elif kind == "other filter":
        wrong = {of: (position, bytes(32) + part[32:]) for of, (position, part) in parts.items()}
    elif kind == "other position":
        wrong = {of: (position + 1, part) for of, (position, part) in parts.items()}
    else:
        wrong = {f"data/{of}/x": part for of, part in parts.items()} if kind == "of no object" else {}

    def change(data):
        data[:] = encode(wrong)

    with spoiled(made, name, change), made.reader() as reader:
        check(made, reader)


def test_a_summary_that_is_gone_when_it_is_read(made, monkeypatch):
    (name,) = summaries(made.inner)
    faulty = FaultStorage(made.inner)
    faulty.fail("get", nth=2)
    with made.reader(faulty) as reader:
        check(made, reader)
    monkeypatch.setattr(log_module, "EAGER_BYTES", 0)
    with made.reader() as reader:
        with gone(made, name):
            check(made, reader)


def test_a_summary_that_its_storage_calls_damaged_costs_requests_and_no_answer(made, monkeypatch):
    """A database with damaged pages reports such an error."""
    (name,) = summaries(made.inner)
    faulty = FaultStorage(made.inner)
    faulty.fail("get", times=None, name_prefix=name, error=lambda text: CorruptFile(name, text))
    for _ in range(2):
        with made.reader(faulty) as reader:
            check(made, reader)
        # the second reader reads the summary for a lookup
        monkeypatch.setattr(log_module, "EAGER_BYTES", 0)


def test_a_writer_renews_the_summary_after_some_files(tmp_path):
    made = cold_index(tmp_path / "root", files=7, entries=5)
    assert summaries(made.inner) == []
    covered = []
    for number in range(7, 25):
        made.add(number)
        (name,) = summaries(made.inner)
        covered.append(len(decode(made.inner.get(name), name)))
    assert covered == [*([8] * 8), *([16] * 8), 24, 24]
    made.storage.reset()
    with made.reader() as reader:
        assert [Answer.of(item) for item in reader.query("t", "all")] == made.expected("t", "all")
        # four requests to open, a group per file, and the directory of the file that the summary lacks
        assert len(made.storage.operations) == 4 + 25 + 1


def test_a_late_renewal_leaves_the_summary_of_later_records(tmp_path):
    made = cold_index(tmp_path / "root", files=9, entries=5)
    log = StorageLog(made.inner, ManualClock())
    state = log.open()
    made.add(*range(9, 20))
    (name,) = summaries(made.inner)
    log._checkpoints.summary.renew(state)
    assert summaries(made.inner) == [name]


def test_a_summary_of_records_that_a_restored_storage_lacks_is_deleted(tmp_path):
    made = cold_index(tmp_path / "root", files=9, entries=5)
    name = summarise(made.inner)
    later = "checkpoint/00000000000000009999-0123456789abcdef.summary"
    made.inner.put(later, made.inner.get(name))
    made.add(*range(9, 18))
    (renewed,) = summaries(made.inner)
    assert name < renewed < later


def test_a_summary_that_can_not_be_written_fails_no_record(tmp_path):
    faulty = FaultStorage(MemoryStorage())
    made = cold_index(tmp_path / "root", files=6, entries=5, storage=faulty)
    with made.writer() as writer:
        for number in (6, 7, 8, 9):
            put(made, writer, columns(number, 5))
            writer.seal()
            faulty.fail("put", name_prefix=CHECKPOINT_PREFIX, times=None)
            writer.run_lifecycle()
            faulty.clear()
        assert summaries(faulty) == []
        put(made, writer, columns(10, 5))
        writer.seal()
        writer.run_lifecycle()
    (name,) = summaries(faulty)
    assert len(decode(faulty.get(name), name)) == 11


def test_a_storage_that_deletes_nothing_keeps_two_summaries(tmp_path, caplog):
    faulty = FaultStorage(MemoryStorage())
    made = cold_index(tmp_path / "root", files=6, entries=5, storage=faulty)
    faulty.fail("delete_many", name_prefix=CHECKPOINT_PREFIX, times=None)
    made.add(*range(6, 40))
    assert len(summaries(faulty)) == 2
    assert "the summary of directories was not renewed" in caplog.text
    faulty.clear()
    made.add(40)
    (name,) = summaries(faulty)
    assert len(decode(faulty.get(name), name)) >= 38


def test_an_append_does_not_wait_for_the_summary_of_another_one(tmp_path):
    made = cold_index(tmp_path / "root", files=9, entries=5)

    class Held(FaultStorage):
        def put(self, name, data):
            if is_summary(name):
                begun.set()
                assert go_on.wait(60)
            super().put(name, data)

    begun, go_on = threading.Event(), threading.Event()
    log = StorageLog(Held(made.inner), ManualClock())
    epoch = log.open().epoch
    for name in summaries(made.inner):
        made.inner.delete(name)
    first = threading.Thread(target=log.append_positions, args=(epoch, {"one": 1}))
    first.start()
    try:
        assert begun.wait(60)
        # the second append waits only for its own summary
        second = threading.Thread(target=log.append_positions, args=(epoch, {"other": 1}))
        second.start()
        until(lambda: "other" in StorageLog(made.inner, ManualClock()).open().positions)
    finally:
        go_on.set()
        first.join(60)
    second.join(60)
    assert not second.is_alive()


def test_a_merge_leaves_a_summary_of_the_present_objects(life):
    for hour in range(10):
        life.put([(MERGED_MS + hour * HOUR_MS, f"k{hour}"), (MERGED_MS + hour * HOUR_MS + 5000, "all")])
        life.publish()
    (before,) = summaries(life.storage)
    life.later()
    life.merge(DAY_S)
    (after,) = summaries(life.storage)
    assert after != before
    assert set(decode(life.storage.get(after), after)) == set(life.state.objects)
    recorder = Recorder(life.storage)
    with IndexReader.open(storage_backend=recorder, clock=life.clock, refresh_interval_s=10**6) as reader:
        assert len(reader.query("t", "all")) == 10
    assert len(recorder.operations) == 5
    life.check()


def test_a_record_with_many_tables_leaves_a_summary_of_all(life):
    tables = 40
    life.put([(MERGED_MS + hour * HOUR_MS, f"k{hour}") for hour in range(tables)])
    life.publish()
    life.later()
    life.merge(HOUR_S)
    (name,) = summaries(life.storage)
    assert len(life.state.objects) == tables
    assert set(decode(life.storage.get(name), name)) == set(life.state.objects)


class Away(Recorder):
    """A storage that answers no range reads."""

    def get_range(self, name, start, length):
        self.operations.append("get_range")
        raise StorageUnavailable("away")


def test_a_storage_that_is_away_ends_the_renewal_soon_and_the_next_record_renews(tmp_path):
    made = cold_index(tmp_path / "root", files=FILES, entries=2)
    for name in summaries(made.inner):
        made.inner.delete(name)
    away = Away(made.inner)
    log = StorageLog(away, ManualClock())
    log._checkpoints.summary.renew(log.open())
    assert away.operations.count("get_range") <= FILES // 8
    assert summaries(made.inner) == []
    log._checkpoints.summary.storage = made.inner
    log._checkpoints.summary.renew(log.state)
    (name,) = summaries(made.inner)
    assert len(decode(made.inner.get(name), name)) == FILES


@pytest.mark.parametrize("data", [b"", b"x", b"TIDXSUM1", b"TIDXSUM1\xff\xff\xff\xff" + bytes(4), encode({})[:-1]])
def test_bytes_that_are_not_a_summary_are_refused(data):
    with pytest.raises(CorruptFile):
        decode(data, "name")
    assert decode(encode({"a": (7, b"xyz"), "b": (0, b"")}), "name") == {"a": (7, b"xyz"), "b": (0, b"")}


def test_a_writer_that_seldom_lists_keeps_the_summary_of_a_job(tmp_path):
    storage = cold_index(tmp_path / "root", files=8, entries=2).inner
    storage.delete_many(summaries(storage))
    writer, job = (StorageLog(storage, ManualClock()) for _ in range(2))
    writer.lists_every_s = LIST_EVERY_S
    writer.open()
    job.open()

    def note(log, position):
        epoch = log.state.epoch
        log.append("positions", epoch, lambda _: LogRecord(0, "positions", epoch, "", 0, positions={"s": position}))

    note(job, 1)
    (name,) = summaries(storage)
    # the job's record came after one of the writer, whose summary is renewed only now
    writer._checkpoints.summary.renew(writer.state)
    note(writer, 2)
    assert writer.state.number == job.state.number + 1
    assert summaries(storage) == [name]


def test_a_repeated_erasure_renews_the_summary_that_a_crash_left(tmp_path, monkeypatch):
    storage = cold_index(tmp_path / "root", files=8, entries=2).inner
    name = summarise(storage)

    def erase_all():
        log = open_log(storage)
        erase(storage, log, EraseRequest("t", before_ms=BASE_MS + 10**9), ManualClock(), yes=True)

    def end(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as crash:
        crash.setattr(Summary, "renew", end)
        with pytest.raises(KeyboardInterrupt):
            erase_all()
    assert summaries(storage) == [name]
    erase_all()
    assert summaries(storage) == []


def test_an_index_that_this_process_wrote_is_not_parsed_again(monkeypatch):
    parts = {"a": (7, b"xyz"), "b": (0, b"")}
    index, data = Index.of(parts), encode(parts)
    assert encode(parts, index) == data
    parsed = []
    load = summary_module.load
    monkeypatch.setattr(summary_module, "load", lambda *given: parsed.append(given) or load(*given))
    assert decode(data, "name", index) == parts and not parsed
    # the summary of another process
    assert decode(encode({"c": (1, b"z")}), "name", index) == {"c": (1, b"z")} and len(parsed) == 1
    with pytest.raises(CorruptFile, match="length"):
        decode(data, "name", Index(index.data, index.rows[1:]))


def test_verify_finds_a_damaged_summary(tmp_path):
    made = cold_index(tmp_path / "root", files=10, entries=2)
    name = summarise(made.inner)

    def findings():
        report = Report()
        check_storage(made.inner, {}, report, lambda *_: None, deep=True, threads=1)
        return [(one.file, one.part) for one in report.findings]

    assert findings() == []
    data = bytearray(made.inner.get(name))
    data[len(data) // 2] ^= 1
    made.inner.put(name, bytes(data))
    assert findings() == [(name, "checkpoint")]
