"""Models that check the parameters and bodies of requests, and return them as the library's arguments.

`openapi.json` describes each parameter. Threads: any; values are immutable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import from_json
from starlette.datastructures import QueryParams
from typing_extensions import TypedDict

from tiered_index.config_checks import in_our_words
from tiered_index.errors import InvalidArgument
from tiered_index.kernels import compiled
from tiered_index.server.calls import Allowance
from tiered_index.server.problems import Refused
from tiered_index.service.answers.asked import LookupColumns
from tiered_index.service.lookup.budget import LookupLimits
from tiered_index.types import MAX_KEY_UNITS, MAX_TOPIC_UNITS, parse_time

M = TypeVar("M", bound=BaseModel)

Time = Annotated[int, BeforeValidator(lambda value: parse_time(str(value)))]
# A date without a time means the end of the day
End = Annotated[int, BeforeValidator(lambda value: parse_time(str(value), end=True))]
Topic = Annotated[str, Field(min_length=1, max_length=MAX_TOPIC_UNITS)]
Key = Annotated[str, Field(min_length=1, max_length=MAX_KEY_UNITS)]
# Default of the library's `query_all`
PAGE = 1000
# Default of `Lookup`
_MAX_COUNT = 64
# Most errors of one request that are reported in detail: pydantic makes an object of a KiB for each
_MOST_ERRORS = 20_000


def _is_no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise InvalidArgument("must be a number, not true or false")
    return value


# pydantic accepts true as 1
Count = Annotated[int, BeforeValidator(_is_no_truth)]
Amount = Annotated[float, BeforeValidator(_is_no_truth)]


class Nothing(BaseModel):
    """Model of a request without parameters. An undeclared parameter is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Spending(Nothing):
    """Bounds of one request. The service has its own; the lower one counts."""

    max_requests: Count | None = Field(None, ge=0)
    max_bytes: Count | None = Field(None, ge=0)
    max_cost_usd: Amount | None = Field(None, ge=0)
    timeout_s: Amount | None = Field(None, gt=0, allow_inf_nan=False)

    def narrow(self, allowance: Allowance) -> None:
        """Lower the bounds of `allowance` to these."""
        allowance.narrow(LookupLimits(self.max_requests, self.max_bytes, self.timeout_s), self.max_cost_usd)


class Bounds(Spending):
    """Bounds of one lookup, and the parts of its answer."""

    allow_partial: bool = False
    explain: bool = False


class Range(Bounds):
    """A time range."""

    begin_ms: Time | None = None
    end_ms: End | None = None


class OneKey(Range):
    """One key of one topic, and the page of its entries."""

    topic: Topic
    key: Key
    max_count: int = Field(_MAX_COUNT, ge=1)
    cursor: str | None = None

    def arguments(self, cursor: str | None = None) -> tuple[str, str, int | None, int | None, int, str | None, bool]:
        """Return the first arguments of the library's lookups, with another `cursor` if one is given."""
        page = self.max_count, cursor or self.cursor, self.allow_partial
        return self.topic, self.key, self.begin_ms, self.end_ms, *page


class QueryParameters(OneKey):
    """Parameters of `GET /v1/query`."""

    all: bool = False


class DuParameters(Nothing):
    """Parameters of `GET /v1/du`."""

    by: str = "topic,day,state"


class EntriesParameters(Nothing):
    """Parameters of `POST /v1/entries`."""

    source: str | None = Field(None, min_length=1, max_length=1024)
    position: int | None = Field(None, ge=0, lt=2**63)
    after: int | None = Field(None, ge=0, lt=2**63)
    durable: bool = False

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.source is None) != (self.position is None) or (self.after is not None and self.source is None):
            raise ValueError("source and position belong together, and after needs both")
        return self


class VerifyBody(Nothing):
    """Body of `POST /v1/verify`."""

    deep: bool = False


Body = Literal["text", "json", "hex", "excerpt", "none"]


class MessagesParameters(OneKey):
    """Parameters of `GET /v1/messages`."""

    body: Body = "text"
    contains: str | None = Field(None, min_length=1, max_length=1024)


class MessageParameters(Bounds):
    """Parameters of `GET /v1/messages/{id}`."""

    topic: Topic | None = None
    cursor: str | None = None
    body: Body = "text"

    @model_validator(mode="after")
    def _continues_a_key(self) -> Self:
        if self.cursor is not None and self.topic is None:
            raise ValueError("cursor continues an answer to a unique key: give topic, too")
        return self


class BrowseParameters(Spending):
    """Parameters of `GET /v1/browse`."""

    topic: Topic
    queue_id: int | None = Field(None, ge=0, lt=2**31)
    at_ms: Time | None = None
    cursor: str | None = Field(None, max_length=4096)
    max_count: int = Field(25, ge=1, le=100)
    body: Body = "text"

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if (self.at_ms is None) == (self.cursor is None):
            raise ValueError("give at_ms or cursor")
        return self


# A TypedDict: making a thousand models or dataclasses took as long as answering
class OneLookup(TypedDict):
    """One of the lookups of a batch."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    topic: Topic
    key: Key
    begin_ms: NotRequired[Time | None]
    end_ms: NotRequired[End | None]
    max_count: NotRequired[Annotated[int, Field(ge=1), BeforeValidator(_is_no_truth)]]
    cursor: NotRequired[str | None]


def _plain(rows: Any) -> tuple[list[str], list[str]] | None:
    """Return the topics and keys of valid lookups without other members; None: check them one by one."""
    core = compiled()
    if core is None or type(rows) is not list:
        return None
    return core.texts_of(rows, "topic", "key", MAX_TOPIC_UNITS, MAX_KEY_UNITS)  # type: ignore[no-any-return]


def _unless_plain(rows: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return rows if rows and _plain(rows) is not None else check(rows)


class BatchBody(Bounds):
    """Body of `POST /v1/query:batch`; the bounds apply to all lookups together."""

    allow_spent: bool = False
    lookups: Annotated[list[OneLookup], Field(min_length=1), WrapValidator(_unless_plain)]

    def columns(self) -> LookupColumns:
        """Return the lookups as columns."""
        rows, count = self.lookups, len(self.lookups)
        if (plain := _plain(rows)) is not None:
            return LookupColumns(*plain, [None] * count, [None] * count, [_MAX_COUNT] * count, [None] * count)
        topics, keys = [one["topic"] for one in rows], [one["key"] for one in rows]
        begins_ms, ends_ms = [one.get("begin_ms") for one in rows], [one.get("end_ms") for one in rows]
        max_counts, cursors = [one.get("max_count", _MAX_COUNT) for one in rows], [one.get("cursor") for one in rows]
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
        return from_json(body, cache_strings="keys")
    except ValueError:
        # pydantic's parser refuses half surrogates and other encodings; the model's errors say where they are
        return json.loads(body)


def _checked(model: type[M], values: Any) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if (count := error.error_count()) > _MOST_ERRORS:
            raise InvalidArgument(f"{count:,} values are wrong or are not parameters of this request") from None
        raise InvalidArgument("; ".join(map(_said, error.errors()[:5]))) from error


def _said(error: Any) -> str:
    place = ".".join(map(str, error["loc"])) or "the body"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place:.80} is not a parameter of this request"
    if error["type"] == "missing":
        return f"{place} is missing"
    return f"{place:.80}: {in_our_words(error)}"
