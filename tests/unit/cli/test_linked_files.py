"""Files as a log: their rows are indexed where they are, once each however a run ends, and read there again."""

import bz2
import contextlib
import decimal
import gzip
import json
import lzma
import os
import random
import shutil
import uuid
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tests.integration.cli.command_lines import run_here
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, config
from tiered_index.config import IndexConfig
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.follow import PatientPut
from tiered_index.format.columnar import decode_columns
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.sources import linked, restart
from tiered_index.sources.linked import FileLinker
from tiered_index.sources.listing import listed_files
from tiered_index.sources.rows import text as rows_of_text
from tiered_index.sources.rows.mapping import RowMapping
from tiered_index.storage.opening import open_storage

BEGIN_S = 1_700_000_000
KEYS = ("--topic", "orders", "--key", "order_id", "--key", "customer.id", "--time", "at")


def row(number):
    return {"order_id": number % 40, "customer": {"id": f"c{number % 7}"}, "at": BEGIN_S + number, "n": number}


def lines(begin, end):
    return "".join(f"{json.dumps(row(n))}\n" for n in range(begin, end)).encode()


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


@pytest.fixture
def ingest(where):
    """Return a function that ingests sources, and returns the document of the run."""

    def run(*arguments):
        done = run_here("ingest", *arguments, *KEYS, *where, "--slots", 32, "--items", 1000, "--json")
        assert done.code == 0, done.err
        return done.document

    return run


@pytest.fixture
def rows_of(where):
    """Return a function that returns the numbers of the rows of a key that come back, and all that do not."""

    def run(key, topic="orders"):
        done = run_here("query", "--messages", "--all", *where, "--json", "--", topic, key)
        messages = [record for record in done.records if "state" in record]
        texts = [record["message"]["body"] for record in messages if record["message"]]
        numbers = [json.loads(text)["n"] if text.startswith("{") else int(text.split(",")[-1]) for text in texts]
        return sorted(numbers), [record["problem"] for record in messages if record["message"] is None]

    return run


def expected(key, count):
    return [n for n in range(count) if key in (str(n % 40), f"c{n % 7}")]


def test_rows_of_many_forms_come_back_by_their_keys(tmp_path, ingest, rows_of):
    folder = tmp_path / "logs"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "0.ndjson").write_bytes(lines(0, 100))
    (folder / "1.gz").write_bytes(gzip.compress(lines(100, 200)))
    (folder / "a" / "2.bz2").write_bytes(bz2.compress(lines(200, 300)))
    (folder / "a" / "3.xz").write_bytes(lzma.compress(lines(300, 400)))
    (folder / "a" / "4.zst").write_bytes(pa.compress(lines(400, 500), "zstd", asbytes=True))
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(500, 600)]), folder / "a" / "b" / "5.parquet", 30)
    cells = "".join(f'{n % 40},"c{n % 7}",{BEGIN_S + n},{n}\n' for n in range(600, 700))
    (folder / "a" / "b" / "6.csv").write_text("order_id,customer.id,at,n\n" + cells)
    written = pa.Table.from_pylist([row(n) for n in range(700, 800)])
    for name, new in (("7.arrow", pa.ipc.new_file), ("8.arrows", pa.ipc.new_stream)):
        with new(folder / name, written.schema) as writer:
            writer.write_table(written.slice(50 * (name[0] == "8"), 50), 30)
    (folder / "a" / "b" / "9.tsv").write_text("order_id\tcustomer.id\tat\tn\n" + cells.replace(",", "\t"))
    (folder / "_SUCCESS").write_bytes(b"x")
    document = ingest(folder / "**" / "*.[!t]*")
    assert (document["read_files"], document["rows"], document["entries"], document["time_unit"]) == (9, 800, 1600, "s")
    for key in ("0", "17", "c3", "c6"):
        assert rows_of(key) == (expected(key, 800), [])
    again = ingest(folder / "**" / "*.[!t]*")
    assert (again["read_files"], again["known"], again["rows"]) == (0, 9, 0)
    # a folder has all of its files, also those of another run
    assert (ingest(folder)["rows"], ingest(folder)["known"]) == (100, 10)


@pytest.mark.parametrize("archive", [(), ("--archive",)], ids=["linked", "archived"])
def test_the_number_of_a_line_comes_back(tmp_path, monkeypatch, where, ingest, archive):
    """Of a text that has grown, too, and of records of several lines; not of rows with columns."""
    monkeypatch.setattr(rows_of_text, "SUM_BYTES", 500)
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 900)
    log, packed, table = tmp_path / "a.log", tmp_path / "b.gz", tmp_path / "c.csv"
    log.write_bytes(b"\n" + lines(0, 40))
    packed.write_bytes(gzip.compress(b"\n\n" + lines(40, 80)))
    table.write_text(
        "order_id,customer.id,at,text,n\n"
        + "".join(f'{n % 40},c{n % 7},{BEGIN_S + n},"two\nlines",{n}\n' for n in range(80, 120))
    )
    pq.write_table(pa.Table.from_pylist([row(n) for n in range(120, 130)]), tmp_path / "d.parquet")
    ingest(tmp_path / "*.*", *archive)
    log.write_bytes(b"\n" + lines(0, 40) + lines(130, 150))
    ingest(log, *archive)
    first = {n: n + 2 for n in range(40)} | {n: n - 40 + 3 for n in range(40, 80)}
    first |= {n: 2 * (n - 80) + 2 for n in range(80, 120)} | {n: n - 130 + 42 for n in range(130, 150)}
    for key in map(str, range(40)):
        done = run_here("query", "orders", key, "--messages", "--all", *where, "--json")
        for message in [record["message"] for record in done.records if "state" in record]:
            text = message["body"]
            number = json.loads(text)["n"] if text.startswith("{") else int(text.split(",")[-1])
            assert message.get("line") == first.get(number), (number, message)
    assert ["line", str(first[13])] in [
        line.split() for line in run_here("query", "orders", "13", "--messages", *where).out.splitlines()
    ]


def test_new_files_and_new_lines_are_indexed_once(tmp_path, ingest, rows_of):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 120)[: len(lines(0, 50)) + 20])
    document = ingest(log)
    assert (document["rows"], document["held_back"]) == (50, [log.as_uri()])
    log.write_bytes(lines(0, 120))
    assert (ingest(log)["rows"], ingest(log)["rows"]) == (70, 0)
    (tmp_path / "later.log").write_bytes(lines(120, 150))
    assert ingest(tmp_path / "*.log")["rows"] == 30
    assert rows_of("c2") == (expected("c2", 150), [])


def test_a_changed_or_deleted_file_is_named_and_its_bytes_are_never_shown(tmp_path, where, ingest, rows_of):
    log, other = tmp_path / "app.log", tmp_path / "other.log"
    log.write_bytes(lines(0, 50))
    other.write_bytes(lines(50, 60))
    assert ingest(log, other)["rows"] == 60
    # of the same size, with the same keys
    log.write_bytes(lines(0, 50).replace(b'"n": 1', b'"n": 2'))
    other.unlink()
    assert rows_of("23") == ([], [f"{log.as_uri()} has changed since it was indexed"])
    shown = run_here("query", "--messages", *where, "orders", "23").out.splitlines()[0]
    assert shown == f"2023-11-14T22:13:43Z  missing: {log.as_uri()} has changed since it was indexed"
    numbers, [gone, changed] = rows_of("10")
    assert (numbers, changed) == ([], f"{log.as_uri()} has changed since it was indexed")
    assert gone.startswith(f"{other.as_uri()} is gone")
    assert [ingest(log)["changed"] for _ in range(2)] == [[log.as_uri()], []]
    numbers, problems = rows_of("10")
    assert (numbers, len(problems)) == ([20], 2)


def test_a_file_that_another_one_has_replaced_is_told(tmp_path, ingest, rows_of):
    log, new = tmp_path / "app.log", tmp_path / "new"
    log.write_bytes(lines(0, 80))
    ingest(log)
    new.write_bytes(lines(80, 160))
    new.rename(log)
    again = ingest(log)
    assert (again["rows"], again["changed"]) == (80, [log.as_uri()])
    assert ingest(log)["changed"] == []
    numbers, problems = rows_of("5")
    assert numbers == [85, 125] and len(problems) == 2 and "has changed since it was indexed" in problems[0]


