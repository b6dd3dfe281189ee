"""One lookup's arguments, the rows that answer it, and the cursors between its pages. Pure; safe under threads.

A row is an entry with `second` (epoch seconds), in one native-order structured array whatever file it came from.
Selection, answer order, identity and paging are defined here, once. A cursor holds the order key of a page's last
answer, a digest of the lookup, and a CRC32 against accidental changes; it is stateless.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import ge, gt, neg
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument, InvalidCursor, SchemaMismatch
from tiered_index.format.hashing import HashRule
from tiered_index.format.schema import Schema, row_form
from tiered_index.kernels import compiled_views
from tiered_index.retention import Expired
from tiered_index.types import MAX_KEY_UNITS, MAX_TIMESTAMP_MS, MAX_TOPIC_UNITS, Explain, IndexItem, QueryResult

if TYPE_CHECKING:
    import pyarrow as pa

    from tiered_index.service.answers.results import AnswerForm

Array = npt.NDArray[Any]
Item = TypeVar("Item", bound=IndexItem)
OrderKey = tuple[int, ...]
"""(second, offset, queue_id, further identity columns): where a page ended."""
# items that plain Python brings into rows sooner than NumPy does
_FEW = 16
# rows that plain Python orders sooner
_SHORT = 128
_VERSION = 1
MOST_ROWS = (1 << 60) - 1
"""Answers of one lookup of the compiled core at most, so that one more is no overflow."""


class PreparedLookup(NamedTuple):
    """A validated lookup: hashes, inclusive epoch seconds, and the order key that the page starts after.

    `key_hash` is what a search looks for, by hash rule ``abs`` until `under` says otherwise; `masked_hash` is the one
    by ``mask``. Of the `queues`, entries before an epoch second each were erased.
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
    queues: tuple[tuple[int, int], ...] = ()

    @property
    def page_end(self) -> OrderKey | None:
        """`after`, where it is a place by second, offset and queue that the compiled core knows."""
        after = self.after
        if after is None or len(after) != 3 or not all(-(2**63) <= bound < 2**63 for bound in after):
            return None
        return after

    def under(self, rule: HashRule) -> tuple[PreparedLookup, ...]:
        """Return the lookups, one or two, that find the key in a file of a hash rule."""
        if rule == "abs" or self.masked_hash == self.key_hash:
            return (self,)
        masked = self._replace(key_hash=self.masked_hash)
        return (masked,) if rule == "mask" else (self, masked)

    def without(self, expired: Expired) -> PreparedLookup:
        """Return the lookup of what has neither expired nor was erased, by the hash that is looked for."""
        begin, erased = expired.begin_of(self.topic), expired.erased_of(self.topic)
        if erased is not None:
            begin = max(begin, erased.begin_of(self.key_hash, self.fingerprint))
        queues = tuple(erased.queues.items()) if erased is not None else ()
        return self._replace(second_min=max(self.second_min, begin), queues=queues)


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def check_topic(topic: object) -> str:
    """Return a valid topic or raise `InvalidArgument`."""
    if type(topic) is not str and not isinstance(topic, str):
        raise InvalidArgument(f"topic must be text, not {type(topic).__name__}")
    if not topic or topic.isspace():
        raise InvalidArgument("topic is empty")
    if len(topic) * 2 > MAX_TOPIC_UNITS and _units(topic) > MAX_TOPIC_UNITS:
        raise InvalidArgument(
            f"topic {topic[:40]!r}... has {_units(topic):,} UTF-16 code units; the limit is {MAX_TOPIC_UNITS:,}"
        )
    return topic


def check_key(key: object) -> str:
    """Return a valid key or raise `InvalidArgument`."""
    if type(key) is not str and not isinstance(key, str):
        raise InvalidArgument(f"a key must be text, not {type(key).__name__}")
    if not key:
        raise InvalidArgument("a key is empty")
    if len(key) * 2 > MAX_KEY_UNITS and _units(key) > MAX_KEY_UNITS:
        raise InvalidArgument(
            f"key {key[:40]!r}... has {_units(key):,} UTF-16 code units; the limit is {MAX_KEY_UNITS:,}"
        )
    return key


