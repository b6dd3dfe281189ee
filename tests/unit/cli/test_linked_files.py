"""Files as a log: their rows are indexed where they are, once each however a run ends, and read there again."""

import bz2
import contextlib
import functools
import gzip
import json
import lzma
import os
import random
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tests.integration.cli.command_lines import run_here
from tests.storage.scripted_server import Answer
from tests.support.batches import batch
from tests.support.counting_proxy import Action, counting_proxy
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, config
from tiered_index.config import IndexConfig
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.files import linked
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import PinnedFile, listed_files, stored_file
from tiered_index.connectors.files.rows import restart
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.places import StoredFile
from tiered_index.connectors.follow import PatientPut
from tiered_index.connectors.source import no_entries
from tiered_index.errors import InvalidArgument, StorageUnavailable
from tiered_index.format.names import TOPICS_QUEUE, linked_store
from tiered_index.format.segments.columnar import decode_columns
from tiered_index.format.topic_documents import TopicDocument
from tiered_index.service.log.topic_keys import added_positions
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

BEGIN_S = 1_700_000_000
KEYS = ("--topic", "orders", "--key", "order_id", "--key", "customer.id", "--time", "at")
BY_FIELD = ("--topic", "field:of.kind", *KEYS[2:])
SIZES = ("--slots", 32, "--items", 1000)
PLAIN = ("--topic", "t", "--key", "k", "--time", "at")


def row(number):
    return {"order_id": number % 40, "customer": {"id": f"c{number % 7}"}, "at": BEGIN_S + number, "n": number}


def as_lines(documents):
    return "".join(f"{json.dumps(document)}\n" for document in documents).encode()


def lines(begin, end):
    return as_lines(map(row, range(begin, end)))


