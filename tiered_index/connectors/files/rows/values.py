"""The values of columns as the texts of keys and as the rows that are shown: the text of a key is the text in its row.

JSON has texts, numbers and booleans for them. A time, a decimal number, a UUID and bytes are texts, a duration is a
number of its unit, and NaN and infinite numbers are the texts `NaN`, `Infinity` and `-Infinity`. Pure; any thread.
"""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.files.rows.columns import has_items
from tiered_index.format.keys.spelling import key_text


def value_text(value: object) -> str:
    """Return the text of a value that JSON has no form for. Raises `TypeError` for one of no column.

    Bytes are the text that `key_text` makes of them. 16 bytes that are no text are a UUID.
    """
    if isinstance(value, bytes):
        text = key_text(value)
        return str(uuid.UUID(bytes=value)) if len(value) == 16 and text == f"0x{value.hex()}" else text
    if isinstance(value, decimal.Decimal):
        # all digits: `str` writes -1E-10 for small numbers
        return f"{value:f}"
    if isinstance(value, datetime.date | datetime.time | uuid.UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is of no column")


def key_value(member: Any) -> Any:
    """Return a member of a row as a key, or as a list of keys, in JSON; None: it is neither, such as an interval."""
    if isinstance(member, list):
        return [key_value(each) for each in member]
    if isinstance(member, str | int | float | dict) or member is None:
        return member
    return None if isinstance(member, tuple) else value_text(member)


def rows_as_json(table: pa.Table) -> list[bytes]:
    """Return the rows of a table as JSON objects. Of columns with the same name each has a name of its own."""
    names = distinct_names(table.schema.names)
    columns = [python_values(column) for column in table.columns]
    return [object_as_json(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def object_as_json(row: dict[str, Any]) -> bytes:
    """Return a row as a JSON object in one line."""
    form: dict[str, Any] = {"default": value_text, "ensure_ascii": False, "separators": (",", ":")}
    try:
        text = json.dumps(row, allow_nan=False, **form)
    except ValueError:
        # only here, because a search for such numbers takes longer than encoding
        text = json.dumps(json.loads(json.dumps(row, **form), parse_constant=str), **form)
    return text.encode()


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table as `python_values`."""
    columns = [python_values(column) for column in table.columns]
    return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as those of Python, and times that it has none for as texts."""
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    column = _with_distinct_members(column)
    try:
        column = _cast(column, _python_type)
    except pa.ArrowInvalid:
        # times of no known zone
        column = _cast(_cast(column, _without_zone), _python_type)
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError, KeyError):
        return [_python_value(column.slice(number, 1)) for number in range(len(column))]


def _python_value(column: pa.Array | pa.ChunkedArray) -> Any:
    """Return the only value of a column: as a text if it has a time of no year of Python, or of no known zone."""
    try:
        return column.to_pylist()[0]
    except (OverflowError, ValueError, KeyError):
        return _cast(_cast(column, _without_zone), _text_type).to_pylist()[0]


def run_ends_decoded(table: pa.Table) -> pa.Table:
    """Return a table whose columns can be taken by their rows: Arrow can't take rows of runs."""
    for number, field in enumerate(table.schema):
        if pa.types.is_run_end_encoded(field.type):
            table = table.set_column(number, field.name, pc.run_end_decode(table.column(number)))
    return table


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names of which none is there twice: x, x_1 and x_2 for three columns x."""
    taken, distinct = {*names}, dict[str, None]()
    for name in names:
        other, number = name, 0
        while other in distinct or (number and other in taken):
            number += 1
            other = f"{name}_{number}"
        distinct[other] = None
    return [*distinct]


def _with_distinct_members(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a column whose structs have no two members of one name, which Python's dictionaries can't have."""
    kind = _replaced(column.type, lambda leaf: leaf, of_members=distinct_names)
    if kind == _replaced(column.type, lambda leaf: leaf):
        return column
    column = _cast(column, lambda leaf: leaf)
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
    return column.view(kind)


def _cast(column: Any, leaf: Callable[[pa.DataType], pa.DataType]) -> Any:
    kind = _replaced(column.type, leaf)
    return column if kind == column.type else column.cast(kind)


def _replaced(
    kind: pa.DataType,
    leaf: Callable[[pa.DataType], pa.DataType],
    of_members: Callable[[Sequence[str]], Sequence[str]] = list,
) -> pa.DataType:
    """Return a type without dictionaries, whose innermost types are those that `leaf` returns for them.

    `of_members` returns the names of a struct's members for those that it has.
    """
    if pa.types.is_dictionary(kind):
        return _replaced(kind.value_type, leaf, of_members)
    if pa.types.is_struct(kind):
        names = of_members([field.name for field in kind])
        members = zip(kind, names, strict=True)
        return pa.struct(
            [field.with_name(name).with_type(_replaced(field.type, leaf, of_members)) for field, name in members]
        )
    if pa.types.is_map(kind):
        return pa.map_(_replaced(kind.key_type, leaf, of_members), _replaced(kind.item_type, leaf, of_members))
    if has_items(kind):
        item = kind.value_field.with_type(_replaced(kind.value_type, leaf, of_members))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    return leaf(kind)


def _python_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_float16(kind):
        return pa.float32()
    is_fine = (pa.types.is_timestamp(kind) or pa.types.is_time64(kind)) and kind.unit == "ns"
    return pa.string() if is_fine else kind


def _without_zone(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind


def _text_type(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_temporal(kind) and not pa.types.is_interval(kind) else kind
