"""The search in one compacted file or shard, local or in a storage.

Only the runs that may have a key are read. Each is checked against its CRC32 before its items are used. A giant slot is
read newest blocks first, twice as many in each round. It ends when each lookup has `max_count` + 1 answers and no
unread block can have a newer one. A batch reads a block once. Threads: any; answers are copies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile
from tiered_index.format.metadata import Metadata
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.answers.batch import NEVER, Damage, LookupBatch, MatchAccumulator, Matches, matching
from tiered_index.service.answers.rows import Array, PreparedLookup, concatenate, leading, select_items

# bytes of blocks of a giant slot in memory at a time
_BATCH_BYTES = 8 << 20
# bytes of slot groups of a batch in memory at a time; unpacked, packed ones are about three times as large
_WINDOW_BYTES = 16 << 20
_MOST_ROUNDS = 20
# more answers than a slot can have
_ALL = 1 << 40


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
    return read_asked(source, runs, None)[0]


def scan_runs(
    source: FileBytes,
    runs: Iterable[Run],
    window_bytes: int,
    *,
    gap_bytes: int = 0,
    read: Callable[[FileBytes, Sequence[Run]], Array] = read_items,
) -> Iterator[tuple[Sequence[Run], Array]]:
    """Yield windows of runs, by position, each with the result of `read`: their verified items (structured, n)."""
    for window in _windows(runs, window_bytes, gap_bytes):
        yield window, read(source, window)


def _windows(runs: Iterable[Run], window_bytes: int, gap_bytes: int = 0) -> Iterator[Sequence[Run]]:
    """Yield runs by position, as many at a time as fit `window_bytes` with the gaps that are read between them."""
    window: list[Run] = []
    size = end = 0
    for run in runs:
        gap = run.offset - end
        length = run.length + (gap if gap <= gap_bytes else 0)
        if window and size + length > window_bytes:
            yield window
            window = []
        size = size + length if window else run.length
        window.append(run)
        end = run.offset + run.length
    if window:
        yield window


def read_asked(
    source: FileBytes,
    runs: Sequence[Run],
    ranks: npt.NDArray[np.int64] | None,
    damaged: dict[int, CorruptFile] | None = None,
) -> tuple[Array, Iterable[int]]:
    """Return the verified items of runs, and the number of items of each run.

    `ranks` (of `Packing.ranks_of`): of packed runs only the items of these hashes, which is much faster. `damaged`: a
    damaged run has no items, and its error is added to `damaged` by position.
    """
    pieces = source.verified(runs, damaged)
    whole = runs
    if damaged and len(pieces) < len(runs):
        whole = [run for run in runs if run.offset not in damaged]
    try:
        items, counts = _unpacked(source, whole, pieces, ranks)
        if whole is runs:
            return items, counts
        found = dict(zip([run.offset for run in whole], counts.tolist(), strict=True))
    except CorruptFile:
        if damaged is None:
            raise
        # a run matches its checksum but can't be unpacked: unpack run by run to find it
        parts, found = [], {}
        for run, piece in zip(whole, pieces, strict=True):
            try:
                part, _ = _unpacked(source, [run], [piece], ranks)
            except CorruptFile as error:
                damaged[run.offset] = error
            else:
                parts.append(part)
                found[run.offset] = len(part)
        items = np.concatenate(parts) if parts else np.empty(0, source.trailer().metadata.layout.schema.item)
    return items, [found.get(run.offset, 0) for run in runs]


def _unpacked(
    source: FileBytes, runs: Sequence[Run], pieces: Sequence[memoryview], ranks: npt.NDArray[np.int64] | None
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return the items of runs, given their bytes, and the number of items of each run."""
    metadata, words = source.trailer().metadata, source.words
    counts = np.array([run.count for run in runs], np.int64)
    if metadata.packing is None:
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), metadata.layout.schema.item), counts
    mapped = None if words is None else (words, np.array([run.offset for run in runs], np.int64))
    return metadata.packing.unpack(pieces, counts, source.file, ranks, mapped)


def scan_matches(
    source: FileBytes, runs: Iterable[Run], batch: LookupBatch, window_bytes: int, *, gap_bytes: int = 0
) -> Iterator[Matches]:
    """Yield all rows of runs that answer lookups of a batch, in any order, a bounded number at a time.

    If the batch may be partial, the damage comes last.
    """
    metadata = source.trailer().metadata
    schema, begin_s, pairs = metadata.layout.schema, metadata.begin_ms // 1000, batch.topic_pairs(metadata)
    ranks = metadata.packing.ranks_of(batch.key_hash) if metadata.packing is not None else None
    damaged: dict[int, CorruptFile] | None = {} if batch.allow_partial else None
    for window in _windows(runs, window_bytes, gap_bytes):
        items, _ = read_asked(source, window, ranks, damaged)
        for places, lookups in batch.matched(items["key_hash"]).pairs():
            picked = items[places]
            seconds = begin_s + picked["time_diff_s"].astype(np.int64)
            found = batch.select(picked, lookups, seconds, pairs, schema)
            if len(found.rows):
                yield found
    if damaged:
        yield Matches.lacking(_damage(source.trailer(), batch, np.arange(len(batch)), damaged))


