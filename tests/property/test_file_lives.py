"""Random lives of files of a log: they are written, rotated, packed, edited and restored, and runs are killed.

The model knows the rows of each file. After each step a row comes back at most as often as files have it, and each row
that came back before and is still in a file comes back, or the answer says that some row does not. After a run that
nothing has disturbed, each row comes back exactly once for each of its files.
"""

import gzip
import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from tests.support.file_logs import KEYS, TABLES, Logs, once, packed
from tests.unit.cli.test_linked_files import Crash, Killed
from tiered_index import IndexService, erase
from tiered_index.connectors.files import linked, listing
from tiered_index.connectors.files.identity import first_name
from tiered_index.connectors.files.rows import text as rows_of_text
from tiered_index.service.jobs.merge_run import merge_index

FORMS = ("ndjson", "csv", "gz", "zst", "parquet", "arrow")
# the forms whose quick life copies rows
ARCHIVED = ("ndjson", "zst", "parquet")
# further lives with copies, in which copies are erased, and runs are killed before files are written to
FURTHER_ARCHIVED = {(1, "zst", "bucket"), (2, "gz", "bucket"), (3, "gz", "folder")}
BLOCK_BYTES = 256


@dataclass
class File:
    """A file: its rows, its bytes, and its text; of a file with columns the bytes.

    - `torn`: the rest of a last line, which is not written yet.
    - `form`: how the text is packed.
    - `archived`: the rows that an undisturbed run has copied, and `known` those that some run may have read.
    - `has_moved`: it had another name before, and copies of its rows have that.
    - `is_apart`: a run has indexed it as a file of its own.
    - `left`: the rows that it had before, and that only copies have; `maybe` those of which a killed run may have some.
    """

    form: str
    numbers: list = field(default_factory=list)
    text: bytes = b""
    data: bytes = b""
    torn: tuple = ()
    archived: Counter = field(default_factory=Counter)
    known: Counter = field(default_factory=Counter)
    is_apart: bool = False
    has_moved: bool = False
    left: Counter = field(default_factory=Counter)
    maybe: Counter = field(default_factory=Counter)

    @property
    def rows(self):
        """The numbers of the rows that are whole."""
        return self.numbers


