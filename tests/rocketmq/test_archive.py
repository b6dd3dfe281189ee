"""Archiving a store, alone or beside a follower: each closed segment is uploaded once, after the follower has put it.
Whatever the broker does meanwhile, no copy is wrong. What uploads survive is in unit/service/test_segment_archive.
"""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import BEGIN_OF_LAST, delete_segments, index_log, log_of, lookups, open_index, scan
from tests.rocketmq.followed import SEGMENT as FOLLOWED_SEGMENT
from tests.rocketmq.followed import Followed, rounds
from tests.rocketmq.messages import blank, full, joined, log, write_log
from tests.rocketmq.remoting_client import ask, records
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver, closed_segments
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.follow.dispatcher import Dispatcher
from tiered_index.connectors.rocketmq.log.segments import segment_name
from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.source import Loss
from tiered_index.errors import CorruptFile, StorageBehind, StorageUnavailable
from tiered_index.format.names import log_name
from tiered_index.format.segments import archived as format_archived
from tiered_index.service.jobs.segments import uploads
from tiered_index.service.log.records import LogRecord
from tiered_index.service.read.segments.segments import Segments
from tiered_index.storage.memory import MemoryStorage

SEGMENT = 1_000


def three_segments(folder: Path) -> Path:
    """Two closed segments, and the one that the broker is writing."""
    segments = {}
    for start in (0, SEGMENT, 2 * SEGMENT):
        messages = log(3, start, first=start)
        segments[start] = joined(messages) if start == 2 * SEGMENT else full(messages, SEGMENT)
    return write_log(folder / "commitlog", SEGMENT, segments)


def starts(index: IndexService) -> list[int]:
    return [segment.start for segment in index.archived()]


def around_reads(index: IndexService, act: Callable[[int, Callable[[], bytes]], bytes]) -> Callable[..., object]:
    """Have `act` make each read of a segment, from the segment's start; return the index's former `archive`."""
    archive = index.archive

    def archiving(store, start, size_bytes, give, *times):
        return archive(store, start, size_bytes, lambda *place: act(start, partial(give, *place)), *times)

    index.archive = archiving  # type: ignore[method-assign]
    return archive


def stored(storage: FaultStorage) -> list[str]:
    return [info.name for info in storage.list("segments/")]


# a store alone


def test_the_golden_store_byte_for_byte(tmp_path, index, storage):
    store = golden_store.unpack(tmp_path / "store")
    archiver = SegmentArchiver(index, "broker a", store / "commitlog")
    assert [archiver.run_once() for _ in range(2)] == [5, 0]
    uploaded = {
        segment.start: storage.get(segment.name)[: segment.size_bytes] for segment in index.archived("broker a")
    }
    assert uploaded == {start: data for start, data in golden_store.segments().items() if start < 81_920}
    names = stored(storage)
    # another archiver compares the segments, and uploads nothing
    assert SegmentArchiver(index, "broker a", store / "commitlog").run_once() == 0
    assert stored(storage) == names


def test_the_segment_being_written_waits_until_the_next_one_is_written_to(tmp_path, index, storage):
    """Also if that has only a blank. A storage that is down is reported and waited for. Nothing is skipped for one that
    went back in time.
    """
    for name, first in (("nothing", None), ("empty", b""), ("begun", joined(log(2)))):
        begun = write_log(tmp_path / name, SEGMENT, {} if first is None else {0: first})
        assert SegmentArchiver(index, "s", begun).run_once() == 0 and index.archived() == ()
    folder = three_segments(tmp_path)
    archiver = SegmentArchiver(index, "s", folder)
    storage.fail("list", name_prefix="log/")
    with pytest.raises(StorageUnavailable):
        archiver.run_once()
    assert archiver.run_once() == 2
    (folder / segment_name(3 * SEGMENT)).write_bytes(bytes(SEGMENT))  # made in advance, as the broker does
    (folder / segment_name(4 * SEGMENT)).write_bytes(b"")
    assert [s.start for s in closed_segments(folder)] == [0, SEGMENT]
    assert archiver.run_once() == 0
    path = folder / segment_name(2 * SEGMENT)
    path.write_bytes(full(log(3, 2 * SEGMENT, first=2 * SEGMENT), SEGMENT))
    (folder / segment_name(3 * SEGMENT)).write_bytes(blank(SEGMENT))
    assert archiver.run_once() == 1
    assert starts(index) == [0, SEGMENT, 2 * SEGMENT]
    storage.delete_many([log_name(index.log_state.number)])
    archiver = SegmentArchiver(index, "s", folder, skip_corrupt=True)
    with pytest.raises(StorageBehind, match="the log ends before it"):
        archiver.run_once()
    assert not archiver.losses


