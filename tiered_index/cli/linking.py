"""The part of `tiered-index ingest` for files of any form, whose rows stay where they are."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiered_index.cli.ending import Ending
from tiered_index.cli.options import IntakeOptions, declare
from tiered_index.cli.output import counted, human_bytes, human_count, human_seconds
from tiered_index.cli.putting import Putting, none_indexed, show_put
from tiered_index.cli.session import Session
from tiered_index.errors import InvalidArgument, ObjectNotFound, StorageUnavailable
from tiered_index.errors import listed as listed_names
from tiered_index.types import format_time

if TYPE_CHECKING:
    from tiered_index.sources.linked import FileLinker
    from tiered_index.sources.listing import SourceFile
    from tiered_index.sources.rows import RowMapping

# seconds between two looks at files (a look that finds rows costs two records of the log); and those for
# which a copy of a file waits
_POLL_S, _COPIES_WAIT_S = 10.0, 60.0
# rows that a dry run shows
_SHOWN = 5
_files = partial(declare, rich_help_panel="Files of any form")


@dataclass(frozen=True)
class RowOptions:
    """Options of files whose rows are indexed where they are: ingest. `--key` is that of Kafka, too."""

    topic: str | None = _files(
        None,
        metavar="NAME",
        help="Topic of the rows, or field:PATH: the field with the topic of a row. With it, SOURCE is files of any "
        "form.",
    )
    time: str | None = _files(
        None, metavar="PATH", help="Time of a row: ISO 8601, a date, or a number of --time-unit. Default: timestamp."
    )
    time_unit: Literal["auto", "s", "ms", "us", "ns"] | None = _files(
        None, "--time-unit", help="Unit of times that are numbers. Default: auto, by the first one."
    )
    delimiter: str | None = _files(
        None, metavar="CHAR", help="Character between values of CSV. Default: comma, tab, ; or |, by the header."
    )
    quote: str | None = _files(None, metavar="CHAR", help='Quote around values of CSV, or none. Default: ".')

    def mapping(self, keys: Sequence[str] | None) -> tuple[str | None, RowMapping]:
        """Return the topic of all rows (None: a field has it) and the mapping. Raises `InvalidArgument`."""
        # imported here: other sources do not need it
        from tiered_index.sources.rows import TOPIC_FIELD, Dialect, RowMapping

        if self.topic is None:
            raise InvalidArgument("--topic is missing: it names the topic of the rows")
        unit = None if self.time_unit in (None, "auto") else self.time_unit
        path = self.topic.removeprefix(TOPIC_FIELD) if self.topic.startswith(TOPIC_FIELD) else None
        dialect = None
        if self.delimiter is not None or self.quote is not None:
            delimiter = "\t" if self.delimiter == "\\t" else self.delimiter
            dialect = Dialect(delimiter, {None: '"', "none": ""}.get(self.quote, self.quote or "none"))
        mapping = RowMapping(tuple(keys or ()), self.time or "timestamp", unit, path, dialect)  # type: ignore[arg-type]
        return (self.topic if path is None else None), mapping


def state_root(storage: str) -> Path:
    """Return the default root of an index: a folder of the user's state directory for its storage."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "tiered-index" / hashlib.blake2b(storage.encode(), digest_size=8).hexdigest()


def ingest_rows(
    session: Session,
    sources: Sequence[str],
    options: RowOptions,
    keys: Sequence[str] | None,
    intake: IntakeOptions,
    *,
    skip_bad: bool,
    dry_run: bool,
    follow: bool = False,
    poll_s: float | None = None,
    archive: bool = False,
    **settings: Any,
) -> int:
    """Index the rows of files, and return the exit code. Raises as `FileLinker.run` and `listed_files`."""
    # imported here: other sources do not need it
    from tiered_index.sources.linked import FileLinker
    from tiered_index.sources.listing import HEAD_BYTES, check_exists, listed_files
    from tiered_index.sources.table_folders import check_outside_tables

    if options.topic is None:
        check_exists(sources[0])
    topic, mapping = options.mapping(keys)
    config = session.config(**settings)
    if config.root is None and config.storage is not None and not dry_run:
        config = session.config(root=state_root(config.storage), **settings)
        session.out.note(f"--root is {config.root}")
        # readers of the storage do not know this root
        intake = replace(intake, wait=intake.wait or not follow)
    for source in sources:
        check_outside_tables(source, config)
    with contextlib.ExitStack() as stack:
        listed = partial(listed_files, sources, config, may_lack=follow)
        files = stack.enter_context(listed())
        if files and not (follow and len(files[0].head()) < HEAD_BYTES):
            _check_fields(files, mapping)
        if dry_run:
            return _show_rows(session, files, topic, mapping)
        putting = stack.enter_context(Putting.open(session, config, intake))
        with putting.progress("ingesting", sum(each.size_bytes for each in files)) as progress:
            linker = FileLinker(putting.index, topic, mapping, putting.patient(), skip_bad, archive=archive)
            linker.progress = lambda size: progress.update(size, f"{human_count(linker.counts.entries)} entries")
            if follow:
                _follow(session, linker, listed, _POLL_S if poll_s is None else poll_s)
            else:
                linker.run(files)
            counts = linker.counts
        for uri in counts.changed:
            session.out.note(f"{uri} has changed since it was indexed: its earlier rows can't be read any more")
        for uri in counts.changed_while_read:
            session.out.note(f"{uri} was changed while it was read: run the command again, which reads it as a whole")
        for uri in [] if follow else counts.held_back:
            session.out.note(f"{uri}: the last line has no newline, and may be cut. The next run reads it when it ends")
        if mapping.is_guessed:
            session.out.note(f"times are numbers of {mapping.unit}, by the first one; --time-unit sets another unit")
        taken_s = putting.elapsed_s
        putting.settle()
        lacks = [f"none of {counts.rows:,} rows has a key"] if counts.rows and not counts.entries else []
        document = putting.document(
            status="stopped" if follow else "complete",
            topic=options.topic,
            **asdict(counts),
            time_unit=mapping.unit,
            quarantined_first=linker.patient.quarantined,
            expired=linker.patient.expired,
            ingest_s=taken_s,
            entries_per_s=round(counts.entries / taken_s) if taken_s else None,
            nothing_indexed=lacks,
        )
    for bad in counts.skipped_first:
        session.out.remark(f"skipped: {bad['where']}: {bad['problem']}")
    known = f", {counts.known:,} known" if counts.known else ""
    shown = {
        "topic": options.topic,
        "files": f"{counts.read_files:,} read ({human_bytes(counts.read_bytes)}){known}",
        "rows": f"{counts.rows:,}",
        "entries": f"{counts.entries:,}",
        "without a key": f"{counts.keyless:,}" if counts.keyless else None,
        "skipped": f"{counts.skipped:,}" if counts.skipped else None,
        "expired": f"{document['expired']:,}" if document["expired"] else None,
        "rate": f"{human_count(document['entries_per_s'])} entries/s" if document["entries_per_s"] else None,
        "elapsed": human_seconds(document["elapsed_s"]),
    }
    show_put(session.out, document, shown)
    return 0 if follow else none_indexed(session, intake, lacks)


