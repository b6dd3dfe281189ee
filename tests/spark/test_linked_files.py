"""Builds of files that stay where they are: Spark makes the segments, offsets and answers of `ingest`."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import random
import zlib
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from tests.integration.cli.command_lines import run_here
from tests.spark.commands import outcome_of
from tiered_index import FileRows, IndexConfig, IndexReader
from tiered_index.connectors.files import linked as linker
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.rows import restart
from tiered_index.connectors.files.rows import table as table_rows
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.names import CATALOG_PREFIX, DATA_PREFIX
from tiered_index.format.segments.columnar import decode_columns
from tiered_index.service.log.state import LogState
from tiered_index.service.read.segments.segments import Segments
from tiered_index.spark import SourceRange, build, register
from tiered_index.spark.addresses import StorageAddress
from tiered_index.spark.audit.audit import audit
from tiered_index.spark.failures import typed_errors
from tiered_index.spark.writing import linked
from tiered_index.spark.writing.census import HAS_KEY, WindowScale, census_of
from tiered_index.spark.writing.linked import FilePlan, LinkedPartsReader, RowsOfFiles, link_files

BEGIN_S = 1_700_000_000
KEYS = ("--topic", "orders", "--key", "order_id", "--key", "customer.id")
ROWS = RowsOfFiles(("order_id", "customer.id"), "at", None, "orders")
NAMED_KEYS = ("--topic", "orders", "--key", "order_id", "--key", "of=customer.id")


def row(number):
    return {"order_id": number % 40, "customer": {"id": f"c{number % 7}"}, "at": BEGIN_S + number, "n": number}


def lines(begin, end):
    return "".join(f"{json.dumps(row(n))}\n" for n in range(begin, end)).encode()


@pytest.fixture
def logs(tmp_path):
    """Return a folder with rows 0 to 699 in files of many forms."""
    folder = tmp_path / "logs"
    (folder / "a b").mkdir(parents=True)
    (folder / "0.ndjson").write_bytes(lines(0, 100))
    (folder / "1.gz").write_bytes(gzip.compress(lines(100, 200)))
    (folder / "a b" / "2.bz2").write_bytes(bz2.compress(lines(200, 300)))
    (folder / "a b" / "3.ndjson").write_bytes(lines(300, 400) + b"\n" + lines(400, 401)[:20])
    table = pa.Table.from_pylist([row(n) for n in range(400, 500)])
    with pa.ipc.new_file(folder / "4.arrow", table.schema) as sink:
        sink.write_table(table, 30)
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(500, 600)]), folder / "5.parquet", 30)
    cells = "".join(f'{n % 40},"c{n % 7}",{BEGIN_S + n},{n}\n' for n in range(600, 700))
    (folder / "6.csv").write_text("order_id,customer.id,at,n\n" + cells)
    return folder


@pytest.fixture
def ingested(tmp_path):
    """Return a function that indexes files by `ingest`, and returns the URI of the index."""

    def run(*sources, keys=KEYS):
        uri = f"file://{tmp_path}/ingested"
        where = "--root", tmp_path / "root", "--storage", uri, "--slots", 64
        done = run_here("ingest", *sources, *keys, "--time", "at", *where, "--wait", "--json")
        assert done.code == 0, done.err
        return uri

    return run


def segments_of(uri):
    with IndexReader.open(uri) as reader:
        return [
            {**segment.to_json(), "published_ms": None, "restarts": None}
            for segment in reader.segment_archive.segments().linked()
        ]


def answers_of(uri):
    """Return for some keys the place and the time of each entry, and its row."""
    answers = {}
    with IndexReader.open(uri) as reader, FileRows(reader) as source:
        for key in [*map(str, range(40)), *(f"{name}c{n}" for n in range(7) for name in ("", "of=")), "nobody"]:
            entries = [
                (item.offset, item.queue_id, item.size, item.timestamp_ms)
                for item in reader.query("orders", key, max_count=1000)
            ]
            fetched_rows = reader.messages("orders", key, source=source, max_count=1000)
            assert all(each.message is not None for each in fetched_rows)
            answers[key] = entries, [(each.message.file, each.message.row, each.message.text) for each in fetched_rows]
    return answers


def test_a_build_of_files_is_the_same_as_ingest(spark, storage, config, logs, ingested):
    named = replace(ROWS, keys=("order_id", "of=customer.id"))
    result = link_files(spark, [str(logs)], named, storage=storage, config=config)
    assert (result.files, result.rows, result.entries, result.unit) == (7, 700, 1400, "s")
    assert result.held_back == ((logs / "a b" / "3.ndjson").as_uri(),)
    uri = ingested(logs, keys=NAMED_KEYS)
    assert segments_of(storage) == segments_of(uri) and len(segments_of(uri)) == 7
    assert answers_of(storage) == answers_of(uri)
    with IndexReader.open(storage) as reader, IndexReader.open(uri) as other:
        assert reader.durable_positions() == other.durable_positions()


@pytest.mark.long
def test_files_are_indexed_once_and_lines_that_follow_are_added(spark, storage, config, logs, ingested):
    link_files(spark, [str(logs)], ROWS, storage=storage, config=config)
    again = link_files(spark, [str(logs)], ROWS, storage=storage, config=config)
    assert (again.files, again.known, again.entries) == (0, 7, 0)
    with (logs / "0.ndjson").open("ab") as file:
        file.write(lines(700, 750))
    (logs / "7.ndjson").write_bytes(lines(750, 800))
    more = link_files(spark, [f"{logs}/*.ndjson"], ROWS, storage=storage, config=config)
    assert (more.files, more.rows, more.changed) == (2, 100, ())
    (logs / "6.csv").write_text("order_id,customer.id,at,n\n" + f"17,c3,{BEGIN_S},9000\n")
    changed = link_files(spark, [f"{logs}/*.csv"], ROWS, storage=storage, config=config)
    assert (changed.rows, changed.changed) == (1, ((logs / "6.csv").as_uri(),))
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        fetched_rows = reader.messages("orders", "17", source=source, max_count=100)
        # values of CSV are texts
        numbers = sorted(int(json.loads(fetched.message.text)["n"]) for fetched in fetched_rows if fetched.message)
        assert numbers == [*(n for n in [*range(600), *range(700, 800)] if n % 40 == 17), 9000]
        assert {fetched.problem for fetched in fetched_rows if not fetched.message} == {
            f"{(logs / '6.csv').as_uri()} has changed since it was indexed"
        }
    # `ingest` goes on where the builds ended, also with a root of its own
    done = run_here(
        "ingest", logs, *KEYS, "--time", "at", "--storage", storage, "--root", logs.parent / "other", "--wait",
        "--json",
    )  # fmt: skip
    assert (done.code, done.document["rows"]) == (0, 0), done.err


def numbers_of(storage, key="17"):
    """Return the numbers of the rows of a key that come back, and the number of replaced ones."""
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        replaced = reader.query("orders", key, max_count=10_000).replaced
        fetched_rows = reader.messages("orders", key, source=source, max_count=10_000)
        return sorted(json.loads(each.message.text)["n"] for each in fetched_rows), replaced


def test_what_was_edited_is_read_anew_and_what_has_moved_is_not(spark, storage, config, tmp_path):
    (folder := tmp_path / "logs").mkdir()
    (folder / "app.log").write_bytes(lines(0, 8000))
    (folder / "other.log").write_bytes(lines(8000, 8100))
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(8100, 8200)]), folder / "a.parquet")
    link_files(spark, [str(folder)], ROWS, storage=storage, config=config)
    # after the first of the blocks of 256 KiB
    (folder / "app.log").write_bytes(lines(0, 7017) + lines(9017, 9018) + lines(7018, 8000))
    (folder / "other.log").rename(folder / "other.log.1")
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(8101, 8200)]), folder / "a.parquet")
    again = link_files(spark, [str(folder)], ROWS, storage=storage, config=config)
    assert again.rewritten == ((folder / "a.parquet").as_uri(), (folder / "app.log").as_uri())
    assert again.rows < 8000 and not again.changed
    left = [n for n in [*range(7017), *range(7018, 8000), 9017, *range(8000, 8100), *range(8101, 8200)] if n % 40 == 17]
    shown, replaced = numbers_of(storage)
    assert shown == sorted(left) and replaced > 0
    assert audit(spark, storage=storage).status == "ok"
    third = link_files(spark, [str(folder)], ROWS, storage=storage, config=config)
    assert (third.files, third.rows, numbers_of(storage)) == (0, 0, (shown, replaced))
    # a further edit of a topic with copies is for `ingest`, which leaves out the rows that have some
    where = "--storage", storage, "--root", tmp_path / "root", "--wait", "--json"
    (folder / "b.log").write_bytes(lines(10_000, 10_100))
    assert run_here("ingest", folder, *KEYS, "--time", "at", *where, "--archive").code == 0
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(8102, 8200)]), folder / "a.parquet")
    with pytest.raises(InvalidArgument, match=r"a.parquet has other rows than before.*ingest .* --archive"):
        link_files(spark, [str(folder)], ROWS, storage=storage, config=config)
    assert run_here("ingest", folder, *KEYS, "--time", "at", *where, "--archive").code == 0
    assert numbers_of(storage)[0] == sorted([*left, *(n for n in range(10_000, 10_100) if n % 40 == 17)])


def test_bad_rows_and_other_work_on_the_log_are_refused(spark, storage, config, logs, ingested):
    # the first time decides their unit, also for the tasks
    times = BEGIN_S * 1000, BEGIN_S, BEGIN_S * 1000 + 1
    texts = [f"{json.dumps({**row(1), 'at': time})}\n" for time in times]
    (logs / "9.ndjson").write_text("".join(texts))
    files, into = [str(logs / "9.ndjson")], {"storage": f"{storage}-of-times", "config": config}
    with pytest.raises(InvalidArgument, match=r"9\.ndjson, line 2 .*seems to be in s, .* in ms: give --time-unit"):
        link_files(spark, files, ROWS, strict=True, **into)
    skipped = link_files(spark, files, ROWS, skip_bad=True, **into)
    assert (skipped.rows, skipped.skipped_rows, skipped.entries, skipped.unit) == (2, 1, 4, "ms")
    # the unit is that of later builds and runs, too
    (logs / "10.ndjson").write_text(texts[1])
    with pytest.raises(InvalidArgument, match="seems to be in s, but the first one was in ms"):
        link_files(spark, [str(logs / "10.ndjson")], ROWS, strict=True, **into)
    of_run = ("--storage", into["storage"], "--root", logs.parent / "of-times", "--json")
    done = run_here("ingest", logs / "10.ndjson", *KEYS, "--time", "at", *of_run)
    assert done.code == 4
    assert "seems to be in s, but the first one was in ms" in done.document["skipped_first"][0]["problem"]
    (logs / "10.ndjson").unlink()
    (logs / "8.ndjson").write_bytes(lines(0, 3) + b'{"order_id": 1}\n')
    with pytest.raises(InvalidArgument, match=r"8\.ndjson, line 4 .*no time at at; --skip-bad leaves such rows out"):
        link_files(spark, [str(logs / "8.ndjson")], ROWS, storage=storage, config=config, strict=True)
    result = link_files(spark, [str(logs / "8.ndjson")], ROWS, storage=storage, config=config, skip_bad=True)
    assert (result.rows, result.skipped_rows, result.skipped_first[0][1]) == (3, 1, "no time at at")
    adds_it = (
        r"n is no key of this topic, which has customer\.id, order_id: `tiered-index ingest \.\.\. --key n` adds it"
    )
    with pytest.raises(InvalidArgument, match=adds_it):
        link_files(spark, [str(logs / "8.ndjson")], replace(ROWS, keys=("n",)), storage=storage, config=config)
    # by another unit known rows are read anew, and count once
    with pytest.raises(InvalidArgument, match=r"8\.ndjson, line 1 .*no time at n2.* Its rows have other times"):
        link_files(spark, [str(logs / "8.ndjson")], replace(ROWS, time="n2"), storage=storage, config=config)
    of_unit = {"storage": storage, "config": config, "skip_bad": True}
    reread = link_files(spark, [str(logs / "8.ndjson")], replace(ROWS, unit="ms"), **of_unit)
    assert (reread.files, reread.rows) == (1, 3)
    with IndexReader.open(storage) as reader:
        assert [item.timestamp_ms for item in reader.query("orders", "1")] == [(BEGIN_S + 1) // 1000 * 1000]
    assert link_files(spark, [str(logs / "8.ndjson")], replace(ROWS, unit="ms"), **of_unit).known == 1
    with pytest.raises(InvalidArgument, match="nobody_has_this"):
        link_files(
            spark, [str(logs)], RowsOfFiles(("nobody_has_this",), "at", None, "others"), storage=storage, config=config
        )


def test_damaged_files_stop_no_other_and_have_the_segments_of_ingest(spark, tmp_path, storage, config):
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "a.log").write_bytes(lines(0, 50))
    random_rows = [row(n) | {"pad": random.Random(n).randbytes(30).hex()} for n in range(4000)]
    packed = gzip.compress("".join(f"{json.dumps(each)}\n" for each in random_rows).encode())
    (folder / "b.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "c.json").write_bytes(b"[1]\n")
    pq.write_table(pa.table({"order_id": [1]}), folder / "d.parquet")
    (folder / "e.log").write_bytes(b"{broken\n" + lines(50, 60))
    done = run_here(
        "ingest", folder, *KEYS, "--time", "at", "--storage", f"{storage}-of-ingest", "--root",
        tmp_path / "root-of-ingest", "--wait", "--json",
    )  # fmt: skip
    assert done.code == 1, done.err
    into = {"storage": f"{storage}-of-build", "config": config}
    for more in ({}, {"skip_bad": True}):
        with pytest.raises((InvalidArgument, CorruptFile)):
            link_files(spark, [str(folder)], ROWS, strict=True, **into, **more)
    result = link_files(spark, [str(folder)], ROWS, **into)
    assert [each["file"] for each in result.damaged_first] == [
        (folder / name).as_uri() for name in ("c.json", "b.gz", "d.parquet")
    ]
    assert (result.damaged, result.skipped_rows, result.rows) == (3, 1, done.document["rows"])

    def facts(storage):
        with IndexReader.open(storage) as reader:
            segments = [*reader.segments().linked()]
        return {(each.uri, each.position, each.length, each.rows, each.blocks, each.damage) for each in segments}

    assert facts(into["storage"]) == facts(f"{storage}-of-ingest")
    again = link_files(spark, [str(folder)], ROWS, **into)
    assert (again.files, again.known, again.damaged, again.known_damaged) == (0, 5, 0, 3)


def test_the_command_builds_files_of_a_bucket_and_the_rows_come_back(spark, s3):
    del spark  # the command uses the session
    bucket_name, query = s3.new_bucket(), f"?endpoint_url={s3.endpoint_url}&addressing_style=path"
    uri, storage = f"s3://{bucket_name}/logs", f"s3://{bucket_name}/index{query}"
    with contextlib.closing(IndexConfig(storage=storage).open_storage(f"{uri}{query}", any_names=True)) as bucket:
        for day in range(3):
            bucket.put(f"day={day}/a b.ndjson", lines(day * 100, day * 100 + 100))
        bucket.put("day=0/c.txt", b"no data")
    source = "--source", f"{uri}/**/*.ndjson", *KEYS, "--time", "at", "--storage", storage
    planned = outcome_of("build", *source, "--dry-run", **s3.environment).document
    assert (planned["status"], planned["rows"], planned["entries"]) == ("planned", 300, 600)
    built = outcome_of("build", *source, "--set", "slots=64", **s3.environment).document
    assert (built["files"], built["rows"], built["read_bytes"]) == (3, 300, len(lines(0, 300)))
    # each file is read twice, with its first bytes before and after
    assert built["metrics"]["bytes_read"] > 2 * len(lines(0, 300)) and built["metrics"]["requests"]
    again = outcome_of("build", *source, **s3.environment).document
    assert (again["files"], again["known"], again["log_number"]) == (0, 3, built["log_number"])
    answer = run_here("query", "orders", "17", "--messages", "--storage", storage, "--json", environment=s3.environment)
    texts = [shown["message"]["body"] for shown in answer.document["messages"]]
    assert [json.loads(text)["n"] for text in texts] == [*range(297, 0, -40)]
    with contextlib.closing(IndexConfig(storage=storage).open_storage(f"{uri}{query}", any_names=True)) as bucket:
        bucket.put("_delta_log/0.json", b"{}")
    for inside in ("day=0", "day=*/*.ndjson"):
        refused = outcome_of("build", "--source", f"{uri}/{inside}", *source[2:], code=2, **s3.environment)
        assert "/logs is a table (_delta_log/)" in refused.err
    for wrong in (("--mode", "append"), ("--column", "key=order_id")):
        refused = outcome_of("build", *source, *wrong, code=2, **s3.environment)
        assert f"leave {wrong[0]} out" in refused.err


def points_of(uri):
    """Return the restart points of an index: the offset of each, its position and its bit."""
    with IndexReader.open(uri) as reader:
        archive, points = reader.segment_archive, []
        for segment in archive.segments().of("points:-/orders/0"):
            table = decode_columns(archive.verified(segment, 0, segment.size_bytes))
            points += [tuple(row.values())[:3] for row in table.to_pylist()]
    return points


def test_a_row_of_packed_text_is_read_from_a_restart_point(spark, storage, config, tmp_path, ingested, monkeypatch):
    moments, folder = random.Random(1), tmp_path / "packed"
    folder.mkdir()
    for number in range(2):
        text = b"".join(
            json.dumps({**row(n), "note": f"{moments.getrandbits(4_000):x}"}).encode() + b"\n"
            for n in range(number * 8_000, (number + 1) * 8_000)
        )
        (folder / f"{number}.gz").write_bytes(gzip.compress(text, 1))
    planned = link_files(spark, [str(folder)], ROWS, storage=storage, config=config, dry_run=True)
    assert planned.rows == 16_000 and not (tmp_path / "storage").exists()
    link_files(spark, [str(folder)], ROWS, storage=storage, config=config)
    # the same points as those of `ingest`, one for each 4 MiB of text
    assert points_of(storage) == points_of(ingested(folder)) and len(points_of(storage)) == 4
    read, of_text = [], restart.RestartedText.read

    def counted(self, size):
        data = of_text(self, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(restart.RestartedText, "read", counted)
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        (fetched,) = reader.messages("orders", "c3", source=source, max_count=1)
    assert json.loads(fetched.message.text)["n"] == 15_998
    assert 0 < sum(read) <= 4 << 20


def test_a_text_that_is_longer_than_its_bound_has_the_points_of_ingest(tmp_path, config, ingested, monkeypatch):
    for module, name, value in (
        (rows_of_text, "_LEAST_BOUND", 4000), (rows_of_text, "_RATIO", 0), (rows_of_text, "BLOCK_BYTES", 700),
        (restart, "SPACING_BYTES", 1000), (restart, "_EARLY_BYTES", 0),
        (linker, "MOST_POINTS", 3), (linked, "MOST_POINTS", 3),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    pieces = [gzip.compress(lines(n, n + 10)) for n in range(0, 200, 10)]
    (tmp_path / "0.gz").write_bytes(b"".join(pieces))
    expected = points_of(ingested(tmp_path / "0.gz"))
    sent, encode = [], restart.encode_points

    def encoded(points):
        sent.extend((offset, point.position, point.bit) for offset, point in points)
        return encode(points)

    monkeypatch.setattr(restart, "encode_points", encoded)
    index = StorageAddress(f"file://{tmp_path}/storage")
    with listed_files([str(tmp_path / "0.gz")], config) as files, index.open() as opened:
        plan, reader = (
            FilePlan.of(ROWS, Segments(LogState(), opened), files, config),
            LinkedPartsReader(ROWS, config, StorageAddress, False, index),
        )
        scale = WindowScale.of("1d", config, BEGIN_S * 1000)
        census = census_of(reader([[part for part, _ in plan.parts()]], ["topic", "timestamp_ms", HAS_KEY]), scale, 10)
        assert census.entries == 400
        parts = census.parts
    segments = [segment for segment, _ in plan.finished(parts)]
    assert len(segments) == 3 and sum(segment.length for segment in segments) == len(lines(0, 200))
    # the first segment's points are sent by the task, the others' by the driver
    of_tasks = [archived for part in parts for archived, _ in part.sent_points]
    assert len(of_tasks) > 0 and all(archived.end <= segments[0].end for archived in of_tasks)
    sent += [(offset, point.position, point.bit) for _, _, points in plan.points for offset, point in points]

    def before(points, offset):
        return max(point for point in points if point[0] <= offset)[1:]

    # `ingest` repeats the last point at the begin of an object
    offsets = [offset for offset, _, _ in expected + sent]
    assert [before(sent, offset) for offset in offsets] == [before(expected, offset) for offset in offsets]
    assert len({bit for _, _, bit in sent}) == 9


def test_the_parts_of_a_table_sum_up_all_of_its_blocks_as_ingest(tmp_path, config, logs, ingested, monkeypatch):
    monkeypatch.setattr(linked, "_PART_ROWS", 30)
    monkeypatch.setattr(table_rows, "SUM_BYTES", 500)
    table = logs / "5.parquet"
    with listed_files([str(table)], config) as files, StorageAddress(f"file://{tmp_path}/storage").open() as opened:
        plan = FilePlan.of(ROWS, Segments(LogState(), opened), files, config)
    reader, groups = LinkedPartsReader(ROWS, config, StorageAddress, False), [[part] for part, _ in plan.parts()]
    assert len(groups) == 4
    census = census_of(reader(groups, ["topic", "timestamp_ms", HAS_KEY]), WindowScale.of("1d", config, 0), 10)
    ((segment, _),) = plan.finished(census.parts)
    data = table.read_bytes()
    sums = [zlib.crc32(data[at : at + 500]) for at in range(0, len(data), 500)]
    assert (segment.blocks, len(sums) > 4) == ((500, (*sums,)), True)
    assert segments_of(ingested(table))[0]["blocks"] == (500, (*sums,))


@pytest.mark.long
def test_a_topic_may_be_a_field_of_the_rows(spark, storage, config, tmp_path):
    text = "".join(f'{{"kind": "t{n % 3}", "id": {n}, "at": {BEGIN_S + n}}}\n' for n in range(90))
    (tmp_path / "a.ndjson").write_text(text)
    of_field = RowsOfFiles(("id",), "at", None, None, "kind")
    link_files(spark, [str(tmp_path / "a.ndjson")], of_field, storage=storage, config=config)
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        (fetched,) = reader.messages("t2", "50", source=source)
        assert json.loads(fetched.message.text)["id"] == 50 and not reader.query("t1", "50").items
        assert [summary.topic for summary in reader.topics()] == ["t0", "t1", "t2"]


def test_entries_of_a_dataframe_use_no_queue_of_files(spark, storage, config, logs):
    """Nor does a range of a source have the name of their position. Other queues and topics are open."""
    register(spark)
    link_files(spark, [str(logs)], ROWS, storage=storage, config=config)
    number = log_number(storage)
    entry = {"topic": "orders", "key": "17", "offset": 5, "size": 9, "timestamp_ms": BEGIN_S * 1000}
    for queue_id, said in ((0, "has rows of files that this index follows"), (2**31 - 1, "is for rows of files")):
        frame = spark.createDataFrame([entry | {"queue_id": queue_id}])
        with pytest.raises(InvalidArgument, match=f"queue_id {queue_id} .*{said}"):
            build(spark, frame, storage=storage, config=config, mode="append")
        with pytest.raises(InvalidArgument, match=f"queue_id {queue_id} .*{said}"), typed_errors("writing"):
            frame.write.format("tiered_index").mode("append").save(storage)
    with pytest.raises(InvalidArgument, match="positions named files:"):
        SourceRange("files:-/orders/0", 0, 9)
    assert log_number(storage) == number
    build(spark, spark.createDataFrame([entry | {"queue_id": 1}]), storage=storage, config=config, mode="append")
    assert log_number(storage) == number + 1


def log_number(uri):
    with IndexReader.open(uri) as reader:
        return reader.log_state.number


def rows_read(spark, folder):
    return spark.read.parquet(str(folder)).select("order_id", "customer", "at", "n", "_metadata")


def write(frame, uri, files, **more):
    options = {
        "topic": "orders",
        "keys": "order_id, customer.id",
        "time": "at",
        "slots": 64,
        "files": str(files),
        **more,
    }
    with typed_errors("writing"):
        frame.write.format("tiered_index").mode("append").options(**options).save(uri)


def test_a_written_dataframe_of_parquet_rows_is_the_same_as_ingest(spark, storage, tmp_path, ingested):
    register(spark)
    folder = tmp_path / "day=1 a"
    folder.mkdir()
    for number in range(4):
        table = pa.Table.from_pylist([row(n) for n in range(number * 100, number * 100 + 100)])
        pq.write_table(table, folder / f"part {number}.parquet", 30)
    frame = rows_read(spark, folder)
    with pytest.raises(InvalidArgument, match="no time at at"):
        # of one task; the others' rows are not published without it
        write(frame.withColumn("at", F.when(F.col("n") != 17, F.col("at"))).repartition(3), storage, folder)
    assert segments_of(storage) == []
    named = {"keys": "order_id, of=customer.id"}
    write(frame.repartition(3), storage, folder, **named)
    uri = ingested(folder, keys=NAMED_KEYS)
    assert segments_of(storage) == segments_of(uri) and len(segments_of(uri)) == 4
    assert answers_of(storage) == answers_of(uri)
    # a second write adds nothing but new files
    write(frame, storage, folder, **named)
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(400, 430)]), folder / "later.parquet")
    write(rows_read(spark, folder), storage, folder, **named)
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        fetched_rows = reader.messages("orders", "17", source=source, max_count=100)
        assert [json.loads(fetched.message.text)["n"] for fetched in fetched_rows] == [*range(417, 0, -40)]
        assert len(segments_of(storage)) == 5


def test_keys_that_are_times_have_the_zone_of_their_file(spark, storage, tmp_path, ingested):
    """Spark gives all times the zone UTC, and its own files store times of 96 bits without a zone."""
    register(spark)
    folder = tmp_path / "times"
    folder.mkdir()
    for number, zone in enumerate(("Europe/Berlin", "UTC", None, "+02:00")):
        at = pa.array([(BEGIN_S + number) * 10**6], pa.timestamp("us", zone))
        later = pa.array([(BEGIN_S + number + 100) * 10**6], at.type)
        customer = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1], later)], names=["id"])
        table = pa.table({"order_id": at, "customer": customer, "at": [BEGIN_S]})
        pq.write_table(table, folder / f"{number}.parquet", use_deprecated_int96_timestamps=zone is None)
    frame = spark.read.parquet(*(str(folder / f"{number}.parquet") for number in (0, 1, 3)))
    of_spark = spark.read.parquet(str(folder / "2.parquet"))
    for rows_of_files in (frame, of_spark):
        selected = rows_of_files.select("order_id", "customer", "at", "_metadata")
        write(selected, storage, folder / "*.parquet" if rows_of_files is frame else folder / "2.parquet")
    texts = [
        "2023-11-14 23:13:20+01:00",
        "2023-11-14 22:13:21+00:00",
        "2023-11-14 22:13:22",
        "2023-11-15 00:13:23+02:00",
    ]
    for uri in (storage, ingested(folder)):
        with IndexReader.open(uri) as reader, FileRows(reader) as source:
            for number, text in enumerate(texts):
                (fetched,) = reader.messages("orders", text, source=source)
                shown = json.loads(fetched.message.text)
                assert (fetched.message.file[-9], shown["order_id"]) == (str(number), text)
                (again,) = reader.messages("orders", shown["customer"]["id"][0], source=source)
                assert again.message.text == fetched.message.text


@pytest.mark.parametrize("is_written", [False, True], ids=["files", "dataframe"])
def test_times_without_a_zone_are_those_of_ingest(spark, storage, config, tmp_path, ingested, is_written):
    """Also in the hours that clocks show twice or leave out, and if Spark takes the times of a file for UTC."""
    register(spark)
    (folder := tmp_path / "clocks").mkdir()
    clocks = ["2026-10-25T02:30:00", "2026-03-29T02:30:00", "2026-07-01T12:00:00", "2026-01-01T00:00:00"]
    rows = [{**row(n), "at": clock} for n, clock in enumerate(clocks)]
    table = pa.Table.from_pylist(rows)
    at = table.schema.get_field_index("at")
    for name, kind, is_short in (("0", "us", False), ("1", "ns", True)):
        times = table.set_column(at, "at", table["at"].cast(pa.timestamp(kind)))
        pq.write_table(times, folder / f"{name}.parquet", use_deprecated_int96_timestamps=is_short)
    zone = "Europe/Berlin"
    if is_written:
        for name in ("0", "1"):
            write(rows_read(spark, folder / f"{name}.parquet"), storage, folder / f"{name}.parquet", timeZone=zone)
    else:
        (folder / "2.ndjson").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        of_zone = replace(ROWS, zone=zone)
        result = link_files(spark, [str(folder)], of_zone, storage=storage, config=config)
        assert (result.time_zone, result.doubled_times, result.missing_times) == (zone, 3, 3)
        # a later build reads by the same clocks
        (folder / "3.ndjson").write_text(f"{json.dumps({**row(7), 'at': clocks[2]})}\n")
        assert link_files(spark, [str(folder)], ROWS, storage=storage, config=config).time_zone == zone
    uri = ingested(*sorted(folder.iterdir()), keys=(*KEYS, "--time-zone", zone))
    assert answers_of(storage) == answers_of(uri)
    with IndexReader.open(storage) as reader, IndexReader.open(uri) as other:
        assert reader.durable_positions() == other.durable_positions()
        assert [item.timestamp_ms for item in reader.query("orders", "1")] == [1_774_747_800_000] * (3 - is_written)


def test_keys_from_the_folders_of_a_partition_are_as_the_folders_name_them(spark, storage, tmp_path):
    """Spark takes them for numbers and times."""
    register(spark)
    folder = tmp_path / "of-days"
    (part := folder / "shop=007" / "hour=2026-01-02 03%3A00%3A00").mkdir(parents=True)
    pq.write_table(pa.table({"at": [BEGIN_S], "n": [1]}), part / "0.parquet")
    frame = spark.read.parquet(str(folder)).select("shop", "hour", "at", "_metadata")
    write(frame, storage, folder, keys="shop, hour")
    with IndexReader.open(storage) as reader, FileRows(reader) as source:
        for key in ("007", "2026-01-02 03:00:00"):
            (fetched,) = reader.messages("orders", key, source=source)
            assert json.loads(fetched.message.text)["n"] == 1


@pytest.mark.long
def test_a_dataframe_whose_rows_are_not_those_of_the_files_is_refused(spark, storage, tmp_path):
    register(spark)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist([row(n) for n in range(30)]), tmp_path / name / "0.parquet")
    frame = rows_read(spark, tmp_path / "a")
    for written, folder, problem in (
        (frame, "b", r"0\.parquet is not among the option files"),
        (frame.drop("_metadata"), "a", "says no file and row: select the column _metadata"),
        (frame.drop("customer"), "a", r"has no column for --key customer\.id; it has order_id"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            write(written, storage, tmp_path / folder)
    with pytest.raises(InvalidArgument, match="use mode append"):
        with typed_errors("writing"):
            frame.write.format("tiered_index").mode("overwrite").options(files=str(tmp_path / "a")).save(storage)
    assert segments_of(storage) == []


@pytest.mark.long
def test_of_two_builds_at_the_same_time_one_is_published(spark, storage, config, logs, monkeypatch):
    publish = linked.publish_files

    def later(*arguments):
        monkeypatch.setattr(linked, "publish_files", publish)
        link_files(spark, [str(logs / "0.ndjson")], ROWS, storage=storage, config=config)
        return publish(*arguments)

    monkeypatch.setattr(linked, "publish_files", later)
    with pytest.raises(InvalidArgument, match="another run has indexed files of this log meanwhile"):
        link_files(spark, [str(logs)], ROWS, storage=storage, config=config)
    assert len(segments_of(storage)) == 1
    assert link_files(spark, [str(logs)], ROWS, storage=storage, config=config).rows == 600
    with IndexReader.open(storage) as reader:
        assert len(reader.query("orders", "17", max_count=100)) == 18
        named = {*reader.log_state.objects, *reader.log_state.catalogs}
        stored = {info.name for info in reader.storage.list() if info.name.startswith((DATA_PREFIX, CATALOG_PREFIX))}
        assert stored <= named
