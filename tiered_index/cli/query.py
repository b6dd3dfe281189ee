"""`tiered-index query TOPIC KEY` and `tiered-index message ID`: entries, and messages themselves; writes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typer import Argument, Option

from tiered_index.cli.explaining import CommandBudget, Explaining, Pages, lost_text
from tiered_index.cli.options import LAST, TIME, LimitOptions, ServiceOptions, end_option, time_option
from tiered_index.cli.output import Cell, Output, counted, human_bytes, states
from tiered_index.cli.session import Session, asked_service, command
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.rocketmq.log.layout import KEYS, TAGS, UNIQ_KEY, tag_key
from tiered_index.rocketmq.log.message import BodyFormat
from tiered_index.service.answers.rows import unseen
from tiered_index.service.lookup.budget import LookupBudget, LookupLimits
from tiered_index.service.lookup.messages import Fetched, MessagesResult
from tiered_index.service.reader import IndexReader
from tiered_index.types import IndexItem, QueryResult, format_time

if TYPE_CHECKING:
    from tiered_index.rocketmq.archive.messages import RocketmqMessages

_PAGE = 1000
# A page reads its files anew, so that pages of one size would take a time that grows with the square of the answers.
_LARGEST_PAGE = 100_000
# Small, since messages may have megabytes.
_PAGE_OF_MESSAGES = 256
_FEW = 64
# More than one key can have.
_EVERY = 2**62
_COLUMNS = ("time", "queue", "offset", "size", "topic id", "source")


@command
def query(
    session: Session,
    topic: str | None = Argument(None, metavar="TOPIC", help="Topic of the messages.", show_default=False),
    key: str | None = Argument(None, metavar="KEY", help="Key that they carry.", show_default=False),
    tag: bool = Option(False, "--tag", help="KEY is a tag, of a store ingested with --index-tags."),
    begin: int | None = Option(None, parser=time_option, metavar="T", help=f"From here on: {TIME}."),
    end: int | None = Option(None, parser=end_option, metavar="T", help=f"Up to here: {LAST}."),
    max_count: int | None = Option(
        None, "--max", help="Answers at most (64); with --all, answers a page (1,000, then more; 256 with --messages)."
    ),
    cursor: str | None = Option(None, help="Continue the truncated answer that gave this cursor."),
    explain: bool = Option(False, "--explain", help="Show what was read, file by file, and what it cost."),
    explain_all: bool = Option(False, "--explain-all", help="The same, with a line for each skipped file."),
    every: bool = Option(False, "--all", help="Every answer; with --json one a line, the last line is the status."),
    allow_partial: bool = Option(
        False, "--allow-partial", help="Answer from what can be read, name the rest (exit 6)."
    ),
    messages: bool = Option(
        False, "--messages", help="Fetch the messages themselves, from --store or archived segments."
    ),
    store: Path | None = Option(None, help="With --messages: RocketMQ's store directory.", show_default=False),
    body: Literal["text", "json", "hex", "none"] | None = Option(
        None, help="With --messages: how to show bodies (text).", show_default=False
    ),
    *,
    limits: LimitOptions,
    service: ServiceOptions,
    keys: Path | None = Option(
        None, "--keys", metavar="FILE", help="Look up every key of a CSV, NDJSON or Parquet file.", show_default=False
    ),
    keys_out: Path | None = Option(
        None, "--out", metavar="FILE", help="With --keys: a new .parquet or .ndjson file.", show_default=False
    ),
) -> int:
    """Look a key up: where its messages lie, newest first, or the messages themselves.

    No match is an empty answer and exit code 0.

    With --storage alone the answer has what was uploaded, and says as of when: its newest entry. With --root, on the
    writer's host, it has what was flushed, too.

    With --messages each message comes with its state: local, archived, expired (the broker deleted it, and it was not
    archived) or missing, with the reason. Entries of other keys with an equal hash are dropped and counted.

    Limits are of the whole command, all pages together. Where one is reached, what was found is printed, the error
    names the files that were not read, and the exit code is 6. Requests that open the index aren't counted.

    Several --storage, or one prefix below which indexes lie, are read as one: one ordered answer, where each entry says
    its source. Their messages come from what each has archived.

    With --keys the file's columns are topic, key and, where wanted, begin_ms and end_ms (as --begin and
    --end, which stand for rows without). Each stored file is read once for 100,000 keys, by a service for 1,000.
    Answers have a row for each entry, and one for a key without (with --json one a line, then the status); --max is of
    each key.

    [bold]Examples[/bold]

      tiered-index query orders order-4711 --storage s3://bucket/index

      tiered-index query orders order-4711 --root /data/index --begin 2026-11-01 --end 2026-11-02T12:00:00Z --explain

      tiered-index query orders customer-7 --storage file:///tmp/store --all --json

      tiered-index query orders order-4711 --storage s3://bucket/index --max-requests 20 --timeout 2 --allow-partial

      tiered-index query orders order-4711 --storage s3://bucket/broker-a --storage s3://bucket/broker-b

      tiered-index query orders order-4711 --root /data/index --messages --store /home/rocketmq/store --body json

      tiered-index query orders order-4711 --url http://localhost:8080 --token-file token

      tiered-index query --keys orders.csv --storage s3://bucket/index --out answers.parquet
    """
    if keys is not None:
        given = {
            "TOPIC": topic,
            "--tag": tag or None,
            "--cursor": cursor,
            "--messages": messages or None,
            "--store": store,
            "--body": body,
        }
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InvalidArgument(f"--keys names the keys and shows their entries: leave {wrong[0]} out")
        if service.url is not None:
            raise InvalidArgument(
                "--keys reads the index itself: leave --url out, or call IndexClient.query_many from Python"
            )
    elif topic is None or key is None:
        raise InvalidArgument("give a TOPIC and a KEY, or --keys FILE")
    elif keys_out is not None:
        raise InvalidArgument("--out says where answers to --keys go: give --keys, too")
    if not messages and (store is not None or body is not None):
        raise InvalidArgument("--store and --body say how messages are fetched and shown: give --messages, too")
    budget = CommandBudget(limits.max_requests, limits.max_bytes, limits.timeout)
    client = asked_service(session, service, store=store)
    config = session.reader_config()
    explaining = Explaining(config.prices.as_of, every=explain_all) if explain or explain_all else None
    if keys is not None:
        # it loads what takes a moment
        from tiered_index.cli.key_files import read_lookups
        from tiered_index.cli.keys import KeysOut, look_up_keys

        most = max_count if max_count is not None else _EVERY if every else _FEW
        lookups = read_lookups(keys, begin, end, most)
        target = KeysOut(keys_out) if keys_out is not None else None
        with contextlib.ExitStack() as stack:
            return look_up_keys(
                session.out,
                lambda: stack.enter_context(session.open_reader(config)),
                lookups,
                budget,
                target,
                allow_partial=allow_partial,
                explaining=explaining,
                begin_ms=begin,
                end_ms=end,
            )
    assert topic is not None and key is not None
    key = tag_key(key) if tag else key
    page = max_count if max_count is not None else _FEW if not every else _PAGE_OF_MESSAGES if messages else _PAGE
    with contextlib.ExitStack() as stack:

        def open_lookup() -> Callable[..., Any]:
            if client is not None:
                stack.enter_context(client)
                explained: Any = {
                    "allow_partial": allow_partial,
                    "explain": session.out.as_json or explaining is not None,
                }
                if messages:
                    explained["body"] = body or "text"
                look_up: Any = client.messages if messages else client.query
                return partial(look_up, topic, key, begin, end, page, **explained)
            reader = stack.enter_context(session.open_reader(config))
            pages.reader = reader
            look_up = partial(reader.messages, source=_source(store, reader, config)) if messages else reader.query
            asked = partial(look_up, topic, key, begin, end, allow_partial=allow_partial)
            return partial(asked, max_count=page) if messages or max_count is not None else growing(asked, page)

        nothing: Any = QueryResult(items=(), status="partial")
        if messages:
            nothing = MessagesResult(messages=(), status="partial")
        pages: Pages[Any] = Pages(
            open_lookup, nothing, cursor, budget, every=every, explaining=explaining, begin_ms=begin, end_ms=end
        )
        return _write_messages(session.out, pages, body or "text") if messages else _write(session.out, pages)


def _source(store: Path | None, reader: IndexReader | None, config: IndexConfig) -> RocketmqMessages:
    """Return where messages come from: the store, and the segments that the indexes archived."""
    # imported when asked for: every command imports this module
    from tiered_index.rocketmq.archive.messages import RocketmqMessages

    archives = reader.segment_archives if reader is not None else None
    return RocketmqMessages(store, archives, threads=config.query_threads, root=config.root)


def growing(look_up: Callable[..., QueryResult], first: int) -> Callable[..., QueryResult]:
    """Return what answers page after page, each of four times as many answers as the one before, `first` at first."""
    sizes = (min(_LARGEST_PAGE, first * 4**number) for number in itertools.count())

    def next_page(**more: Any) -> QueryResult:
        return look_up(max_count=next(sizes), **more)

    return next_page


def _write(out: Output, pages: Pages[QueryResult]) -> int:
    is_stream = pages.every and out.as_json
    items: list[IndexItem] = []
    seen: set[tuple[object, ...]] = set()
    for answer in pages:
        for item in unseen(answer.items, seen):
            if is_stream:
                out.record(item.to_dict())
            else:
                items.append(item)
    out.answer(
        pages.totals(len(seen)) if is_stream else pages.last.to_dict() | pages.seen() | pages.error(),
        streamed=is_stream,
    )
    if items:
        own = own_columns(type(items[0]))
        columns = (*_COLUMNS[:-1], *own, *(_COLUMNS[-1:] if any(item.source is not None for item in items) else ()))
        sources = {item.source or "" for item in items}
        # the ends of URIs are enough where they differ
        is_short = len({source.rpartition("/")[2] for source in sources}) == len(sources)
        rows = [_row(item, own, is_short=is_short)[: len(columns)] for item in items]
        out.table(columns, rows, right="queue offset size", brief=[name for name in columns if name != "topic id"])
    out.line(f"{len(items):,} found, {pages.conclusion}{pages.as_of()}{pages.expired}")
    return pages.finish(out)


def own_columns(kind: type[IndexItem]) -> tuple[str, ...]:
    """Return the names of the columns of an index's own."""
    known = {*(f.name for f in dataclasses.fields(IndexItem)), "fingerprint"}
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in known)


