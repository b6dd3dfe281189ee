"""``compaction = "spark"``: sealed files are staged, jobs compact and publish them, and the writer takes them over. Without Spark here."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter

import pytest

from tests.staging import Job, names_below
from tiered_index import IndexConfig, IndexReader
from tiered_index.errors import BackPressure, ConfigError, CorruptFile, StorageMisconfigured, StorageUnavailable, WriterFenced
from tiered_index.service.merge.run import MergeOptions, merge
from tiered_index.service.orphans import delete_orphans, find_orphans
from tiered_index.service.storage_log import StorageLog
from tiered_index.service.unpublished import MAX_AGE_S, JobOverdue
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.wrappers import WrapperStorage
from tiered_index.testing.disk_faults import SimulatedCrash
from tiered_index.testing.storage_faults import FaultStorage

T = 1_700_000_000_000 - 36_000_000
SPARK = {"compaction": "spark", "refresh_interval_s": 0, "compact_timeout_s": 600}


@pytest.fixture
def storage(clock):
    return MemoryStorage(clock=clock)


@pytest.fixture
def faulty(storage):
    return FaultStorage(storage)


@pytest.fixture
def open_spark(open_index, faulty):
    def make(root="root", **settings):
        return open_index(root, **{"storage_backend": faulty, **SPARK, **settings})

    return make


def fill(index, *offsets, seal=True):
    for offset in offsets:
        index.put("t", 0, f"k{offset % 3}", offset, 1, T - 1000 * offset, source="log", source_position=offset)
    if seal:
        index.seal()


def found(index):
    return sorted(item.offset for key in ("k0", "k1", "k2") for item in index.query("t", key, max_count=1000))


def places(index):
    return [handle.place for handle in index.files()]


def staged(storage):
    return names_below(storage, "staging/")


def holds(storage, clock, *offsets):
    """Whether a reader of the storage alone finds exactly these, each once."""
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert sum(handle.count for handle in reader.files()) == len(offsets)
        assert found(reader) == sorted(offsets)


def test_a_file_is_staged_compacted_elsewhere_and_adopted(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1, 2, 3)
    done = index.run_lifecycle()
    assert (done.staged, done.compacted, done.uploaded) == (1, 0, 0)
    assert places(index) == ["unsealed"] and found(index) == [1, 2, 3]
    (file,) = index.files()
    names = staged(storage)
    assert {name.rpartition(".")[2] for name in names} == {"ticket", "entries"}
    assert all(name.startswith(f"staging/{file.file_id}/") for name in names)
    assert not index.run_lifecycle().any()
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert not found(reader)
    assert Job(storage, clock).run() == {file.file_id}
    holds(storage, clock, 1, 2, 3)
    assert index.log_state.positions == {}
    done = index.run_lifecycle()
    assert (done.adopted, done.uploaded) == (1, 0)
    assert places(index) == ["storage"] and found(index) == [1, 2, 3]
    assert index.log_state.positions == {"log": 3}
    assert not staged(storage)
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    assert not index.run_lifecycle().any()


@pytest.mark.parametrize("preset", ["native", "rocketmq"])
def test_a_job_makes_the_bytes_that_the_writer_would_make(open_spark, storage, clock, tmp_path, preset):
    """Several batches, topics and a predecessor; the same root lives twice."""
    index = open_spark(preset=preset, items=200)
    fill(index, 1)
    for offset in range(2, 40):
        index.put(f"t{offset % 3}", offset % 5, ["a", f"k{offset}"], offset, 7, T + offset * 700, source="log", source_position=offset)
        if offset % 7 == 0:
            index.flush()
    index.seal()
    index.run_lifecycle()
    (job := Job(storage, clock)).run()
    made = {stored.file_id: storage.get(stored.name) for stored in job.log.state.objects.values()}
    index.abandon()
    shutil.copytree(tmp_path / "root", tmp_path / "again")
    local = open_spark("again", compaction="local")
    assert sorted(made) == [handle.file_id for handle in local.files()]
    for handle in local.files():
        local._lifecycle._compact(handle)
    for handle in local.files():
        assert bytes(handle.local.data) == made[handle.file_id]


class Told(WrapperStorage):
    """Counts requests for staged and published objects, by operation and folder."""

    def __init__(self, inner):
        super().__init__(inner)
        self.counts = Counter()

    def _around(self, call, act):
        if call.operation != "list" and call.operation != "list_uploads" and call.name.startswith(("staging/", "data/")):
            self.counts[call.operation] += call.requests
        return act()


def test_what_a_small_file_costs_beyond_the_local_path(open_spark, clock):
    """The figures of docs/spark.md."""

    def spent(folder, mode):
        told = Told(MemoryStorage(clock=clock))
        index = open_spark(folder, storage_backend=told, compaction=mode)
        fill(index, 1, 2, 3)
        index.run_lifecycle()
        if mode == "spark":
            Job(told, clock).run()
        index.run_lifecycle()
        counts = Counter(told.counts)
        assert len(index.log_state.files) == 1 and found(index) == [1, 2, 3]
        return counts

    local = spent("local", "local")
    assert local == {"put": 1, "head": 1}
    more = spent("spark", "spark") - local
    assert more["put"] == 2 and more["head"] == 2 and more["delete"] == 2
    assert more["get"] == 1 and more["get_range"] + more["get_suffix"] == 3
    assert set(more) <= {"put", "head", "delete", "get", "get_range", "get_suffix"}


def test_many_files_come_by_one_record_and_tables_take_them(open_spark, storage, clock):
    index = open_spark(local_keep_s=0)
    for start in (0, 10, 20):
        fill(index, *range(start, start + 5))
    index.run_lifecycle()
    before = index.log_state.number
    assert len(Job(storage, clock).run()) == 3
    assert index.run_lifecycle().adopted == 3
    assert index.log_state.number == before + 2, "the job's record, and one of positions"
    assert index.log_state.positions == {"log": 24}
    merge_all(storage, clock)
    index.run_lifecycle()
    holds(storage, clock, *(start + step for start in (0, 10, 20) for step in range(5)))


def merge_all(storage, clock):
    log = StorageLog(storage, clock)
    log.open()
    return merge(storage, log, clock, MergeOptions(window_s=3600, min_age_s=0, shard_bytes=1 << 20), threads=1)


def test_after_its_time_the_host_compacts_by_itself(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    clock.advance(599)
    assert not index.run_lifecycle().any()
    (job := Job(storage, clock)).look().compact()
    clock.advance(1)
    done = index.run_lifecycle()
    assert (done.compacted, done.uploaded) == (1, 1)
    assert places(index) == ["uploaded"] and not staged(storage)
    # the job was late: it takes back what it sent
    assert job.publish() == set() and job.reasons == ["is in the log already"]
    assert names_below(storage, "data/") == list(index.log_state.objects)
    holds(storage, clock, 1)
    assert Job(storage, clock).run() == set()


def test_a_clock_that_is_put_back_makes_no_file_wait_for_good(open_spark, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    clock._now_ms -= 5_000_000
    assert index.run_lifecycle().compacted == 1


def test_a_job_that_is_first_wins_over_the_hosts_upload(open_spark, faulty, storage, clock):
    index = open_spark(refresh_interval_s=10_000)
    fill(index, 1)
    index.run_lifecycle()
    clock.advance(601)
    faulty.fail("put", name_prefix="data/")
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    assert places(index) == ["compacted"]
    Job(storage, clock).run()
    index.run_lifecycle()
    assert places(index) == ["uploaded"] and found(index) == [1]
    assert index.log_state.positions == {"log": 1}
    assert names_below(storage, "data/") == list(index.log_state.objects) and not staged(storage)
    holds(storage, clock, 1)


def test_a_job_that_comes_between_upload_and_record_wins(open_spark, faulty, storage, clock):
    index = open_spark(refresh_interval_s=10_000)
    fill(index, 1)
    index.run_lifecycle()
    clock.advance(601)
    job = Job(storage, clock).look().compact()
    faulty.fail("put_if_absent", name_prefix="log/", error=lambda text: [job.publish(), StorageUnavailable(text)][1])
    with pytest.raises(StorageUnavailable):
        index.run_lifecycle()
    index.run_lifecycle()
    assert places(index) == ["uploaded"]
    assert names_below(storage, "data/") == list(index.log_state.objects) and len(index.log_state.objects) == 1
    holds(storage, clock, 1)


class Sneaks(FaultStorage):
    """Something happens just before the next log record is put."""

    before = None

    def put_if_absent(self, name, data):
        if name.startswith("log/") and self.before is not None:
            before, self.before = self.before, None
            before()
        super().put_if_absent(name, data)


@pytest.mark.parametrize("merged", [False, True])
def test_a_job_that_takes_the_very_log_number_wins(open_spark, storage, clock, merged):
    sneaks = Sneaks(storage)
    index = open_spark(storage_backend=sneaks, refresh_interval_s=10_000)
    fill(index, 1)
    index.run_lifecycle()
    clock.advance(601)
    job = Job(storage, clock).look().compact()

    def sneak():
        assert len(job.publish()) == 1
        if merged:
            merge_all(storage, clock)

    sneaks.before = sneak
    index.run_lifecycle()
    index.run_lifecycle()
    assert sneaks.before is None and found(index) == [1]
    assert index.log_state.positions == {"log": 1}
    assert len(index.log_state.objects) == 1 and bool(index.log_state.tables) == merged
    holds(storage, clock, 1)
    if not merged:
        assert names_below(storage, "data/") == list(index.log_state.objects)


@pytest.mark.parametrize("when", ["staged", "compacted", "restarted"])
def test_a_file_that_was_published_and_merged_away_does_not_come_again(open_spark, faulty, storage, clock, when):
    index = open_spark()
    fill(index, 1, 2)
    index.run_lifecycle()
    late = Job(storage, clock).look().compact()
    if when == "compacted":
        clock.advance(601)
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
        assert places(index) == ["compacted"]
    Job(storage, clock).run()
    assert merge_all(storage, clock).sources == 1
    assert late.publish() == set() and late.reasons == ["was published and merged meanwhile"]
    assert Job(storage, clock).run() == set()
    if when == "restarted":
        index.abandon()
        index = open_spark()
    index.run_lifecycle()
    assert found(index) == [1, 2]
    assert set(places(index)) == {"storage"}
    assert index.log_state.positions == {"log": 2}
    assert not index.log_state.files
    if when != "restarted":  # then nobody remembers: that is for `orphans`
        assert not staged(storage)
    holds(storage, clock, 1, 2)
    index.abandon()
    index = open_spark()
    assert found(index) == [1, 2] and index.durable_position("log") == 2


def test_nothing_of_a_fenced_writer_is_published(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    job = Job(storage, clock).look().compact()
    clock.advance(61)
    other = open_spark("other")
    fill(other, 2)
    other.run_lifecycle()
    assert job.publish() == set()
    assert "epoch 1, the log's is 2" in job.reasons[0]
    again = Job(storage, clock)
    assert again.run() == {other.files()[0].file_id}
    assert len(again.reasons) == 1 and "epoch 1" in again.reasons[0]
    with pytest.raises(WriterFenced):
        index.run_lifecycle()
    assert [handle.place for handle in index.files() if handle.is_local] == ["unsealed"]
    holds(storage, clock, 2)
    # its host comes back: what it has staged is asked for again, and not sent again
    index.abandon()
    other.close()
    clock.advance(61)
    (sent,) = (name for name in staged(storage) if name == job.tickets[0].object)
    index = open_spark()
    index.run_lifecycle()
    # what the other one's host had no time to sweep is gone: the log has it
    assert [name for name in staged(storage) if name.endswith(".entries")] == [sent]
    Job(storage, clock).run()
    index.run_lifecycle()
    holds(storage, clock, 1, 2)
    assert not staged(storage)


def test_a_restart_renews_tickets_and_keeps_their_time(open_spark, faulty, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    (entries,) = (name for name in staged(storage) if name.endswith(".entries"))
    clock.advance(300)
    index.abandon()
    index = open_spark()
    puts = faulty.calls("put")
    index.run_lifecycle()
    names = staged(storage)
    assert entries in names and len(names) == 2
    assert faulty.calls("put") - puts <= 2, "a ticket, and no entries"
    job = Job(storage, clock).look()
    assert [ticket.epoch for ticket in job.tickets] == [2] and not job.reasons
    clock.advance(300)
    assert index.run_lifecycle().compacted == 1
    assert not staged(storage)


def test_a_restart_as_local_compacts_what_was_staged_and_adopts_what_was_published(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    job = Job(storage, clock).look()
    job.compact(job.tickets[1].file_id).publish()
    index.abandon()
    index = open_spark(compaction="local")
    done = index.run_lifecycle()
    assert (done.compacted, done.uploaded, done.adopted) == (1, 1, 1)
    assert found(index) == [1, 2] and index.log_state.positions == {"log": 2}
    index.run_lifecycle()
    assert sorted(places(index)) == ["storage", "uploaded"]
    holds(storage, clock, 1, 2)


def test_positions_never_run_ahead_of_an_older_file(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    fill(index, 3)
    index.run_lifecycle()
    first, second, third = (handle.file_id for handle in index.files())
    Job(storage, clock).look().compact(third).publish()
    index.run_lifecycle()
    # the last file alone says position 3: its local copy stays, though the storage has it
    assert index.log_state.positions == {}
    assert [handle.place for handle in index.files()] == ["unsealed"] * 3
    Job(storage, clock).look().compact(first).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 1}
    assert [handle.place for handle in index.files()] == ["storage", "unsealed", "unsealed"]
    index.abandon()
    index = open_spark()
    assert index.durable_position("log") == 3
    index.run_lifecycle()
    Job(storage, clock).look().compact(second).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert [handle.place for handle in index.files()] == ["storage"] * 3
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_positions_wait_for_quarantine(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, seal=False)
    index.put("t", 0, "k0", 9, 1, 5_000, source="log", source_position=9)
    index.seal()
    index.run_lifecycle()
    main = next(handle.file_id for handle in index.files() if handle.lane == "main")
    Job(storage, clock).look().compact(main).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {}
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 9}
    holds(storage, clock, 1, 9)


def test_a_file_that_is_not_sealed_durably_is_compacted_here(open_spark, storage, clock):
    """After a restart it would go on where a job had seen its end."""
    index = open_spark()
    fill(index, 1, seal=False)
    index.flush()
    (file,) = index.files()
    file.failed = True
    index.seal()
    done = index.run_lifecycle()
    assert (done.staged, done.compacted, done.uploaded) == (0, 1, 1)
    holds(storage, clock, 1)


def test_staging_goes_in_parts(open_index, storage, clock):
    faulty = FaultStorage(storage)
    index = open_index(storage_backend=faulty, items=300_000, upload_part_bytes=5 << 20, **SPARK)
    count = 300_000 - 1
    index.put_batch({
        "topic": ["t"] * count, "queue_id": [0] * count, "key": [f"k{n % 1000}" for n in range(count)], "offset": list(range(count)),
        "size": [1] * count, "timestamp_ms": [T] * count,
    })  # fmt: skip
    index.seal()
    index.run_lifecycle()
    assert faulty.calls("begin_upload") == 1 and faulty.calls("upload_part") == 2
    assert not list(storage.list_uploads())
    assert len(Job(storage, clock).run()) == 1
    index.run_lifecycle()
    assert len(index.query("t", "k7", max_count=1000)) == 300


WRITER_CALLS = [
    ("put", "staging/", 1), ("put", "staging/", 2), ("head", "staging/", 1), ("head", "log/", 1), ("head", "log/", 2), ("head", "data/", 1),
    ("list", "staging/", 1), ("list_uploads", "staging/", 1), ("get_range", "data/", 1), ("put_if_absent", "log/", 1),
    ("delete", "staging/", 1), ("delete", "staging/", 2),
]  # fmt: skip


@pytest.mark.parametrize("error", [StorageUnavailable, SimulatedCrash], ids=["fails", "crash"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("operation", "prefix", "nth"), WRITER_CALLS)
def test_the_storage_fails_once_at_any_call_of_the_writer(open_spark, faulty, storage, clock, operation, prefix, nth, when, error):
    """Whatever fails, or whoever dies, the next rounds bring it to its end: nothing is lost, nothing is there twice."""
    index = open_spark(checkpoint_every=1000)
    fill(index, 1)
    fill(index, 2, 3)
    struck = []

    def strike(text):
        struck.append(text)
        return error(text)

    faulty.fail(operation, nth=nth, when=when, name_prefix=prefix, error=strike)

    def work(index):
        try:
            index.run_lifecycle()
        except StorageUnavailable:
            pass
        except SimulatedCrash:
            index.abandon()
            index = open_spark(checkpoint_every=1000)
        assert found(index) == [1, 2, 3]
        return index

    for _ in range(3):
        index = work(index)
        Job(storage, clock).run()
    assert struck
    index = work(index)
    index.run_lifecycle()
    assert places(index) == ["storage"] * 2
    assert index.log_state.positions == {"log": 3}
    holds(storage, clock, 1, 2, 3)
    assert names_below(storage, "data/") == sorted(index.log_state.objects)
    clock.advance(10 * 86_400)
    delete_orphans(storage, find_orphans(storage, StorageLog(storage, clock), clock))
    assert not staged(storage)


JOB_CALLS = [
    ("list", "staging/", 1), ("get", "staging/", 1), ("get_range", "staging/", 1), ("get_range", "staging/", 3), ("put", "data/", 1),
    ("head", "data/", 1), ("head", "data/", 2), ("put_if_absent", "log/", 1),
]  # fmt: skip
OF_ONE_FILE = {("get_range", "staging/"), ("put", "data/"), ("head", "data/")}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("operation", "prefix", "nth"), JOB_CALLS)
def test_the_storage_fails_once_at_any_call_of_a_job(open_spark, faulty, storage, clock, operation, prefix, nth, when):
    index = open_spark()
    fill(index, 1)
    fill(index, 2, 3)
    index.run_lifecycle()
    faulty.fail(operation, nth=nth, when=when, name_prefix=prefix)
    if (operation, prefix) in OF_ONE_FILE:
        job = Job(faulty, clock)
        assert len(job.run()) == 1
        assert [r.left.startswith("StorageUnavailable: ") for r in job.results if r.failed] == [True]
    else:
        with pytest.raises(StorageUnavailable):
            Job(faulty, clock).run()
    index.run_lifecycle()
    assert found(index) == [1, 2, 3]
    Job(faulty, clock).run()
    index.run_lifecycle()
    assert places(index) == ["storage"] * 2 and found(index) == [1, 2, 3]
    holds(storage, clock, 1, 2, 3)
    clock.advance(2 * 86_400)
    delete_orphans(storage, find_orphans(storage, Job(storage, clock).log, clock))
    assert names_below(storage, "data/") == sorted(index.log_state.objects)


def test_a_storage_that_is_down_holds_nothing_up_but_staging(open_spark, faulty, storage, clock):
    index = open_spark()
    fill(index, 1)
    faulty.fail("*", times=None)
    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
    fill(index, 2)
    assert found(index) == [1, 2]
    faulty.clear()
    assert index.run_lifecycle().staged == 2


@pytest.mark.parametrize("operation", ["list", "list_uploads", "put"])
def test_a_storage_that_refuses_staging_for_good_makes_the_host_compact_in_time(open_spark, faulty, storage, clock, operation):
    """All files at once: the clock of each runs since it was sealed, not since those before it had their turn."""
    index = open_spark()
    for start in (0, 10, 20):
        fill(index, start, start + 1)
    faulty.fail(operation, name_prefix="staging/", times=None, error=StorageMisconfigured)
    for seconds, left in ((599, 3), (1, 3), (0, 0)):
        assert places(index).count("unsealed") == 3
        with contextlib.suppress(StorageMisconfigured):
            index.run_lifecycle()
        assert places(index).count("unsealed") == left, seconds
        clock.advance(seconds)
    assert places(index) == ["uploaded"] * 3 and index.log_state.positions == {"log": 21}
    holds(storage, clock, 0, 1, 10, 11, 20, 21)


def damage(file):
    """Flip a bit of the second entry of an unsealed file."""
    data = bytearray(file.path.read_bytes())
    data[file.layout.entry_position(2)] ^= 1
    file.path.write_bytes(bytes(data))


@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
@pytest.mark.parametrize("down", [False, True], ids=["", "down"])
@pytest.mark.parametrize("merged", [False, True], ids=["published", "merged"])
def test_a_damaged_local_copy_of_what_was_published_is_let_go_of(open_spark, faulty, storage, clock, tmp_path, merged, down, journal):
    """Whether the storage can be asked at the start or not; the source need not send what a journal says is there."""
    index = open_spark()
    fill(index, 1, 2, 3)
    index.run_lifecycle()
    (file,) = index.files()
    index.abandon()
    Job(storage, clock).run()
    if merged:
        merge_all(storage, clock)
    damage(file)
    if not journal:
        file.journal_path.unlink()
    if down:
        faulty.fail("*", times=None)
    index = open_spark()
    if down:
        with pytest.raises((CorruptFile, StorageUnavailable)):
            found(index)
        faulty.clear()
    else:
        assert found(index) == [1, 2, 3]
        assert index.durable_position("log") == (3 if journal else None)
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    # nothing says positions where no journal is
    expected = {"log": 3} if journal else {}
    assert index.log_state.positions == expected
    fill(index, 4)
    index.run_lifecycle()
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 4}
    assert not list((tmp_path / "root" / "unsealed").glob(f"{file.file_id}*"))
    assert merged or not staged(storage), "what was merged away before the start is for `orphans`"
    holds(storage, clock, 1, 2, 3, 4)


def test_the_position_of_a_damaged_copy_waits_for_an_older_file(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1)
    fill(index, 2, 3)
    index.run_lifecycle()
    first, second = index.files()
    index.abandon()
    Job(storage, clock).look().compact(second.file_id).publish()
    damage(second)
    for _ in range(2):
        index = open_spark()
        index.run_lifecycle()
        assert found(index) == [1, 2, 3] and index.durable_position("log") == 3
        assert index.log_state.positions == {}
        assert list((tmp_path / "root" / "unsealed").glob(f"{second.file_id}*"))
        index.abandon()
    index = open_spark()
    index.run_lifecycle()
    assert Job(storage, clock).run() == {first.file_id}
    index.run_lifecycle()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("merged", [False, True], ids=["published", "merged"])
@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
def test_what_is_staged_heals_a_damaged_local_copy(open_spark, storage, clock, tmp_path, journal, merged):
    index = open_spark()
    fill(index, 1, 2, 3)
    index.run_lifecycle()
    (file,) = index.files()
    index.abandon()
    damage(file)
    if not journal:
        file.journal_path.unlink()
    index = open_spark()
    assert index.durable_position("log") == (3 if journal else None)
    with pytest.raises(CorruptFile):
        found(index)
    index.run_lifecycle()
    assert Job(storage, clock).run() == {file.file_id}
    if merged:
        merge_all(storage, clock)
    index.run_lifecycle()
    assert found(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    assert index.log_state.positions == ({"log": 3} if journal else {})
    assert not staged(storage) and not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_a_damaged_file_that_nobody_has_is_kept_and_told(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, 2, 3)
    (file,) = index.files()
    index.abandon()
    damage(file)
    for _ in range(2):
        index = open_spark()
        index.run_lifecycle()
        with pytest.raises(CorruptFile):
            found(index)
        assert index.durable_position("log") is None, "the source may send it again"
        assert file.path.exists() and file.journal_path.exists()
        index.abandon()


def test_a_bound_on_the_disk_pushes_back_until_jobs_make_room(open_spark, storage, clock):
    index = open_spark(disk_max_bytes=3_000, items=20)
    with pytest.raises(BackPressure):
        for offset in range(200):
            fill(index, offset)
    assert len(index.files()) > 1
    index.run_lifecycle()
    Job(storage, clock).run()
    index.run_lifecycle()
    index.flush()
    fill(index, 500)
    assert 500 in found(index)


@pytest.mark.parametrize(("mode", "lasting"), [("wrong", False), ("wrong", True), ("short", True)])
def test_damage_of_a_staged_file_stops_no_other_one(open_spark, faulty, storage, clock, mode, lasting):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    first, second = (handle.file_id for handle in index.files())
    faulty.corrupt("get_range", mode=mode, name_prefix=f"staging/{first}", times=None if lasting else 1)
    job = Job(faulty, clock)
    assert job.run() == ({second} if lasting else {first, second})
    assert [result.corrupt for result in job.results if result.left] == [True] * lasting
    faulty.clear()
    clock.advance(601)
    index.run_lifecycle()
    holds(storage, clock, 1, 2)


@pytest.mark.parametrize("error", [StorageUnavailable, lambda text: OSError(28, text)], ids=["storage", "disk"])
def test_a_file_whose_task_fails_again_and_again_stops_no_other_one(open_spark, storage, clock, error):
    index = open_spark()
    for offset in (1, 2, 3):
        fill(index, offset)
    index.run_lifecycle()
    *others, last = (handle.file_id for handle in index.files())
    faulty = FaultStorage(storage)
    faulty.fail("get_range", name_prefix=f"staging/{last}", times=None, error=error)
    job = Job(faulty, clock)
    assert job.run() == set(others)
    assert [result.ticket.file_id for result in job.results if result.failed] == [last]
    assert Job(faulty, clock).run() == set()
    assert names_below(storage, "data/") == sorted(job.log.state.objects) and len(job.log.state.objects) == 2
    assert Job(storage, clock).run() == {last}
    index.run_lifecycle()
    holds(storage, clock, 1, 2, 3)


def test_a_flipped_bit_among_staged_entries_is_found(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, 2, 3)
    index.run_lifecycle()
    job = Job(storage, clock).look()
    (ticket,) = job.tickets
    data = bytearray(storage.get(ticket.object))
    data[ticket.entries_bytes - 1] ^= 4
    storage.put(ticket.object, data)
    assert job.compact().publish() == set() and job.results[0].corrupt and "do not match their CRC32" in job.reasons[0]
    assert not names_below(storage, "data/")


def test_a_damaged_ticket_is_told(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    (name,) = (name for name in staged(storage) if name.endswith(".ticket"))
    storage.put(name, storage.get(name)[:-1])
    job = Job(storage, clock)
    assert job.run() == set() and job.left[0].corrupt and name in job.reasons[0]


def test_a_staged_object_that_is_gone_is_left(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    job = Job(storage, clock).look()
    storage.delete(job.tickets[0].object)
    assert job.compact().publish() == set() and "gone" in job.reasons[0]
    assert not names_below(storage, "data/")


def test_an_object_of_another_size_is_not_believed(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    Job(storage, clock).run()
    (name,) = names_below(storage, "data/")
    whole = storage.get(name)
    storage.put(name, whole[:-1])
    with pytest.raises(CorruptFile, match="local file is kept"):
        index.run_lifecycle()
    assert places(index) == ["unsealed"] and found(index) == [1]
    storage.put(name, whole)
    index.run_lifecycle()
    assert places(index) == ["storage"] and found(index) == [1]


def test_two_jobs_publish_a_file_once(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    index.run_lifecycle()
    one, two = Job(storage, clock).look().compact(), Job(storage, clock).look().compact()
    assert len(one.publish()) == 1 and two.publish() == set()
    assert names_below(storage, "data/") == list(one.log.state.objects)
    holds(storage, clock, 1)


def test_orphans_know_what_is_staged(open_spark, storage, clock):
    index = open_spark(compact_timeout_s=10**9)
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    storage.put("staging/000000000000000-000000000000/aa.entries", b"nobody asks for this")
    storage.begin_upload("staging/000000000000000-000000000000/bb.entries")
    log = Job(storage, clock).log

    def orphans():
        return find_orphans(storage, log, clock, older_than_s=3600)

    assert not orphans().objects
    clock.advance(3601)
    assert [info.name[-10:] for info in orphans().objects] == ["aa.entries"] and len(orphans().uploads) == 1
    job = Job(storage, clock).look()
    job.compact(job.tickets[0].file_id).publish()
    index.abandon()
    assert {info.name.split("/")[1] for info in orphans().objects} == {"000000000000000-000000000000", job.tickets[0].file_id}
    merge_all(storage, clock)
    delete_orphans(storage, orphans())
    assert {name.split("/")[1] for name in staged(storage)} == {job.tickets[1].file_id}


@pytest.mark.parametrize("moment", ["find", "delete"])
def test_orphans_leave_what_a_writer_asks_for_again_meanwhile(open_spark, storage, clock, moment):
    """Its host was away for days; it comes back while the sweep has its old ticket's name, or has judged it."""
    fill(index := open_spark(compact_timeout_s=10**7), 1, 2, 3)
    index.run_lifecycle()
    index.abandon()
    clock.advance(5 * 86400)
    came_back = []

    def come_back():
        if not came_back:
            came_back.append(open_spark(compact_timeout_s=10**7))
            came_back[0].run_lifecycle()

    class Meanwhile(FaultStorage):
        def get(self, name):
            if name.startswith("staging/") and moment == "find":
                come_back()
            return super().get(name)

    log = Job(storage, clock).log
    if moment == "delete":
        log.claim_epoch()  # another writer has taken over: the ticket is of a fenced one
    orphans = find_orphans(Meanwhile(storage), log, clock)
    assert len(orphans.objects) == (2 if moment == "delete" else 0)
    come_back()
    asked = set(staged(storage))
    deleted = delete_orphans(storage, orphans)
    assert not deleted.objects and set(staged(storage)) == asked
    assert len((job := Job(storage, clock)).run()) == 1 and not job.reasons
    holds(storage, clock, 1, 2, 3)