def test_a_lost_catalog_of_files_is_named_and_its_offsets_are_never_used_again(tmp_path, where, ingest, rows_of):
    """The files are indexed again behind them; entries from before name the lost catalog."""
    (tmp_path / "a.log").write_bytes(lines(0, 50))
    assert ingest(tmp_path / "a.log")["rows"] == 50
    storage = where[2:]
    with IndexReader.open(storage[1]) as reader:
        (catalog,) = reader.log_state.catalogs
        reader.storage.delete_many([catalog])
    done = run_here("recover", *storage, "--lost", catalog, "--json")
    assert (done.code, done.document["lost_segments"]) == (0, 1), done.err
    numbers, problems = rows_of("10")
    assert numbers == [] and all(f"{catalog}, which listed" in problem for problem in problems)
    assert ingest(tmp_path / "a.log")["rows"] == 50
    assert rows_of("10") == (expected("10", 50), problems)


def members(text):
    """Return gzip of many members."""
    return b"".join(gzip.compress(text[at : at + 900]) for at in range(0, len(text), 900))


def test_offsets_that_another_job_has_given_are_refused(tmp_path, where, ingest):
    """A Spark build may add files while a writer is open: the writer reads the log again, and continues behind."""
    (tmp_path / "a.log").write_bytes(lines(0, 50))
    assert ingest(tmp_path / "a.log")["rows"] == 50
    with IndexService.open(root=where[1], storage=where[3]) as index:
        (known,) = index.segment_archive.segments().linked()
        moved = structs.replace(known, uri=f"{known.uri}.2", start=known.start + 1)
        with pytest.raises(StorageUnavailable, match="another job has added files of the log"):
            index.link([moved])
        assert [*index.segment_archive.segments().linked()] == [known]
        index.link([structs.replace(moved, start=known.end)])
        assert len([*index.segment_archive.segments().linked()]) == 2


class Crash(Exception):
    """The process dies here."""


class Killed:
    """Calls of one process, which dies before call number `left`, and sometimes flushes and uploads after one."""

    def __init__(self, index, moments, left):
        self.index, self.moments, self.left = index, moments, left

    def __call__(self, act):
        def call(*arguments):
            self.left -= 1
            if self.left < 0:
                raise Crash
            result = act(*arguments)
            if self.moments.random() < 0.3:
                self.index.flush()
            if self.moments.random() < 0.05:
                self.index.seal()
                self.index.run_lifecycle()
            return result

        return call


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("form", ["plain", "gzip", "topics", "archive"])
def test_a_run_that_is_killed_anywhere_loses_and_doubles_no_row(tmp_path, monkeypatch, where, rows_of, seed, form):
    moments = random.Random(f"{seed}{form}")
    # small blocks, so that a file takes many puts, and several index files
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    monkeypatch.setattr(rows_of_text, "_LEAST_BOUND", 4000)
    monkeypatch.setattr(rows_of_text, "_RATIO", 0)
    monkeypatch.setattr(linked, "_AT_ONCE", 2)
    # and several objects of the archive
    monkeypatch.setattr(linked, "SEGMENT_BYTES", 3000)
    # and restart points in several objects for each file
    monkeypatch.setattr(restart, "SPACING_BYTES", 2000)
    monkeypatch.setattr(restart, "_EARLY_BYTES", 0)
    monkeypatch.setattr(linked, "MOST_POINTS", 3)
    count, pack = 600, members if form == "gzip" else bytes
    for number in range(4):
        (tmp_path / f"{number}.log").write_bytes(pack(lines(number * 150, (number + 1) * 150)))
    config = IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)
    kills, is_done = 0, False
    while not is_done:
        index = IndexService(config)
        until_killed = Killed(index, moments, moments.randrange(60) if kills < 6 else 10_000)
        index.link = until_killed(index.link)
        index.send_columns, index.name_columns = until_killed(index.send_columns), until_killed(index.name_columns)
        topic, field = (None, "order_id") if form == "topics" else ("orders", None)
        mapping = RowMapping(("order_id", "customer.id"), "at", "s", field)
        linker = FileLinker(index, topic, mapping, PatientPut(index, 10.0), archive=form == "archive")
        linker.patient = until_killed(linker.patient)
        try:
            with listed_files([str(tmp_path / "*.log")], config) as files:
                linker.run(files)
            is_done = True
        except Crash:
            kills += 1
            index.abandon()
        else:
            index.flush()
            names = index.durable_positions()
            queue_id = TOPICS_QUEUE if form == "topics" else 0
            segments = list(index.segment_archive.segments().of_log(linked_store("orders", queue_id)))
            index.close()
    assert kills
    # as many positions as keys and two, whatever the number of files, and one for each topic by a field
    assert len(names) == (44 if form == "topics" else 4)
    assert not any(segment.is_open for segment in segments)
    assert sum(segment.length for segment in segments) == len(lines(0, count))
    if form == "gzip":
        with IndexReader.open(f"file://{tmp_path}/objects") as reader:
            assert any(reader.segments().of("points:-/orders/0"))
    if form == "archive":
        with IndexReader.open(f"file://{tmp_path}/objects") as reader:
            copies = list(reader.segments().of("rows:-/orders/0"))
        assert sum(copy.rows for copy in copies) == count and len(copies) > 4
        for log in tmp_path.glob("*.log"):
            log.unlink()
    for key in ("0", "c6") if form == "topics" else ("0", "13", "39", "c0", "c6"):
        if form != "topics":
            assert rows_of(key) == (expected(key, count), [])
            continue
        # the first key is the topic
        of_topics = [rows_of(key, topic) for topic in map(str, range(40 if key == "c6" else 2))]
        assert sorted(n for numbers, _ in of_topics for n in numbers) == expected(key, count)
        assert not any(problems for _, problems in of_topics)


def test_archived_rows_come_back_without_their_files_until_they_are_erased(tmp_path, where, rows_of):
    folder = tmp_path / "logs"
    written(folder, 0, 120)
    done = run_here("ingest", folder, *KEYS, *where, "--slots", 32, "--items", 1000, "--archive", "--json")
    assert (done.code, done.document["rows"]) == (0, 120), done.err
    # rows of earlier runs stay only in their files
    written(tmp_path / "more", 120, 160)
    assert run_here("ingest", tmp_path / "more", *KEYS, *where, "--json").document["rows"] == 40
    for file in (tmp_path / "logs").iterdir():
        file.unlink()
    numbers = [n for n in range(160) if n % 7 == 3]
    assert rows_of("c3") == (numbers, [])
    shown = run_here("query", "orders", "c3", "--messages", "--all", *where, "--json").records
    states = [record["state"] for record in shown if "state" in record]
    assert states == ["local"] * len([n for n in numbers if n >= 120]) + ["archived"] * len(
        [n for n in numbers if n < 120]
    )
    erased = run_here("erase", "--topic", "orders", "--key", "c3", *where, "--yes", "--now", "--json").document
    assert erased["segments"]["messages_erased"] == len([n for n in numbers if n < 120])
    with IndexReader.open(where[3]) as reader:
        (copy,) = reader.segments().of("rows:-/orders/0")
        texts = decode_columns(reader.segment_archive.verified(copy, 0, copy.size_bytes))["text"].to_pylist()
    assert len(texts) == copy.rows == 120 - len([n for n in numbers if n < 120])
    assert not any(b'"c3"' in text or b",c3," in text for text in texts)
    assert rows_of("c3") == ([], [])
    assert rows_of("c4") == ([n for n in range(160) if n % 7 == 4], [])


def of_index(where, queue_id):
    done = run_here("export", *where, "--format", "ndjson", "--out", "-")
    assert done.code == 0, done.err
    entries = [json.loads(line) for line in done.out.splitlines()]
    # a copy has no carriage return at the end of its line
    packed = [entry | ({"size": 0} if entry["file"].endswith("/0.ndjson") else {}) for entry in entries]
    return sorted(json.dumps(entry) for entry in packed if entry["queue_id"] == queue_id)


