"""Reads the entries of a source and of stored objects for an audit, in tasks.

`identity` and `value` are an entry's bytes: the fields that identify it, and its other fields. Memory of a task: a
batch, or 8 MiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import CorruptFile, ObjectNotFound
from tiered_index.format.keys.hashing import HashRule, folded_hashes, normal_hashes
from tiered_index.format.schema import Schema
from tiered_index.format.trailer import Run
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.records import ArchivedSegment, StoredObject
from tiered_index.service.read.files.cold_path import ColdPath, ColdSettings
from tiered_index.service.read.files.compacted import StorageBytes
from tiered_index.service.read.files.file_search import FileBytes, read_items, scan_runs
from tiered_index.service.write.validation import TopicTable, batch_columns
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.audit.ranges import Part, Ranges, Unread
from tiered_index.spark.frames import large_batches, shuffles_deleted
from tiered_index.spark.writing.sources import Entries
from tiered_index.storage.base import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SOURCE, INDEX = range(2)
PartT = TypeVar("PartT", StoredObject, ArchivedSegment, StoredObject | ArchivedSegment)
_WINDOW_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16
# About the bytes of objects that a task reads
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 1 << 28
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


@dataclass(frozen=True, slots=True)
class Picked:
    """A selection of entries: those in an inclusive range of seconds that have not `expired`.

    `rule` is the hash rule of the index's objects; if they have both, `folded_hashes` are compared. `among` selects
    only entries in ranges that differ.
    """

    first: int
    last: int
    rule: HashRule = "abs"
    expired: Expired = NOTHING
    among: Ranges | None = None

    def as_compared(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the hashes in identities for stored hashes (n)."""
        return folded_hashes(normal_hashes(stored)) if self.rule == "both" else normal_hashes(stored)

    def rows(self, columns: Mapping[str, npt.NDArray[Any]], names: Mapping[int, str]) -> npt.NDArray[np.intp]:
        """Return the indices (intp, n) of the picked entries; `names` has the topic of each `topic_id`."""
        inside = (columns["second"] >= self.first) & (columns["second"] <= self.last)
        if self.expired.hidden is not None:
            stored = {**columns, "key_hash": columns["stored_hash"]}
            inside &= self.expired.keeps(stored, columns["second"], names)
        if self.among is not None:
            inside &= self.among.differ(columns)
        return np.flatnonzero(inside)


# Makes Spark's rows from the parts that a task reads
Make = Callable[[Iterator[Part | Unread]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Sides:
    """A source's entries and an index's storage. Expired entries are on neither side."""

    entries: Entries
    address: StorageAddress
    schema: Schema
    expired: Expired = NOTHING

    @property
    def cores(self) -> int:
        """The number of tasks that run at once."""
        return self.entries.frame.sparkSession.sparkContext.defaultParallelism

    @contextmanager
    def rows(self, objects: Sequence[StoredObject], picked: Picked, make: Make, columns: str) -> Iterator[DataFrame]:
        """Yield the rows that tasks `make` from the picked entries of both sides; valid in the block. Driver."""
        spark, schema, address = self.entries.frame.sparkSession, self.schema, self.address

        def of_source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return make(source_entries(batches, schema, picked))

        def of_index(groups: Iterable[Sequence[StoredObject]], _: object) -> Iterator[Part | Unread]:
            with closing(address.open()) as storage:
                for stored in itertools.chain.from_iterable(groups):
                    yield from stored_entries(stored, storage, schema, picked)

        # the hash distinguishes topics, not the number
        fields = [name for name in self.entries.names if name != "topic_id"]
        with large_batches(spark), shuffles_deleted(spark), ExitStack() as stack:
            rows = stack.enter_context(self.entries.mapped(of_source, fields, columns))
            if objects:
                index = Entries.of_parts(spark, groups_of(objects, self.cores), (), of_index)
                rows = rows.unionAll(stack.enter_context(index.mapped(make, (), columns)))
            yield rows


def groups_of(parts: Sequence[PartT], cores: int) -> list[Sequence[PartT]]:
    """Return objects in groups for tasks that read them: four a core, since sizes differ; fewer for little data."""
    largest = sorted(parts, key=lambda part: -part.size_bytes)
    size = sum(part.size_bytes for part in parts)
    count = min(len(parts), max(cores, min(4 * cores, size // _LEAST_BYTES), size // _MOST_BYTES))
    return [largest[number::count] for number in range(count)]


def source_entries(batches: Iterable[pa.RecordBatch], schema: Schema, picked: Picked) -> Iterator[Part]:
    """Yield the picked entries of a source. Raises `InvalidArgument`."""
    for whole in batches:
        batch = whole.filter(pc.is_valid(whole.column("key"))) if whole.column("key").null_count else whole
        columns = batch_columns(batch, schema, TopicTable(), picked.rule).columns if len(batch) else {}
        if not columns:
            continue
        topics, keys = batch.column("topic").dictionary_encode(), batch.column("key")
        columns |= {"stored_hash": columns["key_hash"], "topic_id": topics.indices.to_numpy()}
        columns["key_hash"] = picked.as_compared(columns["key_hash"])
        wanted_rows = picked.rows(columns, dict(enumerate(topics.dictionary.to_pylist())))
        if len(wanted_rows) == len(batch):
            yield Part(SOURCE, columns, topics, keys)
        elif len(wanted_rows):
            taken = {name: values[wanted_rows] for name, values in columns.items()}
            yield Part(SOURCE, taken, topics.take(pa.array(wanted_rows)), keys.take(pa.array(wanted_rows)))


def stored_entries(stored: StoredObject, storage: Storage, schema: Schema, picked: Picked) -> Iterator[Part | Unread]:
    """Yield an object's picked entries, and `Unread` if it is damaged or missing. Raises `SchemaMismatch`."""
    settings = ColdSettings(query_threads=4, cache_slot_groups=False, coalesce_gap_bytes=0)
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
            whole |= {"stored_hash": items["key_hash"], "key_hash": picked.as_compared(items["key_hash"])}
            wanted_rows = picked.rows(whole, dict(trailer.metadata.topics))
            for start in range(0, len(wanted_rows), _BATCH_ROWS):
                some: Any = wanted_rows[start : start + _BATCH_ROWS]
                if len(wanted_rows) == len(items):
                    # views, not copies
                    some = slice(start, start + len(some))
                columns = {name: values[some] for name, values in whole.items()}
                topics = _topic_names(columns["topic_id"], trailer.metadata.topics)
                yield Part(INDEX, columns, topics, None, stored.name)
        if unread:
            yield Unread(stored.name)


def _topic_names(ids: npt.NDArray[Any], table: Sequence[tuple[int, str]]) -> pa.DictionaryArray:
    """Return each item's topic by the file's table; unknown ids get a name that no topic has."""
    names = {topic_id: name.encode(errors="surrogatepass").decode(errors="replace") for topic_id, name in table}
    encoded = pa.array(np.ascontiguousarray(ids, ids.dtype.newbyteorder("="))).dictionary_encode()
    topic_ids = encoded.dictionary.to_pylist()
    texts = pa.array([names.get(topic_id, f"(topic id {topic_id})") for topic_id in topic_ids], pa.string())
    return pa.DictionaryArray.from_arrays(encoded.indices, texts)


def packed(columns: Mapping[str, Any], dtype: np.dtype[Any]) -> npt.NDArray[np.void]:
    """Return columns (n each) as records (n) of their fields."""
    made: npt.NDArray[np.void] = np.empty(len(next(iter(columns.values()))), dtype)
    for name in dtype.names or ():
        made[name] = columns[name]
    return made
