"""Damaged records and checkpoints of the storage's log: errors name them, and a checkpoint is only a cache."""

from __future__ import annotations

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.errors import CorruptFile, UnsupportedVersion
from tiered_index.format.names import checkpoint_name, log_name, number_of
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.records import LOG_VERSION, decode_document, encode_document


def reopened(storage, world):
    log = StorageLog(storage, world.clock)
    return log.open()


def test_a_flipped_bit_anywhere_in_a_record_is_found(published):
    world = published
    state = world.service.log_state
    for checkpoint in list(world.storage.list("checkpoint/")):
        world.storage.delete(checkpoint.name)
    for number in (1, 2, state.number):
        name = log_name(number)
        good = world.storage.get(name)
        for position in range(len(good)):
            for bit in (0x01, 0x80):
                bad = bytearray(good)
                bad[position] ^= bit
                world.storage.put(name, bytes(bad))
                with pytest.raises(CorruptFile) as caught:
                    reopened(world.storage, world)
                assert caught.value.file == name
        for length in range(len(good)):
            world.storage.put(name, good[:length])
            with pytest.raises(CorruptFile) as caught:
                reopened(world.storage, world)
            assert caught.value.file == name
        world.storage.put(name, good + b"\n")
        with pytest.raises(CorruptFile) as caught:
            reopened(world.storage, world)
        assert caught.value.file == name
        world.storage.put(name, good)
    assert reopened(world.storage, world) == state


def test_a_hole_in_the_log_is_damage(published):
    world = published
    for checkpoint in list(world.storage.list("checkpoint/")):
        world.storage.delete(checkpoint.name)
    for number in range(1, world.service.log_state.number):
        good = world.storage.get(log_name(number))
        world.storage.delete(log_name(number))
        with pytest.raises(CorruptFile, match="hole"):
            reopened(world.storage, world)
        world.storage.put(log_name(number), good)
    reopened(world.storage, world)


def test_a_damaged_checkpoint_is_passed_over(published):
    world = published
    state = world.service.log_state
    names = [info.name for info in world.storage.list("checkpoint/")]
    assert len(names) == 2
    for name in reversed(names):
        data = bytearray(world.storage.get(name))
        data[len(data) // 2] ^= 4
        world.storage.put(name, bytes(data))
        assert reopened(world.storage, world) == state
    world.storage.put(checkpoint_name(3), b"")
    wrong = StorageLog(world.storage, world.clock)
    assert wrong.open() == state
    # whole, but of another number than its name says
    world.storage.put(checkpoint_name(10**6), state.encode())
    assert reopened(world.storage, world) == state


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(published, caplog):
    world = published
    state = world.service.log_state
    older, newest = (info.name for info in world.storage.list("checkpoint/"))
    good = world.storage.get(newest)
    sizes = [good[:length] for length in (0, 1, len(good) // 2, len(good) - 1)] + [good + b"\n"]
    flips = [good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :] for at in range(len(good)) for bit in (0x01, 0x80)]
    for bad in flips + sizes:
        world.storage.put(newest, bad)
        counted = FaultStorage(world.storage)
        caplog.clear()
        found = reopened(counted, world)
        assert (found, list(found.objects)) == (state, list(state.objects))
        # both checkpoints, then what is behind the sound one
        assert counted.calls("get") == 2 + state.number - number_of(older)
        assert [newest in record.getMessage() and older not in record.getMessage() for record in caplog.records] == [
            True
        ]
    world.storage.put(newest, good)
    caplog.clear()
    assert reopened(world.storage, world) == state
    assert not caplog.records


def test_a_damaged_record_behind_a_checkpoint_is_named_by_readers_and_writers(published):
    world = published
    number = world.service.log_state.number
    good = world.storage.get(log_name(number))
    for info in list(world.storage.list("checkpoint/")):
        if number_of(info.name) == number:
            world.storage.delete(info.name)
    world.abandon()
    world.storage.put(log_name(number), good.replace(b'"version":4', b'"version":3'))
    with pytest.raises(CorruptFile) as caught:
        IndexReader.open(storage_backend=world.storage, clock=world.clock)
    assert caught.value.file == log_name(number)
    with pytest.raises(CorruptFile) as caught:
        world.open()
    assert caught.value.file == log_name(number)
    world.storage.put(log_name(number), good)
    world.open()
    world.check()


def test_a_damaged_record_is_named_by_a_reader_that_is_open(published):
    world = published
    with IndexReader.open(storage_backend=world.storage, clock=world.clock) as reader:
        before = reader.log_state
        world.service.seal()
        world.service.run_lifecycle()
        name = log_name(before.number + 1)
        good = world.storage.get(name)
        for bad in (
            good[:-1],
            good[: len(good) // 2],
            b"",
            bytes([good[0] ^ 1]) + good[1:],
            good.replace(b"0", b"1", 1),
        ):
            world.storage.put(name, bad)
            with pytest.raises(CorruptFile) as caught:
                reader.refresh()
            assert caught.value.file == name
            assert reader.log_state is before
        world.storage.put(name, good)
        assert reader.refresh() == world.service.log_state


def test_a_record_or_checkpoint_of_a_later_version_is_refused_by_name(published):
    world = published
    number = world.service.log_state.number + 1
    document = decode_document(world.storage.get(log_name(1)), "x")
    world.storage.put(log_name(number), encode_document(document | {"version": LOG_VERSION + 1, "number": number}))
    with pytest.raises(UnsupportedVersion, match=f"log version {LOG_VERSION + 1}"):
        reopened(world.storage, world)
    with pytest.raises(UnsupportedVersion):
        IndexReader.open(storage_backend=world.storage, clock=world.clock)


def test_records_that_contradict_the_state_are_damage(published):
    world = published
    state = world.service.log_state
    first = decode_document(world.storage.get(log_name(1)), "x")
    adding = next(
        document
        for number in range(2, state.number + 1)
        if (document := decode_document(world.storage.get(log_name(number)), "x"))["add"]
    )
    following = {"number": state.number + 1}
    for document in (
        first | following,  # a second creation
        adding | following,  # adds what is there
        adding | following | {"add": [], "remove": ["data/none"]},
        adding | following | {"number": state.number + 2},
        adding | following | {"epoch": "x"},
        {k: v for k, v in (adding | following).items() if k != "positions"},
        adding | following | {"add": [{"name": "only"}]},
    ):
        world.storage.put(
            log_name(state.number + 1), encode_document({k: v for k, v in document.items() if k != "version"})
        )
        with pytest.raises(CorruptFile):
            reopened(world.storage, world)
