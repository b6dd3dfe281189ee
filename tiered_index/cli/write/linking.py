"""The part of `tiered-index ingest` for files of any form, whose rows stay where they are."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_index.base.clock import SystemClock
from tiered_index.cli.ending import Ending
from tiered_index.cli.exit_codes import DONE, FINDING
from tiered_index.cli.options import IntakeOptions
from tiered_index.cli.output import ProgressDisplay, counted, human_bytes, human_count, human_seconds
from tiered_index.cli.session import Session
from tiered_index.cli.write.options import DEFAULT_TIME, IngestOptions
from tiered_index.cli.write.putting import Putting, none_indexed, show_put
from tiered_index.connectors.follow import FIRST
from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    ObjectNotFound,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.errors import listed as listed_names
from tiered_index.types import format_time

if TYPE_CHECKING:
    from tiered_index.config import IndexConfig
    from tiered_index.connectors.files.added_keys import KeyCounts
    from tiered_index.connectors.files.linked import FileCounts, FileLinker
    from tiered_index.connectors.files.listing import SourceFile, Unlisted
    from tiered_index.connectors.files.rows.batch import RowFile
    from tiered_index.connectors.files.rows.mapping import Dialect, RowMapping
    from tiered_index.connectors.files.rows.zone import TimeZone, UnclearTimes

# seconds between two looks at files: a look that finds rows costs two records of the log; and those for which a file
# without an end stands still
POLL_S, _STILL_S = 10.0, 60.0
# damaged files that a document names
_MOST_NAMED = 100
# rows that a dry run shows
_SHOWN = 5


def state_root(storage: str) -> Path:
    """Return the default root of an index: a folder of the user's state directory for its storage."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "tiered-index" / hashlib.blake2b(storage.encode(), digest_size=8).hexdigest()