def write_rows(path, rows, at_once=30):
    """Write rows in the form that the end of the path's name says."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
    if path.suffix == ".parquet":
        pq.write_table(table, path, at_once)
    elif path.suffix in (".arrow", ".arrows"):
        new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table, at_once)
    else:
        path.write_bytes(as_lines(rows))


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


@pytest.fixture
def new(tmp_path):
    """Another index."""
    return "--root", tmp_path / "new-root", "--storage", f"file://{tmp_path}/new"


def ingested(*arguments, index, fields=KEYS):
    """Ingest sources, and return the document of the run."""
    done = run_here("ingest", *arguments, *fields, *index, *SIZES, "--json")
    assert done.code == 0, done.err
    return done.document


@pytest.fixture
def ingest(where):
    return functools.partial(ingested, index=where)


def refused(*arguments):
    """Return the message of the error with which an ingestion ends."""
    done = run_here("ingest", *arguments, "--json")
    assert done.code == 2, (done.out, done.err)
    return done.error["message"]


def from_archive(old, *index):
    """Make an index of the archive of another one, and return the document of the run."""
    done = run_here("ingest", f"archive:{old[3]}", *index, "--wait", "--json")
    assert done.code == 0, done.err
    return done.document


@pytest.fixture
def rows_of(where):
    """Return a function that returns the numbers of the rows of a key that come back, and all that do not."""

    def run(key, topic="orders"):
        done = run_here("query", "--messages", "--all", *where, "--json", "--", topic, key)
        messages = [record for record in done.records if "state" in record]
        texts = [record["message"]["body"] for record in messages if record["message"]]
        numbers = [int(json.loads(text)["n"]) for text in texts]
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
    write_rows(folder / "a" / "b" / "5.parquet", map(row, range(500, 600)))
    cells = "".join(f'{n % 40},"c{n % 7}",{BEGIN_S + n},{n}\n' for n in range(600, 700))
    (folder / "a" / "b" / "6.csv").write_text("order_id,customer.id,at,n\n" + cells)
    write_rows(folder / "7.arrow", map(row, range(700, 750)))
    write_rows(folder / "8.arrows", map(row, range(750, 800)))
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
    write_rows(tmp_path / "d.parquet", map(row, range(120, 130)))
    ingest(tmp_path / "*.*", *archive)
    log.write_bytes(b"\n" + lines(0, 40) + lines(130, 150))
    ingest(log, *archive)
    first = {n: n + 2 for n in range(40)} | {n: n - 40 + 3 for n in range(40, 80)}
    first |= {n: 2 * (n - 80) + 2 for n in range(80, 120)} | {n: n - 130 + 42 for n in range(130, 150)}
    for key in map(str, range(40)):
        done = run_here("query", "orders", key, "--messages", "--all", *where, "--json")
        for message in [record["message"] for record in done.records if "state" in record]:
            number = int(json.loads(message["body"])["n"])
            assert message.get("line") == first.get(number), (number, message)
    assert ["line", str(first[13])] in [
        line.split() for line in run_here("query", "orders", "13", "--messages", *where).out.splitlines()
    ]


SMALL = {"log": bytes, "log.gz": gzip.compress, "log.bz2": bz2.compress}


def write_small(folder, seed):
    """Write some hundred small files, most of which have a row or two; others have none, or something unusual."""
    rng = random.Random(seed)
    for number in range(300):
        documents = [row(rng.randrange(1000)) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
        documents += [{"at": BEGIN_S, "order_id": None}] * (rng.random() < 0.1)
        is_csv, is_bad = number // 30 % 3 == 0, rng.random() < 0.05
        if is_csv:
            texts = [f"{each['order_id'] or ''};{each['at']};c{number % 7}" for each in documents]
            texts = ["order_id;at;customer", *texts, *(["1;never;c1"] * is_bad)]
            texts += ['"4";1700000000;"c\n1"'] * (rng.random() < 0.05)
        else:
            texts = [*map(json.dumps, documents), *(["{"] * is_bad)]
        texts += [""] * (rng.random() < 0.2) + [" \t"] * (rng.random() < 0.1)
        mark = "\ufeff" * (rng.random() < 0.05)
        text = mark + ("\r\n" if number % 5 == 0 else "\n").join(texts) + "\n" * (rng.random() < 0.9)
        ending = rng.choice([*SMALL])
        path = folder / f"kind={number // 100}" / f"{number:03}.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(SMALL[ending](text.encode()))


def test_many_small_files_are_read_together_with_the_same_rows_and_segments(tmp_path, monkeypatch, where, new):
    """A parse, a put and several reads of each file took 1.4 ms of processor time."""
    logs = tmp_path / "logs"
    logs.mkdir()
    write_small(logs, 7)
    opened, puts = [], []
    open_file, put = PinnedFile.open, PatientPut.__call__

    def opening(self):
        opened.append(self.path.name)
        return open_file(self)

    def putting(self, *arguments):
        puts.append(None)
        return put(self, *arguments)

    monkeypatch.setattr(PinnedFile, "open", opening)
    monkeypatch.setattr(PinnedFile, "ranges", opening)
    monkeypatch.setattr(PinnedFile, "ahead", opening)
    monkeypatch.setattr(PatientPut, "__call__", putting)
    offsets_by_run, opened_by_run, puts_by_run = [], [], []
    for index in (where, new):
        if index is new:
            monkeypatch.setattr(linked, "gathered", lambda files: (([each], []) for each, *_ in files))
        keys = ("--topic", "orders", "--key", "order_id", "--time", "at", "--skip-bad")
        document = ingested(logs, "--wait", index=index, fields=keys)
        with IndexReader.open(index[3]) as reader, reader.export() as batches:
            store = linked_store("orders", 0)
            segments = [structs.replace(each, published_ms=0) for each in reader.segments().of_log(store)]
            table = pa.Table.from_batches(batches)
        entries = sorted(zip(*(table[name].to_pylist() for name in table.column_names), strict=True), key=str)
        names = ("read_files", "read_bytes", "rows", "entries", "keyless", "skipped", "skipped_first", "held_back")
        offsets_by_run.append(({name: document[name] for name in names}, segments, entries))
        opened_by_run.append(len(opened))
        puts_by_run.append(len(puts))
        opened.clear()
        puts.clear()
    together, alone = offsets_by_run
    assert together == alone
    assert together[0]["skipped"] > 5 < together[0]["keyless"]
    # the first one is opened for its fields, too
    assert opened_by_run[0] <= together[0]["read_files"] + 5
    # files with a bad row, and their neighbours, are put one by one
    assert puts_by_run[0] < puts_by_run[1] / 2


def test_rows_of_several_indexes_come_back_by_the_keys_of_each(tmp_path, where, new):
    for number, (index, key) in enumerate([(where, "order_id"), (new, "customer.id")]):
        file = tmp_path / f"{number}.ndjson"
        file.write_bytes(lines(0, 20))
        ingested(file, "--wait", index=index, fields=("--topic", "orders", "--key", key, "--time", "at"))
    for key, source in (("3", where[3]), ("c3", new[3])):
        done = run_here("query", "orders", key, "--messages", "--all", *where[2:], *new[2:], "--json")
        shown = [record for record in done.records if record.get("message")]
        assert sorted(json.loads(record["message"]["body"])["n"] for record in shown) == expected(key, 20), done.out
        assert {record["item"]["source"] for record in shown} == {source}


def test_rows_come_back_beside_an_index_with_a_topic_of_another_connector(tmp_path, ingest, where, new):
    (tmp_path / "rows.ndjson").write_bytes(lines(0, 20))
    ingest(tmp_path / "rows.ndjson", "--wait")
    document = TopicDocument.of("absent", 1, package="absent-connector")
    with IndexService.open(storage=new[3], root=new[1], slots=32, items=1000, background=False) as index:
        entry = batch(1) | {"topic": ["orders"], "key": ["3"]}
        index.put_source_batch(entry, "absent", 1, document=lambda topic: document)
        index.seal()
        index.run_lifecycle()
    for first, second in ((where, new), (new, where)):
        done = run_here("query", "orders", "3", "--messages", "--all", *first[2:], *second[2:], "--json")
        states = {record["item"]["source"]: record for record in done.records if "state" in record}
        assert json.loads(states[where[3]]["message"]["body"])["n"] == 3
        assert "install the package absent-connector" in states[new[3]]["problem"]


def test_no_row_of_a_topic_of_another_connector_is_linked(tmp_path, where):
    with IndexService.open(storage=where[3], root=where[1], slots=32, items=1000, background=False) as index:
        index.put_source_batch(batch(1, topic="orders", queue_id=1), document=lambda _: TopicDocument.of("absent", 1))
        index.seal()
        index.run_lifecycle()
    (tmp_path / "rows.ndjson").write_bytes(lines(0, 20))
    message = refused(tmp_path / "rows.ndjson", *KEYS, *where)
    assert "topic 'orders' has entries of the connector 'absent', and a topic has one connector" in message
    with IndexReader.open(where[3]) as reader:
        assert not reader.segments().stores and reader.topic_documents()["orders"].connector == "absent"


def test_keys_of_a_run_that_was_killed_before_its_first_entry_find_the_rows_of_later_ones(tmp_path, ingest, where):
    store = linked_store("orders", 0)
    with IndexService.open(storage=where[3], root=where[1], slots=32, items=1000, background=False) as index:
        for name, at in added_positions({}, store, "customer.id", {}).items():
            index.put_source_batch(no_entries(index), name, at)
    (tmp_path / "rows.ndjson").write_bytes(lines(0, 20))
    ingest(tmp_path / "rows.ndjson", "--wait", fields=("--topic", "orders", "--key", "order_id", "--time", "at"))
    done = run_here("query", "orders", "c3", "--messages", "--all", *where, "--json")
    shown = [record for record in done.records if record.get("message")]
    assert sorted(json.loads(record["message"]["body"])["n"] for record in shown) == expected("c3", 20), done.out


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
    log, other, new = (tmp_path / name for name in ("app.log", "other.log", "new"))
    log.write_bytes(lines(0, 50))
    other.write_bytes(lines(50, 60))
    new.write_bytes(lines(60, 99))
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
    # another file takes its place
    new.rename(log)
    assert [ingest(log)["changed"] for _ in range(2)] == [[log.as_uri()], []]
    assert rows_of("10")[0] == [90]


def test_a_lost_catalog_of_files_is_named_and_its_offsets_are_never_used_again(tmp_path, where, ingest, rows_of):
    """The files are indexed again behind them; entries from before name the lost catalog."""
    (tmp_path / "a.log").write_bytes(lines(0, 50))
    assert ingest(tmp_path / "a.log")["rows"] == 50
    with IndexReader.open(where[3]) as reader:
        (catalog,) = reader.log_state.catalogs
        reader.storage.delete_many([catalog])
    done = run_here("recover", *where[2:], "--lost", catalog, "--json")
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
        until_killed = Killed(index, moments, moments.randrange(60 if kills else 5) if kills < 6 else 10_000)
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
            names, documents = index.durable_positions(), index.topic_documents()
            queue_id = TOPICS_QUEUE if form == "topics" else 0
            segments = list(index.segment_archive.segments().of_log(linked_store("orders", queue_id)))
            index.close()
    assert kills
    # as many positions as keys and one, whatever the number of files
    assert len(names) == 3
    # all topics by a field share one document
    assert len(documents) == (40 if form == "topics" else 1)
    assert {document.facts["times"]["at"]["unit"] for document in documents.values()} == {"s"}
    assert not any(segment.is_open for segment in segments)
    assert sum(segment.length for segment in segments) == len(lines(0, count))
    with IndexReader.open(where[3]) as reader:
        assert any(reader.segments().of("points:-/orders/0")) == (form == "gzip")
        copies = list(reader.segments().of("rows:-/orders/0"))
    if form == "archive":
        assert sum(copy.rows for copy in copies) == count and len(copies) > 4
        for log in tmp_path.glob("*.log"):
            log.unlink()
    if form != "topics":
        for key in ("0", "13", "39", "c0", "c6"):
            assert rows_of(key) == (expected(key, count), [])
        return
    for key, topics in (("0", 2), ("c6", 40)):
        # the first key is the topic
        of_topics = [rows_of(key, str(topic)) for topic in range(topics)]
        assert sorted(n for numbers, _ in of_topics for n in numbers) == expected(key, count)
        assert not any(problems for _, problems in of_topics)


KINDS = "order", "click", "7"


def kind_of(number):
    return KINDS[number % 3]


def events(begin, end):
    return [row(n) | {"of": {"kind": 7 if n % 3 == 2 else kind_of(n)}} for n in range(begin, end)]


def written(folder, begin, end):
    """Write four files of events of three kinds, each in another form."""
    step = (end - begin) // 4
    a, b, c, d = (events(at, at + step) for at in range(begin, end, step))
    folder.mkdir(exist_ok=True)
    (folder / f"{begin}.ndjson").write_bytes(as_lines(a))
    (folder / f"{begin}.gz").write_bytes(gzip.compress(as_lines(b)))
    write_rows(folder / f"{begin}.parquet", [event | {"of": {"kind": str(event["of"]["kind"])}} for event in c], 10)
    cells = "".join(f"{o['order_id']},{o['customer']['id']},{o['at']},{o['of']['kind']},{o['n']}\n" for o in d)
    (folder / f"{begin}.csv").write_text("order_id,customer.id,at,of.kind,n\n" + cells)
    return folder


def test_archived_rows_come_back_without_their_files_until_they_are_erased(tmp_path, where, ingest, rows_of):
    folder = written(tmp_path / "logs", 0, 120)
    assert ingest(folder, "--archive")["rows"] == 120
    # rows of earlier runs stay only in their files
    assert ingest(written(tmp_path / "more", 120, 160))["rows"] == 40
    for file in folder.iterdir():
        file.unlink()
    numbers = [n for n in range(160) if n % 7 == 3]
    of_archive = len([n for n in numbers if n < 120])
    assert rows_of("c3") == (numbers, [])
    shown = run_here("query", "orders", "c3", "--messages", "--all", *where, "--json").records
    states = [record["state"] for record in shown if "state" in record]
    assert states == ["local"] * (len(numbers) - of_archive) + ["archived"] * of_archive
    erased = run_here("erase", "--topic", "orders", "--key", "c3", *where, "--yes", "--now", "--json").document
    assert erased["segments"]["messages_erased"] == of_archive
    (copy,), texts = archived(where[3], "text")
    assert len(texts) == copy.rows == 120 - of_archive
    assert not any(b'"c3"' in text or b",c3," in text for text in texts)
    assert rows_of("c3") == ([], [])
    assert rows_of("c4") == ([n for n in range(160) if n % 7 == 4], [])


def archived(uri, column):
    """Return the copies of the archive of rows, and a column of all of them."""
    with IndexReader.open(uri) as reader:
        copies = list(reader.segments().of("rows:-/orders/0"))
        data = [reader.segment_archive.verified(copy, 0, copy.size_bytes) for copy in copies]
    return copies, [value for each in data for value in decode_columns(each)[column].to_pylist()]


def of_index(where, queue_id=0):
    done = run_here("export", *where, "--format", "ndjson", "--out", "-")
    assert done.code == 0, done.err
    entries = [json.loads(line) for line in done.out.splitlines()]
    # a copy has no carriage return at the end of its line
    packed = [entry | ({"size": 0} if entry["file"].endswith("/0.ndjson") else {}) for entry in entries]
    return sorted(json.dumps(entry) for entry in packed if entry["queue_id"] == queue_id)


@pytest.mark.parametrize("form", ["one topic", "topics"])
def test_an_archive_of_rows_makes_their_index_again(tmp_path, where, new, ingest, form):
    keys, topic, queue_id = (KEYS, "orders", 0) if form == "one topic" else (BY_FIELD, "order", TOPICS_QUEUE)
    folder = written(tmp_path / "logs", 0, 120)
    crlf = folder / "0.ndjson"
    crlf.write_bytes(crlf.read_bytes().replace(b"\n", b"\r\n"))
    assert ingest(folder, "--archive", "--wait", fields=keys)["rows"] == 120
    before = of_index(where[2:], queue_id)
    assert run_here("ingest", f"archive:{where[3]}", "--dry-run", "--json").document["status"] == "same"
    folder.rename(tmp_path / "away")
    assert from_archive(where, *new)["messages"] == 120
    assert len(before) == 240 and of_index(new[2:], queue_id) == before
    # later files are read with the same keys and unit of times
    with IndexReader.open(where[3]) as old, IndexReader.open(new[3]) as made:
        rules = [{name for name in of.log_state.positions if name.startswith("topic-key")} for of in (old, made)]
        documents = [of.topic_documents() for of in (old, made)]
    assert rules[0] == rules[1] and len(rules[0]) == 2
    assert documents[0] == documents[1] and documents[0][topic].facts["times"]["at"]["unit"] == "s"
    shown = run_here("query", topic, "c4", "--messages", "--all", *new, "--json").records
    bodies = [record["message"]["body"] for record in shown if "state" in record]
    numbers = [n for n in range(120) if n % 7 == 4 and topic in ("orders", kind_of(n))]
    assert len(bodies) == len(numbers) > 4 and all("c4" in body for body in bodies)
    # again, and the files: nothing is new
    again = from_archive(where, *new)
    assert (again["entries"], again["messages"]) == (0, 0)
    (tmp_path / "away").rename(folder)
    known = ingested(folder, written(tmp_path / "more", 120, 160), "--archive", "--wait", index=new, fields=keys)
    assert (known["known"], known["rows"]) == (4, 40)
    assert run_here("verify", "--deep", *new).code == 0


@pytest.mark.parametrize(
    "calls", [(20, 33, 47), pytest.param(range(1, 80), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_run_over_archived_rows_whose_storage_fails_at_a_call_continues(tmp_path, monkeypatch, where, ingest, calls):
    monkeypatch.setattr(linked, "SEGMENT_BYTES", 1000)
    ingest(written(tmp_path / "logs", 0, 120), "--archive", "--wait")
    before, open_storage = of_index(where[2:]), config.open_storage
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
        assert of_index(("--storage", new)) == before
        rows = run_here("query", "orders", "c4", "--messages", "--all", "--storage", new, "--json").records
        states = {record["state"] for record in rows if "state" in record}
        assert states == {"archived"} and run_here("verify", "--deep", "--storage", new).code == 0
    assert failed


def test_an_archive_that_lacks_rows_makes_no_short_index_in_silence(tmp_path, where, new, ingest):
    folders = [written(tmp_path / name, *some) for name, *some in (("a", 0, 120), ("b", 120, 160), ("c", 160, 200))]
    ingest(folders[0], "--wait", "--archive")
    # rows without a key are no gap, also if a run has no others
    (folders[0] / "keyless.ndjson").write_bytes(b'{"at": 1700000000, "n": 1}\n' * 3)
    for folder, archive in zip(folders, (["--archive"], [], ["--archive"]), strict=True):
        ingest(folder, "--wait", "--allow-none", *archive)
    told = refused(f"archive:{where[3]}", *new)
    assert "--skip-missing" in told and "/b/" in told
    # before anything is written
    assert not (tmp_path / "new").exists()
    done = from_archive(where, *new, "--skip-missing")
    assert done["messages"] == 160 and len(done["skipped"]) == 4
    # the files that were left out are new to the index
    added = ingested(*folders, "--wait", index=new)
    assert (added["known"], added["read_files"], added["rows"]) == (9, 4, 40)
    assert len(of_index(new[2:])) == len(of_index(where[2:])) == 400


def test_an_archive_without_some_topics_or_sources_makes_no_index_without_them_in_silence(tmp_path, where, ingest):
    for topic, archive in (("orders", ["--archive"]), ("other", [])):
        ingest(written(tmp_path / topic, 0, 40), "--wait", *archive, fields=("--topic", topic, *KEYS[2:]))
    with IndexService.open(root=where[1], storage=where[3]) as index:
        for source in ("kafka:c/left/0", f"kafka:c/left/1@{'a' * 32}", "rocketmq:broker-a"):
            name = source.partition(":")[0]
            columns = batch(1, topic=f"left-{name}", size=10, timestamp_ms=BEGIN_S * 1000)
            index.put_source_batch(columns, source, 2, document=dict.fromkeys([f"left-{name}"], document_of(name)).get)
        index.seal()
        index.run_lifecycle()
    uri, first, second = f"archive:{where[3]}", f"file://{tmp_path}/first", f"file://{tmp_path}/second"
    assert "/other/" in refused(uri, "--storage", first)
    assert "rows:-/orders/0, which are not of --topics no*" in refused(uri, "--storage", first, "--topics", "no*")
    done = run_here("ingest", uri, "--storage", first, "--topics", "orders", "--json")
    assert done.document["messages"] == 40, done.err
    done = run_here("ingest", uri, "--storage", second, "--skip-missing", "--json")
    assert (done.document["messages"], len(done.document["skipped"])) == (40, 4)
    assert "no archived message of broker-a, kafka:c/left/0, kafka:c/left/1:" in done.err


@pytest.mark.parametrize("more", [10, 100])
def test_an_index_with_files_of_its_own_takes_no_other_rows_of_an_archive(tmp_path, where, new, more):
    """Two files would have the same offsets."""
    for name, index, count in (("a", where, 40), ("b", new, 40), ("c", where, more)):
        (tmp_path / name).write_bytes(lines(0, count))
        ingested(tmp_path / name, "--archive", "--wait", index=index)
        if name == "a":
            from_archive(where, *new)
    assert f"{tmp_path}/b" in refused(f"archive:{where[3]}", *new)
    assert len(of_index(new[2:])) == 160


def test_a_file_that_was_being_read_when_its_archive_was_taken_over_is_continued_once(
    tmp_path, where, new, ingest, monkeypatch
):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 900)
    log = tmp_path / "app.log"

    def write(count):
        log.write_bytes(lines(0, 40) + b"no row\n" + lines(40, count))

    write(80)
    # it ends at the row that is none
    refused(log, *KEYS, *where, *SIZES, "--archive", "--wait", "--strict")
    from_archive(where, *new)
    for count in (80, 120):
        write(count)
        ingest(log, "--archive", "--wait", "--skip-bad")
    from_archive(where, *new)
    write(160)
    added = ingested(log, "--archive", "--wait", "--skip-bad", index=new)
    assert (added["rows"], len(of_index(new[2:]))) == (40, 320)


def test_an_index_of_an_archive_of_rows_brings_back_nothing_that_was_erased(tmp_path, where, new, ingest):
    ingest(written(tmp_path / "logs", 0, 120), "--archive", "--wait")
    # hidden, but still in the copies
    assert run_here("erase", "--topic", "orders", "--key", "c3", *where, "--yes").code == 0
    from_archive(where, *new)
    (copy,), keys = archived(new[3], "keys")
    assert len(keys) == copy.rows > 100 and all(of_row != ["c3"] for of_row in keys)
    assert not run_here("query", "orders", "c3", *new, "--json").document["items"]


def test_the_archive_has_the_rows_before_one_that_ends_the_run(tmp_path, monkeypatch, where, ingest, rows_of):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 30) + b"{broken\n" + lines(30, 40))
    refused(log, *KEYS, *where, *SIZES, "--archive", "--strict")
    before = rows_of("c2")
    assert before[1] == [] and 0 < len(before[0]) < len(expected("c2", 30))
    assert ingest(log, "--skip-bad", "--archive")["skipped"] == 1
    log.unlink()
    assert rows_of("c2") == (expected("c2", 40), [])


def test_the_topic_of_a_row_may_be_one_of_its_fields(tmp_path, where, ingest, rows_of):
    """A file is indexed once for all topics of its rows. Changed files, erasures and pages name it as always."""
    by_field = functools.partial(ingest, fields=BY_FIELD)
    folder = written(tmp_path / "logs", 0, 120)
    document, again = by_field(folder), by_field(folder)
    assert (document["rows"], document["entries"], again["rows"], again["known"]) == (120, 240, 0, 4)
    assert by_field(written(folder, 120, 240))["rows"] == 120
    for number, kind in enumerate(KINDS):
        assert rows_of("c3", kind) == ([n for n in range(240) if n % 7 == 3 and n % 3 == number], [])
    shown = run_here("query", "click", "c3", *where)
    assert "logs/0.ndjson" in shown.out and "2147483647" not in shown.out
    # a file of one topic, too: other offsets, which do not hide those
    (tmp_path / "more.log").write_bytes(lines(500, 507))
    ingest(tmp_path / "more.log", fields=("--topic", "click", *KEYS[2:]))
    assert rows_of("c3", "click")[0][-1] in range(500, 507)
    by_field(folder)
    with IndexReader.open(where[3]) as reader:
        stores = {topic: document.facts["store"] for topic, document in reader.topic_documents().items()}
    assert stores == dict.fromkeys(KINDS, "files:-/2147483647") | {"click": "files:-/click/0"}
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
def test_a_row_of_a_topic_of_another_connector_is_bad_and_others_are_indexed(tmp_path, where, ingest, rows_of, form):
    """A topic has one connector: that of its messages and of erasures."""
    with IndexService.open(root=where[1], storage=where[3], slots=32, items=1_000) as index:
        index.describe_topics(["pay"], TopicDocument.of("kafka", 1))
        index.put("pay", 1, "k", 1, 1, BEGIN_S * 1000)
    documents = [{"kind": kind, "k": "x", "at": BEGIN_S + n, "n": n} for n, kind in enumerate(("t", "pay", "u", "t"))]
    write_rows(tmp_path / f"a.{form}", documents)
    fields = ("--topic", "field:kind", "--key", "k", "--time", "at", "--skip-bad")
    done = ingest(tmp_path / f"a.{form}", fields=fields)
    assert (done["rows"], done["entries"], done["skipped"]) == (3, 3, 1)
    assert "'pay' has entries of another connector" in done["skipped_first"][0]["problem"]
    assert [rows_of("x", topic) for topic in ("t", "u")] == [([0, 3], []), ([2], [])]


@pytest.mark.parametrize("form", ["ndjson", "parquet"])
def test_a_row_has_no_key_twice_and_one_without_a_key_leaves_the_topics_of_others(tmp_path, ingest, rows_of, form):
    keys_by_topic = [("t0", "x", "x"), ("t1", None, None), ("t1", "y", None), ("t0", "x", "y")]
    documents = [
        {"kind": topic, "a": a, "b": b, "at": BEGIN_S + n, "n": n} for n, (topic, a, b) in enumerate(keys_by_topic)
    ]
    write_rows(tmp_path / f"a.{form}", documents)
    done = ingest(tmp_path / f"a.{form}", fields=("--topic", "field:kind", "--key", "a", "--key", "b", "--time", "at"))
    assert (done["rows"], done["entries"], done["keyless"]) == (4, 4, 1)
    numbers = [rows_of(key, topic) for topic in ("t0", "t1") for key in "xy"]
    assert numbers == [([0, 3], []), ([3], []), ([], []), ([2], [])]


def test_a_small_object_is_read_by_one_request(tmp_path, monkeypatch):
    storage, calls = MemoryStorage(), []
    for number in range(40):
        storage.put(f"{number:02}.log", lines(number, number + 1))
    for name in ("get", "get_range", "head"):
        monkeypatch.setattr(
            storage,
            name,
            lambda *arguments, call=getattr(storage, name): (calls.append(arguments), call(*arguments))[1],
        )
    infos = sorted(storage.list(""), key=lambda info: info.name)
    files = [stored_file(StoredFile(f"s3://logs/{i.name}", storage, i.name, i.size_bytes), i) for i in infos]
    with IndexService.open(root=tmp_path / "root", storage="memory://small") as index:
        mapping = RowMapping(("order_id",), "at", "s")
        assert FileLinker(index, "t", mapping, PatientPut(index, 10.0)).run(files).rows == 40
    assert len(calls) == 40


def test_a_topic_may_be_the_number_0(tmp_path, ingest, rows_of):
    (tmp_path / "a.log").write_bytes(as_lines({"n": 0, "of": {"kind": 0}, **row(each)} for each in range(3)))
    assert ingest(tmp_path / "a.log", fields=BY_FIELD)["rows"] == 3
    assert rows_of("1", "0") == ([1], [])


def test_a_row_without_a_topic_is_bad_and_a_field_of_many_values_is_no_topic(tmp_path, where, ingest):
    documents = events(0, 4)
    documents[2]["of"] = {"kind": None}
    documents[3]["of"] = {"kind": ["a", "b"]}
    (tmp_path / "a.log").write_bytes(as_lines(documents))
    told = refused(tmp_path / "a.log", *BY_FIELD, *where, *SIZES, "--strict")
    assert "a.log, line 3 (byte" in told and "no topic at of.kind" in told
    skipped = ingest(tmp_path / "a.log", "--skip-bad", fields=BY_FIELD)
    assert (skipped["rows"], skipped["skipped"]) == (2, 2)
    (tmp_path / "b.log").write_bytes(lines(0, 1_001))
    assert "n has more than 1,000 values" in refused(tmp_path / "b.log", "--topic", "field:n", *KEYS[2:], *where)


def test_a_dry_run_and_wrong_fields_leave_no_index(tmp_path, where):
    log, bad, empty = tmp_path / "app.log", tmp_path / "bad.csv", tmp_path / "empty.log"
    log.write_bytes(lines(0, 9))
    empty.touch()
    shown = run_here("ingest", log, *KEYS, *where, "--dry-run", "--json").document
    assert (shown["entries"][0]["timestamp_ms"], shown["format"], shown["time_unit"]) == (BEGIN_S * 1000, "ndjson", "s")
    assert (shown["entries"][0]["file"], shown["entries"][2]["row"]) == (log.as_uri(), len(lines(0, 1)))
    *_, last, _, _ = run_here("ingest", log, *KEYS, *where, "--dry-run").out.splitlines()
    assert last.split()[-3:] == [log.as_uri(), "byte", f"{len(lines(0, 4))}"]
    bad.write_text("k,at\na,01/02/2024\nb,2024-02-03\n")
    shown = run_here("ingest", bad, *PLAIN, *where, "--dry-run", "--json").document
    problem = f"{bad.as_uri()}, line 2 (byte 5): at is neither a number nor an ISO 8601 time"
    assert [entry["key"] for entry in shown["entries"]] == ["b"] and shown["bad"][0].startswith(problem)
    bad.write_text("k,at\na,01/02/2024\n,2024-02-03\n")
    done = run_here("ingest", bad, *PLAIN, *where, "--dry-run")
    assert done.code == 1 and f"nothing was indexed: each row at the start of {bad.as_uri()}" in done.err
    of_log = f"; the first row of {log.as_uri()} has order_id, customer, at, n"
    wrong = ("--topic", "t", "--key", "order", "--key", "n", "--time", "customer.at")
    for arguments, said in (
        ((log, "--time", "at"), f"--topic, --key are missing: .*{of_log}"),
        ((log, "--topic", "t"), f"--key, --time are missing: .*{of_log}"),
        ((log,), ".*pass --topic, --key and --time"),
        (("-", *KEYS), ".*rows of stdin can't be read again.*"),
        ((empty, *KEYS), ".*empty.log: no file that has data.*"),
        ((log, *wrong), ".*has --key order, --time customer.at; the first one has order_id, customer, at, n"),
        ((log, "--topic", "field:kind", *KEYS[2:]), ".*has --topic field:kind; the first one has order_id.*"),
    ):
        assert re.fullmatch(said, refused(*arguments, *where)), said
    assert not (tmp_path / "root").exists()
    assert "--time-unit" in refused(log, "--topic", "t", "--key", "order_id", "--time", "n", *where)


@pytest.mark.parametrize("form", ["ndjson", "csv", "parquet", "arrow"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_folders_of_a_partition_are_fields(
    tmp_path, monkeypatch, s3_environment, where, ingest, rows_of, form, is_stored
):
    """As Hive and Spark write them. A field of the row goes first."""
    files = tmp_path / "logs"
    for day in (2, 3):
        folder = files / f"kind=clicks/dt=2026-01-0{day}/region=eu%2Fwest/shop=__HIVE_DEFAULT_PARTITION__"
        folder.mkdir(parents=True)
        rows = [{"id": key, "kind": "sales", "n": day * 10 + n} for n, key in enumerate("ab")]
        if form == "csv":
            cells = "".join(f"{each['id']},{each['kind']},{each['n']}\n" for each in rows)
            (folder / "part").write_bytes(gzip.compress(f"id,kind,n\n{cells}".encode()))
        else:
            write_rows(folder / f"part.{form}", rows)
            (folder / f"part.{form}").rename(folder / "part")
        if form == "ndjson":
            (folder / "part").write_bytes(
                (folder / "part").read_bytes().replace(b', "n": 21', b', "dt": null, "n": 21')
            )
    source = f"{files}"
    if is_stored:
        serve_s3(monkeypatch, s3_environment)
        source = f"s3://{s3_environment.new_bucket()}/logs"
        with open_storage(source, any_names=True) as storage:
            for path in files.rglob("part"):
                storage.put(path.relative_to(files).as_posix(), path.read_bytes())
    keys = [part for key in ("id", "dt", "join('/', [dt, id])", "region") for part in ("--key", key)]
    document = ingest(f"{source}/", fields=("--topic", "field:kind", *keys, "--time", "dt"))
    assert (document["rows"], document["entries"]) == (4, 16)
    assert rows_of("2026-01-02", "sales") == ([20, 21], [])
    assert rows_of("2026-01-03/b", "sales") == ([31], [])
    assert rows_of("eu/west", "sales") == ([20, 21, 30, 31], [])
    items = run_here("query", "sales", "2026-01-03", *where, "--json").document["items"]
    assert {item["timestamp_ms"] for item in items} == {1767398400000}
    told = refused(f"{source}/", "--topic", "t", "--key", "shop", "--time", "dt", *where)
    assert re.search("no row of 2 files has --key shop; the first one of .*/part has id, kind, n, dt, region", told)


def serve_s3(monkeypatch, server):
    """Let commands of the test use the S3 server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    of_server = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    monkeypatch.setitem(run_here.__kwdefaults__, "environment", of_server)


