"""Several indexes that are read as one: each is opened, asked and left on its own.

Each index is a `Polled`: its log is read beside those of the others, and its files are searched beside theirs. One that
does not respond within `source_timeout_s` is away until a later read succeeds; the others answer meanwhile. An index
that could not be opened is an `Opening`, which each due read tries to open. It fails lookups until it is open, except a
folder that the user may not read (`FolderDenied`): that is only named. A prefix is listed as often as logs are read.
Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from tiered_index.clock import Clock
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    FolderDenied,
    IndexClosed,
    InvalidArgument,
    SchemaMismatch,
    StorageError,
    TieredIndexError,
)
from tiered_index.format.schema import Schema
from tiered_index.service.read.budget import LookupBudget
from tiered_index.service.read.catalog import Handle
from tiered_index.service.read.index_view import IndexView
from tiered_index.service.read.parts import ReaderParts
from tiered_index.service.read.polled import Polled, Read, unread, wait_for
from tiered_index.service.read.scan import Files, LookupRun, Pass, ScanT
from tiered_index.storage.context import UNBOUNDED, RequestContext, active_context, remaining_s
from tiered_index.storage.pools import DaemonPool, NoThread

# a search ends by itself at the deadline; it is late after this time more
_GRACE_S = 0.1
Take = Callable[[IndexView, float], contextlib.AbstractContextManager[Files]]
"""Takes the snapshot of an index for a lookup that began at a time."""
Openings = Callable[[], Iterable[tuple[str, Callable[[], IndexView | None]]]]
"""Returns the URIs of indexes, each with a call that opens its view, or returns None for a folder without an index."""


class Opening(Polled):
    """An index that is not open yet. `open_view`: as in `Openings`. `adopt` gets the view; it raises `ConfigError`."""

    def __init__(
        self,
        uri: str,
        config: IndexConfig,
        clock: Clock,
        parts: ReaderParts,
        open_view: Callable[[], IndexView | None],
        adopt: Callable[[str, IndexView], None],
    ) -> None:
        super().__init__(uri, config, clock, parts, config.source_timeout_s)
        self._refreshed_s = -math.inf
        self._open_view, self._adopt = open_view, adopt
        # the next try is without the bounds of the lookup that begins it
        self._is_unbounded = self._is_open = False

    def _context(self) -> RequestContext:
        return UNBOUNDED if self._is_unbounded else active_context()

    def _read(self, *, is_due: bool) -> None:
        if self._is_open:
            return
        begun_s = self._clock.monotonic_s()
        if (view := self._open_view()) is not None:
            self._adopt(self.name, view)
            self._is_open = True
        self._is_unbounded = False
        self._refreshed_from(begun_s)

    def _try(self, read: Callable[[], object]) -> None:
        begun_s = self._clock.monotonic_s()
        try:
            super()._try(read)
        except (ConfigError, BudgetExceeded) as error:
            self._is_unbounded = isinstance(error, BudgetExceeded)
            self._failed(error, begun_s)

    def leave(self) -> TieredIndexError:
        """As `Polled`."""
        self._is_unbounded = True
        return super().leave()

    def fails(self, begun_s: float) -> bool:
        """As `Polled`; a folder that the user may not read fails no lookup."""
        return self.problem is not None and not isinstance(self._error, FolderDenied)

    @property
    def error(self) -> TieredIndexError | None:
        """The error of the last try; None: it succeeded, or there was none."""
        return self._error

    @property
    def problem(self) -> TieredIndexError | None:
        """The error of an index that is not open; None: the folder has no index."""
        return self._error or (self._late() if math.isinf(self._refreshed_s) and not self._is_open else None)


class Several(Polled):
    """The indexes of one reader, which `openings` finds. `name` is that of the list or prefix, for errors.

    If it `is_listed`, it is polled as each index is: more may appear later. `grown` gets all views before lookups see
    the files of a new one.
    """

    def __init__(
        self,
        name: str,
        config: IndexConfig,
        clock: Clock,
        parts: ReaderParts,
        openings: Openings,
        grown: Callable[[Sequence[IndexView]], None],
        *,
        is_listed: bool,
    ) -> None:
        super().__init__(name, config, clock, parts, config.source_timeout_s)
        self.views: tuple[IndexView, ...] = ()
        self.is_listed = is_listed
        self._of_each = config, clock, parts
        self._openings, self._grown = openings, grown
        # of searches; other threads replace those of an index that does not respond
        self._threads = DaemonPool(config.query_threads, "tiered-index-search")
        self._unopened: dict[str, Opening] = {}
        self._changing = threading.Lock()
        self._is_started = self._is_closed = False
        self._opened: dict[str, IndexView] = {}

    def __len__(self) -> int:
        return len(self.views)

    def open(self) -> None:
        """Open all that respond. If one does, the others are opened later.

        Raises the first error if none can be opened, and any error that another try can't mend.
        """
        [found] = self._parts.in_time([(f"listing the objects below {self.name}", lambda: list(self._openings()))])
        if twice := [uri for uri, count in Counter(uri for uri, _ in found).items() if count > 1]:
            raise InvalidArgument("the same index is given twice: " + ", ".join(twice))
        self._add(found)
        readings = [(opening, self._begin_opening(opening)) for opening in self._unopened.values()]
        self._wait_for_first(readings)
        ended = [opening for opening, reading in readings if reading.done() and reading.result() is None]
        left = [opening.name for opening, reading in readings if not reading.done()]
        with self._changing:
            self._show({uri: self._opened[uri] for uri, _ in found if uri in self._opened})
            for error in [opening.error for opening in ended if opening.error is not None]:
                if not self.views or not isinstance(error, StorageError | CorruptFile):
                    raise error
            if not self.views and left:
                raise BudgetExceeded(f"timeout_s was reached while opening {left[0]}: its log was not read by then")

    def start(self) -> None:
        """Let lookups read the open indexes. Raises `SchemaMismatch`, `InvalidArgument` for an index given twice."""
        with self._changing:
            common_schema(self.views)
            if len({view.number for view in self.views}) < len(self.views):
                raise InvalidArgument(
                    "the same index is given twice, give it once: " + ", ".join(view.storage.uri for view in self.views)
                )
            self._grown(self.views)
            self._is_started = True

    def _begin_opening(self, opening: Opening) -> Read:
        begun = opening.begin_due(self._clock.monotonic_s(), is_timed=False)
        assert begun is not None
        return begun[0]

    def _wait_for_first(self, readings: Sequence[tuple[Polled, Read]]) -> None:
        """Wait for all openings that get responses, for half of the time left; then until one is open."""
        left_s, now_s = remaining_s(), time.monotonic()
        wait_for(readings, None if left_s is None else now_s + left_s / 2)
        end_s = math.inf if left_s is None else now_s + left_s
        while not self.views and time.monotonic() < end_s:
            pending = [(one, reading) for one, reading in readings if not reading.done()]
            if not pending:
                return
            wait_for(pending[:1], min(end_s, time.monotonic() + self.patience_s / 4))

    def polled(self) -> list[Polled]:
        """Return the states that a lookup polls: the logs, the indexes that are not open, and the list of a prefix."""
        return [*self.views, *self._unopened.values(), *([self] if self.is_listed else [])]

    def problem(self) -> TieredIndexError | None:
        """Return the error of an index that is not open; None: there is none."""
        return next((error for one in list(self._unopened.values()) if (error := one.problem) is not None), None)

    def problems(self, begun_s: float) -> list[Handle]:
        """Return a failing file for each index that is not open, or for a list that could not be read."""
        openings = list(self._unopened.values())
        files = [file for opening in openings for file in unread(opening.problem, source=opening.name)]
        if self.is_listed:
            files += self._problem(begun_s, self._refreshed_s, self._error, f"the list of indexes below {self.name}")
        return files

    # Lookups

    def search_all(
        self,
        begun_s: float,
        budget: LookupBudget,
        take: Take,
        make_run: Callable[..., LookupRun],
        search: Callable[[LookupRun], Pass[ScanT]],
    ) -> list[Pass[ScanT]]:
        """Return the pass of `search` over each index. All are searched side by side, each in a thread.

        The pass of an index that is away or late has one file, which fails; so does that of those that are not open.
        `make_run` gets the fields of `LookupRun` that differ between indexes. Raises the first error of a search.
        """
        # before the views, so that an index is in at least one of both
        unopened = self.problems(begun_s)
        views, end_s = self.views, active_context().deadline_s
        searching: list[tuple[IndexView, Future[Pass[ScanT]]]] = []
        passes: dict[IndexView, Pass[ScanT]] = {}
        for view in views:
            run = make_run(partial(take, view, begun_s), **_of_view(view))
            if view.away is None:
                try:
                    searching.append((view, view.begin_search(self._threads, partial(run.run, search))))
                except NoThread:
                    passes[view] = run.run(search)
        late = True
        try:
            late = bool(wait_for(searching, None if end_s is None else end_s + _GRACE_S))
            # also those whose requests hang after their searches have ended at the deadline
            for view in () if end_s is None else views:
                if view.is_silent and view.away is None:
                    view.leave()
        finally:
            if late:
                # those that are late send no further requests for this lookup
                budget.usage.cancel()
        for view, searched in searching:
            if searched.done():
                passes[view] = searched.result()
        for view in views:
            if view not in passes:
                error = view.away or BudgetExceeded(f"timeout_s was reached before {view.name} answered")
                files = view.without_files(error)
                passes[view] = make_run(partial(contextlib.nullcontext, files), **_of_view(view)).run(search)
        found = [passes[view] for view in views]
        if unopened:
            files = Files(lambda *_: unopened)
            found.append(make_run(partial(contextlib.nullcontext, files), searches=views[0].searches).run(search))
        return found

    # Indexes that appear

    def _read(self, *, is_due: bool) -> None:
        begun_s = self._clock.monotonic_s()
        self._add(list(self._openings()))
        self._refreshed_from(begun_s)

    def is_due(self, begun_s: float) -> bool:
        """As `Polled`."""
        if super().is_due(begun_s):
            return True
        # an index that can't be opened may have been removed
        openings = list(self._unopened.values())
        return begun_s > self._refreshed_s and any(one.fails(begun_s) and one.away is None for one in openings)

    def _add(self, found: Sequence[tuple[str, Callable[[], IndexView | None]]]) -> None:
        """Note the indexes that are listed now, and forget those that are neither listed nor open."""
        with self._changing:
            self._unopened = {
                uri: self._unopened.get(uri) or Opening(uri, *self._of_each, open_view, self._adopt)
                for uri, open_view in found
                if uri not in self._opened
            }

    def _adopt(self, uri: str, view: IndexView) -> None:
        """Include an index from now on. Raises `SchemaMismatch`, `ConfigError`."""
        try:
            with self._changing:
                self._check_open()
                opened = {**self._opened, uri: view}
                if self._is_started:
                    common_schema(tuple(opened.values()))
                    if any(view.number == other.number for other in self.views):
                        raise ConfigError(
                            f"{view.storage.uri} has the same id as an index beside it, so it is a copy: remove one"
                        )
                    self._grown(tuple(opened.values()))
                    self._check_open()
                self._show(opened)
                self._unopened = {name: one for name, one in self._unopened.items() if name != uri}
        except BaseException:
            view.close()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise IndexClosed("the reader was closed while an index was opened")

    def _show(self, opened: dict[str, IndexView]) -> None:
        self._opened = opened
        self.views = tuple(opened.values())

    def close(self, until_s: float | None = None) -> Sequence[IndexView]:
        """Refuse further indexes and searches, and return those to close. `until_s`: see `DaemonPool.close`."""
        self._is_closed = True
        self._threads.close(until_s)
        return self.views


def _of_view(view: IndexView) -> dict[str, Any]:
    """Return the fields of the `LookupRun` of an index."""
    return {"searches": view.searches, "source": view.name, "number": view.number}


def common_schema(views: Sequence[IndexView]) -> Schema:
    """Return the schema of all indexes. Raises `SchemaMismatch`."""
    first = views[0]
    for view in views[1:]:
        if view.schema != first.schema:
            raise SchemaMismatch(
                f"{view.storage.uri} stores {view.schema.name} entries, {first.storage.uri} {first.schema.name}"
            )
    return first.schema
