"""What a lookup cost and what it could not read, for people.

The table has a line of figures for each file that was read or failed, the file's time range below it, and one for all that were skipped for
the same reason. It is 100 columns wide; its columns add up to the totals below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tiered_index.cli.output import Printer, counted, human_bytes
from tiered_index.cli.times import format_time
from tiered_index.types import Explain, FileReport

__all__ = ["Explaining", "print_failed", "print_not_read"]

_SKIPPED = "skipped_"
_FILE_WIDTH = 28
_COLUMNS = (("outcome", -9), ("place", -9), ("requests", 8), ("KiB", 9), ("USD/1M", 8), ("ms", 8), ("matched", 7))
# names and widths; those of texts are negative
_FEW = 20
# files that an error names


def print_failed(out: Printer, failed: Iterable[FileReport]) -> None:
    """Print each file that could not be read, once."""
    for report in {(report.source, report.file): report for report in failed}.values():
        out.line(f"not read: {report.file} ({report.place}{_of_source(report)}): {report.error}")


def print_not_read(out: Printer, failed: Sequence[object]) -> None:
    """Print on stderr, for people, which files an error is about."""
    reports = list({(report.source, report.file): report for report in failed if isinstance(report, FileReport)}.values())
    for report in reports[:_FEW]:
        out.error_line(f"not read: {report.file} ({report.place}{_of_source(report)}), {_between(report)}".removesuffix(", "))
    if len(reports) > _FEW:
        out.error_line(f"not read: {len(reports) - _FEW:,} more (--json names them)")


@dataclass(frozen=True)
class Explaining:
    """How costs are shown: by the prices of `prices_as_of`; with `every` each skipped file has a line of its own."""

    prices_as_of: str
    every: bool = False

    def show(self, out: Printer, pages: Sequence[Explain], more: str = "") -> None:
        """Print what was read, file by file, and what it cost, of all pages together; `more` stands before the cost."""
        _print_explain(out, pages, self.prices_as_of, more=more, every=self.every)


def _print_explain(out: Printer, pages: Sequence[Explain], prices_as_of: str, *, more: str, every: bool) -> None:
    files = _by_file(file for page in pages for file in page.files)
    skipped = [file for file in files if _is_skipped(file)]
    shown = files if every else [*(file for file in files if not _is_skipped(file)), *_summed_up(skipped)]
    out.line()
    _print_row(out, "file", [name for name, _ in _COLUMNS])
    out.line("─" * _width())
    for file in shown:
        _print_file(out, file)
    out.line()
    several = f"{len(pages):,} pages: " if len(pages) > 1 else ""
    read, failed = (len({(f.source, f.file) for f in files if f.outcome == outcome}) for outcome in ("read", "failed"))
    requests, cost_usd = sum(page.requests for page in pages), sum(page.cost_usd for page in pages)
    out.line(
        f"{several}{counted(read, 'file')} read, {len(skipped):,} skipped, {f'{failed:,} failed, ' if failed else ''}{more}"
        f"{counted(requests, 'request')}, {human_bytes(sum(page.bytes for page in pages))}, {sum(page.elapsed_ms for page in pages):.1f} ms"
    )
    out.line(f"{cost_usd * 1e6:.2f} USD a million such look-ups at the prices of {prices_as_of}")


def _by_file(reports: Iterable[FileReport]) -> list[FileReport]:
    """Return the reports of all pages, those of one file, place and outcome together; a file that was read was not skipped."""
    of_files: dict[tuple[str | None, str], list[FileReport]] = {}
    for report in reports:
        of_files.setdefault((report.source, report.file), []).append(report)
    rows = []
    for several in of_files.values():
        first = next((report for report in several if not _is_skipped(report)), several[0])
        of_kind: dict[tuple[str, str], list[FileReport]] = {}
        for report in several:
            kind = first if _is_skipped(report) else report
            of_kind.setdefault((kind.place, kind.outcome), []).append(report)
        rows += [_sum([replace(same[0], place=place, outcome=outcome), *same[1:]]) for (place, outcome), same in of_kind.items()]
    return rows


def _summed_up(skipped: Sequence[FileReport]) -> list[FileReport]:
    """Return one row for each reason to skip files."""
    reasons = dict.fromkeys(file.outcome for file in skipped)
    rows = [[file for file in skipped if file.outcome == reason] for reason in reasons]
    return [replace(_sum(same), file=counted(len(same), "file"), source=None) for same in rows]


def _sum(reports: Sequence[FileReport]) -> FileReport:
    return replace(
        reports[0],
        begin_ms=min(report.begin_ms for report in reports),
        end_ms=max(report.end_ms for report in reports),
        requests=sum(report.requests for report in reports),
        bytes=sum(report.bytes for report in reports),
        cost_usd=sum(report.cost_usd for report in reports),
        elapsed_ms=sum(report.elapsed_ms for report in reports),
        matched=sum(report.matched for report in reports),
    )


def _print_file(out: Printer, file: FileReport) -> None:
    kind = ("skipped", f"by {file.outcome.removeprefix(_SKIPPED)}") if _is_skipped(file) else (file.outcome, file.place)
    cost, ms = f"{file.cost_usd * 1e6:.2f}", f"{file.elapsed_ms:.2f}"
    _print_row(out, file.file, [*kind, f"{file.requests:,}", f"{file.bytes / 1024:,.1f}", cost, ms, f"{file.matched:,}"])
    if below := _between(file) + _of_source(file):
        out.line(f"  {below.removeprefix(', ')}")


def _print_row(out: Printer, file: str, cells: Sequence[str]) -> None:
    if len(file) > _FILE_WIDTH:  # an object's whole name
        out.line(file)
        file = ""
    padded = [f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)]
    out.line("  ".join([f"{file:<{_FILE_WIDTH}}", *padded]))


def _width() -> int:
    return _FILE_WIDTH + sum(2 + abs(width) for _, width in _COLUMNS)


def _between(report: FileReport) -> str:
    """Return the time range of a file, empty for what has none."""
    return f"{format_time(report.begin_ms)} to {format_time(report.end_ms)}" if report.end_ms else ""


def _of_source(report: FileReport) -> str:
    return f", {report.source}" if report.source is not None else ""


def _is_skipped(report: FileReport) -> bool:
    return report.outcome.startswith(_SKIPPED)
