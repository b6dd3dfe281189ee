"""An age of infinity, for "never", could not be rounded: the life cycle ended with `OverflowError` before its first
step. Infinity is refused (`test_config.py`). The greatest age works: it outlasts any clock.
"""

from __future__ import annotations

NOW_MS = 1_700_000_000_000
FOR_EVER_S = 10**12
CENTURY_S = 100 * 365 * 86400.0


def test_local_copies_that_are_kept_permanently(open_index, clock):
    service = open_index(local_keep_s=FOR_EVER_S)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    for _ in range(3):
        service.run_lifecycle()
        assert [handle.place for handle in service.files()] == ["uploaded"]
        clock.advance(CENTURY_S)


def test_permanent_copies_are_still_bounded_in_bytes(open_index):
    service = open_index(local_keep_s=FOR_EVER_S, local_keep_bytes=1)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.seal()
    service.run_lifecycle()
    assert [handle.place for handle in service.files()] == ["storage"]


def test_files_that_are_never_sealed_by_age(open_index, clock):
    service = open_index(seal_after_s=FOR_EVER_S)
    service.put("t", 0, "k", 1, 1, NOW_MS)
    service.flush()
    clock.advance(CENTURY_S)
    assert not service.run_lifecycle().any()
    assert [handle.place for handle in service.files()] == ["unsealed"]
    service.seal()
    assert service.run_lifecycle().uploaded == 1
