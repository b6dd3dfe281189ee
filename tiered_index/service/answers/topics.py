"""Topic ids of one writer: as given by the source, else assigned.

An assigned id is derived from the name (2**30 and 30 bits of CRC32), so it is the same in every root without being
stored; ids given by a source are smaller in practice. One id never means two names. Threads: any.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Iterable

from tiered_index.errors import InvalidArgument
from tiered_index.service.threads.workers import synchronized

_ASSIGNED = 1 << 30


def assigned_topic_id(topic: str) -> int:
    """Return the id a topic gets when its source gives none."""
    return _ASSIGNED | (zlib.crc32(topic.encode("utf-8", "surrogatepass")) & (_ASSIGNED - 1))


class TopicTable:
    """Names by id and ids by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._ids: dict[str, frozenset[int]] = {}
        self._assigned: dict[str, int] = {}

    def assigned(self, topic: object) -> int | None:
        """Return the id that `assign` gave to a topic before, or None."""
        return self._assigned.get(topic) if type(topic) is str else None

    def assign(self, topic: str) -> int:
        """Return the assigned id of `topic`; two names with one CRC get neighbouring ids."""
        known = self._assigned.get(topic)
        if known is not None:
            return known
        return self._assign(topic)

    @synchronized
    def _assign(self, topic: str) -> int:
        topic_id = assigned_topic_id(topic)
        while self._names.get(topic_id, topic) != topic:
            topic_id = _ASSIGNED | ((topic_id + 1) & (_ASSIGNED - 1))
        self._add(topic_id, topic)
        self._assigned[topic] = topic_id
        return topic_id

    @synchronized
    def give(self, pairs: Iterable[tuple[int, str]]) -> None:
        """Record ids given by a source; none, and `InvalidArgument`, where one means another name already."""
        fresh: dict[int, str] = {}
        for topic_id, topic in pairs:
            other = self._names.get(topic_id, fresh.get(topic_id, topic))
            if other != topic:
                raise InvalidArgument(f"topic id {topic_id} of {topic!r} already means topic {other!r}")
            fresh[topic_id] = topic
        for topic_id, topic in fresh.items():
            self._add(topic_id, topic)

    def ids(self, topic: str) -> frozenset[int]:
        """Return every id that means `topic`."""
        return self._ids.get(topic, frozenset())

    @property
    def names(self) -> Collection[str]:
        """Every topic that has an id."""
        return self._ids.keys()

    def name(self, topic_id: int) -> str:
        """Return the name that `topic_id` means; it must have been recorded."""
        return self._names[topic_id]

    def _add(self, topic_id: int, topic: str) -> None:
        # the second may be left to do by an interrupt: whoever comes with this topic next does both
        self._names[topic_id] = topic
        self._ids[topic] = self._ids.get(topic, frozenset()) | {topic_id}
