"""`make bench SUITE=files`: what indexing the rows of files costs, beside DuckDB's read of the same columns.

The rows have 20 fields, and three of them are wanted: two keys, one of them nested, and a time. Each way runs in a
process of its own, the ways of a round one after the other. The seconds are those of the processor, of all threads. An
index is durable on the local disk by then. DuckDB reads the columns into an Arrow table, on one thread, once with types
that it finds itself (`read_json` alone), and once with given types. Ratios are those of DuckDB's seconds to the
index's, as medians of rounds.

Then rows are read again: a key has one row in each of ten objects of an S3 server that answers after 30 ms. The time
is that of `messages`, the lookup and the rows, by a reader that is open. DuckDB looks for the same key in the same
files on the local disk.
"""

import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from tests.benchmarks.cold_peers.run import DelayedServer
from tests.benchmarks.memory import memory_bytes
from tests.benchmarks.report import finish, note, options, require, scratch
from tests.support.processes import own_environment
from tests.support.s3_server import CREDENTIALS, REGION
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.follow import PatientPut

FORMS, PARQUET_TIMES = ("ndjson", "parquet"), 5
_OBJECTS, _DELAY_MS = 10, 30
_DUCKDB = ("duckdb", "duckdb-typed")
_TYPES = "columns={order_id: 'VARCHAR', customer: 'STRUCT(id VARCHAR)', occurred_at: 'BIGINT'}"
_BEGIN_MS = 1_700_000_000_000
_WARM_ROWS = 2_000


def write_rows(target: Path, rows: int) -> None:
    """Write rows as NDJSON, some 600 bytes each, and `PARQUET_TIMES` as many as Parquet."""
    with target.with_suffix(".ndjson").open("w") as file:
        for number, order in enumerate(np.random.default_rng(rows).permutation(rows).tolist()):
            fields = {f"field_{n:02}": f"value {number + n:012}" for n in range(13)}
            numbers = {f"number_{n}": number * n for n in range(3)}
            of_row: dict[str, Any] = {"order_id": f"order-{order}", "total": number / 4}
            of_row |= {"customer": {"id": f"c{order % 50_000}", "name": f"Name {number}"}}
            file.write(json.dumps(fields | of_row | numbers | {"occurred_at": _BEGIN_MS + number * 1000}) + "\n")
    texts = ", ".join(f"format('value {{:012d}}', i + {n}) AS field_{n:02}" for n in range(13))
    keys = f"format('order-{{}}', i * 7919 % {PARQUET_TIMES * rows}) AS order_id, i / 4 AS total"
    customer = "{'id': format('c{}', i % 50000), 'name': format('Name {}', i)} AS customer"
    columns = f"{texts}, {keys}, {customer}, i * 2 AS number_2, {_BEGIN_MS} + i * 1000 AS occurred_at"
    source = f"SELECT {columns} FROM range({PARQUET_TIMES * rows}) numbers(i)"
    duckdb.sql(f"COPY ({source}) TO '{target}.parquet' (FORMAT parquet, COMPRESSION zstd)")


def read_by_duckdb(path: Path, *, typed: bool) -> int:
    """Read the wanted columns, and return the number of rows."""
    reader = "read_parquet" if path.suffix == ".parquet" else "read_json"
    types = f", {_TYPES}" if typed and reader == "read_json" else ""
    with duckdb.connect(config={"threads": 1}) as db:
        table = db.sql(f"SELECT order_id, customer.id, occurred_at FROM {reader}('{path}'{types})").to_arrow_table()
    return int(table.num_rows)


def index(path: Path, folder: str, *, publishes: bool = False) -> tuple[int, int]:
    """Index the rows of a file, and return their number and the bytes of the index's storage.

    `publishes`: compact and upload all of it, too.
    """
    config = IndexConfig(root=Path(folder) / "root", storage=f"file://{folder}/objects", background=False)
    with IndexService(config) as opened:
        mapping = RowMapping(("order_id", "customer.id"), "occurred_at")
        with listed_files([str(path)], config) as files:
            counts = FileLinker(opened, "orders", mapping, PatientPut(opened, 60.0)).run(files)
        opened.flush()
        if publishes:
            opened.seal()
            opened.run_lifecycle()
        assert counts.entries == 2 * counts.rows
    objects = [each for each in (Path(folder) / "objects").rglob("*") if each.is_file()]
    return counts.rows, sum(each.stat().st_size for each in objects)


def run_way(way: str, path: Path) -> dict[str, float]:
    """Return the figures of one way in this process. The first run is of few rows, and does not count."""
    figures: dict[str, float] = {}
    for source in (path.with_name(f"warm{path.suffix}"), path):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            begun_s = time.process_time()
            if way in _DUCKDB:
                rows, size_bytes = read_by_duckdb(source, typed=way == "duckdb-typed"), 0
            else:
                rows, size_bytes = index(source, folder, publishes=way == "published")
            figures = {"cpu_s": time.process_time() - begun_s, "rows": rows, "bytes": size_bytes}
    return figures | {"peak_mib": memory_bytes(os.getpid(), "VmHWM") >> 20}


