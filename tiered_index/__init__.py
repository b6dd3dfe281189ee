"""tiered_index: a tiered cold/hot index engine for append-only message logs.

    with IndexService.open(root="/data/index", storage="s3://bucket/prefix") as index:
        index.put("orders", 0, ["order-4711"], offset=123456, size=512, timestamp_ms=1_700_000_000_000)
        answer = index.query("orders", "order-4711")

`IndexService` writes and reads one index; `IndexReader` reads one or several and changes nothing. `IndexConfig` has
every setting, `errors` every error, sorted by what the caller should do next.
"""

from tiered_index._version import __version__
from tiered_index.config import IndexConfig
from tiered_index.format.hashing import hash_key_sql
from tiered_index.format.hashing import key_hash as hash_key
from tiered_index.service.index import IndexService
from tiered_index.service.lookup.messages import Fetched, MessageSource, MessagesResult
from tiered_index.service.reader import IndexReader
from tiered_index.types import FileReport, IndexItem, KeyedIndexItem, Lookup, QueryResult, column

__all__ = [
    "Fetched",
    "FileReport",
    "IndexConfig",
    "IndexItem",
    "IndexReader",
    "IndexService",
    "KeyedIndexItem",
    "Lookup",
    "MessageSource",
    "MessagesResult",
    "QueryResult",
    "__version__",
    "column",
    "hash_key",
    "hash_key_sql",
]
