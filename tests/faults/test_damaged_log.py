"""Damaged records and checkpoints of the storage's log: errors name them, and a checkpoint is only a cache."""

from functools import partial

import pytest

from tests.support.damage import flipped
from tests.support.log_records import record_document
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile
from tiered_index.format.names import log_name, number_of
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LogRecord, encode_document
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import WrapperStorage

STEP = 15
"""The decoder gets every damaged document, and a start of the log gets one of so many."""


def reopened(world, storage=None):
    return StorageLog(storage or world.storage, world.clock).open()


def is_damage_of(name, act):
    with pytest.raises(CorruptFile) as caught:
        act()
    assert caught.value.file == name


def flips(good):
    return [flipped(good, at, bit) for at in range(len(good)) for bit in (0x01, 0x80)]


@pytest.fixture
def without_checkpoints(published):
    published.storage.delete_many([info.name for info in published.storage.list("checkpoint/")])
    return published


def test_a_flipped_bit_anywhere_in_a_record_is_found(without_checkpoints):
    world = without_checkpoints
    state = world.service.log_state
    for number in (1, 2, state.number):
        name = log_name(number)
        good = world.storage.get(name)
        for at, bad in enumerate((*flips(good), *(good[:length] for length in range(len(good))), good + b"\n")):
            is_damage_of(name, partial(LogRecord.decode, bad, name))
            if at % STEP == 0:
                world.storage.put(name, bad)
                is_damage_of(name, lambda: reopened(world))
        world.storage.put(name, good)
    assert reopened(world) == state


def test_a_hole_in_the_log_is_damage(without_checkpoints):
    world = without_checkpoints
    for number in range(1, world.service.log_state.number):
        good = world.storage.get(log_name(number))
        world.storage.delete_many([log_name(number)])
        with pytest.raises(CorruptFile, match="hole"):
            reopened(world)
        world.storage.put(log_name(number), good)
    reopened(world)


class HastyListing(WrapperStorage):
    """Its first listing of the log lacks the record before the last, as a folder that is read during two appends."""

    is_first = True

    def list(self, prefix, *, start_after=""):
        infos = list(super().list(prefix, start_after=start_after))
        if self.is_first and prefix == "log/":
            self.is_first = False
            del infos[-2]
        return iter(infos)


def test_a_listing_beside_two_appends_is_no_hole(without_checkpoints):
    world = without_checkpoints
    behind = StorageLog(HastyListing(world.storage), world.clock)
    behind.advance(reopened(world))
    world.publish(6)
    world.publish(6)
    assert behind.refresh() == reopened(world)
    assert reopened(world, HastyListing(world.storage)) == reopened(world)
    report = Report()
    assert check_storage(HastyListing(world.storage), {}, report, lambda *_: None, deep=False, threads=1)
    assert not report.findings


def test_a_check_tells_of_a_log_that_is_cut_meanwhile(without_checkpoints):
    world = without_checkpoints
    last = log_name(world.service.log_state.number)
    storage = FaultStorage(world.storage)
    storage.meanwhile("list", lambda: world.storage.delete_many([last]), name_prefix="data/")
    report = Report()
    check_storage(storage, {}, report, lambda *_: None, deep=False, threads=1)
    (told,) = report.findings
    assert (told.file, told.part) == (f"{world.storage.uri}/{last}", "log") and "restored" in told.problem


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(published, caplog):
    world = published
    state = world.service.log_state
    older, newest = (info.name for info in world.storage.list("checkpoint/"))
    good = world.storage.get(newest)
    sizes = [good[:length] for length in (0, 1, len(good) // 2, len(good) - 1)] + [good + b"\n"]
    for bad in flips(good):
        is_damage_of(newest, partial(LogState.decode, bad, newest))
    for bad in flips(good)[::STEP] + sizes:
        world.storage.put(newest, bad)
        counted = FaultStorage(world.storage)
        caplog.clear()
        opened = reopened(world, counted)
        assert (opened, list(opened.objects)) == (state, list(state.objects))
        # both checkpoints, then the records after the sound one
        assert counted.calls("get") == 2 + state.number - number_of(older)
        (message,) = caplog.messages
        assert newest in message and older not in message
    world.storage.put(newest, good)
    caplog.clear()
    assert reopened(world) == state
    assert not caplog.records


def test_a_damaged_record_behind_a_checkpoint_is_named_by_readers_and_writers(published):
    world = published
    number = world.service.log_state.number
    good = world.storage.get(log_name(number))
    for info in list(world.storage.list("checkpoint/")):
        if number_of(info.name) == number:
            world.storage.delete_many([info.name])
    world.abandon()
    world.storage.put(log_name(number), good.replace(b'"kind":"', b'"kind":"x', 1))
    is_damage_of(log_name(number), lambda: IndexReader.open(storage_backend=world.storage, clock=world.clock))
    is_damage_of(log_name(number), world.open)
    world.storage.put(log_name(number), good)
    world.do("open check")


def test_records_that_contradict_the_state_are_damage(published):
    world = published
    state = world.service.log_state
    first = record_document(world.storage.get(log_name(1)))
    others = (record_document(world.storage.get(log_name(number))) for number in range(2, state.number + 1))
    adding = next(document for document in others if document["add"])
    # with the right predecessor, since a record with another one is refused for that alone
    following = {"number": state.number + 1, "previous": state.digest}
    for problem, document in (
        ("only record 1 creates", first | following),
        ("exists already", adding | following),
        ("removes 'data/none'", adding | following | {"add": [], "remove": ["data/none"]}),
        ("another number than its name", adding | following | {"number": state.number + 2}),
        (r"invalid: .*`\$\.epoch`", adding | following | {"epoch": "x"}),
        ("invalid: .*`positions`", {k: v for k, v in (adding | following).items() if k != "positions"}),
        (r"invalid: .*`\$\.add\[0\]\.name`", adding | following | {"add": [{"name": "only"}]}),
    ):
        world.storage.put(log_name(state.number + 1), encode_document(document))
        with pytest.raises(CorruptFile, match=problem) as caught:
            reopened(world)
        assert type(caught.value) is CorruptFile
