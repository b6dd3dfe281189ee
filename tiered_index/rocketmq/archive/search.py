"""The search for one message: reads places and judges their bytes until the message is found. No I/O; one thread.

A message is checked by itself, then against its entry, then for topic and key. One that contradicts its entry was
written later at the same offset: with another store time its own entry answers it, if the index has one
(`Fetched.instead`); with another size it is the answer if no entry agrees with it and it carries the key, because the
index keeps one of several entries with the same place and second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError
from tiered_index.format.archived import DAMAGED_PIECE
from tiered_index.rocketmq.log.layout import Host
from tiered_index.rocketmq.log.message import Message
from tiered_index.service.lookup.messages import Fetched, MessageState
from tiered_index.types import IndexItem

# RocketMQ's index files keep times relative to their first entry, so theirs may be one second off.
_CLOCK_STEP_S = 1


@dataclass(slots=True)
class Search:
    """The search for one message. `problems` are those of the places tried so far, the newest last."""

    offset: int
    # None: unknown.
    size: int | None
    item: IndexItem | None
    key: tuple[str, str] | None
    host: Host | None = None
    found: Fetched | None = None
    collision: Fetched | None = None
    # A message of the entry's place, second and key, and of another size.
    other: Fetched | None = None
    # The entry that a message of the entry's place and key, and of another second, would have.
    instead: IndexItem | None = None
    problems: list[str] = field(default_factory=list)
    error: StorageError | BudgetExceeded | None = None
    read_from: str | None = None
    deleted: bool = False
    # What is at the place is damaged: in an archived segment, in the source's own file. Of a place without an entry
    # only a checksum tells: mostly no message begins there.
    damaged: bool = False
    is_damaged_locally: bool = False
    # The segment that was to be read is archived no more, or under another name.
    gone: bool = False
    # Says which topics the caller may see; None: every one.
    sees: Callable[[str], bool] | None = None
    requests: int = 0
    bytes: int = 0

    def take(self, message: Message, state: MessageState, read_from: str) -> None:
        """Judge a message that was read at the place."""
        self.read_from = read_from
        carries = self.key is None or message.carries(*self.key)
        problem = self._contradiction(message)
        if problem is not None:
            self.problems.append(f"{read_from}: {problem}")
            if self.item is None or not carries or message.queue_id != self.item.queue_id:
                return
            if not self._is_of_the_second(message):
                self.instead = self.instead or self._entry_of(message)
                return
        is_near = self.item is not None and carries and message.store_ms // 1000 != self.item.timestamp_ms // 1000
        fetched = Fetched(
            item=self.item,
            state=state,
            message=message,
            carries_key=carries,
            read_from=read_from,
            problem="; ".join(self.problems) or None,
            instead=self._entry_of(message) if is_near else None,
            is_near=is_near,
        )
        if problem is not None:
            self.other = self.other or fetched
        elif carries:
            self.found = fetched
        else:
            self.collision = self.collision or fetched

    def take_erased(self, message: Message, read_from: str) -> None:
        """Judge a place whose message was erased: what is left of it still tells whether it is the entry's."""
        self.read_from = read_from
        if (problem := self._contradiction(message)) is not None:
            self.problems.append(f"{read_from}: {problem}")
        elif self.key is not None and message.topic != self.key[0]:
            # of its keys nothing is left: the topic alone tells that it is another entry's
            self.collision = Fetched(item=self.item, state="erased", carries_key=False, read_from=read_from)
        else:
            told = "its body and properties were erased from the archived segment"
            self.found = Fetched(item=self.item, state="erased", read_from=read_from, problem=told)

    def fail(self, error: CorruptFile | StorageError | BudgetExceeded) -> None:
        """Note what kept the message from being read; without its traceback, which would keep what was read."""
        self.problems.append(str(error))
        if isinstance(error, CorruptFile):
            self.damaged = self.damaged or self.item is not None or error.problem == DAMAGED_PIECE
        else:
            self.error = error.with_traceback(None)

    def _contradiction(self, message: Message) -> str | None:
        """Return in what the message differs from what the place was said to hold, or None."""
        if self.host is not None and message.store_host != self.host:
            return f"the message there was stored by {message.store_host}, not by {self.host}"
        if self.item is None:
            return None
        agrees = (
            message.queue_id == self.item.queue_id
            and self._is_of_the_second(message)
            and message.size == (self.item.size or message.size)
        )
        return None if agrees else "another message is there: the log was rewritten"

    def _entry_of(self, message: Message) -> IndexItem:
        assert self.item is not None
        return replace(self.item, size=message.size, timestamp_ms=message.store_ms)

    def _is_of_the_second(self, message: Message) -> bool:
        assert self.item is not None
        return abs(message.store_ms // 1000 - self.item.timestamp_ms // 1000) <= _CLOCK_STEP_S
