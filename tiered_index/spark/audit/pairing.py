"""The differences of index and source, found in tasks: entries of a range by identity, those of one side that the other
has not alike laid side by side, counted, and the first of each kind told. NumPy and Arrow. Memory: what `ranges` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.format.hashing import HashRule
from tiered_index.format.schema import Schema
from tiered_index.format.shard import mixed_columns
from tiered_index.spark.audit.entries import Part, identity_dtype, packed, value_dtype
from tiered_index.spark.audit.ranges import Blocks, Ranges
from tiered_index.spark.lookup.plan import Target

# Kinds of reported differences, by number. A missing entry that may have been in a damaged object is unproven.
KINDS = ("missing", "extra", "wrong")
_MISSING, _EXTRA, _WRONG, _UNPROVEN = range(4)
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
_NONE, _LARGE = -1, np.iinfo(np.int64).max
# `rank` is the place among those of an identity.
_TOLD = pa.schema(
    [
        *(("identity", pa.binary()), ("rank", pa.int64())),
        *(("topic", pa.string()), ("key", pa.string())),
        *(("said", pa.binary()), ("said_topic", pa.string())),
        *(("held", pa.binary()), ("held_topic", pa.string()), ("object", pa.string())),
    ]
)
_BY_NAME = [(name, "ascending") for name in ("topic", "key", "identity", "rank", "said", "held", "object")]


def pack(part: Part, schema: Schema) -> pa.RecordBatch:
    """Return a part's entries: identity, value, topic, key and object."""
    kinds = identity_dtype(schema), value_dtype(schema)
    count = len(part.columns["second"])
    cells = [_fixed(packed(part.columns, kind)) for kind in kinds]
    none = pa.DictionaryArray.from_arrays(pa.nulls(count, pa.int32()), pa.array([], pa.string()))
    topics = none if part.topics is None else _int32(part.topics)
    keys = pa.nulls(count, pa.string()) if part.keys is None else part.keys.cast(pa.string())
    name = np.zeros(count, np.int32)
    objects = none if part.name is None else pa.DictionaryArray.from_arrays(pa.array(name), pa.array([part.name]))
    return pa.RecordBatch.from_arrays([*cells, topics, keys, objects], ["identity", "value", "topic", "key", "object"])


def _fixed(records: Array) -> pa.Array:
    kind = pa.binary(records.dtype.itemsize)
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(records), [None, pa.py_buffer(records.view(np.uint8))])


def _int32(texts: pa.DictionaryArray) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(texts.indices.cast(pa.int32()), texts.dictionary.cast(pa.string()))


def cut(held: Sequence[pa.RecordBatch], ranges: Ranges) -> tuple[Int64, list[bytes]]:
    """Return ranges of identities and, of each, its entries."""
    [batch] = pa.Table.from_batches(held).unify_dictionaries().combine_chunks().to_batches()
    order, firsts, numbers = ranges.cut(
        mixed_columns(_words(_bytes_of(batch.column("identity"))), np.zeros(len(batch)))
    )
    ordered = batch.take(pa.array(order))
    blocks = []
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, ordered.schema) as writer:
            writer.write_batch(ordered.slice(first, stop - first))
        blocks.append(sink.getvalue().to_pybytes())
    return numbers, blocks


def _bytes_of(column: Any) -> npt.NDArray[np.uint8]:
    """Return a column of fixed-size cells as bytes (n, size)."""
    size = column.type.byte_width
    whole = np.frombuffer(column.buffers()[1], np.uint8)
    return whole[column.offset * size : (column.offset + len(column)) * size].reshape(len(column), size)


