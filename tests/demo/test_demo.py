"""The demos with few messages: kills happen, nothing is lost, no answer is wrong. Their checks find wrong answers."""

from dataclasses import replace

import numpy as np
import pytest

from tests.demo.command import main
from tests.demo.kafka import KEYS
from tests.demo.kafka import main as kafka_main
from tests.demo.processes import Broker, ProcessFailed, placed
from tests.demo.workload import (
    BEGIN_MS,
    TOPICS,
    LookupChecks,
    ReferenceAnswers,
    Workload,
    entry_batch,
    lookups_of,
    take_census,
)
from tests.integration.cli.command_lines import run_here, run_script
from tests.support.model import ReferenceModel
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader, IndexService
from tiered_index.connectors.rocketmq.log.commitlog import CommitLogReader
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

COUNT, SEED = 2_000, 7
PLACES = [
    "write buffer",
    "unsealed file",
    "compacted file",
    "uploaded, local copy",
    "storage only, first",
    "storage only",
]


@pytest.mark.long
def test_the_demo_loses_nothing_and_prints_its_table(tmp_path):
    mine = {"TIERED_INDEX_ROOT": str(tmp_path / "mine"), "TIERED_INDEX_PRESET": "rocketmq", "TMPDIR": str(tmp_path)}
    outcome = run_script("--messages", "12000", module="tests.demo", timeout=240, environment=mine)
    assert outcome.code == 0, outcome
    rows = [line.strip() for line in outcome.out.splitlines()]
    assert [place for place in PLACES if any(row.startswith(f"{place}  ") for row in rows)] == PLACES
    fields = {name.strip(): value.strip() for name, _, value in (row.partition("  ") for row in rows)}
    assert fields["kills survived"] == "2 (while writing, in the middle of an upload)"
    assert (fields["entries lost"], fields["wrong answers"], rows[-1]) == ("0", "0", "all right")
    assert outcome.err.count("SIGKILL") == 2 and "recovered" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_demo_of_kafka(tmp_path):
    mine = {"TIERED_INDEX_ROOT": str(tmp_path / "mine"), "TMPDIR": str(tmp_path)}
    arguments = ("--records", "12000", "--json", "--quiet")
    outcome = run_script(*arguments, module="tests.demo.kafka", timeout=240, environment=mine)
    assert outcome.code == 0, outcome
    document = outcome.document
    names = ("records_lost", "records_doubled", "wrong_answers", "records", "records_at_brokers")
    assert [document[name] for name in names] == [0, 0, 0, 12_000, 0]
    assert document["status"] == "ok" and 0 < document["resumed_from"] <= 12_000
    assert [row["place"] for row in document["lookups"]] == list(KEYS)
    places = [[3, 1177]]
    assert [[place[:2] for place in key_places["places"]] for key_places in document["asked"]] == [places, places]
    assert document["shown"] >= 200 and document["gets_per_record"] <= 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", [main, kafka_main])
@pytest.mark.parametrize("arguments", [("--messages", 5), ("--records", 5), ("--storage", "memory://x")])
def test_bad_usage(program, arguments):
    assert run_here(*arguments, program=program).code == 2


def test_places_behind_the_blanks_at_the_ends_of_segments(tmp_path):
    drawn = Workload.generate(COUNT, seed=SEED)
    workload = placed(drawn, segment_bytes=1_000)
    ends = drawn.entry_message.searchsorted(range(301)).tolist()
    with StoreWriter(tmp_path, segment_bytes=1_000) as writer:
        for number in range(300):
            keys = [drawn.keys[key] for key in drawn.entry_key[ends[number] : ends[number + 1]]]
            body = bytes(int(drawn.size[number]) % 64)
            writer.put(TOPICS[drawn.topic[number]], 0, body, keys=keys, store_ms=int(drawn.timestamp_ms[number]))
    places = [(m.physical_offset, m.size) for m in CommitLogReader(tmp_path / "commitlog").messages()]
    assert places == list(zip(workload.offset[:300].tolist(), workload.size[:300].tolist(), strict=True))


def test_a_broker_that_fails_says_why(tmp_path):
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    (tmp_path / "store" / "consumequeue").touch()
    with Broker(COUNT, SEED, 10, tmp_path / "store") as broker, pytest.raises(ProcessFailed, match="exit code"):
        broker.wait_written()
        broker.write_tail()


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
    checks = LookupChecks(reference)
    assert checks.check("here", {}, index.query, [lookup]).wrong == []
    measured = checks.check("here", {}, lambda *arguments: lie(index.query(*arguments)), [lookup])
    assert len(measured.wrong) == 1 and workload.keys[3] in measured.wrong[0]


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
