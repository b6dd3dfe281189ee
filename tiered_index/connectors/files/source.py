"""Files as a source: each round is a look at all files that the addresses name, which indexes what is new in them.

`FileLinker` puts within the round, because what it states in the log depends on what is durable. A run that is stopped
ends before its next put. Of a run that follows, a look has a thread: if a file or a storage does not answer, a run that
is stopped leaves it, and its next put fails. One thread, but any may call `positions` and `lag`, and read `trouble`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from threading import Event
from typing import Any

from tiered_index.base.clock import SystemClock
from tiered_index.base.threads import ThreadedCall
from tiered_index.connectors.contract import SourceRun
from tiered_index.connectors.files.damaged import MOST_NAMED, damage_text, files_text, known_damage
from tiered_index.connectors.files.first_rows import CheckedFiles, mapping_of
from tiered_index.connectors.files.linked import FileCounts, FileLinker
from tiered_index.connectors.files.listing import SourceFile, Unlisted, listed_files
from tiered_index.connectors.files.spec import FilesOptions
from tiered_index.connectors.source import FIRST, Batch, Lag, Put, Stopped
from tiered_index.errors import ObjectNotFound, StorageUnavailable, listed
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.index import IndexService

# the time for which a file without an end stands still before it is read
_STILL_S = 60.0
# between looks at a stop, and the longest wait for a look after it: a follower ends within 10 s
_WAIT_S, _STOP_S = 0.2, 5.0


class FileSource:
    """Files of one topic, or with their topic in a field.

    `progress` is called while files are read. Of a run that follows, `damaged_first` and `skipped_first` have the
    first damaged files and bad rows of all looks, and `take_new` returns those of the last ones.
    """

    unit, offsets = "offsets", "offsets"
    # a look that finds rows costs two records of the log
    poll_s = 10.0

    def __init__(self, index: IndexService, run: SourceRun) -> None:
        options: FilesOptions = run.options or FilesOptions()
        self.place, self._index, self._run = listed(run.addresses, 3), index, run
        self._checked: CheckedFiles | None = run.checked
        if self._checked is None:
            topic, mapping = mapping_of(options.rows, options.key)
        else:
            topic, mapping = self._checked.topic, self._checked.mapping
        self.linker = FileLinker(
            index,
            topic,
            mapping,
            self._put,
            options.skip_bad,
            options.rows.strict,
            archive=options.archive,
            dropped_keys=options.drop_key or (),
        )
        self.unlisted = Unlisted() if self._checked is None else self._checked.unlisted
        self.progress: Callable[[], object] = lambda: None
        self.linker.progress = lambda size_bytes: self.progress()
        if run.follow:
            # new rows do not wait until all known ones have the keys that were added
            self.linker.reread_s = max(run.poll_s or self.poll_s, 1.0)
            self.linker.still_s = _STILL_S
        self.damaged_first, self.skipped_first = list[dict[str, Any]](), list[dict[str, str]]()
        self._new: tuple[list[dict[str, Any]], list[dict[str, str]]] = [], []
        # the damaged files that the last look named, and the paths that no look could name
        self._named, self._unnamed = list[dict[str, Any]](), set[str]()
        self._changed = 0
        self.problems = list[str]()
        """The reasons that files can't be read, or not as a whole."""
        # the time before which all that the files had is put; None: not known
        self._whole_ms: int | None = None
        self._looks, self._is_interrupted, self._is_ending = 0, False, False
        self._put_batch: Put = index.put_source_batch
        self._stop = Event()

    def document(self, topic: str) -> TopicDocument:
        """As `Source`."""
        return self.linker.document(topic)

    def attach(self, put: Put, stop: Event) -> None:
        """As `Source.attach`."""
        self._put_batch, self._stop = put, stop

    @property
    def trouble(self) -> str | None:
        """The problems, as text; None: there are none."""
        return "; ".join(self.problems) or None

    @property
    def counts_of_files(self) -> FileCounts:
        """The counts of the run."""
        counts = self.linker.counts
        if not self._run.follow:
            return counts
        return replace(counts, damaged_first=self.damaged_first, skipped_first=self.skipped_first)

    def counts(self) -> dict[str, Any]:
        """Return the counts of the run, as fields of a document."""
        of_files = asdict(self.counts_of_files)
        return of_files | {"empty_sources": len(self.unlisted.empty), "missing_sources": self.unlisted.missing}

    def positions(self) -> dict[str, int]:
        """As `Source.positions`: the offset before which all rows are durable."""
        position = self.linker.position
        return {self.linker.store: position} if position else {}

    def lag(self) -> Lag:
        """Return the time since the last look that has read all. It is unknown before, and while files are away."""
        position, whole_ms = self.linker.position, self._whole_ms
        seconds = None if whole_ms is None else max(SystemClock().now_ms() - whole_ms, 0) / 1000
        return Lag(position, 0, seconds)

    def close(self) -> None:
        """Do nothing: a look closes its files."""

    def batches(self) -> Generator[Batch, None, None]:
        """Look at the files once, put what is new, and yield what was put. Raises as `listed_files`, `FileLinker.run`.

        A run that follows tries again what is away.
        """
        linker, counts = self.linker, self.linker.counts
        before = counts.rows, counts.entries, counts.keyless
        if self._is_interrupted:
            linker.begin_again()
        self._is_interrupted, trouble = True, None
        try:
            if self._run.follow:
                self._await(ThreadedCall(self._look, "tiered-index-look"))
            else:
                self._look()
            self._is_interrupted = False
        except (ObjectNotFound, StorageUnavailable) as error:
            self._whole_ms = None
            if not self._run.follow:
                raise
            trouble = str(error)
            self._run.note(f"{error}: trying again")
            self._index.flush()
        if self._run.follow:
            self._tell(trouble)
        else:
            for uri in counts.changed:
                self._run.note(f"{uri} has changed since it was indexed: its earlier rows can't be read any more")
            for uri in counts.rewritten:
                self._run.note(f"{uri} has other rows from some row on, which are read again in place of earlier ones")
        self._looks += 1
        rows, entries, keyless = (
            now - then for now, then in zip((counts.rows, counts.entries, counts.keyless), before, strict=True)
        )
        put: dict[str, Any] = {"messages": rows, "entries": entries, "left_out": keyless}
        yield Batch(source=linker.store, position=linker.position, **put)

    def last_batches(self) -> Iterator[Batch]:
        """Put the time before which all rows are put."""
        self._is_ending = True
        self.linker.end()
        return iter(())

    def lacks(self, messages: int, hidden: int, left_out: int) -> list[str]:
        """As `Source.lacks`."""
        return [f"none of {messages:,} rows has a key"] if messages == left_out > 0 else []

    def take_new(self) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        """Return the damaged files and the bad rows that were named since the last call."""
        new, self._new = self._new, ([], [])
        return new

    def _put(self, columns: Any, source: str | None, position: int | None) -> int:
        if self._stop.is_set() and not self._is_ending:
            raise Stopped("stopped while files were read")
        return self._put_batch(columns, source, position)

    @contextlib.contextmanager
    def _files(self) -> Iterator[list[SourceFile]]:
        """Yield the files of a look: those that were checked, or for a run that follows those that there are now."""
        run, checked = self._run, self._checked
        if checked is not None and not run.follow:
            yield checked.files
        else:
            unlisted, config = self.unlisted, self._index.config
            with listed_files(run.addresses, config, may_lack=run.follow, unlisted=unlisted) as files:
                yield files

    def _await(self, look: ThreadedCall) -> None:
        """Wait for a look, after a stop for some seconds at most. Raises its error, and `Stopped`."""
        until_s = math.inf
        while look.is_running:
            if self._stop.is_set():
                until_s = min(until_s, time.monotonic() + _STOP_S)
            if time.monotonic() > until_s:
                raise Stopped("stopped while a file or a storage did not answer")
            look.join(time.monotonic() + _WAIT_S)
        look.join(0.0)

    def _look(self) -> None:
        begun_ms = SystemClock().now_ms()
        with self._files() as files:
            self._link(files, begun_ms)

    def _link(self, files: list[SourceFile], begun_ms: int) -> None:
        linker, unlisted = self.linker, self.unlisted
        linker.counts.vanished += unlisted.vanished
        for path, reason in unlisted.unnamed.items():
            if path not in self._unnamed:
                linker.counts.name_damaged(path, reason)
        self._unnamed |= unlisted.unnamed.keys()
        # a folder may be missing because it is not mounted
        is_listed = not (unlisted.missing or unlisted.unnamed)
        linker.run(files, (begun_ms if is_listed else 0) if self._run.follow else None)
        self._whole_ms = begun_ms if is_listed and linker.is_whole else None

    def _tell(self, trouble: str | None) -> None:
        """Note what a look has found that the looks before have not."""
        counts, note = self.linker.counts, self._run.note
        if not self._looks:
            for text in known_damage(counts.known_damaged, counts.known_damaged_first):
                note(text)
            if self.unlisted.empty:
                note(f"no file that has data yet: {listed(self.unlisted.empty, 3)}")
        named, skipped = counts.damaged_first, counts.skipped_first
        # a file that may not be opened is tried at each look
        damaged = [damage for damage in named if damage not in self._named]
        counts.damaged -= len(named) - len(damaged)
        for damage in damaged:
            note(f"damaged: {damage_text(damage)}")
        for uri in counts.changed[self._changed :]:
            note(f"{uri} has other rows now, which are indexed, too")
        not_whole = counts.known_damaged + len(named)
        of_files = f"{files_text(not_whole)} can't be read as a whole" if not_whole else None
        self.problems = [*filter(None, [trouble, of_files])]
        for first, new, most in ((self.damaged_first, damaged, MOST_NAMED), (self.skipped_first, skipped, FIRST)):
            first += new[: max(0, most - len(first))]
        for taken, new in zip(self._new, (damaged, skipped), strict=True):
            taken += new[: max(0, MOST_NAMED - len(taken))]
        self._named, self._changed = named, len(counts.changed)
        counts.damaged_first, counts.skipped_first = [], []
        for uris in (counts.held_back, counts.copies, counts.changed_while_read):
            # the next look tells
            uris.clear()
