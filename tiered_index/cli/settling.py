"""Waiting until everything is uploaded: what `ingest --wait` and the demo do.

A storage that is down is waited for, as long as something happens within `patience_s`. One thread drives the life cycle, the caller's
shows progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tiered_index.cli.progress import Progress
from tiered_index.errors import BackPressure, StorageUnavailable, TieredIndexError
from tiered_index.format.names import COMPACTED, UNSEALED
from tiered_index.service.files.compacted import DamagedFile
from tiered_index.service.index import IndexService

__all__ = ["settle"]

_LOOK_INTERVAL_S = 0.25
_PAUSE_S = 1.0


def settle(index: IndexService, patience_s: float, progress_of: Callable[[int], Progress]) -> None:
    """Seal what is open and return when every file is in the storage.

    Raises what stands in the way: `StorageUnavailable` and `BackPressure` after `patience_s` without progress, anything else at once,
    a damaged file's own error among it.
    """
    index.seal()
    waiting = _waiting(index)
    total, quiet_since = 2 * waiting, time.monotonic()
    with ThreadPoolExecutor(1, "tiered-index-settle") as pool, progress_of(total) as progress:
        while True:
            trouble: TieredIndexError = StorageUnavailable(f"{waiting} files did not move on")
            work: Future[object] = pool.submit(index.run_lifecycle)
            while not wait([work], _LOOK_INTERVAL_S).done:
                progress.update(total - _steps_left(index))
            try:
                work.result()
            except (StorageUnavailable, BackPressure) as error:
                trouble = error
            _raise_damage(index)
            left = _waiting(index)
            if not left:
                return
            if left < waiting:
                waiting, quiet_since = left, time.monotonic()
            elif time.monotonic() - quiet_since > patience_s:
                raise trouble
            else:
                progress.update(total - _steps_left(index), f"waiting: {trouble}")
                time.sleep(_PAUSE_S)


def _waiting(index: IndexService) -> int:
    return sum(handle.place in (UNSEALED, COMPACTED) for handle in index.files())


def _steps_left(index: IndexService) -> int:
    return sum((UNSEALED, COMPACTED)[::-1].index(h.place) + 1 for h in index.files() if h.place in (UNSEALED, COMPACTED))


def _raise_damage(index: IndexService) -> None:
    for handle in index.files():
        if isinstance(handle, DamagedFile):
            raise handle.error
