"""What happens to files of a log between two runs: each row of them is found once, or the answer says why not."""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.cli.test_linked_files import BEGIN_S, Crash, Killed
from tiered_index import FileRows, IndexReader, IndexService
from tiered_index.config import IndexConfig
from tiered_index.follow import PatientPut
from tiered_index.sources import linked
from tiered_index.sources.linked import FileLinker
from tiered_index.sources.listing import listed_files
from tiered_index.sources.rows import text as rows_of_text
from tiered_index.sources.rows.mapping import RowMapping

FORMS = ("ndjson", "csv", "gz", "zst", "parquet")
TEXTS = ("ndjson", "csv", "gz", "zst")


class Logs:
    """The files of a log in a folder or in a bucket, and the index of them."""

    def __init__(self, tmp_path, where, form):
        self.form, self.folder = form, tmp_path / "logs"
        self.is_local = where == "folder"
        self.config = IndexConfig(root=tmp_path / "root", storage=f"file://{tmp_path}/objects", slots=32, items=300)
        self.uri = str(self.folder) if self.is_local else f"memory://{tmp_path.name}"
        self.folder.mkdir()

    @contextlib.contextmanager
    def bucket(self):
        with contextlib.closing(self.config.open_storage(self.uri, any_names=True)) as storage:
            yield storage

    def write(self, name, data):
        if self.is_local:
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(data)
            return
        with self.bucket() as storage:
            storage.put(self.key(name), data)

    def key(self, name):
        """Return the name of an object: the URI of such a bucket has no folders."""
        return name.replace("/", "-")

    def read(self, name):
        if self.is_local:
            return (self.folder / name).read_bytes()
        with self.bucket() as storage:
            return storage.get(self.key(name))

    def delete(self, name):
        if self.is_local:
            (self.folder / name).unlink()
        else:
            with self.bucket() as storage:
                storage.delete_many([self.key(name)])

    def move(self, name, other):
        if self.is_local:
            (self.folder / other).parent.mkdir(exist_ok=True)
            (self.folder / name).rename(self.folder / other)
        else:
            self.write(other, self.read(name))
            self.delete(name)

    def rows(self, *numbers, begin=True):
        """Return a file, or a part to append, with rows. A number of 4 digits is as long as any other."""
        if self.form == "parquet":
            file = io.BytesIO()
            at = [BEGIN_S + n for n in numbers]
            pq.write_table(pa.table({"k": ["a"] * len(at), "at": at, "n": [f"{n:04}" for n in numbers]}), file)
            return file.getvalue()
        if self.form == "csv":
            lines = ["k,at,n"] * begin + [f"a,{BEGIN_S + n},{n:04}" for n in numbers]
        else:
            lines = [json.dumps({"k": "a", "at": BEGIN_S + n, "n": f"{n:04}"}) for n in numbers]
        text = "".join(f"{line}\n" for line in lines).encode()
        if self.form == "gz":
            return gzip.compress(text)
        return pa.compress(text, "zstd", asbytes=True) if self.form == "zst" else text

    def ingest(self, *, archive=False):
        with IndexService(self.config) as index, listed_files([self.uri], self.config, may_lack=True) as files:
            mapping = RowMapping(("k",), "at", "s")
            linker = FileLinker(index, "t", mapping, PatientPut(index, 10.0), archive=archive)
            counts = linker.run(files)
            index.seal()
            index.run_lifecycle()
        return counts

    def found(self):
        """Return how often each row comes back, and the number of rows that do not."""
        with IndexReader.open(config=self.config) as reader, FileRows(reader) as of_files:
            answers = list(reader.messages("t", "a", source=of_files, max_count=100_000))
        shown = Counter(int(json.loads(each.message.text)["n"]) for each in answers if each.message is not None)
        return shown, sum(each.message is None for each in answers)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(rows_of_text, "SUM_BYTES", 256)


def once(*ranges):
    return Counter(n for numbers in ranges for n in numbers)


def both(test):
    places = pytest.mark.parametrize("where", ["folder", "bucket"])
    return places(test)


@pytest.fixture
def logs(tmp_path, where, form):
    return Logs(tmp_path, where, form)


@both
@pytest.mark.parametrize("form", FORMS)
def test_the_same_content_is_the_same_file_and_is_not_read_again(logs):
    logs.write("app.log", logs.rows(*range(40)))
    assert logs.ingest().rows == 40
    if logs.is_local:
        os.utime(logs.folder / "app.log", (BEGIN_S, BEGIN_S))
        assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))
        shutil.copyfile(logs.folder / "app.log", logs.folder / "new")
        (logs.folder / "new").replace(logs.folder / "app.log")
    else:
        logs.write("app.log", logs.read("app.log"))
    # also before a run has seen it
    assert logs.found() == (once(range(40)), 0)
    counts = logs.ingest()
    assert (counts.rows, counts.known, counts.changed, counts.rewritten) == (0, 1, [], [])
    assert logs.found() == (once(range(40)), 0)


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_text_that_has_grown_is_continued(logs):
    logs.write("app.log", logs.rows(*range(30)))
    logs.ingest()
    for begin in (30, 50):
        logs.write("app.log", logs.read("app.log") + logs.rows(*range(begin, begin + 20), begin=False))
        assert logs.ingest().rows == 20
    assert logs.found() == (once(range(70)), 0)
    assert logs.ingest().known == 1


