"""Logs that change after the follower has read them: truncated by a crash of the host, rewritten, replaced. The
follower always notices.
"""

from __future__ import annotations

import errno
import random
import shutil

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, by_key, cut_log, missing, names, rounds, scan
from tests.support.disk_faults import FaultDisk
from tiered_index.errors import DiskFull, StorageUnavailable
from tiered_index.rocketmq.follow import fingerprints
from tiered_index.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.rocketmq.follow.fingerprints import Verdict
from tiered_index.rocketmq.log.segments import End, list_segments


def rewrite(followed: Followed, offset: int, count: int) -> None:
    """Truncate the log and start the broker again; write other messages with bodies of the same sizes, so that their
    boundaries agree.
    """
    cut_log(followed.path, offset)
    followed.writer = followed.open_writer()
    assert followed.writer.next_offset == offset
    followed.write(count, tags="B")


@pytest.mark.parametrize("written", [0, 1, 40, 120])
@pytest.mark.parametrize("crash", [False, True])
def test_a_tail_that_was_cut_and_rewritten_stops_the_follower_or_is_read_again(followed, written, crash):
    offsets = followed.write(100)
    dispatcher = followed.dispatcher(skip_missing=True)
    list(rounds(dispatcher))
    before, end = scan(followed.path), dispatcher.position
    rewrite(followed, offsets[80], written)
    if crash:
        followed.index.flush()
        followed.crash_index()
        dispatcher = followed.dispatcher(skip_missing=True)
    dispatcher._skip_missing = False
    for _ in range(2):
        with pytest.raises(RewrittenOffsets, match="messages in the index") as caught:
            dispatcher.run_once()
        assert caught.value.begin <= offsets[80] < caught.value.end == end == dispatcher.position
    dispatcher._skip_missing = True
    (loss,) = dispatcher.run_once().losses
    kept = [offset for offset in offsets if offset < loss.begin]
    assert (loss.kind, loss.end, loss.messages) == ("rewritten", end, 100 - len(kept))
    assert loss.begin <= offsets[80]
    followed.write(3)
    assert [loss for done in rounds(dispatcher) for loss in done.losses] == []
    after = scan(followed.path)
    for topic, key in names(after):
        found = {(item.offset, item.size) for item in followed.index.query(topic, key, max_count=1_000)}
        now = {(a.offset, a.size) for a in after.query(topic, key, max_count=None)}
        old = {(a.offset, a.size) for a in before.query(topic, key, max_count=None) if a.offset >= offsets[80]}
        assert now <= found <= now | old


def test_a_follower_killed_while_it_reads_again_misses_nothing(followed):
    offsets = followed.write(300)
    followed.dispatcher().run_once()
    followed.index.flush()
    rewrite(followed, offsets[40], 100)
    for number in range(80):
        dispatcher = followed.dispatcher(skip_missing=True, round_bytes=1)
        position = dispatcher.position
        done = dispatcher.run_once()
        if number % 2:
            followed.index.flush()
        followed.crash_index()
        if done.state is End.OPEN and not done.losses and done.end == position:
            break
    else:
        raise AssertionError("no progress over restarts")
    assert missing(followed) == set()
    followed.write(300)
    assert all(not done.losses for done in rounds(followed.dispatcher()))


def test_entries_durable_at_the_followers_death_are_checked_at_its_restart(followed):
    """The background flush may make a batch durable at any moment. Its fingerprint exists by then."""
    followed.write(20)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    followed.index.flush()
    (last,) = followed.write(1)
    dispatcher.run_once()
    followed.index.flush()  # as the flusher does, without a call to the dispatcher
    followed.crash_index()
    rewrite(followed, last, 1)
    with pytest.raises(RewrittenOffsets) as caught:
        followed.dispatcher().run_once()
    assert (caught.value.begin, caught.value.messages) == (last, 1)


def test_rewritten_messages_without_keys_are_noticed_too(followed):
    followed.write(20)
    offsets = followed.write(5, keys="", uniq_key=None)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    rewrite(followed, offsets[-1], 1)
    with pytest.raises(RewrittenOffsets):
        dispatcher.run_once()


def test_a_new_store_in_the_same_place(followed):
    followed.write(300)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    end = dispatcher.position
    shutil.rmtree(followed.path)
    followed.number = 1_000
    followed.writer = followed.open_writer()
    with pytest.raises(StorageUnavailable):
        dispatcher.run_once()
    followed.write(20)
    again = followed.dispatcher(skip_missing=True)
    with pytest.raises(RewrittenOffsets):
        dispatcher.run_once()
    followed.index.flush()
    again = followed.dispatcher(skip_missing=True)
    losses = [loss for done in [again.run_once(), *rounds(again)] for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end, loss.messages) for loss in losses] == [("rewritten", 0, end, 300)]
    assert {item.offset for item in followed.index.query("orders", "own-1000")} == {0}


