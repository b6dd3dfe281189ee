"""The compiled core and NumPy leave out the same hidden entries as a model, in every state of files, page by page."""

import pickle
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_view import KEYS, TOPICS, T, put
from tests.support.core import compiled_core, using
from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader, IndexService
from tiered_index.base import kernels
from tiered_index.base.clock import ManualClock
from tiered_index.base.retention import Horizon
from tiered_index.format.keys.hashing import lookup_numbers
from tiered_index.format.names import TOPICS_QUEUE, linked_store, queue_of_store
from tiered_index.service.log.expired import NOTHING, Expired
from tiered_index.service.log.hidden import HIDES_NOTHING
from tiered_index.service.log.replaced import NOT_REPLACED, Replacement
from tiered_index.service.log.tombstones import Tombstone
from tiered_index.service.read.files import root_view
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.types import Lookup

PRESETS = [{}, {"preset": "rocketmq"}, {"preset": "rocketmq", "hash": "mask"}]
STORES = [linked_store("t", 0), linked_store("t", 1), linked_store("u", 2), linked_store("", TOPICS_QUEUE)]


@pytest.fixture(scope="module")
def core():
    with pytest.MonkeyPatch.context() as patch:
        # a root is settled at once, so that the core searches it
        patch.setattr(root_view, "STEP_NS", -(10**12))
        # None with `--numpy`: then NumPy alone is compared with the model
        yield kernels.compiled()


class Model(ReferenceModel):
    """The entries of an index, without those that `expired` hides."""

    expired = NOTHING

    def hide(self, expired: Expired, keys: dict[Tombstone, str]) -> None:
        self.expired, self.expiries, self.erasures = expired, [], []
        for horizon in expired.horizons:
            # 0 says that no entry has expired, though they may be older than the epoch
            self.expire(horizon.before_ms, dict(horizon.topics))
        for stone in expired.tombstones:
            self.erase(stone.topic, stone.before_ms, key=keys.get(stone), queue_id=stone.queue_id)

    def is_in(self, entry: Any, name: str) -> bool:
        return any(
            start <= entry.offset < end
            for store, ranges in self.expired.replaced.stores.items()
            if queue_of_store(store) in ((entry.topic, entry.queue_id), (None, entry.queue_id))
            for start, end in getattr(ranges, name)
        )

    def has_expired(self, entry: Any) -> bool:
        return super().has_expired(entry) or self.is_in(entry, "hidden")

    def replaced(self, question: tuple[Any, ...], after: Any, last: Any) -> int:
        """The number of replaced rows that are on the page from `after` to `last` (None: to the end)."""
        places = set()
        for entry in self.matching(*question):
            if not super().has_expired(entry) and self.is_in(entry, "retired"):
                rank = self.rank(self.order_key(entry))
                if (after is None or rank > self.rank(after)) and (last is None or rank <= self.rank(last)):
                    places.add((entry.queue_id, entry.offset))
        return len(places)

    @staticmethod
    def rank(key: Any) -> tuple[int, ...]:
        return (-key[0], -key[1], key[2])


def random_expired(random_: random.Random, model: Model) -> tuple[Expired, dict[Tombstone, str]]:
    """Return hidden entries, and the keys of their tombstones."""

    def time_ms() -> int:
        if not model.entries or random_.random() < 0.3:
            return (T + random_.randrange(-50, 650)) * 1000
        # at the second of an entry, or after it
        return (random_.choice(model.entries).second + random_.randrange(2)) * 1000

    def key_of_entry() -> str:
        # entries have many of the first keys, and two of them have equal hashes
        return random_.choice(random_.choice([KEYS[:3], [*KEYS, "absent"]]))

    horizons, keys, stones = list[Horizon](), dict[Tombstone, str](), list[Tombstone]()
    for _ in range(random_.choice([0, 0, 1, 2])):
        patterns = tuple(
            (pattern, time_ms()) for pattern in random_.sample(["t", "?", "те*", "u"], random_.randrange(3))
        )
        horizons.append(Horizon(random_.choice([0, time_ms()]), patterns))
    for _ in range(random_.choice([0, 0, 1, 3, 30])):
        key = key_of_entry()
        stone = Tombstone.of(random_.choice(TOPICS), time_ms(), key=key, keyed=model.keyed)
        # keys with an equal stone are one key, because the index has no fingerprints
        keys[stone] = key
        stones.append(stone)
    for _ in range(random_.choice([0, 0, 1, 2])):
        queue_id = random_.choice([None, 0, 1, 2, TOPICS_QUEUE])
        stones.append(Tombstone.of(random_.choice(TOPICS), time_ms(), queue_id=queue_id))
    replacements = list[Replacement]()
    for _ in range(random_.choice([0, 0, 1, 40])):
        start = random_.randrange(10_000)
        end = start + random_.choice([1, 3, 400])
        # retired at once, or a reading that is not published, whose new offsets are hidden
        new = 1 << 40 if random_.random() < 0.6 else end + random_.randrange(500)
        new_end = new if new == 1 << 40 else new + random_.randrange(1, 400)
        replacements.append(Replacement(random_.choice(STORES), start, end, new, new_end))
    replaced = NOT_REPLACED
    for replacement in replacements:
        replaced = replaced.replayed([replacement], {})
    return Expired(tuple(horizons), {}, tuple(stones), replaced), keys


