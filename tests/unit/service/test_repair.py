"""A repair restores each finding of `verify` from a good copy. An object without one is given up by name.

No answer is silently short.
"""

import os
import zlib
from collections import Counter
from itertools import product

import pytest

from tests.support.changes import replace
from tests.support.damage import flip as flip_file
from tests.support.damage import flip_object
from tests.support.merging import BASE_MS, DAY_S, HOUR_MS
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexConfig, IndexReader
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.journal import parse_journal
from tiered_index.format.trailer import FORMAT_VERSION, TAIL_SIZE
from tiered_index.service.jobs import repair
from tiered_index.service.jobs import verify as checks
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.lost import give_up
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.repair import Repairs
from tiered_index.service.jobs.rewriting import job
from tiered_index.service.jobs.verify import check_root, check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.records import LogRecord, LostObject
from tiered_index.service.root import Root
from tiered_index.storage.disk import Disk

WRITING = ("put", "put_if_absent")
READING = ("head", "get_range", "get", "list")


@pytest.fixture
def life(merging):
    """Four files of three hours each. The last hour of each file is the first hour of the next one."""
    life = merging(settings={"local_keep_s": 10**9})
    for number in range(4):
        for hour in range(3):
            at = BASE_MS + (number * 2 + hour) * HOUR_MS
            put(life, [(at + step * 60_000, f"k{step % 5}") for step in range(30)])
        life.publish()
    return life


def put(life, rows, topic="t"):
    for timestamp_ms, key in rows:
        offset = life.messages
        life.messages += 1
        life.model.put(topic, 1, key, offset, 9, timestamp_ms)
        life.questions.add((topic, key))
        life.index.put(topic, 1, key, offset, 9, timestamp_ms)


