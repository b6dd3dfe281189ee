"""With ``compaction = "spark"`` the writer uploads sealed files as they are, and merges compact them.

Damaged local copies and pending objects are reported, never trusted, and replaced if another copy exists. These tests
do not use Spark.
"""

import contextlib

import pytest
from msgspec import structs

from tests.integration.cli.command_lines import run_here
from tests.server.conftest import serving
from tests.support.damage import checked, flip, flip_object
from tests.support.pending import Job, T, fill, holds, merge_all, names_below, offsets_of, pending, places
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, ObjectNotFound, RootBehind, StorageMisconfigured
from tiered_index.service.jobs.copying import Copier
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

SPARK = {"compaction": "spark", "refresh_interval_s": 0, "compact_timeout_s": 600}


@pytest.fixture
def open_spark(open_index, faulty):
    def make(root="root", **settings):
        return open_index(root, **{"storage_backend": faulty, **SPARK, **settings})

    return make


@pytest.fixture
def upload(open_spark):
    """Return a function that opens an index and uploads a pending file with a message at each offset."""

    def make(*offsets, **settings):
        index = open_spark(**settings)
        fill(index, *offsets)
        index.run_lifecycle()
        return index

    return make


def test_a_file_is_uploaded_as_it_is_merged_elsewhere_and_adopted(open_spark, storage, clock, tmp_path):
    """Until then no reader of the storage, no position and no freshness counts its entries."""
    index = open_spark()
    fill(index, 1, 2, 3)
    done = index.run_lifecycle()
    assert (done.pending, done.compacted, done.uploaded) == (1, 0, 0)
    assert places(index) == ["unsealed"] and offsets_of(index) == [1, 2, 3]
    state = index.log_state
    assert not state.objects and [waiting.file_id for waiting in state.pending.values()] == [index.files()[0].file_id]
    assert (state.positions, state.newest_ms, state.as_of_ms) == ({}, None, None)
    assert names_below(storage, "data/") == [*state.pending]
    assert not index.run_lifecycle().any()
    with IndexReader.open(storage_backend=storage, clock=clock) as reader:
        assert not offsets_of(reader)
    assert len(Job(storage, clock).run()) == 1
    holds(storage, clock, 1, 2, 3)
    assert index.log_state.positions == {}
    done = index.run_lifecycle()
    assert (done.adopted, done.uploaded) == (1, 0)
    state = index.log_state
    assert places(index) == ["storage"] and offsets_of(index) == [1, 2, 3]
    assert (state.positions, state.as_of_ms) == ({"log": 3}, T - 1000)
    assert not state.pending and not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    assert not index.run_lifecycle().any()


def test_lists_of_files_name_pending_ones(open_spark, tmp_path):
    """Also without their writer, whose lookups find the entries in its local copy."""
    uri = (tmp_path / "storage").as_uri()
    index = open_spark(storage_backend=open_storage(uri))
    fill(index, 1, 2, 3)
    index.run_lifecycle()
    ((name, pending),) = index.log_state.pending.items()
    assert [row["state"] for row in index.files_table().to_pylist()] == ["unsealed"]
    with IndexReader.open(uri) as reader, serving(reader) as client:
        assert not offsets_of(reader)
        of_command = run_here("files", "--storage", uri, "--json").document
        of_service = client.get("/v1/files").json()
        for document in (of_command, of_service):
            (row,) = document["files"]
            shown = [row[column] for column in ("state", "object", "entries", "file_id")]
            assert shown == ["pending", name, 3, pending.file_id]
            assert document["totals"]["by_state"] == {"pending": 1} and document["totals"]["entries"] == 3
        assert client.get(f"/v1/files/{pending.file_id}").json() == row | {"topics": None}
        assert "1 pending file: lookups of the storage find" in run_here("files", "--storage", uri).out
        for file in (name, pending.file_id):
            refused = run_here("files", file, "--storage", uri)
            assert refused.code == 2 and f"{file} is pending: it can be read once" in refused.err
        assert [row["object"] for row in reader.files_table().to_pylist()] == [name]
        (summed,) = reader.du().to_pylist()
        assert (summed["state"], summed["entries"], summed["bytes"]) == ("pending", 3, pending.size_bytes)
        assert summed["usd_a_month"] > 0


