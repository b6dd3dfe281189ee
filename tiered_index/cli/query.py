"""`tiered-index query TOPIC KEY`: which messages carry a key.

Reads a storage, a root beside its writer, or both; writes nothing. With --messages the messages themselves are the
answer: see `messages.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tiered_index.cli.explaining import CommandBudget, Explaining, Pages
from tiered_index.cli.options import CacheDir, MaxBytes, MaxRequests, Timeout
from tiered_index.cli.output import Output
from tiered_index.cli.session import Session, command
from tiered_index.cli.times import format_time, time_option
from tiered_index.errors import InvalidArgument
from tiered_index.service.lookup.messages import MessagesResult
from tiered_index.service.reader import IndexReader
from tiered_index.types import IndexItem, QueryResult

_PAGE = 1000
# Small, since messages may have megabytes.
_PAGE_OF_MESSAGES = 256
_FEW = 64
_COLUMNS = ("time", "queue", "offset", "size", "topic id", "source")


@command
def query(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of the messages.", show_default=False)],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key that they carry.", show_default=False)],
    begin: Annotated[
        int | None, typer.Option(parser=time_option, metavar="T", help="From here on: epoch ms or ISO 8601.")
    ] = None,
    end: Annotated[
        int | None, typer.Option(parser=time_option, metavar="T", help="Up to here, inclusive to the second.")
    ] = None,
    max_count: Annotated[
        int | None,
        typer.Option("--max", help="Answers at most (64); with --all, answers a page (1,000; 256 with --messages)."),
    ] = None,
    cursor: Annotated[str | None, typer.Option(help="Continue the truncated answer that gave this cursor.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what was read, file by file, and what it cost.")
    ] = False,
    explain_all: Annotated[
        bool, typer.Option("--explain-all", help="The same, with a line for each skipped file.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Every answer; with --json one a line, the last line is the status.")
    ] = False,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Answer from what can be read, name the rest (exit 6).")
    ] = False,
    messages: Annotated[
        bool, typer.Option("--messages", help="Fetch the messages themselves, from --store or archived segments.")
    ] = False,
    store: Annotated[
        Path | None, typer.Option(help="With --messages: RocketMQ's store directory.", show_default=False)
    ] = None,
    body: Annotated[
        Literal["text", "json", "hex", "none"] | None,
        typer.Option(help="With --messages: how to show bodies (text).", show_default=False),
    ] = None,
    max_requests: MaxRequests = None,
    max_bytes: MaxBytes = None,
    timeout: Timeout = None,
    cache_dir: CacheDir = None,
) -> int:
    """Look a key up: where its messages lie, newest first, or the messages themselves.

    No match is an empty answer and exit code 0.

    With --messages each message comes with its state: local, archived, expired (the broker deleted it, and it was not
    archived) or missing, with the reason. Entries of other keys with an equal hash are dropped and counted.

    Limits are of the whole command, all pages together. Where one is reached, what was found is printed, the error
    names the files that were not read, and the exit code is 6. Requests that open the index aren't counted.

    Several --storage, or one prefix below which indexes lie, are read as one: one ordered answer, where each entry says
    its source.

    [bold]Examples[/bold]

      tiered-index query orders order-4711 --storage s3://bucket/index

      tiered-index query orders order-4711 --root /data/index --begin 2026-11-01 --end 2026-11-02T12:00:00Z --explain

      tiered-index query orders customer-7 --storage file:///tmp/store --all --json

      tiered-index query orders order-4711 --storage s3://bucket/index --max-requests 20 --timeout 2 --allow-partial

      tiered-index query orders order-4711 --storage s3://bucket/broker-a --storage s3://bucket/broker-b

      tiered-index query orders order-4711 --root /data/index --messages --store /home/rocketmq/store --body json
    """
    if not messages and (store is not None or body is not None):
        raise InvalidArgument("--store and --body say how messages are fetched and shown: give --messages, too")
    budget = CommandBudget(max_requests, max_bytes, timeout)
    config = session.reader_config(cache_dir=cache_dir)
    explaining = Explaining(config.prices.as_of, every=explain_all) if explain or explain_all else None
    page = max_count if max_count is not None else _FEW if not every else _PAGE_OF_MESSAGES if messages else _PAGE
    with contextlib.ExitStack() as stack:

        def reader() -> IndexReader:
            return stack.enter_context(session.open_reader(config))

        if messages:
            from tiered_index.cli.messages import write_messages
            from tiered_index.rocketmq.archive.messages import RocketmqMessages

            def open_messages() -> Callable[..., MessagesResult]:
                index = reader()
                source = RocketmqMessages(store, index.segment_archive, threads=config.query_threads, root=config.root)
                return partial(index.messages, topic, key, begin, end, page, allow_partial=allow_partial, source=source)

            none = MessagesResult(messages=(), status="partial")
            pages = Pages(open_messages, none, cursor, budget, every=every, explaining=explaining)
            return write_messages(session.out, pages, body or "text")

        def open_lookup() -> Callable[..., QueryResult]:
            return partial(reader().query, topic, key, begin, end, page, allow_partial=allow_partial)

        nothing = QueryResult(items=(), status="partial")
        return _write(session.out, Pages(open_lookup, nothing, cursor, budget, every=every, explaining=explaining))


def _write(out: Output, pages: Pages[QueryResult]) -> int:
    is_stream = pages.every and out.as_json
    items: list[IndexItem] = []
    seen: set[tuple[object, ...]] = set()
    for answer in pages:
        for item in _unseen(answer.items, seen):
            if is_stream:
                out.record(item.to_dict())
            else:
                items.append(item)
    out.answer(pages.totals(len(seen)) if is_stream else pages.last.to_dict() | pages.error(), streamed=is_stream)
    if items:
        columns = len(_COLUMNS) if any(item.source is not None for item in items) else -1
        out.table(_COLUMNS[:columns], [_row(item)[:columns] for item in items], right="queue offset size")
    out.line(f"{len(items):,} found, {pages.status}")
    return pages.finish(out)


def _unseen(items: Iterable[IndexItem], seen: set[tuple[object, ...]]) -> Iterator[IndexItem]:
    """Yield the items not in `seen` yet: an entry that was put with two times may be on two pages."""
    for item in items:
        columns = [f.name for f in dataclasses.fields(item) if f.metadata.get("identity")]
        identity = (item.source, item.queue_id, item.offset, *(getattr(item, name) for name in columns))
        if identity not in seen:
            seen.add(identity)
            yield item


def _row(item: IndexItem) -> tuple[object, ...]:
    return format_time(item.timestamp_ms), item.queue_id, item.offset, item.size, item.topic_id, item.source
