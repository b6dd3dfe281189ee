"""The origin of entries in a log record (a stream's micro-batch, or a range of a source), so that they are published
once. Pure.

A micro-batch is identified by stream and number, which the log has as a source position, and by a checksum of its
entries. A range is accepted only if the source's position is its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.shard import entry_checksum
from tiered_index.format.topic_documents import connectors_in
from tiered_index.service.log.records import StreamBatch
from tiered_index.service.log.state import LogState
from tiered_index.service.read.answers.rows import check_integer
from tiered_index.service.write.owned import check_position_name


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
                f"the index in {uri} has no micro-batch of this query, but the query's checkpoint has {self.number:,} "
                "published ones: the index was deleted, or the URI names another index. Correct the URI or mount its "
                "storage. To start over, set a new checkpointLocation"
            )

    def is_in(self, state: LogState) -> bool:
        """Return whether the batch has been published.

        Raises `InvalidArgument` if a later one was published, or one of this number with other entries: this one would
        be lost.
        """
        last = state.positions.get(self.stream, -1)
        if last > self.number:
            raise InvalidArgument(
                f"micro-batch {self.number} of this query is older than its last published one, {last}: the checkpoint "
                "is older than the index, or another driver runs the same query. Stop the other driver, or set a new "
                "checkpointLocation"
            )
        told = state.batches.get(self.stream)
        if last == self.number and told != self.told:
            entries = told.entries if told is not None else 0
            raise InvalidArgument(
                f"micro-batch {last} of this query was published with {entries:,} entries, and now has other ones "
                f"({self.content.entries:,}): the checkpoint is older than the index, the query was changed, or it "
                "returns different rows each time. Set a new checkpointLocation"
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
        check_position_name(self.name)

    def check(self, state: LogState) -> None:
        """Raise `InvalidArgument` unless the index's position is `begin`: entries would be lost or published twice."""
        check_position_name(self.name, connectors_in(state.documents))
        reached = state.positions.get(self.name, 0)
        if reached != self.begin:
            raise InvalidArgument(
                f"the index has {self.name} up to position {reached}, but this build begins at {self.begin}: another "
                f"build published first, or the position was not looked up. Build from position {reached}"
            )
