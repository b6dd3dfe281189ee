"""An index of the golden store, and of small stores that tests write: their messages, and their archives."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.rocketmq import golden_store
from tests.rocketmq.messages import full, log, write_log
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.connectors.rocketmq.archive.archive import SegmentArchiver
from tiered_index.connectors.rocketmq.archive.messages import RocketmqMessages
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.base import Storage

BEGIN_OF_LAST = 81_920
"""The begin of the golden store's last segment, which is not archived."""


def open_index(root: Path, storage: Storage, **settings: Any) -> IndexService:
    """Open an index of small files, which has no background threads."""
    chosen = {"slots": 97, "items": 5_000, "background": False, "offset_space": "commitlog", **settings}
    return IndexService.open(root=root, storage_backend=storage, disk=FaultDisk(), **chosen)


def index_log(index: IndexService, store: Path) -> list[Message]:
    """Index every visible message of a store, one by one; return all messages that a scan finds."""
    messages = list(CommitLogReader(store / "commitlog").messages())
    for message in messages:
        if message.is_visible and message.index_keys:
            put(index, message)
    return messages


def put(index: IndexService, message: Message, keys: Iterable[str] | None = None) -> None:
    """Put a message under its keys, or under others."""
    chosen = message.index_keys if keys is None else tuple(keys)
    index.put(message.topic, message.queue_id, chosen, message.physical_offset, message.size, message.store_ms)


def scan(messages: Iterable[Message], topic: str, key: str) -> list[Message]:
    """Return the visible messages of a topic with a key, in answer order."""
    matches = [m for m in messages if m.is_visible and m.topic == topic and key in m.index_keys]
    return sorted(matches, key=lambda m: (-(m.store_ms // 1000), -m.physical_offset, m.queue_id))


def lookups(messages: Iterable[Message]) -> list[tuple[str, str]]:
    """Return every (topic, key) of the messages."""
    return sorted({(m.topic, key) for m in messages if m.is_visible for key in m.index_keys})


def delete_segments(store: Path, before: int) -> None:
    """Delete the commit log segments that begin before an offset, as a broker does after some days."""
    for path in sorted((store / "commitlog").iterdir()):
        if int(path.name) < before:
            path.unlink()


def lies(message: Message) -> str:
    """Return the name of the golden segment that holds a message."""
    return f"{message.physical_offset // golden_store.SEGMENT_BYTES * golden_store.SEGMENT_BYTES:020d}"


def log_of(storage: Storage) -> StorageLog:
    log = StorageLog(storage, SystemClock())
    log.open()
    return log


def settled(index, store):
    """Index the store, upload every entry, archive its closed segments; return all messages."""
    messages = index_log(index, store)
    index.seal()
    index.run_lifecycle()
    SegmentArchiver(index, "s", store / "commitlog").run_once()
    return messages


def source_of(index, store):
    return RocketmqMessages(store, index.segment_archive)


def stored_bytes(answer):
    return [fetched.message.encode() if fetched.message else None for fetched in answer.messages]


def same(fetched, wanted: Message):
    return isinstance(fetched.message, Message) and fetched.message.encode() == wanted.encode()


def one_message(tmp_path, index, **fields):
    """Return an archived store of one closed segment with three messages, and the middle message."""
    messages = log(3, **fields)
    for message in messages:
        put(index, message)
    lay_archived(index, tmp_path / "small", *messages, segment_bytes=2_000)
    return tmp_path / "small", messages[1]


def lay(folder: Path, *messages: Message, segment_bytes: int = 20_000) -> Path:
    """Write a store whose first segment, a closed one, has the messages."""
    behind = log(1, segment_bytes)[0]
    first = full(list(messages), segment_bytes)
    write_log(folder / "commitlog", segment_bytes, {0: first, segment_bytes: behind.encode()})
    return folder


def lay_archived(index, folder: Path, *messages: Message, **how: int) -> RocketmqMessages:
    """Write such a store and archive it; return its archive as a source."""
    assert SegmentArchiver(index, "s", lay(folder, *messages, **how) / "commitlog").run_once() == 1
    return RocketmqMessages(None, index.segment_archive)


def fetched_of(index, wanted, source):
    (fetched,) = index.messages(wanted.topic, wanted.uniq_key, source=source).messages
    return fetched
