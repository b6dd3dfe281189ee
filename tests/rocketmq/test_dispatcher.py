"""The dispatcher beside a live store: new messages, restarts, positions, deleted segments, disks that are not mounted.
Tests compare answers with a scan.
"""

import errno
import json
import os
import shutil

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import open_index
from tests.rocketmq.followed import SEGMENT, Followed, SteppedDispatcher, check, missing, rounds, scan
from tests.support.disk_faults import FaultDisk
from tiered_index.base.clock import ManualClock
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.rocketmq.follow.fingerprints import Scrubber
from tiered_index.connectors.rocketmq.log.columns import ALL_TOPICS, Selection
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.segments import End
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.errors import BackPressure, ConfigError, DiskFull, InvalidArgument, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage


def test_the_golden_store_answers_as_a_scan_and_finds_what_rocketmq_finds(tmp_path):
    path = golden_store.unpack(tmp_path / "store")
    times = [message["storeTimestamp"] for message in golden_store.expected()]
    with open_index(tmp_path / "root", MemoryStorage(), clock=ManualClock(max(times))) as index:
        reader = CommitLogReader(path / "commitlog", selection=ALL_TOPICS)
        done = SteppedDispatcher(index, StoreDirectory.open(path), reader=reader, now_s=lambda: 0.0).run_once()
        hidden = {m["offset"] for m in golden_store.expected() if golden_store.hidden(m)}
        assert (done.messages, done.hidden, done.end, done.state) == (170, len(hidden), golden_store.END, End.OPEN)
        assert done.entries == len(list(golden_store.rows()))
        model = scan(path)
        assert check(index, model) >= done.entries
        count = 0
        for line in golden_store.raw("index_queries.jsonl").splitlines():
            query = json.loads(line)
            if not query["key"]:
                continue  # RocketMQ also looks up the empty key, which no message has
            end_ms = min(query["end"], MAX_TIMESTAMP_MS)
            answer = index.query(query["topic"], query["key"], query["begin"], end_ms, 10_000)
            mine = [item.offset for item in answer]
            assert mine == [a.offset for a in model.query(query["topic"], query["key"], query["begin"], end_ms, None)]
            # RocketMQ counts seconds from the file's begin, so only open ranges have equal answers; it also has
            # prepared messages
            if query["begin"] == 0 and end_ms == MAX_TIMESTAMP_MS:
                assert set(query["phyOffsets"]) - hidden <= set(mine)
                count += len(mine)
        assert count > 100


def test_an_empty_store_is_followed_from_its_first_message_and_its_files_stay_as_they_are(followed):
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.state, done.caught_up, dispatcher.position) == (0, 0, None, True, None)
    assert dispatcher.lag().bytes == 0
    for count in (1, 5, 40, 300):
        followed.write(count)
        before = {path: path.is_file() and path.read_bytes() for path in followed.path.rglob("*")}
        assert sum(done.messages for done in rounds(dispatcher)) == count
        followed.check()
        assert dispatcher.position == followed.writer.next_offset
        assert {path: path.is_file() and path.read_bytes() for path in followed.path.rglob("*")} == before
    assert len(list((followed.path / "commitlog").iterdir())) > 5


def test_only_what_is_selected_is_put(followed):
    """Also of the last messages of a live log, which the dispatcher reads twice."""
    reader = CommitLogReader(followed.path / "commitlog", selection=Selection(exclude=("pay*",)), chunk_bytes=1_500)
    followed.write(30)
    done = list(rounds(followed.dispatcher(reader=reader)))
    assert (sum(progress.messages for progress in done), sum(progress.left_out for progress in done)) == (30, 10)
    assert [len(followed.index.query(*name)) for name in (("orders", "own-1"), ("payments", "own-0"))] == [1, 0]


# rounds


