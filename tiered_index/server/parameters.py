"""Parameters and bodies of requests, as the library's arguments.

The models check requests, and `openapi.json` describes them. Threads: any; values are immutable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.datastructures import QueryParams
from typing_extensions import TypedDict

from tiered_index.config import in_our_words
from tiered_index.errors import InvalidArgument
from tiered_index.server.calls import Allowance
from tiered_index.server.problems import Refused
from tiered_index.service.answers.asked import LookupColumns
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.types import MAX_KEY_UNITS, MAX_TOPIC_UNITS, parse_time

M = TypeVar("M", bound=BaseModel)

_TIME: dict[str, Any] = {
    "anyOf": [
        {"type": "integer"},
        {"type": "string", "description": "epoch milliseconds, or a time or date by ISO 8601, UTC without a zone"},
    ]
}
Time = Annotated[int, BeforeValidator(lambda value: parse_time(str(value))), Field(json_schema_extra=_TIME)]
End = Annotated[int, BeforeValidator(lambda value: parse_time(str(value), end=True)), Field(json_schema_extra=_TIME)]
Topic = Annotated[str, Field(min_length=1, max_length=MAX_TOPIC_UNITS, examples=["orders"])]
Key = Annotated[str, Field(min_length=1, max_length=MAX_KEY_UNITS, examples=["order-4711"])]
# as the library's `query_all`
PAGE = 1000
# as a `Lookup`'s
_MAX_COUNT = 64
# Errors of one request of which the first ones are told: pydantic makes all of them, a KiB each.
_MOST_ERRORS = 20_000
BEGIN = "Earliest time, inclusive, by the second: epoch milliseconds or ISO 8601."
END = "Latest time, inclusive, by the second: epoch milliseconds or ISO 8601; a date alone is its whole day."


def _is_no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise InvalidArgument("must be a number, not true or false")
    return value


# pydantic takes true for 1
Count = Annotated[int, BeforeValidator(_is_no_truth)]
Amount = Annotated[float, BeforeValidator(_is_no_truth)]


class Nothing(BaseModel):
    """Model of a request without parameters. An undeclared parameter is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spending(Nothing):
    """Bounds of one request. The service has its own; the lower one counts."""

    max_requests: Count | None = Field(None, ge=0, description="Most requests to the storage.")
    max_bytes: Count | None = Field(None, ge=0, description="Most bytes read from the storage.")
    max_cost_usd: Amount | None = Field(None, ge=0, description="Highest estimated cost in US dollars.")
    timeout_s: Amount | None = Field(None, gt=0, allow_inf_nan=False, description="Time limit in seconds.")

    def narrow(self, allowance: Allowance) -> None:
        """Lower what a request may spend to these bounds."""
        allowance.narrow(LookupLimits(self.max_requests, self.max_bytes, self.timeout_s), self.max_cost_usd)


class Bounds(Spending):
    """Bounds of one lookup, and the parts of its answer."""

    allow_partial: bool = Field(False, description="Answer from the readable files, and name the others in `failed`.")
    explain: bool = Field(False, description="List each file with its requests, bytes and time in `explain.files`.")


class Range(Bounds):
    """A time range."""

    begin_ms: Time | None = Field(None, description=BEGIN)
    end_ms: End | None = Field(None, description=END)


class OneKey(Range):
    """One key of one topic, and how many answers are wanted."""

    topic: Topic = Field(description="Topic of the messages.")
    key: Key = Field(description="Key of the messages.")
    max_count: int = Field(64, ge=1, description="Most entries; with `all`, entries per page (default 1,000).")
    cursor: str | None = Field(None, description="Continue the truncated answer that gave this cursor.")


class QueryParameters(OneKey):
    """Parameters of `GET /v1/query`."""

    all: bool = Field(False, description="Return all entries, page by page. Only as NDJSON or Arrow.")


class DuParameters(Nothing):
    """Parameters of `GET /v1/du`."""

    by: str = Field("topic,day,state", description="Columns to group by, separated by commas.", examples=["topic"])


class EntriesParameters(Nothing):
    """Parameters of `POST /v1/entries`."""

    source: str | None = Field(None, min_length=1, max_length=1024, description="Name of the source of the entries.")
    position: int | None = Field(
        None, ge=0, lt=2**63, description="Position of the source after these entries (exclusive)."
    )
    after: int | None = Field(
        None, ge=0, lt=2**63, description="Position of the source before these entries. A gap is refused."
    )
    durable: bool = Field(False, description="Answer once the entries are on the local disk.")

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.source is None) != (self.position is None) or (self.after is not None and self.source is None):
            raise ValueError("source and position belong together, and after needs both")
        return self


class VerifyBody(Nothing):
    """Body of `POST /v1/verify`."""

    deep: bool = Field(False, description="Read every byte of every object.")


Body = Literal["text", "json", "hex", "excerpt", "none"]


