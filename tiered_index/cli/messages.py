"""Messages on stdout: `query --messages` and `message`, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_index.cli.explaining import print_explain, print_failed
from tiered_index.cli.output import Printer, counted, human_bytes
from tiered_index.cli.times import format_time
from tiered_index.rocketmq.found_message import BodyFormat, FoundRocketmqMessage, show_body
from tiered_index.rocketmq.message_source import RocketmqMessages
from tiered_index.rocketmq.properties import KEYS, TAGS, UNIQ_KEY
from tiered_index.service.messages import Fetched, MessagesResult
from tiered_index.service.reader import IndexReader

__all__ = ["MessagePages", "describe_fetched", "print_fetched"]

_PARTIAL = 6
_SHOWN_APART = (KEYS, TAGS, UNIQ_KEY)


@dataclass(frozen=True)
class MessagePages:
    """One lookup of messages, page by page; `every`: to its end."""

    reader: IndexReader
    topic: str
    key: str
    begin_ms: int | None
    end_ms: int | None
    page: int
    cursor: str | None
    allow_partial: bool
    every: bool
    store: Path | None
    body: BodyFormat

    def show(self, out: Printer, *, explain: bool) -> int:
        """Print the answer and return the exit code."""
        pages = self._pages()
        if not out.as_json:
            return self._print(out, pages, explain=explain)
        if self.every:
            return self._stream(out, pages)
        (answer,) = pages
        out.document(answer.to_dict() | {"messages": [describe_fetched(one, self.body) for one in answer.messages]})
        return _PARTIAL if answer.status == "partial" else 0

    def _pages(self) -> Iterator[MessagesResult]:
        source = RocketmqMessages(self.store, self.reader.segment_archive, threads=self.reader.config.query_threads)
        cursor = self.cursor
        while True:
            answer = self.reader.messages(
                self.topic, self.key, self.begin_ms, self.end_ms, self.page, cursor, self.allow_partial, source=source
            )
            yield answer
            cursor = answer.cursor
            if not self.every or cursor is None:
                return

    def _stream(self, out: Printer, pages: Iterator[MessagesResult]) -> int:
        total = _Totals()
        for answer in pages:
            for one in answer.messages:
                out.record(describe_fetched(one, self.body))
            total.add(answer)
        out.record(total.to_dict())
        return _PARTIAL if total.failed else 0

    def _print(self, out: Printer, pages: Iterator[MessagesResult], *, explain: bool) -> int:
        total, answers = _Totals(), []
        for answer in pages:
            for one in answer.messages:
                print_fetched(out, one, self.body)
                out.line()
            total.add(answer)
            answers.append(answer.explain)
        states = ", ".join(f"{count} {state}" for state, count in sorted(total.states.items()))
        dropped = f"; {counted(total.collisions, 'entry', 'entries')} of other keys dropped" if total.collisions else ""
        out.line(f"{total.count:,} found{f' ({states})' if states else ''}, {total.status}{dropped}")
        if total.cursor is not None:
            out.line(f"more with --cursor {total.cursor}")
        print_failed(out, total.failed.values())
        if explain:
            fetched = f"{counted(total.message_requests, 'request')} for messages ({human_bytes(total.message_bytes)}), in all "
            for number, page in enumerate(answers, 1):
                print_explain(out, page, fetched if number == len(answers) else "")
        return _PARTIAL if total.failed else 0


class _Totals:
    """What several pages add up to."""

    def __init__(self) -> None:
        self.count = self.collisions = self.requests = self.bytes = self.message_requests = self.message_bytes = 0
        self.cost_usd = self.elapsed_ms = 0.0
        self.states: Counter[str] = Counter()
        self.failed: dict[str, Any] = {}
        self.cursor: str | None = None

    @property
    def status(self) -> str:
        return "partial" if self.failed else "truncated" if self.cursor is not None else "complete"

    def add(self, answer: MessagesResult) -> None:
        self.count += len(answer)
        self.collisions += answer.collisions
        self.requests += answer.explain.requests
        self.bytes += answer.explain.bytes
        self.cost_usd += answer.explain.cost_usd
        self.elapsed_ms += answer.explain.elapsed_ms
        self.message_requests += answer.message_requests
        self.message_bytes += answer.message_bytes
        self.states.update(one.state for one in answer.messages)
        self.failed |= {report.file: report for report in answer.failed}
        self.cursor = answer.cursor

    def to_dict(self) -> dict[str, Any]:
        return {
            "status": self.status, "count": self.count, "states": dict(self.states), "collisions": self.collisions,
            "failed": [report.to_dict() for report in self.failed.values()],
            "explain": {
                "requests": self.requests, "bytes": self.bytes, "cost_usd": self.cost_usd, "elapsed_ms": self.elapsed_ms,
                "message_requests": self.message_requests, "message_bytes": self.message_bytes,
            },
        }  # fmt: skip


def describe_fetched(fetched: Fetched, body: BodyFormat) -> dict[str, Any]:
    """Return it JSON-ready, its body as `body` says."""
    message = fetched.message
    return fetched.to_dict() | ({"message": message.to_dict(body)} if isinstance(message, FoundRocketmqMessage) else {})


def print_fetched(out: Printer, fetched: Fetched, body: BodyFormat) -> None:
    """Print one message, or why it can't be had."""
    message, item = fetched.message, fetched.item
    if not isinstance(message, FoundRocketmqMessage):
        place = f"{format_time(item.timestamp_ms)}  queue {item.queue_id}  commit log offset {item.offset}" if item is not None else ""
        out.line(f"{place}  {fetched.state}: {fetched.problem}".strip())
        return
    out.line(f"{format_time(message.store_ms)}  queue {message.queue_id}  queue offset {message.queue_offset}  {fetched.state}")
    others = {name: value for name, value in message.properties.items() if name not in _SHOWN_APART}
    out.facts({
        "topic": _printable(message.topic),
        "message id": message.offset_msg_id,
        "unique key": _shown(message.uniq_key),
        "keys": _shown(message.properties.get(KEYS)),
        "tags": _shown(message.tags),
        "properties": _printable(", ".join(f"{name}={value}" for name, value in others.items())) or None,
        "born": f"{format_time(message.born_ms)} at {message.born_host}",
        "stored": f"{format_time(message.store_ms)} at {message.store_host}",
        "commit log": f"offset {message.physical_offset}, {message.size:,} bytes",
        "consumed again": message.reconsume_times or None,
        "transaction": None if message.is_visible else "prepared or rolled back: consumers don't see it",
        "read from": fetched.read_from,
        "note": fetched.problem,
        "body": _body(message, body),
    })  # fmt: skip


def _body(message: FoundRocketmqMessage, wanted: BodyFormat) -> str | None:
    shown = show_body(message, wanted)
    if not shown:
        return None
    stored = f", {message.compression}" if message.compression else ""
    head = f"({shown['body_format']}, {human_bytes(len(message.raw_body))}{stored})"
    if problem := shown.get("body_problem"):
        head += f" {problem}"
    text = shown["body"] if isinstance(shown["body"], str) and shown["body_format"] != "json" else _pretty(shown["body"])
    return f"{head} {_printable(text)}" if text else head


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _shown(text: str | None) -> str | None:
    return _printable(text) if text else None


def _printable(text: str) -> str:
    """Return the text with everything escaped that would move a terminal's cursor or colour it; lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
