"""What the pages of one answer add up to, for `query --all` and for streams of the service. One thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tiered_index.types import Answer, FileReport, Freshness, LostFile

R = TypeVar("R", bound=Answer)


class PageTotals:
    """The totals of the pages so far."""

    def __init__(self) -> None:
        self.count = 0
        self.is_partial = False
        self.failed: dict[tuple[str | None, str], FileReport] = {}
        self._costs: dict[str, float] = dict.fromkeys(("requests", "bytes", "cost_usd", "elapsed_ms"), 0)
        self._freshness: dict[str, Freshness] = {}
        self._lost: dict[LostFile, None] = {}

    def add(self, page: R) -> R:
        """Count a page, and return it with the provenance of all pages so far.

        Together they have no more than the first of them saw, or one that read a root without its storage. They lack
        what any of them lacks.
        """
        for index in page.freshness:
            first = self._freshness.setdefault(index.source, index)
            if first.not_asked is None and index.not_asked is not None:
                self._freshness[index.source] = replace(first, not_asked=index.not_asked)
        self._lost |= dict.fromkeys(page.lost)
        self.count += len(page)
        self.is_partial = self.is_partial or page.status == "partial"
        self.failed |= {(report.source, report.file): report for report in page.failed}
        for name in self._costs:
            self._costs[name] += getattr(page.explain, name)
        seen: Any = {"freshness": tuple(self._freshness.values()), "lost": tuple(self._lost)}
        return replace(page, **seen)  # type: ignore[type-var]

    def status_of(self, last: Answer) -> str:
        """Return the status of all pages together, `last` being the last one."""
        return "partial" if self.is_partial else last.status

    def document(self, last: Answer, costs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Return what the last line of NDJSON says of all pages; `costs` stand beside the sums."""
        return {
            "status": self.status_of(last),
            "count": self.count,
            **more,
            "failed": [report.to_dict() for report in self.failed.values()],
            "explain": {**self._costs, **(costs or {})},
            **last.provenance(),
        }