@pytest.mark.parametrize("form", ["one topic", "topics"])
def test_an_archive_of_rows_makes_their_index_again(tmp_path, where, form):
    folder, uri = tmp_path / "logs", where[3]
    keys, topic, queue_id = (KEYS, "orders", 0) if form == "one topic" else (BY_FIELD, "order", TOPICS_QUEUE)
    written(folder, 0, 120)
    crlf = folder / "0.ndjson"
    crlf.write_bytes(crlf.read_bytes().replace(b"\n", b"\r\n"))
    more = "--slots", 32, "--items", 1000, "--archive", "--wait", "--json"
    assert run_here("ingest", folder, *keys, *where, *more).document["rows"] == 120
    before = of_index(where[2:], queue_id)
    assert run_here("ingest", f"archive:{uri}", "--dry-run", "--json").document["status"] == "same"
    for file in folder.iterdir():
        shutil.move(file, tmp_path / file.name)
    new = "--root", tmp_path / "new-root", "--storage", f"file://{tmp_path}/new"
    built = run_here("ingest", f"archive:{uri}", *new, "--wait", "--json")
    assert built.code == 0 and built.document["messages"] == 120, built
    assert len(before) == 240 and of_index(new[2:], queue_id) == before
    # later files are read with the same keys and unit of times
    with IndexReader.open(uri) as old, IndexReader.open(new[3]) as made:
        rules = [{name for name in of.log_state.positions if name.startswith("files-")} for of in (old, made)]
    assert rules[0] == rules[1] and len(rules[0]) > 2
    shown = run_here("query", topic, "c4", "--messages", "--all", *new, "--json").records
    bodies = [record["message"]["body"] for record in shown if "state" in record]
    numbers = [n for n in range(120) if n % 7 == 4 and topic in ("orders", kind_of(n))]
    assert len(bodies) == len(numbers) > 4 and all("c4" in body for body in bodies)
    # again, and the files: nothing is new
    again = run_here("ingest", f"archive:{uri}", *new, "--json").document
    assert (again["entries"], again["messages"]) == (0, 0)
    for file in tmp_path.glob("*.*"):
        if file.is_file():
            shutil.move(file, folder / file.name)
    written(tmp_path / "more", 120, 160)
    known = run_here("ingest", folder, tmp_path / "more", *keys, *new, *more).document
    assert (known["known"], known["rows"]) == (4, 40)
    assert run_here("verify", "--deep", *new).code == 0


@pytest.mark.parametrize(
    "calls", [(20, 33, 47), pytest.param(range(1, 80), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_run_over_archived_rows_whose_storage_fails_at_a_call_continues(tmp_path, monkeypatch, where, calls):
    monkeypatch.setattr(linked, "SEGMENT_BYTES", 1000)
    written(tmp_path / "logs", 0, 120)
    more = "--slots", 32, "--items", 1000, "--archive", "--wait"
    assert run_here("ingest", tmp_path / "logs", *KEYS, *where, *more).code == 0
    before, open_storage = of_index(where[2:], 0), config.open_storage
    failed = 0
    for nth in calls:
        new = f"file://{tmp_path}/{nth}/new"

        def mortal(uri, *, new=new, nth=nth, **more):
            storage = FaultStorage(open_storage(uri, **more))
            if uri == new:
                storage.fail("*", nth=nth, times=None)
            return storage

        line = "ingest", f"archive:{where[3]}", "--storage", new, "--root", tmp_path / str(nth) / "root", "--wait"
        with monkeypatch.context() as patched:
            patched.setattr(config, "open_storage", mortal)
            failed += run_here(*line, "--patience", 0).code != 0
        shutil.rmtree(tmp_path / str(nth) / "new" / "lease%", ignore_errors=True)  # as if it had ended
        done = run_here(*line)
        assert done.code == 0, (nth, done.err)
        assert of_index(("--storage", new), 0) == before
        rows = run_here("query", "orders", "c4", "--messages", "--all", "--storage", new, "--json").records
        states = {record["state"] for record in rows if "state" in record}
        assert states == {"archived"} and run_here("verify", "--deep", "--storage", new).code == 0
    assert failed


def test_an_archive_that_lacks_rows_makes_no_short_index_in_silence(tmp_path, where):
    written(tmp_path / "logs", 0, 120)
    written(tmp_path / "more", 120, 160)
    written(tmp_path / "last", 160, 200)
    more = "--slots", 32, "--items", 1000, "--wait"
    for folder, archive in (("logs", ["--archive"]), ("more", []), ("last", ["--archive"])):
        assert run_here("ingest", tmp_path / folder, *KEYS, *where, *more, *archive).code == 0
    new = "--storage", f"file://{tmp_path}/new"
    refused = run_here("ingest", f"archive:{where[3]}", *new, "--json")
    assert refused.code == 2 and "--skip-missing" in refused.error["message"] and "/more/" in refused.error["message"]
    # before anything is written
    assert not (tmp_path / "new").exists()
    done = run_here("ingest", f"archive:{where[3]}", *new, "--skip-missing", "--json").document
    assert done["messages"] == 160 and len(done["skipped"]) == 4
    # the files that were left out are new to the index
    folders = [tmp_path / folder for folder in ("logs", "more", "last")]
    added = run_here("ingest", *folders, *KEYS, *new, "--wait", "--json").document
    assert (added["known"], added["read_files"], added["rows"]) == (8, 4, 40)
    assert len(of_index(new, 0)) == len(of_index(where[2:], 0)) == 400


def test_an_archive_of_some_topics_makes_no_index_without_the_others_in_silence(tmp_path, where):
    more = "--slots", 32, "--items", 1000, "--wait"
    for topic, archive in (("orders", ["--archive"]), ("other", [])):
        written(tmp_path / topic, 0, 40)
        assert run_here("ingest", tmp_path / topic, "--topic", topic, *KEYS[2:], *where, *more, *archive).code == 0
    new, uri = ("--storage", f"file://{tmp_path}/new", "--json"), f"archive:{where[3]}"
    refused = run_here("ingest", uri, *new)
    assert refused.code == 2 and "/other/" in refused.error["message"], refused
    unknown = run_here("ingest", uri, *new, "--topics", "no*")
    assert unknown.code == 2 and "rows:-/orders/0, which are not of --topics no*" in unknown.error["message"]
    assert run_here("ingest", uri, *new, "--topics", "orders").document["messages"] == 40
    skipped = run_here("ingest", uri, *new[2:], "--storage", f"file://{tmp_path}/newer", "--skip-missing").document
    assert (skipped["messages"], len(skipped["skipped"])) == (40, 4)


def test_sources_without_an_archive_are_named_because_they_are_left_out(tmp_path, where):
    written(tmp_path / "logs", 0, 40)
    more = "--slots", 32, "--items", 1000, "--archive", "--wait"
    assert run_here("ingest", tmp_path / "logs", *KEYS, *where, *more).code == 0
    with IndexService.open(root=where[1], storage=where[3]) as index:
        for source in ("kafka:c/left/0", f"kafka:c/left/1@{'a' * 32}", "rocketmq:broker-a"):
            index.put("left", 0, "k", 1, 10, BEGIN_S * 1000, source=source, source_position=2)
        index.seal()
        index.run_lifecycle()
    new = "--storage", f"file://{tmp_path}/new"
    done = run_here("ingest", f"archive:{where[3]}", *new)
    assert done.code == 0 and "no archived message of broker-a, kafka:c/left/0, kafka:c/left/1:" in done.err, done.err
    again = run_here("ingest", f"archive:{new[1]}", "--storage", f"file://{tmp_path}/newer", "--topics", "orders")
    assert again.code == 0 and "left out" not in again.err


@pytest.mark.parametrize("more", [10, 100])
def test_an_index_with_files_of_its_own_takes_no_other_rows_of_an_archive(tmp_path, where, more):
    """Two files would have the same offsets."""
    new = "--root", tmp_path / "new-root", "--storage", f"file://{tmp_path}/new"
    options = "--slots", 32, "--items", 1000, "--archive", "--wait"
    for name, index, count in (("a", where, 40), ("b", new, 40), ("c", where, more)):
        (tmp_path / name).write_bytes(lines(0, count))
        assert run_here("ingest", tmp_path / name, *KEYS, *index, *options).code == 0
        if name == "a":
            assert run_here("ingest", f"archive:{where[3]}", *new, "--wait").code == 0
    refused = run_here("ingest", f"archive:{where[3]}", *new, "--json")
    assert refused.code == 2 and f"{tmp_path}/b" in refused.error["message"], refused
    assert len(of_index(new[2:], 0)) == 160


def test_a_file_that_was_being_read_when_its_archive_was_taken_over_is_continued_once(tmp_path, where, monkeypatch):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 900)
    log, new = tmp_path / "app.log", ("--root", tmp_path / "new-root", "--storage", f"file://{tmp_path}/new")
    options = "--slots", 32, "--items", 1000, "--archive", "--wait"

    def write(count):
        log.write_bytes(lines(0, 40) + b"no row\n" + lines(40, count))

    write(80)
    # it ends at the row that is none
    assert run_here("ingest", log, *KEYS, *where, *options).code == 2
    assert run_here("ingest", f"archive:{where[3]}", *new, "--wait").code == 0
    for count in (80, 120):
        write(count)
        assert run_here("ingest", log, *KEYS, *where, *options, "--skip-bad").code == 0
    assert run_here("ingest", f"archive:{where[3]}", *new, "--wait").code == 0
    write(160)
    added = run_here("ingest", log, *KEYS, *new, *options, "--skip-bad", "--json").document
    assert (added["rows"], len(of_index(new[2:], 0))) == (40, 320)


def test_rows_without_a_key_are_no_gap_of_an_archive_of_rows(tmp_path, where):
    (folder := tmp_path / "logs").mkdir()
    more = "--slots", 32, "--items", 1000, "--archive", "--wait", "--allow-none"
    parts = {"a": lines(0, 20), "b": b'{"at": 1700000000, "n": 1}\n' * 3, "c": lines(20, 40)}
    for name, content in parts.items():
        (folder / f"{name}.ndjson").write_bytes(content)
        assert run_here("ingest", folder, *KEYS, *where, *more).code == 0
    uri = f"file://{tmp_path}/new"
    built = run_here("ingest", f"archive:{where[3]}", "--storage", uri, "--json")
    assert built.code == 0 and built.document["messages"] == 40, built.err
    assert of_index(("--storage", uri), 0) == of_index(where[2:], 0)


def test_an_index_of_an_archive_of_rows_brings_back_nothing_that_was_erased(tmp_path, where):
    written(tmp_path / "logs", 0, 120)
    more = "--slots", 32, "--items", 1000, "--archive", "--wait"
    assert run_here("ingest", tmp_path / "logs", *KEYS, *where, *more).code == 0
    # hidden, but still in the copies
    assert run_here("erase", "--topic", "orders", "--key", "c3", *where, "--yes").code == 0
    uri = f"file://{tmp_path}/new"
    assert run_here("ingest", f"archive:{where[3]}", "--storage", uri).code == 0
    with IndexReader.open(uri) as reader:
        (copy,) = reader.segments().of("rows:-/orders/0")
        keys = decode_columns(reader.segment_archive.verified(copy, 0, copy.size_bytes))["keys"].to_pylist()
    assert len(keys) == copy.rows > 100 and all(of_row != ["c3"] for of_row in keys)
    assert not run_here("query", "orders", "c3", "--storage", uri, "--json").document["items"]


def test_the_archive_has_the_rows_before_one_that_ends_the_run(tmp_path, monkeypatch, where, ingest, rows_of):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 30) + b"{broken\n" + lines(30, 40))
    assert run_here("ingest", log, *KEYS, *where, "--slots", 32, "--items", 1000, "--archive").code == 2
    before = rows_of("c2")
    assert before[1] == [] and 0 < len(before[0]) < len(expected("c2", 30))
    assert ingest(log, "--skip-bad", "--archive")["skipped"] == 1
    log.unlink()
    assert rows_of("c2") == (expected("c2", 40), [])


