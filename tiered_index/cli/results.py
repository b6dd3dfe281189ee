"""The result of a command: one document, printed as JSON, or for people as fields and tables.

The suffix of a field's name is its unit (`_bytes`, `_ms`, `_s`, `_usd`) and selects its format. Fields without a value
are left out. One thread.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tiered_index.cli.options import human_duration
from tiered_index.cli.output import Output, human_bytes, human_count, human_seconds
from tiered_index.encoding import json_text
from tiered_index.errors import listed
from tiered_index.types import MAX_TIMESTAMP_MS, format_time

# Most rows of a table, and texts of a field
_ROWS, _TEXTS = 20, 5
# A field whose members are named by operations, without units
_REQUESTS = "requests"
# Fields whose members are named by users, without units
_OF_USERS = ("sources", "source_positions", "skipped_reasons", "properties")
# Fields that only programs need
_DETAILS = ("metrics", "quarantined_first")


def show(
    out: Output,
    document: Mapping[str, Any],
    *,
    without: Collection[str] = (),
    streamed: bool = False,
    most: int = _ROWS,
) -> None:
    """Write a result; people do not see the fields `without`. `streamed`: it is the last line of NDJSON. `most` as in
    `show_fields`.
    """
    out.answer(dict(document), streamed=streamed)
    show_fields(out, document, without=without, most=most)


def show_fields(
    out: Output,
    fields: Mapping[str, Any],
    *,
    title: str | None = None,
    without: Collection[str] = (),
    most: int = _ROWS,
) -> None:
    """Write fields for people: a line for each value, then with titles the large documents, and the lists as tables of
    at most `most` rows.
    """
    if out.as_json:
        return
    plain = json.loads(json_text({name: value for name, value in fields.items() if name not in {*_DETAILS, *without}}))
    parts = {name: value for name, value in plain.items() if name != _REQUESTS and _is_part(value)}
    out.fields({label(name): shown(name, value) for name, value in plain.items() if name not in parts}, title=title)
    for name, part in parts.items():
        if isinstance(part, dict) and name in _OF_USERS:
            out.fields({each: shown("", member) for each, member in part.items()}, title=label(name))
        elif isinstance(part, dict):
            show_fields(out, part, title=label(name))
        else:
            show_rows(out, label(name), part, most=most)


def show_rows(
    out: Output,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    count: int | None = None,
    *,
    most: int = _ROWS,
    is_listed: bool = True,
) -> None:
    """Write the first `most` of `rows` for people; `count`: number of all rows, if more than `rows`.

    They are a table or, if that is too wide and `is_listed`, a list.
    """
    cells = [{name: shown(name, _length(value)) for name, value in row.items()} for row in rows[:most]]
    names = [name for name in dict.fromkeys(itertools.chain(*cells)) if any(row.get(name) for row in cells)]
    numbers = {label(name) for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)}
    if cells:
        table = [[row.get(name) for name in names] for row in cells]
        out.table([label(name) for name in names], table, title=title or None, right=numbers, is_listed=is_listed)
    if rest := (len(rows) if count is None else count) - len(cells):
        out.line(f"and {rest:,} more {title}")


def label(name: str) -> str:
    """Return the name of a field for people."""
    return name.removesuffix("_ms").removesuffix("_s").replace("_", " ")


def _member(member: Any) -> str:
    """Return the text of a list's member: of a header of Kafka "name: value", and "name (null)" without a value."""
    if isinstance(member, list):
        if member[-1:] == [None]:
            return f"{': '.join(map(str, member[:-1]))} (null)"
        return ": ".join(map(str, member))
    return str(member)


def shown(name: str, value: Any) -> str | None:
    """Return the text of a field's value for people, None for no value."""
    if value is None or value in ("", [], {}):
        return None
    if isinstance(value, dict) and name in _OF_USERS:
        return ", ".join(f"{each} {shown('', member)}" for each, member in value.items())
    if isinstance(value, dict):
        named = {each: name if name == _REQUESTS else each for each in value}
        members = {label(each): shown(named[each], member) for each, member in value.items()}
        return ", ".join(f"{each} {member}" for each, member in members.items() if member is not None) or None
    if isinstance(value, list | tuple):
        texts = [_member(member) for member in value]
        return listed(texts, _TEXTS)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if "bytes" in name.split("_"):
        return human_bytes(value)
    if name == "second" or name.endswith("_ms"):
        time_ms = int(value * 1000 if name == "second" else value)
        return format_time(time_ms) if 0 <= time_ms <= MAX_TIMESTAMP_MS else str(value)
    if name.endswith("_s"):
        return human_duration(value) if isinstance(value, int) else human_seconds(value)
    return f"${value:.6f}" if "usd" in name.split("_") else human_count(value)


def _length(value: Any) -> Any:
    """Return the length of a list that does not fit into a cell, any other value as it is."""
    return len(value) if isinstance(value, list | tuple) and value and not isinstance(value[0], str) else value


def _is_part(value: Any) -> bool:
    """Return whether a value does not fit into a line: a list of documents, or a document of many fields."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) and len(value) > _TEXTS
