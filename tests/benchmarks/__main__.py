"""`python -m tests.benchmarks SUITE [OPTIONS]`: measure one suite. `make bench SUITE=...` runs it."""

import importlib
import os
import sys

from tests.real_s3.server import ENDPOINT_VARIABLE

SUITES = {
    "quick": ("machine", "puts, compaction, lookups and openings on this machine, with small files (minutes)"),
    "machine": ("machine", "the same with files of 20,000,000 entries, in both presets (half an hour)"),
    "ranges": ("ranges", "lookups in 1 to 1,000 stored files, beside plain GETs and RocketMQ's way of reading"),
    "s3": ("ranges", "the same on a real S3 server, started for it (or $TIERED_INDEX_TEST_S3_ENDPOINT)"),
    "scale": ("scale", "indexes of many objects: opening, refreshing, planning, memory"),
    "billion": ("billion.__main__", "a year of 10 M, 100 M and 1 G messages, by Spark and one process (hours; 70 GB)"),
    "spark": ("billion.__main__", "the same of 20 M messages, and what Spark does without an index"),
    "service": ("service", "the service under load over sockets"),
    "files": ("files", "ingest of NDJSON and Parquet beside DuckDB's read, and rows read again from S3"),
    "peers": ("peers.run", "the same entries in RocksDB, LMDB, SQLite, DuckDB and here"),
    "cold": ("cold_peers.run", "the same entries in object storage, here and in SlateDB, Lance, Parquet and DuckDB"),
    "lived": ("lived", "warm lookups of an index after expiries, erasures and new readings, beside a virgin one"),
    "paths": ("paths", "the files, calls and threads of one lookup, by a profiler (seconds)"),
    "soak": ("soak", "one index under load for a long time, every answer compared with a model"),
}


def main(arguments: list[str]) -> None:
    """Run a suite with its options."""
    suite, options = arguments[0] if arguments else "help", arguments[1:]
    if suite not in SUITES:
        print("\n".join(f"{name:10} {what}" for name, (_, what) in SUITES.items()))
        sys.exit(suite != "help")
    if suite == "s3" and ENDPOINT_VARIABLE not in os.environ and "--help" not in options:
        server = [sys.executable, "-m", "tests.real_s3.server", "run", "--"]
        os.execv(sys.executable, [*server, sys.executable, "-m", "tests.benchmarks", suite, *options])
    importlib.import_module(f"tests.benchmarks.{SUITES[suite][0]}").main(suite, options)


if __name__ == "__main__":
    main(sys.argv[1:])
