"""Finds out whether files belong to a table of Delta, Hudi or Iceberg, which also keeps files of old versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from tiered_index.errors import InvalidArgument, StorageMisconfigured
from tiered_index.sources.places import local_path
from tiered_index.storage.base import PAGE, Storage
from tiered_index.storage.buckets import BucketStorage

# Folders of table formats
TABLES = {"_delta_log", ".hoodie"}
_ICEBERG = re.compile(r"(.*/)?metadata/[^/]*\.metadata\.json(\.gz)?", re.DOTALL)


def table_folder(names: Iterable[str]) -> str | None:
    """Return the folder of a table's metadata if one of the names, relative to a folder, is in it."""
    for name in names:
        if metadata_folders := TABLES & {*name.split("/")[:-1]}:
            return min(metadata_folders)
        if _ICEBERG.fullmatch(name):
            return "metadata"
    return None


def table_error(place: object, folder: str) -> InvalidArgument:
    """Return the error for a place in a table whose metadata has the name `folder`."""
    return InvalidArgument(
        f"{place} is a table ({folder}/), whose metadata names its current files and the rows deleted from them: read "
        "it by Spark's reader of its format, and give `build` or a stream that DataFrame"
    )


def check_no_tables(folders: Iterable[Path]) -> None:
    """Raise `InvalidArgument` if a local folder is that of a table."""
    for folder in folders:
        metadata = (f"metadata/{file.name}" for file in (folder / "metadata").glob("*.metadata.json*"))
        if metadata_folder := next((name for name in TABLES if (folder / name).is_dir()), None) or table_folder(
            metadata
        ):
            raise table_error(folder, metadata_folder)


def check_outside_tables(source: str, opened: Callable[[str], Storage]) -> None:
    """Raise `InvalidArgument` if a path or URI is in the folder of a table.

    `opened` returns the storage of a URI. Costs two listings for each folder above an object.
    """
    if (path := local_path(source)) is not None:
        check_no_tables((path, *path.parents))
        return
    place, mark, parameters = source.partition("?")
    parts = urlsplit(place)
    above = parts.path.strip("/").split("/")
    for depth in range(len(above) - 1, -1, -1):
        uri = "/".join([f"{parts.scheme}://{parts.netloc}", *above[:depth]])
        with closing(opened(uri + mark + parameters)) as storage:
            if not isinstance(getattr(storage, "inner", storage), BucketStorage):
                return
            # a caller that may not list a folder above learns nothing of it
            with suppress(StorageMisconfigured):
                listed = (
                    info.name for prefix in ("_delta_log/", "metadata/") for info in islice(storage.list(prefix), PAGE)
                )
                if metadata_folder := table_folder(listed):
                    raise table_error(uri, metadata_folder)
