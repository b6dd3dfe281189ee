"""An upload whose log record had an unknown outcome was deleted when the next attempt failed. The record arrived later,
and the log named an object that was gone.
"""

from __future__ import annotations

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import ObjectNotFound, StorageUnavailable

NOW_MS = 1_700_000_000_000


class LateRecords(FaultStorage):
    """Delays log records on demand."""

    delayed = False
    held = None

    def put_if_absent(self, name, data):
        if self.delayed and name.startswith("log/"):
            self.held = name, bytes(data)
            raise StorageUnavailable("no answer")
        super().put_if_absent(name, data)


@pytest.fixture
def waiting(open_index, storage):
    """A service whose one file was fully sent, and whose record is still in flight."""
    late = LateRecords(storage)
    service = open_index(storage_backend=late, local_keep_s=1e9)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    late.delayed = True
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    late.delayed = False
    return service, late


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("error", [StorageUnavailable, ObjectNotFound])
def test_it_is_there_when_its_record_arrives(waiting, storage, open_reader, error, rounds):
    service, late = waiting
    (name,) = [info.name for info in storage.list("data/")]
    for _ in range(rounds):
        late.fail("head", error=error, name_prefix="data/")
        with pytest.raises((StorageUnavailable, ObjectNotFound)):
            service.run_lifecycle()
        assert storage.head(name)
    storage.put_if_absent(*late.held)
    service.run_lifecycle()
    assert [handle.place for handle in service.files()] == ["uploaded"]
    assert [o.name for o in service.log_state.objects.values()] == [name]
    assert not service.health()["problems"]
    result = open_reader().query("t", "k")
    assert (result.status, [item.offset for item in result]) == ("complete", [1])


def test_it_is_published_if_the_record_never_arrives(waiting, storage, open_reader):
    service, late = waiting
    late.fail("head", name_prefix="data/")
    with pytest.raises(StorageUnavailable):
        service.run_lifecycle()
    service.run_lifecycle()
    assert [o.name for o in service.log_state.objects.values()] == [info.name for info in storage.list("data/")]
    assert len(open_reader().query("t", "k")) == 1
