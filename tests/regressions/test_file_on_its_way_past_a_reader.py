"""A reader beside the writer took the folders' times before it listed them. So a file that passed through all states
meanwhile was in no folder and in no log record that the reader had read. A "complete" answer lacked it.
"""

from __future__ import annotations

import os
import time

from tiered_index.storage.disk import Disk

NOW_MS = 1_700_000_000_000


def test_a_file_that_is_published_and_retired_during_the_look_is_found(
    open_index, open_reader, tmp_path, monkeypatch, ask
):
    service = open_index(local_keep_s=0)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    long_ago_ns = time.time_ns() - 60 * 10**9
    for state in ("unsealed", "compacted", "uploaded"):
        os.utime(tmp_path / "root" / state, ns=(long_ago_ns, long_ago_ns))  # old enough to be believed
    reader = open_reader("root")
    for _ in range(2):
        assert len(ask(reader)) == 1
    armed = [True]
    names = Disk.names

    def move_then_list(disk, folder):
        if folder.name == "unsealed" and armed:
            armed.clear()
            service.seal()
            service.run_lifecycle()
        return names(disk, folder)

    monkeypatch.setattr(Disk, "names", move_then_list)
    result = ask(reader)
    assert not armed
    assert [handle.place for handle in service.files()] == ["storage"]
    assert (result.status, [item.offset for item in result]) == ("complete", [1])