def _words(cells: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint64]]:
    """Return cells (n, size) as columns (u64, n each) that are ordered as their bytes are: the first ones in front."""
    padded = np.zeros((len(cells), -(-cells.shape[1] // 8) * 8), np.uint8)
    padded[:, : cells.shape[1]] = cells
    return [np.ascontiguousarray(word).astype(np.uint64) for word in padded.view(">u8").T]


@dataclass(frozen=True, slots=True)
class Hidden:
    """The part of a source that damaged objects may hold: inclusive seconds and half-open base slots of each.

    `unread` says which of `targets` those are, beside the ones that a task tells.
    """

    targets: Mapping[str, Target]
    damaged: frozenset[str]
    base: int
    rule: HashRule

    def spans(self, unread: frozenset[str]) -> list[tuple[int, int, int, int]]:
        """Return (first second, last, base slots from, to), joined where ranges of the same slots meet."""
        damaged = [target for name, target in self.targets.items() if name in self.damaged | unread]
        joined: list[tuple[int, int, int, int]] = []
        ranges = [(t.base_low, t.base_high, t.stored.second_min, t.stored.second_max) for t in damaged]
        for low, high, first, last in sorted(ranges):
            before = joined[-1] if joined else None
            if before is not None and before[2:] == (low, high) and first <= before[1] + 1:
                joined[-1] = (before[0], max(before[1], last), low, high)
            else:
                joined.append((first, last, low, high))
        return joined

    def may_hold(self, hashes: Int64, seconds: Int64, spans: Sequence[tuple[int, int, int, int]]) -> Array:
        """Return which entries (bool, n) of these hashes and seconds (n each) lie in one of the spans."""
        hidden = np.zeros(len(hashes), np.bool_)
        slots = [hashes % self.base, *([(2**31 - hashes) % self.base] if self.rule == "both" else [])]
        for first, last, low, high in spans:
            inside = (seconds >= first) & (seconds <= last)
            hidden |= inside & np.logical_or.reduce([(slot >= low) & (slot < high) for slot in slots])
        return hidden


@dataclass(frozen=True, slots=True)
class _Values:
    """The different entries of a range, by identity and value, and what is to be said of each (n each).

    `group` numbers identities; `row` is an entry's among `cells`. Topics and objects are numbers of names, -1 for none;
    those of the index are of the first and the last name.
    """

    both: pa.Table
    group: Int64
    row: Int64
    in_source: npt.NDArray[np.bool_]
    in_index: npt.NDArray[np.bool_]
    topics: pa.Array
    topic: Int64
    wrong_topic: Int64
    misplaced: npt.NDArray[np.bool_]
    objects: pa.Array
    object: Int64

    @classmethod
    def of(cls, one: Blocks) -> _Values:
        """Return what the blocks of a range have."""
        sides = [[batch for cell in cells for batch in pa.ipc.open_stream(cell)] for cells in one.sides]
        both = pa.Table.from_batches([*sides[0], *sides[1]]).unify_dictionaries().combine_chunks()
        from_source = sum(map(len, sides[0]))
        words = [word for name in ("identity", "value") for word in reversed(_words(_bytes_of(_only(both, name))))]
        identity = len(_words(_bytes_of(_only(both, "identity").slice(0, 0))))
        identities, values = words[:identity], words[identity:]
        order = ordered([*values, *identities])
        new_identity = _changes(identities, order)
        new = new_identity | _changes(values, order)
        firsts = np.flatnonzero(new)
        mine = order < from_source
        own = np.add.reduceat(mine, firsts, dtype=np.int64)
        in_source, in_index = own > 0, own < np.diff(firsts, append=len(order))
        topics, topic = _numbered(_only(both, "topic"))
        objects, held_by = _numbered(_only(both, "object"))
        topic, held_by = topic[order], held_by[order]
        said = np.minimum.reduceat(np.where(mine, topic, _LARGE), firsts)
        last_said = np.maximum.reduceat(np.where(mine, topic, _NONE), firsts)
        found = np.minimum.reduceat(np.where(mine | (topic < 0), _LARGE, topic), firsts)
        last_found = np.maximum.reduceat(np.where(mine, _NONE, topic), firsts)
        # a topic is a part of the key's hash; what an index's table says must agree with it, or no look-up finds the
        # entry
        misplaced = in_source & in_index & (last_found >= 0) & ((found != said) | (last_found != last_said))
        return cls(
            both,
            (np.cumsum(new_identity) - 1)[firsts],
            order[firsts],
            in_source,
            in_index,
            topics,
            np.where(in_source, said, _NONE),
            np.where(found != said, found, last_found),
            misplaced,
            objects,
            np.minimum.reduceat(np.where(mine, _LARGE, held_by), firsts),
        )


def _only(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def ordered(words: Sequence[Array]) -> Int64:
    """Return the permutation (i64, n) by words (n each), the most significant one last, as a stable sort makes it: of
    what is alike the source's entries come first.

    One sort by one word; of two rows that it has alike, as nearly all do that both sides have, one comparison.
    """
    *rest, main = words
    order: Int64 = np.argsort(main)
    firsts = np.flatnonzero(_changes([main], order))
    sizes = np.diff(firsts, append=len(order))
    places = firsts[sizes == 2]
    one, other = order[places], order[places + 1]
    swapped = other < one
    for word in rest:
        before, after = word[one], word[other]
        swapped = np.where(before == after, swapped, after < before)
    order[places], order[places + 1] = np.where(swapped, other, one), np.where(swapped, one, other)
    if (many := np.repeat(sizes > 2, sizes)).any():
        rows = np.sort(order[many])
        order[many] = rows[np.lexsort([word[rows] for word in words])]
    return order


def _changes(words: Sequence[Array], order: Array) -> npt.NDArray[np.bool_]:
    """Return where a row (n) in order differs from the one before; the first one does."""
    new = np.zeros(len(order), np.bool_)
    new[:1] = True
    for word in words:
        ordered = word[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    return new


def _numbered(texts: pa.DictionaryArray) -> tuple[pa.Array, Int64]:
    """Return the names in order, and each text's number among them (i64, n), -1 for null."""
    names = texts.dictionary
    order = pc.sort_indices(names).to_numpy()
    numbers = np.empty(len(names) + 1, np.int64)
    numbers[order] = np.arange(len(names))
    numbers[-1] = _NONE
    found: Int64 = numbers[texts.indices.fill_null(_NONE).to_numpy()]
    return names.take(pa.array(order)), found


@dataclass(slots=True)
class Told:
    """Differences of some ranges: how many of each kind, unproven ones last, and for each kind the first `most` by
    topic, key and identity. `unread` is what each task knew of.
    """

    most: int
    counts: list[int] = field(default_factory=lambda: [0] * 4)
    listed: list[pa.Table] = field(default_factory=lambda: [_TOLD.empty_table()] * 3)
    unread: set[frozenset[str]] = field(default_factory=set)

    def add(self, other: Told) -> None:
        """Add what other ranges have."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        for kind, table in enumerate(other.listed):
            self._list(kind, table)
        self.unread |= other.unread

    @classmethod
    def joined(cls, parts: Iterable[Told]) -> Told:
        """Return all parts together, at least one."""
        each = iter(parts)
        whole = next(each)
        for part in each:
            whole.add(part)
        return whole

    def take(self, values: _Values, hidden: Hidden, spans: Sequence[Any], schema: Schema) -> None:
        """Add the differences of a range."""
        alone = np.flatnonzero(~(values.in_source & values.in_index) | values.misplaced)
        if not len(alone):
            return
        pairs = _Pairs.of(values, alone)
        kinds = np.where(pairs.said < 0, _EXTRA, np.where(pairs.held < 0, _MISSING, _WRONG))
        missing = np.flatnonzero(kinds == _MISSING)
        if spans and len(missing):
            rows = values.row[pairs.said[missing]]
            hashes, seconds = (
                _field(values.both, *where, rows)
                for where in (
                    ("identity", identity_dtype(schema), "key_hash"),
                    ("value", value_dtype(schema), "second"),
                )
            )
            kinds[missing[hidden.may_hold(hashes, seconds, spans)]] = _UNPROVEN
        counted = np.bincount(kinds, minlength=4).tolist()
        self.counts = [mine + more for mine, more in zip(self.counts, counted, strict=True)]
        for kind in range(3):
            of_kind = np.flatnonzero(kinds == kind)
            if len(of_kind) and self.most:
                self._list(kind, pairs.table(self._likely(kind, pairs, of_kind)))

    def _likely(self, kind: int, pairs: _Pairs, of_kind: Int64) -> Int64:
        """Return those that may be among the first ones: with as many as are kept before them, others are not."""
        if len(of_kind) <= self.most:
            return of_kind
        texts = pairs.names(of_kind)
        unknown = np.flatnonzero(pc.is_null(texts["key"]).to_numpy())
        known = texts.append_column("at", pa.array(np.arange(len(of_kind)))).filter(pc.is_valid(texts["key"]))
        if len(known) > self.most:
            by = [(name, "ascending") for name in ("topic", "key", "at")]
            known = known.take(pc.select_k_unstable(known, self.most, by))
        places: Int64 = np.concatenate([unknown[: self.most], known["at"].to_numpy()])
        return of_kind[places]

    def _list(self, kind: int, table: pa.Table) -> None:
        both = pa.concat_tables([self.listed[kind], table])
        # what is unknown comes first
        named = [pc.fill_null(both[name], "") if name in ("topic", "key") else both[name] for name in _TOLD.names]
        self.listed[kind] = both.take(pc.sort_indices(pa.table(named, _TOLD.names), _BY_NAME)[: self.most])


def _field(both: pa.Table, column: str, dtype: np.dtype[Any], name: str, rows: Int64) -> Int64:
    cells = np.ascontiguousarray(_bytes_of(_only(both, column))[rows])
    found: Int64 = cells.view(dtype).reshape(-1)[name].astype(np.int64)
    return found


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The source's values beside those of the index, as places among `values` (-1 for none), in order of identity and
    rank (n each).
    """

    values: _Values
    rank: Int64
    said: Int64
    held: Int64
    of_source: Int64

    @classmethod
    def of(cls, values: _Values, alone: Int64) -> _Pairs:
        sides = alone[values.in_source[alone]], alone[values.in_index[alone]]
        groups = [values.group[side] for side in sides]
        totals = [np.bincount(group, minlength=int(values.group[-1]) + 1) for group in groups]
        begins = [np.cumsum(total) - total for total in totals]
        ranks = [np.arange(len(group)) - begin[group] for group, begin in zip(groups, begins, strict=True)]
        span = 1 + max(int(rank.max(initial=0)) for rank in ranks)
        codes = [group * span + rank for group, rank in zip(groups, ranks, strict=True)]
        both = np.sort(np.concatenate(codes))
        both = both[np.diff(both, prepend=-1) > 0]
        group, rank = both // span, both % span
        laid = []
        for side, code in zip(sides, codes, strict=True):
            of = np.full(len(both), _NONE, np.int64)
            of[np.searchsorted(both, code)] = side
            laid.append(of)
        # any of its group's that the source has knows topic and key
        of_source = np.full(len(both), _NONE, np.int64)
        told = totals[0][group] > 0
        of_source[told] = sides[0][begins[0][group[told]]]
        return cls(values, rank, laid[0], laid[1], of_source)

    def names(self, at: Int64) -> pa.Table:
        """Return topic and key of some pairs; of what the source has nothing of, the topic that the index names."""
        of, held = self.of_source[at], self.held[at]
        keys = _only(self.values.both, "key").take(_or_null(of, self.values.row))
        topic = np.where(of >= 0, self.values.topic[of], self.values.wrong_topic[held])
        known = (topic >= 0) & (topic < len(self.values.topics))
        return pa.table({"topic": self.values.topics.take(pa.array(topic, mask=~known)), "key": keys})

    def table(self, at: Int64) -> pa.Table:
        """Return some pairs as rows of the report."""
        values, said, held = self.values, self.said[at], self.held[at]
        some = np.where(said < 0, held, said)
        identity, cells = _only(values.both, "identity"), _only(values.both, "value")
        misplaced = values.misplaced
        columns = {
            "identity": identity.take(pa.array(values.row[some])),
            "rank": pa.array(self.rank[at]),
            **{
                name: column.combine_chunks()
                for name, column in zip(("topic", "key"), self.names(at).columns, strict=True)
            },
            "said": cells.take(_or_null(said, values.row)),
            "said_topic": values.topics.take(_or_null(np.where(misplaced[said], said, _NONE), values.topic)),
            "held": cells.take(_or_null(held, values.row)),
            "held_topic": values.topics.take(_or_null(np.where(misplaced[held], held, _NONE), values.wrong_topic)),
            "object": values.objects.take(_or_null(held, values.object)),
        }
        return pa.table([columns[name].cast(kind) for name, kind in zip(_TOLD.names, _TOLD.types, strict=True)], _TOLD)


def _or_null(at: Int64, numbers: Int64) -> pa.Array:
    """Return the numbers at some places, null where that is -1."""
    return pa.array(numbers[at], mask=at < 0)


def pair(found: Iterator[Blocks], unread: frozenset[str], hidden: Hidden, schema: Schema, most: int) -> Told:
    """Return the differences of a partition's ranges."""
    told = Told(most, unread={unread})
    spans = hidden.spans(unread)
    for one in found:
        told.take(_Values.of(one), hidden, spans, schema)
    return told
