"""Prints the cost of a lookup and the files that it could not read.

The columns of the table add up to the totals below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiered_index.base.units import MAX_TIMESTAMP_MS, format_time
from tiered_index.cli.output import Output, counted, human_bytes
from tiered_index.types import Explain, FileReport, LostFile

_SKIPPED = "skipped_"
_COLUMNS = ("file", "outcome", "place", "requests", "KiB", "USD/1M", "ms", "matched", "from", "to", "source")
_FIGURES = _COLUMNS[3:8]
# Most files that an error names
_FEW = 20
_LOST_SHOWN = 5


def print_failed(out: Output, failed: Iterable[FileReport]) -> None:
    """Print each file that could not be read, once."""
    for report in _once(failed):
        out.line(f"not read: {report.file} ({report.place}{_of_source(report)}): {out.in_flags(str(report.error))}")


def print_not_read(out: Output, failed: Sequence[object]) -> None:
    """Print on stderr, for people, the files that an error is about."""
    reports = _once(report for report in failed if isinstance(report, FileReport))
    for report in reports[:_FEW]:
        times = f", {format_time(report.begin_ms)} to {format_time(report.end_ms)}" if report.end_ms else ""
        out.error_line(f"not read: {report.file} ({report.place}{_of_source(report)}){times}")
    if len(reports) > _FEW:
        out.error_line(f"not read: {len(reports) - _FEW:,} more (--json names them)")


def lost_text(lost: Sequence[LostFile]) -> str:
    """Return the time ranges of lost files as text; empty if there are none."""
    ranges = [_lost_range(file, f"{_cause(file)}{_of_source(file)}") for file in lost[:_LOST_SHOWN]]
    return ", ".join(ranges + ([f"and {len(lost) - len(ranges):,} more"] if len(lost) > len(ranges) else []))


def _lost_range(lost: LostFile, cause: str) -> str:
    if not lost.begin_ms and lost.end_ms // 1000 == MAX_TIMESTAMP_MS // 1000:
        return cause
    return f"{format_time(lost.begin_ms)} to {format_time(lost.end_ms)} ({cause})"


def _cause(lost: LostFile) -> str:
    if lost.reason is not None:
        return f"of {lost.file}, {lost.reason}"
    return f"{counted(lost.entries, 'entry', 'entries')} of all keys lost with {lost.file}"


def _once(reports: Iterable[FileReport]) -> list[FileReport]:
    return list({(report.source, report.file): report for report in reports}.values())


def print_explained(
    out: Output, prices_as_of: str, pages: Sequence[Explain], costs: Mapping[str, Any], more: str = ""
) -> None:
    """Write the result and cost of each file, and the `costs` of all pages together; `more` precedes the cost."""
    files = _by_file(file for page in pages for file in page.files)
    skipped = [file for file in files if _is_skipped(file)]
    shown = [file for file in files if not _is_skipped(file)]
    for reason in dict.fromkeys(file.outcome for file in skipped):
        same = [file for file in skipped if file.outcome == reason]
        shown.append(replace(_sum(same), file=counted(len(same), "file"), source=None))
    several = any(file.source is not None for file in shown)
    columns = _COLUMNS if several else _COLUMNS[:-1]
    out.table(columns, [_row(file)[: len(columns)] for file in shown], right=_FIGURES)
    pages_read = f"{len(pages):,} pages: " if len(pages) > 1 else ""
    read, failed = (len({(f.source, f.file) for f in files if f.outcome == outcome}) for outcome in ("read", "failed"))
    gap_bytes = sum(file.gap_bytes for file in files)
    out.line(
        f"{pages_read}{counted(read, 'file')} read, {len(skipped):,} skipped, "
        f"{f'{failed:,} failed, ' if failed else ''}{more}"
        f"{counted(costs['requests'], 'request')}, {human_bytes(costs['bytes'])}"
        f"{f' ({human_bytes(gap_bytes)} between slot groups)' if gap_bytes else ''}, "
        f"{costs['elapsed_ms']:.1f} ms elapsed"
    )
    out.line(f"{costs['cost_usd'] * 1e6:.2f} USD per million such lookups at the prices of {prices_as_of}")


def _by_file(reports: Iterable[FileReport]) -> list[FileReport]:
    """Return one report for each file, place and outcome of all pages; reading a file cancels its skips."""
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
        rows += [
            _sum([replace(same[0], place=place, outcome=outcome), *same[1:]])
            for (place, outcome), same in of_kind.items()
        ]
    return rows


def _sum(reports: Sequence[FileReport]) -> FileReport:
    costs = ("requests", "bytes", "gap_bytes", "cost_usd", "elapsed_ms", "matched")
    sums: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in costs}
    begin_ms, end_ms = min(report.begin_ms for report in reports), max(report.end_ms for report in reports)
    return replace(reports[0], begin_ms=begin_ms, end_ms=end_ms, **sums)


def _row(file: FileReport) -> tuple[object, ...]:
    kind = ("skipped", f"by {file.outcome.removeprefix(_SKIPPED)}") if _is_skipped(file) else (file.outcome, file.place)
    cost, ms = f"{file.cost_usd * 1e6:.2f}", f"{file.elapsed_ms:.2f}"
    figures = (f"{file.requests:,}", f"{file.bytes / 1024:,.1f}", cost, ms, f"{file.matched:,}")
    times = (format_time(file.begin_ms), format_time(file.end_ms)) if file.end_ms else ("", "")
    return file.file, *kind, *figures, *times, file.source


def _of_source(report: FileReport | LostFile) -> str:
    return f", {report.source}" if report.source is not None else ""


def _is_skipped(report: FileReport) -> bool:
    return report.outcome.startswith(_SKIPPED)