class MessagesParameters(OneKey):
    """Parameters of `GET /v1/messages`."""

    body: Body = Field("text", description="Form of message bodies.")
    contains: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Only messages with this text, in any case, in body, tags, keys, ids or properties; others count "
        "as `collisions`.",
    )


class MessageParameters(Bounds):
    """Parameters of `GET /v1/messages/{id}`."""

    topic: Topic | None = Field(
        None, description="Topic: the id is then a unique key. Without it the id names a place in a log."
    )
    cursor: str | None = Field(None, description="Continue the truncated answer that gave this cursor.")
    body: Body = Field("text", description="Form of message bodies.")


class BrowseParameters(Spending):
    """Parameters of `GET /v1/browse`."""

    topic: Topic = Field(description="Topic of the messages.")
    queue_id: int | None = Field(None, ge=0, lt=2**31, description="Queue of the topic (default: all, up to 64).")
    at_ms: Time | None = Field(
        None, description="The moment: epoch milliseconds or ISO 8601. Half of the messages are from before it."
    )
    cursor: str | None = Field(
        None, max_length=4096, description="Continue at `earlier` or `later` of an answer, instead of `at_ms`."
    )
    max_count: int = Field(25, ge=1, le=100, description="Most messages.")
    body: Body = Field("text", description="Form of message bodies.")

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if (self.at_ms is None) == (self.cursor is None):
            raise ValueError("give at_ms or cursor")
        return self


# a mapping: of a thousand, a model or dataclass each took as long as the answers
class OneLookup(TypedDict):
    """One of the lookups of a batch."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    topic: Topic
    key: Key
    begin_ms: NotRequired[Annotated[Time | None, Field(description=BEGIN, json_schema_extra={"default": None})]]
    end_ms: NotRequired[Annotated[End | None, Field(description=END, json_schema_extra={"default": None})]]
    max_count: NotRequired[
        Annotated[int, Field(ge=1, json_schema_extra={"default": _MAX_COUNT}), BeforeValidator(_is_no_truth)]
    ]
    cursor: NotRequired[Annotated[str | None, Field(json_schema_extra={"default": None})]]


class BatchBody(Bounds):
    """Body of `POST /v1/query:batch`; the bounds are of all lookups together."""

    allow_spent: bool = Field(
        False,
        description="At a bound, answer with the entries found so far, as with `allow_partial`, and name the "
        "bound in `exceeded`.",
    )
    lookups: list[OneLookup] = Field(
        min_length=1,
        description="At most 10,000 lookups, with at most a million `max_count` together.",
        examples=[[{"topic": "orders", "key": "order-4711"}, {"topic": "orders", "key": "order-4712"}]],
    )

    def columns(self) -> LookupColumns:
        """Return what is looked up."""
        rows, count = self.lookups, len(self.lookups)
        topics, keys = [one["topic"] for one in rows], [one["key"] for one in rows]
        if max(map(len, rows)) == 2:
            # topics and keys alone
            return LookupColumns(topics, keys, [None] * count, [None] * count, [_MAX_COUNT] * count, [None] * count)
        begins_ms, ends_ms = [one.get("begin_ms") for one in rows], [one.get("end_ms") for one in rows]
        max_counts, cursors = [one.get("max_count", _MAX_COUNT) for one in rows], [one.get("cursor") for one in rows]
        return LookupColumns(topics, keys, begins_ms, ends_ms, max_counts, cursors)


def of_query(model: type[M], given: QueryParams) -> M:
    """Return a request's parameters. Raises `InvalidArgument`, also for one that is given twice."""
    values = dict(given)
    if len(values) < len(given.multi_items()):
        twice = next(name for name in values if len(given.getlist(name)) > 1)
        raise InvalidArgument(f"parameter {twice!r:.80} is given more than once")
    return _checked(model, values)


def of_body(model: type[M], body: bytes, most: Mapping[str, int] = MappingProxyType({})) -> M:
    """Return a request's JSON body. Raises `InvalidArgument`, and `Refused` where a list has more than `most` says."""
    try:
        values = _json(body)
        for name, limit in most.items() if isinstance(values, dict) else ():
            if isinstance(listed := values.get(name), list) and len(listed) > limit:
                # before something is made of each of them
                raise Refused(413, f"{len(listed):,} {name}; the limit of this service is {limit:,}")
        return _checked(model, values)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument("the body is not JSON") from error


def _json(body: bytes) -> Any:
    try:
        return from_json(body, cache_strings="keys")
    except ValueError:
        # it takes no half surrogates, of which the model says where they are, and UTF-8 alone
        return json.loads(body)


def _checked(model: type[M], values: Any) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if (count := error.error_count()) > _MOST_ERRORS:
            raise InvalidArgument(f"{count:,} values are wrong, or no parameters of this request") from None
        raise InvalidArgument("; ".join(map(_said, error.errors()[:5]))) from error


def _said(error: Any) -> str:
    place = ".".join(map(str, error["loc"])) or "the body"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place:.80} is not a parameter of this request"
    if error["type"] == "missing":
        return f"{place} is missing"
    return f"{place:.80}: {in_our_words(error)}"
