"""Files of messages as a source: the driver lists and opens them, tasks read parts of them as `ingest` reads files.

A part is some row groups of a Parquet file, or some bytes of a text. Folders named ``column=value`` give the files
below them a value for a field. Memory of a task: some blocks of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.config import IndexConfig
from tiered_index.connectors.files.listing import LinkedFiles, SourceFile, as_it_is, listed_files
from tiered_index.connectors.files.message_files import ColumnMessages, MessageFile, open_source
from tiered_index.connectors.files.rows.columns import CheckedMessage, columns_of
from tiered_index.connectors.files.rows.fields import Fields, MessageBatch
from tiered_index.connectors.files.rows.places import LocalFile, StoredFile, local_path
from tiered_index.connectors.files.table_folders import check_outside_tables
from tiered_index.errors import InvalidArgument
from tiered_index.spark.addresses import AddressOf
from tiered_index.spark.writing.census import HAS_KEY
from tiered_index.storage.opening import beside, split_parameters

# Rows of a part: enough for large blocks of a piece, and few enough for a cheap repetition of its task.
_LEAST_ROWS, _MOST_ROWS = 1 << 17, 1 << 21
# Bytes of a part of a local text
_PART_BYTES = 128 << 20
# Files that the driver opens at once
_OPENED = 16
_TEXTS = ("topic", "key")
# A folder's value for a null, as Hive and Spark write it
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class MessagePart:
    """The messages of a file that start at positions [begin, end): rows of Parquet, bytes of a text (None: all).

    `size_bytes` and `written` are the file's size and the time of its last change. `constants` are the values of fields
    from the names of its folders.
    """

    uri: str
    size_bytes: int
    written: str
    begin: int
    end: int | None
    constants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MessageFiles:
    """The parts of all files, and the number of messages of the Parquet files. Driver."""

    parts: Sequence[MessagePart]
    rows: int

    @classmethod
    def of(cls, sources: Sequence[str], fields: Fields, config: IndexConfig, cores: int = 1) -> MessageFiles:
        """List and open the files, for tasks on `cores`. Raises `InvalidArgument`, `CorruptFile`, as the storage."""
        with ExitStack() as stack, ThreadPoolExecutor(_OPENED) as pool:
            # by URI: each file once, though several sources may name it
            places: dict[str, tuple[SourceFile, str, dict[str, Any]]] = {}
            for source in sources:
                path = local_path(source)
                source = beside(source, config.storage) if path is None else source
                files = stack.enter_context(listed_files([source], config))
                if path is None:
                    check_stored_folder(source, files, config)
                parameters = "" if path is not None else split_parameters(source)[1]
                for file in files:
                    constants = _of_folders(source, file.uri, fields)
                    _, _, known = places.setdefault(file.uri, (file, file.uri + parameters, constants))
                    if known != constants:
                        raise InvalidArgument(
                            f"{file.uri} is in several sources, with different values of its folders: give it once"
                        )
            # only the numbers of rows are held: the metadata of many files would fill the driver's memory
            sizes = list(pool.map(lambda place: _sizes(place[0], place[2], fields), places.values()))
        rows = sum(sum(of_file.group_rows) for of_file in sizes if of_file.group_rows is not None)
        aim = max(_LEAST_ROWS, min(_MOST_ROWS, rows // max(1, 2 * cores)))
        parts = []
        for (file, uri, constants), of_file in zip(places.values(), sizes, strict=True):
            ends = [*_ends(of_file, aim)]
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                parts.append(MessagePart(uri, file.size_bytes, _written(file), begin or 0, end, constants))
        return cls(parts, rows)


def check_stored_folder(source: str, files: Sequence[SourceFile], config: IndexConfig) -> None:
    """Raise `InvalidArgument` for a folder or glob of a storage within a table, which listing does not find out.

    `files` are those of the source, at least.
    """
    if unquote(split_parameters(beside(source, config.storage))[0]) not in {unquote(file.uri) for file in files}:
        check_outside_tables(source, config)


def _below(source: str, uri: str) -> str | None:
    """Return the name of a file below a source, None if the source is the file or a pattern."""
    path = local_path(source)
    folder = unquote(path.as_uri() if path is not None else split_parameters(source)[0]).rstrip("/") + "/"
    name = unquote(uri)
    return name.removeprefix(folder) if name.startswith(folder) else None


def _of_folders(source: str, uri: str, fields: Fields) -> dict[str, Any]:
    """Return the values of fields in the names of a file's folders. Raises `InvalidArgument`."""
    pairs = [part.partition("=") for part in (_below(source, uri) or "").split("/")[:-1] if "=" in part]
    values = {unquote(column): unquote(value) for column, _, value in pairs}
    names = {_constant_of(name): column for name, column in fields.names.items() if column in values}
    for name, column in names.items():
        if values[column] == _NO_VALUE or not (name in _TEXTS or re.fullmatch(r"-?[0-9]+", values[column])):
            wanted = "text" if name in _TEXTS else "integer"
            raise InvalidArgument(f"{uri}: the folder {column}={values[column]} has no {wanted} for a field")
    return {name: values[column] if name in _TEXTS else int(values[column]) for name, column in names.items()}


