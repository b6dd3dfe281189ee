"""Models that check the parameters and bodies of requests, and return them as the library's arguments.

`description` describes requests by them, and their docstrings the members. Threads: any; values are immutable.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from tiered_index.base.conversion import sentence_of
from tiered_index.base.documents import decoder_of
from tiered_index.base.units import parse_time
from tiered_index.config import Wait
from tiered_index.errors import InvalidArgument
from tiered_index.server.http.problems import Refused
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.service.read.answers.lookup_columns import LookupColumns
from tiered_index.types import MAX_KEY_UNITS, MAX_TOPIC_UNITS

M = TypeVar("M", bound=Struct)


Topic = Annotated[str, Meta(min_length=1, max_length=MAX_TOPIC_UNITS, examples=["orders"])]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_UNITS, examples=["order-4711"])]
_TIME = "epoch milliseconds, or a time or date by ISO 8601, UTC without a zone"
Time = int | Annotated[str, Meta(max_length=64, description=_TIME)]
"""A time as a request gives it. A class of its own would let msgspec make objects of a list in its place first."""
# Most entries of a page, and lookups of a batch
MAX_COUNT, MAX_LOOKUPS = 1_000, 10_000
Most = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
# The hint of a refused `max_count` of entries
_PAGED = "; continue with the cursor, or ask for a stream (all=true)"
# Default of `Lookup`
_MAX_COUNT = 64
# Most begins of lists and objects for each lookup, also in texts
_BRACKETS = 10
# Most characters of a message about a wrong value
_MOST_SAID = 300
_MOST_SHOWN = 80
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1, max_length=1024)]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Nothing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model of a request without parameters. An undeclared parameter is an error."""


