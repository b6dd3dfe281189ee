"""Files that are followed: they grow, are rotated and copied, and a run is killed anywhere, without a lost row."""

import itertools
import json
import os
import random
import shutil
import signal
from collections import Counter

import pytest

from tests.integration.cli.command_lines import run_here, running
from tests.support.hanging import until
from tests.unit.cli.test_linked_files import BEGIN_S, Crash, Killed
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.follow import PatientPut
from tiered_index.sources import known_files, linked
from tiered_index.sources.linked import FileLinker
from tiered_index.sources.listing import PinnedFile, listed_files
from tiered_index.sources.rows import text as rows_of_text
from tiered_index.sources.rows.mapping import RowMapping

KEYS = 3


@pytest.fixture
def config(tmp_path):
    return IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "logs").mkdir()
    return folder


class Folder:
    """The model: a folder of a program that writes rows, and of those that rotate its files."""

    def __init__(self, path, moments):
        self.path, self.moments = path, moments
        self.written = self.files = 0
        self.torn = b""

    @property
    def log(self):
        return self.path / "app.log"

    def act(self):
        """Do one thing, and return the function that ends it, which may come later."""
        return self.moments.choice([self.append] * 5 + [self.tear, self.create, self.rename, self.copy])()

    def rows(self, count):
        self.written += count
        numbers = range(self.written - count, self.written)
        return "".join(f"{json.dumps({'k': n % KEYS, 'at': BEGIN_S + n, 'n': n})}\n" for n in numbers).encode()

    def append(self):
        with self.log.open("ab") as log:
            log.write(self.torn + self.rows(self.moments.randrange(1, 40)))
        self.torn = b""

    def tear(self):
        self.append()
        line = self.rows(1)
        cut = self.moments.randrange(1, len(line) - 2)
        with self.log.open("ab") as log:
            log.write(line[:cut])
        self.torn = line[cut:]

    def create(self):
        self.files += 1
        (self.path / f"other-{self.files}.log").write_bytes(self.rows(self.moments.randrange(1, 40)))

    def rotated(self):
        self.append()
        self.files += 1
        return self.path / f"app.log.{self.files}"

    def rename(self):
        self.log.rename(self.rotated())
        if self.moments.random() < 0.5:
            self.append()

    def copy(self):
        shutil.copyfile(self.log, self.rotated())
        return lambda: os.truncate(self.log, 0)


@pytest.mark.parametrize("seed", [0, 11, 15, 36, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_no_row_is_lost_or_doubled_while_files_rotate_and_runs_are_killed(folder, monkeypatch, config, seed):
    moments = random.Random(seed)
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    monkeypatch.setattr(linked, "_AT_ONCE", 2)
    written, kills = Folder(folder, moments), 0
    index = linker = None
    later = None
    for step in range(40):
        if later is not None:
            later()
            later = None
        else:
            later = written.act() if step < 36 else written.append()
        if moments.random() < 0.2:
            continue
        if linker is None:
            index = IndexService(config)
            until_killed = Killed(index, moments, moments.randrange(40) if step < 36 else 10_000)
            index.link = until_killed(index.link)
            mapping = RowMapping(("k",), "at", "s")
            linker = FileLinker(index, "t", mapping, PatientPut(index, 10.0))
            linker.patient = until_killed(linker.patient)
        try:
            with listed_files([str(folder)], config, may_lack=True) as files:
                linker.run(files)
        except Crash:
            kills += 1
            index.abandon()
            linker = None
    assert kills
    if linker is not None:
        index.close()
    sources = (folder, "--topic", "t", "--key", "k", "--time", "at", "--root", config.root, "--storage", config.storage)
    done = run_here("ingest", *sources, "--slots", 32, "--items", 300, "--json")
    assert done.code == 0, done.err
    answers = [answer for key in range(KEYS) for answer in answers_of(config, str(key))]
    assert [answer.problem for answer in answers if answer.message is None] == []
    assert Counter(json.loads(answer.message.text)["n"] for answer in answers) == Counter(range(written.written))


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
    live(at_put=lambda number: number >= 1 and crash(number))
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
