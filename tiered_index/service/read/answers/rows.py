"""One lookup's arguments, the rows that answer it, the items of rows, and the cursors between pages. Any thread.

A row is an entry with `second` (epoch seconds). Rows of all files have the same native-order structured dtype.
Selection, answer order, identity and paging are defined only here. A cursor is stateless: it has the order key of a
page's last answer, a digest of the lookup, and a CRC32 against accidental changes.
"""

from __future__ import annotations

import binascii
import dataclasses
import hashlib
import itertools
import json
import operator
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import ge, gt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.base.kernels import compiled_views
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.errors import InvalidArgument, InvalidCursor, SchemaMismatch
from tiered_index.format.schema import Schema, text_of, texts
from tiered_index.types import (
    MAX_KEY_UNITS,
    MAX_TOPIC_UNITS,
    Explain,
    FilePlace,
    IndexItem,
    KeyedIndexItem,
    QueryResult,
    table_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index.base._views import ItemForm
    from tiered_index.service.read.segments.places import RowPlaces

Array = npt.NDArray[Any]
Item = TypeVar("Item", bound=IndexItem)
OrderKey = tuple[int, ...]
"""The end of a page: (second, offset, queue_id, further identity columns)."""
# up to this number of rows, plain Python compares faster
_SHORT = 128
_VERSION = 1
# version, digest and order key, as `encode_cursor` writes them
_BODY = re.compile(rb'\[([0-9]{1,3}),"[0-9a-f]{16}"(?:,(?:0|-?[1-9][0-9]{0,19}))*\]')
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_+/", b"+/!!")
_json_text = json.encoder.encode_basestring_ascii
MOST_ROWS = (1 << 60) - 1
"""Most answers of one lookup of the compiled core, so that one more does not overflow."""


class PreparedLookup(NamedTuple):
    """A validated lookup: hashes, inclusive epoch seconds, and the order key after which the page starts.

    - `key_hash`, `masked_hash`: the hashes by the rules ``abs`` and ``mask``.
    """

    topic: str
    key: str
    key_hash: int
    masked_hash: int
    fingerprint: int
    second_min: int
    second_max: int
    max_count: int
    after: OrderKey | None = None


def core_supports(after: OrderKey) -> bool:
    """Return whether the compiled core supports the end of a page: second, offset and queue only, in 64 bits."""
    return len(after) == 3 and all(-(2**63) <= bound < 2**63 for bound in after)


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def check_text(name: str, text: str) -> str:
    """Return a text of class `str`. Raises `InvalidArgument` if it is no valid Unicode.

    In a message or a URL, a member of an enumeration may be another text.
    """
    if type(text) is not str:
        text = str.__str__(text)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{name} {text[:40]!r} has half a surrogate pair, and is no valid Unicode: encode it in another way"
            ) from error
    return text


def check_topic(topic: object) -> str:
    """Return `topic` if it is valid. Raises `InvalidArgument`."""
    if type(topic) is not str and not isinstance(topic, str):
        raise InvalidArgument(f"topic must be text, not {type(topic).__name__}")
    if not topic or topic.isspace():
        raise InvalidArgument("topic is empty")
    topic = check_text("topic", topic)
    if len(topic) * 2 > MAX_TOPIC_UNITS and _units(topic) > MAX_TOPIC_UNITS:
        raise InvalidArgument(
            f"topic {topic[:40]!r}... has {_units(topic):,} UTF-16 code units; the limit is {MAX_TOPIC_UNITS:,}"
        )
    return topic


def check_key(key: object) -> str:
    """Return `key` if it is valid. Raises `InvalidArgument`."""
    if type(key) is not str and not isinstance(key, str):
        raise InvalidArgument(f"a key must be text, not {type(key).__name__}")
    if not key:
        raise InvalidArgument("a key is empty")
    key = check_text("key", key)
    if len(key) * 2 > MAX_KEY_UNITS and _units(key) > MAX_KEY_UNITS:
        raise InvalidArgument(
            f"key {key[:40]!r}... has {_units(key):,} UTF-16 code units; the limit is {MAX_KEY_UNITS:,}"
        )
    return key


