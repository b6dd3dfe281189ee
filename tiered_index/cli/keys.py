"""`query --keys FILE`: lookups in, a table of answers out.

Answers have a row for each entry, in the order of the lookups and each lookup's answer order, and one without entry for
a lookup that found none. Memory: a batch of lookups and its answers.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index.cli.explaining import CommandBudget, Explaining, Pages, lost_text
from tiered_index.cli.export import NdjsonWriter, check_new, json_rows, made_whole
from tiered_index.cli.key_files import FIELDS
from tiered_index.cli.output import Output, counted
from tiered_index.errors import BudgetExceeded, InvalidArgument
from tiered_index.service.answers.results import QueryResults
from tiered_index.service.answers.rows import check_range
from tiered_index.service.lookup.budget import add_up
from tiered_index.service.reader import IndexReader
from tiered_index.types import Answer, Explain, FileReport, Freshness, Lookup, LostFile, format_time, items_table

if TYPE_CHECKING:
    from tiered_index.client import IndexClient

_PARQUET, _NDJSON = (".parquet",), (".ndjson", ".jsonl", ".json")
# lookups that share their reads
_BATCH = 100_000
# lookups of one request to a service, and entries of each: fewer than a service allows, so that others get their turn
_SERVED, _SERVED_PAGE = 1000, 1000
# and bytes of its topics and keys, of which a service allows four times as many
_SERVED_BYTES = 4 << 20
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


def asked_of(client: IndexClient, *, explain: bool) -> Callable[..., _Found]:
    """Return what looks a batch up as `IndexClient.query_many`, and answers longer than a page to their end. Where a
    bound is reached on the way, the `result` of the `BudgetExceeded` is what was found.
    """
    from tiered_index.client.answers import decoded, seen_of

    def look_up(lookups: Sequence[Lookup], allow_partial: bool, **limits: Any) -> _Found:
        budget, seen = CommandBudget(**limits), []
        tables: list[pa.Table] = []
        most = np.array([one.max_count for one in lookups])
        pages = [replace(one, max_count=min(_SERVED_PAGE, one.max_count)) for one in lookups]
        counts, truncated = np.zeros(len(lookups), np.int64), set(range(len(lookups)))
        cursors: dict[int, str | None] = dict.fromkeys(truncated)
        exceeded: BudgetExceeded | None = None
        lacking: set[int] = set()
        while cursors and exceeded is None:
            places = np.array(list(cursors))
            page = [replace(pages[at], cursor=cursor) for at, cursor in cursors.items()]
            try:
                table, status = client.query_many_arrow(
                    page, allow_partial, explain=explain, allow_spent=True, **budget.left()
                )
            except BudgetExceeded as error:
                if not tables:
                    raise
                exceeded = error
                break
            if "exceeded" in status:
                exceeded = BudgetExceeded(status["exceeded"])
            tables.append(table.set_column(0, "lookup", pa.array(places[table["lookup"].to_numpy()])))
            counts += np.bincount(tables[-1]["lookup"].to_numpy(), minlength=len(lookups))
            seen.append(decoded(seen_of, status))
            budget.spend(seen[-1]["explain"])
            more = {int(places[int(at)]): cursor for at, cursor in status["cursors"].items()}
            # a service of an earlier version does not tell which lookups lack what could not be read
            told = status.get("partial", range(len(page)))
            lacking.update(int(places[at]) for at in told)
            truncated = truncated - set(cursors) | more.keys()
            if not more or (counts >= most)[list(more)].any():
                tables = [_once(tables)]
                counts = np.bincount(tables[0]["lookup"].to_numpy(), minlength=len(lookups))
            # behind a page there may be repeats alone, so that one entry more than is wanted says that there are more
            cursors = {at: cursor for at, cursor in more.items() if counts[at] < most[at] + (most[at] > _SERVED_PAGE)}
        entries = _once(tables)
        counts = np.bincount(entries["lookup"].to_numpy(), minlength=len(lookups))
        truncated = truncated.union(np.flatnonzero(counts > most).tolist())
        rank = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = entries.filter(pa.array(rank < np.repeat(most, counts)))
        entries = entries.drop_columns(["lookup", "topic"])
        failed = tuple({(report.source, report.file): report for one in seen for report in one["failed"]}.values())
        ranges = [check_range(lookup.begin_ms, lookup.end_ms, 1) for lookup in lookups]
        failed_of = [
            _failed(one for one in failed if one.begin_ms // 1000 <= high and one.end_ms // 1000 >= low)
            if at in lacking
            else None
            for at, (low, high, _) in enumerate(ranges)
        ]
        statuses = [
            "partial" if files else "truncated" if at in truncated else "complete" for at, files in enumerate(failed_of)
        ]
        cost = add_up([one["explain"] for one in seen], (), sum(one["explain"].elapsed_ms for one in seen))
        whole = {**seen[0], "failed": failed, "explain": cost}
        found = _Found(entries, np.minimum(counts, most), statuses, failed_of, whole)
        if exceeded is not None:
            raise BudgetExceeded(str(exceeded), failed=failed, result=found)
        return found

    return look_up


def _once(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the entries of pages by lookup: one that was put with two times may be on two of them."""
    entries = pa.concat_tables(tables)
    entries = entries.take(np.argsort(entries["lookup"].to_numpy(), kind="stable"))
    if len(tables) == 1:
        return entries
    same = [name for name in entries.column_names if name not in ("timestamp_ms", "size", "topic_id")]
    rows = entries.append_column("row", pa.array(np.arange(len(entries)))).group_by(same, use_threads=False)
    return entries.take(np.sort(rows.aggregate([("row", "min")])["row_min"].to_numpy()))


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
                yield stack.enter_context(contextlib.closing(NdjsonWriter(partial))).write_table


