"""One peer in one phase of its life, in a process of its own; prints its figures as one line of JSON.

- `write`: put entries in durable batches, look keys up, then wait for the kill.
- `recover`: open the store that the kill left, and settle it.
- `read`: open the settled store, whose files are not in the page cache, and look keys up.
- `pause`: put small batches into a store with small buffers while it compacts.

Wrong answers raise. CPU time, bytes and memory are those of this process, without the making of entries.
"""

import gc
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.memory import memory_bytes, proc_lines
from tests.benchmarks.peers.data import ROW, Data
from tests.benchmarks.peers.duckdb import DuckDb
from tests.benchmarks.peers.lmdb import Lmdb
from tests.benchmarks.peers.ours import Ours
from tests.benchmarks.peers.protocol import Peer
from tests.benchmarks.peers.rocketmq import RocketMq
from tests.benchmarks.peers.rocksdb import RocksDb
from tests.benchmarks.peers.sqlite import Sqlite

PEERS: dict[str, type[Peer]] = {
    "tiered_index": Ours,
    "rocketmq": RocketMq,
    "rocksdb": RocksDb,
    "lmdb": Lmdb,
    "sqlite": Sqlite,
    "duckdb": DuckDb,
}
_BUDGET_S = 5.0
"""The greatest duration of the lookups of one kind."""
_FEWEST = 50
_BATCHES = 5
_PAUSE_ROWS = 500
_MOST_PAUSE_ENTRIES = 500_000


@dataclass(frozen=True)
class Job:
    """The job of a worker. `folder` is the peer's, `seed` the round's."""

    peer: str
    phase: str
    folder: str
    entries: int
    per_key: int
    commit_entries: int
    lookups: int
    many: int
    seed: int


class Usage:
    """The use of this process since `mark`."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
        self._resident = memory_bytes("self", "VmRSS")
        self.mark()

    def mark(self) -> None:
        """Begin to count here."""
        self._cpu_s, self._written = time.process_time(), _written_bytes()

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu_s

    @property
    def written_bytes(self) -> int:
        """Bytes that were written to the device, or will be."""
        return _written_bytes() - self._written

    @property
    def peak_mib(self) -> float:
        """The greatest resident memory above that of the process before it opened the peer."""
        return (memory_bytes("self", "VmHWM") - self._resident) / (1 << 20)


def _written_bytes() -> int:
    return int(proc_lines("self/io")["write_bytes"])


def check(peer: Peer, data: Data, number: int, offsets: list[int]) -> None:
    """Raise an error if these are not the offsets of the key with this number. An absent key's number is negative."""
    expected = data.expected(number) if number >= 0 else []
    sorted_offsets = sorted(offsets)
    if sorted_offsets != expected and (peer.tells_keys_apart or not set(expected) <= set(sorted_offsets)):
        raise RuntimeError(f"{peer.name}: key {number} of {data}: offsets {sorted_offsets}, not {expected}")


def check_many(peer: Peer, data: Data, numbers: Any, keys: list[str], answer: Any) -> None:
    """Raise an error if an answer of many keys is wrong."""
    for number, offsets in zip(numbers.tolist(), peer.offsets_by_key(keys, answer), strict=True):
        check(peer, data, number, offsets)


def main(argument: str) -> None:
    """Do the job that the argument, a JSON object, describes."""
    job = Job(**json.loads(argument))
    small = job.phase == "pause"
    data = Data(min(job.entries, _MOST_PAUSE_ENTRIES) if small else job.entries, job.per_key)
    peer = PEERS[job.peer](Path(job.folder), data.entries, small)
    next(data.batches(job.commit_entries))  # the memory for the making of entries is not the peer's
    gc.freeze()  # nor are collections of the modules
    figures = _PHASES[job.phase](job, peer, data)
    print(json.dumps(figures), flush=True)
    if job.phase == "write":
        sys.stdin.read()


def _write(job: Job, peer: Peer, data: Data) -> dict[str, float]:
    usage = Usage()
    peer.open()
    usage.mark()
    made_s, calls = _put(peer, data, job.commit_entries)
    figures = {
        "ingest CPU": (usage.cpu_s - made_s) / data.entries * 1e6,
        "ingest wall": sum(calls) / data.entries * 1e6,
        "memory writing": usage.peak_mib,
    }
    figures |= _lookups(job, peer, data, "hot", job.seed)
    return figures | {"bytes written": usage.written_bytes / (data.entries * ROW.itemsize)}


