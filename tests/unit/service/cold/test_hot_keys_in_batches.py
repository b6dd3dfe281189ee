"""A batch with a key of 100,000 entries reads and holds about as much as its pages need.

It fetches no byte twice.
"""

from collections import Counter

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.cold_index import Recorder
from tests.support.memory import traced_memory
from tests.support.merging import BASE_MS, Merging
from tests.support.plain_files import plain_files
from tiered_index import IndexReader, Lookup
from tiered_index.format.compacted import BLOCK_BYTES
from tiered_index.format.layout import HEADER_SIZE
from tiered_index.format.schema import KEYED_SCHEMA
from tiered_index.service.read.batch import LookupBatch, MatchAccumulator, Matches

ENTRIES = 100_000


def hot(first):
    """Return entries of one key, 100 per second."""
    numbers = np.arange(first, first + ENTRIES)
    return batch(ENTRIES, key="hot", offset=numbers, timestamp_ms=BASE_MS + numbers * 10)


@pytest.fixture(scope="module", params=["packed", pytest.param("plain", marks=pytest.mark.long), "rocketmq"])
def life(request, tmp_path_factory):
    preset = "rocketmq" if request.param == "rocketmq" else "native"
    settings = {"slots": 100, "items": ENTRIES + 1}
    made = Merging(tmp_path_factory.mktemp("hot"), preset=preset, settings=settings)
    made.index.put_batch(hot(0))
    with plain_files(request.param == "plain"):
        made.publish()
    yield made
    made.close()


@pytest.fixture
def read(life):
    recorder = Recorder(life.storage)
    settings = {"query_threads": 2, "block_cache_bytes": 0, "filter_after_probes": 10**6}
    with IndexReader.open(storage_backend=recorder, **settings) as reader:
        reader.query("t", "hot", max_count=1)
        recorder.reset()
        yield recorder, reader


def peak_of(reader, asked):
    """Return the most bytes that the lookups held at once."""
    with traced_memory() as memory:
        answers = reader.query_many(asked)
        assert answers.counts.tolist() == [q.max_count for q in asked]
        return memory()[1]


def test_a_page_reads_one_block(read):
    recorder, reader = read
    peak = peak_of(reader, [Lookup(topic="t", key="hot", max_count=64)])
    assert recorder.asked_bytes <= BLOCK_BYTES and len(recorder.reads) == 1
    assert peak < 6 << 20


def test_as_many_blocks_as_the_largest_page_needs(read):
    recorder, reader = read
    peak_of(reader, [Lookup(topic="t", key="hot", max_count=count) for count in (1, 20_000, 64)])
    (stored,) = reader.log_state.objects.values()
    entry_bytes = (stored.trailer_position - HEADER_SIZE) / stored.count
    assert 20_000 * min(24, 0.9 * entry_bytes) < recorder.asked_bytes <= 5 * BLOCK_BYTES


def test_old_ranges_read_only_their_blocks(read):
    recorder, reader = read
    peak_of(reader, [Lookup("t", "hot", BASE_MS + at, BASE_MS + at + 999, max_count=5) for at in (0, 990_000)])
    assert recorder.asked_bytes <= 2 * BLOCK_BYTES


def test_many_pages_of_one_key(read):
    """200 lookups and 100,000 entries are 20 million pairs. Each range includes the newest entries."""
    recorder, reader = read
    peak = peak_of(
        reader, [Lookup(topic="t", key="hot", max_count=10, begin_ms=BASE_MS + number * 1000) for number in range(200)]
    )
    assert len(recorder.reads) == 1 and recorder.asked_bytes <= BLOCK_BYTES
    assert peak < 24 << 20


def test_rows_are_cut_as_they_come():
    """At most twice the pages, or a small bound, is held, however many rows arrive."""
    batch = LookupBatch([Lookup(topic="t", key="a", max_count=4), Lookup(topic="t", key="b", max_count=7)])
    gathered = MatchAccumulator(batch, KEYED_SCHEMA)
    rows = np.zeros(20_000, KEYED_SCHEMA.row)
    with traced_memory() as memory:
        for lot in range(40):
            rows["offset"] = np.arange(len(rows)) + lot * len(rows)
            gathered.add(Matches(np.arange(len(rows)) % 2, rows.copy()))
        held, _ = memory()
    first = gathered.first()
    assert first.lookups.tolist() == [0] * 5 + [1] * 8
    assert first.rows["offset"].tolist() == [*range(799_998, 799_989, -2), *range(799_999, 799_984, -2)]
    assert held < 2 * rows.nbytes


def test_nothing_is_read_twice_beside_a_full_buffer(life, tmp_path):
    """The newest entries are in the writer's buffer, then in an unsealed file. The storage has the others."""
    recorder = Recorder(life.storage)
    life.index.close()
    with life.open(storage_backend=recorder, block_cache_bytes=0) as writer:
        writer.put_batch(hot(ENTRIES))
        asked = [Lookup(topic="t", key="hot", max_count=10, begin_ms=BASE_MS + number * 1000) for number in range(60)]
        asked.append(Lookup(topic="t", key="hot", max_count=10, end_ms=BASE_MS + ENTRIES * 10 - 1))
        for _ in range(2):
            recorder.reset()
            answers = writer.query_many(asked)
            assert [item.offset for item in answers[7]] == list(range(2 * ENTRIES - 1, 2 * ENTRIES - 11, -1))
            assert [item.offset for item in answers[60]] == list(range(ENTRIES - 1, ENTRIES - 11, -1))
            ranges = Counter((one.name, one.start) for one in recorder.reads)
            assert ranges and max(ranges.values()) == 1
            writer.flush()
    life.index = life.open()
