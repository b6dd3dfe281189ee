"""Times on the command line are epoch milliseconds or ISO 8601. Without a zone they are UTC."""

import json
from urllib.parse import urlencode

import pyarrow as pa
import pytest
import typer

from tiered_index.base.units import format_time, parse_time
from tiered_index.cli.options import end_option, time_option
from tiered_index.connectors.files.rows.columns import times_ms
from tiered_index.connectors.files.rows.lookups import read_lookups
from tiered_index.errors import InvalidArgument
from tiered_index.server.http.parameters import BatchBody, QueryParameters, of_body, of_query
from tiered_index.spark.lookup.answers import times_of

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
        "2023-11-14t22:13:20z",
        "2023-11-14T22:13:20.000999999Z",
        "2023-11-14 22:13:20.000 Z",
        "2023-11-14 23:13:20 +01:00",
        "2023-11-14 23:13:20,000 +0100",
        "2023-11-14 16:43:20.000999 -05:30",
    ],
)
def test_one_moment_in_its_spellings(text):
    """On the command line, over HTTP and in files of messages; mixed with other forms, too."""
    assert parse_time(text) == parse_time(text, end=True) == end_option(text) == MOMENT_MS
    for others in ([], [None], ["2023-11-14t22:13:20z", "1700000000000"]):
        parsed_ms = times_ms(pa.chunked_array([pa.array([text, *others], pa.string())])).to_pylist()
        assert parsed_ms == [MOMENT_MS, *(other and MOMENT_MS for other in others)]


@pytest.mark.parametrize("text", ["2016-12-31T23:59:60Z", "2017-01-01 08:59:60.000+09:00"])
def test_a_leap_second_is_the_second_after_it(text):
    assert parse_time(text) == 1_483_228_800_000 == times_ms(pa.chunked_array([[text]]))[0].as_py()


@pytest.mark.parametrize(
    "text",
    [
        *("2016-12-31T23:58:60Z", "2016-12-31T23:59:61Z", "yesterday", "", "-", "2023-13-01", "٣"),
        # Python reads a zone of 2 hours and 60 minutes as one of 3 hours
        *("2023-11-14T22:13:20+02:60", "2023-11-14T22:13:20.5-0299", "2023-11-14T22:13+02:00:60"),
    ],
)
def test_an_invalid_time_is_refused_by_name(text):
    with pytest.raises(ValueError, match="neither epoch milliseconds nor an ISO 8601 time"):
        parse_time(text)
    with pytest.raises(typer.BadParameter):
        time_option(text)
    with pytest.raises(InvalidArgument, match="epoch milliseconds or ISO 8601"):
        times_ms(pa.chunked_array([[text]]))


@pytest.mark.parametrize("text", ["631152000", " 1700000000 ", "4102444799"])
def test_a_number_of_seconds_is_no_time_of_a_command(text):
    """In milliseconds it is a time of 1970, before all entries. Its time as ISO 8601 is one."""
    for option in (time_option, end_option):
        with pytest.raises(typer.BadParameter, match=f"if it is in seconds, write {text.strip()}000, otherwise"):
            option(text)
        assert option(format_time(parse_time(text))) // 1000 == parse_time(text) // 1000
        assert [option(other) for other in ("0", "631151999", "4102444800")] == [0, 631_151_999, 4_102_444_800]


@pytest.mark.parametrize("text", ["2023-11-14", " 2023-11-14 ", "2023-W46-2"])
def test_a_date_alone_is_its_midnight_and_as_an_end_its_whole_day(text, tmp_path):
    begin_ms = 1_699_920_000_000
    assert parse_time(text) == time_option(text) == begin_ms
    assert times_of(pa.array([text]), "t", end=False).to_pylist() == [begin_ms]
    last_ms = begin_ms + 86_400_000 - 1
    assert parse_time(text, end=True) == end_option(text) == last_ms
    assert times_of(pa.array([text, None]), "t", end=True).to_pylist() == [last_ms, None]
    assert parse_time("2023-11-14 00:00:00", end=True) == begin_ms
    # files of keys, and HTTP, with one lookup and with many
    lookup = {"topic": "t", "key": "k", "begin_ms": text, "end_ms": text}
    (file := tmp_path / "keys.ndjson").write_text(json.dumps(lookup))
    assert [(each.begin_ms, each.end_ms) for each in read_lookups(file, None, None, 1)] == [(begin_ms, last_ms)]
    many = of_body(BatchBody, json.dumps({"lookups": [lookup]}).encode()).columns()
    assert (many.begins_ms, many.ends_ms) == ([begin_ms], [last_ms])
    assert of_query(QueryParameters, urlencode(lookup).encode()).range_ms() == (begin_ms, last_ms)


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
def test_times_outside_the_range_are_clamped(text, time_ms):
    assert parse_time(text) == time_ms == time_option(text) == parse_time(format_time(time_ms))