@pytest.mark.parametrize("by", ["bytes", "time", "request"])
def test_a_round_is_bounded_and_the_next_one_continues(followed, by):
    """By its bytes; by its time, as each call of the clock advances it by a fifth of a second; or because the follower
    is to end after its first batch.
    """
    followed.write(400)
    times, requests = iter(range(1_000)), iter([True])
    options = {
        "bytes": {"round_bytes": 1},
        "time": {"now_s": lambda: next(times) / 5},
        "request": {"stopping": lambda: next(requests, False)},
    }
    dispatcher = followed.dispatcher(**options[by])
    first = dispatcher.run_once()
    assert (first.caught_up, 0 < first.messages < 400, first.end) == (False, True, dispatcher.position)
    behind, end = dispatcher.lag(), followed.writer.next_offset
    assert (behind.end_offset, behind.bytes) == (end, end - first.end)
    assert behind.seconds == pytest.approx((400 - first.messages) * 0.02)  # up to the newest message
    done = [first, *rounds(dispatcher)]
    assert [d.begin for d in done[1:]] == [d.end for d in done[:-1]]
    assert sum(d.messages for d in done) == 400
    assert followed.check() > 1_000
    assert (dispatcher.lag().bytes, dispatcher.lag().seconds) == (0, 0.0)
    followed.index.flush()
    followed.write(50)
    assert followed.dispatcher().lag().seconds == pytest.approx(1.0)


