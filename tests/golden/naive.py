"""The golden data for tests, and a simple reading of it that shares no code with the package.

`rows` are entries in order of insertion. The right answers (`truth`) come from rows alone: with Java's hash of each
UTF-16 unit, Java's truncation, Java's overflow.
"""

import gzip
import json
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
    """One item of an answer: Java's columns without `previous`."""

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
def java_hash(topic: str, key: str) -> int:
    """Return Java's `String.hashCode` as an absolute value; `Integer.MIN_VALUE` becomes 0, as in our format."""
    value = 0
    encoded = f"{topic}#{key}".encode("utf-16-be", "surrogatepass")
    for (unit,) in struct.iter_unpack(">H", encoded):
        value = (31 * value + unit) % 2**32
    signed = value - 2**32 if value >= 2**31 else value
    return 0 if signed == -(2**31) else abs(signed)


def difference(timestamp_ms: int, begin_ms: int) -> int:
    seconds = abs(timestamp_ms - begin_ms) // 1000 * (1 if timestamp_ms >= begin_ms else -1)
    return (seconds + 2**31) % 2**32 - 2**31


def item_of(row: Row, begin_ms: int) -> Found:
    return Found(java_hash(row.topic, row.key), *row[2:6], difference(row.timestamp_ms, begin_ms))


def truth(rows: list[Row], file_begin_ms: int, query: dict[str, Any]) -> list[Found]:
    """Return the whole answer to a query, newest insertion first."""
    key_hash = java_hash(query["topic"], query["key"])
    answer = [item_of(row, file_begin_ms) for row in rows if java_hash(row.topic, row.key) == key_hash]
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
        """The rows that Java accepted."""
        return [row for call in self.calls if call["result"] == "SUCCESS" for row in self.rows_of(call)]

    @cached_property
    def wanted_rows(self) -> list[Row]:
        """The rows that were put and fit. Puts that Java refused because of a hash of MIN_VALUE count, too."""
        return [
            row
            for call in self.calls
            if call["result"] != "FILE_FULL" and (call["topic"] or "").strip()
            for row in self.rows_of(call)
        ]

    @cached_property
    def written_rows(self) -> list[Row]:
        """The rows that Java wrote, by its item counter. A put that failed half-way left its first keys."""
        rows: list[Row] = []
        for call in self.calls:
            rows += self.rows_of(call)[: call["itemCount"] - len(rows)]
        return rows


CASES = sorted(path.name for path in (DATA / "tiered").iterdir())
load = cache(Case)
