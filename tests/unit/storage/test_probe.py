"""The probe of put-if-absent detects a server that ignores the condition."""

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import ObjectExists, StorageMisconfigured, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import probe_put_if_absent


@pytest.fixture
def faulty() -> FaultStorage:
    return FaultStorage(MemoryStorage())


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


@pytest.mark.parametrize("step", ["put_if_absent", "get", "delete"])
def test_the_probe_tries_again_if_its_object_is_swept(faulty: FaultStorage, step: str) -> None:
    """The process may sleep for a day between two steps."""
    swept: list[str] = []

    def sweep() -> None:
        for info in faulty.inner.list("probe/"):
            faulty.inner.delete(info.name)
            swept.append(info.name)

    faulty.meanwhile(step, sweep, nth=2 if step == "put_if_absent" else 1)
    probe_put_if_absent(faulty, "probe/x")
    assert len(swept) == 1 and list(faulty.list()) == []
