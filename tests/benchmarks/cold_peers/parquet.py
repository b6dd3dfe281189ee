"""One Parquet file by pyarrow, sorted by key, newest first. A lookup reads the row groups whose statistics allow the
key.

The settings are those that pyarrow's documentation advises: zstd, statistics, and `pre_buffer`, which reads the columns
of a row group in parallel. Row groups have 30,720 rows, a quarter of DuckDB's default. Smaller ones make a lookup
cheaper and the footer longer. The footer is read once.
"""

from pathlib import Path
from typing import Any

from tests.benchmarks.cold_peers.lance import by_key, sorted_entries

_ROW_GROUP = 30_720
_COLUMNS = ["second", "offset", "queue_id"]


class Reader:
    """A fragment of a dataset, which keeps the footer."""

    def __init__(self, place: dict[str, str]) -> None:
        import pyarrow.dataset as pads

        form = pads.ParquetFileFormat(default_fragment_scan_options=pads.ParquetFragmentScanOptions(pre_buffer=True))
        dataset = pads.dataset(path_of(place), filesystem=_files(place), format=form)
        self._field = pads.field("key")
        (self._fragment,) = dataset.get_fragments()
        self._fragment.ensure_complete_metadata()

    def lookup(self, key: str, count: int) -> list[list[int]]:
        table = self._fragment.to_table(columns=_COLUMNS, filter=self._field == key).slice(0, count)
        return [list(row) for row in zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True)]

    def lookup_many(self, keys: list[str]) -> list[list[list[int]]]:
        table = self._fragment.to_table(columns=["key", *_COLUMNS], filter=self._field.isin(keys))
        return by_key(keys, table)

    def close(self) -> None:
        """A fragment has nothing to close."""


def build(place: dict[str, str], source: Path) -> None:
    """Sort all entries and write them."""
    import pyarrow.parquet as pq

    pq.write_table(
        sorted_entries(source), path_of(place), filesystem=_files(place), row_group_size=_ROW_GROUP, compression="zstd"
    )


def path_of(place: dict[str, str]) -> str:
    """Return the file's bucket and key."""
    return f"{place['bucket']}/{place['prefix']}/entries.parquet"


def _files(place: dict[str, str]) -> Any:
    from pyarrow.fs import S3FileSystem

    return S3FileSystem(endpoint_override=place["endpoint_url"].removeprefix("http://"), scheme="http")