def _follow(
    session: Session, linker: FileLinker, listed: Callable[[], AbstractContextManager[list[SourceFile]]], poll_s: float
) -> None:
    """Index new rows until a signal. A file that moves while it is read, or a storage that is away, is tried again."""
    from tiered_index.sources.listing import FileMoved

    linker.copies_wait_s = max(_COPIES_WAIT_S, 3 * poll_s)
    with Ending() as ending:
        while not ending.event.is_set():
            before = len(linker.counts.changed)
            try:
                with listed() as files:
                    linker.run(files)
            except (FileMoved, ObjectNotFound, StorageUnavailable) as error:
                # a follower outlives an outage and files that move while they are read
                session.out.note(f"{error}: trying again")
                linker.index.flush()
                linker.begin_again()
            for uri in linker.counts.changed[before:]:
                session.out.note(f"{uri} has other rows now, which are indexed, too")
            linker.counts.held_back.clear()
            ending.event.wait(poll_s)


def _check_fields(files: Sequence[SourceFile], mapping: RowMapping) -> None:
    """Raise `InvalidArgument` that names all fields which the first file lacks, and the fields that it has."""
    from tiered_index.sources.rows import open_rows

    rows = open_rows(files[0].file, files[0].size_bytes, files[0].head(), mapping.dialect)
    if lacking := rows.lacking(mapping):
        fields = ", ".join(f"{option}{path}" for option, path in lacking)
        there = listed_names(rows.fields(), 30)
        raise InvalidArgument(f"no row at the beginning of {files[0].uri} has {fields}; the first one has {there}")


def _show_rows(session: Session, files: Sequence[SourceFile], topic: str | None, mapping: RowMapping) -> int:
    """Write the first rows as they would be indexed."""
    from tiered_index.sources.rows import open_rows

    rows = open_rows(files[0].file, files[0].size_bytes, files[0].head(), mapping.dialect)
    entries: list[dict[str, Any]] = []
    for batch in rows.reading(mapping, 0, rows.length_bound(0)).batches(0):
        for bad in batch.bad[:_SHOWN]:
            session.out.remark(f"bad: {files[0].uri}, {bad.where}: {bad.problem}")
        topics = [topic] * len(batch.keys) if batch.topics is None else batch.topics.to_pylist()
        places = zip(batch.positions.tolist(), batch.times_ms.tolist(), batch.keys.to_pylist(), topics, strict=True)
        entries = [
            {"topic": of_row, "file": files[0].uri, "position": position, "timestamp_ms": time_ms, "key": key}
            for position, time_ms, key, of_row in itertools.islice(sorted(places), _SHOWN * len(mapping.keys))
        ]
        break
    size_bytes = sum(each.size_bytes for each in files)
    document = {"status": "dry run", "files": len(files), "bytes": size_bytes, "format": rows.format}
    session.out.answer(document | {"time_unit": mapping.unit, "entries": entries})
    columns = ("time", "topic", "key", "position")
    session.out.table(columns, [(format_time(e["timestamp_ms"]), e["topic"], e["key"], e["position"]) for e in entries])
    unit = f", times in {mapping.unit}" if mapping.unit else ""
    session.out.line(f"{counted(len(files), 'file')}, {human_bytes(size_bytes)}; the first one is {rows.format}{unit}")
    return 0
