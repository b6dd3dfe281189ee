"""Lance by pylance: one dataset sorted by key, newest first, with a B tree on the key.

The settings are those that its documentation advises: the file format's default version, and an index of type `BTREE`
for lookups of one value. Warm lookups use `prewarm_index`, which reads the whole index into memory. Lance caches
metadata and index pages, but no data.
"""

import os
from pathlib import Path
from typing import Any

_COLUMNS = ["second", "offset", "queue_id"]
_INDEX = "key_idx"
_SORT_BYTES = 4 << 30


class Reader:
    """A dataset, opened once."""

    def __init__(self, place: dict[str, str], prewarm: bool = False) -> None:
        import lance

        self._dataset: Any = lance.dataset(_uri(place), storage_options=_options(place))
        if prewarm:
            self._dataset.prewarm_index(_INDEX)

    def lookup(self, key: str, count: int) -> list[list[int]]:
        scanner = self._dataset.scanner(columns=_COLUMNS, filter=f"key = '{key}'", limit=count, scan_in_order=True)
        return _rows(scanner.to_table())

    def lookup_many(self, keys: list[str]) -> list[list[list[int]]]:
        wanted = ", ".join(f"'{key}'" for key in keys)
        table = self._dataset.to_table(columns=["key", *_COLUMNS], filter=f"key IN ({wanted})", scan_in_order=True)
        return by_key(keys, table)

    def close(self) -> None:
        """A dataset has nothing to close."""


def by_key(keys: list[str], table: Any) -> list[list[list[int]]]:
    """Return the rows of each key from a table with a column `key`."""
    rows: dict[str, list[list[int]]] = {key: [] for key in keys}
    for key, row in zip(table["key"].to_pylist(), _rows(table), strict=True):
        rows[key].append(row)
    return [rows[key] for key in keys]


def _rows(table: Any) -> list[list[int]]:
    return [list(row) for row in zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True)]


def sorted_entries(source: Path) -> Any:
    """Return all entries, sorted by key and newest first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    batches = []
    for path in sorted(source.iterdir()):
        with pa.ipc.open_file(path) as entries:
            batches.append(entries.get_batch(0))
    table = pa.Table.from_batches(batches)
    seconds = pc.divide(table["timestamp_ms"], 1000).cast(pa.int32())
    table = table.drop_columns(["timestamp_ms"]).append_column("second", seconds)
    return table.sort_by([("key", "ascending"), ("second", "descending"), ("offset", "descending")])


def build(place: dict[str, str], source: Path) -> None:
    """Sort all entries, write them, and index the key."""
    # by default it sorts keys in 300 MB, which is too little for five million keys
    os.environ["LANCE_MEM_POOL_SIZE"] = str(_SORT_BYTES)
    import lance

    dataset = lance.write_dataset(sorted_entries(source), _uri(place), storage_options=_options(place))
    dataset.create_scalar_index("key", "BTREE", name=_INDEX)


def _uri(place: dict[str, str]) -> str:
    return f"s3://{place['bucket']}/{place['prefix']}"


def _options(place: dict[str, str]) -> dict[str, str]:
    return {"aws_endpoint": place["endpoint_url"], "allow_http": "true"}