def check_integer(name: str, value: Any) -> int:
    """Return `value`, an integer of Python or NumPy, as an int. Raises `InvalidArgument`."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise InvalidArgument(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{name} must be an integer, not {value!r:.80}") from error


def check_range(begin_ms: Any, end_ms: Any, max_count: Any, which: str = "") -> tuple[int, int, int]:
    """Return the inclusive range in epoch seconds, and the count. None: no bound. `which` is put before messages."""
    if begin_ms is None and end_ms is None and type(max_count) is int and max_count > 0:
        return 0, MAX_TIMESTAMP_MS // 1000, max_count
    low = 0 if begin_ms is None else check_integer(f"{which}begin_ms", begin_ms)
    high = MAX_TIMESTAMP_MS if end_ms is None else check_integer(f"{which}end_ms", end_ms)
    count = max_count if type(max_count) is int else check_integer(f"{which}max_count", max_count)
    if low > high:
        raise InvalidArgument(f"{which}begin_ms {low} is after end_ms {high}")
    if count < 1:
        raise InvalidArgument(f"{which}max_count must be at least 1, not {count}")
    return max(low, -(2**63)) // 1000, min(high, 2**63 - 1) // 1000, count


def are_after(
    rows: Array, key: OrderKey | tuple[Array, ...], schema: Schema, or_at: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.bool_]:
    """Return which rows (bool, n) come after an order key, or each after its own one (columns, n).

    `or_at` (bool, n): the rows that also count if they are exactly there. Raises `SchemaMismatch` for a key of other
    columns.
    """
    # second desc, offset desc, queue_id asc, ...: each column counts if all before it are equal
    later = np.zeros(len(rows), bool)
    equal = np.ones(len(rows), bool)
    names = ("second", "offset", "queue_id", *schema.identity_extra)
    if len(names) != len(key):
        raise SchemaMismatch(f"a file's identity columns are {names}, the index has {len(key)}: it is of another index")
    for name, bound in zip(names, key, strict=True):
        values = rows[name]
        later |= equal & (values < bound if name in ("second", "offset") else values > bound)
        equal &= values == bound
    return later if or_at is None else later | (equal & or_at)


def concatenate(parts: list[Array], schema: Schema) -> Array:
    """Return the rows of all parts, each of the schema, in one array."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    # as bytes, because NumPy joins records column by column
    return np.concatenate([part.view(np.void) for part in filled]).view(schema.row) if filled else schema.no_rows


def check_schema(rows: Array, schema: Schema, file: str) -> None:
    """Raise `SchemaMismatch` if the rows of a file have other columns than the index."""
    if rows.dtype != schema.row:
        raise SchemaMismatch(
            f"{file} has columns {rows.dtype.names}, but the index has {schema.row.names}: the file is of another index"
        )


