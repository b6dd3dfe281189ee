"""The programs of the pages on Spark and Kafka run, and print the output on the page, in the shared session."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.integration.cli.command_lines import run_here
from tests.spark.pages import DOCS, programs, section
from tests.support.archived_records import encode_records
from tiered_index import IndexReader, IndexService
from tiered_index.connectors.kafka.columns import SCHEMA, SIZE
from tiered_index.connectors.kafka.messages import KafkaMessages

# The number of programs in each section. A test here runs each.
_RUN = {("spark.md", "Step by step"): 10, ("spark-data.md", "A Delta or Iceberg table"): 3}


def run(example: str) -> dict[str, Any]:
    """Run a program of the page, which is in a file of docs/examples; return the names that it sets."""
    assert f"](examples/{example})" in (DOCS / "spark-data.md").read_text()
    named: dict[str, Any] = {}
    exec(compile((DOCS / "examples" / example).read_text(), example, "exec"), named)
    return named


@pytest.mark.long
@pytest.mark.parametrize("example", ["spark_data_sources.py", "spark_stream.py"])
def test_a_program_of_the_page_runs(spark: Any, example: str) -> None:
    run(example)


def test_every_program_is_in_a_section_that_a_test_runs():
    assert {at: len(programs(section(*at))) for at in _RUN} == _RUN
    pages = DOCS.glob("spark*.md")
    assert sum(len(programs(page.read_text())) for page in pages) == sum(_RUN.values())


def is_shown(expected: str, printed: str) -> bool:
    """Return whether a program printed the output on its page."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected or "\n", printed or "\n", options)


def test_the_jobs_of_the_page_print_what_it_shows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = section("spark.md", "From the command line")
    block = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    steps = re.findall(r"^\$ ([^\n]*(?:\n    [^\n]*)*)\n(.*?)(?=^\$ |\Z)", block, re.MULTILINE | re.DOTALL)
    assert len(steps) >= 4
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    for command, expected in steps:
        if command.startswith("tiered-index "):
            done = run_here(*shlex.split(command.replace("$PWD", str(tmp_path)))[1:])
            assert done.code == 0, done.err
            printed = done.out
        else:
            made = subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True, capture_output=True, text=True)
            printed = made.stdout
        assert is_shown(expected, printed), f"$ {command}\n{printed}"


@pytest.mark.streams
def test_the_program_on_tables_runs_with_files_in_place_of_a_connector(spark: Any, tmp_path: Path) -> None:
    _, program, _ = programs(section("spark-data.md", "A Delta or Iceberg table"))
    rows = [("order-1", n, 90, datetime(2023, 11, 15, tzinfo=UTC)) for n in range(3)]
    frame = spark.createDataFrame(rows, "order_id string, position long, bytes int, at timestamp")
    frame.write.parquet(f"{tmp_path}/lake/orders")
    stated = 'spark.readStream.schema("order_id string, position long, bytes int, at timestamp").format("parquet")'
    assert 'spark.readStream.format("delta")' in program
    program = program.replace('spark.readStream.format("delta")', stated).replace("/data/lake", f"{tmp_path}/lake")
    for text, own in {"s3://bucket": f"file://{tmp_path}", "/data/c": f"{tmp_path}/c", "settings=DELTA": ""}.items():
        program = program.replace(text, own)
    for _ in range(2):
        exec(compile(program, "spark.md", "exec"), {})
    with IndexReader.open(f"file://{tmp_path}/index") as reader:
        assert [item.offset for item in reader.query("orders", "order-1")] == [2, 1, 0]
        assert sum(stored.count for stored in reader.log_state.objects.values()) == 3


@pytest.mark.long
def test_records_of_kafka_become_entries_once(spark: Any) -> None:
    program = run("spark_kafka.py")
    at = datetime(2023, 11, 15, tzinfo=UTC)
    rows = [
        (b"k", None, "t", 3, 4, at, 0, None),
        (b"", b"12", "t", 3, 5, at, 1, [("trace", None)]),
        ("ü".encode(), b"12", "t", 3, 6, at, 0, [("trace", b"ab")]),
        (b"\xff\x0a", None, "t", 3, 7, at, 0, None),
    ]
    entries = [tuple(row)[:5] for row in program["entries_of"](spark.createDataFrame(rows, program["KAFKA"])).collect()]
    assert entries[-1][:4] == ("t", 3, "0xff0a", 7)
    assert entries[:-1] == [("t", 3, "k", 4, 1), ("t", 3, None, 5, 7), ("t", 3, "ü", 6, 11), ("t", 3, "ab", 6, 11)]


_CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_ZONE = "spark.sql.session.timeZone"


@pytest.fixture
def session(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The shared session, restored afterwards. Commands run in this interpreter, and folders are swept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    zone = spark.conf.get(_ZONE)
    yield spark
    spark.conf.set(_ZONE, zone)


@pytest.mark.long
def test_each_cell_of_step_by_step_prints_what_the_page_shows(session: Any) -> None:
    page = section("spark.md", "Step by step")
    cells = _CELL.findall(page)
    assert len(cells) == page.count("```python\n")
    assert sum(bool(expected) for _, expected in cells) == page.count("```text\n") >= 9
    names: dict[str, Any] = {}
    try:
        for cell, expected in cells:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(cell, "docs/spark.md", "exec"), names)
            shown = printed.getvalue()
            assert is_shown(expected.strip(), shown.strip()), f"{cell}\n{shown}"
    finally:
        if "index" in names:
            names["index"].close()


MANY, BEGIN_MS = 300, 1_700_006_400_000


def records(partition):
    rows = []
    for n in range(MANY):
        value = json.dumps({"customer": f"c{n % 100}", "n": n}).encode() if n % 10 else None
        row = {"key": b"k%d" % n, "value": value, "topic": "orders", "partition": partition, "offset": n}
        row |= {"timestamp": BEGIN_MS + n, "timestampType": 0}
        row["headers"] = [{"key": "h", "value": b"v"}, {"key": "empty", "value": None}] if n % 3 else None
        rows.append(row | {SIZE: len(row["key"]) + len(value or b"") + (len("hvempty") if n % 3 else 0)})
    return pa.Table.from_pylist(rows, SCHEMA.append(pa.field(SIZE, pa.int64())))


@pytest.mark.long
def test_the_programs_of_the_page_open_the_archive(spark, tmp_path, capsys):
    uri, built = (tmp_path / "index").as_uri(), (tmp_path / "built").as_uri()
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=97, items=5_000) as index:
        for partition in range(2):
            file = encode_records(("orders", partition), records(partition), ("key",))
            assert index.archive_columns(f"kafka:cluster/orders/{partition}", 0, MANY, file)
    namespace = {}
    for program in programs(section("kafka-archive.md", "Open the archive with DuckDB or Spark")):
        for place, own in (("s3://bucket/index", uri), ("s3://bucket/by-customer", built)):
            program = program.replace(f'"{place}"', repr(own))
        exec(compile(program, "docs/kafka-archive.md", "exec"), namespace)
    assert str(MANY - 1) in capsys.readouterr().out
    with IndexReader.open(built) as reader, IndexReader.open(uri) as archive:
        source = KafkaMessages(archive.segment_archives, keys=("json:customer",))
        fetched_records = reader.messages("orders", "c7", source=source).messages
        assert sorted((fetched.message.partition, fetched.message.offset) for fetched in fetched_records) == [
            (partition, n) for partition in range(2) for n in (7, 107, 207)
        ]
        assert reader.query("orders", "c10").items == ()