def test_skipped_segments_are_losses_until_they_change(tmp_path, index, storage):
    """Without `skip_corrupt` they are errors. The others go up in either case."""
    folder = three_segments(tmp_path)
    whole = (folder / segment_name(0)).read_bytes()
    os.truncate(folder / segment_name(0), SEGMENT - 1)
    with pytest.raises(CorruptFile, match="cut short") as caught:
        SegmentArchiver(index, "s", folder).run_once()
    assert caught.value.file.endswith(segment_name(0))
    assert starts(index) == [SEGMENT]
    archiver = SegmentArchiver(index, "s", folder, skip_corrupt=True)
    assert archiver.run_once() == 0
    (cut,) = archiver.losses
    assert (cut.kind, cut.begin, cut.end, cut.messages) == ("corrupt", 0, SEGMENT, None)
    assert "was cut short and is not archived" in cut.problem
    os.truncate(folder / segment_name(0), SEGMENT - 2)
    assert [archiver.run_once() for _ in range(2)] == [0, 0] and len(archiver.losses) == 2
    (folder / segment_name(0)).write_bytes(whole)
    assert archiver.run_once() == 1
    assert starts(index) == [0, SEGMENT]
    (folder / segment_name(SEGMENT)).write_bytes(whole)  # rewritten after it was archived
    assert archiver.run_once() == 0
    calls = storage.calls("get"), storage.calls("list")
    assert [archiver.run_once() for _ in range(3)] == [0, 0, 0]
    assert (storage.calls("get"), storage.calls("list")) == calls
    *_, rewritten = archiver.losses
    assert (len(archiver.losses), archiver.passed_over, rewritten.begin) == (3, (rewritten,), SEGMENT)
    assert "it was rewritten" in rewritten.problem
    (folder / segment_name(SEGMENT)).unlink()
    assert (archiver.run_once(), archiver.passed_over) == (0, ())


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_segment_changed_or_deleted_while_it_is_read_leaves_nothing(tmp_path, index, storage, is_begun):
    size = 9 << 20
    folder = write_log(tmp_path / "commitlog", size, {0: full(log(3), size), size: joined(log(1, size))})
    path, archiver = folder / segment_name(0), SegmentArchiver(index, "s", folder)

    def changing(_, read):
        os.utime(path, ns=(1, 1))
        return read()

    def deleting(_, read):
        data = read() if is_begun else b""
        path.unlink(missing_ok=True)
        return data or read()

    archive = around_reads(index, changing)
    with pytest.raises(StorageUnavailable, match="changed"):
        archiver.run_once()
    index.archive = archive
    around_reads(index, deleting)
    assert archiver.run_once() == 0
    assert (stored(storage), index.archived()) == ([], ())


@pytest.mark.parametrize("size", [6 << 20, 9 << 20])
def test_an_archiver_that_is_stopped_ends_within_a_segment(tmp_path, index, storage, size):
    contents = {number * size: full(log(2, number * size), size) for number in range(4)}
    folder = write_log(tmp_path / "commitlog", size, contents)
    archiver = SegmentArchiver(index, "s", folder)

    def stopping(start, read):
        data = read()
        if start == size:
            assert archiver.archived == 1  # counted while the round runs
            archiver.stop()
        return data

    archive = around_reads(index, stopping)
    whole = 2 if size < 8 << 20 else 1  # the archiver uploads a segment that it has read
    assert archiver.run_once() == archiver.archived == whole
    assert starts(index) == [number * size for number in range(whole)]
    assert len(stored(storage)) == whole
    assert archiver.run_once() == 0
    index.archive = archive  # type: ignore[method-assign]
    assert SegmentArchiver(index, "s", folder).run_once() == 3 - whole


