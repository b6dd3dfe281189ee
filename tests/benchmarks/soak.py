"""`python -m tests.benchmarks soak`: one index under load for a long time; memory by minute.

Producers put at a fixed rate with the present time. The background life cycle compacts, uploads and expires, and a
thread merges. Readers compare each answer with the model. Number n of a producer has key n mod KEYS, so a key's answer
follows from the first number and the second of each batch. An answer has every entry that was acknowledged before the
lookup began. It has no entry whose put began after the lookup ended. Threads: two producers, two readers, one that
merges, and the caller's, which samples.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from tests.benchmarks.machine.figures import facts
from tests.benchmarks.machine.setting import scratch
from tests.benchmarks.memory import disk_bytes, memory_bytes
from tests.benchmarks.running import Out, RootDir, base_folder, write_document
from tests.stress.crew import Crew
from tiered_index import IndexConfig, IndexReader, IndexService, MergeOptions, QueryResult, Retention, merge
from tiered_index.cli.output import human_bytes
from tiered_index.cli.session import Session, command
from tiered_index.errors import BackPressure, InvalidArgument

KEYS = 5_000
_TOPIC = "orders"
_BATCH = 1_000
_PRODUCERS = 2
_READERS = 2
_GRACE_S = 3_600.0
# a seal at most after this many seconds, so that merges and expiry have files
_SEAL_S = 60.0
_MERGED_AFTER_S = 30
_SPARKS = "▁▂▃▄▅▆▇█"
_RATIO_FROM_MINUTE = 10

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
    rss_bytes: int
    descriptors: int
    threads: int
    root_bytes: int
    storage_bytes: int


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
        found = [(item.timestamp_ms // 1000, item.offset, item.queue_id) for item in answer]
        if found != sorted(set(found), key=lambda place: (-place[0], -place[1], place[2])):
            return "out of order, or twice"
        horizon = max(low, -(-(answer.expired_before_ms or 0) // 1000))
        for number, (ledger, acknowledged) in enumerate(zip(self._ledgers, before, strict=True)):
            mine = {(second, offset) for second, offset, queue in found if queue == number}
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
        assert self._config.root is not None
        local = str(self._config.storage).removeprefix("file://")
        return Minute(
            minute,
            sum(ledger.acknowledged for ledger in self._ledgers) * _BATCH,
            self.answers,
            memory_bytes("self", "VmRSS"),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            disk_bytes(self._config.root),
            disk_bytes(Path(local)) if local.startswith("/") else 0,
        )


def sparkline(values: list[float]) -> str:
    """Return one bar per value, from 0 to the greatest."""
    most = max([*values, 0.0]) or 1.0
    return "".join(_SPARKS[min(7, int(value / most * 8))] for value in values)


@command
def soak(
    session: Session,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long.")] = 30.0,
    rate: Annotated[int, typer.Option(min=1_000, help="Entries a second.")] = 20_000,
    keep: Annotated[float, typer.Option(min=1, help="Seconds after which entries expire.")] = 600.0,
    items: Annotated[int, typer.Option(min=10_000, help="Items a file.")] = 400_000,
    seed: Annotated[int, typer.Option(help="Seed of the lookups.")] = 1,
    root_dir: RootDir = None,
    out: Out = None,
) -> int:
    """Run one index under load: two producers, background life cycle, expiry, a merge per minute, two readers.

    Each answer is compared with a model. Prints memory, descriptors, threads and disk by minute. Without --storage the
    objects are in a folder, which is deleted at the end. Exit code 1 means a wrong answer.

    [bold]Examples[/bold]

      python -m tests.benchmarks soak --minutes 30 --out soak.json

      python -m tests.benchmarks soak --minutes 5 --storage "s3://bucket/soak?endpoint_url=http://127.0.0.1:7480"
    """
    if session.root is not None:
        raise InvalidArgument("soak makes its own root in --root-dir: leave out --root")
    with scratch(base_folder(root_dir)) as folder:
        config = IndexConfig.load(
            session.config_file,
            root=folder / "root",
            storage=session.storage or f"file://{folder / 'storage'}",
            slots=items // 4,
            items=items,
            seal_after_s=_SEAL_S,
            local_keep_s=120.0,
            retention=Retention(age_s=keep, grace_s=_GRACE_S),
        )
        run, rows = Soak(config, rate, seed), []
        machine = facts(folder)
        for row in run.run(minutes):
            rows.append(row)
            session.out.note(
                f"minute {row.minute}: {row.entries:,} entries, {row.answers:,} answers, {len(run.wrong)} wrong, "
                f"{human_bytes(row.rss_bytes)} resident"
            )
    tenth = rows[min(_RATIO_FROM_MINUTE, len(rows)) - 1]
    document: dict[str, Any] = {
        "status": "wrong" if run.wrong else "ok",
        "machine": machine,
        "minutes": [asdict(row) for row in rows],
        "entries": rows[-1].entries,
        "answers": run.answers,
        "wrong": run.wrong[:10],
        "wrong_answers": len(run.wrong),
        "back_pressure": run.back_pressure,
        "merged_files": run.merged,
        "memory_ratio": round(max(row.rss_bytes for row in rows[rows.index(tenth) :]) / tenth.rss_bytes, 2),
    }
    write_document(out, document)
    session.out.answer(document)
    columns = ("minute", "entries", "resident", "fds", "threads", "root", "storage")
    shown = rows[:: max(1, len(rows) // 10)]
    cells = [
        (
            row.minute,
            f"{row.entries:,}",
            *(human_bytes(row.rss_bytes), row.descriptors, row.threads),
            *(human_bytes(row.root_bytes), human_bytes(row.storage_bytes)),
        )
        for row in shown
    ]
    session.out.table(columns, cells, right=" ".join(columns))
    session.out.fields(
        {
            "resident": sparkline([float(row.rss_bytes) for row in rows]),
            "descriptors": sparkline([float(row.descriptors) for row in rows]),
            "root": sparkline([float(row.root_bytes) for row in rows]),
            "memory": f"{document['memory_ratio']} times minute {tenth.minute} at most",
            "answers": f"{run.answers:,}, {len(run.wrong)} wrong",
            "merged": f"{run.merged:,} files",
        }
    )
    for text in run.wrong[:10]:
        session.out.line(f"WRONG {text}")
    return 1 if run.wrong else 0
