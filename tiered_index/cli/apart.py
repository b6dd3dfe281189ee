"""The broker's folders are only read: an index or a storage that would write into them is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError

__all__ = ["check_apart"]

_PARTS = ("commitlog", "consumequeue", "index")
# a store's parts that may be links to other disks


def check_apart(config: IndexConfig, *folders: Path) -> None:
    """Raise `ConfigError` where the root or a storage of local files lies within one of the broker's `folders`, or they within the root."""
    theirs = {place.resolve() for folder in folders for place in (folder, *(folder / part for part in _PARTS))}
    if config.root is not None:
        root = config.root.resolve()
        for folder in theirs:
            if root.is_relative_to(folder) or folder.is_relative_to(root):
                raise ConfigError(f"the root {root} and the broker's folder {folder} lie within each other: choose a root beside it")
    scheme, _, _ = (config.storage or "").partition("://")
    if scheme.lower() in ("file", "sqlite"):
        storage = Path(unquote(urlsplit(str(config.storage)).path)).resolve()
        for folder in theirs:
            if storage.is_relative_to(folder):
                raise ConfigError(f"the storage {storage} lies within the broker's folder {folder}: choose another place")
