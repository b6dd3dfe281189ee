"""A stateful model test: whatever is done to an index, its answers are the reference model's.

Puts, flushes, seals, life-cycle rounds, clocks, crashes, power cuts, full disks, failing storages, restarts and readers in any order. After
a crash the entries that no flush had confirmed may be there or not; which of them are is asked once, and then they are held to it.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageError, TieredIndexError
from tiered_index.storage.disk import TEMPORARY_PREFIX
from tiered_index.storage.local import LocalStorage
from tiered_index.storage.memory import MemoryStorage
from tiered_index.testing.disk_faults import FaultDisk, SimulatedCrash
from tiered_index.testing.model import Answer, ReferenceModel
from tiered_index.testing.storage_faults import FaultStorage

NOW_MS = 1_700_000_000_000
ALL = 100_000
TOPICS = ("orders", "t", "t#x", "тема")
KEYS = ("Aa", "BB", "y", "x#y", "ключ", "\N{GRINNING FACE}", "lone \ud800")
# Aa and BB have one Java hash; (t, x#y) and (t#x, y) are one string once joined

topics = st.sampled_from(TOPICS)
keys = st.sampled_from(KEYS)
moments = st.one_of(
    st.integers(NOW_MS - 2_000, NOW_MS + 4_000),
    st.sampled_from([NOW_MS, NOW_MS - 10**9, NOW_MS + 3_600_000]),
    st.sampled_from([0, 5_999, NOW_MS + 3 * 86_400_000, 253_402_300_799_999]),  # these go to quarantine
)
messages = st.tuples(
    topics, st.integers(0, 2), st.lists(keys, min_size=1, max_size=3), st.sampled_from([0, 1, 2, 3, 2**63 - 1]), st.integers(0, 2), moments
)
ranges = st.one_of(st.just((None, None)), st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))))
counts = st.sampled_from([1, 2, 3, 64])
works = st.sampled_from(["flush", "seal", "run_lifecycle", "seal_and_run", "close"])


class IndexMachine(RuleBasedStateMachine):
    cursors = Bundle("cursors")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tiered-index-machine-"))
        self.service = None
        self.readers = []

    def teardown(self):
        for reader in self.readers:
            reader.close()
        if self.service is not None:
            self.drop()
        shutil.rmtree(self.folder)

    # Set-up and its repetition

    @initialize(
        preset=st.sampled_from(["native", "native", "rocketmq"]),
        slots=st.sampled_from([1, 7, 64]),
        items=st.sampled_from([2, 5, 9, 40]),
        keep_s=st.sampled_from([0, 50, 86400]),
        on_disk=st.booleans(),
        checkpoint_every=st.sampled_from([None, 1, 3, 32]),
    )
    def create(self, preset, slots, items, keep_s, on_disk, checkpoint_every):
        self.clock = ManualClock(NOW_MS)
        self.storage = FaultStorage(LocalStorage(self.folder / "storage", disk=FaultDisk()) if on_disk else MemoryStorage())
        self.settings = {
            "root": self.folder / "root", "preset": preset, "slots": slots, "items": items, "local_keep_s": keep_s,
            "checkpoint_every": checkpoint_every, "background": False, "query_threads": 2, "refresh_interval_s": 10,
        }  # fmt: skip
        self.model = ReferenceModel(keyed=preset == "native")
        self.durable = ReferenceModel(keyed=preset == "native")
        self.calls = []  # (entries, source position) of each accepted call
        self.position = 0
        self.half_flushed = False  # a flush has failed: some of what waits may be durable already
        self.known_position = self.accepted = None  # durable as far as we know; durable with the next flush
        self.open()

    def open(self):
        self.disk = FaultDisk()
        self.service = IndexService.open(storage_backend=self.storage, clock=self.clock, disk=self.disk, **self.settings)

    def drop(self):
        try:
            self.service.abandon()
        except SimulatedCrash:
            pass
        self.service = None

    # Writing

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
        if arrow:
            batch = [m for m in batch if not any("\ud800" in key for key in m[2])]
        self.position += 1
        rows = [(topic, queue, key, offset, size, ms) for topic, queue, names, offset, size, ms in batch for key in dict.fromkeys(names)]
        entries = [entry for message in batch for entry in self.model.put(*message)]
        topic, queue_id, key, offset, size, timestamp_ms = (
            (list(column) for column in zip(*rows, strict=True)) if rows else ([] for _ in range(6))
        )
        columns = {
            "topic": topic, "queue_id": np.array(queue_id, np.int32), "key": key, "offset": np.array(offset, np.int64),
            "size": np.array(size, ">u4"), "timestamp_ms": np.array(timestamp_ms, np.int64),
        }  # fmt: skip
        if arrow:
            columns["size"] = columns["size"].astype(np.int16)
            columns = pa.RecordBatch.from_pydict(columns | {"topic": pa.array(topic, pa.string()), "key": pa.array(key, pa.large_string())})
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

    @rule(cut=st.booleans(), seed=st.integers(0, 99))
    def crash(self, cut, seed):
        self.drop()
        if cut:
            self.disk.lose_unsynced(random.Random(seed))
        self.open()
        self.resolve()

    @rule(name=works, nth=st.integers(1, 30), after=st.booleans(), torn=st.booleans(), cut=st.booleans(), seed=st.integers(0, 99))
    def crash_during(self, name, nth, after, torn, cut, seed):
        self.disk.crash(nth=nth, after=after, torn=torn)
        try:
            self.work(name)
        except SimulatedCrash:
            pass
        self.drop()
        if cut:
            self.disk.lose_unsynced(random.Random(seed))
        self.open()
        self.resolve()

    @rule(name=works, nth=st.integers(1, 12), after=st.booleans(), power=st.booleans())
    def crash_in_the_storage(self, name, nth, after, power):
        self.storage.fail("*", nth=nth, when="after" if after else "before", times=None, error=SimulatedCrash)
        try:
            self.work(name)
        except SimulatedCrash:
            pass
        self.storage.clear()
        self.drop()
        if power:
            self.disk.lose_unsynced()
        self.open()
        self.resolve()

    @rule(name=works, nth=st.integers(1, 30), times=st.sampled_from([1, 2, None]), full=st.booleans(), torn=st.booleans())
    def trouble_on_the_disk(self, name, nth, times, full, torn):
        self.disk.fail(nth=nth, times=times, error=errno.ENOSPC if full else errno.EIO, torn=torn)
        try:
            self.work(name)
        except TieredIndexError:
            self.half_flushed = True
            if name == "close":  # it has let go of everything, and what was not flushed is lost
                self.disk.clear()
                self.open()
                self.resolve()
        self.disk.clear()

    @rule(name=works, nth=st.integers(1, 12), times=st.sampled_from([1, 3, None]), after=st.booleans())
    def trouble_in_the_storage(self, name, nth, times, after):
        self.storage.fail("*", nth=nth, times=times, when="after" if after else "before")
        try:
            if name != "close":
                self.work(name)
        except StorageError:
            pass
        self.storage.clear()

    def resolve(self):
        """Ask which of the entries that no flush confirmed are there; from now on they must stay."""
        position = self.service.durable_position("log")
        assert self.known_position is None or (position is not None and position >= self.known_position)
        pending, self.calls = self.calls, []
        kept = list(self.durable.entries)
        for entries, call in pending:
            for entry in entries:
                found = self.service.query(entry.topic, entry.key, entry.second * 1000, entry.second * 1000, ALL)
                sizes = [i.size for i in found if (i.queue_id, i.offset) == (entry.queue_id, entry.offset)]
                if position is not None and call <= position:
                    assert sizes and sizes[0] >= entry.size, "the durable position runs ahead of the entries"
                if entry.size in sizes:
                    kept.append(entry)
        self.model.entries = kept
        self.durable.entries = list(kept)
        self.known_position = self.accepted = position
        self.half_flushed = False
        self.check_all(self.service.query, self.model)
        self.check_root()

    # Reading

    @rule(topic=topics, key=keys, limits=ranges, count=counts)
    def query(self, topic, key, limits, count):
        self.compare(self.service.query(topic, key, *limits, count), self.model.query(topic, key, *limits, count + 1), count)

    @rule(target=cursors, topic=topics, key=keys, limits=ranges)
    def begin_paging(self, topic, key, limits):
        result = self.service.query(topic, key, *limits, 1)
        return (topic, key, limits, result.cursor, result.items[-1] if result.items else None)

    @rule(target=cursors, place=consumes(cursors), count=counts)
    def next_page(self, place, count):
        topic, key, limits, cursor, last = place
        if cursor is None:
            return place
        after = self.model.order_key_of(Answer.of(last))
        result = self.service.query(topic, key, *limits, count, cursor)
        self.compare(result, self.model.query(topic, key, *limits, count + 1, after), count)
        return (topic, key, limits, result.cursor, result.items[-1] if result.items else last)

    @rule(topic=topics, key=keys, limits=ranges, count=st.integers(1, 3))
    def page_to_the_end(self, topic, key, limits, count):
        cursor, after, pages = None, None, 0
        while True:
            result = self.service.query(topic, key, *limits, count, cursor)
            expected = self.model.query(topic, key, *limits, count + 1, after)
            self.compare(result, expected, count)
            if result.status == "complete":
                return
            cursor, pages = result.cursor, pages + 1
            if result.items:
                after = self.model.order_key_of(Answer.of(result.items[-1]))
            assert pages <= len(self.model.entries)

    @rule(asked=st.lists(st.tuples(topics, keys, ranges, counts, st.booleans()), max_size=6), beside=st.booleans())
    def query_many(self, asked, beside):
        """Many at once answer as each alone; some go on from a cursor."""
        lookups, afters = [], []
        for topic, key, limits, count, go_on in asked:
            first = self.service.query(topic, key, *limits, 1)
            go_on = go_on and first.cursor is not None
            cursor = first.cursor if go_on else None
            lookups.append(Lookup(topic=topic, key=key, begin_ms=limits[0], end_ms=limits[1], max_count=count, cursor=cursor))
            afters.append(self.model.order_key_of(Answer.of(first.items[-1])) if go_on else None)
        if beside:
            self.work("flush")
            with IndexReader.open(root=self.settings["root"], storage_backend=self.storage, clock=self.clock) as reader:
                results = reader.query_many(lookups)
        else:
            results = self.service.query_many(lookups)
        assert len(results) == len(lookups)
        for q, after, result in zip(lookups, afters, results, strict=True):
            expected = self.model.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count + 1, after)
            assert [Answer.of(item) for item in result] == expected[: q.max_count]
            assert result.status == "truncated" if len(expected) > q.max_count else result.status in ("complete", "truncated")
            assert (result.cursor is not None) == (result.status == "truncated")
            if result.cursor is not None:
                alone = self.service.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count, result.cursor)
                after = self.model.order_key_of(Answer.of(result.items[-1])) if result.items else after
                self.compare(alone, self.model.query(q.topic, q.key, q.begin_ms, q.end_ms, q.max_count + 1, after), q.max_count)

    @rule()
    def a_fresh_reader_beside_the_writer_sees_what_is_flushed(self):
        with IndexReader.open(root=self.settings["root"], storage_backend=self.storage, clock=self.clock) as reader:
            self.check_beside(reader)

    @precondition(lambda self: not self.readers)
    @rule()
    def keep_a_reader(self):
        self.readers.append(IndexReader.open(root=self.settings["root"], storage_backend=self.storage, clock=self.clock))

    @precondition(lambda self: self.readers)
    @rule()
    def the_kept_reader_sees_what_is_flushed(self):
        self.check_beside(self.readers[0])

    @rule(work=st.booleans())
    def a_reader_of_the_storage_sees_what_is_published(self, work):
        if work:
            self.work("seal_and_run")
        with IndexReader.open(storage_backend=self.storage, clock=self.clock) as reader:
            if work:
                self.check_all(reader.query, self.durable)
            assert sum(handle.count for handle in reader.files()) == sum(o.count for o in self.service.log_state.objects.values())

    def check_beside(self, reader):
        """What a reader of the root sees is what is flushed."""
        if self.half_flushed:
            self.work("flush")
        self.check_all(reader.query, self.durable)

    def check_all(self, ask, model):
        for topic in TOPICS:
            for key in KEYS:
                self.compare(ask(topic, key, max_count=ALL), model.query(topic, key, max_count=None), ALL)

    def compare(self, result, expected, count):
        assert [Answer.of(item) for item in result] == expected[:count]
        assert result.status == "truncated" if len(expected) > count else result.status in ("complete", "truncated")
        assert (result.cursor is not None) == (result.status == "truncated")
        if result.status == "truncated":
            assert result.explain.files_skipped or len(expected) > count

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
        names = [path.stem for state in ("unsealed", "compacted", "uploaded") for path in (root / state).glob("*.index")]
        assert len(names) == len(set(names))


def test_an_index_answers_as_the_model_does():
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=60, stateful_step_count=30))


@pytest.mark.slow
def test_an_index_answers_as_the_model_does_for_long():
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=3000, stateful_step_count=60, derandomize=False))
