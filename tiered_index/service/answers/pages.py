"""Totals of the pages of one answer, for `query --all` and for streams of the HTTP service. One thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tiered_index.storage.prices import rounded_usd
from tiered_index.types import Answer, FileReport, Provenance

R = TypeVar("R", bound=Answer)


class PageTotals:
    """The totals of the pages so far."""

    def __init__(self) -> None:
        self.count = 0
        self.is_partial = False
        self.failed: dict[tuple[str | None, str], FileReport] = {}
        names = "requests", "bytes", "cost_usd", "elapsed_ms", "folded_entries"
        self._costs: dict[str, float] = dict.fromkeys(names, 0)
        self._seen = Provenance()

    def add(self, page: R) -> R:
        """Count a page, and return it with the provenance of all pages so far."""
        self._seen = self._seen.joined(page.seen)
        self.count += len(page)
        self.is_partial = self.is_partial or page.status == "partial"
        self.failed |= {(report.source, report.file): report for report in page.failed}
        for name in self._costs:
            self._costs[name] += getattr(page.explain, name)
        return replace(page, seen=self._seen)

    def status_of(self, last: Answer) -> str:
        """Return the status of all pages together. `last` is the last page."""
        return "partial" if self.is_partial else last.status

    def document(self, last: Answer, costs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Return the last line of an NDJSON stream, about all pages. `costs` are added to its `explain`."""
        return {
            "status": self.status_of(last),
            "count": self.count,
            **more,
            "failed": [report.to_dict() for report in self.failed.values()],
            "explain": {**self._costs, "cost_usd": rounded_usd(self._costs["cost_usd"]), **(costs or {})},
            **last.provenance(),
        }
