"""Converts a service's JSON and Arrow responses to the library's answers and errors. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any, TypeVar

from tiered_index import errors
from tiered_index.errors import ConfigError, InvalidArgument, PartialAnswer, StorageUnavailable, TieredIndexError
from tiered_index.format.schema import Column, Schema
from tiered_index.service.lookup.messages import Fetched, MessagesResult
from tiered_index.types import (
    Explain,
    FileReport,
    Freshness,
    IndexItem,
    KeyedIndexItem,
    LostFile,
    Provenance,
    QueryResult,
    TopicsResult,
    TopicSummary,
    column,
    value_kind,
)

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
D = TypeVar("D")
# Key of the status in the metadata of an Arrow stream's last batch
STATUS = b"tiered_index.status"
# Header with the declarations of the entries' columns
COLUMNS = "tiered-index-columns"


def decoded(decode: Callable[[D], T], document: D) -> T:
    """Return `decode(document)`. Raises `StorageUnavailable` if the document has another form than a service's."""
    try:
        return decode(document)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise StorageUnavailable(f"unexpected response: is this a tiered_index service? {error!r:.200}") from error


_EVERY = frozenset(one.name for one in dataclasses.fields(IndexItem))
# declarations of columns by the type of their values in JSON. A number that is not finite is null there.
_INFERRED = {int: ">i8", float: ">f8", type(None): ">f8", str: "U1"}


def item_type_of(declared: str | None) -> type[IndexItem] | None:
    """Return the class of the entries of a response by its header `COLUMNS`; None without it (an older service).

    Raises `StorageUnavailable` for another text.
    """
    return None if declared is None else decoded(_declared, declared)


@functools.lru_cache(maxsize=64)
def _declared(declared: str) -> type[IndexItem]:
    document = json.loads(declared)
    return Schema(document["name"], tuple(Column.served(*one) for one in document["columns"])).item_type()


@functools.lru_cache(maxsize=1024)
def _inferred(columns: tuple[tuple[str, type], ...]) -> type[IndexItem]:
    """Return the item class that has `columns` (name and type in JSON) in addition to those of `IndexItem`."""
    if [name for name, _ in columns] == ["fingerprint"]:
        return KeyedIndexItem
    # An older service does not say which columns are part of the identity. With all of them no entry is dropped.
    fields = [(name, Any, column(_INFERRED[kind], identity=True)) for name, kind in columns]
    return dataclasses.make_dataclass("ServedItem", fields, bases=(IndexItem,), frozen=True, kw_only=True)


