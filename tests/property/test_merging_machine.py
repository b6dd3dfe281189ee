"""Merges, expiry, erasure and sweeps between everything else that may be done to an index: answers are the model's, and
no entry is there twice.

The writer crashes, loses power, hears half of what the storage did and starts again, as `index_machine` says; in
between its files are merged by jobs that fail at any call or die, and what nobody names is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from tests.property.index_machine import NOW_MS, TOPICS, IndexMachine
from tiered_index import IndexReader
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageError
from tiered_index.retention import Expired, Horizon, Retention
from tiered_index.service.erasure.erase import EraseRequest, erase
from tiered_index.service.lifecycle.expiry import groups, record_expiry
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.service.merge.run import MergeOptions, MergeReport, merge
from tiered_index.testing.disk_faults import SimulatedCrash

WINDOWS_S = (1, 4, 3600, 86_400)
Ages = tuple[int | None, dict[str, int]]
# behind `NOW_MS`, around which most entries lie; ages of all topics and of some
moments_s = st.integers(-10, 14)
ages_s = st.sampled_from([(10, {}), (10, {"t*": 4}), (14, {"t": 18, "t*": 8}), (None, {"orders": 9})])


class MergingMachine(IndexMachine):
    """`ever` counts the entries that were accepted: the storage never holds more."""

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

    @rule(at_s=moments_s, ages=ages_s, nth=st.sampled_from([None, None, 1, 2, 3, 4]), after=st.booleans())
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
            record_expiry(log, Retention(age_s=age_s, topics=topics), ManualClock(now_ms))
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
        nth=st.one_of(st.none(), st.integers(1, 30)),
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

    @rule()
    def sweep(self) -> None:
        """Delete what no record names, files that were merged and uploads that nobody has heard of among them."""
        named = self.logged().objects
        for info in list(self.storage.list("data/")):
            if info.name not in named:
                self.storage.delete(info.name)

    @rule()
    def read_afresh(self) -> None:
        """A reader of the storage alone finds as many entries as the log says, and none that the writer doesn't
        know.
        """
        with IndexReader.open(storage_backend=self.storage, clock=self.clock, query_threads=2) as reader:
            state = reader.log_state
            assert sum(handle.count for handle in reader.files()) == sum(
                stored.count for stored in state.objects.values()
            )
            self.model_holds(reader)

    def model_holds(self, reader: IndexReader) -> None:
        for topic, key in {(entry.topic, entry.key) for entry in self.model.entries}:
            known = {(answer.queue_id, answer.offset) for answer in self.model.query(topic, key, max_count=None)}
            assert {(item.queue_id, item.offset) for item in reader.query(topic, key, max_count=100_000)} <= known

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
    "examples", [pytest.param(12, id="short"), pytest.param(800, id="long", marks=pytest.mark.slow)]
)
def test_merges_between_everything_else(examples: int) -> None:
    run_state_machine_as_test(
        MergingMachine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None)
    )