def _own_value(value: Any) -> object:
    """Return bytes as text where they are printable ASCII, filled or not, else as hexadecimal text."""
    if not isinstance(value, bytes):
        return value
    text = value.rstrip(b"\0").decode("ascii", "replace")
    return text if text.isascii() and text.isprintable() else value.hex()


def _row(item: IndexItem, own: Sequence[str], *, is_short: bool) -> tuple[object, ...]:
    source = item.source or ""
    shown = Cell(source, source.rpartition("/")[2] if is_short else source)
    values = [_own_value(getattr(item, name)) for name in own]
    return format_time(item.timestamp_ms), item.queue_id, item.offset, item.size, item.topic_id, *values, shown


_SHOWN_APART = (KEYS, TAGS, UNIQ_KEY)


def _write_messages(out: Output, pages: Pages[MessagesResult], body: BodyFormat) -> int:
    """Write a lookup of messages and return the exit code. Raises `BudgetExceeded` afterwards."""
    # imported when asked for, as in `_source`
    from tiered_index.rocketmq.archive.messages import describe_fetched

    count = collisions = requests = size_bytes = 0
    found: Counter[str] = Counter()
    for answer in pages:
        for one in answer.messages:
            shown = describe_fetched(one, body)
            if not out.as_json:
                _write_message(out, one, shown["message"])
                out.line()
            elif pages.every:
                out.record(shown)
            found[one.state] += 1
        count += len(answer)
        collisions += answer.collisions
        requests += answer.message_requests
        size_bytes += answer.message_bytes
    if pages.every:
        costs = {"message_requests": requests, "message_bytes": size_bytes}
        out.answer(pages.totals(count, costs, states=dict(found), collisions=collisions), streamed=True)
    elif out.as_json:
        described = [describe_fetched(one, body) for one in pages.last.messages]
        out.answer(pages.last.to_dict() | {"messages": described} | pages.seen() | pages.error())
    dropped = f"; {counted(collisions, 'entry', 'entries')} of other keys dropped" if collisions else ""
    seen = f"{dropped}{pages.as_of()}{pages.expired}"
    out.line(f"{count:,} found{f' ({states(found)})' if found else ''}, {pages.conclusion}{seen}")
    return pages.finish(out, f"{counted(requests, 'request')} for messages ({human_bytes(size_bytes)}), in all ")


