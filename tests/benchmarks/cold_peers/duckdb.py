"""DuckDB on the Parquet file of the other column, by its extension `httpfs`.

The settings are those that its documentation advises for repeated queries. DuckDB keeps the file's footer and the
answers of HEAD requests. It keeps no data, so that data stays cold. The extension comes as a package, so nothing is
downloaded at run time.
"""

import os
from pathlib import Path
from typing import Any

from tests.benchmarks.cold_peers.parquet import path_of

_KEPT = ("enable_http_metadata_cache = true", "parquet_metadata_cache = true", "enable_external_file_cache = false")
_COLUMNS = 'second, "offset", queue_id'


class Reader:
    """A connection."""

    def __init__(self, place: dict[str, str]) -> None:
        import duckdb

        self._connection: Any = duckdb.connect(
            config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
        )
        self._connection.execute(f"LOAD '{_extension(duckdb.__version__)}'")
        host = place["endpoint_url"].removeprefix("http://")
        self._connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{os.environ['AWS_ACCESS_KEY_ID']}', "
            f"SECRET '{os.environ['AWS_SECRET_ACCESS_KEY']}', REGION '{os.environ['AWS_DEFAULT_REGION']}', "
            f"ENDPOINT '{host}', URL_STYLE 'path', USE_SSL false)"
        )
        for setting in _KEPT:
            self._connection.execute(f"SET {setting}")
        self._from = f"FROM read_parquet('s3://{path_of(place)}')"
        self._one = f'SELECT {_COLUMNS} {self._from} WHERE key = ? ORDER BY second DESC, "offset" DESC LIMIT ?'

    def lookup(self, key: str, count: int) -> list[list[int]]:
        """Return [second, offset, queue] of the newest `count` entries. Each thread needs its own cursor."""
        return list(map(list, self._connection.cursor().execute(self._one, [key, count]).fetchall()))

    def lookup_many(self, keys: list[str]) -> list[list[list[int]]]:
        statement = f"SELECT key, {_COLUMNS} {self._from} WHERE key IN (SELECT unnest(?)) ORDER BY second DESC"
        rows: dict[str, list[list[int]]] = {key: [] for key in keys}
        for key, *row in self._connection.execute(statement, [keys]).fetchall():
            rows[key].append(row)
        return [rows[key] for key in keys]

    def close(self) -> None:
        self._connection.close()


def _extension(version: str) -> Path:
    import duckdb_extension_httpfs

    return Path(duckdb_extension_httpfs.__file__).parent / "extensions" / f"v{version}" / "httpfs.duckdb_extension"
