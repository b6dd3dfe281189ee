"""Answers about files that a run follows are complete up to a time before which all rows were put, and no later."""

import signal
import time

import pytest

from tests.integration.cli.command_lines import run_here, running
from tests.support.hanging import until
from tests.unit.cli.test_followed_files import rows_of
from tests.unit.cli.test_linked_files import BEGIN_S, Crash
from tiered_index import IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import PinnedFile, listed_files
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.follow import PatientPut
from tiered_index.errors import InvalidArgument

T = BEGIN_S * 1000 + 86_400_000


class Logs:
    """A folder that is followed as topic "t", or, by `topics`, as the topics that the rows have in a field."""

    def __init__(self, folder, *, topics=False):
        self.folder = folder / "logs"
        self.folder.mkdir()
        self.config = IndexConfig(root=folder / "root", storage=f"file://{folder}/objects", slots=32, items=300)
        self.topics = topics
        self.index = IndexService(self.config)
        self.linker = self.new_linker()

    def new_linker(self):
        mapping = RowMapping(("k",), "at", "s", topic="k" if self.topics else None)
        return FileLinker(self.index, None if self.topics else "t", mapping, PatientPut(self.index, 10.0))

    def look(self, *read_ms, linker=None):
        with listed_files([str(self.folder)], self.config, may_lack=True) as files:
            (linker or self.linker).run(files, *read_ms)

    def as_of_ms(self, topic="t"):
        """The time of answers, which the writer and a reader of its root must both have."""
        self.index.flush()
        with IndexReader.open(config=self.config) as reader:
            known = {lookups.query(topic, "a").as_of_ms for lookups in (self.index, reader)}
        (as_of_ms,) = known
        return as_of_ms

    def write(self, *numbers, name="a.log"):
        with (self.folder / name).open("a") as log:
            log.write(rows_of(numbers))


@pytest.fixture
def logs(tmp_path):
    logs = Logs(tmp_path)
    yield logs
    logs.index.close()


def test_the_time_moves_after_rows_once_a_minute_without_them_and_in_the_end(logs):
    logs.write(1)
    logs.look(T)
    assert logs.as_of_ms() == T
    for seconds, moved in ((59, 0), (60, 60_000), (119, 60_000)):
        logs.look(T + seconds * 1000)
        assert logs.as_of_ms() == T + moved
    logs.write(2)
    logs.look(T + 120_000)
    assert logs.as_of_ms() == T + 120_000
    logs.look(T + 127_000)
    assert logs.as_of_ms() == T + 120_000
    logs.linker.end()
    assert logs.as_of_ms() == T + 127_000


def test_the_time_is_not_known_before_the_first_look_has_read_all(logs, monkeypatch):
    """Also of files that were indexed before they were followed."""
    logs.write(1)
    logs.look(linker=logs.new_linker())
    assert logs.as_of_ms() is None
    logs.look(0)
    assert logs.as_of_ms() == 0
    logs.look(T)
    assert logs.as_of_ms() == T


def test_rows_that_are_indexed_once_have_no_time_and_move_none(logs):
    """Such a run may be of other files than those that are followed."""
    logs.write(1)
    logs.look(T)
    logs.write(2)
    logs.look(linker=logs.new_linker())
    assert (len(logs.index.query("t", "a")), logs.as_of_ms()) == (2, T)


def test_the_time_of_topics_in_a_field_is_for_topics_that_no_row_has_yet(tmp_path):
    logs = Logs(tmp_path, topics=True)
    with logs.index:
        logs.write(1)
        logs.look(T)
        assert (logs.as_of_ms("a"), logs.as_of_ms("unknown")) == (T, T)


def test_a_killed_run_leaves_the_time_before_its_rows(logs):
    logs.write(1)
    logs.look(T)
    logs.index.flush()
    logs.write(2)
    logs.look(T + 3_600_000)
    logs.index.abandon()
    logs.index = IndexService(logs.config)
    assert (len(logs.index.query("t", "a")), logs.as_of_ms()) == (1, T)