def test_answers_are_complete_only_up_to_the_begin_of_a_pending_file(open_spark, storage, clock):
    """A merge of a later file does not say that the entries of the earlier one are there."""
    index = open_spark()
    begun_s = clock.now_ms() // 1000
    fill(index, 1)
    clock.advance(3600)
    index.put("t", 0, "k0", 9, 1, (begun_s + 3600) * 1000, source="log", source_position=9)
    index.seal()
    index.run_lifecycle()
    first, second = (handle.file_id for handle in index.files())
    assert Job(storage, clock).run(second) == {second}
    index.run_lifecycle()
    state = index.log_state
    assert (state.newest_ms, state.as_of_ms) == ((begun_s + 3600) * 1000, begun_s * 1000) and state.positions == {}
    assert Job(storage, clock).run() == {first}
    index.run_lifecycle()
    assert index.log_state.as_of_ms == index.log_state.newest_ms and index.log_state.positions == {"log": 9}


def test_after_its_time_the_host_compacts_by_itself_and_the_merge_deletes_its_objects(upload, storage, clock):
    index = upload(1)
    (waiting,) = index.log_state.pending
    clock.advance(599)
    assert not index.run_lifecycle().any()
    job = Job(storage, clock).look().compact()
    clock.advance(1)
    done = index.run_lifecycle()
    assert (done.compacted, done.uploaded) == (1, 1)
    assert places(index) == ["uploaded"] and not index.log_state.pending
    assert job.publish() == set()
    # the removed object stays for readers of the log, until a sweep after the grace
    assert names_below(storage, "data/") == sorted([*index.log_state.objects, waiting])
    holds(storage, clock, 1)
    assert Job(storage, clock).run() == set()
    # nor does a file wait permanently after a clock was set back
    fill(index, 2)
    assert index.run_lifecycle().pending == 1
    clock._now_ms -= 5_000_000
    # the first round follows the clock, as the storage's agrees
    assert sum(index.run_lifecycle().compacted for _ in range(2)) == 1


def test_a_restart_as_local_compacts_pending_files_and_lets_go_of_merged_ones(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    index.run_lifecycle()
    _, second = (handle.file_id for handle in index.files())
    Job(storage, clock).run(second)
    index.abandon()
    index = open_spark(compaction="local")
    index.run_lifecycle()
    assert offsets_of(index) == [1, 2] and index.log_state.positions == {"log": 2}
    assert sorted(places(index)) == ["storage", "uploaded"] and not index.log_state.pending
    holds(storage, clock, 1, 2)


@pytest.mark.parametrize("compaction", ["local", "spark"])
def test_another_root_merges_pending_files_of_a_lost_one_only_if_it_compacts_files(
    open_index, upload, storage, clock, compaction
):
    upload(1, 2).abandon()
    clock.advance(61)
    other = open_index("other", compaction=compaction, merge="1d", refresh_interval_s=0)
    other.run_lifecycle()
    other.run_merge()
    assert offsets_of(other) == ([1, 2] if compaction == "local" else [])
    assert bool(pending(storage, clock)) == (compaction == "spark")


def test_a_file_that_is_not_sealed_durably_is_compacted_here(open_spark, storage, clock):
    """After a restart the file would accept entries beyond the end that a merge has read."""
    index = open_spark()
    fill(index, 1, seal=False)
    index.flush()
    (file,) = index.files()
    file.failed = True
    index.seal()
    done = index.run_lifecycle()
    assert (done.pending, done.compacted, done.uploaded) == (0, 1, 1)
    holds(storage, clock, 1)


def test_positions_never_run_ahead_of_an_older_file(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    fill(index, 3)
    index.run_lifecycle()
    first, second, third = (handle.file_id for handle in index.files())
    Job(storage, clock).run(third)
    index.run_lifecycle()
    # only the last file has position 3, so its local copy stays, though the storage has its entries
    assert index.log_state.positions == {}
    assert [handle.place for handle in index.files() if handle.is_local] == ["unsealed"] * 3
    Job(storage, clock).run(first)
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 1}
    index.abandon()
    index = open_spark()
    assert index.durable_position("log") == 3 and offsets_of(index) == [1, 2, 3]
    index.run_lifecycle()
    Job(storage, clock).run(second)
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert {handle.place for handle in index.files()} == {"storage"}
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_a_file_of_the_quarantine_is_compacted_here_and_positions_wait_for_it(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, seal=False)
    index.put("t", 0, "k0", 9, 1, 5_000, source="log", source_position=9)
    index.seal()
    done = index.run_lifecycle()
    assert (done.pending, done.compacted, done.uploaded) == (1, 1, 1)
    assert [stored.lane for stored in index.log_state.objects.values()] == ["quarantine"]
    assert index.log_state.positions == {}
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 9}
    holds(storage, clock, 1, 9)