def test_the_unit_of_times_is_decided_once_for_all_runs_unless_it_is_given(tmp_path, where):
    def run(number, time, *unit, field="at"):
        (tmp_path / f"{number}.csv").write_text(f"k,{field}\na,{time}\n")
        options = ("--topic", "t", "--key", "k", "--time", field, *unit)
        done = run_here("ingest", tmp_path / f"{number}.csv", *options, *where, "--json")
        assert done.code == (4 if done.document["skipped"] else 0)
        return done.err + done.out

    assert "times are numbers of ms, by the first one" in run(0, BEGIN_S * 1000)
    for number, unit, other in ((1, "ms", "s"), (5, "s", "ms")):
        wrong = run(number, BEGIN_S * {"s": 1, "ms": 1000}[other])
        assert f"seems to be in {other}, but the first one was in {unit}: give --time-unit" in wrong
        (tmp_path / f"{number}.csv").unlink()
        again = run(number + 1, BEGIN_S * {"s": 1, "ms": 1000}[unit] + 1)
        assert f"times are numbers of {unit}, as in an earlier run; --time-unit sets another unit" in again
        told = run(number + 2, BEGIN_S * {"s": 1, "ms": 1000}[other] + 2, "--time-unit", other)
        assert f"numbers of {other} from now on. Earlier rows keep theirs, read in {unit}" in told
    times_ms = [item["timestamp_ms"] for item in run_here("query", "t", "a", *where, "--json").document["items"]]
    assert len(times_ms) == 5 and {*times_ms} <= {BEGIN_S * 1000 + 1000 * number for number in range(3)}
    # times of another field have a unit of their own
    assert "times are numbers of s, by the first one" in run(9, BEGIN_S, field="made")