@functools.lru_cache(maxsize=64)
def _decoders(item_type: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return the names of columns whose values JSON can't have, each with a function that decodes them."""
    by_kind: dict[str, Callable[[Any], Any]] = {"S": bytes.fromhex, "f": lambda value: nan if value is None else value}
    kinds = {f.name: value_kind(f) for f in dataclasses.fields(item_type)}
    return tuple((name, by_kind[kind]) for name, kind in kinds.items() if kind in by_kind)


def item_of(document: Mapping[str, Any], item_type: type[IndexItem] | None = None) -> IndexItem:
    """Return the entry that a JSON document describes, of `item_type`, or of a class that has its columns."""
    kind: Any = item_type or _inferred(tuple((name, type(one)) for name, one in document.items() if name not in _EVERY))
    if decoders := _decoders(kind):
        document = {**document, **{name: decode(document[name]) for name, decode in decoders}}
    item: IndexItem = kind(**document)
    return item


def _known(kind: Any, document: Mapping[str, Any]) -> Any:
    """Return the object of class `kind` that a document describes. Later services may send further members."""
    return kind(**{one.name: document[one.name] for one in dataclasses.fields(kind) if one.name in document})


def _explain(document: dict[str, Any]) -> Explain:
    return _known(Explain, document | {"files": reports_of(document.get("files", ()))})  # type: ignore[no-any-return]


def reports_of(documents: Sequence[dict[str, Any]]) -> tuple[FileReport, ...]:
    """Return the file reports that JSON documents describe."""
    return tuple(_known(FileReport, one) for one in documents)


def seen_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that every kind of answer has, as keyword arguments."""
    return {
        "status": document["status"],
        "failed": reports_of(document.get("failed", ())),
        "explain": _explain(document["explain"]),
        "seen": Provenance(
            tuple(_known(Freshness, one) for one in document.get("freshness", ())),
            tuple(document["unknown_topics"]),
            tuple(_known(LostFile, one) for one in document.get("lost", ())),
            document["expired_before_ms"],
        ),
    }


def result_of(document: dict[str, Any], item_type: type[IndexItem] | None = None) -> QueryResult:
    """Return the answer to one lookup. `item_type` as in `item_of`."""
    items = tuple(item_of(one, item_type) for one in document["items"])
    return QueryResult(
        items=items,
        cursor=document["cursor"],
        timestamp_resolution_ms=document["timestamp_resolution_ms"],
        item_type=item_type or (type(items[0]) if items else IndexItem),
        **seen_of(document),
    )


def results_of(document: dict[str, Any], item_type: type[IndexItem] | None = None) -> list[QueryResult]:
    """Return the answers of a batch; `item_type` as in `item_of`.

    Each has the explain and freshness of the whole batch.
    """
    common = {name: document[name] for name in ("explain", "freshness", "timestamp_resolution_ms")}
    return [result_of(common | one, item_type) for one in document["results"]]


def table_of_stream(data: bytes) -> tuple[pa.Table, dict[str, Any]]:
    """Return the table of an Arrow stream and its status. Raises `ValueError` if the stream ends without a status."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(data) as stream:
            batches = list(stream.iter_batches_with_custom_metadata())
            table = pa.Table.from_batches([batch for batch, _ in batches], stream.schema)
    except OSError as error:  # the stream broke off
        raise ValueError(str(error)) from error
    metadata = batches[-1][1] if batches else None
    if metadata is None:
        raise ValueError("a stream without its status")
    return table, json.loads(metadata[STATUS])


def topics_of(document: dict[str, Any]) -> TopicsResult:
    """Return the answer to a list of topics."""
    return TopicsResult(topics=tuple(_known(TopicSummary, one) for one in document["topics"]), **seen_of(document))


@dataclasses.dataclass(frozen=True)
class _Message:
    """A message as the service returned it."""

    document: dict[str, Any]

    def to_dict(self, body: object = None, max_body_bytes: int = 0) -> dict[str, Any]:
        return self.document  # the service was asked for the body's form


def messages_of(document: dict[str, Any], item_type: type[IndexItem] | None = None) -> MessagesResult:
    """Return the answer to a lookup of messages. `item_type` as in `item_of`."""
    explain = document["explain"]
    fetched = [
        Fetched(
            item=item_of(one["item"], item_type) if one["item"] is not None else None,
            state=one["state"],
            message=_Message(one["message"]) if one["message"] is not None else None,
            read_from=one["read_from"],
            problem=one["problem"],
        )
        for one in document["messages"]
    ]
    return MessagesResult(
        messages=tuple(fetched),
        cursor=document["cursor"],
        collisions=document["collisions"],
        message_requests=explain["message_requests"],
        message_bytes=explain["message_bytes"],
        **seen_of(document),
    )


class NotThere(InvalidArgument):
    """The service has no such message, file or job."""

    exit_code = 1


# Errors whose only argument is their message
_PLAIN = frozenset(
    {
        "BackPressure",
        "ConfigError",
        "DiskFull",
        "InvalidArgument",
        "InvalidCursor",
        "LockHeld",
        "ObjectArchived",
        "SchemaMismatch",
        "StorageMisconfigured",
        "StorageUnavailable",
        "WriterFenced",
    }
)


def error_of(problem: Mapping[str, Any]) -> TieredIndexError:
    """Return the error for a problem document (RFC 9457). Its class says whether to repeat or correct the request."""
    name, status = problem.get("error"), problem.get("status", 500)
    message = str(problem.get("detail", f"the service answered with status {status}"))
    if name in _PLAIN:
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    if name in ("PartialAnswer", "BudgetExceeded"):
        kind: type[PartialAnswer] = getattr(errors, name)
        with contextlib.suppress(TypeError):
            return kind(message, failed=reports_of(problem.get("failed", ())))
        return kind(message)
    if name in ("CorruptFile", "UnsupportedVersion", "StorageBehind", "RootBehind"):
        return getattr(errors, name)("the index", message)  # type: ignore[no-any-return]
    if status in (401, 403):
        return ConfigError(message)
    if status == 404:
        return NotThere(message)
    # A repeat after a timeout (408) or throttling (429) may succeed
    is_wrong = 400 <= status < 500 and status not in (408, 429)
    return InvalidArgument(message) if is_wrong else StorageUnavailable(message)
