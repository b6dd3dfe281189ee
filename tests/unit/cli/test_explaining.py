"""The table of `query --explain` has a row per file. Its sums equal the totals."""

import re
from dataclasses import replace

import pytest

from tiered_index.cli.explaining import print_explained, print_failed, print_not_read
from tiered_index.cli.output import Output
from tiered_index.types import Explain, FileReport

DAY_MS = 86_400_000
BEGIN_MS = 1_700_000_000_000


def report(number: int, outcome: str = "read", place: str = "storage", **more: object) -> FileReport:
    begin_ms = BEGIN_MS + number * DAY_MS
    fields = {"requests": 2, "bytes": 1024 * (number + 1), "cost_usd": 8e-7, "elapsed_ms": 30.5, "matched": number}
    if outcome.startswith("skipped"):
        fields = {}
    return FileReport(
        file=f"{begin_ms:015d}-{number:012x}",
        place=place,
        outcome=outcome,
        begin_ms=begin_ms,
        end_ms=begin_ms + DAY_MS,
        **(fields | more),
    )  # type: ignore[arg-type]


def explain(*files: FileReport) -> Explain:
    return Explain(
        requests=sum(f.requests for f in files),
        bytes=sum(f.bytes for f in files),
        cost_usd=sum(f.cost_usd for f in files),
        elapsed_ms=61.25,
        files_read=sum(f.outcome == "read" for f in files),
        files_skipped=sum(f.outcome.startswith("skipped") for f in files),
        files=files,
    )


def shown(capsys: pytest.CaptureFixture[str], *pages: Explain, more: str = "") -> tuple[list[list[str]], str, str]:
    """Return the table's cells, the totals below it, and the whole output."""
    print_explained(Output(as_json=False), "2026-11", pages, more)
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    rows = [re.split(" {2,}", line.strip()) for line in lines[:-2] if line.strip("─ ")]
    assert rows[0][:8] == ["file", "outcome", "place", "requests", "KiB", "USD/1M", "ms", "matched"]
    return rows[1:], "\n".join(lines[-2:]), captured.out


def number(text: str) -> float:
    return float(text.replace(",", ""))


MIXED = (
    report(9),
    report(8, place="cache", requests=0, bytes=0, cost_usd=0.0),
    report(7, "failed", error="down", matched=0),
    report(6, "skipped_filter"),
    report(5, "skipped_filter"),
    report(4, "skipped_topic"),
    report(3, "skipped_budget", requests=1, cost_usd=4e-7),
    FileReport(
        file="log", place="storage", outcome="refreshed", begin_ms=0, end_ms=0, requests=3, bytes=2000, cost_usd=1.2e-6
    ),
)


def test_the_bytes_between_slot_groups_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    pages = explain(report(9, gap_bytes=2048), report(8)), explain(report(9, gap_bytes=1024))
    _, totals, _ = shown(capsys, *pages)
    assert totals.startswith("2 pages: 2 files read, 0 skipped, 6 requests, 29.0 KiB (3.0 KiB between slot groups), ")


def test_skipped_files_have_one_line_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _, text = shown(capsys, explain(*MIXED))
    assert [row[:3] for row in rows] == [
        [MIXED[0].file, "read", "storage"],
        [MIXED[1].file, "read", "cache"],
        [MIXED[2].file, "failed", "storage"],
        ["log", "refreshed", "storage"],
        ["2 files", "skipped", "by filter"],
        ["1 file", "skipped", "by topic"],
        ["1 file", "skipped", "by budget"],
    ]
    # from the oldest file's first second to the newest file's last second
    assert rows[4][8:] == ["2023-11-19T22:13:20Z", "2023-11-21T22:13:20Z"]
    assert MIXED[3].file not in text


def test_an_unread_file_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    out, failed = Output(as_json=False), [replace(report(n), error="down") for n in (*range(30), 3)]
    print_failed(out, failed)
    assert capsys.readouterr().out.splitlines() == [f"not read: {report(n).file} (storage): down" for n in range(30)]
    print_not_read(out, failed)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 21
    assert lines[0] == f"  not read: {report(0).file} (storage), 2023-11-14T22:13:20Z to 2023-11-15T22:13:20Z"
    assert lines[-1] == "  not read: 10 more (--json names them)"
    print_not_read(Output(as_json=True), failed)
    assert capsys.readouterr().err == ""
