"""The search in one compacted file or shard, local or in a storage, for a batch of lookups.

Only the runs that may have a key are read, each once. Each is checked against its CRC32 before its items are used. A
giant slot is read newest blocks first, twice as many in each round. It ends when each lookup has `max_count` + 1
answers and no unread block can have a newer one. The compiled core chooses slot groups and picks rows; without it, or
where it declines, NumPy does. Threads: any; answers are copies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile
from tiered_index.format.metadata import Metadata
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.read.answers.batch import NEVER, LookupBatch, MatchAccumulator, Matches, in_core, matching
from tiered_index.service.read.answers.rows import Array

Int64 = npt.NDArray[np.int64]
# bytes of slot groups of a batch in memory at a time; unpacked, packed ones are about three times as large
_WINDOW_BYTES = 16 << 20
_MOST_ROUNDS = 20
# more entries than a slot can have
_MOST_ENTRIES = 1 << 40
# the first and the last place of one group of one lookup
_OF_ONE = np.array([0, 1])


class FileBytes(Protocol):
    """The verified bytes of a file."""

    file: str

    def trailer(self) -> Trailer: ...

    @property
    def gap_bytes(self) -> int:
        """Largest gap between two runs that are read as one range."""

    @property
    def words(self) -> npt.NDArray[np.uint64] | None:
        """The file as words, if it is in a memory map; then runs are unpacked without a copy. Otherwise None."""

    def verified(self, runs: Sequence[Run], damaged: dict[int, CorruptFile] | None = None) -> list[memoryview]:
        """Return each run's verified bytes, in the given order. Raises `CorruptFile`.

        If `damaged` is given, damaged runs are left out, and their errors are added to it by position.
        """


def read_items(source: FileBytes, runs: Sequence[Run]) -> Array:
    """Return the verified items of runs (structured, n). Raises `CorruptFile`, and the errors of reading."""
    return _unpacked(source, source.trailer().metadata, runs, source.verified(runs), None)


def scan_runs(
    source: FileBytes,
    runs: Iterable[Run],
    window_bytes: int,
    *,
    read: Callable[[FileBytes, Sequence[Run]], Array] = read_items,
) -> Iterator[tuple[Sequence[Run], Array]]:
    """Yield windows of runs, by position, each with the result of `read`: their verified items (structured, n)."""
    for window in _windows(runs, window_bytes):
        yield window, read(source, window)


def _windows(runs: Iterable[Run], window_bytes: int) -> Iterator[Sequence[Run]]:
    """Yield runs in their order, as many at a time as fit `window_bytes`."""
    window: list[Run] = []
    size = 0
    for run in runs:
        if window and size + run.length > window_bytes:
            yield window
            window, size = [], 0
        size += run.length
        window.append(run)
    if window:
        yield window


def _unpacked(
    source: FileBytes, metadata: Metadata, runs: Sequence[Run], pieces: Sequence[memoryview], ranks: Int64 | None
) -> Array:
    """Return the items of runs, given their bytes. `ranks`: see `Packing.unpack`."""
    words = source.words
    if metadata.packing is None:
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), metadata.layout.schema.item)
    counts = np.array([run.count for run in runs], np.int64)
    mapped = None if words is None else (words, np.array([run.offset for run in runs], np.int64))
    return metadata.packing.unpack(pieces, counts, source.file, ranks, mapped)[0]


def collected(parts: Iterable[Matches]) -> Matches:
    """Return the rows and the damage of `search_file` together."""
    filled = list(parts)
    if len(filled) == 1:
        return filled[0]
    damage = tuple([part_damage for part in filled for part_damage in part.damage])
    filled = [part for part in filled if len(part.rows)]
    if not filled:
        return Matches.lacking(*damage)
    rows = np.concatenate([part.rows.view(np.void) for part in filled]).view(filled[0].rows.dtype)
    return Matches(np.concatenate([part.lookups for part in filled]), rows, damage)


def search_file(source: FileBytes, batch: LookupBatch, away: npt.NDArray[np.bool_] | None = None) -> Iterator[Matches]:
    """Yield rows that answer each lookup except those `away` (bool, n), in any order, a bounded number at a time.

    They are at least the first `max_count` + 1 of each lookup. If the batch may be partial, the damage comes last.
    """
    if away is not None and away.all():
        return
    trailer = source.trailer()
    directory = trailer.directory
    search = _GroupSearch(source, trailer, batch)
    groups, lookups = search.chosen()
    if away is not None and away.any():
        here = ~away[lookups]
        groups, lookups = groups[here], lookups[here]
    if not len(groups):
        return
    giants: list[_GiantSlot] = []
    if len(directory.blocks) and (cut := directory.groups["blocks"][groups] > 0).any():
        for group in np.unique(groups[cut]).tolist():
            blocks = directory.blocks_of(group), lookups[groups == group]
            giants.append(_GiantSlot(*blocks[0], blocks[1], batch, ordered=trailer.metadata.in_answer_order))
        groups, lookups = groups[~cut], lookups[~cut]
    # the place of the first lookup of each group, and the end
    starts = _OF_ONE if len(groups) == 1 else np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
    runs = directory.runs_at(groups[starts[:-1]].tolist()) if len(groups) else []
    if giants:
        yield from _with_giants(search, _asking(runs, starts, lookups), giants)
    else:
        first = 0
        for window in _windows(runs, _WINDOW_BYTES):
            part = starts[first : first + len(window) + 1]
            part_lookups = lookups[part[0] : part[-1]]
            for matches in search.read(window, part - part[0], part_lookups):
                if len(matches.rows):
                    yield matches
            first += len(window)
    if search.lacking:
        offset, errors = next(iter(search.lacking)), search.damaged
        error = errors[offset] if offset in errors else next(iter(errors.values()))
        yield Matches.lacking((np.unique(np.concatenate([*search.lacking.values()])), error))


def _asking(runs: Sequence[Run], starts: Int64, lookups: Int64) -> dict[int, tuple[Run, Int64]]:
    """Return each run and its lookups, by position."""
    ends = itertools.pairwise(starts.tolist())
    return {run.offset: (run, lookups[start:stop]) for run, (start, stop) in zip(runs, ends, strict=True)}


class _GroupSearch:
    """Chooses the slot groups of one file for a batch, reads their runs, and picks the rows that answer lookups.

    By position of a damaged run, `damaged` has its error, and `lacking` the lookups that need it.
    """

    def __init__(self, source: FileBytes, trailer: Trailer, batch: LookupBatch) -> None:
        self._source, self._trailer, self.batch = source, trailer, batch
        self.gap_bytes, self.schema = source.gap_bytes, trailer.metadata.layout.schema
        self.damaged: dict[int, CorruptFile] = {}
        self.lacking: dict[int, Int64] = {}
        view = trailer.core_view()
        self._core: Any = None if view is None else in_core(view, batch, batch.key_hash, stored=True)

    def chosen(self) -> tuple[Int64, Int64]:
        """Return the slot groups (i64, m) that may answer lookups, and these (m), by group. No group is empty."""
        if self._core is not None:
            pairs = np.frombuffer(self._core.chosen(), np.int64)
            return pairs[::2], pairs[1::2]
        metadata, directory, batch = self._trailer.metadata, self._trailer.directory, self.batch
        lookups = np.flatnonzero(batch.within(metadata))
        slots = metadata.slot_map.slots_of(batch.key_hash[lookups])
        groups = directory.groups_of(slots, *(metadata.slot_range if metadata.is_shard else (0, metadata.layout.slots)))
        lookups, groups = lookups[groups >= 0], groups[groups >= 0]
        order = np.argsort(groups, kind="stable")
        return groups[order], lookups[order]

    def read(self, runs: Sequence[Run], starts: Int64, lookups: Int64) -> Iterator[Matches]:
        """Read runs; yield the rows of run m for `lookups` from `starts[m]` up to `starts[m + 1]`."""
        damaged: dict[int, CorruptFile] | None = {} if self.batch.allow_partial else None
        pieces = self._source.verified(runs, damaged)
        if damaged:
            asking = _asking(runs, starts, lookups)
            self._miss(damaged, asking)
            runs = [run for run in runs if run.offset not in damaged]
            if not runs:
                return
            lookups_of_runs = [asking[run.offset][1] for run in runs]
            starts, lookups = np.cumsum([0, *map(len, lookups_of_runs)]), np.concatenate(lookups_of_runs)
        matches = self._picked(runs, pieces, starts, lookups)
        if matches is not None:
            yield matches
            return
        try:
            yield self._matched(runs, pieces, lookups)
        except CorruptFile:
            if damaged is None:
                raise
            # a run matches its checksum but can't be unpacked: unpack run by run to find it
            for (run, run_lookups), piece in zip(_asking(runs, starts, lookups).values(), pieces, strict=True):
                try:
                    part = self._matched([run], [piece], run_lookups)
                except CorruptFile as error:
                    self._miss({run.offset: error}, {run.offset: (run, run_lookups)})
                else:
                    yield part

    def _miss(self, damaged: dict[int, CorruptFile], asking: dict[int, tuple[Run, Int64]]) -> None:
        self.damaged |= damaged
        self.lacking |= {offset: asking[offset][1] for offset in damaged}

    def _picked(self, runs: Sequence[Run], pieces: list[memoryview], starts: Int64, lookups: Int64) -> Matches | None:
        """Return the rows of runs by the compiled core; None: use NumPy."""
        if self._core is None:
            return None
        counts = np.array([run.count for run in runs], np.int64)
        picked = self._core.picked(pieces, counts, starts, np.ascontiguousarray(lookups))
        if picked is None:
            return None
        lookups_of_rows, rows, lookups_of_retired, retired = picked
        self.batch.note_retired(lookups_of_retired, retired, self.schema)
        return Matches(np.frombuffer(lookups_of_rows, np.int64), np.frombuffer(rows, self.schema.row))

    def _matched(self, runs: Sequence[Run], pieces: Sequence[memoryview], lookups: Int64) -> Matches:
        """Return the rows of runs by NumPy. Raises `CorruptFile` for a run that can't be unpacked."""
        metadata, batch = self._trailer.metadata, self.batch
        ranks = None if metadata.packing is None else metadata.packing.ranks_of(batch.key_hash[lookups])
        begin_s, pairs = metadata.begin_ms // 1000, batch.topic_pairs(metadata)

        def seconds_of(items: Array) -> Int64:
            return begin_s + items["time_diff_s"].astype(np.int64)

        items = _unpacked(self._source, metadata, runs, pieces, ranks)
        return matching(batch, items, seconds_of, pairs, self.schema, np.unique(lookups))


