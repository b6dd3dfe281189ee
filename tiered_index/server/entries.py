"""Puts entries from HTTP requests into the writer: NDJSON as for `ingest`, or an Arrow stream of the same columns.

A request is accepted whole or refused whole. With a source and its position it is idempotent: a repeated position puts
nothing. With `after`, a request that leaves a gap is refused. Threads: any.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from starlette.requests import Request
from starlette.responses import Response

from tiered_index.connectors.files.rows.arrow import TooLarge, read_table
from tiered_index.connectors.files.rows.columns import (
    FIELDS,
    check_kinds,
    check_names,
    columns_of,
    entry_columns,
    is_list,
)
from tiered_index.connectors.files.rows.fields import Fields, json_object, written_keys
from tiered_index.errors import InvalidArgument
from tiered_index.server.http import wire
from tiered_index.server.http.answers import Taken
from tiered_index.server.http.calls import Calls, Handlers, body_of, caller_of, type_of
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.operations import Operation
from tiered_index.server.http.parameters import EntriesParameters
from tiered_index.server.http.problems import Refused
from tiered_index.server.http.served import Served, shown_topics
from tiered_index.server.http.tokens import Caller
from tiered_index.service.index import IndexService

_FIELDS = Fields()
_COLUMNS = frozenset({*FIELDS, "key", "keys", "topic_id"})
_ENTRY = """\
{"topic": "orders", "queue_id": 0, "keys": ["order-4713"], "offset": 900000, "size": 300, "timestamp_ms": 1762000120000}
"""
# Each key has a copy of its message's topic. Most bytes of topics for each byte of the largest body:
_TOPICS_PER_BYTE = 8
_LARGE_BYTES = 256 << 10
# Less than in any list of messages that do not have many keys each
_BYTES_PER_VALUE = 12


@dataclass(frozen=True)
class EntriesBatch:
    """The entries of one request's messages, as columns."""

    columns: Any
    messages: int
    topics: frozenset[str]
    gives_topic_ids: bool


def parsed(body: bytes, form: str, most_bytes: int) -> EntriesBatch:
    """Return the messages of a body. Raises `InvalidArgument`, which names the first wrong line or column.

    Raises `Refused` if the decompressed body has more than `most_bytes`, or its topics are too long.
    """
    return _ndjson(body, most_bytes) if form == wire.NDJSON else _arrow(body, most_bytes)


def _check_topics_bytes(topics_bytes: int, most_bytes: int) -> None:
    if topics_bytes > _TOPICS_PER_BYTE * most_bytes:
        raise Refused(413, "too many keys for topics of this length: send fewer messages at once")


def _ndjson(body: bytes, most_bytes: int) -> EntriesBatch:
    if (commas := body.count(b",")) > most_bytes // _BYTES_PER_VALUE:
        raise Refused(413, f"the body has more than {commas:,} values: send fewer keys at once")
    messages = []
    # line by line: a list of short lines needs more than twenty times their bytes
    for number, line in enumerate(io.BytesIO(body), 1):
        if not line.strip():
            continue
        try:
            fields = written_keys(json_object(line))
            if unknown := fields.keys() - _COLUMNS:
                raise InvalidArgument(f"{min(unknown)!r:.80} is not a field of a message")
            messages.append(_FIELDS.checked(fields))
        except InvalidArgument as error:
            raise InvalidArgument(f"line {number}: {error}") from error
    if len({message.topic_id is None for message in messages}) > 1:
        raise InvalidArgument("either all messages have a topic_id, or none")
    _check_topics_bytes(sum(len(message.topic) * len(message.keys) for message in messages), most_bytes)
    topics, gives_ids = (
        frozenset(message.topic for message in messages),
        any(message.topic_id is not None for message in messages),
    )
    return EntriesBatch(columns_of(messages), len(messages), topics, gives_ids)


