"""Requests and bytes of lookups, by this index and by DuckDB on Parquet, on the same server and through the same
counting proxy.

DuckDB reads by its own extension `httpfs`: what a data engineer looks keys up with. The extension comes as a package
(`duckdb-extension-httpfs`), so that nothing is downloaded at run time. Counts only: the embedded server's times are not
those of S3. One lookup at a time; every lookup has another key. One thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from tests.benchmarks.machine.figures import Table
from tests.benchmarks.machine.setting import require
from tests.benchmarks.messages import ABSENT, BEGIN_S, DAY_S, TOPIC, key_in_all, key_in_one
from tests.benchmarks.setting import PLAIN, TUNED, SparkAmounts
from tests.support.counting_proxy import CountingProxy, counting_proxy
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.format.names import is_summary
from tiered_index.service.reader import IndexReader
from tiered_index.storage.local.storage import LocalStorage

__all__ = [
    "FILTERS",
    "FRESH",
    "KINDS",
    "OURS",
    "Cell",
    "DuckLookups",
    "LookupKeys",
    "Place",
    "keys_by_kind",
    "lookups_table",
    "measure_lookups",
    "missing_packages",
    "place_of_uri",
]

_WANTED = {
    "pyspark": "spark",
    "pandas": "spark",
    "duckdb": "bench",
    "duckdb_extension_httpfs": "bench",
    "moto": "demo",
    "flask": "demo",
}


def missing_packages() -> dict[str, str]:
    """Return what suite `spark` needs and isn't installed: package -> the extra that has it."""
    return {name: extra for name, extra in _WANTED.items() if importlib.util.find_spec(name) is None}


