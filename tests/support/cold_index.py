"""A small index that is only in a storage, with its right answers and a record of its requests.

    made = cold_index(tmp_path / "root", files=10)
    reader = made.reader()
    assert [Answer.of(item) for item in reader.query("t", "all")] == made.model.query("t", "all")

File f (0: the oldest) has the keys ``kF-0`` ... and ``all``, each once. The files' times do not overlap.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, ReferenceModel
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import ManualClock
from tiered_index.service.log.records import StoredObject
from tiered_index.storage.base import Storage, StorageRequest, WrapperStorage
from tiered_index.storage.memory import MemoryStorage

BASE_MS = 1_700_000_000_000
_FILE_MS = 10_000_000
# time between the begins of two files
_T = TypeVar("_T")


@dataclass(frozen=True)
class Read:
    """One range that was read."""

    name: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Recorder(WrapperStorage):
    """`inner`, with a record of ranges, calls by operation, and the greatest number of parallel reads of ranges.

    It calls `gate` during each read of a range.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.gate: Callable[[Read], object] | None = None
        self.reads: list[Read] = []
        self.operations: list[str] = []
        self.most_at_once = self._at_once = 0

    def reset(self) -> None:
        """Clear the record."""
        with self._lock:
            self.reads, self.operations, self.most_at_once = [], [], 0

    @property
    def asked_bytes(self) -> int:
        return sum(read.length for read in self.reads)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        read = Read(name, start, length)
        with self._lock:
            self.reads.append(read)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.gate is not None:
                self.gate(read)
            return super().get_range(name, start, length)
        finally:
            with self._lock:
                self._at_once -= 1

    def _around(self, call: StorageRequest, act: Callable[[], _T]) -> _T:
        with self._lock:
            self.operations += [call.operation] * call.requests
        return act()


@dataclass
class ColdIndex:
    """An index in a storage, the record of its requests, and its model.

    `stored` is in order of age, oldest first.
    """

    inner: Storage
    storage: Recorder
    model: ReferenceModel
    root: Path
    settings: dict[str, Any]
    stored: list[StoredObject] = field(default_factory=list)

    def reader(self, storage: Storage | None = None, **settings: Any) -> IndexReader:
        """Open a reader without local state. It reads the log only when it is refreshed."""
        chosen = {"refresh_interval_s": 10**6, **settings}
        return IndexReader.open(storage_backend=storage or self.storage, **chosen)

    def writer(self, **settings: Any) -> IndexService:
        """Open the index's writer on its root."""
        return IndexService.open(
            root=self.root,
            storage_backend=self.storage,
            clock=ManualClock(BASE_MS),
            disk=FaultDisk(),
            **{**self.settings, **settings},
        )

    def add(self, *numbers: int, entries: int = 5) -> None:
        """Put files of these numbers, each published by a separate round."""
        with self.writer() as writer:
            for number in numbers:
                put(self, writer, columns(number, entries))
                writer.seal()
                writer.run_lifecycle()

    def expected(self, topic: str, key: str, **question: Any) -> list[Answer]:
        return self.model.query(topic, key, **{"max_count": None, **question})


def columns(file: int, entries: int) -> dict[str, Any]:
    return {
        "topic": ["t"] * entries,
        "queue_id": np.zeros(entries, int),
        "key": [f"k{file}-{i}" for i in range(entries - 1)] + ["all"],
        "offset": np.arange(entries) + file * entries,
        "size": np.full(entries, 10),
        "timestamp_ms": BASE_MS + file * _FILE_MS + np.arange(entries) * 1000,
    }


def put(made: ColdIndex, writer: IndexService, batch: dict[str, Any]) -> None:
    """Put a batch into the index and the model."""
    writer.put_batch(batch)
    names = ("topic", "queue_id", "key", "offset", "size", "timestamp_ms")
    for row in zip(*(batch[name] for name in names), strict=True):
        made.model.put(*[value.item() if isinstance(value, np.generic) else value for value in row])


def cold_index(
    root: Path, *, files: int = 3, entries: int = 40, storage: Storage | None = None, **settings: Any
) -> ColdIndex:
    """Return an index of `files` files of `entries` entries, all only in the storage. Its writer is closed."""
    inner = storage or MemoryStorage()
    chosen = {
        "slots": 64,
        "items": entries + 1,
        "background": False,
        "local_keep_s": 0,
        "max_early_s": 10**9,
        **settings,
    }
    model = ReferenceModel(keyed=chosen.get("preset") != "rocketmq")
    made = ColdIndex(inner, Recorder(inner), model, root, chosen)
    with made.writer() as writer:
        for number in range(files):
            put(made, writer, columns(number, entries))
            writer.flush()
        publish(made, writer)
    made.storage.reset()
    return made


def publish(made: ColdIndex, writer: IndexService) -> None:
    """Upload all entries, and delete all local copies."""
    writer.seal()
    writer.run_lifecycle()
    writer.run_lifecycle()
    assert all(handle.place == "storage" for handle in writer.files())
    made.stored = sorted(writer.log_state.objects.values(), key=lambda stored: stored.second_min)


@contextlib.contextmanager
def spoiled(made: ColdIndex, name: str, change: Callable[[bytearray], object]) -> Iterator[None]:
    """Replace an object in the storage until the block ends."""
    whole = made.inner.get(name)
    data = bytearray(whole)
    change(data)
    made.inner.put(name, bytes(data))
    try:
        yield
    finally:
        made.inner.put(name, whole)


@contextlib.contextmanager
def gone(made: ColdIndex, name: str) -> Iterator[None]:
    """Remove an object from the storage until the block ends."""
    whole = made.inner.get(name)
    made.inner.delete_many([name])
    try:
        yield
    finally:
        made.inner.put(name, whole)


def in_rounds(storage: Recorder, ask: Callable[[], _T], threads: int, requests: int) -> _T:
    """Return the result of `ask`, after its requests ran in full rounds.

    Each waits until the greatest possible number are in flight. If fewer are, the barrier breaks.
    """
    rounds, numbers = threading.Barrier(threads), itertools.count(1)
    last = requests // threads * threads

    def gate(_: Read) -> None:
        if next(numbers) <= last:
            rounds.wait(60)

    storage.gate = gate
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(ask).result(120)
    finally:
        storage.gate = None
