"""The part of `tiered-index ingest` for files of any form, whose rows stay where they are."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tiered_index.base.units import format_time
from tiered_index.cli.exit_codes import DONE, FINDING
from tiered_index.cli.options import IntakeOptions
from tiered_index.cli.output import ProgressDisplay, counted, human_bytes, human_count, human_seconds
from tiered_index.cli.session import Session
from tiered_index.cli.write.follow import Ended, IngestReport, ingest_followed
from tiered_index.cli.write.options import IngestOptions
from tiered_index.cli.write.putting import Putting, none_indexed, show_put
from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import SourceConnector, SourceRun, checked
from tiered_index.connectors.files.added_keys import KeyCounts
from tiered_index.connectors.files.damaged import damage_text, known_damage
from tiered_index.connectors.files.first_rows import CheckedFiles, first_rows
from tiered_index.connectors.files.rows.zone import TimeZone, UnclearTimes
from tiered_index.connectors.files.source import FileSource
from tiered_index.connectors.files.spec import FilesOptions
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.registry import CONNECTORS, FILES
from tiered_index.connectors.source import FIRST, Source
from tiered_index.errors import CorruptFile, InvalidArgument, NotAnIndex
from tiered_index.errors import listed as listed_names

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
        self.intake, self.follow = options.intake, options.run.follow

    def run(self) -> int:
        """Index the rows, and return the exit code. Raises as `FileLinker.run` and `listed_files`."""
        options, config = self.ingest_options, self._config()
        connector: SourceConnector = CONNECTORS.connector(FILES)
        run = SourceRun(
            addresses=tuple(self.sources),
            options=options.files,
            follow=self.follow,
            note=self.session.out.note,
            poll_s=options.run.poll,
        )
        with checked(connector, run, config) as run:
            if options.run.dry_run:
                return _show_rows(self.session, self.intake, run.checked)
            report = RowsReport(self.session, self.intake, run)
            return ingest_followed(partial(self._opened, config), connector, run, report)

    @contextlib.contextmanager
    def _opened(self, config: IndexConfig) -> Iterator[Putting]:
        """Open the index. The error of a default root whose storage is empty says how to start again."""
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


class RowsReport(IngestReport):
    """Shows a run that reads files."""

    def __init__(self, session: Session, intake: IntakeOptions, run: SourceRun) -> None:
        super().__init__(session, intake, run)
        self._options: FilesOptions = run.options
        self._last: dict[str, Any] = {}

    def progress(self, source: Source) -> tuple[str, int | None]:
        """As `IngestReport.progress`. The files of a follower grow."""
        return ("entries", None) if self.follow else ("ingesting", self.run.checked.size_bytes)

    def begin(self, follower: Follower, progress: ProgressDisplay) -> None:
        """As `IngestReport.begin`, also while files are read."""
        source = _source_of(follower)

        def show() -> None:
            counts, entries = source.linker.counts, source.linker.counts.entries
            if self.follow:
                problems = [*follower.index.health()["problems"], *source.problems]
                progress.update(entries, "; ".join([f"{human_bytes(counts.read_bytes)} read", *problems]))
            else:
                progress.update(counts.read_bytes, f"{human_count(entries)} entries")

        source.progress, follower.status = show, self._status

    def _status(self, follower: Follower) -> None:
        """Tell what looks have found since the last call: on the progress bar, and by a line if it has changed."""
        source = _source_of(follower)
        source.progress()
        counts, problems = source.linker.counts, [*follower.index.health()["problems"], *source.problems]
        numbers = ("read_files", "rows", "entries", "skipped", "damaged")
        line = {"status": "following", **{name: getattr(counts, name) for name in numbers}, "problems": problems}
        if line != self._last and self.out.as_json:
            damaged, skipped = source.take_new()
            self.out.record(line | {"damaged_first": damaged, "skipped_first": skipped})
            self.out.flush()
        self._last = line

    def tell(self, follower: Follower) -> None:
        """Note what a user must know of the files."""
        source = _source_of(follower)
        linker, unlisted = source.linker, source.unlisted
        counts, out = source.counts_of_files, self.out
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
            for text in known_damage(counts.known_damaged, counts.known_damaged_first):
                out.note(text)
            tell_missing(self.session, unlisted.missing)
            if empty := [source for source in unlisted.empty if source not in unlisted.missing]:
                out.note(f"no file that has data: {listed_names(empty, 3)}")
        if counts.vanished:
            out.note(f"{counted(counts.vanished, 'file')} vanished before they were read")
        for key, lacking in counts.lacking.items():
            out.note(f"--key {key}: {lacking:,} of {counted(counts.read_files, 'file')} have no row with this key")
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
            if self._options.rows.time_zone is None:
                out.note(f"times without a zone are of {zone}, as in an earlier run; --time-zone sets another zone")
            elif before not in (None, zone) and not counts.reread:
                out.note(f"times without a zone are of {zone} from now on. Earlier rows keep theirs, read in {before}")
            for text in mapping.unclear_times.texts(zone):
                out.note(text)

    def document(self, putting: Putting, follower: Follower, ended: Ended) -> dict[str, Any]:
        """As `IngestReport.document`."""
        source = _source_of(follower)
        linker, counts = source.linker, source.counts_of_files
        return putting.document(
            status="stopped" if self.follow else "complete",
            topic=self._options.rows.topic,
            **source.counts(),
            time_unit=linker.mapping.unit,
            **about_zone(linker.mapping.zone, linker.mapping.unclear_times),
            quarantined_first=follower.put.quarantined,
            expired=follower.put.expired,
            ingest_s=ended.taken_s,
            entries_per_s=round(counts.entries / ended.taken_s) if ended.taken_s else None,
            nothing_indexed=source.lacks(counts.rows, 0, counts.keyless),
        )

    def show(self, document: dict[str, Any], follower: Follower) -> int:
        """As `IngestReport.show`."""
        out, skip_bad = self.out, self._options.skip_bad
        counts = _source_of(follower).counts_of_files
        for damage in counts.damaged_first[:FIRST]:
            out.note(f"damaged: {damage_text(damage)}")
        say = out.remark if skip_bad else out.note
        for bad in counts.skipped_first:
            say(f"skipped: {bad['where']}: {bad['problem']}")
        known = f", {counts.known:,} known" if counts.known else ""
        shown = {
            "topic": document["topic"],
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
        if counts.damaged or (counts.skipped and not skip_bad):
            return FINDING
        done = DONE if self.follow else none_indexed(self.session, self.intake, document["nothing_indexed"])
        return FINDING if counts.keys.unread and not self.follow else done


def _source_of(follower: Follower) -> FileSource:
    assert isinstance(follower.source, FileSource)
    return follower.source


def _reread(keys: KeyCounts) -> str:
    """Return what a run did for added keys, as text."""
    bad = f", {counted(keys.skipped, 'bad row')} left out" if keys.skipped else ""
    return f"{counted(keys.entries, 'entry', 'entries')} of {counted(keys.files, 'known file')} read again{bad}"


def about_zone(zone: TimeZone | None, unclear: UnclearTimes) -> dict[str, Any]:
    """Return the fields of a document about times without a zone."""
    name = None if zone is None else zone.name
    return {"time_zone": name, "doubled_times": unclear.doubled, "missing_times": unclear.missing}


def tell_missing(session: Session, missing: Sequence[str]) -> None:
    """Note the sources that are the path of no file."""
    if missing:
        session.out.note(f"no such file or folder: {listed_names(missing, 10)}")


def _show_rows(session: Session, intake: IntakeOptions, checked: CheckedFiles) -> int:
    """Write the first rows as they would be indexed, and return the exit code: a finding if all of them are bad."""
    files, topic, mapping = checked.files, checked.topic, checked.mapping
    first = first_rows(files, mapping.dialect)
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
    size_bytes = checked.size_bytes
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
    lacks = [f"each row at the start of {uri} is bad or has no key"] if bad_rows and not entries else []
    return none_indexed(session, intake, lacks)
