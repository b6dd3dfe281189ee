"""Addresses from which tasks open storages. Threads: any.

A storage is never pickled: tasks open it by its URI, with the executor's credentials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tiered_index.base.clock import SystemClock
from tiered_index.errors import ConfigError
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.spark.versions import DRIVER_VERSION, DriverVersion
from tiered_index.storage.base import Storage, StorageOptions
from tiered_index.storage.metering import MeteredStorage, Usage
from tiered_index.storage.opening import beside, open_storage


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """The address of a storage for any process with the `version` of this one. Raises `ConfigError` for `memory://`.

    Without parameters, `uri` takes those of `index`, the URI of a storage of the same scheme.

    `request_stats` is a Spark accumulator; each storage opened by this address adds its counts when it is closed.
    """

    uri: str
    options: StorageOptions | None = None
    request_stats: Any = None
    index: str | None = None
    version: DriverVersion = DRIVER_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", beside(self.uri, self.index))
        if self.uri.startswith("memory:"):
            raise ConfigError("memory:// is one process's memory, and Spark's tasks run in others: use another storage")

    def open(self, *, any_names: bool = False) -> Storage:
        """Return the storage; the caller closes it. `any_names` is that of `Storage`. Raises `ConfigError`."""
        storage = open_storage(self.uri, options=self.options, any_names=any_names)
        return storage if self.request_stats is None else _CountedStorage(storage, self.request_stats)

    def state(self) -> LogState:
        """Return the newest state of the log of an index. Raises `NotAnIndex`, the storage's errors."""
        with self.open() as storage:
            return StorageLog(storage, SystemClock()).open()


# Returns the address of a storage's URI
AddressOf: TypeAlias = Callable[[str], StorageAddress]
READ, WRITTEN = "bytes read", "bytes written"


def counts_of(usage: Usage) -> Counter[str]:
    """Return requests by operation, and bytes as `READ` and `WRITTEN`."""
    return Counter({**usage.requests_by_kind, READ: usage.bytes_read, WRITTEN: usage.bytes_written})


class _CountedStorage(MeteredStorage):
    def __init__(self, inner: Storage, request_stats: Any) -> None:
        super().__init__(inner)
        self._request_stats: Any = request_stats

    def close(self) -> None:
        try:
            super().close()
        finally:
            request_stats, self._request_stats = self._request_stats, None
            if request_stats is not None:
                request_stats.add(counts_of(self.total))
