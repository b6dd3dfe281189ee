"""`tiered-index query TOPIC KEY`: which messages carry a key. Reads a storage, a root beside its writer, or both; writes nothing.

With --messages the messages themselves are the answer: see `messages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from tiered_index.cli.explaining import print_explain, print_failed
from tiered_index.cli.output import Printer
from tiered_index.cli.session import Session, command
from tiered_index.cli.times import format_time, time_option
from tiered_index.errors import InvalidArgument
from tiered_index.service.reader import IndexReader
from tiered_index.types import IndexItem, QueryResult

__all__ = ["query"]

_PARTIAL = 6
_PAGE = 1000
_PAGE_OF_MESSAGES = 256
# messages may have megabytes
_FEW = 64
_COLUMNS = ("time", "queue", "offset", "size", "topic id")


@command
def query(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of the messages.", show_default=False)],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key that they carry.", show_default=False)],
    begin: Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="From here on: epoch ms or ISO 8601.")] = None,
    end: Annotated[int | None, typer.Option(parser=time_option, metavar="T", help="Up to here, inclusive to the second.")] = None,
    max_count: Annotated[
        int | None, typer.Option("--max", help="Answers at most (64); with --all, answers a page (1,000; 256 with --messages).")
    ] = None,
    cursor: Annotated[str | None, typer.Option(help="Continue the truncated answer that gave this cursor.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what was read, file by file, and what it cost.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every answer; with --json one a line, the last line is the status.")] = False,
    allow_partial: Annotated[bool, typer.Option("--allow-partial", help="Answer from what can be read, name the rest (exit 6).")] = False,
    messages: Annotated[bool, typer.Option("--messages", help="Fetch the messages themselves, from --store or archived segments.")] = False,
    store: Annotated[Path | None, typer.Option(help="With --messages: RocketMQ's store directory.", show_default=False)] = None,
    body: Annotated[
        Literal["text", "json", "hex", "none"] | None, typer.Option(help="With --messages: how to show bodies (text).", show_default=False)
    ] = None,
) -> int:
    """Look a key up: where its messages lie, newest first, or the messages themselves. No match is an empty answer and exit code 0.

    With --messages each message comes with its state: local, archived, expired (the broker deleted it, and it was not archived) or missing,
    with the reason. Entries of other keys with an equal hash are dropped and counted.

    [bold]Examples[/bold]

      tiered-index query orders order-4711 --storage s3://bucket/index

      tiered-index query orders order-4711 --root /data/index --begin 2026-11-01 --end 2026-11-02T12:00:00Z --explain

      tiered-index query orders customer-7 --storage file:///tmp/store --all --json

      tiered-index query orders order-4711 --root /data/index --messages --store /home/rocketmq/store --body json
    """
    if not messages and (store is not None or body is not None):
        raise InvalidArgument("--store and --body say how messages are fetched and shown: give --messages, too")
    with IndexReader.open(config=session.config()) as reader:
        page = max_count if max_count is not None else _FEW if not every else _PAGE_OF_MESSAGES if messages else _PAGE
        if messages:
            from tiered_index.cli.messages import MessagePages

            return MessagePages(reader, topic, key, begin, end, page, cursor, allow_partial, every, store, body or "text").show(
                session.out, explain=explain
            )
        pages = _pages(reader, topic, key, begin, end, page, cursor, allow_partial, every=every)
        if every and session.out.as_json:
            return _stream(session.out, pages)
        answers = list(pages)
    last = answers[-1]
    if session.out.as_json:
        session.out.document(last.to_dict())
    else:
        _print(session.out, answers, explain=explain)
    return _PARTIAL if any(answer.status == "partial" for answer in answers) else 0


def _pages(
    reader: IndexReader, topic: str, key: str, begin: int | None, end: int | None, page: int, cursor: str | None, allow_partial: bool,
    *, every: bool,
) -> Iterator[QueryResult]:  # fmt: skip
    while True:
        answer = reader.query(topic, key, begin, end, page, cursor, allow_partial)
        yield answer
        cursor = answer.cursor
        if not every or cursor is None:
            return


def _stream(out: Printer, pages: Iterator[QueryResult]) -> int:
    count = requests = size_bytes = 0
    cost_usd = elapsed_ms = 0.0
    failed: dict[str, object] = {}
    for answer in pages:
        for item in answer.items:
            out.record(item.to_dict())
        count += len(answer)
        requests += answer.explain.requests
        size_bytes += answer.explain.bytes
        cost_usd += answer.explain.cost_usd
        elapsed_ms += answer.explain.elapsed_ms
        failed |= {report.file: report.to_dict() for report in answer.failed}
    costs = {"requests": requests, "bytes": size_bytes, "cost_usd": cost_usd, "elapsed_ms": elapsed_ms}
    out.record({"status": "partial" if failed else "complete", "count": count, "failed": list(failed.values()), "explain": costs})
    return _PARTIAL if failed else 0


def _print(out: Printer, answers: list[QueryResult], *, explain: bool) -> None:
    items = [item for answer in answers for item in answer.items]
    last = answers[-1]
    partial = any(answer.status == "partial" for answer in answers)
    if items:
        out.table(_COLUMNS, map(_row, items), right="queue offset size")
    out.line(f"{len(items):,} found, {'partial' if partial else last.status}")
    if last.cursor is not None:
        out.line(f"more with --cursor {last.cursor}")
    print_failed(out, [report for answer in answers for report in answer.failed])
    if explain:
        for answer in answers:
            print_explain(out, answer.explain)


def _row(item: IndexItem) -> tuple[object, ...]:
    return format_time(item.timestamp_ms), item.queue_id, item.offset, item.size, item.topic_id
