"""The types of the public API: entries, answers, and the declaration of further columns.

`IndexItem` is the class of entries. A subclass adds fixed-width columns with `column(...)`. The engine stores and
returns them like its own columns, and writes their declaration into every file:

    @dataclass(frozen=True, kw_only=True)
    class OrderItem(KeyedIndexItem):
        region: int = column(">u2")
        country: str = column("text", width=2)

Instances are immutable values; share them between threads freely. Functions are pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_type_hints, overload

from typing_extensions import TypeVar

from tiered_index.base.units import format_time as format_time
from tiered_index.errors import ConfigError, TieredIndexError, install_hint

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# Longest topic, in UTF-16 code units (RocketMQ's own limit is 127)
MAX_TOPIC_UNITS = 1_024
# Longest key, in UTF-16 code units (all properties of a RocketMQ message have 32,767 bytes at most)
MAX_KEY_UNITS = 32_767

Status = Literal["complete", "truncated", "partial"]


class _NoProgress:
    """A `progress` that ignores each report. A function would show its address in `help()`."""

    def __call__(self, *report: object) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "no_progress"


no_progress = _NoProgress()
"""The default of `progress`: ignore each report."""


def column(dtype: str, *, width: int | None = None, identity: bool = False, default: Any = ...) -> Any:
    """Declare a stored column of an `IndexItem` subclass.

    `dtype` is a NumPy type string of fixed width (``">u2"``, ``">i8"``, ``">f8"``, ``"S16"``), or ``"text"``. Numbers
    are stored big-endian. A value of bytes that is shorter than the column is filled with NUL bytes. `default` is
    stored if a put gives no value. Without a default (``...``) each put must give one.

    A ``"text"`` column has values of class `str`, whose UTF-8 has at most `width` bytes and no NUL. Each entry needs
    `width` bytes for it. JSON has text as text, but bytes as hexadecimal digits.

    `identity` columns (integers only) are part of the identity of an entry: with ``event: int = column(">i8",
    identity=True)`` it is (topic, queue_id, offset, event).

    Raises `ConfigError` if ``"text"`` has no `width` from 1, and if another type has one.
    """
    is_text = dtype == "text"
    if is_text:
        if type(width) is not int or width < 1:
            raise ConfigError(f'a text column needs its width in bytes, as in column("text", width=16), not {width!r}')
        dtype = f"S{width}"
    elif width is not None:
        raise ConfigError(f"column({dtype!r}) takes no width: only text columns have one")
    with_default = {} if default is ... else {"default": default}
    about = {"dtype": dtype, "text": is_text, "identity": identity, **with_default}
    return field(default=with_default.get("default", 0), metadata=about)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexItem:
    """An entry: the place of one message that has the key of the lookup.

    Preset `native` adds `fingerprint`, a second hash of the key. Columns of your own are further members. In JSON,
    bytes are hexadecimal text, and numbers that are not finite are null. Over HTTP the response header
    `tiered-index-columns` declares them, as JSON. In JSON, entries of files have `file` and `row` (`FilePlace`) and an
    `entry_id` in place of `topic_id`, `queue_id`, `offset`, `size` and hashes.
    The class corresponds to RocketMQ's `org.apache.rocketmq.tieredstore.index.IndexItem`.

    - `topic`: Topic of the message.
    - `topic_id`: Number of the topic in its file.
    - `queue_id`: Queue or partition of the message.
    - `offset`: Offset of the message: its position in the log or queue (setting `offset_space`).
    - `size`: Bytes of the message.
    - `timestamp_ms`: Store time, epoch milliseconds by whole seconds.
    - `key_hash`: Hash of topic and key (`hash_key`), from 0 to 2**31 - 1.
    - `source`: URI of the index, if several are read.
    """

    topic: str
    topic_id: int
    queue_id: int
    offset: int
    size: int
    timestamp_ms: int
    key_hash: int
    source: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict, in declaration order.

        Byte strings become hexadecimal text; a `source` of None is left out.
        """
        kind: Any = self.__class__
        names, values_of, of_bytes = _field_names(kind, self.source is not None)
        document = dict(zip(names, values_of(self)))  # noqa: B905 - both are of the same fields
        for name in of_bytes:
            document[name] = document[name].hex()
        return document


