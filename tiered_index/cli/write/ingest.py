"""`tiered-index ingest SOURCE`: put messages into an index.

The index stores the durable position of a source with the entries. If a command is killed and run again, it puts only
the missing entries. The broker's folders are only read. One thread in addition to the index's own.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tiered_index.cli.options import given_columns, given_flags, refuse_others
from tiered_index.cli.others import groups_of, options_of
from tiered_index.cli.output import counted, human_count
from tiered_index.cli.session import Session
from tiered_index.cli.write.exported import ExportedFile, ingest_exported
from tiered_index.cli.write.follow import IngestReport, ingest_followed, show_ingested
from tiered_index.cli.write.options import ARCHIVE_SCHEME, FileOptions, IngestOptions
from tiered_index.cli.write.putting import Putting, none_indexed
from tiered_index.config import IndexConfig
from tiered_index.connectors.contract import SourceConnector, SourceRun, checked
from tiered_index.connectors.files.message_files import (
    ColumnMessages,
    MessageFile,
    messages_of,
    other_files,
    source_name,
)
from tiered_index.connectors.files.rows.batch import RowFile
from tiered_index.connectors.files.rows.columns import FIELDS, CheckedMessage, columns_of, own_value
from tiered_index.connectors.files.rows.fields import ROW_NUMBER, Fields, MessageBatch, Record
from tiered_index.connectors.files.rows.forms import rows_at
from tiered_index.connectors.files.rows.places import Stdin, local_path, opened_place
from tiered_index.connectors.files.spec import RowOptions
from tiered_index.connectors.files.table_folders import check_outside_tables
from tiered_index.connectors.follow import PatientPut
from tiered_index.connectors.options import pairs
from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec
from tiered_index.connectors.source import FIRST
from tiered_index.errors import InvalidArgument, listed
from tiered_index.format.schema import Schema
from tiered_index.service.index import IndexService
from tiered_index.service.root import Root
from tiered_index.service.write.validation import column_defaults
from tiered_index.storage.disk import Disk
from tiered_index.types import IndexItem


def item_type_named(name: str | None) -> type[IndexItem] | None:
    """Return the class of entries that ``module:Class`` names; the module may be in the working folder.

    Raises `InvalidArgument`.
    """
    if name is None:
        return None
    module, _, qualified = name.partition(":")
    sys.path.insert(0, folder := str(Path.cwd()))
    try:
        function = pkgutil.resolve_name(f"{module}:{qualified}") if module and qualified else None
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise InvalidArgument(f"--item-type {name} can't be loaded: {error}") from error
    finally:
        sys.path.remove(folder)
    if not (isinstance(function, type) and issubclass(function, IndexItem)):
        raise InvalidArgument(f"--item-type {name}: give module:Class, a class of entries (a subclass of IndexItem)")
    return function


def stored_schema(config: IndexConfig) -> Schema:
    """Return the schema of new entries: that of the settings or, without one, of the root's index."""
    if config.item_type is None and config.root is not None:
        marker = Root(config.root, Disk()).read_marker()
        if marker is not None:
            return marker.layout.schema
    return config.schema_of()


def given_fields(
    column: Sequence[str] | None, constant: Sequence[str] | None, schema: Schema, defaults: Mapping[str, Any]
) -> Fields:
    """Return the fields of the options --column and --constant. Raises `InvalidArgument`, which names the option."""
    own = {field.name: field for field in schema.caller_columns}
    known = (*FIELDS, "key", "topic_id", *own)
    for option, names in (("--column", pairs("--column", column)), ("--constant", pairs("--constant", constant))):
        if unknown := [name for name in names if name not in known and (option, name) != ("--column", "keys")]:
            raise InvalidArgument(
                f"{option}: {unknown[0]!r} is not a field of a message; these are {', '.join(known)}"
                f"{'' if own else '; --item-type declares more'}"
            )
    columns, constants = given_columns(column, constant, texts=("topic", "key", *own))
    values: dict[str, Any] = {
        n: own_value(own[n], value) if n in own else value if n in ("topic", "key") else int(value)
        for n, value in constants.items()
    }
    return Fields(columns, values, schema, defaults)


