"""The flusher's thread opens the index, too. If that took longer than the pause between rounds and failed, a round
began without an index.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tiered_index import IndexService
from tiered_index.errors import ConfigError, LockHeld, NotAnIndex
from tiered_index.storage.base import Bytes, WrapperStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

PAUSE_S = 0.001


class LateStorage(WrapperStorage):
    """Refuses the first write, after many rounds' pauses."""

    def put_if_absent(self, name: str, data: Bytes) -> None:
        """Wait, and fail like an opening that other writers refuse."""
        threading.Event().wait(20 * PAUSE_S)
        raise LockHeld("scripted")


def test_an_opening_that_fails_after_a_while_flushes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for attempt in range(3):
        with pytest.raises(LockHeld, match="scripted"):
            IndexService.open(
                root=tmp_path / f"{attempt}", storage_backend=LateStorage(MemoryStorage()), flush_interval_s=PAUSE_S
            )
    assert [record.getMessage() for record in caplog.records] == []


def test_a_root_whose_storage_is_empty_says_that_it_belongs_to_another(tmp_path, uri="memory://a-life-that-ended"):
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=7, items=64):
        with pytest.raises(LockHeld, match=rf"root is being written by this process \({os.getpid()}\)"):
            IndexService.open(root=tmp_path / "root")
        with pytest.raises(LockHeld, match=r"ended is being written by this process .* with another root; its lease"):
            IndexService.open(root=tmp_path / "other", storage=uri, slots=7, items=64)
    empty = f"file://{tmp_path}/empty"
    for other in (None, empty):
        with open_storage(uri) as storage:
            storage.delete_many([info.name for info in storage.list("")])
        with pytest.raises(NotAnIndex) as caught:
            IndexService.open(root=tmp_path / "root", storage=other)
        for part in (other or uri, f"root {tmp_path}/root belongs to another storage", f"in {uri}, which ended"):
            assert part in str(caught.value)


def test_a_bucket_with_too_short_a_name_is_named():
    with pytest.raises(ConfigError, match=r"'b' is not a bucket's name: .* a name of 3 to 255 letters"):
        open_storage("s3://b/p")
