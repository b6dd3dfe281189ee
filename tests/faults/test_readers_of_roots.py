"""A reader beside the writer, whose files move between any two of its looks. No complete answer lacks an entry."""

import os
import time

import pytest

from tests.faults.conftest import ASK
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.disk import Disk

NOW_MS = 1_700_000_000_000
FOLDERS = ("unsealed", "compacted", "uploaded")


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
@pytest.mark.parametrize("move", ["compacted", "retired", "half deleted"])
@pytest.mark.parametrize(("folder", "when"), [*((folder, "before") for folder in FOLDERS), ("compacted", "after")])
def test_files_that_move_at_any_listing_are_found(
    open_index, open_reader, storage, tmp_path, monkeypatch, folder, when, move, ask
):
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty, local_keep_s=0)

    def compact():
        service.seal()
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            service.run_lifecycle()

    def put(number):
        service.put("t", 0, "k", number, 1, NOW_MS + number * 1000)

    put(0)
    compact()
    put(1)
    service.flush()
    long_ago_ns = time.time_ns() - 60 * 10**9
    for name in FOLDERS:
        os.utime(tmp_path / "root" / name, ns=(long_ago_ns, long_ago_ns))  # old enough to be believed
    reader = open_reader("root")
    for _ in range(2):
        assert [item.offset for item in ask(reader)] == [1, 0]
    put(2)
    service.flush()
    names, moved = Disk.names, []

    def moving(disk, place):
        listed = names(disk, place) if when == "after" else None
        if place.name == folder and not moved:
            moved.append(True)
            (journal,) = (path for path in (tmp_path / "root" / "unsealed").glob("*.journal") if path.stat().st_size)
            data = journal.read_bytes()
            service.seal()
            compact() if move == "compacted" else service.run_lifecycle()
            if move == "half deleted":  # the writer died before it deleted the journal
                journal.write_bytes(data)
        return names(disk, place) if listed is None else listed

    monkeypatch.setattr(Disk, "names", moving)
    for _ in range(3):
        result = ask(reader)
        assert (result.status, [item.offset for item in result]) == ("complete", [2, 1, 0])
    assert moved


def test_a_file_that_grows_and_moves_within_one_look_is_found(open_index, open_reader, storage, tmp_path, monkeypatch):
    """The next file, which is compacted first, says that the view of the file before lacks an entry."""
    root, faulty = tmp_path / "root", FaultStorage(storage)
    service = open_index(storage_backend=faulty)
    faulty.fail("put", times=None, name_prefix="data/")
    service.put("t", 0, "k", 0, 1, NOW_MS)
    service.flush()
    early = copy_of(root)
    service.put("t", 0, "k", 1, 1, NOW_MS + 1000)
    service.seal()
    (file_id,) = {path.stem for path in (root / "unsealed").glob("*.journal") if path.stat().st_size}
    grown = copy_of(root)
    service.put("t", 0, "k", 2, 1, NOW_MS + 2000)
    service.seal()
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    late = copy_of(root)
    service.close()
    own = {name: data for name, data in grown.items() if file_id in name}
    both = {name: data for name, data in late.items() if file_id not in name}
    put_back(root, early)
    names = Disk.names

    def moving(disk, place):
        if place.name == "compacted":
            put_back(root, own | both)
        listed = names(disk, place)
        if place.name == "uploaded":
            put_back(root, late)
        return listed

    reader = open_reader("root")
    monkeypatch.setattr(Disk, "names", moving)
    result = reader.query("t", "k")
    assert (result.status, [item.offset for item in result]) == ("complete", [2, 1, 0])


def copy_of(root):
    """Return the bytes of the files of a root, by their path."""
    return {str(path.relative_to(root)): path.read_bytes() for state in FOLDERS for path in (root / state).iterdir()}


def put_back(root, files):
    """Let a root have these files only."""
    for state in FOLDERS:
        for path in (root / state).iterdir():
            path.unlink()
    for name, data in files.items():
        (root / name).write_bytes(data)


def test_a_change_within_one_step_of_the_folders_times_is_seen(open_index, open_reader, tmp_path):
    """Two changes can have the same time on a coarse clock."""
    service = open_index(local_keep_s=0)
    service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    service.seal()
    reader = open_reader("root")
    assert len(reader.query("t", "k")) == 1
    folders = [tmp_path / "root" / state for state in ("unsealed", "compacted", "uploaded")]
    times = [folder.stat().st_mtime_ns for folder in folders]
    service.run_lifecycle()  # the file leaves the root
    for folder, time_ns in zip(folders, times, strict=True):
        os.utime(folder, ns=(time_ns, time_ns))
    assert len(reader.query("t", "k")) == 1