def test_a_log_that_is_shorter_than_the_position_without_any_memory_of_it(followed):
    followed.write(300)
    list(rounds(followed.dispatcher()))
    followed.index.flush()
    shutil.rmtree(followed.folder / "root" / "followers")
    followed.segment(0).rename(followed.segment(0).with_suffix(".old"))
    for path in (followed.path / "commitlog").glob("0*[0-9]"):
        path.unlink()
    followed.segment(0).with_suffix(".old").rename(followed.segment(0))
    with pytest.raises(RewrittenOffsets) as caught:
        followed.dispatcher().run_once()
    assert caught.value.messages is None
    again = followed.dispatcher(skip_missing=True)
    assert [loss.begin for loss in again.run_once().losses] == [0]
    assert sum(done.messages for done in rounds(again)) > 10


@pytest.mark.parametrize("seed", [0, 2, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3, 5))])
def test_a_life_with_every_kind_of_crash(tmp_path, seed):
    """Writes, flushes, rounds and the deaths of broker, follower and host come in any order. At the end the index has
    every message of the log.
    """
    rng = random.Random(seed)
    made = Followed(tmp_path)
    dispatcher = made.dispatcher(skip_missing=True, round_bytes=SEGMENT)
    host_crashes, every = 0, set()
    for _ in range(60):
        action = rng.choice(
            ("write", "write", "write", "round", "round", "flush", "follower dies", "broker dies", "host dies")
        )
        if action == "write":
            made.write(rng.randrange(1, 40), flush=rng.random() < 0.8)
        elif action == "round":
            dispatcher.run_once()
        elif action == "flush":
            made.index.flush()
        elif action == "follower dies":
            made.crash_index()
            dispatcher = made.dispatcher(skip_missing=True, round_bytes=SEGMENT)
        else:
            if (
                action == "host dies"
                and rng.random() < 0.3
                and (offsets := sorted({e.offset for e in scan(made.path).entries}))
            ):
                every |= names(scan(made.path))
                cut_log(made.path, rng.choice(offsets[-30:]))
                host_crashes += 1
            made.writer = made.open_writer()
    made.writer.flush()
    for _ in range(3):
        list(rounds(dispatcher))
    if not host_crashes:
        made.check()
    for name, of_key in by_key(scan(made.path)).items():
        found = {(item.offset, item.size) for item in made.index.query(*name, max_count=10_000)}
        assert {(a.offset, a.size) for a in of_key.query(*name, max_count=None)} <= found, name
    assert dispatcher.lag().bytes == 0
    made.index.abandon()


# a log that was truncated but not zeroed, as by brokers: old messages stay after the cut until others overwrite them


def old_and_new(followed: Followed, kept: int = 10) -> int:
    """Write nearly a whole segment of messages; return the place of the cut."""
    cut = followed.write(kept + 1, body=b"")[-1]
    while followed.writer.next_offset < SEGMENT - 400:
        followed.write(1, body=b"")
    return cut


def write_over(followed: Followed, cut: int, count: int, body: bytes = b"x" * 61) -> None:
    """Start the broker again, truncate its log, and overwrite old messages by `count` messages of other sizes."""
    followed.come_again(cut)
    assert followed.writer.next_offset == cut
    followed.write(count, body=body)


@pytest.mark.parametrize("restart", [False, True])
def test_messages_written_below_the_position_while_the_last_one_stays_are_noticed(followed, restart):
    """The broker closes the segment with a blank before the old messages at its end, which stay permanently."""
    cut = old_and_new(followed)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    end = dispatcher.position
    assert end is not None
    last = dispatcher.fingerprints.ranges[-1]
    write_over(followed, cut, 5)
    followed.write(5, body=b"x" * 6_000)
    assert last.compare_last(list_segments(followed.path / "commitlog")) is Verdict.SAME
    if restart:
        followed.index.flush()
        dispatcher = followed.dispatcher()
    for _ in range(2):
        with pytest.raises(RewrittenOffsets) as caught:
            dispatcher.run_once()
        assert caught.value.begin <= cut < caught.value.end == end
    followed.index.flush()
    again = followed.dispatcher(skip_missing=True)
    assert [loss.kind for loss in again.run_once().losses] == ["rewritten"]
    assert [loss for done in rounds(again) for loss in done.losses] == []
    assert again.position == followed.writer.next_offset
    assert missing(followed) == set()


