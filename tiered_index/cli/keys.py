"""`query --keys FILE`: a file of lookups in, a table of answers out.

A lookup is a row with `topic`, `key` and optionally `begin_ms` and `end_ms`; further columns are skipped. Answers have
a row for each entry, in the order of the lookups and each lookup's answer order, and one without entry for a lookup
that found none. Memory: a batch of lookups and its answers.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.cli.explaining import CommandBudget, Explaining, Pages, lost_text
from tiered_index.cli.output import Output, counted
from tiered_index.errors import BudgetExceeded, CorruptFile, DiskFull, InvalidArgument
from tiered_index.service.answers.results import QueryResults
from tiered_index.service.answers.rows import check_key, check_range, check_topic
from tiered_index.service.answers.validation import milliseconds
from tiered_index.service.reader import IndexReader
from tiered_index.types import (
    Answer,
    Explain,
    FileReport,
    Freshness,
    IndexItem,
    Lookup,
    LostFile,
    QueryResult,
    format_time,
    items_table,
    parse_time,
)

_CSV, _PARQUET = (".csv", ".csv.gz"), (".parquet",)
_NDJSON = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")
# lookups that share their reads
_BATCH = 100_000
_FIELDS = ("topic", "key", "begin_ms", "end_ms")
_SHOWN = ("topic", "key", "time", "queue", "offset", "size", "source")
_NOTHING = Explain()
_FAILED = pa.list_(pa.struct([("file", pa.string()), ("error", pa.string())]))
_ASKED = pa.schema(
    [
        *(("topic", pa.string()), ("key", pa.string()), ("begin_ms", pa.int64()), ("end_ms", pa.int64())),
        *(("status", pa.string()), ("failed", _FAILED), ("position", pa.int32())),
    ]
)


def read_lookups(file: Path, begin_ms: int | None, end_ms: int | None, max_count: int) -> Iterator[Lookup]:
    """Yield the lookups of a file of keys; the bounds are for rows without. Raises `InvalidArgument` naming the row."""
    for where, fields in _rows(file):
        try:
            begin, end = (
                given if (found := _time(fields.get(name))) is None else found
                for name, given in (("begin_ms", begin_ms), ("end_ms", end_ms))
            )
            for name in ("topic", "key"):
                if fields.get(name) is None:
                    raise InvalidArgument(f"{name!r} is missing")
            topic, key = check_topic(fields["topic"]), check_key(fields["key"])
            check_range(begin, end, max_count)
        except (InvalidArgument, ValueError) as error:
            raise InvalidArgument(f"{file}: {where}: {error}") from error
        yield Lookup(topic=topic, key=key, begin_ms=begin, end_ms=end, max_count=max_count)


def _time(value: Any) -> int | None:
    return None if value is None or value == "" else parse_time(value if isinstance(value, str) else f"{value}")


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a file, each with its place for people. Raises `InvalidArgument`, `CorruptFile`."""
    name = file.name.lower()
    rows = next((read for kinds, read in _KINDS if name.endswith(kinds)), None)
    if rows is None:
        raise InvalidArgument(
            f"--keys {file}: a file of keys is .parquet, .ndjson (.jsonl, .json), or .csv with a header"
        )
    try:
        yield from rows(file)
    except (gzip.BadGzipFile, EOFError, zlib.error, pa.ArrowException) as error:
        raise CorruptFile(str(file), f"can't be read: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"--keys {file}: {error.strerror}") from error


def _csv_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # of the package that brings the same files to executors; it is imported when asked for
    from tiered_index.spark.lookup.keys import csv_rows

    rows = csv_rows(file)
    _, header = next(rows, (1, []))
    _check_columns(file, header)
    for line, cells in rows:
        if len(cells) != len(header):
            raise InvalidArgument(f"{file}: line {line:,} has {counted(len(cells), 'cell')}, the header {len(header)}")
        yield f"line {line:,}", {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _ndjson_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"{file}: line {number:,}: not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise InvalidArgument(f"{file}: line {number:,}: not a JSON object: {line[:60]!r}")
            yield f"line {number:,}", fields


def _parquet_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with pq.ParquetFile(file) as opened:
        names = opened.schema_arrow.names
        _check_columns(file, names)
        number = 0
        for batch in opened.iter_batches(_BATCH, columns=[name for name in _FIELDS if name in names]):
            for name in batch.schema.names:
                if pa.types.is_timestamp(batch[name].type):
                    place = batch.schema.get_field_index(name)
                    batch = batch.set_column(place, name, milliseconds(batch[name]))
            for fields in batch.to_pylist():
                number += 1
                yield f"row {number:,}", fields


def _check_columns(file: Path, names: Sequence[str]) -> None:
    if missing := [name for name in ("topic", "key") if name not in names]:
        raise InvalidArgument(f"{file}: column {missing[0]!r} is missing; it has {', '.join(names) or 'none'}")


_KINDS = ((_CSV, _csv_rows), (_NDJSON, _ndjson_rows), (_PARQUET, _parquet_rows))


def _table(lookups: Sequence[Lookup], answers: Sequence[QueryResult], item_type: type[IndexItem]) -> pa.Table:
    """Return the answers to lookups, a row an entry; the columns of a lookup without entries are null."""
    counts = np.array([len(answer) for answer in answers], np.int64)
    entries = items_table([item for answer in answers for item in answer], item_type).drop_columns(["topic"])
    lookup = np.repeat(np.arange(len(lookups)), np.maximum(counts, 1))
    first = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
    position = np.arange(len(lookup)) - first[lookup]
    none = counts[lookup] == 0
    entry = (np.cumsum(counts) - counts)[lookup] + position
    asked: dict[str, list[Any]] = {name: [getattr(one, name) for one in lookups] for name in _FIELDS}
    asked["status"] = [answer.status for answer in answers]
    asked["failed"] = [
        [{"file": report.file, "error": report.error} for report in answer.failed] or None for answer in answers
    ]
    rows = pa.table({name: pa.array(values, _ASKED.field(name).type) for name, values in asked.items()}).take(lookup)
    table = rows.append_column("position", pa.array(position, pa.int32(), mask=none))
    for name, column in zip(entries.column_names, entries.take(pa.array(entry, mask=none)).columns, strict=True):
        table = table.append_column(name, column)
    return table


class KeysOut:
    """A file of answers, which is there when the block ends. Raises `InvalidArgument` where it can't be made."""

    def __init__(self, path: Path) -> None:
        if not path.name.endswith((*_PARQUET, *_NDJSON[:3])):
            raise InvalidArgument(f"--out {path}: answers are written as .parquet or .ndjson (.jsonl, .json)")
        if path.exists():
            raise InvalidArgument(f"--out {path} exists already: answers are written to a file of their own")
        if not path.parent.is_dir():
            raise InvalidArgument(f"--out {path}: there is no folder {path.parent}")
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[pa.Table], None]]:
        """Yield what writes a table. Raises `DiskFull`."""
        try:
            with contextlib.ExitStack() as stack:
                if self.path.name.endswith(_PARQUET):
                    writers: list[pq.ParquetWriter] = []

                    def write(table: pa.Table) -> None:
                        if not writers:
                            writers.append(stack.enter_context(pq.ParquetWriter(self._partial, table.schema)))
                        writers[0].write_table(table)
                else:
                    lines = stack.enter_context(self._partial.open("w"))

                    def write(table: pa.Table) -> None:
                        lines.writelines(f"{json.dumps(row)}\n" for row in json_rows(table))

                yield write
            os.replace(self._partial, self.path)
        except OSError as error:
            raise DiskFull(f"--out {self.path} can't be written: {error.strerror or error}") from error
        finally:
            self._partial.unlink(missing_ok=True)


