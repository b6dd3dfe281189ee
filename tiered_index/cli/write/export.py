"""`tiered-index export`: writes an index's entries as one table, or as RocketMQ's own index files.

The file gets its name when it is complete and durable. One thread; memory: some batches of entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.base.encoding import json_text
from tiered_index.cli.options import RangeOptions
from tiered_index.cli.output import counted, discard, human_count, unknown_topic, writing_stdout
from tiered_index.cli.session import Session
from tiered_index.cli.write.commands import Format
from tiered_index.errors import DiskFull, InvalidArgument, PartialAnswer
from tiered_index.format.keys.hashing import HashRule
from tiered_index.format.layout import HEADER_SIZE, ROCKETMQ, Layout
from tiered_index.format.schema import Schema
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.service.read.export import Export
from tiered_index.service.read.segments.places import RowPlaces
from tiered_index.service.reader import IndexReader
from tiered_index.storage.disk import Disk
from tiered_index.types import FilePlace

PLACE_COLUMNS = {"file": pa.string(), "row": pa.int64()}
"""The columns of entries of files, in addition to those of all entries."""
# Formats by file extension
_ENDINGS: dict[str, Format] = {".parquet": "parquet", ".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson"}
_STDOUT = Path("-")
# Rows of a row group and of one write
_ROWS = 1 << 18


_COLUMNS = ("topic_id", "queue_id", "offset", "size")
_SECONDS = 2**31 - 1


def rocketmq_layout(schema: Schema, rule: HashRule, slots: int | None, items: int | None) -> Layout:
    """Return the layout of RocketMQ's files for entries of a schema whose keys are hashed by `rule`.

    Raises `InvalidArgument` for entries that RocketMQ's format can't represent.
    """
    if schema.caller_columns:
        raise InvalidArgument(
            f"--format rocketmq has no column {schema.caller_columns[0].name!r}, which this index has: export as "
            "parquet or ndjson"
        )
    if rule == "both":
        raise InvalidArgument(
            "files of this range use both hash rules, but RocketMQ supports one: export a range with one rule"
        )
    slots = ROCKETMQ.slots if slots is None else slots
    items = ROCKETMQ.items if items is None else items
    return Layout(ROCKETMQ, ROCKETMQ.schema, slots, items, rule)


class RocketmqFiles:
    """Writes files into an existing folder; they are complete after `close`. Raises `OSError`."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._disk = Disk()
        self._begins: set[int] = set()
        self._table: UnsealedTable | None = None
        self._descriptor = -1

    def write_table(self, entries: pa.Table) -> None:
        """Add exported entries, sorted by time."""
        times_ms = entries.column("timestamp_ms").to_numpy()
        order = np.argsort(times_ms, kind="stable")
        times_ms = times_ms[order]
        columns = {name: entries.column(name).to_numpy()[order] for name in (*_COLUMNS, "key_hash")}
        done = 0
        while done < len(times_ms):
            table = self._writable(int(times_ms[done]))
            stop = min(done + table.free, len(times_ms))
            stop = min(stop, int(np.searchsorted(times_ms, table.begin_ms + 1000 * _SECONDS, "right")))
            part = {name: values[done:stop] for name, values in columns.items()}
            prepared = table.prepare(part["key_hash"], times_ms[done:stop], part)
            position = self._layout.entry_position(prepared.first)
            self._disk.pwrite(self._descriptor, memoryview(prepared.entries.view(np.uint8)), position)  # type: ignore[arg-type]
            table.commit(prepared)
            done = stop

    def _writable(self, time_ms: int) -> UnsealedTable:
        table = self._table
        if table is not None and table.free and abs(time_ms - table.begin_ms) <= 1000 * _SECONDS:
            return table
        self.close()
        while time_ms in self._begins:
            time_ms += 1000
        self._begins.add(time_ms)
        self._descriptor = self._disk.create(self._folder / f"{time_ms}")
        self._table = table = UnsealedTable(self._layout, time_ms)
        return table

    def close(self) -> None:
        """Write header and slot table of the last file."""
        if self._table is None:
            return
        table, self._table = self._table, None
        with contextlib.ExitStack() as last:
            last.callback(self._disk.close, self._descriptor)
            self._disk.truncate(self._descriptor, self._layout.unsealed_size)
            self._disk.pwrite(self._descriptor, table.header().pack(), 0)
            at = HEADER_SIZE
            for piece in table.slot_pieces():
                self._disk.pwrite(self._descriptor, piece, at)
                at += len(piece)
            self._disk.sync(self._descriptor)


