"""`python -m tests.benchmarks spark`: it measures the figures that it names. No test checks speed. `make test-cluster`
runs the whole command.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tests.benchmarks.bulk import NEWEST, SPREAD, KeyBatch, check_answers, counts_of
from tests.benchmarks.command import main
from tests.benchmarks.messages import ABSENT, BEGIN_S, TOPIC, key_in_one, message_frame
from tests.benchmarks.setting import MASTERS, SCALE_MASTER, SparkAmounts, SparkSetting, cores_of
from tests.benchmarks.ways import AUDIT, BUILD, BUILD_FRAME, JOIN, LOOKUP, MERGE
from tests.benchmarks.year import DAY_S, YearOfFiles
from tests.integration.cli.command_lines import run_here, run_script
from tiered_index import IndexConfig, IndexReader
from tiered_index.spark import build, look_up

LAYOUT = IndexConfig(slots=64, items=2_000).geometry()
SETTING = SparkSetting(LAYOUT, 1, quick=True)
AMOUNTS = SparkAmounts.of(SETTING)


def test_amounts_follow_from_the_setting():
    assert (AMOUNTS.entries, AMOUNTS.days, AMOUNTS.masters) == (3_840, 4, MASTERS)
    assert AMOUNTS.counts == (1_000, 1_920)
    assert [cores_of(master) for master in (*MASTERS, SCALE_MASTER, "yarn")] == [2, 2, None]


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    """The URI of an index of the messages."""
    folder = tmp_path_factory.mktemp("bench")
    source = message_frame(spark, AMOUNTS.entries, AMOUNTS.days, 2)
    config = IndexConfig(slots=64, items=2_000, max_late_s=1e10)
    built = build(spark, source, storage=f"file://{folder}/index", window="1d", config=config)
    assert (built.entries, len(built.windows)) == (AMOUNTS.entries, AMOUNTS.days)
    return f"file://{folder}/index"


def test_messages_are_where_their_numbers_say(made):
    with IndexReader.open(made) as reader:
        shared = reader.query(TOPIC, "shared-3", max_count=100)
        assert [item.timestamp_ms // 1000 // DAY_S - BEGIN_S // DAY_S for item in shared] == [3, 2, 1, 0]
        (own,) = reader.query(TOPIC, key_in_one(1_001))
        assert own.timestamp_ms // 1000 == BEGIN_S + 1_001 * AMOUNTS.days * DAY_S // AMOUNTS.entries
        assert not reader.query(TOPIC, key_in_one(ABSENT)).items


def test_keys_of_bulk_lookups_are_those_of_their_kind():
    assert counts_of((10, 5_000), 3_840, 4) == [(SPREAD, 10), (SPREAD, 1_920), (NEWEST, 10), (NEWEST, 480)]
    spread, newest = KeyBatch(SPREAD, 384, 3_840, 4), KeyBatch(NEWEST, 480, 3_840, 4)
    begin_ms, end_ms = (BEGIN_S + 3 * DAY_S) * 1000, (BEGIN_S + 4 * DAY_S) * 1000 - 1
    assert spread.range_ms is None and newest.range_ms == (begin_ms, end_ms)
    assert spread.numbers[1:3].tolist() == [11, 21] and newest.numbers[1:3].tolist() == [2_883, 2_885]
    # one key in twenty belongs to no message; every 15th message has a key that all days hold: 32 odd ones of the
    # newest day
    assert (spread.numbers >= ABSENT).sum() == 20 and (newest.numbers >= ABSENT).sum() == 24
    assert newest.numbers[newest.numbers < ABSENT].max() == 3_839
    assert spread.held.sum() == 384 - 20 and newest.held.sum() == 480 - 24 - 32


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SPREAD, NEWEST])
def test_answers_of_bulk_lookups_are_compared_with_the_messages(spark, made, tmp_path, kind):
    storage, answers = made, str(tmp_path / "answers")
    batch = KeyBatch(kind, 400, AMOUNTS.entries, AMOUNTS.days)
    result = look_up(spark, batch.frame(spark), storage=storage)
    result.frame.write.parquet(answers)
    result.release()
    assert check_answers(spark, answers, batch, storage, sample=50) == 50
    number = int(batch.numbers[batch.held][7])
    rows = spark.read.parquet(answers)
    for name, wrong, told in (
        ("offset", F.col("offset") + 1, "answers other than the message: 1, not 0"),
        ("position", F.lit(None).cast("int"), "keys found"),
        ("status", F.lit("truncated"), "keys whose answer is not complete: 1, not 0"),
    ):
        changed = str(tmp_path / name)
        rows.withColumn(name, F.when(F.col("number") == number, wrong).otherwise(F.col(name))).write.parquet(changed)
        with pytest.raises(RuntimeError, match=told):
            check_answers(spark, changed, batch, storage)


def test_gets_equal_the_windows_in_range():
    year = YearOfFiles(16 * 24)
    ranges = (24, 7 * 24, 16 * 24)
    assert year.gets(ranges) == {hours: (hours, hours) for hours in ranges}
    year.merge(DAY_S)
    assert year.gets(ranges) == {24: (1, 1), 7 * 24: (7, 7), 16 * 24: (16, 16)}
    # a window has four days: the year begins with a window, and all of them are over
    year.merge(4 * DAY_S)
    begin = BEGIN_S // DAY_S
    assert begin % 4 == 2, "the first window has two of these days"
    # days 0-1, 2-5, 6-9 and 10-13 become windows; days 14-15 stay days, since their window is not over
    assert year.gets(ranges) == {24: (1, 1), 7 * 24: (4, 4), 16 * 24: (6, 6)}
    assert [year.in_range(hours) for hours in ranges] == [1, 4, 6]


@pytest.mark.slow
def test_the_whole_command(tmp_path):
    def run(*arguments: str) -> Any:
        command = ("spark", "--rounds", "1", "--quick", "--json", *arguments, "--root-dir", tmp_path)
        done = run_script(*command, module="tests.benchmarks", timeout=600)
        assert done.code == 0, done.err
        assert list(tmp_path.iterdir()) == []
        return done.document

    measured = run("--entries", "4096", "--master", "local[1]", "--master", "local-cluster[2,1,1024]")
    figures = {figure["name"]: figure["median"] for figure in measured["figures"]}
    builds = {name for name in figures if name.startswith(BUILD + ",")}
    assert builds == {"build, local[1]", "build, local-cluster[2,1,1024]"}
    jobs_of = (BUILD, AUDIT, MERGE, f"{LOOKUP},", JOIN)
    assert all(value > 0 for name, value in figures.items() if name.startswith(jobs_of))
    assert figures["lookups of the year that cost other than one GET a window in range"] == 0
    assert 8 < figures["tiered_index: bytes an entry"] < 20
    titles = [table["title"].split(":")[0].split(" of ")[0] for table in measured["tables"]]
    assert titles == ["CPU seconds, median", "CPU seconds, median", "GETs per lookup in the newest part"]
    jobs = {row[0]: row for row in measured["tables"][0]["rows"]}
    assert {BUILD, BUILD_FRAME, AUDIT, MERGE, f"{LOOKUP}, 1,000 keys", f"{JOIN}, 1,000 keys"} <= set(jobs)
    assert jobs[BUILD][1] > jobs[BUILD][2] > 0 and "of Parquet, tuned" in jobs[BUILD][-1]
    scaled = run("--master", "local[2]", "--scale", "5000", "--scale", "10000")
    (table,) = scaled["tables"]
    assert [row[:2] for row in table["rows"]] == [[5000, "build"], [5000, "merge"], [10000, "build"], [10000, "merge"]]
    assert all(int(peak) > 50 for row in table["rows"] for peak in str(row[3]).split())


@pytest.mark.slow
def test_lookups_at_scale(tmp_path):
    amounts = "--scale 4096 --keys 400 --keys 1000000 --slots 100 --master local[2]"
    command = ("spark-lookup", *amounts.split(), "--root-dir", tmp_path, "--json", "--quiet")
    done = run_here(*command, program=main, timeout=600)
    assert done.code == 0, done.err
    document = done.document
    (table,) = document["tables"]
    # columns: keys, asked for, found, objects, requests, MiB read, part of the index, workers, Java, compared
    rows = table["rows"]
    assert [row[:3] for row in rows] == [
        [400, "of all days", 380],
        [2048, "of all days", 1945],
        [400, "of the newest day", 380],
        [512, "of the newest day", 486],
    ]
    # a day's range needs one table: fewer objects, and at most that table's part of the index
    assert [row[3] for row in rows] == [rows[0][3], rows[0][3], rows[0][3] // 4, rows[0][3] // 4]
    assert all(row[4] >= 2 * row[3] for row in rows)
    # both tasks read the log and the directories, which are most of so small an index: about 1.3 times each
    assert all(0.5 < row[6] < 3 for row in rows[:2])
    assert all(0 < newest[6] < whole[6] / 3 for newest, whole in zip(rows[2:], rows[:2], strict=True))
    assert all(int(peak) > 50 for row in rows for peak in row[7].split())
    assert [row[9] for row in rows] == [400, 2000, 400, 512]
    assert [figure["median"] for figure in document["figures"]] == pytest.approx([row[6] for row in rows], abs=1e-4)
    assert not list(tmp_path.iterdir())
