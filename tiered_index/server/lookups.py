"""The handlers of lookups, messages and topics: the library answers, and the answer is sent as bytes.

A call of the library runs in a thread, unless memory has the answer (`IndexService.query_nowait`).
Models of `parameters` check requests, and `wire` encodes answers. Each lookup, also a failed one, is counted and
written to the audit log. Threads: handlers run on the event loop and never wait there for a storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tiered_index.errors import BudgetExceeded, InvalidArgument, TieredIndexError
from tiered_index.kafka.messages import parse_place
from tiered_index.retention import NOTHING
from tiered_index.rocketmq.archive.messages import Containing, RocketmqMessages, messages_by_id
from tiered_index.rocketmq.remoting.browsing import Browsed, Browser
from tiered_index.rocketmq.remoting.pulling import UnknownOffsets
from tiered_index.rocketmq.remoting.queue_sources import QueueCaches, queues_at_hand
from tiered_index.server import parameters, wire
from tiered_index.server.calls import Allowance, Calls
from tiered_index.server.handlers import Handlers, caller_of, need_type
from tiered_index.server.memory import (
    MESSAGE_FACTOR,
    REPORT_BYTES,
    ROW_BYTES,
    SEARCHED_FACTOR,
    SEEN_BYTES,
    CountedMessages,
    Largest,
    MemoryInUse,
    Reservation,
    ShownBodies,
    entries_bytes,
    parsed_bytes,
)
from tiered_index.server.metrics import Metrics
from tiered_index.server.pacing import PACE, Document, Pace, PacedResponse, document_of_rows, document_with_ends
from tiered_index.server.parameters import of_body
from tiered_index.server.problems import Problem, Refused
from tiered_index.server.served import MOST_SHOWN, SHOWN, Served, shown_topics
from tiered_index.server.tokens import Caller
from tiered_index.service.answers.pages import PageTotals
from tiered_index.service.answers.results import QueryResults
from tiered_index.service.answers.rows import once
from tiered_index.service.lookup.budget import LookupBudget, LookupLimits, RequestStats
from tiered_index.service.lookup.messages import MessageSource, MessagesResult, pause_s
from tiered_index.service.reader import IndexReader
from tiered_index.storage.context import deadline_at
from tiered_index.systems import ROCKETMQ
from tiered_index.types import Explain, IndexItem, QueryResult, TopicsResult

_NO_EXPLAIN = Explain()
_UNREADABLE = "this message can't be read"
# Most entries of an answer that is made on the event loop
_FEW = 100
_BETWEEN = re.compile(rb'\},\{"topic":')
_MESSAGES = b'{"messages":['
# Entries of a stream that are sent at once; a slow stream ends after such a piece
_ROWS = 1000
# Most messages that one request searches for a text: a hot key's answer comes in pieces
_MOST_SEARCHED = 2000
_TOO_SLOWLY = "the client reads the answer too slowly: continue from its cursor"
Handle = Callable[[Request, Any], Awaitable[Response]]
"""A handler: it gets a request and its checked query."""


class LookupHandlers(Handlers):
    """Handlers of lookups, topics and messages."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        super().__init__(served, calls, metrics)
        self._queue_caches = QueueCaches()

    def typed(
        self, handle: Callable[[Request, Any], Awaitable[Response]]
    ) -> Callable[[Request, Any], Awaitable[Response]]:
        """Return the handler with the header `COLUMNS` in its answers."""

        @functools.wraps(handle)
        async def answer(request: Request, asked: Any) -> Response:
            response = await handle(request, asked)
            item_type: Any = self.served.lookups.item_type
            response.headers[wire.COLUMNS] = wire.columns_of(item_type)
            return response

        return answer

    async def query(self, request: Request, asked: parameters.QueryParameters) -> Response:
        """Answer a lookup of one key."""
        caller_of(request).need_topic(asked.topic)
        form = wire.form_of(request.headers.get("accept"))
        if asked.all and form == wire.JSON:
            raise InvalidArgument("all=true needs a stream: send Accept: application/x-ndjson, or Arrow's")
        if asked.all and "max_count" not in request.query_params:
            # each page repeats a part of the lookup: larger pages take less time in total
            asked = structs.replace(asked, max_count=min(parameters.PAGE, self.served.caps.max_count))
        self._check_count(asked.max_count)
        if form != wire.JSON:
            return await self._stream(request, asked, self.allowance(asked), form)
        what = {"topic": asked.topic, "key": asked.key}
        claim = entries_bytes([(asked.topic, asked.max_count)])
        encoded = partial(self._items_encoded, asked, _tells_files(request, asked))
        if (response := self._answer_now(request, asked, what, encoded, claim)) is not None:
            return response
        allowance = self.allowance(asked)
        look_up = partial(self._page, asked, allowance)
        return await self._answer(request, allowance, "query", what, look_up, encoded, claim=claim)

    def _answer_now(
        self,
        request: Request,
        asked: parameters.OneKey,
        what: dict[str, Any],
        encoded: Callable[[QueryResult], Document],
        claim: int,
    ) -> Response | None:
        """Return the answer if memory has it: a thread takes longer. None: the lookup needs a thread."""
        writer, reservation = self.served.writer, request.state.reservation
        # writing the audit log may wait for a disk
        if writer is None or self.served.audit.is_on or asked.max_count > _FEW:
            return None
        with contextlib.suppress(MemoryInUse):
            reservation.hold(claim)
            page = asked.begin_ms, asked.end_ms, asked.max_count, asked.cursor
            if (answer := writer.query_nowait(asked.topic, asked.key, *page)) is not None:
                made = encoded(self._recorded(request, "query", what, lambda: answer))
                reservation.settle(len(made.body))
                return PacedResponse(made, wire.JSON)
            reservation.settle(0)
        return None

    def _items_encoded(self, asked: parameters.OneKey, files: bool, answer: QueryResult) -> Document:
        body = wire.encode(wire.answer_document(answer, self.served.redaction, files=files))
        # unambiguous, because quotation marks in texts are escaped
        between = (found.start() + 1 for found in _BETWEEN.finditer(body))
        ends = chain(between, (body.find(b'],"status":') for _ in answer.items[:1]))
        return self._document(asked, body, ends, answer.items, answer)

    def _document(
        self,
        asked: parameters.OneKey,
        body: bytes,
        ends: Iterable[int],
        items: Sequence[Any],
        answer: QueryResult | MessagesResult,
    ) -> Document:
        def cursor_after(number: int) -> str:
            return self._cursor_after(asked, items[number])

        return document_of_rows(body, ends, answer.status, answer.cursor, cursor_after)

    def _cursor_after(self, asked: parameters.OneKey, item: IndexItem) -> str:
        return self.served.lookups.cursor_after(asked.topic, asked.key, asked.begin_ms, asked.end_ms, item)

    def _page(self, asked: parameters.OneKey, allowance: Allowance, cursor: str | None = None) -> QueryResult:
        return self.served.lookups.query(*asked.arguments(cursor), timeout_s=allowance.left_s())

    async def _answer(
        self,
        request: Request,
        allowance: Allowance,
        kind: str,
        what: dict[str, Any],
        look_up: Callable[[], Any],
        encoded: Callable[[Any], bytes | Document],
        *,
        claim: int = 0,
    ) -> Response:
        """Return a lookup's answer as JSON; count and audit it. `claim` is the memory that it may need, in bytes."""

        def act() -> bytes | Document:
            return encoded(self._recorded(request, kind, what, look_up))

        began_s = time.monotonic()
        try:
            return await self.answer(request, allowance, act, wire.JSON, claim=claim)
        finally:
            if _withheld(request):
                # the time must not show what is at a withheld place
                await asyncio.sleep(pause_s(time.monotonic() - began_s))

    def _recorded(self, request: Request, kind: str, what: dict[str, Any], look_up: Callable[[], Any]) -> Any:
        """Return `look_up()` for the caller; count it and write it to the audit log, also if it fails."""
        status, explain, count = "failed", _NO_EXPLAIN, 0
        try:
            answer = _for_caller(caller_of(request), look_up())
            status = getattr(answer, "status", None) or ("partial" if answer.failed else "complete")
            explain, count = answer.explain, len(answer)
            return answer
        except TieredIndexError as error:
            status = type(error).__name__
            raise
        finally:
            self.counters.lookup(kind, status, explain)
            self.served.audit.write(
                {
                    "request_id": request.state.request_id,
                    "caller": caller_of(request).name,
                    "lookup": kind,
                    **what,
                    **_withheld(request),
                    "status": status,
                    "count": count,
                    "requests": explain.requests,
                    "bytes": explain.bytes,
                }
            )

    async def _stream(
        self, request: Request, asked: parameters.QueryParameters, allowance: Allowance, form: str
    ) -> Response:
        """Return an answer as a stream of pages. The first page is read before the response begins: it may raise."""
        redaction = self.served.redaction
        totals, reports, arrow = PageTotals(), list[dict[str, Any]](), wire.ArrowStream()
        files = {"files": reports} if _tells_files(request, asked) else {}
        what = {"topic": asked.topic, "key": asked.key}
        seen: set[tuple[object, ...]] = set()
        reservation: Reservation = request.state.reservation
        claim = entries_bytes([(asked.topic, asked.max_count)])

        def kept_bytes() -> int:
            return SEEN_BYTES * len(seen) + REPORT_BYTES * len(reports)

        async def page(cursor: str | None) -> tuple[QueryResult, list[bytes]]:
            def act() -> tuple[QueryResult, list[bytes]]:
                answer = self._recorded(request, "query", what, partial(self._page, asked, allowance, cursor))
                shown = totals.add(once(answer, seen) if asked.all else answer)
                if files:
                    reports.extend(report.to_dict() for report in shown.explain.files)
                begins = range(0, len(shown), _ROWS)
                if form == wire.ARROW:
                    table = wire.table_of(shown, redaction)
                    # a table without rows sends the schema
                    return shown, [arrow.table(table.slice(n, _ROWS)) for n in begins or (0,)]
                lines = map(wire.encode, wire.item_documents(shown, redaction))
                return shown, [b"".join(islice(lines, _ROWS)) for _ in begins]

            if cursor is None:
                answer, pieces = await self.made(request, allowance, act, claim)
            else:
                async with self.calls.later_pages:
                    await reservation.claim(claim + kept_bytes(), allowance.left_s())
                    answer, pieces = await self.calls.run(request, allowance, partial(reservation.making, act))
            # while a page is sent, the previous one may still be in buffers
            reservation.settle(2 * sum(map(len, pieces)) + kept_bytes())
            return answer, pieces

        first = await page(None)

        pace: Pace = request.scope["state"].get(PACE, Pace())

        async def body() -> AsyncIterator[bytes]:
            answer, pieces = first
            pace.is_slow, pace.is_stream = False, True
            try:
                while True:
                    cursor = answer.cursor
                    for number, piece in enumerate(pieces, 1):
                        yield piece
                        if pace.is_slow and number < len(pieces):
                            cursor = self._cursor_after(asked, answer.items[number * _ROWS - 1])
                            raise Refused(408, _TOO_SLOWLY)
                    if not asked.all or cursor is None:
                        break
                    if pace.is_slow:
                        raise Refused(408, _TOO_SLOWLY)
                    answer, pieces = await page(cursor)
                status = totals.document(answer, files, cursor=cursor)
                status = redaction.document(status | {"timestamp_resolution_ms": answer.timestamp_resolution_ms})
            except TieredIndexError as error:
                # the last line has no status, so that the stream can't be mistaken for a whole answer
                problem = Problem.of(error, request.state.request_id, redaction).document
                status = {"error": problem, "cursor": cursor}
            yield arrow.end(status) if form == wire.ARROW else wire.encode(status)

        return StreamingResponse(body(), media_type=form)

    async def query_batch(self, request: Request, _: None) -> Response:
        """Answer lookups of many keys at once; each file is read once."""
        need_type(request, wire.JSON)
        body = await request.body()
        caller, form = caller_of(request), wire.form_of(request.headers.get("accept"))
        redaction = self.served.redaction

        allowance = self.allowance()
        reservation: Reservation = request.state.reservation
        asked: parameters.BatchBody | None = None

        def act() -> bytes:
            nonlocal asked
            if asked is None:
                reservation.hold(parsed_bytes(body))
                asked = of_body(parameters.BatchBody, body, {"lookups": self.served.caps.max_lookups})
                asked.narrow(allowance)
            lookups = asked.columns()
            shown = zip(lookups.topics[:MOST_SHOWN], lookups.keys[:MOST_SHOWN], strict=True)
            keys = [[topic[:SHOWN], key[:SHOWN]] for topic, key in shown]
            counts = lookups.counts_of_topics()
            what = {"lookups": len(lookups), "topics": shown_topics(counts), "keys": keys}
            # for the audit log, if the request is refused
            request.state.asked = what
            caller.need_topics(counts)
            self._check_counts(lookups.max_counts)
            # stored rows are found before entries are made of them; most lookups find fewer than they ask for
            reservation.need(most := sum(counts.values()), ROW_BYTES * most)
            reservation.hold(entries_bytes(counts.items()))
            files, more = _tells_files(request, asked), dict[str, Any]()

            def look_up() -> QueryResults:
                try:
                    limit_s = allowance.left_s()
                    return self.served.lookups.query_many(lookups, asked.allow_partial, timeout_s=limit_s)
                except BudgetExceeded as error:
                    if not asked.allow_spent or not isinstance(error.result, QueryResults):
                        raise
                    more["exceeded"] = redaction.text(str(error))
                    return error.result

            results = self._recorded(request, "query_many", what, look_up)
            reservation.need(int(results.counts.sum()), entries_bytes(results.counts_of_topics().items()))
            if form == wire.ARROW:
                stream = wire.ArrowStream()
                data = stream.table(wire.table_of(results, redaction))
                return data + stream.end(wire.batch_totals(results, redaction, files=files) | more)
            document = wire.batch_document(results, redaction, files=files) | more
            if form == wire.NDJSON:
                answers = document.pop("results")
                return b"".join(map(wire.encode, [*answers, document]))
            return wire.encode(document)

        return await self.answer(request, allowance, act, form)

    async def messages(self, request: Request, asked: parameters.MessagesParameters) -> Response:
        """Answer a lookup of one key with its messages, each with its state."""
        caller_of(request).need_topic(asked.topic)
        self._check_count(asked.max_count)
        allowance = self.allowance(asked)
        others = self._messages_for(caller_of(request))
        bodies = self._bodies(request, asked, allowance)

        def look_up() -> MessagesResult:
            records = self.served.records(asked.topic)
            source: MessageSource = CountedMessages(records or others, request.state.reservation)
            if asked.contains is not None:
                claim = Largest(request.state.reservation, SEARCHED_FACTOR).claim
                source = Containing(source, asked.contains, self.served.caps.message_bytes, claim)
            limits: Any = {"timeout_s": allowance.left_s(), "max_message_bytes": self.served.caps.message_bytes}
            if asked.contains is not None:
                limits["max_read"] = _MOST_SEARCHED
            answer = self.served.lookups.messages(*asked.arguments(), source=source, **limits)
            return self._with_bodies(bodies, self._leveled(request, answer))

        return await self._answer(
            request,
            allowance,
            "messages",
            {"topic": asked.topic, "key": asked.key} | ({"contains": asked.contains} if asked.contains else {}),
            look_up,
            partial(self._messages_encoded, request, asked, bodies),
            claim=entries_bytes([(asked.topic, asked.max_count)]),
        )

    async def message(self, request: Request, asked: parameters.MessageParameters) -> Response:
        """Answer with one message: by the id of its place, or with `topic` by its unique key."""
        caller, msg_id = caller_of(request), str(request.path_params["id"])
        place = parse_place(msg_id) if asked.topic is None and msg_id.startswith("kafka:") else None
        if (topic := place[0] if place is not None else asked.topic) is not None:
            caller.need_topic(topic)
        allowance = self.allowance(asked)
        source = self._messages_for(caller)
        bodies = self._bodies(request, asked, allowance)

        def look_up() -> MessagesResult:
            answer = (
                self._record(place, allowance)
                if place is not None
                else messages_by_id(
                    self.served.lookups,
                    source,
                    msg_id,
                    asked.topic,
                    cursor=asked.cursor,
                    allow_partial=asked.allow_partial,
                    by_key=CountedMessages(source, request.state.reservation),
                    timeout_s=allowance.left_s(),
                )
            )
            answer = self._leveled(request, answer)
            if not any(one.message is not None for one in answer.messages) and answer.cursor is None:
                problem = next((one.problem for one in answer.messages if one.problem and not one.withheld), None)
                raise Refused(404, f"no message {msg_id:.80}" + (f": {problem}" if problem else ""))
            return self._with_bodies(bodies, answer)

        return await self._answer(
            request,
            allowance,
            "message",
            {"id": msg_id[:200], "topic": asked.topic and asked.topic[:SHOWN]},
            look_up,
            partial(self._messages_encoded, request, asked, bodies),
        )

    async def browse(self, request: Request, asked: parameters.BrowseParameters) -> Response:
        """Answer with the messages of a topic around a moment, without a key."""
        caller = caller_of(request)
        caller.need_topic(asked.topic)
        allowance = self.allowance(asked)
        reservation: Reservation = request.state.reservation
        left = self.served.caps.message_bytes
        bodies = ShownBodies(reservation, allowance, asked.body, left)

        def claim(size: int, is_read_anyway: bool) -> bool:
            nonlocal left
            if (left := left - size) < 0 and not is_read_anyway:
                return False
            reservation.grow(MESSAGE_FACTOR * size)
            return True

        def look_up() -> Browsed:
            lookups, messages = self.served.lookups, self.served.messages
            with deadline_at(time.monotonic() + allowance.left_s()):
                if isinstance(lookups, IndexReader):
                    # learn of erasures
                    lookups.refresh()
                archives = messages.archives
                expired = archives[0].state().expired if len(archives) == 1 else NOTHING
                try:
                    queues = queues_at_hand(
                        asked.topic, messages.store, messages.root, archives, self._queue_caches, reservation.grow
                    )
                    if queues is None:
                        raise Refused(404, messages.words(asked.topic).no_queues)
                    browser = Browser(queues, expired, claim)
                    answer = browser.page(asked.topic, asked.queue_id, asked.at_ms, asked.cursor, asked.max_count)
                except UnknownOffsets as error:
                    raise Refused(404, f"{error.problem}; {ROCKETMQ.no_queues}") from error
            if answer is None:
                queue = "" if asked.queue_id is None else f" {asked.queue_id}"
                raise Refused(404, f"topic {asked.topic!r:.80} has no queue{queue} here")
            self._show_browsed(bodies, caller, answer)
            spent = RequestStats.of_usage(allowance.usage)
            return replace(answer, explain=Explain(requests=spent.requests, bytes=spent.bytes, cost_usd=spent.cost_usd))

        what = {"topic": asked.topic, "queue_id": asked.queue_id, "at_ms": asked.at_ms}
        what |= {"cursor": asked.cursor and asked.cursor[:SHOWN]}
        encoded = partial(self._browsed_encoded, asked.topic, bodies.encoded, caller)
        return await self._answer(request, allowance, "browse", what, look_up, encoded)

    def _show_browsed(self, bodies: ShownBodies, caller: Caller, answer: Browsed) -> None:
        """Encode the messages of an answer."""
        redaction = self.served.redaction
        for one in answer.messages:
            # a reason may name other topics
            problem = one.problem and (redaction.text(one.problem) if caller.topics is None else _UNREADABLE)
            message = None if one.message is None else bodies.document(one.message)
            place = {"queue_id": one.queue_id, "queue_offset": one.queue_offset}
            bodies.add(wire.encode({**place, "message": message, "problem": problem}).rstrip())

    def _browsed_encoded(self, topic: str, shown: list[bytes], caller: Caller, answer: Browsed) -> Document:
        ends = [{"queue_id": n, "begin": of.begin, "end": of.end} for n, of in sorted(answer.ends.items())]
        whole = {"topic": topic, "status": answer.status, "earlier": answer.earlier, "later": answer.later}
        # reads of the archive are about all topics
        explain = {} if caller.topics is not None else {"explain": answer.explain.to_dict(files=False)}
        document = _with_messages(whole | {"queues": ends} | explain, shown)
        return document_with_ends(
            document, _row_ends(shown), whole, lambda number: whole | {"later": answer.later_after(number)}
        )

    def _record(self, place: tuple[str, int, int], allowance: Allowance) -> MessagesResult:
        """Return the record at a topic's partition and offset."""
        if (records := self.served.records(place[0])) is None:
            raise Refused(404, f"the index has no Kafka topic {place[0]!r:.80}")
        with LookupBudget(self.prices, LookupLimits(timeout_s=allowance.left_s())).open():
            return MessagesResult(messages=(records.at(*place),), status="complete")

    def _messages_for(self, caller: Caller) -> RocketmqMessages:
        messages = self.served.messages
        return messages if caller.topics is None else messages.seen_by(caller.sees)

    def _leveled(self, request: Request, answer: MessagesResult) -> MessagesResult:
        """Return an answer whose time shows nothing about withheld places; note their number for the audit log."""
        if not (count := sum(one.withheld for one in answer.messages)):
            return answer
        request.state.withheld = count
        passed_s = answer.explain.elapsed_ms / 1000
        return replace(answer, explain=replace(answer.explain, elapsed_ms=(passed_s + pause_s(passed_s)) * 1000))

    def _bodies(
        self,
        request: Request,
        asked: parameters.MessagesParameters | parameters.MessageParameters,
        allowance: Allowance,
    ) -> ShownBodies:
        most_bytes, partial_too = self.served.caps.message_bytes, asked.allow_partial
        return ShownBodies(request.state.reservation, allowance, asked.body, most_bytes, allow_partial=partial_too)

    def _with_bodies(self, bodies: ShownBodies, answer: MessagesResult) -> MessagesResult:
        """Encode the messages of an answer; return it, ``partial`` if a body was not decompressed in time."""
        redaction = self.served.redaction
        for one in answer.messages:
            document = bodies.document(one)
            # redact only the places, not the message
            document |= {n: redaction.document(document[n]) for n in ("item", "read_from", "problem")}
            bodies.add(wire.encode(document).rstrip())
        return replace(answer, status="partial") if bodies.is_partial else answer

    def _messages_encoded(
        self,
        request: Request,
        asked: parameters.MessagesParameters | parameters.MessageParameters,
        bodies: ShownBodies,
        answer: MessagesResult,
    ) -> bytes | Document:
        document = replace(answer, messages=()).to_dict(files=_tells_files(request, asked))
        whole = _with_messages(self.served.redaction.document(document), bodies.encoded)
        if isinstance(asked, parameters.MessageParameters):
            return whole
        return self._document(asked, whole, _row_ends(bodies.encoded), [one.item for one in answer.messages], answer)

    async def topics(self, request: Request, asked: parameters.Range) -> Response:
        """Answer with the topics: entries, bytes of their messages, first and last second."""
        caller = caller_of(request)
        allowance = self.allowance(asked)

        def look_up() -> Any:
            answer = self.served.lookups.topics(
                asked.begin_ms, asked.end_ms, asked.allow_partial, timeout_s=allowance.left_s()
            )
            return replace(answer, topics=tuple(topic for topic in answer.topics if caller.sees(topic.topic)))

        redaction, files = self.served.redaction, _tells_files(request, asked)

        def encoded(answer: TopicsResult) -> bytes:
            return wire.encode(wire.answer_document(answer, redaction, files=files))

        return await self._answer(request, allowance, "topics", {}, look_up, encoded)

    def _check_counts(self, counts: list[int]) -> None:
        self._check_count(max(counts))
        if (most := sum(counts)) > (given := self.served.caps.max_entries):
            raise Refused(
                413,
                f"the lookups ask for up to {most:,} entries, and this service returns {given:,} at once: ask for "
                "fewer keys, or a lower max_count",
            )

    def _check_count(self, max_count: int) -> None:
        if max_count > self.served.caps.max_count:
            raise InvalidArgument(
                f"max_count is {max_count:,}, and this service returns {self.served.caps.max_count:,} at once: lower "
                "it, and continue with the cursor"
            )