def test_a_look_that_fails_leaves_the_time(logs):
    logs.write(1)
    logs.look(T)
    logs.write(2)
    put, logs.linker.patient = logs.linker.patient, crash
    with pytest.raises(Crash):
        logs.look(T + 3_600_000)
    assert logs.as_of_ms() == T
    logs.linker.patient = put
    logs.linker.begin_again()
    logs.look(T + 7_200_000)
    assert (len(logs.index.query("t", "a")), logs.as_of_ms()) == (2, T + 7_200_000)


def crash(*_):
    raise Crash


@pytest.mark.parametrize("why", ["denied", "moved", "written"])
def test_a_file_that_a_later_look_reads_stops_the_time(logs, monkeypatch, why):
    logs.write(1)
    logs.look(T)
    logs.write(2, name="b.log")
    logs.write(3)
    opened = PinnedFile.open

    def refusing(self):
        if self.path.name != "b.log":
            return opened(self)
        if why == "moved":
            self.path.rename(self.path.with_name("c.log"))
            return opened(self)
        raise InvalidArgument(f"{self.path}: Permission denied") from PermissionError()

    with monkeypatch.context() as patched:
        if why == "written":
            logs.linker.still_s = 60.0
            (logs.folder / "b.log").rename(logs.folder / "b.log.gz")
            (logs.folder / "b.log.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\xff")
        else:
            for name in ("open", "ranges", "ahead"):
                patched.setattr(PinnedFile, name, refusing)
        logs.look(T + 3_600_000)
    assert (len(logs.index.query("t", "a")), logs.as_of_ms()) == (2, T)
    if why == "written":
        (logs.folder / "b.log.gz").unlink()
        logs.write(2, name="b.log")
    logs.look(T + 7_200_000)
    assert (len(logs.index.query("t", "a")), logs.as_of_ms()) == (3, T + 7_200_000)


def test_a_damaged_file_and_a_row_without_its_end_do_not_stop_the_time(logs):
    """The damaged file is named; the row is none before its end is written."""
    logs.write(1)
    (logs.folder / "b.json").write_bytes(b"[1]\n")
    with (logs.folder / "a.log").open("a") as log:
        log.write('{"k": "a", "at"')
    logs.look(T)
    assert (logs.linker.counts.damaged, logs.as_of_ms()) == (1, T)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_answer_of_a_root_says_up_to_when_a_follower_has_read(tmp_path, ending):
    log, where = tmp_path / "app.log", ("--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/objects")
    log.write_text(rows_of([1]))
    arguments = (str(log), "--topic", "t", "--key", "k", "--time", "at", "--follow", "--poll", "0.05")
    begun_s = time.time()

    def answer():
        return run_here("query", "t", "a", *where, "--json").document

    with running("ingest", *arguments, *where) as (process, _):
        until(lambda: (tmp_path / "root").exists() and run_here("query", "t", "a", *where).code == 0, every_s=0.1)
        until(lambda: answer()["as_of_ms"] or 0, every_s=0.1)
        process.send_signal(ending)
        process.wait(60)
    ended_s = time.time()
    with log.open("a") as more:
        more.write(rows_of([2]))
    document = answer()
    assert (len(document["items"]), document["status"]) == (1, "complete")
    assert int(begun_s) * 1000 <= document["as_of_ms"] <= ended_s * 1000
    assert "1 found, complete as of 20" in run_here("query", "t", "a", *where).out


def test_a_folder_that_is_missing_stops_the_time(tmp_path):
    """It may be on a disk that is not mounted."""
    log, where = tmp_path / "app.log", ("--root", str(tmp_path / "root"), "--storage", f"file://{tmp_path}/objects")
    log.write_text(rows_of([1]))
    away = tmp_path / "away"
    arguments = (str(log), str(away), "--topic", "t", "--key", "k", "--time", "at", "--follow", "--poll", "0.05")

    def as_of_ms():
        done = run_here("query", "t", "a", *where, "--json")
        return done.document["as_of_ms"] if done.code == 0 and done.document["items"] else None

    with running("ingest", *arguments, *where) as (process, _):
        until(lambda: as_of_ms() == 0, every_s=0.1)
        assert "complete so far: its source was never read to its end" in run_here("query", "t", "a", *where).out
        away.mkdir()
        # the time moves once a minute without rows, and 0 was long ago
        until(lambda: as_of_ms(), every_s=0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
