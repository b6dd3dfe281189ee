"""Ranges of a store's log that were skipped, rewritten or never there are in the storage's log: answers name what they
may lack. A log that looks whole is an error if the consume queues or the checkpoint name later messages.
"""

import re
import shutil

import pytest

from tests.integration.cli.command_lines import run_here
from tests.rocketmq.followed import SEGMENT, Followed, cut_log
from tests.rocketmq.messages import NOW_MS
from tests.support.damage import flip
from tests.support.storage_faults import FaultStorage
from tests.support.store_writer import StoreWriter, checkpoint_bytes
from tiered_index import IndexReader
from tiered_index.cli.explaining import lost_text
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.follow.dispatcher import MissingMessages, RewrittenOffsets
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader, MissingOffsets
from tiered_index.connectors.rocketmq.log.store import StoreDirectory, list_queues
from tiered_index.errors import CorruptFile, StorageUnavailable

SKIPPING = {"skip_corrupt": True, "skip_missing": True}


def follow(followed: Followed, **options: bool) -> tuple[Follower, list[str]]:
    """Follow the store to its end, as a new process does; return the follower and its notes."""
    notes: list[str] = []
    dispatcher = followed.dispatcher(follow=False, clock=followed.clock, **(options or SKIPPING))
    with Follower(followed.index, dispatcher, follow=False, note=notes.append) as follower:
        follower.run()
    followed.index.flush()
    return follower, notes


def cut_and_write_on(followed: Followed) -> list[int]:
    """Put messages with one key. After they are read, a broker cuts off two and writes on; return all offsets."""
    offsets = followed.write(3, keys="same", only_topic="orders")
    follow(followed)
    followed.come_again(cut=offsets[1])
    # the third message's offset is now within a longer one
    return [*offsets, *followed.write(1, body=b"L" * 2_000, keys="same", only_topic="orders")]


def test_a_cut_is_recorded_once_by_a_run_that_does_not_skip_it(followed):
    """A message written after the cut can still be damaged."""
    offsets = cut_and_write_on(followed)
    before = followed.index.log_state.number
    for _ in range(2):
        with pytest.raises(RewrittenOffsets):
            follow(followed, skip_missing=False)
        assert followed.index.log_state.number == before + 1
    (loss,) = followed.index.log_state.lost.values()
    assert (loss.range.kind, loss.range.begin <= offsets[1] < loss.range.end) == ("rewritten", True)
    assert not loss.lacks_entries
    source = RocketmqMessages(followed.path, followed.index.segment_archive)
    same = followed.index.messages("orders", "same", source=source).messages
    assert not any(fetched.damaged for fetched in same)
    assert any("were cut off or rewritten" in fetched.problem for fetched in same if fetched.state == "missing")
    follow(followed)
    flip(followed.segment(0), offsets[3] + 100)
    same = followed.index.messages("orders", "same", source=source).messages
    assert [fetched.item.offset for fetched in same if fetched.damaged] == [offsets[3]]


