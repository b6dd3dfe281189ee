"""Converts a service's JSON and Arrow responses to the library's answers and errors. Pure."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from tiered_index import errors, types
from tiered_index.base.documents import typed
from tiered_index.base.encoding import COLUMNS, STATUS
from tiered_index.format.schema import Column, Schema
from tiered_index.service.read.answers.messages import Fetched, MessagesResult

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
# Errors whose class and message a problem document restores
_BY_CLASS = (errors.InvalidArgument, errors.ConfigError, errors.BackPressure, errors.StorageUnavailable)


def decoded(decode: Callable[[httpx.Response], T], response: httpx.Response) -> T:
    """Return `decode(response)`. Raises `StorageUnavailable` if it broke off, or has another form than a service's."""
    try:
        return decode(response)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, RecursionError, errors.ConfigError) as error:
        problem = "broke off (repeat the request, or ask for less), or it is none: is this a tiered_index service?"
        text = f"the answer of {response.url.netloc.decode()} {problem} {error!r:.200}"
        raise errors.StorageUnavailable(text) from error


def document_of(response: httpx.Response) -> dict[str, Any]:
    """Return a JSON document."""
    return dict(response.json())


@functools.lru_cache(maxsize=64)
def item_type_of(declared: str) -> type[types.IndexItem]:
    """Return the class of the entries of a response by its header `COLUMNS`."""
    document = json.loads(declared)
    return Schema(document["name"], tuple(Column.served(*column) for column in document["columns"])).item_type()


def _entries_of(
    documents: Sequence[dict[str, Any]], item_type: Any
) -> tuple[tuple[types.IndexItem, ...], tuple[types.FilePlace | None, ...]]:
    """Return the entries that JSON documents describe, and their places in files. JSON has neither bytes nor NaN.

    Members that are no columns are left out.
    """
    # the index may have a column of this name
    has_own = "entry_id" in types.own_columns(item_type)
    places = tuple([None if has_own else types.taken_place(document) for document in documents])
    by_kind: dict[str, Callable[[Any], Any]] = {"S": bytes.fromhex, "f": lambda value: nan if value is None else value}
    decoders = {values.name: by_kind.get(types.value_kind(values)) for values in dataclasses.fields(item_type)}
    columns = ({name: values[name] for name in decoders if name in values} for values in documents)
    special = [(name, decode) for name, decode in decoders.items() if decode is not None]
    items = (item_type(**values | {name: decode(values[name]) for name, decode in special}) for values in columns)
    return tuple(items), places


def _members(kind: type[types.Answer], document: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a kind of answer, without its rows, of a document. A part of a batch lacks some."""
    hints = {name: hint for name, hint in kind.members().items() if name in document and name != kind.rows_field}
    members = {name: typed(document[name], hint) for name, hint in hints.items() if name != "as_of_ms"}
    seen = {name: members.pop(name) for name in types.Provenance._fields if name in members}
    return {**members, "seen": types.Provenance(**seen)}


def result_of(response: httpx.Response) -> types.QueryResult:
    """Return the answer to one lookup."""
    return _result(document_of(response), response)


def _result(document: dict[str, Any], response: httpx.Response) -> types.QueryResult:
    item_type, members = item_type_of(response.headers[COLUMNS]), _members(types.QueryResult, document)
    items, places = _entries_of(document["items"], item_type)
    return types.QueryResult[Any](items=items, item_type=item_type, places=places if any(places) else None, **members)


def results_of(response: httpx.Response) -> list[types.QueryResult]:
    """Return the answers of a batch. Each has the explain and freshness of the whole batch."""
    document = document_of(response)
    return [_result(document | result, response) for result in document["results"]]


def table_of(response: httpx.Response) -> tuple[pa.Table, dict[str, Any]]:
    """Return the table of an Arrow stream and its status, without which it is no answer."""
    import pyarrow as pa

    with pa.ipc.open_stream(response.content) as stream:
        batches = list(stream.iter_batches_with_custom_metadata())
        table = pa.Table.from_batches([batch for batch, _ in batches], stream.schema)
    return table, json.loads(batches[-1][1][STATUS])


def topics_of(response: httpx.Response) -> types.TopicsResult:
    """Return the answer to a list of topics."""
    document, kind = document_of(response), types.TopicsResult
    return kind(topics=typed(document["topics"], kind.members()["topics"]), **_members(kind, document))


@dataclasses.dataclass(frozen=True)
class _Message:
    """A message as the service returned it."""

    document: dict[str, Any]

    def to_dict(self, body: object = None, max_body_bytes: int = 0) -> dict[str, Any]:
        return self.document  # the service was asked for the body's form

    @property
    def compression(self) -> str | None:
        return self.document.get("compression")

    def plain_bytes(self, max_bytes: int) -> int:
        return int(self.document.get("body_bytes") or 0)


def messages_of(response: httpx.Response) -> MessagesResult:
    """Return the answer to a lookup of messages."""
    document, item_type = document_of(response), item_type_of(response.headers[COLUMNS])

    def fetched_of(document: dict[str, Any]) -> Fetched:
        (item,), (place,) = _entries_of([document["item"]], item_type) if document["item"] else ((None,), (None,))
        message = _Message(document["message"]) if document["message"] is not None else None
        return Fetched(
            item=item, place=place, message=message, **{n: document[n] for n in ("state", "read_from", "problem")}
        )

    messages = tuple(map(fetched_of, document["messages"]))
    return MessagesResult(messages=messages, **_members(MessagesResult, document))


class NotThere(errors.InvalidArgument):
    """The service has no such message, file or job."""

    exit_code = 1


_BY_STATUS = {401: errors.ConfigError, 403: errors.ConfigError, 404: NotThere}


def error_of(problem: Mapping[str, Any]) -> errors.TieredIndexError:
    """Return the error for a problem document (RFC 9457). Its class says whether to repeat or correct the request."""
    kind, status = errors.error_named(str(problem.get("error"))), problem.get("status", 500)
    message = str(problem.get("detail", f"the service answered with status {status}"))
    if issubclass(kind, errors.PartialAnswer):
        return kind(message, failed=typed(problem.get("failed", ()), tuple[types.FileReport, ...]))
    if issubclass(kind, errors.CorruptFile):
        return kind("the index", message)
    if issubclass(kind, _BY_CLASS):
        return kind(message)
    if status in _BY_STATUS:
        return _BY_STATUS[status](message)
    # A repeat after a timeout (408) or throttling (429) may succeed
    is_wrong = 400 <= status < 500 and status not in (408, 429)
    return (errors.InvalidArgument if is_wrong else errors.StorageUnavailable)(message)
