"""`tiered-index dump FILE`: the entries of one index file as NDJSON; the last line is the status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from tiered_index.cli.contents.bytes import opened
from tiered_index.cli.contents.kinds import Array, Contents, contents_of
from tiered_index.cli.session import Session, command
from tiered_index.errors import CorruptFile
from tiered_index.format.schema import PREVIOUS

__all__ = ["dump", "entry_records"]


@command
def dump(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A path, a file id, or an object's name.", show_default=False)],
    slots: Annotated[int | None, typer.Option(help="Hash slots of an unsealed file that has no journal.")] = None,
    items: Annotated[int | None, typer.Option(help="Items of an unsealed file that has no journal.")] = None,
) -> int:
    """Print every entry of one file, one JSON object a line, in the file's order; the last line is {"status": ...}.

    Only bytes that match their checksum are printed. At the first that don't the dump ends with status "corrupt" and exit code 4; files of
    RocketMQ's own have no checksums, and the status says so.

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
            session.out.record({"status": "corrupt", "entries": count, "error": str(error), "checksummed": contents.checksummed})
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
