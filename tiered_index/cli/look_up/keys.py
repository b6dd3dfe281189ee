"""`query --keys FILE`: answers the lookups of a file with a table.

The table has a row for each entry, in the order of the lookups and each lookup's answer order. A lookup that found
nothing has one row without entry. Memory: a batch of lookups and its answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tiered_index.base.units import format_time
from tiered_index.cli.explaining import lost_text
from tiered_index.cli.look_up.message import leave_messages_out
from tiered_index.cli.look_up.paging import CommandBudget, Pages
from tiered_index.cli.options import RangeOptions
from tiered_index.cli.output import Output, counted, likely_seconds
from tiered_index.cli.write.commands import Format
from tiered_index.cli.write.export import PLACE_COLUMNS, check_new, made_whole, table_writer
from tiered_index.connectors.files.rows.lookups import FIELDS
from tiered_index.errors import BudgetExceeded, InvalidArgument
from tiered_index.service.read.answers.results import QueryResults
from tiered_index.service.reader import IndexReader
from tiered_index.types import Answer, FileReport, Lookup

_FORMS: dict[str, Format] = {".parquet": "parquet", **dict.fromkeys((".ndjson", ".jsonl", ".json"), "ndjson")}
# Lookups of a batch, which share their reads
_BATCH = 100_000
_OF_MESSAGES, _OF_FILES = ("queue_id", "offset", "size"), ("file", "row")
_FAILED = pa.list_(pa.struct([("file", pa.string()), ("error", pa.string())]))
_ASKED = pa.schema(
    [
        *(("topic", pa.string()), ("key", pa.string()), ("begin_ms", pa.int64()), ("end_ms", pa.int64())),
        *(("status", pa.string()), ("failed", _FAILED), ("position", pa.int32())),
    ]
)


def _failed(reports: Iterable[FileReport]) -> list[dict[str, Any]] | None:
    return [{"file": report.file, "error": report.error} for report in reports] or None


def _table(lookups: Sequence[Lookup], results: QueryResults, *, has_files: bool) -> pa.Table:
    """Return the answers to lookups, one row an entry. A lookup without entries has one row with null columns.

    `has_files`: some topic of the index has files, so that all batches have their columns.
    """
    answers = list(results)
    counts = results.counts
    own = [f.name for f in dataclasses.fields(results.item_type) if f.name != "topic"]
    if clash := [name for name in own if name.lower() in (*_ASKED.names, "lookup")]:
        raise InvalidArgument(
            f"the index's entries have a column {clash[0]!r}, which clashes with a column of answers: look the "
            f"keys up from Python by query_many"
        )
    entries = results.to_arrow().drop_columns(["lookup", "topic"])
    for name, kind in PLACE_COLUMNS.items() if has_files else ():
        if name not in entries.column_names:
            entries = entries.append_column(name, pa.nulls(len(entries), kind))
    lookup = np.repeat(np.arange(len(lookups)), np.maximum(counts, 1))
    first = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
    position = np.arange(len(lookup)) - first[lookup]
    none = counts[lookup] == 0
    entry = (np.cumsum(counts) - counts)[lookup] + position
    columns: dict[str, list[Any]] = {name: [getattr(lookup, name) for lookup in lookups] for name in FIELDS}
    columns["status"] = [answer.status for answer in answers]
    columns["failed"] = [_failed(answer.failed) for answer in answers]
    rows = pa.table({name: pa.array(values, _ASKED.field(name).type) for name, values in columns.items()}).take(lookup)
    table = rows.append_column("position", pa.array(position, pa.int32(), mask=none))
    for name, column in zip(entries.column_names, entries.take(pa.array(entry, mask=none)).columns, strict=True):
        table = table.append_column(name, column)
    return table


class KeysOut:
    """A file for answers, complete when the block of `open` ends. Raises `InvalidArgument` if it can't be made."""

    def __init__(self, path: Path) -> None:
        form = _FORMS.get(path.suffix)
        if form is None:
            raise InvalidArgument(f"--out {path}: its name must end in .parquet or .ndjson (.jsonl, .json)")
        check_new(path, "answers are written to a file of their own")
        self.path, self._form = path, form
        self._writer: Any = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[pa.Table], None]]:
        """Yield a function that writes a table; all have the columns of the first one. Raises `DiskFull`."""
        with made_whole(self.path) as partial, partial.open("wb") as self._sink:
            try:
                yield self._write
            finally:
                # without a table, the file has no row
                (self._writer or table_writer(self._form, self._sink, _ASKED)).close()

    def _write(self, table: pa.Table) -> None:
        table = _with_epochs(table) if self._form == "ndjson" else table
        if self._writer is None:
            self._writer = table_writer(self._form, self._sink, table.schema)
        self._writer.write_table(table)


@dataclass(frozen=True, kw_only=True, repr=False)
class AnsweredLookups(Answer[Any]):
    """The answers to a batch of lookups; `status` is that of all batches so far."""

    results: QueryResults | None = None
    cursor: None = None

    def __len__(self) -> int:
        return 0 if self.results is None else int(self.results.counts.sum())


