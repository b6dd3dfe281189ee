"""The search for one message: the results of its possible places so far. No I/O; one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tiered_index.errors import BudgetExceeded, StorageError
from tiered_index.service.lookup.messages import Fetched, MessageState
from tiered_index.types import IndexItem


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for the message of an entry or at a place. `problems` has those of the places so far, the newest last.

    Each source derives its own, which compares messages with the entry.
    """

    item: IndexItem | None
    found: Fetched | None = None
    # A message with the entry's place, second and key, and another size
    other: Fetched | None = None
    # A message of another key with an equal hash
    collision: Fetched | None = None
    # The entry of a message with the entry's place and key, and another second
    instead: IndexItem | None = None
    problems: list[str] = field(default_factory=list)
    error: StorageError | BudgetExceeded | None = None
    read_from: str | None = None
    damaged: bool = False
    requests: int = 0
    bytes: int = 0

    def fetched(self, state: MessageState, **more: Any) -> Fetched:
        """Return a result of the place that was read last, with all problems so far."""
        problem = "; ".join(self.problems) or None
        return Fetched(item=self.item, state=state, read_from=self.read_from, problem=problem, **more)

    def missing(self, state: MessageState, **more: Any) -> Fetched:
        """Return the result if no place has the message."""
        return self.fetched(state, error=self.error, instead=self.instead, **more)

    def settle(self, fetched: Fetched) -> None:
        """Note a message of the entry's place, size and second, which may have another key."""
        if fetched.carries_key:
            self.found = fetched
        else:
            self.collision = self.collision or fetched

    def outcome(self, missing: Callable[[], Fetched]) -> Fetched:
        """Return the result and its cost.

        It is `missing` if no place has the message, also if a place has another message and one could not be read.
        """
        is_open = self.error is not None or self.damaged
        known = self.found or (None if is_open else self.other or self.collision) or missing()
        return replace(known, requests=self.requests, bytes=self.bytes)
