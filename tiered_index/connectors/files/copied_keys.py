"""Adds keys to the archived copies of rows, and finds keys in the copies of rows whose files are gone.

A copy has all keys of its row, so that lookups and erasures need nothing else, and a segment has all rows with a key.
So a pass for added keys writes the segment again before it puts the entries of its rows. One thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tiered_index.connectors.archive.columns import times_in
from tiered_index.connectors.files.row_archive import FORMAT, copies_of, decoded_rows
from tiered_index.connectors.files.rows.batch import RowBatch, partition_of
from tiered_index.connectors.files.rows.fields import json_object
from tiered_index.connectors.files.rows.mapping import KEY_TYPE, RowMapping
from tiered_index.connectors.json_paths import searched
from tiered_index.errors import InvalidArgument
from tiered_index.format.names import rows_store
from tiered_index.format.segments.columnar import NUMBER
from tiered_index.service.index import IndexService
from tiered_index.service.log.records import ArchivedSegment


class CopiedRows:
    """The copied rows of one archived segment, to which keys are added by the paths of a mapping from `first` on."""

    def __init__(self, index: IndexService, segment: ArchivedSegment, first: int, end: int) -> None:
        self.segment = segment
        self._index, self._paths = index, (first, end)
        self._rows = decoded_rows(index.segment_archive, segment)
        self._offsets: npt.NDArray[np.int64] = self._rows[NUMBER].to_numpy()
        # by the number of the row
        self._more: dict[int, list[str]] = {}
        self._new = list[pa.Table]()

    def add(self, batch: RowBatch, topics_of: Callable[[RowBatch], pa.Array], uri: str, shift: int) -> None:
        """Add the keys of rows of the file at `uri`. Rows that had no key before are copied, too.

        `topics_of` returns the topic of each row. The batch has whole rows; `shift` is added to positions as offsets.
        """
        first, end = self._paths
        with_keys = batch.of_paths(first, end)
        of_keys, keys = with_keys.by_entry()
        at, is_copied = self._at(with_keys.positions + shift)
        for row, key in zip(of_keys.tolist(), keys.to_pylist(), strict=True):
            if is_copied[row]:
                self._more.setdefault(int(at[row]), []).append(key)
        # a row that had a key, and has no copy, was erased
        had_key = np.isin(with_keys.positions, batch.of_paths(0, first).positions)
        if not (had_key | is_copied).all():
            rows = with_keys.only(~(had_key | is_copied))
            self._new.append(copies_of(rows, topics_of(rows), uri, shift))

    def _at(self, offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the number of each row by its offset, and whether it has a copy."""
        at = np.searchsorted(self._offsets, offsets)
        known = np.append(self._offsets, -1)[np.minimum(at, len(self._offsets))]
        return at, known == offsets

    def has(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which rows have a copy, by their offsets."""
        return self._at(offsets)[1]

    def batch(self, begin: int, end: int, mapping: RowMapping, *, is_ndjson: bool) -> RowBatch:
        """Return the copied rows with offsets [`begin`, `end`) that have keys. Their offsets are their positions."""
        first, last = np.searchsorted(self._offsets, [begin, end]).tolist()
        rows, keys, paths, of_keys = self._rows.slice(first, last - first), list[str](), list[int](), list[int]()
        for number, (file, text) in enumerate(zip(rows["file"].to_pylist(), rows["text"].to_pylist(), strict=True)):
            members = _members_of(text, file, mapping, is_ndjson=is_ndjson)
            with contextlib.suppress(ValueError):
                of_row = mapping.paths_of_keys(members[: len(mapping.keys)])
                keys += of_row
                paths += of_row.values()
                of_keys += [number] * len(of_row)
        chosen = rows.take(pa.array(of_keys, pa.int64()))
        positions, sizes, times_ms = (
            chosen[name].cast(pa.int64()).to_numpy() for name in (NUMBER, "size", "timestamp")
        )
        topics = None if mapping.topic is None else chosen["topic"].combine_chunks().dictionary_encode()
        batch = RowBatch(end, len(rows), (pa.array(keys, KEY_TYPE),), positions, sizes, times_ms)
        return replace(batch, topics=topics, paths=np.array(paths, np.int64))

    def take(self, batch: RowBatch) -> None:
        """Add the keys of copied rows, which `batch` returned."""
        first, end = self._paths
        with_keys = batch.of_paths(first, end)
        at, _ = self._at(with_keys.positions)
        for number, key in zip(at.tolist(), with_keys.keys[0].to_pylist(), strict=True):
            self._more.setdefault(number, []).append(key)

    def send(self) -> bool:
        """Archive the segment anew, if its rows have more keys. Return false if another record was first."""
        if not self._more and not self._new:
            return True
        lists = self._rows["keys"].to_pylist()
        for at, keys in self._more.items():
            lists[at] = [*dict.fromkeys([*lists[at], *keys])]
        column = self._rows.schema.get_field_index("keys")
        rows = self._rows.set_column(column, "keys", pa.array(lists, self._rows.schema.field("keys").type))
        table = pa.concat_tables([rows, *self._new])
        table = table.take(pc.sort_indices(table, [(NUMBER, "ascending")])).combine_chunks()
        if table.equals(self._rows):
            return True
        return self._index.replace_columns(self.segment, FORMAT.encode(table), len(table), times_in(table))


def copied_rows(index: IndexService, log: str, begin: int, end: int) -> int:
    """Return how many rows with offsets [`begin`, `end`) of a log of files have copies. Raises as `decoded_rows`."""
    archive, count = index.segment_archive, 0
    for segment in archive.segments().of(rows_store(log), begin):
        if segment.start >= end:
            break
        if segment.rows is not None and begin <= segment.start and segment.end <= end:
            count += segment.rows
        else:
            offsets = decoded_rows(archive, segment)[NUMBER].to_numpy()
            count += int(np.count_nonzero((offsets >= begin) & (offsets < end)))
    return count


def _members_of(text: bytes, uri: str, mapping: RowMapping, *, is_ndjson: bool) -> Sequence[Any]:
    """Return the members of a copied row, as `RowMapping.names`."""
    try:
        row = json_object(text)
    except InvalidArgument:
        return [None] * len(mapping.paths)
    for name, value in partition_of(uri).items():
        if row.get(name) is None:
            row[name] = value
    return [
        # a column may have any name
        row[path] if not is_ndjson and path in row else searched(compiled, row)
        for (_, path), compiled in zip(mapping.names, mapping.paths, strict=True)
    ]
