"""Files of several indexes in one answer: each row says of which index it is.

The engine sees one schema, that of the indexes with a further identity column, the last: equal positions in the logs of two brokers
are two messages. A source's number is a digest of its index's id, so order and cursors don't depend on which others are read with it.
Pure but for the files that are searched. Threads: as the files'.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from tiered_index.format.schema import Column, Schema
from tiered_index.service.batch_query import Found, QuestionBatch
from tiered_index.service.catalog import Handle
from tiered_index.service.rows import Array, Question, check_schema, row_dtype

__all__ = ["SourcedFile", "source_number", "sourced_schema"]


def source_number(index_id: str) -> int:
    """Return the number (63 bits) that stands for an index in rows and cursors."""
    return int.from_bytes(hashlib.blake2b(index_id.encode(), digest_size=8).digest(), "big") >> 1


def sourced_schema(schema: Schema) -> Schema:
    """Return the schema of rows that say which index they are of, in their last column."""
    name = "source_id"
    while any(column.name == name for column in schema.extra):
        name += "_"
    return Schema(schema.name, (*schema.extra, Column(name, ">i8", identity=True)))


class SourcedFile:
    """A file of one of several indexes: `schema` is the index's, `sourced` the one of the rows that are returned."""

    def __init__(self, handle: Handle, source: str, number: int, schema: Schema, sourced: Schema) -> None:
        self._handle = handle
        self._number = number
        self._schema = schema
        self._row = row_dtype(sourced)
        self.source: str | None = source
        self.file_id = handle.file_id
        self.place = handle.place
        self.second_min = handle.second_min
        self.second_max = handle.second_max
        self.sequence = handle.sequence
        self.is_local = handle.is_local
        self.asks_storage = handle.asks_storage
        self.lane = handle.lane

    @property
    def search_bytes(self) -> int:
        """As the file's."""
        return self._handle.search_bytes

    def excludes(self, question: Question) -> str | None:
        """As the file's."""
        return self._handle.excludes(question)

    def excludes_all(self, batch: QuestionBatch) -> str | None:
        """As the file's."""
        return self._handle.excludes_all(batch)

    def search(self, question: Question) -> Array:
        """Return the rows that answer `question`, in no order."""
        after = question.after
        if after is not None:
            *place, last = after
            if self._number > last:
                # what stands at the very place, being of a later source, comes after: begin one step before it
                place[-1] -= 1
            after = tuple(place)
        return self._sourced(self._handle.search(replace(question, after=after)))

    def search_many(self, batch: QuestionBatch) -> Found:
        """Return the rows that answer each question, in no order."""
        found = self._handle.search_many(batch)
        return Found(found.questions, self._sourced(found.rows)) if len(found.rows) else found

    def let_go(self) -> None:
        """As the file's."""
        self._handle.let_go()

    def _sourced(self, rows: Array) -> Array:
        if not len(rows):
            return np.empty(0, self._row)
        check_schema(rows, self._schema, self.file_id)
        sourced = np.empty(len(rows), self._row)
        for name in rows.dtype.names or ():
            sourced[name] = rows[name]
        sourced[self._row.names[-1]] = self._number  # type: ignore[index]
        return sourced