def with_repeats(
    rows: Array, schema: Schema, owners: Sequence[Array] = ()
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of rows (n) by `owners` (n each), then in answer order.

    Also return the places in this order of rows whose owners and identity an earlier row has (m), and of these first
    rows (m). Of equal identities only the newest is an answer, then by `tie_keys`.
    """
    columns = tie_keys(rows, schema)
    columns += [rows[name] for name in reversed(schema.identity_extra)]
    columns += [rows["queue_id"], ~rows["offset"], -rows["second"], *owners]
    order = np.lexsort(columns)
    again, first = repeats(
        [column[order] for column in owners]
        + [rows[name][order] for name in ("queue_id", "offset", *schema.identity_extra)]
    )
    return order, again, first


def repeats(columns: Sequence[Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows (m) that repeat the `columns` (n each) of an earlier row, and the first such row of each (m).

    Columns are compared one by one, because NumPy turns an interrupt of a comparison of records into a `TypeError`.
    """
    # the sort is stable, so the first of equal rows stays the first
    order = np.lexsort(columns)
    equal = np.ones(len(order) - 1, bool)
    for values in columns:
        in_order = values[order]
        equal &= in_order[1:] == in_order[:-1]
    begins = np.concatenate(([True], ~equal))
    first = order[begins][np.cumsum(begins) - 1]
    return order[1:][equal], first[1:][equal]


def in_answer_order(rows: Array, owners: npt.NDArray[np.int64]) -> bool:
    """Return whether rows (n), grouped by `owners` (n), are in answer order with different identities.

    It tests that offsets fall, which is common for a log. False does not exclude that they are in order.
    """
    offsets, seconds = rows["offset"], rows["second"]
    falls = (offsets[1:] < offsets[:-1]) & (seconds[1:] <= seconds[:-1])
    return bool((falls | (owners[1:] != owners[:-1])).all())


def in_one_order(rows: Array) -> bool:
    """As `in_answer_order`, for rows of one lookup."""
    if len(rows) > _SHORT:
        return in_answer_order(rows, np.zeros(len(rows), np.int64))
    seconds, offsets = rows["second"].tolist(), rows["offset"].tolist()
    return all(map(gt, offsets, offsets[1:])) and all(map(ge, seconds, seconds[1:]))


def stable_order(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the stable order (i64, n) of numbers (n) from 0 to 2**31 - 1.

    It sorts numbers with their places in the lower bits, which is much faster than `argsort`.
    """
    keys: npt.NDArray[np.int64] = numbers.astype(np.int64) << 32 | np.arange(len(numbers))
    keys.sort()
    return keys & 0xFFFFFFFF


def differing(rows: Array, kept_rows: Array, schema: Schema) -> int:
    """Return the number of rows (n) that differ from the kept rows (n) of the same identity, except in topic id."""
    differ = np.zeros(len(rows), bool)
    for name in {*(rows.dtype.names or ())} - {"topic_id", "queue_id", "offset", *schema.identity_extra}:
        ours, theirs = rows[name], kept_rows[name]
        # NaN counts as equal to NaN
        differ |= (ours != theirs) & ((ours == ours) | (theirs == theirs))
    return int(differ.sum())


def tie_keys(rows: Array, schema: Schema) -> list[Array]:
    """Return sort keys for equal identities, the most significant last: greatest size, further columns, topic id."""
    keys: list[Array] = [-rows["topic_id"].astype(np.int64)]
    for c in reversed(schema.caller_columns):
        if not c.identity:
            # ranks can be negated for any type of column
            keys.append(-np.unique(rows[c.name], return_inverse=True)[1])
    keys.append(-rows["size"].astype(np.int64))
    return keys


class AnswerForm:
    """Makes items of `item_type`, documents and tables from rows. Immutable.

    `places` are those of files. `sources` are the URIs of the indexes of rows (n); None: one index is read.
    """

    def __init__(self, schema: Schema, item_type: type[IndexItem], places: RowPlaces | None = None) -> None:
        self.item_type = item_type
        self._places = places
        self._extra = [c.name for c in schema.extra]
        self._texts = schema.text_columns
        self._text_places = [place for place, c in enumerate(schema.extra) if c.is_text]
        # these classes only store their fields
        self.only_stores = item_type is KeyedIndexItem or item_type is IndexItem
        # makes the items faster than their constructor; None: it can't
        self.in_core: ItemForm | None = None
        core = compiled_views()
        if core is not None and self.only_stores and self._extra == ["fingerprint"] * schema.keyed:
            self.in_core = core.ItemForm(item_type, schema.keyed)

    def items(self, topic: str, rows: Array, sources: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Return the rows (n) as items."""
        if self.in_core is not None:
            return self.in_core.items(topic, np.ascontiguousarray(rows), sources)
        item_type, extra = self.item_type, self._extra
        made = []
        for row, source in zip(rows.tolist(), sources or itertools.repeat(None)):  # noqa: B905 - None for each row
            second, key_hash, topic_id, queue_id, offset, size, *more = row
            for place in self._text_places:
                more[place] = text_of(more[place])
            fields: dict[str, Any] = {
                "topic": topic,
                "topic_id": topic_id,
                "queue_id": queue_id,
                "offset": offset,
                "size": size,
                "timestamp_ms": second * 1000,
                "key_hash": key_hash,
                "source": source,
            }
            fields.update(zip(extra, more, strict=True))
            made.append(item_type(**fields))
        return tuple(made)

    def has_files(self, topic: str) -> bool:
        """Return whether a topic has files. No request."""
        return self._places is not None and self._places.has(topic)

    def places_of(
        self, topic: str, rows: Array, sources: Sequence[str] | None = None
    ) -> tuple[FilePlace | None, ...] | None:
        """Return the places of rows (n) of a topic, as `RowPlaces.of`. None: the topic has no files."""
        # before the rows become lists
        if self._places is None or not self._places.has(topic):
            return None
        return self._places.of(topic, sources or [None] * len(rows), rows["queue_id"].tolist(), rows["offset"].tolist())

    def documents(
        self, topics: Sequence[str], rows: Array, sources: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the documents of rows (n) with topics (n). Only if `only_stores`."""
        fixed = (rows[name].tolist() for name in ("topic_id", "queue_id", "offset", "size"))
        made: list[dict[str, Any]] = [
            {
                "topic": topic,
                "topic_id": topic_id,
                "queue_id": queue_id,
                "offset": offset,
                "size": size,
                "timestamp_ms": timestamp_ms,
                "key_hash": key_hash,
            }
            for topic, topic_id, queue_id, offset, size, timestamp_ms, key_hash in zip(
                topics, *fixed, (rows["second"] * 1000).tolist(), rows["key_hash"].tolist(), strict=True
            )
        ]
        if sources is not None:
            for document, source in zip(made, sources, strict=True):
                document["source"] = source
        for name in self._extra:
            for document, value in zip(made, rows[name].tolist(), strict=True):
                document[name] = value
        return made

    def table(self, topic: str, rows: Array, sources: Sequence[str] | None = None) -> pa.Table:
        """Return the table that `items_table` returns for the items of rows."""
        # loaded when used, as in `table_of`
        import pyarrow as pa

        text = pa.string()
        columns: dict[str, Any] = {
            "topic": pa.repeat(pa.scalar(topic, text), len(rows)),
            "timestamp_ms": rows["second"] * 1000,
        }
        columns["source"] = pa.nulls(len(rows), text) if sources is None else sources
        for name in rows.dtype.names or ():
            if name in self._texts:
                columns[name] = texts(rows[name])
            elif name != "second":
                columns[name] = rows[name].tolist() if rows[name].dtype.kind == "V" else rows[name].copy()
        return table_of(columns, self.item_type)


class AnswerRows(NamedTuple):
    """The rows that answer one lookup of `topic`: the `LaterFields` of a `QueryResult`."""

    topic: str
    rows: Array
    form: AnswerForm
    explain: Callable[[], Explain]
    sources: Sequence[str] | None = None

    def field(self, name: str) -> Any:
        """Return the field `items`, `places` or `explain`."""
        if name == "explain":
            return self.explain()
        return (self.form.places_of if name == "places" else self.form.items)(self.topic, self.rows, self.sources)

    def documents(self) -> list[dict[str, Any]] | None:
        """See `LaterFields.documents`."""
        if not self.form.only_stores:
            return None
        return self.form.documents([self.topic] * len(self.rows), self.rows, self.sources)

    def table(self) -> pa.Table:
        """Return the rows as a table."""
        return self.form.table(self.topic, self.rows, self.sources)

    def result(self, **known: Any) -> QueryResult[Any]:
        """Return a result with the `known` fields. Its `items` and `explain` are made on first access."""
        result: QueryResult[Any] = object.__new__(QueryResult)
        known["_later"] = self
        result.__dict__.update(known)
        return result


def order_key(row: Any, schema: Schema) -> OrderKey:
    """Return the order key of one row."""
    return tuple(int(row[name]) for name in ("second", "offset", "queue_id", *schema.identity_extra))


def once(page: QueryResult[Any], seen: set[tuple[object, ...]]) -> QueryResult[Any]:
    """Return a page without the items whose identity is in `seen`, which count as folded entries."""
    items = tuple(unseen(page.items, seen))
    if not (again := len(page.items) - len(items)):
        return dataclasses.replace(page, items=items)
    explain = dataclasses.replace(page.explain, folded_entries=page.explain.folded_entries + again)
    places = None
    if page.places is not None:
        by_item = {id(item): place for item, place in zip(page.items, page.places, strict=True)}
        places = tuple([by_item[id(item)] for item in items])
    return dataclasses.replace(page, items=items, explain=explain, places=places)


def unseen(items: Iterable[Item], seen: set[tuple[object, ...]]) -> Iterator[Item]:
    """Yield the items whose identity is not in `seen`: an entry that was put with two times may be on two pages."""
    for item in items:
        columns = [f.name for f in dataclasses.fields(item) if f.metadata.get("identity")]
        identity = (item.source, item.queue_id, item.offset, *(getattr(item, name) for name in columns))
        if identity not in seen:
            seen.add(identity)
            yield item


def query_digest(topic: str, key: str, second_min: int, second_max: int) -> str:
    """Return 16 hexadecimal digits that identify a query. `max_count` is not included: it may change between pages."""
    # the same text as of `json.dumps`, in a third of the time
    text = f"[{_json_text(topic)}, {_json_text(key)}, {second_min}, {second_max}]"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def cursor_after(rows: Array, schema: Schema, key: str, topic: str, second_min: int, second_max: int) -> str:
    """Return the cursor for the page after `rows` of a lookup in inclusive epoch seconds."""
    return encode_cursor(order_key(rows[-1], schema), query_digest(topic, key, second_min, second_max))


def encode_cursor(after: OrderKey, digest: str) -> str:
    """Return the cursor for the page after `after`."""
    return _cursor_of(f'[{_VERSION},"{digest}",{",".join(map(str, after))}]'.encode())


def _cursor_of(body: bytes) -> str:
    text = binascii.b2a_base64(zlib.crc32(body).to_bytes(4, "big") + body, newline=False)
    return text.translate(_TO_URL).decode().rstrip("=")


def decode_cursor(cursor: str, digest: str, columns: int) -> OrderKey:
    """Return the order key (`columns` integers) of a cursor. Raises `InvalidCursor` for another query's."""
    if not isinstance(cursor, str):
        raise InvalidCursor(f"a cursor is text, not {type(cursor).__name__}")
    try:
        raw = binascii.a2b_base64(cursor.encode("ascii").translate(_FROM_URL) + b"=" * (-len(cursor) % 4))
    except ValueError as error:
        raise InvalidCursor(f"not a cursor: {cursor[:40]!r}") from error
    body = raw[4:]
    if zlib.crc32(body) != int.from_bytes(raw[:4], "big"):
        raise InvalidCursor(f"cursor {cursor[:40]!r} was altered: its checksum does not match")
    if (parsed := _BODY.fullmatch(body)) is None:
        raise InvalidCursor(f"not a cursor: {cursor[:40]!r}")
    version, stored, *after = parsed.group().translate(None, b'[]"').split(b",")
    if int(version) != _VERSION:
        raise InvalidCursor(
            f"cursor {cursor[:40]!r} has version {int(version)}, but this program supports version {_VERSION}"
        )
    if stored.decode() != digest:
        raise InvalidCursor("this cursor belongs to another query: give the same topic, key and range as in that query")
    if _cursor_of(body) != cursor:
        raise InvalidCursor(f"cursor {cursor[:40]!r} was altered")
    key = tuple(map(int, after))
    if len(key) != columns or not all(abs(value) < 2**64 for value in key):
        raise InvalidCursor(f"cursor {cursor[:40]!r} does not fit the index's schema")
    return key
