"""Differences that are all of one side, as a day that a build left out: told by the tasks that read that side, with no
shuffle.

An entry that the other side has otherwise would differ there, too. So where one side has all digests that differ, each
of them is a missing entry, or an extra one, and only the first ones by name have to be looked for. Memory of a task:
`HELD` entries, and the digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tiered_index.format.schema import Schema
from tiered_index.service.log.records import StoredObject
from tiered_index.spark.audit.entries import INDEX, SOURCE, Part, Picked, Unread
from tiered_index.spark.audit.matching import Matched
from tiered_index.spark.audit.pairing import Hidden, Told, pack, pair
from tiered_index.spark.audit.ranges import HELD, Blocks, Sides
from tiered_index.spark.executors import gathered


def told_alone(
    sides: Sides,
    stored: Sequence[StoredObject],
    picked: Picked,
    matched: Matched,
    marks: npt.NDArray[np.uint8],
    most: int,
) -> Told | None:
    """Return the differences (the first `most` of them) where all are of one side; None where they are not, or where an
    object can't be read any more. Driver. Raises as `Sides.alone`.
    """
    if (side := matched.side) is None:
        return None
    told = Told(most, 0)
    if most:
        chosen = replace(picked, marks=marks, digests=matched.digests())
        told = sides.alone(stored, chosen, side, _Teller(sides.schema, side, most), Told.joined)
    if told.unread - {frozenset()}:
        return None
    told.counts[0 if side == SOURCE else 1] = matched.differing
    return told


@dataclass(frozen=True, slots=True)
class _Teller:
    schema: Schema
    side: int
    most: int

    def __call__(self, parts: Iterable[Part | Unread]) -> Told:
        """Return the first entries of the parts of a side that a task has read; counts are left to the caller."""
        unread: set[frozenset[str]] = set()
        hidden = Hidden({}, frozenset(), 1, "abs")
        whole = Told(self.most, 0)
        for block in self._blocks(parts, unread):
            told = pair(iter([block]), frozenset(), hidden, self.schema, self.most, 0)
            for kind, table in enumerate(told.listed):
                # other blocks and tasks may have entries of the same identity
                none = pa.array(np.zeros(len(table), np.int64))
                told.listed[kind] = table.set_column(1, "place", none).set_column(2, "rank", none)
            whole.add(told)
        whole.unread |= unread
        whole.counts = [0] * 4
        return whole

    def _blocks(self, parts: Iterable[Part | Unread], unread: set[frozenset[str]]) -> Iterator[Blocks]:
        def there() -> Iterator[pa.RecordBatch]:
            for part in parts:
                if isinstance(part, Unread):
                    unread.add(frozenset([part.name]))
                else:
                    yield pack(part, self.schema)

        for held in gathered(there(), len, HELD):
            sink = pa.BufferOutputStream()
            table = pa.Table.from_batches(held).unify_dictionaries()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            cells = [sink.getvalue().to_pybytes()]
            yield Blocks(0, ([], cells) if self.side == INDEX else (cells, []))
