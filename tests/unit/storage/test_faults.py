"""The fault layer does what its script says, and the probe sees through it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import DiskFull, ObjectExists, ObjectNotFound, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import probe_put_if_absent


@pytest.fixture
def faulty() -> FaultStorage:
    return FaultStorage(MemoryStorage())


def test_the_nth_call_fails_before_acting(faulty: FaultStorage) -> None:
    faulty.fail("put", nth=2, times=2)
    faulty.put("a", b"x")
    for _ in range(2):
        with pytest.raises(StorageUnavailable, match="before put of 'b'"):
            faulty.put("b", b"x")
    with pytest.raises(ObjectNotFound):
        faulty.get("b")
    faulty.put("b", b"x")
    assert faulty.calls("put") == 4


def test_a_lost_answer_has_acted(faulty: FaultStorage) -> None:
    faulty.fail("put_if_absent", when="after")
    with pytest.raises(StorageUnavailable):
        faulty.put_if_absent("a", b"mine")
    with pytest.raises(ObjectExists):
        faulty.put_if_absent("a", b"mine")
    assert faulty.get("a") == b"mine"


def test_faults_choose_names_kinds_and_go_on_for_ever(faulty: FaultStorage) -> None:
    faulty.fail("*", times=None, name_prefix="data/", error=DiskFull)
    faulty.put("log/1", b"x")
    for call in (lambda: faulty.put("data/1", b"x"), lambda: faulty.head("data/1"), lambda: list(faulty.list("data/"))):
        with pytest.raises(DiskFull):
            call()
    faulty.clear()
    faulty.put("data/1", b"x")


def test_reads_are_corrupted_once(faulty: FaultStorage) -> None:
    data = bytes(range(100))
    faulty.put("a", data)
    faulty.corrupt("get_range", mode="short", nth=2)
    assert [len(piece) for piece in [faulty.get_range("a", 0, 10) for _ in range(3)]] == [10, 9, 10]
    faulty.corrupt("get", mode="wrong")
    wrong = faulty.get("a")
    assert len(wrong) == 100
    assert sum(x != y for x, y in zip(wrong, data, strict=True)) == 1
    assert faulty.get("a") == data
    faulty.corrupt("get_suffix", mode="long")
    assert faulty.get_suffix("a", 3) == (data[-3:] + b"\0", 100)


def test_a_hung_call_waits_for_its_release(faulty: FaultStorage) -> None:
    hang = faulty.hang("put")
    thread = threading.Thread(target=faulty.put, args=("a", b"x"))
    thread.start()
    assert hang.entered.wait(60)
    with pytest.raises(ObjectNotFound):
        faulty.get("a")
    hang.release.set()
    thread.join(60)
    assert faulty.get("a") == b"x"


def test_threads_are_struck_exactly_as_often_as_scripted(faulty: FaultStorage) -> None:
    faulty.fail("put", nth=11, times=37)

    def put(n: int) -> bool:
        try:
            faulty.put(str(n), b"x")
        except StorageUnavailable:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        stored = sum(pool.map(put, range(200)))
    assert stored == 200 - 37
    assert len(list(faulty.list())) == stored


def test_the_probe_refuses_a_server_that_ignores_the_condition(faulty: FaultStorage) -> None:
    faulty.ignore_put_if_absent()
    with pytest.raises(StorageMisconfigured, match="put-if-absent"):
        probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []


def test_the_probe_refuses_a_server_that_refuses_and_yet_stores(faulty: FaultStorage) -> None:
    faulty.ignore_put_if_absent()
    faulty.fail("put_if_absent", nth=2, when="after", error=ObjectExists)
    with pytest.raises(StorageMisconfigured):
        probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []


def test_the_probe_is_not_fooled_by_a_retried_first_put(faulty: FaultStorage) -> None:
    faulty.fail("put_if_absent", when="after", error=ObjectExists)
    probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []


def test_the_probe_passes_other_errors_on_and_cleans_up(faulty: FaultStorage) -> None:
    faulty.fail("put_if_absent", nth=2)
    with pytest.raises(StorageUnavailable):
        probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []
    faulty.fail("put_if_absent", nth=2)
    faulty.fail("delete")
    with pytest.raises(StorageUnavailable, match="put_if_absent"):
        probe_put_if_absent(faulty, "probe/x")
