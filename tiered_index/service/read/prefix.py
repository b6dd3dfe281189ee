"""The folders directly below a prefix, as openings of indexes.

An index that was found stays; if its objects vanish, reading its log fails. Threads: one at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial

from tiered_index.errors import (
    ConfigError,
    CorruptFile,
    FolderDenied,
    NotAnIndex,
    ObjectArchived,
    ObjectNotFound,
    StorageError,
    StorageMisconfigured,
)
from tiered_index.format.names import epoch_name, log_name
from tiered_index.service.read.index_view import IndexView
from tiered_index.storage.base import Storage
from tiered_index.storage.metering import MeteredStorage
from tiered_index.storage.opening import child_storages
from tiered_index.storage.prices import PriceTable

# the most folders of a prefix
_MAX_CHILDREN = 1000


class Children:
    """The children of the storage `shared`. `open_view` opens the index of one; it raises `NotAnIndex`."""

    def __init__(self, shared: Storage, prices: PriceTable, open_view: Callable[[Storage], IndexView]) -> None:
        self._shared, self._prices, self._open_view = shared, prices, open_view
        # URIs of folders without an index at the last look
        self._empty: set[str] = set()

    def __call__(self) -> Iterator[tuple[str, Callable[[], IndexView | None]]]:
        """List the prefix; yield the URI of each folder, and a call that opens it.

        The call returns None for a folder without an index. Raises `ConfigError` for too many folders.
        """
        for child in self._listed():
            yield child.uri, partial(self._open, child)

    def _listed(self) -> list[Storage]:
        listed = MeteredStorage(self._shared, self._prices)
        found = list(itertools.islice(child_storages(self._shared, listed), _MAX_CHILDREN + 1))
        if len(found) > _MAX_CHILDREN:
            raise ConfigError(f"{self._shared.uri} has more than {_MAX_CHILDREN} folders: name the indexes themselves")
        return found

    def _open(self, child: Storage) -> IndexView | None:
        if child.uri in self._empty:
            # one request: every index has record 1 of its log
            try:
                MeteredStorage(child, self._prices).head(log_name(1))
            except ObjectNotFound:
                return None
            self._empty.discard(child.uri)
        try:
            return self._open_view(child)
        except NotAnIndex:
            # a writer claims an epoch before it publishes anything, so an epoch without a log shows a lost log
            if next(iter(child.list(epoch_name(1))), None) is not None:
                with contextlib.suppress(NotAnIndex):  # a writer may have created it in between
                    return self._open_view(child)
                raise CorruptFile(f"{child.uri}: {epoch_name(1)}", "belongs to an index without a log") from None
            self._empty.add(child.uri)
            return None
        except ObjectArchived:
            raise
        except StorageMisconfigured as error:
            # a folder of another user is no index if one may look and record 1 of a log is not there
            with contextlib.suppress(StorageError):
                try:
                    MeteredStorage(child, self._prices).head(log_name(1))
                except ObjectNotFound:
                    return None
            raise FolderDenied(
                f"{child.uri} may be an index that this user can't read: allow it, or give the other indexes by their "
                f"URIs instead of {self._shared.uri} ({error})"
            ) from error
