"""The indexes that a reader of several could not open yet. Each refresh tries to open them again.

While one of them is unopened, lookups fail, or name it in `failed`. None delays a lookup: each is opened in a thread of
its own pool. Threads: every method from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial

from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    StorageError,
    StorageUnavailable,
    TieredIndexError,
)
from tiered_index.service.catalog.catalog import Handle
from tiered_index.service.reading.parts import hand_over
from tiered_index.service.reading.refreshed import BRIEF_S, Refreshed, unread
from tiered_index.service.reading.views import IndexView
from tiered_index.storage.context import UNBOUNDED, active_context
from tiered_index.storage.pools import DaemonPool, NoThread

Openings = Callable[[], Iterable[tuple[str, Callable[[], IndexView | None]]]]
"""Returns the URIs of indexes, each with a call that opens its view, or returns None for a folder without an index."""
# indexes that are opened at the same time
_THREADS = 8


class Unopened(Refreshed):
    """The indexes among `openings` that are not in `found` (URIs).

    `name` is that of the list or prefix, for errors. `adopt` lets lookups read an opened view. It raises if they can't
    read it together with the others. `late` has openings under way, by URI, and `errors` those that failed.
    """

    def __init__(
        self,
        name: str,
        config: IndexConfig,
        clock: Clock,
        openings: Openings,
        adopt: Callable[[IndexView], None],
        found: set[str],
        late: dict[str, Future[IndexView | None]],
        errors: dict[str, TieredIndexError],
    ) -> None:
        super().__init__(name, clock, config.refresh_interval_s, config.prices, config.source_timeout_s)
        self._openings, self._adopt, self._found = openings, adopt, found
        self._lock = threading.Lock()
        self._pool = DaemonPool(_THREADS, "tiered-index-opening")
        self._opening = dict(late)
        # URIs of indexes whose last opening took long: no lookup waits for the next one, or counts its requests
        self._slow = set(late)
        self._errors = dict(errors) | {uri: self._late(uri) for uri in late}
        if self._errors:
            self._failed(next(iter(self._errors.values())), clock.monotonic_s())

    def refresh(self) -> None:
        """Find indexes and open them. Raises the errors of `openings`, else the first error of an index."""
        with self._lock:
            begun_s = self._clock.monotonic_s()
            awaited = []
            errors: dict[str, TieredIndexError] = {}
            for uri, open_view in self._openings():
                if uri in self._found or uri in self._opening:
                    continue
                context = UNBOUNDED if uri in self._slow else active_context()
                try:
                    with context.active():
                        self._opening[uri] = self._pool.submit(self._timed, uri, open_view)
                except NoThread as error:
                    errors[uri] = error
                    continue
                if uri not in self._slow:
                    awaited.append(self._opening[uri])
            # the listing of a prefix took a part of the patience
            wait(awaited, self.patience_s / 2)
            self._errors, self._error, self._away = {**errors, **self._join()}, None, None
            for first in self._errors.values():
                raise first
            self._refreshed_from(begun_s)

    def _timed(self, uri: str, open_view: Callable[[], IndexView | None]) -> IndexView | None:
        begun_s = time.monotonic()
        try:
            return open_view()
        except BaseException as error:
            # an opening that the limits of a lookup have ended is tried again without them
            if isinstance(error, BudgetExceeded) or time.monotonic() - begun_s >= BRIEF_S:
                self._slow.add(uri)
            raise

    def _join(self) -> dict[str, TieredIndexError]:
        """Adopt the views that are open by now. Return the error of each index that is not."""
        errors: dict[str, TieredIndexError] = {}
        for uri, opening in list(self._opening.items()):
            if not opening.done():
                errors[uri] = self._late(uri)
                self._slow.add(uri)
                continue
            del self._opening[uri]
            try:
                if (view := opening.result()) is not None:
                    self._adopt(view)
                    self._found.add(uri)
            except (StorageError, CorruptFile, ConfigError, BudgetExceeded) as error:
                errors[uri] = error
            else:
                self._slow.discard(uri)
        return errors

    def _late(self, uri: str) -> StorageUnavailable:
        return StorageUnavailable(f"{uri} did not answer within {self.patience_s:g} s")

    def fails(self, begun_s: float) -> bool:
        """As `Refreshed`."""
        return bool(self._errors) or super().fails(begun_s)

    def _is_due(self, begun_s: float) -> bool:
        if self._errors and self._slow.issuperset(self._errors):
            return self._is_retry_due()
        return super()._is_due(begun_s)

    def _try(self, read: Callable[[], object]) -> None:
        begun_s = self._clock.monotonic_s()
        try:
            super()._try(read)
        except ConfigError as error:  # an index can't be read together with the others
            self._failed(error, begun_s)

    @property
    def is_waiting(self) -> bool:
        """Whether an index is known that could not be opened yet."""
        return bool(self._errors)

    def problems(self, begun_s: float) -> list[Handle]:
        """Return a failing file for each unopened index, or for a list of indexes that could not be read."""
        error, refreshed_s, errors = self._error, self._refreshed_s, self._errors
        if errors:
            return [file for uri, error in errors.items() for file in unread(error, source=uri)]
        return self._problem(begun_s, refreshed_s, error, f"the list of indexes below {self.name}")

    def close(self, until_s: float | None = None) -> None:
        """Stop the threads; views that are opened later are closed at once. Idempotent."""
        self._pool.close(until_s)
        for opening in list(self._opening.values()):
            opening.add_done_callback(partial(hand_over, close_view))


def close_view(view: IndexView | None) -> None:
    """Close the view of an index that nobody reads."""
    if view is not None:
        view.close()
