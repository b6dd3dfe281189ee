"""The steps of the benchmark, each a program of its own, and what they took.

Every step's figures are written down when it ends. An interrupted run continues with its first unfinished step.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.billion import oracle
from tests.benchmarks.billion.data import BEGIN_S, CHANGED, DAY_S, FEW_KEYS, KEYS_FILE, SOURCE
from tests.benchmarks.billion.watch import measured
from tests.support.later import Later
from tiered_index.base.clock import SystemClock
from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

_CLI = (sys.executable, "-m", "tiered_index")
_SETTINGS = ("--set", "max_late_s=1e10")
BY_SPARK, ALONE, COPY, ROOT, ANSWERS, BUCKETS = "by-spark", "alone", "copy", "root", "answers", "buckets"
# an audit has the source, the index, and digests of both sides
SPACE_BYTES_PER_ENTRY = 70


@dataclass
class Run:
    """One size. `folder` has everything; `steps` has the figures of ended steps, by name, and is kept in `folder`."""

    folder: Path
    entries: int
    master: str
    tell: Callable[[str], None]
    steps: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = self.folder / "steps.json"
        # without the messages, later steps would measure nothing
        continues = self._kept.exists() and (self.folder / SOURCE).is_dir()
        self.steps = json.loads(self._kept.read_text()) if continues else {}

    def run(self, *, with_sparks_ways: bool) -> dict[str, dict[str, Any]]:
        """Run all steps that have not ended; return the figures of all."""
        for name, outputs, work in self._all(with_sparks_ways):
            if name in self.steps:
                continue
            self.tell(name)
            self._delete(*outputs)
            self.steps[name] = work()
            self._kept.write_text(json.dumps(self.steps, indent=1))
        return self.steps

    def _all(self, with_sparks_ways: bool) -> Iterator[tuple[str, Sequence[str], Callable[[], dict[str, Any]]]]:
        """Yield name, paths that the step makes, and the step."""
        source = (SOURCE, CHANGED, KEYS_FILE, FEW_KEYS)
        yield "messages", source, partial(self._step, "data", "write", self.folder, self.entries, self.master)
        yield "messages of the keys (DuckDB)", (oracle.FOUND,), partial(self._step, "oracle", "find", self.folder)
        yield "build", (BY_SPARK,), partial(self._build, "spark", "build", "--source", SOURCE, "--window", "1d")
        yield "audit, equal", (), partial(self._audit, SOURCE)
        yield "audit, 0.1 % different", (), partial(self._audit, CHANGED)
        yield "single keys, daily tables", (), partial(self._singles, BY_SPARK)
        yield "merge to 30 days", (), partial(self._build, "merge", "--window", "30d")
        yield "delete the merged tables", (), partial(self._sweep, BY_SPARK)
        yield "million keys", (ANSWERS,), partial(self._look_up, BY_SPARK)
        yield "thousand keys", (ANSWERS,), partial(self._look_up, BY_SPARK, FEW_KEYS)
        yield "single keys", (), partial(self._singles, BY_SPARK)
        yield "verify --deep", (), partial(self._command, BY_SPARK, "verify", "--deep")
        yield "copy", (COPY,), partial(self._command, BY_SPARK, "copy", "--to", f"file://{self.folder / COPY}")
        yield "delete the copy", (), partial(self._delete, COPY)
        yield "erase a key", (), self._erase
        yield "expire a month", (), self._expire
        yield "delete the index", (), partial(self._delete, BY_SPARK)
        yield "put_batch and life cycle, one process", (ALONE, ROOT), self._put
        yield "merge, one process", (), partial(self._command, ALONE, "merge", "--window", "30d")
        yield "delete the tables that one process merged", (), partial(self._sweep, ALONE)
        yield "million keys, one process's index", (ANSWERS,), partial(self._look_up, ALONE)
        yield "delete the index of one process", (), partial(self._delete, ALONE, ROOT)
        sort = partial(self._step, "oracle", "sort", self.folder, self.entries)
        yield "sorted Parquet (DuckDB)", (oracle.SORTED,), sort
        yield "keys in it (DuckDB)", (), partial(self._step, "oracle", "look_up_sorted", self.folder)
        yield "delete the sorted Parquet", (), partial(self._delete, oracle.SORTED)
        if with_sparks_ways:
            yield "start of Spark", (), partial(self._spark, "start")
            yield "build of a DataFrame", (), partial(self._spark, "frame")
            yield "sorted Parquet (Spark)", (), partial(self._spark, "sort")
            yield "sorted buckets (Spark)", (BUCKETS,), partial(self._spark, "buckets")
            yield "million keys joined (Spark)", (), partial(self._spark, "join")
            yield "thousand keys joined (Spark)", (), partial(self._spark, "join_few")
            yield "delete the buckets", (), partial(self._delete, BUCKETS)

    def _step(self, module: str, function: str, *arguments: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.benchmarks.billion.step", module, function, *map(str, arguments)]
        figures, document = measured(command, self.folder)
        return {**figures, **(document or {})}

    def _spark(self, task: str) -> dict[str, Any]:
        figures = self._step("ways", "on_spark", task, self.folder, self.master)
        if "joined" in figures:
            wanted = oracle.count(self.folder, FEW_KEYS if task == "join_few" else KEYS_FILE)
            self._require(figures["joined"], wanted, task)
        return figures

    def _run(self, place: str, *arguments: object, codes: Sequence[int] = (0,)) -> tuple[dict[str, Any], Any]:
        where = ("--storage", f"file://{self.folder / place}", "--json", "--quiet", *_SETTINGS)
        return measured([*_CLI, *map(str, arguments), *where], self.folder, codes)

    def _command(self, place: str, *arguments: object) -> dict[str, Any]:
        """Run a command of the index in `place`."""
        figures, document = self._run(place, *arguments)
        return {**figures, **_requests(document)}

    def _build(self, *arguments: str) -> dict[str, Any]:
        figures, document = self._run(BY_SPARK, *arguments, "--master", self.master)
        entries = document["entries"] if "entries" in document else sum(tier["entries"] for tier in document["tiers"])
        self._require(entries, self.entries, " ".join(arguments[:2]))
        return {**figures, **_requests(document), "stored_bytes": self._stored(BY_SPARK)}

    def _audit(self, source: str) -> dict[str, Any]:
        codes = (0,) if source == SOURCE else (1,)
        figures, document = self._run(
            BY_SPARK, "spark", "audit", "--source", source, "--list", 10, "--master", self.master, codes=codes
        )
        counts = document["differences"]["counts"]
        if (not any(counts.values())) is not (source == SOURCE) or document["differences"]["unproven"]:
            raise RuntimeError(f"the audit of {source} counts {document['differences']}")
        return {**figures, **_requests(document), "differences": counts}

    def _look_up(self, place: str, keys: str = KEYS_FILE) -> dict[str, Any]:
        out = self.folder / ANSWERS
        arguments = ("--keys", keys, "--out", out, "--max", oracle.MAX_COUNT, "--master", self.master)
        figures, document = self._run(place, "spark", "lookup", *arguments)
        checked = oracle.check(self.folder, out, keys)
        shutil.rmtree(out)
        return {**figures, **_requests(document), **checked}

    def _singles(self, place: str) -> dict[str, Any]:
        return self._step("singles", "look_up", self.folder, f"file://{self.folder / place}", self.entries)

    def _erase(self) -> dict[str, Any]:
        topic, key, count = oracle.hottest(self.folder)
        figures, document = self._run(BY_SPARK, "erase", "--topic", topic, "--key", key, "--now", "--yes")
        left = self._run(BY_SPARK, "query", topic, key)[1]["items"]
        self._require(len(left), 0, "entries of the erased key")
        self._require(document["entries_removed"], count, "erased entries")
        return {**figures, **_requests(document), "erased_entries": count, "status": document["status"]}

    def _expire(self) -> dict[str, Any]:
        # the begin of a window, so that whole tables expire
        second = (BEGIN_S // (30 * DAY_S) + 1) * 30 * DAY_S
        retention = f"retention.age_s={int(time.time()) - second}s"
        figures, document = self._run(BY_SPARK, "expire", "--set", retention, "--yes")
        topic, key, _ = oracle.hottest(self.folder)
        self._require(document["entries"], oracle.older(self.folder, second, topic, key), "expired entries")
        return {**figures, **_requests(document)}

    def _put(self) -> dict[str, Any]:
        figures = self._step("ways", "put", self.folder, self.folder / ROOT, f"file://{self.folder / ALONE}")
        self._require(figures["entries"], self.entries, "one process")
        return {**figures, "stored_bytes": self._stored(ALONE)}

    def _stored(self, place: str) -> int:
        """Return the bytes of all objects of an index."""
        storage = open_storage(f"file://{self.folder / place}")
        return sum(info.size_bytes for info in storage.list(DATA_PREFIX))

    def _sweep(self, place: str) -> dict[str, Any]:
        """Delete the objects that a merge has removed from the log, as if two days had passed."""
        with open_storage(f"file://{self.folder / place}") as storage:
            log = StorageLog(storage, SystemClock())
            log.open()
            delete_orphans(storage, find_orphans(Later(storage, 2 * DAY_S), log))
        return {"stored_bytes": self._stored(place)}

    def _delete(self, *places: str) -> dict[str, Any]:
        for path in (self.folder / place for place in places):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return {}

    def _require(self, found: int, expected: int, what: str) -> None:
        if found != expected:
            raise RuntimeError(f"{what}: {found:,} of {expected:,}")


def _requests(document: Any) -> dict[str, Any]:
    """Return the requests of a command's document, where it counts them."""
    counts = (document.get("metrics") or document).get("requests")
    return {} if counts is None else {"requests": _sum(counts)}


def _sum(counts: Any) -> int:
    """Add up the numbers of a nested object."""
    return sum(map(_sum, counts.values())) if isinstance(counts, dict) else counts
