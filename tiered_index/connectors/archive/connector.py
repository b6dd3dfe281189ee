"""What connectors with a columnar archive have in common: derive yours from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tiered_index.connectors.archive.columns import ArchiveFormat
from tiered_index.connectors.archive.erasure import columns_to_erase
from tiered_index.connectors.archive.log import ColumnLog, logs_of
from tiered_index.connectors.archive.messages import ConnectorMessages
from tiered_index.connectors.contract import MessagePlaces
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.jobs.erase import EraseRequest, MakeFind
from tiered_index.service.read.answers.messages import FoundMessage
from tiered_index.service.read.segments.archive import SegmentArchive


class ArchivingConnector:
    """A `SourceConnector` without its source. All that is known of a message is in its file of the archive.

    - `form`: the form of the files.
    - `scheme`: the begin of the names of the stores, which are those of the positions, too.
    """

    form: ArchiveFormat
    scheme: str

    def message_of(self, row: Any) -> FoundMessage:
        """Return the message of a record, which has the columns of the archive by name."""
        raise NotImplementedError

    def watch(self, tell: Callable[[str], None]) -> AbstractContextManager[Callable[[], list[str]]]:
        """Nothing can hang the process."""
        return contextlib.nullcontext(list)

    def messages(self, places: MessagePlaces) -> ConnectorMessages:
        """As `Connector.messages`: at the place if there is one, which has `place` and `read`, and in the archive."""
        live = {} if places.place is None else {"read": places.place.read, "place": places.place.place}
        return ConnectorMessages(places=places, scheme=self.scheme, message_of=self.message_of, **live)

    def archived_logs(self, archive: SegmentArchive, takes: Callable[[str], bool]) -> list[ColumnLog]:
        """As `Connector.archived_logs`."""
        return logs_of(self.form, self.scheme, archive, takes)

    def erasure(self, request: EraseRequest, document: TopicDocument | None) -> MakeFind:
        """As `Connector.erasure`."""
        return columns_to_erase(self.form, request)
