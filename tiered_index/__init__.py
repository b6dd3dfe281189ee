"""tiered_index: a tiered cold/hot index engine for append-only message logs.

    with IndexService.open(root="/data/index", storage="s3://bucket/prefix") as index:
        index.put("orders", 0, ["order-4711"], offset=123456, size=512, timestamp_ms=1_700_000_000_000)
        answer = index.query("orders", "order-4711")

- `IndexService` writes and reads one index.
- `IndexReader` reads one or more indexes and changes nothing.
- `IndexConfig` has all settings.
- `errors` has all errors, grouped by what you should do next.

`help(IndexService.put)` prints the arguments and errors of a call. docs/api.md lists all public names,
and docs/using.md has examples.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tiered_index.base.version import __version__

if TYPE_CHECKING:
    from tiered_index.base.retention import Retention
    from tiered_index.config import IndexConfig
    from tiered_index.connectors.erase import erase_index as erase
    from tiered_index.connectors.files.messages import FileRow, FileRows
    from tiered_index.format.keys.hash_sql import hash_key_sql
    from tiered_index.format.keys.hashing import key_hash as hash_key
    from tiered_index.service.async_reader import AsyncIndexReader
    from tiered_index.service.index import IndexService
    from tiered_index.service.jobs.copying import CopyReport
    from tiered_index.service.jobs.copying import copy_index as copy
    from tiered_index.service.jobs.erase import Erasure
    from tiered_index.service.jobs.expiry import ExpiryPlan
    from tiered_index.service.jobs.expiry import expire_index as expire
    from tiered_index.service.jobs.merge_run import MergeReport
    from tiered_index.service.jobs.merge_run import merge_index as merge
    from tiered_index.service.jobs.rewriting.merge_plan import MergeOptions
    from tiered_index.service.opening import WriterHealth
    from tiered_index.service.read.answers.messages import Fetched, MessageSource, MessagesResult
    from tiered_index.service.reader import IndexReader
    from tiered_index.types import (
        FileReport,
        Freshness,
        IndexItem,
        KeyedIndexItem,
        Lookup,
        LostFile,
        QueryResult,
        TopicsResult,
        TopicSummary,
        column,
    )

__all__ = [
    "AsyncIndexReader",
    "CopyReport",
    "Erasure",
    "ExpiryPlan",
    "Fetched",
    "FileReport",
    "FileRow",
    "FileRows",
    "Freshness",
    "IndexConfig",
    "IndexItem",
    "IndexReader",
    "IndexService",
    "KeyedIndexItem",
    "Lookup",
    "LostFile",
    "MergeOptions",
    "MergeReport",
    "MessageSource",
    "MessagesResult",
    "QueryResult",
    "Retention",
    "TopicSummary",
    "TopicsResult",
    "WriterHealth",
    "__version__",
    "column",
    "copy",
    "erase",
    "expire",
    "hash_key",
    "hash_key_sql",
    "merge",
]

# Public names that differ from the name in their module
_ALIASES = {
    "copy": "copy_index",
    "erase": "erase_index",
    "expire": "expire_index",
    "hash_key": "key_hash",
    "merge": "merge_index",
}
# Modules load on first use: their libraries load slowly, and a command must react to an interrupt before that.
_NAMES = {
    "connectors.erase": ("erase",),
    "config": ("IndexConfig",),
    "format.keys.hash_sql": ("hash_key_sql",),
    "format.keys.hashing": ("hash_key",),
    "base.retention": ("Retention",),
    "service.async_reader": ("AsyncIndexReader",),
    "service.jobs.erase": ("Erasure",),
    "service.index": ("IndexService",),
    "service.jobs.copying": ("CopyReport", "copy"),
    "service.jobs.expiry": ("ExpiryPlan", "expire"),
    "service.jobs.rewriting.merge_plan": ("MergeOptions",),
    "service.jobs.merge_run": ("MergeReport", "merge"),
    "service.opening": ("WriterHealth",),
    "service.read.answers.messages": ("Fetched", "MessageSource", "MessagesResult"),
    "service.reader": ("IndexReader",),
    "connectors.files.messages": ("FileRow", "FileRows"),
    "types": (
        "FileReport",
        "Freshness",
        "IndexItem",
        "KeyedIndexItem",
        "Lookup",
        "LostFile",
        "QueryResult",
        "TopicSummary",
        "TopicsResult",
        "column",
    ),
}


def _named(function: Any, name: str) -> Any:
    # `help` shows this name; pickle finds a function by its name and module
    function.__name__, function.__qualname__, function.__module__ = name, name, __name__
    return function


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            home = importlib.import_module(f"{__name__}.{module}")
            return _named(getattr(home, _ALIASES[name]), name) if name in _ALIASES else getattr(home, name)
    if name in ("config", "errors", "format", "service", "storage", "types"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