class RowIngestion:
    """A run of `ingest` for rows of files."""

    def __init__(self, session: Session, sources: Sequence[str], options: IngestOptions) -> None:
        self.session, self.sources, self.ingest_options = session, sources, options
        self.options, self.keys = options.of_rows, options.kafka.key or ()
        self.intake, self.follow = options.intake, options.run.follow
        self.skip_bad = options.of_files.skip_bad

    def run(self) -> int:
        """Index the rows, and return the exit code. Raises as `FileLinker.run` and `listed_files`."""
        # imported here: other sources do not need it
        from tiered_index.connectors.files.linked import FileLinker
        from tiered_index.connectors.files.listing import HEAD_BYTES, Unlisted, listed_files
        from tiered_index.connectors.files.rows.places import STDIN
        from tiered_index.connectors.files.table_folders import check_outside_tables

        if STDIN in self.sources:
            raise InvalidArgument("rows of stdin can't be read again: write them to a file, and give the file")
        config = self._config()
        for source in self.sources:
            check_outside_tables(source, config)
        with contextlib.ExitStack() as stack:
            unlisted = Unlisted()
            listed = partial(listed_files, self.sources, config, may_lack=self.follow, unlisted=unlisted)
            files = stack.enter_context(listed())
            self._check_options(files)
            topic, mapping = self.options.mapping(self.keys)
            if not self.follow or sum(file.size_bytes for file in files) >= HEAD_BYTES:
                self._check_fields(config, files, topic, mapping)
            if self.ingest_options.run.dry_run:
                return _show_rows(self.session, self.intake, files, topic, mapping)
            putting = stack.enter_context(self._opened(config))
            # the files of a follower grow
            size_bytes = None if self.follow else sum(file.size_bytes for file in files)
            with putting.progress("entries" if self.follow else "ingesting", size_bytes) as progress:
                linker = FileLinker(
                    putting.index,
                    topic,
                    mapping,
                    putting.patient(),
                    self.skip_bad,
                    self.options.strict,
                    archive=self.ingest_options.kafka.archive,
                    dropped_keys=self.ingest_options.kafka.drop_key or (),
                )
                counts = linker.counts
                if self.follow:
                    looks = _Looks(self.session, linker, progress, listed, unlisted)
                    looks.follow(self.ingest_options.run.poll or POLL_S)
                else:
                    linker.progress = lambda size: progress.update(size, f"{human_count(counts.entries)} entries")
                    _count_unlisted(counts, unlisted)
                    linker.run(files)
            self._tell(linker, unlisted)
            taken_s = putting.elapsed_s
            putting.settle()
            document = self._document(putting, linker, taken_s)
            document |= {"empty_sources": len(unlisted.empty), "missing_sources": unlisted.missing}
        return self._show(linker.counts, document)

    @contextlib.contextmanager
    def _opened(self, config: IndexConfig) -> Iterator[Putting]:
        """Open the index. The error of a default root whose storage is empty says how to begin again."""
        with contextlib.ExitStack() as stack:
            try:
                putting = stack.enter_context(Putting.open(self.session, config, self.intake))
            except NotAnIndex as error:
                if config.storage is None or config.root != state_root(config.storage):
                    raise
                raise NotAnIndex(
                    f"{error}. This root is the default for {config.storage}: if you deleted the index there, delete "
                    f"{config.root}, too, and run the command again"
                ) from error
            yield putting

    def _config(self) -> IndexConfig:
        """Return the settings of the index. Without a root, the one of a storage is a folder of the user's state."""
        config = self.session.config(**self.ingest_options.settings)
        if config.root is not None or config.storage is None or self.ingest_options.run.dry_run:
            return config
        config = self.session.config(root=state_root(config.storage), **self.ingest_options.settings)
        self.session.out.note(f"--root is {config.root}")
        # readers of the storage do not know this root
        self.intake = replace(self.intake, wait=self.intake.wait or not self.follow)
        return config

    def _check_options(self, files: Sequence[SourceFile]) -> None:
        """Raise `InvalidArgument` that names all options which are missing, and the fields of the first file."""
        missing = {"--topic": self.options.topic is None, "--key": not self.keys}
        if not any(missing.values()):
            return
        there, fields = "", list[str]()
        with contextlib.suppress(TieredIndexError):
            first = _first_rows(files, None)
            fields = [] if first is None else first[1].fields()
        if fields and first is not None:
            missing["--time"] = self.options.time is None and DEFAULT_TIME not in fields
            there = f"; the first row of {first[0].uri} has {listed_names(fields, 30)}"
        names = [option for option, is_missing in missing.items() if is_missing]
        needed = "rows need a topic, the field of a key (such as --key order_id) and that of the time"
        raise InvalidArgument(f"{listed_names(names)} {'is' if len(names) == 1 else 'are'} missing: {needed}{there}")

    def _check_fields(
        self, config: IndexConfig, files: Sequence[SourceFile], topic: str | None, mapping: RowMapping
    ) -> None:
        """Raise `InvalidArgument` for fields that no row of the files has, and the error of files without a row."""
        from tiered_index.connectors.files.first_rows import FieldSearch

        search = FieldSearch(mapping)
        search.look_at_heads(files)
        if search.is_over or (search.first is None and search.error is None):
            return
        known = _known_keys(config, topic)
        if search.first is None and search.error is not None:
            if known:
                # the log notes the files
                return
            raise search.error
        if not search.misses(known, keys_may_come=self.follow):
            return
        if search.is_cut:
            self.session.out.note(f"looking at all rows, because at the beginning {search.failure(len(files))}")
            search.look_at_all(files)
        if search.misses(known, keys_may_come=self.follow):
            raise search.failure(len(files))

    def _tell(self, linker: FileLinker, unlisted: Unlisted) -> None:
        """Note what a user must know of the files."""
        counts, out = linker.counts, self.session.out
        keys = counts.keys
        if keys.further:
            of_topic = listed_names([f"--key {key}" for key in keys.further])
            out.note(f"new rows are also indexed by {of_topic}, as in earlier runs; --drop-key ends that")
        for key in keys.dropped:
            out.note(f"new rows are not indexed by --key {key} any more; it still finds earlier ones")
        for unread in keys.unread[:FIRST]:
            out.note(f"{unread['file']} can't be read again for --key {unread['key']}: {unread['problem']}")
        if len(keys.unread) > FIRST:
            out.note(f"nor can {len(keys.unread) - FIRST:,} more (--json names them)")
        if not self.follow:
            tell_known_damage(self.session, counts.known_damaged, counts.known_damaged_first)
        if not self.follow:
            tell_missing(self.session, unlisted.missing)
            if empty := [source for source in unlisted.empty if source not in unlisted.missing]:
                out.note(f"no file that has data: {listed_names(empty, 3)}")
        if counts.vanished:
            out.note(f"{counted(counts.vanished, 'file')} vanished before they were read")
        for key, lacking in counts.lacking.items():
            out.note(f"--key {key}: {lacking:,} of {counted(counts.read_files, 'file')} have no row with this key")
        for uri in counts.changed:
            out.note(f"{uri} has changed since it was indexed: its earlier rows can't be read any more")
        for uri in counts.rewritten:
            out.note(f"{uri} has other rows from some row on, which are read again in place of the earlier ones")
        if counts.reread:
            files = listed_names(counts.reread, 3)
            out.note(f"rows are read in another way than before, so all rows of {files} are read again")
            if counts.otherwise:
                others = listed_names(counts.otherwise, 3)
                out.note(f"not of {others}: these rows stay as they are, because this run does not list the files")
        for uri in counts.copies:
            out.note(f"{uri} is a copy of another file of its folder, whose rows are indexed once")
        for uri in counts.changed_while_read:
            out.note(f"{uri} was changed while it was read: run the command again, which reads what is new in it")
        for uri in [] if self.follow else counts.held_back:
            out.note(
                f"{uri}: the last row has no newline or an open quote: it may be cut. A later run reads it when it ends"
            )
        if pieces := counts.in_one_piece:
            out.note(
                "packed by bzip2, xz, or zstd in one frame, so that a lookup decompresses a row's file from its start: "
                f"{listed_names(pieces, 3)}. With --archive a row costs one ranged read of its copy; "
                "`zstd -dc FILE | pzstd -c > NEW` packs a file in many frames"
            )
        if (mapping := linker.mapping).has_numbers:
            before = linker.unit_before
            if mapping.is_guessed:
                decided = "by the first one" if before is None else "as in an earlier run"
                out.note(f"times are numbers of {mapping.unit}, {decided}; --time-unit sets another unit")
            elif before not in (None, mapping.unit) and not counts.reread:
                out.note(f"times are numbers of {mapping.unit} from now on. Earlier rows keep theirs, read in {before}")
        if mapping.has_zoneless and mapping.zone is not None:
            before, zone = linker.zone_before, mapping.zone.name
            if self.options.time_zone is None:
                out.note(f"times without a zone are of {zone}, as in an earlier run; --time-zone sets another zone")
            elif before not in (None, zone) and not counts.reread:
                out.note(f"times without a zone are of {zone} from now on. Earlier rows keep theirs, read in {before}")
            for text in mapping.unclear_times.texts(zone):
                out.note(text)

    def _document(self, putting: Putting, linker: FileLinker, taken_s: float) -> dict[str, Any]:
        counts = linker.counts
        return putting.document(
            status="stopped" if self.follow else "complete",
            topic=self.options.topic,
            **asdict(counts),
            time_unit=linker.mapping.unit,
            **about_zone(linker.mapping.zone, linker.mapping.unclear_times),
            quarantined_first=linker.patient.quarantined,
            expired=linker.patient.expired,
            ingest_s=taken_s,
            entries_per_s=round(counts.entries / taken_s) if taken_s else None,
            nothing_indexed=[f"none of {counts.rows:,} rows has a key"] if counts.rows == counts.keyless > 0 else [],
        )

    def _show(self, counts: FileCounts, document: dict[str, Any]) -> int:
        """Write the document, and return the exit code."""
        out = self.session.out
        for damage in counts.damaged_first[:FIRST]:
            out.note(f"damaged: {damage_text(damage)}")
        say = out.remark if self.skip_bad else out.note
        for bad in counts.skipped_first:
            say(f"skipped: {bad['where']}: {bad['problem']}")
        known = f", {counts.known:,} known" if counts.known else ""
        shown = {
            "topic": self.options.topic,
            "files": f"{counts.read_files:,} read ({human_bytes(counts.read_bytes)}){known}",
            "rows": f"{counts.rows:,}",
            "entries": f"{counts.entries:,}",
            "for new keys": _reread(counts.keys) if counts.keys.added else None,
            "without a key": f"{counts.keyless:,}" if counts.keyless else None,
            "skipped": f"{counts.skipped:,}" if counts.skipped else None,
            "damaged": counted(counts.damaged, "file") if counts.damaged else None,
            "expired": f"{document['expired']:,}" if document["expired"] else None,
            "quarantined": f"{late:,} entries with an implausible time" if (late := document["quarantined"]) else None,
            "rate": f"{human_count(document['entries_per_s'])} entries/s" if document["entries_per_s"] else None,
            "elapsed": human_seconds(document["elapsed_s"]),
        }
        show_put(out, document, shown, streamed=self.follow)
        if counts.is_none_read and not self.follow:
            out.error_line("nothing was indexed: no row of the files can be read")
            return CorruptFile.exit_code
        if counts.damaged or (counts.skipped and not self.skip_bad):
            return FINDING
        done = DONE if self.follow else none_indexed(self.session, self.intake, document["nothing_indexed"])
        return FINDING if counts.keys.unread and not self.follow else done


