"""The operations of the service: the place of each, the models of its query, body and answer, and its description.

`app` makes routes of them, and `description` the document of OpenAPI. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_index.server import answers, parameters
from tiered_index.server.answers import Document, Explain, IndexItem
from tiered_index.server.wire import ARROW, JSON, NDJSON

PROBLEMS: Mapping[int, str] = {
    400: "The request is wrong.",
    401: "No token, or an unknown one.",
    403: "The token does not allow this.",
    408: "The body arrives too slowly.",
    409: "Another writer has the index, the service is read-only, or the source has another position than `after`.",
    413: "The body or the batch is too large, or its answer could be.",
    415: "The content type is not supported.",
    422: "A bound (`timeout_s`, `max_requests`, `max_bytes`, `max_cost_usd`) was reached. `failed` names the unread "
    "files, and the answer has no entries. With `allow_partial` the answer is 200, with the entries found so far.",
    500: "An error of the service.",
    502: "The storage did not answer, or an object is damaged. With `allow_partial`, a lookup answers 200 from the "
    "readable files.",
    503: "Too many running requests, a full write buffer, or an index that is being opened. Wait for `Retry-After` "
    "seconds.",
}
"""The meaning of each status of problems, for operations without a text of their own."""
_OF_OPEN, _OF_TOKENS, _OF_BODIES = (400, 500, 503), (401, 403, 502), (408, 413, 415)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation. Its `place` is a method and a path.

    - `query`, `body`, `answer`: the models; None: any query, no JSON body, no JSON answer.
    - `bodies`: examples of the body by content type.
    - `example`: an example of the answer, whose status is `status`.
    - `forms`: further content types of the answer.
    - `part`: the meaning of the path's parameter, and an example.
    - `problems`: further statuses of problems, with their text, or None for that of `PROBLEMS`.
    - `is_open`: it needs no token.
    - `unready`: an example of the answer with 503, which is no problem.
    """

    place: str
    summary: str
    more: str = ""
    query: type[parameters.Nothing] | None = parameters.Nothing
    body: type[parameters.Nothing] | None = None
    bodies: Mapping[str, Any] = field(default_factory=dict)
    answer: type[Document] | None = None
    example: Document | None = None
    told: str = "The answer."
    status: int = 200
    forms: tuple[str, ...] = ()
    part: tuple[str, str] | None = None
    problems: Mapping[int, str | None] = field(default_factory=dict)
    is_open: bool = False
    unready: Document | None = None

    def texts(self) -> dict[int, str]:
        """Return the meaning of each status of problems."""
        statuses = (*_OF_OPEN, *(() if self.is_open else _OF_TOKENS), *(_OF_BODIES if self.bodies else ()))
        own = {status: text or PROBLEMS[status] for status, text in self.problems.items()}
        return dict(sorted(({status: PROBLEMS[status] for status in statuses} | own).items()))


class _Keyed(IndexItem, kw_only=True):
    fingerprint: int


def _item(queue_id: int, offset: int, size: int, timestamp_ms: int, key_hash: int, fingerprint: int) -> IndexItem:
    place: Any = {"topic_id": 1697644014, "queue_id": queue_id, "offset": offset, "size": size}
    return _Keyed(topic="orders", timestamp_ms=timestamp_ms, key_hash=key_hash, fingerprint=fingerprint, **place)


# The entries of the examples
_ITEMS = [
    _item(3, 204800, 498, 1762000060000, 747360416, 3169704831),
    _item(0, 1024, 512, 1762000000000, 747360416, 3169704831),
]
_OTHER = _item(1, 65536, 731, 1762000061000, 747360415, 234789609)
_EXPLAIN = Explain(elapsed_ms=0.3, files_read=1)
_FILE_ID = "001762000000000-90a149333947"
_FILE: Any = {
    "file_id": _FILE_ID,
    "state": "unsealed",
    "lane": "main",
    "sequence": 1,
    "entries": 4,
    "bytes": 40312,
    "begin_ms": 1762000000000,
    "end_ms": 1762000090000,
    "path": f"[root]/unsealed/{_FILE_ID}.index",
}
_INDEX: Any = {"index_id": "47b54056aa827d3f", "log_number": 2}
_LOOKUPS = [{"topic": "orders", "key": "order-4711"}, {"topic": "orders", "key": "order-4712", "max_count": 1}]
_ENTRY = """\
{"topic": "orders", "queue_id": 0, "keys": ["order-4713"], "offset": 900000, "size": 300, "timestamp_ms": 1762000120000}
"""
_SUMMARIES = [
    answers.TopicSummary(topic="orders", entries=3, bytes=1741, begin_ms=1762000000000, end_ms=1762000061000),
    answers.TopicSummary(topic="payments", entries=1, bytes=256, begin_ms=1762000090000, end_ms=1762000090000),
]
_ROWS = [
    answers.Row(topic="orders", entries=3, bytes=30234, usd_a_month=0.0),
    answers.Row(topic="payments", entries=1, bytes=10078, usd_a_month=0.0),
]
_ONE_INDEX = "A service of several indexes answers 400."