class RowNumbers:
    """Refuses row numbers as offsets in a queue that has entries already, if other files were read.

    Each file's rows count from 0, so an entry of one file would hide one of another.
    """

    def __init__(self, index: IndexService, others: Sequence[str]) -> None:
        self._index, self._others = index, others
        # the queues that had entries before this run, by topic
        self._queues: dict[str, set[int]] = {}

    def check(self, batch: MessageBatch) -> None:
        """Raise `InvalidArgument` if a message of the batch is in such a queue."""
        if batch.columns is not None:
            topics, queues = (batch.columns[name].to_pylist() for name in ("topic", "queue_id"))
            places = set(zip(topics, queues, strict=True))
        else:
            messages = [record.message for record in batch.records() if record.message is not None]
            places = {(message.topic, message.queue_id) for message in messages}
        for topic, queue_id in sorted(places, key=str):
            if queue_id in self._queues_of(topic):
                raise InvalidArgument(
                    f"queue {queue_id} of topic {topic!r} has entries, and {listed(self._others, 3)} was read before: "
                    f"row numbers of two files would hide entries of each other. Give this file a queue of its own "
                    f"(--constant queue_id=N), or --column offset=COLUMN with a number that is unique in its queue"
                )

    def _queues_of(self, topic: Any) -> set[int]:
        if topic not in self._queues:
            self._queues[topic] = offsets = set[int]()
            # the put refuses other topics
            if isinstance(topic, str) and topic:
                with self._index.export(topic, allow_partial=True) as batches:
                    for entries in batches:
                        offsets.update(entries["queue_id"].unique().to_pylist())
        return self._queues[topic]


def _check_first_message(config: IndexConfig, source: MessageFile) -> None:
    """Raise `InvalidArgument` for a bad first message before a new root is made, so that the run leaves no index."""
    if isinstance(source.place, Stdin) or config.root is None or Root(config.root, Disk()).read_marker() is not None:
        return
    batch = next(source.batches(0), None)
    if batch is not None and batch.columns is None:
        for record in itertools.islice(batch.records(), 1):
            if record.message is None:
                hint = "; to index rows of any form, pass --topic, --key and --time"
                raise InvalidArgument(f"{_bad(source, record)}{hint if 'is missing' in record.problem else ''}")


def _names_a_key(options: FileOptions) -> bool:
    """Return whether --column or --constant says what the key of a message is."""
    return any(
        text.partition("=")[0] in ("key", "keys") for text in (*(options.column or ()), *(options.constant or ()))
    )


def _bad(source: MessageFile, record: Record) -> InvalidArgument:
    return InvalidArgument(f"{source.place}, {record.where}: {record.problem}")


