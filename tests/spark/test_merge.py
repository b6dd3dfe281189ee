"""Merges by Spark: files of live writers and tables of builds become longer windows, and no answer changes.

Compaction by Spark: one record adds the staged files of a writer to the log, and the writer adopts them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.cli.command_lines import run_here
from tests.spark.commands import told
from tests.spark.entries import check, messages, put_files, states, sweep, total, write_parquet
from tests.support.damage import flip_object
from tiered_index import IndexReader, IndexService
from tiered_index.service.merge.run import MergeOptions
from tiered_index.spark import build, merge
from tiered_index.spark.build.merge import compact
from tiered_index.storage.opening import open_storage

HOUR_MS = 3_600_000


def test_files_and_builds_become_days_and_then_a_month(spark, storage, config, tmp_path):
    written = messages(4_000, days=3)
    put_files(storage, tmp_path / "root", written, rows=700)
    more = messages(800, days=2, seed=5)
    build(spark, write_parquet(more, tmp_path / "m.parquet"), storage=storage, window="6h", config=config)
    files = len(states(storage).objects)
    seen = []
    options = MergeOptions(shard_bytes=1 << 20)
    report = merge(spark, storage=storage, window="1d", options=options, progress=lambda *said: seen.append(said))
    # three days of the writer and two of the build, in separate tables
    assert (report.entries, report.sources, report.tables) == (4_800, files, 5)
    assert total(storage) == 4_800
    assert {shards[0].shard.window_s for shards in states(storage).tables.values()} == {86_400}
    assert seen[-1][0] == "merge" and seen[-1][1] >= seen[-1][2] > 0
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
    planned = told(f"{command} --dry-run").document
    assert (planned["status"], planned["entries"], planned["dry_run"]) == ("planned", 300, True)
    built = told(command).document
    assert (built["status"], built["log_number"], len(built["windows"])) == ("built", 2, len(planned["windows"]))
    assert built["windows"][0]["window_s"] == 3600 and built["windows"][0]["begin_ms"] % HOUR_MS == 0
    assert "has a table already" in told(command, code=2).error["message"]
    assert "NAME=VALUE" in told(f"{source} --column key", code=2).error["message"]
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

    merging, tiers = f"--storage {storage}", "--tiers 1d,30d --min-age 2h --end 2023-11-15T23:59:59Z"
    here = run_here("merge", *f"{tiers} --dry-run {merging} --json --quiet".split())
    planned = told(f"merge {tiers} --dry-run {merging}").document
    assert planned == here.document and planned["status"] == "planned"
    assert [len(tier["jobs"]) for tier in planned["tiers"]] == [2, 1]
    wrong = told(f"merge --tiers 1h,90m --dry-run {merging}", code=2)
    assert "is not a multiple of" in wrong.error["message"]
    merged = told(f"merge --tiers 1d,30d {merging}").document
    days, month = merged["tiers"]
    assert (merged["status"], days["tables"], days["entries"]) == ("merged", 2, 300)
    assert (month["tables"], month["sources"]) == (1, 2)
    assert merged["log_number"] == states(storage).number
    for tier in merged["tiers"]:
        driven, ran = tier["metrics"]["stages"]
        assert [(one["name"], one["entries"]) for one in (driven, ran)] == [("plan and publish", 300), ("merge", 300)]
        assert ran["requests"]["driver"] == driven["requests"]["tasks"] == {} and driven["tasks"] == 0 < ran["tasks"]
        assert (ran["requests"]["tasks"]["put"], ran["bytes_written"]) == (tier["shards"], tier["written_bytes"])
        assert driven["requests"]["driver"]["head"] >= tier["shards"]
    assert merged["bytes_read"] == sum(tier["metrics"]["bytes_read"] for tier in merged["tiers"]) > 0
    assert merged["requests"]["put"] == sum(tier["metrics"]["requests"]["put"] for tier in merged["tiers"])
    assert told(f"merge --window 1d {merging}").document["status"] == "nothing to do"
    check(storage, table)


@pytest.fixture
def writer(storage, tmp_path):
    """A writer with three staged files, and their messages."""
    table = messages(1_200, days=2)
    settings = {"slots": 64, "items": 450, "background": False, "compaction": "spark", "refresh_interval_s": 0}
    with IndexService.open(root=tmp_path / "root", storage=storage, **settings) as index:
        index.put_batch(table, source="log", source_position=7)
        index.seal()
        assert index.run_lifecycle().staged == 3
        yield index, table


def test_staged_files_come_by_one_record_and_the_writer_adopts_them(spark, storage, writer):
    index, table = writer
    before, answers = states(storage).number, [item.offset for item in index.query("orders", "key-0", max_count=10_000)]
    seen = []
    planned = compact(spark, storage=storage, dry_run=True)
    report = compact(spark, storage=storage, progress=lambda *said: seen.append(said))
    assert (report.files, report.entries, report.left, report.damaged) == (3, 1_200, (), ())
    assert states(storage).number == report.log_number == before + 1
    assert seen[-1][0] == "compact" and seen[-1][1] >= seen[-1][2] > 0
    assert {stage.name for stage in report.metrics.stages} == {"plan and publish", "compact"}
    assert total(storage) == 1_200
    assert report.written_bytes == sum(stored.size_bytes for stored in states(storage).objects.values())
    # the plan gave the right cost
    assert dict(planned.requests) == dict(report.requests) == report.metrics.requests
    assert planned.cost_usd == pytest.approx(report.cost_usd) and planned.cost_usd > 0
    assert planned.read_bytes == report.read_bytes
    # the plan does not know which keys repeat
    assert 0.5 < planned.written_bytes / report.written_bytes < 1.5
    check(storage, table)
    assert index.run_lifecycle().adopted == 3
    assert [item.offset for item in index.query("orders", "key-0", max_count=10_000)] == answers
    assert {handle.place for handle in index.files()} == {"storage"}
    assert states(storage).positions == {"log": 7}
    assert compact(spark, storage=storage).files == 0
    assert states(storage).number == before + 2


def test_the_command_reports_remaining_and_damaged_files(spark, storage, writer):
    index, table = writer
    command = f"compact --storage {storage}"
    planned = told(f"{command} --dry-run").document
    assert (planned["status"], planned["files"], planned["entries"], planned["dry_run"]) == ("planned", 3, 1_200, True)
    assert planned["cost_usd"] > 0 and "metrics" not in planned
    first, second = (handle.file_id for handle in index.files()[:2])
    with open_storage(storage) as opened:
        entries = [info.name for info in opened.list("staging/") if info.name.endswith(".entries")]
        names = {name.split("/")[1]: name for name in entries}
        whole = opened.get(names[first])
        flip_object(opened, names[first], 100)
    # an object that no task can read
    (unreadable,) = Path(storage.removeprefix("file://")).rglob(f"{Path(names[second]).name}*")
    unreadable.unlink()
    unreadable.mkdir()
    done = told(command, code=4).document
    assert (done["status"], done["files"]) == ("compacted", 1)
    assert [[file_id for file_id, _ in done[what]] for what in ("damaged", "failed", "left")] == [[first], [second], []]
    assert done["metrics"]["stages"][0]["requests"]["driver"]["put_if_absent"] >= 1
    with open_storage(storage) as opened:
        opened.put(names[first], whole)
    done = told(command, code=3).document
    assert (done["files"], done["failed"][0][0], done["damaged"]) == (1, second, [])
    unreadable.rmdir()
    index.run_lifecycle()
    with IndexReader.open(storage) as reader:
        assert len(reader.files()) == 2
    # the writer's epoch is over, and its root opens again as one that compacts by itself
    root = index.config.root
    index.close()
    with IndexService.open(root=root, storage=storage, background=False) as again:
        assert again.run_lifecycle().uploaded == 1
    assert told(command).document["status"] == "nothing to do"
    check(storage, table)