def _write_message(out: Output, fetched: Fetched, shown: dict[str, Any] | None) -> None:
    """Write what became of an entry; `shown` is its message's document, where there is one."""
    item = fetched.item
    if shown is None:
        place = (
            f"{format_time(item.timestamp_ms)}  queue {item.queue_id}  commit log offset {item.offset}"
            f"{f'  of {item.source}' if item.source is not None else ''}"
            if item is not None
            else ""
        )
        out.line(f"{place}  {fetched.state}: {fetched.problem}".strip())
        return
    out.line(
        f"{format_time(shown['store_ms'])}  queue {shown['queue_id']}  queue offset {shown['queue_offset']}  "
        f"{fetched.state}"
    )
    properties = shown["properties"]
    others = {name: value for name, value in properties.items() if name not in _SHOWN_APART}
    out.fields(
        {
            "topic": shown["topic"],
            "message id": shown["msg_id"],
            "unique key": shown["uniq_key"] or None,
            "keys": properties.get(KEYS) or None,
            "tags": shown["tags"] or None,
            "properties": ", ".join(f"{name}={value}" for name, value in others.items()) or None,
            "born": f"{format_time(shown['born_ms'])} at {shown['born_host']}",
            "stored": f"{format_time(shown['store_ms'])} at {shown['store_host']}",
            "commit log": f"offset {shown['physical_offset']}, {shown['size']:,} bytes",
            "consumed again": str(shown["reconsume_times"]) if shown["reconsume_times"] else None,
            "transaction": None if shown["visible"] else "prepared or rolled back: consumers don't see it",
            "source": item.source if item is not None else None,
            "read from": fetched.read_from,
            "note": fetched.problem,
        }
    )
    if body := _body(shown):
        out.lines(f"  {'body':<14}  {body}")


