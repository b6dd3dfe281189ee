"""A second, larger store of RocketMQ's: the writer's files and the followed index have its bytes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.rocketmq import large_store
from tests.rocketmq.followed import SteppedDispatcher
from tests.support.store_writer import checkpoint_bytes
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.connectors.rocketmq.classic import classic_file_names, read_entries
from tiered_index.connectors.rocketmq.log.columns import ALL_TOPICS
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.connectors.rocketmq.log.store import StoreDirectory
from tiered_index.format.layout import HEADER_SIZE, ROCKETMQ, SLOT_SIZE


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "store"
    large_store.write(folder).close(checkpoint_bytes(*large_store.java()["checkpoint"]))
    return folder


def test_all_files_have_the_brokers_bytes(store):
    assert large_store.digests(store) == large_store.java()["files"]
    assert sum(count for count, _ in large_store.java()["files"].values()) == 1_864


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


def test_followed_entries_have_the_bytes_of_the_tiered_store_and_are_those_of_the_classic_index(store, tmp_path):
    """RocketMQ's `IndexStoreFile` received the entries, in whole seconds, and compacted them."""
    tiered = large_store.java()["tiered"]

    def follow(index):
        reader = CommitLogReader(store / "commitlog", selection=ALL_TOPICS)
        dispatcher = SteppedDispatcher(index, StoreDirectory.open(store), reader=reader)
        while not dispatcher.run_once().caught_up:
            pass

    followed = stored(tmp_path / "followed", follow)
    assert hashlib.sha256(followed[: tiered["bytes"]]).hexdigest() == tiered["sha256"]

    # the broker's classic index has the same entries
    names = classic_file_names(store / "index")
    classic = np.concatenate([read_entries(store / "index" / name) for name in names])
    items = np.frombuffer(followed, ROCKETMQ.schema.item, tiered["entries"], HEADER_SIZE + SLOT_SIZE * tiered["slots"])
    of_classic, of_ours = (
        {*zip(rows["key_hash"].tolist(), rows["offset"].tolist(), strict=True)} for rows in (classic, items)
    )
    assert len(of_ours) == tiered["entries"] and of_ours <= of_classic
    # the classic index also has prepared messages of transactions
    log = CommitLogReader(store / "commitlog", selection=ALL_TOPICS)
    more = {offset for _, offset in of_classic - of_ours}
    assert more and not any(log.read(offset).is_visible for offset in more)
