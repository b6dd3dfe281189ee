"""Files as a connector: rows stay where they are, and are read there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from tiered_index.connectors.contract import Connector, MessagePlaces
from tiered_index.connectors.files.messages import FileRows
from tiered_index.connectors.files.row_archive import RowsToErase
from tiered_index.connectors.files.rows.restart import has_points, windows_to_erase
from tiered_index.service.jobs.erase import EraseRequest, MakeFind
from tiered_index.service.jobs.segments.erase_segments import FoundMessages
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive


@dataclass(frozen=True)
class _CopiesToErase:
    """Finds the rows of a request in what is archived of files: a `FindMessages`."""

    request: EraseRequest
    before_ms: int
    keyed: bool

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        if has_points(segment):
            return windows_to_erase(self.request, archive, segment)
        return RowsToErase(self.request, self.before_ms, self.keyed)(archive, segment)


class FilesConnector:
    """Reads the rows of files where they are. `ingest` puts them itself."""

    def place(self, options: object, address: str | None = None) -> None:
        """Return None: the index names the files."""

    def messages(self, places: MessagePlaces) -> FileRows:
        """As `Connector.messages`. Needs an index."""
        assert places.index is not None
        return FileRows(places.index)

    def erasure(self, request: EraseRequest, positions: Collection[str]) -> MakeFind:
        """As `Connector.erasure`."""
        return partial(_CopiesToErase, request)


CONNECTOR: Connector = FilesConnector()