KINDS = "order", "click", "7"


def events(begin, end):
    return [row(n) | {"of": {"kind": 7 if n % 3 == 2 else KINDS[n % 3]}} for n in range(begin, end)]


def kind_of(number):
    return str(7 if number % 3 == 2 else KINDS[number % 3])


def written(folder, begin, end):
    """Write four files of events of three kinds, each in another form."""
    step = (end - begin) // 4
    a, b, c, d = (events(at, at + step) for at in range(begin, end, step))
    folder.mkdir(exist_ok=True)
    (folder / f"{begin}.ndjson").write_text("".join(f"{json.dumps(event)}\n" for event in a))
    (folder / f"{begin}.gz").write_bytes(gzip.compress("".join(f"{json.dumps(event)}\n" for event in b).encode()))
    pq.write_table(pa.Table.from_pylist([event | {"of": {"kind": str(event["of"]["kind"])}} for event in c]),
                   folder / f"{begin}.parquet", 10)  # fmt: skip
    cells = "".join(f"{o['order_id']},{o['customer']['id']},{o['at']},{o['of']['kind']},{o['n']}\n" for o in d)
    (folder / f"{begin}.csv").write_text("order_id,customer.id,at,of.kind,n\n" + cells)


BY_FIELD = ("--topic", "field:of.kind", *KEYS[2:])


def test_the_topic_of_a_row_may_be_one_of_its_fields(tmp_path, where, rows_of):
    """A file is indexed once for all topics of its rows. Changed files, erasures and pages name it as always."""
    folder = tmp_path / "logs"
    written(folder, 0, 120)
    done = run_here("ingest", folder, *BY_FIELD, *where, "--slots", 32, "--items", 1000, "--json")
    assert (done.code, done.document["rows"], done.document["entries"]) == (0, 120, 240), done.err
    again = run_here("ingest", folder, *BY_FIELD, *where, "--json").document
    assert (again["rows"], again["known"]) == (0, 4)
    written(folder, 120, 240)
    assert run_here("ingest", folder, *BY_FIELD, *where, "--json").document["rows"] == 120
    for number, kind in enumerate(KINDS):
        assert rows_of("c3", kind) == ([n for n in range(240) if n % 7 == 3 and n % 3 == number], [])
    shown = run_here("query", "click", "c3", *where)
    assert "logs/0.ndjson" in shown.out and "2147483647" not in shown.out
    # a file of one topic, too: other offsets, which do not hide those
    (tmp_path / "more.log").write_bytes(lines(500, 507))
    assert run_here("ingest", tmp_path / "more.log", *where, "--topic", "click", *KEYS[2:], "--json").code == 0
    assert rows_of("c3", "click")[0][-1] in range(500, 507)
    for changed in folder.glob("*.ndjson"):
        changed.write_bytes(changed.read_bytes().replace(b'"n": ', b'"n":  '))
    numbers, problems = rows_of("c3", "7")
    mine = [n for n in range(240) if n % 7 == 3 and n % 3 == 2]
    assert numbers == [n for n in mine if n % 120 >= 30] and len(problems) == len(mine) - len(numbers) > 0
    assert {*problems} == {f"{file.as_uri()} has changed since it was indexed" for file in folder.glob("*.ndjson")}
    erased = run_here("erase", "--topic", "7", "--key", "c3", *where, "--yes", "--json")
    assert erased.document["segments"]["linked_remaining"], erased.err
    assert rows_of("c3", "7") == ([], []) != rows_of("c3", "order")


@pytest.mark.parametrize("form", ["ndjson", "parquet"])
def test_a_row_has_no_key_twice_and_one_without_a_key_leaves_the_topics_of_others(tmp_path, where, rows_of, form):
    keys_by_topic = [("t0", "x", "x"), ("t1", None, None), ("t1", "y", None), ("t0", "x", "y")]
    documents = [
        {"kind": topic, "a": a, "b": b, "at": BEGIN_S + n, "n": n} for n, (topic, a, b) in enumerate(keys_by_topic)
    ]
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(documents), path)
    else:
        path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    fields = "--topic", "field:kind", "--key", "a", "--key", "b", "--time", "at"
    done = run_here("ingest", path, *fields, *where, "--json")
    counts = {name: done.document[name] for name in ("rows", "entries", "keyless")}
    assert counts == {"rows": 4, "entries": 4, "keyless": 1}, done.err
    numbers = {(topic, key): rows_of(key, topic) for topic in ("t0", "t1") for key in "xy"}
    assert numbers == {
        ("t0", "x"): ([0, 3], []), ("t0", "y"): ([3], []), ("t1", "x"): ([], []), ("t1", "y"): ([2], [])
    }  # fmt: skip


def test_a_row_without_a_topic_is_bad_and_a_field_of_many_values_is_no_topic(tmp_path, where):
    documents = events(0, 4)
    documents[2]["of"] = {"kind": None}
    documents[3]["of"] = {"kind": ["a", "b"]}
    (tmp_path / "a.log").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    done = run_here("ingest", tmp_path / "a.log", *BY_FIELD, *where, "--json")
    assert done.code == 2 and "a.log, line 3 (byte" in done.error["message"]
    assert "no topic at of.kind" in done.error["message"]
    skipped = run_here("ingest", tmp_path / "a.log", *BY_FIELD, *where, "--skip-bad", "--json").document
    assert (skipped["rows"], skipped["skipped"]) == (2, 2)
    lacking = run_here("ingest", tmp_path / "a.log", "--topic", "field:kind", *KEYS[2:], *where, "--json")
    assert "has --topic field:kind; the first one has order_id" in lacking.error["message"]
    (tmp_path / "b.log").write_bytes(lines(0, 1_001))
    many = run_here("ingest", tmp_path / "b.log", "--topic", "field:n", *KEYS[2:], *where, "--json")
    assert many.code == 2 and "n has more than 1,000 values" in many.error["message"]


