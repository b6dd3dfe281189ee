"""A reader is closed during a lookup. The lookup answers or raises `IndexClosed`, and reports no object as corrupt."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cold_index import Recorder, cold_index
from tests.support.hanging import until
from tiered_index import IndexReader
from tiered_index.errors import IndexClosed, InvalidArgument


class Closing(Recorder):
    """Refuse every call after the close, as backends with connections do."""

    def __init__(self, inner):
        super().__init__(inner)
        self.closed = threading.Event()

    def get_range(self, name, start, length):
        data = super().get_range(name, start, length)  # waits in the gate
        if self.closed.is_set():
            raise InvalidArgument("the storage is closed")
        return data

    def close(self):
        self.closed.set()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cold_index(tmp_path_factory.mktemp("cold") / "root", files=4)


def ask_one(reader, stored):
    return len(reader.query("t", "all", stored.second_min * 1000, stored.second_max * 1000))


@pytest.mark.parametrize("warm", [False, True])
def test_a_lookup_in_its_callers_thread(made, warm):
    storage = Closing(made.inner)
    reader = IndexReader.open(storage_backend=storage, block_cache_bytes=0)
    if warm:
        assert ask_one(reader, made.stored[0]) == 1
    arrived, release = threading.Event(), threading.Event()

    def gate(read):
        arrived.set()
        assert release.wait(30)

    storage.gate = gate
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask_one, reader, made.stored[0])
        assert arrived.wait(30)
        closed = pool.submit(reader._cold_paths[0].close)
        until(lambda: reader._cold_paths[0]._closed)
        storage.close()
        release.set()
        closed.result(30)
        assert isinstance(asked.exception(30), IndexClosed)
    reader.close()


def test_lookups_of_all_files_from_many_threads(made, tmp_path):
    for _ in range(5):
        storage = Closing(made.inner)
        settings = {"block_cache_bytes": 0, "cache_dir": tmp_path / "cache", "query_threads": 3}
        reader = IndexReader.open(storage_backend=storage, **settings)
        begun = threading.Barrier(5)

        def ask(reader=reader, begun=begun):
            begun.wait(30)
            while True:
                assert len(reader.query("t", "all")) == 4

        with ThreadPoolExecutor(4) as pool:
            ends = [pool.submit(ask) for _ in range(4)]
            begun.wait(30)
            reader.close()
            assert {type(end.exception(30)) for end in ends} == {IndexClosed}
