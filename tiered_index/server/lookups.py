"""The handlers of lookups, messages and topics: the library answers, and the answer is sent page by page.

A call of the library runs in a thread, unless memory has the answer (`Lookups.query_nowait`). An answer has at
most a page of entries or messages; a stream makes the next page when the client has taken the last one.
Models of `parameters` check requests, and `wire` encodes answers. Each lookup, also a failed one, is counted and
written to the audit log. Threads: handlers run on the event loop and never wait there for a storage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from tiered_index.base.call import check_deadline, deadline_at
from tiered_index.base.encoding import BodyFormat
from tiered_index.connectors.containing import Containing
from tiered_index.connectors.read_again import NotInstalled
from tiered_index.connectors.registry import CONNECTORS, OF_OTHERS
from tiered_index.errors import BudgetExceeded, InvalidArgument, TieredIndexError
from tiered_index.server.http import answers, parameters, wire
from tiered_index.server.http.calls import Allowance, Calls, Handlers, body_of, caller_of
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.operations import Operation
from tiered_index.server.http.parameters import of_body
from tiered_index.server.http.problems import Refused, problem_of
from tiered_index.server.http.served import MOST_SHOWN, SHOWN, Served, shown_topics
from tiered_index.server.http.tokens import Caller
from tiered_index.service.read.answers.budget import RequestStats
from tiered_index.service.read.answers.messages import MANY, FoundMessage, MessagesResult, pause_s
from tiered_index.service.read.answers.results import PageTotals, QueryResults
from tiered_index.service.reader import IndexReader
from tiered_index.types import Explain, QueryResult, TopicsResult

if TYPE_CHECKING:
    from tiered_index.connectors.contract import BrowsedMessages, TopicQueues

K = TypeVar("K", bound=parameters.OneKey)
_NO_EXPLAIN = Explain()
# The example of a batch
_LOOKUPS = [{"topic": "orders", "key": "order-4711"}, {"topic": "orders", "key": "order-4712", "max_count": 1}]
_UNREADABLE = "this message can't be read"
# Most entries of an answer that is made on the event loop, and their part of the bytes of a page
_FEW, _FEW_OF = 100, 32
# Most entries of a batch; they have at most this many times the bytes of a page
_ENTRIES_OF_BATCH, _PAGES_OF_BATCH = 100_000, 4
# A larger body is not parsed as JSON, which may need fifty times its size
_MOST_PARSED_BYTES = 1 << 20
_MESSAGES = b'{"messages":['
# Most messages that one request searches for a text: a hot key's answer comes in pieces
_MOST_SEARCHED = 2000


class LookupHandlers(Handlers):
    """Handlers of lookups, topics and messages."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        super().__init__(served, calls, metrics)
        # what reads queues, by the connector; None: it has none
        self._queues: dict[str, TopicQueues | None] = {}

    def _queues_of(self, topic: str) -> TopicQueues:
        """Return what reads the queues of a topic. Raises `Refused` if there are none."""
        sources = self.served.sources
        if isinstance(source := sources.of(topic), NotInstalled):
            raise self._not_there(source.problem)
        name = sources.connector_of(topic) or OF_OTHERS
        if name not in self._queues:
            self._queues[name] = CONNECTORS.queues(name, sources.of_connector(name))
        if (queues := self._queues[name]) is None:
            raise self._not_there(CONNECTORS.spec(name).words.no_queues)
        return queues

    @Operation("GET /v1/query", answer=answers.QueryResult, forms=(wire.NDJSON, wire.ARROW), problems={422: None})
    async def query(self, request: Request, params: parameters.QueryParameters) -> Response:
        """Look up one key: its entries, the newest first."""
        caller_of(request).need_topic(params.topic)
        form = wire.form_of(request.headers.get("accept"))
        if params.all and form == wire.JSON:
            raise InvalidArgument("all=true needs a stream: send Accept: application/x-ndjson, or Arrow's")
        if params.all and "max_count" not in request.query_params:
            # each page repeats a part of the lookup: larger pages take less time in total
            params = structs.replace(params, max_count=parameters.MAX_COUNT)
        params = self._paged(params)
        # on the event loop, if memory has the answer: a thread takes longer. Writing the audit log may wait for a disk.
        is_few = params.max_count <= min(_FEW, self._most_entries() // _FEW_OF) and not params.all
        if is_few and not self.served.audit.is_on:
            page = *params.range_ms(), params.max_count, params.cursor
            if (answer := self.served.lookups.query_nowait(params.topic, params.key, *page)) is not None:
                pages = self._pages(request, params, form, lambda _: answer)
                return Response(b"".join(pages), headers=self._columns(), media_type=form)
        allowance = self.allowance(params)

        def look_up(cursor: str | None) -> QueryResult:
            return self.served.lookups.query(*params.arguments(cursor))

        def act() -> bytes | Iterator[bytes]:
            pages = self._pages(request, params, form, look_up)
            return pages if params.all else b"".join(pages)

        return self._typed(await self.answer(request, allowance, act, form))

    def _typed(self, response: Response) -> Response:
        """Return a response with the header `COLUMNS`."""
        response.headers.update(self._columns())
        return response

    def _columns(self) -> dict[str, str]:
        item_type: Any = self.served.lookups.item_type
        return {wire.COLUMNS: wire.columns_of(item_type)}

    async def _answer(
        self,
        request: Request,
        allowance: Allowance,
        kind: str,
        audited: dict[str, Any],
        look_up: Callable[[], Any],
        encoded: Callable[[Any], bytes | Iterator[bytes]],
    ) -> Response:
        """Return a lookup's answer as JSON; count and audit it."""

        def act() -> bytes | Iterator[bytes]:
            return encoded(self._recorded(request, kind, audited, look_up))

        began_s = time.monotonic()
        try:
            return await self.answer(request, allowance, act, wire.JSON)
        finally:
            if _withheld(request):
                # the time must not show what is at a withheld place
                await asyncio.sleep(pause_s(time.monotonic() - began_s))

    def _recorded(self, request: Request, kind: str, audited: dict[str, Any], look_up: Callable[[], Any]) -> Any:
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
            if self.served.audit.is_on:
                self.served.audit.write(
                    {
                        "request_id": request.state.request_id,
                        "caller": caller_of(request).name,
                        "lookup": kind,
                        **audited,
                        **_withheld(request),
                        "status": status,
                        "count": count,
                        "requests": explain.requests,
                        "bytes": explain.bytes,
                    }
                )

    def _pages(
        self,
        request: Request,
        params: parameters.QueryParameters,
        form: str,
        look_up: Callable[[str | None], QueryResult],
    ) -> Iterator[bytes]:
        """Yield the pages of an answer in a form, and the status. `look_up` returns the page at a cursor.

        The first page raises. A later error is in place of the status.
        """
        redaction, files = self.served.redaction, _tells_files(request, params)
        audited, cursor, is_begun = {"topic": params.topic, "key": params.key}, params.cursor, False
        if form == wire.JSON:
            answer = self._recorded(request, "query", audited, partial(look_up, cursor))
            yield wire.encode(wire.answer_document(answer, redaction, files=files))
            return
        totals, arrow = PageTotals(), wire.ArrowStream()
        # the last report of each file
        reports = dict[tuple[str | None, str], dict[str, Any]]()
        try:
            while not is_begun or (params.all and cursor is not None):
                answer = self._recorded(request, "query", audited, partial(look_up, cursor))
                answer = totals.add(answer)
                if files:
                    reports |= {(file.source, file.file): file.to_dict() for file in answer.explain.files}
                cursor, is_begun = answer.cursor, True
                if form == wire.ARROW:
                    yield arrow.table(wire.table_of(answer, redaction))
                else:
                    lines = [*wire.item_documents(answer, redaction)]
                    # a client whose stream is cut continues from the last cursor that it got
                    lines += [{"cursor": cursor}] if params.all and cursor is not None else []
                    yield b"".join(map(wire.encode, lines))
            costs = {"files": [*reports.values()]} if files else {}
            status = totals.document(answer, costs, cursor=cursor)
            status = redaction.document(status | {"timestamp_resolution_ms": answer.timestamp_resolution_ms})
        except TieredIndexError as error:
            if not is_begun:
                raise
            # the last line has no status, so that the stream can't be mistaken for a whole answer
            status = {"error": problem_of(error, request.state.request_id, redaction), "cursor": cursor}
        yield arrow.end(status) if form == wire.ARROW else wire.encode(status)

    @Operation(
        "POST /v1/query:batch",
        body=parameters.BatchBody,
        bodies={wire.JSON: {"lookups": _LOOKUPS}},
        answer=answers.BatchAnswers,
        forms=(wire.NDJSON, wire.ARROW),
        problems={422: None},
    )
    async def query_batch(self, request: Request, _: None) -> Response:
        """Look up many keys. The service reads each file once for all of them."""
        body = await body_of(request, wire.JSON)
        caller, form = caller_of(request), wire.form_of(request.headers.get("accept"))
        redaction, allowance = self.served.redaction, self.allowance()

        def act() -> bytes | Iterator[bytes]:
            params = of_body(parameters.BatchBody, body)
            allowance.narrow(params.limits(), params.max_cost_usd)
            lookups = params.columns()
            shown = zip(lookups.topics[:MOST_SHOWN], lookups.keys[:MOST_SHOWN], strict=True)
            keys = [[topic[:SHOWN], key[:SHOWN]] for topic, key in shown]
            counts = lookups.counts_of_topics()
            audited = {"lookups": len(lookups), "topics": shown_topics(counts), "keys": keys}
            # for the audit log, if the request is refused
            request.state.of_body = audited
            caller.need_topics(counts)
            lookups = replace(lookups, max_counts=self._page_counts(lookups.max_counts))
            files, more = _tells_files(request, params), dict[str, Any]()

            def look_up() -> QueryResults:
                try:
                    with deadline_at(allowance.deadline_s):
                        return self.served.lookups.query_many(lookups, params.allow_partial)
                except BudgetExceeded as error:
                    if not params.allow_spent or not isinstance(error.result, QueryResults):
                        raise
                    more["exceeded"] = redaction.text(str(error))
                    return error.result

            results = self._recorded(request, "query_many", audited, look_up)
            totals = wire.batch_totals(results, redaction, files=files) | more
            pieces = wire.batch_pieces(results, redaction, totals, form)
            return b"".join(pieces) if int(results.counts.sum()) <= wire.piece_rows(results) else pieces

        return self._typed(await self.answer(request, allowance, act, form))

    @Operation("GET /v1/messages", answer=answers.MessagesResult, problems={422: None})
    async def messages(self, request: Request, params: parameters.MessagesParameters) -> Response:
        """Look up one key and fetch its messages, each with its state."""
        caller_of(request).need_topic(params.topic)
        params = self._paged(params)
        caller = caller_of(request)

        def fetch(most_bytes: int) -> MessagesResult:
            source = self.served.sources.of(params.topic, None if caller.topics is None else caller.sees)
            most_read = None
            if params.contains is not None:
                source, most_read = Containing(source, params.contains, most_bytes), _MOST_SEARCHED
            bounds: Any = {"max_message_bytes": most_bytes, "max_read": most_read}
            return self.served.lookups.messages(*params.arguments(), source=source, **bounds)

        audited = {"topic": params.topic, "key": params.key} | (
            {"contains": params.contains} if params.contains else {}
        )
        return await self._messages(request, params, audited, fetch)

    @Operation(
        "GET /v1/messages/{id}",
        answer=answers.MessagesResult,
        part="Offset id, unique key, or place such as `kafka:TOPIC/PARTITION/OFFSET`.",
        problems={404: "No such message.", 422: None},
    )
    async def message(self, request: Request, params: parameters.MessageParameters) -> Response:
        """Show one message by its offset id, or by its unique key if you pass `topic`.

        If `topic` is one of files or Kafka, `id` is any of its keys.
        """
        caller, msg_id = caller_of(request), str(request.path_params["id"])
        spec = CONNECTORS.of_place(msg_id) if params.topic is None else None
        place: tuple[Any, ...] = () if spec is None else CONNECTORS.connector(spec.name).parse_place(msg_id)
        if (topic := place[0] if place else params.topic) is not None:
            caller.need_topic(topic)
        lookups = self.served.lookups

        def fetch(most_bytes: int) -> MessagesResult:
            page: Any = {"cursor": params.cursor, "allow_partial": params.allow_partial}
            page["max_message_bytes"] = most_bytes
            sources, sees = self.served.sources, None if caller.topics is None else caller.sees
            if spec is not None:
                if sources.connector_of(place[0]) != spec.name:
                    raise self._not_there(f"the index has no topic {place[0]!r:.80} of {spec.title}")
                message = sources.of_connector(spec.name).at(*place)
                return MessagesResult(messages=(message,), status="complete")
            source: Any = sources.of(params.topic, sees) if params.topic is not None else sources.of_ids(sees)
            if (by_id := getattr(source, "by_id", None)) is not None:
                answer: MessagesResult = by_id(lookups, msg_id, params.topic, **page)
                return answer
            assert params.topic is not None, "the source of ids has them"
            return lookups.messages(params.topic, msg_id, source=source, max_count=MANY, **page)

        audited = {"id": msg_id[:200], "topic": params.topic and params.topic[:SHOWN]}
        return await self._messages(request, params, audited, fetch, msg_id)

    async def _messages(
        self,
        request: Request,
        params: parameters.MessagesParameters | parameters.MessageParameters,
        audited: dict[str, Any],
        fetch: Callable[[int], MessagesResult],
        msg_id: str | None = None,
    ) -> Response:
        """Return messages as JSON. `fetch` returns them, of so many bytes at most; with `msg_id` there is one."""
        most_bytes, allowance, redaction = self.served.caps.message_bytes, self.allowance(params), self.served.redaction
        bodies = ShownBodies(most_bytes, params.body, allow_partial=params.allow_partial)

        def look_up() -> MessagesResult:
            answer = fetch(most_bytes)
            if count := sum(fetched.withheld for fetched in answer.messages):
                # the answer's time shows nothing about withheld places; their number is for the audit log
                request.state.withheld = count
                passed_s = answer.explain.elapsed_ms / 1000
                explain = replace(answer.explain, elapsed_ms=(passed_s + pause_s(passed_s)) * 1000)
                answer = replace(answer, explain=explain)
            is_there = answer.cursor is not None or any(fetched.message is not None for fetched in answer.messages)
            # a further page may be empty: its entries are of other messages
            if msg_id is not None and params.cursor is None and not is_there:
                problems = (fetched.problem for fetched in answer.messages if fetched.problem and not fetched.withheld)
                raise self._not_there(": ".join([f"no message {msg_id:.80}", *islice(problems, 1)]))
            for fetched in answer.messages:
                # redact only the places, not the message
                bodies.add(fetched.message, redaction.document(replace(fetched, message=None).to_dict()))
            return replace(answer, status="partial") if bodies.is_partial else answer

        def encoded(answer: MessagesResult) -> bytes:
            document = replace(answer, messages=()).to_dict(files=_tells_files(request, params))
            return _with_messages(redaction.document(document), bodies.encoded)

        kind = "messages" if msg_id is None else "message"
        return self._typed(await self._answer(request, allowance, kind, audited, look_up, encoded))

    @Operation(
        "GET /v1/browse",
        answer=answers.Browsed,
        problems={
            404: "The topic has no queue offsets here, or no such queue.",
            422: "A bound (`timeout_s`, `max_requests`, `max_bytes`, `max_cost_usd`) was reached. The answer has no "
            "messages.",
        },
    )
    async def browse(self, request: Request, params: parameters.BrowseParameters) -> Response:
        """Show the messages of a topic around a moment, without a key.

        The service needs queue offsets. It has them with `serve --store`, or from segments that `--archive-queues`
        archived.
        """
        caller = caller_of(request)
        caller.need_topic(params.topic)
        allowance = self.allowance(params)
        left = self.served.caps.message_bytes
        bodies = ShownBodies(left, params.body)

        def claim(size: int, is_read_anyway: bool) -> bool:
            nonlocal left
            return (left := left - size) >= 0 or is_read_anyway

        def look_up() -> BrowsedMessages:
            lookups, queues = self.served.lookups, self._queues_of(params.topic)
            if isinstance(lookups, IndexReader):
                # learn of erasures
                lookups.refresh()
            page = params.moment_ms(), params.cursor, params.max_count
            answer = queues.page(params.topic, params.queue_id, *page, claim)
            if isinstance(answer, str):
                raise self._not_there(answer)
            # a reason may name other topics
            shown = self.served.redaction.text if caller.topics is None else lambda _: _UNREADABLE
            for placed in answer.messages:
                document = {"queue_id": placed.queue_id, "queue_offset": placed.queue_offset, "message": None}
                bodies.add(placed.message, document | {"problem": placed.problem and shown(placed.problem)})
            spent = RequestStats.of_usage(allowance.usage)
            return replace(answer, explain=Explain(requests=spent.requests, bytes=spent.bytes, cost_usd=spent.cost_usd))

        def encoded(answer: BrowsedMessages) -> bytes:
            ends = [{"queue_id": n, "begin": begin, "end": end} for n, (begin, end) in sorted(answer.ends.items())]
            whole = {"topic": params.topic, "status": answer.status, "earlier": answer.earlier, "later": answer.later}
            # reads of the archive are about all topics
            explain = {} if caller.topics is not None else {"explain": answer.explain.to_dict(files=False)}
            return _with_messages(whole | {"queues": ends} | explain, bodies.encoded)

        audited = {"topic": params.topic, "queue_id": params.queue_id, "at_ms": params.moment_ms()}
        audited |= {"cursor": params.cursor and params.cursor[:SHOWN]}
        return await self._answer(request, allowance, "browse", audited, look_up, encoded)

    def _not_there(self, text: str) -> Refused:
        """Return the error for something that no index has. Raises the error of an index that could not be opened."""
        self.served.lookups._check_opened()
        return Refused(404, text)

    @Operation("GET /v1/topics", answer=answers.TopicsResult, problems={422: None})
    async def topics(self, request: Request, params: parameters.Range) -> Response:
        """List the topics, each with its entries, bytes of entries and time range.

        The sums have all entries of a topic in each file where the topic's times overlap the range.
        """
        caller = caller_of(request)

        def look_up() -> Any:
            answer = self.served.lookups.topics(*params.range_ms(), params.allow_partial)
            return replace(answer, topics=tuple([topic for topic in answer.topics if caller.sees(topic.topic)]))

        redaction, files = self.served.redaction, _tells_files(request, params)

        def encoded(answer: TopicsResult) -> bytes | Iterator[bytes]:
            document = wire.answer_document(replace(answer, topics=()), redaction, files=files)
            topics = (topic.to_dict() for topic in answer.topics)
            return wire.list_document(document | {"topics": topics}, "topics", wire.JSON)

        return await self._answer(request, self.allowance(params), "topics", {}, look_up, encoded)

    def _most_entries(self) -> int:
        item_type: Any = self.served.lookups.item_type
        return wire.most_entries(item_type)

    def _page_counts(self, counts: list[int]) -> list[int]:
        """Return the most entries of each lookup of a batch. Raises `Refused` if their answers could be too large."""
        most = self._most_entries()
        if most < max(counts):
            counts = [min(count, most) for count in counts]
        if (asked_for := sum(counts)) > (allowed := min(_ENTRIES_OF_BATCH, _PAGES_OF_BATCH * most)):
            raise Refused(
                413,
                f"the lookups ask for up to {asked_for:,} entries, and this service returns {allowed:,} at once: ask "
                "for fewer keys, or a lower max_count",
            )
        return counts

    def _paged(self, params: K) -> K:
        """Return the parameters with the most entries of a page: fewer of wide columns."""
        most = self._most_entries()
        return params if params.max_count <= most else structs.replace(params, max_count=most)


class ShownBodies:
    """Shows the messages of one answer, whose bodies have `left` bytes together, until the request's deadline.

    A body that exceeds the bytes is shown as stored. After the deadline no body is decompressed: the answer fails, or
    with `allow_partial` becomes partial.
    """

    def __init__(self, left: int, wanted: BodyFormat, *, allow_partial: bool = False) -> None:
        self.encoded: list[bytes] = []
        # Whether the deadline left a body compressed
        self.is_partial = False
        self._left, self._wanted, self._allow_partial = left, wanted, allow_partial

    def add(self, message: FoundMessage | None, document: dict[str, Any]) -> None:
        """Append a document to `encoded`, with its member `message`.

        Raises `BudgetExceeded` after the deadline if the message's body is compressed.
        """
        document["message"] = None if message is None else self._document(message)
        self.encoded.append(wire.encode(document).rstrip())
        self._left = max(0, self._left - len(self.encoded[-1]))

    def _document(self, message: FoundMessage) -> dict[str, Any]:
        most_bytes, late, wanted = self._left, None, self._wanted
        if wanted not in ("excerpt", "none") and message.compression is not None:
            try:
                check_deadline("decompressing bodies")
            except BudgetExceeded as error:
                if not self._allow_partial:
                    raise
                most_bytes, late = 0, str(error)
        if wanted == "json" and message.plain_bytes(most_bytes) > _MOST_PARSED_BYTES:
            wanted = "text"
        document = message.to_dict(wanted, most_bytes)
        if late is not None and "body_problem" in document:
            document["body_problem"] = late
            self.is_partial = True
        return document


def _with_messages(whole: dict[str, Any], shown: list[bytes]) -> bytes:
    """Return a document that begins with the messages `shown`, which are encoded already, to save memory."""
    whole = {"messages": [], **whole}
    return b"".join((_MESSAGES, b",".join(shown), wire.encode(whole)[len(_MESSAGES) :]))


def _withheld(request: Request) -> dict[str, int]:
    """Return the number of places that were withheld from a request, for the audit log; empty for none."""
    count: int = getattr(request.state, "withheld", 0)
    return {"withheld": count} if count else {}


def _tells_files(request: Request, params: parameters.RequestBounds) -> bool:
    """Return whether an answer reports each file. Files are about all topics, so the caller must see every topic."""
    return params.explain and caller_of(request).topics is None


def _for_caller(caller: Caller, answer: Any) -> Any:
    """Return a lookup's answer without the positions of sources that the caller may not see."""
    if caller.topics is None or not hasattr(answer, "freshness"):
        return answer
    freshness = tuple(
        replace(freshness, positions={name: at for name, at in freshness.positions.items() if caller.sees_source(name)})
        for freshness in answer.freshness
    )
    if isinstance(answer, QueryResults):
        answer.freshness = freshness
        return answer
    return replace(answer, seen=answer.seen._replace(freshness=freshness))