@dataclass
class FileIntake:
    """Puts one file of messages into one index."""

    index: IndexService
    source: MessageFile
    name: str | None
    skip_bad: bool
    patient: PatientPut
    messages: int = 0
    entries: int = 0
    skipped: int = 0
    position: int = 0
    # Skipped messages: counts by reason, and the first ones
    skipped_reasons: Counter[str] = field(default_factory=Counter)
    skipped_first: list[dict[str, str]] = field(default_factory=list)

    def take(self, batch: MessageBatch) -> None:
        """Put one batch. Raises `InvalidArgument` at a bad message, after putting the messages before it."""
        known, is_put = len(self.quarantined), False
        if batch.columns is not None:
            # a batch that is refused whole is put one by one, to find the bad message
            with contextlib.suppress(InvalidArgument):
                self._put(batch.columns, batch.end)
                self.messages += batch.messages
                is_put = True
        if not is_put:
            self._take_slowly(batch)
        if new := self.quarantined[known:]:
            self._name_places(batch, new)

    @property
    def quarantined(self) -> list[dict[str, Any]]:
        """Count as `PatientPut.quarantined` does; `where` is the place of each message."""
        return self.patient.quarantined

    def lacks(self) -> list[str]:
        """Return why none of the messages that were read was indexed; empty: some were, or there were none."""
        if self.entries or not (self.messages or self.skipped):
            return []
        fields = self.source.fields
        column = next((fields.columns[name] for name in ("key", "keys") if name in fields.columns), "key or keys")
        reasons = {f"have no {column}": self.messages, "are invalid, and were skipped": self.skipped}
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        return [f"of {self.messages + self.skipped:,} messages, {left_out}"]

    def to_dict(self) -> dict[str, Any]:
        """Return what was read and put, as fields of the command's document."""
        return {
            "source": str(self.source.place),
            "source_name": self.name,
            "position": self.position,
            "unit": self.source.unit,
            "messages": self.messages,
            "entries": self.entries,
            "dropped_columns": self.source.unused,
            "held_back": int(self.source.held_back_bytes > 0),
            "skipped": self.skipped,
            "skipped_reasons": dict(self.skipped_reasons.most_common()),
            "skipped_first": self.skipped_first,
            "expired": self.patient.expired,
            "quarantined_first": self.quarantined,
        }

    def _name_places(self, batch: MessageBatch, messages: list[dict[str, Any]]) -> None:
        for record in batch.records():
            for message in messages:
                if record.message is not None and all(getattr(record.message, n) == v for n, v in message.items()):
                    message["where"] = record.where
                    messages = [other for other in messages if other is not message]
                    break
            if not messages:
                return
        for message in messages:
            # Arrow may accept a value that the reading of single lines refuses
            message["where"] = f"{self.source.unit} up to {batch.end:,}"

    def _take_slowly(self, batch: MessageBatch) -> None:
        run: list[tuple[Record, CheckedMessage]] = []
        for record in batch.records():
            if record.message is None:
                if not self.skip_bad:
                    self._put_run(run, record.start)
                self._skip(record)
                continue
            # all messages of a batch have a topic id, or none
            if run and (run[0][1].topic_id is None) != (record.message.topic_id is None):
                self._put_run(run, record.start)
                run = []
            run.append((record, record.message))
        self._put_run(run, batch.end)

    def _skip(self, bad: Record) -> None:
        """Count a bad message. Raises `InvalidArgument` without `skip_bad`."""
        if not self.skip_bad:
            raise _bad(self.source, bad)
        self.skipped += 1
        self.skipped_reasons[bad.reason] += 1
        if len(self.skipped_first) < FIRST:
            self.skipped_first.append({"where": bad.where, "problem": bad.problem})

    def _put_run(self, run: list[tuple[Record, CheckedMessage]], end: int) -> None:
        try:
            self._put(columns_of([message for _, message in run], self.source.fields.own), end)
            self.messages += len(run)
        except InvalidArgument as error:
            if not run:
                raise
            if half := len(run) // 2:  # find the message whose topic id means another topic
                self._put_run(run[:half], run[half][0].start)
                self._put_run(run[half:], end)
            else:
                self._skip(replace(run[0][0], problem=f"refused by the index: {error}"))
                self._put_run([], end)

    def _put(self, columns: Any, end: int) -> None:
        self.entries += self.patient(columns, self.name, end if self.name is not None else None)
        self.position = end


def ingest(session: Session, *, sources: list[str], options: IngestOptions, others: Any = None) -> int:
    """Index messages of a source. `others` are options of connectors of other packages; None: none were given."""
    session.log_as(options.run.log_format)
    return Ingestion(session, tuple(sources), options, others).run()


