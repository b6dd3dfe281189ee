"""Messages as the answer: what an index's entries point to, fetched from wherever it still is, and checked against the real key.

Whatever an entry points to is accounted for: a message, or its state and a reason. Only entries of another key with an equal hash are
dropped, and counted; and those of messages that were written over, where the index has the entry of the message that lies there now: it
answers for itself, at its place in the order. Threads: any; no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tiered_index.errors import BudgetExceeded, PartialAnswer
from tiered_index.format.schema import Schema
from tiered_index.service.account import Account
from tiered_index.service.fetched import Asked, Fetched, FoundMessage, MessageSource, MessagesResult, MessageState
from tiered_index.service.message_lookup import MessageLookup
from tiered_index.storage.metering import PriceTable
from tiered_index.types import Explain, FileReport, QueryResult

__all__ = ["Asked", "Fetched", "FoundMessage", "MessageSource", "MessageState", "MessagesResult", "find_messages"]

_PAGE = 64
# entries asked for at least, once collisions have shown that a page holds others' entries, too


def find_messages(
    query: Callable[..., QueryResult], asked: Asked, source: MessageSource, schema: Schema, account: Account
) -> MessagesResult:
    """Look up, fetch, and page on past collisions until `max_count` entries are accounted for or there are no more.

    `query` is that of a service or reader; `account` is open and holds the bounds of the whole call. Raises as `query` does, and the first
    `Fetched.error` unless partial answers are allowed; the `result` of a `BudgetExceeded` is the `MessagesResult` up to then.
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
    """Return what was done with each archived segment, or other place that cost a request or failed, of which messages were asked."""
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
                file=file, place="messages", outcome="failed" if failed else "fetched", begin_ms=min(times), end_ms=max(times),
                requests=requests, bytes=read, cost_usd=prices.cost_usd({"get_range": requests}, read),
                matched=sum(one.message is not None and one.carries_key for one in several),
                error=str(several[0].error) if failed else None,
            )
        )  # fmt: skip
    return reports


def _failures(spent: Sequence[Fetched], reports: Sequence[FileReport], *, allow_partial: bool) -> dict[str, FileReport]:
    """Return the reports of what could not be asked; raises what it raised unless partial answers are allowed, or the budget refused it."""
    failed = {report.file: report for report in reports if report.outcome == "failed"}
    errors = [one.error for one in spent if one.error is not None]
    hard = [error for error in errors if not isinstance(error, BudgetExceeded)]
    if hard and not allow_partial:
        if all(type(error) is type(hard[0]) for error in hard):
            raise hard[0]
        raise PartialAnswer("; ".join(f"{file}: {report.error}" for file, report in failed.items()), failed=tuple(failed.values()))
    return failed


def _refused(spent: Sequence[Fetched]) -> BudgetExceeded | None:
    """Return the error of the first message that the budget did not reach for, saying how many those were."""
    errors = [one.error for one in spent if isinstance(one.error, BudgetExceeded)]
    return BudgetExceeded(f"{errors[0]}; {len(errors)} of the messages were not read") if errors else None


def _together(explains: Sequence[Explain], fetched: Sequence[FileReport], account: Account, started: float) -> Explain:
    """Return the sum of it all. What the account counted beside lookups and messages is the log's, which fetching may read on."""
    parts: list[Explain | FileReport] = [*explains, *fetched]
    requests, read, cost_usd = sum(p.requests for p in parts), sum(p.bytes for p in parts), sum((p.cost_usd for p in parts), 0.0)
    usage, log = account.usage, []
    if (more := usage.requests - requests) > 0:
        more_bytes, more_usd = max(0, usage.bytes_read - read), max(0.0, usage.cost_usd - cost_usd)
        log = [
            FileReport(
                file="log", place="storage", outcome="refreshed", begin_ms=0, end_ms=0, requests=more, bytes=more_bytes, cost_usd=more_usd
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
