"""Times on the command line: epoch milliseconds or ISO 8601, UTC where nothing else is said."""

from __future__ import annotations

import pytest
import typer

from tiered_index.cli.options import time_option
from tiered_index.types import format_time, parse_time

MOMENT_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    "text",
    [
        "1700000000000",
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20",
        "2023-11-14 22:13:20",
        " 2023-11-15T06:13:20+08:00 ",
        "20231114T221320",
    ],
)
def test_one_moment_in_its_spellings(text):
    assert parse_time(text) == MOMENT_MS


def test_milliseconds_and_dates():
    assert parse_time("2023-11-14T22:13:20.123Z") == MOMENT_MS + 123
    assert parse_time("2023-11-14") == 1_699_920_000_000
    assert parse_time("0") == 0


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("-5", 0),
        ("1969-12-31T23:59:59Z", 0),
        ("9999-12-31T23:59:59.999Z", 253_402_300_799_999),
        ("9999-12-31T23:59:59.999-08:00", 253_402_300_799_999),
        ("9223372036854775807", 253_402_300_799_999),
    ],
)
def test_what_lies_outside_all_time_is_clamped(text, time_ms):
    assert parse_time(text) == time_ms == time_option(text)


@pytest.mark.parametrize("text", ["yesterday", "", "--5", "-", "1e3", "2023-13-01", "٣"])
def test_what_is_no_time_is_refused_by_name(text):
    with pytest.raises(ValueError, match="epoch milliseconds"):
        parse_time(text)
    with pytest.raises(typer.BadParameter):
        time_option(text)


def test_format_gives_back_what_was_parsed():
    for time_ms in (0, MOMENT_MS, MOMENT_MS + 7, 253_402_300_799_999):
        assert parse_time(format_time(time_ms)) == time_ms
    assert format_time(MOMENT_MS) == "2023-11-14T22:13:20Z"
    assert format_time(None) == ""