class _GiantSlot:
    """The search in one cut group: its `blocks` (rows of the directory, n), their runs, and its lookups (numbers)."""

    def __init__(self, blocks: Array, runs: list[Run], lookups: Int64, batch: LookupBatch, *, ordered: bool) -> None:
        self._batch, self._lookups, self._ordered = batch, lookups, ordered
        # by newest first, like all rows below
        order = np.arange(len(runs)) if ordered else np.argsort(-blocks["second_max"].astype(np.int64), kind="stable")
        hash_min, hash_max, second_min, second_max = (
            blocks[name][order, None].astype(np.int64) for name in ("hash_min", "hash_max", "second_min", "second_max")
        )
        self.runs = [runs[place] for place in order.tolist()]
        self._newest, self._counts = second_max, np.array([[run.count] for run in self.runs])
        if batch.after:
            # the page before may have all entries of a block that begins in its last second
            is_continued = np.isin(lookups, list(batch.after))
            self._counts = np.where((second_min == batch.second_max[lookups]) & is_continued, 0, self._counts)
        self._places = {run.offset: place for place, run in enumerate(self.runs)}
        hashes = batch.key_hash[lookups]
        # which lookups may have answers in each block (bool, blocks x lookups)
        self._needing = (hashes >= hash_min) & (hashes <= hash_max)
        self._needing &= (batch.second_min[lookups] <= second_max) & (batch.second_max[lookups] >= second_min)
        self._unread = np.ones((len(runs), 1), bool)
        self._damaged = np.zeros((len(runs), 1), bool)
        self._open = np.ones(len(lookups), bool)
        self._lost = ~self._open
        # the lookups for which a round chose each block
        self._short = self._needing
        self._round = 0

    @property
    def lacking(self) -> Int64:
        """The lookups whose page needs a damaged block. They are closed."""
        return self._lookups[self._lost]

    def next_runs(self) -> list[Run]:
        """Return the runs of the next round: for each open lookup enough blocks for its missing answers."""
        target = (np.minimum(self._batch.max_count[self._lookups], _MOST_ENTRIES) + 1) << self._round
        self._round = min(self._round + 1, _MOST_ROUNDS)
        needing = self._needing & self._unread & self._open
        promised = needing * self._counts
        self._short = needing & (promised.cumsum(axis=0) - promised < target)
        if not self._ordered:
            # no page ends within a second, so its blocks are read together
            oldest = np.where(self._short, self._newest, -NEVER - 1).min(axis=0, initial=-NEVER - 1)
            self._short |= needing & (self._newest >= oldest)
        self._give_up(np.logical_or.reduce(self._short & self._damaged))
        self._short &= self._open
        return self._chosen(self._short)

    def waiting(self) -> list[Run]:
        """Return the unread runs that an open lookup needs."""
        return self._chosen(self._needing & self._unread & self._open & ~self._damaged)

    def asking(self, run: Run) -> Int64:
        """Return the open lookups that need a block."""
        asking: Int64 = self._lookups[self._needing[self._places[run.offset]] & self._open]
        return asking

    def take(self, run: Run) -> None:
        """Note that a block was read."""
        self._unread[self._places[run.offset]] = False

    def miss(self, run: Run) -> None:
        """Note that a block is damaged. The lookups for which it was chosen get no page."""
        place = self._places[run.offset]
        self._damaged[place] = True
        self._give_up(self._short[place])

    def settle(self, matches: Matches) -> None:
        """Close the lookups that have enough rows. `matches` has their first rows so far (`OrderedRows.first`)."""
        last = self._batch.page_ends(self._lookups, matches)
        unread = self._needing & self._unread
        newest = np.where(unread, self._newest, NEVER).max(axis=0)
        # whether a block behind an unread one was read
        behind = (np.logical_or.accumulate(unread, axis=0) & self._needing & ~self._unread).any(axis=0)
        enough = (last > NEVER) & ((last > newest) | (self._ordered & ~behind))
        self._open &= unread.any(axis=0) & ~enough

    def _give_up(self, lost: npt.NDArray[np.bool_]) -> None:
        self._lost |= lost
        self._open &= ~self._lost

    def _chosen(self, wanted: npt.NDArray[np.bool_]) -> list[Run]:
        return [self.runs[place] for place in np.flatnonzero(wanted.any(axis=1)).tolist()]


