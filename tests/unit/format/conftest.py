"""Functions that make entries and files for the format's tests."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.compacted_files import SMALL
from tests.support.core import compiled_core, using
from tiered_index.format.compacted import Compaction
from tiered_index.format.unsealed import UnsealedTable

BEGIN_MS = 1_700_000_000_000
ABOUT = {
    "file_id": "001700000000000-0123456789ab",
    "topics": ((1, "orders"), (2, "payments")),
    "source_positions": {"store-a": 42},
    "lane": "main",
    "offset_space": "custom",
    "writer": "test",
}


def columns_of(rng, schema, count, *, topics=2):
    """Return random columns with many ties in queue and offset. Each further column of the schema has small values."""
    columns = {
        "topic_id": rng.integers(1, topics + 1, count),
        "queue_id": rng.integers(0, 3, count),
        "offset": rng.integers(0, 4, count),
        "size": rng.integers(1, 1000, count),
    }
    for column in schema.extra:
        values = rng.integers(0, 3, count)
        columns[column.name] = values.astype(str).astype("S") if np.dtype(column.dtype).kind == "S" else values
    return columns


def entries_of(layout, hashes, times, columns, begin_ms=BEGIN_MS, batches=1):
    """Write rows through a table. Return the table and its entries."""
    table = UnsealedTable(layout, begin_ms)
    parts = []
    for rows in np.array_split(np.arange(len(hashes)), batches):
        prepared = table.prepare(hashes[rows], times[rows], {name: column[rows] for name, column in columns.items()})
        table.commit(prepared)
        parts.append(prepared.entries.tobytes())
    return table, np.frombuffer(b"".join(parts), layout.schema.entry)


def random_file(layout, count, *, seed=0, distinct_hashes=None, spread_s=4, topics=2, about=None):
    """Return the bytes of a compacted file of random entries, and the entries."""
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, 2**31, distinct_hashes or count).astype(np.int32)[
        rng.integers(0, distinct_hashes or count, count)
    ]
    times = BEGIN_MS + 1000 * rng.integers(-spread_s, spread_s + 1, count)
    table, entries = entries_of(layout, hashes, times, columns_of(rng, layout.schema, count, topics=topics))
    return compacted(table, entries, **(about or {})), entries


def compacted(table, entries, **about):
    """Return the bytes of the compacted file of a table's entries."""
    compaction = Compaction(entries, table.layout, table.begin_ms, table.end_ms)
    return b"".join(bytes(piece) for piece in compaction.pieces(**(ABOUT | about)))


@pytest.fixture(scope="session")
def make():
    return SimpleNamespace(
        begin_ms=BEGIN_MS, columns=columns_of, entries=entries_of, file=random_file, compacted=compacted
    )


@pytest.fixture(params=["NumPy", "loops"])
def way(request):
    """Run the test with NumPy, then with the compiled core."""
    with using(None if request.param == "NumPy" else compiled_core()):
        yield


@pytest.fixture(scope="module")
def small(make):
    """A file of the layout `SMALL` with twelve entries of four hashes."""
    data, _ = make.file(SMALL, 12, distinct_hashes=4)
    return data
