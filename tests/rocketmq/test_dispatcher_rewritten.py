"""Logs that change after the follower has read them or skipped a damaged part: truncated by a crash of the host,
rewritten, replaced. The follower always notices, by its record of the log.
"""

import errno
import itertools
import json
import os
import random
import shutil

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, SteppedDispatcher, by_key, cut_log, missing, names, rounds, scan
from tests.rocketmq.messages import NOW_MS
from tests.support import damage
from tests.support.disk_faults import FaultDisk
from tiered_index.connectors.rocketmq.follow import dispatcher as dispatching
from tiered_index.connectors.rocketmq.follow import fingerprints
from tiered_index.connectors.rocketmq.follow.dispatcher import RewrittenOffsets
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.segments import End
from tiered_index.errors import CorruptFile, DiskFull, NotAnIndex

ALL = {"skip_corrupt": True, "skip_missing": True}


def follow(followed: Followed, **options: bool) -> SteppedDispatcher:
    """Return a dispatcher as the command line makes it: it checks bodies."""
    return followed.dispatcher(**(options or ALL), reader=CommitLogReader(followed.path / "commitlog", check_crc=True))


def rewrite(followed: Followed, offset: int, count: int) -> None:
    """Truncate the log, start the broker again, and write other messages of the same sizes and boundaries."""
    cut_log(followed.path, offset)
    followed.writer = followed.open_writer()
    assert followed.writer.next_offset == offset
    followed.write(count, tags="B")