def shows(index: Any, expired: Expired) -> None:
    """Make all lookups see a state that hides entries."""
    catalog = index._catalog if isinstance(index, IndexService) else index._views[0].catalog
    catalog.show(replace(catalog.snapshot.state, expired=expired), catalog.snapshot.as_of_s)


def put_rows(model: Model, index: IndexService, random_: random.Random) -> None:
    """Put the same entries in an index and a model, some in the queue of files whose topic is a field."""

    class Both:
        def put_batch(self, columns: dict[str, list[Any]]) -> None:
            columns["queue_id"] = [
                TOPICS_QUEUE if queue == 2 and offset % 2 else queue
                for queue, offset in zip(columns["queue_id"], columns["offset"], strict=True)
            ]
            index._put_columns(columns, None, None, of_source=True)
            for row in zip(*columns.values(), strict=True):
                model.put(*row)

    put(Both(), random_, random_.randrange(1, 120))  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    preset=st.sampled_from(PRESETS),
    is_local=st.booleans(),
    steps=st.lists(st.sampled_from(["put", "put", "flush", "seal", "compact"]), min_size=1, max_size=7),
)
def test_hidden_entries_are_in_no_answer(core, tmp_path_factory, seed, preset, is_local, steps):
    random_, clock, folder = random.Random(seed), ManualClock(T * 1000), tmp_path_factory.mktemp("index")
    storage = LocalStorage(folder / "storage", disk=FaultDisk()) if is_local else MemoryStorage(clock=clock)
    options = {"slots": 5, "items": 150, "background": False, "clock": clock, "query_threads": 2, **preset}
    keyed = not preset
    model = Model(keyed=keyed)
    index = IndexService.open(root=folder / "root", storage_backend=storage, disk=FaultDisk(), **options)
    try:
        for step in steps:
            if step == "put":
                put_rows(model, index, random_)
            elif step == "flush":
                index.flush()
            else:
                index.seal()
                if step == "compact":
                    index.run_lifecycle()
        check_states(core, index, model, random_)
        index.seal()
        index.run_lifecycle()
        reading = {"storage_backend": storage, "clock": clock, "refresh_interval_s": 1e9, "query_threads": 2}
        for root in (None, folder / "root"):
            with IndexReader.open(root=root, **reading, cache_slot_groups=random_.random() < 0.5) as reader:
                if root is not None:
                    # the first look reads the log again
                    reader.query(TOPICS[0], KEYS[0])
                check_states(core, reader, model, random_)
    finally:
        index.abandon()


def check_states(core: Any, index: Any, model: Model, random_: random.Random) -> None:
    for _ in range(4):
        expired, keys = random_expired(random_, model)
        model.hide(expired, keys)
        shows(index, expired)
        for _ in range(4):
            check_pages(core, index, model, random_)
        check_batch(core, index, model, random_)


def random_question(random_: random.Random) -> tuple[Any, ...]:
    begin, end = (random_.choice([None, (T + random_.randrange(-50, 650)) * 1000]) for _ in range(2))
    if begin is not None and end is not None:
        begin, end = min(begin, end), max(begin, end)
    return random_.choice(TOPICS), random_.choice(random_.choice([KEYS[:3], [*KEYS, "absent"]])), begin, end


def check_pages(core: Any, index: Any, model: Model, random_: random.Random) -> None:
    """Compare all pages of a lookup with those of NumPy and of the model."""
    question, most = random_question(random_), random_.choice([1, 2, 5, 64])
    cursor = after = None
    for _ in range(200):
        with using(core):
            answer = index.query(*question, most, cursor)
            bounded = index.query(*question, most, cursor, timeout_s=100)
        with using(None):
            expected = index.query(*question, most, cursor)
        assert [Answer.of(item) for item in answer] == model.query(*question, most, after)
        last = order_key(answer.items[-1]) if answer.status == "truncated" else None
        for other in (bounded, expected):
            assert other.items == answer.items and other.unknown_topics == answer.unknown_topics
            assert other.expired_before_ms == answer.expired_before_ms
            if other.status == answer.status:
                # otherwise one of the two did not read on, and can't know that no entry follows
                assert (other.replaced, other.cursor) == (answer.replaced, answer.cursor)
        assert answer.replaced == model.replaced(question, after, last)
        if (cursor := answer.cursor) is None:
            return
        after = last
    raise AssertionError("a lookup has too many pages")


