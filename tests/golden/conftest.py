"""The golden data as the tests see it, and a naive reading of it that shares no code with the package.

`rows` are entries in order of insertion. A truth is computed from rows alone: Java's hash unit by unit, Java's
truncation, Java's wrap.
"""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DATA = Path(__file__).parent / "data"


class Row(NamedTuple):
    topic: str
    key: str
    topic_id: int
    queue_id: int
    offset: int
    size: int
    timestamp_ms: int


class Found(NamedTuple):
    """One item of an answer, as Java's columns without `previous`."""

    key_hash: int
    topic_id: int
    queue_id: int
    offset: int
    size: int
    time_diff_s: int


def raw(path: str) -> bytes:
    """Return a golden file's raw bytes."""
    plain = DATA / path
    return plain.read_bytes() if plain.exists() else gzip.decompress((DATA / f"{path}.gz").read_bytes())


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw(path).decode().splitlines()]


@cache
def naive_hash(topic: str, key: str) -> int:
    """`String.hashCode`, unit by unit, then abs; `Integer.MIN_VALUE` becomes 0, as our format has it."""
    value = 0
    encoded = f"{topic}#{key}".encode("utf-16-be", "surrogatepass")
    for (unit,) in struct.iter_unpack(">H", encoded):
        value = (31 * value + unit) % 2**32
    signed = value - 2**32 if value >= 2**31 else value
    return 0 if signed == -(2**31) else abs(signed)


def naive_difference(timestamp_ms: int, begin_ms: int) -> int:
    seconds = abs(timestamp_ms - begin_ms) // 1000 * (1 if timestamp_ms >= begin_ms else -1)
    return (seconds + 2**31) % 2**32 - 2**31


def found(row: Row, begin_ms: int) -> Found:
    return Found(naive_hash(row.topic, row.key), *row[2:6], naive_difference(row.timestamp_ms, begin_ms))


class Rows:
    """Rows that are the same where they are one list, which is kept."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and other.rows is self.rows


@lru_cache(maxsize=4)
def rows_by_hash(rows: Rows) -> dict[int, list[Row]]:
    """The rows of each hash, in order of insertion."""
    made: dict[int, list[Row]] = {}
    for row in rows.rows:
        made.setdefault(naive_hash(row.topic, row.key), []).append(row)
    return made


def truth(rows: list[Row], file_begin_ms: int, query: dict[str, Any]) -> list[Found]:
    """The whole answer to a query, newest insertion first."""
    of_hash = rows_by_hash(Rows(rows)).get(naive_hash(query["topic"], query["key"]), [])
    answer = [found(row, file_begin_ms) for row in of_hash]
    return [f for f in reversed(answer) if query["begin"] <= file_begin_ms + 1000 * f.time_diff_s <= query["end"]]


@dataclass(frozen=True)
class Case:
    name: str

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads(raw(f"tiered/{self.name}/meta.json"))

    @property
    def begin_ms(self) -> int:
        return self.meta["beginTimestamp"]

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        return lines(f"tiered/{self.name}/input.jsonl")

    @cached_property
    def queries(self) -> list[dict[str, Any]]:
        return lines(f"tiered/{self.name}/queries.jsonl")

    @cached_property
    def unsealed(self) -> bytes:
        return raw(f"tiered/{self.name}/unsealed.bin")

    @cached_property
    def compacted(self) -> bytes:
        return raw(f"tiered/{self.name}/compacted.bin")

    def rows_of(self, call: dict[str, Any]) -> list[Row]:
        about = (call["topicId"], call["queueId"], call["offset"], call["size"], call["timestamp"])
        return [Row(call["topic"], key, *about) for key in call["keys"] or ()]

    @cached_property
    def rows(self) -> list[Row]:
        """What Java accepted."""
        return [row for call in self.calls if call["result"] == "SUCCESS" for row in self.rows_of(call)]

    @cached_property
    def wanted_rows(self) -> list[Row]:
        """What was put and fits: Java's refusals by error, which a hash of MIN_VALUE caused, count as puts."""
        return [
            row
            for call in self.calls
            if call["result"] != "FILE_FULL" and (call["topic"] or "").strip()
            for row in self.rows_of(call)
        ]

    @cached_property
    def written_rows(self) -> list[Row]:
        """What Java wrote, by its item counter: a put that failed half-way left its first keys behind."""
        rows: list[Row] = []
        for call in self.calls:
            rows += self.rows_of(call)[: call["itemCount"] - len(rows)]
        return rows


