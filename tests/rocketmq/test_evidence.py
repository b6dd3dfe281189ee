"""The end of the log is compared with the consume queues and the checkpoint: if they name later messages, a log that
looks whole is an error, and not `complete` and healthy permanently.
"""

from __future__ import annotations

import re
import shutil

import pytest

from tests.integration.cli.command_lines import run_here
from tests.rocketmq.followed import SEGMENT, Followed, cut_log
from tests.rocketmq.messages import NOW_MS
from tests.rocketmq.test_skipped_ranges import SKIPPING, follow
from tests.support.store_writer import CHECKPOINT_BYTES, checkpoint_bytes
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.follow import Follower
from tiered_index.rocketmq.archive.archive import closed_segments
from tiered_index.rocketmq.follow.dispatcher import Dispatcher, MissingMessages
from tiered_index.rocketmq.log.commitlog import MissingOffsets
from tiered_index.rocketmq.log.store import StoreDirectory


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
                followed.index.put_batch(batch.columns, batch.source, batch.position)
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


def test_a_log_that_is_older_than_the_checkpoint_is_an_error(followed):
    """The queues are those of the old log, too: only the time of the last flush shows later messages."""
    whole(followed)
    later = checkpoint_bytes(NOW_MS + 86_400_000, NOW_MS, 0)
    assert len(later) == CHECKPOINT_BYTES
    (followed.path / "checkpoint").write_bytes(later)
    with pytest.raises(MissingMessages, match=r"the checkpoint says that a message of 2023-11-15.* is flushed"):
        follow(followed, skip_missing=False)


def test_offsets_of_the_checkpoint_count_too(followed):
    end = whole(followed)
    times = (NOW_MS, NOW_MS, 0)
    (followed.path / "checkpoint").write_bytes(checkpoint_bytes(*times, 0, end + 2 * SEGMENT))
    with pytest.raises(MissingMessages, match=f"the checkpoint names .* {end + 2 * SEGMENT:,}"):
        follow(followed, skip_missing=False)


@pytest.mark.parametrize("log", ["older messages", "no messages", "no folder"])
def test_dledger_is_named(followed, log):
    end = whole(followed)
    lay_dledger(followed)
    if log == "older messages":
        followed.segment(end // SEGMENT).unlink()
    else:
        shutil.rmtree(followed.path / "commitlog")
        if log == "no messages":
            (followed.path / "commitlog").mkdir()
    with pytest.raises(MissingMessages, match="dledger-n0/data, which can't be read"):
        follow(followed, skip_missing=False)


def test_a_commit_log_on_another_disk_is_named(followed):
    whole(followed)
    shutil.rmtree(followed.path / "commitlog")
    with pytest.raises(StorageUnavailable, match="--commitlog"):
        follow(followed, skip_missing=False)
    (followed.path / "commitlog").mkdir()
    with pytest.raises(MissingMessages, match=r"the log ends at offset 0: .*--commitlog"):
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


def test_a_log_of_two_disks_is_read_whole(followed):
    """`storePathCommitLog` of two folders: one alone is an error, and both together are the store."""
    end = whole(followed)
    other = followed.folder / "disk-2" / "commitlog"
    other.mkdir(parents=True)
    for number in range(1, end // SEGMENT + 1, 2):
        shutil.move(followed.segment(number), other)
    with pytest.raises(MissingOffsets):
        follow(followed, skip_missing=False)
    store = StoreDirectory.open(followed.path, None, [other])
    dispatcher = Dispatcher(followed.index, store, follow=False)
    with Follower(followed.index, dispatcher, follow=False) as follower:
        follower.run()
    assert (follower.position, follower.messages, follower.losses) == (end, 200, [])
    assert len(followed.index.query("orders", "own-199")) == 1
    assert [one.start for one in closed_segments(store.commitlog)] == list(range(0, end - end % SEGMENT, SEGMENT))
    with pytest.raises(InvalidArgument, match="--commitlog"):
        StoreDirectory.open(followed.path, None, [followed.folder / "none"])


def test_the_command_line_reads_a_log_of_two_disks(followed):
    end = whole(followed)
    other = followed.folder / "disk-2" / "commitlog"
    other.mkdir(parents=True)
    shutil.move(followed.segment(end // SEGMENT - 1), other)
    ingest = ("ingest", followed.path, "--storage", (followed.folder / "by command").as_uri(), "--json")
    ingest += ("--root", followed.folder / "root of command")
    alone = run_here(*ingest)
    assert (alone.code, alone.error["type"]) == (4, "MissingOffsets"), alone.err
    both = run_here(*ingest, "--commitlog", other)
    assert (both.code, both.document["position"]) == (0, end), both.err
    absent = run_here(*ingest, "--commitlog", followed.folder / "none")
    assert (absent.code, "--commitlog" in absent.error["message"]) == (2, True), absent.err


def test_a_clock_that_was_set_back_is_no_error_also_after_a_restart(followed):
    """The checkpoint's time is that of an earlier message; the greatest time is kept with the position."""
    followed.write(100)
    checkpoint = followed.path / "checkpoint"
    checkpoint.write_bytes(checkpoint_bytes(NOW_MS + 20 * 99, NOW_MS, 0))
    follow(followed, skip_missing=False)
    followed.crash_index()
    followed.writer.put("orders", 0, keys=["later"], store_ms=NOW_MS - 3_600_000)
    followed.writer.flush()
    follow(followed, skip_missing=False)
    assert trouble_of(followed) == []
    checkpoint.write_bytes(checkpoint_bytes(NOW_MS + 86_400_000, NOW_MS, 0))
    with pytest.raises(MissingMessages, match=r"the newest one read is of 2023-11-14T22:13:21"):
        follow(followed, skip_missing=False)