OPERATIONS: Mapping[str, Operation] = {
    "query": Operation(
        place="GET /v1/query",
        summary="Look up one key: its entries, the newest first",
        query=parameters.QueryParameters,
        answer=answers.QueryResult,
        example=answers.QueryResult(items=_ITEMS, explain=_EXPLAIN),
        forms=(NDJSON, ARROW),
        problems={422: None},
    ),
    "query_batch": Operation(
        place="POST /v1/query:batch",
        summary="Look up many keys. The service reads each file once for all of them",
        query=None,
        body=parameters.BatchBody,
        bodies={JSON: {"lookups": _LOOKUPS}},
        answer=answers.QueryResults,
        example=answers.QueryResults(
            results=[answers.BatchAnswer(items=_ITEMS), answers.BatchAnswer(items=[_OTHER])], explain=_EXPLAIN
        ),
        forms=(NDJSON, ARROW),
        problems={422: None},
    ),
    "messages": Operation(
        place="GET /v1/messages",
        summary="Look up one key and fetch its messages, each with its state",
        query=parameters.MessagesParameters,
        answer=answers.MessagesResult,
        problems={422: None},
    ),
    "message": Operation(
        place="GET /v1/messages/{id}",
        summary="Show one message by its offset id, or by its unique key if you pass `topic`",
        query=parameters.MessageParameters,
        answer=answers.MessagesResult,
        part=("Offset id, unique key, or `kafka:TOPIC/PARTITION/OFFSET`.", "7F00000100002A9F0000000000000000"),
        problems={404: "No such message.", 422: None},
    ),
    "browse": Operation(
        place="GET /v1/browse",
        summary="Show the messages of a topic around a moment, without a key",
        more="The service needs queue offsets. It has them with `serve --store`, or from segments that "
        "`--archive-queues` archived.",
        query=parameters.BrowseParameters,
        answer=answers.Browsed,
        told="The messages by store time, the oldest first.",
        problems={
            404: "The topic has no queue offsets here, or no such queue.",
            422: "A bound (`timeout_s`, `max_requests`, `max_bytes`, `max_cost_usd`) was reached. The answer has no "
            "messages.",
        },
    ),
    "topics": Operation(
        place="GET /v1/topics",
        summary="List the topics, each with its entries, bytes of its messages and time range",
        more="The sums have all entries of a topic in each file where the topic's times overlap the range.",
        query=parameters.Range,
        answer=answers.TopicsResult,
        example=answers.TopicsResult(topics=_SUMMARIES, explain=_EXPLAIN),
        problems={422: None},
    ),
    "files": Operation(
        place="GET /v1/files",
        summary="List all files, window tables and archived segments",
        more=_ONE_INDEX,
        answer=answers.Files,
        example=answers.Files(
            files=[answers.File(**_FILE)],
            totals={"files": 1, "entries": 4, "bytes": 40312, "by_state": {"unsealed": 1}},
            **_INDEX,
        ),
        forms=(NDJSON,),
    ),
    "file": Operation(
        place="GET /v1/files/{id}",
        summary="Show one file, without reading its entries",
        answer=answers.File,
        example=answers.File(**_FILE, topics=["orders", "payments"]),
        part=("Id of the file or window table.", _FILE_ID),
        problems={404: "No such file or window table."},
    ),
    "du": Operation(
        place="GET /v1/du",
        summary="Show stored entries, bytes and monthly cost by topic, day and state",
        more=_ONE_INDEX,
        query=parameters.DuParameters,
        answer=answers.Du,
        example=answers.Du(
            by=["topic"],
            prices_as_of="2026-11",
            usd_per_gib_month=0.023,
            rows=_ROWS,
            totals={"entries": 4, "bytes": 40312, "usd_a_month": 0.0},
            **_INDEX,
        ),
        problems={422: "A bound of the service was reached."},
    ),
    "entries": Operation(
        place="POST /v1/entries",
        summary="Put entries: NDJSON as for `ingest`, or an Arrow stream",
        more="A body is accepted whole or refused whole. Members that `ingest` ignores are refused.",
        query=parameters.EntriesParameters,
        bodies={NDJSON: _ENTRY, ARROW: None},
        answer=answers.Taken,
        example=answers.Taken(entries=1, messages=1),
        problems={409: None},
    ),
    "verify": Operation(
        place="POST /v1/verify",
        summary="Start a check of all checksums",
        more=f"The header `Location` of the answer is the URL of the progress. {_ONE_INDEX}",
        body=parameters.VerifyBody,
        bodies={JSON: {"deep": True}},
        answer=answers.Verification,
        example=answers.Verification(id="9f86d081884c7d65", deep=True, begun_ms=1762000200000),
        status=202,
        problems={409: "Another verification is running."},
    ),
    "verification": Operation(
        place="GET /v1/verify/{id}",
        summary="Show the progress of a verification, and its report at the end",
        answer=answers.Verification,
        part=("Id of the verification.", "9f86d081884c7d65"),
        problems={404: "No such verification."},
    ),
    "health": Operation(
        place="GET /v1/health",
        summary="List the problems that the service has now",
        answer=answers.Problems,
        example=answers.Problems(status="healthy", ready=True, problems=[]),
    ),
    "token": Operation(
        place="GET /v1/token",
        summary="Show the role and topics of the caller's token",
        answer=answers.Token,
        example=answers.Token(name="anyone", role="admin", topics=None),
    ),
    "metrics": Operation(place="GET /metrics", summary="Show metrics for Prometheus", forms=("text/plain",)),
    "livez": Operation(
        place="GET /livez",
        summary="Check that the process answers",
        query=None,
        answer=answers.Health,
        example=answers.Health(status="alive"),
        is_open=True,
    ),
    "readyz": Operation(
        place="GET /readyz",
        summary="Show whether this replica is ready for requests, and its problems",
        query=None,
        answer=answers.Health,
        example=answers.Health(status="ready", reasons=[], problems=[]),
        unready=answers.Health(status="not ready", reasons=["stopping"], problems=[]),
        problems={503: "Not ready, with the reasons."},
        is_open=True,
    ),
}
"""The operations, by the names of their handlers."""
