"""Commands print one JSON document or tables, errors on stderr, and readable numbers."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from tiered_index.cli.output import Output, ProgressDisplay, describe_error, human_bytes, human_count, human_seconds
from tiered_index.errors import LockHeld


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (human_bytes(0), "0 B"),
        (human_bytes(1023), "1,023 B"),
        (human_bytes(1536), "1.5 KiB"),
        (human_bytes(5 << 50), "5,120.0 TiB"),
        (human_count(7.84), "7.8"),
        (human_count(26.0), "26"),
        (human_count(1234567), "1,234,567"),
        (human_seconds(0.00085), "0.85 ms"),
        (human_seconds(0.452), "452 ms"),
        (human_seconds(12.34), "12.3 s"),
        (human_seconds(125), "2 min 05 s"),
    ],
)
def test_numbers_for_people(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("columns", [None, 20, 200])
def test_a_row_of_a_table_is_one_line(columns, capsys, monkeypatch):
    monkeypatch.setattr("tiered_index.cli.output._is_terminal", lambda stream: columns is not None)
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("orders", 7 * n, "中" if n == 7 else None) for n in range(1_001)]
    Output(as_json=False).table(("topic", "queue", "key"), rows, title="keys", right={"queue"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["keys", "", " topic    queue   key ", " " + "─" * 20]
    assert lines[4 + 7] == " orders      49   中  "
    assert lines[4 + 1_000 :] == [" orders    7000       ", ""]


@pytest.mark.parametrize(("columns", "is_table"), [(None, True), (30, False), (200, True)])
def test_a_table_that_would_be_too_wide_is_a_list(columns, is_table, capsys, monkeypatch):
    monkeypatch.setattr("tiered_index.cli.output._is_terminal", lambda stream: columns is not None)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Output(as_json=False)
    rows = [("data/0017", "uploaded", None), ("data/0018", "uploaded", "gone")]
    out.table(("file", "place", "problem"), rows, title="findings", is_listed=True)
    text = capsys.readouterr().out
    listed = (
        "findings\n  file     data/0017\n  place    uploaded\n\n"
        "  file     data/0018\n  place    uploaded\n  problem  gone\n\n"
    )
    assert (text == listed) == (not is_table)
    out.table(("file", "place"), [("x" * 100, "y" * 30)], is_listed=True)
    shown = capsys.readouterr().out
    assert shown.startswith(f"  file   {'x' * 100}\n  place") == (columns != 200)


@pytest.mark.parametrize(("encoding", "rule"), [("utf-8", "─"), ("latin-1", "-"), ("ascii", "-")])
def test_a_table_uses_only_characters_that_stdout_can_write(encoding, rule, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    Output(as_json=False).table(("topic",), [("中é",)])
    sys.stdout.flush()
    text = written.getvalue().decode(encoding)
    assert rule * 5 in text and "2500" not in text
    assert "中é".encode(encoding, "backslashreplace").decode(encoding) in text


@pytest.mark.parametrize("as_json", [False, True])
def test_only_the_requested_form_of_a_result_is_written(as_json, capsys):
    out = Output(as_json=as_json)
    out.answer({"files": 1234})
    out.fields({"files": 1234, "lost": None}, title="index")
    out.table(("file",), [("a",)])
    out.line("done")
    out.lines("x\ny")
    out.line("a")
    out.line("b")
    out.line("1 more")
    out.remark("note")
    captured = capsys.readouterr()
    if as_json:
        assert (captured.out, captured.err) == ('{"files": 1234}\n', "")
        return
    lines = [line.rstrip() for line in captured.out.splitlines()]
    assert lines[:2] == ["index", "  files  1,234"]
    assert lines[-6:] == ["done", "x", "    y", "a", "b", "1 more"]
    assert captured.err == "note\n"


def test_errors_go_to_stderr_as_text_or_as_one_json_line(capsys):
    Output(as_json=False).error("InvalidArgument", "topic is empty")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "tiered-index: topic is empty\n")
    error = LockHeld("held", pid=7, host="h")
    Output(as_json=True).error("LockHeld", str(error), **describe_error(error))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err) == {
        "error": {"type": "LockHeld", "message": "held", "exit_code": 5, "pid": 7, "host": "h"}
    }


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tiered_index.cli.output.time", SimpleNamespace(monotonic=lambda: now[0]))
    stream, quiet = io.StringIO(), io.StringIO()
    with (
        ProgressDisplay("ingesting", 200, quiet=False, stream=stream) as shown,
        ProgressDisplay("x", 200, quiet=True, stream=quiet) as silent,
    ):
        for step in range(12):
            now[0] += 1
            shown.update(step * 10, f"{step} entries")
            silent.update(step)
    assert stream.getvalue().splitlines() == ["ingesting: 20 %, 4 entries", "ingesting: 45 %, 9 entries"]
    assert quiet.getvalue() == ""
