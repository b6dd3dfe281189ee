"""A thread writes a large file while its pieces are made. It writes the same bytes, raises every error, then stops."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.storage import disk as module
from tiered_index.storage.disk import Disk, WriteBehind

PIECES = [bytes([number]) * (number * 1000 + 1) for number in range(60)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "_LARGE_BYTES", 10_000)
    monkeypatch.setattr("tiered_index.storage.disk._SYNC_BYTES", 50_000)


def test_a_large_file_has_the_bytes_of_its_pieces_in_order(tmp_path):
    disk = FaultDisk()
    assert disk.write_file(tmp_path / "f", PIECES) == sum(map(len, PIECES))
    assert (tmp_path / "f").read_bytes() == b"".join(PIECES)
    assert not [t for t in threading.enumerate() if t.name.startswith("tiered-index-write")]


@pytest.mark.parametrize("operation", ["pwrite", "sync"])
@pytest.mark.parametrize("nth", [1, 7, 20])
def test_an_error_of_any_call_is_raised_and_leaves_no_file(tmp_path, operation, nth):
    disk = FaultDisk()
    disk.fail(operation, nth=nth, times=None, error=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        disk.write_file(tmp_path / "f", PIECES)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_making_of_a_piece_is_raised_and_leaves_no_file(tmp_path):
    def pieces():
        yield from PIECES[:30]
        raise OSError(errno.EIO, "no more pieces")

    with pytest.raises(OSError, match="no more pieces"):
        Disk().write_file(tmp_path / "f", pieces())
    assert list(tmp_path.iterdir()) == []


def test_a_crash_in_the_writing_thread_is_a_crash(tmp_path):
    disk = FaultDisk()
    disk.crash("pwrite", nth=20, torn=True)
    with pytest.raises(SimulatedCrash):
        disk.write_file(tmp_path / "f", PIECES)
    written = (tmp_path / "f").read_bytes()
    assert written == b"".join(PIECES)[: len(written)]
    assert sum(map(len, PIECES[:19])) < len(written) < sum(map(len, PIECES[:20]))


def test_few_pieces_wait_and_none_is_written_once_the_end_was_an_error():
    made, written, go = [], [], threading.Event()

    def pwrite(data, position):
        go.wait()
        written.append(position)
        if position == 2:
            raise OSError(errno.EIO, "broken")

    def make():
        with WriteBehind(pwrite, lambda: None) as behind:
            for number in range(100):
                made.append(number)
                behind.write(b"x", number)

    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(make)
        while len(made) < 5:
            assert not making.done()
        assert len(made) == 5  # one piece is being written and four wait, so no more are made
        assert written == []
        go.set()
        with pytest.raises(OSError, match="broken"):
            making.result()
    assert len(made) < 12
    assert written == list(range(len(written)))
