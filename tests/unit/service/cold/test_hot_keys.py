"""A key has 100,000 entries in one slot.

Each page and batch reads only what it needs.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.cold_index import BASE_MS, Recorder
from tests.support.disk_faults import FaultDisk
from tests.support.memory import traced_memory
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.format.compacted import BLOCK_BYTES
from tiered_index.storage.memory import MemoryStorage

ENTRIES = 100_000
OTHERS = 300


def giant_columns():
    """Return the hot key's entries, several per second and some late, with other keys' entries between them."""
    rng = np.random.default_rng(7)
    count = ENTRIES + OTHERS
    keys = np.full(count, "hot", object)
    others = rng.choice(count, OTHERS, replace=False)
    keys[others] = [f"k{number}" for number in range(OTHERS)]
    seconds = np.arange(count) // 3 - (rng.random(count) < 0.01) * rng.integers(0, 5000, count)
    queues = rng.integers(0, 3, count)
    times = BASE_MS + seconds * 1000
    return batch(count, key=keys.tolist(), queue_id=queues, offset=np.arange(count), size=10, timestamp_ms=times)


@dataclass
class Giant:
    storage: Recorder

    def reader(self, **settings):
        return IndexReader.open(storage_backend=self.storage, refresh_interval_s=10**6, **settings)


@pytest.fixture(scope="module", params=["native", "rocketmq"])
def giant(request, tmp_path_factory):
    storage = Recorder(MemoryStorage())
    settings = {"slots": 64, "items": ENTRIES + OTHERS + 1, "background": False, "max_early_s": 10**9}
    settings |= {"preset": request.param, "clock": ManualClock(BASE_MS)}
    root = tmp_path_factory.mktemp("giant") / "root"
    opened = IndexService.open(root=root, storage_backend=storage, disk=FaultDisk(), **settings)
    with opened as service:
        service.put_batch(giant_columns())
        service.seal()
        service.run_lifecycle()
        yield Giant(storage)


def test_all_of_it_is_one_range(giant):
    with giant.reader() as cold:
        cold.query("t", "k1")
        giant.storage.reset()
        answer = cold.query("t", "hot", max_count=ENTRIES)
        (read,) = giant.storage.reads
        assert (answer.explain.requests, answer.explain.bytes) == (1, read.length)
        (stored,) = cold.log_state.objects.values()
        item_bytes = min(cold.genesis.layout.schema.item.itemsize, 0.98 * stored.trailer_position / stored.count)
        assert ENTRIES * item_bytes <= read.length <= (ENTRIES + OTHERS) * item_bytes + BLOCK_BYTES


@pytest.mark.parametrize("start", [0, 30_000, 99_900])
def test_a_page_reads_the_blocks_it_needs(giant, start):
    with giant.reader(cache_slot_groups=False) as cold:
        after = cold.query("t", "hot", max_count=start + 1).items[start]
        first = cold.query("t", "hot", end_ms=after.timestamp_ms, max_count=64)
        giant.storage.reset()
        page = cold.query("t", "hot", end_ms=after.timestamp_ms, max_count=64, cursor=first.cursor)
        assert len(page) == 64 or start == 99_900
        # up to 15,000 entries are late, so in RocketMQ's order a second may be in several blocks
        blocks = 2 if cold.genesis.layout.schema.keyed else 5
        assert 0 < giant.storage.asked_bytes <= blocks * BLOCK_BYTES
        assert page.explain.bytes == giant.storage.asked_bytes
        assert page.explain.requests == len(giant.storage.reads) <= blocks


@pytest.mark.parametrize(
    ("lookups", "blocks"),
    [
        # as many blocks as the largest page needs
        ([Lookup("t", "hot", max_count=count) for count in (1, 20_000, 64)], 5),
        # in RocketMQ's order late entries are in other blocks, too
        ([Lookup("t", "hot", BASE_MS + at, BASE_MS + at + 999, max_count=2) for at in (0, 990_000)], 4),
        # 200 lookups and 100,000 entries are 20 million pairs; each range includes the newest entries
        ([Lookup("t", "hot", BASE_MS + at, max_count=10) for at in range(0, 200_000, 1000)], 1),
    ],
    ids=["pages", "old ranges", "many pages"],
)
def test_a_batch_reads_only_the_blocks_of_its_pages(giant, lookups, blocks):
    with giant.reader(query_threads=2, cache_slot_groups=False, filter_after_probes=10**6) as reader:
        reader.query("t", "hot", max_count=1)
        giant.storage.reset()
        with traced_memory() as memory:
            answers = reader.query_many(lookups)
            assert answers.counts.tolist() == [q.max_count for q in lookups]
            assert memory()[1] < 24 << 20
        bound = min(blocks, 2) if blocks == 4 and reader.genesis.layout.schema.keyed else blocks
        assert 0 < giant.storage.asked_bytes <= bound * BLOCK_BYTES