@pytest.mark.parametrize("archive", [(), ("--archive",)], ids=["linked", "archived"])
@pytest.mark.parametrize("mark", ['{"k": "%s", "at": "2024-02-03"}', '"%s";"2024-02-03"'], ids=["ndjson", "csv"])
def test_a_row_comes_back_without_a_byte_order_mark_and_the_end_of_its_line(tmp_path, where, ingest, mark, archive):
    rows = [mark % key for key in "ab"]
    text = "\r\n".join([*([] if "{" in mark else ["k;at"]), *rows, ""])
    (path := tmp_path / "a.log").write_bytes(b"\xef\xbb\xbf" + text.encode())
    ingest(path, *archive, "--wait", fields=PLAIN)
    for key in "ab":
        shown = mark % key if "{" in mark else f'{{"k":"{key}","at":"2024-02-03"}}'
        (message,) = run_here("query", "t", key, "--messages", *where, "--body", "text", "--json").document["messages"]
        assert message["message"]["body"] == shown


ID = "6f1d2c3b-4a59-4687-9788-112233445566"


@pytest.mark.parametrize(
    ("key", "similar"),
    [
        ("136", ["order=136", "user=136"]),
        ("user=137", ["order=137"]),
        ("order=138", []),
        (ID.upper(), [ID]),
        (f"{{{ID.replace('-', '')}}}", [ID]),
        ("00ff", ["0x00ff"]),
        ("0xabcd", ["0xABCD"]),
        ("0x6b617a65", ["kaze"]),
        ("nurse", ["0x6e75727365"]),
        ("0x610962", ["a\tb"]),
        ("c\td", ["0x630964"]),
        (" 'Order-7' ", ["order=Order-7"]),
        ("nobody", []),
    ],
)
def test_a_key_that_nothing_has_is_hinted_at_by_its_other_forms(tmp_path, where, ingest, key, similar):
    rows = [
        {"order": 136, "user": 136, "id": ID},
        {"order": 137, "user": 1, "id": "0x00ff"},
        {"order": "Order-7", "id": "0xABCD"},
        *({"id": text} for text in ("kaze", "0x6e75727365", "a\tb", "0x630964")),
    ]
    (tmp_path / "a.ndjson").write_bytes(as_lines({**row, "at": "2024-02-03"} for row in rows))
    keys = ("--key", "order=order", "--key", "user=user", "--key", "id")
    ingest(tmp_path / "a.ndjson", "--wait", fields=("--topic", "t", *keys, "--time", "at"))
    hints = [f"keys are exact: {other!r} has entries" for other in similar]
    for index in (where[:2], where[2:]):
        for options in ((), ("--messages",)):
            answer = run_here("query", *index, *options, "--json", "--", "t", key).document
            assert (answer["hints"], answer["status"]) == (hints, "complete")
            text = run_here("query", *index, *options, "--", "t", key).out
            assert [line for line in text.splitlines() if line.startswith("keys are exact")] == hints
        done = run_here("message", *index, "--topic", "t", "--json", "--", key)
        assert (done.code, done.document["messages"], done.document.get("hints", [])) == (1, [], hints)
        text = run_here("message", *index, "--topic", "t", "--", key).out
        assert [line for line in text.splitlines() if line.startswith("keys are exact")] == hints
    assert run_here("query", *where, "-q", "--", "t", key).out == ""
    # no form of another topic or time
    later = run_here("query", *where, "--begin", "2024-02-04", "--json", "--", "t", key).document["hints"]
    assert [hint for hint in later if "exact" in hint] == []