class Life:
    """The model, and the steps of those that write files. `archives`: each run copies rows."""

    def __init__(self, logs, moments, *, archives):
        self.logs, self.moments, self.archives = logs, moments, archives
        self.next = self.names = self.device = 0
        self.files, self.history = {}, []
        # of a plain text that has grown since the last undisturbed run, only two known blocks are compared
        self.grown, self.edited = set(), set()
        # one that has moved and was edited since then is another file
        self.moved = set()
        # rows that only copies have: those of which it is sure, and those that a killed run may have copied
        self.copied, self.maybe = Counter(), Counter()
        self.shown = Counter()
        # the keys that are erased, and the rows whose copies were erased with them
        self.erased, self.without_copies = set(), set()
        # the second half of a step, and an earlier list of the bucket
        self.later, self.older = None, []
        self.did = []

    # What is there

    @property
    def counted(self):
        """How often files have each row."""
        return once(*(file.rows for name, file in self.files.items() if self.original(name) is None))

    @property
    def least(self):
        """How often each row must come back: a row that has copies, once, also if several files have it."""
        copied = sum((file.left for file in self.files.values()), self.copied + Counter())
        counted = Counter(dict.fromkeys(self.counted, 1)) if self.archives else self.counted
        return counted | Counter(dict.fromkeys(copied, 1))

    @property
    def most(self):
        """How often each row may come back."""
        most = sum((file.left + file.maybe for file in self.files.values()), self.counted) + self.copied + self.maybe
        for name, file in self.files.items():
            original = self.original(name)
            if original is not None and file.is_apart and self.files[original].is_apart:
                # they were different logs before
                most += once(file.rows)
        return most

    def original(self, name):
        """Return the name of the file in the same folder, another one of its log, that has all rows of a file."""
        folder, slash, last = name.rpartition("/")
        file = self.files[name]
        for other_name, other in self.files.items() if file.text else ():
            of_other = other_name.rpartition("/")
            if other_name == name or of_other[:2] != (folder, slash) or first_name(of_other[2]) != first_name(last):
                continue
            is_longer = self.is_text and other.text.startswith(file.text) and other.text != file.text
            if is_longer or (other.text == file.text and (file.is_apart, other_name) < (other.is_apart, name)):
                return other_name
        return None

    @property
    def is_text(self):
        return self.logs.form not in TABLES

    # What happens

    def step(self):
        if self.later is not None:
            self.did.append("later")
            later, self.later = self.later, None
            later()
            return
        steps = [self.append, self.append, self.edit, self.redact, self.same, self.rotate, self.copy_and_truncate]
        steps += [self.move, self.copy_elsewhere, self.restore, self.create, self.delete]
        steps += [self.pack, self.tear] if self.logs.form in ("ndjson", "csv") else []
        steps += [self.remount] if self.logs.is_local else []
        act = self.moments.choice(steps)
        self.did.append(act.__name__)
        before = {name: file.data for name, file in self.files.items()}
        act()
        self.did[-1] += " " + ",".join(
            n for n in sorted({*before, *self.files}) if n not in self.files or before.get(n) != self.files[n].data
        )

    def numbers(self, least, most):
        count = self.moments.randrange(least, most)
        self.next += count
        return list(range(self.next - count, self.next))

    def name(self, begin):
        self.names += 1
        return f"{begin}.{self.names}"

    def any_file(self):
        return self.moments.choice(names) if (names := sorted(self.files)) else None

    def made(self, numbers, form=None):
        """Return a file with rows."""
        form = self.logs.form if form is None else form
        if not self.is_text:
            data = self.logs.rows(*numbers)
            return File(form, numbers, data, data)
        text = self.logs.lines(*numbers) if numbers else b""
        return File(form, numbers, text, packed(text, form) if text else b"")

    def write(self, name, file, *, is_new=False):
        """Write a file. `is_new`: it gets another inode."""
        if name in self.files and self.files[name] is not file:
            self.history.append((name, replace(self.files[name])))
        self.files[name] = file
        if is_new and self.logs.is_local:
            self.logs.write("new-one", file.data)
            self.logs.move("new-one", name)
        else:
            self.logs.write(name, file.data)

    def gone(self, file):
        """Note that a file is not there any more. Its rows stay if they are copied."""
        if self.archives:
            sure = self.sure(once(file.rows) & file.archived)
            self.copied += sure + file.left
            self.maybe += file.known - sure + file.maybe

    def sure(self, counts):
        """Return those of archived rows whose copies no erasure has taken."""
        return Counter({n: count for n, count in counts.items() if n not in self.without_copies})

    def replaced(self, name, numbers, *, is_new=False):
        """Write other rows under the name of a file."""
        before = self.files[name]
        after = self.made(numbers, before.form)
        if self.is_text and after.text[:BLOCK_BYTES] != before.text[:BLOCK_BYTES]:
            # another log
            self.gone(before)
        else:
            rows = once(numbers)
            after.is_apart = before.is_apart
            after.archived, after.known = before.archived & rows, before.known & rows
            if self.archives:
                sure = self.sure(before.archived - rows)
                left, maybe = before.left + sure, before.maybe + before.known - rows - sure
                # a row that comes back has its copy
                back = (rows - once(before.rows)) & left
                after.archived += back
                after.known |= after.archived
                after.left, after.maybe = left - back, maybe - rows
        self.write(name, after, is_new=is_new)
        self.edited.add(name)
        after.has_moved = before.has_moved
        # a row whose copy was erased is not replaced, because offsets near it have copies
        after.maybe |= Counter({n: 1 for n in self.without_copies if before.known[n]})
        if name in self.moved or before.has_moved or before.known - before.archived:
            # of a text whose reading was killed, the first block is a larger one
            after.maybe |= before.left
            self.doubt(name)

    def append(self, most=40):
        name = "app.log"
        if name not in self.files or not self.is_text or not self.files[name].text:
            numbers = self.numbers(5, most)
            if name in self.files:
                self.replaced(name, numbers)
            else:
                self.write(name, self.made(numbers))
            return
        file = self.files[name]
        if name in self.edited and file.form in ("ndjson", "csv"):
            return
        added = self.numbers(1, most)
        numbers = [*file.torn[:1], *added]
        rest = b"".join(file.torn[1:])
        text = rest + self.logs.lines(*added, begin=False)
        grown = replace(file, numbers=[*file.numbers, *numbers], text=file.text + text, torn=())
        grown.data = file.data + packed(text, file.form)
        self.write(name, grown)
        self.grown.add(name)

    def tear(self):
        """Append rows, and a part of another one."""
        self.append()
        name = "app.log"
        file = self.files[name]
        if name in self.edited or file.torn:
            return
        (number,) = self.numbers(1, 2)
        line = self.logs.lines(number, begin=False)
        cut = self.moments.randrange(1, len(line) - 2)
        grown = replace(file, text=file.text + line[:cut], torn=(number, line[cut:]))
        grown.data = file.data + packed(line[:cut], file.form)
        self.write(name, grown)
        self.grown.add(name)

    def editable(self):
        """Return the name of a file, and the number of a row that may be edited."""
        names = [name for name, file in sorted(self.files.items()) if name not in self.grown and not file.torn]
        name = self.moments.choice(names) if names else None
        if name is None or len(numbers := self.files[name].numbers) < 3:
            return None, 0
        at = self.moments.randrange(len(numbers))
        if self.archives and self.is_text and len(self.logs.lines(*numbers[:at])) < BLOCK_BYTES:
            # it is clear that it is in the first block, or that it is not
            at = 0
        return name, at

    def edit(self):
        name, at = self.editable()
        if name is not None:
            numbers = [*self.files[name].numbers]
            numbers[at : at + 1] = self.numbers(0 if at else 1, 3)
            self.replaced(name, numbers, is_new=self.moments.random() < 0.5)

    def redact(self):
        """Change a row, and no length."""
        name, at = self.editable()
        if name is not None:
            numbers = [*self.files[name].numbers]
            numbers[at : at + 1] = self.numbers(1, 2)
            self.replaced(name, numbers, is_new=self.moments.random() < 0.5)

    def same(self):
        """Touch or upload all files again."""
        for name, file in self.files.items():
            self.write(name, file, is_new=self.moments.random() < 0.5)

    def remount(self):
        """Give the device another number."""
        self.device += 1

    def taken(self, name):
        """Forget a file that gets another name, and return it."""
        for names in (self.grown, self.edited, self.moved):
            names.discard(name)
        return self.files.pop(name)

    def move_to(self, name, other):
        marks = [names for names in (self.grown, self.edited) if name in names]
        self.logs.move(name, other)
        self.files[other] = self.taken(name)
        for names in (*marks, self.moved):
            names.add(other)
        self.files[other].has_moved = True
        if other in self.edited or other in self.grown:
            self.doubt(other)

    def rotate(self):
        if "app.log" in self.files:
            self.move_to("app.log", self.name("app.log"))
            if self.moments.random() < 0.7:
                self.append(20)

    def move(self):
        if (name := self.any_file()) is not None:
            self.move_to(name, self.name("elsewhere/file" if self.moments.random() < 0.5 else "elsewhere/app.log"))

    def copy(self, name, other, data=None):
        """Copy a file. Copies of its rows in the archive are those of the first one."""
        file = replace(self.files[name], archived=Counter(), known=Counter(), left=Counter(), maybe=Counter())
        file.is_apart = False
        if data is not None:
            file.form, file.data = "gz", data
        self.write(other, file)
        for names in (self.grown, self.edited):
            if name in names:
                names.add(other)

    def empty(self, name):
        """Truncate a log whose rows another file has now."""
        before = self.files[name]
        for names in (self.grown, self.edited):
            names.discard(name)
        self.write(name, File(before.form))
        if self.moments.random() < 0.7:
            self.write(name, self.made(self.numbers(5, 20), before.form))

    def copy_and_truncate(self):
        if "app.log" in self.files and self.files["app.log"].numbers and self.is_text:
            self.copy("app.log", other := self.name("app.log"))
            is_truncated = self.moments.random() < 0.8

            def later():
                if is_truncated:
                    self.moved_rows("app.log", other)
                    self.empty("app.log")
                else:
                    self.delete_file(other)

            self.now_or_later(later)

    def pack(self):
        if (name := self.any_file()) is not None and self.files[name].text and self.files[name].form != "gz":
            file = self.files[name]
            other = f"{name}.gz" if name != "app.log" else f"{self.name(name)}.gz"
            if file.torn or other in self.files:
                return
            self.copy(name, other, gzip.compress(file.text))

            def later():
                self.moved_rows(name, other)
                self.logs.delete(name)
                self.taken(name)

            self.now_or_later(later)

    def doubt(self, name):
        """Note that a file may be another one for the index, so that copies of its rows stay answers."""
        if self.archives:
            self.files[name].maybe |= self.files[name].known

    def moved_rows(self, name, copy):
        """Let a copy of a file be the one that the index knows."""
        for what in ("archived", "known", "left", "maybe", "is_apart"):
            setattr(self.files[copy], what, getattr(self.files[name], what))
        if name in self.edited or name in self.grown:
            self.doubt(copy)

    def now_or_later(self, act):
        if self.moments.random() < 0.5:
            self.later = act
        else:
            act()

    def copy_elsewhere(self):
        if (name := self.any_file()) is not None and self.files[name].data and not self.files[name].torn:
            self.copy(name, self.name("copy/other"))

    def restore(self):
        """Bring an earlier state of a file back."""
        states = [(name, file) for name, file in self.history[-12:] if name in self.files and name not in self.grown]
        if states and not self.files[(chosen := self.moments.choice(states))[0]].torn:
            name, file = chosen
            if not file.torn and file.form == self.files[name].form:
                self.replaced(name, file.numbers)

    def create(self):
        self.write(self.name("other"), self.made(self.numbers(5, 40)))

    def delete_file(self, name):
        self.logs.delete(name)
        self.gone(self.taken(name))

    def delete(self):
        if rotated := sorted(self.files.keys() - {"app.log"}):
            self.delete_file(self.moments.choice(rotated))

    # Runs

    def run(self, *, kill=None, is_stale=False):
        """Index the files. Return whether nothing has disturbed it."""
        index = IndexService(self.logs.config)
        until_killed = Killed(index, self.moments, 10_000 if kill is None else kill)
        index.link = until_killed(index.link)
        linker = self.logs.linker(index, archive=self.archives)
        linker.patient = until_killed(linker.patient)
        is_whole = not is_stale
        try:
            with self.logs.listed() as files:
                if is_stale:
                    files = self.stale(files)
                for file in self.files.values():
                    file.known |= once(file.rows)
                linker.run(files)
        except Crash:
            is_whole = False
            if self.moments.random() < 0.5:
                index.flush()
            index.abandon()
        else:
            index.close()
        if is_whole:
            self.grown.clear()
            self.edited.clear()
            self.moved.clear()
            originals = {name: self.original(name) for name in self.files}
            for name, file in self.files.items():
                file.archived = once(file.rows) if originals[name] is None else Counter()
        for name, file in self.files.items():
            file.is_apart = file.is_apart or self.original(name) is None
        self.did.append("run" if is_whole else "stale run" if is_stale else "killed")
        return is_whole

    def stale(self, files):
        """Return an earlier list of a bucket, or let files change after they were listed."""
        older, self.older = self.older, files
        if self.logs.is_local or not older or self.moments.random() < 0.5:
            self.step()
            return files
        storage = next((file.file.storage for file in files), None)
        return [] if storage is None else [replace(old, file=replace(old.file, storage=storage)) for old in older]

    def merge(self):
        """Merge the objects of the index."""
        self.did.append("merge")
        self.index()
        merge_index(self.logs.config.storage)

    def index(self):
        """Let all entries be in the storage."""
        with IndexService(self.logs.config) as index:
            index.seal()
            index.run_lifecycle()

    def erase(self):
        """Erase a key, perhaps with the copies of its rows."""
        self.did.append("erase")
        number, is_now = self.moments.randrange(KEYS), self.moments.random() < 0.5
        self.index()
        erase(self.logs.config.storage, "t", keys=f"e{number}", yes=True, now=is_now)
        self.erased.add(number)
        if is_now:
            self.without_copies |= {n for n in range(self.next) if n % KEYS == number}
            for of in (self, *self.files.values()):
                counts = self.copied if of is self else of.left
                for n in [n for n in counts if n % KEYS == number]:
                    of.maybe[n] += counts.pop(n)

    def check(self, *, is_whole=False):
        """Compare all answers with the model."""
        shown, missing = self.logs.found()
        expected, most = self.least, self.most
        if not is_whole:
            # a copy may have been another file, and the next run compares it
            most += once(*(file.rows for name, file in self.files.items() if self.original(name) is not None))
        assert not shown - most, ("too often", shown - most)
        if is_whole:
            lost = expected - shown
            # a row whose copy was erased is lost if its file was edited, or if its entries were not put before
            assert lost.keys() <= self.without_copies, ("lost", lost)
        held = (self.shown & expected) - shown
        if held.total() > missing:
            # those of a file that was rotated after it was listed are replaced until the next run
            assert held.total() <= missing + self.logs.replaced(), ("lost, and not said", held)
        self.shown = shown

    def check_key(self):
        """Compare the rows of one of the keys, which may be erased."""
        number = self.moments.randrange(KEYS)
        shown, _ = self.logs.found(f"e{number}")
        assert shown == ({} if number in self.erased else {n: c for n, c in self.shown.items() if n % KEYS == number})