@pytest.mark.parametrize("same_sizes", [False, True])
def test_a_range_that_is_overwritten_in_small_steps_is_read_again(followed, same_sizes):
    cut = old_and_new(followed)
    dispatcher = followed.dispatcher(skip_missing=True)
    dispatcher.run_once()
    write_over(followed, cut, 1, body=b"" if same_sizes else b"x" * 61)
    (loss,) = dispatcher.run_once().losses
    assert (loss.kind, loss.begin <= cut) == ("rewritten", True)
    followed.writer.close()
    followed.come_again(followed.writer.next_offset)
    followed.write(100, body=b"y" * 33)
    for _ in range(3):
        list(rounds(dispatcher))
    assert dispatcher.position == followed.writer.next_offset
    assert missing(followed) == set()


def test_old_ranges_are_compared_in_some_rounds_and_all_after_a_start_of_the_broker(followed, monkeypatch):
    monkeypatch.setattr("tiered_index.rocketmq.follow.fingerprints.NEAR_RANGES", 2)
    monkeypatch.setattr("tiered_index.rocketmq.follow.fingerprints.FAR_ROUNDS", 10)
    dispatcher = followed.dispatcher()
    for _ in range(9):
        followed.write(1)
        dispatcher.run_once()
    path = followed.segment(0)
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    dispatcher.run_once()  # the ninth round with an older fingerprint
    with pytest.raises(RewrittenOffsets):
        dispatcher.run_once()
    data[60] ^= 1
    path.write_bytes(data)
    assert dispatcher.run_once().losses == ()
    data[60] ^= 1
    path.write_bytes(data)
    (followed.path / "lock").write_text("lock")
    dispatcher.run_once()
    followed.write(1)
    dispatcher.run_once()
    with pytest.raises(RewrittenOffsets) as caught:
        dispatcher.run_once()
    assert caught.value.begin == 0


def test_a_large_batch_has_fingerprints_within_it(followed, monkeypatch):
    monkeypatch.setattr(fingerprints, "_PIECE_BYTES", 1_000)
    monkeypatch.setattr(fingerprints, "_READ_BYTES", 300)
    cut = old_and_new(followed, 20)
    dispatcher = followed.dispatcher(skip_missing=True)
    done = dispatcher.run_once()
    ranges = dispatcher.fingerprints.ranges
    assert len(ranges) > 4
    assert sum(one.messages for one in ranges) == done.messages
    assert all(one.compare(list_segments(followed.path / "commitlog")) is Verdict.SAME for one in ranges)
    assert [one.begin for one in ranges] == [0] + [one.end for one in ranges[:-1]]
    write_over(followed, cut, 1)
    (loss,) = dispatcher.run_once().losses
    assert cut - 1_500 < loss.begin <= cut
    assert loss.messages == sum(one.messages for one in ranges if one.end > loss.begin)


def test_another_host_has_what_was_read_again_after_a_cut(followed):
    """The storage's position is that of the longer log before the cut."""
    same = {"body": b"b", "keys": "k", "uniq_key": None}  # messages begin at the same offsets as before
    offsets = followed.write(300, **same)
    dispatcher = followed.dispatcher(skip_missing=True)
    list(rounds(dispatcher))
    followed.index.seal()
    followed.index.run_lifecycle()
    cut_log(followed.path, offsets[240])
    followed.writer, followed.number = followed.open_writer(), 1_200
    followed.write(100, **same)
    list(rounds(dispatcher))
    followed.index.run_lifecycle()
    followed.index.close()
    shutil.rmtree(followed.folder / "root")
    followed.index = followed.open_index()
    list(rounds(followed.dispatcher()))
    for (topic, key), part in by_key(scan(followed.path)).items():
        found = {(item.offset, item.timestamp_ms) for item in followed.index.query(topic, key, max_count=1_000)}
        assert {(a.offset, a.timestamp_ms // 1000 * 1000) for a in part.query(topic, key, max_count=None)} <= found


def test_a_rewritten_log_is_reported_if_the_disk_was_full(followed):
    offsets, disk = followed.write(100), FaultDisk()
    dispatcher = followed.dispatcher(skip_missing=True, disk=disk)
    list(rounds(dispatcher))
    end = dispatcher.position
    rewrite(followed, offsets[80], 40)
    disk.fail("create", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        dispatcher.run_once()
    losses = [loss for done in [dispatcher.run_once(), *rounds(dispatcher)] for loss in done.losses]
    assert [(loss.kind, loss.end) for loss in losses] == [("rewritten", end)]
    assert missing(followed) == set()