@both
@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_behind_an_edit_are_read_anew_and_those_before_it_keep_their_places(logs, shift):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    edited = [*range(25), 1025, *range(26 + shift, 40)]
    logs.write("app.log", logs.rows(*edited))
    counts = logs.ingest()
    assert 15 - shift <= counts.rows < 40 and len(counts.rewritten) == 1
    assert logs.found() == (once(edited), 0)
    again = logs.ingest()
    assert (again.rows, again.known) == (0, 1)
    # and once more before the first edit, and behind the end
    edited[18] = 1018
    logs.write("app.log", logs.rows(*edited))
    logs.ingest()
    assert logs.found() == (once(edited), 0)


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_text_with_another_begin_is_another_log_and_no_old_row_is_shown_for_it(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    edited = [1000, *range(1, 40)]
    logs.write("app.log", logs.rows(*edited))
    assert len(logs.ingest().changed) == 1
    assert logs.found() == (once(edited), 40)
    # the first text again, elsewhere
    logs.write("old/other", logs.rows(*range(40)))
    logs.ingest()
    assert logs.found() == (once(edited) + once(range(40)), 0)


@both
@pytest.mark.parametrize("form", ["parquet"])
def test_a_table_with_other_content_replaces_the_rows_of_its_name(logs):
    logs.write("a.parquet", logs.rows(*range(40)))
    logs.ingest()
    logs.write("a.parquet", logs.rows(*range(1, 41)))
    assert (logs.ingest().rows, logs.found()) == (40, (once(range(1, 41)), 0))
    logs.write("a.parquet", logs.rows(*range(40)))
    assert (logs.ingest().rows, logs.found()) == (40, (once(range(40)), 0))


@both
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["app.log.1", "elsewhere/app.log", "elsewhere/other"])
def test_a_file_that_has_moved_keeps_its_rows(logs, name):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    logs.move("app.log", name)
    logs.write("app.log", logs.rows(*range(40, 70)))
    assert (logs.ingest().rows, logs.found()) == (30, (once(range(70)), 0))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_copy_beside_a_log_is_not_indexed_and_has_its_rows_when_it_is_truncated(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    logs.write("app.log.1", logs.read("app.log"))
    counts = logs.ingest()
    assert (counts.rows, len(counts.copies), logs.found()) == (0, 1, (once(range(40)), 0))
    logs.write("app.log", logs.rows(*range(40, 45)))
    assert (logs.ingest().rows, logs.found()) == (5, (once(range(45)), 0))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_a_copy_that_is_new_with_its_log_is_indexed_once(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.write("app.log.1", logs.read("app.log"))
    assert (logs.ingest().rows, logs.found()) == (40, (once(range(40)), 0))


@both
@pytest.mark.parametrize("form", FORMS)
def test_the_same_content_under_two_names_is_two_files(logs):
    logs.write("a/app.log", logs.rows(*range(40)))
    logs.write("b/app.log", logs.read("a/app.log"))
    assert (logs.ingest().rows, logs.found()) == (80, (once(range(40), range(40)), 0))
    logs.write("c/app.log", logs.read("a/app.log"))
    assert logs.ingest().rows == 40


@both
@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_a_log_that_is_packed_keeps_its_rows(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    packed = gzip.compress(logs.read("app.log"))
    logs.write("app.log.1.gz", packed)
    # while both are there
    assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))
    logs.delete("app.log")
    assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))
    logs.write("app.log.1.gz", gzip.compress(gzip.decompress(packed), 1))
    assert (logs.ingest().rows, logs.found()) == (0, (once(range(40)), 0))


@both
@pytest.mark.parametrize("form", TEXTS)
def test_rows_with_copies_stay_answers_and_count_once(logs):
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest(archive=True)
    edited = [*range(25), 1025, *range(26, 40)]
    logs.write("app.log", logs.rows(*edited))
    logs.ingest(archive=True)
    # the row that is not in the file any more has its copy
    assert logs.found() == (once([*edited, 25]), 0)


