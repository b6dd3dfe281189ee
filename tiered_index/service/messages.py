"""Messages as the answer: what an index's entries point to, fetched from wherever it still is, and checked against the real key.

The index knows hashes and places; a `MessageSource` knows the messages of one system. Whatever an entry points to is accounted for: a
message, or its state and a reason. Only entries of another key with an equal hash are dropped, and counted. Threads: any; no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tiered_index.errors import PartialAnswer, TieredIndexError
from tiered_index.format.schema import Schema
from tiered_index.service.cursor import encode_cursor, query_digest
from tiered_index.service.validation import check_range
from tiered_index.storage.metering import PriceTable
from tiered_index.types import Explain, FileReport, IndexItem, QueryResult, Status

__all__ = ["Asked", "Fetched", "FoundMessage", "MessageSource", "MessageState", "MessagesResult", "find_messages"]

MessageState = Literal["local", "archived", "expired", "missing"]
"""``local``: read from the source's own files. ``archived``: from an archived segment. ``expired``: the source has deleted it, and no
archive has it. ``missing``: it should be there and isn't, is damaged, or could not be asked for."""

_PAGE = 64
# entries asked for at least, once collisions have shown that a page holds others' entries, too
_NOTHING = Explain()


class FoundMessage(Protocol):
    """A message of any system."""

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What became of one entry of the index, or of one place that was asked for (`item` is then None).

    `message` is there where the state is ``local`` or ``archived``. `problem` says why not, or why it was not read from a nearer place.
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
    """Where the state is ``missing`` and another message of the key lies in the entry's place: the entry that one would have."""
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
        """Return what became of each of `items`, in their order, looked up under `key` of `topic`. Never raises for a single item."""
        ...


