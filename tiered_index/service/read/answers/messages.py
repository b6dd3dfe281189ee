"""Lookups of messages: fetches the messages of a lookup's entries, and checks the real key.

Every entry has a message, or a state and a reason. Exceptions are entries of other keys with an equal hash, which are
counted, and entries of overwritten messages if the new message has an entry. If a log was rewritten, several entries
with different seconds have the same place and queue. The message is then answered by its own entry, at that entry's
place in the order; if a newer entry hides it, it is looked up. Threads: any; a `MessageLookup` belongs to one thread.
"""

from __future__ import annotations

import sys
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal, Protocol

from tiered_index.base.encoding import MAX_BODY_BYTES, BodyFormat
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import (
    BudgetExceeded,
    CorruptFile,
    ObjectArchived,
    ObjectRefused,
    PartialAnswer,
    StorageError,
    TieredIndexError,
)
from tiered_index.service.read.answers.budget import LookupBudget, RequestStats, add_up
from tiered_index.service.read.answers.rows import OrderKey, check_range, encode_cursor, query_digest
from tiered_index.types import (
    Answer,
    Explain,
    FilePlace,
    FileReport,
    IndexItem,
    Lookup,
    Provenance,
    QueryResult,
    describe_places,
)

MessageState = Literal["local", "archived", "expired", "erased", "no_topic", "refused", "unavailable", "missing"]
"""The state of a message:

- ``local``: read from the source's own files.
- ``archived``: read from an archived segment.
- ``expired``: the source has deleted it, and no archived segment has it.
- ``erased``: an erasure overwrote it in its archived segment, or left it out.
- ``no_topic``: the source has no such topic or partition, and no archived segment has it.
- ``refused``: the source or its object does not let the caller read it, and no archived segment has it.
- ``unavailable``: the source can't be read now, and no archived segment has it. Trying again may help.
- ``missing``: it should exist, but it does not, is damaged, or could not be read.
"""

MANY = 32
"""The messages of one unique key on a page."""
_WITHHELD_S = 0.2


def pause_s(passed_s: float) -> float:
    """Return the time to wait before an answer that withholds a place: until the next step, each twice the last.

    So the response time does not reveal whether the place has a message.
    """
    step_s = _WITHHELD_S
    while step_s < passed_s:
        step_s *= 2
    return step_s - passed_s


