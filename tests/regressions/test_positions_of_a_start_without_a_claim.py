"""A root lost its sources' positions if all its local files were retired and its writer could not claim the storage.

A follower would have begun from the source's start. The writer may read the log, or only the root's copy of it.
"""

from __future__ import annotations

import pytest

from tests.support.storage_faults import FaultStorage

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("refused", [("put", "put_if_absent"), ("*",)])
def test_a_start_without_a_claim_has_the_positions_of_retired_files(open_index, storage, refused):
    faulty = FaultStorage(storage)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS, source="s", source_position=5)
        service.seal()
        for _ in range(2):
            service.run_lifecycle()
        assert service.health()["files"] == {"storage": 1}
    for call in refused:
        faulty.fail(call, times=None)
    with open_index(storage_backend=faulty, local_keep_s=0) as service:
        assert service.durable_position("s") == 5
        faulty.clear()
