"""`tiered-index query TOPIC KEY`: entries, page by page; writes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tiered_index.base.units import format_time
from tiered_index.cli.look_up.commands import QueryOptions
from tiered_index.cli.look_up.message import (
    NO_MESSAGES,
    MessagesOfKeys,
    leave_messages_out,
    write_messages,
    write_values,
)
from tiered_index.cli.look_up.paging import CommandBudget, Pages, connectors_of, key_names_of, similar_with_entries
from tiered_index.cli.options import LimitOptions, RangeOptions, ServiceOptions
from tiered_index.cli.output import Output
from tiered_index.cli.places import opened_places
from tiered_index.cli.session import Session, asked_service
from tiered_index.config import IndexConfig
from tiered_index.connectors.kafka.spec import KafkaClientOptions
from tiered_index.connectors.read_again import MessageSources
from tiered_index.errors import InvalidArgument
from tiered_index.types import IndexItem, QueryResult, describe_places, own_columns

if TYPE_CHECKING:
    from tiered_index.client import IndexClient
    from tiered_index.service.reader import IndexReader

# the most that a service may return at once
_PAGE_OF_SERVICE = 1000
# More entries than a key can have.
_EVERY = 2**62


def query(
    session: Session,
    *,
    topic: str | None,
    key: str | None,
    options: QueryOptions,
    within: RangeOptions,
    limits: LimitOptions,
    service: ServiceOptions,
    kafka: KafkaClientOptions,
) -> int:
    """Look up a key: print its entries, the newest first, or its messages."""
    options.check(topic, key, service.url, kafka)
    if options.rows and session.out.as_json:
        raise InvalidArgument("leave --json out: --rows prints JSON")
    budget = CommandBudget(limits.of_lookups)
    client = asked_service(session, service, store=options.store, **dataclasses.asdict(kafka))
    config = session.reader_config()
    of_pages: dict[str, Any] = {"within": within, "prices_as_of": config.prices.as_of if options.explain else None}
    with contextlib.ExitStack() as stack:
        if options.keys is not None:
            # imported here: it loads slow packages
            from tiered_index.cli.look_up.keys import KeysOut, KeysQuestion, look_up_keys
            from tiered_index.connectors.files.rows.lookups import read_lookups

            most = _EVERY if options.every and not options.messages else options.page()
            lookups = read_lookups(options.keys, within.begin, within.end, most)
            target = KeysOut(options.keys_out) if options.keys_out is not None else None
            opened = partial(_open_in, stack, session, config)
            if options.messages:
                sources_of = partial(_sources_in, stack, config, options.store, kafka)
                how = {"every": options.every, "allow_partial": options.allow_partial}
                keys = MessagesOfKeys(opened, lookups, sources_of, **how)
                of_keys = Pages(keys.open, NO_MESSAGES, None, budget, every=True, **of_pages)
                if options.rows:
                    return write_values(session.out, of_keys)
                return write_messages(session.out, of_keys, keys, options.body or "text", raw=options.raw)
            asking = KeysQuestion(opened, lookups, allow_partial=options.allow_partial)
            return look_up_keys(session.out, asking, budget, target, **of_pages)
        assert topic is not None and key is not None
        question = KeyQuestion(stack, session, config, client, topic, key, options, within, kafka)
        nothing = NO_MESSAGES if options.messages else QueryResult(items=(), status="partial")
        of_pages |= {} if options.tag else {"similar": question.similar}
        of_pages |= {} if client is None else {"connectors": partial(connectors_of, client)}
        pages: Pages[Any] = Pages(question.open, nothing, options.cursor, budget, every=options.every, **of_pages)
        if options.rows:
            return write_values(session.out, pages)
        if options.messages:
            return write_messages(session.out, pages, topic, options.body or "text", raw=options.raw)
        return _write(session.out, pages, topic)


def _open_in(stack: contextlib.ExitStack, session: Session, config: IndexConfig) -> IndexReader:
    """Open the index, which `stack` closes."""
    return stack.enter_context(session.open_reader(config, with_writers=True))


def _sources_in(
    stack: contextlib.ExitStack, config: IndexConfig, store: str | None, kafka: KafkaClientOptions, reader: IndexReader
) -> MessageSources:
    """Return the sources of messages, which `stack` closes."""
    sources = MessageSources(reader, config, opened_places(store, kafka))
    return stack.enter_context(contextlib.closing(sources))


@dataclass(frozen=True)
class KeyQuestion:
    """The lookup of one key, or with `tag` of a tag: of its entries or, with `messages`, of its messages.

    `stack` closes what it opens.
    """

    stack: contextlib.ExitStack
    session: Session
    config: IndexConfig
    client: IndexClient | None
    topic: str
    named: str
    options: QueryOptions
    within: RangeOptions
    kafka: KafkaClientOptions

    @property
    def key(self) -> str:
        """The key in the index."""
        if not self.options.tag:
            return self.named
        # imported here: other keys need nothing of RocketMQ
        from tiered_index.connectors.rocketmq.log.layout import tag_key

        return tag_key(self.named)

    def open(self) -> tuple[IndexReader | None, list[Callable[..., Any]]]:
        """Open the index or the client, as `Pages.open`."""
        reader, look_up = (None, self._of_service(self.client)) if self.client is not None else self._of_index()
        return reader, [partial(self._page_of_tag, reader, look_up) if self.options.tag else look_up]

    def similar(self, reader: IndexReader | None) -> list[str]:
        """Return what `similar_with_entries` finds in the range of the command."""
        index = self.client if reader is None else reader
        return similar_with_entries(index, self.topic, self.key, self.within)

    def _of_service(self, client: IndexClient) -> Callable[..., Any]:
        self.stack.enter_context(client)
        options, within = self.options, self.within
        bounds: dict[str, Any] = {
            "begin_ms": within.begin,
            "end_ms": within.end,
            "max_count": options.page(_PAGE_OF_SERVICE),
        }
        bounds |= {"allow_partial": options.allow_partial, "explain": self.session.out.as_json or options.explain}
        if options.messages:
            return partial(client.messages, self.topic, self.key, body=options.body or "text", **bounds)
        return partial(client.query, self.topic, self.key, **bounds)

    def _of_index(self) -> tuple[IndexReader, Callable[..., Any]]:
        options, within = self.options, self.within
        reader = _open_in(self.stack, self.session, self.config)
        lookup = (self.topic, self.key, within.begin, within.end)
        if not options.messages:
            return reader, partial(reader.query, *lookup, max_count=options.page(), allow_partial=options.allow_partial)
        source = _sources_in(self.stack, self.config, options.store, self.kafka, reader).of(self.topic)
        more: dict[str, Any] = {"allow_partial": options.allow_partial, "max_count": options.page()}
        return reader, partial(reader.messages, *lookup, source=source, **more)

    def _page_of_tag(
        self, reader: IndexReader | None, look_up: Callable[..., Any], *, cursor: str | None = None, **limits: Any
    ) -> Any:
        """Return the next page. Raises `InvalidArgument` if a topic without tags has nothing.

        Nothing tells whether an unknown topic has tags: a remark says so.
        """
        from tiered_index.connectors.rocketmq.log.layout import TAG_NAME

        answer = look_up(cursor=cursor, **limits)
        if len(answer) or cursor is not None or answer.status != "complete":
            return answer
        tag, names = self.named, key_names_of(self.client if reader is None else reader, self.topic)
        if self.topic in answer.unknown_topics:
            self.session.out.remark(
                f"no message with the tag {tag!r} was found; an index has tags only with `ingest --index-tags`"
            )
        elif TAG_NAME not in names:
            raise InvalidArgument(
                f"no message with the tag {tag!r} was found, and the topic has no tags: run `ingest --index-tags`, "
                "with --restart if the store has been indexed before"
            )
        return answer


def _write(out: Output, pages: Pages[QueryResult], topic: str) -> int:
    is_stream = pages.every and out.as_json
    items: list[IndexItem] = []
    places: list[tuple[str, str]] = []
    for answer in pages:
        if is_stream:
            for document in _documents(answer):
                out.record(document)
        elif not out.as_json:
            items += answer.items
            places += [(place.file, str(place)) for place in answer.places or () if place is not None]
    if is_stream:
        out.answer(pages.totals(), streamed=True)
    elif out.as_json:
        out.answer(pages.last.to_dict() | {"items": _documents(pages.last)} | pages.seen() | pages.error())
    if items:
        own = own_columns(type(items[0]))
        queue, several = pages.words(topic).queue, any(item.source is not None for item in items)
        has_rows = len(places) == len(items)
        place = ("file", "row") if has_rows else (queue, "offset", "size", "topic id")
        columns = ("time", *place, *own, *(("source",) if several else ()))
        shown = [
            (format_time(item.timestamp_ms), *at, *_own_values(item, own), item.source)[: len(columns)]
            for item, at in zip(items, places if has_rows else map(_place, items), strict=True)
        ]
        out.table(columns, shown, right={*place, *own} - {"file", "topic id"})
    pages.conclude(out, f"{pages.count:,} found, {pages.conclusion}{pages.as_of()}{pages.expired}")
    return pages.finish(out)


def _documents(answer: QueryResult) -> list[dict[str, Any]]:
    """Return the entries as JSON. Those of files have their file and row in place of the fields of messages."""
    documents = [item.to_dict() for item in answer.items]
    describe_places(documents, answer.places)
    for document, place in zip(documents, answer.places or (), strict=answer.places is not None):
        if place is not None:
            leave_messages_out(document)
    return documents


def _own_value(value: Any) -> object:
    """Return bytes as text if they are printable ASCII (padded with zeros or not), else as hexadecimal."""
    if not isinstance(value, bytes):
        return value
    text = value.rstrip(b"\0").decode("ascii", "replace")
    return text if text.isascii() and text.isprintable() else value.hex()


def _own_values(item: IndexItem, own: Sequence[str]) -> list[object]:
    return [_own_value(getattr(item, name)) for name in own]


def _place(item: IndexItem) -> tuple[object, ...]:
    return item.queue_id, item.offset, item.size, item.topic_id