@pytest.mark.parametrize("restart", [False, True])
def test_answers_name_a_gap_that_was_skipped(followed, restart):
    """They were `complete`, and `lost` was empty. Lookups of other times are not concerned."""
    followed.write(20)
    follow(followed)
    followed.write(300)
    end = followed.writer.next_offset
    last_ms = NOW_MS + 20 * 19
    for number in range(end // SEGMENT - 1):
        followed.segment(number).unlink()
    if restart:
        followed.crash_index()
    follower, notes = follow(followed)
    (loss,) = follower.losses
    assert (loss.kind, loss.is_least) == ("missing", True)
    assert f"at least {loss.messages:,} messages" in notes[0]
    followed.index.seal()
    followed.index.run_lifecycle()
    with IndexReader.open(storage_backend=followed.storage) as reader:
        for lookups in (followed.index, reader):
            answer = lookups.query("orders", "own-100")
            assert (answer.status, len(answer)) == ("complete", 0)
            (lost,) = answer.lost
            assert (lost.file, lost.entries) == (f"rocketmq:{followed.path}", loss.messages)
            assert "deleted before they were read" in lost.reason and "at least" in lost_text(answer.lost)
            assert lost.begin_ms == last_ms // 1000 * 1000 and last_ms < lost.end_ms <= NOW_MS + 20 * 320
            assert lookups.messages("orders", "own-100", source=RocketmqMessages(followed.path)).lost == (lost,)
            for begin_ms, end_ms in ((None, lost.begin_ms - 1), (lost.end_ms + 1_000, None)):
                assert lookups.query("orders", "own-100", begin_ms, end_ms).lost == ()
            (many,) = lookups.query_many([("orders", "own-100")])
            assert many.lost == (lost,)
    number = followed.index.log_state.number
    follow(followed)
    assert followed.index.log_state.number == number


def test_damage_that_was_skipped_is_named_and_many_ranges_stay_few_in_the_log(followed):
    """A gap is recorded before the position moves past it, also by a storage that was away: no later run finds it."""
    bad = followed.write(640)[5::3]
    for offset in bad:
        followed.overwrite(offset, b"\xee" * 40)
    with pytest.raises(CorruptFile):
        follow(followed, skip_corrupt=False)
    followed.index.abandon()
    followed.storage = FaultStorage(followed.storage)
    followed.index = followed.open_index()
    followed.storage.fail("put_if_absent", times=None, name_prefix="log/")
    dispatcher = followed.dispatcher(follow=False, **SKIPPING)
    with Follower(followed.index, dispatcher, follow=False, patience_s=0.0, note=lambda _: None) as follower:
        with pytest.raises(StorageUnavailable):
            follower.run()
    assert (followed.index.durable_position(dispatcher.store.source) or 0) <= bad[0]
    followed.storage.clear()
    follow(followed)
    ranges = [loss.range for loss in followed.index.log_state.lost.values()]
    assert len(bad) > len(ranges) == 200
    assert all(any(lost_range.begin <= offset < lost_range.end for lost_range in ranges) for offset in bad)
    lost = followed.index.query("orders", "absent").lost
    assert all("are damaged" in loss.reason for loss in lost)
    assert lost[0].begin_ms <= NOW_MS + 20 * 5 <= lost[0].end_ms + 999


# a log whose end is not where other files of its store say


def whole(followed: Followed, count: int = 200) -> int:
    """Write a store whose broker ends normally; return the log's end."""
    followed.write(count)
    end = followed.writer.next_offset
    followed.writer.close()
    return end


def lay_dledger(followed: Followed) -> None:
    data = followed.path / "dledger-n0" / "data"
    data.mkdir(parents=True)
    shutil.copy(followed.segment(0), data / followed.segment(0).name)


def trouble_of(followed: Followed) -> list[str]:
    """Return the problems that a follower reports, as the health of `serve --follow` has them."""
    dispatcher = followed.dispatcher(follow=True, clock=followed.clock)
    with Follower(followed.index, dispatcher, note=lambda _: None) as follower:
        for batch in dispatcher.batches():
            if batch.columns is not None:
                followed.index.put_source_batch(batch.columns, batch.source, batch.position)
        for batch in dispatcher.batches():
            assert batch.caught_up
        return follower.problems()


def test_a_partial_copy_is_an_error_that_names_both_ends(followed):
    end = whole(followed)
    followed.segment(end // SEGMENT).unlink()
    last = end // SEGMENT * SEGMENT
    with pytest.raises(MissingMessages) as caught:
        follow(followed, skip_missing=False)
    assert re.search(rf"consume queue \S+ names a message that ends at commit log offset {end:,}", str(caught.value))
    assert f"the log ends at offset {last:,}" in str(caught.value)
    assert "partial copy" in str(caught.value) and "storePathCommitLog" in str(caught.value)
    followed.index.flush()
    assert followed.index.durable_position(f"rocketmq:{followed.path}") == last, "all that is there was put"
    (problem,) = trouble_of(followed)
    assert f"{end:,}" in problem and f"{last:,}" in problem
    follower, notes = follow(followed)
    assert [(loss.kind, loss.begin, loss.end) for loss in follower.losses] == [("missing", last, end)]
    assert "at least" in notes[0] and followed.index.query("orders", "absent").lost


def test_a_log_that_is_older_than_the_checkpoint_is_an_error_and_a_clock_that_was_set_back_is_none(followed):
    """The queues are those of the old log, too: only the checkpoint shows later messages. Its time may be that of an
    earlier message, and the greatest time is kept with the position.
    """
    followed.write(100)
    checkpoint = followed.path / "checkpoint"
    checkpoint.write_bytes(checkpoint_bytes(NOW_MS + 20 * 99, NOW_MS, 0))
    follow(followed, skip_missing=False)
    followed.crash_index()
    followed.writer.put("orders", 0, keys=["later"], store_ms=NOW_MS - 3_600_000)
    followed.writer.flush()
    follow(followed, skip_missing=False)
    assert trouble_of(followed) == []
    behind = followed.writer.next_offset + 2 * SEGMENT
    flushed = (
        "the checkpoint says that a message of 2023-11-15.* is flushed, .*the newest one read is of 2023-11-14T22:13:21"
    )
    for numbers, said in (
        ((NOW_MS + 86_400_000, NOW_MS, 0), flushed),
        ((NOW_MS, NOW_MS, 0, 0, behind), f"the checkpoint names .* {behind:,}"),
    ):
        checkpoint.write_bytes(checkpoint_bytes(*numbers))
        with pytest.raises(MissingMessages, match=said):
            follow(followed, skip_missing=False)


@pytest.mark.parametrize(
    ("log", "dledger"),
    [
        *((log, True) for log in ("older messages", "no messages", "no queues", "no folder")),
        *((log, False) for log in ("no messages", "no folder")),
    ],
)
def test_dledger_or_a_commit_log_on_another_disk_is_named(followed, log, dledger):
    end = whole(followed)
    if dledger:
        lay_dledger(followed)
    if log == "older messages":
        followed.segment(end // SEGMENT).unlink()
    else:
        shutil.rmtree(followed.path / "commitlog")
    if log in ("no messages", "no queues"):
        (followed.path / "commitlog").mkdir()
    if log == "no queues":
        shutil.rmtree(followed.path / "consumequeue")
        (followed.path / "checkpoint").unlink()
    error = StorageUnavailable if (log, dledger) == ("no folder", False) else MissingMessages
    with pytest.raises(error, match="dledger-n0/data, which can't be read" if dledger else "--commitlog"):
        follow(followed, skip_missing=False)


@pytest.mark.parametrize("state", ["closed", "running", "killed", "cut and closed", "dledger that is not used"])
def test_sound_stores_and_crashes_are_no_error(followed, state):
    """After a crash, entries of messages that were cut off stay in the files of the queues."""
    offsets = followed.write(200)
    if state == "killed":
        cut_log(followed.path, offsets[195])
    elif state == "cut and closed":
        followed.come_again(cut=offsets[195])
    if state != "running" and state != "killed":
        followed.writer.close()
    if state == "dledger that is not used":
        lay_dledger(followed)
    follow(followed, **SKIPPING if state == "killed" else {"skip_missing": False})
    assert trouble_of(followed) == []
    assert followed.index.log_state.lost == {}


def test_an_entry_of_a_message_that_was_cut_off_is_no_error_while_its_bytes_are_left_over(followed):
    """A broker that cuts its log zeroes neither its segments nor its queues. Zeros of a body hide the old message."""
    sizes = {"segment_bytes": 8 * SEGMENT, "queue_entries": 50}
    followed.writer = StoreWriter(followed.path, **sizes)
    followed.write(20)
    (cut,) = followed.write(1, body=bytes(6 * SEGMENT))
    followed.write(1, only_topic="left over")
    followed.writer = StoreWriter(followed.path, **sizes, cut=cut)
    followed.write(1)
    followed.writer.close()
    follower, _ = follow(followed, skip_missing=False)
    assert follower.position == followed.writer.next_offset < cut + SEGMENT
    assert trouble_of(followed) == []


@pytest.mark.parametrize("queues", ["whole", "gone"])
def test_a_log_whose_middle_is_missing_is_on_another_disk_or_damaged(followed, queues):
    """`--skip-missing` left out half of the log. The messages are counted by the queue offsets around them."""
    end = whole(followed)
    offsets = [message.physical_offset for message in CommitLogReader(followed.path / "commitlog").messages()]
    for number in range(1, end // SEGMENT, 2):
        followed.segment(number).rename(followed.folder / f"{number}")
    if queues == "gone":
        shutil.rmtree(followed.path / "consumequeue")
    expected = sum(SEGMENT <= offset < 2 * SEGMENT for offset in offsets)
    for options in ({"skip_missing": True}, {"skip_missing": False}):
        with pytest.raises(MissingOffsets, match=f"by --commitlog, .*at least {expected} messages, by their queues"):
            follow(followed, **options)
    follower, notes = follow(followed, skip_corrupt=True)
    counts = [sum(loss.begin <= offset < loss.end for offset in offsets) for loss in follower.losses]
    assert [(loss.kind, loss.messages) for loss in follower.losses] == [("corrupt", count) for count in counts]
    assert len(counts) == end // SEGMENT // 2 and "missing in the middle of the log" in notes[0]
    assert "are damaged" in followed.index.query("orders", "absent").lost[0].reason


@pytest.mark.parametrize("how", ["running", "restarted", "killed"])
def test_deleted_messages_are_counted_by_queue_offsets_if_their_consume_queues_are_gone_too(followed, how):
    """The queues have the last few of them: brokers delete files of queues as well."""
    followed.write(40)
    dispatcher = followed.dispatcher(follow=False, **SKIPPING)
    with Follower(followed.index, dispatcher, follow=False, note=lambda _: None) as follower:
        follower.run()
        if how != "killed":
            followed.index.flush()
        offsets = followed.write(900)
        end = offsets[-1] // SEGMENT * SEGMENT
        for number in range(end // SEGMENT):
            followed.segment(number).unlink()
        for queue in list_queues(followed.path / "consumequeue"):
            for path in sorted(queue.folder.iterdir())[:-1]:
                path.unlink()
        few = StoreDirectory.open(followed.path).messages_named(offsets[0], end)
        lost = sum(offset < end for offset in offsets)
        assert few < lost
        if how == "running":
            follower.run()
    if how == "restarted":
        followed.crash_index()
    if how == "killed":
        followed.index.flush()
        followed.index.abandon()
        # the root is restored to a time before the last batch was remembered
        next((followed.folder / "root" / "followers").iterdir()).unlink()
        followed.index = followed.open_index()
    if how != "running":
        follower, _ = follow(followed)
    (loss,) = follower.losses
    assert (loss.kind, loss.begin, loss.end) == ("missing", offsets[0], end)
    assert (loss.messages, loss.is_least) == (few if how == "killed" else lost, True)


def test_the_command_line_reads_a_log_of_two_disks(followed):
    """`storePathCommitLog` of two folders: one alone is an error, and both together are the store."""
    end = whole(followed)
    other = followed.folder / "disk-2" / "commitlog"
    other.mkdir(parents=True)
    for number in range(1, end // SEGMENT + 1, 2):
        shutil.move(followed.segment(number), other)
    ingest = ("ingest", followed.path, "--storage", (followed.folder / "by command").as_uri(), "--json")
    ingest += ("--root", followed.folder / "root of command", "--archive-segments")
    alone = run_here(*ingest)
    assert (alone.code, alone.error["type"]) == (4, "MissingOffsets"), alone.err
    skipping = run_here(*ingest, "--skip-missing")
    assert skipping.code == 4 and "--commitlog" in skipping.err
    both = run_here(*ingest, "--commitlog", other)
    assert (both.code, both.document["position"]) == (0, end), both.err
    assert both.document["archived_segments"] == end // SEGMENT
    absent = run_here(*ingest, "--commitlog", followed.folder / "none")
    assert (absent.code, "--commitlog" in absent.error["message"]) == (2, True), absent.err


def test_queue_offsets_that_can_not_be_some_are_not_counted_and_end_no_run(followed):
    """Nothing checks the queue offset of a message, and the root keeps the last ones."""
    offsets = followed.write(40)
    for offset, bad in zip(offsets[-2:], (b"\xff" * 8, b"\x7f" + b"\xff" * 7), strict=True):
        followed.overwrite(offset + 20, bad)
    follow(followed)
    followed.crash_index()
    more = followed.write(300)
    end = more[-1] // SEGMENT * SEGMENT
    # so that some queue seems to have lost more than the gap can hold
    followed.overwrite(min(offset for offset in more if offset >= end) + 20, b"\x00\x7f" + b"\xff" * 6)
    shutil.rmtree(followed.path / "consumequeue")
    for number in range(end // SEGMENT):
        followed.segment(number).unlink()
    (loss,) = follow(followed)[0].losses
    assert loss.kind == "missing" and 0 < loss.messages <= sum(offset < end for offset in more)
