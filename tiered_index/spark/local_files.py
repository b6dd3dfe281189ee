"""Where local files are, and what Spark calls them. No file is opened here.

Spark takes a path for a pattern, and decodes nothing: `%20` is three characters of a name.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tiered_index.errors import InvalidArgument
from tiered_index.storage.disk import absolute_path

__all__ = ["is_local", "local_path", "to_read", "to_write"]

_PATTERN = re.compile(r"[][{}*?\\]")


def is_local(path: str) -> bool:
    """Return whether a path, or a URI, is of local disks."""
    return "://" not in path or path.startswith("file://")


def local_path(path: str) -> Path:
    """Return the absolute path that a path, or a `file://` URI with its escapes, names."""
    return absolute_path(unquote(urlsplit(path).path) if path.startswith("file://") else path)


def to_read(file: Path) -> str:
    """Return what Spark reads an absolute path by. Raises `InvalidArgument` for a name that Hadoop can't read."""
    if ":" in file.name:
        raise InvalidArgument(f"{file}: Spark reads no local file with ':' in its name: rename it")
    return "file://" + _PATTERN.sub(r"\\\g<0>", str(file))


def to_write(folder: Path) -> str:
    """Return what Spark writes to an absolute path by, which is no pattern then."""
    return f"file://{folder}"
