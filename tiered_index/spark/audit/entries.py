"""Reads the entries of a source and of stored objects for an audit, in tasks.

`identity` and `value` are an entry's bytes: the fields that identify it, and its other fields. Memory of a task: a
batch, or 8 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.hashing import HashRule, folded_hashes, normal_hashes
from tiered_index.format.schema import Schema
from tiered_index.format.shard import mixed_columns
from tiered_index.format.trailer import Run
from tiered_index.retention import NOTHING, Expired
from tiered_index.service.answers.validation import TopicTable, batch_columns
from tiered_index.service.cold.path import ColdPath, ColdSettings
from tiered_index.service.files.compacted import StorageBytes
from tiered_index.service.files.search import FileBytes, read_items, scan_runs
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.audit.digest_table import DigestTable
from tiered_index.spark.build.log_sources import SKIPPED
from tiered_index.spark.build.parquet import PART
from tiered_index.spark.build.sources import Entries
from tiered_index.spark.frames import broadcast, gathered, large_batches
from tiered_index.storage.base import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SOURCE, INDEX = range(2)
_WINDOW_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16
# About the bytes of objects that a task reads
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 1 << 28
# Least entries of a group of small objects, and about the most groups of a large index: each group gives the shuffle a
# row for each range
_GROUP_ENTRIES = 1 << 17
_MOST_GROUPS = 1 << 12
# The origin of entries of a source that has no numbered parts
UNKNOWN = -1
# A range of seconds without bounds
ALL_TIME = (-(2**62), 2**62)


def identity_dtype(schema: Schema) -> np.dtype[Any]:
    """Return the fields of an entry's identity."""
    keyed = [("fingerprint", ">u4")] if schema.keyed else []
    further = [(c.name, c.dtype) for c in schema.caller_columns if c.identity]
    return np.dtype([("key_hash", ">i4"), *keyed, ("queue_id", ">i4"), ("offset", ">i8"), *further])


def value_dtype(schema: Schema) -> np.dtype[Any]:
    """Return the fields of an entry that are not its identity."""
    further = [(c.name, c.dtype) for c in schema.caller_columns if not c.identity]
    return np.dtype([("second", ">i8"), ("size", ">i4"), *further])


def entry_digests(columns: Mapping[str, npt.NDArray[Any]], schema: Schema) -> npt.NDArray[np.uint64]:
    """Return a 64-bit digest (u64, n) of each entry's identity and values, for columns of any byte order."""
    kinds = [dtype[name] for dtype in (identity_dtype(schema), value_dtype(schema)) for name in dtype.names or ()]
    names = [*(identity_dtype(schema).names or ()), *(value_dtype(schema).names or ())]
    # integers are mixed by their values, others by their bytes
    told = (columns[n] if k.kind in "iu" else columns[n].astype(k) for n, k in zip(names, kinds, strict=True))
    return mixed_columns(told, np.zeros(len(columns["second"]), np.int64))


