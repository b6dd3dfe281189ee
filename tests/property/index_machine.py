"""The base of the state machine: an index, the steps on it, and its writer's answers, which must equal the reference
model's.

Puts, flushes, seals, life-cycle rounds, clocks, crashes, power cuts, full disks, failing storages and restarts come in
any order. After a crash, the entries that no flush confirmed may be there or not. The machine looks them up once; from
then on they must stay so. `rules_of_readers` adds readers, and `rules_of_faults` adds faults of lookups.
"""

import contextlib
import errno
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.property.places import Place, memory
from tests.support.batches import columns_of
from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.errors import StorageError, TieredIndexError
from tiered_index.storage.disk import TEMPORARY_PREFIX

NOW_MS = 1_700_000_000_000
ALL = 100_000
TOPICS = ("orders", "t", "t#x", "тема")
KEYS = ("Aa", "BB", "y", "x#y", "ключ", "\N{GRINNING FACE}")
# Aa and BB have one Java hash; (t, x#y) and (t#x, y) give the same string when joined

HOT = ("orders", "Aa")
# most seeded entries, and many lookups

topics = st.sampled_from(TOPICS)
keys = st.sampled_from(KEYS)
moments = st.one_of(
    st.integers(NOW_MS - 2_000, NOW_MS + 4_000),
    st.sampled_from([NOW_MS, NOW_MS - 10**9, NOW_MS + 3_600_000]),
    st.sampled_from([0, 5_999, NOW_MS + 3 * 86_400_000, 253_402_300_799_999]),  # these times cause quarantine
)
messages = st.tuples(
    topics,
    st.integers(0, 2),
    st.lists(keys, min_size=1, max_size=3),
    st.sampled_from([0, 1, 2, 3, 2**63 - 1]),
    st.integers(0, 2),
    moments,
)
asked_topics = st.sampled_from((HOT[0],) * 6 + TOPICS)
asked_keys = st.sampled_from((HOT[1],) * 8 + KEYS)
ranges = st.one_of(st.just((None, None)), st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))))
counts = st.sampled_from([1, 2, 3, 64])
CACHES = (
    {},
    {"cache_slot_groups": False, "filter_after_probes": 1},
    {"read_cache_bytes": 20_000, "filter_after_probes": 1},
    {"read_cache_bytes": 100},
)
# usual caches, and caches for little or nothing
seeds = st.integers(0, 99)
works = st.sampled_from(["flush", "seal", "run_lifecycle", "seal_and_run", "run_merge", "close"])


def seeded(rng):
    """Return twenty messages, most of them under one key, with few places and few seconds."""
    drawn = []
    for _ in range(20):
        topic, key = HOT if rng.random() < 0.7 else (rng.choice(TOPICS), rng.choice(KEYS))
        queue_id, offset, size = rng.randrange(2), rng.randrange(6), rng.randrange(3)
        drawn.append((topic, queue_id, [key], offset, size, NOW_MS - 1000 * rng.randrange(8)))
    return drawn


def compare_page(answers, result, expected, count):
    """Compare a page of up to `count` answers with all remaining ones."""
    assert answers == expected[:count]
    assert result.status == "truncated" if len(expected) > count else result.status in ("complete", "truncated")
    assert (result.cursor is not None) == (result.status == "truncated")


