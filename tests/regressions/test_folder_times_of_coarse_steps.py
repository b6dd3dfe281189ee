"""A reader beside the writer took equal folder times for "nothing has changed", though two changes can have the same
time on a coarse clock.
"""

from __future__ import annotations

import os


def test_a_change_within_one_step_of_the_folders_times_is_seen(open_index, open_reader, tmp_path):
    service = open_index(local_keep_s=0)
    service.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    service.seal()
    reader = open_reader("root")
    assert len(reader.query("t", "k")) == 1
    folders = [tmp_path / "root" / state for state in ("unsealed", "compacted", "uploaded")]
    times = [folder.stat().st_mtime_ns for folder in folders]
    service.run_lifecycle()  # the file leaves the root
    for folder, time_ns in zip(folders, times, strict=True):
        os.utime(folder, ns=(time_ns, time_ns))
    assert len(reader.query("t", "k")) == 1
