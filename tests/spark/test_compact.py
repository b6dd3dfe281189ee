"""Compaction by Spark: what a writer has staged comes into the log by one record, and the writer adopts it; by code and
by command.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spark.entries import check, messages, states, total
from tiered_index import IndexReader, IndexService
from tiered_index.cli.main import run
from tiered_index.spark.build.merge import compact
from tiered_index.storage.opening import open_storage


@pytest.fixture
def writer(storage, tmp_path):
    """A writer with three staged files, and what they hold."""
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
    told = []
    planned = compact(spark, storage=storage, dry_run=True)
    report = compact(spark, storage=storage, progress=lambda *said: told.append(said))
    assert (report.files, report.entries, report.left, report.damaged) == (3, 1_200, (), ())
    assert states(storage).number == report.log_number == before + 1
    assert told[-1][0] == "compact" and told[-1][1] >= told[-1][2] > 0
    assert {stage.name for stage in report.metrics.stages} == {"plan and publish", "compact"}
    assert total(storage) == 1_200 and report.written_bytes == sum(
        o.size_bytes for o in states(storage).objects.values()
    )
    # the plan knew what it would cost
    assert dict(planned.requests) == dict(report.requests) == report.metrics.requests
    assert planned.cost_usd == pytest.approx(report.cost_usd) and planned.cost_usd > 0
    assert planned.read_bytes == report.read_bytes
    # what keys repeat is not known to it
    assert 0.5 < planned.written_bytes / report.written_bytes < 1.5
    check(storage, table)
    assert index.run_lifecycle().adopted == 3
    assert [item.offset for item in index.query("orders", "key-0", max_count=10_000)] == answers
    assert {handle.place for handle in index.files()} == {"storage"}
    assert states(storage).positions == {"log": 7}
    assert compact(spark, storage=storage).files == 0
    assert states(storage).number == before + 2


def test_the_command_tells_what_is_left_and_what_is_damaged(spark, storage, writer, capfd):
    index, table = writer

    def told(*arguments, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(["spark", "compact", *arguments, "--storage", storage, "--json", "--quiet"])
        captured = capfd.readouterr()
        assert ended.value.code == code, captured.err
        return json.loads(captured.out)

    planned = told("--dry-run")
    assert (planned["status"], planned["files"], planned["entries"], planned["dry_run"]) == ("planned", 3, 1_200, True)
    assert planned["cost_usd"] > 0 and "metrics" not in planned
    first, second = (handle.file_id for handle in index.files()[:2])
    with open_storage(storage) as opened:
        names = {
            info.name.split("/")[1]: info.name for info in opened.list("staging/") if info.name.endswith(".entries")
        }
        whole = opened.get(names[first])
        opened.put(names[first], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    # something that no task can read
    (unreadable,) = Path(storage.removeprefix("file://")).rglob(f"{Path(names[second]).name}*")
    unreadable.unlink()
    unreadable.mkdir()
    done = told(code=4)
    assert (done["status"], done["files"]) == ("compacted", 1)
    assert [[file_id for file_id, _ in done[what]] for what in ("damaged", "failed", "left")] == [[first], [second], []]
    assert done["metrics"]["stages"][0]["requests"]["driver"]["put_if_absent"] >= 1
    with open_storage(storage) as opened:
        opened.put(names[first], whole)
    done = told(code=3)
    assert (done["files"], done["failed"][0][0], done["damaged"]) == (1, second, [])
    unreadable.rmdir()
    index.run_lifecycle()
    with IndexReader.open(storage) as reader:
        assert len(reader.files()) == 2
    # the writer's epoch is over, its root comes back as one that compacts by itself
    root = index.config.root
    index.close()
    with IndexService.open(root=root, storage=storage, background=False) as again:
        assert again.run_lifecycle().uploaded == 1
    assert told()["status"] == "nothing to do"
    check(storage, table)
