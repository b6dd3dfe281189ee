"""`health` called an index well although its lookups failed: it reported neither a file that recovery had found damaged
nor a log that could not be read at the opening.
"""

from __future__ import annotations

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import CorruptFile, StorageUnavailable

NOW_MS = 1_700_000_000_000


def problems(service):
    return service.health()["problems"]


def put(service):
    service.put("t", 0, "k", 1, 1, NOW_MS)


def damage(path):
    """Change every byte of a file; return the old contents."""
    data = path.read_bytes()
    path.write_bytes(bytes(byte ^ 0xFF for byte in data))
    return data


@pytest.mark.parametrize("state", ["unsealed", "compacted"])
def test_a_damaged_file_is_named_until_it_is_whole_again(open_index, leave_compacted, storage, tmp_path, state):
    if state == "compacted":
        leave_compacted().close()
    else:
        service = open_index()
        put(service)
        service.close()
    (path,) = (tmp_path / "root" / state).glob("*.index")
    whole = damage(path)
    service = open_index()
    for _ in range(2):
        with pytest.raises(CorruptFile, match=path.stem):
            service.query("t", "k")
        (problem,) = problems(service)
        assert problem.startswith(f"{path.stem}: ")
        service.run_lifecycle()
    service.close()
    path.write_bytes(whole)
    service = open_index()
    assert len(service.query("t", "k")) == 1
    assert problems(service) == []


def test_a_damaged_file_that_the_storage_has_is_none_once_the_log_is_read(open_index, storage, tmp_path):
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty)
    put(service)
    service.seal()
    service.run_lifecycle()
    service.close()
    (path,) = (tmp_path / "root" / "uploaded").glob("*.index")
    damage(path)
    faulty.fail("*", times=None)
    service = open_index(storage_backend=faulty)
    assert sorted(problem.split(": ")[0] for problem in problems(service)) == sorted([path.stem, "log"])
    faulty.clear()
    service.run_lifecycle()
    assert [item.offset for item in service.query("t", "k")] == [1]
    assert problems(service) == []


def test_an_unreadable_log_is_reported_until_it_is_read(open_index, storage):
    faulty = FaultStorage(storage)
    service = open_index(storage_backend=faulty)
    put(service)
    service.close()
    faulty.fail("*", times=None)
    service = open_index(storage_backend=faulty)
    with pytest.raises(StorageUnavailable):
        service.query("t", "k")
    (problem,) = problems(service)
    assert problem.startswith("log: ")
    assert "scripted fault" in problem
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    assert any(problem.startswith("log: ") for problem in problems(service))
    faulty.clear()
    service.run_lifecycle()
    assert len(service.query("t", "k")) == 1
    assert problems(service) == []
