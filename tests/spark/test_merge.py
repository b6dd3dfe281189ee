"""Merges by Spark: what live writers uploaded and builds made becomes longer windows, and no answer changes."""

from __future__ import annotations

import json

import pytest

from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import run
from tiered_index.service.merge.run import MergeOptions
from tiered_index.spark import build, merge

HOUR_MS = 3_600_000


@pytest.fixture
def written(storage, tmp_path):
    """Uploaded files of a live writer, and what they hold."""
    table = messages(4_000, days=3)
    with IndexService.open(root=tmp_path / "root", storage=storage, slots=64, items=700, background=False) as index:
        for batch in table.to_batches(500):
            index.put_batch(batch)
            index.flush()
        index.seal()
        index.run_lifecycle()
    return table


def test_files_and_builds_become_days_and_then_a_month(spark, storage, written, config, tmp_path):
    more = messages(800, days=2, seed=5)
    build(spark, write_parquet(more, tmp_path / "m.parquet"), storage=storage, window="1h", config=config)
    files = len(states(storage).objects)
    told = []
    options = MergeOptions(shard_bytes=1 << 20)
    report = merge(spark, storage=storage, window="1d", options=options, progress=lambda *said: told.append(said))
    assert (report.entries, report.sources, report.tables) == (4_800, files, 3)
    assert total(storage) == 4_800
    assert {shards[0].shard.window_s for shards in states(storage).tables.values()} == {86_400}
    assert told[-1][0] == "merge" and told[-1][1] >= told[-1][2] > 0
    check(storage, written, more)
    assert merge(spark, storage=storage, window="1d", options=options).jobs == 0
    assert merge(spark, storage=storage, window=30 * 86_400, options=options).sources == 3
    check(storage, written, more)
    assert sweep(storage) > files


def test_cursors_and_readers_survive_a_merge(spark, storage, written):
    with IndexReader.open(storage) as reader:
        first = reader.query("orders", "key-0", max_count=10)
        whole = reader.query("orders", "key-0", max_count=10_000).items
        assert merge(spark, storage=storage).jobs > 0
        rest = reader.query("orders", "key-0", max_count=10_000, cursor=first.cursor)
        assert [i.offset for i in (*first.items, *rest.items)] == [i.offset for i in whole]


def test_commands_build_and_merge_as_json(spark, storage, tmp_path, capfd):
    table = messages(300)
    path = write_parquet(table.rename_columns(["topic", "queue_id", "order_id", "offset", "size", "timestamp_ms"]), tmp_path / "m.parquet")

    def told(*arguments, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(["spark", *arguments, "--storage", storage, "--json", "--quiet"])
        captured = capfd.readouterr()
        assert ended.value.code == code, captured.err
        return json.loads(captured.out if not code else captured.err.splitlines()[-1])

    command = ("build", "--source", path, "--column", "key=order_id", "--window", "1h", "--slots", "64")
    planned = told(*command, "--dry-run")
    assert (planned["status"], planned["entries"], planned["dry_run"]) == ("planned", 300, True)
    built = told(*command)
    assert (built["status"], built["log_number"], len(built["windows"])) == ("built", 2, len(planned["windows"]))
    assert built["windows"][0]["window_s"] == 3600 and built["windows"][0]["begin_ms"] % HOUR_MS == 0
    assert "has a table already" in told(*command, code=2)["error"]["message"]
    assert "is missing" in told("build", "--source", path, code=2)["error"]["message"]
    assert "NAME=VALUE" in told("build", "--source", path, "--column", "key", code=2)["error"]["message"]
    merged = told("merge", "--window", "1d")
    assert (merged["status"], merged["tables"], merged["entries"]) == ("merged", 2, 300)
    assert told("merge", "--window", "1d")["status"] == "nothing to do"
    check(storage, table)
