"""`tiered-index inspect FILE` and `tiered-index dump FILE`: one index file's metadata, and its entries as NDJSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tiered_index.cli.contents import Array, Contents, contents_of, opened
from tiered_index.cli.options import File, FileItems, FileSlots
from tiered_index.cli.output import human_bytes
from tiered_index.cli.session import Session, command
from tiered_index.cli.times import format_time
from tiered_index.errors import CorruptFile
from tiered_index.format.schema import PREVIOUS

_TOPICS_SHOWN = 10


@command
def inspect(session: Session, file: File, slots: FileSlots = None, items: FileItems = None) -> int:
    """Show header, geometry, metadata and directory statistics of one file; its entries are not checked (that is
    verify).

    [bold]Examples[/bold]

      tiered-index inspect /data/index/uploaded/001700000000000-0123456789ab.index

      tiered-index inspect data/001700000000000-0123456789ab/89abcdef01234567.index --storage s3://bucket/index --json

      tiered-index inspect store/index/20231114221320000 --slots 5000000 --items 20000000
    """
    with opened(session, file) as data:
        document: dict[str, Any] = {
            "file": data.name,
            "bytes": data.size_bytes,
            **contents_of(data, slots, items).describe(),
        }
    session.out.answer(document)
    session.out.line(f"{document['file']}: {document['kind']}, {human_bytes(document['bytes'])}")
    for name, part in document.items():
        if isinstance(part, dict):
            session.out.fields({key: _shown(key, value) for key, value in part.items()}, title=name)
    return 0


def _shown(name: str, value: Any) -> object:
    if name.endswith("_ms") and isinstance(value, int):
        return f"{value} ({format_time(value)})" if 0 <= value < 2**47 else str(value)
    if name == "topics":
        names = [f"{text} ({topic_id})" for topic_id, text in value]
        return ", ".join(names[:_TOPICS_SHOWN]) + (
            f" and {len(names) - _TOPICS_SHOWN} more" if len(names) > _TOPICS_SHOWN else ""
        )
    if isinstance(value, dict):
        return ", ".join(f"{key} = {number}" for key, number in value.items()) or "none"
    return value


@command
def dump(session: Session, file: File, slots: FileSlots = None, items: FileItems = None) -> int:
    """Print every entry of one file, one JSON object a line, in the file's order; the last line is {"status": ...}.

    Only bytes that match their checksum are printed. At the first that don't the dump ends with status "corrupt" and
    exit code 4; files of RocketMQ's own have no checksums, and the status says so.

    [bold]Examples[/bold]

      tiered-index dump /data/index/compacted/001700000000000-0123456789ab.index | head

      tiered-index dump data/001700000000000-0123456789ab/89abcdef01234567.index --storage s3://bucket/index
    """
    count = 0
    with opened(session, file) as data:
        contents = contents_of(data, slots, items)
        try:
            for record in entry_records(contents):
                session.out.record(record)
                count += 1
        except CorruptFile as error:
            session.out.record(
                {"status": "corrupt", "entries": count, "error": str(error), "checksummed": contents.checksummed}
            )
            raise
    session.out.record({"status": "complete", "entries": count, "checksummed": contents.checksummed})
    return 0


def entry_records(contents: Contents) -> Iterator[dict[str, Any]]:
    """Yield the entries as JSON-ready dicts; `topic` is None where the file's own table doesn't name the id once."""
    names: dict[int, str | None] = {}
    for topic_id, name in contents.topics:
        names[topic_id] = None if topic_id in names else name
    columns = [name for name in contents.layout.schema.item.names or () if name not in ("time_diff_s", PREVIOUS)]
    for items in contents.items():
        yield from _records(items, columns, contents.begin_ms, names)


def _records(items: Array, columns: list[str], begin_ms: int, names: dict[int, str | None]) -> Iterator[dict[str, Any]]:
    times = (begin_ms + items["time_diff_s"].astype(np.int64) * 1000).tolist()
    values = zip(*(items[name].tolist() for name in columns), strict=True)
    place = columns.index("topic_id")
    for time_ms, row in zip(times, values, strict=True):
        shown = [value.hex() if isinstance(value, bytes) else value for value in row]
        yield {"topic": names.get(row[place]), "timestamp_ms": time_ms, **dict(zip(columns, shown, strict=True))}