def ended(index, storage, clock):
    """Assert that the writer and merges end with each entry once, and that a sweep leaves what the log names."""
    for _ in range(2):
        Job(storage, clock).run()
        index.run_lifecycle()
    assert {*places(index)} == {"storage"} and offsets_of(index) == [1, 2, 3]
    assert index.log_state.positions == {"log": 3} and not index.log_state.pending
    holds(storage, clock, 1, 2, 3)
    clock.advance(10 * 86_400)
    delete_orphans(storage, find_orphans(storage, StorageLog(storage, clock)))
    assert names_below(storage, "data/") == sorted(index.log_state.objects)


@pytest.mark.parametrize("loser", ["writer", "merge"])
@pytest.mark.parametrize("is_merged_again", [False, True])
def test_the_log_accepts_the_writer_or_the_merge(open_spark, faulty, storage, clock, loser, is_merged_again):
    """Both have their objects in the storage before the first record. The loser deletes its own."""
    index = open_spark(refresh_interval_s=10_000)
    fill(index, 1, 2, 3)
    index.run_lifecycle()
    clock.advance(601)
    job = Job(storage, clock).look().compact()
    won = []

    def merge_first():
        won.extend(job.publish())
        if is_merged_again:
            merge_all(storage, clock)

    if loser == "writer":
        faulty.meanwhile("put_if_absent", merge_first, name_prefix="log/")
    index.run_lifecycle()
    assert (won if loser == "writer" else not job.publish()) and offsets_of(index) == [1, 2, 3]
    assert bool(index._lifecycle.refresh().tables) == (loser == "writer")
    ended(index, storage, clock) if loser == "writer" else holds(storage, clock, 1, 2, 3)
    sent = {name for name in names_below(storage, "data/") if name not in index.log_state.objects}
    assert len(sent) == (0 if loser == "writer" else 1), "the pending object stays until the sweep"


@pytest.mark.parametrize("journal", [True, False], ids=["", "no journal"])
@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "pending"])
def test_a_damaged_local_copy_is_dropped_once_its_file_is_merged(
    open_spark, upload, storage, clock, tmp_path, is_merged, journal
):
    """The journal has the file's position, so the source need not resend."""
    index = upload(1, 2, 3)
    (file,) = index.files()
    index.abandon()
    if is_merged:
        Job(storage, clock).run()
    flip(file.path, file.layout.entry_position(2))
    if not journal:
        file.journal_path.unlink()
    index = open_spark()
    assert is_merged or index.durable_position("log") == (3 if journal else None)
    if not is_merged:
        with pytest.raises(CorruptFile):
            offsets_of(index)
        index.run_lifecycle()
        assert Job(storage, clock).run() == {file.file_id}
    index.run_lifecycle()
    assert offsets_of(index) == [1, 2, 3] and set(places(index)) == {"storage"}
    # without a journal no local file has the positions
    assert index.log_state.positions == ({"log": 3} if journal else {})
    assert not list((tmp_path / "root" / "unsealed").glob(f"{file.file_id}*"))
    holds(storage, clock, 1, 2, 3)


