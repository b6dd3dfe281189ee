"""Messages to look up by their keys, and a store whose one segment has one of them, for tests of answers."""

from __future__ import annotations

from pathlib import Path

from tests.rocketmq.archived_store import index_log, put
from tests.rocketmq.messages import full, log, write_log
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.message import Message

BEGIN_OF_LAST = 81_920


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
    for one in messages:
        put(index, one)
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


def asked(index, wanted, source):
    (fetched,) = index.messages(wanted.topic, wanted.uniq_key, source=source).messages
    return fetched
