"""Finds out whether files belong to a table of Delta, Hudi or Iceberg, which also keeps files of old versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tiered_index.base.threads import each
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.globs import wildcard_at
from tiered_index.connectors.files.rows.places import local_path
from tiered_index.errors import InvalidArgument, StorageMisconfigured
from tiered_index.storage.base import PAGE, Storage, list_whole
from tiered_index.storage.buckets import BucketStorage
from tiered_index.storage.opening import beside, split_parameters

# Folders of table formats
TABLES = {"_delta_log", ".hoodie"}
# folders that show a table, and requests that are sent at once
_METADATA, _THREADS = ("metadata", *sorted(TABLES)), 16
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


def check_outside_tables(source: str, config: IndexConfig) -> None:
    """Raise `InvalidArgument` if a file, folder, glob or prefix is in the folder of a table.

    Costs three listings for each folder above an object, sent at once. A folder that the caller may not list is passed.
    """
    if (path := local_path(source)) is not None:
        check_no_tables((path, *path.parents))
        return
    place, parameters = split_parameters(beside(source, config.storage))
    # a glob is below the folder where its wildcards begin
    parts = urlsplit(place[: wildcard_at(place)])
    *above, _ = parts.path.strip("/").split("/")
    bucket = f"{parts.scheme}://{parts.netloc}"

    def opened(folder: str) -> Storage:
        return config.open_storage(folder + parameters, any_names=True)

    with closing(opened("/".join([bucket, *above]))) as storage:
        if not isinstance(getattr(storage, "inner", storage), BucketStorage):
            return
    with closing(opened(bucket)) as storage:

        def check(folders: Sequence[str]) -> None:
            folder, prefix = "".join(f"{unquote(name)}/" for name in folders[:-1]), folders[-1]
            with suppress(StorageMisconfigured):
                listed = islice(list_whole(storage, f"{folder}{prefix}/"), PAGE)
                if metadata_folder := table_folder(info.name.removeprefix(folder) for info in listed):
                    raise table_error(f"{bucket}/{folder}".rstrip("/"), metadata_folder)

        each([(*above[:depth], name) for depth in range(len(above), -1, -1) for name in _METADATA], check, _THREADS)
