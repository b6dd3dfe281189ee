"""The indexes directly below a prefix, listed again at every refresh: one that appears is read without a restart.

An index that was found stays; where its objects vanish, its own log says so. An index that can't be opened fails
lookups until it can. Threads: every method from any thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import ConfigError, CorruptFile, ObjectNotFound, StorageError, TieredIndexError
from tiered_index.format.names import log_name
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.reading.refreshed import Refreshed, unread
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import child_storages

# Most folders that a prefix may have
_MAX_CHILDREN = 1000


class Prefix(Refreshed):
    """The prefix at which `shared` was opened. `adopt` opens the index of a child and has it read from then on, and
    returns whether the child has one; it raises why it can't. `found` are the URIs of those that are read.
    """

    def __init__(
        self, shared: Storage, config: IndexConfig, clock: Clock, adopt: Callable[[Storage], bool], found: set[str]
    ) -> None:
        super().__init__(clock, config.refresh_interval_s, config.prices)
        self.uri = shared.uri
        self._shared = shared
        self._adopt = adopt
        self._lock = threading.Lock()
        self._found = found
        # folders that held no index when they were looked at
        self._empty: set[str] = set()
        # why indexes that are there could not be opened, by their URIs
        self._unopened: dict[str, TieredIndexError] = {}

    def refresh(self) -> None:
        """List the prefix and open what is new. Raises what `children` does, else the first index's error."""
        with self._lock:
            begun_s = self._clock.monotonic_s()
            unopened: dict[str, TieredIndexError] = {}
            for child in children(self._shared, MeteredStorage(self._shared, self._prices)):
                if child.uri in self._found:
                    continue
                try:
                    self._look(child)
                except (StorageError, CorruptFile, ConfigError) as error:
                    unopened[child.uri] = error
            self._unopened, self._error = unopened, None
            for first in unopened.values():
                raise first
            self._refreshed_from(begun_s)

    def _look(self, child: Storage) -> None:
        if child.uri in self._empty:
            # one request: an index begins with its record 1, which stays
            try:
                MeteredStorage(child, self._prices).head(log_name(1))
            except ObjectNotFound:
                return
            self._empty.discard(child.uri)
        if self._adopt(child):
            self._found.add(child.uri)
        else:
            self._empty.add(child.uri)

    def fails(self, begun_s: float) -> bool:
        """As `Refreshed`."""
        return bool(self._unopened) or super().fails(begun_s)

    def _try(self, read: Callable[[], object]) -> None:
        begun_s = self._clock.monotonic_s()
        try:
            super()._try(read)
        except ConfigError as error:  # of an index that can't be read with the others
            self._failed(error, begun_s)

    def problems(self, begun_s: float) -> list[Handle]:
        """Return a file that fails for each index that could not be opened, or for the listing that is not known."""
        error, refreshed_s, unopened = self._error, self._refreshed_s, self._unopened
        if unopened:
            return [file for uri, error in unopened.items() for file in unread(error, source=uri)]
        return self._problem(begun_s, refreshed_s, error, f"the list of what is below {self.uri}")


def children(shared: Storage, listed: Storage | None = None) -> list[Storage]:
    """Return the storages directly below one, which is listed through `listed`. Raises `ConfigError` for too many."""
    found = list(itertools.islice(child_storages(shared, listed), _MAX_CHILDREN + 1))
    if len(found) > _MAX_CHILDREN:
        raise ConfigError(f"{shared.uri} has more than {_MAX_CHILDREN} folders: name the indexes that are meant")
    return found
