"""Damaged, lost and rewritten messages are never answers. They have a reason, or come from a sound copy in the
archive.
"""

import random

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import (
    BEGIN_OF_LAST,
    delete_segments,
    fetched_of,
    index_log,
    lay_archived,
    lies,
    log_of,
    one_message,
    same,
    scan,
    settled,
    source_of,
)
from tests.rocketmq.messages import log, message
from tests.support.damage import flip, flipped
from tiered_index import IndexReader
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.segments import segment_name
from tiered_index.errors import StorageUnavailable
from tiered_index.format.segments.archived import PIECE_BYTES
from tiered_index.service.log.records import LogRecord
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments


def test_no_damaged_byte_of_the_store_becomes_an_answer(tmp_path, index):
    """The test flips each byte of the message. The body's CRC or a field shows it, and the archive has a sound copy;
    other bytes have no checksum in RocketMQ's format.
    """
    store, wanted = one_message(tmp_path, index)
    path = store / "commitlog" / segment_name(0)
    whole = path.read_bytes()
    unchecked = []
    for at in range(wanted.physical_offset, wanted.physical_offset + wanted.size):
        flip(path, at)
        answer = index.messages(wanted.topic, wanted.uniq_key, source=RocketmqMessages(store))
        if answer.collisions:  # the topic or key is another one now
            assert answer.messages == ()
        elif answer.messages[0].message is not None:
            unchecked.append(at - wanted.physical_offset)
            assert wanted.uniq_key in answer.messages[0].message.index_keys
        else:
            (fetched,) = answer.messages
            assert fetched.state == "missing" and str(store / "commitlog") in fetched.problem
            sound = fetched_of(index, wanted, source_of(index, store))
            # with the reason why it does not come from the store
            assert (sound.state, same(sound, wanted), sound.problem) == ("archived", True, fetched.problem)
        path.write_bytes(whole)
    # the format does not protect flag, queue offset, sys flag, times below the second, hosts, counts, property values
    checked_always = {*range(4), *range(4, 8), *range(8, 12), *range(12, 16), *range(28, 36)}
    body = wanted.encode().index(wanted.raw_body)
    checked_always |= set(range(body - 4, body + len(wanted.raw_body)))
    assert not checked_always & set(unchecked)


def test_an_archived_message_is_answered_as_it_was_or_called_damaged(index, store, storage):
    """One bit is flipped somewhere in each archived segment. Lookups are by key, place and id."""
    messages = [m for m in settled(index, store) if m.physical_offset < BEGIN_OF_LAST]
    keyed = {m.physical_offset: m for m in messages if m.is_visible and m.index_keys}
    chosen, seen = random.Random(33), set()
    for _ in range(12):
        objects = {segment.name: storage.get(segment.name) for segment in index.archived()}
        half = chosen.sample(index.archived(), 3)
        places = {segment.start: chosen.randrange(segment.size_bytes) for segment in half}
        for segment in half:
            storage.put(segment.name, flipped(objects[segment.name], places[segment.start], 1 << chosen.randrange(8)))
        source = RocketmqMessages(None, SegmentArchive(storage, lambda: index.log_state, lambda: index.log_state))
        for start, at in places.items():
            near = min(keyed, key=lambda offset: abs(offset - start - at))
            for wanted in [keyed[near], *chosen.sample(sorted(keyed.values()), 3)]:
                topic, key = wanted.topic, chosen.choice(wanted.index_keys)
                expected = scan(messages, topic, key)
                answer = index.messages(topic, key, max_count=1000, source=source)
                assert answer.collisions == 0
                archived_answers = [answered for answered in answer.messages if answered.item.offset < BEGIN_OF_LAST]
                by_place = [source.at(wanted.physical_offset), source.by_msg_id(wanted.offset_msg_id)]
                pairs = [
                    *zip(archived_answers, expected, strict=True),
                    *((place_answer, wanted) for place_answer in by_place),
                ]
                for fetched, as_it_was in pairs:
                    if not same(fetched, as_it_was):
                        assert (fetched.state, fetched.message) == ("missing", None)
                        assert f"{fetched.read_from}: a piece of an archived segment does not" in fetched.problem
                        assert lies(as_it_was) in fetched.read_from
                    seen.add(same(fetched, as_it_was))
        for name, data in objects.items():
            storage.put(name, data)
    assert seen == {True, False}


