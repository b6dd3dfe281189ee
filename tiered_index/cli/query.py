"""`tiered-index query TOPIC KEY`: entries, page by page; writes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from typer import Argument, Option

from tiered_index.cli.kafka import KafkaClientOptions, open_kafka_broker, open_kafka_messages
from tiered_index.cli.messages import messages_source, write_messages
from tiered_index.cli.options import LimitOptions, RangeOptions, ServiceOptions
from tiered_index.cli.output import Output
from tiered_index.cli.paging import CommandBudget, Pages
from tiered_index.cli.session import Session, asked_service, command
from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.log.layout import TAGS_SOURCE, tag_key
from tiered_index.service.read.messages import MessagesResult
from tiered_index.service.reader import IndexReader
from tiered_index.types import IndexItem, QueryResult, format_time

_PAGE = 1000
# Each page reads the files again: with pages of constant size the time would grow with the square of the entries.
_LARGEST_PAGE = 100_000
# Small: a message may have megabytes.
_PAGE_OF_MESSAGES = 256
_FEW = 64
# More entries than a key can have.
_EVERY = 2**62


@command
def query(
    session: Session,
    topic: str | None = Argument(None, metavar="TOPIC", help="Topic of the messages."),
    key: str | None = Argument(None, metavar="KEY", help="Key of the messages."),
    tag: bool = Option(False, "--tag", help="Look up KEY as a tag. The index must have tags (`ingest --index-tags`)."),
    max_count: int | None = Option(
        None,
        "--max",
        help="Limit of entries (default 64). With --all: entries per page (default 1,000; with --messages 256).",
    ),
    cursor: str | None = Option(None, help="Continue the truncated answer that gave this cursor."),
    explain: bool = Option(False, "--explain", help="Print the files, requests, bytes and cost of the lookup."),
    every: bool = Option(
        False, "--all", help="Print all entries. With --json: one per line; the last line is the status."
    ),
    allow_partial: bool = Option(
        False, "--allow-partial", help="Answer from the readable files, and name the others (exit code 6)."
    ),
    messages: bool = Option(False, "--messages", help="Print the messages, from --store, a broker or the archive."),
    store: Path | None = Option(None, help="With --messages: folder of the RocketMQ store."),
    body: Literal["text", "json", "hex", "none"] | None = Option(
        None, help="With --messages: form of the bodies (default text)."
    ),
    raw: bool = Option(
        False, "--raw", help="With --messages: print the whole of values of more than 4,000 characters or 50 lines."
    ),
    *,
    within: RangeOptions,
    limits: LimitOptions,
    service: ServiceOptions,
    kafka: KafkaClientOptions,
    keys: Path | None = Option(
        None, "--keys", metavar="FILE", help="Look up every row of a CSV, NDJSON or Parquet file."
    ),
    keys_out: Path | None = Option(
        None, "--out", metavar="FILE", help="With --keys: new .parquet or .ndjson file for the answers."
    ),
) -> int:
    """Look up a key: print its entries, the newest first, or its messages.

    [bold]Examples[/bold]

      tiered-index query orders order-4711 --storage s3://bucket/index

      tiered-index query orders order-4711 --root /data/index --begin 2026-11-01 --end 2026-11-02T12:00:00Z --explain

      tiered-index query orders customer-7 --storage file:///tmp/store --all --json

      tiered-index query orders order-4711 --storage s3://bucket/index --max-requests 20 --timeout 2

      tiered-index query orders order-4711 --storage s3://bucket/broker-a --storage s3://bucket/broker-b

      tiered-index query orders order-4711 --root /data/index --messages --store /home/rocketmq/store --body json

      tiered-index query orders order-4711 --root /data/index --messages --kafka bootstrap.servers=broker:9092

      tiered-index query orders order-4711 --url http://localhost:8080 --token-file token

      tiered-index query --keys orders.csv --storage s3://bucket/index --out answers.parquet

    No match is an empty answer with exit code 0.

    With --storage alone the answer has the uploaded entries, and states the time of the newest one. With --root, on the
    writer's host, it also has entries that are flushed but not uploaded.

    With --messages each message has a state: local, archived, expired (deleted by the broker, not archived), erased, or
    missing with the reason. Messages of other keys with the same hash are dropped and counted.

    --max-requests, --max-bytes and --timeout limit the whole command, all pages together. At a limit the command prints
    the entries found so far, names the files that it did not read, and ends with exit code 6. With --url it prints the
    entries only if you pass --allow-partial. Requests that open the index are not counted.

    To read several indexes as one, repeat --storage, or name a prefix above them. Each entry then has the URI of its
    index as source. Messages come from the archived segments of each index.

    The file of --keys has the columns topic, key and optionally begin_ms and end_ms. --begin and --end apply to
    rows without these. --max applies to each key, unless you pass --all. The command looks up the keys in batches of
    100,000, and reads each stored file once per batch. The output has a row for each entry, and one row for a key
    without entries. With --json each row is one line, and the last line is the status.
    """
    if keys is not None:
        options = {"TOPIC": topic, "--tag": tag, "--cursor": cursor, "--messages": messages, "--store": store}
        if wrong := [
            name for name, value in (options | {"--body": body, "--raw": raw}).items() if value not in (None, False)
        ]:
            raise InvalidArgument(f"leave {wrong[0]} out: --keys can't be used with it")
        if service.url is not None:
            raise InvalidArgument("--keys can't be used with --url: call IndexClient.query_many from Python")
    elif topic is None or key is None:
        raise InvalidArgument("give a TOPIC and a KEY, or --keys FILE")
    elif keys_out is not None:
        raise InvalidArgument("--out needs --keys")
    if not messages and (store is not None or body is not None or raw or kafka != KafkaClientOptions()):
        raise InvalidArgument("--store, --body, --raw and --kafka need --messages")
    budget = CommandBudget(limits.of_lookups)
    client = asked_service(session, service, store=store, **dataclasses.asdict(kafka))
    config = session.reader_config()
    of_pages: dict[str, Any] = {"within": within, "prices_as_of": config.prices.as_of if explain else None}
    if keys is not None:
        # imported here: it loads slow packages
        from tiered_index.cli.keys import KeysOut, look_up_keys
        from tiered_index.sources.keys import read_lookups

        most = _EVERY if every else _FEW if max_count is None else max_count
        lookups = read_lookups(keys, within.begin, within.end, most)
        target = KeysOut(keys_out) if keys_out is not None else None
        of_pages |= {"allow_partial": allow_partial}
        with contextlib.ExitStack() as stack:
            return look_up_keys(stack, session, config, lookups, budget, target, **of_pages)
    assert topic is not None and key is not None
    asked_tag, key = (key, tag_key(key)) if tag else (None, key)
    page = max_count if max_count is not None else _FEW if not every else _PAGE_OF_MESSAGES if messages else _PAGE
    with contextlib.ExitStack() as stack:

        def open_lookup() -> Callable[..., Any]:
            if client is not None:
                stack.enter_context(client)
                explained: Any = {"allow_partial": allow_partial, "explain": session.out.as_json or explain}
                if messages:
                    explained["body"] = body or "text"
                look_up: Any = client.messages if messages else client.query
                bounds = {"begin_ms": within.begin, "end_ms": within.end, "max_count": page}
                return partial(look_up, topic, key, **bounds, **explained)
            reader = stack.enter_context(session.open_reader(config, with_writers=True))
            pages.reader = reader
            look_up = reader.query
            if messages:
                if (records := open_kafka_messages(reader, open_kafka_broker(kafka), topic)) is not None:
                    stack.callback(records.close)
                look_up = partial(reader.messages, source=records or messages_source(store, reader, config))
            ask = partial(look_up, topic, key, within.begin, within.end, allow_partial=allow_partial)
            return partial(ask, max_count=page) if messages or max_count is not None else growing(ask, page)

        of_messages = MessagesResult(messages=(), status="partial")
        nothing: Any = of_messages if messages else QueryResult(items=(), status="partial")
        if asked_tag is not None:
            open_lookup = partial(_with_tags, session.out, open_lookup, lambda: pages.reader, asked_tag)
        pages: Pages[Any] = Pages(open_lookup, nothing, cursor, budget, every=every, **of_pages)
        if messages:
            return write_messages(session.out, pages, topic, body or "text", raw=raw)
        return _write(session.out, pages, topic)


def _with_tags(
    out: Output, open_lookup: Callable[[], Callable[..., Any]], reader: Callable[[], IndexReader | None], tag: str
) -> Callable[..., Any]:
    """Return the opened lookup of `tag`. It raises `InvalidArgument` if it finds nothing in an index without tags.

    A service that reads a root or writes an index does not tell whether it has tags: a remark says so.
    """
    look_up = open_lookup()

    def next_page(*, cursor: str | None, **more: Any) -> Any:
        answer = look_up(cursor=cursor, **more)
        if len(answer) or cursor is not None or answer.status != "complete":
            return answer
        here = reader()
        known = [source.positions for source in answer.freshness] if here is None else [here.durable_positions()]
        if not known:
            out.remark(f"no message with the tag {tag!r} was found; an index has tags only with `ingest --index-tags`")
        elif not any(TAGS_SOURCE in positions for positions in known):
            raise InvalidArgument(
                f"no message with the tag {tag!r} was found, and the index has no tags: run `ingest --index-tags`, "
                "with --restart if the store has been indexed before"
            )
        return answer

    return next_page


def growing(look_up: Callable[..., QueryResult], first: int) -> Callable[..., QueryResult]:
    """Return a function that looks up the next page: `first` entries, then four times as many as in the page before."""
    sizes = (min(_LARGEST_PAGE, first * 4**number) for number in itertools.count())

    def next_page(**more: Any) -> QueryResult:
        return look_up(max_count=next(sizes), **more)

    return next_page


def _write(out: Output, pages: Pages[QueryResult], topic: str) -> int:
    is_stream = pages.every and out.as_json
    items: list[IndexItem] = []
    count = 0
    for answer in pages:
        count += len(answer)
        for item in answer.items:
            if is_stream:
                out.record(item.to_dict())
            else:
                items.append(item)
    out.answer(
        pages.totals(count) if is_stream else pages.last.to_dict() | pages.seen() | pages.error(), streamed=is_stream
    )
    if items:
        own = own_columns(type(items[0]))
        queue, several = pages.words(topic).queue, any(item.source is not None for item in items)
        columns = ("time", queue, "offset", "size", "topic id", *own, *(("source",) if several else ()))
        rows = [_row(item, own)[: len(columns)] for item in items]
        out.table(columns, rows, right=(queue, "offset", "size"))
    out.line(f"{len(items):,} found, {pages.conclusion}{pages.as_of()}{pages.expired}")
    return pages.finish(out)


def own_columns(kind: type[IndexItem]) -> tuple[str, ...]:
    """Return the names of the columns that this index has beside those of every index."""
    known = {*(f.name for f in dataclasses.fields(IndexItem)), "fingerprint"}
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in known)


def _own_value(value: Any) -> object:
    """Return bytes as text if they are printable ASCII (padded with zeros or not), else as hexadecimal."""
    if not isinstance(value, bytes):
        return value
    text = value.rstrip(b"\0").decode("ascii", "replace")
    return text if text.isascii() and text.isprintable() else value.hex()


def _row(item: IndexItem, own: Sequence[str]) -> tuple[object, ...]:
    values = [_own_value(getattr(item, name)) for name in own]
    return format_time(item.timestamp_ms), item.queue_id, item.offset, item.size, item.topic_id, *values, item.source