@dataclass(frozen=True)
class Ingestion:
    """A run of `ingest`: its source and its options. `run` reads the source as what it is."""

    session: Session
    sources: tuple[str, ...]
    options: IngestOptions
    others: Any = None

    def run(self) -> int:
        """Put the messages of the source into the index, and return the exit code. Raises as the source does."""
        is_archive = self.source.startswith(ARCHIVE_SCHEME)
        spec = None if is_archive else CONNECTORS.of_address(self.source)
        for problem in CONNECTORS.problems:
            self.session.out.note(problem)
        # a folder may be a source of its own, and may have files
        has_files = spec is not None and (spec.claims is None or self._is_path())
        has_key = self.options.kafka.key is not None
        of_rows = self.options.of_rows
        if is_archive:
            # an archive can be read strictly, too
            of_rows = replace(of_rows, strict=False)
        if of_rows != RowOptions() or (has_files and (len(self.sources) > 1 or has_key)):
            return self._rows()
        if len(self.sources) > 1 and not (spec is not None and spec.several):
            raise InvalidArgument(f"give one SOURCE: {listed(self.sources, 3)} are several, which only files can be")
        if spec is None:
            return self._archive()
        if spec.claims is not None:
            return self._followed(spec)
        if (path := local_path(self.source)) is not None and not path.exists():
            raise InvalidArgument(f"{path}: No such file or directory")
        self._refuse_others("a file")
        if self.options.run.follow:
            raise InvalidArgument(f"--follow is for a RocketMQ store or Kafka, and {self.source} is a file")
        of_files = self.options.of_files
        item_type = item_type_named(of_files.item_type)
        config = self._config(item_type=item_type)
        with opened_place(self.source, config) as place:
            rows = rows_at(place)
            file = ExportedFile.of(rows)
            # lines of messages may have a member key_hash, too: then an option says what their key is
            if file is not None and not (file.about is None and _names_a_key(of_files)):
                return self._export(file)
            schema = stored_schema(config)
            fields = given_fields(of_files.column, of_files.constant, schema, column_defaults(item_type))
            return self._messages(rows, config, fields)

    @property
    def source(self) -> str:
        """The only source, unless they are files with --topic."""
        return self.sources[0]

    def _is_path(self) -> bool:
        """Return whether the source is a file or a folder that is there."""
        path = local_path(self.source)
        return path is not None and path.exists()

    def _rows(self) -> int:
        # imported here: other sources do not need it
        from tiered_index.cli.write.linking import RowIngestion

        options, run = self.options, self.options.run
        wrong: dict[str, Any] = {"--restart": run.restart, "--store-name": run.store_name}
        wrong |= {"--dry-run": run.dry_run} if run.follow else {}
        if flag := next((flag for flag, value in wrong.items() if value), None):
            raise InvalidArgument(f"leave {flag} out: it is not for rows of files (--topic)")
        groups: list[tuple[str, Any]] = [("a file of messages", replace(options.of_files, skip_bad=False))]
        groups += [("a RocketMQ store", options.rocketmq)]
        groups += [("Kafka", replace(options.kafka, key=None, drop_key=None, archive=False))]
        groups += groups_of(self.others)
        refuse_others(listed(self.sources, 3), "files with --topic", *groups)
        return RowIngestion(self.session, self.sources, options).run()

    def _config(self, **more: Any) -> IndexConfig:
        return self.session.config(**self.options.settings, **more)

    def _refuse_others(self, kind: str) -> None:
        """Raise `InvalidArgument` for an option that is for another kind of source."""
        options = self.options
        # an archive has the messages of a store
        of_store = options.rocketmq if kind != "an archive" else options.rocketmq.archiving
        groups: list[tuple[str, Any]] = [("a file", options.of_files), ("a RocketMQ store", of_store)]
        groups += [("Kafka", options.kafka), *groups_of(self.others)]
        refuse_others(self.source, kind, *groups)
        if options.run.dry_run and kind != "an archive":
            raise InvalidArgument(f"--dry-run is for archive:URI, or needs --topic, and {self.source} is {kind}")

    def _archive(self) -> int:
        # imported here: it reads the archives of all connectors
        from tiered_index.cli.write.archived import ingest_archive

        self._refuse_others("an archive")
        run, of_store = self.options.run, self.options.rocketmq.of_store
        wrong: dict[str, Any] = {"--follow": run.follow, "--restart": run.restart}
        wrong |= {"--preset": run.preset, "--hash": run.hash_rule}
        wrong |= {"--commitlog": of_store.commitlog, "--no-check-bodies": not of_store.check_bodies}
        if flags := [flag for flag, value in wrong.items() if value]:
            raise InvalidArgument(f"leave {flags[0]} out: it is not for {ARCHIVE_SCHEME}URI")
        return ingest_archive(self.session, self.source.removeprefix(ARCHIVE_SCHEME), self.options)

    def _followed(self, spec: ConnectorSpec) -> int:
        self._refuse_others(spec.title)
        session, options = self.session, self.options
        connector: SourceConnector = CONNECTORS.connector(spec.name)
        config = self._config(**({} if spec.offset_space is None else {"offset_space": spec.offset_space}))
        run = SourceRun(
            addresses=self.sources,
            options=options_of(spec, options.of_connectors, self.others),
            name=options.run.store_name,
            follow=options.run.follow,
            restart=options.run.restart,
            note=session.out.note,
            poll_s=options.run.poll,
        )
        with connector.watch(lambda problem: session.out.error("StorageUnavailable", problem)):
            if self._is_path():
                check_outside_tables(self.source, config)
            with checked(connector, run, config) as run:
                report = IngestReport(session, options.intake, run)
                return ingest_followed(partial(Putting.open, session, config, options.intake), connector, run, report)

    def _export(self, file: ExportedFile) -> int:
        named, of_files = self.options.run.store_name, given_flags(self.options.of_files)
        if flag := "--store-name" if named is not None else next(of_files, None):
            raise InvalidArgument(f"leave {flag} out: {self.source} is a file that `tiered-index export` wrote")
        return ingest_exported(self.session, file, self.options)

    def _messages(self, rows: RowFile, config: IndexConfig, fields: Fields) -> int:
        """Put the messages of a file, an object or stdin into the index of `config`, and return the exit code."""
        session, run, skip_bad = self.session, self.options.run, self.options.of_files.skip_bad
        if "offset" in fields.constants:
            session.out.note(
                "--constant offset: lookups return only the newest message of one key, topic and queue; use --column "
                f"offset=COLUMN with a number that is unique in its queue, or {ROW_NUMBER} for the row's number"
            )
        opened = messages_of(rows, fields)
        if isinstance(opened, ColumnMessages):
            check_outside_tables(self.source, config)
        if not skip_bad:
            _check_first_message(config, opened)
        with Putting.open(session, config, self.options.intake) as putting:
            index = putting.index
            if index.schema.caller_columns != fields.schema.caller_columns:
                names = ", ".join(field.name for field in index.schema.caller_columns) or "none"
                declares = "--item-type MODULE:CLASS declares them"
                raise InvalidArgument(f"the index has columns of its own ({names}): {declares}")
            known = index.durable_positions()
            name = source_name(opened, known, restart=run.restart, called=run.store_name)
            start = 0 if run.restart or name is None else index.durable_position(name) or 0
            taken = FileIntake(index, opened, name, skip_bad, putting.patient(is_outside=True), position=start)
            is_counted = fields.names.get("offset") == ROW_NUMBER and opened.counts_rows
            others = other_files(opened, known) if is_counted and not start and not run.restart else []
            numbers = RowNumbers(index, others) if others else None
            with putting.progress("ingesting", opened.total) as progress:
                for batch in opened.batches(start):
                    if numbers is not None:
                        numbers.check(batch)
                    taken.take(batch)
                    progress.update(taken.position, f"{human_count(taken.entries)} entries")
            if opened.held_back_lines:
                session.out.note(
                    f"{opened.place}: the last row ({counted(opened.held_back_bytes, 'byte')}, "
                    f"{counted(opened.held_back_lines, 'line')}) is held back: a quote in it is not closed. Close it, "
                    "and ingest again with --restart, or write the rest of the row"
                )
            elif opened.held_back_bytes:
                session.out.note(
                    f"{opened.place}: the last line ({counted(opened.held_back_bytes, 'byte')}) is held back: it has "
                    "no newline, or an open quote, and may be cut. Complete it, and ingest again"
                )
            if opened.unused:
                session.out.note(f"not indexed: {listed(opened.unused)} of {opened.place}")
            taken_s = putting.elapsed_s
            putting.settle()
            lacks = taken.lacks()
            timed = {"ingest_s": taken_s, "entries_per_s": round(taken.entries / taken_s) if taken_s else None}
            document = putting.document(
                status="complete", resumed_from=start, **taken.to_dict(), **timed, nothing_indexed=lacks
            )
        show_ingested(session.out, document)
        return none_indexed(session, self.options.intake, lacks)
