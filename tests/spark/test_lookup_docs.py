"""The program on bulk lookups of docs/spark-sql.md runs; messages join entries; the benchmark measures its figures."""

from __future__ import annotations

import json

import pytest

from docs.generators import spark_page
from tests.benchmarks.command import main
from tests.rocketmq.archived_store import index_log
from tests.spark.pages import programs, section
from tests.support.store_writer import StoreWriter
from tiered_index import IndexService
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.rocketmq.archive.archive import SegmentArchiver
from tiered_index.spark import look_up, lookup

BEGIN_MS = 1_700_000_000_000


def test_the_program_of_the_page_runs(spark):
    [program] = programs(section("spark-sql.md", "Bulk lookup"))
    exec(compile(program, "docs/spark-sql.md", "exec"), {})


@pytest.fixture
def store(tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=1 << 12) as writer:
        for n in range(120):
            writer.put("t", 0, b"body %d" % n, keys=[f"k{n % 10}"], tags="tag", store_ms=BEGIN_MS + n * 1000)
    return tmp_path / "store"


@pytest.mark.long
def test_messages_are_joined(spark, store, tmp_path):
    storage = f"file://{tmp_path}/storage"
    settings = {"slots": 97, "items": 5_000, "background": False, "offset_space": "commitlog", "max_late_s": 1e10}
    with IndexService.open(root=tmp_path / "root", storage=storage, **settings) as index:
        messages = {m.physical_offset: m for m in index_log(index, store)}
        index.seal()
        index.run_lifecycle()
        archiver = SegmentArchiver(index, "here", store / "commitlog")
        archiver.run_once()
        archived = index.log_state.segments_of("here")[-1].end
    frame = spark.createDataFrame([("t", "k3"), ("t", "k4"), ("t", "none")], "topic string, key string")
    rows = lookup(spark, frame, storage=storage, messages=str(store), max_count=6).collect()
    assert len(rows) == 13
    for row in rows:
        if row.position is None:
            assert (row.key, row.message_state, row.message_body) == ("none", None, None)
            continue
        message = messages[row.offset]
        assert (row.message_state, bytes(row.message_body), row.message_tags) == ("local", message.body(), "tag")
        assert row.message_properties == dict(message.properties) and row.key in message.index_keys
    answered = lookup(spark, frame, storage=storage, messages="archive").where("position is not null").collect()
    assert {row.message_state for row in answered} <= {"archived", "missing"} and archived > 0
    for row in answered:
        assert row.message_state == ("archived" if row.offset < archived else "missing")
        assert row.message_body == (messages[row.offset].body() if row.offset < archived else None)
    with pytest.raises(InvalidArgument, match="not to nested"):
        look_up(spark, frame, storage=storage, messages="archive", nested=True)
    with pytest.raises(ConfigError, match="has no commitlog/"):
        look_up(spark, frame, storage=storage, messages=str(tmp_path))


@pytest.mark.slow
def test_lookups_at_scale(tmp_path, capfd):
    amounts = ("--scale", "4096", "--keys", "400", "--keys", "1000000", "--slots", "100", "--master", "local[2]")
    with pytest.raises(SystemExit) as ended:
        main(["spark-lookup", *amounts, "--root-dir", str(tmp_path), "--json", "--quiet"])
    captured = capfd.readouterr()
    assert ended.value.code == 0, captured.err
    document = json.loads(captured.out)
    (table,) = document["tables"]
    # of every row: keys, asked for, found, objects, requests, MiB read, part of the index, workers, Java, compared
    rows = table["rows"]
    assert [row[:3] for row in rows] == [
        [400, "of all days", 380],
        [2048, "of all days", 1945],
        [400, "of the newest day", 380],
        [512, "of the newest day", 486],
    ]
    # a day's range is one table's: fewer objects, and no more than that table's part of the index
    assert [row[3] for row in rows] == [rows[0][3], rows[0][3], rows[0][3] // 4, rows[0][3] // 4]
    assert all(row[4] >= 2 * row[3] for row in rows)
    assert all(0 < row[6] < 1 / 3 for row in rows[2:]) and all(0.5 < row[6] <= 1 for row in rows[:2])
    assert all(int(peak) > 50 for row in rows for peak in row[7].split()) and [row[9] for row in rows] == [
        400,
        2000,
        400,
        512,
    ]
    assert [figure["median"] for figure in document["figures"]] == pytest.approx([row[6] for row in rows], abs=1e-4)
    assert spark_page.bulk(document).count("\n") == 8
    assert not list(tmp_path.iterdir())