class IndexMachine(RuleBasedStateMachine):
    """A subclass names the storage: `place` makes it."""

    place: Callable[[Path], Place] = staticmethod(memory)

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tiered-index-machine-"))
        self.where = self.place(self.folder)
        self.service = None

    def teardown(self):
        if self.service is not None:
            self.drop()
        self.where.close()
        shutil.rmtree(self.folder)

    # Set-up and reopening

    @initialize(
        preset=st.sampled_from(["native", "native", "rocketmq"]),
        slots=st.sampled_from([1, 7, 64]),
        items=st.sampled_from([2, 5, 9, 40]),
        keep_s=st.sampled_from([0, 0, 50, 86400]),
        checkpoint_every=st.sampled_from([None, 1, 3, 32]),
        caches=st.sampled_from(CACHES),
        seeds=st.lists(st.integers(0, 9), max_size=3),
    )
    def create(self, preset, slots, items, keep_s, checkpoint_every, caches, seeds):
        self.clock = ManualClock(NOW_MS)
        self.storage = self.where.storage
        self.caches = {"refresh_interval_s": 10, **caches}
        self.settings = {"root": self.folder / "root", "preset": preset, "slots": slots, "items": items}
        self.settings |= {"local_keep_s": keep_s, "checkpoint_every": checkpoint_every, **self.caches}
        self.settings |= {"background": False, "query_threads": 2, "merge": "2s,1h"}
        self.keyed = preset == "native"
        self.model, self.durable = ReferenceModel(keyed=self.keyed), ReferenceModel(keyed=self.keyed)
        self.calls = []  # (entries, source position) of each accepted call
        self.position = 0
        self.half_flushed = False  # a flush has failed: some waiting entries may be durable already
        # the known durable position; the position that the next flush makes durable
        self.known_position = self.accepted = None
        self.open()
        for seed in seeds:
            self.publish_some(random.Random(seed))

    def open(self):
        self.disk = FaultDisk()
        where = {"storage_backend": self.storage, "clock": self.clock, "disk": self.disk}
        self.service = IndexService.open(**where, **self.settings)
        self.service._parts.merger.min_age_s = 0

    def drop(self):
        with contextlib.suppress(SimulatedCrash):
            self.service.abandon()
        self.service = None

    def come_back(self, cut, rng=None):
        """Open the index after its process ended, or after a power cut."""
        self.drop()
        if cut:
            self.disk.lose_unsynced(rng)
        self.open()
        self.resolve()

    # Writing

    @rule(seed=st.integers(0, 9))
    def some_more_is_published(self, seed):
        self.publish_some(random.Random(seed))

    def publish_some(self, rng):
        """Put twenty messages, most of them under one key, and publish all entries."""
        self.put_all(seeded(rng))
        self.work("seal_and_run")
        self.service.run_lifecycle()

    @rule(message=messages, given_id=st.booleans())
    def put(self, message, given_id):
        self.position += 1
        entries = self.model.put(*message)
        ids = {"topic_id": TOPICS.index(message[0]) + 1} if given_id else {}
        assert self.service.put(*message, source="log", source_position=self.position, **ids) == len(entries)
        self.calls.append((entries, self.position))
        self.accepted = self.position

    @rule(batch=st.lists(messages, max_size=12), arrow=st.booleans())
    def put_batch(self, batch, arrow):
        self.put_all(batch, arrow=arrow)

    def put_all(self, batch, *, arrow=False):
        self.position += 1
        rows = [(topic, queue, key, *more) for topic, queue, names, *more in batch for key in dict.fromkeys(names)]
        entries = [entry for message in batch for entry in self.model.put(*message)]
        columns = columns_of(rows)
        for name, kind in (("queue_id", "i4"), ("offset", "i8"), ("size", ">u4"), ("timestamp_ms", "i8")):
            columns[name] = np.array(columns[name], kind)
        if arrow:
            columns["topic"] = pa.array(columns["topic"], pa.string())
            columns["key"] = pa.array(columns["key"], pa.large_string())
            columns["size"] = columns["size"].astype(np.int16)
            columns = pa.RecordBatch.from_pydict(columns)
        assert self.service.put_batch(columns, source="log", source_position=self.position) == len(entries)
        self.calls.append((entries, self.position))
        self.accepted = self.position

    # Life

    def work(self, name):
        if name == "seal_and_run":
            self.service.seal()
            self.confirm()
            self.service.run_lifecycle()
        else:
            getattr(self.service, name)()
        if name in ("flush", "seal", "close"):
            self.confirm()
        if name == "close":
            self.open()

    def confirm(self):
        self.durable.entries = list(self.model.entries)
        self.calls.clear()
        self.known_position = self.accepted
        self.half_flushed = False

    @rule(name=works)
    def go_on(self, name):
        self.work(name)
        if name == "seal_and_run":
            assert self.service.run_lifecycle().compacted == 0

    @rule(seconds=st.sampled_from([1, 25, 100, 11_000]))
    def advance(self, seconds):
        self.clock.advance(seconds)

    @rule(cut=st.booleans(), seed=seeds)
    def crash(self, cut, seed):
        self.come_back(cut, random.Random(seed))

    @rule(name=works, nth=st.integers(1, 30), after=st.booleans(), torn=st.booleans(), cut=st.booleans(), seed=seeds)
    def crash_during(self, name, nth, after, torn, cut, seed):
        self.disk.crash(nth=nth, after=after, torn=torn)
        with contextlib.suppress(SimulatedCrash):
            self.work(name)
        self.come_back(cut, random.Random(seed))

    @rule(name=works, nth=st.integers(1, 12), after=st.booleans(), power=st.booleans())
    def crash_in_the_storage(self, name, nth, after, power):
        self.storage.fail("*", nth=nth, when="after" if after else "before", times=None, error=SimulatedCrash)
        with contextlib.suppress(SimulatedCrash):
            self.work(name)
        self.storage.clear()
        self.come_back(power)

    @rule(
        name=works, nth=st.integers(1, 30), times=st.sampled_from([1, 2, None]), full=st.booleans(), torn=st.booleans()
    )
    def trouble_on_the_disk(self, name, nth, times, full, torn):
        self.disk.fail(nth=nth, times=times, error=errno.ENOSPC if full else errno.EIO, torn=torn)
        try:
            self.work(name)
        except TieredIndexError:
            self.half_flushed = True
            if name == "close":  # the writer is closed, and unflushed entries are lost
                self.disk.clear()
                self.open()
                self.resolve()
        self.disk.clear()

    @rule(name=works, nth=st.integers(1, 12), times=st.sampled_from([1, 3, None]), after=st.booleans())
    def trouble_in_the_storage(self, name, nth, times, after):
        self.storage.fail("*", nth=nth, times=times, when="after" if after else "before")
        with contextlib.suppress(StorageError):
            if name != "close":
                self.work(name)
        self.storage.clear()

    def resolve(self):
        """Look up the entries that no flush confirmed; from now on those that are there must stay."""
        position = self.service.durable_position("log")
        assert self.known_position is None or (position is not None and position >= self.known_position)
        pending, self.calls = self.calls, []
        surviving = list(self.durable.entries)
        for entries, call in pending:
            for entry in entries:
                if self.model.has_expired(entry):
                    continue
                answer = self.service.query(entry.topic, entry.key, entry.second * 1000, entry.second * 1000, ALL)
                sizes = [i.size for i in answer if (i.queue_id, i.offset) == (entry.queue_id, entry.offset)]
                if position is not None and call <= position:
                    assert sizes and sizes[0] >= entry.size, "the durable position is ahead of the entries"
                if entry.size in sizes:
                    surviving.append(entry)
        self.model.entries = surviving
        self.durable.entries = list(surviving)
        self.known_position = self.accepted = position
        self.half_flushed = False
        self.check_all(self.service.query, self.model)
        self.check_root()

    # Reading

    def check_all(self, ask, model):
        for topic in TOPICS:
            for key in KEYS:
                result = ask(topic, key, max_count=ALL)
                compare_page([Answer.of(item) for item in result], result, model.query(topic, key, max_count=None), ALL)

    @invariant()
    def every_file_is_in_one_state_and_counted_once(self):
        if self.service is None:
            return
        handles = self.service.files()
        ids = [handle.file_id for handle in handles]
        assert len(ids) == len(set(ids))
        position = self.service.durable_position("log")
        assert self.known_position is None or (position is not None and position >= self.known_position)

    def check_root(self):
        root = self.settings["root"]
        assert not list(root.rglob(TEMPORARY_PREFIX + "*"))
        states = ("unsealed", "compacted", "uploaded")
        names = [path.stem for state in states for path in (root / state).glob("*.index")]
        assert len(names) == len(set(names))