def test_a_dry_run_and_wrong_fields_leave_no_index(tmp_path, where):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 9))
    shown = run_here("ingest", log, *KEYS, *where, "--dry-run", "--json").document
    assert (shown["entries"][0]["timestamp_ms"], shown["format"], shown["time_unit"]) == (BEGIN_S * 1000, "ndjson", "s")
    assert (shown["entries"][0]["file"], shown["entries"][2]["row"]) == (log.as_uri(), len(lines(0, 1)))
    *_, last, _, _ = run_here("ingest", log, *KEYS, *where, "--dry-run").out.splitlines()
    assert last.split()[-3:] == [log.as_uri(), "byte", f"{len(lines(0, 4))}"]
    (tmp_path / "bad.csv").write_text("k,at\na,01/02/2024\nb,2024-02-03\n")
    fields = ("--topic", "t", "--key", "k", "--time", "at")
    shown = run_here("ingest", tmp_path / "bad.csv", *fields, *where, "--dry-run", "--json").document
    problem = f"file://{tmp_path}/bad.csv, line 2 (byte 5): at is neither a number nor an ISO 8601 time"
    assert [entry["key"] for entry in shown["entries"]] == ["b"] and shown["bad"][0].startswith(problem)
    (tmp_path / "bad.csv").write_text("k,at\na,01/02/2024\n,2024-02-03\n")
    bad = run_here("ingest", tmp_path / "bad.csv", *fields, *where, "--dry-run")
    assert bad.code == 1 and f"nothing was indexed: each row at the beginning of {tmp_path.as_uri()}/bad.csv" in bad.err
    for options, missing in {("--time", "at"): "--topic, --key are", ("--topic", "t"): "--key, --time are"}.items():
        done = run_here("ingest", log, *options, *where, "--json")
        told = done.error["message"]
        assert done.code == 2 and told.startswith(f"{missing} missing: ")
        assert told.endswith(f"; the first row of {log.as_uri()} has order_id, customer, at, n")
    plain = run_here("ingest", log, *where, "--json")
    assert plain.code == 2 and plain.error["message"].endswith("pass --topic, --key and --time")
    stdin = run_here("ingest", "-", *KEYS, *where, "--json")
    assert stdin.code == 2 and "rows of stdin can't be read again" in stdin.error["message"]
    (tmp_path / "empty.log").touch()
    empty = run_here("ingest", tmp_path / "empty.log", *KEYS, *where, "--json")
    assert empty.code == 2 and "empty.log: no file that has data" in empty.error["message"]
    wrong = ("--topic", "t", "--key", "order", "--key", "n", "--time", "customer.at")
    done = run_here("ingest", log, *wrong, *where, "--json")
    said = "has --key order, --time customer.at; the first one has order_id, customer, at, n"
    assert done.code == 2 and done.error["message"].endswith(said)
    assert not (tmp_path / "root").exists()
    short = run_here("ingest", log, "--topic", "t", "--key", "order_id", "--time", "n", *where, "--json")
    assert short.code == 2 and "--time-unit" in short.error["message"]


@pytest.mark.parametrize("form", ["ndjson", "csv", "parquet", "arrow"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_folders_of_a_partition_are_fields(tmp_path, monkeypatch, s3_environment, where, rows_of, form, is_stored):
    """As Hive and Spark write them. A field of the row goes first."""
    files = tmp_path / "logs"
    for day in (2, 3):
        folder = files / f"kind=clicks/dt=2026-01-0{day}/region=eu%2Fwest/shop=__HIVE_DEFAULT_PARTITION__"
        folder.mkdir(parents=True)
        table = pa.table({"id": ["a", "b"], "kind": ["sales", "sales"], "n": [day * 10, day * 10 + 1]})
        if form == "ndjson":
            text = "".join(f"{json.dumps(each)}\n" for each in table.to_pylist())
            (folder / "part").write_text(text.replace(', "n": 21', ', "dt": null, "n": 21'))
        elif form == "csv":
            cells = "".join(f"{each['id']},{each['kind']},{each['n']}\n" for each in table.to_pylist())
            (folder / "part").write_bytes(gzip.compress(f"id,kind,n\n{cells}".encode()))
        elif form == "parquet":
            pq.write_table(table, folder / "part")
        else:
            with pa.ipc.new_file(folder / "part", table.schema) as writer:
                writer.write_table(table)
    source = f"{files}"
    if is_stored:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint_url)
        of_server = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        monkeypatch.setitem(run_here.__kwdefaults__, "environment", of_server)
        source = f"s3://{s3_environment.new_bucket()}/logs"
        with open_storage(source, any_names=True) as storage:
            for path in files.rglob("part"):
                storage.put(path.relative_to(files).as_posix(), path.read_bytes())
    keys = [part for key in ("id", "dt", "join('/', [dt, id])", "region") for part in ("--key", key)]
    fields = ("--topic", "field:kind", *keys, "--time", "dt")
    done = run_here("ingest", f"{source}/", *fields, *where, "--json")
    assert (done.code, done.document["rows"], done.document["entries"]) == (0, 4, 16), done.err
    assert rows_of("2026-01-02", "sales") == ([20, 21], [])
    assert rows_of("2026-01-03/b", "sales") == ([31], [])
    assert rows_of("eu/west", "sales") == ([20, 21, 30, 31], [])
    items = run_here("query", "sales", "2026-01-03", *where, "--json").document["items"]
    assert {item["timestamp_ms"] for item in items} == {1767398400000}
    lacking = run_here("ingest", f"{source}/", "--topic", "t", "--key", "shop", "--time", "dt", *where, "--json")
    assert "has --key shop; the first one has id, kind, n, dt, region" in lacking.error["message"]


def test_the_unit_of_times_is_decided_once_for_all_runs_unless_it_is_given(tmp_path, where):
    def run(number, time, *unit):
        (tmp_path / f"{number}.csv").write_text(f"k,at\na,{time}\n")
        fields = ("--topic", "t", "--key", "k", "--time", "at", *unit)
        return run_here("ingest", tmp_path / f"{number}.csv", *fields, *where, "--json")

    assert "times are numbers of ms, by the first one" in run(0, BEGIN_S * 1000).err
    for number, unit, other in ((1, "ms", "s"), (5, "s", "ms")):
        wrong = run(number, BEGIN_S * {"s": 1, "ms": 1000}[other])
        assert f"seems to be in {other}, but the first one was in {unit}: give --time-unit" in wrong.err
        (tmp_path / f"{number}.csv").unlink()
        again = run(number + 1, BEGIN_S * {"s": 1, "ms": 1000}[unit] + 1)
        assert f"times are numbers of {unit}, as in an earlier run; --time-unit sets another unit" in again.err
        told = run(number + 2, BEGIN_S * {"s": 1, "ms": 1000}[other] + 2, "--time-unit", other)
        assert f"numbers of {other} from now on. Earlier rows keep theirs, read in {unit}" in told.err
    items = run_here("query", "t", "a", *where, "--json").document["items"]
    assert {item["timestamp_ms"] for item in items} <= {BEGIN_S * 1000, BEGIN_S * 1000 + 1000, BEGIN_S * 1000 + 2000}
    assert len(items) == 5
    # times of another field have a unit of their own
    (tmp_path / "9.csv").write_text(f"k,made\na,{BEGIN_S}\n")
    other = run_here("ingest", tmp_path / "9.csv", "--topic", "t", "--key", "k", "--time", "made", *where, "--json")
    assert "times are numbers of s, by the first one" in other.err


COLUMNS_OF_ROW = {
    "s": (BEGIN_S, pa.timestamp("s"), "2023-11-14 22:13:20"),
    "ms": (BEGIN_S * 1000, pa.timestamp("ms"), "2023-11-14 22:13:20"),
    "us": (BEGIN_S * 10**6 + 1, pa.timestamp("us", "UTC"), "2023-11-14 22:13:20.000001+00:00"),
    "ns": (BEGIN_S * 10**9 + 1, pa.timestamp("ns"), "2023-11-14 22:13:20.000000001"),
    "far": (2**62, pa.timestamp("us"), "<value out of range: 4611686018427387904>"),
    "day": (19_675, pa.date32(), "2023-11-14"),
    "noon": (43_200 * 10**9 + 1, pa.time64("ns"), "12:00:00.000000001"),
    "took": (1500, pa.duration("ms"), 1500),
    "cost": (decimal.Decimal("12.50"), pa.decimal128(6, 2), "12.50"),
    "inner": ([{"at": BEGIN_S * 10**9 + 2}], pa.list_(pa.struct({"at": pa.timestamp("ns")})),
              [{"at": "2023-11-14 22:13:20.000000002"}]),
}  # fmt: skip


in_place_or_archived = pytest.mark.parametrize("archive", [(), ("--archive",)], ids=["linked", "archived"])


def ingested(where, path, *more, keys=("k",), time="at"):
    """Ingest a file under topic t, and return the document of the run."""
    options = [part for key in keys for part in ("--key", key)]
    done = run_here("ingest", path, "--topic", "t", *options, "--time", time, *where, "--wait", *more, "--json")
    assert done.code == 0, done.err
    return done.document


def bodies(where, key, form="json"):
    """Return the bodies of the messages of topic t with a key."""
    done = run_here("query", "t", key, "--messages", *where, "--body", form, "--json")
    return [message["message"]["body"] for message in done.document["messages"]]


@in_place_or_archived
def test_rows_with_columns_of_any_type_come_back_as_json(tmp_path, where, archive):
    """Times and decimal numbers are texts, also those that Python has no value for."""
    columns = {name: pa.array([value], kind) for name, (value, kind, _) in COLUMNS_OF_ROW.items()}
    pq.write_table(pa.table({"k": ["a"], **columns}), path := tmp_path / "a.parquet", store_schema=True)
    ingested(where, path, *archive, keys=("k", "s", "ns", "day", "cost"), time="ns")
    if archive:
        path.unlink()
    expected = {"k": "a"} | {name: shown for name, (_, _, shown) in COLUMNS_OF_ROW.items()}
    for key in ("a", "2023-11-14 22:13:20", "2023-11-14 22:13:20.000000001", "2023-11-14", "12.50"):
        (body,) = bodies(where, key)
        assert body | {"s": body["s"][:19]} == expected


@in_place_or_archived
def test_rows_of_arrow_with_intervals_and_runs_come_back(tmp_path, where, archive):
    table = pa.table(
        {
            "k": pa.array(["a", "b"]),
            "at": pa.array(["2024-02-03", "2024-02-04"]),
            "every": pa.array([pa.MonthDayNano([1, 2, 3])] * 2),
            "state": pc.run_end_encode(pa.array(["open", "open"])),
        }
    )
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    ingested(where, path, *archive)
    assert bodies(where, "b") == [{"k": "b", "at": "2024-02-04", "every": [1, 2, 3], "state": "open"}]


@in_place_or_archived
@pytest.mark.parametrize(
    "lines",
    [
        ['{"k": "a", "at": "2024-02-03"}', '{"k": "b", "at": "2024-02-03"}'],
        ["k;at", '"a";"2024-02-03"', '"b";"2024-02-03"'],
    ],
)
def test_a_row_comes_back_without_a_byte_order_mark_and_the_end_of_its_line(tmp_path, where, lines, archive):
    (path := tmp_path / "a.log").write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode())
    ingested(where, path, *archive)
    assert [bodies(where, key, "text") for key in "ab"] == [[line] for line in lines[-2:]]


