"""`tiered-index message ID`: one message by its id, as RocketMQ's `queryMsgById` and `queryMsgByUniqueKey` give it. Writes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tiered_index.cli.output import error_document
from tiered_index.cli.session import Session, command
from tiered_index.cli.spending import Allowance, CacheDir, MaxBytes, MaxRequests, Timeout
from tiered_index.errors import BudgetExceeded, ConfigError, InvalidArgument
from tiered_index.service.lookup.budget import Account, LookupLimits
from tiered_index.service.lookup.messages import Fetched, MessageSource, MessagesResult
from tiered_index.service.reader import IndexReader
from tiered_index.types import IndexItem

__all__ = ["message"]

_FOUND = 1
_MANY = 32


@command
def message(
    session: Session,
    msg_id: Annotated[str, typer.Argument(metavar="ID", help="Offset message id, or with --topic a unique key.", show_default=False)],
    topic: Annotated[str | None, typer.Option(help="Topic: the id is looked up in the index as a unique key.", show_default=False)] = None,
    store: Annotated[Path | None, typer.Option(help="RocketMQ's store directory.", show_default=False)] = None,
    body: Annotated[Literal["text", "json", "hex", "none"], typer.Option(help="How to show the body.")] = "text",
    cursor: Annotated[
        str | None, typer.Option(help="With --topic: continue the truncated answer that gave it.", show_default=False)
    ] = None,
    max_requests: MaxRequests = None,
    max_bytes: MaxBytes = None,
    timeout: Timeout = None,
    cache_dir: CacheDir = None,
) -> int:
    """Show one message: by the id that names its place (store host and commit log offset, 32 or 56 hexadecimal digits), or with --topic by
    the unique key that its producer gave it, which needs the index. Of messages with one unique key 32 are shown at a time.

    It is read from --store, or from archived segments where --storage or --root names the index. Exit code 1: the id is well-formed, and
    the message can't be had; its state and the reason are printed.

    [bold]Examples[/bold]

      tiered-index message 7F00000100002A9F0000000000000000 --store /home/rocketmq/store

      tiered-index message 7F00000100002A9F0000000000000000 --storage s3://bucket/index --body json

      tiered-index message 7F00000100002A9F0000000000000000 --storage s3://bucket/index --max-requests 2 --timeout 1.5

      tiered-index message 0A010203000004D218B4AAC200000000 --topic orders --root /data/index --store /home/rocketmq/store --json
    """
    allowance = Allowance(max_requests, max_bytes, timeout)
    config = session.config(cache_dir=cache_dir)
    has_index = config.root is not None or config.storage is not None
    if not has_index and (store is None or topic is not None):
        raise ConfigError("a unique key needs the index: give --root or --storage" if topic else "give --store, --storage or --root")
    if cursor is not None and topic is None:
        raise InvalidArgument("--cursor continues an answer to a unique key: give --topic, too")
    from tiered_index.cli.messages import describe_fetched, print_fetched
    from tiered_index.rocketmq.archive.message_source import RocketmqMessages

    answer = MessagesResult(messages=(), status="complete")
    exceeded: BudgetExceeded | None = None
    with contextlib.ExitStack() as stack:
        try:
            with allowance.clock():
                reader = stack.enter_context(IndexReader.open(config=config)) if has_index else None
            limits = allowance.left()
            if reader is not None:
                # what a place costs beside a lookup counts, too
                stack.enter_context(Account([reader.storage], LookupLimits(**limits)).open())
            source = RocketmqMessages(store, reader.segment_archive if reader is not None else None, root=config.root)
            if topic is None:
                answer = replace(answer, messages=(source.by_msg_id(msg_id),))
            else:
                assert reader is not None
                by_key = _ByUniqueKey(source)
                answer = reader.messages(topic, msg_id, max_count=_MANY, cursor=cursor, source=by_key, **limits)
                if not answer.messages and cursor is None:
                    answer = replace(answer, messages=_by_place(source.by_msg_id, topic, msg_id))
        except BudgetExceeded as error:
            exceeded = error
            answer = error.result if isinstance(error.result, MessagesResult) else replace(answer, status="partial")
    found = answer.messages
    if session.out.as_json:
        partial = error_document(exceeded) if exceeded is not None else {}
        shown = [describe_fetched(one, body) for one in found]
        session.out.document({"messages": shown, "status": answer.status, "cursor": answer.cursor, **partial})
    else:
        for one in found:
            print_fetched(session.out, one, body)
        if not found and exceeded is None:
            session.out.line(f"no {'more messages' if cursor else 'message'} of {topic} with the unique key {msg_id}")
        if answer.cursor is not None:
            session.out.line(f"{len(found)} found, {answer.status}")
            session.out.line(f"more with --cursor {answer.cursor}")
    if exceeded is not None:
        raise exceeded
    return 0 if any(one.message is not None for one in found) else _FOUND


@dataclass(frozen=True)
class _ByUniqueKey:
    """A source to which a message that carries the key as one of its others is one of another key: so it is paged past."""

    source: MessageSource

    def fetch(self, items: Sequence[IndexItem], topic: str, key: str) -> list[Fetched]:
        """Return what became of each of `items`."""
        fetched = self.source.fetch(items, topic, key)
        return [
            one if one.message is None or getattr(one.message, "uniq_key", None) == key else replace(one, carries_key=False)
            for one in fetched
        ]


def _by_place(by_msg_id: Callable[[str], Fetched], topic: str, msg_id: str) -> tuple[Fetched, ...]:
    """Return the message of that topic which the id names by its place, or why it can't be had: RocketMQ's tools take either id, too."""
    try:
        fetched = by_msg_id(msg_id)
    except InvalidArgument:
        return ()
    return (fetched,) if fetched.message is None or getattr(fetched.message, "topic", None) == topic else ()
