"""Calls of the codecs for tests: rows to table and entries, compaction to bytes."""

from typing import Any

import numpy as np

from tests.golden.naive import Case, Row
from tiered_index.format.compacted import Compaction
from tiered_index.format.keys.hashing import code_units, hash_batch
from tiered_index.format.layout import ROCKETMQ, Layout, Preset
from tiered_index.format.unsealed import UnsealedTable

ABOUT = {"source_positions": {}, "lane": "main", "offset_space": "custom", "writer": "test"}


def layout_of(case: Case) -> Layout:
    return Layout(ROCKETMQ, ROCKETMQ.schema, case.meta["slots"], case.meta["items"])


def columns_of(rows: list[Row], layout: Layout) -> tuple[Any, Any, dict[str, Any]]:
    topics = sorted({row.topic for row in rows})
    index = np.array([topics.index(row.topic) for row in rows], np.int64)
    hashes, fingerprints = hash_batch(topics, index, code_units([row.key for row in rows]))
    names = ("topic_id", "queue_id", "offset", "size")
    columns = {name: np.array([getattr(row, name) for row in rows], np.int64) for name in names}
    if layout.schema.keyed:
        columns["fingerprint"] = fingerprints
    return hashes, np.array([row.timestamp_ms for row in rows], np.int64), columns


def write(rows: list[Row], layout: Layout, begin_ms: int, batch: int) -> tuple[UnsealedTable, Any]:
    """Put rows in batches; return the table and its entries."""
    table = UnsealedTable(layout, begin_ms)
    hashes, times, columns = columns_of(rows, layout)
    parts = []
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        chosen = {name: column[part] for name, column in columns.items()}
        prepared = table.prepare(hashes[part], times[part], chosen)
        table.commit(prepared)
        parts.append(prepared.entries.tobytes())
    return table, np.frombuffer(b"".join(parts), layout.schema.entry)


def compacted(rows: list[Row], preset: Preset, slots: int, begin_ms: int) -> bytes:
    layout = Layout(preset, preset.schema, slots, len(rows) + 1)
    table, entries = write(rows, layout, begin_ms, len(rows))
    compaction = Compaction(entries, layout, begin_ms, table.end_ms)
    topics = tuple(sorted({(row.topic_id, row.topic) for row in rows}))
    return b"".join(map(bytes, compaction.pieces(file_id="golden", topics=topics, **ABOUT)))
