"""A workload with its right answers, for tests of whole indexes on a real server."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tests.demo.workload import BEGIN_MS, TOPICS, ReferenceAnswers, Workload, entry_batch, message_table
from tiered_index import IndexService, QueryResult
from tiered_index.service.read.lookups import Lookups

MESSAGES, _PUT_AT_ONCE = 400_000, 5_000


@dataclass(frozen=True)
class Sample:
    workload: Workload
    answers: ReferenceAnswers

    @classmethod
    def generate(cls, seed: int = 1) -> "Sample":
        workload = Workload.generate(MESSAGES, seed=seed)
        return cls(workload, ReferenceAnswers(workload))

    def write_parquet(self, path: Path, start: int, stop: int, *, group_rows: int) -> None:
        """Write messages [start, stop) in the columns of `tiered-index ingest`, with lists of keys."""
        pq.write_table(message_table(self.workload, start, stop), path, row_group_size=group_rows)

    def questions(self, count: int, seed: int = 1) -> list[tuple[str, str]]:
        """Return topics and keys, from the most frequent key to some that occur once or never."""
        rng = random.Random(seed)
        keys = [self.workload.keys[int(len(self.workload.keys) * rng.random() ** 3)] for _ in range(count - 2)]
        return [(rng.choice(TOPICS), key) for key in (self.workload.keys[0], self.workload.keys[-1], *keys)]

    def hour(self) -> tuple[int, int]:
        """Return an hour in the middle."""
        begin_ms = BEGIN_MS + 36 * 3_600_000
        return begin_ms, begin_ms + 3_600_000

    def put_into(self, index: IndexService, *, source: str | None = None) -> None:
        """Put all messages; the number of a message is its position in a source."""
        for start in range(0, MESSAGES, _PUT_AT_ONCE):
            stop = start + _PUT_AT_ONCE
            position = None if source is None else stop
            index.put_batch(entry_batch(self.workload, start, stop), source=source, source_position=position)

    def check(self, index: Lookups, questions: Iterable[tuple[str, str]]) -> None:
        """Look up all keys. Each answer must be complete and right, so each entry is found exactly once."""
        for topic, key in questions:
            self.check_one(index.query(topic, key, max_count=1_000_000), topic, key)

    def check_one(
        self, result: QueryResult, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None
    ) -> None:
        assert result.status == "complete"
        entries = [(item.timestamp_ms, item.queue_id, item.offset, item.size) for item in result.items]
        assert entries == self.answers.answer(topic, key, begin_ms, end_ms)