class Spending(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one request. The service has its own; the lower one counts.

    - `max_requests`: Limit of requests to the storage.
    - `max_bytes`: Limit of bytes read from the storage.
    - `max_cost_usd`: Limit of the estimated cost in US dollars.
    - `timeout_s`: Time limit in seconds.
    """

    max_requests: Count | None = None
    max_bytes: Count | None = None
    max_cost_usd: Amount | None = None
    timeout_s: Wait | None = None

    def limits(self) -> LookupLimits:
        """Return the bounds but that of the cost."""
        return LookupLimits(self.max_requests, self.max_bytes, self.timeout_s)


class RequestBounds(Spending, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one lookup, and the parts of its answer.

    - `allow_partial`: Answer from the files that can be read within the bounds, and name the others in `failed`.
    - `explain`: List each file with its requests, bytes and time in `explain.files`.
    """

    allow_partial: bool = False
    explain: bool = False


class Range(RequestBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time range.

    - `begin_ms`: Earliest time, inclusive by whole seconds: epoch milliseconds or ISO 8601.
    - `end_ms`: Latest time, inclusive by whole seconds: epoch milliseconds or ISO 8601. A date alone includes that
      whole day.
    """

    begin_ms: Time | None = None
    end_ms: Time | None = None

    def __post_init__(self) -> None:
        self.range_ms()

    def range_ms(self) -> tuple[int | None, int | None]:
        """Return the range in epoch milliseconds. Raises `InvalidArgument` for a text that is no time."""
        return _time_ms("begin_ms", self.begin_ms), _time_ms("end_ms", self.end_ms, end=True)


class OneKey(Range, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of one topic, and the page of its entries.

    - `topic`: Topic of the messages.
    - `key`: Key of the messages.
    - `max_count`: Limit of entries, at most 1,000.
    - `cursor`: Continue the truncated answer that gave this cursor.
    """

    topic: Topic
    key: Key
    max_count: Most = _MAX_COUNT
    cursor: str | None = None

    def arguments(self, cursor: str | None = None) -> tuple[str, str, int | None, int | None, int, str | None, bool]:
        """Return the first arguments of the library's lookups, with another `cursor` if one is given."""
        return self.topic, self.key, *self.range_ms(), self.max_count, cursor or self.cursor, self.allow_partial


class QueryParameters(OneKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/query`.

    - `all`: Return all entries, as NDJSON or Arrow only. `max_count` is then the number of entries that the service
      reads at a time. Its default is then 1,000.
    """

    all: bool = False


class DuParameters(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/du`.

    - `by`: Columns to group by, separated by commas.
    """

    by: Annotated[str, Meta(examples=["topic"])] = "topic,day,state"


class EntriesParameters(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `POST /v1/entries`.

    - `source`: Name of the source of the entries. Needs `position`.
    - `position`: Position of the source after these entries. A repeated position adds nothing.
    - `after`: Position of the source before these entries. If the index has another position, the service refuses the
      entries (409).
    - `durable`: Answer once the entries are on the local disk. Otherwise the service answers once they are in its
      memory.
    """

    source: Text | None = None
    position: Position | None = None
    after: Position | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        if (self.source is None) != (self.position is None) or (self.after is not None and self.source is None):
            raise ValueError("source and position belong together, and after needs both")


class VerifyBody(Nothing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/verify`.

    - `deep`: Read every byte of every object.
    """

    deep: bool = False


Body = Literal["text", "json", "hex", "excerpt", "none"]


class MessagesParameters(OneKey, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/messages`.

    - `body`: Form of message bodies.
    - `contains`: Return only messages with this text in body, tags, keys, ids or properties. Case does not matter. The
      member `collisions` of the answer also counts messages without this text. A request searches at most 2,000
      messages: continue with `cursor`.
    """

    body: Body = "text"
    contains: Text | None = None


class MessageParameters(RequestBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/messages/{id}`.

    - `topic`: Topic of the message. Required if `id` is a unique key.
    - `cursor`: Continue the truncated answer that gave this cursor.
    - `body`: Form of message bodies.
    """

    topic: Annotated[str, Meta(min_length=1, max_length=MAX_TOPIC_UNITS)] | None = None
    cursor: str | None = None
    body: Body = "text"

    def __post_init__(self) -> None:
        if self.cursor is not None and self.topic is None:
            raise ValueError("cursor continues an answer to a unique key: give topic, too")


class BrowseParameters(Spending, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of `GET /v1/browse`.

    - `topic`: Topic of the messages.
    - `queue_id`: Queue of the topic (default: all, up to 64).
    - `at_ms`: The moment: epoch milliseconds or ISO 8601. Half of the messages are older. Required without `cursor`.
    - `cursor`: The member `earlier` or `later` of the last answer. Pass it instead of `at_ms`.
    - `max_count`: Limit of messages, at most 100.
    - `body`: Form of message bodies.
    """

    topic: Topic
    queue_id: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    at_ms: Time | None = None
    cursor: Annotated[str, Meta(max_length=4096)] | None = None
    max_count: Annotated[int, Meta(ge=1, le=100)] = 25
    body: Body = "text"

    def __post_init__(self) -> None:
        if (self.at_ms is None) == (self.cursor is None):
            raise ValueError("give at_ms or cursor")
        self.moment_ms()

    def moment_ms(self) -> int | None:
        """Return the moment in epoch milliseconds. Raises `InvalidArgument` for a text that is no time."""
        return _time_ms("at_ms", self.at_ms)


class OneLookup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One of the lookups of a batch.

    - `topic`: Topic of the messages.
    - `key`: Key of the messages.
    - `begin_ms`: Earliest time, inclusive by whole seconds: epoch milliseconds or ISO 8601.
    - `end_ms`: Latest time, inclusive by whole seconds: epoch milliseconds or ISO 8601. A date alone includes that
      whole day.
    - `max_count`: Limit of entries, at most 1,000.
    - `cursor`: Continues a truncated answer of this lookup.
    """

    topic: Topic
    key: Key
    begin_ms: Time | None = None
    end_ms: Time | None = None
    max_count: Most = _MAX_COUNT
    cursor: str | None = None


class BatchBody(RequestBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/query:batch`; the bounds apply to all lookups together.

    - `allow_spent`: If a bound is reached, answer 200 with the entries found so far, instead of 422. `exceeded` states
      the bound.
    - `lookups`: At most 10,000 lookups. The sum of their `max_count` is at most 100,000.
    """

    allow_spent: bool = False
    lookups: Annotated[list[OneLookup], Meta(min_length=1, max_length=MAX_LOOKUPS)]

    def columns(self) -> LookupColumns:
        """Return the lookups as columns. Raises `InvalidArgument` for a text that is no time."""
        rows = self.lookups
        begins_ms: list[int | None] = [None] * len(rows)
        ends_ms = begins_ms[:]
        for number, row in enumerate(rows):
            if row.begin_ms is not None:
                begins_ms[number] = _time_ms(f"lookups.{number}.begin_ms", row.begin_ms)
            if row.end_ms is not None:
                ends_ms[number] = _time_ms(f"lookups.{number}.end_ms", row.end_ms, end=True)
        max_counts, cursors = [row.max_count for row in rows], [row.cursor for row in rows]
        topics, keys = [row.topic for row in rows], [row.key for row in rows]
        return LookupColumns(topics, keys, begins_ms, ends_ms, max_counts, cursors)


def of_query(model: type[M], query: bytes) -> M:
    """Return a request's checked parameters. Raises `InvalidArgument`, also for a repeated parameter."""
    text = query.decode("latin-1")
    if "%" in text or "+" in text:
        pairs = parse_qsl(text, keep_blank_values=True)
    else:
        # most lookups escape nothing, and `parse_qsl` takes five times as long
        pairs = [(name, value) for name, _, value in [part.partition("=") for part in text.split("&") if part]]
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in values if names.count(name) > 1)
        raise InvalidArgument(f"parameter {twice!r:.80} is given more than once")
    return _checked(model, values)


def of_body(model: type[M], body: bytes) -> M:
    """Return a request's checked JSON body. Raises `InvalidArgument`, and `Refused` for more than `MAX_LOOKUPS`.

    A body that is too long is refused before its elements become objects.
    """
    # texts may have brackets, too
    begins = body.count(b"{") + body.count(b"[")
    if begins > _BRACKETS * (MAX_LOOKUPS + 1):
        raise Refused(413, f"the body begins {begins:,} lists and objects: send fewer lookups at once")
    try:
        if begins > MAX_LOOKUPS + 2 and (count := len(_LISTED.decode(body).lookups)) > MAX_LOOKUPS:
            raise Refused(413, f"{count:,} lookups; the limit of this service is {MAX_LOOKUPS:,}")
        return decoder_of(model).decode(body)
    except msgspec.ValidationError as error:
        values: Any = None
        # the error may be before an end that is cut off
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            values = msgspec.json.decode(body)
        raise InvalidArgument(_said(str(error), values)[:_MOST_SAID]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not JSON: {error}"[:_MOST_SAID]) from error


class _AnyObject(Struct, gc=False):
    """An object whose members are skipped."""


class _Listed(Struct):
    """The number of lookups of a body. Another element than an object, which could be as short as a digit, is wrong."""

    lookups: list[_AnyObject] = []


_LISTED = msgspec.json.Decoder(_Listed)


def _time_ms(place: str, time: int | str | None, *, end: bool = False) -> int | None:
    """Return a time of a request in epoch milliseconds. Raises `InvalidArgument`, which names its place."""
    try:
        return None if time is None else parse_time(str(time), end=end)
    except ValueError as error:
        raise InvalidArgument(f"{place}: {error}") from error


def _checked(model: type[M], values: Any) -> M:
    """Return values as a model; numbers and truths may be text. Raises `InvalidArgument` for the first wrong one."""
    try:
        return msgspec.convert(values, model, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(_said(str(error), values)[:_MOST_SAID]) from error


def _said(problem: str, values: Any) -> str:
    """Return a message of msgspec in plain words. It names the place like ``lookups.0.topic``, and shows its value.

    `values` has the members; None if they are not known.
    """
    problem, _, path = problem.partition(" - at `$")
    place = re.sub(r"[\[\].]+", ".", path.rstrip("`")).strip(".")
    if (named := _MEMBER.match(problem)) is not None:
        name = ".".join(filter(None, (place, named[2])))
        return f"{name} is {'missing' if named[1] == 'missing required' else 'not a parameter of this request'}"
    hint = _PAGED if place.endswith("max_count") and f" {MAX_COUNT}" in problem else ""
    said = sentence_of(problem)
    if values is not None:
        for step in filter(None, place.split(".")):
            values = values[int(step) if isinstance(values, list) else step]
        said += f", not {msgspec.json.encode(values)[:_MOST_SHOWN].decode(errors='replace')}"
    return f"{place}: {said}{hint}" if place else said


_MEMBER = re.compile("Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
