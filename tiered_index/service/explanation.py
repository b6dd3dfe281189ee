"""What a lookup says of itself: each file and what it cost, and what went to the storage's log. Pure; one thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiered_index.service.scan import Scan
from tiered_index.types import Explain, FileReport

__all__ = ["NOTHING", "Spent", "explain_scan", "explain_together"]


@dataclass(frozen=True, slots=True)
class Spent:
    """What lookups cost."""

    requests: int
    bytes: int
    cost_usd: float

    @classmethod
    def of(cls, explain: Explain | FileReport) -> Spent:
        """Return what a lookup cost by its own account of it, or what one file did."""
        return cls(explain.requests, explain.bytes, explain.cost_usd)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.requests + other.requests, self.bytes + other.bytes, self.cost_usd + other.cost_usd)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.requests - other.requests, self.bytes - other.bytes, self.cost_usd - other.cost_usd)


NOTHING = Spent(0, 0, 0.0)


def explain_scan(scan: Scan, started: float, elsewhere: Spent = NOTHING) -> Explain:
    """Return what a lookup did since `started`; what its account says beyond its files, those of passes that were given
    up among them, and `elsewhere` went to the log."""
    # the account first: a search that nobody waits for any more may still make a request
    account = NOTHING
    if scan.account is not None:
        usage = scan.account.usage
        # what a read that was given up has asked for may still come
        account = Spent(usage.requests, usage.bytes_asked, usage.cost_usd) - elsewhere
    spent = NOTHING
    if scan.usages:
        spent = Spent(
            sum([usage.requests for usage in scan.usages]),
            sum([usage.bytes_asked for usage in scan.usages]),
            sum([usage.cost_usd for usage in scan.usages]),
        )
    reports = scan.reports
    if scan.outdated:
        reports = [*reports, *scan.outdated]
        spent = sum(map(Spent.of, scan.outdated), spent)
    if len(reports) > 1:
        reports = sorted(reports, key=lambda r: (-r.end_ms, r.file))
    if account.requests > spent.requests:
        log = account - spent
        reports = [
            *reports,
            FileReport(
                file="log", place="storage", outcome="refreshed", begin_ms=0, end_ms=0, requests=log.requests, bytes=log.bytes,
                cost_usd=log.cost_usd,
            ),
        ]  # fmt: skip
        spent = account
    return Explain(
        requests=spent.requests,
        bytes=spent.bytes,
        cost_usd=spent.cost_usd,
        elapsed_ms=(time.perf_counter() - started) * 1000,
        files_read=sum([report.outcome == "read" for report in reports]),
        files_skipped=sum([report.outcome.startswith("skipped") for report in reports]),
        files=tuple(reports),
    )


def explain_together(explain: Explain, alone: Sequence[Explain]) -> Explain:
    """Return what a batch did, its lookups that were asked alone among it."""
    if not alone:
        return explain
    spent = sum(map(Spent.of, alone), Spent.of(explain))
    return replace(
        explain,
        requests=spent.requests,
        bytes=spent.bytes,
        cost_usd=spent.cost_usd,
        files_read=explain.files_read + sum([one.files_read for one in alone]),
        files_skipped=explain.files_skipped + sum([one.files_skipped for one in alone]),
        files=explain.files + tuple([report for one in alone for report in one.files]),
    )
