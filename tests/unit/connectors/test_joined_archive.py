"""Small archived files are joined: each message, entry and erasure stays as it was, whatever happens meanwhile."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService, MergeOptions
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.connectors.archive.archiver import ColumnArchiver
from tiered_index.connectors.archive.columns import SHARED, ArchiveFormat, ArchiveSearch, record_at
from tiered_index.connectors.archive.erasure import columns_to_erase
from tiered_index.connectors.archive.log import ColumnLog
from tiered_index.connectors.files import row_archive
from tiered_index.connectors.kafka import columns as kafka
from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.merge_run import merge
from tiered_index.service.jobs.orphans import find_orphans
from tiered_index.service.jobs.segments import joining
from tiered_index.service.jobs.segments.joining import LEAST, join_segments
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import IndexItem

WORDS = ArchiveFormat("archived words", "tiered_index.words", 1, pa.schema({**SHARED, "word": pa.string()}), ("word",))
STORES = {"words": "words:-/t/0", "kafka": "kafka:c/t/0", "rows": "rows:-/t/0"}
FORMS = {"words": WORDS, "kafka": kafka.FORMAT, "rows": row_archive.FORMAT}
NOTES = {kafka.KEYS_NOTE: "[]"}
ITEM = IndexItem(topic="t", topic_id=0, key_hash=0, queue_id=0, offset=0, size=1, timestamp_ms=0)
MORE = {
    "words": lambda at: {"word": f"word {at}"},
    "kafka": lambda at: {
        "partition": 0,
        "key": b"k%d" % at,
        "value": None if at % 7 == 3 else b"value %d" % at,
        "timestampType": 0,
        "headers": [{"key": "h", "value": b"%d" % at}] if at % 3 else [],
    },
    "rows": lambda at: {"file": f"/logs/{at // 20}", "row": at, "line": None, "size": 9, "text": b"text %d" % at},
}


class Archive:
    """An index with an archive of small files, and what it answers."""

    def __init__(self, kind, root):
        self.storage = FaultStorage(MemoryStorage())
        self.form, self.store, self.more = FORMS[kind], STORES[kind], MORE[kind]
        settings = {"slots": 97, "items": 5_000, "background": False, "environment": False}
        self.clock = ManualClock(SystemClock().now_ms())
        self.index = IndexService.open(root=root, storage_backend=self.storage, clock=self.clock, **settings)

    def table(self, begin, end, time=lambda at: 1_000 + at):
        rows = [
            {"topic": "t", "offset": at, "timestamp": time(at), "keys": [f"k{at}", f"all{at % 2}"]} | self.more(at)
            for at in range(begin, end)
            if at % 5 != 4
        ]
        return pa.Table.from_pylist(rows, self.form.schema)

    def send(self, begin, count=LEAST, size=10, notes=None, time=lambda at: 1_000 + at):
        archiver = ColumnArchiver(self.index, self.form)
        for at in range(begin, begin + count * size, size):
            archiver.send(self.store, at, at + size, self.table(at, at + size, time), NOTES | (notes or {}))
        return archiver.name()

    def log(self, storage=None):
        log = StorageLog(storage or self.storage, SystemClock())
        log.open()
        return log

    def segments(self):
        self.index.segment_archive.refresh()
        return [*self.index.segment_archive.segments().of(self.store)]

    def ranges(self):
        return [(segment.start, segment.end) for segment in self.segments()]

    def answers(self, end):
        """What `message`, `erase` and `ingest archive:` read: records by offset, their numbers, entries."""
        self.segments()
        archive = self.index.segment_archive
        records = [record_at(archive, self.store, at, ArchiveSearch(item=ITEM)).row.to_pylist() for at in range(end)]
        log = ColumnLog(self.form, archive, self.store, bool)
        entries = [row for batch in log.batches(None) for row in batch.columns.to_pylist()]
        counts = {}
        for key in ("all0", "k3", "k18"):
            find = columns_to_erase(self.form, EraseRequest("t", (key,)))(2_000_000, True)
            counts[key] = sum(find(archive, segment).messages for segment in archive.segments().of(self.store))
        return records, entries, counts


@pytest.fixture(params=[*FORMS])
def archive(request, tmp_path):
    made = Archive(request.param, tmp_path / "root")
    yield made
    made.index.abandon()


@pytest.fixture
def words(tmp_path):
    made = Archive("words", tmp_path / "root")
    yield made
    made.index.abandon()


def test_a_merge_joins_small_files_and_all_answers_stay(archive):
    archive.send(0, 20)
    before, old = archive.answers(200), archive.segments()
    report = merge(archive.storage, archive.log(), SystemClock(), MergeOptions())
    assert (report.segments_joined, report.segments_made, report.left) == (20, 1, ())
    (whole,) = archive.segments()
    assert (whole.start, whole.end, whole.rows, whole.source) == (0, 200, 160, None)
    assert (whole.times, whole.published_ms) == ((1_000, 1_198), max(segment.published_ms for segment in old))
    assert archive.answers(200) == before
    # the follower goes on behind it
    assert ColumnArchiver(archive.index, archive.form).end(archive.store) == 200
    assert archive.index.storage.get_range(old[3].name, 0, 4) == b"PAR1"
    later = join_segments(archive.log())
    assert (later.segments, later.made) == (0, 0)


def test_an_erasure_after_the_join_and_before_it_leaves_the_same_messages(archive):
    request = EraseRequest("t", ("all0",))

    def erase_now():
        find = columns_to_erase(archive.form, request)
        return erase(archive.storage, archive.log(), request, SystemClock(), yes=True, now=True, messages=find)

    archive.send(0, LEAST)
    join_segments(archive.log())
    assert erase_now().messages_erased == 32
    (erased,) = archive.segments()
    assert erased.source is not None
    archive.send(80, LEAST)
    assert erase_now().messages_erased == 32
    # those of which messages are erased are joined only with such
    archive.send(160, LEAST)
    assert (join_segments(archive.log()).made, archive.ranges()) == (2, [(0, 160), (160, 240)])
    whole, rest = archive.segments()
    assert (whole.source is None, rest.source is None) == (False, True)
    offsets = archive.form.read(archive.index.segment_archive, whole).records["offset"].to_pylist()
    assert offsets == [at for at in range(160) if at % 2 and at % 5 != 4]


def test_what_is_not_alike_or_not_worth_it_stays_apart(words):
    words.send(0, LEAST - 1)
    words.send(100, LEAST, notes={"id": "a"})
    words.send(100 + LEAST * 10, LEAST, notes={"id": "b"})
    words.send(400, LEAST, time=lambda at: None if at % 10 == 2 else at)
    before, ranges = words.ranges(), [(at, at + 10) for at in range(0, (LEAST - 1) * 10, 10)]
    assert join_segments(words.log()).made == 2
    timeless = [(at, at + 10) for at in range(400, 400 + LEAST * 10, 10)]
    middle = 100 + LEAST * 10
    assert words.ranges() == [*ranges, (100, middle), (middle, middle + LEAST * 10), *timeless]
    assert before[0] == words.ranges()[0]


def test_files_that_were_uploaded_more_than_a_day_apart_stay_apart(words):
    words.send(0, LEAST - 1)
    words.clock.advance(86_401)
    words.send((LEAST - 1) * 10, LEAST - 1)
    assert join_segments(words.log()).made == 0
    words.clock.advance(86_400)
    words.send((LEAST - 1) * 20, 1)
    assert join_segments(words.log()).made == 1
    assert words.ranges()[LEAST - 1 :] == [((LEAST - 1) * 10, (LEAST - 1) * 20 + 10)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_each_request_leaves_the_old_files_or_the_new_one(tmp_path, when):
    made, before = 0, None
    for nth in itertools.count(1):
        archive = Archive("words", tmp_path / str(nth))
        try:
            archive.send(0, LEAST, size=2)
            old, whole = archive.ranges(), [(0, LEAST * 2)]
            before = before or archive.answers(LEAST * 2)
            storage = FaultStorage(archive.storage)
            storage.fail("*", nth=nth, when=when)
            with contextlib.suppress(TieredIndexError):
                join_segments(archive.log(storage))
            struck = storage.calls() >= nth
            assert archive.ranges() in (old, whole)
            made += archive.ranges() == whole
            assert archive.answers(LEAST * 2) == before
            join_segments(archive.log())
            assert archive.ranges() == whole
        finally:
            archive.index.abandon()
        if not struck:
            break
    assert nth > 10 and made


def test_a_damaged_file_is_named_and_those_beside_it_are_joined(words):
    words.send(0, 2 * LEAST + 1)
    damaged = words.segments()[LEAST]
    words.storage.delete_many([damaged.name])
    joined = join_segments(words.log())
    assert (joined.segments, joined.made) == (2 * LEAST, 2)
    ((name, reason),) = joined.damaged
    assert name == damaged.name and "the storage does not have it" in reason
    middle = LEAST * 10
    assert words.ranges() == [(0, middle), (middle, middle + 10), (middle + 10, 2 * middle + 10)]
    with pytest.raises(CorruptFile):
        words.answers(middle + 10)


def test_an_erasure_that_is_faster_is_planned_again(words, monkeypatch):
    words.send(0, LEAST)
    request, raced = EraseRequest("t", ("k3",)), []
    run = joining.JoinTask.run

    def after_another(task, *of_task):
        result = run(task, *of_task)
        if not raced:
            raced.append(1)
            find = columns_to_erase(words.form, request)
            erase(words.storage, words.log(), request, SystemClock(), yes=True, now=True, messages=find)
            words.send(LEAST * 10, 1)
        return result

    monkeypatch.setattr(joining.JoinTask, "run", after_another)
    join_segments(words.log())
    # the first file is now an erased one, and stays apart; what came meanwhile is joined
    assert words.ranges() == [(0, 10), (10, LEAST * 10 + 10)]
    records, _, counts = words.answers(LEAST * 10 + 10)
    assert (records[3], records[5][0]["word"], counts["k3"]) == ([], "word 5", 0)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_a_file_whose_record_came_late_is_not_archived_beside_the_joined_one(words, is_known):
    words.send(0, LEAST - 1)
    begin, end = LEAST * 10 - 10, LEAST * 10
    archiver = ColumnArchiver(words.index, words.form)
    archiver.send(words.store, begin, end, words.table(begin, end), NOTES)
    away = partial(words.storage.fail, "*", times=None)
    words.storage.meanwhile("put_if_absent", away, when="after", name_prefix="log/")
    words.storage.fail("put_if_absent", when="after", name_prefix="log/")
    with pytest.raises(TieredIndexError):
        archiver.name()
    words.storage.clear()
    assert join_segments(words.log()).made == 1
    if is_known:
        assert words.ranges() == [(0, end)]
    # the outcome was unknown, so the writer sends the file again
    archiver = ColumnArchiver(words.index, words.form)
    assert archiver.send(words.store, begin, end, words.table(begin, end), NOTES) is not is_known
    assert (archiver.name(), words.ranges()) == (0, [(0, end)])


def test_old_files_are_deleted_once_they_are_old(words):
    words.send(0, LEAST)
    old = {segment.name for segment in words.segments()}
    join_segments(words.log())
    (whole,) = words.segments()
    assert {info.name for info in words.storage.list("segments/")} == {*old, whole.name}
    assert find_orphans(words.storage, words.log(), removed_s=None).objects == ()
    orphans = find_orphans(words.storage, words.log(), removed_s=0)
    assert {info.name for info in orphans.objects} == old


def test_a_writer_joins_files_once_they_are_many_or_a_day_old(archive):
    worker = archive.index._parts.merger
    archive.send(0, LEAST)
    archive.index.run_lifecycle()
    before = archive.answers(LEAST * 10)
    archive.index.run_merge()
    # more may follow
    assert len(archive.segments()) == LEAST
    archive.clock.advance(86_400)
    archive.index.run_merge()
    assert (archive.ranges(), worker.segments_joined) == ([(0, LEAST * 10)], LEAST)
    assert archive.answers(LEAST * 10) == before
    # as many as are joined at once
    archive.send(LEAST * 10, joining.MOST, size=2)
    archive.clock.advance(60)
    archive.index.run_merge()
    assert len(archive.segments()) == 1 + joining.MOST, "it looks every ten minutes"
    archive.clock.advance(600)
    archive.index.run_merge()
    assert len(archive.segments()) <= 2


def test_a_writer_rests_between_the_files_that_it_joins_and_takes_no_lock_to_send_them(words, monkeypatch):
    words.send(0, LEAST)
    words.index.run_lifecycle()
    words.clock.advance(86_400)
    worker, rests = words.index._parts.merger, []
    monkeypatch.setattr(worker, "_rest", rests.append)

    def put_meanwhile():
        with ThreadPoolExecutor(1) as pool:
            # in another thread, which waits if one of the locks is held
            locks = words.index._parts.round_locks
            others = [lock for lock in locks if lock is not worker.lock]
            assert all(pool.submit(lock.acquire, timeout=5).result() for lock in others)
            for lock in others:
                pool.submit(lock.release).result()
            words.index.put("t", 0, "k", 1_000, 1, 5_000)

    words.storage.meanwhile("put", put_meanwhile, name_prefix="segments/")
    words.index.run_merge()
    assert (rests, worker.segments_joined) == ([8] * LEAST, LEAST)
    assert [item.offset for item in words.index.query("t", "k")] == [1_000]


def test_a_writer_that_was_overtaken_or_finds_damage_leaves_the_files(words):
    words.send(0, LEAST)
    words.index.run_lifecycle()
    words.storage.delete_many([words.segments()[3].name])
    words.clock.advance(86_400)
    words.index.run_merge()
    assert len(words.segments()) == LEAST and words.index._parts.merger.segments_joined == 0
