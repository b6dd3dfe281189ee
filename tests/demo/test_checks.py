"""The demo's checks: they must find a wrong answer, a lost entry, and an entry that was never put."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.demo.workload import BEGIN_MS, TOPICS, LookupChecks, ReferenceAnswers, Workload, lookups_of, take_census
from tests.support.model import ReferenceModel
from tests.support.workload import entry_batch
from tiered_index import IndexReader, IndexService
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

SETTINGS = {"storage": "memory://demo", "slots": 500, "items": 1000, "background": False}


@pytest.fixture(scope="module")
def workload():
    return Workload.generate(3000, seed=5)


@pytest.fixture(scope="module")
def reference(workload):
    return ReferenceAnswers(workload)


@pytest.fixture
def index(workload, tmp_path):
    with IndexService.open(root=tmp_path / "root", storage_backend=MemoryStorage(), **SETTINGS) as opened:
        opened.put_batch(entry_batch(workload, 0, len(workload)))
        yield opened


def test_expected_answers_are_the_reference_models(workload, reference):
    model = ReferenceModel()
    for message, key in zip(workload.entry_message.tolist(), workload.entry_key.tolist(), strict=True):
        model.put(
            TOPICS[workload.topic[message]],
            int(workload.queue_id[message]),
            workload.keys[key],
            int(workload.offset[message]),
            int(workload.size[message]),
            int(workload.timestamp_ms[message]),
        )
    lookups = lookups_of(workload, 2800, 120, seed=3)
    hits = 0
    for lookup in [*lookups, Lookup(topic=TOPICS[0], key=workload.keys[0], max_count=256)]:
        answers = model.query(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms, None)
        expected = [(a.timestamp_ms, a.queue_id, a.offset, a.size) for a in answers]
        assert reference.answer(lookup.topic, lookup.key, lookup.begin_ms, lookup.end_ms) == expected
        hits += len(expected)
    assert hits > 500


def test_right_answers_count_as_right(workload, reference, index):
    checks = LookupChecks(reference)
    lookups = lookups_of(workload, 2800, 200, seed=4)
    measured = checks.check(
        "here", {}, index.query, lookups, paged=Lookup(topic=TOPICS[0], key=workload.keys[0], max_count=10)
    )
    assert measured.wrong == []
    assert len(measured.latencies_ms) > 203
    assert measured.to_dict()["wrong"] == 0


LIES = {
    "an answer is missing": lambda r: replace(r, items=r.items[1:]),
    "another size": lambda r: replace(r, items=(replace(r.items[0], size=r.items[0].size + 1), *r.items[1:])),
    "another order": lambda r: replace(r, items=r.items[::-1]),
    "one too many": lambda r: replace(r, items=(*r.items, r.items[-1])),
    "cut without saying so": lambda r: replace(r, items=r.items[:-1], status="truncated", cursor="c"),
    "partial": lambda r: replace(r, status="partial"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_is_a_wrong_answer(workload, reference, index, lie):
    lookup = Lookup(topic=TOPICS[0], key=workload.keys[3], max_count=256)

    def query(*arguments):
        return lie(index.query(*arguments))

    measured = LookupChecks(reference).check("here", {}, query, [lookup])
    assert len(measured.wrong) == 1
    assert workload.keys[3] in measured.wrong[0]


def test_the_census_finds_lost_repeated_and_unexpected_entries(workload, tmp_path):
    storage = MemoryStorage()
    with IndexService.open(root=tmp_path / "root", storage_backend=storage, **SETTINGS) as index:
        index.put_batch(entry_batch(workload, 0, 2990))
        index.put_batch(entry_batch(workload, 100, 200))
        index.put(TOPICS[0], 0, "stranger", 10**9, 1, BEGIN_MS)
        index.seal()
        index.run_lifecycle()
        with IndexReader.open(storage_backend=storage) as reader:
            census = take_census(reader, workload)
            missing = workload.entries - int(np.searchsorted(workload.entry_message, 2990))
            low, high = np.searchsorted(workload.entry_message, (100, 200))
            assert (census.lost, census.repeated, census.unexpected) == (missing, high - low, 1)
            assert census.expected == workload.entries
            index.put_batch(entry_batch(workload, 2990, 3000))
            index.seal()
            index.run_lifecycle()
            reader.refresh()
            assert take_census(reader, workload).lost == 0
