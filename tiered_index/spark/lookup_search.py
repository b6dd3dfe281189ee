"""The reading half of a bulk lookup: one task's objects, each opened once, searched for all questions that they may answer.

An object costs one request for its directory, one for its filter where that is small beside what it may spare, and its slot groups by
coalesced ranges, in order, each once. Answers are cut to one more than `max_count` a key before they leave. Runs in tasks, one thread each
and those of the cold path. Memory: the task's questions (28 bytes each), 16 MiB of ranges, half a million rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.errors import CorruptFile, SchemaMismatch
from tiered_index.format.trailer import Run, Trailer
from tiered_index.service.answers.batch import Found, TooManyPairs, first_rows
from tiered_index.service.answers.rows import Question, row_dtype
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.files.compacted import StorageBytes
from tiered_index.service.files.search import question_hashes, search_file
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.lookup_plan import LookupPlan
from tiered_index.spark.lookup_questions import PackedBatch
from tiered_index.storage.base import Storage

__all__ = ["WINDOW_BYTES", "HeldAnswers", "request_bytes", "search_object", "worth_a_filter"]

WINDOW_BYTES = 16 << 20
_HELD_ROWS = 1 << 19
_CHUNK = 1 << 20
# questions searched for at a time
_FILTER_SHARE = 4
# a filter is fetched where it costs at most one in so many of what would be read without it
_LEAST_REQUEST_BYTES = 16 << 10
_ALONE = 4
# questions of one giant slot that are searched for one by one, newest blocks first
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class HeldAnswers:
    """Answers on their way out, cut early: while they are few they wait for those of further objects. `questions` are those of all."""

    def __init__(self, plan: LookupPlan, questions: Array, most: int = _HELD_ROWS) -> None:
        self._plan, self._questions, self._most = plan, questions, most
        self._parts: list[Found] = []
        self._count = 0

    def add(self, found: Found) -> Iterator[tuple[Array, Array]]:
        """Take in rows; yield the (questions, rows) that must go."""
        self._parts.append(found)
        self._count += len(found.rows)
        if self._count > self._most:
            yield from self._settle(self._most // 2)

    def rest(self) -> Iterator[tuple[Array, Array]]:
        """Yield what is left."""
        yield from self._settle(0)

    def _settle(self, keep: int) -> Iterator[tuple[Array, Array]]:
        if not self._count:
            return
        places, index = np.unique(np.concatenate([part.questions for part in self._parts]), return_inverse=True)
        rows = np.concatenate([part.rows for part in self._parts])
        first, _ = first_rows(np.full(len(places), self._plan.max_count + 1), [Found(index, rows)], self._plan.schema)
        settled = Found(places[first.questions], first.rows)
        if len(settled.rows) > keep:
            self._parts, self._count = [], 0
            yield self._questions[settled.questions], settled.rows
        else:
            self._parts, self._count = [settled], len(settled.rows)


def search_object(plan: LookupPlan, storage: Storage, stored: StoredObject, questions: Array, places: Int64) -> Iterator[Found]:
    """Yield what one object holds for `questions[places]`, which are different ones; those of an answer are of all `questions`.

    Raises as a lookup does.
    """
    settings = replace(plan.settings, block_cache_bytes=0, filter_after_probes=1, directory_cache_bytes=1 << 30)
    # a path for each object: what it keeps, a directory and perhaps a filter, goes with it
    cold = ColdPath(storage, keyed=plan.schema.keyed, settings=settings)
    try:
        source = StorageBytes(cold, stored)
        trailer = source.trailer()
        if trailer.metadata.layout.schema != plan.schema:
            raise SchemaMismatch(f"{stored.name} stores {trailer.metadata.layout.schema.name} entries, the index {plan.schema.name}")
        if len(places) > _CHUNK:
            # so that each lot reads another stretch of the object
            places = places[np.argsort(plan.base_slots(questions[places]), kind="stable")]
        for start in range(0, len(places), _CHUNK):
            part = places[start : start + _CHUNK]
            batch = PackedBatch(questions[part], plan.topics, plan.max_count + 1, part)
            yield from _search(plan, source, trailer, batch)
    finally:
        cold.close()


def _search(plan: LookupPlan, source: StorageBytes, trailer: Trailer, batch: PackedBatch) -> Iterator[Found]:
    metadata = trailer.metadata
    pairs = None
    if metadata.topics:
        asked = frozenset(batch.topics)
        pairs = [(topic_id, name) for topic_id, name in metadata.topics if name in asked]
        names = {name for _, name in pairs}
        here = np.array([topic in names for topic in batch.topics], bool)
        batch = batch.part(here[batch.topic_index])
    overlapping = batch.overlapping(metadata.second_min, metadata.second_max)
    if len(overlapping) < len(batch):
        batch = batch.part(overlapping)
    if not len(batch):
        return
    batch = _filtered(plan, source, trailer, batch)
    alone, giants = _giants(trailer, batch)
    for place in giants.tolist():
        rows = search_file(source, _question(batch, place))
        yield Found(np.repeat(batch.places[place : place + 1], len(rows)), rows)
    batch = batch.part(~alone)
    if not len(batch):
        return
    begin_s = metadata.begin_ms // 1000
    for window in _windows(_runs_of(trailer, batch), plan.settings.coalesce_gap_bytes):
        items = np.frombuffer(b"".join(source.verified(window)), plan.schema.item)
        yield from _matching(plan, batch, items, begin_s, pairs)


def _runs_of(trailer: Trailer, batch: PackedBatch) -> list[Run]:
    if not len(batch):
        return []
    slots = trailer.metadata.slot_map.slots_of(batch.key_hash)
    return trailer.directory.runs_of(slots, int(batch.second_min.min()), int(batch.second_max.max()))


def _filtered(plan: LookupPlan, source: StorageBytes, trailer: Trailer, batch: PackedBatch) -> PackedBatch:
    """Return the questions that are left after the object's filter was asked, where that was worth fetching."""
    stored, cold = source.stored, source.cold
    gap = plan.settings.coalesce_gap_bytes
    request = request_bytes(plan.settings)
    wanted = sum(size if near else size + request for _, size, near in _extents(_runs_of(trailer, batch), gap))
    if not worth_a_filter(stored, wanted, request):
        return batch
    hashes = question_hashes(batch, keyed=cold.keyed)
    cold.filters.note_in_vain(stored, int(hashes[0]))
    if not cold.learn_filter(stored):
        return batch
    return batch.part(~cold.filters.excludes_many(stored, hashes))