class DuckLookups:
    """A connection that looks keys up in the files below `prefix` (``bucket/folder``) of the S3 server at
    `endpoint_url`.

    `names` are the objects, as a catalogue of tables would know them; None: DuckDB lists them for every lookup. What it
    keeps between lookups is every file's footer, not data, so that a fresh key is a fresh read.
    """

    def __init__(
        self, endpoint_url: str, credentials: tuple[str, str], region: str, prefix: str, names: Sequence[str] | None
    ) -> None:
        import duckdb

        self._connection: Any = duckdb.connect(
            config={"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 2}
        )
        self._run(f"LOAD '{_extension()}'")
        access, secret = (value.replace("'", "''") for value in credentials)
        host = endpoint_url.removeprefix("http://")
        self._run(
            f"CREATE SECRET (TYPE s3, KEY_ID '{access}', SECRET '{secret}', REGION '{region}', ENDPOINT '{host}', "
            f"URL_STYLE 'path', "
            "USE_SSL false)"
        )
        for setting in (
            "enable_http_metadata_cache = true",
            "parquet_metadata_cache = true",
            "enable_external_file_cache = false",
        ):
            self._run(f"SET {setting}")
        paths = [f"s3://{prefix}/{name}" for name in names] if names is not None else [f"s3://{prefix}/*/*.parquet"]
        self._source = f"read_parquet([{', '.join(repr(path) for path in paths)}], hive_partitioning = true)"

    def find(self, column: str, value: str | int, days: tuple[date, date] | None = None) -> int:
        """Return how many messages have `value` in `column`, within inclusive days; all of their columns but the key
        are read.
        """
        where, values = f"{column} = ?", [value]
        if days is not None:
            where += f" AND day BETWEEN DATE '{days[0]}' AND DATE '{days[1]}'"
        query = f'SELECT topic, queue_id, "offset", size, timestamp_ms FROM {self._source} WHERE {where}'
        return len(self._connection.execute(query, values).fetchall())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _run(self, statement: str) -> None:
        self._connection.execute(statement)


def _extension() -> Path:
    import duckdb
    import duckdb_extension_httpfs

    path = (
        Path(duckdb_extension_httpfs.__file__).parent
        / "extensions"
        / f"v{duckdb.__version__}"
        / "httpfs.duckdb_extension"
    )
    if not path.exists():
        raise ConfigError(f"duckdb-extension-httpfs is not of DuckDB {duckdb.__version__}: pip install '.[bench]'")
    return path


KINDS = ("one day", "all days", "no day")
"""Which days of the range hold the key."""
OURS, FILTERS, FRESH = "tiered_index", "tiered_index, filters at hand", ", nothing known"
_EPOCH = date(1970, 1, 1)
Find = Callable[[str, int, int], int]
"""(key, first day, last day) -> messages found; days are counted from the first."""


@dataclass(frozen=True)
class Place:
    """An S3 server without TLS and where on it to put things; credentials as environment variables have them."""

    endpoint_url: str
    bucket: str
    prefix: str
    region: str

    @property
    def credentials(self) -> tuple[str, str]:
        """Return the access key and its secret, by the usual chain."""
        import boto3

        found = boto3.Session().get_credentials()
        if found is None:
            raise InvalidArgument("bench spark needs credentials of the S3 server")
        return found.access_key, found.secret_key


def place_of_uri(uri: str) -> Place:
    """Return what an ``s3://bucket/prefix?endpoint_url=http://...`` names.

    Raises `InvalidArgument`: a proxy can't look into TLS.
    """
    parts = urlsplit(uri)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    endpoint = query.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3", "")
    if parts.scheme != "s3" or not endpoint.startswith("http://"):
        raise InvalidArgument(
            "bench spark counts through a proxy of its own: --storage is s3://bucket/prefix?endpoint_url=http://..."
        )
    region = query.get("region") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
    return Place(endpoint.rstrip("/"), parts.netloc, parts.path.strip("/"), region)


@dataclass(frozen=True)
class LookupKeys:
    """Keys by kind, each with the day that holds it (the newest where all do); `hashes` are the tuned layout's, by
    key.
    """

    by_kind: dict[str, list[tuple[str, int]]]
    hashes: dict[str, int]


@dataclass
class Cell:
    """What the lookups of one kind took, all together."""

    lookups: int = 0
    gets: int = 0
    lists: int = 0
    bytes: int = 0

    def add(self, proxy: CountingProxy) -> None:
        """Add what the proxy has counted since its last reset."""
        self.lookups += 1
        for exchange in proxy.reset():
            listing = exchange.method == "GET" and "/" not in exchange.key
            self.lists += listing
            self.gets += not listing
            self.bytes += exchange.bytes


def keys_by_kind(amounts: SparkAmounts) -> dict[str, list[tuple[str, int]]]:
    """Return as many keys of each kind as there are lookups."""
    step = amounts.a_day // 64
    # never a shared key's number
    drawn = np.random.default_rng(11).integers(0, amounts.entries, amounts.lookups) // step * step + 1
    return {
        "one day": [(key_in_one(number), number // amounts.a_day) for number in drawn.tolist()],
        "all days": [(key_in_all(number), amounts.days - 1) for number in range(amounts.lookups)],
        "no day": [(key_in_one(ABSENT + number), number % amounts.days) for number in range(amounts.lookups)],
    }


def measure_lookups(
    folder: Path, place: Place, amounts: SparkAmounts, keys: LookupKeys, layouts: Sequence[str] = (PLAIN, TUNED)
) -> dict[tuple[str, str, str], Cell]:
    """Put `folder`'s index and Parquet files on the server, look keys up, take everything away again.

    Return cells by (read by, key in, range).
    """
    cells: dict[tuple[str, str, str], Cell] = {}
    mark = f"{place.prefix}/tiered-index-bench-{secrets.token_hex(6)}".strip("/")
    with counting_proxy(place.endpoint_url) as proxy:
        with _uploaded(_objects(folder / "index"), place, f"{mark}/index"):
            uri = f"s3://{place.bucket}/{mark}/index?endpoint_url={proxy.endpoint_url}&region={place.region}&addressing_style=path"
            for name, opened in _our_readers(uri):
                _measure(name, opened, proxy, amounts, keys, cells)
        for layout in layouts:
            with _uploaded(_files(folder / layout), place, f"{mark}/parquet") as names:
                for name, opened in _ducks(layout, names, proxy, place, f"{place.bucket}/{mark}/parquet", keys):
                    _measure(name, opened, proxy, amounts, keys, cells)
    return cells


def lookups_table(cells: dict[tuple[str, str, str], Cell], amounts: SparkAmounts, where: str) -> Table:
    """Return the cells as a table, a line each."""
    columns = ("read by", "key in", "range", "lookups", "GETs", "LISTs", "KiB")
    rows = [
        (*way, cell.lookups, cell.gets / cell.lookups, cell.lists / cell.lookups, cell.bytes / cell.lookups / 1024)
        for way, cell in cells.items()
    ]
    title = f"requests and bytes a lookup: {amounts.entries:,} entries in {amounts.days} days on {where}"
    return Table(title, columns, tuple(rows))


Opened = Callable[[], contextlib.AbstractContextManager[Find]]


def _measure(
    name: str,
    opened: Opened,
    proxy: CountingProxy,
    amounts: SparkAmounts,
    keys: LookupKeys,
    cells: dict[tuple[str, str, str], Cell],
) -> None:
    """Look up every key: with a new connection each where `name` says that nothing is known, else with one that has
    seen all files.
    """
    last = amounts.days - 1
    if name.endswith(FRESH):
        for kind in KINDS:
            cell = cells.setdefault((name, kind, "all days"), Cell())
            for key, _ in keys.by_kind[kind][:2]:
                proxy.reset()
                with opened() as find:
                    require(find(key, 0, last), _expected(kind, amounts.days), f"{name}: answers for a key in {kind}")
                cell.add(proxy)
        return
    with opened() as find:
        for kind in KINDS:
            for span in ("all days", "one day"):
                cell = cells.setdefault((name, kind, span), Cell())
                for key, day in keys.by_kind[kind]:
                    proxy.reset()
                    first, end, days = (0, last, amounts.days) if span == "all days" else (day, day, 1)
                    require(find(key, first, end), _expected(kind, days), f"{name}: answers for a key in {kind}")
                    cell.add(proxy)


def _expected(kind: str, days: int) -> int:
    return {"one day": 1, "all days": days, "no day": 0}[kind]


def _our_readers(uri: str) -> Iterator[tuple[str, Opened]]:
    @contextlib.contextmanager
    def opened(probes: int, fruitless: int) -> Iterator[Find]:
        with IndexReader.open(uri, block_cache_bytes=0, filter_after_probes=probes, refresh_interval_s=1e9) as reader:

            def find(key: str, first: int, last: int) -> int:
                begin_ms = (BEGIN_S + first * DAY_S) * 1000
                return len(
                    reader.query(TOPIC, key, begin_ms, (BEGIN_S + (last + 1) * DAY_S) * 1000 - 1, max_count=1_000)
                )

            for number in range(fruitless):
                # directories are known after the first, filters where that many were in vain
                reader.query(TOPIC, key_in_one(ABSENT + 10_000 + number))
            yield find

    yield OURS, lambda: opened(1 << 30, 1)
    yield FILTERS, lambda: opened(1, 64)
    yield OURS + FRESH, lambda: opened(1 << 30, 0)


def _ducks(
    layout: str, names: Sequence[str], proxy: CountingProxy, place: Place, prefix: str, keys: LookupKeys
) -> Iterator[tuple[str, Opened]]:
    @contextlib.contextmanager
    def opened(known: bool) -> Iterator[Find]:
        duck = DuckLookups(proxy.endpoint_url, place.credentials, place.region, prefix, names if known else None)

        def find(key: str, first: int, last: int) -> int:
            days = _day(first), _day(last)
            if layout == TUNED:
                return duck.find("key_hash", keys.hashes[key], days)
            return duck.find("key", key, days)

        try:
            if known:
                find(keys.by_kind["all days"][0][0], 0, 10_000)
            yield find
        finally:
            duck.close()

    yield layout, lambda: opened(True)
    yield layout + FRESH, lambda: opened(False)


def _day(number: int) -> date:
    return datetime.fromtimestamp(BEGIN_S + number * DAY_S, UTC).date()


def _objects(folder: Path) -> Iterator[tuple[str, bytes]]:
    with LocalStorage(folder) as storage:
        for info in list(storage.list()):
            # a summary would bring the filters that a row goes without
            if not is_summary(info.name):
                yield info.name, storage.get(info.name)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.parquet")):
        if not path.name.startswith("."):
            yield str(path.relative_to(folder)), path.read_bytes()


@contextlib.contextmanager
def _uploaded(objects: Iterator[tuple[str, bytes]], place: Place, prefix: str) -> Iterator[list[str]]:
    """Put objects under a prefix by boto3, past the proxy, and yield their names; they are deleted at the end."""
    import boto3
    from botocore.config import Config

    style: Any = {"addressing_style": "path"}
    client = boto3.client("s3", endpoint_url=place.endpoint_url, region_name=place.region, config=Config(s3=style))
    names: list[str] = []
    try:
        for name, data in objects:
            names.append(name)
            client.put_object(Bucket=place.bucket, Key=f"{prefix}/{name}", Body=data)
        yield names
    finally:
        for name in names:
            client.delete_object(Bucket=place.bucket, Key=f"{prefix}/{name}")
        client.close()
