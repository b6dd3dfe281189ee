"""What a message is as an answer: the words that indexes and the sources of their messages have in common.

The index knows hashes and places; a `MessageSource` knows the messages of one system. Values are immutable; share them between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tiered_index.errors import TieredIndexError
from tiered_index.types import Explain, FileReport, IndexItem, Status

__all__ = ["Asked", "Fetched", "FoundMessage", "MessageSource", "MessageState", "MessagesResult"]

MessageState = Literal["local", "archived", "expired", "missing"]
"""``local``: read from the source's own files. ``archived``: from an archived segment. ``expired``: the source has deleted it, and no
archive has it. ``missing``: it should be there and isn't, is damaged, or could not be asked for."""

_NOTHING = Explain()


class FoundMessage(Protocol):
    """A message of any system."""

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What became of one entry of the index, or of one place that was asked for (`item` is then None).

    `message` is there where the state is ``local`` or ``archived``. `problem` says why not, or why it was not read from a nearer place.
    """

    item: IndexItem | None
    state: MessageState
    message: FoundMessage | None = None
    carries_key: bool = True
    """False: a whole message of another key or topic, whose hash is equal."""
    read_from: str | None = None
    """Path or object's name that was read, or tried last."""
    problem: str | None = None
    error: TieredIndexError | None = None
    """Why the place could not be asked; asking again may help."""
    instead: IndexItem | None = None
    """Where another message of the key lies in the entry's place, of another second: the entry that one would have."""
    is_near: bool = False
    """`message` is the one of `instead`, whose second is so near that this may be its entry, where the index has no other for it."""
    requests: int = 0
    bytes: int = 0
    """What it cost in requests to the storage. Neighbours fetched by one request stand with the first of them."""

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "state": self.state,
            "item": self.item.to_dict() if self.item is not None else None,
            "message": self.message.to_dict() if self.message is not None else None,
            "read_from": self.read_from,
            "problem": self.problem,
        }


class MessageSource(Protocol):
    """Where the messages are. Safe under threads."""

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`, in their order, looked up under `key` of `topic`. Never raises for a single item."""
        ...


@dataclass(frozen=True, kw_only=True)
class MessagesResult:
    """The answer to a lookup of messages.

    `messages` are in answer order, at most `max_count` of them, those that can't be had among them. `status` and `cursor` are as in
    `QueryResult`; `failed` names files of the index and places of messages that could not be read (status ``partial``). `collisions` is
    how many entries of other keys with an equal hash were dropped. `explain` counts lookups and messages (its reports of place
    ``messages``), the last two fields the messages alone.
    """

    messages: tuple[Fetched, ...]
    status: Status
    cursor: str | None = None
    failed: tuple[FileReport, ...] = ()
    collisions: int = 0
    explain: Explain = _NOTHING
    message_requests: int = 0
    message_bytes: int = 0

    def __len__(self) -> int:
        return len(self.messages)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer JSON-ready."""
        return {
            "messages": [fetched.to_dict() for fetched in self.messages],
            "status": self.status,
            "cursor": self.cursor,
            "failed": [report.to_dict() for report in self.failed],
            "collisions": self.collisions,
            "explain": self.explain.to_dict() | {"message_requests": self.message_requests, "message_bytes": self.message_bytes},
        }


@dataclass(frozen=True)
class Asked:
    """The question: as `IndexService.query` takes it."""

    topic: str
    key: str
    begin_ms: int | None
    end_ms: int | None
    max_count: int
    cursor: str | None
    allow_partial: bool