def _reread(keys: KeyCounts) -> str:
    """Return what a run did for added keys, as text."""
    bad = f", {counted(keys.skipped, 'bad row')} left out" if keys.skipped else ""
    return f"{counted(keys.entries, 'entry', 'entries')} of {counted(keys.files, 'known file')} read again{bad}"


def _known_keys(config: IndexConfig, topic: str | None) -> set[str]:
    """Return the keys of the rows of files of a topic (None: of all topics by a field) that an index has already."""
    from tiered_index.connectors.systems import position_names
    from tiered_index.format.names import TOPICS_QUEUE, linked_store
    from tiered_index.service.log.topic_keys import rules_in
    from tiered_index.service.read.segments.places import FILES_QUEUE
    from tiered_index.service.reader import IndexReader

    store = linked_store("", TOPICS_QUEUE) if topic is None else linked_store(topic, FILES_QUEUE)
    with contextlib.suppress(ConfigError), IndexReader.open(config=config) as reader:
        return {*rules_in(position_names(reader), store)}
    return set()


def damage_text(damage: Mapping[str, Any]) -> str:
    """Return a damaged file, the position of the first row that was not read, and the reason, as text."""
    position = "" if damage["position"] is None else f" at {damage['position']:,}"
    return f"{damage['file']}{position}: {damage['reason']}"


