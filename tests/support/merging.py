"""An index whose files are in a storage and are merged, the model of its answers, and the lookups to compare.

life = Merging(tmp_path)
life.put([(hour_ms, "k"), ...]); life.publish()
life.merge(DAY_S)
life.check()
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexItem, IndexReader, IndexService, KeyedIndexItem, Lookup, QueryResult, column
from tiered_index.base.clock import ManualClock
from tiered_index.service.jobs.merge_run import MergeOptions, MergeReport, merge, plan
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.jobs.rewriting import merge_plan
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.state import LogState
from tiered_index.service.read.lookups import Lookups
from tiered_index.storage.base import Storage
from tiered_index.storage.memory import MemoryStorage

DAY_S, HOUR_S = 86400, 3600
DAY_MS, HOUR_MS = DAY_S * 1000, HOUR_S * 1000
BASE_MS = 1_700_000_000_000 // (30 * DAY_MS) * (30 * DAY_MS)
"""The beginning of a window of any length: an hour, a day or 30 days."""


@dataclass(frozen=True, kw_only=True)
class RegionItem(KeyedIndexItem):
    """Further columns, one of them part of the identity."""

    region: int = column(">u2", identity=True)
    price: float = column(">f8")
    tag: bytes = column("S4")


EXTRA: dict[Any, tuple[str, ...]] = {RegionItem: ("region", "price", "tag")}


@contextlib.contextmanager
def small_shards(size_bytes: int = 1 << 10) -> Iterator[None]:
    """Let merges make shards of about this size, which is below the least one that a merge may be given."""
    make = merge_plan._rewrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_plan, "_rewrite", lambda *plan: make(*plan[:-1], size_bytes))
        yield


@dataclass
class Merging:
    """One writer, one storage (a new one in memory by default), its model.

    `item_type` and `preset` are those of the settings.
    """

    folder: Path
    storage: Storage = None  # type: ignore[assignment]
    preset: str = "native"
    item_type: type[IndexItem] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=lambda: ManualClock(BASE_MS))
    model: ReferenceModel = field(init=False)
    messages: int = 0
    questions: set[tuple[str, str]] = field(default_factory=set)
    _services: list[IndexService] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = self.storage or MemoryStorage(clock=self.clock)
        extra = EXTRA.get(self.item_type, ())
        self.model = ReferenceModel(keyed=self.preset == "native", extra=extra, identity=extra[:1])
        self.extra = extra
        self.index = self.open()

    def open(self, root: str = "root", **more: Any) -> IndexService:
        """Open a writer, which `close` drops."""
        chosen: dict[str, Any] = {
            "slots": 11,
            "items": 4000,
            "background": False,
            "query_threads": 2,
            "local_keep_s": 0,
            "preset": self.preset,
            "max_late_s": 10**10,
            "max_early_s": 10**10,
            **self.settings,
            **more,
        }
        if self.item_type is not None:
            chosen["item_type"] = self.item_type
        backend = chosen.pop("storage_backend", self.storage)
        service = IndexService.open(
            root=self.folder / root, storage_backend=backend, clock=self.clock, disk=FaultDisk(), **chosen
        )
        self._services.append(service)
        return service

    def close(self) -> None:
        """Drop all writers, without a clean end."""
        for service in self._services:
            service.abandon()

    def put(
        self, rows: Iterable[tuple[int, str]], topic: str = "t", into: IndexService | None = None, **more: Any
    ) -> None:
        """Put (timestamp_ms, key) rows. A counter gives their places, and sometimes repeats one."""
        for timestamp_ms, key in rows:
            self.messages += 1
            place = (self.messages % 3, self.messages % 10 if self.messages % 7 == 0 else self.messages)
            extra: dict[str, Any] = {}
            if self.extra:
                extra = {"region": self.messages % 4, "price": self.messages / 8}
                extra |= {"tag": b"%04d" % (self.messages % 1000)}
            message = (topic, place[0], key, place[1], self.messages % 50, timestamp_ms)
            self.model.put(*message, **extra)
            self.questions.add((topic, key))
            (into or self.index).put(*message, **extra, **more)

    def fill(self, days: int = 1, files: int = 3) -> None:
        """Publish files of some days, and let the days pass. Key "hot" has as many entries as four others."""
        for day in range(days):
            for file in range(files):
                start = BASE_MS + day * DAY_MS + file * 5 * HOUR_MS
                self.put([(start + step * 60_000, key) for step in range(20) for key in ("hot", f"k{step % 4}")])
                self.publish()
        self.later()

    def sweep(self, **spared: Any) -> int:
        """Delete unnamed objects, three days later; return their number."""
        self.later(3)
        orphans = find_orphans(self.storage, self.log(), **spared)
        delete_orphans(self.storage, orphans)
        return len(orphans.objects)

    def publish(self, index: IndexService | None = None) -> None:
        """Seal, compact, upload and retire everything."""
        index = index or self.index
        index.seal()
        index.run_lifecycle()
        index.run_lifecycle()

    def move(self, root: str) -> None:
        """Let the writer of another root take over."""
        self.index.close()
        self.index = self.open(root)

    def copied(self, folder: Path) -> "Merging":
        """Return a copy that continues from here, with its own folder and memory. This one's writer must be closed."""
        shutil.copytree(self.folder, folder)
        clock = ManualClock(self.clock.now_ms())
        storage = type(self.storage)(clock=clock)  # type: ignore[call-arg]
        # with their times; the bytes are shared
        storage._shelf.objects.update(self.storage._shelf.objects)  # type: ignore[attr-defined]
        new = replace(self, folder=folder, storage=storage, clock=clock, questions=set(self.questions), _services=[])
        new.model = copy(self.model)
        for name in ("entries", "expiries", "erasures"):
            setattr(new.model, name, list(getattr(self.model, name)))
        return new

    def log(self) -> StorageLog:
        """Return a separate view of the log."""
        log = StorageLog(self.storage, self.clock)
        log.open()
        return log

    @property
    def state(self) -> LogState:
        return self.log().state

    def options(self, window_s: int = DAY_S, **more: Any) -> MergeOptions:
        """Return options that treat every window as over."""
        return MergeOptions(**{"window_s": window_s, "min_age_s": 0, "shard_bytes": 1 << 20, **more})

    def later(self, days: float = 1000) -> None:
        """Let time pass, so that windows are over."""
        self.clock.advance(days * DAY_S)

    def plan(self, window_s: int = DAY_S, **more: Any) -> Any:
        return plan(self.log(), self.clock, self.options(window_s, **more))

    def merge(
        self, window_s: int = DAY_S, *, storage: Storage | None = None, threads: int = 1, **more: Any
    ) -> MergeReport:
        """Merge, and check the counts: entries before, entries after, and expired ones."""
        before = sum(stored.count for stored in self.state.objects.values())
        report = merge(storage or self.storage, self.log(), self.clock, self.options(window_s, **more), threads=threads)
        assert sum(stored.count for stored in self.state.objects.values()) + report.expired == before
        return report

    def reader(self, storage: Storage | None = None, **more: Any) -> IndexReader:
        if self.item_type is not None:
            more["item_type"] = self.item_type
        return IndexReader.open(storage_backend=storage or self.storage, clock=self.clock, query_threads=2, **more)

    def answers(self, result: QueryResult | Iterable[IndexItem]) -> list[Answer]:
        """Return the fields of an answer that the model knows."""
        return [Answer.of(item, self.extra) for item in result]

    def ranges(self) -> list[tuple[int | None, int | None]]:
        """Return ranges to look up: all, the edges of windows, a second."""
        seconds = sorted({entry.second for entry in self.model.entries})
        middle = seconds[len(seconds) // 2] * 1000
        edge = middle // DAY_MS * DAY_MS
        return [(None, None), (edge - 1000, edge), (edge, edge + DAY_MS - 1), (middle, middle), (None, edge - 1)]

    def check(self, reader: Lookups | None = None, questions: Iterable[tuple[str, str]] | None = None) -> None:
        """Look up every key in every range, by pages and in one batch, and compare with the model."""
        own = self.reader() if reader is None else None
        read: Lookups = reader if reader is not None else own  # type: ignore[assignment]
        questions = sorted(self.questions) if questions is None else list(questions)
        lookups, expected = [], []
        for topic, key in [*questions, ("t", "nobody"), ("nowhere", "k")]:
            for begin_ms, end_ms in self.ranges():
                answer = self.model.query(topic, key, begin_ms, end_ms, max_count=None)
                result = read.query(topic, key, begin_ms, end_ms, max_count=10**6)
                assert (self.answers(result), result.status) == (answer, "complete"), (topic, key, begin_ms, end_ms)
                lookups.append(Lookup(topic=topic, key=key, begin_ms=begin_ms, end_ms=end_ms, max_count=10**6))
                expected.append(answer)
            self.check_pages(read, topic, key)
        assert [self.answers(result) for result in read.query_many(lookups)] == expected
        if own is not None:
            own.close()

    def check_pages(self, read: Lookups, topic: str, key: str) -> None:
        """Page through a key in about four pages, and compare each."""
        size = max(3, len(self.model.query(topic, key, max_count=None)) // 4)
        cursor, after = None, None
        for _ in range(10**6):
            page = read.query(topic, key, max_count=size, cursor=cursor)
            expected = self.model.query(topic, key, max_count=size, after=after)
            assert self.answers(page) == expected
            cursor = page.cursor
            if cursor is None:
                return
            after = self.model.order_key_of(expected[-1]) if expected else after

    def windows(self) -> list[tuple[int, int]]:
        """Return (hours from `BASE_MS`, hours long) of the existing tables, by their begin."""
        places = {
            (shards[0].shard.begin_s, shards[0].shard.window_s, t)
            for t, shards in self.state.tables.items()
            if shards[0].shard
        }
        return sorted(((begin - BASE_MS // 1000) // HOUR_S, length // HOUR_S) for begin, length, _ in places)
