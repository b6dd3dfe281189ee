"""One lookup of messages at work: pages of the index, what became of their entries, and which entry answers for a message.

A log may be written anew from some place on. Then the index has several entries of one place and queue, each of another second, and one
message lies there. An entry answers only for the message that it was written for; the message that lies there is answered by its own
entry, at that entry's place in the order: so it is answered once, however the answer is cut into pages. One page has only the newest
entry of a place; one that comes later in the order and that a newer one hides is asked for. One thread uses it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered_index.errors import BudgetExceeded
from tiered_index.format.schema import Schema
from tiered_index.service.account import Account
from tiered_index.service.cursor import encode_cursor, query_digest
from tiered_index.service.fetched import Asked, Fetched, MessageSource
from tiered_index.service.validation import check_range
from tiered_index.storage.deadline import check_deadline
from tiered_index.types import MAX_TIMESTAMP_MS, IndexItem, QueryResult

__all__ = ["MessageLookup"]

_MOMENT_S = 1e-6
# what a lookup is given whose time is up: it says what it would have read
_STEPS_S = (0, 1, -1)
# how far an entry's second may be from its message's own, in order of preference


class MessageLookup:
    """The calls of one lookup, and what they gave; `exceeded` is the budget's refusal of a part of the index."""

    def __init__(self, query: Callable[..., QueryResult], asked: Asked, source: MessageSource, schema: Schema, account: Account) -> None:
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
        return encode_cursor((second, offset, *more), query_digest(self._asked.topic, self._asked.key, self._second_min, self._second_max))

    def settle(self, items: Sequence[IndexItem], ahead: list[IndexItem], *, is_last: bool) -> list[Fetched]:
        """Return what became of `items`, in answer order, other keys' messages among them; entries that don't answer are left out.

        `ahead` are the entries behind them on their page; an entry that comes later and that one of these hides is put among them, if
        it lies before the page's end, which there is unless the page `is_last`. Else it comes by itself, on its own page.
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
        return item.timestamp_ms // 1000, item.offset, item.queue_id, *(int(getattr(item, name)) for name in self._schema.identity_extra)

    def _look_up(self, begin_ms: int | None, end_ms: int | None, max_count: int, cursor: str | None) -> QueryResult:
        asked, left_s = self._asked, self._account.remaining_s()
        limits = {} if left_s is None else {"timeout_s": max(left_s, _MOMENT_S)}
        try:
            answer = self._query(asked.topic, asked.key, begin_ms, end_ms, max_count, cursor, asked.allow_partial, **limits)
        except BudgetExceeded as error:
            self.exceeded = self.exceeded or error
            answer = error.result if isinstance(error.result, QueryResult) else QueryResult(items=(), status="partial")
        self.pages.append(answer)
        return answer

    def _own_entry(self, there: IndexItem) -> IndexItem | None:
        """Return the index's entry, of whatever range, of the message that would have the entry `there`, None where it has none."""
        second, *place = self._key(there)
        for step in _STEPS_S:
            own = second + step
            if not 0 <= own <= MAX_TIMESTAMP_MS // 1000:
                continue  # a time that was damaged
            # the cursor just before it: no other entry lies between
            before = encode_cursor((own, *place[:-1], place[-1] - 1), query_digest(self._asked.topic, self._asked.key, own, own))
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
    return replace(fetched, state="missing", message=None, problem=f"{fetched.read_from}: the message there has an entry of another second")