def tell_known_damage(session: Session, count: int, first: Sequence[Mapping[str, Any]]) -> None:
    """Note the files that an earlier run could not read, or not as a whole, and that are as they were."""
    if count:
        session.out.note(f"{counted(count, 'file')} could not be read as a whole by an earlier run:")
        for damage in first[:FIRST]:
            session.out.note(damage_text(damage))


def about_zone(zone: TimeZone | None, unclear: UnclearTimes) -> dict[str, Any]:
    """Return the fields of a document about times without a zone."""
    name = None if zone is None else zone.name
    return {"time_zone": name, "doubled_times": unclear.doubled, "missing_times": unclear.missing}


def tell_missing(session: Session, missing: Sequence[str]) -> None:
    """Note the sources that are the path of no file."""
    if missing:
        session.out.note(f"no such file or folder: {listed_names(missing, 10)}")


def _count_unlisted(counts: FileCounts, unlisted: Unlisted) -> None:
    """Count the files that a listing could not give."""
    counts.vanished += unlisted.vanished
    for path, reason in unlisted.unnamed.items():
        counts.name_damaged(path, reason)


class _Looks:
    """Looks at files again and again. Tells after each look what it has found: by notes, on the progress bar, and with
    --json by a line if anything has changed.
    """

    def __init__(
        self,
        session: Session,
        linker: FileLinker,
        progress: ProgressDisplay,
        listed: Callable[[], AbstractContextManager[list[SourceFile]]],
        unlisted: Unlisted,
    ) -> None:
        self._out, self._session, self._linker, self._progress = session.out, session, linker, progress
        self._listed, self._unlisted = listed, unlisted
        self._unnamed = set[str]()
        self._last: dict[str, Any] = {}
        self._trouble: str | None = None
        self._problems = list[str]()
        # the damaged files that the last look named, then the first ones and the first bad rows of all looks
        self._named, self._damaged, self._skipped = (
            list[dict[str, Any]](),
            list[dict[str, Any]](),
            list[dict[str, str]](),
        )
        self._changed = 0

    def follow(self, poll_s: float) -> None:
        """Index new rows until a signal. A file or a storage that is away is tried again."""
        linker, counts = self._linker, self._linker.counts
        linker.progress = lambda size: self._show_progress()
        # new rows do not wait until all known ones have the keys that were added
        linker.reread_s = max(poll_s, 1.0)
        linker.still_s = _STILL_S
        with Ending() as ending:
            while not ending.event.is_set():
                self._look()
                if not self._last:
                    tell_known_damage(self._session, counts.known_damaged, counts.known_damaged_first)
                    if self._unlisted.empty:
                        self._out.note(f"no file that has data yet: {listed_names(self._unlisted.empty, 3)}")
                self._tell()
                ending.event.wait(poll_s)
            linker.end()
        counts.damaged_first, counts.skipped_first = self._damaged, self._skipped

    def _look(self) -> None:
        linker = self._linker
        self._trouble = None
        begun_ms = SystemClock().now_ms()
        try:
            with self._listed() as files:
                unlisted = self._unlisted
                # a folder may be missing because it is not mounted
                read_ms = 0 if unlisted.missing or unlisted.unnamed else begun_ms
                new = {path: reason for path, reason in unlisted.unnamed.items() if path not in self._unnamed}
                self._unnamed |= new.keys()
                _count_unlisted(linker.counts, replace(unlisted, unnamed=new))
                linker.run(files, read_ms)
        except (ObjectNotFound, StorageUnavailable) as error:
            # a follower outlives an outage
            self._trouble = str(error)
            self._out.note(f"{error}: trying again")
            linker.index.flush()
            linker.begin_again()

    def _tell(self) -> None:
        """Tell what a look has found that the looks before have not."""
        counts = self._linker.counts
        named, skipped = counts.damaged_first, counts.skipped_first
        # a file that may not be opened is tried at each look
        damaged = [damage for damage in named if damage not in self._named]
        counts.damaged -= len(named) - len(damaged)
        for damage in damaged:
            self._out.note(f"damaged: {damage_text(damage)}")
        for uri in counts.changed[self._changed :]:
            self._out.note(f"{uri} has other rows now, which are indexed, too")
        not_whole = counts.known_damaged + len(named)
        of_files = f"{counted(not_whole, 'file')} can't be read as a whole" if not_whole else None
        self._problems = [*self._linker.index.health()["problems"], *filter(None, [self._trouble, of_files])]
        self._show_progress()
        numbers = ("read_files", "rows", "entries", "skipped", "damaged")
        line = {"status": "following", **{name: getattr(counts, name) for name in numbers}, "problems": self._problems}
        if line != self._last and self._out.as_json:
            self._out.record(line | {"damaged_first": damaged, "skipped_first": skipped})
            self._out.flush()
        self._last, self._named, self._changed = line, named, len(counts.changed)
        self._damaged += damaged[: max(0, _MOST_NAMED - len(self._damaged))]
        self._skipped += skipped[: max(0, FIRST - len(self._skipped))]
        counts.damaged_first, counts.skipped_first = [], []
        for uris in (counts.held_back, counts.copies, counts.changed_while_read):
            # the next look tells
            uris.clear()

    def _show_progress(self) -> None:
        counts = self._linker.counts
        self._progress.update(counts.entries, "; ".join([f"{human_bytes(counts.read_bytes)} read", *self._problems]))


