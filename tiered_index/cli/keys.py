"""`query --keys FILE`: lookups in, a table of answers out.

Answers have a row for each entry, in the order of the lookups and each lookup's answer order, and one without entry for
a lookup that found none. Memory: a batch of lookups and its answers.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.cli.explaining import Explaining, lost_text
from tiered_index.cli.export import NdjsonWriter, check_new, json_rows, made_whole
from tiered_index.cli.output import Output, counted
from tiered_index.cli.paging import CommandBudget, Pages
from tiered_index.errors import BudgetExceeded, InvalidArgument
from tiered_index.service.answers.results import QueryResults
from tiered_index.service.reader import IndexReader
from tiered_index.sources.keys import FIELDS
from tiered_index.types import (
    Answer,
    Explain,
    FileReport,
    Freshness,
    Lookup,
    LostFile,
    Status,
    format_time,
    items_table,
)

_PARQUET, _NDJSON = (".parquet",), (".ndjson", ".jsonl", ".json")
# lookups that share their reads
_BATCH = 100_000
_SHOWN = ("topic", "key", "time", "queue", "offset", "size", "source")
_FAILED = pa.list_(pa.struct([("file", pa.string()), ("error", pa.string())]))
_ASKED = pa.schema(
    [
        *(("topic", pa.string()), ("key", pa.string()), ("begin_ms", pa.int64()), ("end_ms", pa.int64())),
        *(("status", pa.string()), ("failed", _FAILED), ("position", pa.int32())),
    ]
)


class _Found(NamedTuple):
    """The answers to n lookups: `entries`, by lookup and in answer order, `counts` (i64, n) of them, and of each lookup
    its status and the files that could not be read. The rest is of all lookups.
    """

    entries: pa.Table
    counts: npt.NDArray[np.int64]
    statuses: list[str]
    failed_of: list[list[dict[str, Any]] | None]
    whole: dict[str, Any]

    @classmethod
    def of(cls, results: QueryResults) -> _Found:
        """Return what `query_many` has found."""
        answers = list(results)
        return cls(
            items_table([item for answer in answers for item in answer], results.item_type).drop_columns(["topic"]),
            np.array([len(answer) for answer in answers], np.int64),
            [answer.status for answer in answers],
            [_failed(answer.failed) for answer in answers],
            {
                "failed": results.failed,
                "explain": results.explain,
                "freshness": results.freshness,
                "unknown_topics": tuple(dict.fromkeys(name for answer in answers for name in answer.unknown_topics)),
                "lost": tuple(dict.fromkeys(lost for answer in answers for lost in answer.lost)),
                "expired_before_ms": max(
                    [ms for one in answers if (ms := one.expired_before_ms) is not None], default=None
                ),
            },
        )


def _failed(reports: Iterable[FileReport]) -> list[dict[str, Any]] | None:
    return [{"file": report.file, "error": report.error} for report in reports] or None


def _table(lookups: Sequence[Lookup], found: _Found) -> pa.Table:
    """Return the answers to lookups, a row an entry; the columns of a lookup without entries are null."""
    counts, entries = found.counts, found.entries
    if clash := [name for name in entries.column_names if name.lower() in _ASKED.names]:
        raise InvalidArgument(
            f"the index's entries have a column {clash[0]!r}, which is the name of a column of answers: look the keys "
            "up from Python, by query_many"
        )
    lookup = np.repeat(np.arange(len(lookups)), np.maximum(counts, 1))
    first = np.cumsum(np.maximum(counts, 1)) - np.maximum(counts, 1)
    position = np.arange(len(lookup)) - first[lookup]
    none = counts[lookup] == 0
    entry = (np.cumsum(counts) - counts)[lookup] + position
    asked: dict[str, list[Any]] = {name: [getattr(one, name) for one in lookups] for name in FIELDS}
    asked["status"], asked["failed"] = found.statuses, found.failed_of
    rows = pa.table({name: pa.array(values, _ASKED.field(name).type) for name, values in asked.items()}).take(lookup)
    table = rows.append_column("position", pa.array(position, pa.int32(), mask=none))
    for name, column in zip(entries.column_names, entries.take(pa.array(entry, mask=none)).columns, strict=True):
        table = table.append_column(name, column)
    return table


class KeysOut:
    """A file of answers, which is there when the block ends. Raises `InvalidArgument` where it can't be made."""

    def __init__(self, path: Path) -> None:
        if not path.name.endswith((*_PARQUET, *_NDJSON)):
            raise InvalidArgument(f"--out {path}: answers are written as .parquet or .ndjson (.jsonl, .json)")
        check_new(path, "answers are written to a file of their own")
        self.path = path

    @contextlib.contextmanager
    def open(self) -> Iterator[Callable[[pa.Table], None]]:
        """Yield what writes a table. Raises `DiskFull`."""
        with made_whole(self.path) as partial, contextlib.ExitStack() as stack:
            if self.path.name.endswith(_PARQUET):
                writers: list[pq.ParquetWriter] = []

                def write(table: pa.Table) -> None:
                    if not writers:
                        writers.append(stack.enter_context(pq.ParquetWriter(partial, table.schema)))
                    writers[0].write_table(table)

                yield write
            else:
                yield NdjsonWriter(stack.enter_context(partial.open("wb"))).write_table


