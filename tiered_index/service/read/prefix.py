"""The folders directly below a prefix, each of which may be an index.

An index that was found stays; if its objects vanish, reading its log fails. Threads: one at a time.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

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


def children_of(shared: Storage, prices: PriceTable) -> list[Storage]:
    """List the folders of the storage `shared`, each as a storage. Raises `ConfigError` for too many."""
    listed = MeteredStorage(shared, prices)
    children = list(itertools.islice(child_storages(shared, listed), _MAX_CHILDREN + 1))
    if len(children) > _MAX_CHILDREN:
        raise ConfigError(f"{shared.uri} has more than {_MAX_CHILDREN} folders: name the indexes themselves")
    return children


class Child(IndexView):
    """A folder directly below `prefix`, a URI, that may be an index. Its storage is given; see `IndexView`."""

    def __init__(self, prefix: str, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._prefix = prefix
        # whether it was no index at the last look
        self._is_empty = False

    def open(self) -> bool:
        """As `IndexView`; False for a folder without an index. Raises `FolderDenied` if the user may not read it."""
        assert self._backend is not None
        child = MeteredStorage(self._backend, self._prices)
        if self._is_empty:
            # one request: every index has record 1 of its log
            try:
                child.head(log_name(1))
            except ObjectNotFound:
                return False
            self._is_empty = False
        try:
            return super().open()
        except NotAnIndex:
            # a writer claims an epoch before it publishes anything, so an epoch without a log shows a lost log
            if next(iter(self._backend.list(epoch_name(1))), None) is not None:
                with contextlib.suppress(NotAnIndex):  # a writer may have created it in between
                    return super().open()
                raise CorruptFile(f"{child.uri}: {epoch_name(1)}", "belongs to an index without a log") from None
            self._is_empty = True
            return False
        except ObjectArchived:
            raise
        except StorageMisconfigured as error:
            # a folder of another user is no index if one may look and record 1 of a log is not there
            with contextlib.suppress(StorageError):
                try:
                    child.head(log_name(1))
                except ObjectNotFound:
                    return False
            raise FolderDenied(
                f"{child.uri} may be an index that this user can't read: allow it, or give the other indexes by their "
                f"URIs instead of {self._prefix} ({error})"
            ) from error