@functools.cache
def _field_names(
    kind: Any, has_source: bool = True
) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]], tuple[str, ...]]:
    """Return the names of a class's fields, a function that returns their values, and the names of those with bytes.

    Without `source` unless the items have one.
    """
    fields = [f for f in dataclasses.fields(kind) if has_source or f.name != "source"]
    names = tuple(f.name for f in fields)
    return names, attrgetter(*names), tuple(f.name for f in fields if value_kind(f) == "S")


def value_kind(of: dataclasses.Field[Any]) -> str:
    """Return the NumPy kind of a field's values: U for text, S for bytes; empty for a field without `column`."""
    return "U" if of.metadata.get("text") else str(of.metadata.get("dtype", "")).lstrip("<>=|")[:1]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedIndexItem(IndexItem):
    """An `IndexItem` with a 32-bit fingerprint of topic#key: the default class of entries.

    `fingerprint` is an independent hash. It distinguishes keys whose `key_hash` is equal.
    """

    fingerprint: int = column(">u4")


ItemT = TypeVar("ItemT", bound=IndexItem, default=KeyedIndexItem, covariant=True)
"""The class of entries; by default the one of preset `native`."""
OpenedT = TypeVar("OpenedT", bound=IndexItem, default=KeyedIndexItem)
"""The class of entries that a caller gives when it opens an index. Not that of a class, which a checker would solve."""


def own_columns(kind: type[IndexItem]) -> tuple[str, ...]:
    """Return the names of the columns that a class of entries has beside those of every index."""
    known = {*(f.name for f in dataclasses.fields(IndexItem)), "fingerprint"}
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in known)


@dataclass(frozen=True)
class Lookup:
    """One lookup of `query_many`: a key of a topic in the inclusive range [`begin_ms`, `end_ms`].

    `topic` and `key` are texts. Bounds are epoch milliseconds; None: no bound. `max_count` bounds the entries of the
    answer; `cursor` continues a truncated answer.
    """

    topic: str
    key: str
    begin_ms: int | None = None
    end_ms: int | None = None
    max_count: int = 64
    cursor: str | None = None


class _Record:
    """Base class of records whose fields are all JSON-ready."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict."""
        kind: Any = self.__class__
        names, values_of, _ = _field_names(kind)
        return dict(zip(names, values_of(self)))  # noqa: B905 - both are of the same fields

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Return a record with these fields, and the defaults of the others, in a third of the constructor's time."""
        record = object.__new__(cls)
        record.__dict__.update(fields)
        return record


@dataclass(frozen=True, kw_only=True)
class FileReport(_Record):
    """The outcome of a lookup for one file.

    - `file`: Id of the file.
    - `place`: Place where the file was read: `buffer`, `unsealed`, `compacted`, `uploaded` (a local copy), `cache`
      (a stored file, read from caches without a request) or `storage`. `messages`: this is no file, but a place of
      messages.
    - `outcome`: `read`, `failed`, or the reason why the file was skipped: `skipped_time`, `skipped_topic`,
      `skipped_filter`, or `skipped_budget` (the answer already had `max_count` newer entries). `fetched`: messages
      were read. `refreshed`: this is no file, but the storage's log, which the lookup read. `outdated`: the log
      changed after this read, so the lookup began again.
    - `begin_ms`: Time of the first entry, inclusive, epoch milliseconds.
    - `end_ms`: Time of the last entry, inclusive.
    - `requests`: Requests to the storage.
    - `bytes`: Bytes read from the storage.
    - `gap_bytes`: Bytes between two parts of the file that one request read together (setting
      `coalesce_gap_bytes`). `bytes` includes them.
    - `cost_usd`: Estimated cost, by the setting `prices`.
    - `elapsed_ms`: Wall time.
    - `matched`: Entries of the key that were found.
    - `error`: Reason why the file could not be read. Null: it was read or skipped.
    - `source`: URI of the index, if several are read.
    - `not_in_core`: Reason why the compiled core did not search the file, which takes longer: `directory` or
      `slot_group` (not in memory), `blocks` or `long_chain` (very many entries of a slot), `equal_rows` (two rows may
      be the same entry), `cursor`, `bounds` (of the lookup), `new_files`, `kind` (of the file), `damage`, or
      `no_core` (NumPy does all). Null: it did, or the file was skipped.
    """

    file: str
    place: str
    outcome: str
    begin_ms: int
    end_ms: int
    requests: int = 0
    bytes: int = 0
    gap_bytes: int = 0
    cost_usd: float = 0.0
    elapsed_ms: float = 0.0
    matched: int = 0
    error: str | None = None
    source: str | None = None
    not_in_core: str | None = None