def test_tickets_of_a_fenced_writer_cost_no_more_from_day_to_day_and_are_swept(open_spark, storage, clock):
    fill(index := open_spark(), 1)
    index.run_lifecycle()
    index.abandon()
    log = Job(storage, clock).log
    log.claim_epoch()
    faulty = FaultStorage(storage)
    costs = []
    for number in range(3):
        for step in range(10):
            log.say(log.state.epoch, {"x": 10 * number + step})
        before = faulty.calls("get")
        assert Job(faulty, clock).look().left
        costs.append(faulty.calls("get") - before)
    assert costs == [2, 2, 2], "a checkpoint and the ticket"
    assert not find_orphans(storage, log, clock).objects
    clock.advance(86_401)
    before = faulty.calls("get")
    assert len(find_orphans(faulty, log, clock).objects) == 2
    assert faulty.calls("get") - before == 1
    delete_orphans(storage, find_orphans(storage, log, clock))
    assert not staged(storage)
    again = open_spark()  # nothing is lost: its host has the file
    assert again.run_lifecycle().staged == 1
    Job(storage, clock).run()
    holds(storage, clock, 1)


def test_a_compaction_that_took_too_long_is_not_published(open_spark, storage, clock):
    fill(index := open_spark(compact_timeout_s=10**7), 1)
    index.run_lifecycle()
    job = Job(storage, clock).look().compact()
    clock.advance(MAX_AGE_S)
    with pytest.raises(JobOverdue, match="a compaction began"):
        job.publish()
    assert not names_below(storage, "data/")
    assert len(Job(storage, clock).run()) == 1
    holds(storage, clock, 1)


def test_a_publication_that_is_repeated_takes_nothing_back(open_spark, storage, clock):
    fill(index := open_spark(), 1)
    index.run_lifecycle()
    job = Job(storage, clock).look().compact()
    assert len(job.publish()) == 1 and len(job.publish()) == 1
    holds(storage, clock, 1)


def test_settings_that_can_not_be():
    with pytest.raises(ConfigError, match="compaction"):
        IndexConfig(compaction="elsewhere")
    with pytest.raises(ConfigError, match="compact_timeout_s"):
        IndexConfig(compact_timeout_s=0)