def _damage(
    trailer: Trailer, batch: LookupBatch, among: npt.NDArray[np.int64], damaged: Mapping[int, CorruptFile]
) -> Damage:
    """Return the lookups in `among` that need damaged runs, and the first error."""
    hashes = batch.key_hash[among]
    seconds = batch.second_min[among], batch.second_max[among]
    needing = trailer.directory.needing(damaged, trailer.metadata.slot_map.slots_of(hashes), hashes, *seconds)
    return among[needing], next(iter(damaged.values()))


def search_file(source: FileBytes, lookup: PreparedLookup) -> Array:
    """Return the rows that make the first `max_count` + 1 answers of `lookup`, or all of its rows, unordered."""
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    ids: frozenset[int] | None = None
    if metadata.topics:
        ids = metadata.ids_by_topic.get(lookup.topic)
        if ids is None:
            return layout.schema.no_rows
    second_max = lookup.second_max if lookup.after is None else min(lookup.second_max, lookup.after[0])
    runs = trailer.directory.runs(
        metadata.slot_map.slot_of(lookup.key_hash), lookup.key_hash, lookup.second_min, second_max
    )
    if len(runs) == 1:
        (data,) = source.verified(runs)
        return _select(data, runs[0], source, metadata, lookup, ids)
    first = rows = layout.schema.no_rows
    ordered = metadata.in_answer_order
    for batch in _newest_first(runs, lookup, ordered=ordered):
        # there are `max_count` + 1 answers, and all further blocks are older: they can't change the page
        if len(first) > lookup.max_count and (ordered or int(first["second"][lookup.max_count]) > batch[0].second_max):
            break
        read = zip(batch, source.verified(batch), strict=True)
        found = [_select(data, run, source, metadata, lookup, ids) for run, data in read]
        rows = concatenate([rows, *found], layout.schema)
        if len(runs) > len(batch):
            first, rows = leading(rows, layout.schema, lookup.max_count + 1)
    return rows