@dataclass(frozen=True, kw_only=True)
class _Batch(Answer):
    """The answers to a batch of lookups; `status`, `unknown_topics`, `lost`, `expired_before_ms` are of all so far."""

    status: str
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

    def __init__(
        self, lookups: Iterator[Lookup], *, allow_partial: bool, most: int, most_bytes: int | None = None
    ) -> None:
        self._lookups = _cut(lookups, most, most_bytes)
        self._allow_partial = allow_partial
        self._next = next(self._lookups, [])
        self._unknown: dict[str, None] = {}
        self._lost: dict[LostFile, None] = {}
        self._expired_before_ms: int | None = None
        self.statuses: Counter[str] = Counter()

    def look_up(self, ask: Callable[..., _Found], cursor: str | None, **limits: Any) -> _Batch:
        """Return the next batch of answers. Raises as `ask`; the `result` of a `BudgetExceeded` is a batch."""
        asked = self._next
        try:
            found = ask(asked, self._allow_partial, **limits)
        except BudgetExceeded as error:
            spent = _Found.of(error.result) if isinstance(error.result, QueryResults) else error.result
            if not isinstance(spent, _Found):
                raise
            self._next = []
            raise BudgetExceeded(str(error), failed=error.failed, result=self._batch(asked, spent)) from error
        self._next = next(self._lookups, [])
        return self._batch(asked, found)

    def _batch(self, asked: Sequence[Lookup], found: _Found) -> _Batch:
        self.statuses.update(found.statuses)
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


def _cut(lookups: Iterator[Lookup], most: int, most_bytes: int | None) -> Iterator[list[Lookup]]:
    """Yield batches of up to `most` lookups, whose topics and keys as JSON have up to `most_bytes`; one at least."""
    if most_bytes is None:
        yield from iter(lambda: list(islice(lookups, most)), [])
        return
    batch: list[Lookup] = []
    left = most_bytes
    for one in lookups:
        left -= (size := len(json.dumps([one.topic, one.key])))
        if batch and (len(batch) == most or left < 0):
            yield batch
            batch, left = [], most_bytes - size
        batch.append(one)
    if batch:
        yield batch


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
    client: IndexClient | None,
) -> int:
    """Look all up, by `client` where there is one, write the answers, say what they are, and return the exit code.
    Raises `BudgetExceeded` then.
    """
    bound: dict[str, Any] = {"most": _BATCH} if client is None else {"most": _SERVED, "most_bytes": _SERVED_BYTES}
    asking = _Asking(lookups, allow_partial=allow_partial, **bound)

    def open_lookup() -> Callable[..., _Batch]:
        if client is not None:
            return partial(asking.look_up, asked_of(client, explain=explaining is not None))
        reader = pages.reader = open_reader()
        return partial(asking.look_up, lambda *asked, **limits: _Found.of(reader.query_many(*asked, **limits)))

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
