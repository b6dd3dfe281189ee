"""A reader makes few requests, even for an index of very many objects and a batch of very many keys."""

import os

import numpy as np
import pytest

from tests.support.changes import replace
from tests.support.cold_index import BASE_MS, cold_index, columns
from tests.support.disk_faults import FaultDisk
from tests.support.log_records import publish
from tests.support.model import Answer
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.clock import ManualClock
from tiered_index.format.names import STATES
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read.batch import LookupBatch
from tiered_index.service.read.compacted import CompactedFile
from tiered_index.storage.memory import MemoryStorage

_OBJECTS = 4_000
_FILES, _ENTRIES, _KEYS = 50, 3_000, 500


def _older(stored, number):
    """Return an object that does not exist, of a time long before that of `stored`."""
    file_id = f"{stored.file_id[:-8]}{number:08x}"
    begin_s, end_s = stored.second_min - 100_000 * number, stored.second_max - 100_000 * number
    return replace(stored, name=f"data/{file_id}/0.index", file_id=file_id, second_min=begin_s, second_max=end_s)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An index of very many objects. Only the three newest exist."""
    made = cold_index(tmp_path_factory.mktemp("many") / "root", files=3)
    log = StorageLog(made.inner, ManualClock(BASE_MS))
    epoch = log.open().epoch
    for first in range(1, _OBJECTS + 1, 500):
        publish(log, epoch, tuple(_older(made.stored[0], first + n) for n in range(500)))
    for state in STATES:
        # a reader beside a root would read the log again if the folders had just changed
        os.utime(made.root / state, (BASE_MS / 1000, BASE_MS / 1000))
    return made


@pytest.mark.parametrize("beside_the_root", [False, True])
def test_the_cost_of_a_lookup_does_not_grow_with_the_index(made, beside_the_root):
    made.storage.reset()
    with made.reader(**({"root": made.root} if beside_the_root else {})) as reader:
        # the checkpoint, and the record after the one that the root knows
        assert sorted(made.storage.operations) == [*["get"] * (1 + beside_the_root), "list", "list"]
        assert len(reader.files()) == _OBJECTS + 3
        newest = made.stored[-1]
        for requests in (2 - beside_the_root, 0):
            found = reader.query("t", "all", newest.second_min * 1000)
            assert [Answer.of(item) for item in found] == made.expected("t", "all", begin_ms=newest.second_min * 1000)
            assert found.explain.requests == requests
            assert [report.file for report in found.explain.files] == [newest.file_id]
        made.storage.reset()
        reader.refresh()
        assert made.storage.operations == ["list"]
        log = StorageLog(made.inner, ManualClock(BASE_MS))
        publish(log, log.open().epoch, (_older(made.stored[0], 2 * _OBJECTS + beside_the_root),))
        made.storage.reset()
        before = reader.files()
        reader.refresh()
        assert made.storage.operations == ["list", "get"]
        # `before` stays alive, so that no new file has the `id()` of an old one
        assert len(set(map(id, reader.files())) - set(map(id, before))) == 1
        publish(log, log.state.epoch, remove=(_older(made.stored[0], 2 * _OBJECTS + beside_the_root).name,))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A storage of many files with several slot groups each, and the writer's cache of their filters."""
    root, storage = tmp_path_factory.mktemp("keys") / "root", MemoryStorage()
    settings = {"slots": 1_000, "items": _ENTRIES + 1, "background": False, "local_keep_s": 0, "max_early_s": 10**9}
    settings |= {"clock": ManualClock(BASE_MS), "disk": FaultDisk()}
    with IndexService.open(root=root, storage_backend=storage, **settings) as writer:
        for file in range(_FILES):
            writer.put_batch(columns(file, _ENTRIES))
            writer.flush()
        writer.seal()
        writer.run_lifecycle()
        writer.run_lifecycle()
        assert [file.place for file in writer.files()] == ["storage"] * _FILES
    return storage, root / "cache"


@pytest.mark.parametrize("gap_bytes", [0, 256 << 10])
@pytest.mark.parametrize("filters", [False, True])
def test_a_batch_makes_no_more_requests_than_there_are_slot_groups_to_read(stored, filters, gap_bytes):
    settings = {"block_cache_bytes": 0, "filter_after_probes": 1 << 30, "coalesce_gap_bytes": gap_bytes}
    storage, cache = stored
    numbers = np.random.default_rng(7).choice(_FILES * (_ENTRIES - 1), _KEYS, replace=False).tolist()
    lookups = [Lookup(topic="t", key=f"k{n // (_ENTRIES - 1)}-{n % (_ENTRIES - 1)}") for n in numbers]
    settings |= {"storage_backend": storage, "cache_dir": cache if filters else None, "refresh_interval_s": 10**6}
    with IndexReader.open(**settings) as reader:
        groups = set(_groups(reader, lookups))
        found = reader.query_many(lookups)
        assert found.counts.tolist() == [1] * _KEYS
        assert _FILES <= found.explain.requests <= 1.1 * len(groups)
        # without filters, the keys are in slots of all groups of each file
        assert len(groups) <= 1.1 * _KEYS if filters else len(groups) > 4 * _FILES


def _groups(reader, lookups):
    """Yield the slot groups that may have an answer, by directories and cached filters."""
    batch = LookupBatch(lookups)
    for file in reader.files():
        assert isinstance(file, CompactedFile) and file.stored is not None
        trailer, cold = file.stored.trailer(), file.stored.cold
        asked = ~cold.filters.excludes_many(file.stored.stored, batch.filter_hashes(keyed=cold.keyed))
        slots = trailer.metadata.slot_map.slots_of(batch.key_hash[asked])
        for run in trailer.directory.runs_of(slots, file.second_min, file.second_max):
            yield file.stored.file, run.offset