class KeysQuestion:
    """The lookups of a file, a batch a question. It counts the keys by status, and those that are left."""

    def __init__(self, opened: Callable[[], IndexReader], lookups: Iterator[Lookup], *, allow_partial: bool) -> None:
        self._opened, self._lookups, self._allow_partial = opened, lookups, allow_partial
        # those of the last batch, unless they are answered
        self._unanswered = 0
        self.statuses: Counter[str] = Counter()
        # The lookup with the earliest end or, without an end, begin
        self.earliest = Lookup("", "")

    def open(self) -> tuple[IndexReader, Iterator[Callable[..., AnsweredLookups]]]:
        """Open the index, as `Pages.open`."""
        self._reader = self._opened()
        return self._reader, self._questions()

    def _questions(self) -> Iterator[Callable[..., AnsweredLookups]]:
        batches = iter(lambda: list(islice(self._lookups, _BATCH)), [])
        for batch in chain([next(batches, [])], batches):
            self._unanswered = len(batch)
            yield partial(self._answers, batch)

    def _answers(self, lookups: Sequence[Lookup], **limits: Any) -> AnsweredLookups:
        """Return the answers to a batch. Raises as `query_many`; the `result` of a `BudgetExceeded` is a batch."""
        try:
            return self._batch(lookups, self._reader.query_many(lookups, self._allow_partial, **limits))
        except BudgetExceeded as error:
            if not isinstance(error.result, QueryResults):
                raise
            raise BudgetExceeded(str(error), failed=error.failed, result=self._batch(lookups, error.result)) from error

    def _batch(self, lookups: Sequence[Lookup], results: QueryResults) -> AnsweredLookups:
        self._unanswered = 0
        self.statuses.update(answer.status for answer in results)
        self.earliest = min([self.earliest, *lookups], key=_bound_ms)
        return AnsweredLookups(
            results=results,
            status=next((status for status in ("partial", "truncated") if self.statuses[status]), "complete"),
            failed=results.failed,
            explain=results.explain,
            seen=results.seen,
        )

    @cached_property
    def has_files(self) -> bool:
        """Whether some topic of the index has files."""
        return any(archive.segments().have_links for archive in self._reader.segment_archives.values())

    def left(self) -> int:
        """Return the number of lookups without an answer; reads the rest of the file."""
        return self._unanswered + sum(1 for _ in self._lookups)


def _bound_ms(lookup: Lookup) -> float:
    # a begin of 0 is no bound
    bound_ms = (lookup.begin_ms or None) if lookup.end_ms is None else lookup.end_ms
    return math.inf if bound_ms is None else bound_ms


def look_up_keys(
    out: Output, asking: KeysQuestion, budget: CommandBudget, target: KeysOut | None, **of_pages: Any
) -> int:
    """Answer all lookups, write and summarise the answers, and return the exit code. Raises `BudgetExceeded` last."""
    pages: Pages[Any] = Pages(asking.open, AnsweredLookups(status="partial"), None, budget, every=True, **of_pages)
    shown: list[dict[str, Any]] = []
    answered = 0
    with target.open() if target is not None else contextlib.nullcontext(partial(_show, out, shown)) as write:
        for batch in pages:
            if batch.results is not None:
                write(_table(batch.results.batch.lookups, batch.results, has_files=asking.has_files))
                answered += int((batch.results.counts > 0).sum())
        left = asking.left()
    # the range that hints are about
    begin_ms, end_ms = asking.earliest.begin_ms, asking.earliest.end_ms
    pages.within = RangeOptions(begin_ms, end_ms)
    seconds = (
        likely_seconds("the range", begin_ms or 0, "begins") if end_ms is None else likely_seconds("the range", end_ms)
    )
    pages.more_hints += [] if seconds is None else [seconds]
    total = asking.statuses.total()
    more: dict[str, Any] = {"out": str(target.path)} if target is not None else {}
    counts: dict[str, Any] = {"lookups": total, "found": answered, "statuses": dict(asking.statuses)}
    out.answer(pages.totals(**counts, not_looked_up=left, **more), streamed=target is None)
    if shown:
        of_files = any(row.get("file") is not None for row in shown)
        of_messages = any(row.get("key_hash") is not None for row in shown)
        names = [*("topic", "key", "time"), *_OF_FILES * of_files, *_OF_MESSAGES * (of_messages or not of_files)]
        names += ["source"] * any(row["source"] is not None for row in shown)
        titles = ["queue" if name == "queue_id" else name for name in names]
        right = ("queue", "offset", "size", "row")
        out.table(titles, [[row.get(name) for name in names] for row in shown], right=right)
    by_status = ", ".join(f"{count:,} {name}" for name, count in sorted(asking.statuses.items()))
    pages.conclude(
        out,
        f"{counted(total, 'lookup')}{f' ({by_status})' if by_status else ''}, {answered:,} with entries: "
        f"{pages.count:,} found{pages.as_of()}",
    )
    if pages.last.lost:
        out.line(f"lost permanently: {lost_text(pages.last.lost)}")
    if target is not None:
        out.summary(f"written to {target.path}")
    if truncated := asking.statuses["truncated"]:
        out.line(f"{truncated:,} truncated: more with a greater --max, or --all")
    if left:
        out.line(f"{counted(left, 'more lookup')} not started")
    return pages.finish(out)


def _with_epochs(table: pa.Table) -> pa.Table:
    """Return a table with the time of entries in epoch milliseconds, as JSON has it."""
    at = table.column_names.index("timestamp_ms")
    return table.set_column(at, "timestamp_ms", table["timestamp_ms"].cast(pa.int64()))


def _show(out: Output, shown: list[dict[str, Any]], table: pa.Table) -> None:
    """Write a table: as JSON at once; for people, add its rows to `shown`, which is printed at the end.

    The row of an entry of files has no fields of messages.
    """
    for row in _with_epochs(table).to_pylist():
        if row.get("file") is not None:
            leave_messages_out(row)
        if out.as_json:
            out.record(row)
        else:
            shown.append(row | {"time": format_time(row["timestamp_ms"]) or "nothing found"})
