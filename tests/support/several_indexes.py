"""Several small indexes that are wholly in their storages, as of a cluster of brokers, and their common answers.

cluster = Cluster(tmp_path)
cluster.add("memory://x/broker-0", rows(1))
with IndexReader.open(cluster.uris) as reader:
    assert cluster.answers(reader.query("t", "k")) == cluster.model().query("t", "k")
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, OrderKey, ReferenceModel
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, QueryResult
from tiered_index.base.clock import ManualClock
from tiered_index.service.read.answers.merged import index_number
from tiered_index.storage.base import Storage

BASE_MS = 1_700_000_000_000
_READS = ("get", "get_range", "get_suffix", "head", "list")
Row = tuple[str, int, str | list[str], int, int, int]
"""Topic, queue_id, keys, offset, size, timestamp_ms."""


def rows(seed: int, count: int = 100, *, seconds: int = 5) -> list[Row]:
    """Return messages with few places and few seconds, so that sources often agree in both."""
    rng = random.Random(seed)
    return [
        (
            "t",
            rng.randrange(2),
            rng.choice(["k", "k", ["k", "other"]]),
            rng.randrange(20),
            10,
            BASE_MS + 1000 * rng.randrange(seconds),
        )
        for _ in range(count)
    ]


@dataclass
class Cluster:
    """Indexes by URI, in the order in which they were added, with a model each. `folder` is for their roots."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    keyed: bool = True
    models: dict[str, ReferenceModel] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def uris(self) -> list[str]:
        return list(self.models)

    def writer(self, uri: str, storage: Storage | None = None, **settings: Any) -> IndexService:
        where = {"storage": uri} if storage is None else {"storage_backend": storage}
        chosen = {"slots": 11, "items": 50, "local_keep_s": 0, "background": False, **self.settings, **settings}
        root = self.folder / f"root-{uri.replace('/', '_')[-100:]}"
        return IndexService.open(root=root, clock=ManualClock(BASE_MS + 60_000), disk=FaultDisk(), **where, **chosen)

    def add(self, uri: str, messages: Iterable[Row], storage: Storage | None = None, **settings: Any) -> None:
        """Make an index, or continue it, until its storage has all rows."""
        with self.writer(uri, storage, **settings) as index:
            model = self.models.setdefault(uri, ReferenceModel(keyed=self.keyed))
            self.numbers[uri] = index_number(index.index_id)
            for row in messages:
                index.put(*row)
                model.put(*row)
            index.seal()
            index.run_lifecycle()
            index.run_lifecycle()
            assert {handle.place for handle in index.files()} <= {"storage"}

    def model(self, uris: Iterable[str] | None = None) -> ReferenceModel:
        """Return the model of some indexes (default: all) together. Entries of two sources are never one answer."""
        joined = ReferenceModel(keyed=self.keyed, extra=["source"], identity=["source"])
        for uri in self.models if uris is None else uris:
            for e in self.models[uri].entries:
                joined.put(e.topic, e.queue_id, e.key, e.offset, e.size, e.second * 1000, source=self.numbers[uri])
        return joined

    def expected(self, uris: Iterable[str] | None = None) -> list[Answer]:
        """Return all answers of key k from some indexes (default: all) together."""
        return self.model(uris).query("t", "k", max_count=None)

    def answers(self, result: Iterable[Any]) -> list[Answer]:
        """Return answers as the model gives them."""
        return [replace(Answer.of(item), extra=(("source", self.numbers[item.source]),)) for item in result]

    def reader(self, uris: Sequence[str] | None = None, **settings: Any) -> IndexReader:
        """Open some indexes (default: all) as one, by their URIs, without automatic refreshes."""
        return IndexReader.open(self.uris if uris is None else uris, **{"refresh_interval_s": 10**6, **settings})

    def check_page(self, result: QueryResult, expected: list[Answer], count: int) -> OrderKey | None:
        """Compare a page of up to `count` answers with all remaining answers; return where it ended."""
        answers = self.answers(result)
        assert answers == expected[:count]
        assert result.status == ("truncated" if len(expected) > count else result.status)
        assert result.status in ("complete", "truncated")
        assert (result.cursor is None) == (result.status == "complete")
        return self.model([]).order_key_of(answers[-1]) if answers else None


class Watched(FaultStorage):
    """A storage with faults that records whether it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()

    def requests(self) -> int:
        """Return the number of reads so far."""
        return sum(map(self.calls, _READS))


def of(opened: Iterable[Watched], uri: str) -> Watched:
    (storage,) = [storage for storage in opened if storage.uri == uri]
    return storage
