"""A commit log folder without a segment, although segments were read before: its disk is not mounted, and no segment
was deleted.
"""

from __future__ import annotations

import shutil

import pytest

from tests.rocketmq.followed import Followed, rounds
from tiered_index.errors import StorageUnavailable
from tiered_index.rocketmq.follow.fingerprints import Scrubber


def unmount(followed: Followed, how: str) -> None:
    (followed.path / "commitlog").rename(followed.folder / "elsewhere")
    if how != "gone":
        (followed.path / "commitlog").mkdir()
    if how == "other names":
        (followed.path / "commitlog" / "lost+found").mkdir()


def mount(followed: Followed) -> None:
    shutil.rmtree(followed.path / "commitlog", ignore_errors=True)
    (followed.folder / "elsewhere").rename(followed.path / "commitlog")


@pytest.mark.parametrize("how", ["gone", "empty", "other names"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_commit_log_without_segments_is_unavailable_and_the_position_stays(followed, how, restart):
    followed.write(30)
    dispatcher = followed.dispatcher(skip_missing=True, skip_corrupt=True)
    *_, done = rounds(dispatcher)
    followed.index.flush()
    unmount(followed, how)
    for _ in range(2):
        with pytest.raises(StorageUnavailable, match="mounted") as caught:
            dispatcher.run_once()
        assert str(done.end) in str(caught.value)
        assert dispatcher.position == done.end
        followed.crash_index()
        dispatcher = followed.dispatcher(skip_missing=True, skip_corrupt=True, restart=restart)
        if restart:
            with pytest.raises(StorageUnavailable):
                dispatcher.run_once()
            dispatcher = followed.dispatcher(skip_missing=True)
    mount(followed)
    followed.write(5)
    *_, after = rounds(dispatcher)
    assert (after.begin, after.messages, after.losses) == (done.end, 5, ())
    followed.check()


@pytest.mark.parametrize("part", ["consumequeue", "config", "checkpoint"])
def test_a_commit_log_that_is_not_there_at_the_first_start_is_unavailable_beside_other_files_of_a_broker(
    tmp_path, followed, part
):
    store = tmp_path / "new"
    store.mkdir()
    (store / "abort").touch()
    followed.path = store
    dispatcher = followed.dispatcher()
    assert dispatcher.run_once().caught_up  # a new store
    (store / part).mkdir() if part != "checkpoint" else (store / part).touch()
    for again in (dispatcher, followed.dispatcher(skip_missing=True, skip_corrupt=True)):
        with pytest.raises(StorageUnavailable, match="mounted"):
            again.run_once()
    (store / "commitlog").mkdir()
    assert dispatcher.run_once().caught_up


def test_a_log_that_is_unmounted_while_it_is_looked_at(followed, monkeypatch):
    followed.write(30)
    dispatcher = followed.dispatcher(skip_missing=True)
    *_, done = rounds(dispatcher)
    followed.write(5)
    real = Scrubber.is_changed

    def unmounting(*given):
        changed = real(*given)
        unmount(followed, "empty")
        return changed

    monkeypatch.setattr(Scrubber, "is_changed", unmounting)
    with pytest.raises(StorageUnavailable, match="has no segment"):
        dispatcher.run_once()
    assert dispatcher.position == done.end
    monkeypatch.undo()
    mount(followed)
    assert [round.losses for round in rounds(dispatcher)] == [()]
    followed.check()