def _constant_of(name: str) -> str:
    """Return the name of the constant that takes the place of a field's column."""
    return "key" if name == "keys" else name


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The rows of each row group of a Parquet file; the bytes of a text that tasks may share, None for another one."""

    group_rows: Sequence[int] | None
    shared_bytes: int | None


def _sizes(file: SourceFile, constants: Mapping[str, Any], fields: Fields) -> _Sizes:
    """Open a file on the driver. Raises `InvalidArgument` for a missing column, or one whose values were lost."""
    source = open_source(file.file, _with(fields, constants))
    _check_folders_apart(source, fields, constants)
    if not isinstance(source, ColumnMessages):
        return _Sizes(None, source.total if isinstance(source.place, LocalFile) else None)
    there = source.schema
    for name, column in fields.names.items():
        if column in there.names and name != "topic_id" and pa.types.is_null(there.field(column).type):
            raise InvalidArgument(
                f"column {fields.shown(name)} has no type in {file.file}, only nulls: write it with the type that it "
                "has in other files"
            )
    return _Sizes(source.group_rows, None)


def _check_folders_apart(source: MessageFile, fields: Fields, constants: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` if a file, or the first line of NDJSON, has the column of a value of its folders."""
    for name, column in fields.names.items():
        if column in source.unused and _constant_of(name) in constants:
            raise InvalidArgument(
                f"column {fields.shown(name)} is in {source.place} and in the name of its folder: pass the paths of "
                "the files, to read it from them, or a DataFrame"
            )


def _with(fields: Fields, constants: Mapping[str, Any]) -> Fields:
    return replace(fields, constants={**fields.constants, **constants}) if constants else fields


def _ends(sizes: _Sizes, aim: int) -> Iterator[int | None]:
    """Yield the ends of a file's parts: of row groups with about `aim` rows, or of a local plain text."""
    if sizes.group_rows is not None:
        yield from row_ends(sizes.group_rows, aim)
    else:
        yield from range(_PART_BYTES, sizes.shared_bytes or 0, _PART_BYTES)
        yield None


def row_ends(group_rows: Sequence[int], aim: int) -> Iterator[int]:
    """Yield the ends of parts of neighbouring row groups with about `aim` rows; 0 for a file without rows."""
    begin = held = 0
    for end in accumulate(group_rows):
        if held > begin and end - begin > aim:
            yield held
            begin = held
        held = end
    yield held


def _written(file: SourceFile) -> str:
    """Return the time of a file's last change; the rest of a stamp may differ between hosts."""
    return file.stamp.rpartition("-")[2]


@dataclass
class PartsReader:
    """Reads parts in tasks. One thread; `_last` is the batch that was yielded last."""

    fields: Fields
    config: IndexConfig
    address_of: AddressOf
    _last: tuple[str, MessageBatch] | None = field(default=None, init=False)

    def __call__(self, parts: Iterable[MessagePart], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the fields `names` (and `HAS_KEY`) of the entries of parts.

        With `HAS_KEY` a message without key is a row, too. Raises `InvalidArgument`, also for a file that was replaced.
        """
        with closing(LinkedFiles(self.config, lambda uri: self.address_of(uri).open(any_names=True))) as files:
            for part in parts:
                file = files.file(part.uri, part.size_bytes)
                if isinstance(file, StoredFile):
                    file = replace(file, uri=file.uri.partition("?")[0])
                _check_same(file, part)
                # columns that nobody wants are not read
                unread = dict.fromkeys({"queue_id", "offset", "size"} - {*names}, 0)
                fields = _with(self.fields, unread | {**part.constants})
                source = open_source(file, fields)
                is_counted = "key" not in names
                if is_counted and isinstance(source, ColumnMessages) and source.has_every_key(part.begin, part.end):
                    source = open_source(file, _with(fields, {"key": "any"}))
                for messages in source.part(part.begin, part.end):
                    self._last = str(file), messages
                    yield from _rows(messages, str(file), self.fields, names)
                if source.held_back_lines:
                    raise InvalidArgument(f"{file}: a quote in the last row is not closed: close it")
                if source.held_back_bytes:
                    raise InvalidArgument(
                        f"{file}: the last line has no newline, or an open quote, and may be cut: complete it"
                    )
                _check_same(file, part)

    def name_row(self, error: Exception) -> None:
        """Raise `InvalidArgument` that names the first wrong message of the last batch, if it has one."""
        where, messages = self._last or ("", None)
        for record in messages.records() if messages is not None else ():
            if record.message is None:
                raise InvalidArgument(f"{where}, {record.where}: {record.problem}") from error


def _check_same(file: LocalFile | StoredFile, part: MessagePart) -> None:
    now = as_it_is(file)
    if (now.size_bytes, _written(now)) != (part.size_bytes, part.written):
        raise InvalidArgument(f"{file} was replaced while it was read: use a copy that does not change")


def _rows(batch: MessageBatch, where: str, fields: Fields, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the entries of a batch. Raises `InvalidArgument`, which names the first wrong message."""
    columns, keyless = batch.columns, batch.keyless
    if columns is not None and pc.any(pc.equal(columns.column("key"), "")).as_py():
        columns = None  # an empty key of a list is none
    if columns is not None:
        yield _selected(columns, names)
    else:
        messages = list[CheckedMessage]()
        for record in batch.records():
            if record.message is None:
                raise InvalidArgument(f"{where}, {record.where}: {record.problem}")
            messages.append(record.message)
        # all messages of one batch have topic ids, or none has
        for with_ids in (True, False):
            some = [message for message in messages if (message.topic_id is not None) == with_ids and message.keys]
            if some:
                yield from (_selected(b, names) for b in pa.table(columns_of(some, fields.own)).to_batches())
        keyless = sum(not message.keys for message in messages)
    if keyless and HAS_KEY in names:
        nothing: dict[str, Any] = {name: pa.nulls(keyless) for name in names}
        yield pa.record_batch(nothing | {HAS_KEY: pa.repeat(False, keyless)})


def _selected(columns: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return the columns `names` that are there; `HAS_KEY` says whether there is a key."""
    if HAS_KEY in names:
        columns = columns.append_column(HAS_KEY, pc.is_valid(columns.column("key")))
    return columns.select([name for name in names if name in columns.schema.names])
