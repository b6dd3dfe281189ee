"""Archiving beside a follower: the archiver uploads only segments that the follower has put. A rewritten segment
replaces its copy.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.rocketmq.archived_store import log_of
from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tests.rocketmq.remoting_client import ask, records
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, StorageUnavailable
from tiered_index.follow import Loss
from tiered_index.format import archived as format_archived
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.follow.dispatcher import Dispatcher
from tiered_index.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.service.jobs import segment_archive
from tiered_index.service.log.records import LogRecord

JUNK = b"\xee" * 40


def follow(followed: Followed, *, skip: bool = True) -> tuple[Dispatcher, SegmentArchiver]:
    dispatcher = followed.dispatcher(skip_corrupt=skip, skip_missing=skip, clock=followed.clock)
    return dispatcher, SegmentArchiver(followed.index, "s", followed.path / "commitlog", dispatcher=dispatcher)


def archived(followed: Followed) -> dict[int, bytes]:
    return {s.start // SEGMENT: followed.storage.get(s.name)[: s.size_bytes] for s in followed.index.archived("s")}


def local(followed: Followed, *numbers: int) -> dict[int, bytes]:
    return {number: followed.segment(number).read_bytes() for number in numbers}


def catch_up(followed: Followed, dispatcher: Dispatcher) -> None:
    for _ in range(3):
        list(rounds(dispatcher))
    followed.index.flush()
    dispatcher.run_once()


def come_again(followed: Followed) -> None:
    followed.come_again()
    followed.clock.advance(60_000)


def test_segments_that_the_follower_has_not_put_are_not_archived(followed):
    offsets = followed.write(100)
    followed.overwrite(offsets[10], JUNK)
    dispatcher, archiver = follow(followed, skip=False)
    dispatcher.run_once()
    with pytest.raises(CorruptFile):
        dispatcher.run_once()
    followed.index.flush()
    assert archiver.run_once() == 0
    come_again(followed)
    assert followed.writer.next_offset == offsets[10]
    followed.write(100)
    catch_up(followed, dispatcher)
    assert archiver.run_once() > 0
    assert archived(followed) == local(followed, *range(followed.writer.next_offset // SEGMENT))


def test_segments_with_undurable_entries_are_not_archived(followed):
    followed.write(100)
    dispatcher, archiver = follow(followed)
    list(rounds(dispatcher))
    assert dispatcher.settled_before == 0
    assert archiver.run_once() == 0
    followed.index.flush()
    assert dispatcher.settled_before == dispatcher.position
    assert archiver.run_once() == followed.writer.next_offset // SEGMENT


@pytest.mark.parametrize("restart", [False, True])
def test_a_rewritten_segment_replaces_its_copy(followed, restart):
    offsets = followed.write(100)
    followed.overwrite(offsets[10], JUNK)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    last = followed.writer.next_offset // SEGMENT
    assert archiver.run_once() == last
    assert archived(followed) == local(followed, *range(last))
    come_again(followed)
    followed.write(130)
    with pytest.raises(CorruptFile, match="it was rewritten"):  # until the follower has noticed
        archiver.run_once()
    assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
    assert dispatcher.settled_before <= offsets[10]
    assert archiver.run_once() == 0
    followed.clock.advance(1)
    if restart:
        followed.index.flush()
        followed.crash_index()
        dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    last = followed.writer.next_offset // SEGMENT
    assert archiver.run_once() == last
    assert archived(followed) == local(followed, *range(last))
    assert archiver.run_once() == 0
    # a difference from a copy of the present log is damage, as before
    followed.clock.advance(60_000)
    followed.overwrite(3_000, JUNK)
    whole = archived(followed)
    for again in (archiver, follow(followed)[1]):
        with pytest.raises(CorruptFile, match="it was rewritten"):
            again.run_once()
    assert archived(followed) == whole


def test_a_skipped_segment_is_archived_once_it_is_known_to_be_rewritten(followed):
    offsets = followed.write(100)
    followed.overwrite(offsets[10], JUNK)
    dispatcher, archiver = follow(followed)
    archiver.skip_corrupt = True
    catch_up(followed, dispatcher)
    archiver.run_once()
    come_again(followed)
    followed.write(130)
    assert archiver.run_once() == 0
    assert {loss.begin for loss in archiver.passed_over} >= {0}
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archiver.passed_over == ()
    assert archived(followed)[0] == local(followed, 0)[0]


def cut(followed: Followed, offset: int) -> None:
    """Cut the log as a broker does at a role change: later segments are deleted, and the old bytes stay."""
    for number in range(offset // SEGMENT + 1, followed.writer.next_offset // SEGMENT + 1):
        followed.segment(number).unlink()
    followed.come_again(offset)


def test_a_segment_that_is_cut_during_a_round_is_archived_once_it_is_closed_again(followed, monkeypatch):
    """The storage is slow: the follower notices the cut while an earlier segment is sent."""
    offsets = followed.write(200)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archive, sent = followed.index.archive, []

    def slow(store: str, start: int, *more: object) -> bool:
        sent.append(archive(store, start, *more))
        if len(sent) == 1:
            cut(followed, next(offset for offset in offsets if offset > SEGMENT + 2_000))
            followed.write(3)
            assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
            followed.clock.advance(60)
        return sent[-1]

    monkeypatch.setattr(followed.index, "archive", slow)
    with pytest.raises(StorageUnavailable, match="changed while it was read"):
        archiver.run_once()
    assert list(archived(followed)) == [0]
    followed.write(200)
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archived(followed) == local(followed, *range(followed.writer.next_offset // SEGMENT))


def test_a_restart_notices_segments_that_were_rewritten_meanwhile(followed):
    offsets = followed.write(200)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archiver.run_once()
    followed.crash_index()
    cut(followed, next(offset for offset in offsets if offset > SEGMENT + 2_000))
    followed.write(200)
    followed.clock.advance(60)
    dispatcher = followed.dispatcher(restart=True, clock=followed.clock)
    archiver = SegmentArchiver(followed.index, "s", followed.path / "commitlog", dispatcher=dispatcher)
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archived(followed) == local(followed, *range(followed.writer.next_offset // SEGMENT))


def test_a_rewritten_segment_replaces_its_copy_if_the_clock_went_back(followed, monkeypatch):
    for module in (format_archived, segment_archive):  # the cut is behind the part that is always compared
        monkeypatch.setattr(module, "HEAD_BYTES", 1_024)
    dispatcher, archiver = follow(followed)
    followed.write(20)
    list(rounds(dispatcher))
    offsets = followed.write(40)
    followed.clock.advance(3_600)  # the host's clock is an hour fast
    catch_up(followed, dispatcher)
    assert archiver.run_once() == 1
    followed.clock = ManualClock(followed.clock.now_ms() - 3_000_000)
    dispatcher._clock = followed.clock
    cut(followed, next(offset for offset in offsets if offset > 4_000))
    followed.write(60)
    now_ns = followed.clock.now_ms() * 1_000_000
    os.utime(followed.segment(0), ns=(now_ns, now_ns))
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archived(followed) == local(followed, *range(followed.writer.next_offset // SEGMENT))


def test_segments_that_the_broker_deleted_before_they_were_archived_are_a_loss(followed):
    followed.write(60)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    assert archiver.run_once() == 1
    followed.write(200)
    catch_up(followed, dispatcher)
    for number in range(3):  # the storage was down for three days
        followed.segment(number).unlink()
    archiver.run_once()
    archiver.run_once()
    assert min(set(archived(followed)) - {0}) == 3
    problem = "not archived: the broker deleted them before"
    assert archiver.losses == [Loss("missing", SEGMENT, 3 * SEGMENT, None, problem)]


def test_a_log_that_was_recreated_replaces_no_archived_segment(followed):
    """The broker's disk was replaced. The archive may have the only copy of the old log."""
    followed.write(200)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archiver.run_once()
    before = archived(followed)
    shutil.rmtree(followed.path)
    followed.writer = followed.open_writer()
    followed.write(200)
    followed.clock.advance(60)
    catch_up(followed, dispatcher)
    with pytest.raises(CorruptFile, match="it was rewritten"):
        archiver.run_once()
    assert archived(followed) == before


def test_a_segment_that_was_given_up_is_archived_again(followed):
    followed.write(100)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archiver.run_once()
    whole, lost = archived(followed), followed.index.archived()[0].name
    removing = LogRecord(0, "remove", 0, "", 0, remove=(lost,))
    log_of(followed.storage).append("a segment that was lost", None, lambda _: removing)
    followed.clock.advance(60)
    followed.index.run_lifecycle()
    assert archiver.run_once() == 1
    assert archived(followed) == whole


def test_the_store_has_the_present_message_of_a_rewritten_place(followed):
    offsets = followed.write(200, keys="k", uniq_key=None, body=b"b")
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archiver.run_once()
    place = next(offset for offset in offsets[::12] if offset > SEGMENT + 2_000)
    cut(followed, place)
    followed.number = 1_200  # the same topic
    followed.write(1, keys="k", uniq_key=None, body=b"c")
    broker = ReadOnlyBroker(followed.index, store=followed.path)
    answer = ask(broker, 33, "orders", offset=str(place))
    assert (answer.code, [one.body() for one in records(answer.body)]) == (0, [b"c"])
