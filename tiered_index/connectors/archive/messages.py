"""Reads the messages of a connector with a columnar archive again, at the source and in the archive. Threads: any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tiered_index.base.threads import each
from tiered_index.connectors.archive.columns import CLOCK_STEP_S, ArchivedRecord, ArchiveSearch, read_archived
from tiered_index.connectors.contract import MessagePlaces
from tiered_index.errors import BudgetExceeded, StorageError, StorageUnavailable
from tiered_index.service.read.answers.messages import Fetched, FoundMessage, MessageState
from tiered_index.types import IndexItem

# entries whose messages are read at once
_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class ConnectorMessages:
    """The messages of a connector with a columnar archive: a `MessageSource`.

    - `places`: where the messages are; their archives may change.
    - `scheme`: the begin of the names of the connector's stores, such as ``kafka:``.
    - `message_of`: returns the message of a record, which has the columns of the archive by name.
    - `read`: reads topic, queue and offset at the source: one record as columns of the archive, or none if the source
      has deleted it. It returns None if the source lacks the topic, and raises the errors of storages. None: there is
      no source.
    - `place`: the source, as answers name it.
    """

    places: MessagePlaces
    scheme: str
    message_of: Callable[[Mapping[str, Any]], FoundMessage]
    read: Callable[[str, int, int], pa.Table | None] | None = None
    place: str = ""

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """As `MessageSource.fetch`."""
        looks = [_Look(self, ArchiveSearch(item=item), item, topic, key) for item in items]
        each(looks, _Look.run, _AT_ONCE)
        return [look.search.result() for look in looks]


@dataclass(frozen=True)
class _Look:
    """The look for the message of an entry."""

    source: ConnectorMessages
    search: ArchiveSearch
    item: IndexItem
    topic: str
    key: str

    def run(self) -> None:
        search, item, place = self.search, self.item, (self.topic, self.item.queue_id, self.item.offset)
        if self.source.read is not None:
            self._ask(self.source.read, place)
        archive = self.source.places.archives.get(item.source)
        if archive is not None and search.found is None:
            read_archived(archive, self.source.scheme, place, search, self._take_archived)

    def _ask(self, read: Callable[[str, int, int], pa.Table | None], place: tuple[str, int, int]) -> None:
        search, search.read_from = self.search, self.source.place
        try:
            record = read(*place)
        except (StorageError, BudgetExceeded) as error:
            search.state = "unavailable" if isinstance(error, StorageUnavailable) else "missing"
            search.note(error)
            return
        if record is None:
            search.state = "no_topic"
            search.problems.append(f"{search.read_from} does not have the topic {self.topic}")
        elif not len(record):
            search.state = "expired"
            search.problems.append(f"{search.read_from} has no message at offset {place[2]:,} any more")
        else:
            self._take(record, "local")

    def _take_archived(self, record: ArchivedRecord) -> None:
        self._take(record.row, "archived")

    def _take(self, record: pa.Table, state: MessageState) -> None:
        search, (row,) = self.search, record.to_pylist()
        time_ms = record["timestamp"].cast(pa.int64())[0].as_py()
        if time_ms is not None and abs(time_ms // 1000 - self.item.timestamp_ms // 1000) > CLOCK_STEP_S:
            search.problems.append(f"{search.read_from}: another record is there: the log is another one")
            return
        carries_key = self.key in (row["keys"] or ())
        search.settle(search.fetched(state, message=self.source.message_of(row), carries_key=carries_key))
