"""A view gives the answers of the NumPy reference, file by file, for any files. It never reads hostile bytes."""

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import columns_of
from tests.support.core import compiled_core, using
from tests.support.disk_faults import FaultDisk
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.format.keys.hashing import lookup_numbers
from tiered_index.service.read.answers.batch import LookupBatch
from tiered_index.service.read.answers.rows import PreparedLookup
from tiered_index.service.read.files.file_view import LocalView
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

T = 1_700_000_000
NEVER = 2**40
TOPICS = ("t", "u", "тема")
# the Java hashes of two keys are equal; some others are negative
KEYS = ("Aa", "BB", "ключ", *(f"key{number}" for number in range(30)))


@pytest.fixture(scope="module")
def core():
    return compiled_core()


def put(index: IndexService, random_: random.Random, count: int) -> None:
    """Put entries in any order; some repeat others in all fields but the size."""
    repeats, rows = random_.random() < 0.5, []
    for offset in random_.sample(range(10_000), count):
        number = random_.randrange(200)
        topic, key = random_.choice(TOPICS[:2]), random_.choice(KEYS[: random_.choice([3, len(KEYS)])])
        place = (number % 3, key, number // 2 if repeats else offset)
        rows.append((topic, *place, random_.randrange(1, 4), (T + random_.randrange(600)) * 1000))
    index.put_batch(columns_of(rows))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    preset=st.sampled_from([{}, {"preset": "rocketmq"}, {"preset": "rocketmq", "hash": "mask"}]),
    steps=st.lists(st.sampled_from(["put", "put", "flush", "seal", "compact"]), min_size=1, max_size=9),
)
def test_lookups_answer_what_the_reference_does(core, tmp_path_factory, seed, preset, steps):
    random_, clock = random.Random(seed), ManualClock(T * 1000)
    options = {"slots": 5, "items": 150, "background": False, "clock": clock, "query_threads": 2, **preset}
    root, storage = tmp_path_factory.mktemp("root"), MemoryStorage(clock=clock)
    index = IndexService.open(root=root, storage_backend=storage, disk=FaultDisk(), **options)
    try:
        for step in steps:
            if step == "put":
                put(index, random_, random_.randrange(1, 120))
            elif step == "flush":
                index.flush()
            else:
                index.seal()
                if step == "compact":
                    index.run_lifecycle()
        for _ in range(40):
            compare(core, index, random_)
    finally:
        index.abandon()


def compare(core: Any, index: IndexService, random_: random.Random) -> None:
    begin, end = (random_.choice([None, (T + random_.randrange(-50, 650)) * 1000]) for _ in range(2))
    if begin is not None and end is not None:
        begin, end = min(begin, end), max(begin, end)
    question = (
        random_.choice(TOPICS),
        random_.choice([*KEYS, "absent"]),
        begin,
        end,
        random_.choice([1, 2, 5, 64, 2**70]),
    )
    with using(core):
        answer = index.query(*question)
    with using(None):
        expected = index.query(*question)
        assert answer.items == expected.items
        assert answer.unknown_topics == expected.unknown_topics
        if answer.status != expected.status:
            # files in another order: one of the two did not read on, and can't know that no entry follows
            short = answer if answer.status == "truncated" else expected
            rest = index.query(*question, short.cursor)
            assert {answer.status, expected.status} == {"complete", "truncated"} and not rest.items
        else:
            assert answer.cursor == expected.cursor
    compare_batches(core, index, random_)


def compare_batches(core: Any, index: IndexService, random_: random.Random) -> None:
    lookups = [
        Lookup(random_.choice(TOPICS), random_.choice([*KEYS, "absent"]), *times, max_count=random_.choice([1, 5, 64]))
        for times in [(None, None), (T * 1000, None), ((T + 200) * 1000, (T + 400) * 1000)] * 3
    ]
    with using(core):
        answers = index.query_many(lookups)
    with using(None):
        expected = index.query_many(lookups)
    assert [answer.items for answer in answers] == [answer.items for answer in expected]
    assert [(answer.status, answer.cursor) for answer in answers] == [
        (answer.status, answer.cursor) for answer in expected
    ]
    assert answers.unknown == expected.unknown and answers.explain.files_read == expected.explain.files_read


@pytest.mark.parametrize(("items", "walks"), [(300 * 32, True), (299 * 32, False)])
def test_a_chain_is_walked_if_it_is_short_beside_its_file(core, tmp_path, items, walks):
    settled = {"slots": 1, "items": items, "background": False, "storage_backend": MemoryStorage()}
    with IndexService.open(root=tmp_path / "root", disk=FaultDisk(), **settled) as index:
        for number in range(301):
            index.put("t", 0, "k", number, 1, T * 1000)
        index.flush()
        (handle,) = index.files()
        lookup = PreparedLookup("t", "k", *lookup_numbers("t", "k"), 0, NEVER, 999)
        view = LocalView(handle.layout.schema, [handle])
        rows = view.find(LookupBatch.of_one(lookup))
        assert rows is not None and bool(rows.rest) != walks
        answer = index.query("t", "k", max_count=999)
        # other processes get the schema of the entries found
        assert pickle.loads(pickle.dumps(handle.layout)) == handle.layout
        assert [item.offset for item in answer] == list(range(300, -1, -1))
        assert [len(answer) for answer in index.query_many([("t", "k"), ("t", "no")], max_count=999)] == [301, 0]
