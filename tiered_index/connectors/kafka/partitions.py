"""A partition that is followed: its place in the index and in its log, and what was read of it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_index.base.units import format_time
from tiered_index.connectors.kafka.client.broker import LogRange, Place
from tiered_index.connectors.kafka.names import Name
from tiered_index.connectors.source import Batch, Loss, no_entries
from tiered_index.errors import CorruptFile
from tiered_index.service.index import IndexService
from tiered_index.types import inclusive

_UNKNOWN = LogRange(0, 0, 0)
# the times of so many batches are known apart
_MOST_BATCHES = 64


class OffsetOutOfRange(CorruptFile):
    """The next record of a partition, at `position`, is not in its log, which has offsets [`begin`, `end`)."""

    def __init__(self, place: str, position: int, begin: int, end: int) -> None:
        problem = f"the next offset is {position:,}, and the log has {inclusive(begin, end)}"
        hint = "--restart-at begin or --restart-at end continues there, and reports the gap"
        super().__init__(place, f"{problem}: {hint}")
        self.position, self.begin, self.end = position, begin, end


class OldestTimes:
    """The oldest time of a partition's records from an offset on. Any thread.

    An old record counts until all records that were put with it are passed, or some more if many batches wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # the end of each batch, and the oldest time in it: ends and times ascend, because an earlier batch with a later
        # time is never the answer
        self._batches: deque[tuple[int, int]] = deque()

    def add(self, end: int, oldest_ms: int) -> None:
        """Add the records up to an offset, exclusive, behind those that were added."""
        with self._lock:
            while self._batches and self._batches[-1][1] >= oldest_ms:
                self._batches.pop()
            self._batches.append((end, oldest_ms))
            if len(self._batches) > _MOST_BATCHES:
                _, first_ms = self._batches.popleft()
                self._batches[0] = self._batches[0][0], first_ms

    def since(self, offset: int) -> int | None:
        """Return the oldest time of records from an offset on, and forget those before it. None: there are none."""
        with self._lock:
            while self._batches and self._batches[0][0] <= offset:
                self._batches.popleft()
            return self._batches[0][1] if self._batches else None


@dataclass(eq=False, slots=True)
class Partition:
    """One partition: `position` is the offset after its last put record, `read` after its last read one.

    `newest_ms` is the time of the last put record, `oldest` has the times of all that were put.
    """

    name: Name
    position: int
    read: int
    # The client has lost its place in the log
    is_out_of_range: bool = False
    # It was taken up behind the end of its log, which may have been cut: if the log reaches it, records are compared
    is_past_end: bool = False
    # The client has read on from records that were put before, or reached the end: the log was not cut between runs
    is_checked: bool = True
    # The offset at which a run without `follow` ends; None: unknown
    target: int | None = None
    at_end: bool = False
    newest_ms: int | None = None
    oldest: OldestTimes = field(default_factory=OldestTimes)
    # The epoch of the leader that wrote the last put record; None: unknown. Earlier records have no greater one, unless
    # the log was cut and grew again
    epoch: int | None = None
    # The end of the log that the client saw last
    high: int = 0
    # The position at which this run took it up, and the mean size of a record that it read
    begun: int = 0
    record_bytes: float = 0.0
    # The log at the last look, the time at which its end was seen first, and whether that was an earlier look
    log: LogRange = _UNKNOWN
    seen_ms: int = 0
    is_seen_again: bool = False

    @property
    def key(self) -> Place:
        """Topic and number of the partition."""
        return self.name.topic, self.name.partition

    @property
    def place(self) -> str:
        """Topic and number of the partition, for messages."""
        return f"{self.name.topic}/{self.name.partition}"

    def is_done(self) -> bool:
        """Return whether all records that the log had at the begin are put."""
        return self.is_checked and (self.at_end or (self.target is not None and self.position >= self.target))

    def look_at(self, log: LogRange, now_ms: int) -> None:
        """Note the log as it is now."""
        # the end before may be of a log without a transaction: records that are written between the questions for `end`
        # and `high` are not held
        self.is_seen_again = self.seen_ms > 0 and log.end == self.log.end < self.log.high
        if not self.is_seen_again:
            self.seen_ms = now_ms
        self.log, self.high = log, max(self.high, log.high)

    @property
    def held(self) -> str | None:
        """The records behind the last stable offset, which can't be read; None: there are none."""
        if self.position != self.log.end or self.log.high <= self.log.end:
            return None
        return (
            f"{self.place}: {self.log.high - self.log.end:,} offsets can't be read: a transaction is open at the last "
            f"stable offset, {self.log.end:,}, since {format_time(self.seen_ms)} or earlier"
        )

    def pass_to(self, end: int, index: IndexService, *losses: Loss) -> ReadBatch:
        """Read on from `end`, and return a batch without records that advances the position in the index to it."""
        self.read = end
        batch = Batch(source=str(self.name), position=end, columns=no_entries(index), losses=losses)
        return ReadBatch(self, batch, None, None, None)


class ReadBatch(NamedTuple):
    """A batch that was read from a partition; the time and the leader's epoch are those of its last record.

    `oldest_ms` is the least time of a record in it; None: no record has a time.
    """

    partition: Partition
    batch: Batch
    newest_ms: int | None
    oldest_ms: int | None
    epoch: int | None