def _with_giants(
    search: _GroupSearch, asking: dict[int, tuple[Run, Int64]], giants: Sequence[_GiantSlot]
) -> Iterator[Matches]:
    """Yield the rows of runs and of giant slots. Their runs are read together, by position."""
    gathered = MatchAccumulator(search.batch, search.schema)
    owners = {run.offset: giant for giant in giants for run in giant.runs}
    runs = [run for run, _ in asking.values()]
    done: list[int] = []
    while chosen := [*runs, *(run for giant in giants for run in giant.next_runs())]:
        waiting = [run for giant in giants for run in giant.waiting()]
        segments = list(_segments(chosen, waiting, done, search.gap_bytes))
        for window in itertools.chain.from_iterable(_windows(segment, _WINDOW_BYTES) for segment in segments):
            unexcluded = [
                owners[run.offset].asking(run) if run.offset in owners else asking[run.offset][1] for run in window
            ]
            for matches in search.read(window, np.cumsum([0, *map(len, unexcluded)]), np.concatenate(unexcluded)):
                gathered.add(matches)
            for run in window:
                if (giant := owners.get(run.offset)) is not None:
                    (giant.miss if run.offset in search.damaged else giant.take)(run)
        done = sorted([*done, *(run.offset for segment in segments for run in segment)])
        runs = []
        first = gathered.first()
        for giant in giants:
            giant.settle(first)
    if len((matches := gathered.matches()).rows):
        yield matches
    # a lookup needs only the blocks that were chosen for it
    search.lacking = {offset: lookups for offset, lookups in search.lacking.items() if offset not in owners}
    search.lacking |= {giant.runs[0].offset: giant.lacking for giant in giants if len(giant.lacking)}


def _segments(chosen: Sequence[Run], waiting: list[Run], done: list[int], gap_bytes: int) -> Iterator[list[Run]]:
    """Yield the chosen runs by position, cut where a range over two of them would read a run again.

    Waiting runs in a gap that is read anyway are included. `done` has the sorted positions of the runs read so far.
    """
    chosen = sorted(chosen, key=attrgetter("offset"))
    waiting = sorted(waiting, key=attrgetter("offset"))
    offsets = [run.offset for run in waiting]
    segment = chosen[:1]
    for before, after in itertools.pairwise(chosen):
        end = before.offset + before.length
        if after.offset - end <= gap_bytes:
            if bisect_left(done, after.offset) > bisect_left(done, end):
                yield segment
                segment = []
            else:
                segment += waiting[bisect_left(offsets, end) : bisect_left(offsets, after.offset)]
        segment.append(after)
    yield segment
