"""Commands print one JSON document or tables, errors on stderr, and pages that add up."""

import io
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from tiered_index.cli.look_up.paging import CommandBudget, Pages
from tiered_index.cli.output import Output, ProgressDisplay, human_bytes, human_count, human_seconds, value_text
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.types import Explain, FileReport, Freshness, LostFile, Provenance, QueryResult

DAY_MS, BEGIN_MS = 86_400_000, 1_700_000_000_000


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (human_bytes(1023), "1,023 B"),
        (human_bytes(1536), "1.5 KiB"),
        (human_count(7.84), "7.8"),
        (human_count(1234567), "1,234,567"),
        (human_seconds(0.00085), "0.85 ms"),
        (human_seconds(12.34), "12.3 s"),
        (human_seconds(125), "2 min 05 s"),
        (value_text("headers", [["a", None], ["b", "None"], ["c", ""]]), "a (null), b: None, c: "),
    ],
)
def test_values_for_people(shown, expected):
    assert shown == expected


def test_a_result_is_fields_and_parts_by_the_units_in_their_names(capsys):
    result = {
        "status": "planned",
        "objects": [{"object": "a", "entries": 1200, "bytes": 2048, "begin_ms": BEGIN_MS}] * 21,
        "window_s": 86400,
        "cost_usd": 0.5,
        # names of users stay as they are
        "sources": {"file:/data/my_log_ms": 1700},
    }
    Output(as_json=False).show(result)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == ["  status    planned", "  window    1d", "  cost usd  $0.500000"]
    assert "file:/data/my_log_ms 1,700" in lines[3]
    assert [line.split() for line in lines].count(["a", "1,200", "2.0", "KiB", "2023-11-14T22:13:20Z"]) == 20
    assert "and 1 more objects" in lines
    Output(as_json=False).show({"sources": {f"file:{n}_ms": 1700 for n in range(6)}})
    assert "file:5_ms  1,700" in capsys.readouterr().out
    Output(as_json=True).show(result)
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize("columns", [None, 20, 200])
def test_a_row_of_a_table_is_one_line_or_a_list_of_its_cells(columns, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Output(as_json=False)
    rows = [("orders", 7 * n, "中" if n == 7 else None) for n in range(1_001)]
    out.table(("topic", "queue", "key"), rows, title="keys", right={"queue"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["keys", "", " topic    queue   key ", " " + "─" * 20]
    assert lines[4 + 7] == " orders      49   中  "
    assert lines[4 + 1_000 :] == [" orders    7000       ", ""]
    out.table(("file", "problem"), [("data/0017", None), ("data/0018", "gone")], title="findings", is_listed=True)
    listed = "findings\n  file     data/0017\n\n  file     data/0018\n  problem  gone\n\n"
    assert (capsys.readouterr().out == listed) == (columns == 20)


@pytest.mark.parametrize(("encoding", "rule"), [("utf-8", "─"), ("ascii", "-")])
def test_a_table_uses_only_characters_that_stdout_can_write(encoding, rule, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    Output(as_json=False).table(("topic",), [("中é",)])
    sys.stdout.flush()
    assert rule * 5 in written.getvalue().decode(encoding)
    assert "中é".encode(encoding, "backslashreplace") in written.getvalue()


def test_progress_off_a_terminal_is_a_line_now_and_then_and_goes_on_if_its_stream_is_full(monkeypatch):
    clock = itertools.count(100.0)
    monkeypatch.setattr("tiered_index.cli.output.time", SimpleNamespace(monotonic=clock.__next__))
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    for quiet in (True, False):
        with ProgressDisplay("ingesting", 200, quiet=quiet) as shown:
            for step in range(12):
                shown.update(step * 10, f"{step} entries")
    assert stream.getvalue().splitlines() == ["ingesting: 20 %, 4 entries", "ingesting: 45 %, 9 entries"]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        shown = ProgressDisplay("ingesting", 2, quiet=False)
        for step in range(12):
            shown.update(step)


def report(number, outcome="read", **more):
    begin_ms = BEGIN_MS + number * DAY_MS
    file = f"{begin_ms:015d}-{number:012x}"
    times = {"begin_ms": begin_ms, "end_ms": begin_ms + DAY_MS}
    return FileReport(**{"file": file, "place": "storage", "outcome": outcome, **times, **more})


def answer(cursor, *, not_asked=None, as_of_ms=BEGIN_MS, lost=()):
    known = Freshness(source="s3://b/i", as_of_ms=as_of_ms, positions={}, not_asked=not_asked)
    status = "truncated" if cursor else "complete"
    return QueryResult(items=(), status=status, cursor=cursor, seen=Provenance((known,), lost=lost))


def test_pages_together_are_as_old_and_lack_as_much_as_any_of_them():
    gone = LostFile(file="f", begin_ms=BEGIN_MS, end_ms=BEGIN_MS + 1_000, entries=5)
    for answers in (
        [answer("a", lost=(gone,)), answer(None, as_of_ms=BEGIN_MS + 9_000, not_asked="no answer")],
        [answer("a", not_asked="no answer"), answer(None, as_of_ms=BEGIN_MS + 9_000, lost=(gone,))],
    ):
        opened = None, [lambda answers=answers, **limits: answers.pop(0)]
        nothing = QueryResult(items=(), status="partial")
        pages = Pages(lambda opened=opened: opened, nothing, None, CommandBudget(LookupLimits()), every=True)
        assert len([*pages]) == 2
        assert (pages.seen()["as_of_ms"], pages.seen()["freshness"][0]["not_asked"]) == (BEGIN_MS, "no answer")
        assert pages.as_of() == " as far as the root knows (the storage as of 2023-11-14T22:13:20Z)"
        assert pages.totals()["lost"] == [gone.to_dict()] and "except" in pages.conclusion


def all_pages(*answers, limits=()):
    """Return the pages of a command that gets these answers, and the limits of each lookup."""
    left, bounds = list(answers), []

    def look_up(max_requests, max_bytes, **_):
        bounds.append((max_requests, max_bytes))
        return left.pop(0)

    nothing = QueryResult(items=(), status="partial")
    pages = Pages(lambda: (None, [look_up]), nothing, None, CommandBudget(LookupLimits(*limits)), every=True)
    assert len([*pages]) == len(answers)
    return pages, bounds


def test_pages_together_lack_the_files_and_spend_the_limits_of_all():
    lacking = [
        QueryResult(items=(), status="partial", cursor=cursor, failed=(report(number, "failed"),), explain=explain)
        for number, (cursor, explain) in enumerate(
            (("a", Explain(requests=2, bytes=100)), ("b", Explain(requests=9, bytes=1000)))
        )
    ]
    pages, limits = all_pages(*lacking, answer(None), limits=(5, 150))
    assert limits == [(5, 150), (3, 50), (0, 0)]
    assert (pages.status, pages.totals()["status"]) == ("partial", "partial")
    assert [file["file"] for file in pages.totals()["failed"]] == [report(number).file for number in (0, 1)]