def _put(peer: Peer, data: Data, rows: int) -> tuple[float, list[float]]:
    """Put everything. Return the CPU seconds of making entries, and the seconds of each batch."""
    made_s, calls, batches = 0.0, list[float](), data.batches(rows)
    while True:
        before_s = time.thread_time()
        batch = next(batches, None)
        made_s += time.thread_time() - before_s
        if batch is None:
            return made_s, calls
        started_s = time.perf_counter()
        peer.put_batch(peer.prepare(batch))
        calls.append(time.perf_counter() - started_s)


def _lookups(job: Job, peer: Peer, data: Data, state: str, seed: int) -> dict[str, float]:
    """Look up keys, then absent keys, one at a time; return times in microseconds.

    The first lookup is not timed, since a peer may open files in it.
    """
    numbers = data.drawn(job.lookups, seed)
    peer.lookup(data.texts(numbers[:1])[0])
    figures = _timed(f"{state} lookup", peer, data, numbers, data.texts(numbers))
    return figures | _timed(f"{state} absent", peer, data, -1 - numbers, data.absent(numbers))


def _many(job: Job, peer: Peer, data: Data, state: str) -> dict[str, float]:
    """Look up many keys at once, repeatedly, with different keys each time; return the median a key."""
    calls_us = []
    for turn in range(_BATCHES):
        keys = data.texts(numbers := data.drawn(job.many, job.seed + 10 + turn))
        started_s = time.perf_counter()
        answer = peer.lookup_many(keys)
        calls_us.append((time.perf_counter() - started_s) / len(keys) * 1e6)
        check_many(peer, data, numbers, keys, answer)
    return {f"{state} many p50": float(np.median(calls_us))}


def _timed(name: str, peer: Peer, data: Data, numbers: Any, keys: list[str]) -> dict[str, float]:
    answers, calls, end_s = [], [], time.monotonic() + _BUDGET_S
    for key in keys:
        started_s = time.perf_counter()
        answers.append(peer.lookup(key))
        calls.append(time.perf_counter() - started_s)
        if len(calls) >= _FEWEST and time.monotonic() > end_s:
            break
    for number, answer in zip(numbers.tolist(), answers, strict=False):
        check(peer, data, number, peer.offsets(answer))
    p50, p99 = (np.percentile(calls, (50, 99)) * 1e6).tolist()
    return {f"{name} p50": p50, f"{name} p99": p99}


def _recover(job: Job, peer: Peer, data: Data) -> dict[str, float]:
    usage = Usage()
    # each batch once, newest first
    numbers = np.unique(np.append(data.drawn(job.many, job.seed + 1), data.keys - 1))[::-1]
    keys = data.texts(numbers)
    started_s = time.perf_counter()
    peer.open()
    first = peer.lookup(keys[0])
    opened_s = time.perf_counter() - started_s
    check(peer, data, int(numbers[0]), peer.offsets(first))
    check_many(peer, data, numbers, keys, peer.lookup_many(keys))
    before_s = usage.cpu_s
    peer.settle()
    figures = {"settle CPU": (usage.cpu_s - before_s) / data.entries * 1e6}
    if peer.survives_reading:
        figures["recovery"] = opened_s
    check_many(peer, data, numbers, keys, peer.lookup_many(keys))
    figures["bytes written"] = usage.written_bytes / (data.entries * ROW.itemsize)
    peer.close()
    return figures


def _read(job: Job, peer: Peer, data: Data) -> dict[str, float]:
    _forget(Path(job.folder))
    usage = Usage()
    peer.open()
    numbers = data.drawn(max(_FEWEST, job.lookups // 10), job.seed + 2)
    figures = _timed("cold lookup", peer, data, numbers, data.texts(numbers))
    keys = data.texts(numbers := data.drawn(job.many, job.seed + 3))
    check_many(peer, data, numbers, keys, peer.lookup_many(keys))
    figures |= _lookups(job, peer, data, "settled", job.seed + 4)
    figures |= _many(job, peer, data, "settled")
    if (reader := peer.reader()) is not None:
        reader.open()
        figures |= _lookups(job, reader, data, "reader", job.seed + 4)
        reader.close()
    figures["memory reading"] = usage.peak_mib
    peer.close()
    return figures | {"stored bytes": peer.stored_bytes() / data.entries}


def _forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, as a restart of the machine does."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _pause(job: Job, peer: Peer, data: Data) -> dict[str, float]:
    peer.open()
    _, calls = _put(peer, data, min(_PAUSE_ROWS, job.commit_entries))
    p50, p999 = (np.percentile(calls, (50, 99.9)) * 1e3).tolist()
    numbers = data.drawn(job.many, job.seed)
    keys = data.texts(numbers)
    check_many(peer, data, numbers, keys, peer.lookup_many(keys))
    peer.close()
    return {"batch p50": p50, "batch p99.9": p999}


_PHASES = {"write": _write, "recover": _recover, "read": _read, "pause": _pause}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1])
