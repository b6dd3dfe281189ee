"""The values of rows of files are keys as they are shown: one that is copied from a row finds the row."""

import datetime
import decimal
import json
import uuid

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tiered_index import FileRows, IndexReader, erase
from tiered_index.connectors.files.rows.values import rows_as_json

MOMENT = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
NUMBERS = {
    **{str(kind): (n, kind) for n, kind in enumerate((pa.int8(), pa.uint16(), pa.int64()), 1)},
    "most": (2**64 - 1, pa.uint64()),
    "half": (2.5, pa.float16()),
    "single": (0.1, pa.float32()),
    "large": (1e20, pa.float64()),
    "tiny": (1e-7, pa.float64()),
    "whole": (5.0, pa.float64()),
    "nan": (float("nan"), pa.float64()),
    "infinite": (float("-inf"), pa.float32()),
    "true": (True, pa.bool_()),
    "cost": (decimal.Decimal("1.50"), pa.decimal128(9, 2)),
    "fine cost": (decimal.Decimal("12E-9"), pa.decimal256(50, 10)),
}
TIMES = {
    **{
        f"{unit}, {zone}": (MOMENT.timestamp() * per + 60 * per * (minute + 9 * hour), pa.timestamp(unit, zone))
        for minute, (unit, per) in enumerate({"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}.items())
        for hour, zone in enumerate((None, "UTC", "Europe/Berlin", "+02:00", "No/Where"))
    },
    "split second": (MOMENT.replace(microsecond=1500), pa.timestamp("us", "UTC")),
    "beyond": (2**52, pa.timestamp("ms")),
    "day": (datetime.date(2024, 2, 3), pa.date32()),
    "day in ms": (datetime.date(2024, 2, 4), pa.date64()),
    "clock": (datetime.time(1, 2, 3, 4000), pa.time32("ms")),
    "fine clock": (3723000000001, pa.time64("ns")),
    "duration": (5001, pa.duration("ms")),
}
BYTES = {
    "text": ('Käse \x7f "x" \\ 1', pa.string()),
    "view": ("seen", pa.string_view()),
    # some writers of Parquet don't say that a column of bytes is text: sixteen bytes of text are no UUID
    "bytes of text": (b"order-47", pa.binary()),
    "sixteen bytes": (b"order-0000000047", pa.binary(16)),
    "sixteen bytes with umlauts": ("Müller-Straße1".encode(), pa.binary()),
    "bytes": (b"\xff\x00\x01", pa.binary()),
    "control": (b"\0\1\2\3", pa.binary(4)),
    "named": (uuid.UUID(int=7).bytes, pa.binary(16)),
}
NESTED = {
    "list": ([MOMENT.replace(year=2020), MOMENT.replace(year=2021)], pa.list_(pa.timestamp("ms", "UTC"))),
    "pair": ([3.25, 4.25], pa.list_(pa.float64(), 2)),
    "inner": (
        {"at": MOMENT.replace(year=2022), "id": b"\xfe"},
        pa.struct({"at": pa.timestamp("s"), "id": pa.binary()}),
    ),
    "items": ([{"cost": decimal.Decimal("7.70")}], pa.list_(pa.struct({"cost": pa.decimal128(5, 2)}))),
}


def columns():
    """Return an array of one value for each type."""
    arrays = {}
    for name, (value, kind) in {**NUMBERS, **TIMES, **BYTES, **NESTED}.items():
        is_number = isinstance(value, int | float) and pa.types.is_temporal(kind)
        arrays[name] = pa.array([int(value)], pa.int64()).cast(kind) if is_number else pa.array([value], kind)
    arrays["runs"] = pc.run_end_encode(pa.array(["open"]))
    arrays["coded"] = pa.array([MOMENT.replace(year=2019)], pa.timestamp("us")).dictionary_encode()
    if hasattr(pa, "uuid"):
        stored = pa.array([uuid.UUID(int=8 << 120).bytes], pa.binary(16))
        arrays["uuid"] = pa.ExtensionArray.from_storage(pa.uuid(), stored)
    return arrays


def leaves(value):
    """Return the texts of a member of a row, as one copies them."""
    if isinstance(value, dict | list):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in leaves(each)]
    return [value if isinstance(value, str) else json.dumps(value)]


@pytest.mark.parametrize("is_archived", [False, True])
@pytest.mark.parametrize("form", ["parquet", "arrow", "ndjson", "csv"])
def test_a_value_that_is_copied_from_a_row_finds_the_row(tmp_path, form, is_archived):
    arrays = columns()
    if form == "parquet":
        arrays = {name: column for name, column in arrays.items() if name not in ("half", "coded", "runs")}
    keys = [*(name for name in arrays if name not in ("inner", "items")), "inner.at", "inner.id", "items[].cost"]
    table, path = pa.table({**arrays, "time": pa.array([MOMENT])}), tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "arrow":
        # an interval is shown, and is no key
        table = table.append_column("every", pa.array([pa.MonthDayNano([1, 2, 3])]))
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif form == "ndjson":
        path.write_text('{"a":1.50,"b":-0,"c":1E5,"d":true,"e":["x",12345678901234567890],"time":"2024-01-01"}\n')
        keys = ["a", "b", "c", "d", "e"]
    else:
        path.write_text('a,b,c,time\n1.50,"x ""y"", z",2024-01-01 00:00:57+00:00,2024-01-01\n')
        keys = ["a", "b", "c"]
    options = [option for key in keys for option in ("--key", f'"{key}"' if " " in key or "," in key else key)]
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects", "--wait")
    archive = ["--archive"] if is_archived else []
    done = run_here("ingest", path, "--topic", "t", *options, "--time", "time", *where, *archive, "--json")
    assert done.code == 0, done.err
    with IndexReader.open(f"file://{tmp_path}/objects") as reader, FileRows(reader) as rows:

        def texts(key):
            messages = [each.message for each in reader.messages("t", key, source=rows)]
            return [message and message.text for message in messages]

        first = {"ndjson": "1.50", "csv": "1.50"}.get(form, "order-47")
        (shown,) = texts(first)
        printed = {
            "ndjson": ["1.50", "-0", "1E5", "true", "x", "12345678901234567890"],
            "csv": ["1.50", 'x "y", z', "2024-01-01 00:00:57+00:00"],
        }.get(form)
        if printed is None:
            row = json.loads(shown)
            del row["time"]
            assert row.pop("every", [1, 2, 3]) == [1, 2, 3]
            printed = leaves(row)
            assert len(set(printed)) == len(printed) == len(arrays) + 3, "the values of a row must differ"
        assert {key: texts(key) for key in printed} == {key: [shown] for key in printed}


def test_rows_are_found_and_erased_by_the_form_of_their_key(tmp_path):
    texts, data = ["order", "0x6f72646572", "a\tb", "0x610962", "0xff"], [b"x1", b"x2", b"\xff", b"a\tb", b"x5"]
    table = pa.table({"text": texts, "data": pa.array(data, pa.binary()), "time": pa.array([MOMENT] * 5)})
    pq.write_table(table, tmp_path / "a.parquet")
    uri, keys = f"file://{tmp_path}/objects", ("--key", "text", "--key", "data", "--time", "time")
    where = ("--root", tmp_path / "root", "--storage", uri, "--wait", "--archive")
    assert run_here("ingest", tmp_path / "a.parquet", "--topic", "t", *keys, *where).code == 0
    # a text is itself, and bytes that are no plain text are their digits
    expected = {"order": [0], "0x6f72646572": [1], "a\tb": [2], "0x610962": [3], "0xff": [2, 4], "0xFF": [], "\xff": []}
    for erased in (None, "0x610962", "order"):
        if erased is not None:
            assert erase(uri, "t", keys=erased, yes=True, now=True, grace_s=0).messages_erased == 1
            expected[erased] = []
        for files in (True, False):
            with IndexReader.open(uri) as reader, FileRows(reader) as rows:
                for key, numbers in expected.items():
                    messages = reader.messages("t", key, source=rows).messages
                    assert sorted(each.message.row for each in messages) == numbers, (key, files)
            if files:
                (tmp_path / "a.parquet").rename(tmp_path / "away")
        (tmp_path / "away").rename(tmp_path / "a.parquet")


SHOWN = {
    "us": (1_700_000_000_000_001, pa.timestamp("us", "UTC"), "2023-11-14 22:13:20.000001+00:00"),
    "ns": (1_700_000_000_000_000_001, pa.timestamp("ns"), "2023-11-14 22:13:20.000000001"),
    "far": (2**62, pa.timestamp("us"), "<value out of range: 4611686018427387904>"),
    "day": (19_675, pa.date32(), "2023-11-14"),
    "noon": (43_200 * 10**9 + 1, pa.time64("ns"), "12:00:00.000000001"),
    "took": (1500, pa.duration("ms"), 1500),
    "cost": (decimal.Decimal("12.50"), pa.decimal128(6, 2), "12.50"),
    "small cost": (decimal.Decimal("-0.0000000001"), pa.decimal128(38, 10), "-0.0000000001"),
    "no cost": (decimal.Decimal(0), pa.decimal256(76, 38), "0." + "0" * 38),
    "large cost": (decimal.Decimal("-1200"), pa.decimal128(5, -2), "-1200"),
    "named": (uuid.UUID(int=7).bytes, pa.binary(16), str(uuid.UUID(int=7))),
    "text": (b"order-0000000047", pa.binary(16), "order-0000000047"),
    "umlaut": ("Käse".encode(), pa.binary(), "Käse"),
    "umlauts": ("Müller-Straße1".encode(), pa.binary(), "Müller-Straße1"),
    "no text": (b"\xff\0", pa.binary(), "0xff00"),
    "control": (b"a\tb", pa.large_binary(), "0x610962"),
    "typed": ("a\tb", pa.string(), "a\tb"),
    "inner": ([{"at": 2}], pa.list_(pa.struct({"at": pa.timestamp("ns")})), [{"at": "1970-01-01 00:00:00.000000002"}]),
}


def test_values_without_a_form_in_json_are_texts_and_names_are_distinct():
    """Also values that Python has no form for."""
    pair = pa.StructArray.from_arrays(
        [[1, 2], ["x", "y"]], fields=[pa.field("a", pa.int64()), pa.field("a", pa.string())]
    )
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pair)
    columns = {name: pa.array([value] * 2, kind) for name, (value, kind, _) in SHOWN.items()}
    columns |= {"pair": pair, "chunks": pa.chunked_array([lists.slice(0, 1), lists.slice(1, 1)])}
    table = pa.table([*columns.values(), *([n, n] for n in range(4))], [*columns, "n", "n", "n_1", "n"])
    shown = {name: text for name, (_, _, text) in SHOWN.items()} | {"n": 0, "n_2": 1, "n_1": 2, "n_3": 3}
    shown |= {"pair": {"a": 2, "a_1": "y"}, "chunks": [{"a": 2, "a_1": "y"}]}
    assert json.loads(rows_as_json(table)[1]) == shown