def flip(life, stored, position=None):
    flip_object(life.storage, stored.name, stored.trailer_position // 2 if position is None else position)


def remove(life, stored):
    life.storage.delete_many([stored.name])


def checked(life, root):
    report = Report()
    local = check_root(root, report, lambda *_: None) if root is not None else {}
    check_storage(life.storage, local, report, lambda *_: None, deep=True, threads=1)
    return report, local


def mend(life, root=None, storage=None, *, yes=True):
    folder = Root(life.folder / root, Disk()) if root is not None else None
    report, local = checked(life, folder)
    log = life.log() if storage is None else type(life.log())(storage, life.clock)
    return Repairs(storage or life.storage, log, folder, local).run(report, yes=yes)


def sound(life, *keys):
    """Check every byte, and every answer of a fresh reader and of the writer that was open before."""
    report, _ = checked(life, None)
    assert not report.findings
    assert sum(stored.count for stored in life.state.objects.values()) == life.messages
    life.index._lifecycle.refresh()
    life.check(questions=[("t", key) for key in keys] or None)


@pytest.mark.parametrize(("harm", "root"), [(flip, "root"), (remove, "root"), (remove, None)])
def test_an_object_is_put_back_from_the_roots_copy_or_an_upload_that_no_record_names(life, harm, root):
    first, *others = life.state.objects.values()
    number, copy = life.state.number, str(life.folder / "root" / "uploaded" / f"{first.file_id}.index")
    if root is None:
        copy = first.name.replace(".index", "0.index")
        life.storage.put(copy, life.storage.get(first.name))
    config = IndexConfig(storage="memory://here", cache_slot_groups=False, refresh_interval_s=10**6)
    with (
        IndexReader.open(config=life.index.config, storage_backend=life.storage, clock=life.clock) as beside,
        IndexReader.open(config=config, storage_backend=life.storage, clock=life.clock) as stored,
    ):
        before = [reader.query("t", "k1", max_count=1000).items for reader in (beside, stored)]
        harm(life, first)
        (planned,) = mend(life, root, yes=False)
        assert (planned.action, planned.source, planned.replaced_by) == ("restore", copy, None)
        assert life.state.number == number, "a dry run changes nothing"
        (done,) = mend(life, root)
        assert life.state.number == number + 1
        assert {*life.state.objects} == {done.replaced_by, *(o.name for o in others)} and done.object == first.name
        beside.refresh()
        if harm is flip:
            stored.refresh()
        # otherwise it looks for the object that took the place
        assert [reader.query("t", "k1", max_count=1000).items for reader in (beside, stored)] == before
    sound(life)
    assert mend(life, root) == [] and life.state.number == number + 1
    put(life, [(BASE_MS + 20 * HOUR_MS, "k1")])
    life.publish()
    life.later(3)
    delete_orphans(life.storage, find_orphans(life.storage, life.log()))
    sound(life)


def test_an_object_that_a_merge_has_removed_meanwhile_is_not_missing(life, monkeypatch):
    """A check of a large storage takes longer than the grace after which removed objects are deleted."""
    life.later()
    known = {*life.state.objects}
    check = checks.check_object

    def merged_first(*arguments, **how):
        monkeypatch.setattr(checks, "check_object", check)
        life.merge(DAY_S)
        assert life.sweep() == len(known)
        check(*arguments, **how)

    monkeypatch.setattr(checks, "check_object", merged_first)
    report, _ = checked(life, None)
    assert (report.findings, report.missing, report.status) == ([], [], "incomplete")
    assert {name for name, _ in report.unchecked} == known


def test_an_object_that_can_not_be_read_keeps_no_other_from_its_check(life):
    """For example, a sector of a disk is bad. A storage that is away ends the check."""
    unread, _, harmed, _ = life.state.objects.values()
    flip(life, harmed)
    storage, report = FaultStorage(life.storage), Report()
    storage.fail("get_range", times=None, name_prefix=unread.name)
    assert check_storage(storage, {}, report, lambda *_: None, deep=True, threads=1) == life.state
    assert {finding.file for finding in report.findings} == {harmed.name}
    assert [name for name, _ in report.unchecked] == [unread.name]
    storage.clear()
    storage.meanwhile("get_range", lambda: storage.fail("*", times=None))
    with pytest.raises(StorageUnavailable):
        check_storage(storage, {}, Report(), lambda *_: None, deep=True, threads=1)


def test_an_object_that_was_damaged_for_a_moment_or_is_of_a_newer_version_is_left_alone(life):
    """Readers of this version refuse a newer file and name its version. It is not damaged, so a repair keeps it."""
    first, *_ = life.state.objects.values()
    data, number = life.storage.get(first.name), life.state.number
    flip(life, first)
    report, _ = checked(life, None)
    life.storage.put(first.name, data)
    assert report.findings and Repairs(life.storage, life.log()).run(report, yes=True) == []
    newer = bytearray(data)
    newer[8 - TAIL_SIZE : 12 - TAIL_SIZE] = (FORMAT_VERSION + 1).to_bytes(4, "big")
    newer[-4:] = zlib.crc32(newer[-TAIL_SIZE:-4]).to_bytes(4, "big")
    life.storage.put(first.name, bytes(newer))
    assert [finding.file for finding in checked(life, None)[0].findings] == [first.name]
    assert mend(life) == [] and life.state.number == number


def test_a_repair_makes_no_entries_of_hidden_ones(life):
    """A merge left out hidden entries of a table, so nobody can make its entries of the messages again."""
    request = EraseRequest("t", keys=("k1",), before_ms=BASE_MS + 24 * HOUR_MS)
    erase(life.storage, life.log(), EraseRequest("t", queue_id=7), life.clock, yes=True)
    erase(life.storage, life.log(), request, life.clock, yes=True)
    life.later()
    life.merge(DAY_S)
    (table,) = life.state.objects.values()
    remove(life, table)
    number = life.state.number
    assert mend(life) == []
    planned = give_up(life.storage, life.log(), [table.name], dry_run=True)
    assert life.state.number == number, "a dry run changes nothing"
    assert give_up(life.storage, life.log(), [table.name]) == planned == [LostObject.of(table)]
    life.index._lifecycle.refresh()
    answer = life.index.query("t", "k2", max_count=1000)
    assert [lost.entries for lost in answer.lost] == [table.count] and not len(answer)


def test_an_object_that_was_merged_meanwhile_is_left_alone(life, monkeypatch):
    first, *_ = life.state.objects.values()
    data = life.storage.get(first.name)
    remove(life, first)
    check = job.Publication.check

    def merged_first(publication):
        monkeypatch.undo()
        check(publication)
        life.storage.put(first.name, data)
        life.later()
        life.merge(DAY_S)

    monkeypatch.setattr(job.Publication, "check", merged_first)
    (done,) = mend(life, "root")
    assert done.replaced_by is None
    assert not any(name.startswith(f"data/{first.file_id}") for name in life.state.objects)
    assert [info.name for info in life.storage.list(f"data/{first.file_id}/")] == [first.name]
    sound(life)


def test_an_upload_that_was_damaged_on_the_way_is_not_recorded(life, monkeypatch):
    first, *_ = life.state.objects.values()
    remove(life, first)
    send = repair.send_object

    def damaged(storage, name, *more):
        sent = send(storage, name, *more)
        flip_object(life.storage, name, sent.size_bytes // 4)
        return sent

    monkeypatch.setattr(repair, "send_object", damaged)
    number = life.state.number
    with pytest.raises(CorruptFile, match="does not verify"):
        mend(life, "root")
    assert life.state.number == number and not list(life.storage.list(f"data/{first.file_id}/"))


# a call that only reads changes nothing before it fails
@pytest.mark.parametrize(
    ("operation", "when"), [*product(WRITING, ("before", "after")), *((operation, "before") for operation in READING)]
)
def test_a_storage_that_fails_at_any_call_leaves_the_old_state_or_the_new_one(life, operation, when):
    first, *_ = life.state.objects.values()
    data = life.storage.get(first.name)
    outcomes = Counter()
    for nth in range(1, 100):
        faulty = FaultStorage(life.storage)
        named = next(name for name in life.state.objects if name.startswith(f"data/{first.file_id}/"))
        life.storage.delete_many([named])
        faulty.fail(operation, nth=nth, when=when)
        state = life.state
        try:
            (done,) = mend(life, "root", storage=faulty)
        except StorageUnavailable:
            after = life.state
            if after.objects == state.objects:
                outcomes["old"] += 1
                life.storage.put(named, data)
            else:
                outcomes["unheard"] += 1
        else:
            outcomes["new"] += 1
            assert life.state.objects.keys() - state.objects.keys() == {done.replaced_by}
        sound(life, "k1", "k4")
        if faulty.calls(operation) < nth:
            break
    assert outcomes["new"] and sum(outcomes.values()) > 1


@pytest.fixture
def both_forms(life):
    """A root with a damaged compacted file that also has its unsealed form, as after a crash. Return their paths."""
    faulty = FaultStorage(life.storage)
    faulty.fail("put", name_prefix="data/", times=None)
    life.index.close()
    life.index = life.open("root", storage_backend=faulty)
    put(life, [(BASE_MS + 20 * HOUR_MS + step * 60_000, f"k{step % 5}") for step in range(30)])
    life.index.seal()
    root = life.folder / "root"
    unsealed = {path: path.read_bytes() for path in (root / "unsealed").iterdir() if path.name[0].isdigit()}
    with pytest.raises(StorageUnavailable):
        life.index.run_lifecycle()
    life.index.abandon()
    # a crash before the unsealed form was deleted
    for path, data in unsealed.items():
        path.write_bytes(data)
    (compacted,) = (root / "compacted").iterdir()
    flip_file(compacted, compacted.stat().st_size // 2)
    return compacted, *sorted(unsealed)


def test_of_a_damaged_object_and_its_damaged_local_copy_none_is_deleted(life):
    first, *_ = life.state.objects.values()
    path = life.folder / "root" / "uploaded" / f"{first.file_id}.index"
    life.index.close()
    flip_object(life.storage, first.name, first.trailer_position // 2)
    flip_file(path, first.trailer_position // 3)
    assert mend(life, "root") == []
    assert path.exists() and first.name in life.state.objects


def test_a_damaged_compacted_file_is_dropped_and_compacted_again(life, both_forms):
    compacted, _, journal = both_forms
    (done,) = mend(life, "root")
    assert (done.object, done.action, done.source) == (str(compacted), "drop", str(journal))
    life.index = life.open("root")
    assert not compacted.exists() and not any("compacted again" in note for note in life.index.recovery_notes)
    life.publish()
    sound(life)


@pytest.mark.parametrize("harm", ["entries", "journal", "cut", "without its seal", "without its entries"])
def test_of_two_damaged_forms_of_a_file_none_is_deleted(life, both_forms, harm):
    """The compacted form may have the entries that the unsealed form lacks."""
    compacted, index, journal = both_forms
    if harm == "entries":
        known = parse_journal(journal.read_bytes(), str(journal), journal.stem)
        flip_file(index, known.layout.entry_position(5))
    elif harm == "journal":
        flip_file(journal, 60)
    elif harm == "cut":
        os.truncate(index, 4000)
    elif harm == "without its seal":
        os.truncate(journal, journal.read_bytes().rindex(b"seal"))
    else:
        index.unlink()
    before = {path: path.read_bytes() for path in both_forms if path.exists()}
    assert mend(life, "root") == []
    life.index = life.open("root")
    for _ in range(2):
        life.index.run_lifecycle()
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(CorruptFile):
        life.index.query("t", "k1", max_count=1000)
    partial = life.index.query("t", "k1", max_count=1000, allow_partial=True)
    assert (partial.status, [report.file for report in partial.failed]) == ("partial", [compacted.stem])


def test_a_damaged_checkpoint_is_deleted_and_a_wrong_repair_is_found(life):
    name = max(info.name for info in life.storage.list("checkpoint/"))
    life.storage.put(name, b"{}")
    assert [mended.action for mended in mend(life)] == ["drop"]
    assert name not in {info.name for info in life.storage.list("checkpoint/")}
    sound(life)
    first, second, *_ = life.state.objects.values()
    record = LogRecord(0, "repair", 0, "", 0, add=(replace(second, name="data/x/y.index"),), remove=(first.name,))
    life.log().append("a wrong repair", None, lambda state: record)
    report, _ = checked(life, None)
    assert any(finding.part == "repair" for finding in report.findings)