@pytest.mark.parametrize("where", ["bucket"])
@pytest.mark.parametrize("form", FORMS)
def test_a_list_with_an_old_size_changes_nothing(logs, monkeypatch):
    logs.write("app.log", logs.rows(*range(20)))
    with listed_files([logs.uri], logs.config) as files:
        (old,) = files
    logs.write("app.log", logs.rows(*range(40)))
    logs.ingest()
    with IndexService(logs.config) as index, logs.bucket():
        linker = FileLinker(index, "t", RowMapping(("k",), "at", "s"), PatientPut(index, 10.0))
        with listed_files([logs.uri], logs.config) as files:
            stale = [type(old)(files[0].file, old.uri, old.size_bytes, old.place, old.stamp)]
            counts = linker.run(stale)
    assert (counts.rows, counts.known, counts.rewritten, logs.found()) == (0, 1, [], (once(range(40)), 0))


@pytest.mark.parametrize("where", ["folder"])
@pytest.mark.parametrize("form", ["ndjson"])
def test_a_row_with_a_byte_that_is_not_utf_8_elsewhere_is_shown_with_escapes(logs):
    logs.write("app.log", b'{"k": "a", "at": 1700000000, "n": "7", "note": "caf\xe9"}\n')
    assert logs.ingest().rows == 1
    with IndexReader.open(config=logs.config) as reader, FileRows(reader) as of_files:
        (answer,) = reader.messages("t", "a", source=of_files)
    assert json.loads(answer.message.text)["note"] == r"caf\xe9"


class Life:
    """The model: the rows of each file, whose numbers are unique, and a step of those that write and rotate files."""

    def __init__(self, logs, moments):
        self.logs, self.moments = logs, moments
        self.next = self.names = 0
        self.rows = {}
        # since the last run that was not killed: of a text that has grown, only two known blocks are compared
        self.grown, self.edited = set(), set()

    def numbers(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    def name(self, begin):
        self.names += 1
        return f"{begin}.{self.names}"

    def put(self, name, numbers):
        self.rows[name] = numbers
        self.logs.write(name, self.logs.rows(*numbers))

    def step(self):
        steps = [self.append, self.append, self.edit, self.edit, self.same, self.rename, self.copy, self.create]
        self.moments.choice([*steps, self.delete])()

    def append(self):
        if "app.log" not in self.rows or self.logs.form == "parquet":
            self.put("app.log", self.numbers(self.moments.randrange(5, 40)))
        elif "app.log" not in self.edited:
            numbers = self.numbers(self.moments.randrange(1, 40))
            self.rows["app.log"] = [*self.rows["app.log"], *numbers]
            self.logs.write("app.log", self.logs.read("app.log") + self.logs.rows(*numbers, begin=False))
            self.grown.add("app.log")

    def edit(self):
        if (names := sorted(self.rows.keys() - self.grown)) and len(self.rows[name := self.moments.choice(names)]) > 2:
            numbers, at = [*self.rows[name]], self.moments.randrange(len(self.rows[name]))
            numbers[at : at + 1] = self.numbers(self.moments.randrange(3))
            self.put(name, numbers)
            self.edited.add(name)

    def same(self):
        for name in self.rows:
            self.logs.write(name, self.logs.read(name))

    def rename(self):
        if "app.log" in self.rows and not self.grown:
            self.rows[other := self.name("app.log")] = self.rows.pop("app.log")
            self.logs.move("app.log", other)
            self.put("app.log", self.numbers(self.moments.randrange(5, 20)))

    def copy(self):
        if "app.log" in self.rows and not self.grown:
            self.rows[other := self.name("app.log")] = self.rows["app.log"]
            self.logs.write(other, self.logs.read("app.log"))
            if self.moments.random() < 0.7:
                self.put("app.log", self.numbers(self.moments.randrange(5, 20)))
            else:
                self.logs.delete(other)
                del self.rows[other]

    def create(self):
        self.put(self.name("other"), self.numbers(self.moments.randrange(5, 40)))

    def delete(self):
        if rotated := sorted(self.rows.keys() - {"app.log"}):
            self.logs.delete(name := self.moments.choice(rotated))
            del self.rows[name]


@both
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_each_row_of_files_is_found_once_whatever_happens_to_them_between_runs_that_are_killed(
    logs, monkeypatch, seed, form
):
    moments = random.Random(f"{seed}{form}{logs.is_local}")
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    monkeypatch.setattr(linked, "_AT_ONCE", 2)
    life, kills = Life(logs, moments), 0
    for step in range(24):
        life.step()
        index = IndexService(logs.config)
        until_killed = Killed(index, moments, moments.randrange(4) if step % 3 == 1 else 10_000)
        index.link = until_killed(index.link)
        linker = FileLinker(index, "t", RowMapping(("k",), "at", "s"), PatientPut(index, 10.0))
        linker.patient = until_killed(linker.patient)
        try:
            with listed_files([logs.uri], logs.config, may_lack=True) as files:
                linker.run(files)
        except Crash:
            kills += 1
            index.abandon()
            continue
        index.close()
        life.grown.clear()
        life.edited.clear()
        if step % 6 == 5:
            logs.ingest()
            expected = once(*life.rows.values())
            assert logs.found()[0] == expected, step
    logs.ingest()
    assert kills and logs.found()[0] == once(*life.rows.values())