@dataclass(frozen=True, kw_only=True)
class LostFile(_Record):
    """A file, or a part of a window table, that is missing in the storage and was declared lost.

    It may also be a range of a followed source that was skipped: deleted before it was read, or damaged. Answers lack
    its entries.

    - `file`: Id of the file or window table, or name of the source.
    - `begin_ms`: Time of its first entry, inclusive, epoch milliseconds.
    - `end_ms`: Time of its last entry, inclusive.
    - `entries`: Entries of all keys that it had; of a source's range, the least number of messages that are known
      to be there.
    - `source`: URI of the index, if several are read.
    - `reason`: The skipped range of a source, and the reason; null for a file.
    """

    file: str
    begin_ms: int
    end_ms: int
    entries: int
    source: str | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Explain(_Record):
    """The cost of a lookup, or of all lookups of a batch.

    A page counts the `folded_entries` between its first and last entry, so the pages of `query_all` together count each
    entry once. A batch counts all entries that it read.

    - `requests`: Requests to the storage.
    - `bytes`: Bytes read from the storage.
    - `cost_usd`: Estimated cost of requests and traffic, by the setting `prices`.
    - `elapsed_ms`: Wall time.
    - `files_read`: Files that were read.
    - `files_cached`: Those of them that are in the storage, and were read from caches without a request.
    - `files_skipped`: Files that were not read.
    - `files`: A report for each file; over HTTP with `explain=true`.
    - `folded_entries`: Entries left out because another entry of the answer has the same topic, queue and offset,
      but other content. If it is not 0, different messages share an offset.
    - `message_requests`: Requests for messages, in answers with messages only. `requests` includes them.
    - `message_bytes`: Bytes of messages, in answers with messages only. `bytes` includes them.
    """

    requests: int = 0
    bytes: int = 0
    cost_usd: float = 0.0
    elapsed_ms: float = 0.0
    files_read: int = 0
    files_cached: int = 0
    files_skipped: int = 0
    files: tuple[FileReport, ...] = ()
    folded_entries: int = 0
    message_requests: int | None = None
    message_bytes: int | None = None

    def to_dict(self, *, files: bool = True) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict; without the reports of files if `files` is false."""
        totals: dict[str, Any] = dict(zip(_COSTS, _costs_of(self)))  # noqa: B905 - both are of the same fields
        if self.message_requests is not None:
            totals |= {"message_requests": self.message_requests, "message_bytes": self.message_bytes}
        if files:
            totals["files"] = [report.to_dict() for report in self.files]
        return totals


_COSTS = (
    "requests",
    "bytes",
    "cost_usd",
    "elapsed_ms",
    "files_read",
    "files_cached",
    "files_skipped",
    "folded_entries",
)
_costs_of = attrgetter(*_COSTS)


class TopicBounds(NamedTuple):
    """The bounds of `Freshness.as_of_ms` by topic, in epoch milliseconds.

    - `read_before_ms`: every record that a topic's source had before this time is in the index. 0: not known yet. The
      empty topic stands for all that are not named.
    - `published_ms`: `as_of_ms` of the index, for all topics.
    - `has_all_put`: the writer's root was read, so an answer lacks only records that the source got later.
    """

    read_before_ms: Mapping[str, int]
    published_ms: int | None = None
    has_all_put: bool = False

    def read_before(self, topics: Iterable[str]) -> list[int]:
        """Return the times of those of `topics` that have one."""
        known, of_others = self.read_before_ms, self.read_before_ms.get("")
        return [at for at in (known.get(topic, of_others) for topic in topics) if at is not None]


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """The age of one index in the storage. A lookup can't see entries that the writer has not published yet.

    `bounds` bounds `as_of_ms` for lookups of topics of followed sources; None: there are none.

    - `source`: URI of the index.
    - `as_of_ms`: Time of the newest published entry outside the quarantine, or of the last upload if that is
      earlier, epoch milliseconds by whole seconds. For a topic of a followed source also no later than the time up
      to which this was read; 0: never to the end. Null: none is published.
    - `positions`: Position of each source. All entries before it are published.
    - `not_asked`: Reason why the newest state of the index was not read: the storage is not available, or a newer
      writer has fenced this one. The answer may then lack files that other hosts or jobs added.
    """

    source: str
    as_of_ms: int | None
    positions: Mapping[str, int]
    not_asked: str | None = None
    # of `as_of_ms`, for lookups of topics of followed sources; in no document
    bounds: TopicBounds | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict; a `not_asked` of None is left out."""
        known = {"source": self.source, "as_of_ms": self.as_of_ms, "positions": dict(self.positions)}
        return known if self.not_asked is None else known | {"not_asked": self.not_asked}


