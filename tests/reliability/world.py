"""One root and one storage for fault tests and crash campaigns, with the entries that were put and expected answers."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.disk_faults import FaultDisk, SimulatedCrash
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader, IndexService, QueryResult
from tiered_index.base.clock import ManualClock
from tiered_index.base.retention import Retention
from tiered_index.errors import TieredIndexError
from tiered_index.service.jobs.erase import EraseRequest
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.base import Storage
from tiered_index.storage.disk import TEMPORARY_PREFIX, Disk
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
KEYS = ("a", "b", "c", "ключ")
QUESTIONS = [(topic, key) for topic in ("orders", "payments") for key in KEYS]


class World:
    """One root and one storage, with their entries.

    `model` has the entries of all puts, and `durable` those that a flush has confirmed.
    """

    def __init__(self, folder: Path, storage: Storage | None = None) -> None:
        self.root = folder / "root"
        self.clock = ManualClock(NOW_MS)
        self.storage = storage or MemoryStorage(clock=self.clock)
        self.model = ReferenceModel()
        self.durable = ReferenceModel()
        self.service: IndexService | None = None
        self.unsettled = False
        self.settings: dict[str, object] = {"slots": 7, "items": 12, "local_keep_s": 0}
        self.settings |= {"background": False, "query_threads": 2}
        self.number = 0
        self.are_interrupted = False
        """An interrupt may end a put between its entries and its position."""
        self.wild = 10
        """One of so many messages has an implausible time."""
        self.position = 0
        self.durable_position: int | None = None
        self.expired: dict[tuple[str, str], int] = {}
        self.rule = Retention()
        """Entries may have expired by this rule. Answers show whether they have."""
        self.erasures: list[EraseRequest] = []
        """Entries may have been erased by these requests. Log and answers show whether they were."""

    def open(self, disk: Disk | None = None, storage: Storage | None = None, **settings: object) -> IndexService:
        where = {"root": self.root, "storage_backend": storage or self.storage, "disk": disk or FaultDisk()}
        self.unsettled = True  # the losses of an earlier service are not known yet
        self.service = IndexService.open(clock=self.clock, **where, **(self.settings | settings))
        return self.service

    def put(self, count: int) -> None:
        """Put `count` messages of one or two keys each. One in `wild` has an implausible time."""
        for _ in range(count):
            message, before = self.message(), len(self.model.entries)
            self.model.put(*message)  # first, because a concurrent lookup may find it during the call
            try:
                self.service.put(*message, source="log", source_position=self.number)
            except TieredIndexError:
                del self.model.entries[before:]
                raise
            self.position = self.number

    def message(self) -> tuple[Any, ...]:
        self.number += 1
        number = self.number
        keys = [KEYS[number % 4], KEYS[number % 3]]
        timestamp_ms = 5_000 if number % self.wild == 0 else NOW_MS + number * 1000
        return "orders" if number % 2 else "payments", number % 3, keys, number, 10, timestamp_ms

    def flush(self) -> None:
        self.service.flush()
        self.confirm()

    def seal(self) -> None:
        self.service.seal()
        self.confirm()

    def run_lifecycle(self) -> None:
        self.service.run_lifecycle()

    def run_merge(self) -> None:
        """Run a round of the writer's own merges. All windows count as over."""
        self.service._parts.merger.min_age_s = 0
        self.service.run_merge()

    def publish(self, count: int = 0) -> None:
        """Put `count` messages, and upload all entries."""
        self.put(count)
        self.seal()
        self.run_lifecycle()

    def confirm(self) -> None:
        """Note all entries so far as durable."""
        self.durable.entries = list(self.model.entries)
        self.durable_position = self.position or None

    def steps(self, script: str, **more: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Yield the steps of a script. A number is a number of puts. A word names a method, or one of `more`."""
        for word in script.split():
            yield partial(self.put, int(word)) if word.isdigit() else more.get(word) or getattr(self, word)

    def do(self, script: str) -> None:
        """Take the steps of a script."""
        for step in self.steps(script):
            step()

    def script(self) -> Iterator[Callable[[], object]]:
        """Yield the steps of the scenario."""
        yield from self.steps("5 flush 8 flush run_lifecycle 3 seal run_lifecycle run_lifecycle")
        yield from self.steps("4 flush 1 seal 2 flush run_lifecycle")

    def abandon(self) -> None:
        """Abandon the service, as if its process was killed."""
        if self.service is not None:
            with contextlib.suppress(SimulatedCrash):
                self.service.abandon()
            self.service = None

    def come_back(self, disk: Disk | None = None) -> None:
        """Open the index again, as after a kill of its process."""
        self.abandon()
        self.open(disk)
        self.check()

    def heal(self) -> None:
        """Publish everything. Check that the storage has every entry once, and nothing else."""
        self.flush()
        self.publish()
        self.run_lifecycle()
        self.check()
        self.check_stored()
        state, health = self.service.log_state, self.service.health()
        assert health["problems"] == []
        assert not {"unsealed", "compacted"} & set(health["files"])
        assert self.service.durable_position("log") == self.position
        assert state.positions == {"log": self.position}
        assert sum(stored.count for stored in state.objects.values()) == len(self.model.entries)
        assert {info.name for info in self.storage.list("data/")} == set(state.objects)

    def check_stored(self) -> None:
        """Check the answers of a reader of only the storage."""
        with IndexReader.open(storage_backend=self.storage, clock=self.clock) as reader:
            self.check(reader.query)

    def answers(self, ask: Callable[..., QueryResult] | None = None) -> dict[tuple[str, str], list[Answer]]:
        """Return all answers by (topic, key), each complete."""
        answers = {}
        for question in QUESTIONS:
            result = (ask or self.service.query)(*question, max_count=1000)
            assert result.status == "complete"
            answers[question] = [Answer.of(item) for item in result]
            self.expired[question] = expired_ms = result.expired_before_ms or 0
            assert expired_ms <= self.rule.horizon(self.clock.now_ms()).of_topic(question[0])
            assert all(item.timestamp_ms >= expired_ms for item in result), "the answer has expired entries"
        return answers

    def check(self, ask: Callable[..., QueryResult] | None = None) -> None:
        """Check that each durable entry is found once, only entries of puts are found, and positions are right."""
        answers = self.check_answers(ask)
        position = self.service.durable_position("log")
        promised = ReferenceModel()
        promised.entries = [entry for entry in self.model.entries if position is not None and entry.offset <= position]
        for question in QUESTIONS:
            ahead = self._kept(question, promised) - set(answers[question])
            assert not ahead, f"durable_position {position} is ahead of {ahead}"
        if self.durable_position:
            assert position is not None, "no durable position"
            problem = f"durable position {position}, not from {self.durable_position} to {self.position}"
            assert self.durable_position <= position <= self.position, problem
        if self.unsettled and not self.are_interrupted and self.service._buffer.is_empty:
            # the source puts messages after the position again, so that an entry of one would be stored twice
            messages = itertools.chain.from_iterable(answers.values())
            twice = [a for a in messages if a.offset > (position or 0) and a.timestamp_ms > NOW_MS]
            assert not twice, f"durable_position {position} is behind {twice}"

    def check_answers(self, ask: Callable[..., QueryResult] | None = None) -> dict[tuple[str, str], list[Answer]]:
        """Check that each durable entry is found once, and only entries of puts are found. Return the answers."""
        all_answers = self.answers(ask)
        self.model.erasures = self.durable.erasures = self._stated(all_answers)
        for question in QUESTIONS:
            answers = all_answers[question]
            assert len(answers) == len(set(answers))
            possible = self.model.query(*question, max_count=None)
            assert answers == [answer for answer in possible if answer in set(answers)], f"{question}: {answers}"
            lost = self._kept(question, self.durable) - set(answers)
            assert not lost, f"durable entries of {question} are gone: {lost}"
        return all_answers

    def _kept(self, question: tuple[str, str], model: ReferenceModel) -> set[Answer]:
        """Return a model's answers without erased entries, and without those that the last answers show as expired."""
        model.erasures = self.model.erasures
        answers = model.query(*question, max_count=None)
        return {answer for answer in answers if answer.timestamp_ms >= self.expired.get(question, 0)}

    def _stated(
        self, all_answers: dict[tuple[str, str], list[Answer]]
    ) -> list[tuple[str, int, str | None, int | None]]:
        """Return the erasures that the log states, if the answers have none of their entries."""
        if not self.erasures:
            return []
        known, stated = StorageLog(self.storage, self.clock).open().expired, []
        self.model.erasures = []
        for erasure in self.erasures:
            stones = erasure.tombstones(0, keyed=True)
            shown = [
                answer
                for (topic, key), answers in all_answers.items()
                for answer in answers
                if topic == erasure.topic
                and (not erasure.keys or key in erasure.keys)
                and erasure.queue_id in (None, answer.queue_id)
                and answer.timestamp_ms < stones[0].before_ms
            ]
            if not shown and known.joined(Expired(tombstones=stones)) is known:
                stated += [
                    (erasure.topic, stones[0].before_ms, key, erasure.queue_id) for key in erasure.keys or (None,)
                ]
        return stated

    def settle(self) -> None:
        """Note the losses after a recovery: all entries that are found are durable."""
        places = {question: {(a.queue_id, a.offset) for a in answers} for question, answers in self.answers().items()}
        self.model.entries = [e for e in self.model.entries if (e.queue_id, e.offset) in places[e.topic, e.key]]
        self.durable.entries = list(self.model.entries)
        self.position = self.service.durable_position("log") or 0
        self.unsettled = False

    def tidy(self) -> None:
        """Check that no temporary files are left, and that every file is in one state."""
        states = ("unsealed", "compacted", "uploaded")
        names = [path.name for path in self.root.rglob("*")]
        assert not [name for name in names if name.startswith(TEMPORARY_PREFIX)]
        ids = [path.stem for state in states for path in (self.root / state).glob("*.index")]
        assert len(ids) == len(set(ids))
