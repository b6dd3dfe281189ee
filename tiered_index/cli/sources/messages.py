"""Messages as files have them: which column is which field, what is wrong with one, their entries as columns; and where
the bytes of a source are: a local file, an object of a storage, or standard input. One thread.

A message has its keys in `keys`, a list of text, or in `key`, one key or a list; of both, `keys` counts.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import select
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any, cast
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from tiered_index.cli.options import given_columns, pairs
from tiered_index.cli.output import listed
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, InvalidArgument, ObjectNotFound
from tiered_index.format.schema import ROCKETMQ_SCHEMA, Schema
from tiered_index.service.answers.incoming import (
    FIELDS,
    Message,
    check_names,
    checked_message,
    is_list,
    is_text,
    own_value,
    times_ms,
)
from tiered_index.service.answers.validation import milliseconds
from tiered_index.storage.base import ObjectReader, Storage
from tiered_index.storage.disk import absolute_path

STDIN = "-"
# One request fills so much, where less is asked for.
_BUFFER_BYTES = 1 << 20
# So long a block is gathered from a stream.
_MOMENT_S = 0.2


@dataclass(frozen=True)
class LocalFile:
    """One file of the local disk. Raises `InvalidArgument` where it can't be opened."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise InvalidArgument(f"{self.path}: {error.strerror}") from error

    ranges = open


@dataclass(frozen=True)
class StoredFile:
    """One object; `uri` names it, without parameters."""

    uri: str
    storage: Storage
    name: str
    size_bytes: int

    def __str__(self) -> str:
        return self.uri

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable, buffered for reading on and on."""
        return io.BufferedReader(self._reader(), _BUFFER_BYTES)

    def ranges(self) -> AbstractContextManager[IO[bytes]]:
        """Return the bytes, seekable; each read is one request."""
        return cast(IO[bytes], self._reader())

    def _reader(self) -> ObjectReader:
        return ObjectReader(self.storage, self.name, self.size_bytes)


class Stdin:
    """What comes on standard input, gzipped or not: read once, so that nothing of it can be continued."""

    def __init__(self) -> None:
        if sys.stdin is None:
            raise InvalidArgument("stdin is closed")
        raw = cast(io.BufferedReader, sys.stdin.buffer)
        # what unpacks must not wait for whole buffers either
        packed = cast(IO[bytes], SimpleNamespace(read=raw.read1))
        self._stream: Any = gzip.GzipFile(fileobj=packed, mode="rb") if raw.peek(2)[:2] == b"\x1f\x8b" else raw

    def __str__(self) -> str:
        return "stdin"

    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Return the one stream; it stays open."""
        return contextlib.nullcontext(self._stream)

    def read(self, size_bytes: int) -> bytes:
        """Return what comes within a moment, so that nothing waits for a whole block; empty at the end only."""
        until_s = time.monotonic() + _MOMENT_S
        pieces = [self._stream.read1(size_bytes)]
        left = size_bytes - len(pieces[0])
        while pieces[-1] and left and select.select([sys.stdin], [], [], max(0, until_s - time.monotonic()))[0]:
            pieces.append(self._stream.read1(left))
            left -= len(pieces[-1])
        return b"".join(pieces)

    def head(self) -> bytes:
        """Return the first bytes, which stay to be read; empty at the end of the stream."""
        try:
            return bytes(self._stream.peek(1))
        except (EOFError, OSError, zlib.error) as error:
            raise CorruptFile(str(self), f"damaged gzip file: {error}") from error


Place = LocalFile | StoredFile | Stdin


def local_path(source: str) -> Path | None:
    """Return the absolute path of a path or a `file://` URI, None for any other source. Raises `InvalidArgument`."""
    if source == STDIN:
        return None
    if source.startswith("file://"):
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise InvalidArgument(f"file://{parts.netloc}/... is not absolute: write file:///dir/file")
        return absolute_path(unquote(parts.path))
    return None if "://" in source else absolute_path(source)


