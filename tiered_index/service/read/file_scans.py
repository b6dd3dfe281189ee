"""Scans: what one pass over the files of an index has found so far, for lookups or for the stats of topics.

A view or `scan` gives each file to it. Threads: a scan belongs to one lookup, whose threads look at its files.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TypeAlias

from tiered_index.base.call import Call
from tiered_index.errors import TieredIndexError
from tiered_index.format.metadata import NamedStats
from tiered_index.format.schema import Schema
from tiered_index.service.log.expired import NOTHING as NOTHING_EXPIRED
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.hidden import HiddenTable
from tiered_index.service.read.answers.batch import Damage, LookupBatch, MatchAccumulator
from tiered_index.service.read.answers.budget import NOTHING, RequestStats
from tiered_index.service.read.answers.replaced_rows import ReplacedRows
from tiered_index.service.read.answers.rows import check_schema
from tiered_index.service.read.files.cold_path import MissingObject
from tiered_index.service.read.files.file_view import Found, Noted, Rest, Why
from tiered_index.service.read.files.snapshot import Handle
from tiered_index.types import FileReport

FileNote: TypeAlias = "partial[FileReport]"
"""Makes the report of one file when it is called."""


@dataclass(slots=True, kw_only=True)
class Scan(ABC):
    """One pass over the files of an index for a lookup.

    - `newest` is the last second that an answer may have, if answers skip files.
    - `can_skip` returns whether a file with this greatest second can no longer change the answer.
    - `missing` returns the number of answers that are missing before files can be skipped; 0: files are never skipped.
    - `outdated` has the reports of earlier passes of the lookup.
    - `viewed` has the notes of the files that a view has searched. `why`: by file, why the core did not search it.
    """

    newest: int = 0
    can_skip: Callable[[int], bool] = lambda _: False
    missing: Callable[[], int] = lambda: 0
    notes: list[FileNote] = field(default_factory=list)
    errors: list[tuple[FileReport, TieredIndexError]] = field(default_factory=list)
    outdated: Sequence[FileReport] = ()
    viewed: Noted | None = None
    why: Mapping[str, Why] = field(default_factory=dict)
    stop: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    # receives each search that ends in another thread
    done: queue.SimpleQueue[Future[None]] | None = None

    @abstractmethod
    def look(self, handle: Handle, call: Call) -> int:
        """Search a file, keep its rows and return their number. Its requests are those of `call`."""

    def excludes(self, handle: Handle) -> str | None:
        """Return the reason why a file needs no search; None: it needs one."""
        return None

    def note(
        self,
        handle: Handle,
        outcome: str,
        place: str,
        started: float | None = None,
        matched: int = 0,
        spent: RequestStats = NOTHING,
        error: TieredIndexError | None = None,
    ) -> None:
        """Note the outcome of a file, and its error."""
        note = partial(
            FileReport,
            file=handle.file_id,
            place=place,
            outcome=outcome,
            begin_ms=handle.second_min * 1000,
            end_ms=handle.second_max * 1000,
            requests=spent.requests,
            bytes=spent.bytes,
            gap_bytes=spent.gap_bytes,
            cost_usd=spent.cost_usd,
            elapsed_ms=(time.perf_counter() - started) * 1000 if started is not None else 0.0,
            matched=matched,
            error=None if error is None else str(error),
            not_in_core=self.why.get(handle.file_id) if outcome in ("read", "failed") else None,
        )
        self.notes.append(note)
        if error is not None:
            self.errors.append((note(), error))


@dataclass(slots=True)
class LookupScan(Scan):
    """The pass of a batch for rows of `schema`. If it is of one lookup, its answers skip files.

    - `hidden`: the hidden entries of the index (None: none is). `replaced` gets the replaced ones that match.
    - `rest`: by file, what a view has left to a search.
    - `lacking`: by file, the lookups that need its unreadable parts.
    """

    schema: Schema
    batch: LookupBatch
    _: KW_ONLY
    hidden: HiddenTable | None = None
    rest: Mapping[str, Rest] = field(default_factory=dict)
    lacking: dict[str, set[int]] = field(default_factory=dict)
    answers: MatchAccumulator = field(init=False)
    replaced: ReplacedRows = field(init=False)

    def __post_init__(self) -> None:
        self.answers = MatchAccumulator(self.batch, self.schema, self.batch.is_one)
        self.replaced = ReplacedRows(self.schema, self.answers.page_ends)
        self.can_skip = self.answers.can_skip
        self.missing = self.answers.missing
        if self.batch.is_one:
            self.newest = int(self.batch.second_max[0])

    def take(self, viewed: Found) -> None:
        """Take the rows and the notes of a view."""
        self.viewed, self.rest = viewed.noted, {rest.handle.file_id: rest for rest in viewed.rest}
        self.why = {rest.handle.file_id: rest.why for rest in viewed.rest}
        for page in viewed.retired:
            self.replaced.add(*page)
        for matches in viewed.matches:
            self.answers.add(matches)
        self.answers.skipped = viewed.skipped

    def look(self, handle: Handle, call: Call) -> int:
        """See `Scan.look`."""
        batch, damage = self.batch, list[Damage]()
        rest = self.rest.get(handle.file_id)
        some, matched = (None, 0) if rest is None else rest[2:]
        needed_batch = batch if some is None else batch.only(some)
        for of_rule in needed_batch.under(handle.hash):
            # by the searched hash, because those of both rules may be erased at different times
            under_rule = of_rule.hiding(self.hidden, self.replaced)
            matches = handle.search(under_rule, call)
            if len(matches.rows):
                check_schema(matches.rows, self.schema, handle.file_id)
                if under_rule.key_hash is not batch.key_hash:
                    matches.rows["key_hash"] = batch.key_hash[matches.lookups]
                if self.schema.keyed and under_rule.fingerprint is not batch.fingerprint:
                    matches.rows["fingerprint"] = batch.fingerprint[matches.lookups]
                self.answers.add(matches)
            matched += len(matches.rows)
            damage += matches.damage
        if damage:
            self.lacking[handle.file_id] = {at for places, _ in damage for at in places.tolist()}
            # a missing object first, because the log has to be read for it
            raise min([error for _, error in damage], key=lambda error: not isinstance(error, MissingObject))
        return matched

    def excludes(self, handle: Handle) -> str | None:
        """See `Scan.excludes`."""
        rest = self.rest.get(handle.file_id)
        # a view has tested the filter for the others
        some = None if rest is None else rest.lookups
        first, *more = (self.batch if some is None else self.batch.only(some)).under(handle.hash)
        reason = handle.excludes(first)
        return reason if not more or all(map(handle.excludes, more)) else None


@dataclass(slots=True)
class StatsScan(Scan):
    """The pass that collects each file's stats of topics in inclusive epoch seconds, without what `expired` hides."""

    second_min: int
    second_max: int
    expired: Expired = NOTHING_EXPIRED
    stats: list[tuple[Handle, NamedStats]] = field(default_factory=list)

    def look(self, handle: Handle, call: Call) -> int:
        """See `Scan.look`."""
        stats = [
            (name, topic_stats)
            for name, topic_stats in handle.topic_stats(call)
            if topic_stats.second_max >= max(self.second_min, self.expired.hidden_of(name).begin_s)
            and topic_stats.second_min <= self.second_max
        ]
        self.stats.append((handle, stats))
        return len({name for name, _ in stats})
