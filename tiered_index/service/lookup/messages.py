"""Messages as the answer: what an index's entries point to, fetched from wherever it still is, and checked against the
real key.

Whatever an entry points to is accounted for: a message, or its state and a reason. Only entries of another key with an
equal hash are dropped, and counted; and those of messages that were written over, where the index has the entry of the
message that lies there now: it answers for itself, at its place in the order. Threads: any; no state.

One lookup of messages at work: pages of the index, what became of their entries, and which entry answers for a message.

A log may be written anew from some place on. Then the index has several entries of one place and queue, each of another
second, and one message lies there. An entry answers only for the message that it was written for; the message that lies
there is answered by its own entry, at that entry's place in the order: so it is answered once, however the answer is
cut into pages. One page has only the newest entry of a place; one that comes later in the order and that a newer one
hides is asked for. One thread uses it.

What a message is as an answer: the words that indexes and the sources of their messages have in common.

The index knows hashes and places; a `MessageSource` knows the messages of one system. Values are immutable; share them
between threads.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tiered_index.errors import BudgetExceeded, PartialAnswer, TieredIndexError
from tiered_index.format.schema import Schema
from tiered_index.service.answers.rows import encode_cursor, query_digest
from tiered_index.service.answers.validation import check_range
from tiered_index.service.lookup.budget import LookupBudget
from tiered_index.storage.context import check_deadline
from tiered_index.storage.metering import PriceTable
from tiered_index.types import MAX_TIMESTAMP_MS, Explain, FileReport, IndexItem, QueryResult, Status

__all__ = [
    "Fetched",
    "FoundMessage",
    "LookupArguments",
    "MessageLookup",
    "MessageSource",
    "MessageState",
    "MessagesResult",
    "find_messages",
]

MessageState = Literal["local", "archived", "expired", "missing"]
"""``local``: read from the source's own files. ``archived``: from an archived segment. ``expired``: the source has
deleted it, and no archive has it. ``missing``: it should be there and isn't, is damaged, or could not be asked for.
"""

_NOTHING = Explain()


class FoundMessage(Protocol):
    """A message of any system."""

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What became of one entry of the index, or of one place that was asked for (`item` is then None).

    `message` is there where the state is ``local`` or ``archived``. `problem` says why not, or why it was not read from
    a nearer place.
    """

    item: IndexItem | None
    state: MessageState
    message: FoundMessage | None = None
    carries_key: bool = True
    """False: a whole message of another key or topic, whose hash is equal."""
    read_from: str | None = None
    """Path or object's name that was read, or tried last."""
    problem: str | None = None
    error: TieredIndexError | None = None
    """Why the place could not be asked; asking again may help."""
    instead: IndexItem | None = None
    """Where another message of the key lies in the entry's place, of another second: the entry that one would have."""
    is_near: bool = False
    """`message` is the one of `instead`, whose second is so near that this may be its entry, where the index has no
    other for it.
    """
    requests: int = 0
    bytes: int = 0
    """What it cost in requests to the storage. Neighbours fetched by one request stand with the first of them."""

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "state": self.state,
            "item": self.item.to_dict() if self.item is not None else None,
            "message": self.message.to_dict() if self.message is not None else None,
            "read_from": self.read_from,
            "problem": self.problem,
        }


