"""The public API keeps its names and signatures, and each has a docstring (docs/api.md)."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
from pathlib import Path

import tiered_index
from tiered_index import Fetched, IndexConfig, IndexItem, IndexReader, IndexService, MessagesResult, QueryResult
from tiered_index import errors as errors_module
from tiered_index.errors import TieredIndexError
from tiered_index.types import Explain, FileReport, Lookup, Provenance, TopicsResult

PACKAGE = Path(tiered_index.__file__).parent


def parameters(function):
    return [
        (p.name, None if p.default is p.empty else p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self" and p.kind is p.POSITIONAL_OR_KEYWORD
    ]


def names(function):
    return [name for name, _ in parameters(function)]


def test_the_package_shows_what_a_user_imports():
    assert tiered_index.__all__ == [
        "AsyncIndexReader", "CopyReport", "Erasure", "ExpiryPlan", "Fetched", "FileReport", "FileRow", "FileRows",
        "Freshness", "IndexConfig", "IndexItem", "IndexReader", "IndexService", "KeyedIndexItem", "Lookup", "LostFile",
        "MergeOptions", "MergeReport", "MessageSource", "MessagesResult", "QueryResult", "Retention", "TopicSummary",
        "TopicsResult", "WriterHealth", "__version__", "column", "copy", "erase", "expire", "hash_key", "hash_key_sql",
        "merge",
    ]  # fmt: skip
    assert all(hasattr(tiered_index, name) for name in tiered_index.__all__)


def test_signatures_are_contracts():
    put = ["topic", "queue_id", "keys", "offset", "size", "timestamp_ms", "source", "source_position"]
    assert names(IndexService.put) == put
    assert names(IndexService.put_batch) == ["columns", "source", "source_position"]
    optional = [("begin_ms", None), ("end_ms", None), ("max_count", 64), ("cursor", None), ("allow_partial", False)]
    query = [("topic", None), ("key", None), *optional]
    for kind in (IndexService, IndexReader):
        assert parameters(kind.query) == query
        assert parameters(kind.messages) == query
        assert inspect.signature(kind.messages).parameters["source"].kind is inspect.Parameter.KEYWORD_ONLY
        assert names(kind.query_many)[0] == "lookups"
        assert issubclass(kind, contextlib.AbstractContextManager)
    for name in ("flush", "seal", "run_lifecycle"):
        assert names(getattr(IndexService, name)) == []
    assert names(IndexReader.close) == []
    assert parameters(IndexService.close) == [("timeout_s", 10.0)]
    assert names(IndexService.durable_position) == ["source"]
    assert names(IndexService.open) == ["config"]
    assert names(IndexReader.open) == ["storage"]
    keywords = {p.name for p in inspect.signature(IndexReader.open).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert {"root", "config"} <= keywords
    assert callable(IndexConfig.load)


def test_fields_are_contracts():
    def fields(kind):
        return [f.name for f in dataclasses.fields(kind)]

    entry = ["topic", "topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash", "source"]
    assert fields(IndexItem) == entry
    seen = ["freshness", "unknown_topics", "lost", "expired_before_ms", "replaced"]
    every = ["status", "failed", "explain", "seen"]
    assert fields(QueryResult) == [*every, "items", "cursor", "timestamp_resolution_ms", "item_type", "places"]
    assert fields(MessagesResult)[:6] == [*every, "messages", "cursor"]
    assert list(Provenance._fields) == seen
    # answers have the same names
    assert all(hasattr(kind, name) for kind in (QueryResult, TopicsResult, MessagesResult) for name in seen)
    assert {"item", "state", "message", "problem"} <= set(fields(Fetched))
    assert fields(Lookup) == ["topic", "key", "begin_ms", "end_ms", "max_count", "cursor"]
    cost = ["requests", "bytes", "cost_usd", "elapsed_ms"]
    of_messages = ["message_requests", "message_bytes"]
    assert fields(Explain) == [
        *cost,
        "files_read",
        "files_cached",
        "files_skipped",
        "files",
        "folded_entries",
        *of_messages,
    ]
    report = {*cost, "file", "place", "outcome", "begin_ms", "end_ms", "gap_bytes", "matched", "error", "source"}
    report |= {"not_in_core"}
    assert set(fields(FileReport)) == report


def test_every_error_is_ours_and_has_an_exit_code():
    kinds = [getattr(errors_module, name) for name in errors_module.__all__]
    assert all(issubclass(kind, TieredIndexError) for kind in kinds)
    assert {kind.exit_code for kind in kinds} == {2, 3, 4, 5, 6, 7, 70}
    defined = {
        name
        for name, kind in vars(errors_module).items()
        if inspect.isclass(kind) and issubclass(kind, TieredIndexError)
    }
    assert defined == set(errors_module.__all__)


def public_definitions(path):
    """Yield (name, node) of the module and of every public class, function and method in it."""
    tree = ast.parse(path.read_text())
    yield "module", tree
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef) and "Protocol" not in {
                ast.unparse(base).partition("[")[0] for base in node.bases
            }:
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith(("_", "test_")):
                        yield f"{node.name}.{inner.name}", inner


def inherited(path, name):
    """Return the docstring that an override inherits."""
    module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    return inspect.getdoc(functools.reduce(getattr, name.split("."), module)) if "." in name else None


def test_everything_public_says_what_it_is():
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stat().st_size]
    missing = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in paths
        for name, node in public_definitions(path)
        if ast.get_docstring(node) is None and not inherited(path, name)
    ]
    assert len(paths) > 150
    assert not missing