def test_lookups_beside_archiving_and_deletion_never_miss_a_message(tmp_path: Path) -> None:
    """A broker deletes archived segments while readers look up all messages; one of them is behind the log."""
    store = golden_store.unpack(tmp_path / "store")
    storage = MemoryStorage()
    with open_index(tmp_path / "root", storage) as index:
        messages = index_log(index, store)
        index.seal()
        index.run_lifecycle()
        wanted = [(topic, key, [m.encode() for m in scan(messages, topic, key)]) for topic, key in lookups(messages)]
        over, seen = threading.Event(), set[str]()
        with IndexReader.open(storage_backend=storage, refresh_interval_s=3600) as reader:

            def look_up(reads: IndexReader | IndexService, number: int) -> int:
                source = RocketmqMessages(store, reads.segment_archive, threads=2)
                turns = 0
                while True:
                    last = over.is_set()
                    for topic, key, expected in wanted[number::3]:
                        answer = reads.messages(topic, key, max_count=1000, source=source)
                        assert [f.message.encode() if f.message else f for f in answer.messages] == expected
                        seen.update(f.state for f in answer.messages)
                    turns += 1
                    if last:
                        return turns

            with ThreadPoolExecutor(3) as pool:
                reading = [pool.submit(look_up, kind, number) for number, kind in enumerate((reader, index, reader))]
                try:
                    for begin in range(golden_store.SEGMENT_BYTES, BEGIN_OF_LAST + 1, golden_store.SEGMENT_BYTES):
                        SegmentArchiver(index, "s", store / "commitlog").run_once()
                        delete_segments(store, begin)
                finally:
                    over.set()
                assert all(done.result(timeout=120) >= 1 for done in reading)
        assert seen == {"local", "archived"}
        assert len(index.archived()) == 5


# beside a follower: a rewritten segment replaces its copy


def follow(followed: Followed, *, skip: bool = True) -> tuple[Dispatcher, SegmentArchiver]:
    dispatcher = followed.dispatcher(skip_corrupt=skip, skip_missing=skip, clock=followed.clock)
    return dispatcher, SegmentArchiver(followed.index, "s", followed.path / "commitlog", dispatcher=dispatcher)


