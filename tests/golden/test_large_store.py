"""A second, larger store of RocketMQ's: the writer's files and the followed index have its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.rocketmq import large_store
from tests.rocketmq.followed import SteppedDispatcher
from tests.support.store_writer import checkpoint_bytes
from tiered_index import IndexService
from tiered_index.clock import ManualClock
from tiered_index.rocketmq.log.columns import ALL_TOPICS
from tiered_index.rocketmq.log.commitlog import CommitLogReader
from tiered_index.rocketmq.log.store import StoreDirectory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "store"
    large_store.write(folder).close(checkpoint_bytes(*large_store.java()["checkpoint"]))
    return folder


def test_all_files_have_the_brokers_bytes(store):
    written = {name: files for name, files in large_store.java()["files"].items() if name != "index"}
    assert large_store.digests(store) == written
    assert sum(count for count, _ in written.values()) > 1_800


def stored(folder, fill):
    """Return the bytes of the one file that an index uploaded after `fill` filled it."""
    tiered, clock = large_store.java()["tiered"], ManualClock(sum(large_store.java()["store_ms_steps"]))
    where = {"root": folder / "root", "storage": f"file://{folder}/cold", "clock": clock, "background": False}
    chosen = {"preset": "rocketmq", "hash": "abs", "offset_space": "commitlog"}
    with IndexService.open(**where, **chosen, slots=tiered["slots"], items=tiered["items"]) as index:
        fill(index)
        index.flush()
        index.seal()
        index.run_lifecycle()
    (file,) = (folder / "cold").rglob("*.index")
    return file.read_bytes()


def test_followed_entries_have_the_bytes_of_the_tiered_store(store, tmp_path):
    """RocketMQ's `IndexStoreFile` received the entries, in whole seconds, and compacted them."""
    tiered = large_store.java()["tiered"]

    def follow(index):
        reader = CommitLogReader(store / "commitlog", selection=ALL_TOPICS)
        dispatcher = SteppedDispatcher(index, StoreDirectory.open(store), reader=reader)
        while not dispatcher.run_once().caught_up:
            pass

    followed = stored(tmp_path / "followed", follow)
    assert hashlib.sha256(followed[: tiered["bytes"]]).hexdigest() == tiered["sha256"]
