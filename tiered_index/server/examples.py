"""The examples of the description, as the service answers them of an index that has `ENTRIES`; a test holds them true.

What differs between indexes (times, costs, ids) is as it was once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# topic, queue_id, key, offset, size, timestamp_ms
ENTRIES = (
    ("orders", 0, "order-4711", 1024, 512, 1_762_000_000_000),
    ("orders", 3, "order-4711", 204_800, 498, 1_762_000_060_000),
    ("orders", 1, "order-4712", 65_536, 731, 1_762_000_061_000),
    ("payments", 0, "order-4711", 4096, 256, 1_762_000_090_000),
)


@dataclass(frozen=True)
class Examples:
    """Answers by method and path, ids by path, and the bodies of a batch and of entries."""

    answers: dict[str, Any]
    ids: dict[str, str]
    batch: dict[str, Any]
    entries: str


_HASHES = {"order-4711": (747_360_416, 3_169_704_831), "order-4712": (747_360_415, 234_789_609)}


def _item(topic: str, queue_id: int, key: str, offset: int, size: int, timestamp_ms: int) -> dict[str, Any]:
    key_hash, fingerprint = _HASHES[key]
    return {
        "topic": topic,
        "topic_id": 1_697_644_014,
        "queue_id": queue_id,
        "offset": offset,
        "size": size,
        "timestamp_ms": timestamp_ms,
        "key_hash": key_hash,
        "fingerprint": fingerprint,
    }


_SEEN: dict[str, Any] = {"unknown_topics": [], "as_of_ms": None, "freshness": [], "lost": [], "expired_before_ms": None}
_EXPLAIN: dict[str, Any] = {
    "requests": 0,
    "bytes": 0,
    "cost_usd": 0.0,
    "elapsed_ms": 0.3,
    "files_read": 1,
    "files_skipped": 0,
    "folded_entries": 0,
}
_NEWEST = [_item(*ENTRIES[1]), _item(*ENTRIES[0])]
_RESULT: dict[str, Any] = {"status": "complete", "cursor": None, "unknown_topics": [], "expired_before_ms": None}
_FILE_ID = "001762000000000-90a149333947"
_FILE = {
    "file_id": _FILE_ID,
    "state": "unsealed",
    "lane": "main",
    "sequence": 1,
    "begin_ms": 1_762_000_000_000,
    "end_ms": 1_762_000_090_000,
    "entries": 4,
    "bytes": 40_312,
    "path": f"[root]/unsealed/{_FILE_ID}.index",
    "object": None,
    "table": None,
    "error": None,
}
_TIMES = {"begin_ms": 1_762_000_000_000, "end_ms": 1_762_000_061_000}
_OF_ORDERS = {"topic": "orders", "entries": 3, "bytes": 1741, **_TIMES, "uncounted_files": 0}
_OF_PAYMENTS = {
    "topic": "payments",
    "entries": 1,
    "bytes": 256,
    "begin_ms": 1_762_000_090_000,
    "end_ms": 1_762_000_090_000,
    "uncounted_files": 0,
}

_JOB_ID = "9f86d081884c7d65"
_ENTRY = {"topic": "orders", "queue_id": 0, "keys": ["order-4713"], "offset": 900_000, "size": 300}

EXAMPLES = Examples(
    {
        "GET /v1/query": {
            "items": _NEWEST,
            "status": "complete",
            "cursor": None,
            "failed": [],
            "explain": _EXPLAIN,
            **_SEEN,
            "timestamp_resolution_ms": 1000,
        },
        "POST /v1/query:batch": {
            "results": [{"items": _NEWEST, **_RESULT}, {"items": [_item(*ENTRIES[2])], **_RESULT}],
            "status": "complete",
            "cursors": {},
            "partial": [],
            "failed": [],
            "explain": _EXPLAIN,
            **_SEEN,
            "timestamp_resolution_ms": 1000,
        },
        "GET /v1/topics": {
            "topics": [_OF_ORDERS, _OF_PAYMENTS],
            "status": "complete",
            "failed": [],
            "explain": _EXPLAIN,
            **_SEEN,
        },
        "GET /v1/files": {
            "index_id": "47b54056aa827d3f",
            "log_number": 2,
            "status": "complete",
            "files": [_FILE],
            "totals": {"files": 1, "entries": 4, "bytes": 40_312, "by_state": {"unsealed": 1}},
            "archived": [],
        },
        "GET /v1/files/{id}": {**_FILE, "topics": ["orders", "payments"]},
        "GET /v1/du": {
            "status": "complete",
            "index_id": "47b54056aa827d3f",
            "log_number": 2,
            "by": ["topic"],
            "prices_as_of": "2026-11",
            "usd_per_gib_month": 0.023,
            "rows": [
                {"topic": "orders", "entries": 3, "bytes": 30_234, "usd_a_month": 0.0, "estimated": False},
                {"topic": "payments", "entries": 1, "bytes": 10_078, "usd_a_month": 0.0, "estimated": False},
            ],
            "totals": {"entries": 4, "bytes": 40_312, "usd_a_month": 0.0},
        },
        "POST /v1/entries": {
            "entries": 1,
            "messages": 1,
            "source": None,
            "position": None,
            "durable_position": None,
            "repeated": False,
        },
        "POST /v1/verify": {
            "id": _JOB_ID,
            "state": "running",
            "deep": True,
            "begun_ms": 1_762_000_200_000,
            "ended_ms": None,
            "checked": 0,
            "doing": "files",
            "report": None,
            "problem": None,
        },
        "GET /livez": {"status": "alive"},
        "GET /readyz": {"status": "ready", "reasons": []},
    },
    {"/v1/messages/{id}": "7F00000100002A9F0000000000000000", "/v1/files/{id}": _FILE_ID, "/v1/verify/{id}": _JOB_ID},
    {"lookups": [{"topic": "orders", "key": "order-4711"}, {"topic": "orders", "key": "order-4712", "max_count": 1}]},
    json.dumps(_ENTRY | {"timestamp_ms": 1_762_000_120_000}) + "\n",
)
