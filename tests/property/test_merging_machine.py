"""Merges, expiry, erasure, copies, repairs and sweeps between everything else that may be done to an index: answers are
the model's, and no entry is there twice.

The writer crashes, loses power, hears half of what the storage did and starts again, as `index_machine` says; in
between its files are merged, copied and repaired by jobs that fail at any call or die, and what nobody names is
deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from tests.property import places
from tests.property.index_machine import KEYS, NOW_MS, TOPICS, IndexMachine
from tests.property.published import Published
from tests.support.disk_faults import SimulatedCrash
from tests.support.model import ReferenceModel
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import NotAnIndex, StorageError
from tiered_index.retention import Expired, Horizon, Retention
from tiered_index.service.checks.checks import check_storage
from tiered_index.service.checks.repair import Repairs
from tiered_index.service.checks.report import Report
from tiered_index.service.erasure.erase import EraseRequest, erase
from tiered_index.service.lifecycle.copying import Copier
from tiered_index.service.lifecycle.expiry import expire, groups, record_expiry
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.service.merge.run import MergeOptions, MergeReport, merge
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

WINDOWS_S = (1, 4, 3600, 86_400)
Ages = tuple[int | None, dict[str, int]]
# behind `NOW_MS`, around which most entries lie; ages of all topics and of some
moments_s = st.integers(-10, 14)
ages_s = st.sampled_from([(10, {}), (10, {"t*": 4}), (14, {"t": 18, "t*": 8}), (None, {"orders": 9})])


class _Lent(FaultStorage):
    """A reader closes the storage that it was given."""

    def close(self) -> None:
        pass


class MergingMachine(IndexMachine):
    """`ever` counts the entries that were accepted: the storage never holds more. `standby` gets copies."""

    def __init__(self) -> None:
        super().__init__()
        self.ever = 0

    def open(self) -> None:
        super().open()
        self.service.put = self.counted(self.service.put)
        self.service.put_batch = self.counted(self.service.put_batch)

    def counted(self, put: Callable[..., int]) -> Callable[..., int]:
        def put_and_count(*given: Any, **more: Any) -> int:
            accepted = put(*given, **more)
            self.ever += accepted
            return accepted

        return put_and_count

    @rule(window_s=st.sampled_from(WINDOWS_S), later_s=st.sampled_from([0, 5, 100_000]))
    def merge_all(self, window_s: int, later_s: int) -> None:
        self.clock.advance(later_s)
        before = self.logged()
        report = self.merge(window_s)
        after = self.logged()
        assert sum(stored.count for stored in after.objects.values()) + report.expired == sum(
            stored.count for stored in before.objects.values()
        )
        assert not report.expired or self.model.expiries or self.model.erasures
        self.check_all(self.service.query, self.model)

    @rule(
        window_s=st.sampled_from(WINDOWS_S),
        nth=st.integers(1, 40),
        times=st.sampled_from([1, None]),
        after=st.booleans(),
        dies=st.booleans(),
    )
    def merge_in_trouble(self, window_s: int, nth: int, times: int | None, after: bool, dies: bool) -> None:
        before = sum(stored.count for stored in self.logged().objects.values())
        more = {"error": SimulatedCrash} if dies else {}
        self.storage.fail("*", nth=nth, times=times, when="after" if after else "before", **more)
        with contextlib.suppress(StorageError, SimulatedCrash):
            self.merge(window_s)
        self.storage.clear()
        after_all = sum(stored.count for stored in self.logged().objects.values())
        assert after_all == before or (after_all < before and (self.model.expiries or self.model.erasures))

    @rule(at_s=moments_s, ages=ages_s, nth=st.one_of(st.none(), st.integers(1, 12)), after=st.booleans())
    def expire(self, at_s: int, ages: Ages, nth: int | None, after: bool) -> None:
        self.expire_at(at_s, ages, nth, after)

    @rule(at_s=moments_s, ages=ages_s, window_s=st.sampled_from(WINDOWS_S))
    def expire_and_merge(self, at_s: int, ages: Ages, window_s: int) -> None:
        """What expires between two merges leaves at the second."""
        self.expire_at(at_s, ages, None, False)
        self.clock.advance(100_000)
        before = sum(stored.count for stored in self.logged().objects.values())
        report = self.merge(window_s)
        assert sum(stored.count for stored in self.logged().objects.values()) + report.expired == before
        self.look_again()

    def expire_at(self, at_s: int, ages: Ages, nth: int | None, after: bool) -> None:
        """A job states what has expired. Where it dies, the log alone knows whether it has."""
        now_ms, (age_s, topics) = NOW_MS + at_s * 1000, ages
        if nth is not None:
            self.storage.fail("*", nth=nth, when="after" if after else "before", error=SimulatedCrash)
        log = StorageLog(self.storage, self.clock)
        with contextlib.suppress(SimulatedCrash):
            log.open()
            expire(self.storage, log, Retention(age_s=age_s, topics=topics), ManualClock(now_ms), yes=True)
        self.storage.clear()
        before = {pattern: now_ms - age * 1000 for pattern, age in topics.items()}
        horizon = Horizon(0 if age_s is None else now_ms - age_s * 1000, tuple(sorted(before.items())))
        if any(known.has(horizon) for known in self.logged().expired.horizons):
            for model in (self.model, self.durable):
                model.expire(horizon.before_ms, before)
        self.look_again()

    @rule(most=st.sampled_from([0, 3_000, 20_000]))
    def bound_the_bytes(self, most: int) -> None:
        log = StorageLog(self.storage, self.clock)
        log.open()
        plan = record_expiry(log, Retention(max_bytes=most), self.clock)
        state = self.logged()
        # what has an entry of this second, or of a clock that is fast, stays
        now_s = self.clock.now_ms() // 1000
        left = sum(stored.size_bytes for stored in state.objects.values())
        assert left <= most or all(max(one.second_max for one in group) >= now_s for group in groups(state))
        for model in (self.model, self.durable):
            model.expire(plan.expired.of_all_ms)
        self.look_again()

    def look_again(self) -> None:
        """The writer knows the log, and hides what has expired wherever it lies."""
        self.service._lifecycle.refresh()
        self.check_all(self.service.query, self.model)
        for topic in TOPICS:
            told = self.service.query(topic, "y").expired_before_ms
            assert (told or 0) == max(0, self.service.log_state.expired.before_ms(topic))

    @rule(
        at_s=moments_s,
        what=st.sampled_from([{}, {"keys": ("Aa",)}, {"keys": ("y", "x#y")}, {"queue_id": 0}]),
        topic=st.sampled_from(TOPICS),
        now=st.booleans(),
        nth=st.one_of(st.none(), st.integers(1, 60)),
        after=st.booleans(),
    )
    def erase(self, at_s: int, what: dict[str, Any], topic: str, now: bool, nth: int | None, after: bool) -> None:
        """A job erases. Where it dies the log alone knows whether it has; repeated, it goes on."""
        request = EraseRequest(topic, **what, before_ms=NOW_MS + at_s * 1000)
        if nth is not None:
            self.storage.fail("*", nth=nth, when="after" if after else "before", error=SimulatedCrash)
        log = StorageLog(self.storage, self.clock)
        with contextlib.suppress(SimulatedCrash):
            log.open()
            done = erase(self.storage, log, request, self.clock, yes=True, now=now, grace_s=0, threads=1)
            assert not now or not done.remaining
        self.storage.clear()
        state = self.logged()
        assert state.genesis is not None
        stones = request.tombstones(0, keyed=state.genesis.layout.schema.keyed)
        if state.expired.joined(Expired(tombstones=stones)) is state.expired:
            for key in request.keys or (None,):
                for model in (self.model, self.durable):
                    model.erase(topic, stones[0].before_ms, key=key, queue_id=request.queue_id)
        self.look_again()

    @rule(nth=st.one_of(st.none(), st.integers(1, 30)), after=st.booleans(), source=st.booleans())
    def copy(self, nth: int | None, after: bool, source: bool) -> None:
        """A round of a copy. Where it dies, the copy is what it was, or what the source is; a reader of it answers as
        one of the source.
        """
        if nth is not None:
            struck = self.storage if source else self.standby
            struck.fail("*", nth=nth, when="after" if after else "before", error=SimulatedCrash)
        number = None
        with contextlib.suppress(SimulatedCrash):
            copier = Copier(self.storage, self.standby, self.clock, threads=1)
            copier.open()
            number = copier.run_once().source_number
        for storage in (self.storage, self.standby):
            storage.clear()
        state, log = self.logged(), StorageLog(self.standby, self.clock)
        assert number in (None, state.number)
        try:
            copied = log.open()
        except NotAnIndex:
            assert number is None
            return
        at = copied.positions[f"copy:{state.genesis.index_id}"]  # type: ignore[union-attr]
        own = StorageLog(self.storage, self.clock)
        own.open()
        before = LogState().replayed([(own.record(n), str(n)) for n in range(1, at + 1)])
        assert (copied.objects, copied.expired) == (before.objects, before.expired)
        if at == state.number:
            self.answers_what_the_log_names(self.standby)

    @rule(
        which=st.integers(0, 9), gone=st.booleans(), nth=st.one_of(st.none(), st.integers(1, 20)), after=st.booleans()
    )
    def repair(self, which: int, gone: bool, nth: int | None, after: bool) -> None:
        """What is damaged or lost is restored of the copy. Where that dies, the next repair goes on."""
        copied = {info.name for info in self.standby.list("data/")}
        names = sorted(copied.intersection(self.logged().objects))
        if not names:
            return
        name = names[which % len(names)]
        data = bytearray(self.storage.get(name))
        if gone:
            self.storage.delete(name)
        else:
            data[len(data) // 2] ^= 1
            self.storage.put(name, bytes(data))
        if nth is not None:
            self.storage.fail("*", nth=nth, when="after" if after else "before", error=SimulatedCrash)
            with contextlib.suppress(SimulatedCrash):
                self.repair_all()
            self.storage.clear()
        self.repair_all()
        state = self.logged()
        assert name not in state.objects and not state.lost
        self.look_again()

    def repair_all(self) -> None:
        report, log = Report(), StorageLog(self.storage, self.clock)
        log.open()
        check_storage(self.storage, {}, report, lambda *_: None, deep=True, threads=1)
        done = Repairs(self.storage, log, standby=self.standby).run(report, yes=True)
        assert all(one.action in ("restore", "drop") for one in done)

    @rule()
    def sweep(self) -> None:
        """Delete what no record names, files that were merged and uploads that nobody has heard of among them."""
        named = self.logged().objects
        for info in list(self.storage.list("data/")):
            if info.name not in named:
                self.storage.delete(info.name)

    @rule()
    def read_afresh(self) -> None:
        """A reader of the storage alone finds what the log names, and nothing that the writer doesn't know."""
        self.answers_what_the_log_names(self.storage)
        shown = [entry for entry in self.named().entries if not self.model.has_expired(entry)]
        known = {(entry.topic, entry.queue_id, entry.offset) for entry in self.model.entries}
        assert {(entry.topic, entry.queue_id, entry.offset) for entry in shown} <= known

    def answers_what_the_log_names(self, storage: Storage) -> None:
        named = self.named()
        with IndexReader.open(storage_backend=storage, clock=self.clock, query_threads=2) as reader:
            assert sum(handle.count for handle in reader.files()) == len(named.entries)
            self.check_all(reader.query, named)

    def named(self) -> ReferenceModel:
        """Return the model of the objects that the log names, by the codec alone."""
        named = self.published.model(self.logged())
        named.expiries, named.erasures = self.model.expiries, self.model.erasures
        return named

    @cached_property
    def standby(self) -> FaultStorage:
        return _Lent(MemoryStorage(clock=self.clock))

    @cached_property
    def published(self) -> Published:
        return Published(self.where.inner, KEYS, keyed=self.keyed)

    @invariant()
    def the_storage_never_holds_more_than_was_put(self) -> None:
        if self.service is not None:
            assert sum(stored.count for stored in self.logged().objects.values()) <= self.ever

    def merge(self, window_s: int) -> MergeReport:
        log = StorageLog(self.storage, self.clock)
        log.open()
        return merge(
            self.storage, log, self.clock, MergeOptions(window_s=window_s, min_age_s=0, shard_bytes=1 << 20), threads=1
        )

    def logged(self) -> LogState:
        log = StorageLog(self.storage, self.clock)
        return log.open()


@pytest.mark.parametrize(
    ("place", "examples"),
    [
        ("memory", 8),
        ("file", 4),
        pytest.param("memory", 800, marks=pytest.mark.slow),
        pytest.param("file", 300, marks=pytest.mark.slow),
    ],
)
def test_merges_between_everything_else(place: str, examples: int) -> None:
    machine = type(f"On{place.title()}", (MergingMachine,), {"place": staticmethod(getattr(places, place))})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
