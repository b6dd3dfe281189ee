"""The table of hot rows: entries that no compacted file has yet, of a chunk of the buffer or of an unsealed file.

A search asks the compiled core first, then follows hash chains, then scans the columns: a table may have all three, or
only the columns. Threads: any.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.base.call import Call
from tiered_index.errors import CorruptFile
from tiered_index.format.metadata import NamedStats, topic_stats
from tiered_index.format.schema import Schema
from tiered_index.service.read.answers.batch import LookupBatch, Matches, matching, search_batch
from tiered_index.service.read.files.snapshot import LocalHandle

Array = npt.NDArray[Any]


class HotRows(LocalHandle):
    """Entries of `schema`, with epoch seconds from `second_min` to `second_max`. Errors name them by `where`."""

    where: str
    schema: Schema
    second_min: int
    second_max: int

    @abstractmethod
    def columns(self) -> Array | Mapping[str, Array]:
        """Return the entries, or their columns by name, for a scan. They are verified."""

    @abstractmethod
    def seconds_of(self, entries: Any) -> npt.NDArray[np.int64]:
        """Return the epoch seconds of some of the `columns`."""

    @abstractmethod
    def topic_pairs(self, topics: Iterable[str] | None = None) -> list[tuple[int, str]]:
        """Return the ids and names of topics (None: of all that the entries may have), at least those asked for."""

    def in_core(self) -> Any:
        """Return the compiled core's `LocalFile` of the entries, which gets later ones, too; None: there is none."""
        return None

    def walked(self, batch: LookupBatch) -> tuple[Array, npt.NDArray[np.int64]] | None:
        """Return the entries in the chains of lookups, and the lookups of each; None: there are none, or long ones."""
        return None

    def search(self, batch: LookupBatch, call: Call) -> Matches:
        """Return the rows that answer each lookup, in any order."""
        within = self.second_min, self.second_max
        if (matches := search_batch(self.in_core(), batch, self.schema, *within)) is not None:
            return matches
        pairs = self.topic_pairs(batch.topics)
        if (walked := self.walked(batch)) is not None:
            picked, lookups = walked
            return batch.select(picked, lookups, self.seconds_of(picked), pairs, self.schema)
        return matching(batch, self.columns(), self.seconds_of, pairs, self.schema)

    def topic_stats(self, call: Call) -> NamedStats:
        """See `Handle.topic_stats`."""
        entries = self.columns()
        stats = topic_stats(entries["topic_id"], entries["size"], self.seconds_of(entries))
        names = dict(self.topic_pairs())
        if nameless := {topic.topic_id for topic in stats} - names.keys():
            raise CorruptFile(self.where, f"entries have topic id {min(nameless)}, which no topic has")
        return [(names[topic.topic_id], topic) for topic in stats]
