"""Bulk lookups in an index of very many messages, on executors with little memory: bytes read, and peaks of memory.

The messages are those of `messages`, in tables of a day. Keys are taken evenly from all messages, without a time range,
or from the newest day, with that day as their range. One key in twenty has no message. Each answer is compared with the
message that its number defines. The answers of a sample are also compared with those of `IndexReader.query`. This
module runs on the driver, in one thread.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.benchmarks.machine.setting import require
from tests.benchmarks.memory import ProcessWatch
from tests.benchmarks.messages import (
    ABSENT,
    BEGIN_S,
    DAY_S,
    TOPIC,
    key_in_one,
    message_columns,
    message_frame,
    shared_step,
)
from tiered_index.config import IndexConfig
from tiered_index.service.reader import IndexReader
from tiered_index.spark import build, look_up
from tiered_index.spark.lookup.keys import write_answers
from tiered_index.storage.s3.options import S3Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPREAD, NEWEST = "of all days", "of the newest day"
_ABSENT_ONE_IN = 20
_SAMPLE = 2_000
_MAX_COUNT = 64
_ENTRY = ("topic_id", "queue_id", "offset", "size", "timestamp_ms", "key_hash")


@dataclass(frozen=True)
class KeyBatch:
    """`count` keys, by the numbers of their messages, among `entries` messages of `days` days. `kind` is `SPREAD` or
    `NEWEST`.
    """

    kind: str
    count: int
    entries: int
    days: int

    @property
    def range_ms(self) -> tuple[int, int] | None:
        """The time range of the lookups (inclusive), or None for no bound."""
        begin_ms = (BEGIN_S + (self.days - 1) * DAY_S) * 1000
        return (begin_ms, begin_ms + DAY_S * 1000 - 1) if self.kind == NEWEST else None

    @property
    def evenly(self) -> tuple[int, int]:
        """The number of the first key's message, and the step between two numbers."""
        first, span = (
            (self.entries - self.entries // self.days, self.entries // self.days)
            if self.kind == NEWEST
            else (0, self.entries)
        )
        return first + 1, span // self.count

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The numbers (i64, `count`). A number of `ABSENT` or more has no message."""
        first, step = self.evenly
        places = np.arange(self.count, dtype=np.int64)
        return np.where(places % _ABSENT_ONE_IN == 0, ABSENT + places, first + places * step)

    @cached_property
    def held(self) -> npt.NDArray[np.bool_]:
        """Return which keys (bool, `count`) have a message that exists, and are not shared keys."""
        own: npt.NDArray[np.bool_] = self.numbers % shared_step(self.entries, self.days) != 0
        return own & (self.numbers < ABSENT)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows to look up, with their numbers."""
        from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

        first, step = self.evenly
        place: Any = F.col("id")
        number = F.when(place % _ABSENT_ONE_IN == 0, place + ABSENT).otherwise(place * step + first)
        bounds = [
            F.lit(bound).alias(name) for name, bound in zip(("begin_ms", "end_ms"), self.range_ms or (), strict=False)
        ]
        key = F.md5(number.cast("string").cast("binary"))
        return spark.range(0, self.count, 1, 4).select(
            F.lit(TOPIC).alias("topic"), key.alias("key"), number.alias("number"), *bounds
        )


def counts_of(counts: Sequence[int], entries: int, days: int) -> list[tuple[str, int]]:
    """Return the key batches: each number of keys, of either kind, at most half as many as there are messages."""
    most = {SPREAD: max(1, entries // 2), NEWEST: max(1, entries // days // 2)}
    return [(kind, count) for kind in most for count in dict.fromkeys(min(count, most[kind]) for count in counts)]


def look_up_many(
    spark: SparkSession,
    folder: Path,
    entries: int,
    days: int,
    counts: Sequence[int],
    config: IndexConfig,
    watch: ProcessWatch,
    tell: Callable[..., None],
) -> None:
    """Build the index in `folder`, look up each number of keys, and pass the costs to `tell`.

    Raises `RuntimeError` for a wrong answer.
    """
    storage = f"file://{folder}/index"
    source = message_frame(spark, entries, days, max(4, entries // 1_000_000))
    built = build(spark, source, storage=storage, window="1d", config=config)
    require(built.entries, entries, "entries built")
    tell("index", entries=entries, shards=built.shards, bytes=built.written_bytes)
    for kind, count in counts_of(counts, entries, days):
        batch = KeyBatch(kind, count, entries, days)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            keys, answers = f"{place}/keys", f"{place}/answers"
            batch.frame(spark).write.parquet(keys)
            watch.restart()
            begun = time.perf_counter()
            result = look_up(spark, spark.read.parquet(keys), storage=storage, max_count=_MAX_COUNT, config=config)
            assert result.frame is not None
            write_answers(result.frame, answers, S3Options())
            spent = taken(begun, watch)
            result.release()
            checked = check_answers(spark, answers, batch, storage)
            tell(
                "lookup",
                kind=kind,
                keys=count,
                found=int(batch.held.sum()),
                objects=result.objects,
                requests=result.requests,
                read_bytes=result.bytes_read,
                checked=checked,
                **spent,
            )


def taken(begun: float, watch: ProcessWatch) -> dict[str, Any]:
    """Return the seconds since `begun`, and the peaks of memory of Spark's processes since then."""
    elapsed_s, peaks = time.perf_counter() - begun, watch.peaks_mib()
    memory = {"workers_mib": peaks.get("worker", []), "java_mib": peaks.get("java", [])}
    return {"elapsed_s": elapsed_s, **memory, "load_average": os.getloadavg()[0]}


def check_answers(spark: SparkSession, answers: str, batch: KeyBatch, storage: str, sample: int = _SAMPLE) -> int:
    """Compare all written answers with the messages, and a random sample with a reader's.

    Returns the number of answers in the sample. Raises `RuntimeError` if answers differ.
    """
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    rows = spark.read.parquet(answers)
    require(rows.count(), batch.count, "rows of answers")
    require(rows.where("status <> 'complete'").count(), 0, "keys whose answer is not complete")
    found = rows.where("position IS NOT NULL")
    require(found.count(), int(batch.held.sum()), "keys found")
    made = message_columns(batch.entries, batch.days, F.col("number"))
    # the index keeps whole seconds
    alike = F.floor(F.col("timestamp_ms") / 1000) == F.floor(made.pop("timestamp_ms") / 1000)
    for name, column in made.items():
        alike &= F.col(name) == column
    require(found.where(~alike).count(), 0, "answers other than the message")
    numbers = np.random.default_rng(batch.count).choice(batch.numbers, min(sample, batch.count), replace=False)
    table = pq.read_table(answers, columns=["number", "position", *_ENTRY])
    table = table.filter(pc.is_in(table["number"], pa.array(numbers)))
    given: dict[int, list[tuple[int, ...]]] = {int(number): [] for number in numbers}
    for row in table.to_pylist():
        if row["position"] is not None:
            given[row["number"]].append(tuple(row[name] for name in _ENTRY))
    begin_ms, end_ms = batch.range_ms or (None, None)
    with IndexReader.open(storage) as reader:
        for number, entries in given.items():
            answer = reader.query(TOPIC, key_in_one(number), begin_ms, end_ms, max_count=_MAX_COUNT)
            require(
                entries,
                [tuple(getattr(item, name) for name in _ENTRY) for item in answer],
                f"answer to message {number}'s key",
            )
    return len(given)
