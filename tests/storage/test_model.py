"""Random sequences of calls to each backend and to a dict: both agree after every step."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tests.storage.sqlite_probes import check_sound
from tiered_index.errors import InvalidArgument, ObjectExists, ObjectNotFound
from tiered_index.storage import sqlite
from tiered_index.storage.base import Storage, Writer
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.sqlite import SqliteStorage

SEGMENTS = st.sampled_from(["a", "b", "a-", "a.", "a0", ".tmp-a", "x" * 199, "x" * 200])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=2).map("/".join)
PREFIXES = st.one_of(st.just(""), NAMES, NAMES.map(lambda name: name + "/"), NAMES.map(lambda name: name[:1]))
DATA = st.binary(max_size=30)


class StorageModel(RuleBasedStateMachine):
    writers = Bundle("writers")

    def open(self) -> Storage:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.storage = self.open()
        self.objects: dict[str, bytes] = {}
        self.streamed: dict[int, bytes] = {}

    @rule(name=NAMES, data=DATA)
    def put(self, name: str, data: bytes) -> None:
        self.storage.put(name, data)
        self.objects[name] = data

    @rule(name=NAMES, data=DATA)
    def put_if_absent(self, name: str, data: bytes) -> None:
        try:
            self.storage.put_if_absent(name, data)
        except ObjectExists:
            assert name in self.objects
        else:
            assert name not in self.objects
            self.objects[name] = data

    @rule(names=st.lists(NAMES, max_size=3))
    def delete(self, names: list[str]) -> None:
        self.storage.delete_many(names)
        for name in names:
            self.objects.pop(name, None)

    @rule(name=NAMES, start=st.integers(0, 32), length=st.integers(1, 32))
    def read(self, name: str, start: int, length: int) -> None:
        try:
            data_read = self.storage.get_range(name, start, length)
        except ObjectNotFound:
            assert name not in self.objects
        except InvalidArgument:
            assert start + length > len(self.objects[name])
        else:
            assert data_read == self.objects[name][start : start + length]
            assert len(data_read) == length
            data = self.objects[name]
            assert self.storage.get_suffix(name, length) == (data[max(0, len(data) - length) :], len(data))

    @precondition(lambda self: getattr(self, "objects", None))
    @rule(data=st.data())
    def read_a_part(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.objects)))
        whole = self.objects[name]
        start = data.draw(st.integers(0, len(whole)))
        length = data.draw(st.integers(0, len(whole) - start))
        assert self.storage.get_range(name, start, length) == whole[start : start + length]
        most = data.draw(st.integers(0, 32))
        assert self.storage.get_suffix(name, most) == (whole[max(0, len(whole) - most) :], len(whole))

    @rule(prefix=PREFIXES, start_after=PREFIXES)
    def list(self, prefix: str, start_after: str) -> None:
        expected = sorted(name for name in self.objects if name.startswith(prefix) and name > start_after)
        assert [info.name for info in self.storage.list(prefix, start_after=start_after)] == expected

    @rule(target=writers, name=NAMES)
    def open_writer(self, name: str) -> Writer:
        return self.storage.open_writer(name)

    @rule(writer=writers, data=DATA)
    def write(self, writer: Writer, data: bytes) -> None:
        writer.write(data)
        self.streamed[id(writer)] = self.streamed.get(id(writer), b"") + data

    @rule(writer=consumes(writers))
    def close_writer(self, writer: Writer) -> None:
        writer.close()
        self.objects[writer.name] = self.streamed.pop(id(writer), b"")

    @rule(writer=consumes(writers))
    def abort_writer(self, writer: Writer) -> None:
        writer.abort()
        self.streamed.pop(id(writer), None)

    @invariant()
    def agrees(self) -> None:
        sizes = {info.name: info.size_bytes for info in self.storage.list()}
        assert sizes == {name: len(data) for name, data in self.objects.items()}
        assert list(sizes) == sorted(sizes)
        for name, data in self.objects.items():
            assert self.storage.get(name) == data


class MemoryModel(StorageModel):
    def open(self) -> Storage:
        return MemoryStorage()


class LocalModel(StorageModel):
    def open(self) -> Storage:
        self.folder = Path(tempfile.mkdtemp())
        return LocalStorage(self.folder)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class SqliteModel(StorageModel):
    """Rows hold 7 bytes, so that most objects have several. Every row belongs to an object."""

    def open(self) -> Storage:
        self.rows = pytest.MonkeyPatch()
        self.rows.setattr(sqlite, "CHUNK_BYTES", 7)
        self.folder = Path(tempfile.mkdtemp())
        return SqliteStorage(self.folder / "objects.db")

    @invariant()
    def has_no_other_rows(self) -> None:
        if self.objects:
            check_sound(self.folder / "objects.db", 7)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.storage.close()
            shutil.rmtree(self.folder)
            self.rows.undo()


_SETTINGS = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMemoryModel = MemoryModel.TestCase
TestMemoryModel.settings = _SETTINGS
TestLocalModel = LocalModel.TestCase
TestLocalModel.settings = _SETTINGS
TestSqliteModel = SqliteModel.TestCase
TestSqliteModel.settings = _SETTINGS
