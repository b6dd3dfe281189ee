"""What a missing object means to a lookup: removed by a later record of the log, or lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError, StorageUnavailable, TieredIndexError
from tiered_index.service.catalog.catalog import Catalog
from tiered_index.service.cold.path import MissingObject, lost_error
from tiered_index.service.log.state import LogState
from tiered_index.service.lookup.scan import Scan
from tiered_index.types import FileReport

LOG_RETRIES = 100
"""How often a lookup starts again because objects vanish; each time the log has moved on."""
T = TypeVar("T")


class _MovedOn(Exception):
    """Internal: the log no longer names an object that a pass over the files has missed."""


@dataclass(eq=False)
class MissingObjects:
    """What one lookup knows of missing objects, and its passes that were given up. Threads: one lookup's. A later
    record may have removed a missing object, or the storage lost it. Missing objects are resolved once per pass: the
    log is read on, once per storage. Where it still names all of them, the pass stands and they are what could not be
    read; else the lookup starts again over the present files, and reports what the earlier passes cost.
    """

    read_log: Callable[[str], LogState]  # reads on the log of a storage, by its URI, and applies it to its catalog
    allow_partial: bool
    _known: dict[tuple[str, str], TieredIndexError] = field(default_factory=dict)
    _scans: list[Scan] = field(default_factory=list)
    _outdated: list[FileReport] = field(default_factory=list)
    _reported: bool = False

    def run(self, catalogs: Sequence[Catalog], answer: Callable[[MissingObjects], T]) -> T:
        """Return what `answer` returns; where the log has removed an object it starts again. Raises as `resolve`."""
        uri = ""
        for _ in range(LOG_RETRIES):
            try:
                with catalogs[0].reading() if len(catalogs) == 1 else _reading(catalogs):
                    return answer(self)
            except _MovedOn as moved_on:
                uri = str(moved_on)
                reports = [report for scan in self._scans for report in scan.reports if report.requests]
                self._outdated += [replace(report, outcome="outdated", matched=0) for report in reports]
                self._scans = []
                self._reported = False
        raise StorageUnavailable(f"{uri}: objects kept vanishing during {LOG_RETRIES} tries of one lookup; try again")

    def begin(self, scan: Scan) -> None:
        """Remember a pass that begins, for what it costs should it be given up."""
        self._scans.append(scan)

    def resolve(self, scan: Scan) -> None:
        """Replace the error of each missing object by what that means. Raises `CorruptFile`, as reading the log."""
        if self._outdated and not self._reported:
            self._reported, scan.outdated = True, self._outdated
        unknown: dict[str, list[MissingObject]] = {}
        for _, error in scan.errors:
            if isinstance(error, MissingObject) and (error.uri, error.name) not in self._known:
                unknown.setdefault(error.uri, []).append(error)
        moved_on = [uri for uri, errors in unknown.items() if self._were_removed(uri, errors)]
        if moved_on:
            raise _MovedOn(moved_on[0])
        for number, (report, error) in enumerate(scan.errors):
            if isinstance(error, MissingObject):
                meant = self._known[error.uri, error.name]
                scan.errors[number] = (replace(report, error=str(meant)), meant)

    def _were_removed(self, uri: str, missing: Sequence[MissingObject]) -> bool:
        """Read the log on; return whether it has removed any of a storage's missing objects, and note the others."""
        meant: TieredIndexError | None = None
        try:
            state = self.read_log(uri)
        except BudgetExceeded as spent:
            meant = spent
        except (StorageError, CorruptFile) as unread:
            if not self.allow_partial:
                raise
            meant = unread  # nobody knows what became of it
        if meant is not None:
            self._known |= {(uri, error.name): meant for error in missing}
            return False
        lost = [error for error in missing if error.name in state.objects]
        if lost and not self.allow_partial:
            raise lost_error(lost[0].name) from lost[0]
        self._known |= {(uri, error.name): error for error in lost}
        return len(lost) < len(missing)


@contextlib.contextmanager
def _reading(catalogs: Sequence[Catalog]) -> Iterator[None]:
    with contextlib.ExitStack() as reading:
        for catalog in catalogs:
            reading.enter_context(catalog.reading())
        yield