def test_quiet_prints_no_summary_but_says_what_an_answer_lacks(tmp_path, where):
    (tmp_path / "a.ndjson").write_bytes(as_lines({"k": "a", "at": f"2024-02-0{n}"} for n in range(1, 4)))
    done = run_here("ingest", tmp_path / "a.ndjson", *PLAIN, *where, "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    whole = run_here("query", "t", "a", *where, "-q").out
    assert "found" not in whole and whole.count("a.ndjson") == 3
    assert "1 found, truncated" in run_here("query", "t", "a", *where, "-q", "--max", "1").out


def test_implausible_times_are_counted_for_people(tmp_path, where):
    (tmp_path / "a.ndjson").write_bytes(as_lines({"k": "a", "at": at} for at in ("1971-02-03", "2024-02-03")))
    done = run_here("ingest", tmp_path / "a.ndjson", *PLAIN, *where)
    assert re.search(r"quarantined +1 entries with an implausible time", done.out), done.out


@pytest.mark.parametrize("options", [(), PLAIN], ids=["messages", "rows"])
def test_topics_of_kafka_without_slashes_are_hinted_at(where, options):
    for source in ("kafka:broker:9092/orders", "kafka:/broker:9092/orders"):
        told = refused(source, *options, *where)
        assert told == f"{source} is no file: write topics of Kafka as kafka://broker:9092/orders"


def test_values_alone_are_one_json_document_a_line(tmp_path, where, ingest):
    """With numbers as they are written, for programs that read JSON lines; all else is on stderr."""
    values = ['{"k": "a",\t"at": "2024-02-05", "n": 1.50, "id": 12345678901234567890}',
              '{"k": "a", "at": "2024-02-04", "n": "\u00e4\x7f\U0001f600\u202e\\n"}']  # fmt: skip
    (tmp_path / "a.ndjson").write_text("".join(f"{value}\r\n" for value in values))
    (tmp_path / "b.csv").write_text('k;at;n\na;2024-02-03;"x\ny"\n')
    ingest(tmp_path / "*.*", fields=PLAIN)

    def run(*options):
        return run_here("query", "t", "a", "--messages", "--rows", *where, *options)

    done = run()
    printed = done.out.splitlines()
    assert (done.code, printed[0]) == (0, values[0].replace("\t", " "))
    assert done.out.isascii() and done.out.replace("\n", "").isprintable()
    of_csv = {"k": "a", "at": "2024-02-03", "n": "x\ny"}
    assert [json.loads(line) for line in printed] == [*map(json.loads, values), of_csv]
    assert "3 found (3 local), complete" in done.err and "more with --all" in run("--max", "1").err
    for wrong in ("--json", "--raw", "--explain", "--body=json"):
        assert run(wrong).code == 2
    (tmp_path / "a.ndjson").unlink()
    done = run("--quiet")
    assert (done.code, [json.loads(line) for line in done.out.splitlines()]) == (1, [of_csv])
    assert len(done.err.splitlines()) == 2 and "no value, missing: file" in done.err


@pytest.mark.parametrize("archive", [(), ("--archive",)], ids=["linked", "archived"])
def test_a_row_of_csv_comes_back_as_an_object_of_its_header(tmp_path, where, ingest, archive):
    """With texts as they are meant, and a name for each column. The index keeps the sizes of lines."""
    header = '\ufeffk,n,n,"a ""b""",Größe,at,\r\n'
    line = '7,1,02,"x ""y""\nz; ä",,2024-02-03,\r'
    (tmp_path / "a.csv").write_text(f"{header}{line}\n", newline="")
    ingest(tmp_path / "a.csv", *archive, "--wait", fields=("--topic", "t", "--key", "k", "--time", "at"))
    shown = {"k": "7", "n": "1", "n_1": "02", 'a "b"': 'x "y"\nz; ä', "Größe": "", "at": "2024-02-03", "": ""}
    for body in ("json", "text"):
        (message,) = run_here("query", "t", "7", "--messages", *where, "--body", body, "--json").document["messages"]
        assert message["state"] == ("archived" if archive else "local")
        value = message["message"]["body"]
        assert (json.loads(value) if body == "text" else value) == shown
    (item,) = run_here("query", "t", "7", *where, "--json").document["items"]
    with IndexReader.open(where[3]) as reader:
        sizes = {entry.size for entry in reader.query("t", "7")}
    assert (item["row"], sizes) == (len(header.encode()), {len(line.encode())})


def test_a_field_is_named_as_it_is_written_also_with_blanks(tmp_path, where, ingest, rows_of):
    names = ["Auftrags-Nr. (neu)", "time-stamp", "n"]
    (tmp_path / "a.log").write_text(f"{','.join(names)}\na,2024-02-03,0\n")
    pq.write_table(pa.table([["a"], ["2024-02-03"], [1]], names), tmp_path / "b.log")
    (tmp_path / "c.log").write_bytes(as_lines([dict(zip(names, ["a", "2024-02-03", 2], strict=True))]))
    ingest(tmp_path / "*.log", fields=("--topic", "t", "--key", names[0], "--time", names[1]))
    assert rows_of("a", "t") == ([0, 1, 2], [])
    told = refused(tmp_path / "b.log", "--topic", "t", "--key", "No. 1", "--time", "n", *where)
    assert "has --key No. 1 (as a name; it can't be read as JMESPath: " in told


# each has a meaning as a JMESPath, or is none
NAMES = ("Auftrags-Nr.", "max(price)", "items[0]", "a.b", "a || b", "Preis [EUR]", "a==b", "`1`", "@", "")


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_a_column_is_named_whatever_characters_its_name_has(tmp_path, where, rows_of, form):
    """A key that is a path of other columns as a JMESPath is the column of exactly this name."""
    columns = {name: [f"{number}"] for number, name in enumerate(NAMES)}
    columns |= {"at.": ["2024-02-03"], "a": ["x"], "b": ["y"], "n": [7]}
    if form == "csv":
        rows = list(columns), [f"{value}" for (value,) in columns.values()]
        (tmp_path / "a.csv").write_text("\n".join(";".join(cells) for cells in (*rows, "")))
    else:
        write_rows(tmp_path / f"a.{form}", pa.table(columns))
    keys = [option for name in NAMES for option in ("--key", name)]
    document = ingested(tmp_path / f"a.{form}", index=where, fields=("--topic", "t", *keys, "--time", "at."))
    assert document["entries"] == len(NAMES)
    for number in range(len(NAMES)):
        (message,) = run_here("query", "t", str(number), "--messages", *where, "--json").document["messages"]
        assert message["state"] == "local"


@pytest.mark.parametrize("archive", [(), ("--archive",)], ids=["linked", "archived"])
def test_a_named_key_is_found_by_its_name_and_value_alone(tmp_path, where, new, ingest, archive):
    """Order 136 and user 136 are two keys, in each form, also if rows are read one by one or from an archive."""
    orders = [{"order": 136, "user": {"id": "7"}}, {"order": 7, "user": {"id": "136"}}, {"order": "", "user": None}]
    rows = [{**of_order, "at": BEGIN_S + n, "n": n} for n, of_order in enumerate(orders)]
    (tmp_path / "a.ndjson").write_bytes(as_lines(rows[:2]))
    (tmp_path / "b.ndjson").write_bytes(as_lines(rows) + b'{"order": 136, "at": 1700000000, "n": 1e400}\n')
    (tmp_path / "c.csv").write_text("order,user.id,at,n\n136,7,1700000000,0\n7,136,1700000000,1\n,,1700000000,2\n")
    for end in ("parquet", "arrow"):
        write_rows(tmp_path / f"d.{end}", rows[:1])
    keys = ("--key", "order=order", "--key", "user=user.id", "--key", "both=[order, user.id]", "--key", "order")
    fields = ("--topic", "t", *keys, "--time", "at")
    shown = run_here("ingest", tmp_path / "c.csv", *fields, "--dry-run", *where, "--json").document["entries"]
    of_csv = ("order=136", "order=7", "user=136", "user=7", "both=136", "both=7", "136", "7")
    assert sorted(entry["key"] for entry in shown) == sorted(of_csv)
    ingest(tmp_path / "*", *archive, "--wait", fields=fields)
    rows_by_key = {
        "order=136": 6,
        "user=7": 5,
        "both=136": 8,
        "136": 6,
        "user=136": 3,
        "order=7": 3,
        "order=": 0,
        "user": 0,
    }
    for index in (where, *([new] if archive and from_archive(where, *new) else ())):
        for key, count in rows_by_key.items():
            messages = run_here("query", "t", key, "--messages", *index, "--json").document["messages"]
            assert [message["state"] for message in messages] == ["archived" if archive else "local"] * count, key
    erased = run_here("erase", "--topic", "t", "--key", "user=7", "--now", "--yes", *where[2:], "--json")
    assert erased.code == 0, erased.err
    if archive:
        # the copies of the rows go, and their files still show them by their other keys
        messages = run_here("query", "t", "order=136", "--messages", *where, "--json").document["messages"]
        assert sorted(message["state"] for message in messages) == ["archived", *["local"] * 5]
    left = {key: len(run_here("query", "t", key, *where, "--json").document["items"]) for key in rows_by_key}
    assert left == rows_by_key | {"user=7": 0}


OF_MAPS = pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int64()))
TWICE = pa.table([["a"], ["b"], ["2024-02-03"], [1]], ["k", "k", "at", "n"])


