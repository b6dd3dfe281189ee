"""Messages on stdout: `query --messages` and `message`, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tiered_index.cli.explaining import Explaining, print_failed
from tiered_index.cli.output import Printer, counted, human_bytes
from tiered_index.cli.spending import Pages
from tiered_index.cli.times import format_time
from tiered_index.rocketmq.archive.found_message import BodyFormat, FoundRocketmqMessage, show_body
from tiered_index.rocketmq.log.layout import KEYS, TAGS, UNIQ_KEY
from tiered_index.service.lookup.messages import Fetched, MessagesResult

__all__ = ["describe_fetched", "print_fetched", "show_messages"]

_SHOWN_APART = (KEYS, TAGS, UNIQ_KEY)


def show_messages(out: Printer, pages: Pages[MessagesResult], body: BodyFormat, explaining: Explaining | None) -> int:
    """Print a lookup of messages and return the exit code; with `explaining` also what it cost. Raises `BudgetExceeded` afterwards."""
    if not out.as_json:
        return _print(out, pages, body, explaining)
    if pages.every:
        return _stream(out, pages, body)
    (answer,) = pages
    out.document(answer.to_dict() | {"messages": [describe_fetched(one, body) for one in answer.messages]} | pages.error())
    return pages.settle(partial=answer.status == "partial")


def _stream(out: Printer, pages: Pages[MessagesResult], body: BodyFormat) -> int:
    total = _Totals()
    for answer in pages:
        for one in answer.messages:
            out.record(describe_fetched(one, body))
        total.add(answer)
    out.record(total.to_dict() | pages.error())
    return pages.settle(partial=total.partial)


def _print(out: Printer, pages: Pages[MessagesResult], body: BodyFormat, explaining: Explaining | None) -> int:
    total, answers = _Totals(), []
    for answer in pages:
        for one in answer.messages:
            print_fetched(out, one, body)
            out.line()
        total.add(answer)
        answers.append(answer.explain)
    states = ", ".join(f"{count} {state}" for state, count in sorted(total.states.items()))
    dropped = f"; {counted(total.collisions, 'entry', 'entries')} of other keys dropped" if total.collisions else ""
    out.line(f"{total.count:,} found{f' ({states})' if states else ''}, {total.status}{dropped}")
    if total.cursor is not None:
        out.line(f"more with --cursor {total.cursor}")
    if pages.exceeded is None:
        print_failed(out, total.failed.values())
    if explaining is not None:
        fetched = f"{counted(total.message_requests, 'request')} for messages ({human_bytes(total.message_bytes)}), in all "
        explaining.show(out, answers, fetched)
    return pages.settle(partial=total.partial)


class _Totals:
    """What several pages add up to."""

    def __init__(self) -> None:
        self.count = self.collisions = self.requests = self.bytes = self.message_requests = self.message_bytes = 0
        self.cost_usd = self.elapsed_ms = 0.0
        self.states: Counter[str] = Counter()
        self.failed: dict[str, Any] = {}
        self.cursor: str | None = None
        self.partial = False

    @property
    def status(self) -> str:
        return "partial" if self.partial else "truncated" if self.cursor is not None else "complete"

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
        self.partial = self.partial or answer.status == "partial"

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
        "topic": message.topic,
        "message id": message.offset_msg_id,
        "unique key": message.uniq_key or None,
        "keys": message.properties.get(KEYS) or None,
        "tags": message.tags or None,
        "properties": ", ".join(f"{name}={value}" for name, value in others.items()) or None,
        "born": f"{format_time(message.born_ms)} at {message.born_host}",
        "stored": f"{format_time(message.store_ms)} at {message.store_host}",
        "commit log": f"offset {message.physical_offset}, {message.size:,} bytes",
        "consumed again": message.reconsume_times or None,
        "transaction": None if message.is_visible else "prepared or rolled back: consumers don't see it",
        "read from": fetched.read_from,
        "note": fetched.problem,
    })  # fmt: skip
    if shown := _body(message, body):
        out.lines(f"  {'body':<14}  {shown}")


def _body(message: FoundRocketmqMessage, wanted: BodyFormat) -> str | None:
    shown = show_body(message, wanted)
    if not shown:
        return None
    stored = f", {message.compression}" if message.compression else ""
    head = f"({shown['body_format']}, {human_bytes(len(message.raw_body))}{stored})"
    if problem := shown.get("body_problem"):
        head += f" {problem}"
    text = shown["body"] if isinstance(shown["body"], str) and shown["body_format"] != "json" else _pretty(shown["body"])
    return f"{head} {text}" if text else head


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
