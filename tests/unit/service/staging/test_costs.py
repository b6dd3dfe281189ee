"""What staging costs in requests: of one file, of many, of large ones."""

from collections import Counter

from tests.support.batches import batch
from tests.support.staging import Job, T, fill, found, holds, merge_all
from tiered_index.storage.base import WrapperStorage
from tiered_index.storage.memory import MemoryStorage


class Told(WrapperStorage):
    """Counts requests for staged and published objects, by operation and folder."""

    def __init__(self, inner):
        super().__init__(inner)
        self.counts = Counter()

    def _around(self, call, act):
        if (
            call.operation != "list"
            and call.operation != "list_uploads"
            and call.name.startswith(("staging/", "data/"))
        ):
            self.counts[call.operation] += call.requests
        return act()


def test_what_a_small_file_costs_beyond_the_local_path(open_spark, clock):
    """The figures of docs/spark-cluster.md."""

    def spent(folder, mode):
        told = Told(MemoryStorage(clock=clock))
        index = open_spark(folder, storage_backend=told, compaction=mode)
        fill(index, 1, 2, 3)
        index.run_lifecycle()
        if mode == "spark":
            Job(told, clock).run()
        index.run_lifecycle()
        counts = Counter(told.counts)
        assert len(index.log_state.files) == 1 and found(index) == [1, 2, 3]
        return counts

    local = spent("local", "local")
    assert local == {"put": 1, "head": 1}
    more = spent("spark", "spark") - local
    assert more["put"] == 2 and more["head"] == 2 and more["delete"] == 2
    assert more["get"] == 1 and more["get_range"] + more["get_suffix"] == 3
    assert set(more) <= {"put", "head", "delete", "get", "get_range", "get_suffix"}


def test_many_files_come_by_one_record_and_tables_take_them(open_spark, storage, clock):
    index = open_spark(local_keep_s=0)
    for start in (0, 10, 20):
        fill(index, *range(start, start + 5))
    index.run_lifecycle()
    before = index.log_state.number
    assert len(Job(storage, clock).run()) == 3
    assert index.run_lifecycle().adopted == 3
    assert index.log_state.number == before + 2, "the job's record, and one of positions"
    assert index.log_state.positions == {"log": 24}
    merge_all(storage, clock)
    index.run_lifecycle()
    holds(storage, clock, *(start + step for start in (0, 10, 20) for step in range(5)))


def test_staging_goes_in_parts(open_spark, faulty, storage, clock):
    index = open_spark(items=300_000, upload_part_bytes=5 << 20)
    count = 300_000 - 1
    index.put_batch(batch(count, key=[f"k{n % 1000}" for n in range(count)], timestamp_ms=T))
    index.seal()
    index.run_lifecycle()
    assert faulty.calls("begin_upload") == 1 and faulty.calls("upload_part") == 2
    assert not list(storage.list_uploads())
    assert len(Job(storage, clock).run()) == 1
    index.run_lifecycle()
    assert len(index.query("t", "k7", max_count=1000)) == 300
