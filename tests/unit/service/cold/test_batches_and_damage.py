"""Misses of batches count towards a filter. `explain` shows requests for a damaged local copy in a row of the copy."""

import contextlib
import random

import numpy as np
import pytest

from tests.support.batches import batch
from tests.support.damage import flip
from tests.support.log_records import open_log
from tests.support.plain_files import plain_files
from tiered_index import IndexReader, IndexService, Lookup, kernels
from tiered_index.clock import ManualClock
from tiered_index.errors import CorruptFile, PartialAnswer
from tiered_index.format.hashing import lookup_numbers
from tiered_index.format.trailer import parse_trailer
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.read.batch import LookupBatch
from tiered_index.service.read.compacted import LocalBytes, open_local
from tiered_index.service.read.rows import PreparedLookup
from tiered_index.storage.memory import MemoryStorage

BASE_MS = 1_700_000_000_000


def put(service, count):
    service.put_batch(batch(count, key=[f"k{i}" for i in range(count)], timestamp_ms=BASE_MS + np.arange(count) * 1000))


@contextlib.contextmanager
def uploaded(root, storage, count, **settings):
    """Yield the writer of keys k0 to before `count` in one uploaded file."""
    chosen = {"slots": 100, "items": 4000, "background": False, **settings}
    with IndexService.open(root=root, storage_backend=storage, **chosen) as service:
        put(service, count)
        service.seal()
        service.run_lifecycle()
        yield service


@pytest.mark.usefixtures("large_filters")
def test_a_reader_that_only_asks_batches_learns_the_filter(tmp_path):
    storage = MemoryStorage()
    with uploaded(tmp_path, storage, 2000, local_keep_s=0):
        pass
    with IndexReader.open(storage_backend=storage, filter_after_probes=1) as reader:
        absent = [[Lookup(topic="t", key=f"absent{batch}-{i}") for i in range(5)] for batch in range(3)]
        asked = [reader.query_many(lookups).explain for lookups in absent]
        assert asked[0].requests >= 2  # the directory, and the groups that have no key
        assert asked[1].requests <= 2  # the filter, and the groups that it cannot exclude
        assert sum(explain.requests for explain in asked[2:]) == 0
        assert asked[2].files[0].outcome == "skipped_filter"
        assert reader.query_many([Lookup(topic="t", key="k7")]).counts.tolist() == [1]


def test_requests_for_a_damaged_copy_are_its_own(tmp_path):
    storage = MemoryStorage()
    with uploaded(tmp_path, storage, 2000) as service:
        (path,) = (tmp_path / "uploaded").iterdir()
        data = bytearray(path.read_bytes())
        data[28 + 800 : -3000] = bytes(len(data) - 28 - 800 - 3000)
        path.write_bytes(data)
        answer = service.query("t", "k7")
        assert [item.offset for item in answer] == [7]
        (report,) = answer.explain.files
        assert report.requests == answer.explain.requests > 0
    with IndexReader.open(root=tmp_path, storage_backend=storage) as reader:
        answer = reader.query("t", "k7")
        (report,) = [report for report in answer.explain.files if report.file != "log"]
        assert report.requests > 0
        assert sum(report.requests for report in answer.explain.files) == answer.explain.requests