def freshness_of(freshness: tuple[Freshness, ...], topics: Iterable[str]) -> tuple[Freshness, ...]:
    """Return the freshness of an answer about `topics`: its times are those up to which all of these were read."""
    for index in freshness:
        if index.bounds is not None:
            break
    else:
        return freshness
    names, bounded = list(topics), []
    for index in freshness:
        bounds, as_of_ms = index.bounds, index.as_of_ms
        if bounds is not None:
            times = [at // 1000 * 1000 for at in bounds.read_before(names)]
            if bounds.has_all_put and not times:
                continue
            published_ms = [] if bounds.published_ms is None else [bounds.published_ms]
            has_entries = published_ms or bounds.has_all_put
            as_of_ms = min([*published_ms, *times]) if has_entries else None
        bounded.append(dataclasses.replace(index, as_of_ms=as_of_ms))
    return tuple(bounded)


# characters of a line in a terminal
_WIDTH = 100


def shortened(text: str) -> str:
    """Return a text as one printable line of at most 100 characters."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: _WIDTH + 1])
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def inclusive(begin: int, end: int) -> str:
    """Return the range [`begin`, `end`) of offsets for people, with its first and last number: ``0 to 29,999``."""
    return f"{begin:,} to {end - 1:,}" if begin < end else f"none, and {end:,} is next"


class Provenance(NamedTuple):
    """The state of each index that an answer was read from, and the entries that the answer lacks.

    - `freshness`: how much the storage had, for each index that was read without its root, without its storage, or by a
      fenced writer. Also up to which time a source was read, for each index that has a source of the topic.
    - `unknown_topics`: the topic of the lookup, if nothing was found and no file that was read in its range has the
      topic. In a batch, files in the range of any lookup count.
    - `lost`: lost files that may have had answers in the range. The answer is complete except for them.
    - `expired_before_ms`: entries before this time have expired and are in no answer. None: the range begins later.
    - `replaced`: number of rows of files that were met and left out, because a newer reading of their file replaced
      them.
    """

    freshness: tuple[Freshness, ...] = ()
    unknown_topics: tuple[str, ...] = ()
    lost: tuple[LostFile, ...] = ()
    expired_before_ms: int | None = None
    replaced: int = 0

    @property
    def as_of_ms(self) -> int | None:
        """As `Answer.as_of_ms`."""
        if len(self.freshness) == 1:
            return self.freshness[0].as_of_ms
        return min([index.as_of_ms for index in self.freshness if index.as_of_ms is not None], default=None)

    def joined(self, later: Provenance) -> Provenance:
        """Return the provenance of two pages or batches together.

        The freshness is that of the first, with the earlier time. `not_asked` is set if one of them has it. Each of the
        two can lack entries, so the result names the topics and files of both.
        """
        indexes = {index.source: index for index in self.freshness}
        for index in later.freshness:
            first = indexes.setdefault(index.source, index)
            times = [other.as_of_ms for other in (first, index) if other.as_of_ms is not None]
            as_of_ms = min(times) if first.as_of_ms is not None else None
            not_asked = index.not_asked if first.not_asked is None else first.not_asked
            if (as_of_ms, not_asked) != (first.as_of_ms, first.not_asked):
                indexes[index.source] = dataclasses.replace(first, as_of_ms=as_of_ms, not_asked=not_asked)
        expired = [ms for ms in (self.expired_before_ms, later.expired_before_ms) if ms is not None]
        return Provenance(
            tuple(indexes.values()),
            tuple(dict.fromkeys(self.unknown_topics + later.unknown_topics)),
            tuple(dict.fromkeys(self.lost + later.lost)),
            max(expired, default=None),
            self.replaced + later.replaced,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and `as_of_ms`, as a JSON-ready dict."""
        return {
            "unknown_topics": list(self.unknown_topics),
            "as_of_ms": self.as_of_ms,
            "freshness": [index.to_dict() for index in self.freshness],
            "lost": [file.to_dict() for file in self.lost],
            "expired_before_ms": self.expired_before_ms,
            "replaced": self.replaced,
        }


_NOTHING_SEEN = Provenance()
# the newest entries that the text of an answer shows, and the most characters of one of their values
_SHOWN, _CELL = 5, 40
RowT = TypeVar("RowT", covariant=True, default=Any)


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer(Sequence[RowT]):
    """Base class of answers: a sequence of rows.

    - `status`: `complete`; `truncated`: continue with `cursor`; `partial`: `failed` names the files that the answer
      lacks.
    - `failed`: Files that could not be read. Without `allow_partial` only folders that the user may not read, below a
      prefix of several indexes.
    - `explain`: The cost.
    - `unknown_topics`: Has the topic if no file in the time range has it. Otherwise empty.
    - `as_of_ms`: Time of the newest published entry outside the quarantine, or of the last upload if that is
      earlier. For a topic of a followed source also no later than the time up to which this was read; 0: never to
      the end. With several indexes or topics, the earliest of their times. The answer may lack earlier entries that
      were published later. Null: none was published, or `freshness` is empty.
    - `freshness`: The state of each index that was read from its storage, or that has a source of the topic.
    - `lost`: Lost files that may have had entries of the answer.
    - `expired_before_ms`: Entries before this time have expired. Null: nothing expired in the range.
    - `replaced`: Number of rows of files that were left out, because a newer reading of their file replaced them. After
      a merge they no longer count.
    """

    # default factories, because a class attribute would hide the fields that `QueryResult` makes later
    status: Status
    failed: tuple[FileReport, ...] = field(default_factory=tuple)
    explain: Explain = field(default_factory=Explain)
    seen: Provenance = field(default_factory=lambda: _NOTHING_SEEN)

    # the name of the field that has the rows, and the names of further fields in `to_dict`
    rows_field: ClassVar[str] = ""
    own_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @functools.cache
    def members(cls) -> dict[str, Any]:
        """Return the type of each member of `to_dict`. The service describes answers by them; clients read them so."""
        hints = get_type_hints(cls) | get_type_hints(Provenance) | {"as_of_ms": int | None}
        names = cls.rows_field, "status", *cls.own_fields, "failed", "explain", *Provenance().to_dict()
        return {name: hints[name] for name in names if name in hints}

    @property
    def rows(self) -> tuple[RowT, ...]:
        """The rows, in answer order."""
        return getattr(self, self.rows_field)  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RowT]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> RowT: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RowT, ...]: ...
    def __getitem__(self, index: int | slice) -> RowT | tuple[RowT, ...]:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status}: {len(self):,} {self.rows_field}>"

    @property
    def freshness(self) -> tuple[Freshness, ...]:
        """The time of the newest published entry, for each index whose writer's root was not read.

        Also for each index with a source that says up to which time it has read the topic.
        """
        return self.seen.freshness

    @property
    def unknown_topics(self) -> tuple[str, ...]:
        """The topic of the lookup, if nothing was found and no file of the range has the topic."""
        return self.seen.unknown_topics

    @property
    def lost(self) -> tuple[LostFile, ...]:
        """The lost files that may have had answers. The answer is complete except for them."""
        return self.seen.lost

    @property
    def expired_before_ms(self) -> int | None:
        """The time before which entries have expired, in epoch milliseconds; None: the range begins later."""
        return self.seen.expired_before_ms

    @property
    def replaced(self) -> int:
        """The number of rows that were left out, because a newer reading of their file replaced them."""
        return self.seen.replaced

    @property
    def as_of_ms(self) -> int | None:
        """The time up to which the answer can be complete, in epoch milliseconds; the least of several indexes.

        None: the answer has all written entries, because the writer's root was read, and no source says up to which
        time it has read the topic; or no index has published an entry. 0: a source was never read to its end.
        """
        return self.seen.as_of_ms

    def provenance(self) -> dict[str, Any]:
        """Return `seen` as a JSON-ready dict."""
        return self.seen.to_dict()

    def to_dict(self, *, files: bool = True) -> dict[str, Any]:
        """Return the answer as a JSON-ready dict. If `files` is false, its `explain` has no reports of files."""
        rows: Sequence[Any] = self.rows
        return self._document([row.to_dict() for row in rows], files=files)

    def _document(self, rows: list[dict[str, Any]], *, files: bool) -> dict[str, Any]:
        """Return `to_dict` with the documents of the rows."""
        document: dict[str, Any] = {self.rows_field: rows, "status": self.status}
        for name in self.own_fields:
            document[name] = getattr(self, name)
        document["failed"] = [report.to_dict() for report in self.failed]
        document["explain"] = self.explain.to_dict(files=files)
        document.update(self.provenance())
        return document


