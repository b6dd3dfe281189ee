"""DuckDB on Parquet in an object store, by its own extension `httpfs`: what a data engineer looks keys up with.

One thread.

The extension comes as a package (`duckdb-extension-httpfs`), so that nothing is downloaded at run time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tiered_index.errors import ConfigError

__all__ = ["DuckLookups", "missing_packages"]

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
        raise ConfigError(f"duckdb-extension-httpfs is not of DuckDB {duckdb.__version__}: install tiered_index[bench]")
    return path