class NdjsonWriter:
    """Writes a JSON object a line, in printable ASCII, with bytes as hexadecimal text."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink

    def write_table(self, table: pa.Table) -> None:
        """Write the rows."""
        # `ingest` reads NaN back, and refuses null
        self._sink.writelines(f"{json_text(row, allow_nan=True)}\n".encode() for row in table.to_pylist())

    def close(self) -> None:
        """Leave the file open: its opener closes it."""


def export(
    session: Session,
    *,
    out: Path,
    form: Format | None,
    topic: list[str] | None,
    slots: int | None,
    items: int | None,
    within: RangeOptions,
) -> int:
    """Export the entries of an index as one consistent snapshot."""
    form = form or _format_of(out)
    if out == _STDOUT and (form == "rocketmq" or session.out.as_json):
        wrong = "--json" if session.out.as_json else "--format rocketmq"
        raise InvalidArgument(f"{wrong} can't be used with --out -, which writes entries to stdout: give a file")
    if (slots is not None or items is not None) and form != "rocketmq":
        raise InvalidArgument(f"{'--items' if slots is None else '--slots'} needs --format rocketmq")
    config = session.config()
    started_s = time.monotonic()
    chosen = topic, within.begin, within.end
    with session.open_reader(config) as reader, reader.export(*chosen, allow_partial=True) as entries:
        lost = [file.lost_file(None) for file in reader.log_state.lacking.values() if file.lacks_entries]
        places = _places_of(reader) if form != "rocketmq" else None
        schema = _schema_of(entries, form, with_places=places is not None)
        with _made(out, form, entries, schema, slots, items) as writer:
            with session.out.progress("exporting", entries.most_entries) as progress:
                for table in _tables(entries):
                    writer.write_table(table if form == "rocketmq" else _shaped(table, schema, places))
                    progress.update(entries.entries, f"{human_count(entries.entries)} entries")
    unknown = [name for name in dict.fromkeys(topic or ()) if name not in entries.known_topics]
    if out == _STDOUT:
        session.out.note(f"{counted(entries.entries, 'entry', 'entries')}, checksum {entries.checksum:016x}")
        for name in unknown:
            session.out.note(unknown_topic(name, entries.known_topics))
        if lost:
            session.out.note(_without(lost))
        return _tell_missing(session, entries)
    size_bytes = sum(path.stat().st_size for path in (out.iterdir() if out.is_dir() else (out,)))
    document: dict[str, Any] = {
        "status": "partial" if entries.missing else "complete",
        "out": str(out),
        "format": form,
        "entries": entries.entries,
        "checksum": f"{entries.checksum:016x}",
        "bytes": size_bytes,
        "columns": [] if form == "rocketmq" else schema.names,
        "lost": lost,
        **{name: getattr(entries, name) for name in ("log_number", "hash", "not_asked", "missing")},
        "unknown_topics": unknown,
        "elapsed_s": round(time.monotonic() - started_s, 3),
    }
    session.out.show(document, without=("status", "columns", "hash", "lost", "not_asked", "missing", "unknown_topics"))
    for name in unknown:
        session.out.line(unknown_topic(name, entries.known_topics))
    if lost:
        session.out.line(_without(lost))
    return _tell_missing(session, entries)


def _tell_missing(session: Session, entries: Export) -> int:
    """Print why only the root was exported, if so; return the exit code."""
    if entries.not_asked is not None:
        session.out.note(f"only the root's files are exported: the storage could not be read: {entries.not_asked}")
    for name in entries.missing:
        session.out.note(f"MISSING {name}: only the storage has it")
    return PartialAnswer.exit_code if entries.missing else 0


def _without(lost: Sequence[object]) -> str:
    return f"without the entries of {counted(len(lost), 'lost file')}"


def _format_of(out: Path) -> Format:
    """Return the format of a file by its name. Raises `InvalidArgument` for one that an export can't have."""
    if out == _STDOUT:
        return "ndjson"
    ending = out.suffix.lower()
    if ending in (".gz", ".zst", ".bz2", ".xz"):
        raise InvalidArgument(f"--out {out}: an export is not compressed; write `--out - | gzip > {out}`")
    if ending in (".csv", ".arrow", ".feather"):
        raise InvalidArgument(f"--out {out}: an export is Parquet or NDJSON, which other tools turn into {ending}")
    return _ENDINGS.get(ending, "parquet")


def _tables(entries: Export) -> Iterator[pa.Table]:
    """Yield the batches of an export as tables of one chunk; join small batches."""
    held: list[pa.RecordBatch] = []
    for batch in entries:
        held.append(batch)
        if sum(map(len, held)) >= _ROWS:
            yield pa.Table.from_batches(held).combine_chunks()
            held = []
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def _places_of(reader: IndexReader) -> RowPlaces | None:
    """Return the places of rows of files; None: the index has no files."""
    archive = reader.segment_archive
    return (
        RowPlaces(lambda: [archive.state()], lambda: {None: archive}, reader.topic_document)
        if archive.segments().have_links
        else None
    )