def _select(
    data: memoryview,
    run: Run,
    source: FileBytes,
    metadata: Metadata,
    lookup: PreparedLookup,
    ids: frozenset[int] | None,
) -> Array:
    """Return the rows of a run that answer `lookup`, in any order."""
    packing, schema = metadata.packing, metadata.layout.schema
    if packing is None:
        items = np.frombuffer(data, schema.item)
    else:
        items = packing.find(data, run.count, source.file, lookup.key_hash, source.words, run.offset)
    return select_items(items, metadata.begin_ms // 1000, lookup, ids, schema)


def _newest_first(runs: list[Run], lookup: PreparedLookup, *, ordered: bool) -> Iterator[list[Run]]:
    """Yield the runs newest first, in growing batches. The first batch may have `max_count` + 1 items.

    Runs of one second stay together if their order is undecided: for the second of a cursor, and for any second if the
    file is not `ordered` (`Metadata.in_answer_order`).
    """
    if len(runs) > 1 and not ordered:
        runs = sorted(runs, key=attrgetter("second_max"), reverse=True)
    within = lookup.after[0] if lookup.after is not None else None
    wanted = lookup.max_count + 1
    start = 0
    while start < len(runs):
        stop, count, size = start, 0, 0
        while stop < len(runs) and (stop == start or size + runs[stop].length <= _BATCH_BYTES):
            last = runs[stop - 1] if stop > start else None
            if last is not None and count >= wanted:
                undecided = last.second_min == within if ordered else runs[stop].second_max == last.second_max
                if not undecided:
                    break
            count += runs[stop].count
            size += runs[stop].length
            stop += 1
        yield runs[start:stop]
        start, wanted = stop, 2 * wanted


class GiantSlot:
    """The search in one cut group: its `blocks` (rows of the directory, n), their runs, and its lookups (numbers)."""

    def __init__(
        self, blocks: Array, runs: list[Run], lookups: npt.NDArray[np.int64], batch: LookupBatch, *, ordered: bool
    ) -> None:
        self._batch, self._lookups, self._ordered = batch, lookups, ordered
        # by newest first, like all rows below
        order = np.arange(len(runs)) if ordered else np.argsort(-blocks["second_max"].astype(np.int64), kind="stable")
        hash_min, hash_max, second_min, second_max = (
            blocks[name][order, None].astype(np.int64) for name in ("hash_min", "hash_max", "second_min", "second_max")
        )
        self.runs = [runs[place] for place in order.tolist()]
        self._newest, self._counts = second_max, np.array([[run.count] for run in self.runs])
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
    def lacking(self) -> npt.NDArray[np.int64]:
        """The lookups whose page needs a damaged block. They are closed."""
        return self._lookups[self._lost]

    def next_runs(self) -> list[Run]:
        """Return the runs of the next round: for each open lookup enough blocks for its missing answers."""
        target = (np.minimum(self._batch.max_count[self._lookups], _ALL) + 1) << self._round
        self._round = min(self._round + 1, _MOST_ROUNDS)
        needing = self._needing & self._unread & self._open
        promised = needing * self._counts
        self._short = needing & (promised.cumsum(axis=0) - promised < target)
        self._give_up(np.logical_or.reduce(self._short & self._damaged))
        self._short &= self._open
        return self._chosen(self._short)

    def waiting(self) -> list[Run]:
        """Return the unread runs that an open lookup needs."""
        return self._chosen(self._needing & self._unread & self._open & ~self._damaged)

    def take(self, run: Run) -> npt.NDArray[np.int64]:
        """Note that a block was read. Return the lookups that need it."""
        place = self._places[run.offset]
        self._unread[place] = False
        needing: npt.NDArray[np.int64] = self._lookups[self._needing[place] & self._open]
        return needing

    def miss(self, run: Run) -> None:
        """Note that a block is damaged. The lookups for which it was chosen get no page."""
        place = self._places[run.offset]
        self._damaged[place] = True
        self._give_up(self._short[place])

    def settle(self, found: Matches) -> None:
        """Close the lookups that have enough rows. `found` has their first rows so far (`first_rows`)."""
        last = self._batch.page_ends(self._lookups, found)
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


def search_file_for_many(
    source: FileBytes, batch: LookupBatch, excluded: npt.NDArray[np.bool_] | None = None
) -> Matches:
    """Return rows that answer each lookup except `excluded` (bool, n), in any order, at most `max_count` + 1 of each.

    If the batch may be partial, they have the damage, too.
    """
    if excluded is not None and excluded.all():
        return Matches(np.zeros(0, np.int64), np.zeros(0, np.int64))
    trailer = source.trailer()
    metadata, directory = trailer.metadata, trailer.directory
    schema = metadata.layout.schema
    within = batch.within(metadata)
    wanted = np.flatnonzero(within if excluded is None else within & ~excluded)
    gathered = MatchAccumulator(batch, schema)
    pairs, begin_s = batch.topic_pairs(metadata), metadata.begin_ms // 1000

    def seconds_of(items: Array) -> npt.NDArray[np.int64]:
        return begin_s + items["time_diff_s"].astype(np.int64)

    def look(items: Array, among: npt.NDArray[np.int64] | None) -> None:
        gathered.add(matching(batch, items, seconds_of, pairs, schema, among))

    slots = metadata.slot_map.slots_of(batch.key_hash[wanted])
    cut = directory.cut_groups(slots)
    runs = directory.runs_of(slots[cut < 0], metadata.second_min, metadata.second_max)
    giants = [
        GiantSlot(*directory.blocks_of(group), wanted[cut == group], batch, ordered=metadata.in_answer_order)
        for group in np.unique(cut[cut >= 0]).tolist()
    ]
    owners = {run.offset: giant for giant in giants for run in giant.runs}
    ranks = metadata.packing.ranks_of(batch.key_hash[wanted]) if metadata.packing is not None else None
    done: list[int] = []
    damaged: dict[int, CorruptFile] | None = {} if batch.allow_partial else None

    while chosen := [*runs, *(run for giant in giants for run in giant.next_runs())]:
        waiting = [run for giant in giants for run in giant.waiting()]
        segments = list(_segments(chosen, waiting, done, source.gap_bytes)) if giants else [chosen]
        for window in itertools.chain.from_iterable(_windows(segment, _WINDOW_BYTES) for segment in segments):
            items, counts = read_asked(source, window, ranks, damaged)
            stop, held = 0, iter(counts)
            for giant, part in itertools.groupby(window, lambda run: owners.get(run.offset)):
                for block in [list(part)] if giant is None else [[run] for run in part]:
                    start, stop = stop, stop + sum(itertools.islice(held, len(block)))
                    if giant is not None and damaged and block[0].offset in damaged:
                        giant.miss(block[0])
                    else:
                        look(items[start:stop], None if giant is None else giant.take(block[0]))
        done = sorted([*done, *(run.offset for segment in segments for run in segment)])
        runs = []
        if giants:
            found = gathered.first()
            for giant in giants:
                giant.settle(found)
    found = gathered.found()
    if not damaged:
        return found
    groups = {offset: error for offset, error in damaged.items() if offset not in owners}
    lookups, error = _damage(trailer, batch, wanted[cut < 0], groups or damaged)
    lookups = np.unique(np.concatenate([lookups, *(giant.lacking for giant in giants)]))
    return replace(found, damage=((lookups, error),)) if len(lookups) else found


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
