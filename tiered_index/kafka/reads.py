"""The time up to which each topic is put whole: a proof by looks at the ends of its partitions' logs. Pure.

A look notes the end of every partition's log, also of records that can't be read yet. Once every partition has reached
its end, every record that the brokers had before the look is put.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tiered_index.kafka.names import Name


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
