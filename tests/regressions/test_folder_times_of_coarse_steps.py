"""A reader beside the writer took equal folder times for "nothing has changed", though two changes may fall into one
step of the clock.
"""

from __future__ import annotations

import os

from tiered_index import IndexReader, IndexService
from tiered_index.storage.memory import MemoryStorage


def test_a_change_within_one_step_of_the_folders_times_is_seen(tmp_path):
    root, storage = tmp_path / "root", MemoryStorage()
    with IndexService.open(
        root=root, storage_backend=storage, slots=7, items=12, local_keep_s=0, background=False
    ) as service:
        service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
        service.seal()
        with IndexReader.open(root=root, storage_backend=storage) as reader:
            assert len(reader.query("t", "k")) == 1
            folders = [root / state for state in ("unsealed", "compacted", "uploaded")]
            times = [folder.stat().st_mtime_ns for folder in folders]
            service.run_lifecycle()  # the file leaves the root
            for folder, time_ns in zip(folders, times, strict=True):
                os.utime(folder, ns=(time_ns, time_ns))
            assert len(reader.query("t", "k")) == 1
