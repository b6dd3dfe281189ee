"""The flusher's thread opens the index, too; where that took longer than the pause between rounds and failed, a round
began on nothing.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tiered_index import IndexService
from tiered_index.errors import LockHeld
from tiered_index.storage.base import Bytes, WrapperStorage
from tiered_index.storage.memory import MemoryStorage

PAUSE_S = 0.001


class LateStorage(WrapperStorage):
    """Refuses the first write, after many rounds' pauses."""

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Wait, and fail as an opening that others keep out."""
        threading.Event().wait(20 * PAUSE_S)
        raise LockHeld("scripted")


def test_an_opening_that_fails_after_a_while_flushes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for attempt in range(3):
        with pytest.raises(LockHeld, match="scripted"):
            IndexService.open(
                root=tmp_path / f"{attempt}", storage_backend=LateStorage(MemoryStorage()), flush_interval_s=PAUSE_S
            )
    assert [record.getMessage() for record in caplog.records] == []
