"""Merges by Spark: what live writers uploaded and builds made becomes longer windows, and no answer changes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.spark.entries import check, messages, states, sweep, total, write_parquet
from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import app, run
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
    # three days of the writer, and two of the build: they stay apart
    assert (report.entries, report.sources, report.tables) == (4_800, files, 5)
    assert total(storage) == 4_800
    assert {shards[0].shard.window_s for shards in states(storage).tables.values()} == {86_400}
    assert told[-1][0] == "merge" and told[-1][1] >= told[-1][2] > 0
    check(storage, written, more)
    assert merge(spark, storage=storage, window="1d", options=options).jobs == 0
    assert merge(spark, storage=storage, window=30 * 86_400, options=options).sources == 5
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
    path = write_parquet(
        table.rename_columns(["topic", "queue_id", "order_id", "offset", "size", "timestamp_ms"]),
        tmp_path / "m.parquet",
    )

    def told(*arguments, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(["spark", *arguments, "--storage", storage, "--json", "--quiet"])
        captured = capfd.readouterr()
        assert ended.value.code == code, captured.err
        return json.loads(captured.out if not code else captured.err.splitlines()[-1])

    command = ("build", "--source", path, "--column", "key=order_id", "--window", "1h", "--set", "slots=64")
    planned = told(*command, "--dry-run")
    assert (planned["status"], planned["entries"], planned["dry_run"]) == ("planned", 300, True)
    built = told(*command)
    assert (built["status"], built["log_number"], len(built["windows"])) == ("built", 2, len(planned["windows"]))
    assert built["windows"][0]["window_s"] == 3600 and built["windows"][0]["begin_ms"] % HOUR_MS == 0
    assert "has a table already" in told(*command, code=2)["error"]["message"]
    assert "is missing" in told("build", "--source", path, code=2)["error"]["message"]
    assert "NAME=VALUE" in told("build", "--source", path, "--column", "key", code=2)["error"]["message"]
    stages = {stage["name"]: stage for stage in built["metrics"]["stages"]}
    assert list(stages) == ["plan", "count", "build", "publish"]
    assert all(stages[name]["entries"] == 300 for name in ("count", "build", "publish"))
    assert stages["count"]["tasks"] >= 1 and stages["build"]["tasks"] >= 2 and stages["publish"]["tasks"] == 0
    assert stages["build"]["requests"]["tasks"]["put"] == built["shards"] and not stages["count"]["requests"]["tasks"]
    assert stages["build"]["bytes_written"] == built["written_bytes"]
    assert built["metrics"]["application_id"] == spark.sparkContext.applicationId and built["metrics"]["cost_usd"] > 0
    both = built["metrics"]["requests"]
    parts = [part.get("put", 0) for stage in stages.values() for part in stage["requests"].values()]
    assert both["put"] == sum(parts) >= built["shards"]

    tiers = ("--tiers", "1d,30d", "--min-age", "2h", "--end", "2023-11-15T23:59:59Z")
    here = CliRunner().invoke(app, ["merge", *tiers, "--dry-run", "--storage", storage, "--json", "--quiet"])
    planned = told("merge", *tiers, "--dry-run")
    assert planned == json.loads(here.stdout) and planned["status"] == "planned"
    assert [len(tier["jobs"]) for tier in planned["tiers"]] == [2, 1]
    assert "is not a multiple of" in told("merge", "--tiers", "1h,90m", "--dry-run", code=2)["error"]["message"]
    merged = told("merge", "--tiers", "1d,30d")
    days, month = merged["tiers"]
    assert (merged["status"], days["tables"], days["entries"], month["tables"], month["sources"]) == (
        "merged",
        2,
        300,
        1,
        2,
    )
    assert merged["log_number"] == states(storage).number
    for tier in merged["tiers"]:
        driven, ran = tier["metrics"]["stages"]
        assert (driven["name"], ran["name"], driven["entries"], ran["entries"]) == (
            "plan and publish",
            "merge",
            300,
            300,
        )
        assert ran["requests"]["driver"] == driven["requests"]["tasks"] == {} and driven["tasks"] == 0 < ran["tasks"]
        assert (ran["requests"]["tasks"]["put"], ran["bytes_written"]) == (tier["shards"], tier["written_bytes"])
        assert driven["requests"]["driver"]["head"] >= tier["shards"]
    assert merged["bytes_read"] == sum(tier["metrics"]["bytes_read"] for tier in merged["tiers"]) > 0
    assert merged["requests"]["put"] == sum(tier["metrics"]["requests"]["put"] for tier in merged["tiers"])
    assert told("merge", "--window", "1d")["status"] == "nothing to do"
    check(storage, table)
