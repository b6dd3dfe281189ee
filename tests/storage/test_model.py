"""Random sequences of calls to each backend and to a dict: both agree after every step."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tests.support.unsynced_disk import UnsyncedDisk
from tiered_index.errors import InvalidArgument, ObjectExists, ObjectNotFound
from tiered_index.storage.base import PartInfo, Storage, UploadHandle
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.sqlite.storage import SqliteStorage

SEGMENTS = st.sampled_from(["a", "b", "a-", "a.", "a0", ".tmp-a", "x" * 199, "x" * 200, "x" * 201])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=2).map("/".join)
PREFIXES = st.one_of(st.just(""), NAMES, NAMES.map(lambda name: name + "/"), NAMES.map(lambda name: name[:1]))
DATA = st.binary(max_size=30)


class StorageModel(RuleBasedStateMachine):
    uploads = Bundle("uploads")

    def open(self) -> Storage:
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.storage = self.open()
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, tuple[PartInfo, bytes]]] = {}

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
            found = self.storage.get_range(name, start, length)
        except ObjectNotFound:
            assert name not in self.objects
        except InvalidArgument:
            assert start + length > len(self.objects[name])
        else:
            assert found == self.objects[name][start : start + length]
            assert len(found) == length
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

    @rule(target=uploads, name=NAMES)
    def begin_upload(self, name: str) -> UploadHandle:
        handle = self.storage.begin_upload(name)
        self.parts[handle.upload_id] = {}
        return handle

    @rule(handle=uploads, number=st.integers(1, 3), data=DATA.filter(len))
    def upload_part(self, handle: UploadHandle, number: int, data: bytes) -> None:
        self.parts[handle.upload_id][number] = (self.storage.upload_part(handle, number, data), data)

    @rule(handle=consumes(uploads))
    def complete_upload(self, handle: UploadHandle) -> None:
        parts = self.parts[handle.upload_id]
        try:
            self.storage.complete_upload(handle, [info for info, _ in parts.values()])
        except InvalidArgument:
            assert not parts
            self.storage.abort_upload(handle)
        else:
            assert parts
            self.objects[handle.name] = b"".join(parts[number][1] for number in sorted(parts))
        del self.parts[handle.upload_id]

    @rule(handle=consumes(uploads))
    def abort_upload(self, handle: UploadHandle) -> None:
        self.storage.abort_upload(handle)
        del self.parts[handle.upload_id]

    @invariant()
    def agrees(self) -> None:
        found = {info.name: info.size_bytes for info in self.storage.list()}
        assert found == {name: len(data) for name, data in self.objects.items()}
        assert list(found) == sorted(found)
        assert {handle.upload_id for handle in self.storage.list_uploads()} == set(self.parts)
        for name, data in self.objects.items():
            assert self.storage.get(name) == data


class MemoryModel(StorageModel):
    def open(self) -> Storage:
        return MemoryStorage()


class LocalModel(StorageModel):
    def open(self) -> Storage:
        self.folder = Path(tempfile.mkdtemp())
        return LocalStorage(self.folder, disk=UnsyncedDisk())

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class SqliteModel(StorageModel):
    """Objects are smaller than a row; rows and transactions have tests of their own."""

    def open(self) -> Storage:
        self.folder = Path(tempfile.mkdtemp())
        return SqliteStorage(self.folder / "objects.db")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.storage.close()
            shutil.rmtree(self.folder)


_SETTINGS = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMemoryModel = MemoryModel.TestCase
TestMemoryModel.settings = _SETTINGS
TestLocalModel = LocalModel.TestCase
TestLocalModel.settings = _SETTINGS
TestSqliteModel = SqliteModel.TestCase
TestSqliteModel.settings = _SETTINGS
