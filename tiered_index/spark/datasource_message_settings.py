"""What a read of a commit log was told: the options, checked, the place of the segments, and the columns that come of it.

PATH is a store directory, its commitlog folder, or ``archive:`` and a storage URI: the segments that the index there has archived.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tiered_index.errors import InvalidArgument
from tiered_index.spark.datasource_explain import ExplainedAddress, place_told
from tiered_index.spark.datasource_options import Options
from tiered_index.spark.executors import StorageAddress
from tiered_index.spark.local_files import is_local, local_path

__all__ = ["OPTIONS", "MessageSettings"]

OPTIONS = ("body", "skipCorrupt", "store", "maxBytesPerTrigger", "explain")

_COLUMNS: dict[str, DataType] = {
    "topic": StringType(), "queue_id": IntegerType(), "queue_offset": LongType(), "physical_offset": LongType(),
    "store_size": IntegerType(), "store_timestamp": TimestampType(), "born_timestamp": TimestampType(), "visible": BooleanType(),
    "keys": ArrayType(StringType()), "tags": StringType(), "properties": MapType(StringType(), StringType()), "body": BinaryType(),
}  # fmt: skip
_ARCHIVE = "archive:"


@dataclass(frozen=True, slots=True)
class MessageSettings:
    """The options, checked. `body` is ``plain``, ``stored`` (perhaps compressed) or ``none``; `archive` is None for local segments."""

    path: str
    body: str
    skip_corrupt: bool
    store: str | None
    max_bytes: int | None
    explain: StorageAddress | None
    archive: ExplainedAddress | None
    columns: StructType

    @classmethod
    def of(cls, options: Options) -> MessageSettings:
        """Return the settings that options make. Raises `InvalidArgument`, `ConfigError`."""
        body = options.choice("body", ("plain", "stored", "none"))
        columns = StructType([StructField(name, kind) for name, kind in _COLUMNS.items() if name != "body" or body != "none"])
        skips = options.choice("skipCorrupt", ("false", "true")) == "true"
        size, told, path = options.size("maxBytesPerTrigger"), place_told(options), options.path
        stored = path.startswith(_ARCHIVE) or not is_local(path)
        archive = ExplainedAddress(StorageAddress(path.removeprefix(_ARCHIVE)), told) if stored else None
        made = cls(path, body, skips, options.text("store"), size, told, archive, columns)
        if archive is None and told is not None and _is_within(told, made.commit_log.parent):
            raise InvalidArgument(f"option explain names a place within the store ({told.uri}); give another one")
        return made

    @property
    def folder(self) -> Path:
        """The local folder of segments. Raises `InvalidArgument` where what was given is no folder."""
        if not self._given.is_dir():
            raise InvalidArgument(f"{self._given}: no such folder")
        return self.commit_log

    @property
    def commit_log(self) -> Path:
        """Where the local folder of segments should be."""
        given = self._given
        return given if given.name == "commitlog" and not (given / "commitlog").is_dir() else given / "commitlog"

    @property
    def _given(self) -> Path:
        return local_path(self.path)


def _is_within(told: StorageAddress, folder: Path) -> bool:
    parts = urlsplit(told.uri)
    return parts.scheme == "file" and Path(unquote(parts.path)).resolve().is_relative_to(folder.resolve())
