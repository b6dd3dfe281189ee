"""Files that are followed: they grow, are rotated and copied, and a run is killed anywhere, without a lost row."""

import itertools
import json
import signal

import pytest

from tests.integration.cli.command_lines import run_here, running
from tests.support.hanging import until
from tests.unit.cli.test_linked_files import BEGIN_S, Crash
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.connectors.files import known_files
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import PinnedFile, listed_files
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.follow import PatientPut


@pytest.fixture
def config(tmp_path):
    return IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "logs").mkdir()
    return folder


def test_the_command_follows_files_until_a_signal(tmp_path):
    log, storage = tmp_path / "app.log", f"file://{tmp_path}/objects"
    row = '{{"k": "a", "at": 1700000000, "n": {}}}\n'.format
    log.write_text(row(0))
    where = ["--root", str(tmp_path / "root"), "--storage", storage]
    arguments = [str(tmp_path / "*.log*"), "--topic", "t", "--key", "k", "--time", "at", "--follow", "--poll", "0.05"]
    with running("ingest", *arguments, *where, "--json") as (process, lines):
        wait_for(where, 1)
        with log.open("a") as more:
            more.write(row(1))
        wait_for(where, 2)
        log.rename(tmp_path / "app.log.1")
        log.write_text(row(2))
        wait_for(where, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        document = lines()[-1]
    assert (document["status"], document["rows"]) == ("stopped", 3)
    answer = run_here("query", "t", "a", "--messages", *where, "--json").document["messages"]
    assert sorted(json.loads(record["message"]["body"])["n"] for record in answer) == [0, 1, 2]


def test_an_interrupt_ends_a_run_that_follows_files_as_one_that_follows_a_broker(tmp_path):
    log, where = tmp_path / "app.log", ["--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/objects"]
    log.write_text('{"k": "a", "at": 1700000000}\n')
    arguments = [str(log), "--topic", "t", "--key", "k", "--time", "at", "--follow", "--poll", "0.05"]
    with running("ingest", *arguments, *where, "--json") as (process, lines):
        wait_for(where, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert lines()[-1]["status"] == "stopped"


def wait_for(where, count):
    def is_met():
        done = run_here("query", "t", "a", *where, "--json")
        return done.code == 0 and len(done.document["items"]) == count

    until(is_met, every_s=0.1)


def test_a_file_that_is_renamed_while_it_is_read_is_named_and_each_of_its_rows_is_found_once(
    folder, monkeypatch, config
):
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    # a file that is whole in its first bytes is not read again
    monkeypatch.setattr(known_files, "HeldFile", lambda file, head: file)
    log = folder / "app.log"
    log.write_text(rows_of(range(30)))
    moves = itertools.count()
    opened = PinnedFile.open

    def moving(file):
        # after it was listed, and its first bytes were read
        if next(moves) == 1:
            log.rename(folder / "app.log.1")
            log.write_text(rows_of(range(30, 40)))
        return opened(file)

    with IndexService(config) as index:
        linker = FileLinker(index, "t", RowMapping(("k",), "at", "s"), PatientPut(index, 10.0))
        for number in range(2):
            with monkeypatch.context() as patched, listed_files([str(folder)], config) as files:
                for name in ("open", "ranges", "ahead"):
                    patched.setattr(PinnedFile, name, moving)
                counts = linker.run(files)
            assert len(counts.changed_while_read) == 1, number
    assert indexed_rows(config) == list(range(40))


def lives_of(folder, config):
    """Return a function that indexes a folder by a new writer; `at_put` and `at_link` are called before calls."""

    def live(at_put=lambda number: None, at_link=lambda number: None):
        index, puts, links = IndexService(config), itertools.count(), itertools.count()
        linker = FileLinker(index, "t", RowMapping(("k",), "at", "s"), PatientPut(index, 10.0))
        put, link = linker.patient, index.link

        def put_until(*arguments):
            at_put(next(puts))
            put(*arguments)

        def link_until(*arguments):
            at_link(next(links))
            return link(*arguments)

        linker.patient, index.link = put_until, link_until
        try:
            with listed_files([str(folder)], config) as files:
                linker.run(files)
        except Crash:
            index.flush()
            index.abandon()
        else:
            index.close()

    return live


def rows_of(numbers):
    return "".join(f"{json.dumps({'k': 'a', 'at': BEGIN_S + n, 'n': n})}\n" for n in numbers)


def answers_of(config, key="a"):
    with IndexReader.open(config=config) as reader, FileRows(reader) as of_files:
        return list(reader.messages("t", key, source=of_files, max_count=100_000))


def indexed_rows(config):
    return sorted(json.loads(answer.message.text)["n"] for answer in answers_of(config))


def crash(number):
    raise Crash


def test_a_text_that_is_away_while_a_run_goes_on_is_read_when_it_is_back(tmp_path, folder, config):
    away = tmp_path / "away.log"
    (folder / "a.log").write_text(rows_of(range(5)))
    live = lives_of(folder, config)
    (folder / "b.log").write_text(rows_of(range(5, 8)))
    # killed with both files begun, and again with the rows of the second one put
    live(at_put=crash)
    (folder / "a.log").rename(away)
    puts = []
    live(at_put=puts.append, at_link=lambda number: len(puts) > 1 and crash(number))
    assert len(puts) > 1
    away.rename(folder / "c.log")
    live()
    live()
    assert indexed_rows(config) == list(range(8))


def test_lines_that_come_after_a_killed_run_has_read_to_the_end_are_indexed(folder, monkeypatch, config):
    log = folder / "a.log"
    log.write_text(rows_of(range(30)))
    live = lives_of(folder, config)
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)

    def grow(number):
        if number == 2:
            with log.open("a") as more:
                more.write(rows_of(range(30, 40)))

    # it grows while it is read, so a further segment reserves more than it has
    live(at_put=grow, at_link=lambda number: number >= 2 and crash(number))
    with log.open("a") as more:
        more.write(rows_of(range(40, 60)))
    live()
    assert indexed_rows(config) == list(range(60))


def test_rows_without_checksums_are_never_those_of_another_text(folder, monkeypatch, config):
    (folder / "a.log").write_text(rows_of(range(10, 50)))
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    live = lives_of(folder, config)
    # killed with some rows put, and its file replaced by one with the same key in each line
    live(at_put=lambda number: number >= 3 and crash(number))
    (folder / "a.log").write_text(rows_of(range(20, 40)))
    live()
    answers = answers_of(config)
    for answer in answers:
        at = answer.item.timestamp_ms // 1000 - BEGIN_S
        assert answer.message is None or json.loads(answer.message.text)["n"] == at
    assert any("has changed" in (answer.problem or "") for answer in answers if answer.message is None)
