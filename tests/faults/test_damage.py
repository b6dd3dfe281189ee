"""Damaged files in every state: their bytes are never used, nothing is deleted, and answers name what is unreadable."""

import os
import struct
import traceback

import pytest

from tests.faults.conftest import ASK
from tests.support.damage import flip
from tests.support.log_records import open_log, publish
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.format.trailer import Tail

NOW_MS = 1_700_000_000_000


def beside(world):
    return IndexReader.open(root=world.root, storage_backend=world.storage, clock=world.clock)


def test_a_damaged_unsealed_file_fails_the_lookups_that_meet_it_and_is_kept(make_world):
    world = make_world()
    world.do("open 9 publish 4 flush abandon")
    (path,) = (p for p in (world.root / "unsealed").glob("*.index") if not p.name.startswith("0000"))
    flip(path, 28 + 8 * 7 + 36 + 5)
    before = {p: p.read_bytes() for p in (world.root / "unsealed").iterdir() if ".tmp" not in p.name}
    world.open()
    assert {p: p.read_bytes() for p in before} == before
    depths = set()
    for _ in range(3):
        with pytest.raises(CorruptFile, match=path.name) as raised:
            world.service.query("orders", "a")
        depths.add(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(depths) == 1  # the error is kept, and must not grow
    assert [problem.split(": ")[0] for problem in world.service.health()["problems"]] == [path.stem]
    result = world.service.query("orders", "a", max_count=1000, allow_partial=True)
    assert result.status == "partial"
    assert [report.file for report in result.failed] == [path.stem]
    assert "CRC32" in result.failed[0].error
    whole = {a.offset for a in world.model.query("orders", "a", max_count=None)}
    assert {i.offset for i in result} == {offset for offset in whole if offset <= 9}
    # lookups that do not read the file are complete
    assert world.service.query("orders", "a", 0, 10_000).status == "complete"
    with beside(world) as reader:
        with pytest.raises(CorruptFile):
            reader.query("orders", "a")
        partial = reader.query("orders", "a", max_count=1000, allow_partial=True)
        assert (partial.status, partial.items) == ("partial", result.items)
    # the other files continue, and the log never states the damaged file's entries as durable
    world.publish(6)
    assert world.service.log_state.positions.get("log", 0) <= 9
    assert path.exists()


def test_an_entry_that_rots_while_the_writer_runs_is_not_compacted(make_world):
    world = make_world()
    world.do("open 9 seal")
    # the first one of the main files
    path = min(p for p in (world.root / "unsealed").glob("*.index") if not p.name.startswith("0000"))
    with path.open("r+b") as handle:
        place = 28 + 8 * 7 + 36 * 2 + 12
        (byte,) = os.pread(handle.fileno(), 1, place)
        os.pwrite(handle.fileno(), bytes([byte ^ 1]), place)
    world.do("9 seal")
    with pytest.raises(CorruptFile):
        world.service.run_lifecycle()
    assert path.exists()
    assert not [p for p in (world.root / "compacted").iterdir() if p.stem == path.stem]
    # later files are published, but no position that includes entries of the damaged one
    assert "log" not in world.service.log_state.positions


@pytest.mark.parametrize("place", ["uploaded", "compacted"])
def test_a_damaged_local_copy_is_answered_from_the_storage(make_world, place):
    """It is in `compacted` if a crash came between the file's record and its move."""
    world = make_world()
    world.settings["local_keep_s"] = 86400
    world.do("open 9 publish")
    paths = list((world.root / "uploaded").glob("*.index"))
    for path in paths:
        with path.open("r+b") as handle:
            handle.seek(28 + 8 * 7 + 3)
            handle.write(b"\xff\x00\xff\x00")
    world.check()
    with beside(world) as reader:
        world.check(reader.query)
    world.do("come_back abandon")
    for path in paths:
        flip(path, -30)  # in the trailer: the file can't even be opened
        path.rename(world.root / place / path.name)
    with beside(world) as reader:
        world.check_answers(reader.query)
    storage = FaultStorage(world.storage)
    if place == "uploaded":
        storage.fail("*", times=None)
    service = world.open(storage=storage)
    problems = {problem.split(": ")[0] for problem in service.health()["problems"]}
    assert problems == ({"log", *(path.stem for path in paths)} if place == "uploaded" else set())
    storage.clear()
    world.do("run_lifecycle check")
    assert service.health()["problems"] == []


@pytest.mark.parametrize("allow_partial", [False, True])
def test_an_object_that_a_later_record_removed_makes_a_reader_look_again(published, allow_partial):
    """A merge and an expiry do this: the record removes the object, then it is deleted."""
    world = published
    settings = {"refresh_interval_s": 10**6, "cache_slot_groups": False}
    with IndexReader.open(storage_backend=world.storage, clock=world.clock, **settings) as reader:
        known = [reader.query(topic, "a", max_count=1000) for topic in ("orders", "payments")]
        log = open_log(world.storage, world.clock)
        names = tuple(log.state.objects)
        publish(log, log.state.epoch, remove=names)
        for name in names:
            world.storage.delete_many([name])
        for topic in ("orders", "payments"):
            result = reader.query(topic, "a", max_count=1000, allow_partial=allow_partial)
            assert (len(result), result.status) == (0, "complete")
        assert any(len(result) for result in known)
    for topic in ("orders", "payments"):
        result = world.service.query(topic, "a", max_count=1000, allow_partial=allow_partial)
        assert result.status == "complete"
        assert all(item.offset > 18 for item in result)


def test_a_damaged_compacted_file_is_made_again_from_its_unsealed_form(make_world):
    """The crash came between the two steps. Whatever caused the damage, the unsealed form is still whole."""
    world = make_world()
    world.do("open 9 seal abandon")
    originals = {path.name: path.read_bytes() for path in (world.root / "unsealed").iterdir() if path.name[0].isdigit()}
    for position in (5, 40, 28 + 8 * 7 + 5, -30, -200):
        storage = FaultStorage(world.storage)
        storage.fail("put", name_prefix="data/", times=None)
        world.open(storage=storage)
        with pytest.raises(StorageUnavailable):
            world.service.run_lifecycle()
        world.abandon()
        for path in (world.root / "compacted").glob("*.index"):
            flip(path, position)
        for name, data in originals.items():
            (world.root / "unsealed" / name).write_bytes(data)
        world.do("come_back abandon")
        assert all((world.root / "unsealed" / name).exists() for name in originals)
    world.do("open run_lifecycle check")


def test_a_damaged_journal_fails_a_readers_lookups_too(make_world):
    """A crash can't tear a record that has a whole one after it."""
    world = make_world()
    world.open()
    for _ in range(3):
        world.do("1 flush")
    world.service.close()
    (path,) = (world.root / "unsealed").glob("[0-9]*.journal")
    good = path.read_bytes()
    with beside(world) as reader:
        world.check(reader.query)
        flip(path, good.index(b'"batch"'))
        with pytest.raises(CorruptFile, match=path.name):
            reader.query("orders", "a")
        result = reader.query("orders", "a", allow_partial=True)
        assert (result.status, [report.file for report in result.failed]) == ("partial", [path.stem])
        path.write_bytes(good)
        world.check(reader.query)


# Tables that this project's lookups don't need, but other readers do


@pytest.mark.parametrize(
    ("place", "preset", "reopened"),
    [
        ("filter", "native", False),
        (10, "native", True),  # in the header
        (28 + 8 * 3 + 2, "native", False),  # in the packed entries
        (28 + 8 * 7 - 1, "rocketmq", False),  # its end
    ],
)
def test_a_compacted_file_with_a_damaged_table_is_not_published(
    leave_compacted, open_index, storage, tmp_path, place, preset, reopened
):
    service = leave_compacted(count=20, preset=preset)
    (path,) = (tmp_path / "root" / "compacted").iterdir()
    whole = path.read_bytes()
    if place == "filter":
        place = Tail.decode(path.read_bytes(), path.name, path.stat().st_size).position + 5
    flip(path, place)
    damaged = path.read_bytes()
    if reopened:
        service.abandon()
        service = open_index()
    for _ in range(2):
        with pytest.raises(CorruptFile, match=path.name):
            service.run_lifecycle()
        assert not list(storage.list("data/")) and not service.log_state.objects
        assert path.read_bytes() == damaged
        assert [problem.split(": ")[0] for problem in service.health()["problems"]] == [path.stem]
    path.write_bytes(whole)
    service.abandon()
    service = open_index()
    service.run_lifecycle()
    assert len(service.query("t", "k")) == 20 and service.health()["problems"] == []


# The end of a journal: damage where a younger file proves that the file was whole

LANES = {"main": NOW_MS, "quarantine": 5_000}


def put(service, first, last, begin_ms=NOW_MS):
    for number in range(first, last + 1):
        service.put("t", 0, "k", number, 1, begin_ms + number * 1000, source="s", source_position=number)
    service.flush()


def borders(journal):
    """Return the end of each record of a journal: open, batch, batch, seal."""
    ends = [12]
    while ends[-1] < len(journal):
        (length,) = struct.unpack_from(">I", journal, ends[-1])
        ends.append(ends[-1] + 8 + length)
    return ends[1:]


LOST = {
    "cut behind the first batch": lambda data, ends: data[: ends[1]],
    "cut within the second batch": lambda data, ends: data[: ends[1] + 20],
    "zeros from the second batch on": lambda data, ends: data[: ends[1]].ljust(len(data), b"\0"),
    "cut behind the open record": lambda data, ends: data[: ends[0]],
    "cut within the first batch": lambda data, ends: data[: ends[0] + 20],
}


@pytest.mark.parametrize(
    ("lost", "lane", "restarted"),
    [*((lost, "main", False) for lost in LOST), *((next(iter(LOST)), lane, True) for lane in LANES)],
)
def test_what_a_journal_lost_is_damage_where_a_younger_file_is(
    open_index, open_reader, offsets, tmp_path, lost, lane, restarted
):
    """Messages 1..40 are in a sealed file whose journal lost its end, and 41..50 in a younger file."""
    service = open_index()
    put(service, 1, 20, LANES[lane])
    put(service, 21, 40, LANES[lane])
    service.seal()
    if restarted:
        service.close()
        service = open_index()
    put(service, 41, 50, LANES[lane])
    service.abandon()
    journals = (tmp_path / "root" / "unsealed").glob("*.journal")
    journal = next(path for path in journals if b'"kind":"seal"' in path.read_bytes())
    data = journal.read_bytes()
    ends = borders(data)
    assert (len(ends), ends[-1]) == (4, len(data))
    journal.write_bytes(LOST[lost](data, ends))
    files = {path: path.read_bytes() for path in (journal, journal.with_suffix(".index"))}
    for _ in range(2):
        service = open_index()
        for either in (service, open_reader("root")):
            for ask in ASK.values():
                with pytest.raises(CorruptFile, match=journal.stem):
                    ask(either)
            result = either.query("t", "k", max_count=1000, allow_partial=True)
            assert (result.status, sorted(item.offset for item in result)) == ("partial", list(range(41, 51)))
            assert [report.file for report in result.failed] == [journal.stem]
        service.seal()
        service.run_lifecycle()
        service.run_lifecycle()
        assert {path: path.read_bytes() for path in files if path.exists()} == files
        assert journal.stem not in {o.file_id for o in service.log_state.objects.values()}
        reader = open_reader()
        promised = reader.log_state.positions.get("s", 0)
        assert set(range(1, promised + 1)) <= set(offsets(reader))
        service.close()
