"""The search in one compacted file or shard, wherever its bytes lie.

The directory says which ranges may hold a key; just those are read, each is checked against its CRC32, and only then an item is looked at.
A giant slot is read newest blocks first, no more of it than the page needs. Threads: any; answers are copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.format.bloom import filter_hash
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.batch_query import Found, QuestionBatch
from tiered_index.service.rows import Question, concatenate, first_answers, select_items

__all__ = ["FileBytes", "question_hash", "question_hashes", "search_file", "search_file_for_many"]

Array = npt.NDArray[Any]
_WINDOW_BYTES = 32 << 20
# slot groups of a batch held in memory at a time
_BATCH_BYTES = 8 << 20
# blocks of a giant slot held in memory at a time


class FileBytes(Protocol):
    """A file's bytes, verified."""

    file: str

    def trailer(self) -> Trailer: ...

    def verified(self, runs: Sequence[Run]) -> list[memoryview]: ...


def question_hash(question: Question, *, keyed: bool) -> int:
    """Return what filters are asked for a question's key (u64)."""
    return filter_hash(question.key_hash, question.fingerprint if keyed else 0)


def question_hashes(batch: QuestionBatch, *, keyed: bool) -> npt.NDArray[np.uint64]:
    """Return what filters are asked for the keys of a batch (u64, n)."""
    return batch.keyed_filter_hashes if keyed else batch.plain_filter_hashes


def search_file(source: FileBytes, question: Question) -> Array:
    """Return the first `max_count` + 1 of the rows that answer `question`, or all of them, in no order."""
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    ids: frozenset[int] | None = None
    if metadata.topics:
        ids = frozenset(topic_id for topic_id, name in metadata.topics if name == question.topic)
        if not ids:
            return concatenate([], layout.schema)
    second_max = question.second_max if question.after is None else min(question.second_max, question.after[0])
    runs = trailer.directory.runs(metadata.slot_map.slot_of(question.key_hash), question.key_hash, question.second_min, second_max)
    begin_s = metadata.begin_ms // 1000
    rows = concatenate([], layout.schema)
    ordered = metadata.in_answer_order
    for batch in _newest_first(runs, question, ordered=ordered):
        # one answer more than asked, and the rest of the blocks is behind them all: it can't change the page
        if len(rows) > question.max_count and (ordered or int(rows["second"][question.max_count]) > batch[0].second_max):
            break
        items = (np.frombuffer(data, layout.schema.item) for data in source.verified(batch))
        parts = [rows, *(select_items(part, begin_s, question, ids, layout.schema) for part in items)]
        rows = concatenate(parts, layout.schema)
        if len(runs) > len(batch):
            rows = first_answers(rows, layout.schema, question.max_count + 1)
    return rows


def _newest_first(runs: list[Run], question: Question, *, ordered: bool) -> Iterator[list[Run]]:
    """Yield the runs newest first, in batches that may hold as many items as asked; each batch is larger than the one before.

    Runs of one second are taken together where only all of them tell which of their items come first: a second within which a cursor
    stands, and any second of a file that isn't `ordered` (`Metadata.in_answer_order`).
    """
    if len(runs) > 1 and not ordered:
        runs = sorted(runs, key=attrgetter("second_max"), reverse=True)
    within = question.after[0] if question.after is not None else None
    wanted = question.max_count + 1
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


def search_file_for_many(source: FileBytes, batch: QuestionBatch, excluded: npt.NDArray[np.bool_] | None = None) -> Found:
    """Return the rows that answer each question, in no order; `excluded` (n) are those whose key the file certainly doesn't hold."""
    wanted = np.arange(len(batch)) if excluded is None else np.flatnonzero(~excluded)
    if not len(wanted):
        return Found(np.zeros(0, np.int64), np.zeros(0, np.int64))
    trailer = source.trailer()
    metadata = trailer.metadata
    layout = metadata.layout
    pairs = [(topic_id, name) for topic_id, name in metadata.topics if name in batch.topics]
    wanted = np.intersect1d(wanted, batch.overlapping(metadata.second_min, metadata.second_max), assume_unique=True)
    if metadata.topics:
        names = {name for _, name in pairs}
        here = np.array([topic in names for topic in batch.topics], bool)
        wanted = wanted[here[batch.topic_index[wanted]]] if len(here) else wanted
    runs: list[Run] = []
    if len(wanted):
        low, high = int(batch.second_min[wanted].min()), int(batch.second_max[wanted].max())
        runs = trailer.directory.runs_of(metadata.slot_map.slots_of(batch.key_hash[wanted]), low, high)
    begin_s = metadata.begin_ms // 1000
    found = [Found(np.zeros(0, np.int64), concatenate([], layout.schema))]
    for window in _windows(runs):
        data = b"".join(source.verified(window))
        items = np.frombuffer(data, layout.schema.item)
        places, questions = batch.join(items["key_hash"])
        picked = items[places]
        seconds = begin_s + picked["time_diff_s"].astype(np.int64)
        found.append(batch.select(picked, questions, seconds, pairs if metadata.topics else None, layout.schema))
    return Found(np.concatenate([f.questions for f in found]), np.concatenate([f.rows for f in found]))


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
