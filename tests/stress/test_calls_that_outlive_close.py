"""A call checks that the index is open; then `close` begins. The call then continues, and must find that the index is
closed.

Such a call used to take disk space in an unlocked root and keep its descriptors. Others compacted, uploaded and deleted
there beside the next writer.
"""

from __future__ import annotations

import threading

import pytest

from tests.stress.crew import Crew
from tests.support.disk_faults import FaultDisk
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.errors import IndexClosed
from tiered_index.storage.disk import TEMPORARY_PREFIX
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("name", ["flush", "seal", "run_lifecycle"])
def test_a_late_call_does_nothing(tmp_path, monkeypatch, name):
    storage, disk, crew = FaultStorage(MemoryStorage()), FaultDisk(), Crew(1)
    settings = {"slots": 7, "items": 16, "background": False, "local_keep_s": 0.0, "query_threads": 2}
    service = IndexService.open(root=tmp_path / "root", storage_backend=storage, disk=disk, **settings)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    service.put("t", 0, "k", 2, 1, NOW_MS)
    service.flush()
    entered, go_on, ended = threading.Event(), threading.Event(), []
    real = service._check_open

    def held():
        real()
        if threading.current_thread().name == "stress-late":
            entered.set()
            assert go_on.wait(30)

    monkeypatch.setattr(service, "_check_open", held)

    def call():
        with pytest.raises(IndexClosed, match="closed"):
            getattr(service, name)()
        ended.append(True)

    late = crew.begin("late", call)
    assert entered.wait(30)
    service.close()
    calls, names = disk.calls(), sorted(info.name for info in storage.list(""))
    go_on.set()
    crew.wait_for([late])
    assert disk.calls() == calls, "the root changed after the close"
    assert sorted(info.name for info in storage.list("")) == names, "the storage changed after the close"
    assert not list((tmp_path / "root").rglob(TEMPORARY_PREFIX + "*"))
    crew.finish()
    assert ended
