"""The writers of the columnar archive: send files of records, and name them in the index's log.

The log alone says which records are archived. So a file is sent before a record of the log names it, and one record
names many files. After an error, or a crash, what was not named is sent again. A connector archives records before it
puts their entries, or follows its own durable positions, as a `PutArchiver` does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.archive.columns import ArchiveFormat, times_in
from tiered_index.connectors.source import Loss
from tiered_index.format.segments.columnar import NUMBER
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import ArchivedSegment
from tiered_index.service.read.segments.segments import Segments

# One log record names at most so many files, and about so many bytes of them
_NAMED, _NAMED_BYTES = 256, 64 << 20
# about the bytes of records in a file, before they are compressed, and how often records are archived if they are few
_FILE_BYTES, _EVERY_S = 32 << 20, 300.0


def archived_end(segments: Segments, store: str) -> int | None:
    """Return the offset before which the records of a log are archived, or were; None: none is."""
    return max(segments.end(store), segments.state.expired.segments.get(store, 0)) or None


@dataclass
class _Waiting:
    """Records of one log, all of offsets [`begin`, `end`), that wait to be sent."""

    begin: int
    end: int
    parts: list[pa.Table] = field(default_factory=list)


class ColumnArchiver:
    """Archives the records of a connector, for any number of its logs. One thread.

    Either let records wait by `add`, until `archive` makes a file of them; or send files by `send`, until `name` adds
    them to the archive. Methods raise as `IndexService.archive_columns`.
    """

    def __init__(self, index: IndexService, form: ArchiveFormat) -> None:
        self._index, self._form = index, form
        self._waiting: dict[str, _Waiting] = {}
        self._sent: list[tuple[str, int]] = []
        self._sent_bytes = 0
        # by the name of the store
        self._sent_ends: dict[str, int] = {}
        self.size_bytes = 0
        """The bytes of records that wait for `archive`."""
        self.archived = 0
        """The number of files that were archived."""

    def end(self, store: str, segments: Segments | None = None) -> int:
        """Return the offset before which the records of a log are archived, were, or wait for that.

        `segments`: those of the archive, if they are known.
        """
        if (waiting := self._waiting.get(store)) is not None:
            return waiting.end
        segments = self._index.segment_archive.segments() if segments is None else segments
        return max(archived_end(segments, store) or 0, self._sent_ends.get(store, 0))

    def add(self, store: str, begin: int, end: int, records: pa.Table) -> None:
        """Let all records of a log at offsets [`begin`, `end`) wait; those that are archived are left out.

        Calls for one log continue each other: `begin` counts for the first one alone. Records are in order of offsets.
        """
        if store not in self._waiting:
            begin = max(begin, self.end(store))
            self._waiting[store] = _Waiting(begin, begin)
        waiting = self._waiting[store]
        if len(records) and records[NUMBER][0].as_py() < waiting.end:
            records = records.filter(pc.greater_equal(records[NUMBER], waiting.end))
        waiting.end = max(waiting.end, end)
        if len(records):
            waiting.parts.append(records)
            self.size_bytes += records.nbytes

    def archive(self, notes: Mapping[str, str] | None = None) -> int:
        """Archive the records that wait, by one file a log and one record. Return the number of files.

        `notes` are those of `ArchiveFormat.encode`. After an error no record waits: add them again, from `end` on.
        """
        waiting, self._waiting, self.size_bytes = self._waiting, {}, 0
        for store, of_log in waiting.items():
            if of_log.parts:
                self.send(store, of_log.begin, of_log.end, pa.concat_tables(of_log.parts).combine_chunks(), notes)
        named = self.name()
        # after an error nothing waits
        self._waiting = {
            store: _Waiting(of_log.end if of_log.parts else of_log.begin, of_log.end)
            for store, of_log in waiting.items()
        }
        return named

    def send(
        self,
        store: str,
        begin: int,
        end: int,
        records: pa.Table,
        notes: Mapping[str, str] | None = None,
        *,
        file: bytes | None = None,
        copied: ArchivedSegment | None = None,
    ) -> bool:
        """Send a file of all records of a log at offsets [`begin`, `end`). Return false if they are archived.

        `file`: the file of these records, if it is made. `copied`: the segment of another index that has them.
        """
        file = self._form.encode(records, notes) if file is None else file
        is_sent = self._index.send_columns(store, begin, end - begin, file, len(records), times_in(records), copied)
        if is_sent:
            self._sent.append((store, begin))
            self._sent_bytes += len(file)
        self._sent_ends[store] = end
        return is_sent

    @property
    def waits(self) -> bool:
        """Whether files that were sent wait for `name`."""
        return bool(self._sent)

    @property
    def is_full(self) -> bool:
        """Whether as many files wait for `name` as one record should name."""
        return len(self._sent) >= _NAMED or self._sent_bytes >= _NAMED_BYTES

    def name(self) -> int:
        """Add all files that were sent to the archive, by one record. Return their number.

        After an error they are not archived: their records must be sent again.
        """
        sent, self._sent, self._sent_bytes, self._sent_ends = self._sent, [], 0, {}
        named = self._index.name_columns(sent) if sent else 0
        self.archived += named
        return named

    def begin_again(self) -> None:
        """Forget the records that wait, and the files that have no name. They must be added again."""
        self.size_bytes, self._sent_bytes = 0, 0
        self._waiting, self._sent, self._sent_ends = {}, [], {}


class PutArchiver:
    """Archives the records that a source has put, by reading them again: an `Archiver`.

    - `stores`: returns the logs of the source. The position of a log has the name of its store.
    - `read`: yields the records of a log at offsets from a begin to an end, as columns of `form`, in order, and the
      offset behind each table. The last one is the end.

    Records are archived every `every_s`, and at the end of a run. The source should keep them longer than that.
    """

    # records that wait may be deleted while the command is not running
    ends_whole = True

    def __init__(
        self,
        index: IndexService,
        form: ArchiveFormat,
        stores: Callable[[], Iterable[str]],
        read: Callable[[str, int, int], Iterator[tuple[pa.Table, int]]],
        every_s: float = _EVERY_S,
    ) -> None:
        self._index, self._stores, self._read, self._every_s = index, stores, read, every_s
        self._columns = ColumnArchiver(index, form)
        self._stopped = threading.Event()
        self._began_s = time.monotonic()
        self.losses = list[Loss]()
        self.passed_over = ()

    @property
    def archived(self) -> int:
        """The number of archived files."""
        return self._columns.archived

    def stop(self) -> None:
        """End the round soon. Any thread."""
        self._stopped.set()

    def run_once(self) -> int:
        """Archive records if the last time is long ago. Return the number of files. Raises as `finish`."""
        return self._run() if time.monotonic() - self._began_s >= self._every_s else 0

    def finish(self) -> int:
        """Archive the records of all puts. Raises as `read` and `IndexService.archive_columns`; call it again later."""
        self._index.flush()
        return self._run()

    def _run(self) -> int:
        self._began_s, before = time.monotonic(), self.archived
        for store in self._stores():
            begin = self._columns.end(store)
            for records, end in self._read(store, begin, self._index.durable_position(store) or 0):
                self._columns.add(store, begin, end, records)
                begin = end
                if self._columns.size_bytes >= _FILE_BYTES:
                    self._columns.archive()
                if self._stopped.is_set():
                    break
        self._columns.archive()
        return self.archived - before
