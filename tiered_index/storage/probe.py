"""Does this storage keep the one promise correctness is built on? Asked once, at start. Threads: any."""

from __future__ import annotations

import contextlib
import uuid

from tiered_index.errors import ObjectExists, StorageMisconfigured, TieredIndexError
from tiered_index.storage.base import Storage

__all__ = ["PROBE_PREFIX", "probe_put_if_absent"]

PROBE_PREFIX = "probe/"
"""Objects below it are of no use to anybody a moment later; one may be left by a process that was killed."""


def probe_put_if_absent(storage: Storage, name: str = PROBE_PREFIX + "put-if-absent") -> None:
    """Put twice to one unique name that starts with `name`, and remove it again.

    Raises `StorageMisconfigured` where the second put is accepted, or refused and yet stored: some servers ignore the condition
    and answer 200. Other errors pass as they are.
    """
    unique = f"{name}-{uuid.uuid4().hex}"
    try:
        _probe(storage, unique)
    except TieredIndexError:
        with contextlib.suppress(TieredIndexError):  # what went wrong first is what the caller must hear
            storage.delete(unique)
        raise
    storage.delete(unique)


def _probe(storage: Storage, unique: str) -> None:
    # A first put that was repeated inside after a lost answer says "exists"; the name is ours alone, so it was stored.
    with contextlib.suppress(ObjectExists):
        storage.put_if_absent(unique, b"first")
    try:
        storage.put_if_absent(unique, b"second")
    except ObjectExists:
        if storage.get(unique) == b"first":
            return
    raise StorageMisconfigured(
        f"{storage.uri} ignores put-if-absent (If-None-Match: *): two writers would overwrite each other's log. "
        "Use a server that honours it"
    )