@pytest.fixture
def life(tmp_path, monkeypatch, where, form, seed, archives):
    moments = random.Random(f"{seed}{form}{where}{archives}")
    monkeypatch.setattr(rows_of_text, "SUM_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(rows_of_text, "BLOCK_BYTES", 700)
    monkeypatch.setattr(linked, "_AT_ONCE", 2)
    life = Life(Logs(tmp_path, where, form), moments, archives=archives)
    IndexService(life.logs.config).close()
    place_of = listing._place_of

    def place_on_device(status):
        return place_of(os.stat_result((*status[:2], status.st_dev + life.device, *status[3:])))

    monkeypatch.setattr(listing, "_place_of", place_on_device)
    return life


def lives():
    """Yield the parameters of lives: a few quick ones, with each form, and many long ones."""
    for seed, form, where, archives in itertools.product(range(4), FORMS, ("folder", "bucket"), (False, True)):
        if archives and seed and (seed, form, where) not in FURTHER_ARCHIVED:
            # of rows with copies it is less clear which are those of a file that was edited and has moved
            continue
        is_quick = seed == 0 and (where == "folder") == (FORMS.index(form) % 2 == 0) and archives == (form in ARCHIVED)
        marks = () if is_quick else pytest.mark.long
        yield pytest.param(seed, form, where, archives, marks=marks)


@pytest.mark.parametrize(("seed", "form", "where", "archives"), [*lives()])
def test_each_row_of_files_comes_back_once_or_the_answer_says_that_it_does_not(life):
    moments = life.moments
    for _ in range(16):
        life.step()
        life.check()
        if moments.random() < 0.2:
            continue
        if moments.random() < 0.15:
            moments.choice([life.merge, life.merge, life.erase])()
            life.check()
        kill = moments.randrange(12) if moments.random() < 0.4 else None
        life.check(is_whole=life.run(kill=kill, is_stale=moments.random() < 0.25))
    life.run()
    life.check(is_whole=True)
    life.check_key()
