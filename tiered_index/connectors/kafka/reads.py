"""The time up to which each topic is put whole: a proof by looks at the ends of its partitions' logs.

A look notes the end of every partition's log, also of records that can't be read yet. Once every partition has reached
its end, every record that the brokers had before the look is put.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_index.connectors.kafka.names import Name
from tiered_index.connectors.source import Batch, ReadTime
from tiered_index.service.index import IndexService


class Look(NamedTuple):
    """The ends of the logs of all partitions of a topic. `begun_ms` is the time before they were asked for."""

    begun_ms: int
    ends: Mapping[Name, int]


@dataclass(eq=False, slots=True)
class TopicRead:
    """The part of one topic that is put: all that the brokers had before `read_ms`, in epoch milliseconds."""

    read_ms: int
    # The look whose ends are not reached yet, and the newest one
    _waits: Look | None = None
    _newest: Look | None = None

    def look(self, look: Look) -> None:
        """Note a look. An earlier one whose ends are not reached yet counts first: else a slow reader proves none.

        The exception: a log that ends earlier now was cut, and may never reach its earlier end.
        """
        self._newest, waits = look, self._waits
        if waits is None or any(look.ends.get(name, end) < end for name, end in waits.ends.items()):
            self._waits = look

    def reach(self, positions: Mapping[Name, int]) -> None:
        """Advance `read_ms` to the newest look whose ends `positions` have reached.

        A partition that is read again has another name: then a later look counts.
        """
        while (look := self._waits) is not None:
            is_known = look.ends.keys() <= positions.keys()
            if is_known and any(positions[name] < end for name, end in look.ends.items()):
                return
            if is_known:
                self.read_ms = max(self.read_ms, look.begun_ms)
            self._waits = self._newest if self._newest is not look else None


@dataclass(eq=False)
class TopicReads:
    """The parts of all topics of a cluster that are put, and what the positions of `index` say of them. One thread."""

    index: IndexService
    cluster: str
    # whether records came since `positions` told the last positions
    has_moved: bool = False
    _topics: dict[str, tuple[ReadTime, TopicRead]] = field(default_factory=dict)

    def look(self, begun_ms: int, topics: Iterable[str], ends: Mapping[str, Mapping[Name, int]]) -> None:
        """Note a look at `topics`: the `ends` of the logs of those that could be asked for all partitions."""
        for topic in {*topics, *ends}:
            if topic not in self._topics:
                time = ReadTime(self.index, f"kafka:{self.cluster}", topic)
                self._topics[topic] = time, TopicRead(time.told_ms)
            if topic in ends:
                self._topics[topic][1].look(Look(begun_ms, ends[topic]))

    def told(self, positions: Mapping[Name, int], *, is_ending: bool) -> Generator[Batch, None, None]:
        """Yield the positions that say up to which time topics are read whole, if `positions` of partitions are put.

        It yields them after records, at the end of a run (`is_ending`), and otherwise once a minute, so that topics
        without new records write little.
        """
        has_told, is_due = False, self.has_moved or is_ending
        for time, read in self._topics.values():
            read.reach(positions)
            has_told |= yield from time.told(read.read_ms, is_due=is_due)
        self.has_moved = self.has_moved and not has_told