def check_integer(name: str, value: Any) -> int:
    """Return `value`, Python's or NumPy's, as an integer, or raise `InvalidArgument`."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise InvalidArgument(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidArgument(f"{name} must be an integer, not {value!r:.80}") from error


def check_range(begin_ms: Any, end_ms: Any, max_count: Any, which: str = "") -> tuple[int, int, int]:
    """Return the inclusive range in epoch seconds, None being no bound, and the count; `which` begins an error."""
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


def select_items(
    items: Array | Mapping[str, Array],
    begin_s: int | None,
    lookup: PreparedLookup,
    topic_ids: frozenset[int] | None,
    schema: Schema,
) -> Array:
    """Return rows of items that answer `lookup`, unordered. `items` (n) are structured, with times that count from
    `begin_s`; or columns by name, with epoch seconds in `second`. `topic_ids` None: all topics.
    """
    if begin_s is not None and len(items) <= _FEW:
        return _select_few(items, begin_s, lookup, topic_ids, schema)
    hashes = items["key_hash"]
    equal = hashes == lookup.key_hash
    if lookup.key_hash == 0:
        # as `normal_hashes` says
        equal |= hashes == -(2**31)
    (places,) = equal.nonzero()
    if not len(places):
        return schema.no_rows
    if schema.keyed:
        places = places[items["fingerprint"][places] == lookup.fingerprint]
    if topic_ids is not None and len(places):
        places = places[_is_one_of(items["topic_id"][places], topic_ids)]
    rows = np.empty(len(places), schema.row)
    for name in rows.dtype.names or ():
        if name == "second" and begin_s is not None:
            rows[name] = begin_s + items["time_diff_s"][places].astype(np.int64)
        else:
            rows[name] = items[name][places]
    rows["key_hash"] = lookup.key_hash
    return _in_lookup(rows, lookup, schema)


def _select_few(
    items: Any, begin_s: int, lookup: PreparedLookup, topic_ids: frozenset[int] | None, schema: Schema
) -> Array:
    """Do as `select_items` for a few items; plain Python is then faster."""
    end = 6 + len(schema.extra)
    fingerprint = schema.fingerprint_place
    low, high, key_hash, wanted = lookup.second_min, lookup.second_max, lookup.key_hash, lookup.fingerprint
    kept = []
    for values in items.tolist():
        second = begin_s + values[5]
        if (
            (values[0] == key_hash or (key_hash == 0 and values[0] == -(2**31)))
            and low <= second <= high
            and (topic_ids is None or values[1] in topic_ids)
            and (fingerprint < 0 or values[fingerprint] == wanted)
        ):
            kept.append((second, key_hash, *values[1:5], *values[6:end]))
    if not kept:
        return schema.no_rows
    rows = np.array(kept, schema.row)
    return _in_lookup(rows, lookup, schema) if lookup.after is not None or lookup.queues else rows


def search_one(file: Any, lookup: PreparedLookup, schema: Schema) -> Array | None:
    """Return the first `max_count` + 1 rows, or all, that the compiled core has of a local file, by the hash that is
    looked for; None: it has no such file, or leaves it to the caller.
    """
    core, (low, high), after = compiled_views(), (lookup.second_min, lookup.second_max), lookup.page_end
    if core is None or file is None or lookup.queues or (after is None and lookup.after is not None):
        return None
    hashes = lookup.key_hash, lookup.key_hash, lookup.fingerprint
    view = core.View(row_form(schema), [(file, low, high)], [file])
    found = view.find(lookup.topic, *hashes, low, high, min(lookup.max_count, MOST_ROWS), after)
    if found is None:
        return None
    return None if found.has_left else np.frombuffer(found.rows, schema.row)


def _is_one_of(values: Array, topic_ids: frozenset[int]) -> Array:
    """Return which values are among `topic_ids`; nearly always there is one, which needs no sort as `np.isin` does."""
    if len(topic_ids) == 1:
        (only,) = topic_ids
        return values == only  # type: ignore[no-any-return]
    return np.isin(values, list(topic_ids))


def _in_lookup(rows: Array, lookup: PreparedLookup, schema: Schema) -> Array:
    seconds = rows["second"]
    if len(rows) and not (within := (seconds >= lookup.second_min) & (seconds <= lookup.second_max)).all():
        rows = rows[within]
    for queue_id, begin in lookup.queues:
        rows = rows[(rows["queue_id"] != queue_id) | (rows["second"] >= begin)]
    if lookup.after is None or not len(rows):
        return rows
    # strictly after in (second desc, offset desc, queue_id asc, ...): by column while all before are equal
    later = np.zeros(len(rows), bool)
    equal = np.ones(len(rows), bool)
    names = ("second", "offset", "queue_id", *schema.identity_extra)
    if len(names) != len(lookup.after):
        raise SchemaMismatch(
            f"a file tells entries apart by {names}, the index by {len(lookup.after)} columns: it is not of this index"
        )
    for name, bound in zip(names, lookup.after, strict=True):
        values = rows[name]
        later |= equal & (values < bound if name in ("second", "offset") else values > bound)
        equal &= values == bound
    return rows[later]


def concatenate(parts: list[Array], schema: Schema) -> Array:
    """Return the rows of all parts, each of the schema, in one array."""
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    # as bytes, since NumPy joins records column by column
    return np.concatenate([part.view(np.void) for part in filled]).view(schema.row) if filled else schema.no_rows


def check_schema(rows: Array, schema: Schema, file: str) -> None:
    """Raise `SchemaMismatch` where the rows of a file have other columns than the index."""
    if rows.dtype != schema.row:
        raise SchemaMismatch(
            f"{file} stores the columns {rows.dtype.names}, the index {schema.row.names}: it is not of this index"
        )


def first_answers(rows: Array, schema: Schema, limit: int, folded: Callable[[int], None] | None = None) -> Array:
    """Return the first `limit` answers in order; of equal identities the newest one, then as `tie_keys` decide.

    `folded` gets the number of `differing` ones that were dropped, if any were.
    """
    if len(rows) <= 1:
        return rows[:limit]
    seconds, offsets = rows["second"].tolist(), rows["offset"].tolist()
    if all(map(gt, offsets, offsets[1:])) and all(map(ge, seconds, seconds[1:])):
        # as one file has those of a log: in order, and with offsets that fall no two of them have one identity
        return rows[:limit]
    if len(rows) <= _SHORT:
        names = ("queue_id", *schema.identity_extra)
        keys = list(zip(map(neg, seconds), map(neg, offsets), *[rows[name].tolist() for name in names], strict=True))
        if len({key[1:] for key in keys}) == len(keys):
            return rows[sorted(range(len(keys)), key=keys.__getitem__)[:limit]]
    return rows[answer_order(rows, schema, folded)[:limit]]


def answer_order(
    rows: Array, schema: Schema, folded: Callable[[int], None] | None = None, owners: Sequence[Array] = ()
) -> npt.NDArray[np.int64]:
    """Return the places of rows (n) in answer order, by each of `owners` (n) first; of rows with equal identities and
    owners the first one alone. `folded` as that of `first_answers`.
    """
    columns = tie_keys(rows, schema)
    columns += [rows[name] for name in reversed(schema.identity_extra)]
    columns += [rows["queue_id"], ~rows["offset"], -rows["second"], *owners]
    order = np.lexsort(columns)
    again, first = repeats(
        [column[order] for column in owners]
        + [rows[name][order] for name in ("queue_id", "offset", *schema.identity_extra)]
    )
    if not len(again):
        return order
    if folded is not None:
        folded(differing(rows[order[again]], rows[order[first]], schema))
    kept = np.ones(len(order), bool)
    kept[again] = False
    return order[kept]


def repeats(columns: Sequence[Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return which rows (m) repeat the `columns` (n each) of an earlier one, and which is the first of these (m).

    Columns are compared one by one: an interrupt while NumPy compares records is raised as their `TypeError`.
    """
    # a stable sort: of equal rows the first stays the first
    order = np.lexsort(columns)
    equal = np.ones(len(order) - 1, bool)
    for values in columns:
        in_order = values[order]
        equal &= in_order[1:] == in_order[:-1]
    begins = np.concatenate(([True], ~equal))
    first = order[begins][np.cumsum(begins) - 1]
    return order[1:][equal], first[1:][equal]


