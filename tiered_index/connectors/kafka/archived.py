"""The archived records of partitions, from which `ingest archive:URI` makes an index again.

The keys of a file are those of `--key` when it was written, which its footer has, and those that were added later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pyarrow as pa

from tiered_index.connectors.archive.columns import SHARED, ArchivedTable
from tiered_index.connectors.archive.log import ColumnLog
from tiered_index.connectors.kafka.columns import FORMAT, keys_in_notes, keys_of_rows
from tiered_index.connectors.kafka.names import BEGIN_PREFIX, LOST_PREFIX, Name, positions_by_store
from tiered_index.service.log import topic_keys
from tiered_index.service.read.segments.archive import SegmentArchive


class PartitionLog(ColumnLog):
    """The archived records of one log of a partition."""

    @property
    def _known(self) -> Mapping[str, int]:
        return self.archive.state().positions

    @property
    def source(self) -> str:
        """As `ColumnLog.source`: the newest position of the log."""
        names = [name for text in self._known if (name := Name.parse(text)) is not None and name.store == self.store]
        newest = max(names, key=lambda name: (name.generation, self._known[str(name)]), default=None)
        return self.store if newest is None else str(newest)

    @property
    def positions(self) -> Mapping[str, int]:
        """As `ColumnLog.positions`: which keys were indexed, where the log began, and what of it is lost."""
        bounds = {f"{prefix}{self.store}" for prefix in (BEGIN_PREFIX, LOST_PREFIX)}
        rules = topic_keys.rule_positions(self._known, topic_keys.scope_of(self.store))
        return rules | {name: at for name, at in self._known.items() if name in bounds}

    @property
    def rules(self) -> Collection[str]:
        """As `ColumnLog.rules`."""
        return topic_keys.rules_of(self._known, topic_keys.scope_of(self.store))

    @property
    def begin(self) -> int:
        """As `ColumnLog.begin`: the begin of the log, or of the records that have not expired."""
        begin = max(self._known.get(f"{BEGIN_PREFIX}{self.store}", 0), self.expired or 0)
        # an index that lost its root may have begun behind what it had archived
        return min([begin, *(segment.start for segment in self.segments[:1])])

    def keys_at_least(self, table: ArchivedTable) -> pa.ListArray:
        """As `ColumnLog.keys_at_least`: without those of a function."""
        keys = keys_of_rows(table.records, keys_in_notes(table.notes), self.rules)
        return pa.array(keys, SHARED["keys"])


def archived_logs(archive: SegmentArchive, takes: Callable[[str], bool]) -> list[PartitionLog]:
    """Return the logs of partitions, also those of which no record is archived. As `Connector.archived_logs`."""
    state = archive.state()
    ends = positions_by_store(state.positions).items()
    put = {store for store, at in ends if at > state.expired.segments.get(store, 0)}
    stores = {*put, *(store for store in archive.segments().stores if Name.parse(store) is not None)}
    return [PartitionLog(FORMAT, archive, store, takes) for store in sorted(stores)]
