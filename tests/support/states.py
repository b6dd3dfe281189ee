"""An index and its model, moved through every state of a file. All objects that can answer must answer as the model."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import columns_of
from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, ReferenceModel
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup, QueryResult
from tiered_index.base.clock import ManualClock
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.local import LocalStorage

NOW_MS = 1_700_000_000_000
STATES = ("buffered", "unsealed", "compacted", "uploaded", "storage")
KEEP_S = 3600
SETTINGS: dict[str, Any] = {"slots": 7, "items": 20, "local_keep_s": KEEP_S, "background": False, "query_threads": 4}
Ask = Callable[..., QueryResult]


class States:
    """One index below a folder, its storage and disk, which fail on demand, and its model."""

    def __init__(self, folder: Path, preset: str = "native", **settings: Any) -> None:
        self.root = folder / "root"
        self.clock = ManualClock(NOW_MS)
        self.storage = FaultStorage(LocalStorage(folder / "storage", disk=FaultDisk()))
        self.model = ReferenceModel(keyed=preset == "native")
        self.state = "buffered"
        self.settings = {"preset": preset, **SETTINGS, **settings}
        self.service: IndexService | None = None
        self._readers = contextlib.ExitStack()
        self.open()

    def open(self, **settings: Any) -> IndexService:
        """Open the root, again as after a kill. Without other settings, use those of its creation."""
        self.crash()
        self.disk = FaultDisk()
        where = {"root": self.root, "storage_backend": self.storage, "clock": self.clock, "disk": self.disk}
        self.service = IndexService.open(**where, **(self.settings | settings))
        return self.service

    def crash(self) -> None:
        """Leave the files that a killed process leaves."""
        self._readers.close()
        if self.service is not None:
            self.service.abandon()
            self.service = None

    def put(
        self, topic: str, queue_id: int, keys: Any, offset: int, size: int = 10, timestamp_ms: int = NOW_MS, **more: Any
    ) -> int:
        """Put a message to the index and to the model."""
        made = self.service.put(topic, queue_id, keys, offset, size, timestamp_ms, **more)
        self.model.put(topic, queue_id, keys, offset, size, timestamp_ms)
        return made

    def put_batch(self, rows: list[tuple[str, int, str, int, int, int]]) -> None:
        """Put (topic, queue_id, key, offset, size, timestamp_ms) rows, one entry each."""
        self.service.put_batch(columns_of(rows))
        for row in rows:
            self.model.put(*row)

    def through(self) -> Iterator[str]:
        """Move all entries into the present state, then into each later one, and yield the state's name."""
        for state in STATES[STATES.index(self.state) :]:
            self.bring(state)
            yield state

    def bring(self, state: str) -> None:
        """Move all entries into a state that does not come before the present one."""
        for step in STATES[STATES.index(self.state) : STATES.index(state) + 1]:
            self._step(step)
        self.state = state
        self._readers.close()

    def _step(self, state: str) -> None:
        service = self.service
        if state == "buffered":
            assert service.health()["buffered_entries"] == len(self.model.entries)
            return
        if state == "unsealed":
            service.flush()
        elif state == "compacted":
            service.seal()
            self.storage.fail("put", name_prefix="data/", times=None)
            with pytest.raises(StorageUnavailable):
                service.run_lifecycle()
            self.storage.clear()
        elif state == "uploaded":
            service.run_lifecycle()
        else:
            self.clock.advance(KEEP_S + 1)
            service.run_lifecycle()
            service.run_lifecycle()
            assert not list(self.root.glob("*/*.index"))
        assert {file.place for file in service.files()} == {state}
        assert service.health()["buffered_entries"] == 0

    def asking(self) -> list[tuple[str, Ask]]:
        """Return the objects that can answer for all entries in the present state, by name."""
        asking: list[tuple[str, Ask]] = [("service", self.service.query), ("in a batch", _batched(self.service))]
        if self.state != "buffered":
            asking.append(("reader beside", self.reader(root=self.root).query))
        if self.state in ("uploaded", "storage"):
            reader = self.reader()
            asking += [("reader", reader.query), ("reader, in a batch", _batched(reader))]
        return asking

    def reader(self, root: Path | None = None) -> IndexReader:
        """Open a reader of the storage, or of a root too. It is closed when the state changes."""
        options: dict[str, Any] = {"root": root, "storage_backend": self.storage, "clock": self.clock}
        return self._readers.enter_context(IndexReader.open(query_threads=4, **options))

    def check(
        self, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None, max_count: int = 64
    ) -> list[Answer]:
        """Look up in every object, compare with the model, and return the answers."""
        return self.check_all([(topic, key, begin_ms, end_ms, max_count)])[0]

    def check_all(self, questions: list[tuple[Any, ...]]) -> list[list[Answer]]:
        """Check several questions: topic, key, begin, end, and the greatest count."""
        expected = []
        asking = self.asking()
        for question in questions:
            *about, max_count = question
            everything = self.model.query(*about, None)
            expected.append(everything[:max_count])
            for name, ask in asking:
                result = ask(*question)
                assert [Answer.of(item) for item in result] == expected[-1], (self.state, name, question)
                # an answer with exactly this many may or may not be proven complete
                if len(everything) != max_count:
                    assert result.status == ("truncated" if len(everything) > max_count else "complete")
                assert not result.failed
        return expected


def _batched(index: IndexService | IndexReader) -> Ask:
    def ask(topic: str, key: str, *more: Any, allow_partial: bool = False, **how: Any) -> QueryResult:
        how |= dict(zip(("begin_ms", "end_ms", "max_count"), more, strict=False))
        lookup = Lookup(topic=topic, key=key, **how)
        other = Lookup(topic="another topic", key=key, begin_ms=lookup.begin_ms, end_ms=lookup.end_ms)
        return index.query_many([other, lookup], allow_partial)[1]

    return ask
