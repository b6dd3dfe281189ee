"""Searches the messages of a source for a text. Threads: any."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from tiered_index.base.call import check_deadline
from tiered_index.base.encoding import MAX_BODY_BYTES
from tiered_index.errors import BudgetExceeded, CorruptFile
from tiered_index.service.read.answers.messages import Fetched, MessageSource
from tiered_index.types import IndexItem

# Part of a body that is searched at a time
_SEARCHED_BYTES = 256 << 10


@runtime_checkable
class Searched(Protocol):
    """A message that can be searched for a text: its `texts` (ids, keys, properties) and its body."""

    @property
    def texts(self) -> tuple[str, ...]: ...

    def body(self, max_bytes: int) -> bytes:
        """Return the plain body. Raises `CorruptFile` for a damaged body, or one of more than `max_bytes`."""


@dataclass(frozen=True)
class Containing:
    """A `MessageSource` of only the messages that have `text`; others are marked as not carrying the key.

    It searches body, tags, keys, ids and properties, and ignores case. A message that can't be read, or decompressed
    within `max_body_bytes`, may have the text, and stays in the answer. A message that is not searched before the
    deadline has an error.
    """

    source: MessageSource
    text: str
    max_body_bytes: int = MAX_BODY_BYTES

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return the result for each of `items`."""
        wanted = self.text.casefold()
        return [self._searched(fetched, wanted) for fetched in self.source.fetch(items, topic, key)]

    def _searched(self, fetched: Fetched, wanted: str) -> Fetched:
        try:
            # a few stored bytes can become megabytes of text
            check_deadline("searching messages for a text")
        except BudgetExceeded as error:
            if fetched.message is None or not fetched.carries_key:
                return fetched
            return replace(fetched, state="missing", message=None, problem=str(error), error=error)
        message = fetched.message
        if not isinstance(message, Searched) or not fetched.carries_key or self._has(message, wanted):
            return fetched
        # free the memory of the message
        return replace(fetched, message=fetched.message if fetched.instead is not None else None, carries_key=False)

    def _has(self, message: Searched, wanted: str) -> bool:
        try:
            body = message.body(self.max_body_bytes)
        except CorruptFile:
            return True
        return any(wanted in text.casefold() for text in message.texts) or _body_has(body, wanted)


def _body_has(body: bytes, wanted: str) -> bool:
    """Return whether a body has the case-folded text `wanted`. It is searched in parts to save memory."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for at in range(0, len(body), _SEARCHED_BYTES):
        until = at + _SEARCHED_BYTES
        # the text may be in two parts
        text = text[max(0, len(text) - len(wanted) + 1) :]
        text += decoder.decode(body[at:until], until >= len(body)).casefold()
        if wanted in text:
            return True
    return False
