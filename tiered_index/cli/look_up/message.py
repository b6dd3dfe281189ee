"""`tiered-index message ID`, and the output of messages, also for `query --messages`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tiered_index.base.encoding import BodyFormat, json_line, json_text
from tiered_index.base.units import format_time
from tiered_index.cli.exit_codes import FINDING
from tiered_index.cli.explaining import lost_text, print_failed, print_not_read
from tiered_index.cli.look_up.commands import MessageOptions
from tiered_index.cli.look_up.paging import CommandBudget, Pages, connectors_of, similar_with_entries
from tiered_index.cli.options import LimitOptions, ServiceOptions
from tiered_index.cli.output import Output, counted, human_bytes, states, value_text
from tiered_index.cli.places import opened_places
from tiered_index.cli.session import Session, asked_service
from tiered_index.config import IndexConfig
from tiered_index.connectors.kafka.spec import KafkaClientOptions
from tiered_index.connectors.read_again import MessageSources
from tiered_index.connectors.registry import CONNECTORS, OF_OTHERS, OTHER, ConnectorSpec, Words
from tiered_index.errors import BudgetExceeded, ConfigError, InvalidArgument
from tiered_index.service.read.answers.budget import LookupBudget, LookupLimits
from tiered_index.service.read.answers.messages import MANY, Fetched, MessageSource, MessagesResult
from tiered_index.service.reader import IndexReader
from tiered_index.types import Lookup

if TYPE_CHECKING:
    from tiered_index.client import IndexClient


# Fields of a message that the first line or its body has, or that only programs need
_SHOWN_APART = (
    *("queue_id", "queue_offset", "body", "body_format", "body_bytes", "body_problem", "body_crc", "compression"),
    *("flag", "sys_flag", "prepared_offset"),
)


# Most messages without a value that are named
_FEW_REASONS = 10
# Most characters and lines of a value that people see, unless they ask for all
_PAGE, _PAGE_LINES = 4_000, 50


def leave_messages_out(entry: dict[str, Any]) -> None:
    """Remove the fields of messages from the document of an entry of files, or its id, which only a client needs."""
    # a document with both has a column of the index by the name of the id
    of_messages = ("topic_id", "queue_id", "offset", "size", "key_hash", "fingerprint")
    for name in of_messages if "queue_id" in entry else ("entry_id",):
        entry.pop(name, None)


def _described(fetched: Fetched, body: BodyFormat, words: Words) -> dict[str, Any]:
    document = fetched.to_dict(body)
    if words.in_files and document["item"] is not None:
        leave_messages_out(document["item"])
    return document


NO_MESSAGES = MessagesResult(messages=(), status="partial")
"""The answer of a lookup of messages that found nothing before its budget was exceeded."""


class MessagesOfKeys:
    """The messages of the lookups of a file. `lookup` is the last one, `status` that of its last page.

    `statuses` counts keys. `sources_of` returns the sources of messages. With `every` the pages of a key follow each
    other.
    """

    def __init__(
        self,
        opened: Callable[[], IndexReader],
        lookups: Iterator[Lookup],
        sources_of: Callable[[IndexReader], MessageSources],
        *,
        every: bool,
        allow_partial: bool,
    ) -> None:
        self._opened, self._sources_of = opened, sources_of
        self._lookups, self._every, self._allow_partial = lookups, every, allow_partial
        self.lookup: Lookup | None = None
        self.status = "complete"
        self.statuses: Counter[str] = Counter()

    def open(self) -> tuple[IndexReader, Iterator[Callable[..., MessagesResult]]]:
        """Open the index, as `Pages.open`."""
        reader = self._opened()
        return reader, self._questions(reader, self._sources_of(reader))

    def _questions(self, reader: IndexReader, sources: MessageSources) -> Iterator[Callable[..., MessagesResult]]:
        source_of: dict[str, MessageSource] = {}
        for lookup in self._lookups:
            self.lookup = lookup
            if lookup.topic not in source_of:
                source_of[lookup.topic] = sources.of(lookup.topic)
            of_key = partial(reader.messages, *dataclasses.astuple(lookup)[:-1], source=source_of[lookup.topic])
            yield partial(self._page, of_key, allow_partial=self._allow_partial)
        if self.lookup is None:
            yield lambda **_: MessagesResult(messages=(), status="complete")

    def _page(self, read: Callable[..., MessagesResult], **more: Any) -> MessagesResult:
        """Return the next page of a key, with the status of all keys so far. Raises as `IndexReader.messages`."""
        try:
            answer = read(**more)
        except BudgetExceeded as error:
            self.status = "partial"
            self.statuses[self.status] += 1
            if isinstance(error.result, MessagesResult):
                # no cursor of a key continues the command
                error.result = dataclasses.replace(error.result, cursor=None)
            raise
        self.status, cursor = answer.status, answer.cursor if self._every else None
        if cursor is None:
            self.statuses[answer.status] += 1
        status: Any = next((name for name in ("partial", "truncated") if self.statuses[name]), "complete")
        return dataclasses.replace(answer, status=status, cursor=cursor)

    @cached_property
    def left(self) -> int:
        """The lookups that were not started; reads the rest of the file."""
        return sum(1 for _ in self._lookups)

    def counts(self, answered: int) -> dict[str, Any]:
        """Return counts of lookups for the last line; `answered` of them have messages."""
        done = {"lookups": self.statuses.total(), "found": answered, "statuses": dict(self.statuses)}
        return done | {"not_looked_up": self.left}


def _write_key(out: Output, named: dict[str, str], count: int, problem: str | None) -> None:
    """Write a key before its messages, or that it has none. `problem` says why it may have some. None: it has none."""
    reason = "" if count else f": {problem or 'nothing found'}"
    out.line(f"{named['topic']}  {named['key']}{reason}")
    if out.as_json and not count:
        out.record(named | _NO_MESSAGE | {"problem": problem})


_LIMITED, _UNREAD = "the limit was reached before all files were read", "nothing found in the files that could be read"
_NO_MESSAGE = dict.fromkeys(("state", "item", "message", "read_from", "problem"))


def write_messages(
    out: Output, pages: Pages[MessagesResult], asked_for: str | MessagesOfKeys, body: BodyFormat, *, raw: bool = False
) -> int:
    """Write a lookup of messages and return the exit code; `raw`: people see whole values.

    `asked_for` is the topic of one key, or the lookups of a file. Raises `BudgetExceeded` afterwards.
    """
    collisions = 0
    by_state: Counter[str] = Counter()
    keys, topic = (None, asked_for) if isinstance(asked_for, str) else (asked_for, None)
    answered, named = 0, dict[str, str]()
    words: Words = OTHER
    for answer in pages:
        if keys is not None and keys.lookup is not None:
            topic, named = keys.lookup.topic, {"topic": keys.lookup.topic, "key": keys.lookup.key}
            if pages.is_first_page:
                answered += len(answer) > 0
                problem = _LIMITED if pages.exceeded is not None else _UNREAD if keys.status == "partial" else None
                _write_key(out, named, len(answer), problem)
        words = words if topic is None else pages.words(topic)
        for message in answer.messages:
            shown = _described(message, body, words)
            if not out.as_json:
                _write_message(out, message, shown["message"], words, raw=raw)
                out.line()
            elif pages.every:
                out.record(named | shown)
            by_state[message.state] += 1
        collisions += answer.collisions
    if pages.every:
        more = {} if keys is None else keys.counts(answered)
        out.answer(pages.totals(states=dict(by_state), collisions=collisions, **more), streamed=True)
    elif out.as_json:
        described = [_described(message, body, words) for message in pages.last.messages]
        out.answer(pages.last.to_dict() | {"messages": described} | pages.seen() | pages.error())
    dropped = f"; {counted(collisions, 'entry', 'entries')} of other keys dropped" if collisions else ""
    seen = f"{dropped}{pages.as_of()}{pages.expired}"
    if keys is not None:
        counts = keys.counts(answered)
        left = f", {counted(counts['not_looked_up'], 'more lookup')} not started" if counts["not_looked_up"] else ""
        summary = f"{counted(counts['lookups'], 'lookup')} ({states(keys.statuses)}), {answered:,} with entries{left}"
        pages.conclude(out, summary)
        if truncated := keys.statuses["truncated"]:
            out.line(f"{truncated:,} truncated: more with a greater --max, or --all")
    total = f"{pages.count:,} found{f' ({states(by_state)})' if by_state else ''}"
    pages.conclude(out, f"{total}, {pages.conclusion}{seen}")
    requests, size = counted(pages.costs["message_requests"], "request"), human_bytes(pages.costs["message_bytes"])
    return pages.finish(out, f"{requests} for messages ({size}), in all ")


def write_values(out: Output, pages: Pages[MessagesResult]) -> int:
    """Write the value of each message as one line of JSON, all else to stderr, and return the exit code.

    It is `FINDING` if a message has no value. Raises `BudgetExceeded` afterwards.
    """
    by_state, without_value = Counter[str](), 0
    for answer in pages:
        for message in answer.messages:
            by_state[message.state] += 1
            shown, reason = message.to_dict("text")["message"], message.problem
            if shown is not None and (reason := shown.get("body_problem")) is None:
                # a tombstone has no body
                body, is_text = shown.get("body"), shown.get("body_format") == "text"
                out.value(json_line(body) if is_text else json_text(body))
                continue
            without_value += 1
            if without_value <= _FEW_REASONS:
                out.error_line(f"no value, {message.state}: {reason}")
    if without_value > _FEW_REASONS:
        out.error_line(f"no value: {without_value - _FEW_REASONS:,} more")
    # the user of a cut answer must see that it is one
    say = out.note if pages.status == "complete" else out.error_line
    say(f"{pages.count:,} found{f' ({states(by_state)})' if by_state else ''}, {pages.conclusion}{pages.as_of()}")
    for hint in pages.hints:
        out.note(hint)
    if pages.last.cursor is not None:
        say(f"more with --all, or --cursor {pages.last.cursor}")
    if pages.exceeded is None:
        print_not_read(out, pages.failed)
    return pages.settle() or (FINDING if without_value else 0)


def _write_message(out: Output, fetched: Fetched, shown: dict[str, Any] | None, words: Words, *, raw: bool) -> None:
    """Write the result of an entry; `shown` is the document of its message or record, or None.

    `words` are those of its system. `raw`: write the whole of large values.
    """
    item = fetched.item
    source = item.source if item is not None else None
    if shown is None:
        place = ""
        if item is not None:
            # the problem names the file
            of_queue = f"  {words.queue} {item.queue_id}  {words.offset} {item.offset}" if not words.in_files else ""
            of_index = f"  of {source}" if source is not None else ""
            place = f"{format_time(item.timestamp_ms)}{of_queue}{of_index}"
        out.line(f"{place}  {fetched.state}: {fetched.problem}".strip())
        return
    # a producer may give any number as a record's time
    time = value_text("timestamp_ms", shown.get("store_ms", shown.get("timestamp_ms"))) or "no time"
    queue = f"  queue {shown['queue_id']}  queue offset {shown['queue_offset']}" if "queue_id" in shown else ""
    out.line(f"{time}{queue}  {fetched.state}")
    properties = shown.get("properties", {})
    read = {"source": source, "read_from": fetched.read_from, "note": fetched.problem}
    values = {n: value for n, value in {**shown, "properties": properties}.items() if n not in _SHOWN_APART}
    if "queue_offset" in shown:
        # imported here: other messages need nothing of RocketMQ
        from tiered_index.connectors.rocketmq.log.layout import KEYS, TAGS, UNIQ_KEY

        values["properties"] = {n: value for n, value in properties.items() if n not in (KEYS, TAGS, UNIQ_KEY)}
        # the unique key has a line of its own
        values["keys"] = [key for key in values["keys"] if key != values["uniq_key"]]
    out.fields({**(values if raw else _pages_of(values)), **read})
    if "partition" in shown and shown["body_bytes"] is None:
        out.line("  no value: a tombstone")
    if body := _body(shown, raw=raw):
        out.lines(f"  body  {body}")


def _page_of(text: str, digits: int = 1) -> str:
    """Return the first page of a text, and the number of bytes that it leaves out. A byte has `digits` characters."""
    page = "\n".join(text[:_PAGE].split("\n", _PAGE_LINES)[:_PAGE_LINES])
    if len(page) == len(text):
        return text
    page = page[: len(page) // digits * digits]
    left = len(text[len(page) :].encode(errors="surrogatepass")) // digits
    return f"{page}... and {counted(left, 'more byte')}: --raw writes all"


def _pages_of(value: Any) -> Any:
    """Return a JSON-ready value with the first page of each of its texts."""
    if isinstance(value, dict):
        return {name: _pages_of(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_pages_of(member) for member in value]
    return _page_of(value) if isinstance(value, str) else value


def _body(shown: dict[str, Any], *, raw: bool) -> str | None:
    if "body" not in shown:
        return None
    stored = f", {shown['compression']}" if shown.get("compression") else ""
    head = f"({shown['body_format']}, {human_bytes(shown['body_bytes'])}{stored})"
    if problem := shown.get("body_problem"):
        head += f" {problem}"
    text = shown["body"]
    if not isinstance(text, str) or shown["body_format"] == "json":
        text = json.dumps(text, indent=2, ensure_ascii=False)
    if not raw:
        text = _page_of(text, 2 if shown["body_format"] == "hex" else 1)
    return f"{head} {text}" if text else head


def _check_id(msg_id: str) -> None:
    """Raise `InvalidArgument`, which names the forms of an ID, unless it is an id of a message."""
    try:
        CONNECTORS.connector(OF_OTHERS).check_id(msg_id)
    except InvalidArgument as error:
        places = ", ".join(CONNECTORS.places())
        raise InvalidArgument(f"{error}; give such an id, {places}, or --topic and a unique key") from error


@dataclass(frozen=True)
class MessageQuestion:
    """One message by its id or place, or the messages with a unique key. `stack` closes what it opens."""

    stack: contextlib.ExitStack
    config: IndexConfig
    client: IndexClient | None
    msg_id: str | None
    options: MessageOptions
    kafka: KafkaClientOptions

    @cached_property
    def of_place(self) -> ConnectorSpec | None:
        """The connector that reads the place that the id is; None: it is another id."""
        return None if self.msg_id is None else CONNECTORS.of_place(self.msg_id)

    @property
    def has_index(self) -> bool:
        """Whether the options name an index."""
        return self.client is None and (self.config.root is not None or self.config.storage is not None)

    def check(self) -> None:
        """Raise `InvalidArgument` for a place that the options do not name, `ConfigError` if nothing can be asked."""
        place, msg_id, is_place = self.options, self.msg_id, self.of_place is not None
        no_source = place.store is None and not self.has_index
        if place.queue_offset is not None:
            if msg_id is not None or place.topic is None or place.queue_id is None or place.cursor is not None:
                raise InvalidArgument("--offset needs --topic and --queue-id, and neither ID nor --cursor")
            if no_source:
                raise ConfigError("give --store, --storage or --root")
        elif msg_id is None or place.queue_id is not None:
            raise InvalidArgument("give an ID, or --offset with --topic and --queue-id")
        elif self.client is None and not (is_place and self.kafka != KafkaClientOptions()):
            if place.topic is not None and not self.has_index:
                raise ConfigError("a unique key needs the index: give --root or --storage")
            if no_source:
                raise ConfigError("give --store, --storage or --root")
        if place.cursor is not None and place.topic is None:
            raise InvalidArgument("--cursor continues an answer to a unique key: give --topic, too")
        if self.client is None and msg_id is not None and place.topic is None and not is_place:
            _check_id(msg_id)

    def open(self) -> tuple[IndexReader | None, list[Callable[..., MessagesResult]]]:
        """Open the index or the client, and the sources of messages, as `Pages.open`."""
        place, msg_id = self.options, str(self.msg_id)
        if self.client is not None:
            self.stack.enter_context(self.client)
            return None, [partial(self.client.message, msg_id, place.topic, body=place.body)]
        reader = self.stack.enter_context(IndexReader.open(config=self.config)) if self.has_index else None
        return reader, [self._of_index(reader, place, msg_id)]

    def similar(self, reader: IndexReader | None) -> list[str]:
        """Return what `similar_with_entries` finds; nothing is similar to a place."""
        topic, key, index = self.options.topic, self.msg_id, self.client if reader is None else reader
        if topic is None or key is None or index is None or self.of_place is not None:
            return []
        return similar_with_entries(index, topic, key)

    def _of_index(
        self, reader: IndexReader | None, place: MessageOptions, msg_id: str
    ) -> Callable[..., MessagesResult]:
        if self.of_place is not None:
            return partial(self._page_of, self._message_at(self.of_place, reader, msg_id))
        sources = self.stack.enter_context(
            closing(MessageSources(reader, self.config, opened_places(place.store, self.kafka)))
        )
        topic, queue_id, offset = place.topic, place.queue_id, place.queue_offset
        if topic is not None and queue_id is not None and offset is not None:
            queues = CONNECTORS.queues(OF_OTHERS, sources.of_connector(OF_OTHERS))
            assert queues is not None
            return partial(self._page_of, partial(queues.at, topic, queue_id, offset))
        source = sources.of_ids() if topic is None or reader is None else sources.of(topic)
        if (by_id := getattr(source, "by_id", None)) is not None:
            return partial(by_id, reader, msg_id, topic)
        assert reader is not None and topic is not None
        return partial(reader.messages, topic, msg_id, source=source, max_count=MANY)

    def _page_of(self, read: Callable[[], Fetched], cursor: str | None = None, **limits: Any) -> MessagesResult:
        # the limits also apply to a message that needs no lookup
        with LookupBudget(self.config.prices, LookupLimits(**limits)).open():
            return MessagesResult(messages=(read(),), status="complete")

    def _message_at(self, spec: ConnectorSpec, reader: IndexReader | None, msg_id: str) -> Callable[[], Fetched]:
        """Return a function that reads the message at a place. Raises `InvalidArgument` for no such place or topic."""
        topic, *parts = CONNECTORS.connector(spec.name).parse_place(msg_id)
        places = opened_places(None, self.kafka)
        sources = self.stack.enter_context(closing(MessageSources(reader, self.config, places)))
        if sources.connector_of(topic) != spec.name:
            if reader is not None:
                reader._check_opened()
            is_asked = spec.name in places or spec.advice is None
            advice = "its entries are of another kind of source" if is_asked else spec.advice
            raise InvalidArgument(f"the index has no topic {topic!r} of {spec.title}: {advice}")
        return partial(sources.of_connector(spec.name).at, topic, *parts)


def message(
    session: Session,
    *,
    msg_id: str | None,
    options: MessageOptions,
    limits: LimitOptions,
    service: ServiceOptions,
    kafka: KafkaClientOptions,
) -> int:
    """Show one message by its id, unique key or queue offset, or one record of Kafka."""
    budget = CommandBudget(limits.of_lookups)
    config, out, topic = session.config(), session.out, options.topic
    own = {"store": options.store, "offset": options.queue_offset, **dataclasses.asdict(kafka)}
    client = asked_service(session, service, **own)
    with contextlib.ExitStack() as stack:
        question = MessageQuestion(stack, config, client, msg_id, options, kafka)
        question.check()
        of_pages: dict[str, Any] = {"every": False, "similar": question.similar}
        of_pages |= {} if client is None else {"connectors": partial(connectors_of, client)}
        pages = Pages(question.open, NO_MESSAGES, options.cursor, budget, **of_pages)
        (answer,) = pages
        is_found = any(message.message is not None for message in answer.messages)
        if not is_found and pages.exceeded is None and isinstance(pages.reader, IndexReader):
            pages.reader._check_opened()
        hints = [] if answer.messages else pages.hints
        words = pages.words(topic) if topic is not None else OTHER
    shown = [_described(message, options.body, words) for message in answer.messages]
    lost = {"lost": answer.lost} if answer.lost else {}
    document = {"messages": shown, "status": answer.status, "cursor": answer.cursor}
    out.answer(document | lost | ({"hints": hints} if hints else {}) | pages.error())
    for message, document_of_one in zip(answer.messages, shown, strict=True):
        _write_message(out, message, document_of_one["message"], words, raw=options.raw)
    if not answer.messages and pages.exceeded is None:
        what = f"more {words.message}s" if options.cursor else words.message
        out.line(f"no {what} of {topic} with the {words.key} {msg_id}")
        for hint in hints:
            out.line(hint)
    if answer.lost:
        out.line(f"lost permanently: {lost_text(answer.lost)}")
    if answer.cursor is not None:
        out.line(f"{len(answer.messages)} found, {answer.status}")
        out.line(f"more with --cursor {answer.cursor}")
    if pages.exceeded is None:
        print_failed(out, answer.failed)
    code = pages.settle()
    return code if is_found else FINDING
