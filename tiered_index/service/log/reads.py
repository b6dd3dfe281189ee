"""Positions that say how much of a topic was read from its source. Pure. SPEC.md section 9.

A source whose partitions can be behind one another puts two positions for each topic, both in epoch milliseconds:

- ``read-before:SOURCE/TOPIC``: every record that the source had before this time is put; 0: this is not known yet.
- ``unread-since:SOURCE/TOPIC``: the value of the other one when the source noticed that it is behind.

As all positions they only grow, and become durable with the entries that were put before them. A topic is *behind*
while the second one is not less than the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_index.service.log.topic_keys import TOPIC_KEYS
from tiered_index.types import TopicBounds

READ_PREFIX, UNREAD_PREFIX = "read-before:", "unread-since:"


def read_name(source: str, topic: str) -> str:
    """Return the name of the time before which all of a topic is put. `source` has no slash."""
    return f"{READ_PREFIX}{source}/{topic}"


def unread_name(source: str, topic: str) -> str:
    """Return the name of the time since which the source is behind. `source` has no slash."""
    return f"{UNREAD_PREFIX}{source}/{topic}"


def reads_in(positions: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that say how much of topics was read, and by which rules of keys."""
    return {name: at for name, at in positions.items() if name.startswith((READ_PREFIX, UNREAD_PREFIX, TOPIC_KEYS))}


def bounds_of_root(reads: Mapping[str, int]) -> TopicBounds | None:
    """Return the bounds of answers that have all put entries: those of topics that are behind; None: none is."""
    times = read_before_ms(reads, only_behind=True)
    return TopicBounds(times, has_all_put=True) if times else None


def read_before_ms(reads: Mapping[str, int], *, only_behind: bool = False) -> dict[str, int]:
    """Return the time before which all of each topic is put, the least of its sources, by a result of `reads_in`.

    `only_behind`: only for sources that are behind.
    """
    times: dict[str, int] = {}
    for name, at in reads.items():
        if name.startswith(READ_PREFIX):
            place = name.removeprefix(READ_PREFIX)
            if not only_behind or reads.get(f"{UNREAD_PREFIX}{place}", 0) >= at:
                topic = place.partition("/")[2]
                times[topic] = min(at, times.get(topic, at))
    return times
