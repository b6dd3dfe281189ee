"""The demo's broker: a process that writes the stream into a RocketMQ store while it is followed, and where each message must come to lie.

The process writes everything up to the tail, says so, waits for a word and writes the tail. Where the messages lie is computed here from
their lengths alone, and is what answers are compared with. One thread.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_index.cli.demo.follower import ProcessFailed
from tiered_index.rocketmq.log.layout import BLANK_BYTES, KEYS, MAGIC_V1, format_properties
from tiered_index.rocketmq.log.message import message_size
from tiered_index.rocketmq.store_writer import StoreWriter
from tiered_index.testing.workload import TOPICS, Workload

__all__ = ["SEGMENT_BYTES", "Broker", "placed"]

SEGMENT_BYTES = 64 << 20
"""Smaller than a broker's 1 GiB, so that the demo's log has several."""
_BODY_BYTES = 64
_FLUSH_MESSAGES = 5_000
_WAIT_S = 300
_WRITTEN = "written"
_MODULE = "tiered_index.cli.demo.broker"

Array = npt.NDArray[Any]


def placed(workload: Workload, segment_bytes: int = SEGMENT_BYTES) -> Workload:
    """Return the stream with the commit log offset and the size of each message as the broker's process will store it."""
    starts = np.searchsorted(workload.entry_message, np.arange(len(workload)))
    key_bytes = np.array([len(key) for key in workload.keys])
    counts = np.bincount(workload.entry_message, minlength=len(workload))
    joined = np.add.reduceat(key_bytes[workload.entry_key], starts) + counts - 1
    fixed = np.array([message_size(0, MAGIC_V1, len(topic), 0, len(format_properties({KEYS: "x"})) - 1) for topic in TOPICS])
    size = fixed[workload.topic] + _body_bytes(workload) + joined
    ends = np.cumsum(size)
    offset = np.empty(len(workload), np.int64)
    first, segment = 0, 0
    while first < len(workload):
        before = int(ends[first] - size[first])
        # a message goes into the segment where a blank has room behind it
        last = max(first + 1, int(np.searchsorted(ends, before + segment_bytes - BLANK_BYTES, "right")))
        offset[first:last] = segment + ends[first:last] - size[first:last] - before
        first, segment = last, segment + segment_bytes
    return dataclasses.replace(workload, offset=offset, size=size.astype(np.int32))


def _body_bytes(workload: Workload) -> Array:
    return workload.size % _BODY_BYTES


class Broker:
    """The process. `workload` is the stream before it was `placed`."""

    def __init__(self, workload: Workload, store: Path, folder: Path, tail_start: int) -> None:
        plan = folder / "stream.npz"
        starts = np.searchsorted(workload.entry_message, np.arange(len(workload)))
        second = np.full(len(workload), -1, np.int64)
        of = np.flatnonzero(np.diff(workload.entry_message, prepend=-1) == 0)
        second[workload.entry_message[of]] = workload.entry_key[of]
        np.savez(
            plan, topic=workload.topic, queue_id=workload.queue_id, body=_body_bytes(workload), store_ms=workload.timestamp_ms,
            first=workload.entry_key[starts], second=second, keys=np.array(workload.keys), tail_start=np.array(tail_start),
        )  # fmt: skip
        store.mkdir(parents=True, exist_ok=True)
        (store / "commitlog").mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(plan), str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def is_writing(self) -> bool:
        """Return whether the process lives: it ends once the tail is written."""
        return self._process.poll() is None

    def wait_written(self) -> None:
        """Return when everything before the tail is written. Raises `ProcessFailed`."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != _WRITTEN:
            self._failed()

    def write_tail(self) -> None:
        """Have the tail written, to its end. Raises `ProcessFailed`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(_WAIT_S):
            self._failed()

    def _failed(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        raise ProcessFailed(f"the broker's process ended with exit code {self._process.returncode}: {self._process.stderr.read().strip()}")

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _write(plan: Path, store: Path) -> None:
    """Be the process."""
    with np.load(plan) as loaded:
        names = ("topic", "queue_id", "body", "store_ms", "first", "second")
        columns = [loaded[name].tolist() for name in names]
        keys, tail_start = loaded["keys"].tolist(), int(loaded["tail_start"])
    body = bytes(range(_BODY_BYTES))
    with StoreWriter(store, segment_bytes=SEGMENT_BYTES) as writer:
        for number, (topic, queue_id, length, store_ms, first, second) in enumerate(zip(*columns, strict=True)):
            if number == tail_start:
                writer.flush()
                sys.stdout.write(_WRITTEN + "\n")
                sys.stdout.flush()
                sys.stdin.read()
            text = keys[first] if second < 0 else f"{keys[first]} {keys[second]}"
            writer.put(TOPICS[topic], queue_id, body[:length], keys=text, store_ms=store_ms)
            if number % _FLUSH_MESSAGES == 0:
                writer.flush()


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Path(sys.argv[2]))