def test_a_row_of_columns_with_the_same_name_has_all_of_them(tmp_path, where):
    table = pa.table([["a"], ["2024-02-03"], [1], [2], [3], [4]], ["k", "at", "n", "n", "n_1", "n"])
    pq.write_table(table, path := tmp_path / "a.parquet")
    ingested(where, path)
    assert bodies(where, "a") == [{"k": "a", "at": "2024-02-03", "n": 1, "n_2": 2, "n_1": 3, "n_3": 4}]


def test_keys_are_the_texts_of_numbers_booleans_lists_and_uuids(tmp_path, where, rows_of):
    """Some writers of Parquet don't say that a column of bytes is text: sixteen bytes of text are no UUID."""
    documents = ['{"k":-0,"n":0}', '{"k":[1.50,true,"x"],"n":1}', '{"k":12345678901234567890123,"n":2}', '{"n":3}']
    rows_written = (f'{document[:-1]},"at":"2024-02-03T04:05:06Z"}}\n' for document in documents)
    (tmp_path / "a.log").write_text("".join(rows_written))
    named = uuid.UUID("6f726465-722d-3000-b030-303030303437")
    keys = pa.array([b"order-0000000047", named.bytes, b"order-47"], pa.binary())
    at = pa.array([BEGIN_S * 10**6] * 3, pa.timestamp("us"))
    pq.write_table(pa.table({"k": keys, "at": at, "n": [4, 5, 6]}), tmp_path / "b.log")
    fixed = pa.table({"k": keys[1:2].cast(pa.binary(16)), "at": at[:1], "n": [7]})
    pq.write_table(fixed, tmp_path / "c.log")
    document = ingested(where, tmp_path / "*.log")
    assert (document["rows"], document["keyless"]) == (8, 1)
    texts = {"-0": [0], "1.50": [1], "true": [1], "x": [1], "12345678901234567890123": [2]}
    texts |= {"order-0000000047": [4], str(named): [5, 7], "order-47": [6]}
    assert {key: rows_of(key, "t") for key in texts} == {key: (numbers, []) for key, numbers in texts.items()}


def test_a_field_is_named_as_it_is_written_also_with_blanks(tmp_path, where, rows_of):
    names, of_parquet = ["Order ID", "time-stamp", "n"], tmp_path / "b.log"
    (tmp_path / "a.log").write_text(f"{','.join(names)}\na,2024-02-03,0\n")
    pq.write_table(pa.table([["a"], ["2024-02-03"], [1]], names), of_parquet)
    (tmp_path / "c.log").write_text(json.dumps(dict(zip(names, ["a", "2024-02-03", 2], strict=True))) + "\n")
    fields = ("--key", names[0], "--time", names[1])
    done = run_here("ingest", tmp_path / "*.log", "--topic", "t", *fields, *where, "--wait")
    assert done.code == 0, done.err
    assert rows_of("a", "t") == ([0, 1, 2], [])
    wrong = run_here("ingest", of_parquet, "--topic", "t", "--key", "No. 1", "--time", "n", *where, "--json")
    assert "is written in quotes" in wrong.error["message"]


@pytest.mark.parametrize("field", ["k", "k || n"])
def test_a_key_of_columns_with_the_same_name_is_refused_by_the_name_of_the_file(tmp_path, where, field):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([["a"], ["b"], ["2024-02-03"], [1]], ["k", "k", "at", "n"]), path)
    done = run_here("ingest", path, "--topic", "t", "--key", field, "--time", "at", *where, "--json")
    assert done.code == 2, done.err
    assert done.error["message"].startswith(f"{path} has 2 columns with the name k: ")


def test_files_without_a_row_beside_others_change_nothing(tmp_path, where, ingest, rows_of):
    folder = tmp_path / "logs"
    folder.mkdir()
    for number, data in enumerate((b"", b"\n\n", gzip.compress(b""), lzma.compress(b"\n"), b"\xef\xbb\xbf")):
        (folder / f"{number}.log").write_bytes(data)
    only_empty = run_here("ingest", folder, *KEYS, *where, "--dry-run", "--json")
    assert only_empty.code == 2 and only_empty.error["message"].endswith("1.log: no file has a row")
    (folder / "9.log").write_bytes(lines(0, 40))
    shown = run_here("ingest", folder, *KEYS, *where, "--dry-run", "--json").document
    assert shown["format"] == "ndjson" and shown["entries"][0]["file"].endswith("9.log")
    # as a shell expands a glob: each file by its name
    assert ingest(*sorted(folder.iterdir()))["rows"] == 40
    # the first row decides the form
    (folder / "4.log").write_bytes(b"\xef\xbb\xbforder_id,customer.id,at,n\n" + f"7,c7,{BEGIN_S},70\n".encode())
    assert [ingest(folder)["rows"] for _ in range(2)] == [1, 0]
    assert rows_of("c7") == ([70], []) and rows_of("c3")[0] == expected("c3", 40)