@dataclass(frozen=True, slots=True)
class Picked:
    """A selection of entries: those in an inclusive range of seconds that have not `expired`.

    `rule` is the hash rule of the index's objects; if they have both, `folded_hashes` are compared. `among` selects
    only entries with digests (`entry_digests`) that it may hold.
    """

    first: int
    last: int
    rule: HashRule = "abs"
    expired: Expired = NOTHING
    among: DigestTable | None = None

    def as_compared(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the hashes in identities for stored hashes (n)."""
        return folded_hashes(normal_hashes(stored)) if self.rule == "both" else normal_hashes(stored)

    def rows(self, columns: Mapping[str, npt.NDArray[Any]], schema: Schema) -> npt.NDArray[np.intp]:
        """Return the indices (intp, n) of the picked entries."""
        inside = (columns["second"] >= self.first) & (columns["second"] <= self.last)
        if self.among is not None:
            inside &= self.among.may_hold(entry_digests(columns, schema))
        return np.flatnonzero(inside)


@dataclass(frozen=True, slots=True)
class Part:
    """Some entries of one side: columns (n), topics if known, keys (of a source), and the object's name.

    `origin` is the number of the source's part, or of the group of objects.
    """

    side: int
    columns: Mapping[str, npt.NDArray[Any]]
    topics: pa.DictionaryArray | None
    keys: pa.Array | None = None
    name: str | None = None
    origin: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Unread:
    """An object that could not be read whole."""

    name: str


# Objects that are read together; the place in a list is their number
Groups = Sequence[Sequence[StoredObject]]


def groups_of(stored: Sequence[StoredObject]) -> Groups:
    """Return objects in groups, the largest first; small neighbours in time share one."""
    least = max(_GROUP_ENTRIES, sum(one.count for one in stored) // _MOST_GROUPS)
    groups = gathered(sorted(stored, key=lambda one: one.second_min), lambda one: one.count, least)
    return sorted(groups, key=_size, reverse=True)


def _size(group: Sequence[StoredObject]) -> int:
    return sum(one.size_bytes for one in group)


# Makes Spark's rows from the parts that a task reads
Make = Callable[[Iterator[Part | Unread]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Sides:
    """A source's entries and an index's storage. `base` is the number of slots of the index's files.

    Expired entries are on neither side.
    """

    entries: Entries
    address: StorageAddress
    schema: Schema
    base: int
    expired: Expired = NOTHING

    @property
    def cores(self) -> int:
        """The number of tasks that run at once."""
        return self.entries.frame.sparkSession.sparkContext.defaultParallelism

    @contextmanager
    def rows(
        self, groups: Groups, picked: Picked, make: Make, columns: str, parts: Sequence[int] | None = None
    ) -> Iterator[DataFrame]:
        """Yield the rows that tasks `make` from the picked entries of both sides; valid in the block. Driver.

        `parts` are the numbers of the source's parts to read, None for the whole source.
        """
        spark, schema, address = self.entries.frame.sparkSession, self.schema, self.address
        size = sum(map(_size, groups))
        # four a core, fewer if there is little to read
        tasks = max(self.cores, min(4 * self.cores, size // _LEAST_BYTES), size // _MOST_BYTES)
        tasks = min(len(groups), tasks)
        # a task reads every `tasks`-th group
        with broadcast(spark, (groups, picked)) as shared:

            def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return make(source_entries(batches, schema, shared.value[1]))

            def of_index(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return make(read(number for batch in batches for number in batch.column(0).to_pylist()))

            def read(numbers: Iterable[int]) -> Iterator[Part | Unread]:
                groups, picked = shared.value
                with closing(address.open()) as storage:
                    for number in numbers:
                        for origin in range(number, len(groups), tasks):
                            for one in groups[origin]:
                                yield from stored_entries(one, storage, schema, picked, origin)

            # the hash distinguishes topics, not the number
            fields = [name for name in self.entries.names if name not in ("topic_id", SKIPPED)]
            entries = self.entries.of_parts(parts) if parts else self.entries
            with large_batches(spark):
                rows = [entries.mapped(of_source, fields, columns)] if parts is None or parts else []
                if groups:
                    rows.append(spark.range(0, tasks, 1, tasks).mapInArrow(of_index, columns))
                yield reduce(lambda one, other: one.unionAll(other), rows)


def source_entries(batches: Iterable[pa.RecordBatch], schema: Schema, picked: Picked) -> Iterator[Part]:
    """Yield the picked entries of a source. Raises `InvalidArgument`."""
    for whole in batches:
        batch = whole.filter(pc.is_valid(whole.column("key"))) if whole.column("key").null_count else whole
        columns, _ = batch_columns(batch, schema, TopicTable(), picked.rule) if len(batch) else ({}, [])
        if not columns:
            continue
        hashed = columns
        origin = int((whole.schema.metadata or {}).get(PART, UNKNOWN))
        columns = columns | {"key_hash": picked.as_compared(columns["key_hash"])}
        topics, keys = batch.column("topic").dictionary_encode(), batch.column("key")
        kept = picked.rows(columns, schema)
        if picked.expired:
            names, ids = dict(enumerate(topics.dictionary.to_pylist())), topics.indices.to_numpy()
            judged = {name: values[kept] for name, values in hashed.items()} | {"topic_id": ids[kept]}
            kept = kept[picked.expired.keeps(judged, columns["second"][kept], names)]
        if len(kept) == len(batch):
            yield Part(SOURCE, columns, topics, keys, origin=origin)
        elif len(kept):
            taken = {name: values[kept] for name, values in columns.items()}
            yield Part(SOURCE, taken, topics.take(pa.array(kept)), keys.take(pa.array(kept)), origin=origin)


def stored_entries(
    stored: StoredObject, storage: Storage, schema: Schema, picked: Picked, origin: int = UNKNOWN
) -> Iterator[Part | Unread]:
    """Yield an object's picked entries, and `Unread` if it is damaged or missing. Raises `SchemaMismatch`."""
    settings = ColdSettings(query_threads=4, block_cache_bytes=0, coalesce_gap_bytes=0)
    with closing(ColdPath(storage, keyed=schema.keyed, settings=settings)) as cold:
        source, unread = StorageBytes(cold, stored), False
        try:
            trailer = source.trailer_of(schema)
        except (CorruptFile, ObjectNotFound):
            yield Unread(stored.name)
            return

        def readable(_: FileBytes, runs: Sequence[Run]) -> npt.NDArray[Any]:
            """Return the items of the undamaged runs."""
            nonlocal unread
            try:
                return read_items(source, runs)
            except CorruptFile:
                if len(runs) > 1:
                    return np.concatenate([readable(source, [run]) for run in runs])
            except ObjectNotFound:
                pass
            unread = True
            return np.empty(0, schema.item)

        begin_s = trailer.metadata.begin_ms // 1000
        for _, items in scan_runs(source, trailer.directory.all_runs(), _WINDOW_BYTES, read=readable):
            whole: dict[str, Any] = {name: items[name] for name in items.dtype.names or ()}
            whole["second"] = items["time_diff_s"].astype(np.int64) + begin_s
            whole["key_hash"] = picked.as_compared(items["key_hash"])
            kept = picked.rows(whole, schema)
            if picked.expired:
                names = dict(trailer.metadata.topics)
                kept = kept[picked.expired.keeps(items[kept], whole["second"][kept], names)]
            for start in range(0, len(kept), _BATCH_ROWS):
                some: Any = kept[start : start + _BATCH_ROWS]
                if len(kept) == len(items):
                    # views, not copies
                    some = slice(start, start + len(some))
                columns = {name: values[some] for name, values in whole.items()}
                topics = _topic_names(columns["topic_id"], trailer.metadata.topics)
                yield Part(INDEX, columns, topics, None, stored.name, origin)
        if unread:
            yield Unread(stored.name)


def _topic_names(ids: npt.NDArray[Any], table: Sequence[tuple[int, str]]) -> pa.DictionaryArray | None:
    """Return each item's topic by the file's table, None without a table; unknown ids get a name no topic has."""
    if not table:
        return None
    names = {topic_id: name.encode(errors="surrogatepass").decode(errors="replace") for topic_id, name in table}
    encoded = pa.array(np.ascontiguousarray(ids, ids.dtype.newbyteorder("="))).dictionary_encode()
    found = encoded.dictionary.to_pylist()
    texts = pa.array([names.get(topic_id, f"(topic id {topic_id})") for topic_id in found], pa.string())
    return pa.DictionaryArray.from_arrays(encoded.indices, texts)


def packed(columns: Mapping[str, Any], dtype: np.dtype[Any]) -> npt.NDArray[np.void]:
    """Return columns (n each) as records (n) of their fields."""
    made: npt.NDArray[np.void] = np.empty(len(next(iter(columns.values()))), dtype)
    for name in dtype.names or ():
        made[name] = columns[name]
    return made