class MessageSource(Protocol):
    """Where the messages are. Safe under threads."""

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`, in their order, looked up under `key` of `topic`.

        Never raises for a single item.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class MessagesResult:
    """The answer to a lookup of messages.

    `messages` are in answer order, at most `max_count` of them, those that can't be had among them. `status` and
    `cursor` are as in `QueryResult`; `failed` names files of the index and places of messages that could not be read
    (status ``partial``). `collisions` is how many entries of other keys with an equal hash were dropped. `explain`
    counts lookups and messages (its reports of place ``messages``), the last two fields the messages alone.
    """

    messages: tuple[Fetched, ...]
    status: Status
    cursor: str | None = None
    failed: tuple[FileReport, ...] = ()
    collisions: int = 0
    explain: Explain = _NOTHING
    message_requests: int = 0
    message_bytes: int = 0

    def __len__(self) -> int:
        return len(self.messages)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer JSON-ready."""
        return {
            "messages": [fetched.to_dict() for fetched in self.messages],
            "status": self.status,
            "cursor": self.cursor,
            "failed": [report.to_dict() for report in self.failed],
            "collisions": self.collisions,
            "explain": self.explain.to_dict()
            | {"message_requests": self.message_requests, "message_bytes": self.message_bytes},
        }


@dataclass(frozen=True)
class LookupArguments:
    """The lookup: as `IndexService.query` takes it."""

    topic: str
    key: str
    begin_ms: int | None
    end_ms: int | None
    max_count: int
    cursor: str | None
    allow_partial: bool


_MOMENT_S = 1e-6
# what a lookup is given whose time is up: it says what it would have read
_STEPS_S = (0, 1, -1)
# how far an entry's second may be from its message's own, in order of preference


class MessageLookup:
    """The calls of one lookup, and what they gave; `exceeded` is the budget's refusal of a part of the index."""

    def __init__(
        self,
        query: Callable[..., QueryResult],
        asked: LookupArguments,
        source: MessageSource,
        schema: Schema,
        account: LookupBudget,
    ) -> None:
        self._query = query
        self._asked = asked
        self._source = source
        self._schema = schema
        self._account = account
        self._second_min, self._second_max, _ = check_range(asked.begin_ms, asked.end_ms, asked.max_count)
        self.pages: list[QueryResult] = []
        self.spent: list[Fetched] = []
        self.exceeded: BudgetExceeded | None = None

    def page(self, max_count: int, cursor: str | None) -> QueryResult:
        """Return a page of the index, as far as the budget reaches."""
        return self._look_up(self._asked.begin_ms, self._asked.end_ms, max_count, cursor)

    def cursor_behind(self, item: IndexItem) -> str:
        """Return the cursor of a page that ended with `item`."""
        second, offset, *more = self._key(item)
        return encode_cursor(
            (second, offset, *more),
            query_digest(self._asked.topic, self._asked.key, self._second_min, self._second_max),
        )

    def settle(self, items: Sequence[IndexItem], ahead: list[IndexItem], *, is_last: bool) -> list[Fetched]:
        """Return what became of `items`, in answer order, other keys' messages among them; entries that don't answer
        are left out.

        `ahead` are the entries behind them on their page; an entry that comes later and that one of these hides is put
        among them, if it lies before the page's end, which there is unless the page `is_last`. Else it comes by itself,
        on its own page.
        """
        end = self.order(items[-1])
        settled: list[Fetched] = []
        while items:
            hidden = []
            for one in self._fetch(items):
                assert one.item is not None
                own = self._own_entry(one.instead) if one.instead is not None else None
                if own is None or self.order(own) == self.order(one.item):
                    settled.append(one)
                    continue
                in_range = self._second_min <= own.timestamp_ms // 1000 <= self._second_max
                if one.message is not None and not one.is_near:
                    settled.append(one)
                elif not in_range:
                    settled.append(_not_there(one))
                if in_range and self.order(own) > self.order(one.item):
                    hidden.append(own)
            items = [own for own in hidden if self.order(own) < end]
            for own in hidden:
                if self.order(own) > end and (is_last or (ahead and self.order(own) < self.order(ahead[-1]))):
                    insort(ahead, own, key=self.order)
        return sorted(settled, key=self._order_of)

    def order(self, item: IndexItem) -> tuple[int, ...]:
        """Return what entries are ordered by, ascending."""
        second, offset, *more = self._key(item)
        return (-second, -offset, *more)

    def _order_of(self, fetched: Fetched) -> tuple[int, ...]:
        assert fetched.item is not None
        return self.order(fetched.item)

    def _key(self, item: IndexItem) -> tuple[int, ...]:
        return (
            item.timestamp_ms // 1000,
            item.offset,
            item.queue_id,
            *(int(getattr(item, name)) for name in self._schema.identity_extra),
        )

    def _look_up(self, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None) -> QueryResult:
        asked, left_s = self._asked, self._account.remaining_s()
        limits = {} if left_s is None else {"timeout_s": max(left_s, _MOMENT_S)}
        try:
            answer = self._query(
                asked.topic, asked.key, begin_ms, end_ms, max_count, cursor, asked.allow_partial, **limits
            )
        except BudgetExceeded as error:
            self.exceeded = self.exceeded or error
            answer = error.result if isinstance(error.result, QueryResult) else QueryResult(items=(), status="partial")
        self.pages.append(answer)
        return answer

    def _own_entry(self, there: IndexItem) -> IndexItem | None:
        """Return the index's entry, of whatever range, of the message that would have the entry `there`, None where it
        has none.
        """
        second, *place = self._key(there)
        for step in _STEPS_S:
            own = second + step
            if not 0 <= own <= MAX_TIMESTAMP_MS // 1000:
                continue  # a time that was damaged
            # the cursor just before it: no other entry lies between
            before = encode_cursor(
                (own, *place[:-1], place[-1] - 1), query_digest(self._asked.topic, self._asked.key, own, own)
            )
            for item in self._look_up(own * 1000, own * 1000, 1, before).items:
                if self._key(item) == (own, *place):
                    return item
        return None

    def _fetch(self, items: Sequence[IndexItem]) -> list[Fetched]:
        """Return what became of each of `items`, in their order."""
        try:
            check_deadline("fetching messages")
        except BudgetExceeded as error:
            fetched = [Fetched(item=item, state="missing", problem=str(error), error=error) for item in items]
        else:
            fetched = self._source.fetch(items, self._asked.topic, self._asked.key)
        if [one.item for one in fetched] != list(items):
            raise AssertionError("a message source answers for every item, in order")
        self.spent += fetched
        return fetched


def _not_there(fetched: Fetched) -> Fetched:
    """Return the same without a message that is another entry's."""
    if fetched.message is None:
        return fetched
    return replace(
        fetched,
        state="missing",
        message=None,
        problem=f"{fetched.read_from}: the message there has an entry of another second",
    )


_PAGE = 64
# entries asked for at least, once collisions have shown that a page holds others' entries, too


def find_messages(
    query: Callable[..., QueryResult],
    asked: LookupArguments,
    source: MessageSource,
    schema: Schema,
    account: LookupBudget,
) -> MessagesResult:
    """Look up, fetch, and page on past collisions until `max_count` entries are accounted for or there are no more.

    `query` is that of a service or reader; `account` is open and holds the bounds of the whole call. Raises as `query`
    does, and the first `Fetched.error` unless partial answers are allowed; the `result` of a `BudgetExceeded` is the
    `MessagesResult` up to then.
    """
    started = time.perf_counter()
    work = MessageLookup(query, asked, source, schema, account)
    found: list[Fetched] = []
    collisions = 0
    cursor, page = asked.cursor, asked.max_count
    while True:
        answer = work.page(page, cursor)
        cursor, ahead = answer.cursor, list(answer.items)
        while ahead and len(found) < asked.max_count:
            left = asked.max_count - len(found)
            items, ahead = ahead[:left], ahead[left:]
            settled = work.settle(items, ahead, is_last=answer.cursor is None)
            kept, behind = _first(settled, left)
            found += [one for one in kept if one.carries_key]
            collisions += sum(not one.carries_key for one in kept)
            last = kept[-1].item if behind else items[-1]
            assert last is not None
            cursor = work.cursor_behind(last) if behind or ahead else answer.cursor
        if len(found) >= asked.max_count or cursor is None:
            break
        if work.exceeded is not None:
            break
        page = max(asked.max_count - len(found), _PAGE)
    fetched = _reports(work.spent, account.usage.prices)
    failed = {report.file: report for answer in work.pages for report in answer.failed}
    failed |= _failures(work.spent, fetched, allow_partial=asked.allow_partial)
    result = MessagesResult(
        messages=tuple(found),
        status="partial" if failed or work.exceeded is not None else "truncated" if cursor is not None else "complete",
        cursor=cursor,
        failed=tuple(failed.values()),
        collisions=collisions,
        explain=_together([answer.explain for answer in work.pages], fetched, account, started),
        message_requests=sum(one.requests for one in work.spent),
        message_bytes=sum(one.bytes for one in work.spent),
    )
    if asked.allow_partial or (exceeded := work.exceeded or _refused(work.spent)) is None:
        return result
    raise BudgetExceeded(str(exceeded), failed=result.failed, result=result) from exceeded


def _first(settled: Sequence[Fetched], count: int) -> tuple[list[Fetched], bool]:
    """Return what there is up to the message number `count`, and whether there is more behind it."""
    carrying = [place for place, one in enumerate(settled) if one.carries_key]
    end = carrying[count - 1] + 1 if len(carrying) > count else len(settled)
    return list(settled[:end]), end < len(settled)


def _reports(spent: Sequence[Fetched], prices: PriceTable) -> list[FileReport]:
    """Return what was done with each archived segment, or other place that cost a request or failed, of which messages
    were asked.
    """
    groups: dict[tuple[str, bool], list[Fetched]] = {}
    for one in spent:
        if one.item is not None and (one.requests or one.error is not None or one.state == "archived"):
            groups.setdefault((one.read_from or "messages", one.error is not None), []).append(one)
    reports = []
    for (file, failed), several in groups.items():
        times = [one.item.timestamp_ms for one in several if one.item is not None]
        requests, read = sum(one.requests for one in several), sum(one.bytes for one in several)
        reports.append(
            FileReport(
                file=file,
                place="messages",
                outcome="failed" if failed else "fetched",
                begin_ms=min(times),
                end_ms=max(times),
                requests=requests,
                bytes=read,
                cost_usd=prices.cost_usd({"get_range": requests}, read),
                matched=sum(one.message is not None and one.carries_key for one in several),
                error=str(several[0].error) if failed else None,
            )
        )
    return reports


def _failures(spent: Sequence[Fetched], reports: Sequence[FileReport], *, allow_partial: bool) -> dict[str, FileReport]:
    """Return the reports of what could not be asked; raises what it raised unless partial answers are allowed, or the
    budget refused it.
    """
    failed = {report.file: report for report in reports if report.outcome == "failed"}
    errors = [one.error for one in spent if one.error is not None]
    hard = [error for error in errors if not isinstance(error, BudgetExceeded)]
    if hard and not allow_partial:
        if all(type(error) is type(hard[0]) for error in hard):
            raise hard[0]
        raise PartialAnswer(
            "; ".join(f"{file}: {report.error}" for file, report in failed.items()), failed=tuple(failed.values())
        )
    return failed


def _refused(spent: Sequence[Fetched]) -> BudgetExceeded | None:
    """Return the error of the first message that the budget did not reach for, saying how many those were."""
    errors = [one.error for one in spent if isinstance(one.error, BudgetExceeded)]
    return BudgetExceeded(f"{errors[0]}; {len(errors)} of the messages were not read") if errors else None


def _together(
    explains: Sequence[Explain], fetched: Sequence[FileReport], account: LookupBudget, started: float
) -> Explain:
    """Return the sum of it all.

    What the account counted beside lookups and messages is the log's, which fetching may read on.
    """
    parts: list[Explain | FileReport] = [*explains, *fetched]
    requests, read, cost_usd = (
        sum(p.requests for p in parts),
        sum(p.bytes for p in parts),
        sum((p.cost_usd for p in parts), 0.0),
    )
    usage, log = account.usage, []
    if (more := usage.requests - requests) > 0:
        more_bytes, more_usd = max(0, usage.bytes_read - read), max(0.0, usage.cost_usd - cost_usd)
        log = [
            FileReport(
                file="log",
                place="storage",
                outcome="refreshed",
                begin_ms=0,
                end_ms=0,
                requests=more,
                bytes=more_bytes,
                cost_usd=more_usd,
            )
        ]
        requests, read, cost_usd = requests + more, read + more_bytes, cost_usd + more_usd
    return Explain(
        requests=requests,
        bytes=read,
        cost_usd=cost_usd,
        elapsed_ms=(time.perf_counter() - started) * 1000,
        files_read=sum(explain.files_read for explain in explains),
        files_skipped=sum(explain.files_skipped for explain in explains),
        files=(*(file for explain in explains for file in explain.files), *fetched, *log),
    )