def flip(followed: Followed, offset: int) -> None:
    damage.flip(followed.segment(offset // SEGMENT), offset % SEGMENT)


def losses_of(dispatcher: SteppedDispatcher, turns: int = 3) -> list[tuple[str, int, int]]:
    """Return the losses of rounds until the dispatcher caught up, several times."""
    losses = [loss for _ in range(turns) for done in rounds(dispatcher) for loss in done.losses]
    return [(loss.kind, loss.begin, loss.end) for loss in losses]


# the end of the log


@pytest.mark.parametrize("written", [0, 1, 120])
@pytest.mark.parametrize("crash", [False, True])
def test_a_tail_that_was_cut_and_rewritten_stops_the_follower_or_is_read_again(followed, written, crash):
    """Also if the disk is full when it is noticed first."""
    offsets, disk = followed.write(100), FaultDisk()
    dispatcher = followed.dispatcher(skip_missing=True, disk=disk)
    list(rounds(dispatcher))
    before, end = scan(followed.path), dispatcher.position
    rewrite(followed, offsets[80], written)
    if crash:
        followed.index.flush()
        followed.crash_index()
        dispatcher = followed.dispatcher(skip_missing=True, disk=disk)
    careful = followed.sharing(dispatcher)
    for _ in range(2):
        with pytest.raises(RewrittenOffsets, match="messages in the index") as caught:
            careful.run_once()
        assert caught.value.begin <= offsets[80] < caught.value.end == end == careful.position
    disk.fail("create", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        dispatcher.run_once()
    (loss,) = dispatcher.run_once().losses
    intact = [offset for offset in offsets if offset < loss.begin]
    assert (loss.kind, loss.end, loss.messages) == ("rewritten", end, 100 - len(intact))
    assert loss.begin <= offsets[80]
    followed.write(3)
    assert losses_of(dispatcher, 1) == []
    after = scan(followed.path)
    for topic, key in names(after):
        indexed = {(item.offset, item.size) for item in followed.index.query(topic, key, max_count=1_000)}
        now = {(a.offset, a.size) for a in after.query(topic, key, max_count=None)}
        old = {(a.offset, a.size) for a in before.query(topic, key, max_count=None) if a.offset >= offsets[80]}
        assert now <= indexed <= now | old


@pytest.mark.parametrize("keys", [{}, {"keys": "", "uniq_key": None}], ids=["keys", "no keys"])
def test_entries_durable_at_the_followers_death_are_checked_at_its_restart(followed, keys):
    """The background flush may make a batch durable at any moment. Its fingerprint exists by then."""
    followed.write(20)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    followed.index.flush()
    (last,) = followed.write(1, **keys)
    dispatcher.run_once()
    followed.index.flush()  # as the flusher does, without a call to the dispatcher
    followed.crash_index()
    rewrite(followed, last, 1)
    with pytest.raises(RewrittenOffsets) as caught:
        followed.dispatcher().run_once()
    assert (caught.value.begin, caught.value.messages) == (last, 1)


def test_a_new_store_in_the_same_place(followed):
    followed.write(300)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    end = dispatcher.position
    shutil.rmtree(followed.path)
    followed.number = 1_000
    followed.writer = followed.open_writer()
    assert dispatcher.run_once().messages == 0 and "has no segment" in dispatcher.trouble
    followed.write(20)
    with pytest.raises(RewrittenOffsets):
        dispatcher.run_once()
    followed.index.flush()
    again = followed.dispatcher(skip_missing=True)
    losses = [loss for done in [again.run_once(), *rounds(again)] for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end, loss.messages) for loss in losses] == [("rewritten", 0, end, 300)]
    assert {item.offset for item in followed.index.query("orders", "own-1000")} == {0}


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
        indexed = {(item.offset, item.timestamp_ms) for item in followed.index.query(topic, key, max_count=1_000)}
        assert {(a.offset, a.timestamp_ms // 1000 * 1000) for a in part.query(topic, key, max_count=None)} <= indexed


# a log that was truncated but not zeroed, as by brokers: old messages stay after the cut until others overwrite them


def old_and_new(followed: Followed) -> int:
    """Write nearly a whole segment of messages; return the place of the cut."""
    cut = followed.write(11, body=b"")[-1]
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
    write_over(followed, cut, 5)
    followed.write(5, body=b"x" * 6_000)
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
    assert losses_of(again, 1) == []
    assert again.position == followed.writer.next_offset
    assert missing(followed) == set()


# far behind the position: some rounds compare older parts, small steps the whole log, a start of the broker everything


STEP = 500
ROUNDS = 2 * SEGMENT // STEP + 90
"""Rounds for all of two segments, and one more for each fingerprint."""


@pytest.fixture
def scrubbing(followed, monkeypatch) -> SteppedDispatcher:
    """A dispatcher that compares the newest 600 bytes in every round, 500 older bytes in small steps, and everything
    only at a start. Its record has a few fingerprints of the durable part that cover all of it.
    """
    for name, number in (("NEAR_BYTES", 600), ("FAR_BYTES", 600), ("SCRUB_BYTES", STEP)):
        monkeypatch.setattr(fingerprints, name, number)
    monkeypatch.setattr(dispatching, "FAR_BYTES", 600)
    made = followed.dispatcher(skip_missing=True)
    count = 0
    while followed.writer.next_offset < 2 * SEGMENT - 800:
        count += len(followed.write(1, body=b""))
        list(rounds(made))
        followed.index.flush()
    ranges = made.fingerprints.ranges
    assert len(ranges) < 64 + 21 < count == sum(covered.messages for covered in ranges)
    # a blank is of no range
    assert all(two.begin in (covered.end, SEGMENT) for covered, two in itertools.pairwise(ranges))
    assert followed.dispatcher().fingerprints.ranges == ranges
    return made


@pytest.mark.parametrize(("at", "starts"), [(40, False), (3_000, False), (SEGMENT + 100, False), (3_000, True)])
def test_a_byte_that_is_changed_far_back_is_noticed_without_a_start_and_soon_after_one(followed, scrubbing, at, starts):
    """A start of the broker, which may have cut its log: all is compared once messages follow."""
    assert all(scrubbing.run_once().losses == () for _ in range(ROUNDS))
    flip(followed, at)
    if starts:
        (followed.path / "lock").write_text("lock")
        followed.write(1)
    losses = [loss for _ in range(3 if starts else ROUNDS) for loss in scrubbing.run_once().losses]
    assert [loss.kind for loss in losses] == ["rewritten"]
    assert losses[0].begin <= at < losses[0].end


def test_a_deep_cut_is_written_over_and_its_messages_are_found(followed, scrubbing):
    """The broker is still far from the position, and the bytes before the position are those that were read. A segment
    that is deleted meanwhile is nothing changed.
    """
    followed.segment(0).unlink()
    assert all(scrubbing.run_once().losses == () for _ in range(ROUNDS))
    offset = min(covered.end for covered in scrubbing.fingerprints.ranges if covered.end > SEGMENT + 1_000)
    followed.come_again(offset)
    offsets = followed.write(3, body=b"x" * 41)
    (loss,) = [loss for _ in range(ROUNDS) for loss in scrubbing.run_once().losses]
    assert (loss.kind, loss.begin) == ("rewritten", offset)
    for number, place in zip(range(1_000, 1_003), offsets, strict=True):
        entries = followed.index.query("orders" if number % 3 else "payments", f"own-{number}")
        assert [item.offset for item in entries] == [place]


# ranges that were skipped


def close_segment(followed: Followed, begin: int) -> None:
    """Write the final blank of the segment that has the offset `begin`."""
    left = SEGMENT - begin % SEGMENT
    followed.overwrite(begin, left.to_bytes(4, "big") + bytes.fromhex("cbd43194"))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("written", [1, 100])
@pytest.mark.parametrize("what", ["message", "blank"])
def test_messages_written_over_a_skipped_range_or_in_place_of_a_lost_blank_are_read(followed, restart, written, what):
    """A last message lacks a page although the blank after it is there, or the follower read a blank that was not on
    the disk when the host crashed.
    """
    followed.write(20)
    (last,) = followed.write(1, body=b"B" * (SEGMENT - followed.writer.next_offset - 500))
    blank = followed.writer.next_offset
    close_segment(followed, blank)
    begin = last if what == "message" else blank
    if what == "message":
        followed.overwrite(last + 200, bytes(60))
    dispatcher = follow(followed)
    lost = [("corrupt", last)] if what == "message" else []
    assert [loss[:2] for loss in losses_of(dispatcher)] == lost  # until something is written there
    assert dispatcher.position == SEGMENT
    if restart:
        followed.index.flush()
        followed.crash_index()
        dispatcher = follow(followed)
        assert (dispatcher.lag().bytes, dispatcher.lag().seconds) == (0, 0.0)
    if what == "blank":
        followed.overwrite(blank, bytes(8))
    followed.come_again()
    assert followed.writer.next_offset == begin
    followed.write(written, body=b"")
    careful = followed.sharing(dispatcher, skip_corrupt=True)
    with pytest.raises(RewrittenOffsets) as caught:
        careful.run_once()
    assert (caught.value.begin, caught.value.end, caught.value.messages) == (begin, SEGMENT, 0)
    assert [loss for loss in losses_of(dispatcher) if loss[0] == "rewritten"] == [("rewritten", begin, SEGMENT)]
    assert missing(followed) == set()
    assert dispatcher.position in (followed.writer.next_offset, SEGMENT)


@pytest.mark.parametrize("left", [0, 50, 4_000])
def test_a_truncated_segment_is_skipped_once(followed, left):
    followed.write(100)
    os.truncate(followed.segment(0), left)
    dispatcher = follow(followed)
    assert [(kind, end) for kind, _, end in losses_of(dispatcher)] == [("corrupt", SEGMENT)]
    followed.index.flush()
    for again in (dispatcher, follow(followed)):
        assert [again.run_once().losses for _ in range(40)] == [()] * 40


# lives


def lose_pages(made: Followed, rng: random.Random) -> None:
    """Zero or overwrite some pages of the last segments, as a crash of the host does."""
    end = made.writer.next_offset
    for page in range(max(0, end - rng.choice((500, 3_000, 2 * SEGMENT))) // 512, end // 512 + 1):
        if rng.random() < 0.3 and made.segment(page * 512 // SEGMENT).exists():
            made.overwrite(page * 512, bytes(512) if rng.random() < 0.7 else rng.randbytes(512))


ACTIONS = ("write", "write", "write", "round", "round", "flush", "follower", "broker", "cut", "pages", "pages")


@pytest.mark.parametrize(
    "seed", [4, 6, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 1, 2, 3, 5, 7, 8))]
)
def test_a_life_with_every_kind_of_crash(tmp_path, seed):
    """Writes, flushes, rounds and the deaths of broker, follower and host come in any order. After the host's death the
    log ends earlier or lacks pages, which a follower that skips damage may read before the broker truncates its log. At
    the end the index has every message of the log.
    """
    rng = random.Random(seed)
    made = Followed(tmp_path)
    dispatcher = follow(made)
    for _ in range(60):
        action = rng.choice(ACTIONS)
        if action == "write":
            made.write(rng.randrange(1, 40), flush=rng.random() < 0.8)
        elif action == "round":
            dispatcher.run_once()
        elif action == "flush":
            made.index.flush()
        elif action == "follower":
            made.crash_index()
            dispatcher = follow(made)
        elif action == "pages":
            made.writer.flush()
            lose_pages(made, rng)
            for _ in range(rng.randrange(3)):
                dispatcher.run_once()
            made.come_again()
        else:
            if action == "cut" and (offsets := sorted({entry.offset for entry in scan(made.path).entries})):
                cut_log(made.path, rng.choice(offsets[-30:]))
            made.writer = made.open_writer()
    made.write(100)
    for _ in range(60):  # older ranges are compared only in some rounds
        done = dispatcher.run_once()
    assert done.state in (End.OPEN, End.TORN)
    assert dispatcher.position == made.writer.next_offset and dispatcher.lag().bytes == 0
    assert missing(made) == set()
    made.index.abandon()


# the record of a log


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"follower": 2}', '{"follower": 2, "source": "other", "witnesses": []}']
)
def test_a_record_that_cannot_be_read_is_named(followed, content):
    """It is written whole or not, and leftovers go."""
    followed.write(5)
    followed.dispatcher().run_once()
    folder = followed.folder / "root" / "followers"
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["source"] == f"rocketmq:{followed.path}"
    (folder / ".tmp-0123456789abcdef").write_bytes(b"half")
    followed.crash_index()
    assert [path.name for path in folder.iterdir()] == [file.name]
    file.write_text(content)
    with pytest.raises(CorruptFile, match="unchecked"):
        followed.dispatcher()


def test_a_root_of_nobody_may_have_an_empty_folder_of_followers(tmp_path):
    (tmp_path / "root" / "followers").mkdir(parents=True)
    (tmp_path / "root" / "followers" / "x.json").touch()
    with pytest.raises(NotAnIndex, match="followers"):
        Followed(tmp_path)
    (tmp_path / "root" / "followers" / "x.json").unlink()
    Followed(tmp_path).index.close()


# the root is lost, too


def lose_root(followed: Followed) -> None:
    """Lose the follower's host; a new root continues from the storage."""
    followed.index.close()  # ends the lease, and uploads nothing
    shutil.rmtree(followed.folder / "root")
    followed.index = followed.open_index()


def upload(followed: Followed) -> None:
    followed.index.flush()
    followed.index.seal()
    followed.index.run_lifecycle()


def test_a_new_root_reads_messages_after_a_cut_that_the_lost_root_reported(followed):
    """The storage still has the position from before the cut, beyond the end of the log."""
    offsets = followed.write(300)
    list(rounds(followed.dispatcher()))
    upload(followed)
    rewrite(followed, offsets[250], 20)
    dispatcher = followed.dispatcher(skip_missing=True)
    (loss,) = dispatcher.run_once().losses
    followed.index.record_ranges([loss.recorded(dispatcher.store.source, NOW_MS)])  # as `Follower` does
    assert losses_of(dispatcher) == []
    for _ in range(2):
        lose_root(followed)
        again = followed.dispatcher()
        followed.write(5)
        assert losses_of(again) == []
        assert again.position == followed.writer.next_offset
        assert missing(followed) == set()
        upload(followed)


@pytest.mark.parametrize("lost", ["root", "record of the log"])
def test_a_new_root_continues_at_the_end_of_the_log_and_says_so_if_its_position_is_after_it(followed, lost):
    """A store from a backup, or a slave that has not caught up: its lag was 0 bytes."""
    # zeros hide the end of the log
    offsets = followed.write(300, body=b"\0" * 6_000 if lost == "root" else b"body")
    list(rounds(followed.dispatcher()))
    end = followed.writer.next_offset
    upload(followed)
    if lost == "root":
        lose_root(followed)
    else:
        shutil.rmtree(followed.folder / "root" / "followers")
    dispatcher = followed.dispatcher()
    assert (losses_of(dispatcher), dispatcher.position) == ([], end)
    cut_log(followed.path, offsets[295])
    for _ in range(2):
        with pytest.raises(RewrittenOffsets, match="--skip-missing") as caught:
            followed.dispatcher().run_once()
        assert (caught.value.end, caught.value.messages) == (end, None)
    followed.writer = followed.open_writer()
    followed.write(2)
    again = followed.dispatcher(skip_missing=True)
    assert [loss[:2] for loss in losses_of(again)] == [("rewritten", 0)]
    assert again.position == followed.writer.next_offset < end
    assert missing(followed) == set()
