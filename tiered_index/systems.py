"""The words of the system that entries come from: RocketMQ, Kafka, files, or another.

The names of an index's positions show the system of its topics. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.service.jobs.segment_archive import SegmentArchive
from tiered_index.service.read.compacted import CompactedFile
from tiered_index.service.read.root_view import UnsealedView

if TYPE_CHECKING:
    from tiered_index.service.reader import IndexReader


FILES_QUEUE = 0
"""The queue of the rows of files of one topic."""
FILES_QUEUES = (FILES_QUEUE, TOPICS_QUEUE)
"""The queues that rows of files may have."""


class Words(NamedTuple):
    """The words of a system in texts for people.

    - `queue`: the part of a topic.
    - `offset`: the offset of an entry.
    - `no_message`: the reason why there is no message if no place of messages was given.
    - `no_queues`: the reason why messages can't be read by their place in a queue.
    """

    queue: str
    offset: str
    no_message: str
    no_queues: str


ROCKETMQ = Words(
    "queue",
    "commit log offset",
    "no archived segment holds it, and no store directory was given",
    "queue offsets are needed: give --store, or archive segments with --archive-queues",
)
KAFKA = Words(
    "partition",
    "offset",
    "no archive has it, and no broker was given",
    "it is a topic of Kafka: look up a key, or read a record by kafka:TOPIC/PARTITION/OFFSET",
)
OTHER = Words(
    "queue",
    "offset",
    "the index has the place of the message, but no copy of it: read it in the source that was ingested",
    "only topics of RocketMQ have queues to read: look up a key",
)
FILES = Words("file", "row", "no file of the topic has it", "it is a topic of files: look up a key")
UNKNOWN = OTHER._replace(no_queues=ROCKETMQ.no_queues)
"""Words for an index without positions: its entries may be of any system, or there are none yet."""


def files_key(store: str) -> str:
    """Return the beginning of the names of positions that have the paths of keys of a log of files."""
    return f"files-key:{store}/"


def files_topic(topic: str) -> str:
    """Return the name of the position that says that rows of files have a topic by one of their fields."""
    return f"files-topic:{topic}"


def has_files(archives: Iterable[SegmentArchive], names: Callable[[], Iterable[str]], topic: str) -> bool:
    """Return whether a topic has, or had, rows of files in one of the indexes with these archives. No request.

    `names` returns the names of all positions of the indexes.
    """
    states = [archive.state() for archive in archives]
    of_topic, of_topics = (
        any(store in state.listed_logs or store in state.given_up for state in states)
        for store in (linked_store(topic, queue_id) for queue_id in FILES_QUEUES)
    )
    return of_topic or (of_topics and files_topic(topic) in names())


def words_of(positions: Iterable[str], topic: str | None = None) -> Words:
    """Return the words for a topic (None: any topic) of an index with these names of positions."""
    positions = list(positions)
    if topic is not None:
        of_files = files_key(linked_store(topic, FILES_QUEUE))
        if files_topic(topic) in positions or any(name.startswith(of_files) for name in positions):
            return FILES
    part = "/" if topic is None else f"/{topic}/"
    if any(name.startswith("kafka:") and part in name for name in positions):
        return KAFKA
    if any(name.startswith("rocketmq:") for name in positions):
        return ROCKETMQ
    return OTHER if positions else UNKNOWN


def position_names(reader: IndexReader[Any]) -> set[str]:
    """Return the names of all positions and archived logs of the indexes that a reader reads."""
    # positions of entries that are not uploaded are only in the root's files
    names: set[str] = set()
    for file in reader.files():
        if isinstance(file, UnsealedView):
            names.update(file.journal.positions)
        elif isinstance(file, CompactedFile) and file.is_local:
            names.update(file.metadata().source_positions)
    for archive in reader.segment_archives.values():
        segments = archive.segments()
        names.update(segments.state.positions)
        of_bytes = frozenset(segments.byte_stores)
        names.update(f"rocketmq:{store}" if store in of_bytes else store for store in segments.stores)
    return names
