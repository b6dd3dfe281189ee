"""The origin of entries in a log record (a stream's micro-batch, or a range of a source), so that they are published
once. Pure.

A micro-batch is identified by stream and number, which the log has as a source position, and by a checksum of its
entries. A range is accepted only if the source's position is its begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.shard import entry_checksum
from tiered_index.service.answers.rows import check_integer
from tiered_index.service.log.records import StreamBatch
from tiered_index.service.log.state import LogState


@dataclass(frozen=True, slots=True)
class BatchContent:
    """The number of entries, and the sum (u64) of their checksums."""

    entries: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, items: npt.NDArray[Any], seconds: npt.NDArray[np.int64]) -> BatchContent:
        """Return the content of items (n) with their seconds (n)."""
        # topic ids may differ between attempts if two names have the same CRC; the hash covers topic and key
        told = [name for name in items.dtype.names or () if name != "topic_id"]
        return cls(len(items), entry_checksum(items[told], seconds))

    @classmethod
    def joined(cls, parts: Iterable[BatchContent]) -> BatchContent:
        """Return the content of all parts."""
        known = list(parts)
        return cls(sum(part.entries for part in known), sum(part.checksum for part in known) % 2**64)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Batch `number` of a stream; numbers ascend, and Spark repeats only the last one."""

    stream: str
    number: int
    content: BatchContent

    @property
    def told(self) -> StreamBatch:
        """The batch as a log record has it."""
        return StreamBatch(self.number, self.content.entries, self.content.checksum)

    def check_known(self, state: LogState, uri: str) -> None:
        """Raise `InvalidArgument` if the index lacks the batches before this one: it is another index."""
        if self.number and self.stream not in state.positions:
            raise InvalidArgument(
                f"{uri} has no index that knows this query, and its checkpoint has {self.number:,} published "
                "micro-batches: the index is gone, or the URI is another one's. Check the URI, and that its storage is "
                "mounted; to begin again, give a new checkpointLocation"
            )

    def is_in(self, state: LogState) -> bool:
        """Return whether the batch has been published; by its number only if the record has no content.

        Raises `InvalidArgument` if a later one was published, or one of this number with other entries: this one would
        be lost.
        """
        last = state.positions.get(self.stream, -1)
        if last > self.number:
            raise InvalidArgument(
                f"the index has micro-batch {last} of this query already, and {self.number} comes now: its checkpoint "
                "is older than the index, or another driver continues it; begin with a new checkpoint"
            )
        told = state.batches.get(self.stream)
        if last == self.number and told is not None and told.number == last and told != self.told:
            raise InvalidArgument(
                f"the index has micro-batch {last} of this query already, of {told.entries:,} entries, and the "
                f"{self.content.entries:,} that come now under its number are others: its checkpoint is older than the "
                "index, or the query was changed, or makes other rows each time; begin with a new checkpoint"
            )
        return last == self.number


@dataclass(frozen=True, slots=True)
class SourceRange:
    """The part of the source `name` that a build reads: from position `begin` (0: all) up to `end`, exclusive.

    A position is any integer (Python's or NumPy's) that ascends with the source, such as a table's version or a
    snapshot's sequence number. Raises `InvalidArgument`.
    """

    name: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        # the log record accepts only Python's integers
        for position in ("begin", "end"):
            object.__setattr__(self, position, check_integer(position, getattr(self, position)))
        if not (isinstance(self.name, str) and self.name) or not 0 <= self.begin < self.end < 2**63:
            raise InvalidArgument(f"a range of a source has a name and 0 <= begin < end < 2^63, not {self}")

    def check(self, state: LogState) -> None:
        """Raise `InvalidArgument` unless the index's position is `begin`: entries would be lost or published twice."""
        reached = state.positions.get(self.name, 0)
        if reached != self.begin:
            raise InvalidArgument(
                f"the index has {self.name} up to position {reached}, but the build would continue from {self.begin}: "
                "another one was faster, or the position was not looked up; build from the index's position"
            )
