"""Finds the files and rows of entries by the linked segments of their topics. Threads: any."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiered_index.errors import IndexClosed
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.format.segments.segment import LinkedSegment
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.service.read.segments.segments import Segments
from tiered_index.types import FilePlace

T = TypeVar("T")
FILES_QUEUE = 0
"""The queue of the rows of files of one topic."""
FILES_QUEUES = (FILES_QUEUE, TOPICS_QUEUE)
"""The queues that rows of files may have."""


def has_files(states: Sequence[LogState], document: Callable[[str], TopicDocument | None], topic: str) -> bool:
    """Return whether a topic has, or had, rows of files in one of the indexes with these states. No request.

    `document` returns the document of a topic.
    """
    # each lookup asks this, and most indexes have no segments
    for state in states:
        if state.listed_logs or state.given_up:
            break
    else:
        return False
    of_topic, of_topics = (
        any(store in state.listed_logs or store in state.given_up for state in states)
        for store in (linked_store(topic, queue_id) for queue_id in FILES_QUEUES)
    )
    if of_topic or not of_topics:
        return of_topic
    # its rows have it in one of their fields
    published = (state.documents[topic].document for state in states if topic in state.documents)
    described = (known for known in (*published, document(topic)) if known is not None)
    return any(known.facts.get("store") == linked_store("", TOPICS_QUEUE) for known in described)


def alive(index: weakref.ref[T]) -> T:
    """Return the index behind a reference. An answer must not keep an index open that nothing else refers to.

    Raises `IndexClosed` if it is gone.
    """
    if (there := index()) is None:
        raise IndexClosed("the index of this answer is gone: keep it open while you ask for files and rows")
    return there


def file_place(segment: LinkedSegment, offset: int) -> FilePlace:
    """Return the place of an offset of a segment's log."""
    position = offset - segment.start + segment.position
    return FilePlace(segment.uri, position, "row" if segment.format in ("parquet", "arrow") else "byte")


@dataclass(frozen=True)
class RowPlaces:
    """The places of the rows of files.

    `states` returns the states of the indexes' logs, `archives` their archives, by the `source` of entries, and
    `document` the document of a topic. The archives are asked for only if there are files.
    """

    states: Callable[[], Sequence[LogState]]
    archives: Callable[[], Mapping[str | None, SegmentArchive]]
    document: Callable[[str], TopicDocument | None]

    def has(self, topic: str) -> bool:
        """Return whether a topic has files. No request."""
        return has_files(self.states(), self.document, topic)

    def of(
        self, topic: str, sources: Sequence[str | None], queue_ids: Sequence[int], offsets: Sequence[int]
    ) -> tuple[FilePlace | None, ...] | None:
        """Return the place of each entry, None for one that is of no file. None: the topic has no files.

        It reads parts of catalogs that are in no cache, but no file. Raises `StorageUnavailable`, `CorruptFile`.
        """
        if not self.has(topic):
            return None
        archives = self.archives()
        stores = {queue_id: linked_store(topic, queue_id) for queue_id in FILES_QUEUES}
        entries = list(zip(sources, queue_ids, offsets, strict=True))
        wanted: dict[str | None, set[tuple[str, int]]] = {}
        for source, queue_id, offset in entries:
            if (store := stores.get(queue_id)) is not None:
                wanted.setdefault(source, set()).add((store, offset))
        places = {
            (source, *at): file_place(segment, at[1])
            for source, of_source in wanted.items()
            for at, segment in _segments_of(archives[source], of_source).items()
        }
        return tuple([places.get((source, stores.get(queue_id, ""), offset)) for source, queue_id, offset in entries])


def _segments_of(archive: SegmentArchive, offsets: Collection[tuple[str, int]]) -> dict[tuple[str, int], LinkedSegment]:
    """Return the linked segments of (store, offset); the offsets of no file are left out."""

    def look(segments: Segments) -> dict[tuple[str, int], LinkedSegment]:
        segments.prefetch(offsets)
        # in the order of the catalog, which decodes each of its groups once
        located = {place: segments.segment(*place) for place in sorted(offsets)}
        return {place: segment for place, segment in located.items() if isinstance(segment, LinkedSegment)}

    return archive.looked_up(look)
