"""`replace` removes entries of builds, and none that live writers put, whatever merges ran in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.entries import BEGIN_MS, DAY_MS, check, check_stored, joined, messages
from tests.spark.in_process import planned, shards_of, written
from tests.support.changes import replace
from tests.support.log_records import open_log
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.service.jobs.erase import EraseRequest, erase
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.spark import build
from tiered_index.spark.writing.build import entries_by_topic, publish_tables
from tiered_index.storage.opening import open_storage

NIGHTS = 30


class Pipeline:
    """A live writer, builds and merges of one index."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"memory://{folder.name}"
        self.clock = ManualClock(BEGIN_MS + 40 * DAY_MS)
        self.storage = open_storage(self.uri)
        settings = {"slots": 64, "items": 100_000, "background": False, "local_keep_s": 0, "max_late_s": 10**10}
        self.live = IndexService.open(root=folder / "root", storage=self.uri, clock=self.clock, **settings)

    @property
    def log(self) -> StorageLog:
        return open_log(self.storage, self.clock)

    def put(self, table: pa.Table) -> None:
        self.live.put_batch(table.combine_chunks().to_batches()[0])
        self.live.seal()
        self.live.run_lifecycle()
        self.live.run_lifecycle()

    def build(self, table: pa.Table, mode: str = "replace") -> int:
        plan = replace(planned(table), genesis=self.log.state.genesis)
        shards = shards_of(written(table, plan, self.storage, now_ms=self.clock.now_ms()))
        return publish_tables(shards, mode, self.log)[1]

    def merge(self, window_s: int = 86_400) -> None:
        merge(self.storage, self.log, self.clock, MergeOptions(window_s=window_s, min_age_s=0), threads=1)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    yield made
    made.live.close()


def of_topic(topic: str, table: pa.Table) -> pa.Table:
    return table.set_column(0, "topic", pa.array([topic] * len(table)))


LIVE = of_topic("live", messages(100, days=1))
BATCH, AGAIN = (of_topic("batch", messages(10 * seed, days=1, seed=seed)) for seed in (2, 3))


def test_rewritten_tables_keep_their_origin(pipeline: Pipeline) -> None:
    later = messages(50, days=1, seed=5, begin_ms=BEGIN_MS + DAY_MS)
    pipeline.build(joined([BATCH, later]), "error")
    pipeline.put(LIVE)
    request = EraseRequest("batch", (BATCH["key"][0].as_py(),))
    erase(pipeline.storage, pipeline.log, request, pipeline.clock, yes=True, now=True, grace_s=0, threads=1)
    pipeline.merge(30 * 86_400)
    tables = pipeline.log.state.tables
    assert sorted(str(shards[0].origin) for shards in tables.values()) == ["build", "writer"]
    assert sum(shard.count for shards in tables.values() for shard in shards if shard.origin == "writer") == len(LIVE)


def test_replace_all_tells_the_entries_of_live_writers_that_it_removes(pipeline: Pipeline) -> None:
    pipeline.put(LIVE)
    pipeline.merge()
    pipeline.build(BATCH, "error")
    pipeline.put(AGAIN)
    pipeline.merge()
    state = pipeline.log.state
    told = entries_by_topic(state, list(state.objects), pipeline.storage)
    assert told == (("batch", len(BATCH) + len(AGAIN)), ("live", len(LIVE)))
    assert pipeline.build(BATCH, "replace-all") == len(state.objects)
    check_stored(pipeline.uri, BATCH)


def test_thirty_nights_of_builds_and_merges_beside_a_live_writer(pipeline: Pipeline) -> None:
    live: list[pa.Table] = []
    built: list[pa.Table] = []
    for night in range(NIGHTS):
        begin_ms = BEGIN_MS + night * DAY_MS
        # some entries come late: they belong to the day before
        late_ms = begin_ms - (DAY_MS // 4 if night else 0)
        live.append(of_topic("live", messages(40, days=1, seed=100 + night, begin_ms=late_ms)))
        pipeline.put(live[-1])
        whole = of_topic("batch", messages(30, days=1, seed=200 + night, begin_ms=begin_ms))
        for part in (whole.slice(0, 20), whole)[night % 2 :]:
            pipeline.build(part)
            if night % 3:
                pipeline.merge()
        built.append(whole)
        if night % 3 == 2:
            # an earlier day again
            pipeline.build(built[night - 1])
    pipeline.merge()
    check_stored(pipeline.uri, *live, *built)
    check(pipeline.uri, joined(live), joined(built), keys=5)


def test_removed_entries_are_counted_by_topic_before_spark_writes(spark, tmp_path, caplog):
    source, storage = tmp_path / "m.parquet", f"file://{tmp_path}/index"
    for table in (BATCH, AGAIN):
        pq.write_table(table, source)
        planned_result, result = (
            build(spark, source, storage=storage, mode="replace", dry_run=dry_run) for dry_run in (True, False)
        )
    assert planned_result.removed_topics == result.removed_topics == (("batch", len(BATCH)),)
    assert result.removed_objects == planned_result.removed_objects == 1
    for verb in ("would be", "are"):
        assert f"1 objects of these windows {verb} replaced: topic batch: {len(BATCH)} entries" in caplog.text


def test_a_table_that_is_lost_is_replaced_and_counted(pipeline: Pipeline) -> None:
    pipeline.build(BATCH)
    names = [stored.name for shards in pipeline.log.state.tables.values() for stored in shards]
    pipeline.storage.delete_many(names)
    assert entries_by_topic(pipeline.log.state, names, pipeline.storage) == (("(not readable)", len(BATCH)),)
