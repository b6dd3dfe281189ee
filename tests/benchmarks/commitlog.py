"""What this machine makes of RocketMQ's files: index entries out of a commit log, and the store writer, as medians of several rounds.

    python -m tests.benchmarks.commitlog [--messages N] [--body BYTES] [--rounds N] [--json]

Messages have a unique key and two keys, so three index entries each, and about 130 bytes of properties. One thread, warm page cache; rates
are given for wall time and for the processor time of this process, which neighbours disturb less. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tiered_index.rocketmq.commitlog import CommitLogReader
from tiered_index.rocketmq.consumequeue import QueuePositions
from tiered_index.rocketmq.index_columns import decode_index_columns
from tiered_index.rocketmq.store_writer import StoreWriter

_SEGMENT_BYTES = 1 << 28
_START_MS = 1_700_000_000_000


def write_store(root: Path, messages: int, body_bytes: int) -> int:
    """Write a store and return how many messages it holds."""
    body = os.urandom(body_bytes)
    with StoreWriter(root, segment_bytes=_SEGMENT_BYTES) as writer:
        for number in range(messages):
            writer.put(
                f"TopicOrder{number % 10:02d}", number % 8, body, keys=f"order-{number} user-{number % 1000}", tags="TagA",
                uniq_key=f"0A010203000004D218B4AAC2{number:08X}", properties={"CLUSTER": "DefaultCluster", "WAIT": "true"},
                store_ms=_START_MS + number // 100,
            )  # fmt: skip
    return messages


def _decoded(segments: list[tuple[int, bytes, Any]], check_crc: bool = False) -> int:
    return sum(decode_index_columns(data, start, positions, check_crc=check_crc).messages for start, data, positions in segments)


def _read(root: Path, queues: bool) -> int:
    positions = QueuePositions(root / "consumequeue") if queues else None
    return sum(batch.messages for batch in CommitLogReader(root / "commitlog", positions=positions).batches())


def _round(root: Path, messages: int, body_bytes: int) -> dict[str, tuple[float, float]]:
    """One round: write the store, decode it in memory, read it from files; return messages/s of wall and of processor time by name."""
    rates: dict[str, tuple[float, float]] = {}

    def measure(name: str, work: Callable[[], int]) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        done = work()
        rates[name] = (done / (time.perf_counter() - wall), done / (time.process_time() - processor))
        if done != messages:
            raise SystemExit(f"{name}: {done:,} of {messages:,} messages")

    measure("store writer", lambda: write_store(root, messages, body_bytes))
    walked, known = [], []
    queues = QueuePositions(root / "consumequeue")
    for segment in CommitLogReader(root / "commitlog").segments():
        data = segment.path.read_bytes()
        walked.append((segment.start, data, None))
        known.append((segment.start, data, queues.between(segment.start, segment.end) - segment.start))
    _decoded(walked)  # the first pass pays for memory that later ones have
    measure("whole segments in memory, walked", lambda: _decoded(walked))
    measure("whole segments in memory, positions from queues", lambda: _decoded(known))
    measure("whole segments in memory, walked, every body's CRC", lambda: _decoded(walked, check_crc=True))
    measure("files by the reader, walked", lambda: _read(root, False))
    measure("files by the reader, with consume queues", lambda: _read(root, True))
    return rates


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--body", type=int, default=256, help="bytes of each body")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    pa.set_cpu_count(1)
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds} ...", file=sys.stderr)
        folder = Path(tempfile.mkdtemp(prefix="tiered-index-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")))
        try:
            rounds.append(_round(folder / "store", options.messages, options.body))
        finally:
            shutil.rmtree(folder)
    medians = {
        name: {"wall": statistics.median(r[name][0] for r in rounds), "processor": statistics.median(r[name][1] for r in rounds)}
        for name in rounds[0]
    }
    if options.json:
        print(json.dumps({"messages": options.messages, "body_bytes": options.body, "rounds": rounds, "medians": medians}, indent=2))
    else:
        print(f"{options.messages:,} messages, bodies of {options.body:,} bytes, median of {options.rounds} rounds; messages/s")
        for name, median in medians.items():
            print(f"  {name:55} wall {median['wall']:>12,.0f}   processor {median['processor']:>12,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