@dataclass(frozen=True, kw_only=True)
class _Batch(Answer):
    """The answers to a batch of lookups; `status`, `unknown_topics`, `lost`, `expired_before_ms` are of all so far."""

    status: Status
    lookups: Sequence[Lookup] = ()
    found: _Found | None = None
    # whatever it is, there are more batches
    cursor: str | None = None
    failed: tuple[FileReport, ...] = ()
    explain: Explain = field(default_factory=Explain)
    freshness: tuple[Freshness, ...] = ()
    unknown_topics: tuple[str, ...] = ()
    lost: tuple[LostFile, ...] = ()
    expired_before_ms: int | None = None

    def __len__(self) -> int:
        return 0 if self.found is None else int(self.found.counts.sum())


class _Asking:
    """Looks a batch up after the other; counts by status what was, and what was not yet."""

    def __init__(self, lookups: Iterator[Lookup], *, allow_partial: bool) -> None:
        self._lookups = iter(lambda: list(islice(lookups, _BATCH)), [])
        self._allow_partial = allow_partial
        self._next = next(self._lookups, [])
        self._unknown: dict[str, None] = {}
        self._lost: dict[LostFile, None] = {}
        self._expired_before_ms: int | None = None
        self.statuses: Counter[str] = Counter()
        # the one whose range ends first, or begins first where it has no end
        self.earliest = Lookup("", "")

    def look_up(self, reader: IndexReader, cursor: str | None, **limits: Any) -> _Batch:
        """Return the next batch of answers. Raises as `query_many`; the `result` of a `BudgetExceeded` is a batch."""
        asked = self._next
        try:
            found = _Found.of(reader.query_many(asked, self._allow_partial, **limits))
        except BudgetExceeded as error:
            if not isinstance(error.result, QueryResults):
                raise
            self._next, spent = [], _Found.of(error.result)
            raise BudgetExceeded(str(error), failed=error.failed, result=self._batch(asked, spent)) from error
        self._next = next(self._lookups, [])
        return self._batch(asked, found)

    def _batch(self, asked: Sequence[Lookup], found: _Found) -> _Batch:
        self.statuses.update(found.statuses)
        self.earliest = min([self.earliest, *asked], key=_bound_ms)
        self._unknown |= dict.fromkeys(found.whole["unknown_topics"])
        self._lost |= dict.fromkeys(found.whole["lost"])
        expired = (self._expired_before_ms, found.whole["expired_before_ms"])
        self._expired_before_ms = max([ms for ms in expired if ms is not None], default=None)
        return _Batch(
            lookups=asked,
            found=found,
            status=next((each for each in ("partial", "truncated") if self.statuses[each]), "complete"),
            cursor="more" if self._next else None,
            failed=found.whole["failed"],
            explain=found.whole["explain"],
            freshness=found.whole["freshness"],
            unknown_topics=tuple(self._unknown),
            lost=tuple(self._lost),
            expired_before_ms=self._expired_before_ms,
        )

    def left(self) -> int:
        """Return how many lookups have no answer; they are read for that."""
        return len(self._next) + sum(map(len, self._lookups))


def _bound_ms(lookup: Lookup) -> float:
    # 0 is the begin of all
    bound_ms = (lookup.begin_ms or None) if lookup.end_ms is None else lookup.end_ms
    return math.inf if bound_ms is None else bound_ms


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
    """Look all keys up, write and summarise the answers, and return the exit code. Raises `BudgetExceeded` last."""
    asking = _Asking(lookups, allow_partial=allow_partial)

    def open_lookup() -> Callable[..., _Batch]:
        reader = pages.reader = open_reader()
        return partial(asking.look_up, reader)

    bounds: Any = {"begin_ms": begin_ms, "end_ms": end_ms}
    pages: Pages[Any] = Pages(
        open_lookup, _Batch(status="partial"), None, budget, every=True, explaining=explaining, **bounds
    )
    shown: list[tuple[object, ...]] = []
    entries = found = 0
    with target.open() if target is not None else contextlib.nullcontext(partial(_show, out, shown)) as write:
        for batch in pages:
            if batch is not pages.nothing:
                write(_table(batch.lookups, batch.found))
                found += int((batch.found.counts > 0).sum())
            entries += len(batch)
        left = asking.left()
    # what hints are about
    pages.begin_ms, pages.end_ms = asking.earliest.begin_ms, asking.earliest.end_ms
    total = asking.statuses.total()
    more: dict[str, Any] = {"out": str(target.path)} if target is not None else {}
    counts: dict[str, Any] = {"lookups": total, "found": found, "statuses": dict(asking.statuses)}
    out.answer(pages.totals(entries, **counts, not_looked_up=left, **more), streamed=target is None)
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