@dataclass(frozen=True, kw_only=True)
class MessagesResult:
    """The answer to a lookup of messages.

    `messages` are in answer order, at most `max_count` of them, those that can't be had among them. `status` and `cursor` are as in
    `QueryResult`; `failed` names files of the index and places of messages that could not be read (status ``partial``). `collisions` is
    how many entries of other keys with an equal hash were dropped. `explain` counts lookups and messages, the last two fields the
    messages alone.
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
            "explain": self.explain.to_dict() | {"message_requests": self.message_requests, "message_bytes": self.message_bytes},
        }


@dataclass(frozen=True)
class Asked:
    """The question: as `IndexService.query` takes it."""

    topic: str
    key: str
    begin_ms: int | None
    end_ms: int | None
    max_count: int
    cursor: str | None
    allow_partial: bool


def find_messages(
    query: Callable[..., QueryResult], asked: Asked, source: MessageSource, schema: Schema, prices: PriceTable
) -> MessagesResult:
    """Look up, fetch, and page on past collisions until `max_count` entries are accounted for or there are no more.

    `query` is that of a service or reader. Raises as it does, and the first `Fetched.error` unless partial answers are allowed.
    """
    started = time.perf_counter()
    found: list[Fetched] = []
    spent: list[Fetched] = []
    replaced: list[IndexItem | None] = []
    pages: list[QueryResult] = []
    cursor, page = asked.cursor, asked.max_count
    while True:
        answer = query(asked.topic, asked.key, asked.begin_ms, asked.end_ms, page, cursor, asked.allow_partial)
        pages.append(answer)
        taken = 0
        while taken < len(answer.items) and len(found) < asked.max_count:
            items = answer.items[taken : taken + asked.max_count - len(found)]
            taken += len(items)
            fetched = source.fetch(items, asked.topic, asked.key)
            if [one.item for one in fetched] != list(items):
                raise AssertionError("a message source answers for every item, in order")
            spent += fetched
            for one in fetched:
                other = _fetch_instead(query, asked, source, one, pages, spent) if one.instead is not None else None
                replaced += [other.item] if other is not None else []
                if one.carries_key and not (other is None and one.item in replaced):
                    found.append(other or one)
        cursor = answer.cursor if taken == len(answer.items) else _cursor_behind(answer.items[taken - 1], asked, schema)
        if len(found) >= asked.max_count or cursor is None:
            break
        page = max(asked.max_count - len(found), _PAGE)
    if replaced:
        found.sort(key=_order)
    failed = {report.file: report for answer in pages for report in answer.failed}
    failed |= _failures(spent, allow_partial=asked.allow_partial)
    requests, read = sum(one.requests for one in spent), sum(one.bytes for one in spent)
    return MessagesResult(
        messages=tuple(found),
        status="partial" if failed else "truncated" if cursor is not None else "complete",
        cursor=cursor,
        failed=tuple(failed.values()),
        collisions=sum(not one.carries_key for one in spent),
        explain=_together([answer.explain for answer in pages], requests, read, prices, started),
        message_requests=requests,
        message_bytes=read,
    )


def _fetch_instead(
    query: Callable[..., QueryResult], asked: Asked, source: MessageSource, one: Fetched, pages: list[QueryResult], spent: list[Fetched]
) -> Fetched | None:
    """Return the message that lies in the place of `one`, None where it isn't of the asked range, or the index has no entry of it.

    Entries of one place are one answer, the newest; a log that was written anew, under a clock that was set back, may have another message
    there. Its own second is asked for. What that costs is added to `pages` and `spent`.
    """
    there = one.instead
    assert there is not None
    second = there.timestamp_ms // 1000
    second_min, second_max, _ = check_range(asked.begin_ms, asked.end_ms, asked.max_count)
    cursor: str | None = None
    while second_min <= second <= second_max:
        answer = query(asked.topic, asked.key, second * 1000, second * 1000, _PAGE, cursor, asked.allow_partial)
        pages.append(answer)
        for item in answer.items:
            if (item.queue_id, item.offset, item.size) == (there.queue_id, there.offset, there.size):
                (fetched,) = source.fetch([item], asked.topic, asked.key)
                spent.append(fetched)
                return fetched if fetched.message is not None and fetched.carries_key else None
        if (cursor := answer.cursor) is None:
            break
    return None


def _order(fetched: Fetched) -> tuple[int, int, int]:
    assert fetched.item is not None
    return -(fetched.item.timestamp_ms // 1000), -fetched.item.offset, fetched.item.queue_id


def _cursor_behind(item: IndexItem, asked: Asked, schema: Schema) -> str:
    """Return the cursor of a page that ended with `item`."""
    second_min, second_max, _ = check_range(asked.begin_ms, asked.end_ms, asked.max_count)
    key = (item.timestamp_ms // 1000, item.offset, item.queue_id, *(int(getattr(item, name)) for name in schema.identity_extra))
    return encode_cursor(key, query_digest(asked.topic, asked.key, second_min, second_max))


def _failures(spent: Sequence[Fetched], *, allow_partial: bool) -> dict[str, FileReport]:
    """Return a report of each place that could not be asked; raises what it raised unless partial answers are allowed."""
    reports: dict[str, FileReport] = {}
    errors = [one.error for one in spent if one.error is not None]
    for one in spent:
        if one.error is None or one.item is None:
            continue
        file = one.read_from or "messages"
        time_ms = one.item.timestamp_ms
        known = reports.get(file)
        begin_ms, end_ms = (min(known.begin_ms, time_ms), max(known.end_ms, time_ms)) if known else (time_ms, time_ms)
        reports[file] = FileReport(file=file, place="messages", outcome="failed", begin_ms=begin_ms, end_ms=end_ms, error=str(one.error))
    if errors and not allow_partial:
        if all(type(error) is type(errors[0]) for error in errors):
            raise errors[0]
        raise PartialAnswer("; ".join(f"{file}: {report.error}" for file, report in reports.items()), failed=tuple(reports.values()))
    return reports


def _together(explains: Sequence[Explain], requests: int, read: int, prices: PriceTable, started: float) -> Explain:
    return replace(
        explains[0],
        requests=sum(explain.requests for explain in explains) + requests,
        bytes=sum(explain.bytes for explain in explains) + read,
        cost_usd=sum(explain.cost_usd for explain in explains) + prices.cost_usd({"get_range": requests}, read),
        elapsed_ms=(time.perf_counter() - started) * 1000,
        files_read=sum(explain.files_read for explain in explains),
        files_skipped=sum(explain.files_skipped for explain in explains),
        files=tuple(file for explain in explains for file in explain.files),
    )
