"""Fixtures of the regression tests of RocketMQ's faults: an index and its model, moved through every state of a file.

`make_life` runs a test for both presets and both storages, memory:// and file://. Each preset runs on one of them, as a
storage sees only bytes. In a test with many cases, short runs of neighbours alternate between the presets.
`Life.through` moves all entries through the five states. `Life.check` sends a lookup to every object that can answer in
the present state: the writer (one by one and in a batch), a reader beside it, and a reader of the storage alone. It
compares the answers with `tests.support.model`.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, ReferenceModel
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Lookup, QueryResult
from tiered_index.clock import ManualClock
from tiered_index.errors import StorageUnavailable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import open_storage

NOW_MS = 1_700_000_000_000
STATES = ("buffered", "unsealed", "compacted", "uploaded", "storage")
KEEP_S = 3600
SETTINGS: dict[str, Any] = {"slots": 7, "items": 20, "local_keep_s": KEEP_S, "background": False, "query_threads": 4}
Ask = Callable[..., QueryResult]

_FEW = 3
"""A test with fewer cases runs each of them for both presets."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one preset of each case to long runs, so that neighbouring cases alternate between the presets."""
    cases: dict[Any, tuple[list[pytest.Item], ...]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "make_life" in item.callspec.indices:
            cases.setdefault(item.function, ([], []))[item.callspec.indices["make_life"]].append(item)
    for of_presets in cases.values():
        for preset, of_preset in enumerate(of_presets):
            for number, item in enumerate(of_preset):
                # the parity of the bits, so that no value of one parameter implies a preset
                if len(of_preset) >= _FEW and (number.bit_count() + preset) % 2:
                    item.add_marker(pytest.mark.slow)


class Life:
    """One index, its storage (`storage`, which fails on demand, at `uri`), its disk and its model."""

    def __init__(self, folder: Path, uri: str, preset: str, settings: dict[str, Any]) -> None:
        self.root = folder / "root"
        self.uri = uri
        self.preset = preset
        self.clock = ManualClock(NOW_MS)
        self.storage = FaultStorage(open_storage(uri, disk=FaultDisk()))
        self.disk = FaultDisk()
        self.model = ReferenceModel(keyed=preset == "native")
        self.state = "buffered"
        self.settings = {"preset": preset, **SETTINGS, **settings}
        self._readers = contextlib.ExitStack()
        self._asking: list[tuple[str, Ask]] = []
        self._modelled: dict[tuple[Any, ...], list[Answer]] = {}
        self.open()

    # Life

    def open(self, **settings: Any) -> IndexService:
        """Open the root again, with the settings of its creation by default. An open one is dropped first."""
        self.crash()
        chosen = {**self.settings, **settings}
        self.disk = FaultDisk()
        self.service = IndexService.open(
            root=self.root,
            storage_backend=self.storage,
            clock=self.clock,
            disk=self.disk,
            **{name: value for name, value in chosen.items() if value is not ...},
        )
        return self.service

    def crash(self) -> None:
        """Leave the state that a killed process leaves."""
        self.dismiss()
        if hasattr(self, "service"):
            with contextlib.suppress(BaseException):  # a disk that has crashed stays crashed
                self.service.abandon()

    def close(self) -> None:
        """Close everything and drop it."""
        self.dismiss()
        self.service.close()
        del self.service

    def dismiss(self) -> None:
        """Close the readers."""
        self._readers.close()
        self._asking = []

    def put(
        self, topic: str, queue_id: int, keys: Any, offset: int, size: int = 10, timestamp_ms: int = NOW_MS, **more: Any
    ) -> int:
        """Put a message to the index and to the model."""
        made = self.service.put(topic, queue_id, keys, offset, size, timestamp_ms, **more)
        self.model.put(topic, queue_id, keys, offset, size, timestamp_ms)
        return made

    def put_call(self, call: dict[str, Any]) -> int:
        """Put the message of a call in RocketMQ's golden files."""
        place = (call[name] for name in ("topic", "queueId", "keys", "offset", "size", "timestamp"))
        return self.put(*place, topic_id=call["topicId"])

    def put_batch(self, rows: list[tuple[str, int, str, int, int, int]]) -> None:
        """Put (topic, queue_id, key, offset, size, timestamp_ms) rows, one entry each."""
        names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
        self.service.put_batch(
            {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
        )
        for row in rows:
            self.model.put(*row)

    # States

    def through(self) -> Iterator[str]:
        """Move all entries into the present state, then into each later one, and yield the state's name."""
        for state in STATES[STATES.index(self.state) :]:
            self.bring(state)
            yield state

    def bring(self, state: str, *, begin: str | None = None) -> None:
        """Move all entries into `state`. It must not come before the present state, or before `begin`, if a test has
        already moved them there.
        """
        self.state = begin or self.state
        for step in STATES[STATES.index(self.state) : STATES.index(state) + 1]:
            self._step(step)
        self.state = state
        self.dismiss()

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

    # Answers

    def asking(self) -> list[tuple[str, Ask]]:
        """Return the objects that can answer for all entries in the present state, by name."""
        if not self._asking:
            self._asking = [("service", self.service.query), ("service, in a batch", _batched(self.service))]
            if self.state != "buffered":
                self._asking.append(("reader beside", self.reader(root=self.root).query))
            if self.state in ("uploaded", "storage"):
                reader = self.reader()
                self._asking += [("reader", reader.query), ("reader, in a batch", _batched(reader))]
        return self._asking

    def reader(self, root: Path | None = None) -> IndexReader:
        """Return a reader of the storage, or of a root too."""
        return self._readers.enter_context(
            IndexReader.open(root=root, storage_backend=self.storage, clock=self.clock, query_threads=4)
        )

    def check(
        self, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None, max_count: int = 64
    ) -> list[Answer]:
        """Look up in every object, compare with the model, and return the answers."""
        question = (len(self.model.entries), topic, key, begin_ms, end_ms)
        if question not in self._modelled:  # the model is slow with many entries
            self._modelled[question] = self.model.query(topic, key, begin_ms, end_ms, None)
        everything = self._modelled[question]
        expected = everything[:max_count]
        for name, ask in self.asking():
            result = ask(topic, key, begin_ms, end_ms, max_count)
            where = (self.state, name, topic, key, begin_ms, end_ms, max_count)
            assert [Answer.of(item) for item in result] == expected, where
            if len(everything) != max_count:  # an answer with exactly this many may or may not be proven complete
                assert result.status == ("truncated" if len(everything) > max_count else "complete"), where
            assert not result.failed, where
        return expected


def _batched(index: IndexService | IndexReader) -> Ask:
    def ask(topic: str, key: str, *more: Any, allow_partial: bool = False, **how: Any) -> QueryResult:
        how |= dict(zip(("begin_ms", "end_ms", "max_count"), more, strict=False))
        lookup = Lookup(topic=topic, key=key, **how)
        other = Lookup(topic="another topic", key=key, begin_ms=lookup.begin_ms, end_ms=lookup.end_ms)
        return index.query_many([other, lookup], allow_partial)[1]

    return ask


@pytest.fixture(params=[("native", "file"), ("rocketmq", "memory")], ids="-".join)
def make_life(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Life]]:
    """Create an index. Named settings differ from those of all tests here."""
    preset, scheme = request.param
    made: list[Life] = []
    numbers = itertools.count()

    def make(**settings: Any) -> Life:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        name = f"rocketmq-faults-{uuid.uuid4().hex}"
        uri = f"memory://{name}" if scheme == "memory" else f"file://{folder}/storage"
        made.append(Life(folder, uri, preset, settings))
        return made[-1]

    yield make
    for life in made:
        life.crash()
        if life.uri.startswith("memory://"):
            MemoryStorage.forget(life.uri.removeprefix("memory://"))


@pytest.fixture
def life(make_life: Callable[..., Life]) -> Life:
    return make_life()


@pytest.fixture(scope="session")
def golden() -> Callable[[str], list[dict[str, Any]]]:
    """Return the lines of a golden file by its path under `tests/golden/data`."""
    data = Path(__file__).parents[2] / "golden" / "data"

    def lines(path: str) -> list[dict[str, Any]]:
        plain = data / path
        raw = plain.read_bytes() if plain.exists() else gzip.decompress((data / f"{path}.gz").read_bytes())
        return [json.loads(line) for line in raw.decode().splitlines()]

    return lines