@contextlib.contextmanager
def opened_place(source: str, config: IndexConfig) -> Iterator[Place]:
    """Yield what `source` names. Raises `InvalidArgument`, and as the storage."""
    path = local_path(source)
    if path is not None:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InvalidArgument(f"{path} is a pipe or a device, which is read only once: give - and < {path}")
        yield LocalFile(path)
        return
    if source == STDIN:
        yield Stdin()
        return
    uri, mark, parameters = source.partition("?")
    folder, _, name = uri.rpartition("/")
    if not name or folder.endswith(("/", ":")):
        raise InvalidArgument(f"{uri} is no file: give the URI of one, such as s3://bucket/day.ndjson")
    with contextlib.closing(config.open_storage(folder + mark + parameters)) as storage:
        try:
            size_bytes = storage.head(name).size_bytes
        except ObjectNotFound as error:
            raise InvalidArgument(f"{uri}: no such object") from error
        yield StoredFile(uri, storage, name, size_bytes)


def json_object(line: bytes, where: str = "") -> dict[str, Any]:
    """Return a line of NDJSON. Raises `InvalidArgument`, whose text begins with `where`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{where}not a JSON object: {line[:60]!r}")
    return found


_KEYS = ("key", "keys")
ROW_NUMBER = "rownumber"
"""The column of a source that is the row's number, from 0, unless it has one of that name."""


