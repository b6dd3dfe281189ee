"""The files of a log in a folder or in a bucket, the index of them, and the rows that come back."""

import contextlib
import gzip
import io
import itertools
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq

from tiered_index import FileRows, IndexReader, IndexService, erase
from tiered_index.config import IndexConfig
from tiered_index.connectors.files.linked import FileLinker
from tiered_index.connectors.files.listing import listed_files
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.follow import PatientPut

TABLES = ("parquet", "arrow")
BEGIN_S = 1_700_000_000
KEYS = 5
"""Keys of rows beside `a`, which all rows have: `e0` to `e4`."""


def packed(data, form):
    """Return a text as a file of a form has it."""
    if form == "gz":
        return gzip.compress(data)
    return pa.compress(data, "zstd", asbytes=True) if form == "zst" else data


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

    def lines(self, *numbers, begin=True):
        """Return the text of rows. A number of 4 digits is as long as any other."""
        if self.form == "csv":
            lines = ["k,e,at,n"] * begin + [f"a,e{n % KEYS},{BEGIN_S + n},{n:04}" for n in numbers]
        else:
            rows = [{"k": "a", "e": f"e{n % KEYS}", "at": BEGIN_S + n, "n": f"{n:04}"} for n in numbers]
            lines = [json.dumps(row) for row in rows]
        return "".join(f"{line}\n" for line in lines).encode()

    def rows(self, *numbers, begin=True):
        """Return a file, or a part to append, with rows."""
        if self.form not in TABLES:
            return packed(self.lines(*numbers, begin=begin), self.form)
        file, at = io.BytesIO(), [BEGIN_S + n for n in numbers]
        keys = {"k": ["a"] * len(at), "e": [f"e{n % KEYS}" for n in numbers]}
        table = pa.table({**keys, "at": at, "n": [f"{n:04}" for n in numbers]})
        if self.form == "parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=16)
        return file.getvalue()

    def linker(self, index, *, archive=False):
        """Return what indexes the files."""
        mapping = RowMapping(("k", "e"), "at", "s")
        return FileLinker(index, "t", mapping, PatientPut(index, 10.0), archive=archive)

    def listed(self):
        """Return a context with the files as they are listed."""
        return listed_files([self.uri], self.config, may_lack=True)

    def ingest(self, *, archive=False):
        with IndexService(self.config) as index, self.listed() as files:
            counts = self.linker(index, archive=archive).run(files)
            index.seal()
            index.run_lifecycle()
        return counts

    def killed(self, *, puts=1000, links=1000, archive=False, files=None):
        """Index the files by a run that dies before a put, or a record of files, with all earlier entries durable."""

        class Crash(Exception):
            pass

        def until(act, count):
            left = itertools.count(count, -1)

            def call(*arguments):
                if next(left) == 0:
                    raise Crash
                return act(*arguments)

            return call

        index = IndexService(self.config)
        index.link = until(index.link, links)
        linker = self.linker(index, archive=archive)
        linker.patient = until(linker.patient, puts)
        with contextlib.suppress(Crash), self.listed() as listed:
            linker.run(listed if files is None else files(listed))
        index.flush()
        index.abandon()

    def erase(self, key):
        """Erase a key with the copies of its rows."""
        with IndexService(self.config) as index:
            index.seal()
            index.run_lifecycle()
        erase(self.config.storage, "t", keys=key, yes=True, now=True)

    def found(self, key="a"):
        """Return how often each row comes back, and the number of rows that do not."""
        with IndexReader.open(config=self.config) as reader, FileRows(reader) as of_files:
            answers = list(reader.messages("t", key, source=of_files, max_count=100_000))
        shown = Counter(int(json.loads(each.message.text)["n"]) for each in answers if each.message is not None)
        return shown, sum(each.message is None for each in answers)

    def replaced(self):
        """Return how many rows an answer counts as replaced."""
        with IndexReader.open(config=self.config) as reader:
            return reader.query("t", "a", max_count=100_000).replaced


def once(*ranges):
    """Return the count of each number in ranges."""
    return Counter(n for numbers in ranges for n in numbers)