def test_a_first_file_that_has_only_a_header_lacks_no_field(tmp_path, where, ingest):
    (tmp_path / "a.csv").write_text("order_id,customer.id,at\n")
    assert ingest(tmp_path / "a.csv")["rows"] == 0
    (tmp_path / "b.csv").write_text("order_id,at\n")
    done = run_here("ingest", tmp_path / "b.csv", *KEYS, *where, "--json")
    assert "has --key customer.id; " in done.error["message"]


@pytest.mark.parametrize("kind", ["ndjson", "parquet"])
@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("customer", "--key customer is an object, which is no key: name a field of it, such as --key customer.id"),
        ("parts", "--key parts is a list of objects, which is no key: name a field of it, such as --key parts[].sku"),
    ],
)
def test_a_key_that_is_an_object_is_refused_with_a_field_of_it(tmp_path, where, kind, field, problem):
    rows, path = [row(n) | {"parts": [{"sku": f"s{n}"}]} for n in range(5)], tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    done = run_here("ingest", path, *KEYS, "--key", field, *where, "--json")
    assert done.code == 2 and problem in done.error["message"]


def test_a_key_that_is_a_map_is_refused(tmp_path, where):
    path = tmp_path / "a.parquet"
    marks = pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table({"k": ["x"], "at": [BEGIN_S], "marks": marks}), path)
    fields = ("--topic", "t", "--key", "k", "--key", "marks", "--time", "at")
    done = run_here("ingest", path, *fields, *where, "--json")
    assert done.code == 2 and "--key marks is a map, which is no key" in done.error["message"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_lists_and_other_jmespaths_are_read_from_columns(tmp_path, where, rows_of, kind):
    """As from NDJSON: elements of lists, functions, and a time in a structure of a list."""
    rows = [
        {
            "items": [{"sku": f"s{n % 3}", "at": BEGIN_S + n}, {"sku": f"x{n % 5}", "at": 0}],
            "user": {"id": n % 4},
            "n": n,
        }
        for n in range(40)
    ]
    rows[7]["items"] = None
    log, keys = tmp_path / f"a.{kind}", ("items[].sku", "join('-', ['u', to_string(user.id)])", "n")
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), log, 7)
    else:
        with pa.ipc.new_file(log, pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows), 7)
    options = [option for key in keys for option in ("--key", key)]
    of_rows = ("--topic", "orders", *options, "--time", "items[0].at", "--skip-bad", *where, "--json")
    done = run_here("ingest", log, *of_rows)
    assert (done.code, done.document["rows"], done.document["skipped"]) == (0, 39, 1), done.err
    assert done.document["skipped_first"][0] == {"where": f"{log.as_uri()}, row 8", "problem": "no time at items[0].at"}
    others = [n for n in range(40) if n != 7]
    assert rows_of("s1") == ([n for n in others if n % 3 == 1], [])
    assert rows_of("x2") == ([n for n in others if n % 5 == 2], [])
    assert rows_of("u-3") == ([n for n in others if n % 4 == 3], [])
    lacking = run_here("ingest", log, "--topic", "t", "--key", "goods[].sku", "--time", "n", *where, "--json")
    assert lacking.code == 2 and "has --key goods[].sku; the first one has items, user, n" in lacking.error["message"]


def test_a_bad_row_is_named_and_skipped_only_on_demand(tmp_path, where, ingest):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 3) + b"{broken\n" + lines(3, 5) + b'{"order_id": 1, "at": "yesterday"}\n')
    refused = run_here("ingest", log, *KEYS, *where, "--slots", 32, "--items", 1000, "--json")
    assert refused.code == 2
    assert f"byte {len(lines(0, 3))}" in refused.error["message"] and "app.log" in refused.error["message"]
    document = ingest(log, "--skip-bad")
    assert (document["rows"], document["skipped"]) == (5, 2)
    assert "yesterday" in document["skipped_first"][1]["problem"]


def test_a_topic_with_other_entries_is_refused_because_offsets_would_hide_one_another(tmp_path, where):
    with IndexService.open(root=where[1], storage=where[3]) as index:
        index.put("orders", 0, "k", 5, 1, BEGIN_S * 1000)
    (tmp_path / "app.log").write_bytes(lines(0, 3))
    done = run_here("ingest", tmp_path / "app.log", *KEYS, *where, "--json")
    assert (done.code, done.error["type"]) == (2, "InvalidArgument")
    assert "choose another --topic" in done.error["message"]


def test_messages_of_a_topic_with_rows_are_refused_because_they_would_be_shown_as_rows(tmp_path, where, ingest):
    (tmp_path / "app.log").write_bytes(lines(0, 3))
    ingest(tmp_path / "app.log")
    message = {"topic": "orders", "queue_id": 0, "key": "k", "offset": 0, "size": 1, "timestamp_ms": BEGIN_S * 1000}
    (tmp_path / "messages.ndjson").write_text(json.dumps(message) + "\n")
    done = run_here("ingest", tmp_path / "messages.ndjson", *where, "--json")
    assert done.code == 2 and "topic 'orders' has rows of files" in done.error["message"]
    record = ("message", "kafka:orders/0/0", "--kafka", "bootstrap.servers=127.0.0.1:1", *where)
    assert "its entries are of another kind of source" in run_here(*record).err


def test_without_a_root_the_index_has_a_folder_of_the_state_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "app.log").write_bytes(lines(0, 9))
    arguments = (tmp_path / "app.log", *KEYS, "--storage", f"file://{tmp_path}/objects")
    done = run_here("ingest", *arguments)
    [root] = (tmp_path / "state" / "tiered-index").iterdir()
    assert f"--root is {root}" in done.err
    # all of it is uploaded, because a reader of the storage does not know that root
    answer = run_here("query", "orders", "7", "--messages", "--storage", f"file://{tmp_path}/objects", "--json")
    assert answer.document["messages"] and all(each["message"] for each in answer.document["messages"])
    assert "1 known" in run_here("ingest", *arguments).out
    # the storage was deleted by hand
    shutil.rmtree(tmp_path / "objects")
    done = run_here("ingest", *arguments, "--json")
    assert done.code == 2 and f"delete {root}, too, and run the command again" in done.error["message"], done.err
    shutil.rmtree(root)
    assert run_here("ingest", *arguments, "--json").document["rows"] == 9


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [(b'[{"order_id": 1}]', 2, "jq -c '.[]'"), (b"ARROW1\0\0" * 9, 4, "Arrow")],
    ids=["JSON array", "damaged Arrow file"],
)
def test_a_file_that_is_no_text_is_not_taken_for_a_line_that_is_not_written_yet(tmp_path, where, text, code, problem):
    (tmp_path / "a.json").write_bytes(lines(0, 9))
    (tmp_path / "b.json").write_bytes(text)
    done = run_here("ingest", tmp_path / "a.json", tmp_path / "b.json", *KEYS, *where, "--json")
    assert done.code == code and "b.json" in done.error["message"] and problem in done.error["message"]


