"""The time up to which each topic is put whole: a proof by looks at the ends of its partitions' logs.

A look notes the end of every partition's log, also of records that can't be read yet. Once every partition has reached
its end, every record that the brokers had before the look is put.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_index.follow import Batch
from tiered_index.kafka.names import Name
from tiered_index.kafka.partitions import NO_ENTRIES
from tiered_index.service.index import IndexService
from tiered_index.service.log.reads import read_name, unread_name


class Look(NamedTuple):
    """The ends of the logs of all partitions of a topic. `begun_ms` is the time before they were asked for."""

    begun_ms: int
    ends: Mapping[Name, int]


@dataclass(eq=False, slots=True)
class TopicRead:
    """The part of one topic that is put: all that the brokers had before `read_ms`, in epoch milliseconds.

    `told_ms` and `is_told_behind`: what the index's positions say.
    """

    told_ms: int
    is_told_behind: bool
    read_ms: int = 0
    # The look whose ends are not reached yet, and the newest one
    _waits: Look | None = None
    _newest: Look | None = None

    def __post_init__(self) -> None:
        self.read_ms = self.told_ms

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
    # the begins of the last look and of the first
    begun_ms: int = 0
    first_begun_ms: int = 0
    # the begin of the look before the last
    before_ms: int = 0
    # whether records came since `positions` told the last positions
    has_moved: bool = False
    _topics: dict[str, TopicRead] = field(default_factory=dict)

    def look(self, begun_ms: int, topics: Iterable[str], ends: Mapping[str, Mapping[Name, int]]) -> None:
        """Note a look at `topics`: the `ends` of the logs of those that could be asked for all partitions."""
        self.before_ms, self.begun_ms = self.begun_ms, begun_ms
        self.first_begun_ms = self.first_begun_ms or begun_ms
        for topic in {*topics, *ends}:
            if (read := self._topics.get(topic)) is None:
                name, unread = (form(self._source, topic) for form in (read_name, unread_name))
                if (told_ms := self.index.durable_position(name)) is None:
                    # before its first record is put: nothing is known to be whole
                    told_ms = 0
                    self.index.put_source_batch(NO_ENTRIES, name, told_ms)
                is_behind = (self.index.durable_position(unread) or 0) >= told_ms
                read = self._topics[topic] = TopicRead(told_ms, is_behind)
            if topic in ends:
                read.look(Look(begun_ms, ends[topic]))

    def told(self, positions: Mapping[Name, int], *, is_ending: bool) -> Generator[Batch, None, None]:
        """Yield the positions that say up to which time topics are read whole, and which are behind.

        `positions` of partitions are put. It yields them only after records, so that a topic without new ones writes
        nothing. `is_ending`: a topic is behind if it is not whole up to the first look, otherwise the last but one.
        """
        has_told, whole_before_ms = False, self.first_begun_ms if is_ending else self.before_ms
        for topic, read in self._topics.items():
            read.reach(positions)
            is_behind = read.read_ms < whole_before_ms
            if read.read_ms > read.told_ms and (self.has_moved or is_behind != read.is_told_behind):
                yield Batch(source=read_name(self._source, topic), position=read.read_ms, columns=NO_ENTRIES)
                read.told_ms, read.is_told_behind, has_told = read.read_ms, False, True
            if is_behind and not read.is_told_behind:
                yield Batch(source=unread_name(self._source, topic), position=read.told_ms, columns=NO_ENTRIES)
                read.is_told_behind = True
        self.has_moved = self.has_moved and not has_told

    @property
    def _source(self) -> str:
        return f"kafka:{self.cluster}"