def test_back_pressure_and_a_full_disk_refuse_a_whole_batch_and_the_next_round_continues(tmp_path):
    made, disk = Followed(tmp_path, buffer_max_entries=150), FaultDisk()
    made.write(200)
    dispatcher = made.dispatcher(disk=disk)
    disk.fail("sync", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        dispatcher.run_once()  # nothing is put whose fingerprint can't be written
    assert len(made.index.query("orders", "k1")) == 0
    pushed_back = 0
    for _ in range(50):
        try:
            if dispatcher.run_once().caught_up:
                break
        except BackPressure:
            pushed_back += 1
            made.index.flush()
    assert pushed_back > 1
    made.check()
    ranges = dispatcher.fingerprints.ranges
    assert [fingerprint.end for fingerprint in ranges] == sorted({fingerprint.end for fingerprint in ranges})
    assert sum(fingerprint.messages for fingerprint in ranges) == 200
    made.index.abandon()


# positions


def test_a_restart_continues_at_the_durable_position_a_new_root_at_the_storages_and_a_new_index_with_the_log(followed):
    followed.write(100)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    followed.index.flush()
    durable = dispatcher.position
    followed.write(60)
    dispatcher.run_once()
    followed.crash_index()
    again = followed.dispatcher()
    assert again.resumed_from == durable == followed.index.durable_position(again.store.source)
    followed.write(10)
    assert again.run_once().messages == 70
    followed.check()
    followed.index.close()
    followed.index = followed.open_index()
    for path in sorted((followed.path / "commitlog").iterdir())[:-1]:
        path.unlink()  # what was read before it was deleted is no loss
    last = followed.dispatcher()
    assert last.resumed_from == followed.writer.next_offset
    done = last.run_once()
    assert (done.messages, done.losses) == (0, ())
    followed.index.seal()
    followed.index.run_lifecycle()
    for begin in (last.position, followed.writer.next_offset // SEGMENT * SEGMENT):
        followed.index.close()
        shutil.rmtree(followed.folder / "root")
        followed.index = followed.open_index()
        fresh = followed.dispatcher()
        assert fresh.resumed_from == begin > 0
        followed.storage = MemoryStorage()
    assert fresh.run_once().losses == ()
    followed.check()


def test_one_index_is_of_one_store_and_of_one_kind_of_offsets(followed, tmp_path):
    followed.write(3)
    followed.dispatcher().run_once()
    followed.index.flush()
    assert followed.dispatcher(store_name="elsewhere", restart=True).run_once().messages == 3
    followed.index.flush()
    assert followed.dispatcher(store_name="elsewhere").resumed_from == followed.writer.next_offset
    with pytest.raises(InvalidArgument, match="name"):
        followed.dispatcher(store_name=" ")
    made = Followed(tmp_path / "custom", offset_space="custom")
    made.index.close()
    made.settings["offset_space"] = "commitlog"
    with pytest.raises(ConfigError, match="'custom', not in 'commitlog'"):
        made.open_index()


# segments that the broker deleted


def test_a_segment_deleted_before_it_was_read_is_reported_with_its_messages(followed, monkeypatch):
    """Also one that vanishes between the listing of the folder and the read."""
    offsets = followed.write(400)
    dispatcher = followed.dispatcher(round_bytes=1)
    dispatcher.run_once()
    for number in range(3):
        followed.segment(number).unlink()
    begin = dispatcher.position
    lost = sum(begin <= offset < 3 * SEGMENT for offset in offsets)
    with pytest.raises(MissingOffsets, match=f"{lost} messages") as caught:
        list(rounds(dispatcher))
    assert (caught.value.begin, caught.value.end, caught.value.exit_code) == (begin, 3 * SEGMENT, 4)
    assert dispatcher.position == begin <= SEGMENT
    real = os.open

    def vanishing(path, *arguments, **keywords):
        if str(path) == str(followed.segment(4)):
            for number in (3, 4):
                followed.segment(number).unlink(missing_ok=True)
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", vanishing)
    followed.index.flush()
    skipping = followed.dispatcher(skip_missing=True)
    losses = [loss for done in rounds(skipping) for loss in done.losses]
    later = sum(4 * SEGMENT <= offset < 5 * SEGMENT for offset in offsets)
    assert [(loss.kind, loss.begin, loss.end, loss.messages) for loss in losses] == [
        ("missing", begin, 3 * SEGMENT, lost),
        ("missing", 4 * SEGMENT, 5 * SEGMENT, later),
    ]
    assert missing(followed) == set()


# a folder without a segment, although segments were read before: its disk is not mounted


def unmount(followed: Followed, how: str) -> None:
    (followed.path / "commitlog").rename(followed.folder / "elsewhere")
    if how != "gone":
        (followed.path / "commitlog" / "lost+found").mkdir(parents=True)


def mount(followed: Followed) -> None:
    shutil.rmtree(followed.path / "commitlog", ignore_errors=True)
    (followed.folder / "elsewhere").rename(followed.path / "commitlog")


@pytest.mark.parametrize("how", ["gone", "other names"])
def test_a_commit_log_without_segments_is_unavailable_and_the_position_stays(followed, how, monkeypatch):
    """Also one that is unmounted while it is looked at."""
    followed.write(30)
    dispatcher = followed.dispatcher(skip_missing=True, skip_corrupt=True)
    *_, done = rounds(dispatcher)
    followed.index.flush()
    unmount(followed, how)
    for restart in (False, True):
        # it follows, and waits for the disk
        assert (dispatcher.run_once().messages, dispatcher.lag().is_unknown) == (0, True)
        assert "mounted" in dispatcher.trouble and str(done.end) in dispatcher.trouble
        assert dispatcher.position == done.end
        followed.crash_index()
        with pytest.raises(StorageUnavailable, match="mounted"):
            followed.dispatcher(skip_missing=True, skip_corrupt=True, restart=restart, follow=False).run_once()
        dispatcher = followed.dispatcher(skip_missing=True)
    mount(followed)
    followed.write(5)
    is_changed = Scrubber.is_changed

    def unmounting(*arguments):
        changed = is_changed(*arguments)
        unmount(followed, how)
        return changed

    with monkeypatch.context() as looking:
        looking.setattr(Scrubber, "is_changed", unmounting)
        assert dispatcher.run_once().messages == 0
    assert "mounted" in dispatcher.trouble and dispatcher.position == done.end
    mount(followed)
    *_, after = rounds(dispatcher)
    assert dispatcher.trouble is None and not dispatcher.lag().is_unknown
    assert (after.begin, after.messages, after.losses) == (done.end, 5, ())
    followed.check()


@pytest.mark.parametrize("part", ["consumequeue", "config", "checkpoint"])
def test_a_log_that_is_not_there_at_the_first_start_is_unavailable_beside_files_of_a_broker(tmp_path, followed, part):
    store = tmp_path / "new"
    store.mkdir()
    (store / "abort").touch()
    followed.path = store
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().caught_up  # a new store
    (store / part).mkdir() if part != "checkpoint" else (store / part).touch()
    dispatcher.run_once()
    assert "mounted" in dispatcher.trouble
    with pytest.raises(StorageUnavailable, match="mounted"):
        followed.dispatcher(skip_missing=True, skip_corrupt=True, follow=False).run_once()
    (store / "commitlog").mkdir()
    assert dispatcher.run_once().caught_up
