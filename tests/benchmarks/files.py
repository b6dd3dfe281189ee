"""Measures what indexing the rows of files costs, beside DuckDB's read of the same columns: `make bench SUITE=files`.

The rows have 20 fields, and three of them are wanted: two keys, one of them nested, and a time. Each way runs in a
process of its own, the ways of a round one after the other. The seconds are those of the processor, of all threads. An
index is durable on the local disk by then. DuckDB reads the columns into an Arrow table, on one thread, once with types
that it finds itself (`read_json` alone), and once with given types. Ratios are those of DuckDB's seconds to the
index's, as medians of rounds.

Then rows are read again: a key has one row in each of ten objects of an S3 server that answers after 30 ms. The time
is that of `messages`, the lookup and the rows, by a reader that is open. DuckDB looks for the same key in the same
files on the local disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from tests.benchmarks.cold_peers.run import DelayedServer
from tests.benchmarks.machine.setting import require
from tests.benchmarks.memory import memory_bytes
from tests.support.environment import own_environment
from tests.support.s3_server import CREDENTIALS, REGION
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.follow import PatientPut
from tiered_index.sources.linked import FileLinker
from tiered_index.sources.listing import listed_files
from tiered_index.sources.rows import RowMapping

GOALS = {"ndjson": 0.55, "parquet": 0.5}
"""The least ratio of DuckDB's seconds to those of the index, by form."""
MEMORY_MIB, ENTRY_BYTES = 400, 20
"""The greatest memory of a process that indexes, and the greatest size of the index for each row of two keys."""
PARQUET_TIMES = 5
ROWS_MS = 120
"""The greatest time to look a key up and to read its ten rows."""
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
                found = reader.messages("orders", f"order-{number * rows // lookups}", source=source)
                taken_ms.append((time.perf_counter() - begun_s) * 1000)
                require(sum(each.message is not None for each in found), _OBJECTS, "rows that came back")
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


def measure(rows: int, rounds: int, root_dir: str | None = None) -> dict[str, Any]:
    """Return the figures of all ways."""
    ways = [
        *((form, way) for form in GOALS for way in (*_DUCKDB[: 1 + (form == "ndjson")], "index")),
        ("ndjson", "published"),
    ]
    taken: dict[tuple[str, str], list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=root_dir) as folder:
        write_rows(Path(folder) / "rows", rows)
        write_rows(Path(folder) / "warm", min(rows, _WARM_ROWS))
        for _ in range(rounds):
            for form, way in ways:
                command = [sys.executable, "-m", "tests.benchmarks.files", "--way", way]
                done = subprocess.run(
                    [*command, "--path", f"{folder}/rows.{form}"], stdout=subprocess.PIPE, text=True, check=True
                )
                taken[form, way].append(json.loads(done.stdout))
        read = read_rows(Path(folder), max(100, rows // _OBJECTS), 11)
        sizes = {form: Path(f"{folder}/rows.{form}").stat().st_size for form in GOALS}
    shown = {
        f"{form} {way}": {name: statistics.median(each[name] for each in runs) for name in ("cpu_s", "peak_mib")}
        for (form, way), runs in taken.items()
    }
    ratios = {f"{form} {way}": _ratio(taken[form, way], taken[form, "index"]) for form, way in ways if way in _DUCKDB}
    return {
        "rows": rows,
        "rounds": rounds,
        "bytes": sizes,
        "ways": shown,
        "rows_per_cpu_s": {
            form: round(statistics.median(each["rows"] / each["cpu_s"] for each in taken[form, "index"]))
            for form in GOALS
        },
        "ratios": ratios,
        "index_bytes_per_row": round(taken["ndjson", "published"][-1]["bytes"] / rows, 1),
        **read,
        "goals": {**GOALS, "rows_ms": ROWS_MS, "peak_mib": MEMORY_MIB, "index_bytes_per_row": ENTRY_BYTES},
    }


def _ratio(others: list[dict[str, float]], ours: list[dict[str, float]]) -> float:
    paired = zip(others, ours, strict=True)
    return round(statistics.median(other["cpu_s"] / own["cpu_s"] for other, own in paired), 2)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root-dir", help="Folder to measure in.")
    for name in ("--way", "--path"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way is not None:
        print(json.dumps(run_way(given.way, Path(given.path))))
    else:
        print(json.dumps(measure(given.rows, given.rounds, given.root_dir), indent=1))


if __name__ == "__main__":
    main()