def archived(followed: Followed) -> dict[int, bytes]:
    parts = followed.index.archived("s")
    return {s.start // FOLLOWED_SEGMENT: followed.storage.get(s.name)[: s.size_bytes] for s in parts}


def closed(followed: Followed) -> dict[int, bytes]:
    numbers = range(followed.writer.next_offset // FOLLOWED_SEGMENT)
    return {number: followed.segment(number).read_bytes() for number in numbers}


def catch_up(followed: Followed, dispatcher: Dispatcher) -> None:
    for _ in range(3):
        list(rounds(dispatcher))
    followed.index.flush()
    dispatcher.run_once()


def damaged(followed: Followed) -> int:
    """Write messages, and damage one of the first segment; return its offset."""
    offset = followed.write(100)[10]
    followed.overwrite(offset, b"\xee" * 40)
    return offset


def come_again(followed: Followed) -> None:
    followed.come_again()
    followed.clock.advance(60_000)


def cut(followed: Followed, offset: int) -> None:
    """Cut the log as a broker does at a role change: later segments are deleted, and the old bytes stay."""
    for number in range(offset // FOLLOWED_SEGMENT + 1, followed.writer.next_offset // FOLLOWED_SEGMENT + 1):
        followed.segment(number).unlink()
    followed.come_again(offset)


def test_segments_that_the_follower_has_not_put_durably_are_not_archived(followed):
    begin = damaged(followed)
    dispatcher, archiver = follow(followed, skip=False)
    dispatcher.run_once()
    with pytest.raises(CorruptFile):
        dispatcher.run_once()
    followed.index.flush()
    assert archiver.run_once() == 0
    come_again(followed)
    assert followed.writer.next_offset == begin
    followed.write(100)
    for _ in range(3):
        list(rounds(dispatcher))
    assert archiver.run_once() == 0 and dispatcher.settled_before < dispatcher.position
    followed.index.flush()
    assert dispatcher.settled_before == dispatcher.position
    assert archiver.run_once() > 0
    assert archived(followed) == closed(followed)


@pytest.mark.parametrize("how", ["", "skips", "restarts"])
def test_a_rewritten_segment_replaces_its_copy(followed, how):
    begin = damaged(followed)
    dispatcher, archiver = follow(followed)
    archiver.skip_corrupt = how == "skips"
    catch_up(followed, dispatcher)
    assert archiver.run_once() == len(closed(followed))
    assert archived(followed) == closed(followed)
    come_again(followed)
    followed.write(130)
    if how == "skips":
        assert archiver.run_once() == 0 and {loss.begin for loss in archiver.passed_over} >= {0}
    else:
        with pytest.raises(CorruptFile, match="it was rewritten"):  # until the follower has noticed
            archiver.run_once()
    assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
    assert dispatcher.settled_before <= begin
    # a round before the segment is settled would forget that it was skipped
    assert how == "skips" or archiver.run_once() == 0
    followed.clock.advance(1)
    if how == "restarts":
        followed.index.flush()
        followed.crash_index()
        dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    assert [archiver.run_once() for _ in range(2)] == [len(closed(followed)), 0]
    assert archived(followed) == closed(followed) and archiver.passed_over == ()
    archiver.skip_corrupt = False
    # a difference from a copy of the present log is damage, as before
    followed.clock.advance(60_000)
    followed.overwrite(3_000, b"\xee" * 40)
    whole = archived(followed)
    for again in (archiver, follow(followed)[1]):
        with pytest.raises(CorruptFile, match="it was rewritten"):
            again.run_once()
    assert archived(followed) == whole


def test_a_segment_that_is_cut_during_a_round_is_archived_once_it_is_closed_again(followed, monkeypatch):
    """The storage is slow: the follower notices the cut while an earlier segment is sent."""
    offsets = followed.write(200)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archive = followed.index.archive

    def slow(store: str, start: int, *more: object) -> bool:
        sent = archive(store, start, *more)
        if start == 0:
            cut(followed, next(offset for offset in offsets if offset > FOLLOWED_SEGMENT + 2_000))
            followed.write(3)
            assert [loss.kind for loss in dispatcher.run_once().losses] == ["rewritten"]
            followed.clock.advance(60)
        return sent

    monkeypatch.setattr(followed.index, "archive", slow)
    with pytest.raises(StorageUnavailable, match="changed while it was read"):
        archiver.run_once()
    assert list(archived(followed)) == [0]
    followed.write(200)
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archived(followed) == closed(followed)


def test_a_restart_notices_segments_that_were_rewritten_meanwhile(followed):
    """The store has the present message of a rewritten place, and not the archive."""
    offsets = followed.write(200, keys="k", uniq_key=None, body=b"b")
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archiver.run_once()
    followed.crash_index()
    place = next(offset for offset in offsets[::12] if offset > FOLLOWED_SEGMENT + 2_000)
    cut(followed, place)
    followed.number = 1_200  # the same topic
    followed.write(1, keys="k", uniq_key=None, body=b"c")
    answer = ask(ReadOnlyBroker(followed.index, store=followed.path), 33, "orders", offset=str(place))
    assert (answer.code, [message.body() for message in records(answer.body)]) == (0, [b"c"])
    followed.write(200)
    followed.clock.advance(60)
    dispatcher = followed.dispatcher(restart=True, clock=followed.clock)
    archiver = SegmentArchiver(followed.index, "s", followed.path / "commitlog", dispatcher=dispatcher)
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archived(followed) == closed(followed)


def test_a_rewritten_segment_replaces_its_copy_if_the_clock_went_back(followed, monkeypatch):
    for module in (format_archived, uploads):  # the cut is behind the part that is always compared
        monkeypatch.setattr(module, "HEAD_BYTES", 1_024)

    class SetBack(ManualClock):
        back_ms = 0

        def now_ms(self):
            return super().now_ms() - self.back_ms

    followed.clock.advance(3_600)  # the host's clock is an hour fast
    clock = SetBack(followed.clock.now_ms())
    dispatcher = followed.dispatcher(skip_corrupt=True, skip_missing=True, clock=clock)
    archiver = SegmentArchiver(followed.index, "s", followed.path / "commitlog", dispatcher=dispatcher)
    followed.write(20)
    list(rounds(dispatcher))
    offsets = followed.write(40)
    catch_up(followed, dispatcher)
    assert archiver.run_once() == 1
    clock.back_ms = 3_000_000
    cut(followed, next(offset for offset in offsets if offset > 4_000))
    followed.write(60)
    now_ns = clock.now_ms() * 1_000_000
    os.utime(followed.segment(0), ns=(now_ns, now_ns))
    catch_up(followed, dispatcher)
    archiver.run_once()
    assert archived(followed) == closed(followed)


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
    assert archiver.losses == [Loss("missing", FOLLOWED_SEGMENT, 3 * FOLLOWED_SEGMENT, None, problem)]


def test_a_log_that_was_recreated_replaces_no_archived_segment_and_one_that_was_given_up_goes_up_again(followed):
    """The broker's disk was replaced. The archive may have the only copy of the old log."""
    followed.write(200)
    dispatcher, archiver = follow(followed)
    catch_up(followed, dispatcher)
    archiver.run_once()
    before, first = archived(followed), followed.index.archived()[0]
    log = log_of(followed.storage)
    removing = LogRecord(0, "remove", 0, "", 0, **Segments(log.state, log.storage).change([], [first]))
    log.append("a segment that was lost", None, lambda _: removing)
    followed.clock.advance(60)
    followed.index.run_lifecycle()
    assert archiver.run_once() == 1
    assert archived(followed) == before
    shutil.rmtree(followed.path)
    followed.writer = followed.open_writer()
    followed.write(200)
    followed.clock.advance(60)
    catch_up(followed, dispatcher)
    with pytest.raises(CorruptFile, match="it was rewritten"):
        archiver.run_once()
    assert archived(followed) == before
