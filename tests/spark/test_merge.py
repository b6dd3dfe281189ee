"""Merges by Spark: files of live writers and tables of builds become longer windows, and no answer changes."""

import pickle

import pytest
from pyspark.sql.types import StructType

from tests.integration.cli.command_lines import run_here
from tests.spark.commands import outcome_of
from tests.spark.entries import check, messages, put_files, states, sweep, total, write_parquet
from tiered_index.errors import ConfigError
from tiered_index.service.jobs.merge_run import MergeOptions
from tiered_index.spark import RowsOfFiles, build, link_files, look_up, merge, versions
from tiered_index.spark.datasource.lookup_function import AnalyzedLookup
from tiered_index.spark.datasource.options import TaskPartition

HOUR_MS = 3_600_000


def test_files_and_builds_become_days_and_then_a_month(spark, storage, config, tmp_path):
    written = messages(4_000, days=3)
    put_files(storage, tmp_path / "root", written, rows=700)
    more = messages(800, days=2, seed=5)
    build(spark, write_parquet(more, tmp_path / "m.parquet"), storage=storage, window="6h", config=config)
    files = len(states(storage).objects)
    options = MergeOptions(shard_bytes=1 << 20)
    report = merge(spark, storage=storage, window="1d", options=options)
    # three days of the writer and two of the build, in separate tables
    assert (report.entries, report.sources, report.tables) == (4_800, files, 5)
    assert total(storage) == 4_800
    assert {shards[0].shard.window_s for shards in states(storage).tables.values()} == {86_400}
    check(storage, written, more)
    assert merge(spark, storage=storage, window="1d", options=options).jobs == 0
    assert merge(spark, storage=storage, window=30 * 86_400, options=options).sources == 5
    check(storage, written, more)
    assert sweep(storage) > files


def test_commands_build_and_merge_as_json(spark, storage, tmp_path):
    table = messages(300)
    path = write_parquet(table.rename_columns({"key": "order_id"}), tmp_path / "m.parquet")
    source = f"build --storage {storage} --source {path}"
    command = f"{source} --column key=order_id --window 1h --set slots=64"
    planned = outcome_of(f"{command} --dry-run").document
    assert (planned["status"], planned["entries"], planned["dry_run"]) == ("planned", 300, True)
    built = outcome_of(command).document
    assert (built["status"], built["log_number"], len(built["windows"])) == ("built", 2, len(planned["windows"]))
    assert built["windows"][0]["window_s"] == 3600 and built["windows"][0]["begin_ms"] % HOUR_MS == 0
    assert "has a table already" in outcome_of(command, code=2).error["message"]
    assert "NAME=VALUE" in outcome_of(f"{source} --column key", code=2).error["message"]
    assert built["metrics"]["application_id"] == spark.sparkContext.applicationId and built["metrics"]["cost_usd"] > 0
    assert built["metrics"]["requests"]["put"] >= built["shards"]
    assert built["metrics"]["bytes_written"] >= built["written_bytes"] and built["metrics"]["bytes_read"] > 0

    merging, tiers = f"--storage {storage}", "--window 1d,30d --min-age 2h --end 2023-11-15T23:59:59Z"
    here = run_here("merge", *f"{tiers} --dry-run {merging} --json --quiet".split())
    planned = outcome_of(f"merge {tiers} --dry-run {merging}").document
    assert planned == here.document and planned["status"] == "planned"
    assert [len(tier["jobs"]) for tier in planned["tiers"]] == [2, 1]
    wrong = outcome_of(f"merge --window 1h,90m --dry-run {merging}", code=2)
    assert "is not a multiple of" in wrong.error["message"]
    merged = outcome_of(f"merge --window 1d,30d {merging}").document
    days, month = merged["tiers"]
    assert (merged["status"], days["tables"], days["entries"]) == ("merged", 2, 300)
    assert (month["tables"], month["sources"]) == (1, 2)
    assert merged["log_number"] == states(storage).number
    for tier in merged["tiers"]:
        used = tier["metrics"]
        assert min(used["requests"][name] for name in ("put", "head")) >= tier["shards"]
        assert used["bytes_written"] >= tier["written_bytes"] > 0
    assert merged["bytes_read"] == sum(tier["metrics"]["bytes_read"] for tier in merged["tiers"]) > 0
    assert merged["requests"]["put"] == sum(tier["metrics"]["requests"]["put"] for tier in merged["tiers"])
    assert outcome_of(f"merge --window 1d {merging}").document["status"] == "nothing to do"
    check(storage, table)


def test_executors_with_another_version_of_the_package_are_refused(spark, storage, config, tmp_path, monkeypatch):
    source = write_parquet(messages(300), tmp_path / "m.parquet")
    logs = tmp_path / "logs.ndjson"
    logs.write_text('{"id": "k", "at": 1700000000}\n')
    build(spark, source, storage=storage, window="1h", config=config)
    with monkeypatch.context() as patched:
        # the workers load the package themselves
        patched.setattr(versions, "RELEASE", "0.0.9")

        def refused():
            return pytest.raises(ConfigError, match=r"the driver has tiered-index 0\.0\.9, and an executor 0\.1\.0")

        with refused():
            build(spark, source, storage=f"{storage}-2", window="1h", config=config)
        with refused():
            merge(spark, storage=storage, window="1d")
        with refused():
            link_files(spark, [str(logs)], RowsOfFiles(("id",), "at", None, "logs"), storage=storage, config=config)
        with refused():
            look_up(spark, spark.read.parquet(source).select("topic", "key"), storage=storage, config=config)
    assert total(storage) == 300
    assert merge(spark, storage=storage, window="1d").entries == 300


@pytest.mark.parametrize("planned", [TaskPartition(1), AnalyzedLookup(StructType())], ids=["data source", "function"])
def test_tasks_of_reads_and_of_the_table_function_are_refused_by_another_version_too(planned, monkeypatch):
    """Spark plans both in a process of its own, and sends what was planned to the tasks."""
    assert pickle.loads(pickle.dumps(planned)).version is versions.DRIVER_VERSION
    with monkeypatch.context() as patched:
        patched.setattr(versions, "RELEASE", "0.0.9")
        sent = pickle.dumps(planned)
    with pytest.raises(ConfigError, match=r"the driver has tiered-index 0\.0\.9, and an executor 0\.1\.0"):
        pickle.loads(sent)
