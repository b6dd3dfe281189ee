"""Two jobs change one index in parallel: one stops before a write, the other runs, then the first continues.

The log decides: entries that either job removes are gone. No other entry is lost or doubled.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from tests.property.published import Published, mark
from tests.spark.in_process import GENESIS, planned, shards_of, written
from tests.support.batches import columns_of
from tests.support.changes import replace
from tests.support.log_records import open_log
from tests.support.merging import BASE_MS, HOUR_MS, HOUR_S, Merging
from tiered_index.base.clock import ManualClock
from tiered_index.base.retention import Retention
from tiered_index.service.jobs.erase import EraseRequest, Erasure, erase
from tiered_index.service.jobs.expiry import expire
from tiered_index.service.jobs.merge_run import merge
from tiered_index.service.jobs.verify import check_storage
from tiered_index.service.jobs.verify_report import Report
from tiered_index.service.log.log import StorageLog
from tiered_index.spark.writing.build import publish_tables
from tiered_index.storage.base import Storage, StorageRequest, WrapperStorage

KEYS = ("k", "k2")
TOPICS = ("orders", "t")
LATER_MS = BASE_MS + 3 * HOUR_MS


def put(life: Merging, hours: range) -> None:
    for hour in hours:
        for topic in TOPICS:
            life.put([(BASE_MS + hour * HOUR_MS, key) for key in KEYS], topic)
    life.publish()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Merging:
    """An index of two files and a window table, whose writer is closed."""
    # as many slots as a build plans
    life = Merging(tmp_path_factory.mktemp("source"), settings={"slots": GENESIS.layout.slots})
    put(life, range(2))
    life.later()
    life.merge(4 * HOUR_S)
    for hour in (2, 3):
        put(life, range(hour, hour + 1))
    life.index.close()
    return life


def merging(life: Merging, storage: Storage, log: StorageLog) -> None:
    merge(storage, log, life.clock, life.options(), threads=1)


def expiring(life: Merging, storage: Storage, log: StorageLog) -> None:
    # this expires the whole table, and one topic of a file
    rule, clock = Retention(topics={"t": HOUR_S // 2, "o*": HOUR_S * 3 // 2}), ManualClock(LATER_MS)
    expire(storage, log, rule, clock, yes=True, now_ms=LATER_MS)
    horizon = rule.horizon(LATER_MS)
    life.model.expire(horizon.before_ms, dict(horizon.topics))


def erasing(life: Merging, storage: Storage, log: StorageLog) -> Erasure:
    request = EraseRequest("orders", ("k",), before_ms=LATER_MS)
    done = erase(storage, log, request, life.clock, yes=True, now=True, grace_s=0, threads=1)
    life.model.erase("orders", LATER_MS, key="k")
    return done


def writing(life: Merging, storage: Storage, log: StorageLog) -> None:
    """A writer publishes more entries; some have expired or been erased, or will be."""
    put(life, range(1, 6))


def building(life: Merging, storage: Storage, log: StorageLog) -> None:
    """A build adds tables, some of hours that have a table, and one of an hour without."""
    every = itertools.product((1, 3, 6), TOPICS, KEYS)
    rows = [(topic, 2, key, 1_000 + hour, 1, BASE_MS + hour * HOUR_MS) for hour, topic, key in every]
    table = pa.table(columns_of(rows))
    plan = replace(planned(table), genesis=log.state.genesis)
    publish_tables(shards_of(written(table, plan, storage, now_ms=life.clock.now_ms())), "append", log)
    for row in rows:
        life.model.put(*row)


JOBS = (merging, expiring, erasing, building)


class Stopping(WrapperStorage):
    """Runs `meanwhile` before the `nth` step: a record, a deletion, or the first upload of an object."""

    def __init__(self, inner: Storage, nth: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner)
        self.left, self.meanwhile = nth, meanwhile
        self.sent = False

    def _around(self, call: StorageRequest, act: Callable[[], Any]) -> Any:
        sends = call.operation == "put" and call.name.startswith("data/")
        records = call.operation == "put_if_absent" and call.name.startswith("log/")
        if records or (sends and not self.sent) or call.operation == "delete_many":
            self.sent |= sends
            self.left -= 1
            if not self.left:
                self.meanwhile()
        return act()


def run(job: Callable[..., None], life: Merging, storage: Storage) -> None:
    job(life, storage, open_log(storage, life.clock))


# the simulation has all but builds beside each other
@pytest.mark.parametrize(
    ("first", "second"),
    [(building, other) for other in (*JOBS, writing)] + [(other, building) for other in JOBS if other is not building],
    ids=lambda job: job.__name__,
)
def test_one_runs_while_another_is_stopped_before_a_write(
    make_life: Callable[[], Merging], first: Callable[..., None], second: Callable[..., None]
) -> None:
    for nth in range(1, 100):
        life = make_life()
        storage = Stopping(life.storage, nth, lambda life=life: run(second, life, life.storage))  # type: ignore[misc]
        run(first, life, storage)
        if storage.left > 0:
            break
        check(life)
        if erasing in (first, second):
            # it has not seen entries published after its last read
            assert not erasing(life, life.storage, life.log()).remaining
        life.check()
    assert nth > 1


def check(life: Merging) -> None:
    """Check that no entry is missing or doubled, except those that may be gone, and all bytes and answers."""
    gone = life.model.has_expired
    published = Published(life.storage, KEYS, keyed=True)
    stored = Counter(mark(e, keyed=True) for file in life.state.objects.values() for e in published.entries(file))
    put = Counter(mark(entry, keyed=True) for entry in life.model.entries)
    unexpired = Counter(mark(entry, keyed=True) for entry in life.model.entries if not gone(entry))
    assert unexpired <= stored <= put
    report = Report()
    check_storage(life.storage, {}, report, lambda *_: None, deep=True, threads=1)
    assert not report.findings
    life.index._lifecycle.refresh()
    life.check(life.index, [("orders", "k"), ("t", "k2")])
