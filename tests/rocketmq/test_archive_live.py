"""An archiver that dies at any call to the storage, lookups beside archiving and deletion, and a storage that speaks
S3.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import boto3
import pytest
from moto import mock_aws

from tests.rocketmq import golden_store
from tests.rocketmq.archived_store import delete_segments, index_log, lookups, open_index, scan
from tests.rocketmq.messages import full, joined, log, write_log
from tiered_index import IndexReader, IndexService
from tiered_index.errors import StorageUnavailable
from tiered_index.format.archived import HEAD_BYTES, PIECE_BYTES, segment_object_bytes
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.storage.base import Call, Storage, WrapperStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

_T = TypeVar("_T")
PART = 5 << 20
"""The least of S3's parts."""
BEGIN_OF_LAST = 81_920


class Dies(WrapperStorage):
    """Ends the process, as it were, before or after call number `at` that concerns segments or the log."""

    def __init__(self, inner: MemoryStorage, at: int, *, after: bool, error: type[BaseException]) -> None:
        super().__init__(inner)
        self.left, self._after, self._error = at, after, error
        self.armed = False

    def _around(self, call: Call, act: Callable[[], _T]) -> _T:
        if not self.armed or not call.name.startswith(("segments/", "log/")):
            return act()
        self.left -= 1
        if self.left == 0 and not self._after:
            raise self._error("scripted end")
        result = act()
        if self.left == 0:
            raise self._error("scripted end")
        return result


def open_archiver(root: Path, storage: Storage, log: Path) -> tuple[IndexService, SegmentArchiver]:
    """Open an index, and an archiver whose parts are as small as they can be."""
    index = open_index(root, storage)
    index._segments.part_bytes = HEAD_BYTES
    return index, SegmentArchiver(index, "s", log)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageUnavailable])
def test_whichever_call_fails_the_next_run_makes_it_whole(
    tmp_path: Path, after: bool, error: type[BaseException]
) -> None:
    size = PIECE_BYTES + HEAD_BYTES
    contents = {0: full(log(3), size), size: full(log(2, size), size), 2 * size: joined(log(1, 2 * size))}
    folder = write_log(tmp_path / "commitlog", size, contents)
    calls = 0
    while True:
        calls += 1
        storage = MemoryStorage()
        dying = Dies(storage, calls, after=after, error=error)
        index, archiver = open_archiver(tmp_path / f"root{calls}", dying, folder)
        dying.armed = True
        try:
            archiver.run_once()
        except error:
            dying.armed = False
            if error is KeyboardInterrupt:
                index.abandon()
                index, archiver = open_archiver(tmp_path / f"root{calls}", storage, folder)
            archiver.run_once()
        dying.armed = False
        stored = {segment.name: segment for segment in index.archived()}
        assert sorted(segment.start for segment in stored.values()) == [0, size]
        named = [info.name for info in storage.list("segments/")]
        if error is KeyboardInterrupt:
            assert named == sorted(stored)
        else:  # what one failing clean-up left goes with the next start
            assert set(named) >= set(stored)
        for segment in stored.values():
            assert storage.get(segment.name)[:size] == contents[segment.start].ljust(size, b"\0")
            assert index.segment_archive.table(segment).size_bytes == size
        index.abandon()
        if dying.left > 0:
            break
    assert calls > 12
    assert list(storage.list_uploads()) == []


def test_lookups_beside_archiving_and_deletion_never_miss_a_message(tmp_path: Path) -> None:
    """A broker deletes what is archived while readers, one of them behind the log, ask for everything again and
    again.
    """
    store = golden_store.unpack(tmp_path / "store")
    storage = MemoryStorage()
    with open_index(tmp_path / "root", storage) as index:
        messages = index_log(index, store)
        index.seal()
        index.run_lifecycle()
        asked = [(topic, key, [m.encode() for m in scan(messages, topic, key)]) for topic, key in lookups(messages)]
        over = threading.Event()
        seen: set[str] = set()
        with IndexReader.open(storage_backend=storage, refresh_interval_s=3600) as reader:

            def ask(kind: IndexReader | object, number: int) -> int:
                source = RocketmqMessages(store, (reader if kind is reader else index).segment_archive, threads=2)
                rounds = 0
                while True:
                    last = over.is_set()
                    for topic, key, wanted in asked[number::3]:
                        answer = (reader if kind is reader else index).messages(
                            topic, key, max_count=1000, source=source
                        )
                        assert [f.message.encode() if f.message else f for f in answer.messages] == wanted
                        seen.update(f.state for f in answer.messages)
                    rounds += 1
                    if last:
                        return rounds

            with ThreadPoolExecutor(3) as pool:
                asking = [pool.submit(ask, kind, number) for number, kind in enumerate((reader, index, reader))]
                try:
                    for begin in range(golden_store.SEGMENT_BYTES, BEGIN_OF_LAST + 1, golden_store.SEGMENT_BYTES):
                        SegmentArchiver(index, "s", store / "commitlog").run_once()
                        delete_segments(store, begin)
                finally:
                    over.set()
                assert all(done.result(timeout=120) >= 1 for done in asking)
        assert seen == {"local", "archived"}
        assert len(index.archived()) == 5


def test_on_s3_a_segment_goes_up_in_parts_and_a_message_comes_by_one_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    size = 2 * PART + 1000
    messages = log(3)
    folder = write_log(
        tmp_path / "store" / "commitlog", size, {0: full(messages, size), size: joined(log(1, size, first=9))}
    )
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        storage = open_storage("s3://bucket/index?region=us-east-1")
        with open_index(tmp_path / "root", storage, upload_part_bytes=PART) as index:
            index_log(index, tmp_path / "store")
            before = index.storage.total.requests_by_kind
            assert SegmentArchiver(index, "s", folder).run_once() == 1
            spent = {
                k: v - before.get(k, 0) for k, v in index.storage.total.requests_by_kind.items() if v > before.get(k, 0)
            }
            assert (spent["begin_upload"], spent["upload_part"], spent["complete_upload"]) == (1, 3, 1)
            source = RocketmqMessages(None, index.segment_archive)
            for n, wanted in enumerate(messages):
                with index.storage.measure() as usage:
                    (fetched,) = index.messages(wanted.topic, wanted.uniq_key, source=source).messages
                assert fetched.state == "archived"
                assert fetched.message.encode() == wanted.encode()  # type: ignore[union-attr,attr-defined]
                # the first one brings the segment's table, too
                assert usage.requests_by_kind == {"get_range": 1} | ({} if n else {"get_suffix": 1})
                assert usage.bytes_read == PIECE_BYTES + (0 if n else segment_object_bytes(size) - size)
