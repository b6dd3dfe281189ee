"""`make bench SUITE=cold`: the same entries in object storage, here and in other stores, over one S3 server.

The server runs here, counts requests, and delays each. Each store is built once. Then keys are looked up in turn.

This process starts every process of a store. One builds the store, without delay. A warm one stays open for all rounds:
it knows the metadata, but its data is cold. Every lookup has a new key, and no store caches data. Other processes look
up one key and end. The server counts requests and bytes. Every answer is compared with the oracle, and a wrong one ends
the run.
"""

import contextlib
import http.client
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.cold_peers.data import HOT_KEYS, Data
from tests.benchmarks.report import TOP, Measured, compared, finish, note, numbers, options, scratch
from tests.support.child import Child
from tests.support.s3_server import CREDENTIALS, REGION
from tiered_index.base.version import __version__
from tiered_index.storage.prices import PriceTable

_BUCKET = "bench"
_MAX_COUNT = 64
_PRICES = PriceTable()
_DAY_S = 86_400
# as docs/cold-path.md advises for a process that looks up many keys
_OURS = {"MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class Column:
    """One store in one form: its build, its first lookup in a new process, and its warm lookups."""

    title: str
    module: str
    packages: tuple[str, ...] = ()
    base: str | None = None
    """The column whose objects it begins with."""
    build: dict[str, Any] | None = field(default_factory=dict)
    """Options of the build, or None to read the base's own objects."""
    warm: dict[str, Any] = field(default_factory=dict)
    follows: bool = False
    """Whether a reader in another process is measured while a writer runs."""


COLUMNS = {
    "files": Column("tiered_index, 240 files", "ours", warm={"warm": True}, follows=True),
    "month": Column("tiered_index, 30d table", "ours", base="files", build={"window": "30d"}, warm={"warm": True}),
    "slatedb": Column("SlateDB", "slatedb", ("slatedb",), follows=True),
    "lance": Column("Lance, prewarmed", "lance", ("pylance",), warm={"prewarm": True}),
    "parquet": Column("Parquet by pyarrow", "parquet", ("pyarrow",)),
    "duckdb": Column("DuckDB", "duckdb", ("duckdb", "duckdb-extension-httpfs"), base="parquet", build=None),
}


FIGURES = {
    "process ms": "a new process, one lookup, ms",
    "process CPU": "... CPU ms",
    "process requests": "... requests",
    "key ms": "a key of weeks, p50 ms",
    "key requests": "... requests",
    "key USD": "... USD per million",
    "absent ms": "absent key, p50 ms",
    "hot ms": "newest 64 of a hot key, p50 ms",
    "many ms": "1,000 keys, ms",
    "many MB": "... MB",
    "at once": "lookups per second, 32 at once",
    "memory": "peak memory, MiB",
    "stored": "stored, bytes per entry",
    "build": "build, CPU s",
    "fresh": "written to readable elsewhere, s",
    "fresh USD": "... cost of one entry and 100 lookups per second, USD per day",
}


@dataclass(frozen=True)
class Amounts:
    """The amounts that one round measures."""

    rounds: int = 3
    processes: int = 2
    lookups: int = 24
    hot: int = 8
    many: int = 1_000
    at_once: int = 320
    fresh: int = 5
    files: int = 240
    delay_ms: float = 30.0


class DelayedServer(Child):
    """The server's process, and calls that control it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("-m", "tests.benchmarks.cold_peers.server", str(folder), env=_environment("", False))
        self._port = int(self.line())
        self.endpoint_url = f"http://127.0.0.1:{self._port}"

    def _control(self, what: str) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", f"/-/{what}")
            answer: dict[str, float] = json.loads(connection.getresponse().read())
            return answer

    def delay(self, milliseconds: float) -> None:
        """Delay every answer from now on."""
        self._control(f"delay?ms={milliseconds}")

    def counts(self) -> "_Cost":
        """Return the server's counts since the last call."""
        counts = self._control("counts")
        return _Cost(*(int(counts.get(kind, 0)) for kind in ("get", "list", "put", "bytes")))

    def copy(self, source: str, target: str) -> None:
        """Give objects below one prefix a second name below another prefix."""
        self._control(f"copy?source={_BUCKET}/{source}&target={_BUCKET}/{target}")

    def stored_bytes(self, prefix: str) -> float:
        """Return the size of an object, or of all objects below a prefix."""
        return self._control(f"size?prefix={_BUCKET}/{prefix}")["bytes"]


@dataclass(frozen=True)
class _Cost:
    gets: int
    lists: int
    puts: int
    bytes: int

    @property
    def requests(self) -> int:
        return self.gets + self.lists + self.puts

    @property
    def usd(self) -> float:
        return _PRICES.cost_usd({"get_range": self.gets, "list": self.lists, "put": self.puts}, self.bytes)


class _Worker(Child):
    """A process of a store. Requests and answers are lines of JSON."""

    def __init__(self, endpoint_url: str, job: dict[str, Any]) -> None:
        self._what = f"{job['module']} in phase {job['phase']}"
        super().__init__(*_program(job), env=_environment(endpoint_url, job["module"] != "ours"))

    def answer(self) -> dict[str, Any]:
        """Return the next document that the process writes."""
        if not (line := self.line()):
            raise RuntimeError(f"{self._what} failed: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return the answer."""
        self.tell(json.dumps(request))
        return self.answer()


def _children_s() -> float:
    """Return the CPU time of all threads of this process's ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _program(job: dict[str, Any]) -> list[str]:
    return ["-m", "tests.benchmarks.cold_peers.worker", json.dumps(job)]


def _environment(endpoint_url: str, peer: bool) -> dict[str, str]:
    left_out = ("AWS_", "TIERED_INDEX_", "PYTHONDONTWRITEBYTECODE")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(left_out)},
        **CREDENTIALS,
        # the command sets it, too: OpenBLAS's threads spin for a while when NumPy is loaded
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(TOP),
        # SlateDB's object store reads these names; this index would ask boto3 for the credentials
        **({"AWS_REGION": REGION, "AWS_ENDPOINT": endpoint_url, "AWS_ALLOW_HTTP": "true"} if peer else _OURS),
    }


def versions(columns: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return each column's versions, by column, and the first package that other columns lack, by title."""
    installed, lacking = {}, {}
    for name in columns:
        try:
            packages = [f"{package} {version(package)}" for package in COLUMNS[name].packages]
            installed[name] = ", ".join(packages) or __version__
        except PackageNotFoundError as error:
            lacking[COLUMNS[name].title] = str(error.name)
    return installed, lacking


def run(columns: Sequence[str], entries: int, amounts: Amounts, folder: Path) -> dict[str, Measured]:
    """Measure columns in a folder, and return their figures. Raises `RuntimeError` for a wrong answer."""
    data = Data(entries, amounts.files)
    figures: dict[str, Measured] = {name: {} for name in columns}
    source = folder / "source"
    for place in (source, folder / "objects"):
        place.mkdir()
    for number, entries_of_file in enumerate(data.files()):
        with pa.ipc.new_file(source / f"{number:04}.arrow", entries_of_file.schema) as file:
            file.write_batch(entries_of_file)
    with DelayedServer(folder / "objects") as server, contextlib.ExitStack() as opened:
        run_of = _Run(data, amounts, server, source)
        for name in columns:
            note(f"building {COLUMNS[name].title}")
            figures[name] |= run_of.built(name)
            if "build" in figures[name] and (base := COLUMNS[name].base) is not None:
                figures[name]["build"][0] += figures[base]["build"][0]  # a merge needs the files
        server.delay(amounts.delay_ms)
        workers = {name: opened.enter_context(run_of.opened(name)) for name in columns}
        for number in range(amounts.rounds):
            # each round begins with a different column
            for name in [*columns[number % len(columns) :], *columns[: number % len(columns)]]:
                note(f"round {number + 1} of {amounts.rounds}: {COLUMNS[name].title}")
                for figure, value in run_of.measured(name, workers[name], number).items():
                    figures[name].setdefault(figure, []).append(value)
        for name in columns:
            figures[name]["memory"] = [workers[name].ask(task="memory")["mib"]]
            if COLUMNS[name].follows:
                figures[name] |= run_of.followed(name)
    return figures


@dataclass
class _Run:
    data: Data
    amounts: Amounts
    server: DelayedServer
    source: Path

    def _job(self, name: str, phase: str, prefix: str | None = None, **more: Any) -> dict[str, Any]:
        column = COLUMNS[name]
        prefix = prefix or (column.base if column.build is None else name)
        place = {"endpoint_url": self.server.endpoint_url, "bucket": _BUCKET, "prefix": prefix}
        return {"module": column.module, "phase": phase, "place": place, **more}

    def built(self, name: str) -> dict[str, list[float]]:
        """Build a column; return its bytes per entry and the CPU seconds."""
        column = COLUMNS[name]
        if column.build is None:
            return {}
        if column.base is not None:
            self.server.copy(column.base, name)
        job = self._job(name, "build", source=str(self.source), options=column.build)
        with _Worker(self.server.endpoint_url, job) as worker:
            said = worker.answer()
        # None: the build leaves no garbage
        prefixes = [name] if said["prefixes"] is None else [f"{name}/{each}" for each in said["prefixes"]]
        stored = sum(map(self.server.stored_bytes, prefixes))
        return {"build": [said["cpu_s"]], "stored": [stored / self.data.entries]}

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[_Worker]:
        """Yield a worker that has looked up enough keys to know all metadata."""
        job = self._job(name, "serve", options=COLUMNS[name].warm)
        with _Worker(self.server.endpoint_url, job) as worker:
            worker.answer()
            numbers = self.data.drawn(2 * self.amounts.lookups, 0)
            for keys in (self.data.texts(numbers), self.data.absent(numbers), [self.data.hot(0)]):
                worker.ask(task="each", keys=keys, count=_MAX_COUNT, hot=False)
            worker.ask(task="at_once", keys=self.data.texts(numbers))
            yield worker

    def measured(self, name: str, worker: _Worker, number: int) -> dict[str, float]:
        """Return a column's figures of one round."""
        amounts, data = self.amounts, self.data
        figures = self._processes(name, number)
        drawn = data.drawn(amounts.lookups, number + 2)
        figures |= self._each(name, worker, "key", data.texts(drawn), [data.expected(n) for n in drawn.tolist()])
        figures |= self._each(name, worker, "absent", data.absent(drawn), [[]] * len(drawn))
        hot = [(number * amounts.hot + at) % HOT_KEYS for at in range(amounts.hot)]
        figures |= self._each(
            name, worker, "hot", [data.hot(n) for n in hot], [data.expected_hot(n, _MAX_COUNT) for n in hot]
        )
        for task, count in (("many", amounts.many), ("at_once", amounts.at_once)):
            drawn = data.drawn(min(count, data.keys), number + 2)
            self.server.counts()
            said = worker.ask(task=task, keys=data.texts(drawn))
            cost = self.server.counts()
            self._check(name, said["answers"], [data.expected(n) for n in drawn.tolist()])
            if task == "many":
                figures |= {"many ms": said["wall_ms"], "many MB": cost.bytes / 1e6}
            else:
                figures["at once"] = len(drawn) / said["wall_ms"] * 1e3
        return figures

    def _each(
        self, name: str, worker: _Worker, kind: str, keys: list[str], expected: list[list[list[int]]]
    ) -> dict[str, float]:
        self.server.counts()
        said = worker.ask(task="each", keys=keys, count=_MAX_COUNT, hot=kind == "hot")
        cost = self.server.counts()
        self._check(name, said["answers"], expected)
        return {
            f"{kind} ms": statistics.median(said["walls_ms"]),
            f"{kind} requests": cost.requests / len(keys),
            f"{kind} USD": cost.usd / len(keys) * 1e6,
        }

    def _processes(self, name: str, number: int) -> dict[str, float]:
        walls, cpus, requests = [], [], []
        drawn = self.data.drawn(self.amounts.processes, number + 1)
        for key_number, key in zip(drawn.tolist(), self.data.texts(drawn), strict=True):
            job = self._job(name, "once", key=key, count=_MAX_COUNT)
            self.server.counts()
            started_s, before_s = time.perf_counter(), _children_s()
            said = subprocess.run(
                [sys.executable, *_program(job)],
                env=_environment(self.server.endpoint_url, bool(COLUMNS[name].packages)),
                stdout=-1,
                check=True,
            )
            walls.append((time.perf_counter() - started_s) * 1e3)
            cpus.append((_children_s() - before_s) * 1e3)
            requests.append(self.server.counts().requests)
            self._check(name, json.loads(said.stdout)["answers"], [self.data.expected(key_number)])
        measured = {"process ms": walls, "process CPU": cpus, "process requests": requests}
        return {name: statistics.median(values) for name, values in measured.items()}

    def followed(self, name: str) -> dict[str, list[float]]:
        """Put entries in one process and read them in another; return the seconds between, and the price of a day."""
        waits = []
        with contextlib.ExitStack() as stack:
            prefix = f"{name}-followed"
            writer = stack.enter_context(_Worker(self.server.endpoint_url, self._job(name, "write", prefix)))
            writer.answer()
            writer.ask(key="first")
            time.sleep(2)
            job = self._job(name, "serve", prefix, options={"follow": True})
            reader = stack.enter_context(_Worker(self.server.endpoint_url, job))
            reader.answer()
            self.server.counts()
            began_s = time.monotonic()
            for number in range(self.amounts.fresh):
                reader.tell(json.dumps({"task": "seen", "key": f"key {number}", "timeout_s": 60}))
                put_s = writer.ask(key=f"key {number}")["at_s"]
                waits.append(reader.answer()["at_s"] - put_s)
                # one entry per second, and a lookup every 10 ms
                reader.ask(task="seen", key="no key", timeout_s=max(0, 1 - waits[-1]), absent=True)
            usd = self.server.counts().usd / (time.monotonic() - began_s) * _DAY_S
        return {"fresh": waits, "fresh USD": [usd]}

    @staticmethod
    def _check(name: str, answers: list[Any], expected: list[Any]) -> None:
        for answer, wanted in zip(answers, expected, strict=True):
            if answer != wanted:
                raise RuntimeError(f"{COLUMNS[name].title} answered {answer} in place of {wanted}")


def main(suite: str, arguments: list[str]) -> None:
    """Measure, and print a table for each size."""
    parser = options(suite, __doc__, rounds=3)
    parser.add_argument("--entries", type=numbers, default=[5_000_000, 20_000_000], help="sizes, by commas")
    parser.add_argument("--only", default=",".join(COLUMNS), help="the columns, by commas")
    parser.add_argument("--delay", type=float, default=30.0, help="delay of each request in milliseconds")
    flags = parser.parse_args(arguments)
    # a column may start from another column's objects
    wanted = {part for name in flags.only.split(",") for part in (COLUMNS[name].base, name)}
    installed, lacking = versions([name for name in COLUMNS if name in wanted])
    for title, packages in lacking.items():
        note(f"{title} is left out: {packages} is not installed")
    chosen = [name for name in installed if COLUMNS[name].base is None or COLUMNS[name].base in installed]
    amounts = Amounts(rounds=flags.rounds, delay_ms=flags.delay)
    document: dict[str, Any] = {
        "amounts": asdict(amounts),
        "versions": installed,
        "left out": lacking,
        "sizes": {},
        "tables": {},
    }
    for size in flags.entries:
        with scratch(flags.root_dir) as folder:
            measured = run(chosen, size, amounts, folder)
        document["sizes"][str(size)] = measured
        titled = {COLUMNS[name].title: figures for name, figures in measured.items()}
        document["tables"][f"{size:,} entries, {flags.rounds} rounds"] = compared(titled, FIGURES, {"at once"})
        finish(flags, document)