class FoundMessage(Protocol):
    """A message of any source."""

    def to_dict(self, body: BodyFormat = "text", max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
        """Return it JSON-ready, its body as `show_bytes`; one that would be larger is not decompressed."""

    @property
    def compression(self) -> str | None:
        """The compression of the body; None: it is stored as it is."""

    def plain_bytes(self, max_bytes: int) -> int:
        """Return the bytes of the plain body, or a greater number than `max_bytes` once it has more."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """The message of one entry or offset, or the reason why there is none.

    - `item`: the entry; None for an offset.
    - `place`: the file and the row of an entry of files; None: it is of no file, or none is known.
    - `state`: a `MessageState`.
    - `message`: set if the state is ``local`` or ``archived``.
    - `carries_key`: False: the message has another key or topic with an equal hash.
    - `read_from`: path or object name that was read, or tried last.
    - `problem`: the reason why there is no message, or why no nearer place had it.
    - `error`: why the place could not be read. Trying again may help.
    - `damaged`: the bytes contradict their checksum or structure, and there is no other copy.
    - `instead`: if the place has another message of the key, with another second: the entry of that message.
    - `is_near`: `message` is that of `instead`, and its second is so near that this may be its entry, if the index has
      no other.
    - `withheld`: the caller may see only some topics, and no message of these begins at the place.
    - `requests`, `bytes`: requests and bytes of the storage. If one request fetched neighbours, the first of them has
      the cost.
    """

    item: IndexItem | None
    state: MessageState
    message: FoundMessage | None = None
    carries_key: bool = True
    read_from: str | None = None
    problem: str | None = None
    error: TieredIndexError | None = None
    damaged: bool = False
    instead: IndexItem | None = None
    is_near: bool = False
    withheld: bool = False
    requests: int = 0
    bytes: int = 0
    place: FilePlace | None = None

    def to_dict(self, body: BodyFormat = "text", max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
        """Return it JSON-ready, with its message as `FoundMessage.to_dict`."""
        items = [] if self.item is None else [self.item.to_dict()]
        describe_places(items, [self.place] * len(items))
        return {
            "state": self.state,
            "item": items[0] if items else None,
            "message": self.message.to_dict(body, max_body_bytes) if self.message is not None else None,
            "read_from": self.read_from,
            "problem": self.problem,
        }


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for the message of an entry or at a place. `problems` has those of the places so far, the newest last.

    Each source derives its own, which compares messages with the entry.
    """

    item: IndexItem | None
    found: Fetched | None = None
    # A message with the entry's place, second and key, and another size
    other: Fetched | None = None
    # A message of another key with an equal hash
    collision: Fetched | None = None
    # The entry of a message with the entry's place and key, and another second
    instead: IndexItem | None = None
    problems: list[str] = field(default_factory=list)
    error: StorageError | BudgetExceeded | None = None
    read_from: str | None = None
    damaged: bool = False
    # An object that may have the message is refused to the caller, or is archived
    is_refused: bool = False
    requests: int = 0
    bytes: int = 0
    file_place: FilePlace | None = None

    def note(self, error: CorruptFile | StorageError | BudgetExceeded) -> None:
        """Note why a place was not read. That an object is refused is the state of its entries, and ends no lookup."""
        self.problems.append(str(error))
        if isinstance(error, CorruptFile):
            self.damaged = True
        elif isinstance(error, ObjectRefused | ObjectArchived) and self.item is not None:
            self.is_refused = True
        else:
            # without its traceback, which would keep the bytes in memory
            self.error = self.error or error.with_traceback(None)

    def charge(self, reads: Sequence[int]) -> None:
        """Count reads of catalogs, of so many bytes each."""
        self.requests += len(reads)
        self.bytes += sum(reads)

    def fetched(self, state: MessageState, **more: Any) -> Fetched:
        """Return a result of the place that was read last, with all problems so far."""
        problem = "; ".join(self.problems) or None
        of_entry: dict[str, Any] = {"item": self.item, "place": self.file_place, "read_from": self.read_from}
        return Fetched(state=state, problem=problem, **of_entry, **more)

    def missing(self, state: MessageState, **more: Any) -> Fetched:
        """Return the result if no place has the message."""
        if self.is_refused and self.error is None:
            state = "refused"
        return self.fetched(state, error=self.error, instead=self.instead, **more)

    def settle(self, fetched: Fetched) -> None:
        """Note a message of the entry's place, size and second, which may have another key."""
        if fetched.carries_key:
            self.found = fetched
        else:
            self.collision = self.collision or fetched

    def outcome(self, missing: Callable[[], Fetched]) -> Fetched:
        """Return the result and its cost.

        It is `missing` if no place has the message, also if a place has another message and one could not be read.
        """
        is_open = self.error is not None or self.damaged or self.is_refused
        known = self.found or (None if is_open else self.other or self.collision) or missing()
        return replace(known, requests=self.requests, bytes=self.bytes)


class MessageSource(Protocol):
    """Fetches the messages of entries, of one or several indexes. Any thread may call it.

    If the entries are of several indexes, the `source` of an entry chooses the index.
    """

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return the result for each of `items`, in order, for `key` of `topic`. An item's error is in its result."""


@dataclass(frozen=True, kw_only=True, repr=False)
class MessagesResult(Answer[Fetched]):
    """The answer to a lookup of messages: at most `max_count` in answer order, also those that can't be read.

    It is a sequence of `Fetched`. `seen` has the provenance, as in `QueryResult`. `explain` counts lookups and
    messages together (reports of place ``messages``).

    - `messages`: Entries (`item`), each with its message. `state` is `local`, `archived`, `expired`, `erased`,
      `no_topic`, `refused`, `unavailable` or `missing` (`problem` states the reason). `expired`: the broker deleted
      the message before it was archived. `no_topic`: the broker has no such topic. `refused`: the broker or the
      storage does not let the service read it. `unavailable`: the broker does not answer, or can't return it yet.
    - `cursor`: Continues a truncated answer. Null: there is no more.
    - `collisions`: Entries left out because their messages have another key with the same hash, or lack the text
      `contains`.
    - `failed`: LookupFiles of the index and places of messages that could not be read.
    """

    rows_field = "messages"
    own_fields = ("cursor", "collisions")
    messages: tuple[Fetched, ...]
    cursor: str | None = None
    collisions: int = 0
    explain: Explain = field(default_factory=lambda: Explain(message_requests=0, message_bytes=0))

    @property
    def message_requests(self) -> int:
        """Requests for messages only."""
        return self.explain.message_requests or 0

    @property
    def message_bytes(self) -> int:
        """Bytes of messages only."""
        return self.explain.message_bytes or 0


# allowed differences between an entry's second and its message's, in order of preference
_STEPS_S = (0, 1, -1)
# least entries of a page after the first, which had collisions
_PAGE = 64


@dataclass(eq=False)
class MessageLookup:
    """One lookup of messages: its pages, its fetched messages, and the first budget error of a page.

    `query` is that of a service or reader. `order_key` returns the order key of an entry. `budget` is open and has the
    bounds of the whole call.
    """

    query: Callable[..., QueryResult[IndexItem]]
    lookup: Lookup
    allow_partial: bool
    source: MessageSource
    order_key: Callable[[IndexItem], OrderKey]
    budget: LookupBudget
    max_message_bytes: int | None = None
    max_read: int | None = None
    pages: list[QueryResult[IndexItem]] = field(default_factory=list)
    fetched: list[Fetched] = field(default_factory=list)
    exceeded: BudgetExceeded | None = None

    def __post_init__(self) -> None:
        lookup = self.lookup
        self._second_min, self._second_max, _ = check_range(lookup.begin_ms, lookup.end_ms, lookup.max_count)
        self._message_bytes, self._is_full = 0, False

    def run(self) -> MessagesResult:
        """Look up, fetch, continue past collisions. Raises as `query`, and the first `Fetched.error` unless partial."""
        started = time.perf_counter()
        lookup = self.lookup
        messages: list[Fetched] = []
        collisions = 0
        cursor, page = lookup.cursor, lookup.max_count
        seen = Provenance()
        digest = query_digest(lookup.topic, lookup.key, self._second_min, self._second_max)
        while True:
            resume = cursor
            answer = self._look_up(lookup.begin_ms, lookup.end_ms, page, cursor)
            cursor, ahead, seen = answer.cursor, list(answer.items), seen.joined(answer.seen)
            while ahead and len(messages) < lookup.max_count and not self._is_full and self._may_read:
                left = min(lookup.max_count - len(messages), self._may_read)
                if not (count := self._fitting(ahead[:left])):
                    cursor = resume
                    break
                items, ahead = ahead[:count], ahead[count:]
                resolved = self._resolve(items, ahead, is_last=answer.cursor is None)
                carrying = [place for place, fetched in enumerate(resolved) if fetched.carries_key]
                page_messages = resolved[: carrying[left - 1] + 1] if len(carrying) > left else resolved
                behind = len(page_messages) < len(resolved)
                messages += [fetched for fetched in page_messages if fetched.carries_key]
                collisions += sum(not fetched.carries_key for fetched in page_messages)
                last = page_messages[-1].item if behind else items[-1]
                assert last is not None
                resume = cursor = encode_cursor(self.order_key(last), digest) if behind or ahead else answer.cursor
            if len(messages) >= lookup.max_count or cursor is None or self.exceeded is not None or self._is_full:
                break
            if not self._may_read:
                break
            page = max(lookup.max_count - len(messages), _PAGE)
        reports = self._reports()
        failed = {(report.source, report.file): report for answer in self.pages for report in answer.failed}
        failed |= self._failures(reports)
        partial = failed or self.exceeded is not None
        result = MessagesResult(
            messages=tuple(messages),
            status="partial" if partial else "truncated" if cursor is not None else "complete",
            cursor=cursor,
            failed=tuple(failed.values()),
            collisions=collisions,
            explain=self._explain(reports, started),
            seen=seen,
        )
        if self.allow_partial or (exceeded := self.exceeded or self._refusal()) is None:
            return result
        raise BudgetExceeded(str(exceeded), failed=result.failed, result=result) from exceeded

    def _resolve(self, items: Sequence[IndexItem], ahead: list[IndexItem], *, is_last: bool) -> list[Fetched]:
        """Return the fetched `items` in answer order, with other keys' messages, without overwritten entries.

        `ahead` are the entries after them on their page. One of `items` may hide a later entry.
        That entry is inserted into `ahead` if it belongs on this page or the page `is_last`. Else a later page has it.
        """
        end = self._order(items[-1])
        resolved: list[tuple[tuple[int, ...], Fetched]] = []
        while items:
            hidden = []
            for fetched in self._fetch(items):
                assert fetched.item is not None
                order = self._order(fetched.item)
                own = self._own_entry(fetched.instead) if fetched.instead is not None else None
                if own is None or self._order(own) == order:
                    resolved.append((order, fetched))
                    continue
                in_range = self._second_min <= own.timestamp_ms // 1000 <= self._second_max
                if fetched.message is not None and not fetched.is_near:
                    resolved.append((order, fetched))
                elif not in_range:
                    if fetched.message is not None:
                        problem = f"{fetched.read_from}: the message there has an entry of another second"
                        fetched = replace(fetched, state="missing", message=None, problem=problem)
                    resolved.append((order, fetched))
                if in_range and self._order(own) > order:
                    hidden.append(own)
            items = [own for own in hidden if self._order(own) < end]
            for own in hidden:
                if self._order(own) > end and (is_last or (ahead and self._order(own) < self._order(ahead[-1]))):
                    insort(ahead, own, key=self._order)
        return [fetched for _, fetched in sorted(resolved, key=itemgetter(0))]

    @property
    def _may_read(self) -> int:
        """The number of messages that may still be fetched."""
        return sys.maxsize if self.max_read is None else max(0, self.max_read - len(self.fetched))

    def _fitting(self, items: Sequence[IndexItem]) -> int:
        """Return how many of `items` fit the remaining message bytes; at least 1 for the first message."""
        if self.max_message_bytes is None:
            return len(items)
        for number, item in enumerate(items):
            self._message_bytes += item.size
            if self._message_bytes > self.max_message_bytes:
                self._is_full = True
                return max(number, 0 if self.fetched else 1)
        return len(items)

    def _order(self, item: IndexItem) -> tuple[int, ...]:
        """Return an ascending sort key of entries."""
        second, offset, *more = self.order_key(item)
        return (-second, -offset, *more)

    def _look_up(
        self, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None
    ) -> QueryResult[IndexItem]:
        """Return a page of the index; only a part if the budget is exceeded."""
        topic, key = self.lookup.topic, self.lookup.key
        try:
            answer = self.query(topic, key, begin_ms, end_ms, max_count, cursor, self.allow_partial)
        except BudgetExceeded as error:
            self.exceeded = self.exceeded or error
            answer = error.result if isinstance(error.result, QueryResult) else QueryResult(items=(), status="partial")
        self.pages.append(answer)
        return answer

    def _own_entry(self, there: IndexItem) -> IndexItem | None:
        """Return the index's entry, of any time, for the message whose entry would be `there`; None: there is none."""
        second, *place = self.order_key(there)
        for step in _STEPS_S:
            own = second + step
            if not 0 <= own <= MAX_TIMESTAMP_MS // 1000:
                continue  # a damaged time
            # the cursor directly before it
            digest = query_digest(self.lookup.topic, self.lookup.key, own, own)
            before = encode_cursor((own, *place[:-1], place[-1] - 1), digest)
            for item in self._look_up(own * 1000, own * 1000, 1, before).items:
                if self.order_key(item) == (own, *place):
                    return item
        return None

    def _fetch(self, items: Sequence[IndexItem]) -> list[Fetched]:
        """Return the result for each of `items`, in order."""
        try:
            self.budget.call.check("fetching messages")
        except BudgetExceeded as error:
            fetched = [Fetched(item=item, state="missing", problem=str(error), error=error) for item in items]
        else:
            fetched = self.source.fetch(items, self.lookup.topic, self.lookup.key)
        if [message.item for message in fetched] != list(items):
            raise AssertionError("a message source must return a result for each item, in order")
        self.fetched += fetched
        return fetched

    def _reports(self) -> list[FileReport]:
        """Return a report for each archived segment, and for other places that cost a request or failed."""
        groups: dict[tuple[str | None, str, bool], list[Fetched]] = {}
        for fetched in self.fetched:
            if fetched.item is not None and (
                fetched.requests or fetched.error is not None or fetched.state == "archived"
            ):
                place = (fetched.item.source, fetched.read_from or "messages", fetched.error is not None)
                groups.setdefault(place, []).append(fetched)
        reports = []
        for (source, file, failed), several in groups.items():
            times = [fetched.item.timestamp_ms for fetched in several if fetched.item is not None]
            requests, read = sum(fetched.requests for fetched in several), sum(fetched.bytes for fetched in several)
            reports.append(
                FileReport(
                    file=file,
                    place="messages",
                    outcome="failed" if failed else "fetched",
                    begin_ms=min(times),
                    end_ms=max(times),
                    requests=requests,
                    bytes=read,
                    cost_usd=self.budget.usage.prices.cost_usd({"get_range": requests}, read),
                    matched=sum(fetched.message is not None and fetched.carries_key for fetched in several),
                    error=str(several[0].error) if failed else None,
                    source=source,
                )
            )
        return reports

    def _failures(self, reports: Sequence[FileReport]) -> dict[tuple[str | None, str], FileReport]:
        """Return the failed reports. Raises their error, unless it is of the budget or partial answers are allowed."""
        failed = {(report.source, report.file): report for report in reports if report.outcome == "failed"}
        errors = [fetched.error for fetched in self.fetched if fetched.error is not None]
        hard = [error for error in errors if not isinstance(error, BudgetExceeded)]
        if hard and not self.allow_partial:
            if all(type(error) is type(hard[0]) for error in hard):
                raise hard[0]
            raise PartialAnswer(
                "; ".join(f"{report.file}: {report.error}" for report in failed.values()), failed=tuple(failed.values())
            )
        return failed

    def _refusal(self) -> BudgetExceeded | None:
        """Return an error if the budget was exceeded before all messages were read, with their number."""
        errors = [fetched.error for fetched in self.fetched if isinstance(fetched.error, BudgetExceeded)]
        if not errors:
            return None
        left = f"{len(errors)} of the messages were not read"
        return BudgetExceeded(f"{errors[0]}; {left}: allow_partial returns the rest")

    def _explain(self, reports: Sequence[FileReport], started: float) -> Explain:
        """Return the total cost. Requests besides those of lookups and messages are reads of the log."""
        explains = [answer.explain for answer in self.pages]
        usage = self.budget.usage
        total = RequestStats(usage.requests, usage.bytes_read, usage.cost_usd)
        more = total - RequestStats.of(*explains, *reports)
        log = [more.of_log()] if more.requests else []
        return replace(
            add_up(explains, [*reports, *log], (time.perf_counter() - started) * 1000),
            message_requests=sum(fetched.requests for fetched in self.fetched),
            message_bytes=sum(fetched.bytes for fetched in self.fetched),
        )
