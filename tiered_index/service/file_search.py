"""The search in one compacted file or shard, wherever its bytes lie.

The directory says which ranges may hold a key; just those are read, each is checked against its CRC32, and only then an item is looked at.
A giant slot is read newest blocks first, no more of it than the page needs. Threads: any; answers are copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiered_index.format.bloom import filter_hash
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.batch_query import QuestionBatch
from tiered_index.service.rows import Array, Question, concatenate, first_answers, select_items

__all__ = ["FileBytes", "question_hash", "question_hashes", "search_file"]


_BATCH_BYTES = 8 << 20
# blocks of a giant slot held in memory at a time


class FileBytes(Protocol):
    """A file's bytes, verified."""

    file: str

    def trailer(self) -> Trailer: ...

    @property
    def gap_bytes(self) -> int:
        """Bytes between two ranges up to which they are read as one."""

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
