"""A root whose local files were all retired, opened while the storage could be read but not be claimed, knew no
source's position any more: whoever follows a source by it would have begun from its start.
"""

from __future__ import annotations

from tests.support.storage_faults import FaultStorage
from tiered_index import IndexService
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000


def test_what_was_read_of_the_log_says_positions(tmp_path):
    storage = FaultStorage(MemoryStorage())
    settings = {
        "root": tmp_path / "root",
        "storage_backend": storage,
        "background": False,
        "slots": 7,
        "items": 12,
        "local_keep_s": 0,
    }
    with IndexService.open(**settings) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS, source="s", source_position=5)
        service.seal()
        for _ in range(2):
            service.run_lifecycle()
        assert service.health()["files"] == {"storage": 1}
    storage.fail("put", times=None)
    storage.fail("put_if_absent", times=None)
    with IndexService.open(**settings) as service:
        assert service.durable_position("s") == 5
        storage.clear()