def _schema_of(entries: Export, form: Format, *, with_places: bool) -> pa.Schema:
    """Return the columns of the rows that a file of a form has; `with_places`: also file and row."""
    schema = entries.schema
    if form == "parquet":
        at = schema.get_field_index("timestamp_ms")
        schema = schema.set(at, pa.field("timestamp_ms", pa.timestamp("ms", "UTC")))
    for name, kind in PLACE_COLUMNS.items() if with_places else ():
        if name not in schema.names:
            schema = schema.append(pa.field(name, kind))
    return schema


def _shaped(table: pa.Table, schema: pa.Schema, places: RowPlaces | None) -> pa.Table:
    """Return exported entries with the columns of a schema of `_schema_of`."""
    if places is not None:
        of_rows: list[FilePlace | None] = [None] * len(table)
        topics = table["topic"].to_numpy(zero_copy_only=False)
        for topic in table["topic"].unique().to_pylist():
            at = np.flatnonzero(topics == topic)
            queues, offsets = (table[name].to_numpy()[at].tolist() for name in ("queue_id", "offset"))
            of_topic = None if topic is None else places.of(topic, [None] * len(at), queues, offsets)
            for number, place in zip(at.tolist(), of_topic or (), strict=of_topic is not None):
                of_rows[number] = place
        cells = {"file": [place and place.file for place in of_rows], "row": [place and place.row for place in of_rows]}
        for name, kind in PLACE_COLUMNS.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array(cells[name], kind))
    return table.cast(schema)


@contextlib.contextmanager
def _made(
    out: Path, form: Format, entries: Export, schema: pa.Schema, slots: int | None, items: int | None
) -> Iterator[Any]:
    """Yield a writer; after the block the output is complete, or removed. Raises `InvalidArgument`, `DiskFull`."""
    if out == _STDOUT:
        with writing_stdout():
            with contextlib.closing(table_writer(form, sys.stdout.buffer, schema)) as writer:
                try:
                    yield writer
                except BaseException:
                    # closing writes the end of a Parquet file, so that a part would look whole
                    discard(sys.stdout)
                    raise
            sys.stdout.buffer.flush()
        return
    check_new(out, "an export is written to a name of its own", is_folder=form == "rocketmq")
    with made_whole(out) as partial, contextlib.ExitStack() as stack:
        if form == "rocketmq":
            layout = rocketmq_layout(entries.entry_schema, entries.hash, slots, items)
            partial.mkdir()
            yield stack.enter_context(contextlib.closing(RocketmqFiles(partial, layout)))
        else:
            sink = stack.enter_context(partial.open("wb"))
            yield stack.enter_context(contextlib.closing(table_writer(form, sink, schema)))


def table_writer(form: Format, sink: IO[bytes], schema: pa.Schema) -> Any:
    """Return a writer of tables with `write_table` and `close`; the caller closes `sink`."""
    if form == "parquet":
        return pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True)
    return NdjsonWriter(sink)


def check_new(out: Path, own: str, *, is_folder: bool = False) -> None:
    """Raise `InvalidArgument` if `out` exists, its folder is missing, or a folder has the temporary name of the file.

    `own` is the reason why `out` must not exist.
    """
    if out.exists():
        raise InvalidArgument(f"--out {out} exists already: {own}")
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out {out}: there is no folder {out.parent}")
    if (partial := _partial(out)).is_dir() and not is_folder:
        raise InvalidArgument(f"--out {out}: the temporary file {partial} is a folder: move it, or choose another name")


def _partial(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


@contextlib.contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder. After the block it is renamed to `out`, durably.

    If the block fails, it is removed. Raises `DiskFull`, and `InvalidArgument` if another command writes `out`.
    """
    with _alone(out), _renamed(out) as partial:
        yield partial


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold a lock on the name `out`: a second command would take the place of the first one's temporary file."""
    path = out.with_name(f".{out.name}.lock")
    try:
        lock = path.open("wb")
    except OSError as error:
        raise DiskFull(f"--out {out} can't be written: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the command that held it may have deleted it since it was opened
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                raise BlockingIOError
        except BlockingIOError:
            raise InvalidArgument(f"--out {out}: another command is writing it") from None
        except OSError:
            pass  # the file system has no locks
        try:
            # another command may have written it since it was checked
            if out.exists():
                raise InvalidArgument(f"--out {out} exists already")
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _renamed(out: Path) -> Iterator[Path]:
    partial, disk = _partial(out), Disk()
    try:
        _remove(partial)
        yield partial
        if partial.is_dir():
            disk.sync_folder(partial)
        else:
            descriptor = disk.open_rw(partial)
            try:
                disk.sync(descriptor)
            finally:
                disk.close(descriptor)
        disk.rename(partial, out)
        disk.sync_folder(out.parent)
    except OSError as error:
        raise DiskFull(f"--out {out} can't be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # must not hide the first error
            _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