@pytest.mark.parametrize(
    ("form", "rows", "key", "problem"),
    [
        *(
            (form, [row(n) | {"parts": [{"sku": f"s{n}"}]} for n in range(5)], key, f"--key {key} is {kind}, which is "
             f"no key: name a field of it, such as --key {field}")
            for form in ("ndjson", "parquet")
            for key, kind, field in (
                ("customer", "an object", "customer.id"), ("parts", "a list of objects", "parts[].sku")
            )
        ),
        ("parquet", pa.table({"at": [BEGIN_S], "marks": OF_MAPS}), "marks", "--key marks is a map, which is no key"),
        ("parquet", [row(1)], "goods[].sku", "has --key goods[].sku; the first one has order_id, customer, at, n"),
        ("parquet", TWICE, "k", "a.parquet has 2 columns with the name k: "),
        ("parquet", TWICE, "k || n", "a.parquet has 2 columns with the name k: "),
    ],
)  # fmt: skip
def test_a_field_that_is_no_key_is_refused_with_one_that_is(tmp_path, where, form, rows, key, problem):
    write_rows(path := tmp_path / f"a.{form}", rows)
    assert problem in refused(path, "--topic", "t", "--key", key, "--time", "at", *where)


def test_files_without_a_row_beside_others_change_nothing(tmp_path, where, new, ingest, rows_of):
    folder = tmp_path / "logs"
    folder.mkdir()
    for number, data in enumerate((b"", b"\n\n", gzip.compress(b""), lzma.compress(b"\n"), b"\xef\xbb\xbf")):
        (folder / f"{number}.log").write_bytes(data)
    assert refused(folder, *KEYS, *where, "--dry-run").endswith("1.log: no file has a row")
    (folder / "9.log").write_bytes(lines(0, 40))
    shown = run_here("ingest", folder, *KEYS, *where, "--dry-run", "--json").document
    assert shown["format"] == "ndjson" and shown["entries"][0]["file"].endswith("9.log")
    # as a shell expands a glob: each file by its name
    assert ingest(*sorted(folder.iterdir()))["rows"] == 40
    # the first row decides the form
    (folder / "4.log").write_bytes(b"\xef\xbb\xbforder_id,customer.id,at,n\n" + f"7,c7,{BEGIN_S},70\n".encode())
    assert [ingest(folder)["rows"] for _ in range(2)] == [1, 0]
    assert rows_of("c7") == ([70], []) and rows_of("c3")[0] == expected("c3", 40)
    # a first file that has only a header lacks no field
    (tmp_path / "a.csv").write_text("order_id,customer.id,at\n")
    assert ingest(tmp_path / "a.csv")["rows"] == 0
    (tmp_path / "b.csv").write_text("order_id,at\n")
    assert "has --key customer.id; " in refused(tmp_path / "b.csv", *KEYS, *new)


