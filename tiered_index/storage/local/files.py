"""Maps object names to paths, and lists a folder tree in order of name. Threads: any number, in any processes.

On disk the last segment of a name is a file. Every earlier one is a folder whose name ends in ``%``, a character that
object names can't hold: ``a`` and ``a/b`` are ``a`` and ``a%/b``. A path that is no object's is never listed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tiered_index.storage.base import SEGMENT, ObjectInfo

_SEGMENT = re.compile(SEGMENT)


def encode(name: str) -> Path:
    """Return the relative path of object `name` (a valid name)."""
    return Path(name.replace("/", "%/"))


def walk(path: Path, prefix: str, start_after: str, stem: str = "") -> Iterator[ObjectInfo]:
    """Yield the objects under `path` in order of whole name, a folder at a time. Their names begin with `stem`.

    The sort key of an object is ``text``, of a folder ``text/``: then every name below a folder sorts between its
    neighbours.
    """
    entries_by_name: dict[str, os.DirEntry[str]] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if not is_folder and stem + entry.name <= start_after:
                    # most files of a listing that starts near the end
                    continue
                text = entry.name.removesuffix("%") if is_folder else entry.name
                if (is_folder and text == entry.name) or not _SEGMENT.fullmatch(text):
                    continue
                name = stem + text + "/" * is_folder
                is_listed = name.startswith(prefix) and name > start_after and entry.is_file(follow_symlinks=False)
                if is_listed or (is_folder and _may_hold(name, prefix, start_after)):
                    entries_by_name[name] = entry
    except FileNotFoundError:
        return  # removed since its parent was read
    for name, entry in sorted(entries_by_name.items()):
        if name.endswith("/"):
            yield from walk(Path(entry), prefix, start_after, name)
        else:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield ObjectInfo(name, status.st_size, status.st_mtime_ns // 1_000_000)


def _may_hold(stem: str, prefix: str, start_after: str) -> bool:
    """Return whether a name that starts with `stem` can start with `prefix` and sort after `start_after`."""
    return (stem.startswith(prefix) or prefix.startswith(stem)) and (stem > start_after or start_after.startswith(stem))