class FilePlace(NamedTuple):
    """The file and the row of an entry of files.

    - `file`: the URI of the file.
    - `row`: the number of the row, from 0; of a text, the byte at which its line begins, after decompression.
    - `unit`: ``byte`` or ``row``.
    """

    file: str
    row: int
    unit: Literal["byte", "row"]

    def __str__(self) -> str:
        return f"{self.unit} {self.row:,}"


class LaterFields(Protocol):
    """Makes fields of a `QueryResult` on first access. Several threads may ask for the same field."""

    def field(self, name: str) -> Any:
        """Return the field."""

    def documents(self) -> list[dict[str, Any]] | None:
        """Return `to_dict` of each item, without making the items. None: they have to be made."""

    def table(self) -> pa.Table:
        """Return the result of `items_table` for the items, without making the items."""


# the fields that `QueryResult.to_dict` needs, beside the items
_DESCRIBED = ("status", "cursor", "failed", "explain", "seen", "places")


@dataclass(frozen=True, kw_only=True, repr=False)
class QueryResult(Answer[ItemT]):
    """The answer to the lookup of one key.

    It is a sequence of its entries in answer order: second descending, offset descending, queue_id ascending.

    If several entries have the same identity, only the newest is in the answer; within a second, the one with the
    greatest `size`, then the greatest further columns. This holds for each page by itself: an identity that was put at
    two times can be on two pages. `query_all` gives it once. The last page of a truncated answer may be empty.

    `item_type` is the class of the entries, `seen` has the provenance. `places` has the `FilePlace` of each item if the
    topic has files, None for an item of no file. It is None if the topic has no files. The first access may read parts
    of catalogs from the storage: it raises `StorageUnavailable` and `CorruptFile`, and so do `to_dict`, `to_arrow` and
    the functions that need it.

    - `items`: Entries, the newest first.
    - `cursor`: Continues a truncated answer. Null: there is no more.
    - `timestamp_resolution_ms`: Resolution of times: 1,000.
    """

    rows_field = "items"
    own_fields = ("cursor", "timestamp_resolution_ms")
    items: tuple[ItemT, ...]
    cursor: str | None = field(default_factory=lambda: None)
    timestamp_resolution_ms: int = 1000
    item_type: type[IndexItem] = field(default_factory=lambda: IndexItem, repr=False)
    places: tuple[FilePlace | None, ...] | None = field(default_factory=lambda: None, compare=False)

    # `_later`, a `LaterFields`, makes some fields on first access
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            later = self.__dict__.get("_later")
            if later is None or name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            # if two threads do this at the same time, both return the value of the first
            return self.__dict__.setdefault(name, later.field(name))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_arrow(self) -> pa.Table:
        """Return the entries as an Arrow table, with a row per entry and a column per field. It builds no item objects.

        `timestamp_ms` is a timestamp in milliseconds, UTC. `offset` is int64; other numbers have their stored width.
        `source` is null if one index is read. An empty answer has the same columns. If the topic has files the columns
        are `topic`, `timestamp_ms`, `file` (text), `row` (int64), the index's own columns, and `source`.
        """
        later: LaterFields | None = self.__dict__.get("_later")
        table = items_table(self.items, self.item_type) if later is None else later.table()
        return table if self.places is None else with_places(table, self.places, own_columns(self.item_type))

    def to_dict(self, *, files: bool = True) -> dict[str, Any]:
        """Return the answer as a JSON-ready dict, as `Answer.to_dict`. See `IndexItem` for items of files."""
        known, later, documents = self.__dict__, self.__dict__.get("_later"), None
        if later is not None:
            # each would be missed first
            for name in _DESCRIBED:
                if name not in known:
                    known.setdefault(name, later.field(name))
            documents = later.documents()
        if documents is None:
            documents = [item.to_dict() for item in self.items]
        if (places := self.places) is not None:
            describe_places(documents, places)
        return self._document(documents, files=files)

    def to_pandas(self) -> pd.DataFrame:
        """Return `to_arrow` as a pandas DataFrame. Raises `ConfigError` without pandas (extra `pandas`)."""
        return to_pandas(self.to_arrow())

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return `to_arrow` as a stream of Arrow's C data interface, for DuckDB, Polars and other libraries."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        # the end of a file's URI says more than its begin
        cells_of = [[cell if len(cell) <= _CELL else f"…{cell[1 - _CELL :]}" for cell in row] for row in self._newest()]
        lines = [shortened(f"  {'  '.join(cells)}") for cells in [*cells_of, *zip(self._left())]]
        return "\n".join([super().__repr__(), *lines])

    def _repr_html_(self) -> str:
        """Return the answer for notebooks: its status, and a table of the newest entries."""
        from html import escape  # only notebooks need it

        cells_of = self._newest()
        names = ("time", "topic", *(("queue_id", "offset") if self._shown_places() is None else ("file", "row")))
        head = "".join(f"<th>{name}</th>" for name in names)
        rows = ["".join(f"<td>{escape(text)}</td>" for text in cells) for cells in cells_of]
        table = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
        return f"<p>{escape(super().__repr__())}</p><table>{table}</table><p>{' '.join(self._left())}</p>"

    def _newest(self) -> list[tuple[str, ...]]:
        shown = self.items[:_SHOWN]
        places = self._shown_places()
        of_item = [(f"{item.queue_id}", f"{item.offset:,}") for item in shown] if places is None else places[:_SHOWN]
        times = [format_time(item.timestamp_ms) for item in shown]
        return [(time, shortened(item.topic), *at) for time, item, at in zip(times, shown, of_item, strict=True)]

    def _shown_places(self) -> list[tuple[str, str]] | None:
        """Return the texts of `places`; None: there are none, or they can't be read now."""
        with contextlib.suppress(TieredIndexError):
            if self.places is not None:
                return [("", "") if place is None else (place.file, str(place)) for place in self.places]
        return None

    def _left(self) -> list[str]:
        return [f"and {len(self) - _SHOWN:,} more"] if len(self) > _SHOWN else []


