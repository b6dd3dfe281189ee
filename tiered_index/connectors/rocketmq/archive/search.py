"""Judges the bytes of possible places until a message is found. No I/O; one thread.

A message is checked by itself, then against its entry, then for topic and key. A message that contradicts its entry was
written later at the same offset. If its store time differs, its own entry answers it, if the index has one
(`Fetched.instead`). If only its size differs and it carries the key, it is the answer unless another place agrees: the
index keeps one of several entries with the same place and second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tiered_index.connectors.rocketmq.log.layout import Host
from tiered_index.connectors.rocketmq.log.message import Message
from tiered_index.errors import BudgetExceeded, CorruptFile, StorageError
from tiered_index.format.segments.archived import DAMAGED_PIECE
from tiered_index.service.read.answers.messages import Fetched, MessageState, Search
from tiered_index.types import IndexItem

# Times of RocketMQ's index files are relative to their first entry, and may differ by one second
_CLOCK_STEP_S = 1


@dataclass(slots=True)
class MessageSearch(Search):
    """The search for the message at an offset of a store's log."""

    offset: int
    # None: unknown.
    size: int | None
    key: tuple[str, str] | None = None
    host: Host | None = None
    deleted: bool = False
    # Whether the source's own file is damaged; `damaged`: an archived segment. Without an entry only a checksum shows
    # damage: usually no message begins there.
    is_damaged_locally: bool = False
    # Whether the archived segment was removed or replaced
    gone: bool = False
    # Whether a checksum of the archive shows damage, not only that no message begins at the place
    is_damage_sure: bool = False
    # Returns whether the caller may see a topic; None: every topic
    sees: Callable[[str], bool] | None = None

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
        instead = self._entry_of(message) if is_near else None
        fetched = self.fetched(state, message=message, carries_key=carries, instead=instead, is_near=is_near)
        if problem is not None:
            self.other = self.other or fetched
        else:
            self.settle(fetched)

    def take_erased(self, message: Message, read_from: str) -> None:
        """Judge an erased message: its remaining fields show whether it is the entry's."""
        self.read_from = read_from
        if (problem := self._contradiction(message)) is not None:
            self.problems.append(f"{read_from}: {problem}")
        elif self.key is not None and message.topic != self.key[0]:
            # it has no keys any more: only the topic shows that it is another entry's
            self.settle(self.fetched("erased", carries_key=False))
        else:
            problem = "its body and properties were erased from the archived segment"
            self.found = Fetched(item=self.item, state="erased", read_from=read_from, problem=problem)

    def fail(self, error: CorruptFile | StorageError | BudgetExceeded, *, no_message: bool = False) -> None:
        """Note an error.

        `no_message`: the bytes at the place are those that were archived, but they are no message.
        """
        if isinstance(error, CorruptFile):
            self.problems.append(str(error))
            self.is_damage_sure = self.is_damage_sure or not no_message
            self.damaged = self.damaged or self.item is not None or error.problem == DAMAGED_PIECE
        else:
            self.note(error)

    def _contradiction(self, message: Message) -> str | None:
        """Return the difference between the message and the expected one, or None."""
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
