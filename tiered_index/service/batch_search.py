"""The search of a batch in one compacted file or shard: its slot groups in order, each byte once.

Giant slots are read newest blocks first, more of them in each round, while questions lack answers: what a question can't need any more is
not read. What is found is cut to the pages as it comes in. Threads: any; answers are copies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from tiered_index.format.trailer import Run
from tiered_index.service.batch_query import Found, QuestionBatch
from tiered_index.service.file_search import FileBytes
from tiered_index.service.gathered import Gathered, matching
from tiered_index.service.giant_slot import GiantSlot
from tiered_index.service.rows import Array

__all__ = ["search_file_for_many"]

_WINDOW_BYTES = 32 << 20
# slot groups of a batch held in memory at a time


def search_file_for_many(source: FileBytes, batch: QuestionBatch, excluded: npt.NDArray[np.bool_] | None = None) -> Found:
    """Return the rows that answer each question, in no order, at most one more than asked of each.

    `excluded` (bool, n) are those whose key the file certainly doesn't hold.
    """
    wanted = np.arange(len(batch)) if excluded is None else np.flatnonzero(~excluded)
    if not len(wanted):
        return Found(np.zeros(0, np.int64), np.zeros(0, np.int64))
    trailer = source.trailer()
    metadata, directory = trailer.metadata, trailer.directory
    schema = metadata.layout.schema
    pairs = [(topic_id, name) for topic_id, name in metadata.topics if name in batch.topics] if metadata.topics else None
    wanted = np.intersect1d(wanted, batch.overlapping(metadata.second_min, metadata.second_max), assume_unique=True)
    if pairs is not None:
        names = {name for _, name in pairs}
        here = np.array([topic in names for topic in batch.topics], bool)
        wanted = wanted[here[batch.topic_index[wanted]]] if len(here) else wanted
    gathered = Gathered(batch, schema)
    begin_s = metadata.begin_ms // 1000

    def seconds_of(items: Array) -> npt.NDArray[np.int64]:
        return begin_s + items["time_diff_s"].astype(np.int64)

    def look(data: bytes | memoryview, among: npt.NDArray[np.int64] | None) -> None:
        gathered.add(matching(batch, np.frombuffer(data, schema.item), seconds_of, pairs, schema, among))

    slots = metadata.slot_map.slots_of(batch.key_hash[wanted])
    cut = directory.cut_groups(slots)
    runs = directory.runs_of(slots[cut < 0], metadata.second_min, metadata.second_max)
    giants = [
        GiantSlot(*directory.blocks_of(group), wanted[cut == group], batch, ordered=metadata.in_answer_order)
        for group in np.unique(cut[cut >= 0]).tolist()
    ]
    done: list[int] = []
    while True:
        chosen = [*runs, *(run for giant in giants for run in giant.next_runs())]
        if not chosen:
            return gathered.found()
        waiting = [(giant, run) for giant in giants for run in giant.waiting()]
        owners = {run.offset: giant for giant, run in waiting}
        segments = list(_segments(chosen, [run for _, run in waiting], done, source.gap_bytes))
        for window in itertools.chain.from_iterable(map(_windows, segments)):
            groups = []
            for run, data in zip(window, source.verified(window), strict=True):
                if (giant := owners.get(run.offset)) is None:
                    groups.append(data)
                else:
                    look(data, giant.take(run))
            if groups:
                look(b"".join(groups), None)
        if not giants:
            return gathered.found()
        done = sorted([*done, *(run.offset for segment in segments for run in segment)])
        runs = []
        found = gathered.first()
        for giant in giants:
            giant.settle(found)


def _segments(chosen: list[Run], waiting: list[Run], done: list[int], gap_bytes: int) -> Iterator[list[Run]]:
    """Yield the chosen runs in order of position, cut where two of them would be read as one range over a gap that was read already.

    What of the waiting runs lies in a gap that is read anyway is read for good. `done` are the positions of what was read, sorted.
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


def _windows(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield the runs in order, in lists of at most 32 MiB or of one run."""
    window: list[Run] = []
    size = 0
    for run in runs:
        if window and size + run.length > _WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(run)
        size += run.length
    if window:
        yield window