@dataclass(frozen=True, kw_only=True)
class TopicSummary(_Record):
    """The entries of one topic.

    - `topic`: The topic.
    - `entries`: Entries of the topic. An entry that was put twice counts twice until its files are merged.
    - `bytes_of_entries`: Bytes of the messages of all entries. A message with two keys has two entries, and counts
      twice.
    - `begin_ms`: Time of the first entry, epoch milliseconds.
    - `end_ms`: Time of the last entry, inclusive.
    - `key_names`: What keys with a name begin with, such as `order=`.
    - `connector`: The connector that wrote the topic, such as `kafka`; null: a program put its entries.
    """

    topic: str
    entries: int
    bytes_of_entries: int
    begin_ms: int
    end_ms: int
    key_names: tuple[str, ...] = ()
    connector: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class TopicsResult(Answer[TopicSummary]):
    """The topics of the index, a sequence in order of their names.

    `seen` has the provenance, as in `QueryResult`.

    - `topics`: A summary of each topic.
    - `status`: `partial`: `failed` names the files that the answer lacks. Otherwise `complete`.
    - `unknown_topics`: Always empty, since the request names no topic.
    - `expired_before_ms`: The latest such time of any topic. Other topics may have older entries.
    - `replaced`: Always 0. The numbers of entries and bytes include replaced rows until a merge.
    """

    rows_field = "topics"
    topics: tuple[TopicSummary, ...]
    cursor: ClassVar[None] = None  # the answer is whole


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Return a table as a pandas DataFrame. Raises `ConfigError` if pandas is not installed."""
    try:
        return table.to_pandas()
    except ImportError as error:
        raise ConfigError(f"to_pandas needs pandas: {install_hint('pandas')}") from error


# an entry of files as `entry_id`: queue and offset, then what a merge may change, then `_HAS_FINGERPRINT` and `_IS_ROW`
_ENTRY_ID = struct.Struct(">iqiiiIB")
_HAS_FINGERPRINT, _IS_ROW = 1, 2
_OF_MESSAGES = ("queue_id", "offset", "size", "key_hash", "topic_id")
_OF_PLACES = ("file", "row", "entry_id")


def describe_places(documents: Sequence[dict[str, Any]], places: Sequence[FilePlace | None] | None) -> None:
    """Describe entries by their places: `file`, `row` and `entry_id`, in place of the fields of messages.

    A column of the index keeps its name: then the other fields stay, too.
    """
    for document, place in zip(documents, places or (), strict=places is not None):
        if place is None:
            continue
        if document.keys() >= {*_OF_MESSAGES} and document.keys().isdisjoint(_OF_PLACES):
            numbers = [document.pop(name) for name in _OF_MESSAGES]
            fingerprint = document.pop("fingerprint", None)
            flags = _HAS_FINGERPRINT * (fingerprint is not None) | _IS_ROW * (place.unit == "row")
            document["entry_id"] = _ENTRY_ID.pack(*numbers, fingerprint or 0, flags).hex()
        document.setdefault("file", place.file)
        document.setdefault("row", place.row)


def taken_place(document: dict[str, Any]) -> FilePlace | None:
    """Return the place in the document of an entry, which gets the fields of messages back; None: it has no place."""
    if (entry_id := document.pop("entry_id", None)) is None:
        return None
    *numbers, fingerprint, flags = _ENTRY_ID.unpack(bytes.fromhex(entry_id))
    document |= dict(zip(_OF_MESSAGES, numbers, strict=True))
    document |= {"fingerprint": fingerprint} if flags & _HAS_FINGERPRINT else {}
    return FilePlace(document.pop("file"), document.pop("row"), "row" if flags & _IS_ROW else "byte")


def with_places(table: pa.Table, places: Sequence[FilePlace | None], own: Sequence[str]) -> pa.Table:
    """Return a table of entries with the columns `file` and `row`. `own` are the index's own columns, which stay.

    `table` has the columns of `items_table`. A column that the index already has under one of these names stays.
    """
    # imported here, as in `table_of`
    import pyarrow as pa

    columns = {
        "topic": table["topic"],
        "timestamp_ms": table["timestamp_ms"],
        "file": pa.array([place and place.file for place in places], pa.string()),
        "row": pa.array([place and place.row for place in places], pa.int64()),
        **{name: table[name] for name in own},
        "source": table["source"],
    }
    return pa.table(columns)


_ARROW_TYPES = {"topic": "string", "offset": "int64", "source": "string"}


def items_table(items: Sequence[IndexItem], item_type: type[IndexItem]) -> pa.Table:
    """Return entries as an Arrow table, with a row per entry and a column per field of `item_type`, in their order.

    Numbers have the width in which they are stored (`timestamp_ms`: int64, epoch milliseconds), bytes are binary, and
    text columns are strings.
    """
    return table_of(
        {f.name: [getattr(item, f.name) for item in items] for f in dataclasses.fields(item_type)}, item_type
    )


def table_of(columns: Mapping[str, Any], item_type: type[IndexItem]) -> pa.Table:
    """Return a table as `items_table` does, from `columns`: for each field a list, or a NumPy or Arrow array."""
    # imported here, because every command loads this module
    import numpy as np
    import pyarrow as pa

    table = {}
    for f in dataclasses.fields(item_type):
        if "dtype" in f.metadata:
            by_kind = {"S": pa.binary(), "U": pa.string()}
            kind = by_kind.get(value_kind(f)) or pa.from_numpy_dtype(np.dtype(f.metadata["dtype"]).newbyteorder("="))
        else:
            is_time = f.name == "timestamp_ms"
            kind = pa.timestamp("ms", "UTC") if is_time else pa.type_for_alias(_ARROW_TYPES.get(f.name, "int32"))
        values = columns[f.name]
        table[f.name] = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return pa.table(table)