def json_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows JSON-ready: bytes as hexadecimal text."""
    for row in table.to_pylist():
        yield {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}


@dataclass(frozen=True, kw_only=True)
class _Batch(Answer):
    """The answers to a batch of lookups; `status`, `unknown_topics`, `lost`, `expired_before_ms` are of all so far."""

    status: str
    lookups: Sequence[Lookup] = ()
    answers: Sequence[QueryResult] = ()
    item_type: type[IndexItem] = IndexItem
    # whatever it is, there are more batches
    cursor: str | None = None
    failed: tuple[FileReport, ...] = ()
    explain: Explain = _NOTHING
    freshness: tuple[Freshness, ...] = ()
    unknown_topics: tuple[str, ...] = ()
    lost: tuple[LostFile, ...] = ()
    expired_before_ms: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self.answers))


class _Asking:
    """Looks a batch up after the other; counts by status what was, and what was not yet."""

    def __init__(self, lookups: Iterator[Lookup], *, allow_partial: bool) -> None:
        self._lookups = lookups
        self._allow_partial = allow_partial
        self._next = list(islice(lookups, _BATCH))
        self._unknown: dict[str, None] = {}
        self._lost: dict[LostFile, None] = {}
        self._expired_before_ms: int | None = None
        self.statuses: Counter[str] = Counter()

    def look_up(self, reader: IndexReader, cursor: str | None, **limits: Any) -> _Batch:
        """Return the next batch of answers. Raises as `query_many`; the `result` of a `BudgetExceeded` is a batch."""
        asked = self._next
        try:
            answers = reader.query_many(asked, self._allow_partial, **limits)
        except BudgetExceeded as error:
            if not isinstance(error.result, QueryResults):
                raise
            self._next = []
            raise BudgetExceeded(str(error), failed=error.failed, result=self._batch(asked, error.result)) from error
        self._next = list(islice(self._lookups, _BATCH))
        return self._batch(asked, answers)

    def _batch(self, asked: Sequence[Lookup], found: QueryResults) -> _Batch:
        answers = list(found)
        self.statuses.update(answer.status for answer in answers)
        self._unknown |= {topic: None for answer in answers for topic in answer.unknown_topics}
        self._lost |= {lost: None for answer in answers for lost in answer.lost}
        expired = [self._expired_before_ms, *(answer.expired_before_ms for answer in answers)]
        self._expired_before_ms = max([ms for ms in expired if ms is not None], default=None)
        return _Batch(
            lookups=asked,
            answers=answers,
            item_type=found.item_type,
            status=next((each for each in ("partial", "truncated") if self.statuses[each]), "complete"),
            cursor="more" if self._next else None,
            failed=found.failed,
            explain=found.explain,
            freshness=found.freshness,
            unknown_topics=tuple(self._unknown),
            lost=tuple(self._lost),
            expired_before_ms=self._expired_before_ms,
        )

    def left(self) -> int:
        """Return how many lookups have no answer; they are read for that."""
        return len(self._next) + sum(1 for _ in self._lookups)


def look_up_keys(
    out: Output,
    open_reader: Callable[[], IndexReader],
    lookups: Iterator[Lookup],
    budget: CommandBudget,
    target: KeysOut | None,
    *,
    allow_partial: bool,
    explaining: Explaining | None,
    begin_ms: int | None,
    end_ms: int | None,
) -> int:
    """Look all up, write the answers, say what they are, and return the exit code. Raises `BudgetExceeded` then."""
    asking = _Asking(lookups, allow_partial=allow_partial)

    def open_lookup() -> Callable[..., _Batch]:
        pages.reader = open_reader()
        return partial(asking.look_up, pages.reader)

    bounds: Any = {"begin_ms": begin_ms, "end_ms": end_ms}
    pages: Pages[Any] = Pages(
        open_lookup, _Batch(status="partial"), None, budget, every=True, explaining=explaining, **bounds
    )
    shown: list[tuple[object, ...]] = []
    entries = found = 0
    with target.open() if target is not None else contextlib.nullcontext(partial(_show, out, shown)) as write:
        for batch in pages:
            if batch is not pages.nothing:
                write(_table(batch.lookups, batch.answers, batch.item_type))
            entries += len(batch)
            found += sum(len(answer) > 0 for answer in batch.answers)
        left = asking.left()
    total = asking.statuses.total()
    more: dict[str, Any] = {"out": str(target.path)} if target is not None else {}
    counts: dict[str, Any] = {
        "lookups": total,
        "found": found,
        "statuses": dict(asking.statuses),
        "not_looked_up": left,
    }
    out.answer(pages.totals(entries, **counts, **more), streamed=target is None)
    if shown:
        columns = _SHOWN if any(row[-1] is not None for row in shown) else _SHOWN[:-1]
        out.table(columns, [row[: len(columns)] for row in shown], right="queue offset size")
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(asking.statuses.items()))
    out.line(
        f"{counted(total, 'lookup')}{f' ({told})' if told else ''}, {found:,} with entries: "
        f"{entries:,} found{pages.as_of()}"
    )
    if pages.last.lost:
        out.line(f"lost for good: {lost_text(pages.last.lost)}")
    if target is not None:
        out.line(f"written to {target.path}")
    if truncated := asking.statuses["truncated"]:
        out.line(f"{truncated:,} truncated: more with a greater --max, or --all")
    if left:
        out.line(f"{counted(left, 'more lookup')} not begun")
    return pages.finish(out)


def _show(out: Output, shown: list[tuple[object, ...]], table: pa.Table) -> None:
    """Show a table: to programs at once, to people, by `shown`, at the end."""
    for row in json_rows(table):
        if out.as_json:
            out.record(row)
        else:
            time = format_time(row["timestamp_ms"]) or "nothing found"
            shown.append((row["topic"], row["key"], time, *(row[n] for n in ("queue_id", "offset", "size", "source"))))
