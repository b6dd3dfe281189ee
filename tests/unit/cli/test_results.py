"""A result is one document. Programs get JSON. People get fields and tables, with the units that the names state."""

import pytest

from tiered_index.cli.output import Output, value_text

_RESULT = {
    "status": "planned",
    "objects": [{"object": "a", "entries": 1200, "bytes": 2048, "begin_ms": 1_700_000_000_000}] * 21,
    "window_s": 86400,
    "elapsed_s": 1.25,
    "cost_usd": 0.5,
    "requests": {"get": 3, "now_ms": 1, "a": 1, "b": 1, "c": 1, "d": 1},
    "left": [["f1", "it is damaged"]],
    "topics": [],
    "same": False,
    "metrics": {"requests": {}},
    "scan": dict.fromkeys("abcdef", 1),
}


def test_people_get_fields_then_parts_by_the_units_in_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).show(_RESULT, without=("same",))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:6] == [
        "  status    planned",
        "  window    1d",
        "  elapsed   1.2 s",
        "  cost usd  $0.500000",
        "  requests  get 3, now 1, a 1, b 1, c 1, d 1",
        "  left      f1: it is damaged",
    ]
    assert [line.split() for line in lines].count(["a", "1,200", "2.0", "KiB", "2023-11-14T22:13:20Z"]) == 20
    assert "and 1 more objects" in lines
    assert lines[-7:] == ["scan", *(f"  {name}  1" for name in "abcdef")]


@pytest.mark.parametrize("more", [0, 5])
def test_names_of_users_stay_as_they_are(more: int, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {"file:/data/my_log_ms": 1700, "file:b_bytes": 2048} | {f"s_{n}": n for n in range(more)}
    Output(as_json=False).show({"sources": sources})
    words = capsys.readouterr().out.replace(",\n", "\n").split()
    assert words[words.index("file:/data/my_log_ms") + 1].rstrip(",") == "1,700"
    assert words[words.index("file:b_bytes") + 1] == "2,048"


def test_a_null_header_is_not_the_text_none() -> None:
    assert value_text("headers", [["a", None], ["b", "None"], ["c", ""]]) == "a (null), b: None, c: "
