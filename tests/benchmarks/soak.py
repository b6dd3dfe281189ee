"""`make bench SUITE=soak`: one index under load for a long time; memory by minute.

Producers put at a fixed rate with the present time. The background life cycle compacts, uploads and expires, and a
thread merges. Readers compare each answer with the model. Number n of a producer has key n mod KEYS, so a key's answer
follows from the first number and the second of each batch. An answer has every entry that was acknowledged before the
lookup began. It has no entry whose put began after the lookup ended. Threads: two producers, two readers, one that
merges, and the caller's, which samples.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.benchmarks.memory import memory_bytes
from tests.benchmarks.report import finish, note, options, scratch
from tests.stress.crew import Crew
from tiered_index import IndexConfig, IndexReader, IndexService, MergeOptions, QueryResult, Retention, merge
from tiered_index.errors import BackPressure

KEYS = 5_000
_TOPIC = "orders"
_BATCH = 1_000
_PRODUCERS = 2
_READERS = 2
_GRACE_S = 3_600.0
# a seal at most after this many seconds, so that merges and expiry have files
_SEAL_S = 60.0
_MERGED_AFTER_S = 30

I64 = npt.NDArray[np.int64]


class Ledger:
    """The batches of one producer: each one's first number and second, and how many are begun and acknowledged.

    One thread puts, and any thread reads. A batch is recorded before its put begins.
    """

    def __init__(self) -> None:
        self._firsts = np.zeros(1 << 20, np.int64)
        self._seconds = np.zeros(1 << 20, np.int64)
        self.begun = 0
        self.acknowledged = 0

    def begin(self, second: int) -> int:
        """Record a batch of the second, and return its first number."""
        first = self.begun * _BATCH
        self._firsts[self.begun], self._seconds[self.begun] = first, second
        self.begun += 1
        return first

    def numbers(self, key: int, batches: int, low: int, high: int) -> tuple[I64, I64]:
        """Return the numbers of the key in the first `batches` within [low, high] epoch seconds, and their seconds."""
        firsts, seconds = self._firsts[:batches], self._seconds[:batches]
        numbers = firsts + (key - firsts) % KEYS
        chosen = (numbers < firsts + _BATCH) & (seconds >= low) & (seconds <= high)
        return numbers[chosen], seconds[chosen]


@dataclass
class Minute:
    """The figures of one minute of the soak."""

    minute: int
    entries: int
    answers: int
    resident_mib: int


class Soak:
    """One run. `wrong` has the missing and the additional entries of answers."""

    def __init__(self, config: IndexConfig, rate: int, seed: int) -> None:
        self._config, self._rate, self._seed = config, rate, seed
        self._ledgers = [Ledger() for _ in range(_PRODUCERS)]
        self._crew = Crew(seed)
        self._over = self._crew.stop
        self.answers = 0
        self.back_pressure = 0
        self.merged = 0
        self.wrong: list[str] = []

    def run(self, minutes: float) -> Iterator[Minute]:
        """Put, look up and merge for this many minutes; yield each minute's figures. Raises the error of a thread."""
        with IndexService.open(self._config) as index:
            for number in range(_PRODUCERS):
                self._crew.begin(f"producer-{number}", self._produce, index, number)
            for number in range(_READERS):
                self._crew.begin(f"reader-{number}", self._read, index, number)
            self._crew.begin("merger", self._merge)
            try:
                whole = max(1, round(minutes))
                for minute in range(1, whole + 1):
                    if self._over.wait(60 * minutes / whole):
                        break
                    yield self._sample(minute)
            finally:
                self._crew.finish()
            index.seal()
            index.run_lifecycle()
        with IndexReader.open(config=self._config.changed(root=None)) as reader:
            rng = random.Random(self._seed)
            for _ in range(200):
                self._check(reader, rng)

    def _produce(self, index: IndexService, number: int) -> None:
        ledger, pause_s = self._ledgers[number], _BATCH * _PRODUCERS / self._rate
        step = np.arange(_BATCH)
        names = np.array([f"key-{key}" for key in range(KEYS)], dtype=object)
        due_s = time.monotonic()
        while not self._over.wait(max(0.0, due_s - time.monotonic())):
            due_s += pause_s
            second = int(time.time())
            first = ledger.begin(second)
            columns = {
                "topic": np.full(_BATCH, _TOPIC),
                "queue_id": np.full(_BATCH, number, np.int32),
                "key": names[(first + step) % KEYS],
                "offset": first + step,
                "size": np.full(_BATCH, 100, np.int32),
                "timestamp_ms": np.full(_BATCH, second * 1000),
            }
            while True:
                try:
                    index.put_batch(columns, source=f"producer-{number}", source_position=first + _BATCH)
                    break
                except BackPressure:
                    self.back_pressure += 1
                    time.sleep(0.05)
            ledger.acknowledged = ledger.begun

    def _read(self, index: IndexService, number: int) -> None:
        rng = random.Random(self._seed * 1_000 + number)
        while not self._over.wait(0.01):
            self._check(index, rng)

    def _check(self, index: IndexService | IndexReader, rng: random.Random) -> None:
        key, now = rng.randrange(KEYS), int(time.time())
        low = now - rng.choice([10, 60, 300, 3_600])
        before = [ledger.acknowledged for ledger in self._ledgers]
        answer = index.query(_TOPIC, f"key-{key}", low * 1000, None, max_count=1_000_000)
        wrong = self._wrong(answer, key, before, low)
        self.answers += 1
        if wrong:
            self.wrong.append(f"key-{key} from {low}: {wrong}")

    def _wrong(self, answer: QueryResult, key: int, before: list[int], low: int) -> str | None:
        """Return the fault of an answer, if any."""
        if answer.status != "complete":
            return f"status {answer.status}"
        places = [(item.timestamp_ms // 1000, item.offset, item.queue_id) for item in answer]
        if places != sorted(set(places), key=lambda place: (-place[0], -place[1], place[2])):
            return "out of order, or twice"
        horizon = max(low, -(-(answer.expired_before_ms or 0) // 1000))
        for number, (ledger, acknowledged) in enumerate(zip(self._ledgers, before, strict=True)):
            mine = {(second, offset) for second, offset, queue in places if queue == number}
            least = set(zip(*reversed(ledger.numbers(key, acknowledged, horizon, 1 << 40)), strict=True))
            most = set(zip(*reversed(ledger.numbers(key, ledger.begun, low, 1 << 40)), strict=True))
            if least - mine:
                return f"{len(least - mine)} entries of producer {number} are missing: {sorted(least - mine)[:3]}"
            if mine - most:
                return f"{len(mine - most)} entries of producer {number} were never put: {sorted(mine - most)[:3]}"
        return None

    def _merge(self) -> None:
        while not self._over.wait(60):
            self.merged += merge(
                str(self._config.storage),
                window="1m",
                options=MergeOptions(min_age_s=_MERGED_AFTER_S),
                s3=self._config.s3,
            ).sources

    def _sample(self, minute: int) -> Minute:
        entries = sum(ledger.acknowledged for ledger in self._ledgers) * _BATCH
        return Minute(minute, entries, self.answers, memory_bytes("self", "VmRSS") >> 20)


def main(suite: str, arguments: list[str]) -> None:
    """Run one index under load; exit code 1 means a wrong answer."""
    parser = options(suite, __doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=int, default=20_000, help="entries a second")
    parser.add_argument("--keep", type=float, default=600.0, help="seconds after which entries expire")
    parser.add_argument("--items", type=int, default=400_000, help="items a file")
    parser.add_argument("--storage", help="its URI (default: a folder, which is deleted at the end)")
    flags = parser.parse_args(arguments)
    with scratch(flags.root_dir) as folder:
        config = IndexConfig.load(
            root=folder / "root",
            storage=flags.storage or f"file://{folder / 'storage'}",
            slots=flags.items // 4,
            items=flags.items,
            seal_after_s=_SEAL_S,
            local_keep_s=120.0,
            retention=Retention(age_s=flags.keep, grace_s=_GRACE_S),
        )
        run, minutes = Soak(config, flags.rate, 1), list[Minute]()
        for minute in run.run(flags.minutes):
            minutes.append(minute)
            note(f"{minute}, {len(run.wrong)} wrong")
    figures: dict[str, Any] = {
        "minutes": [asdict(minute) for minute in minutes],
        "entries": minutes[-1].entries,
        "answers": run.answers,
        "wrong": run.wrong[:10],
        "wrong_answers": len(run.wrong),
        "back_pressure": run.back_pressure,
        "merged_files": run.merged,
    }
    columns = tuple(field.name for field in fields(Minute))
    title = f"{run.answers:,} answers, {len(run.wrong)} wrong; {run.merged:,} files merged"
    finish(flags, figures | {"tables": {title: [columns, *map(astuple, minutes)]}})
    if run.wrong:
        sys.exit("\n".join(run.wrong[:10]))
