"""The output of an audit: the summary and the JSON document state everything that they leave out.

These tests need no Spark.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.cli.command_lines import Outcome, run_here
from tests.spark.commands import outcome_of
from tiered_index.cli.spark import reading
from tiered_index.errors import StorageUnavailable
from tiered_index.service.jobs.verify_report import Report
from tiered_index.spark.audit.audit import AuditResult
from tiered_index.spark.audit.differences import Difference, Differences


def difference(kind: str, offset: int, **more: Any) -> Difference:
    expected = None if kind == "extra" else {"second": 1_700_000_000, "size": 10, **more}
    stored_value = None if kind == "missing" else {"second": 1_700_000_060, "size": 10, **more}
    stored = None if stored_value is None else "data/a.index"
    return Difference(kind, "orders", "order-7", 5, 0, offset, expected, stored_value, stored)


def result_of(listed: list[Difference], counts: dict[str, int], report: Any = None, **more: Any) -> AuditResult:
    every = {"missing": 0, "extra": 0, "wrong": 0} | counts
    compared = Differences(every, tuple(listed), more.pop("unproven", 0), 100, 100, **more)
    return AuditResult(report or Report(), compared, 100, 1, 3)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Return a function that prints a result as the command does, without a source or a storage."""
    module = sys.modules["tiered_index.spark.audit.audit"]

    def tell(result: AuditResult, *arguments: str) -> Outcome:
        monkeypatch.setattr(reading, "spark_of", lambda *_, **more: None)
        monkeypatch.setattr(module, "check_audit", lambda *_, **more: None)
        monkeypatch.setattr(module, "audit", lambda *_, **more: result)
        options = ("--storage", "file:///tmp/x", "--source", "s.parquet", "--quiet", *arguments)
        return run_here("spark", "audit", *options)

    return tell


def test_the_summary_shows_each_kind_and_counts_what_it_leaves_out(printed):
    report = Report()
    report.unchecked += [(f"data/{n}.index", StorageUnavailable("denied")) for n in range(25)]
    listed = [difference("missing", n) for n in range(30)] + [difference("wrong", 77)]
    done = printed(result_of(listed, {"missing": 50, "wrong": 1}, report, unproven=4, unsought=9))
    out = done.out
    assert done.code == 1
    # a row that is too wide for a table
    times = r"expected +second 2023-11-14T22:13:20Z, size 10\n +found +second 2023-11-14T22:14:20Z, size 10\n"
    assert re.search(r"\nwrong\n +kind +wrong\n(?: .*\n)* +offset +77\n +" + times, out)
    assert len([line for line in out.splitlines() if line.startswith(" missing  ")]) == 20
    assert "and 30 more missing" in out and "more wrong" not in out
    assert out.count("StorageUnavailable") == 20 and "and 5 more not checked" in out
    assert "4 entries of the source may be in damaged objects" in out and "9 " in out


SOURCE = "--storage file:///tmp/x --source s.parquet"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--storage file:///tmp/x --begin 2026-01-01", "--source"),
        (f"{SOURCE} --constant size=much", "size=much"),
        (
            f"{SOURCE} --begin 2030-01-01 --end 2029-01-01",
            "--begin 2030-01-01T00:00:00Z is after --end 2029-01-01T23:59:59.999Z",
        ),
    ],
)
def test_impossible_options_are_refused_before_spark_starts(monkeypatch, arguments, named):
    monkeypatch.setattr(reading, "spark_of", None)
    assert named in outcome_of(f"audit {arguments}", code=2).error["message"]