def damage(storage, rng):
    """Flip a bit in some slot groups of every object, and in a block of a giant slot."""
    for info in list(storage.list()):
        if not info.name.startswith("data/"):
            continue
        data = bytearray(storage.get(info.name))
        directory = parse_trailer(bytes(data), info.name, len(data)).directory
        runs = [*directory.all_runs()]
        for run in rng.sample(runs, max(1, len(runs) // 5)):
            data[run.offset + rng.randrange(run.length)] ^= 1 << rng.randrange(8)
        storage.put(info.name, bytes(data))


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_batch_is_partial_by_slot_group_as_single_lookups_are(tmp_path, layout, merged):
    clock, rng = ManualClock(BASE_MS), random.Random(f"{layout} {merged}")
    storage = MemoryStorage(clock=clock)
    count = 3000
    settings = {"slots": 500, "items": 40_000, "local_keep_s": 0, "background": False, "max_early_s": 10**9}
    opened = IndexService.open(root=tmp_path, storage_backend=storage, clock=clock, **settings)
    with plain_files(layout == "plain"), opened as service:
        for _ in range(2):
            put(service, count)
            service.put_batch(batch(12_000, key="hot", timestamp_ms=BASE_MS + np.arange(12_000) * 1000))
            service.seal()
            service.run_lifecycle()
    if merged:
        clock.advance(10**6)
        log = open_log(storage, clock)
        assert merge(storage, log, clock, MergeOptions(window_s=30 * 86_400, min_age_s=0, shard_bytes=1 << 20)).sources
    damage(storage, rng)
    asked = [Lookup(topic="t", key=f"k{number}") for number in range(0, count, 12)]
    asked += [Lookup(topic="t", key="hot", max_count=most) for most in (1, 100)]
    asked += [Lookup(topic="t", key="absent"), Lookup(topic="u", key="k1")]
    with IndexReader.open(storage_backend=storage, clock=clock, filter_after_probes=10**6) as reader:
        alone = [reader.query(one.topic, one.key, max_count=one.max_count, allow_partial=True) for one in asked]
    with IndexReader.open(storage_backend=storage, clock=clock, filter_after_probes=10**6) as reader:
        many = reader.query_many(asked, allow_partial=True)
        with pytest.raises((CorruptFile, PartialAnswer)):
            reader.query_many(asked)
    partial = [one.status == "partial" for one in alone]
    assert 0 < sum(partial) < len(asked)
    for lookup, one, other in zip(asked, alone, many, strict=True):
        assert other.status == one.status, lookup
        # of a giant slot a batch keeps the entries of its undamaged blocks
        assert other.items == one.items or (lookup.key == "hot" and one.status == "partial"), lookup
        assert {report.file for report in other.failed} == {report.file for report in one.failed}, lookup
    assert {report.file for report in many.failed} == {report.file for one in alone for report in one.failed}


@pytest.mark.parametrize("checked", [True, False], ids=["of other bytes", "that is no run"])
def test_damage_of_a_local_file_is_of_its_slot_group(tmp_path, monkeypatch, checked):
    with uploaded(tmp_path, MemoryStorage(), 3000):
        (path,) = (tmp_path / "uploaded").iterdir()
    file = open_local(path)
    runs = file.local.trailer().directory.all_runs()
    bad = runs[1]
    if checked:
        flip(path, bad.offset)
        file = open_local(path)
    else:
        verified = LocalBytes.verified

        def garbled(self, asked, damaged=None):
            found = verified(self, asked, damaged)
            return [
                memoryview(b"\xff" * run.length) if run.offset == bad.offset else piece
                for run, piece in zip(asked, found, strict=True)
            ]

        monkeypatch.setattr(LocalBytes, "verified", garbled)
        # the core reads the map itself
        monkeypatch.setattr(kernels, "_core", None)
    lookups = [Lookup(topic="t", key=f"k{number}") for number in range(300)]
    lacking = set()
    for number, lookup in enumerate(lookups):
        prepared = PreparedLookup("t", lookup.key, *lookup_numbers("t", lookup.key), 0, 2**40, 64)
        try:
            assert len(file.search(LookupBatch.of_one(prepared)).rows) == 1
        except CorruptFile:
            lacking.add(number)
    assert 0 < len(lacking) < 300
    found = file.search(LookupBatch(lookups, allow_partial=True))
    ((places, error),) = found.damage
    assert set(places.tolist()) == lacking == set(range(300)) - set(found.lookups.tolist())
    assert isinstance(error, CorruptFile)
    with pytest.raises(CorruptFile):
        file.search(LookupBatch(lookups))
