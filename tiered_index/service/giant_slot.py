"""A slot group that is cut into blocks, and the questions of a batch that look there: which block is read, and when it is enough.

A question needs the blocks that may hold its hash at its time. They are read newest first, twice as many in each round, until it has one
answer more than asked and nothing that is not read could come before. A block is read once, for all that need it. Threads: one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiered_index.format.trailer import Run
from tiered_index.service.batch_query import NEVER, Found, QuestionBatch
from tiered_index.service.rows import Array

__all__ = ["GiantSlot"]

_MOST_ROUNDS = 20
_ALL = 1 << 40
# answers: more than a slot holds


class GiantSlot:
    """One cut group: its `blocks` (rows of the directory, n), what must be read of each, and the open questions (numbers in the batch).

    `ordered`: entries of one hash stand in answer order.
    """

    def __init__(self, blocks: Array, runs: list[Run], questions: npt.NDArray[np.int64], batch: QuestionBatch, *, ordered: bool) -> None:
        self._runs = runs
        self._places = {run.offset: place for place, run in enumerate(runs)}
        self._bounds = list(zip(*(blocks[n].tolist() for n in ("hash_min", "hash_max", "second_min", "second_max")), strict=True))
        newest = blocks["second_max"].astype(np.int64)
        self._order = list(range(len(runs))) if ordered else np.argsort(-newest, kind="stable").tolist()
        self._unread = [True] * len(runs)
        self._batch = batch
        self._ordered = ordered
        self._round = 0
        self._ask(questions)

    def next_runs(self) -> list[Run]:
        """Return what the next round reads: of each question as many blocks as may hold what it asks for, or as was found wanting."""
        target = (np.minimum(self._batch.max_count[self._questions], _ALL) + 1) << self._round
        self._round = min(self._round + 1, _MOST_ROUNDS)
        promised = np.zeros(len(self._questions), np.int64)
        chosen = []
        for place in self._order:
            if not self._unread[place]:
                continue
            if (promised >= target).all():
                break
            needing = self._needing(place)
            if (needing & (promised < target)).any():
                chosen.append(self._runs[place])
                promised[needing] += self._runs[place].count
        return chosen

    def waiting(self) -> list[Run]:
        """Return what is not read and needed by an open question."""
        return [run for place, run in enumerate(self._runs) if self._unread[place] and self._needing(place).any()]

    def take(self, run: Run) -> npt.NDArray[np.int64]:
        """Note that a block is read; return the questions that need it."""
        place = self._places[run.offset]
        self._unread[place] = False
        return self._questions[self._needing(place)]

    def settle(self, found: Found) -> None:
        """Close the questions that have enough; `found` are their first rows so far, by question and in answer order."""
        questions = self._questions
        last = self._batch.page_ends(questions, found)
        # the greatest second of what is not read; whether any is; whether something was read that stands behind it
        newest = np.full(len(questions), NEVER)
        unread = np.zeros(len(questions), bool)
        behind = np.zeros(len(questions), bool)
        for place in self._order:
            needing = self._needing(place)
            if self._unread[place]:
                newest[needing] = np.maximum(newest[needing], self._bounds[place][3])
                unread |= needing
            else:
                behind |= needing & unread
        first = ~behind if self._ordered else np.zeros(len(questions), bool)
        self._ask(questions[unread & ~((last > NEVER) & (first | (last > newest)))])

    def _ask(self, questions: npt.NDArray[np.int64]) -> None:
        self._questions = questions
        self._hashes = self._batch.key_hash[questions]
        self._low, self._high = self._batch.second_min[questions], self._batch.second_max[questions]

    def _needing(self, place: int) -> npt.NDArray[np.bool_]:
        """Return which open questions may have answers in a block."""
        hash_min, hash_max, second_min, second_max = self._bounds[place]
        needing: npt.NDArray[np.bool_] = (self._hashes >= hash_min) & (self._hashes <= hash_max)
        needing &= (self._low <= second_max) & (self._high >= second_min)
        return needing
