"""Lists the files of a source's folder or storage by the rules of Spark's own readers. Driver only.

Hidden names are left out. All other files are included, with any extension. Folders named ``column=value`` are columns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa

from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.sources.places import CSV, NDJSON, PARQUET, readings
from tiered_index.sources.table_folders import TABLES, check_outside_tables, table_error, table_folder
from tiered_index.spark.addresses import AddressOf
from tiered_index.storage.opening import open_storage

_HEAD_BYTES = 64
# Fields that are text
_TEXTS = ("topic", "key", "keys")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def find_stored(address_of: AddressOf, uri: str) -> list[tuple[str, str]]:
    """Return (storage's URI, name) of the object that `uri` names, or of the files below it.

    The URI of a folder's files is one of `readings(uri)`.
    """
    place, mark, parameters = uri.partition("?")
    is_file, meant = bool(kind_of(place)), readings(place)
    for reading in meant:
        folder, _, last = reading.rpartition("/")
        as_object = (folder + mark + parameters, unquote(last))
        if is_file and (len(meant) == 1 or _is_object(address_of, *as_object)):
            return [as_object]
        of_folder = reading + mark + parameters
        with address_of(of_folder).open(any_names=True) as storage:
            # a key that ends so marks a folder, as consoles and Hadoop make it
            keys = [info.name for info in storage.list() if not info.name.endswith(("/", "_$folder$"))]
        if names := _shown(uri, [key for key in keys if key]):
            check_outside_tables(of_folder, lambda above: address_of(above).open(any_names=True))
            return [(of_folder, name) for name in names]
        if not is_file and _is_object(address_of, *as_object):
            return [as_object]
    raise InvalidArgument(f"{uri} has no Parquet or NDJSON file")


def _is_object(address_of: AddressOf, uri: str, name: str) -> bool:
    """Return whether there is an object of that name."""
    try:
        with address_of(uri).open(any_names=True) as storage:
            return storage.head(name).size_bytes >= 0
    except (InvalidArgument, ObjectNotFound):
        return False


def files_below(path: Path) -> list[Path]:
    """Return `path` if it is a file, or the files below a folder without hidden ones and Spark's own."""
    if path.is_file():
        return [path]
    names = [p.relative_to(path).as_posix() for p in sorted(_all_below(path))]
    check_outside_tables(str(path), open_storage)
    paths = [path / name for name in _shown(str(path), names)]
    if not paths:
        raise InvalidArgument(
            f"{path} has no Parquet or NDJSON file, and is not a RocketMQ store: it has no commitlog/"
        )
    return paths


def _all_below(folder: Path) -> list[Path]:
    """Return the files below a folder. Raises `InvalidArgument` for a folder whose files would be missing silently."""

    def refuse(error: OSError) -> None:
        raise InvalidArgument(f"{error.filename}: {error.strerror}") from error

    paths: list[Path] = []
    for above, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name in TABLES or not _is_hidden(name)]
        if links := [path for name in folders if (path := Path(above, name)).is_symlink()]:
            raise InvalidArgument(
                f"{links[0]} is a link to a folder, which is not followed: give the paths of the folders themselves"
            )
        # a broken link is an error when it is opened
        paths += [path for name in names if (path := Path(above, name)).is_file() or path.is_symlink()]
    return paths


def _shown(folder: str, names: Sequence[str]) -> list[str]:
    """Return the names below a folder that Spark reads: not hidden, and not in a hidden folder like uncommitted files.

    Raises `InvalidArgument` for a table format, whose folder may also have old files.
    """
    if table := table_folder(names):
        raise table_error(folder, table)
    return [name for name in names if not any(map(_is_hidden, name.split("/")))]


def _is_hidden(part: str) -> bool:
    # `_day=1` is a partition, not hidden
    return part.startswith(".") or (part.startswith("_") and "=" not in part) or part.endswith("._COPYING_")


_ENDINGS = {"parquet": PARQUET, "ndjson": NDJSON, "csv": CSV}


def kind_of(name: str) -> str:
    """Return ``parquet``, ``ndjson`` or ``csv`` by a file's extension; empty for another one."""
    return next((kind for kind, endings in _ENDINGS.items() if name.lower().endswith(endings)), "")


def kind_of_all(files: Sequence[tuple[str, str]], address_of: AddressOf, known: Sequence[str]) -> str:
    """Return the kind of all files; each is (storage's URI, name), with an empty URI for a local file.

    Files with another extension are taken for the others' kind. If no file has a known extension, the first one's bytes
    decide. Raises `InvalidArgument` for two kinds, or one that is not `known`.
    """
    kinds = {kind_of(name) for _, name in files} - {""} or {_kind_by_content(*files[0], address_of)}
    if len(kinds) != 1 or not kinds <= {*known}:
        told = " or all ".join(f"{kind} ({', '.join(_ENDINGS[kind])})" for kind in known)
        raise InvalidArgument(f"files are all {told}, not {files[0][1]} ({len(files):,} files)")
    return kinds.pop()


def _kind_by_content(uri: str, name: str, address_of: AddressOf) -> str:
    if uri:
        with address_of(uri).open(any_names=True) as storage:
            size = min(_HEAD_BYTES, storage.head(name).size_bytes)
            head = bytes(storage.get_range(name, 0, size)) if size else b""
    else:
        with Path(name).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    return "parquet" if head.startswith(b"PAR1") else "ndjson" if head.lstrip().startswith(b"{") else ""


def partition_columns(below: Sequence[str], fields: Mapping[str, object] | None = None) -> dict[str, pa.Array]:
    """Return the columns of folders named ``column=value``, with a value for each file.

    `below` are the files' names relative to the source. `fields` have the columns of fields. A column of the topic or
    key is text, one of another field integers. A column of no field is integers unless that would change its text
    (``007``). Raises `InvalidArgument` unless all files have the same columns.
    """
    partitions = [_values(name) for name in below]
    for name, values in zip(below, partitions, strict=True):
        if list(values) != list(partitions[0]):
            raise InvalidArgument(
                f"folders of {below[0]} and {name} are named for other columns ({', '.join(partitions[0]) or 'none'}; "
                f"{', '.join(values) or 'none'}): give folders of the same columns"
            )
    named = {name: column for name, column in (fields or {}).items() if isinstance(column, str)}
    used = {name: name for name in _TEXTS} | named
    of_texts = {column for name, column in used.items() if name in _TEXTS}
    of_others = {column for name, column in used.items() if name not in _TEXTS}
    columns = {}
    for column in partitions[0] if partitions else ():
        columns[column] = texts = pa.array([values[column] for values in partitions], pa.string())
        with contextlib.suppress(pa.ArrowInvalid):
            numbers = texts.cast(pa.int64())
            if column not in of_texts and (column in of_others or numbers.cast(pa.string()).equals(texts)):
                columns[column] = numbers
    return columns


def _values(name: str) -> Mapping[str, str | None]:
    pairs = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return {unquote(column): None if value == _NO_VALUE else unquote(value) for column, _, value in pairs}