def test_the_host_compacts_in_time_if_the_storage_always_refuses_pending_files(open_spark, faulty, storage, clock):
    """This applies to all files at once: the time of each begins at its seal, not after the files before it."""
    index = open_spark()
    for start in (0, 10, 20):
        fill(index, start, start + 1)
    faulty.fail("put", name_prefix="data/", times=None, error=StorageMisconfigured)
    for seconds, left in ((599, 3), (1, 3), (0, 0)):
        assert places(index).count("unsealed") == 3
        with contextlib.suppress(StorageMisconfigured):
            index.run_lifecycle()
        assert places(index).count("unsealed") == left, seconds
        clock.advance(seconds)
    faulty.clear()
    index.run_lifecycle()
    assert places(index) == ["uploaded"] * 3 and index.log_state.positions == {"log": 21}
    holds(storage, clock, 0, 1, 10, 11, 20, 21)


@pytest.mark.parametrize("part", ["entries", "document"])
def test_a_damaged_pending_object_is_never_merged_and_its_writer_compacts_the_file(upload, storage, clock, part):
    index = upload(1, 2, 3)
    (waiting,) = index.log_state.pending.values()
    flip_object(storage, waiting.name, waiting.trailer_position - 1 if part == "entries" else waiting.size_bytes - 20)
    with pytest.raises(CorruptFile, match="CRC32"):
        Job(storage, clock).run()
    assert names_below(storage, "data/") == [waiting.name]
    report = checked(storage)
    assert [finding.file for finding in report.findings] == [waiting.name]
    clock.advance(600)
    assert index.run_lifecycle().uploaded == 1
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("harm", ["damage", "loss"])
def test_a_copy_restores_a_pending_object_which_is_then_merged(upload, storage, clock, harm):
    index = upload(1, 2, 3)
    (waiting,) = index.log_state.pending.values()
    target = MemoryStorage(clock=clock)
    copy_job = Copier(storage, target, clock)
    copy_job.open()
    copy_job.run_once()
    flip_object(storage, waiting.name, 9) if harm == "damage" else storage.delete_many([waiting.name])
    # the root is lost with the object
    index.abandon()
    report = checked(storage)
    repairs = Repairs(storage, Job(storage, clock).log, standby=target)
    (planned,) = repairs.run(report, yes=False)
    assert (planned.object, planned.source) == (waiting.name, f"{target.uri}: {waiting.name}")
    (done,) = repairs.run(report, yes=True)
    assert pending(storage, clock) == [done.replaced_by] and done.replaced_by != waiting.name
    assert Job(storage, clock).run() == {waiting.file_id}
    holds(storage, clock, 1, 2, 3)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_lost_pending_object_is_given_up_and_sent_again_from_its_local_copy(
    open_spark, upload, storage, clock, is_open
):
    index = upload(1, 2, 3)
    (waiting,) = index.log_state.pending.values()
    storage.delete_many([waiting.name])
    with pytest.raises(ObjectNotFound):
        Job(storage, clock).run()
    if not is_open:
        index.abandon()
    assert [lost.name for lost in give_up(storage, Job(storage, clock).log, [waiting.file_id])] == [waiting.name]
    if not is_open:
        index = open_spark()
    index.run_lifecycle()
    assert offsets_of(index) == [1, 2, 3] or not is_open
    assert Job(storage, clock).run() == {waiting.file_id}
    holds(storage, clock, 1, 2, 3)


def test_a_sweep_keeps_pending_objects_and_deletes_those_of_earlier_versions(upload, storage, clock):
    index = upload(1, compact_timeout_s=10**9)
    storage.put("staging/000000000000000-000000000000/aa.entries", b"an earlier version put this")
    storage.put(f"staging/000000000000000-000000000000/{1:020d}.ticket", b"and this")
    clock.advance(3601)
    orphans = find_orphans(storage, Job(storage, clock).log, older_than_s=3600)
    assert [info.name.split("/")[0] for info in orphans.objects] == ["staging"] * 2
    delete_orphans(storage, orphans)
    merge_all(storage, clock)
    index.run_lifecycle()
    holds(storage, clock, 1)


def test_another_copy_of_the_root_with_other_entries_is_refused(open_spark, upload, storage, clock, tmp_path):
    index = upload(1, 2, 3)
    (file,) = index.files()
    (waiting,) = index.log_state.pending.values()
    index.log_state.pending[waiting.name] = structs.replace(waiting, count=2)
    with pytest.raises(RootBehind, match=waiting.name):
        index.run_lifecycle()
    assert file.path.exists()