@dataclass(frozen=True)
class Fields:
    """Which column of a source is a field (by default the one of its name), and fields that all messages have."""

    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    # what the entries of the index are, with its own columns
    schema: Schema = ROCKETMQ_SCHEMA
    # values of own columns that a source may lack
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def given(
        cls,
        column: Sequence[str] | None,
        constant: Sequence[str] | None,
        schema: Schema = ROCKETMQ_SCHEMA,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> Fields:
        """Return what the options --column and --constant say. Raises `InvalidArgument` naming the option."""
        own = {each.name: each for each in schema.caller_columns}
        known = (*FIELDS, "key", "topic_id", *own)
        for option, names in (("--column", pairs("--column", column)), ("--constant", pairs("--constant", constant))):
            if unknown := [name for name in names if name not in known and (option, name) != ("--column", "keys")]:
                raise InvalidArgument(
                    f"{option}: {unknown[0]!r} is no field of a message; these are {', '.join(known)}"
                    f"{'' if own else '; --item-type declares more'}"
                )
        columns, constants = given_columns(column, constant, texts=("topic", "key", *own))
        values: dict[str, Any] = {
            n: value if n in ("topic", "key") else int(value) for n, value in constants.items() if n not in own
        }
        for name in constants.keys() & own.keys():
            values[name] = own_value(own[name], constants[name])
        return cls(columns, values, schema, defaults)

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The names of the index's own columns."""
        return tuple(column.name for column in self.schema.caller_columns)

    @cached_property
    def names(self) -> dict[str, str]:
        """The columns by field, those of constants left out; a column given for the key is the only one for keys."""
        chosen = [name for name in _KEYS if name in self.columns or name in self.constants]
        wanted = (*FIELDS, *(chosen or _KEYS), "topic_id", *self.own)
        return {name: self.columns.get(name, name) for name in wanted if name not in self.constants}

    def fingerprint(self) -> str:
        """Return ``/`` and a hash of what differs from columns of the fields' names; nothing where nothing does."""
        said = [{n: c for n, c in self.columns.items() if n != c}, dict(self.constants)]
        text = json.dumps(said, sort_keys=True, default=bytes.hex).encode()
        return f"/{hashlib.sha256(text).hexdigest()[:16]}" if any(said) else ""

    def check_columns(self, there: Sequence[str], whose: str) -> None:
        """Raise `InvalidArgument` where a source of rows lacks a column or has several for the keys."""
        check_names(there, self.names.values(), whose)
        for name in (*FIELDS, *self.own):
            needed = name not in self.defaults or name in self.columns
            if needed and name in self.names and self.names[name] not in (*there, ROW_NUMBER):
                raise InvalidArgument(
                    f"{whose}: column {self.shown(name)} is missing; it has {listed(there)} (--column "
                    f"{name}=COLUMN says which one it is, --constant {name}=VALUE gives all messages one)"
                )
        keys = [name for name in _KEYS if name in self.names and self.names[name] in there]
        if len(keys) != 1 and "key" not in self.constants:
            given = [name for name in _KEYS if name in self.columns]
            wanted = self.shown(given[0]) if given else "'key' (text) or a column 'keys' (list of text)"
            raise InvalidArgument(
                f"{whose}: give a column {wanted}; it has {listed(there)} (--column key=COLUMN says which one it is)"
            )

    def shown(self, name: str) -> str:
        """Return what errors call a field."""
        column = self.columns.get(name, name)
        return repr(name) if column == name else f"{column!r} ({name})"

    def checked(self, fields: Mapping[str, Any]) -> Message:
        """Return a message of plain values. Raises `InvalidArgument` naming the field as a source has it."""
        return checked_message(fields, self.shown, "key" if "key" in self.columns else "keys", self.schema)

    def unused(self, there: Sequence[str]) -> list[str]:
        """Return which columns of a source are no field, and so are not indexed."""
        used = {*self.names.values()}
        return [name for name in there if name not in used]

    def counts_rows(self, there: Sequence[str]) -> bool:
        """Return whether a field is the number of the row, since the source has no column of that name."""
        return ROW_NUMBER in self.names.values() and ROW_NUMBER not in there

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of one message."""
        given = {name: row[column] for name, column in self.names.items() if column in row}
        return {**self.defaults, **given, **self.constants}

    def of_table(self, table: pa.Table) -> pa.Table:
        """Return the fields of many messages as columns."""
        columns = {name: table[column] for name, column in self.names.items() if column in table.column_names}
        for name, value in self.defaults.items():
            if name not in columns or pa.types.is_null(columns[name].type):
                columns[name] = pa.chunked_array([pa.repeat(pa.scalar(value), len(table))])
        for column in self.schema.caller_columns:
            if np.dtype(column.dtype).kind == "S" and column.name in columns and is_text(columns[column.name].type):
                columns[column.name] = columns[column.name].cast(pa.large_binary())
        for name, value in self.constants.items():
            kind = pa.int64() if isinstance(value, int) else None
            columns[name] = pa.chunked_array([pa.repeat(pa.scalar(value, kind), len(table))])
        if pa.types.is_timestamp(columns["timestamp_ms"].type):
            columns["timestamp_ms"] = milliseconds(columns["timestamp_ms"])
        elif pa.types.is_string(columns["timestamp_ms"].type):
            columns["timestamp_ms"] = times_ms(columns["timestamp_ms"])
        if "key" in columns and is_list(columns["key"].type):
            keys = columns.pop("key")
            if "keys" not in columns or columns["keys"].null_count == len(table):
                columns["keys"] = keys
        return pa.table(columns)


# What of a problem is the message's own: values, and what a parser says of a line.
_OWN = re.compile(r": .*|, not .*| -?[0-9]+(?= is outside)", re.DOTALL)
_TOO_LONG = re.compile(r"(topic|key) .* UTF-16 code units; the limit is", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """One message, or what is wrong with it, and its place: `where` for people, [start, end) as positions."""

    where: str
    start: int
    end: int
    message: Message | None
    problem: str = ""

    @property
    def reason(self) -> str:
        """What is wrong without the values of this message, so that it can be counted."""
        return _OWN.sub("", _TOO_LONG.sub(r"\1 is longer than", self.problem))


@dataclass(frozen=True)
class Batch:
    """Messages up to position `end`; `columns` is None where only `records`, slow and exact, can say what is wrong."""

    columns: pa.RecordBatch | None
    messages: int
    end: int
    records: Callable[[], Iterator[Record]]