def in_answer_order(rows: Array, owners: npt.NDArray[np.int64]) -> bool:
    """Return whether rows (n), grouped by `owners` (n), are in order and of one identity each, as a log's mostly are.

    Where offsets fall from row to row no two have one identity, and what orders rows of equal ones decides nothing.
    """
    offsets, seconds = rows["offset"], rows["second"]
    falls = (offsets[1:] < offsets[:-1]) & (seconds[1:] <= seconds[:-1])
    return bool((falls | (owners[1:] != owners[:-1])).all())


def stable_order(numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the stable order (i64, n) of numbers (n) from 0 to 2**31 - 1: each with its place behind it is a number of
    its own, and numbers are sorted in a fraction of the time of their `argsort`.
    """
    keys: npt.NDArray[np.int64] = numbers.astype(np.int64) << 32 | np.arange(len(numbers))
    keys.sort()
    return keys & 0xFFFFFFFF


def differing(rows: Array, kept: Array, schema: Schema) -> int:
    """Return how many rows (n) differ from those of the same identity that stay (n) in more than the topic's id."""
    differ = np.zeros(len(rows), bool)
    for name in {*(rows.dtype.names or ())} - {"topic_id", "queue_id", "offset", *schema.identity_extra}:
        one, other = rows[name], kept[name]
        # NaN, which doesn't equal itself, is no other content than NaN
        differ |= (one != other) & ((one == one) | (other == other))
    return int(differ.sum())


def tie_keys(rows: Array, schema: Schema) -> list[Array]:
    """Return sort keys (last one first) among equal identities: greater size, then further columns, then topic id."""
    keys: list[Array] = [-rows["topic_id"].astype(np.int64)]
    for c in reversed(schema.caller_columns):
        if not c.identity:
            # ranks can be negated, whatever the column's type
            keys.append(-np.unique(rows[c.name], return_inverse=True)[1])
    keys.append(-rows["size"].astype(np.int64))
    return keys


class AnswerRows(NamedTuple):
    """The rows that answer one lookup of `topic`, as yet without their `form`: a `QueryResult`'s `LaterFields`."""

    topic: str
    rows: Array
    form: AnswerForm
    explain: Callable[[], Explain]

    def field(self, name: str) -> Any:
        """Return the `items` or `explain`."""
        return self.explain() if name == "explain" else self.form.items(self.topic, self.rows)

    def table(self) -> pa.Table:
        """Return the rows as a table."""
        return self.form.table(self.topic, self.rows)

    def result(self, **known: Any) -> QueryResult[Any]:
        """Return a result of the `known` fields; `items` and `explain` are made, once, when they are looked at."""
        result: QueryResult[Any] = object.__new__(QueryResult)
        known["_later"] = self
        result.__dict__.update(known)
        return result


def order_key(row: Any, schema: Schema) -> OrderKey:
    """Return the order key of one row."""
    return tuple(int(row[name]) for name in ("second", "offset", "queue_id", *schema.identity_extra))


def unseen(items: Iterable[Item], seen: set[tuple[object, ...]]) -> Iterator[Item]:
    """Yield the items not in `seen` yet: an entry that was put with two times may be on two pages."""
    for item in items:
        columns = [f.name for f in dataclasses.fields(item) if f.metadata.get("identity")]
        identity = (item.source, item.queue_id, item.offset, *(getattr(item, name) for name in columns))
        if identity not in seen:
            seen.add(identity)
            yield item


def query_digest(topic: str, key: str, second_min: int, second_max: int) -> str:
    """Return 16 hexadecimal digits that tell one query from another; `max_count` may change between pages."""
    text = json.dumps([topic, key, second_min, second_max])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def encode_cursor(after: OrderKey, digest: str) -> str:
    """Return the cursor for the page after `after`."""
    body = json.dumps([_VERSION, digest, *after], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")


def decode_cursor(cursor: str, digest: str, columns: int) -> OrderKey:
    """Return the order key (`columns` integers) of a cursor; `InvalidCursor` where it is altered or another's."""
    if not isinstance(cursor, str):
        raise InvalidCursor(f"a cursor is text, not {type(cursor).__name__}")
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        body = raw[4:]
        if zlib.crc32(body) != int.from_bytes(raw[:4], "big"):
            raise InvalidCursor(f"cursor {cursor[:40]!r} was altered: its checksum does not match")
        version, stored, *after = json.loads(body)
        canonical = encode_cursor(tuple(after), stored) == cursor
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise InvalidCursor(f"not a cursor: {cursor[:40]!r}") from error
    if version != _VERSION:
        raise InvalidCursor(f"cursor {cursor[:40]!r} is of version {version}, this reader knows version {_VERSION}")
    if stored != digest:
        raise InvalidCursor("this cursor belongs to another query: topic, key and range must be those it came with")
    if not canonical:
        raise InvalidCursor(f"cursor {cursor[:40]!r} was altered")
    if len(after) != columns or not all(type(value) is int and abs(value) < 2**64 for value in after):
        raise InvalidCursor(f"cursor {cursor[:40]!r} does not fit the index's schema")
    return tuple(after)
