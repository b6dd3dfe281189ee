"""Cursors that travel: each page comes in another state of the files, and from another of writer, reader beside it,
stateless reader.

Each page must equal the model's, which has no files. An entry put meanwhile with an older second comes on a later page.
One with a newer second comes on no page.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.batches import columns_of
from tests.support.disk_faults import FaultDisk
from tests.support.model import Answer, OrderKey, ReferenceModel
from tiered_index import IndexReader, IndexService, Lookup, QueryResult
from tiered_index.clock import ManualClock
from tiered_index.storage.memory import MemoryStorage

NOW_MS = 1_700_000_000_000
KEEP_S = 100
SPAN_S = 500
ASKERS = ("service", "beside", "stateless")


class Travels:
    """One index, its three readers, and the entries put to it."""

    def __init__(self, folder: Path, preset: str, items: int) -> None:
        self.clock = ManualClock(NOW_MS)
        self.storage = MemoryStorage()
        self.model = ReferenceModel(keyed=preset == "native")
        self._settings = {"root": folder / "root", "preset": preset, "slots": 7, "items": items}
        self._settings |= {"local_keep_s": KEEP_S, "background": False, "query_threads": 2}
        self._numbers = itertools.count()
        self._readers: list[IndexReader] = []
        self.buffered = self.unpublished = False
        self.open()
        self.stateless = self._reader()
        self.beside = self._reader(root=folder / "root")

    def _reader(self, **settings: object) -> IndexReader:
        reader = IndexReader.open(storage_backend=self.storage, clock=self.clock, refresh_interval_s=10**6, **settings)
        self._readers.append(reader)
        return reader

    def open(self) -> None:
        where = {"storage_backend": self.storage, "clock": self.clock, "disk": FaultDisk()}
        self.service = IndexService.open(refresh_interval_s=10**6, **where, **self._settings)

    def close(self) -> None:
        """Close everything."""
        for reader in self._readers:
            reader.close()
        self.service.abandon()

    # Steps between two pages

    def put(self, count: int, rng: random.Random) -> None:
        """Put `count` entries of the key in any order of time, and others among them."""
        rows = []
        for n in itertools.islice(self._numbers, count):
            key, ms = rng.choice(["hot", "hot", "hot", "cold"]), NOW_MS - 1000 * rng.randrange(SPAN_S)
            rows.append(("t", n % 3, key, n, 1, ms))
            self.model.put(*rows[-1])
        self.service.put_batch(columns_of(rows))
        self.buffered = self.unpublished = True

    def flush(self) -> None:
        self.service.flush()
        self.buffered = False

    def seal(self) -> None:
        self.service.seal()
        self.buffered = False

    def upload(self) -> None:
        """Compact and publish all entries."""
        self.seal()
        self.service.run_lifecycle()
        assert "unsealed" not in self.service.health()["files"]
        self.unpublished = False

    def retire(self) -> None:
        """Retire the local copies of published files."""
        self.clock.advance(KEEP_S + 1)
        self.service.run_lifecycle()
        self.service.run_lifecycle()

    def reopen(self) -> None:
        self.service.close()
        self.open()
        self.buffered = False

    def crash(self) -> None:
        """End the process without closing the index, after a flush."""
        self.flush()
        self.service.abandon()
        self.open()

    def another_reader(self) -> None:
        self.stateless = self._reader()

    def moves(self, rng: random.Random) -> dict[str, Callable[[], object]]:
        """Return the possible steps, by name."""
        names = {*LIFE, *LATER} - {"put"}
        return {"put": lambda: self.put(20, rng)} | {name: getattr(self, name) for name in names}

    # Lookups

    def askers(self) -> list[str]:
        """Return the readers that see everything now."""
        blind = (False, self.buffered, self.unpublished)
        return [asker for asker, is_blind in zip(ASKERS, blind, strict=True) if not is_blind]

    def page(self, asker: str, count: int, cursor: str | None, *, many: bool = False) -> QueryResult:
        index = {"service": self.service, "beside": self.beside, "stateless": self.stateless}[asker]
        if asker == "stateless":
            self.stateless.refresh()
        if many:
            (answer,) = index.query_many([Lookup(topic="t", key="hot", max_count=count, cursor=cursor)])
            return answer
        return index.query("t", "hot", max_count=count, cursor=cursor)


def check_pages(
    travels: Travels,
    plan: Iterator[tuple[list[str], int, int]],
    rng: random.Random,
    kinds: set[tuple[str, str]] | None = None,
) -> list[Answer]:
    """Follow `plan` (steps before a page, which reader, how many answers) to the last page; return all answers."""
    model, seen = travels.model, []
    cursor: str | None = None
    after: OrderKey | None = None
    moves = travels.moves(rng)
    rest, known = model.query("t", "hot", max_count=None), len(model.entries)
    last = "begun"
    while True:
        todo, which, count = next(plan)
        for last in todo:
            moves[last]()
        if len(model.entries) > known:
            rest, known = model.query("t", "hot", max_count=None, after=after), len(model.entries)
        askers = travels.askers()
        asker = askers[which % len(askers)]
        result = travels.page(asker, count, cursor, many=which % 5 == 0)
        if kinds is not None:
            kinds.add((asker, last))
        found = [Answer.of(item) for item in result]
        assert found == rest[:count], (asker, last, len(seen))
        seen += found
        rest = rest[count:]
        if result.cursor is None:
            assert (result.status, rest) == ("complete", [])
            return seen
        assert result.status == "truncated"
        cursor, after = result.cursor, model.order_key_of(found[-1])


LIFE = ["flush", "seal", "upload", "retire", "another_reader", "reopen"]


LATER = ("put", "flush", "upload", "another_reader", "put", "crash", "upload", "retire")


def along_a_life(first: int, counts: Iterable[int]) -> Iterator[tuple[list[str], int, int]]:
    """Take one step of a life before each page, the first `first` together; then any step at times, 40 in all."""
    steps = [LIFE[:first], *([step] for step in LIFE[first:])]
    later = itertools.cycle(LATER)
    left = 40
    for n, count in enumerate(counts):
        if n < len(steps):
            yield steps[n], first + n, count
        elif left and n % (1 + 16 // count) == 0:
            left -= 1
            yield [next(later)], n, count
        else:
            yield [], n, count


@pytest.mark.parametrize(
    ("preset", "first", "counts"),
    [
        ("native", 0, [1] * 150 + [64] * 100),
        pytest.param("native", 0, [1] * 10_000, marks=pytest.mark.slow),
        pytest.param("native", 0, [7] * 1000, marks=pytest.mark.slow),
        ("native", 0, [64] * 100),
        ("rocketmq", 0, [64] * 100),
        *(("native", first, [1000] * 10) for first in range(len(LIFE))),
    ],
    ids=lambda value: f"{value[0]}-{value[-1]}" if isinstance(value, list) else str(value),
)
def test_pages_of_a_key_with_thousands_of_entries(tmp_path, preset, first, counts):
    rng = random.Random(counts[0] + first)
    travels = Travels(tmp_path, preset, 400)
    try:
        travels.put(4000, rng)
        whole = travels.model.query("t", "hot", max_count=None)
        assert len(whole) > 2900
        kinds: set[tuple[str, str]] = set()
        seen = check_pages(travels, along_a_life(first, counts), rng, kinds)
        there = set(whole)
        assert [answer for answer in seen if answer in there] == whole
        assert len(set(seen)) == len(seen)
        if counts[0] < 1000:
            assert {asker for asker, _ in kinds} == set(ASKERS)
            assert {step for _, step in kinds} >= {*LIFE, *LATER}
            assert len(seen) > len(whole)  # entries put meanwhile with an older second
            assert len(travels.service.log_state.objects) > 10
    finally:
        travels.close()