def test_a_name_that_is_not_utf_8_is_refused_by_its_name(tmp_path, where):
    folder = tmp_path / "logs"
    folder.mkdir()
    with open(os.path.join(os.fsencode(folder), b"caf\xe9.log"), "wb") as log:  # noqa: PTH118
        log.write(lines(0, 3))
    for source in (folder, folder / "*.log"):
        done = run_here("ingest", source, *KEYS, *where, "--json")
        assert (done.code, done.error["type"]) == (2, "InvalidArgument")
        assert "caf" in done.error["message"] and "the name is not UTF-8" in done.error["message"]
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("source", ["", "*/*/1.ndjson", "**/*.ndjson", "b/**", "b/*/1.ndjson"])
def test_a_folder_that_cannot_be_read_is_refused_if_it_may_have_files(tmp_path, monkeypatch, source):
    for folder in ("a/1", "b/_day=1", "b/secret"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.ndjson").write_bytes(lines(0, 1))
    config, denied, scanned = IndexConfig(storage="memory://"), str(tmp_path / "b/secret"), os.scandir

    def listed(text):
        with listed_files([str(tmp_path / text)], config) as files:
            return len(files)

    before = listed(source)
    monkeypatch.setattr(os, "scandir", lambda at: denied_to(at) if str(at) == denied else scanned(at))
    assert (before, listed("a/*/*.ndjson"), listed("*/_*/1.ndjson")) == (2 if source.startswith("b") else 3, 1, 1)
    with pytest.raises(InvalidArgument, match="secret: Permission denied"):
        listed(source)


def denied_to(place):
    raise PermissionError(13, "Permission denied", str(place))


def test_prefixes_folders_and_globs_of_a_bucket_name_its_files(tmp_path, monkeypatch, s3_environment, ingest, rows_of):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint_url)
    of_server = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    monkeypatch.setitem(run_here.__kwdefaults__, "environment", of_server)
    uri = f"s3://{s3_environment.new_bucket()}/logs"
    config = IndexConfig(storage=f"file://{tmp_path}/objects")
    files = {"a/1.ndjson": (0, 30), "a/b/2 t%3A.ndjson.gz": (30, 60), "a/b/3.json": (60, 61), "ab/4.ndjson": (61, 62)}
    with contextlib.closing(config.open_storage(uri, any_names=True)) as storage:
        for name, numbers in files.items():
            storage.put(name, gzip.compress(lines(*numbers)) if name.endswith("gz") else lines(*numbers))
        storage.put("a/empty", b"")
        storage.put("a/_SUCCESS", b"x")

    def listed(*sources):
        with listed_files(sources, config) as listing:
            return [unquote(file.uri).removeprefix(f"{uri}/") for file in listing]

    first, second, third, fourth = files
    assert listed(f"{uri}/{first}") == [first]
    assert listed(f"{uri}/a/") == listed(f"{uri}/a") == [first, second, third]
    assert listed(f"{uri}/a/**/*.ndjson*") == listed(f"{uri}/a/*.ndjson", f"{uri}/a/b/2*") == [first, second]
    assert listed(f"{uri}/a*/*.ndjson") == [first, fourth]
    with pytest.raises(InvalidArgument, match="no file"):
        listed(f"{uri}/c/*")
    assert ingest(f"{uri}/a/**/*.ndjson*")["rows"] == 60
    assert ingest(f"{uri}/a*/**")["rows"] == 2
    assert rows_of("c4") == (expected("c4", 62), [])


def test_folders_in_a_table_of_a_bucket_are_refused(tmp_path, monkeypatch, s3_environment):
    """A partition's folder has rows that the table has deleted, which an index would bring back."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.endpoint_url)
    of_server = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    uri = f"s3://{s3_environment.new_bucket()}"
    storage = IndexConfig(storage="memory://").open_storage(uri, any_names=True)
    log, index = lines(0, 10), ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects")
    with contextlib.closing(storage):
        tables = {"delta": "_delta_log/0.json", "hudi": ".hoodie/x", "ice berg": "metadata/1.metadata.json"}
        for name, metadata in tables.items():
            storage.put(f"logs/{name}/data/day=1/1.ndjson", log)
            storage.put(f"logs/{name}/{metadata}", b"{}")
        storage.put("logs/plain tables/metadata/1.ndjson", log)
    for name in ("delta", "hudi", "ice%20berg"):
        for place in ("data", "data/day=1/", "data/day=1/1.ndjson", "data/day=*/*.ndjson", "d*/**"):
            source = f"{uri}/logs/{name}/{place}"
            done = run_here("ingest", source, *KEYS, *index, environment=of_server)
            assert done.code == 2 and "is a table (" in done.err and unquote(name) in done.err, (place, done.err)
    assert not (tmp_path / "root").exists()
    plain = run_here("ingest", f"{uri}/logs/plain t*/**", *KEYS, *index, "--json", environment=of_server)
    assert (plain.code, plain.document["rows"]) == (0, 10), plain.err


@pytest.mark.parametrize(
    ("mark", "quote", "options"),
    [("^", "'", ("--delimiter", "^", "--quote", "'")), ("\t", "", ("--delimiter", "\\t", "--quote", "none"))],
)
def test_rows_of_csv_come_back_by_the_delimiter_and_quote_that_were_given(
    tmp_path, ingest, rows_of, where, mark, quote, options
):
    def records(begin, end):
        cells = ([n % 40, f"{quote}c{n % 7}{quote}", BEGIN_S + n, f'5" x, y {n}', f",{n}"] for n in range(begin, end))
        return "".join(f"{mark.join(map(str, row))}\n" for row in cells)

    log = tmp_path / "a.txt"
    log.write_text(mark.join(("order_id", "customer.id", "at", "note", "n")) + "\n" + records(0, 100))
    assert ingest(log, *options)["entries"] == 200
    with log.open("a") as appended:
        appended.write(records(100, 130))
    (tmp_path / "b.gz").write_bytes(gzip.compress(log.read_bytes()))
    document = ingest(log, tmp_path / "b.gz", *options)
    assert (document["rows"], document["changed"]) == (30 + 130, [])
    # the command that reads needs no option
    assert rows_of("c3") == (sorted([n for n in range(130) if n % 7 == 3] * 2), [])
    refused = run_here("ingest", log, *KEYS, *where, "--delimiter", "ab")
    assert (refused.code, "--delimiter is one ASCII character" in refused.err) == (2, True)


def test_a_file_that_changes_while_it_is_read_is_named_and_read_again_by_the_next_run(
    tmp_path, monkeypatch, ingest, rows_of
):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 50))
    read_text = rows_of_text.read_text

    def rewriting(*arguments):
        data = read_text(*arguments)
        if data and arguments[-1] == rows_of_text.BLOCK_BYTES:
            log.write_bytes(lines(50, 99))
        return data

    monkeypatch.setattr(rows_of_text, "read_text", rewriting)
    assert ingest(log)["changed_while_read"] == [log.as_uri()]
    monkeypatch.undo()
    # no row of the file as it was comes back, and none is taken for another
    numbers, problems = rows_of("c3")
    assert numbers == [] and set(problems) == {f"{log.as_uri()} has changed since it was indexed"}
    again = ingest(log)
    assert (again["rows"], again["changed"], again["changed_while_read"]) == (49, [log.as_uri()], [])
    assert rows_of("c3")[0] == [n for n in range(50, 99) if n % 7 == 3]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_file_that_is_cut_off_is_named(tmp_path, where, pack):
    log = tmp_path / "app.log"
    log.write_bytes(pack(lines(0, 5000))[:-20])
    done = run_here("ingest", log, *KEYS, *where, "--json")
    assert (done.code, done.error["type"]) == (4, "CorruptFile")
    assert "app.log" in done.error["message"] and "damaged" in done.error["message"]


def test_a_row_that_does_not_carry_the_key_is_dropped(tmp_path, where, ingest, rows_of):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 3))
    assert ingest(log)["rows"] == 3
    # an entry of another key with the same hash would lead here, too
    with IndexService.open(root=where[1], storage=where[3], slots=32, items=1000) as index:
        index.put("orders", 0, "stranger", 0, len(lines(0, 1)) - 1, BEGIN_S * 1000)
    assert rows_of("c0")[0] == [0]
    assert rows_of("stranger") == ([], [])


def test_what_is_not_read_says_how_to_make_it_readable(tmp_path, where):
    for name, text, more, said in (
        ("a.json", b'[{"order_id": 1}]\n', (), "jq -c '.[]'"),
        ("a.json", b'[{"order_id": 1}]\n', ("--follow",), "jq -c '.[]'"),
        ("a.json", b'[{"order_id": 1}]\n', ("--follow", "--dry-run"), "--dry-run"),
        ("b.csv", b"order_id,at\r1,2024-02-03\r", (), r"`tr '\r' '\n' < FILE > FILE.csv`"),
        ("c.csv", b'"order_id"x,at\n1,2024-02-03\n', (), f"{tmp_path}/c.csv: the header is not CSV: "),
        ("d.csv", "order_id,customer.id,at\nMüller,1,2\n".encode("latin-1"), (), "`iconv -f LATIN1 -t UTF-8 FILE > "),
        ("e.log", '{"order_id":"Müller"}\n'.encode("latin-1"), (), "is not UTF-8: write UTF-8, for example with "),
        ("f.log", b'{"order_id":"' + b"a" * (17 << 20) + b'"}\n', (), "the first line is longer than 16,777,216 bytes"),
        ("g.log", b'{"order_id":1,}\n', (), "g.log: the first row is bad: not JSON: "),
    ):
        (tmp_path / name).write_bytes(text)
        done = run_here("ingest", tmp_path / name, *KEYS, *where, *more, "--json")
        assert done.code == 2 and said in done.error["message"], done.err
        assert "--dry-run" in more or str(tmp_path / name) in done.error["message"]
