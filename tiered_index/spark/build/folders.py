"""Which files of a folder, or of a storage, are a source's, by the rules of Spark's own readers: hidden names are out,
all others are in, whatever they end in, and folders named ``column=value`` are columns. Driver only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa

from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.sources.places import CSV, NDJSON, PARQUET
from tiered_index.spark.addresses import AddressOf

_HEAD_BYTES = 64
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# of a folder's name, to files of another program that are no data
_TABLES = {"_delta_log", ".hoodie"}


def find_stored(address_of: AddressOf, uri: str) -> list[tuple[str, str]]:
    """Return (storage's URI, name) of the object that `uri` names, or of the files below it."""
    place, mark, parameters = uri.partition("?")
    folder, _, last = place.rpartition("/")
    above = folder + mark + parameters
    if kind_of(place):
        return [(above, last)]
    with address_of(uri).open() as storage:
        names = _shown(uri, [info.name for info in storage.list()])
        # left out, they would be missing in silence
        foreign = _shown(uri, list(storage.foreign_keys()))
    if foreign:
        raise InvalidArgument(
            f"{uri} has files with unsupported names, {foreign[0]!r} first: names have letters, digits and ._=+@- "
            "only; have Spark read the folder and give the DataFrame"
        )
    if not names and _is_object(address_of, above, last):
        return [(above, last)]
    if not names:
        raise InvalidArgument(f"{uri} has no Parquet or NDJSON file")
    return [(uri, name) for name in names]


def _is_object(address_of: AddressOf, uri: str, name: str) -> bool:
    """Return whether there is an object of that name, whose name says nothing of its kind."""
    try:
        with address_of(uri).open() as storage:
            return storage.head(name).size_bytes >= 0
    except (InvalidArgument, ObjectNotFound):
        return False


def files_below(path: Path) -> list[Path]:
    """Return a file, or those of a folder; hidden ones and Spark's own are none."""
    if path.is_file():
        return [path]
    names = [p.relative_to(path).as_posix() for p in sorted(path.rglob("*")) if p.is_file()]
    found = [path / name for name in _shown(str(path), names)]
    if not found:
        raise InvalidArgument(
            f"{path} has no Parquet or NDJSON file, and is not a RocketMQ store: it has no commitlog/"
        )
    return found


def _shown(folder: str, names: Sequence[str]) -> list[str]:
    """Return those of the names below a folder that Spark sees: nothing that is hidden, or in a hidden folder, as what
    a job has not committed is. Raises `InvalidArgument` for a table: old files may be there too.
    """
    parts = [name.split("/") for name in names]
    if tables := _TABLES & {part for path in parts for part in path[:-1]}:
        raise InvalidArgument(
            f"{folder} is a table ({min(tables)}/), whose metadata names its current files: give those, or a DataFrame"
        )
    return [name for name, path in zip(names, parts, strict=True) if not any(map(_is_hidden, path))]


def _is_hidden(part: str) -> bool:
    # a folder of a partition may be named `_day=1`
    return part.startswith(".") or (part.startswith("_") and "=" not in part) or part.endswith("._COPYING_")


_ENDINGS = {"parquet": PARQUET, "ndjson": NDJSON, "csv": CSV}


def kind_of(name: str) -> str:
    """Return ``parquet``, ``ndjson``, ``csv``, or nothing for a name that doesn't say."""
    return next((kind for kind, endings in _ENDINGS.items() if name.lower().endswith(endings)), "")


def kind_of_all(files: Sequence[tuple[str, str]], address_of: AddressOf, known: Sequence[str]) -> str:
    """Return the kind of all files, each of a storage's URI, or of nothing where it is local. Files whose names don't
    say are of the others' kind, which reading them proves; where none says, the first one's bytes do.

    Raises `InvalidArgument` where there are two kinds, or another one than the `known` ones.
    """
    kinds = {kind_of(name) for _, name in files} - {""} or {_kind_by_content(*files[0], address_of)}
    if len(kinds) != 1 or not kinds <= {*known}:
        told = " or all ".join(f"{kind} ({', '.join(_ENDINGS[kind])})" for kind in known)
        raise InvalidArgument(f"files are all {told}, not {files[0][1]} ({len(files):,} files)")
    return kinds.pop()


def _kind_by_content(uri: str, name: str, address_of: AddressOf) -> str:
    if uri:
        with address_of(uri).open() as storage:
            size = min(_HEAD_BYTES, storage.head(name).size_bytes)
            head = bytes(storage.get_range(name, 0, size)) if size else b""
    else:
        with Path(name).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    return "parquet" if head.startswith(b"PAR1") else "ndjson" if head.lstrip().startswith(b"{") else ""


def partition_columns(below: Sequence[str]) -> dict[str, pa.Array]:
    """Return the columns that the folders of files are named for, a value a file: integers where all are, else text.
    `below` are the files' names below what was given. Raises `InvalidArgument` where not all have the same columns.
    """
    found = [_values(name) for name in below]
    for name, values in zip(below, found, strict=True):
        if list(values) != list(found[0]):
            raise InvalidArgument(
                f"folders of {below[0]} and {name} are named for other columns ({', '.join(found[0]) or 'none'}; "
                f"{', '.join(values) or 'none'}): give folders of the same columns"
            )
    columns = {}
    for column in found[0] if found else ():
        texts = pa.array([values[column] for values in found], pa.string())
        try:
            columns[column] = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            columns[column] = texts
    return columns


def _values(name: str) -> Mapping[str, str | None]:
    pairs = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return {unquote(column): None if value == _NO_VALUE else unquote(value) for column, _, value in pairs}