def _arrow(body: bytes, most_bytes: int) -> EntriesBatch:
    try:
        table = read_table(body, most_bytes)
    except TooLarge as error:
        raise Refused(413, str(error)) from error
    names = table.column_names
    if unknown := [name for name in names if name not in _COLUMNS]:
        raise InvalidArgument(f"{unknown[0]!r:.80} is not a column of messages")
    check_names(names, names, "the body")
    if missing := [name for name in FIELDS if name not in names]:
        raise InvalidArgument(f"column {missing[0]!r} is missing")
    if "key" not in names and "keys" not in names:
        raise InvalidArgument("give a column 'key' (text) or 'keys' (list of text)")
    check_kinds({field.name: field.type for field in table.schema})
    if "keys" in names and is_list(table["keys"].type) and not pa.types.is_null(table["topic"].type):
        lengths = pc.binary_length(table["topic"].cast(pa.large_string())).cast(pa.int64())
        beside = pc.multiply(lengths, pc.list_value_length(table["keys"]).cast(pa.int64()))
        _check_topics_bytes(pc.sum(beside).as_py() or 0, most_bytes)
    columns = entry_columns(table)
    if columns is None:
        raise InvalidArgument("a value is missing, or a column has a type that no message column may have: cast it")
    topics = pc.unique(columns["topic"]).to_pylist()
    return EntriesBatch(columns, len(table), frozenset(topics), "topic_id" in columns.schema.names)


class Intake:
    """Puts batches into one index, each position of a source only once."""

    def __init__(self, index: IndexService) -> None:
        self._index = index
        self._lock = threading.Lock()
        # Positions that were put here; the durable ones may be less
        self._positions: dict[str, int] = {}
        # The topics of each caller that has a bound of topics
        self._topics: dict[str, set[str]] = {}

    def take(self, batch: EntriesBatch, params: EntriesParameters) -> Taken:
        """Put a batch and return the answer. Raises as `put_batch`, and `Refused` if it leaves a gap."""
        source, position = params.source, params.position
        with self._lock:
            known = self._known(source)
            repeated = known is not None and position is not None and position <= known
            entries = 0
            if repeated:
                # Raises if another writer has taken the index over. That writer may lack this body.
                self._index.put_batch(columns_of([]))
            else:
                if params.after is not None and params.after != (known or 0):
                    raise Refused(409, f"source {source!r:.80} is at position {known or 0:,}, not {params.after:,}")
                entries = self._index.put_batch(batch.columns, source, position)
                if source is not None and position is not None:
                    self._positions[source] = position
            taken_up_to = self._known(source)
        if params.durable:
            self._index.flush()
        return Taken(
            entries=entries,
            messages=0 if repeated else batch.messages,
            source=source,
            position=taken_up_to,
            durable_position=self._index.durable_position(source) if source is not None else None,
            repeated=repeated,
        )

    def count_topics(self, caller: Caller, topics: Set[str]) -> None:
        """Count the topics of a caller's batch. Raises `Refused` if they would exceed its bound."""
        if (bound := caller.max_topics) is None:
            return
        with self._lock:
            counted = self._topics.setdefault(caller.name, set())
            if len(topics - counted) > bound - len(counted):
                text = f"the token may put entries of {bound:,} topics, and has put some of {len(counted):,}"
                raise Refused(403, f"{text}: raise its max_topics in the file of tokens")
            counted |= topics

    def _known(self, source: str | None) -> int | None:
        if source is None:
            return None
        known = (self._positions.get(source), self._index.durable_position(source))
        return max((time for time in known if time is not None), default=None)


class EntryHandlers(Handlers):
    """Puts entries if the service has a writer, and refuses them otherwise."""

    def __init__(self, served: Served, calls: Calls, metrics: Metrics) -> None:
        super().__init__(served, calls, metrics)
        self._intake = Intake(served.writer) if served.writer is not None else None
        # The entries of a large body need up to twenty times its bytes: of one at a time
        self._reading = asyncio.Semaphore(1)

    @Operation("POST /v1/entries", bodies={wire.NDJSON: _ENTRY, wire.ARROW: None}, answer=Taken, problems={409: None})
    async def entries(self, request: Request, params: EntriesParameters) -> Response:
        """Put entries: NDJSON as for `ingest`, or an Arrow stream.

        A body is accepted whole or refused whole. Members that `ingest` ignores are refused.
        """
        caller = caller_of(request)
        caller.need("write")
        if params.source is not None:
            caller.need_source(params.source)
        if (intake := self._intake) is None:
            raise Refused(409, "this service is read-only: send entries to the writer's service")
        body = await body_of(request, wire.NDJSON, wire.ARROW)

        def act() -> bytes:
            batch = parsed(body, type_of(request), self.served.caps.body_bytes)
            request.state.of_body = {"topics": shown_topics(batch.topics)}
            caller.need_topics(batch.topics)
            if batch.gives_topic_ids:
                caller.need_topic_ids()
            intake.count_topics(caller, batch.topics)
            return wire.encode(intake.take(batch, params))

        async with self._reading if len(body) > _LARGE_BYTES else contextlib.nullcontext():
            return await self.answer(request, self.allowance(), act, wire.JSON)
