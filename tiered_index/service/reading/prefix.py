"""Finds the indexes directly below a prefix, again at every refresh: a new index is read without a restart.

An index that was found stays; if its objects vanish, reading its log fails. While an index can't be opened, lookups
fail. Threads: every method from any thread.
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

# the most folders of a prefix
_MAX_CHILDREN = 1000


class Prefix(Refreshed):
    """The prefix of the storage `shared`.

    `adopt` opens the index of a child storage, so that lookups read it. It returns whether the child has one. It raises
    if it can't open it. `found` has the URIs of the indexes that are read.
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
        # URIs of folders without an index at the last look
        self._empty: set[str] = set()
        # by URI, errors of indexes that could not be opened
        self._unopened: dict[str, TieredIndexError] = {}

    def refresh(self) -> None:
        """List the prefix and open new indexes. Raises as `children`, else the first error of an index."""
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
            # one request: every index has record 1 of its log
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
        except ConfigError as error:  # an index can't be read together with the others
            self._failed(error, begun_s)

    def problems(self, begun_s: float) -> list[Handle]:
        """Return a failing file for each index that could not be opened, or for a list that could not be read."""
        error, refreshed_s, unopened = self._error, self._refreshed_s, self._unopened
        if unopened:
            return [file for uri, error in unopened.items() for file in unread(error, source=uri)]
        return self._problem(begun_s, refreshed_s, error, f"the list of indexes below {self.uri}")


def children(shared: Storage, listed: Storage | None = None) -> list[Storage]:
    """Return the storages directly below `shared`, listed through `listed`. Raises `ConfigError` for too many."""
    found = list(itertools.islice(child_storages(shared, listed), _MAX_CHILDREN + 1))
    if len(found) > _MAX_CHILDREN:
        raise ConfigError(f"{shared.uri} has more than {_MAX_CHILDREN} folders: name the indexes themselves")
    return found
