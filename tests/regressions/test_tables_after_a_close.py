"""`close` chose the files whose header and slot table it writes before its last flush, so a file that this flush began
kept empty ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from tiered_index.format.layout import HEADER_SIZE, read_header

NOW_MS = 1_700_000_000_000
LANES = {"main": [NOW_MS], "quarantine": [5_000], "both": [NOW_MS, 5_000]}


@pytest.mark.parametrize("times", LANES.values(), ids=LANES)
def test_a_file_begun_by_the_last_flush_has_its_tables(open_index, tmp_path, times):
    for rounds in (1, 2):
        service = open_index()
        for time_ms in times:
            service.put("t", 0, "k", rounds, 1, time_ms)
        service.close()
        paths = list((tmp_path / "root" / "unsealed").glob("*.index"))
        assert len(paths) == len(times)
        for path in paths:
            data = path.read_bytes()
            header = read_header(data[:HEADER_SIZE], path.name)
            heads = np.frombuffer(data, ">i4", 2 * 7, HEADER_SIZE)[::2]
            assert (header.items, header.slots_in_use) == (rounds, 1)
            assert (header.begin_ms, header.end_ms) in [(time_ms, time_ms) for time_ms in times]
            assert sorted(heads.tolist()) == [0] * 6 + [rounds]
