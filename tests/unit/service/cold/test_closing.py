"""A reader that is closed in the middle of a lookup: the lookup ends with its answer or says so, and accuses no
object.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cold_index import ColdIndex, Read, Recorder, cold_index
from tiered_index import IndexReader
from tiered_index.errors import IndexClosed, InvalidArgument
from tiered_index.service.log.records import StoredObject
from tiered_index.storage.base import Storage


class Closing(Recorder):
    """Refuses everything once it is closed, as backends with connections do."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.closed = threading.Event()

    def get_range(self, name: str, start: int, length: int) -> bytes:
        data = super().get_range(name, start, length)  # waits in the gate
        if self.closed.is_set():
            raise InvalidArgument("the storage is closed")
        return data

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ColdIndex:
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=4)


def ask_one(reader: IndexReader, stored: StoredObject) -> int:
    return len(reader.query("t", "all", stored.second_min * 1000, stored.second_max * 1000))


@pytest.mark.parametrize("warm", [False, True])
def test_a_lookup_in_its_callers_thread(made: ColdIndex, warm: bool) -> None:
    storage = Closing(made.inner)
    reader = IndexReader.open(storage_backend=storage, block_cache_bytes=0)
    if warm:
        assert ask_one(reader, made.stored[0]) == 1
    arrived, release = threading.Event(), threading.Event()

    def gate(read: Read) -> None:
        arrived.set()
        assert release.wait(30)

    storage.gate = gate
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask_one, reader, made.stored[0])
        assert arrived.wait(30)
        closed = pool.submit(reader._cold_paths[0].close)
        deadline_s = time.monotonic() + 30
        while not reader._cold_paths[0]._closed:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        storage.close()
        release.set()
        closed.result(30)
        assert isinstance(asked.exception(30), IndexClosed)
    reader.close()


def test_lookups_of_all_files_from_many_threads(made: ColdIndex, tmp_path: Path) -> None:
    for _ in range(5):
        storage = Closing(made.inner)
        reader = IndexReader.open(
            storage_backend=storage, block_cache_bytes=0, cache_dir=tmp_path / "cache", query_threads=3
        )
        begun = threading.Barrier(5)

        def ask(reader: IndexReader = reader, begun: threading.Barrier = begun) -> None:
            begun.wait(30)
            while True:
                assert len(reader.query("t", "all")) == 4

        with ThreadPoolExecutor(4) as pool:
            ends = [pool.submit(ask) for _ in range(4)]
            begun.wait(30)
            reader.close()
            assert {type(end.exception(30)) for end in ends} == {IndexClosed}