def order_key(item: Any) -> Any:
    return item.timestamp_ms // 1000, item.offset, item.queue_id, ()


def check_batch(core: Any, index: Any, model: Model, random_: random.Random) -> None:
    questions = [random_question(random_) for _ in range(12)]
    lookups = [Lookup(*question, max_count=random_.choice([1, 5, 64])) for question in questions]
    with using(core):
        answers = index.query_many(lookups)
    with using(None):
        expected = index.query_many(lookups)
    for question, lookup, answer, other in zip(questions, lookups, answers, expected, strict=True):
        assert [Answer.of(item) for item in answer] == model.query(*question, lookup.max_count)
        assert (answer.items, answer.status, answer.cursor) == (other.items, other.status, other.cursor)
        last = order_key(answer.items[-1]) if answer.status == "truncated" else None
        assert answer.replaced == other.replaced == model.replaced(question, None, last)
    assert answers.unknown == expected.unknown


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 60))
def test_exports_and_rewrites_keep_what_the_model_has(seed, count):
    random_ = random.Random(seed)
    model, names = Model(), {2: "t", 5: "u", 7: "тема"}
    entries = [
        entry
        for _ in range(count)
        for entry in model.put(
            random_.choice(TOPICS),
            random_.choice([0, 1, 2, TOPICS_QUEUE]),
            random_.choice(KEYS),
            random_.randrange(10_000),
            1,
            (T + random_.randrange(600)) * 1000,
        )
    ]
    expired, keys = random_expired(random_, model)
    model.hide(expired, keys)
    numbers = np.array([lookup_numbers(entry.topic, entry.key) for entry in entries], np.int64).reshape(-1, 3)
    ids = {topic: topic_id for topic_id, topic in names.items()}
    columns = {
        "topic_id": np.array([ids[entry.topic] for entry in entries], np.int32),
        "queue_id": np.array([entry.queue_id for entry in entries], np.int32),
        "offset": np.array([entry.offset for entry in entries], np.int64),
        "key_hash": numbers[:, random_.randrange(2)].astype(np.int32),
        "fingerprint": numbers[:, 2].astype(np.uint32),
    }
    seconds = np.array([entry.second for entry in entries], np.int64)
    shown = expired.keeps(columns, seconds, names)
    assert shown.tolist() == [not model.has_expired(entry) for entry in entries]


def test_hidden_entries_are_sent_to_other_processes_without_their_table():
    compiled_core()
    expired, _ = random_expired(random.Random(3), Model())
    expired = Expired((Horizon(1000),), {}, (Tombstone.of("t", 5000, key="k"),), expired.replaced)
    assert expired.hidden is not None and expired.hidden["t"].core is not None
    for copied in (pickle.loads(pickle.dumps(expired)), msgspec.structs.replace(expired)):
        assert copied == expired and copied.hidden is not expired.hidden


def test_strangers_can_not_fill_the_table():
    expired = Expired((Horizon(0, (("t*", 5000),)),))
    for number in range(9_000):
        assert expired.hidden_of(f"t{number}").begin_s == 5
    assert len(expired.hidden) <= 4096
    assert expired.hidden_of("other") is HIDES_NOTHING and NOTHING.hidden is None
    assert Expired(segments={"store": 9}).hidden is None


def longs(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


KEY = np.array([5, 5], np.uint32), np.array([1, 1 << 32], np.uint64), longs(7, 8)
QUEUE = np.array([1, 3], np.int32), longs(7, 8)
RANGES = (2, longs(0, 10), longs(3, 11), longs(1), longs(2))


@pytest.mark.parametrize(
    "changed",
    [
        {0: np.array([5], np.uint32)},
        {0: np.array([5, 4], np.uint32)},
        {1: np.array([1], np.uint64)},
        {2: longs(7)},
        {3: np.array([3, 3], np.int32)},
        {4: longs(7)},
        {5: [RANGES, RANGES]},
        {5: [(2, longs(0, 10), longs(3), longs(), longs())]},
        {5: [(2, longs(0, 3), longs(3, 11), longs(), longs())]},
        {5: [(2, longs(0, 10), longs(3, 10), longs(), longs())]},
        {5: [(2, longs(10, 0), longs(11, 3), longs(), longs())]},
        {5: [(2, longs(0), longs(3), longs(5), longs(5))]},
    ],
)
def test_arrays_that_the_core_could_not_search_are_refused(changed):
    compiled_core()
    views = kernels.compiled_views()
    assert views is not None
    sound = [*KEY, *QUEUE, [RANGES]]
    assert views.HiddenOf(0, *sound)
    with pytest.raises(ValueError):
        views.HiddenOf(0, *(changed.get(number, value) for number, value in enumerate(sound)))
