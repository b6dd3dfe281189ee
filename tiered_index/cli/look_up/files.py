"""`tiered-index files`: the files of an index, and the contents of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tiered_index.base.units import human_duration
from tiered_index.cli.exit_codes import DONE, PARTIAL
from tiered_index.cli.look_up.contents import Array, Contents, contents_of, opened
from tiered_index.cli.options import ServiceOptions
from tiered_index.cli.output import counted, human_bytes, states
from tiered_index.cli.session import Session, asked_service
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.schema import PREVIOUS, Schema, listed, texts
from tiered_index.format.segments.segment import ArchivedSegment
from tiered_index.service.read.files.compacted import DamagedFile
from tiered_index.service.read.inventory import files_document
from tiered_index.types import inclusive

if TYPE_CHECKING:
    from tiered_index.client import IndexClient


def files(session: Session, *, file: str | None, entries: bool, service: ServiceOptions) -> int:
    """List all files and window tables, then the archived segments, or show one file."""
    client = asked_service(session, service, file=file)
    if file is not None:
        return _show_file(session, file, entries=entries)
    if entries:
        raise InvalidArgument("--entries needs FILE")
    return _list_files(session, client)


def _list_files(session: Session, client: IndexClient | None) -> int:
    """Write the list of all files, and return the exit code."""
    damaged: set[str] = set()
    if client is not None:
        with client:
            document = client.files()
        sums = _archived_sums(msgspec.convert(document["archived"], list[ArchivedSegment]))
    else:
        with session.open_reader(session.config()) as reader:
            handles = reader.files()
            document = files_document(reader.genesis.index_id, reader.log_state, handles, reader.segments())
            document["files"] = list(document["files"])
            sums = {} if session.out.as_json else _archived_sums(reader.segments())
        broken_handles = [handle for handle in handles if isinstance(handle, DamagedFile)]
        damaged = {handle.file_id for handle in broken_handles if isinstance(handle.error, CorruptFile)}
    listed, totals = document["files"], document["totals"]
    broken = [file for file in listed if file["error"] is not None]
    session.out.answer(document)
    rows = [_row(file, "damaged" if file["file_id"] in damaged else "not read") for file in listed]
    session.out.rows("", rows, most=len(rows), is_listed=False)
    session.out.line(
        f"{counted(len(listed), 'file')} ({states(totals['by_state']) or 'none'}), "
        f"{counted(totals['entries'], 'entry', 'entries')}, {human_bytes(totals['bytes'])}"
    )
    for store, text in sums.items():
        session.out.line(f"archived of {store}: {text}")
    if client is not None and document.get("archived_more"):
        session.out.note("the service lists 10,000 archived segments at most, and has more")
    return PARTIAL if broken else DONE


def _row(file: dict[str, Any], broken: str) -> dict[str, Any]:
    table = file["table"]
    window = table and f"window of {human_duration(table['window_s'])}, {counted(len(table['shards']), 'shard')}"
    return {
        "file": file["file_id"],
        "state": file["state"] if file["error"] is None else f"{file['state']}, {broken}",
        **{name: file[name] for name in ("lane", "begin_ms", "end_ms", "entries", "bytes")},
        "place": file["error"] or file["path"] or file["object"] or window,
    }


def _archived_sums(segments: Iterable[ArchivedSegment]) -> dict[str, str]:
    """Return for each store how much is archived, and where segments are missing between others."""
    texts = {}
    for store, of_store in groupby(segments, key=attrgetter("store")):
        start = end = None
        count = size_bytes = gaps = last_gap = 0
        for segment in of_store:
            start = segment.start if start is None else start
            if end is not None and end < segment.start:
                gaps, last_gap = gaps + 1, segment.start
            end, count, size_bytes = segment.end, count + 1, size_bytes + segment.size_bytes
        note = f", with {counted(gaps, 'gap')}, the last one before {last_gap:,}" if gaps else ""
        texts[store] = (
            f"{counted(count, 'segment')}, {human_bytes(size_bytes)}, offsets {inclusive(start or 0, end or 0)}{note}"
        )
    return texts


def _show_file(session: Session, file: str, *, entries: bool) -> int:
    """Write what one file states of itself, or its entries, and return the exit code."""
    with opened(session, file) as data:
        contents = contents_of(data, session.config())
        if entries:
            _print_entries(session, contents)
        else:
            session.out.show({"file": data.name, "bytes": data.size_bytes, **contents.describe()})
    return DONE


def _print_entries(session: Session, contents: Contents) -> None:
    count = 0
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


def entry_records(contents: Contents) -> Iterator[dict[str, Any]]:
    """Yield the entries as dicts for JSON; `topic` is None unless the file's table has exactly one name of the id."""
    names: dict[int, str | None] = {}
    for topic_id, name in contents.topics:
        names[topic_id] = None if topic_id in names else name
    for items in contents.items():
        yield from _records(items, contents.layout.schema, contents.begin_ms, names)


def _records(items: Array, schema: Schema, begin_ms: int, names: dict[int, str | None]) -> Iterator[dict[str, Any]]:
    columns = [name for name in schema.item.names or () if name not in ("time_diff_s", PREVIOUS)]
    times = (begin_ms + items["time_diff_s"].astype(np.int64) * 1000).tolist()
    cells = (texts(items[name]) if name in schema.text_columns else listed(items[name]) for name in columns)
    values = zip(*cells, strict=True)
    place = columns.index("topic_id")
    for time_ms, row in zip(times, values, strict=True):
        shown = [value.hex() if isinstance(value, bytes) else value for value in row]
        yield {"topic": names.get(row[place]), "timestamp_ms": time_ms, **dict(zip(columns, shown, strict=True))}
