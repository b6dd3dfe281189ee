"""Files as a connector: rows stay where they are, and are read there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from tiered_index.config import IndexConfig
from tiered_index.connectors.archive.erasure import ColumnsToErase
from tiered_index.connectors.contract import MessagePlaces, OpenedSource, SourceConnector, SourceRun
from tiered_index.connectors.files.damaged import files_text
from tiered_index.connectors.files.first_rows import CheckedFiles
from tiered_index.connectors.files.listing import Unlisted, listed_files
from tiered_index.connectors.files.messages import FileRows
from tiered_index.connectors.files.row_archive import FORMAT, RowsLog, archived_logs
from tiered_index.connectors.files.rows.restart import has_points, windows_to_erase
from tiered_index.connectors.files.source import FileSource
from tiered_index.connectors.files.table_folders import check_outside_tables
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService
from tiered_index.service.jobs.erase import EraseRequest, MakeFind
from tiered_index.service.jobs.segments.erase_segments import FoundMessages
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.archive import SegmentArchive
from tiered_index.storage.probe import AbilityFinding


@dataclass(frozen=True)
class _CopiesToErase:
    """Finds the rows of a request in what is archived of files: a `FindMessages`."""

    request: EraseRequest
    before_ms: int
    keyed: bool

    def __call__(self, archive: SegmentArchive, segment: ArchivedSegment) -> FoundMessages:
        if has_points(segment):
            return windows_to_erase(self.request, archive, segment)
        return ColumnsToErase(FORMAT, self.request, self.before_ms, self.keyed)(archive, segment)


class FilesConnector:
    """Indexes the rows of files, and reads them where they are."""

    def check(self, run: SourceRun, config: IndexConfig) -> CheckedFiles:
        """As `SourceConnector.check`."""
        return CheckedFiles.open(run, config)

    def source(self, run: SourceRun, index: IndexService) -> OpenedSource:
        """As `SourceConnector.source`. The rows are archived as they are put."""
        source = FileSource(index, run)
        return OpenedSource(source, None, source.linker.store)

    def doctor(self, run: SourceRun, config: IndexConfig) -> list[AbilityFinding]:
        """As `SourceConnector.doctor`: list the files. Raises as `listed_files`."""
        for address in run.addresses:
            check_outside_tables(address, config)
        unlisted = Unlisted()
        with listed_files(run.addresses, config, unlisted=unlisted) as files:
            size_bytes = sum(file.size_bytes for file in files)
            listed = f"yes: {files_text(len(files))}, {size_bytes:,} bytes"
        findings = [AbilityFinding("list of files", "finding new files", "ok", listed)]
        for place, reason in unlisted.unnamed.items():
            findings.append(AbilityFinding(place, "reading all of its rows", "missing", reason))
        return findings

    def watch(self, tell: Callable[[str], None]) -> AbstractContextManager[Callable[[], list[str]]]:
        """Nothing can hang the process."""
        return contextlib.nullcontext(list)

    def place(self, options: object, address: str | None = None) -> None:
        """Return None: the index names the files."""

    def messages(self, places: MessagePlaces) -> FileRows:
        """As `Connector.messages`. Needs an index."""
        assert places.index is not None
        return FileRows(places.index)

    def archived_logs(self, archive: SegmentArchive, takes: Callable[[str], bool]) -> list[RowsLog]:
        """As `Connector.archived_logs`."""
        return archived_logs(archive, takes)

    def erasure(self, request: EraseRequest, document: TopicDocument | None) -> MakeFind:
        """As `Connector.erasure`."""
        return partial(_CopiesToErase, request)


CONNECTOR: SourceConnector = FilesConnector()