def test_damage_hides_no_more_than_its_piece(tmp_path, index, storage):
    """Lookups of messages in other pieces succeed. A bit that only the transfer flipped causes another read."""
    messages = log(400)
    source = lay_archived(index, tmp_path / "laid", *messages, segment_bytes=100_000)
    (segment,) = index.archived()
    whole = storage.get(segment.name)
    storage.put(segment.name, flipped(whole, PIECE_BYTES + 100))
    fetched_messages = [source.at(m.physical_offset) for m in messages]
    bad = [m for m, fetched in zip(messages, fetched_messages, strict=True) if fetched.message is None]
    piece = range(PIECE_BYTES, 2 * PIECE_BYTES)
    assert bad == [m for m in messages if m.physical_offset < piece.stop and m.physical_offset + m.size > piece.start]
    storage.put(segment.name, whole)
    storage.corrupt("get_range")
    before = storage.calls("get_range")
    assert same(source.at(bad[1].physical_offset), bad[1])
    assert storage.calls("get_range") - before == 2


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_spoiled_archived_segment_is_missing_with_its_reason(tmp_path, index, storage, change):
    store, wanted = one_message(tmp_path, index)
    (segment,) = index.archived()
    if change == "cut":
        storage.put(segment.name, storage.get(segment.name)[: wanted.physical_offset + 10])
    else:
        storage.delete_many([segment.name])
    delete_segments(store, 2_000)
    for source in (RocketmqMessages(None, index.segment_archive), source_of(index, store)):
        fetched = fetched_of(index, wanted, source)
        assert (fetched.state, fetched.message) == ("missing", None)
        assert segment.name in fetched.problem


def test_a_segment_that_was_lost_between_others_is_missing_and_not_expired(index, store, storage):
    messages = index_log(index, store)
    SegmentArchiver(index, "s", store / "commitlog").run_once()
    _, lost, *_ = index.archived()
    log = log_of(storage)
    removing = LogRecord(0, "remove", 0, "", 0, **Segments(log.state, storage).change([], [lost]))
    log.append("a segment that was lost", None, lambda _: removing)
    storage.delete_many([lost.name])
    delete_segments(store, BEGIN_OF_LAST)
    states = set()
    with IndexReader.open(storage_backend=storage) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        for wanted in (message for message in messages if message.physical_offset < BEGIN_OF_LAST):
            fetched = source.at(wanted.physical_offset, wanted.size)
            is_lost = lost.start <= wanted.physical_offset < lost.end
            assert fetched.state == ("missing" if is_lost else "archived")
            assert not is_lost or f"has the offsets before {lost.end:,}: it was lost" in fetched.problem
            states.add(fetched.state)
    assert states == {"missing", "archived"}


def test_the_log_is_read_before_a_message_is_called_expired(index, store, storage):
    """The message was archived and deleted by the broker since the reader last read the log."""
    messages = index_log(index, store)
    index.seal()
    index.run_lifecycle()
    wanted = next(m for m in messages if m.is_visible and m.uniq_key)
    with IndexReader.open(storage_backend=storage, refresh_interval_s=3600) as reader:
        source = RocketmqMessages(store, reader.segment_archive)
        assert fetched_of(reader, wanted, source).state == "local"
        SegmentArchiver(index, "s", store / "commitlog").run_once()
        delete_segments(store, BEGIN_OF_LAST)
        assert reader.archived() == ()
        storage.fail("list", times=None, name_prefix="log/")
        with pytest.raises(StorageUnavailable):
            fetched_of(reader, wanted, source)
        storage.clear()
        fetched = fetched_of(reader, wanted, source)
        assert fetched.state == "archived" and same(fetched, wanted)


@pytest.mark.parametrize(
    "fields", [{"queue_id": 2}, {"store_ms": golden_store.END}, {"body": b"bod", "properties": b"KEYS\x01other\x02"}]
)
def test_a_rewritten_log_gives_no_wrong_message(tmp_path, index, fields):
    store, wanted = one_message(tmp_path, index)
    other = message(
        wanted.physical_offset, **{"store_ms": wanted.store_ms, "properties": wanted.raw_properties, **fields}
    )
    path = store / "commitlog" / segment_name(0)
    data = bytearray(path.read_bytes())
    data[wanted.physical_offset : wanted.physical_offset + other.size] = other.encode()
    path.write_bytes(data)
    fetched = fetched_of(index, wanted, RocketmqMessages(store))
    assert (fetched.state, fetched.message) == ("missing", None)
    assert "another message" in fetched.problem
    assert fetched_of(index, wanted, source_of(index, store)).state == "archived"
