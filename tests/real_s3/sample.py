"""A workload and every right answer to it, for the tests of whole indexes on a real server."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq

from tests.demo.workload import BEGIN_MS, TOPICS, ReferenceAnswers, Workload
from tests.support.workload import message_table
from tiered_index import QueryResult

PART_BYTES = 5 << 20
"""The smallest part that S3 allows, so that small files are uploaded in several."""


class Answering(Protocol):
    """An index or a reader."""

    def query(
        self, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None, max_count: int = 64
    ) -> QueryResult: ...


@dataclass(frozen=True)
class Sample:
    workload: Workload
    answers: ReferenceAnswers

    @classmethod
    def generate(cls, messages: int, seed: int = 1) -> Sample:
        workload = Workload.generate(messages, seed=seed)
        return cls(workload, ReferenceAnswers(workload))

    def write_parquet(self, path: Path, start: int, stop: int, *, group_rows: int) -> None:
        """Write messages [start, stop) as `tiered-index ingest` reads them, keys as lists."""
        writer: pq.ParquetWriter | None = None
        try:
            for first in range(start, stop, group_rows):
                table = message_table(self.workload, first, min(first + group_rows, stop))
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()

    def questions(self, count: int, seed: int = 1) -> list[tuple[str, str]]:
        """Return topics and keys, from the most frequent key to some that occur once or never."""
        rng = random.Random(seed)
        keys = [self.workload.keys[int(len(self.workload.keys) * rng.random() ** 3)] for _ in range(count - 2)]
        return [(rng.choice(TOPICS), key) for key in (self.workload.keys[0], self.workload.keys[-1], *keys)]

    def hour(self) -> tuple[int, int]:
        """Return an hour in the middle."""
        begin_ms = BEGIN_MS + 36 * 3_600_000
        return begin_ms, begin_ms + 3_600_000

    def check(self, index: Answering, questions: Iterable[tuple[str, str]]) -> None:
        """Ask everything; each answer must be complete and right, so each entry is found exactly once."""
        for topic, key in questions:
            self.check_one(index.query(topic, key, max_count=1_000_000), topic, key)

    def check_one(
        self, result: QueryResult, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None
    ) -> None:
        assert result.status == "complete"
        found = [(item.timestamp_ms, item.queue_id, item.offset, item.size) for item in result.items]
        assert found == self.answers.answer(topic, key, begin_ms, end_ms)