def _first_rows(files: Sequence[SourceFile], dialect: Dialect | None) -> tuple[SourceFile, RowFile] | None:
    """Return the first file that has rows, and its rows; None: no file has any. Raises the error if none is read."""
    from tiered_index.connectors.files.rows.batch import UNREADABLE
    from tiered_index.connectors.files.rows.forms import open_rows

    failure: TieredIndexError | None = None
    for file in files:
        try:
            rows = open_rows(file.file, file.size_bytes, file.head(), dialect)
        except UNREADABLE as error:
            failure = failure or error
            continue
        if rows.length_bound(0):
            return file, rows
    if failure is not None:
        raise failure
    return None


def _show_rows(
    session: Session, intake: IntakeOptions, files: Sequence[SourceFile], topic: str | None, mapping: RowMapping
) -> int:
    """Write the first rows as they would be indexed, and return the exit code: a finding if all of them are bad."""
    first = _first_rows(files, mapping.dialect)
    if first is None:
        raise InvalidArgument(f"{files[0].uri}: no file has a row")
    uri, rows = first[0].uri, first[1]
    entries, bad_rows = list[dict[str, Any]](), list[str]()
    for batch in rows.reading(mapping, 0, rows.length_bound(0)).batches(0):
        bad_rows = [f"{uri}, {bad.where}: {bad.problem}" for bad in batch.bad[:_SHOWN]]
        for bad_row in bad_rows:
            session.out.remark(f"bad: {bad_row}")
        of_entries, keys = batch.by_entry()
        of_rows = [topic] * len(batch.positions) if batch.topics is None else batch.topics.to_pylist()
        rows_of_entries = zip(of_entries.tolist(), keys.to_pylist(), strict=True)
        places = ((int(batch.positions[at]), int(batch.times_ms[at]), key, of_rows[at]) for at, key in rows_of_entries)
        entries = [
            {"topic": of_row, "file": uri, "row": row, "timestamp_ms": time_ms, "key": key}
            for row, time_ms, key, of_row in itertools.islice(sorted(places), _SHOWN * len(mapping.keys))
        ]
        break
    size_bytes = sum(file.size_bytes for file in files)
    document = {"status": "dry run", "files": len(files), "bytes": size_bytes, "format": rows.format}
    document |= {"time_unit": mapping.unit, **about_zone(mapping.zone, mapping.unclear_times)}
    session.out.answer(document | {"entries": entries, "bad": bad_rows})
    for text in mapping.unclear_times.texts("" if mapping.zone is None else mapping.zone.name):
        session.out.note(text)
    columns, position_unit = ("time", "topic", "key", "file", "row"), "byte" if rows.is_text else "row"
    cells = [
        (format_time(e["timestamp_ms"]), e["topic"], e["key"], uri, f"{position_unit} {e['row']:,}") for e in entries
    ]
    session.out.table(columns, cells, right=("row",))
    unit = f", times in {mapping.unit}" if mapping.unit else ""
    session.out.line(f"{counted(len(files), 'file')}, {human_bytes(size_bytes)}; the first one is {rows.format}{unit}")
    lacks = [f"each row at the beginning of {uri} is bad or has no key"] if bad_rows and not entries else []
    return none_indexed(session, intake, lacks)
