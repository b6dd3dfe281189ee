"""An age of infinity, for "never", could not be rounded: the life cycle ended with `OverflowError` before it had done
anything.
"""

from __future__ import annotations

import math

NOW_MS = 1_700_000_000_000
CENTURY_S = 100 * 365 * 86400.0


def test_local_copies_that_are_kept_for_ever(open_index, clock):
    service = open_index(local_keep_s=math.inf)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    for _ in range(3):
        service.run_lifecycle()
        assert [handle.place for handle in service.files()] == ["uploaded"]
        clock.advance(CENTURY_S)


def test_copies_kept_for_ever_still_give_way_to_the_bound_in_bytes(open_index):
    service = open_index(local_keep_s=math.inf, local_keep_bytes=1)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    service.run_lifecycle()
    assert [handle.place for handle in service.files()] == ["storage"]


def test_files_that_are_never_sealed_by_age(open_index, clock):
    service = open_index(seal_after_s=math.inf)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    clock.advance(CENTURY_S)
    assert not service.run_lifecycle().any()
    assert [handle.place for handle in service.files()] == ["unsealed"]
    service.seal()
    assert service.run_lifecycle().uploaded == 1