def _body(shown: dict[str, Any]) -> str | None:
    if "body" not in shown:
        return None
    stored = f", {shown['compression']}" if shown["compression"] else ""
    head = f"({shown['body_format']}, {human_bytes(shown['body_bytes'])}{stored})"
    if problem := shown.get("body_problem"):
        head += f" {problem}"
    text = shown["body"]
    if not isinstance(text, str) or shown["body_format"] == "json":
        text = json.dumps(text, indent=2, ensure_ascii=False)
    return f"{head} {text}" if text else head


_FOUND = 1


@command
def message(
    session: Session,
    msg_id: str | None = Argument(
        None, metavar="ID", help="Offset message id, or with --topic a unique key.", show_default=False
    ),
    topic: str | None = Option(
        None, help="Topic: the id is looked up in the index as a unique key.", show_default=False
    ),
    queue_id: int | None = Option(None, "--queue-id", min=0, help="With --offset: the queue.", show_default=False),
    queue_offset: int | None = Option(
        None,
        "--offset",
        min=0,
        help="Offset in the queue of --topic and --queue-id, in place of ID.",
        show_default=False,
    ),
    store: Path | None = Option(None, help="RocketMQ's store directory.", show_default=False),
    body: Literal["text", "json", "hex", "none"] = Option("text", help="How to show the body."),
    cursor: str | None = Option(
        None, help="With --topic: continue the truncated answer that gave it.", show_default=False
    ),
    *,
    limits: LimitOptions,
    service: ServiceOptions,
) -> int:
    """Show one message: by the id that names its place (store host and commit log offset, 32 or 56 hexadecimal digits),
    or with --topic by the unique key that its producer gave it, which needs the index, or by its offset in a queue of
    --store. Of messages with one unique key 32 are shown at a time.

    It is read from --store, or from archived segments where --storage or --root names the index. Exit code 1: the id is
    well-formed, and the message can't be had; its state and the reason are printed.

    [bold]Examples[/bold]

      tiered-index message 7F00000100002A9F0000000000000000 --store /home/rocketmq/store

      tiered-index message 7F00000100002A9F0000000000000000 --storage s3://bucket/index --body json

      tiered-index message 7F00000100002A9F0000000000000000 --storage s3://bucket/index --max-requests 2 --timeout 1.5

      tiered-index message 0A010203000004D218B4AAC200000000 --topic orders --root /data/index --store
      /home/rocketmq/store --json

      tiered-index message --topic orders --queue-id 0 --offset 17 --store /home/rocketmq/store

      tiered-index message 7F00000100002A9F0000000000000000 --url http://localhost:8080 --token-file token
    """
    # imported when asked for, as in `_source`
    from tiered_index.rocketmq.archive.messages import describe_fetched, messages_by_id

    budget = CommandBudget(limits.max_requests, limits.max_bytes, limits.timeout)
    config = session.config()
    client = asked_service(session, service, store=store, offset=queue_offset)
    has_index = client is None and (config.root is not None or config.storage is not None)
    if queue_offset is not None:
        if msg_id is not None or topic is None or queue_id is None or store is None or cursor is not None:
            raise InvalidArgument("--offset needs --topic, --queue-id and --store, and neither ID nor --cursor")
    elif msg_id is None or queue_id is not None:
        raise InvalidArgument("give an ID, or --offset with --topic, --queue-id and --store")
    elif client is None and not has_index and (store is None or topic is not None):
        raise ConfigError(
            "a unique key needs the index: give --root or --storage" if topic else "give --store, --storage or --root"
        )
    if cursor is not None and topic is None:
        raise InvalidArgument("--cursor continues an answer to a unique key: give --topic, too")
    with contextlib.ExitStack() as stack:

        def open_lookup() -> Callable[..., MessagesResult]:
            if client is not None:
                stack.enter_context(client)
                assert msg_id is not None
                return partial(client.message, msg_id, topic, body=body)
            reader = stack.enter_context(IndexReader.open(config=config)) if has_index else None

            def look_up(cursor: str | None, **limits: Any) -> MessagesResult:
                source = _source(store, reader, config)
                if topic is not None and queue_id is not None and queue_offset is not None:
                    if reader is not None:
                        # what a place costs beside a lookup counts, too
                        stack.enter_context(LookupBudget(reader.storage.prices, LookupLimits(**limits)).open())
                    fetched = source.by_queue_offset(topic, queue_id, queue_offset)
                    return MessagesResult(messages=(fetched,), status="complete")
                assert msg_id is not None
                return messages_by_id(reader, source, msg_id, topic, cursor, **limits)

            return look_up

        pages = Pages(open_lookup, MessagesResult(messages=(), status="partial"), cursor, budget, every=False)
        (answer,) = pages
    shown = [describe_fetched(one, body) for one in answer.messages]
    lost = {"lost": [one.to_dict() for one in answer.lost]} if answer.lost else {}
    document = {"messages": shown, "status": answer.status, "cursor": answer.cursor}
    session.out.answer(document | lost | pages.error())
    for one, document_of_one in zip(answer.messages, shown, strict=True):
        _write_message(session.out, one, document_of_one["message"])
    if not answer.messages and pages.exceeded is None:
        session.out.line(f"no {'more messages' if cursor else 'message'} of {topic} with the unique key {msg_id}")
    if answer.lost:
        session.out.line(f"lost for good: {lost_text(answer.lost)}")
    if answer.cursor is not None:
        session.out.line(f"{len(answer.messages)} found, {answer.status}")
        session.out.line(f"more with --cursor {answer.cursor}")
    pages.settle()
    return 0 if any(one.message is not None for one in answer.messages) else _FOUND
