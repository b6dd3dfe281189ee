"""Models that check the parameters and bodies of requests, and return them as the library's arguments.

`openapi.json` describes each parameter. Threads: any; values are immutable.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import QueryParams

from tiered_index.config import Wait
from tiered_index.conversion import converted, kinds, members_of, of_text, sentence_of
from tiered_index.errors import InvalidArgument
from tiered_index.server.calls import Allowance
from tiered_index.server.problems import Refused
from tiered_index.service.answers.asked import LookupColumns
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.types import MAX_KEY_UNITS, MAX_TOPIC_UNITS, parse_time

M = TypeVar("M", bound=Struct)


class Time(int):
    """Epoch milliseconds; a request may give an ISO 8601 time."""


class End(int):
    """The end of a time range; a date without a time means the end of the day."""


Topic = Annotated[str, Meta(min_length=1, max_length=MAX_TOPIC_UNITS)]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_UNITS)]
# Default of the library's `query_all`
PAGE = 1000
# Default of `Lookup`
_MAX_COUNT = 64
# Most errors of one request that are reported in detail
_MOST_ERRORS = 5
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1, max_length=1024)]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Nothing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model of a request without parameters. An undeclared parameter is an error."""


class Spending(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one request. The service has its own; the lower one counts."""

    max_requests: Count | None = None
    max_bytes: Count | None = None
    max_cost_usd: Amount | None = None
    timeout_s: Wait | None = None

    def narrow(self, allowance: Allowance) -> None:
        """Lower the bounds of `allowance` to these."""
        allowance.narrow(LookupLimits(self.max_requests, self.max_bytes, self.timeout_s), self.max_cost_usd)


class Bounds(Spending, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one lookup, and the parts of its answer."""

    allow_partial: bool = False
    explain: bool = False


class Range(Bounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time range."""

    begin_ms: Time | None = None
    end_ms: End | None = None


class OneKey(Range, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of one topic, and the page of its entries."""

    topic: Topic
    key: Key
    max_count: Annotated[int, Meta(ge=1)] = _MAX_COUNT
    cursor: str | None = None

    def arguments(self, cursor: str | None = None) -> tuple[str, str, int | None, int | None, int, str | None, bool]:
        """Return the first arguments of the library's lookups, with another `cursor` if one is given."""
        page = self.max_count, cursor or self.cursor, self.allow_partial
        return self.topic, self.key, self.begin_ms, self.end_ms, *page


class QueryParameters(OneKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/query`."""

    all: bool = False


class DuParameters(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/du`."""

    by: str = "topic,day,state"


class EntriesParameters(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `POST /v1/entries`."""

    source: Text | None = None
    position: Position | None = None
    after: Position | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        if (self.source is None) != (self.position is None) or (self.after is not None and self.source is None):
            raise ValueError("source and position belong together, and after needs both")


class VerifyBody(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/verify`."""

    deep: bool = False


Body = Literal["text", "json", "hex", "excerpt", "none"]


class MessagesParameters(OneKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/messages`."""

    body: Body = "text"
    contains: Text | None = None


class MessageParameters(Bounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/messages/{id}`."""

    topic: Topic | None = None
    cursor: str | None = None
    body: Body = "text"

    def __post_init__(self) -> None:
        if self.cursor is not None and self.topic is None:
            raise ValueError("cursor continues an answer to a unique key: give topic, too")


class BrowseParameters(Spending, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/browse`."""

    topic: Topic
    queue_id: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    at_ms: Time | None = None
    cursor: Annotated[str, Meta(max_length=4096)] | None = None
    max_count: Annotated[int, Meta(ge=1, le=100)] = 25
    body: Body = "text"

    def __post_init__(self) -> None:
        if (self.at_ms is None) == (self.cursor is None):
            raise ValueError("give at_ms or cursor")


class OneLookup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One of the lookups of a batch."""

    topic: Topic
    key: Key
    begin_ms: Time | None = None
    end_ms: End | None = None
    max_count: Annotated[int, Meta(ge=1)] = _MAX_COUNT
    cursor: str | None = None


class BatchBody(Bounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/query:batch`; the bounds apply to all lookups together."""

    allow_spent: bool = False
    lookups: Annotated[list[OneLookup], Meta(min_length=1)]

    def columns(self) -> LookupColumns:
        """Return the lookups as columns."""
        rows = self.lookups
        begins_ms: list[int | None] = [one.begin_ms for one in rows]
        ends_ms: list[int | None] = [one.end_ms for one in rows]
        max_counts, cursors = [one.max_count for one in rows], [one.cursor for one in rows]
        topics, keys = [one.topic for one in rows], [one.key for one in rows]
        return LookupColumns(topics, keys, begins_ms, ends_ms, max_counts, cursors)


def of_query(model: type[M], given: QueryParams) -> M:
    """Return a request's checked parameters. Raises `InvalidArgument`, also for a repeated parameter."""
    values = dict(given)
    if len(values) < len(given.multi_items()):
        twice = next(name for name in values if len(given.getlist(name)) > 1)
        raise InvalidArgument(f"parameter {twice!r:.80} is given more than once")
    return _checked(model, values)


def of_body(model: type[M], body: bytes, most: Mapping[str, int] = MappingProxyType({})) -> M:
    """Return a request's checked JSON body. Raises `InvalidArgument`, and `Refused` for a list longer than `most`."""
    try:
        values = _json(body)
        for name, limit in most.items() if isinstance(values, dict) else ():
            if isinstance(listed := values.get(name), list) and len(listed) > limit:
                # before objects are made for the elements
                raise Refused(413, f"{len(listed):,} {name}; the limit of this service is {limit:,}")
        return _checked(model, values)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument("the body is not JSON") from error


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        # other encodings, and constants such as NaN
        return json.loads(body)


def _time(kind: type, value: Any) -> Any:
    return kind(parse_time(str(value), end=kind is End))


def _checked(model: type[M], values: Any) -> M:
    if not isinstance(values, dict):
        raise InvalidArgument("the body must be an object")
    values = _typed(model, values)
    try:
        return msgspec.convert(values, model, dec_hook=_time)
    except msgspec.ValidationError:
        if isinstance(rows := values.get("lookups"), list):
            values["lookups"] = [_typed(OneLookup, row) if isinstance(row, dict) else row for row in rows]
        # msgspec names the first error only
        if problems := _problems(model, values):
            raise InvalidArgument("; ".join(problems[:_MOST_ERRORS])) from None
    try:
        return msgspec.convert(values, model, dec_hook=_time)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from error


def _typed(model: type[Struct], values: dict[str, Any]) -> dict[str, Any]:
    """Return values whose numbers and truths are no texts."""
    members = _members(model)
    return {name: of_text(value, members[name]) if name in members else value for name, value in values.items()}


@functools.cache
def _members(model: type[Struct]) -> dict[str, list[Any]]:
    return {name: members_of(kind) for name, kind in kinds(model).items()}


def _problems(model: type[Struct], values: dict[str, Any]) -> list[str]:
    declared, problems = kinds(model), []
    for name, value in values.items():
        if name not in declared:
            problems.append(f"{name:.80} is not a parameter of this request")
            continue
        try:
            converted(value, declared[name], _time)
        except ValueError as error:
            problems.append(_said(name, error))
    required = [field.name for field in msgspec.structs.fields(model) if field.required]
    return problems + [f"{name} is missing" for name in required if name not in values]


def _said(name: str, error: ValueError) -> str:
    """Return the message about a parameter, or about a member of a list in it."""
    cause = str(error.__cause__ or error)
    problem, _, inner = cause.partition(" - at `$")
    place = name + inner.rstrip("`").replace("[", ".").replace("]", "")
    if (lacking := _LACKING.match(problem)) is not None:
        return f"{place}.{lacking[2]} is {'missing' if lacking[1] == 'missing required' else 'not a parameter'}"
    return f"{place:.80}: {sentence_of(problem) if inner else error}"


_LACKING = re.compile("Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