def _with_messages(whole: dict[str, Any], shown: list[bytes]) -> bytes:
    """Return a document that begins with the messages `shown`, which are encoded already, to save memory."""
    whole = {"messages": [], **whole}
    return b"".join((_MESSAGES, b",".join(shown), wire.encode(whole)[len(_MESSAGES) :]))


def _row_ends(shown: list[bytes]) -> Iterator[int]:
    """Yield the position after each message of a document of `_with_messages`."""
    # each is followed by a comma
    return islice(accumulate((len(one) + 1 for one in shown), initial=len(_MESSAGES) - 1), 1, None)


def _withheld(request: Request) -> dict[str, int]:
    """Return the number of places that were withheld from a request, for the audit log; empty for none."""
    count: int = getattr(request.state, "withheld", 0)
    return {"withheld": count} if count else {}


def _tells_files(request: Request, asked: parameters.Bounds) -> bool:
    """Return whether an answer reports each file. Files are about all topics, so the caller must see every topic."""
    return asked.explain and caller_of(request).topics is None


def _for_caller(caller: Caller, answer: Any) -> Any:
    """Return a lookup's answer without the positions of sources that the caller may not see."""
    if caller.topics is None or isinstance(answer, Browsed):
        return answer
    freshness = tuple(
        replace(one, positions={name: at for name, at in one.positions.items() if caller.sees_source(name)})
        for one in answer.freshness
    )
    if isinstance(answer, QueryResults):
        answer.freshness = freshness
        # those of lookups with a cursor
        answer.pages = {number: _for_caller(caller, page) for number, page in answer.pages.items()}
        return answer
    return replace(answer, seen=answer.seen._replace(freshness=freshness))
