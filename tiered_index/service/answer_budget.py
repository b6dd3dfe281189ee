"""The one thread-safe budget of a lookup's answers: what was found so far, best first, and which files that makes needless."""

from __future__ import annotations

import threading

from tiered_index.format.schema import Schema
from tiered_index.service.rows import Array, concatenate, first_answers

__all__ = ["AnswerBudget"]

_FEW_ANSWERS = 4096


class AnswerBudget:
    """The answers found so far, best first, and what they make needless. Safe under threads."""

    def __init__(self, schema: Schema, max_count: int) -> None:
        self._schema = schema
        self._max_count = max_count
        self._lock = threading.Lock()
        self._rows = concatenate([], schema)
        self._fresh: list[Array] = []
        self._fresh_count = 0
        self._cutoff: int | None = None
        self.skipped = False

    def add(self, rows: Array) -> int:
        """Take in one file's rows; return how many those were."""
        if not len(rows):
            return 0
        with self._lock:
            self._fresh.append(rows)
            self._fresh_count += len(rows)
            # fewer than asked spare no read; enough are brought in order at once where they are few or the first, many when they doubled
            total = len(self._rows) + self._fresh_count
            enough = total >= self._max_count and (total <= _FEW_ANSWERS or self._cutoff is None)
            if enough or self._fresh_count >= max(len(self._rows), _FEW_ANSWERS):
                self._settle()
        return len(rows)

    def _settle(self) -> None:
        # one more than asked tells a full answer from a truncated one
        rows = concatenate([self._rows, *self._fresh], self._schema)
        self._rows = first_answers(rows, self._schema, self._max_count + 1)
        self._fresh, self._fresh_count = [], 0
        if len(self._rows) >= self._max_count:
            self._cutoff = int(self._rows["second"][self._max_count - 1])

    def spares(self, second_max: int) -> bool:
        """Return whether a file with this greatest second can't change the answer any more; if so the answer counts as truncated."""
        with self._lock:
            if self._cutoff is None or second_max >= self._cutoff:
                return False
            self.skipped = True
            return True

    def missing(self) -> int:
        """Return how many more answers are asked for than were found, at least 0; equal identities count as often as they were found."""
        with self._lock:
            return max(0, self._max_count - len(self._rows) - self._fresh_count)

    def answers(self) -> tuple[Array, bool]:
        """Return the first `max_count` answers, and whether there may be more."""
        with self._lock:
            if self._fresh:
                self._settle()
            return self._rows[: self._max_count], self.skipped or len(self._rows) > self._max_count
