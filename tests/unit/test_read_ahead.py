"""Objects that are read to their ends: the next pieces are asked for while one is used."""

import threading

import pytest

from tiered_index.errors import StorageUnavailable
from tiered_index.sources import places
from tiered_index.sources.places import StoredFile
from tiered_index.storage.memory import MemoryStorage

DATA = bytes(range(256)) * 40


@pytest.fixture
def storage(monkeypatch):
    monkeypatch.setattr(places, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(places, "_BUFFER_BYTES", 300)
    storage = MemoryStorage()
    storage.put("x", DATA)
    return storage


@pytest.mark.parametrize("size", [1, 299, 1000, 1001, 5000, 20_000])
def test_all_bytes_are_read_in_order_from_any_position(storage, size):
    with StoredFile("memory://x", storage, "x", len(DATA)).ahead() as handle:
        for begin in (0, 17, 999, len(DATA) - 1, len(DATA)):
            assert handle.seek(begin) == begin
            pieces = [*iter(lambda: handle.read(size), b"")]
            assert b"".join(pieces) == DATA[begin:] and handle.tell() == len(DATA)


def test_a_bounded_number_of_pieces_is_asked_for_at_once(storage, monkeypatch):
    asked, may_end, most = list[int](), threading.Event(), threading.Semaphore(0)
    get_range = storage.get_range

    def waiting(name, offset, length):
        asked.append(offset)
        most.release()
        assert may_end.wait(10)
        return get_range(name, offset, length)

    monkeypatch.setattr(storage, "get_range", waiting)
    with StoredFile("memory://x", storage, "x", len(DATA)).ahead() as handle:
        read = []
        reader = threading.Thread(target=lambda: read.append(handle.read(10)))
        reader.start()
        for _ in range(places._AHEAD):
            assert most.acquire(timeout=10)
        assert not most.acquire(timeout=0.05) and sorted(asked) == [0, 1000, 2000, 3000]
        may_end.set()
        reader.join(10)
        assert read == [DATA[:10]]
    # no piece behind the one in use is asked for again, and none after the end
    assert len(asked) <= 1 + places._AHEAD


def test_an_error_of_a_piece_is_raised_where_it_is_needed(storage, monkeypatch):
    get_range = storage.get_range

    def failing(name, offset, length):
        if offset >= 3000:
            raise StorageUnavailable("away")
        return get_range(name, offset, length)

    monkeypatch.setattr(storage, "get_range", failing)
    with StoredFile("memory://x", storage, "x", len(DATA)).ahead() as handle:
        assert handle.read(3000) == DATA[:3000]
        with pytest.raises(StorageUnavailable, match="away"):
            handle.read(1)
