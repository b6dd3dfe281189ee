"""Several indexes that are read as one: a fan-out to one reader an index.

A lookup asks all indexes side by side, each in a thread: the index is opened or its log is read if that is due (see
`poller`), and then its files are searched. One that does not respond within `source_timeout_s` is given up until a
later read succeeds; the others answer meanwhile. An index that can't be opened fails lookups until it is open, except a
folder that the user may not read (`FolderDenied`): that is only named. A prefix is listed as often as logs are read.
Threads: every method from any thread.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from tiered_index.base.call import Call, active_context, remaining_s
from tiered_index.base.clock import Clock
from tiered_index.base.locks import call_lock
from tiered_index.base.threads import DaemonPool, NoThread, PoolFuture, have_ended
from tiered_index.config import IndexConfig
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    IndexClosed,
    InvalidArgument,
    SchemaMismatch,
    StorageError,
    TieredIndexError,
)
from tiered_index.format.schema import Schema
from tiered_index.service.read.answers.budget import LookupBudget
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.service.read.index_view import IndexView
from tiered_index.service.read.parts import ReaderParts, ended
from tiered_index.service.read.poller import PolledState, Read, unread
from tiered_index.service.read.scan import LookupFiles, LookupRun, Pass, ScanT

# a search ends by itself at the deadline; it is late after this time more
_GRACE_S = 0.1
T = TypeVar("T")
Take = Callable[[IndexView, float, Call], contextlib.AbstractContextManager[LookupFiles]]
"""Takes the snapshot of an index for the call of a lookup that began at a time."""
Listed = Iterable[tuple[str, Callable[[Callable[[IndexView], None]], IndexView]]]
"""The URIs of indexes, each with a function that makes its view, not open yet, with its `adopt`."""


class Listing(PolledState):
    """The list of the folders below a prefix. `show` reads it."""

    def __init__(
        self, name: str, config: IndexConfig, clock: Clock, parts: ReaderParts, show: Callable[[], None]
    ) -> None:
        super().__init__(name, config, clock, parts, config.source_timeout_s)
        self._show = show

    def _read(self, *, is_due: bool) -> None:
        begun_s = self._clock.monotonic_s()
        self._show()
        self._refreshed_from(begun_s)

    def problems(self, begun_s: float) -> list[Handle]:
        """Return a failing file if the list could not be read, or not in time."""
        return self._problem(begun_s, self._refreshed_s, self._error, f"the list of indexes below {self.name}")


class Several:
    """The indexes of one reader, which `listed` finds. `name` is that of the list or prefix, for errors.

    If it `is_prefix`, it is listed again: more may appear later. `grown` gets all open views before lookups see the
    files of a new one.
    """

    def __init__(
        self,
        name: str,
        config: IndexConfig,
        clock: Clock,
        parts: ReaderParts,
        listed: Callable[[], Listed],
        grown: Callable[[Sequence[IndexView]], None],
        *,
        is_prefix: bool,
    ) -> None:
        self.name, self._clock, self._parts = name, clock, parts
        self._listed, self._grown = listed, grown
        self.listing = Listing(name, config, clock, parts, self._list) if is_prefix else None
        # of searches; other threads replace those of an index that does not respond
        self._threads = DaemonPool(config.query_threads, "tiered-index-search")
        # by the URI as it was given or listed
        self._indexes: dict[str, IndexView] = {}
        # those that are or were open
        self._adopted: set[IndexView] = set()
        self._changing = call_lock()
        self._is_started = self._is_closed = False

    @property
    def views(self) -> tuple[IndexView, ...]:
        """The indexes that are open."""
        return tuple([view for view in self.indexes if view in self._adopted])

    @property
    def indexes(self) -> list[IndexView]:
        """All indexes, also those that are not open."""
        return list(self._indexes.values())

    def open(self) -> None:
        """Open all that respond. If one does, the others are opened later.

        Raises the first error if none can be opened, and any error that another try can't mend.
        """
        self._parts.in_time([(f"listing the objects below {self.name}", self._list)])
        now_s = self._clock.monotonic_s()
        due = [(view, view.begin_due(now_s, active_context(), is_timed=False)) for view in self.indexes]
        readings = [(view, started[0]) for view, started in due if started is not None]
        self._wait_for_first([reading for _, reading in readings])
        for _, reading in readings:
            if reading.done() and not reading.is_given_up:
                reading.result()
        ended = [view.unopened for view, _ in readings if view.under_way is None]
        left = [view.name for view, _ in readings if view.under_way is not None]
        has_open = bool(self.views)
        for error in ended:
            if error is not None and not (has_open and isinstance(error, StorageError | CorruptFile)):
                raise error
        if not has_open and left:
            raise BudgetExceeded(f"timeout_s was reached while opening {left[0]}: its log was not read by then")

    def start(self) -> None:
        """Let lookups read the open indexes. Raises `SchemaMismatch`, `InvalidArgument` for an index given twice."""
        with self._changing:
            views = self.views
            common_schema(views)
            if len({view.index_id for view in views}) < len(views):
                raise InvalidArgument(
                    "the same index is given twice, give it once: " + ", ".join(view.storage.uri for view in views)
                )
            self._grown(views)
            self._is_started = True

    def _wait_for_first(self, readings: Sequence[Read]) -> None:
        """Wait for all openings that get responses, for half of the time left; then until one is open."""
        left_s, now_s = remaining_s(), time.monotonic()
        have_ended(readings, None if left_s is None else left_s / 2)
        end_s = math.inf if left_s is None else now_s + left_s
        while not self.views and time.monotonic() < end_s:
            opening = [reading for view in self.indexes if (reading := view.under_way) is not None]
            if not opening:
                return
            have_ended(opening[:1], min(end_s - time.monotonic(), _GRACE_S))

    def problem(self) -> TieredIndexError | None:
        """Return the error of an index that is not open; None: there is none."""
        return next((error for view in self.indexes if (error := view.unopened) is not None), None)

    def problems(self, begun_s: float) -> list[Handle]:
        """Return a failing file for each index that is not open, or for a list that could not be read."""
        files = [file for view in self.indexes for file in unread(view.unopened)]
        return files if self.listing is None else files + self.listing.problems(begun_s)

    # Lookups

    def files_now(self, begun_s: float) -> dict[str, LookupFiles] | None:
        """Return the present files of each index, by URI, as `IndexView.files_now`; None: a lookup needs more."""
        if (listing := self.listing) is not None and (listing.is_due(begun_s) or listing.problems(begun_s)):
            return None
        files_of = {}
        for view in self._indexes.values():
            if view.is_open:
                if (files := view.files_now(begun_s)) is None:
                    return None
                files_of[view.name] = files
            elif view.is_due(begun_s) or view.unopened is not None:
                return None
        return files_of

    def search_all(
        self,
        begun_s: float,
        budget: LookupBudget,
        take: Take,
        make_run: Callable[..., LookupRun],
        search: Callable[[LookupRun], Pass[ScanT]],
    ) -> list[Pass[ScanT]]:
        """Return the pass of `search` over each index. All are asked side by side, each in a thread.

        The pass of an index that does not respond, is late or not open has one file, which fails. `make_run` gets the
        fields of `LookupRun` that differ between indexes. Raises the first error of a search.

        It is long because one idea is in one place: begin, wait, cancel what is late, and collect in order.
        """

        def of_view(view: IndexView) -> Call:
            # the view tells by its usage whether a storage responds
            return budget.call.counting(view.usage)

        def searched(
            view: IndexView, taken: Callable[[], contextlib.AbstractContextManager[LookupFiles]]
        ) -> Pass[ScanT]:
            return make_run(taken, call=of_view(view), searches=view.searches, source=view.name).run(search)

        def failing(view: IndexView, error: TieredIndexError) -> Pass[ScanT]:
            files = view.without_files(error)
            return searched(view, lambda: contextlib.nullcontext(files))

        def ask(view: IndexView) -> Pass[ScanT] | None:
            """Open or refresh an index, then search it. None: the folder has no index."""
            call = of_view(view)
            view.newest(begun_s, call)
            if (error := view.unresponsive or view.unopened) is not None:
                return failing(view, error)
            return searched(view, partial(take, view, begun_s, call)) if view.is_open else None

        end_s, is_late = budget.deadline_s, False
        searches: dict[IndexView, PoolFuture[Pass[ScanT] | None]] = {}
        passes: dict[IndexView, Pass[ScanT] | None] = {}
        try:
            # twice, because a prefix may have more indexes than before
            for _ in range(2):
                asking: list[PoolFuture[Any]] = []
                if self.listing is not None and self.listing.is_due(begun_s):
                    asking.append(self._begin(self.listing, partial(self.listing.newest, begun_s, budget.call)))
                for view in [view for view in self.indexes if view not in searches and view not in passes]:
                    is_needed, error = _needs(view, begun_s)
                    if error is not None:
                        passes[view] = failing(view, error)
                    elif is_needed:
                        searches[view] = self._begin(view, partial(ask, view))
                        asking.append(searches[view])
                left_s = None if end_s is None else max(0.0, end_s + _GRACE_S - time.monotonic())
                is_late |= not have_ended(asking, left_s) or any(search.is_given_up for search in asking)
                if self.listing is None:
                    break
        except BaseException:
            is_late = True
            raise
        finally:
            if is_late:
                # those that are late send no further requests for this lookup
                budget.cancellation.set()
        for view, search_of_it in searches.items():
            if search_of_it.done() and not search_of_it.is_given_up:
                passes[view] = search_of_it.result()
            else:
                late = BudgetExceeded(f"timeout_s was reached before {view.name} answered")
                passes[view] = failing(view, view.unresponsive or view.unopened or late)
        in_order = [view_pass for view in self.indexes if (view_pass := passes.get(view)) is not None]
        if self.listing is not None and (problems := self.listing.problems(begun_s)):
            taken = partial(contextlib.nullcontext, LookupFiles(lambda *_: problems))
            in_order.append(make_run(taken, call=budget.call, searches=self.views[0].searches).run(search))
        return in_order

    def _begin(self, state: PolledState, call: Callable[[], T]) -> PoolFuture[T]:
        try:
            return state.begin_search(self._threads, call)
        except NoThread:
            return ended(call)

    # Indexes that appear

    def _list(self) -> None:
        """Note the indexes that are listed now, and forget those that are neither listed nor open."""
        children = list(self._listed())
        if twice := [uri for uri, count in Counter(uri for uri, _ in children).items() if count > 1]:
            raise InvalidArgument("the same index is given twice: " + ", ".join(twice))
        with self._changing:
            opened = {uri: view for uri, view in self._indexes.items() if view in self._adopted}
            listed = {uri: self._indexes.get(uri) or make(partial(self._adopt, uri)) for uri, make in children}
            self._indexes = opened | listed

    def _adopt(self, uri: str, view: IndexView) -> None:
        """Include an index that is about to be open. Raises `SchemaMismatch`, `ConfigError`."""
        with self._changing:
            self._check_open()
            views = [*self.views, view]
            if self._is_started:
                common_schema(views)
                if len({view.index_id for view in views}) < len(views):
                    raise ConfigError(
                        f"{view.storage.uri} has the same id as an index beside it, so it is a copy: remove one"
                    )
                self._grown(views)
                self._check_open()
            self._adopted.add(view)
            self._indexes = {**self._indexes, uri: view}

    def _check_open(self) -> None:
        if self._is_closed:
            raise IndexClosed("the reader was closed while an index was opened")

    def close(self, until_s: float | None = None) -> Sequence[IndexView]:
        """Refuse further indexes and searches, and return those to close. `until_s`: see `DaemonPool.close`."""
        self._is_closed = True
        self._threads.close(until_s)
        if self.listing is not None:
            self.listing.stop()
        return self.indexes


def _needs(view: IndexView, begun_s: float) -> tuple[bool, TieredIndexError | None]:
    """Return whether a lookup that began at `begun_s` asks an index, and why it fails without being asked."""
    is_due = view.is_due(begun_s)
    return is_due or view.is_open, view.unresponsive or (None if is_due else view.unopened)


def common_schema(views: Sequence[IndexView]) -> Schema:
    """Return the schema of all indexes. Raises `SchemaMismatch`."""
    first = views[0]
    for view in views[1:]:
        if view.schema != first.schema:
            raise SchemaMismatch(
                f"{view.storage.uri} stores {view.schema.name} entries, {first.storage.uri} {first.schema.name}"
            )
    return first.schema
