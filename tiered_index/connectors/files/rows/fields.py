"""Maps the columns of a source to message fields; records and batches of messages. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index.connectors import json_numbers
from tiered_index.connectors.files.rows.columns import (
    FIELDS,
    CheckedMessage,
    check_names,
    checked_message,
    is_list,
    is_text,
    times_ms,
)
from tiered_index.connectors.json_numbers import number_text
from tiered_index.errors import InvalidArgument, listed
from tiered_index.format.schema import ROCKETMQ_SCHEMA, Schema
from tiered_index.service.write.validation import milliseconds


def json_object(line: bytes | str, where: str = "") -> dict[str, Any]:
    """Return the object of an NDJSON line, as `json_numbers.loads`. Raises `InvalidArgument`; its text begins with
    `where`.
    """
    try:
        document = json_numbers.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}not JSON: {error}") from error
    if not isinstance(document, dict):
        is_list = isinstance(document, list)
        hint = ": write one object a line, for example with `jq -c '.[]'`" if is_list else ""
        raise InvalidArgument(f"{where}not a JSON object{', but an array' if is_list else ''}: {line[:60]!r}{hint}")
    return document


_KEYS = ("key", "keys")


def written_keys(fields: dict[str, Any], keys: Iterable[str | None] = _KEYS) -> dict[str, Any]:
    """Return the object of an NDJSON line; numbers in the members `keys` become text, as written.

    It is the one reader of JSON keys: of `ingest`, `query --keys`, requests of the service and tasks of Spark.
    """
    for name in keys:
        if name in fields:
            fields[name] = _written_key(fields[name])
    return fields


def _written_key(key: Any) -> Any:
    """Return a key of JSON: a number as it was written, and any other value unchanged."""
    if isinstance(key, list):
        return [_written_key(each) for each in key]
    return number_text(key) if isinstance(key, int | float) and not isinstance(key, bool) else key


ROW_NUMBER = "rownumber"
"""The name of a generated column: the row's number, from 0. A source's column of this name takes its place."""


@dataclass(frozen=True)
class Fields:
    """The column of each field (default: the one of its name), and fields with one value for all messages."""

    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Entries of the index, with its own columns
    schema: Schema = ROCKETMQ_SCHEMA
    # Values of own columns that are missing in the source
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The names of the index's own columns."""
        return tuple(column.name for column in self.schema.caller_columns)

    @cached_property
    def names(self) -> dict[str, str]:
        """The columns by field, without constants. If a column or constant is given for the key, only that one."""
        chosen = [name for name in _KEYS if name in self.columns or name in self.constants]
        wanted = (*FIELDS, *(chosen or _KEYS), "topic_id", *self.own)
        return {name: self.columns.get(name, name) for name in wanted if name not in self.constants}

    def fingerprint(self) -> str:
        """Return ``/`` and a hash of renamed columns and constants; an empty text if there are none."""
        said = [{n: c for n, c in self.columns.items() if n != c}, dict(self.constants)]
        text = json.dumps(said, sort_keys=True, default=bytes.hex).encode()
        return f"/{hashlib.sha256(text).hexdigest()[:16]}" if any(said) else ""

    def check_columns(self, there: Sequence[str], whose: str) -> None:
        """Raise `InvalidArgument` if a source with the columns `there` lacks one, or has several for the keys."""
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
            key_columns = [name for name in _KEYS if name in self.columns]
            wanted = self.shown(key_columns[0]) if key_columns else "'key' (text) or a column 'keys' (list of text)"
            hint = "; entries of an export are read from Parquet, Arrow and NDJSON" if "key_hash" in there else ""
            raise InvalidArgument(
                f"{whose}: give a column {wanted}; it has {listed(there)} (--column key=COLUMN says which one "
                f"it is){hint}"
            )

    def shown(self, name: str) -> str:
        """Return the name of a field in errors."""
        column = self.columns.get(name, name)
        return repr(name) if column == name else f"{column!r} ({name})"

    def checked(self, fields: Mapping[str, Any]) -> CheckedMessage:
        """Return the checked message of `fields`; it has no empty keys.

        Raises `InvalidArgument`, with the name of the source's column.
        """
        fields = {**fields, **{name: _without_empty(fields[name]) for name in _KEYS if name in fields}}
        return checked_message(fields, self.shown, "key" if "key" in self.columns else "keys", self.schema)

    def unused(self, there: Sequence[str]) -> list[str]:
        """Return the columns of a source that are no field, and are not indexed."""
        used = {*self.names.values()}
        return [name for name in there if name not in used]

    def counts_rows(self, there: Sequence[str]) -> bool:
        """Return whether a field uses the generated row number."""
        return ROW_NUMBER in self.names.values() and ROW_NUMBER not in there

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of one message."""
        of_source = {name: row[column] for name, column in self.names.items() if column in row}
        return {**self.defaults, **of_source, **self.constants}

    def of_table(self, table: pa.Table) -> pa.Table:
        """Return the fields of many messages as columns."""
        columns = {name: table[column] for name, column in self.names.items() if column in table.column_names}
        for name, value in self.defaults.items():
            if name not in columns or pa.types.is_null(columns[name].type):
                columns[name] = pa.chunked_array([pa.repeat(pa.scalar(value), len(table))])
        for column in self.schema.caller_columns:
            is_bytes = np.dtype(column.dtype).kind == "S" and not column.is_text
            if is_bytes and column.name in columns and is_text(columns[column.name].type):
                columns[column.name] = columns[column.name].cast(pa.large_binary())
        for name, value in self.constants.items():
            kind = None
            if isinstance(value, int):
                if not -(2**63) <= value < 2**64:
                    raise InvalidArgument(f"{name} {value} does not fit 64 bits")
                kind = pa.int64() if value < 2**63 else pa.uint64()
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


def _without_empty(keys: Any) -> Any:
    """Return a key or a list of keys without empty ones, as many tools write a message without a key."""
    if isinstance(keys, list):
        return [key for key in keys if key != ""]
    return None if isinstance(keys, str) and not keys else keys


# The parts of a problem that differ between messages: values, and a parser's text about a line
_OWN = re.compile(r": .*|, not .*| -?[0-9]+(?= is outside)", re.DOTALL)
_TOO_LONG = re.compile(r"(topic|key) .* UTF-16 code units; the limit is", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """One message or its problem, and its place: `where` for people, positions [start, end)."""

    where: str
    start: int
    end: int
    message: CheckedMessage | None
    problem: str = ""

    @property
    def reason(self) -> str:
        """The problem without the values of this message, for counting equal problems."""
        return _OWN.sub("", _TOO_LONG.sub(r"\1 is longer than", self.problem))


@dataclass(frozen=True)
class MessageBatch:
    """Messages up to position `end`. `columns` is None if they have a problem: use `records`, slow and exact."""

    columns: pa.RecordBatch | None
    messages: int
    end: int
    records: Callable[[], Iterator[Record]]
    # Messages without key; only counted for text with `columns`
    keyless: int = 0