CASES = sorted(path.name for path in (DATA / "tiered").iterdir())
MIN_VALUE_CASES = [name for name in CASES if name.startswith("minvalue_")]
_load = cache(Case)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, names in (
        ("case", CASES),
        ("min_value_case", MIN_VALUE_CASES),
        ("normal_case", [name for name in CASES if name not in MIN_VALUE_CASES]),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [_load(name) for name in names], ids=names)


@pytest.fixture(scope="session")
def load_case() -> Any:
    return _load


@pytest.fixture(scope="session")
def naive() -> Any:
    """The naive functions of this module by name."""

    class Naive:
        hash = staticmethod(naive_hash)
        difference = staticmethod(naive_difference)
        found = staticmethod(found)
        truth = staticmethod(truth)
        raw = staticmethod(raw)
        lines = staticmethod(lines)
        Found = Found
        Row = Row
        DATA = DATA

    return Naive


@pytest.fixture(scope="session")
def codec() -> Any:
    """How the tests drive the codecs: rows to table and entries, compaction to bytes."""
    import numpy as np

    from tiered_index.format.compacted import Compaction
    from tiered_index.format.hashing import code_units, hash_batch
    from tiered_index.format.layout import Layout, Preset
    from tiered_index.format.unsealed import UnsealedTable

    class Codec:
        @staticmethod
        def columns(rows: list[Row], layout: Layout) -> tuple[Any, Any, dict[str, Any]]:
            topics = sorted({row.topic for row in rows})
            index = np.array([topics.index(row.topic) for row in rows], np.int64)
            hashes, fingerprints = hash_batch(topics, index, code_units([row.key for row in rows]))
            columns: dict[str, Any] = {
                name: np.array([getattr(row, name) for row in rows], np.int64)
                for name in ("topic_id", "queue_id", "offset", "size")
            }
            if layout.schema.keyed:
                columns["fingerprint"] = fingerprints
            return hashes, np.array([row.timestamp_ms for row in rows], np.int64), columns

        @classmethod
        def write(cls, rows: list[Row], layout: Layout, begin_ms: int, batch: int) -> tuple[UnsealedTable, Any]:
            """Put rows in batches; returns the table and its entries."""
            table = UnsealedTable(layout, begin_ms)
            hashes, times, columns = cls.columns(rows, layout)
            parts = []
            for start in range(0, len(rows), batch):
                part = slice(start, start + batch)
                prepared = table.prepare(
                    hashes[part], times[part], {name: column[part] for name, column in columns.items()}
                )
                table.commit(prepared)
                parts.append(prepared.entries.tobytes())
            return table, np.frombuffer(b"".join(parts), layout.schema.entry)

        @classmethod
        def compacted(cls, rows: list[Row], preset: Preset, slots: int, begin_ms: int) -> bytes:
            layout = Layout(preset, preset.schema, slots, len(rows) + 1)
            table, entries = cls.write(rows, layout, begin_ms, len(rows))
            compaction = Compaction(entries, layout, begin_ms, table.end_ms)
            topics = tuple(sorted({(row.topic_id, row.topic) for row in rows}))
            return b"".join(
                bytes(piece)
                for piece in compaction.pieces(
                    file_id="golden",
                    topics=topics,
                    source_positions={},
                    lane="main",
                    offset_space="custom",
                    writer="test",
                )
            )

    return Codec
