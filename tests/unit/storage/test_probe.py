"""The probes detect what a storage lacks, and name it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.errors import ObjectExists, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.base import Bytes, ObjectInfo, WrapperStorage
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.probe import check_storage, probe, probe_put_if_absent


@pytest.fixture
def faulty() -> FaultStorage:
    return FaultStorage(MemoryStorage())


def test_the_probe_refuses_a_server_that_refuses_and_yet_stores(faulty: FaultStorage) -> None:
    faulty.ignore_put_if_absent()
    faulty.fail("put_if_absent", nth=2, when="after", error=ObjectExists)
    with pytest.raises(StorageMisconfigured):
        probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []
    # a first put that was retried is no such server
    faulty.clear()
    faulty.fail("put_if_absent", when="after", error=ObjectExists)
    probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []


@pytest.mark.parametrize("check", [check_storage, probe_put_if_absent])
def test_the_probe_accuses_no_server_whose_object_a_sweep_has_deleted(
    faulty: FaultStorage, check: Callable[[WrapperStorage], None]
) -> None:
    # a sweep deletes the first object that is put, as if this process was suspended for a day
    sweep = partial(faulty.inner.delete_many, (info.name for info in faulty.inner.list()))
    faulty.meanwhile("put_if_absent", sweep, when="after")
    check(faulty)
    assert list(faulty.list()) == []


def test_the_probe_passes_other_errors_on_and_cleans_up(faulty: FaultStorage) -> None:
    faulty.fail("put_if_absent", nth=2)
    with pytest.raises(StorageUnavailable):
        probe_put_if_absent(faulty, "probe/x")
    assert list(faulty.list()) == []
    faulty.fail("put_if_absent", nth=2)
    faulty.fail("delete_many")
    with pytest.raises(StorageUnavailable, match="put_if_absent"):
        probe_put_if_absent(faulty, "probe/x")


def test_a_root_is_not_opened_at_a_server_that_ignores_put_if_absent(tmp_path: Path) -> None:
    IndexService.open(root=tmp_path / "root", storage=f"file://{tmp_path}/storage").close()
    served = FaultStorage(LocalStorage(tmp_path / "storage"))
    served.ignore_put_if_absent()
    with pytest.raises(StorageMisconfigured, match="ignores put-if-absent"):
        IndexService.open(root=tmp_path / "root", storage_backend=served)


class Framing(WrapperStorage):
    """Stores the frames of a transfer (aws-chunked) as content."""

    def put_if_absent(self, name: str, data: Bytes) -> None:
        super().put_if_absent(name, b"%x;chunk-signature=0\r\n%b\r\n0\r\n\r\n" % (len(data), bytes(data)))


class Lying(WrapperStorage):
    """Ignores everything that is asked beside a name."""

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return super().get_range(name, 0, length)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def now_ms(self) -> int:
        return super().now_ms() + 1_000_000

    def delete_many(self, names: Iterable[str]) -> None:
        if len(doomed := list(names)) > 1:
            raise StorageMisconfigured(f"deleting {len(doomed)} objects: MethodNotAllowed")
        super().delete_many(doomed)

    def shortfalls(self) -> dict[str, str]:
        return {"multipart uploads": "is slow"}


def states(abilities: object) -> dict[str, str]:
    return {ability.what: ability.state for ability in abilities}  # type: ignore[attr-defined]


def test_each_ability_that_is_missing_is_named_and_no_index_is_created(faulty: FaultStorage, tmp_path: Path) -> None:
    for lesser in (Framing(faulty), Lying(faulty)):
        with pytest.raises(StorageMisconfigured):
            IndexService.open(root=tmp_path, storage_backend=lesser, environment=False)
    assert set(states(probe(faulty)).values()) == {"ok"}
    abilities = probe(Lying(faulty))
    assert states(abilities) == {
        "put-if-absent": "ok",
        "the bytes that come back": "ok",
        "ranges": "missing",
        "lists after a name": "missing",
        "multipart uploads": "worked round",
        "bulk deletes": "missing",
        "clock": "missing",
    }
    assert [ability.result for ability in abilities if "deletes" in ability.what] == [
        "deleting 3 objects: MethodNotAllowed"
    ]
    assert list(faulty.list()) == []


def test_a_server_that_stores_frames_is_not_accused_of_another_lack(faulty: FaultStorage) -> None:
    advice = "aws-chunked.*AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    for check in (check_storage, probe_put_if_absent):
        with pytest.raises(StorageMisconfigured, match=advice) as caught:
            check(Framing(faulty))
        assert caught.value.exit_code == 2 and "put-if-absent (If" not in str(caught.value)
    assert states(probe(Framing(faulty)))["put-if-absent"] == "ok"
    assert list(faulty.list()) == []


def test_a_clock_that_is_far_off_is_told(faulty: FaultStorage) -> None:
    clock = ManualClock(faulty.now_ms() + 3_600_000)
    (of_clock,) = [ability for ability in probe(faulty, clock) if ability.state != "ok"]
    assert (of_clock.what, of_clock.state) == ("clock", "worked round")
    assert "3,600 s behind" in of_clock.result
