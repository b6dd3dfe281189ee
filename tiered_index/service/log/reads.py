"""Positions that say how much of a topic was read from its source. Pure. SPEC.md section 9.

A source puts a position for each topic, ``read-before:SOURCE/TOPIC``, in epoch milliseconds: every record that the
source had before this time is put; 0: this is not known yet. One without a topic, ``read-before:SOURCE/``, is for all
topics of which the source has no position. As all positions it only grows, and becomes durable with the entries that
were put before it. So it bounds answers also when nothing reads the source any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_index.service.log.topic_keys import TOPIC_KEYS
from tiered_index.types import TopicBounds

READ_PREFIX = "read-before:"


def read_name(source: str, topic: str) -> str:
    """Return the name of the time before which all of a topic, or of all topics (empty), is put."""
    # the first slash ends the source
    return f"{READ_PREFIX}{source.replace('%', '%25').replace('/', '%2F')}/{topic}"


def reads_in(positions: Mapping[str, int]) -> dict[str, int]:
    """Return the positions that say how much of topics was read, and by which rules of keys."""
    return {name: at for name, at in positions.items() if name.startswith((READ_PREFIX, TOPIC_KEYS))}


def bounds_of_root(reads: Mapping[str, int]) -> TopicBounds | None:
    """Return the bounds of answers that have all put entries; None: no source says how much it has read."""
    times = read_before_ms(reads)
    return TopicBounds(times, has_all_put=True) if times else None


def read_before_ms(reads: Mapping[str, int]) -> dict[str, int]:
    """Return the time before which all of each topic is put, the least of its sources, by a result of `reads_in`.

    That of the empty topic is for all others.
    """
    sources: dict[str, dict[str, int]] = {}
    for name, at in reads.items():
        if name.startswith(READ_PREFIX):
            source, _, topic = name.removeprefix(READ_PREFIX).partition("/")
            sources.setdefault(source, {})[topic] = at
    topics = {topic for times in sources.values() for topic in times}
    known = {topic: [times.get(topic, times.get("")) for times in sources.values()] for topic in topics}
    return {topic: min(at for at in times if at is not None) for topic, times in known.items()}
