"""An archiver that dies at any call to the storage, and lookups beside archiving and deletion."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rocketmq import golden_store
from tests.rocketmq.answered import BEGIN_OF_LAST
from tests.rocketmq.archived_store import delete_segments, index_log, lookups, open_index, scan
from tests.rocketmq.messages import full, joined, log, write_log
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.errors import StorageUnavailable
from tiered_index.format.archived import HEAD_BYTES, PIECE_BYTES
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage


def open_archiver(root: Path, storage: Storage, log: Path) -> tuple[IndexService, SegmentArchiver]:
    """Open an index, and an archiver whose parts are as small as they can be."""
    index = open_index(root, storage)
    index._segments.part_bytes = HEAD_BYTES
    return index, SegmentArchiver(index, "s", log)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, StorageUnavailable])
def test_whichever_call_fails_the_next_run_makes_it_whole(tmp_path, when, error):
    size = PIECE_BYTES + HEAD_BYTES
    contents = {0: full(log(3), size), size: full(log(2, size), size), 2 * size: joined(log(1, 2 * size))}
    folder = write_log(tmp_path / "commitlog", size, contents)
    struck = []

    def strike(text):
        struck.append(text)
        return error(text)

    for nth in itertools.count(1):
        struck.clear()
        storage = MemoryStorage()
        dying = FaultStorage(storage)
        index, archiver = open_archiver(tmp_path / f"root{nth}", dying, folder)
        dying.fail("*", nth=nth, when=when, error=strike, name_prefix=("segments/", "log/"))
        try:
            archiver.run_once()
        except error:
            if error is KeyboardInterrupt:
                index.abandon()
                index, archiver = open_archiver(tmp_path / f"root{nth}", storage, folder)
            archiver.run_once()
        dying.clear()
        stored = {segment.name: segment for segment in index.archived()}
        assert sorted(segment.start for segment in stored.values()) == [0, size]
        named = [info.name for info in storage.list("segments/")]
        if error is KeyboardInterrupt:
            assert named == sorted(stored)
        else:  # the next start deletes the leftovers of a failed clean-up
            assert set(named) >= set(stored)
        for segment in stored.values():
            assert storage.get(segment.name)[:size] == contents[segment.start].ljust(size, b"\0")
            assert index.segment_archive.table(segment).size_bytes == size
        index.abandon()
        if not struck:
            break
    assert nth > 12


def test_lookups_beside_archiving_and_deletion_never_miss_a_message(tmp_path: Path) -> None:
    """A broker deletes archived segments. Meanwhile readers look up all messages again and again, and one of them is
    behind the log.
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