def test_a_bad_row_is_named_and_passed_over_and_is_no_finding_on_demand(tmp_path, where, new, ingest):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 3) + b"{broken\n" + lines(3, 5) + b'{"order_id": 1, "at": "yesterday"}\n')
    told = refused(log, *KEYS, *where, *SIZES, "--strict")
    assert f"byte {len(lines(0, 3))}" in told and "app.log" in told
    document = ingest(log, "--skip-bad")
    assert (document["rows"], document["skipped"]) == (5, 2)
    assert "yesterday" in document["skipped_first"][1]["problem"]
    done = run_here("ingest", log, *KEYS, *new, *SIZES)
    assert done.code == 1 and re.search(r"rows +5\n", done.out) and "damaged" not in done.out
    assert f"skipped: {log.as_uri()}, line 4 (byte {len(lines(0, 3))}): not JSON" in done.err


def test_a_topic_with_other_entries_is_refused_because_offsets_would_hide_one_another(tmp_path, where, new, ingest):
    with IndexService.open(root=new[1], storage=new[3]) as index:
        index.put("orders", 0, "k", 5, 1, BEGIN_S * 1000)
    (tmp_path / "app.log").write_bytes(lines(0, 3))
    assert "choose another --topic" in refused(tmp_path / "app.log", *KEYS, *new)
    # and messages of a topic with rows, which would be shown as rows
    ingest(tmp_path / "app.log")
    message = {"topic": "orders", "queue_id": 0, "key": "k", "offset": 0, "size": 1, "timestamp_ms": BEGIN_S * 1000}
    (tmp_path / "messages.ndjson").write_bytes(as_lines([message]))
    assert "queue_id 0 of topic 'orders' has rows of files" in refused(tmp_path / "messages.ndjson", *where)
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
    assert f"delete {root}, too, and run the command again" in refused(*arguments)
    shutil.rmtree(root)
    assert run_here("ingest", *arguments, "--json").document["rows"] == 9


def test_a_name_that_is_not_utf_8_is_refused_by_its_name(tmp_path, where):
    folder = tmp_path / "logs"
    folder.mkdir()
    with open(os.path.join(os.fsencode(folder), b"caf\xe9.log"), "wb") as log:  # noqa: PTH118
        log.write(lines(0, 3))
    for source in (folder, folder / "*.log"):
        told = refused(source, *KEYS, *where)
        assert "caf" in told and "the name is not UTF-8" in told
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

    def scan(place):
        if str(place) == denied:
            raise PermissionError(13, "Permission denied", denied)
        return scanned(place)

    before = listed(source)
    monkeypatch.setattr(os, "scandir", scan)
    assert (before, listed("a/*/*.ndjson"), listed("*/_*/1.ndjson")) == (2 if source.startswith("b") else 3, 1, 1)
    with pytest.raises(InvalidArgument, match="secret: Permission denied"):
        listed(source)


