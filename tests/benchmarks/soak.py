"""`make bench SUITE=soak`: one index under load for a long time; memory by minute.

Producers put at a fixed rate with the present time. The background life cycle compacts, uploads and expires, and a
thread merges. Readers compare each answer with the model. Number n of a producer has key n mod KEYS, so a key's answer
follows from the first number and the second of each batch. An answer has every entry that was acknowledged before the
lookup began. It has no entry whose put began after the lookup ended. Threads: two producers, two readers, one that
merges, and the caller's, which samples.
"""

import random
import sys
import time
from collections.abc import Iterator

import numpy as np

from tests.benchmarks.memory import memory_bytes
from tests.benchmarks.report import finish, note, options, scratch
from tests.support.hanging import Crew
from tests.support.model import ModelEntry, ReferenceModel
from tiered_index import IndexConfig, IndexReader, IndexService, Lookup, MergeOptions, Retention, merge
from tiered_index.errors import BackPressure

KEYS = 5_000
_TOPIC = "orders"
BATCH, _SIZE = 1_000, 100
_PRODUCERS = 2
_READERS = 2
_KEEP_S, _GRACE_S = 600.0, 3_600.0
# a seal at most after this many seconds, so that merges and expiry have files
_SEAL_S = 60.0
_MERGED_AFTER_S = 30
COLUMNS = ("minute", "entries", "answers", "resident_mib")


class Ledger:
    """The batches of one producer: each one's first number and second, and how many are begun and acknowledged.

    One thread puts, and any thread reads. A batch is recorded before its put begins.
    """

    def __init__(self, queue_id: int) -> None:
        self.queue_id = queue_id
        self._seconds = np.zeros(1 << 20, np.int64)
        self.begun = 0
        self.acknowledged = 0

    def begin(self, second: int) -> int:
        """Record a batch of the second, and return its first number."""
        self._seconds[self.begun] = second
        self.begun += 1
        return (self.begun - 1) * BATCH

    def entries(self, key: int, batches: int, low: int) -> list[ModelEntry]:
        """Return the entries of the key in the first `batches` from second `low` on."""
        numbers = np.arange(key, batches * BATCH, KEYS)
        seconds = self._seconds[numbers // BATCH]
        rows = zip(numbers[seconds >= low].tolist(), seconds[seconds >= low].tolist(), strict=True)
        return [ModelEntry(_TOPIC, f"key-{key}", self.queue_id, number, _SIZE, second) for number, second in rows]


class Soak:
    """One run. `wrong` has the missing and the additional entries of answers."""

    def __init__(self, config: IndexConfig, rate: int, seed: int) -> None:
        self._config, self._rate, self._seed = config, rate, seed
        self._ledgers = [Ledger(number) for number in range(_PRODUCERS)]
        self._crew = Crew()
        self._over = self._crew.stop
        self.answers = 0
        self.merged = 0
        self.wrong: list[str] = []

    def run(self, minutes: float) -> Iterator[tuple[int, ...]]:
        """Put, look up and merge for this many minutes; yield the row of each. Raises the error of a thread."""
        with IndexService.open(self._config) as index:
            for number in range(_PRODUCERS):
                self._crew.begin(self._produce, index, number)
            for number in range(_READERS):
                self._crew.begin(self._read, index, number)
            self._crew.begin(self._merge)
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
        ledger, pause_s = self._ledgers[number], BATCH * _PRODUCERS / self._rate
        step = np.arange(BATCH)
        names = np.array([f"key-{key}" for key in range(KEYS)], dtype=object)
        due_s = time.monotonic()
        while not self._over.wait(max(0.0, due_s - time.monotonic())):
            due_s += pause_s
            second = int(time.time())
            first = ledger.begin(second)
            columns = {
                "topic": np.full(BATCH, _TOPIC),
                "queue_id": np.full(BATCH, number, np.int32),
                "key": names[(first + step) % KEYS],
                "offset": first + step,
                "size": np.full(BATCH, _SIZE, np.int32),
                "timestamp_ms": np.full(BATCH, second * 1000),
            }
            while True:
                try:
                    index.put_batch(columns, source=f"producer-{number}", source_position=first + BATCH)
                    break
                except BackPressure:
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
        question = Lookup(_TOPIC, f"key-{key}", low * 1000, max_count=1_000_000)
        answer = index.query(_TOPIC, question.key, question.begin_ms, max_count=question.max_count)
        horizon, model = max(low, -(-(answer.expired_before_ms or 0) // 1000)), ReferenceModel()
        for ledger, acknowledged in zip(self._ledgers, before, strict=True):
            model.entries += ledger.entries(key, acknowledged, horizon)
        begun = [entry for ledger in self._ledgers for entry in ledger.entries(key, ledger.begun, low)]
        self.answers += 1
        if problem := model.problem_with(answer, question, begun):
            self.wrong.append(problem[1])

    def _merge(self) -> None:
        while not self._over.wait(60):
            self.merged += merge(
                str(self._config.storage),
                window="1m",
                options=MergeOptions(min_age_s=_MERGED_AFTER_S),
                s3=self._config.s3,
            ).sources

    def _sample(self, minute: int) -> tuple[int, ...]:
        """Return the values of `COLUMNS`."""
        entries = sum(ledger.acknowledged for ledger in self._ledgers) * BATCH
        return minute, entries, self.answers, memory_bytes("self", "VmRSS") >> 20


def main(suite: str, arguments: list[str]) -> None:
    """Run one index under load; exit code 1 means a wrong answer."""
    parser = options(suite, __doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=int, default=20_000, help="entries a second")
    parser.add_argument("--items", type=int, default=400_000, help="items a file")
    flags = parser.parse_args(arguments)
    with scratch(flags.root_dir) as folder:
        config = IndexConfig.load(
            root=folder / "root",
            storage=f"file://{folder / 'storage'}",
            slots=flags.items // 4,
            items=flags.items,
            seal_after_s=_SEAL_S,
            local_keep_s=120.0,
            retention=Retention(age_s=_KEEP_S, grace_s=_GRACE_S),
        )
        run, minutes = Soak(config, flags.rate, 1), list[tuple[int, ...]]()
        for minute in run.run(flags.minutes):
            minutes.append(minute)
            note(f"{dict(zip(COLUMNS, minute, strict=True))}, {len(run.wrong)} wrong")
    counts = {"answers": run.answers, "wrong_answers": len(run.wrong), "merged_files": run.merged}
    title = f"{run.answers:,} answers, {len(run.wrong)} wrong; {run.merged:,} files merged"
    finish(flags, counts | {"wrong": run.wrong[:10], "tables": {title: [COLUMNS, *minutes]}})
    if run.wrong:
        sys.exit("\n".join(run.wrong[:10]))
