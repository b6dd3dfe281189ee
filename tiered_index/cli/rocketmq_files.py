"""Index files of RocketMQ's tiered store, as its `IndexStoreFile` writes and opens them, out of exported entries.

A file is called by its begin, epoch milliseconds, which no two files share. Within a hash chain the entry written last
comes first. Memory: 8 bytes a slot and one batch. One thread.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.format.hashing import HashRule
from tiered_index.format.layout import HEADER_SIZE, ROCKETMQ, Layout
from tiered_index.format.schema import Schema
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.storage.disk import Disk

_COLUMNS = ("topic_id", "queue_id", "offset", "size")
_SECONDS = 2**31 - 1


def rocketmq_layout(schema: Schema, rule: HashRule, slots: int | None, items: int | None) -> Layout:
    """Return the geometry of files for entries of a schema whose keys are hashed by `rule`. Raises `InvalidArgument`
    naming what RocketMQ's form has no place for.
    """
    if schema.caller_columns:
        raise InvalidArgument(
            f"RocketMQ's entries have no column {schema.caller_columns[0].name!r}, and those of this index have: "
            "export them as parquet, ndjson or arrow"
        )
    if rule == "both":
        raise InvalidArgument(
            "keys are hashed by both rules here, and RocketMQ finds those of one: export a range whose files have one"
        )
    return Layout(ROCKETMQ, ROCKETMQ.schema, slots or ROCKETMQ.slots, items or ROCKETMQ.items, rule)


class RocketmqFiles:
    """Writes files into a folder that is there; they are whole once it is closed. Raises `OSError`."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._disk = Disk()
        self._begins: set[int] = set()
        self._table: UnsealedTable | None = None
        self._descriptor = -1

    def write_table(self, entries: pa.Table) -> None:
        """Add exported entries, by time."""
        times_ms = entries.column("timestamp_ms").to_numpy()
        order = np.argsort(times_ms, kind="stable")
        times_ms = times_ms[order]
        columns = {name: entries.column(name).to_numpy()[order] for name in (*_COLUMNS, "key_hash")}
        done = 0
        while done < len(times_ms):
            table = self._writable(int(times_ms[done]))
            stop = min(done + table.free, len(times_ms))
            stop = min(stop, int(np.searchsorted(times_ms, table.begin_ms + 1000 * _SECONDS, "right")))
            part = {name: values[done:stop] for name, values in columns.items()}
            prepared = table.prepare(part["key_hash"], times_ms[done:stop], part)
            position = self._layout.entry_position(prepared.first)
            self._disk.pwrite(self._descriptor, memoryview(prepared.entries.view(np.uint8)), position)  # type: ignore[arg-type]
            table.commit(prepared)
            done = stop

    def _writable(self, time_ms: int) -> UnsealedTable:
        table = self._table
        if table is not None and table.free and abs(time_ms - table.begin_ms) <= 1000 * _SECONDS:
            return table
        self.close()
        while time_ms in self._begins:
            time_ms += 1000
        self._begins.add(time_ms)
        self._descriptor = self._disk.create(self._folder / f"{time_ms}")
        self._table = table = UnsealedTable(self._layout, time_ms)
        return table

    def close(self) -> None:
        """Write header and slot table of the last file."""
        if self._table is None:
            return
        table, self._table = self._table, None
        with contextlib.ExitStack() as last:
            last.callback(self._disk.close, self._descriptor)
            self._disk.truncate(self._descriptor, self._layout.unsealed_size)
            self._disk.pwrite(self._descriptor, table.header().pack(), 0)
            self._disk.pwrite(self._descriptor, table.slot_table(), HEADER_SIZE)
            self._disk.sync(self._descriptor)