def test_prefixes_folders_and_globs_of_a_bucket_name_its_files(tmp_path, monkeypatch, s3_environment, ingest, rows_of):
    serve_s3(monkeypatch, s3_environment)
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


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidObjectState"])
def test_an_object_that_is_refused_is_the_state_of_its_rows(
    tmp_path, monkeypatch, s3_environment, where, ingest, rows_of, code
):
    refusal = Answer(403, b"<Error><Code>%s</Code></Error>" % code.encode(), {"Content-Type": "application/xml"})
    with counting_proxy(s3_environment.endpoint_url) as proxy:
        serve_s3(monkeypatch, proxy)
        uri = f"s3://{s3_environment.new_bucket()}/logs"
        with contextlib.closing(IndexConfig(storage="memory://").open_storage(uri, any_names=True)) as storage:
            for number, suffix in enumerate(("ndjson", "parquet", "ndjson", "parquet")):
                write_rows(path := tmp_path / f"{number}.{suffix}", [row(number * 40)])
                storage.put(path.name, path.read_bytes())
        assert ingest(f"{uri}/*")["rows"] == 4
        for refused_files in (("0.", "3."), ("0.", "1.", "2.", "3.")):
            proxy.fault = lambda request, names=refused_files: (
                Action(answer=refusal) if request.path.rpartition("/")[2].startswith(names) else None
            )
            done = run_here("query", "--messages", *where, "--json", "orders", "0")
            states = [message["state"] for message in done.document["messages"]]
            assert (done.code, done.document["status"]) == (0, "complete")
            assert states == ["refused" if f"{number}." in refused_files else "local" for number in (3, 2, 1, 0)]
            problems = [message["problem"] for message in done.document["messages"] if message["state"] == "refused"]
            assert all(f"in {uri.rpartition('/')[0]}: " in problem for problem in problems)


def test_a_file_that_may_not_be_opened_is_refused(tmp_path, monkeypatch, where, ingest):
    write_rows(tmp_path / "a.ndjson", [row(0)])
    ingest(tmp_path / "a.ndjson")
    opened = Path.open

    def denied(path, *how, **named):
        if path.name == "a.ndjson":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *how, **named)

    monkeypatch.setattr(Path, "open", denied)
    done = run_here("query", "--messages", *where, "--json", "orders", "0")
    (message,) = done.document["messages"]
    assert (done.code, message["state"]) == (0, "refused") and "Permission denied" in message["problem"]


def test_folders_in_a_table_of_a_bucket_are_refused(tmp_path, monkeypatch, s3_environment, where, ingest):
    """A partition's folder has rows that the table has deleted, which an index would bring back."""
    serve_s3(monkeypatch, s3_environment)
    uri = f"s3://{s3_environment.new_bucket()}"
    with contextlib.closing(IndexConfig(storage="memory://").open_storage(uri, any_names=True)) as storage:
        tables = {"delta": "_delta_log/0.json", "hudi": ".hoodie/x", "ice berg": "metadata/1.metadata.json"}
        for name, metadata in tables.items():
            storage.put(f"logs/{name}/data/day=1/1.ndjson", lines(0, 10))
            storage.put(f"logs/{name}/{metadata}", b"{}")
        storage.put("logs/plain tables/metadata/1.ndjson", lines(0, 10))
    for name in ("delta", "hudi", "ice%20berg"):
        for place in ("data", "data/day=1/", "data/day=1/1.ndjson", "data/day=*/*.ndjson", "d*/**"):
            told = refused(f"{uri}/logs/{name}/{place}", *KEYS, *where)
            assert "is a table (" in told and unquote(name) in told, place
    assert not (tmp_path / "root").exists()
    assert ingest(f"{uri}/logs/plain t*/**")["rows"] == 10


@pytest.mark.parametrize(
    ("mark", "quote", "options"),
    [("^", "'", ("--delimiter", "^", "--quote", "'")), ("\t", "", ("--delimiter", "\\t", "--quote", "none"))],
)
def test_rows_of_csv_come_back_by_the_delimiter_and_quote_that_were_given(
    tmp_path, ingest, rows_of, where, mark, quote, options
):
    def records(begin, end):
        cells = ([n % 40, f"{quote}c{n % 7}{quote}", BEGIN_S + n, f'5" x, y {n}', n] for n in range(begin, end))
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
    assert "--delimiter is one ASCII character" in refused(log, *KEYS, *where, "--delimiter", "ab")


def test_a_file_that_changes_while_it_is_read_is_named_and_read_again_by_the_next_run(
    tmp_path, monkeypatch, ingest, rows_of
):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 50))
    text_before_damage = rows_of_text.text_before_damage

    def rewriting(*arguments):
        read = text_before_damage(*arguments)
        if read[0] and arguments[-1] == rows_of_text.BLOCK_BYTES:
            log.write_bytes(lines(50, 99))
        return read

    monkeypatch.setattr(rows_of_text, "text_before_damage", rewriting)
    assert ingest(log)["changed_while_read"] == [log.as_uri()]
    monkeypatch.undo()
    # no row of the file as it was comes back, and none is taken for another
    numbers, problems = rows_of("c3")
    assert numbers == [] and set(problems) == {f"{log.as_uri()} has changed since it was indexed"}
    again = ingest(log)
    assert (again["rows"], again["changed"], again["changed_while_read"]) == (49, [log.as_uri()], [])
    assert rows_of("c3")[0] == [n for n in range(50, 99) if n % 7 == 3]


def test_a_row_that_does_not_carry_the_key_is_dropped(tmp_path, where, ingest, rows_of):
    log = tmp_path / "app.log"
    log.write_bytes(lines(0, 3))
    assert ingest(log)["rows"] == 3
    # an entry of another key with the same hash would lead here, too
    with IndexService.open(root=where[1], storage=where[3], slots=32, items=1000) as index:
        of_row = {"key": "stranger", "size": len(lines(0, 1)) - 1, "timestamp_ms": BEGIN_S * 1000}
        index.put_source_batch(batch(1, topic="orders", **of_row))
    assert rows_of("c0")[0] == [0]
    assert rows_of("stranger") == ([], [])


def test_what_is_not_read_says_how_to_make_it_readable(tmp_path, where):
    (tmp_path / "0.log").write_bytes(lines(0, 9))
    for name, text, more, said in (
        ("a.json", b'[{"order_id": 1}]\n', (), "jq -c '.[]'"),
        ("a.json", b'[{"order_id": 1}]\n', ("--follow", "--dry-run"), "--dry-run"),
        # no line that is not yet whole, though a first file can be read
        ("a.json", b'[{"order_id": 1}]', (tmp_path / "0.log", "--strict"), "jq -c '.[]'"),
        ("b.csv", b"order_id,at\r1,2024-02-03\r", (), r"`tr '\r' '\n' < FILE > FILE.csv`"),
        ("c.csv", b'"order_id"x,at\n1,2024-02-03\n', (), f"{tmp_path}/c.csv: the header is not CSV: "),
        ("d.csv", "order_id,customer.id,at\nMüller,1,2\n".encode("latin-1"), (), "`iconv -f LATIN1 -t UTF-8 FILE > "),
        ("e.log", '{"order_id":"Müller"}\n'.encode("latin-1"), (), "is not UTF-8: write UTF-8, for example with "),
        (
            "f.log",
            b'{"order_id":"' + b"a" * (17 << 20) + b'"}\n',
            (),
            "the line at byte 0 is longer than 16,777,216 bytes",
        ),
        ("g.log", b'{"order_id":1,}\n', (), "g.log: the first row is bad: not JSON: "),
    ):
        (tmp_path / name).write_bytes(text)
        told = refused(tmp_path / name, *KEYS, *where, *more)
        assert said in told and ("--dry-run" in more or str(tmp_path / name) in told)
