"""The store's side of the dispatcher: deleted segments, folders that are no store or can't be read, files that must not
change.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.rocketmq.followed import SEGMENT, check, rounds, scan
from tests.rocketmq.messages import blank
from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.log.commitlog import MissingOffsets
from tiered_index.rocketmq.log.store import StoreDirectory


def test_a_segment_deleted_before_it_was_read_is_reported_with_its_messages(followed):
    offsets = followed.write(300)
    dispatcher = followed.dispatcher(round_bytes=1)
    dispatcher.run_once()
    followed.segment(1).unlink()
    followed.segment(2).unlink()
    lost = sum(SEGMENT <= offset < 3 * SEGMENT for offset in offsets)
    with pytest.raises(MissingOffsets, match=f"{lost} messages") as caught:
        list(rounds(dispatcher))
    assert (caught.value.begin, caught.value.end, caught.value.exit_code) == (SEGMENT, 3 * SEGMENT, 4)
    assert dispatcher.position <= SEGMENT
    skipping = followed.dispatcher(skip_missing=True)
    losses = [loss for done in rounds(skipping) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end, loss.messages) for loss in losses] == [
        ("missing", SEGMENT, 3 * SEGMENT, lost)
    ]
    followed.check()
    shutil.rmtree(followed.path / "consumequeue")
    assert followed.dispatcher(restart=True, skip_missing=True).run_once().losses[0].messages is None


def test_segments_deleted_after_they_were_read_are_no_loss(followed):
    followed.write(300)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    model = scan(followed.path)
    for path in sorted((followed.path / "commitlog").iterdir())[:-1]:
        path.unlink()
    offsets = followed.write(5)
    assert [done.losses for done in rounds(dispatcher)] == [()]
    model.entries += [entry for entry in scan(followed.path).entries if entry.offset in offsets]
    check(followed.index, model)


def test_segments_that_vanish_between_listing_and_reading(followed, monkeypatch):
    followed.write(300)
    dispatcher = followed.dispatcher(skip_missing=True)
    real, gone = os.open, []

    def vanishing(path, *arguments, **keywords):
        if str(path) == str(followed.segment(1)):
            Path(path).unlink(missing_ok=True)
            gone.append(path)
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", vanishing)
    losses = [loss for done in rounds(dispatcher) for loss in done.losses]
    assert [(loss.kind, loss.begin, loss.end) for loss in losses] == [("missing", SEGMENT, 2 * SEGMENT)]
    assert gone
    followed.check()


# folders that are no store or can't be read


def test_an_empty_store_has_nothing_and_is_followed_from_its_first_message(followed):
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.state, done.caught_up, dispatcher.position) == (0, 0, None, True, None)
    assert dispatcher.lag().bytes == 0
    followed.write(3)
    assert dispatcher.run_once().messages == 3
    followed.check()


def test_a_log_of_only_a_blank(followed):
    followed.segment(0).write_bytes(blank(SEGMENT))
    dispatcher = followed.dispatcher()
    done = dispatcher.run_once()
    assert (done.messages, done.end, done.caught_up) == (0, SEGMENT, True)
    followed.index.flush()
    assert followed.index.durable_position(dispatcher.store.source) == SEGMENT
    assert dispatcher.run_once().end == SEGMENT


@pytest.mark.parametrize("parts", [[], ["something"]])
def test_a_folder_that_is_no_store(tmp_path, parts):
    for part in parts:
        (tmp_path / part).mkdir()
    with pytest.raises(InvalidArgument, match="not a RocketMQ store"):
        StoreDirectory.open(tmp_path)
    with pytest.raises(InvalidArgument, match="not a folder"):
        StoreDirectory.open(tmp_path / "absent")
    (tmp_path / "abort").touch()
    with pytest.raises(InvalidArgument, match="name"):
        StoreDirectory.open(tmp_path, " ")
    assert StoreDirectory.open(tmp_path).source == f"rocketmq:{tmp_path.resolve()}"


def test_the_brokers_files_stay_as_they_are(followed):
    followed.write(200)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in followed.path.rglob("*") if path.is_file()}
    folders = sorted(path for path in followed.path.rglob("*"))
    list(rounds(followed.dispatcher(round_bytes=1)))
    followed.dispatcher(restart=True).lag()
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert sorted(path for path in followed.path.rglob("*")) == folders


def test_the_folder_is_listed_a_few_times_a_round_and_not_for_every_comparison(followed, monkeypatch):
    dispatcher = followed.dispatcher()
    for _ in range(12):
        followed.write(10)
        list(rounds(dispatcher))
    assert len(dispatcher.fingerprints.ranges) >= 8
    followed.index.flush()
    looked = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or real(path))
    for written in (0, 0, 10):
        followed.write(written)
        looked.clear()
        assert dispatcher.run_once().messages == written
        assert looked.count(followed.path / "commitlog") <= 4 + 3 * bool(written)
