"""The storage and the log of one index, for commands that work on them without its root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tiered_index.clock import Clock, SystemClock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError
from tiered_index.service.log.log import StorageLog
from tiered_index.service.root.root import Root
from tiered_index.storage.disk import Disk
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import open_storage

__all__ = ["StoredIndex", "open_stored_index", "storage_uri"]


@dataclass(frozen=True)
class StoredIndex:
    """A storage, metered, and its log, read."""

    storage: MeteredStorage
    log: StorageLog
    clock: Clock


def storage_uri(config: IndexConfig) -> str:
    """Return the URI that `config` names, or that its root's marker does.

    Raises `ConfigError` where neither is given.
    """
    uri = config.storage
    if uri is None and config.root is not None:
        marker = Root(config.root, Disk()).read_marker()
        uri = marker.storage if marker is not None else None
    if uri is None:
        raise ConfigError("no storage is given: --storage URI, or --root of an index that has one")
    return uri


@contextlib.contextmanager
def open_stored_index(config: IndexConfig) -> Iterator[StoredIndex]:
    """Yield the index in the storage that `config` names, or that its root's marker does.

    Raises `ConfigError` where neither is given, `NotAnIndex`, `StorageUnavailable`.
    """
    uri = storage_uri(config)
    clock = SystemClock()
    storage = MeteredStorage(open_storage(uri, options=config.s3, parallel_reads=config.query_threads), config.prices)
    with contextlib.closing(storage):
        log = StorageLog(storage, clock)
        log.open()
        yield StoredIndex(storage, log, clock)
