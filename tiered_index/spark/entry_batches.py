"""From a DataFrame's Arrow batches to the fields of entries, for who has batches only: `columns` does the same with frames.

The columns are checked on the driver by Spark's types, values in the tasks. A row without key makes no entry, a list of keys one for each
different key. Pure; threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import Schema
from tiered_index.spark.columns import FIELDS, check_kind

__all__ = ["EntryColumns"]


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """The fields that a frame has, each by its own name, but `key` that may be called `keys`."""

    names: tuple[str, ...]
    key: str

    @classmethod
    def of(cls, found: Sequence[tuple[str, str]], schema: Schema) -> EntryColumns:
        """Return the fields of a frame of these columns, (name, Spark's type as text). Raises `InvalidArgument` naming the column."""
        kinds = dict(found)
        needed = [*FIELDS, *(column.name for column in schema.caller_columns)]
        key = "keys" if "key" not in kinds and "keys" in kinds else "key"
        given = {name: key if name == "key" else name for name in (*needed, "topic_id")}
        for name in needed:
            if given[name] not in kinds:
                raise InvalidArgument(f"column {name!r} is missing; the DataFrame has {', '.join(kinds) or 'no columns'}")
        if unknown := [name for name in kinds if name not in given.values()]:
            raise InvalidArgument(f"column {unknown[0]!r} is no field of an entry; these are {', '.join(given)}: rename it or leave it out")
        names = tuple(name for name in given if given[name] in kinds)
        for name in names:
            check_kind(name, kinds[given[name]], given[name])
        return cls(names, key)

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the entries of each batch, those without key left out, in the fields' order."""
        for batch in batches:
            columns = [batch.column(self.key if name == "key" else name) for name in self.names]
            entries = pa.RecordBatch.from_arrays(columns, names=list(self.names))
            if pa.types.is_list(entries.column("key").type) or pa.types.is_large_list(entries.column("key").type):
                entries = _a_row_a_key(entries)
            elif entries.column("key").null_count:
                entries = entries.filter(pc.is_valid(entries.column("key")))
            if len(entries):
                yield entries


def _a_row_a_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a row for each different key of each row."""
    at = batch.schema.get_field_index("key")
    lists = batch.column(at)
    pairs = pa.table({"row": pc.list_parent_indices(lists), "key": pc.list_flatten(lists)})
    pairs = pairs.filter(pc.is_valid(pairs["key"])).group_by(["row", "key"]).aggregate([]).combine_chunks()
    rows = pa.array(pairs["row"].to_numpy().astype(np.int64))
    keys = pairs["key"].combine_chunks()
    keys = keys if isinstance(keys, pa.Array) else pa.concat_arrays(keys.chunks) if keys.num_chunks else pa.array([], keys.type)
    return batch.drop_columns(["key"]).take(rows).add_column(at, "key", keys)
