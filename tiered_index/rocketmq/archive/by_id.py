"""One message by its id, as RocketMQ's tools find it: by its place, or by the unique key that its producer gave it; and
how a message is shown. Threads: any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiered_index.errors import InvalidArgument
from tiered_index.rocketmq.archive.messages import RocketmqMessages
from tiered_index.rocketmq.log.message import MAX_BODY_BYTES, BodyFormat, Message
from tiered_index.service.lookup.budget import LookupBudget, LookupLimits
from tiered_index.service.lookup.lookups import Lookups
from tiered_index.service.lookup.messages import Fetched, MessageSource, MessagesResult
from tiered_index.types import IndexItem

# of messages with one unique key so many are shown at a time
_MANY = 32


def messages_by_id(
    lookups: Lookups | None,
    source: RocketmqMessages,
    msg_id: str,
    topic: str | None,
    cursor: str | None = None,
    allow_partial: bool = False,
    *,
    by_key: MessageSource | None = None,
    **limits: Any,
) -> MessagesResult:
    """Return the message at the place that `msg_id` names or, with `topic`, those whose unique key it is.

    Where no message of the topic has that unique key, the one at the place is returned, if the id names one.
    `allow_partial` and `limits` are as in `Lookups.messages`; without `lookups`, and then without `topic`, there are
    none. `by_key` fetches those of a unique key in place of `source`. Raises as that, and `InvalidArgument` for no such
    id.
    """
    if lookups is None or topic is None:
        answer = MessagesResult(messages=(), status="complete")
        with contextlib.ExitStack() as stack:
            if lookups is not None:
                stack.enter_context(LookupBudget(lookups.config.prices, LookupLimits(**limits)).open())
            return replace(answer, messages=(source.by_msg_id(msg_id),))
    unique = _ByUniqueKey(by_key or source)
    answer = lookups.messages(
        topic, msg_id, max_count=_MANY, cursor=cursor, allow_partial=allow_partial, source=unique, **limits
    )
    if not answer.messages and cursor is None:
        answer = replace(answer, messages=_by_place(source.by_msg_id, topic, msg_id))
    return answer


def describe_fetched(fetched: Fetched, body: BodyFormat, *, max_body_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Return what became of an entry, its message among it, JSON-ready; `body` and `max_body_bytes` as in
    `show_body`.
    """
    message = fetched.message
    shown = {"message": message.to_dict(body, max_body_bytes)} if isinstance(message, Message) else {}
    return fetched.to_dict() | shown


@dataclass(frozen=True)
class _ByUniqueKey:
    """Gives only messages whose unique key is the one asked for; others that carry it are paged past."""

    source: MessageSource

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`."""
        fetched = self.source.fetch(items, topic, key)
        return [
            one
            if one.message is None or getattr(one.message, "uniq_key", None) == key
            else replace(one, carries_key=False)
            for one in fetched
        ]


def _by_place(by_msg_id: Callable[[str], Fetched], topic: str, msg_id: str) -> tuple[Fetched, ...]:
    """Return the topic's message at the place that the id names, if it names one; RocketMQ's tools do so."""
    try:
        fetched = by_msg_id(msg_id)
    except InvalidArgument:
        return ()
    return (fetched,) if fetched.message is None or getattr(fetched.message, "topic", None) == topic else ()
