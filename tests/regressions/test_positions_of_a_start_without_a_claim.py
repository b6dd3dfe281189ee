"""A root lost its sources' positions if all its local files were retired and its writer could read the storage but not
claim it. A follower would have begun from the source's start.
"""

from __future__ import annotations

from tests.support.storage_faults import FaultStorage

NOW_MS = 1_700_000_000_000


def test_the_read_part_of_the_log_has_positions(open_index, storage):
    faulty = FaultStorage(storage)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS, source="s", source_position=5)
        service.seal()
        for _ in range(2):
            service.run_lifecycle()
        assert service.health()["files"] == {"storage": 1}
    faulty.fail("put", times=None)
    faulty.fail("put_if_absent", times=None)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        assert service.durable_position("s") == 5
        faulty.clear()


def test_the_root_has_the_positions_of_retired_files(open_index, storage):
    faulty = FaultStorage(storage)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS, source="s", source_position=5)
        service.seal()
        for _ in range(2):
            service.run_lifecycle()
        assert service.health()["files"] == {"storage": 1}
    faulty.fail("*", times=None)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        assert service.durable_position("s") == 5
        faulty.clear()
