"""Which files of a folder, or of a storage, are a source's: Parquet and NDJSON by their names, as Spark's own readers
take them. Driver only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiered_index.errors import InvalidArgument
from tiered_index.spark.executors import AddressOf

NDJSON = (".ndjson", ".jsonl", ".json", ".ndjson.gz", ".jsonl.gz", ".json.gz")


def find_stored(address_of: AddressOf, uri: str) -> list[tuple[str, str]]:
    """Return (storage's URI, name) of the object that `uri` names, or of the Parquet and NDJSON files below it."""
    place, mark, parameters = uri.partition("?")
    if kind_of(place):
        folder, _, name = place.rpartition("/")
        return [(folder + mark + parameters, name)]
    with address_of(uri).open() as storage:
        names = _readable(uri, [info.name for info in storage.list()])
        # left out, they would be missing in silence
        foreign = _readable(uri, list(storage.foreign_keys()))
    if foreign:
        raise InvalidArgument(
            f"{uri} has files that can't be named here, {foreign[0]!r} first: names have letters, digits and ._=+@- "
            "only; have Spark read the folder and give the DataFrame"
        )
    if not names:
        raise InvalidArgument(f"{uri} has no Parquet or NDJSON file")
    return [(uri, name) for name in names]


def files_below(path: Path) -> list[Path]:
    """Return a file, or those of a folder that have a name of ours; hidden ones and Spark's own are none."""
    if path.is_file():
        return [path]
    names = [p.relative_to(path).as_posix() for p in sorted(path.rglob("*")) if p.is_file()]
    found = [path / name for name in _readable(str(path), names)]
    if not found:
        raise InvalidArgument(f"{path} has no Parquet or NDJSON file, and is no RocketMQ store: it has no commitlog/")
    return found


_TABLES = {"_delta_log", ".hoodie"}


def _readable(folder: str, names: Sequence[str]) -> list[str]:
    """Return those of the names below a folder that are of our kinds. As to Spark, nothing is there that is hidden, or
    in a hidden folder: what a job has not committed. Raises `InvalidArgument` for a table: old files may be there too.
    """
    parts = [name.split("/") for name in names]
    if tables := _TABLES & {part for path in parts for part in path[:-1]}:
        raise InvalidArgument(
            f"{folder} is a table ({min(tables)}/), which says which of its files count: give those, or a DataFrame"
        )
    # a folder of a partition may be named `_day=1`
    shown = [not any(part.startswith(".") or (part[0:1] == "_" and "=" not in part) for part in path) for path in parts]
    return [name for name, seen in zip(names, shown, strict=True) if seen and kind_of(name)]


def kind_of(name: str) -> str:
    """Return ``parquet``, ``ndjson``, or nothing for another file."""
    return "parquet" if name.endswith(".parquet") else "ndjson" if name.endswith(NDJSON) else ""


def kind_of_all(names: Sequence[str]) -> str:
    """Return the kind of all files. Raises `InvalidArgument` where there are two, or another one."""
    kinds = {kind_of(name) for name in names}
    if kinds - {"parquet", "ndjson"} or len(kinds) != 1:
        raise InvalidArgument(
            f"sources are all Parquet (.parquet) or all NDJSON (.ndjson, .jsonl, .json, each also .gz), not {names[0]}"
        )
    return kinds.pop()