def read_rows(folder: Path, rows: int, lookups: int) -> dict[str, Any]:
    """Return the milliseconds of lookups with the rows, first and median, and those of DuckDB on local files.

    Each of the objects has `rows` rows. Raises `RuntimeError` if a row does not come back.
    """
    objects = folder / "objects"
    objects.mkdir()
    with DelayedServer(objects) as server, own_environment():
        os.environ |= dict(CREDENTIALS) | {"AWS_ENDPOINT_URL_S3": server.endpoint_url, "AWS_REGION": REGION}
        config = IndexConfig(root=folder / "root", storage="s3://bench/index", background=False)
        sources = Path(folder / "logs")
        sources.mkdir()
        with contextlib.closing(config.open_storage("s3://bench/logs", any_names=True)) as storage:
            for number in range(_OBJECTS):
                data = "".join(
                    f'{{"order_id": "order-{n}", "occurred_at": {_BEGIN_MS + n * 1000}, "note": "{n:0200}"}}\n'
                    for n in range(rows)
                ).encode()
                storage.put(f"{number}.ndjson", data)
                (sources / f"{number}.ndjson").write_bytes(data)
        with IndexService(config) as opened, listed_files(["s3://bench/logs/*"], config) as files:
            FileLinker(opened, "orders", RowMapping(("order_id",), "occurred_at"), PatientPut(opened, 60.0)).run(files)
            opened.seal()
            opened.run_lifecycle()
        server.delay(_DELAY_MS)
        taken_ms = []
        with IndexReader.open("s3://bench/index") as reader, FileRows(reader) as source:
            for number in range(lookups):
                begun_s = time.perf_counter()
                answer = reader.messages("orders", f"order-{number * rows // lookups}", source=source)
                taken_ms.append((time.perf_counter() - begun_s) * 1000)
                require(sum(each.message is not None for each in answer), _OBJECTS, "rows that came back")
    begun_s = time.perf_counter()
    where = f"WHERE order_id = 'order-{rows // 2}'"
    with duckdb.connect() as db:
        require(len(db.sql(f"SELECT * FROM read_json('{sources}/*.ndjson') {where}").fetchall()), _OBJECTS, "rows")
    scanned_ms = (time.perf_counter() - begun_s) * 1000
    return {
        "rows_ms": round(statistics.median(taken_ms[1:]), 1),
        "first_rows_ms": round(taken_ms[0], 1),
        "duckdb_scan_ms": round(scanned_ms, 1),
        "scanned_rows": rows * _OBJECTS,
    }


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Return the figures of all ways, the medians of the rounds."""
    ways = [(form, way) for form in FORMS for way in (*_DUCKDB[: 1 + (form == "ndjson")], "index")]
    ways.append(("ndjson", "published"))
    taken: dict[tuple[str, str], list[dict[str, float]]] = {way: [] for way in ways}
    write_rows(folder / "rows", rows)
    write_rows(folder / "warm", min(rows, _WARM_ROWS))
    for number in range(rounds):
        note(f"round {number + 1} of {rounds}")
        for form, way in ways:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                taken[form, way].append(pool.apply(run_way, (way, folder / f"rows.{form}")))
    figures = {
        f"{form} {way}": {
            "rows a CPU s": statistics.median(run["rows"] / run["cpu_s"] for run in runs),
            "speed, of DuckDB's": statistics.median(
                ours["cpu_s"] and theirs["cpu_s"] / ours["cpu_s"]
                for theirs, ours in zip(runs, taken[form, "index"], strict=True)
            )
            if way in _DUCKDB
            else None,
            "MiB": statistics.median(run["peak_mib"] for run in runs),
            "bytes a row": runs[-1]["bytes"] / rows if way == "published" else None,
        }
        for (form, way), runs in taken.items()
    }
    return {"ways": figures, "read again": read_rows(folder, max(100, rows // _OBJECTS), 11)}


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print the tables."""
    parser = options(suite, __doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=400_000)
    flags = parser.parse_args(arguments)
    with scratch(flags.root_dir) as folder:
        figures = measure(folder, flags.rows, flags.rounds)
    names = list(figures["ways"]["ndjson index"])
    rows = [(way, *values.values()) for way, values in figures["ways"].items()]
    tables = {
        f"{flags.rows:,} rows": [("way", *names), *rows],
        "rows read again": [("", ""), *figures["read again"].items()],
    }
    finish(flags, figures | {"tables": tables})