def request_bytes(settings: ColdSettings) -> int:
    """Return how many bytes a request is taken to cost: as many as are read to spare one, and at least a slot group."""
    return max(settings.coalesce_gap_bytes, _LEAST_REQUEST_BYTES)


def worth_a_filter(stored: StoredObject, wanted: int, request: int) -> bool:
    """Whether an object's filter is fetched where `wanted` bytes, with those of requests, would be read without it."""
    return stored.filter_length > 0 and (stored.filter_length + request) * _FILTER_SHARE <= wanted


def _giants(trailer: Trailer, batch: PackedBatch) -> tuple[npt.NDArray[np.bool_], Int64]:
    """Return which questions (bool, n) are better asked alone, and their places: the few of a slot that is cut into blocks."""
    groups = trailer.directory.groups
    firsts = groups["first_slot"].astype(np.int64)
    alone = np.zeros(len(batch), bool)
    if not (groups["blocks"] > 0).any():
        return alone, np.zeros(0, np.int64)
    index = np.searchsorted(firsts, trailer.metadata.slot_map.slots_of(batch.key_hash), "right") - 1
    cut = (index >= 0) & (groups["blocks"][index] > 0)
    often = np.bincount(index[cut], minlength=len(groups)) > _ALONE
    alone = cut & ~often[index]
    return alone, np.flatnonzero(alone)


def _question(batch: PackedBatch, place: int) -> Question:
    # a key's text plays no part in the search
    return Question(
        batch.topics[int(batch.topic_index[place])], "", int(batch.key_hash[place]), int(batch.fingerprint[place]),
        int(batch.second_min[place]), int(batch.second_max[place]), int(batch.max_count[place]) - 1,
    )  # fmt: skip


def _matching(plan: LookupPlan, batch: PackedBatch, items: Array, begin_s: int, pairs: Sequence[tuple[int, str]] | None) -> Iterator[Found]:
    """Yield the rows of `items` that answer questions of the batch; a batch that makes too many pairs is halved."""
    try:
        at, questions = batch.join(items["key_hash"])
    except TooManyPairs:
        half = len(batch) // 2
        yield from _matching(plan, batch.part(slice(0, half)), items, begin_s, pairs)
        yield from _matching(plan, batch.part(slice(half, None)), items, begin_s, pairs)
        return
    if not len(at):
        return
    picked = items[at]
    seconds = begin_s + picked["time_diff_s"].astype(np.int64)
    found = batch.select(picked, questions, seconds, pairs, plan.schema)
    if found.rows.dtype != row_dtype(plan.schema):
        raise CorruptFile("lookup", "rows of another schema")
    if len(found.rows):
        yield Found(batch.places[found.questions], found.rows)


def _extents(runs: Iterable[Run], gap: int) -> Iterator[tuple[Run, int, bool]]:
    """Yield each run, how many bytes it adds to what is read, and whether it joins the one before over a gap no longer than `gap`."""
    end: int | None = None
    for run in runs:
        near = end is not None and run.offset - end <= gap
        yield run, run.length + (run.offset - end if near and end is not None else 0), near
        end = run.offset + run.length


def _windows(runs: Iterable[Run], gap: int) -> Iterator[list[Run]]:
    """Yield the runs in order, in lists whose ranges, gaps included, have at most 16 MiB, or of one run."""
    window: list[Run] = []
    size = 0
    for run, length, _ in _extents(runs, gap):
        if window and size + length > WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(run)
        size += length
    if window:
        yield window
