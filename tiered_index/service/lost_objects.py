"""Objects that the log names and the storage doesn't have: what that means for a lookup.

A later record may have removed them, or the storage lost them. One pass over the files finds all that it misses; then the log is read on,
once for each storage. Where it still names all of them the pass stands, and they are what could not be read. Where it doesn't, the lookup
is begun again over the files that there are now; what the passes before have cost stays on its account, file by file.
Threads: one lookup's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError, StorageUnavailable, TieredIndexError
from tiered_index.service.catalog import Catalog
from tiered_index.service.cold.path import MissingObject
from tiered_index.service.log_records import LogState
from tiered_index.service.scan import Scan
from tiered_index.types import FileReport

__all__ = ["LOG_RETRIES", "Lost", "past_lost_objects"]

LOG_RETRIES = 100
"""How often a lookup is begun again because objects vanish; each time the log has moved on."""
T = TypeVar("T")


class _MovedOn(Exception):
    """Internal: the log doesn't name an object any more that a pass over the files has missed."""


class Lost:
    """What one lookup knows of objects that are not there, and of its passes that were given up.

    `read_log` reads on the log of a storage, by its URI; without it the first object that is missing is the lookup's error.
    """

    def __init__(self, read_log: Callable[[str], LogState] | None = None, *, allow_partial: bool = False) -> None:
        self._read_log = read_log
        self._allow_partial = allow_partial
        self._known: dict[tuple[str, str], TieredIndexError] = {}
        self._scans: list[Scan] = []
        self._outdated: list[FileReport] = []
        self._told = False

    def note(self, scan: Scan) -> None:
        """Remember a scan that is about to begin, for what it costs should it be in vain."""
        self._scans.append(scan)

    def settle(self, scan: Scan) -> None:
        """Put in place of each object that a scan has missed what that means.

        Where the lookup can't afford to read the log, the object's file is one that its budget did not reach for. Raises `CorruptFile`
        where one is lost and partial answers are not allowed, and what keeps the log from being read.
        """
        if self._outdated and not self._told:
            self._told, scan.outdated = True, self._outdated
        unknown: dict[str, list[MissingObject]] = {}
        for _, error in scan.errors:
            if isinstance(error, MissingObject) and (error.uri, error.name) not in self._known:
                unknown.setdefault(error.uri, []).append(error)
        moved_on = [uri for uri, errors in unknown.items() if self._look_up(uri, errors)]
        if moved_on:
            raise _MovedOn(moved_on[0])
        for number, (report, error) in enumerate(scan.errors):
            if isinstance(error, MissingObject):
                meant = self._known[error.uri, error.name]
                scan.errors[number] = (replace(report, error=str(meant)), meant)

    def _look_up(self, uri: str, missing: Sequence[MissingObject]) -> bool:
        """Find out what it means that objects of a storage are not there; return whether the log has removed any."""
        if self._read_log is None:
            raise missing[0]
        meant: TieredIndexError | None = None
        try:
            state = self._read_log(uri)
        except BudgetExceeded as spent:
            meant = spent
        except (StorageError, CorruptFile) as unread:
            if not self._allow_partial:
                raise
            meant = unread  # nobody knows what became of it
        if meant is not None:
            self._known |= {(uri, error.name): meant for error in missing}
            return False
        lost = [error for error in missing if error.name in state.objects]
        if lost and not self._allow_partial:
            raise CorruptFile(lost[0].name, "the log names this object, but the storage does not have it") from lost[0]
        self._known |= {(uri, error.name): error for error in lost}
        return len(lost) < len(missing)

    def begin_again(self) -> None:
        """Give up what was scanned since the last time."""
        reports = [report for scan in self._scans for report in scan.reports if report.requests]
        self._outdated += [replace(report, outcome="outdated", matched=0) for report in reports]
        self._scans = []
        self._told = False


def past_lost_objects(
    catalogs: Sequence[Catalog],
    read_log: Callable[[str], LogState],
    allow_partial: bool,
    ask_engine: Callable[[Lost], T],
) -> T:
    """Return what `ask_engine` answers; where the log has removed an object, the lookup is begun again, a bounded number of times.

    `read_log` reads on the log of a storage, by its URI, and shows it in its catalog. Raises as `Lost.settle`.
    """
    lost = Lost(read_log, allow_partial=allow_partial)
    uri = ""
    for _ in range(LOG_RETRIES):
        try:
            with catalogs[0].reading() if len(catalogs) == 1 else _reading(catalogs):
                return ask_engine(lost)
        except _MovedOn as moved_on:
            uri = str(moved_on)
            lost.begin_again()
    raise StorageUnavailable(f"{uri}: objects kept vanishing during {LOG_RETRIES} tries of one lookup; try again")


@contextlib.contextmanager
def _reading(catalogs: Sequence[Catalog]) -> Iterator[None]:
    with contextlib.ExitStack() as reading:
        for catalog in catalogs:
            reading.enter_context(catalog.reading())
        yield
