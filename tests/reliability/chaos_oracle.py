"""Checks the answers of the chaos campaign: it knows all entries that were put, confirmed as durable, and erased.

A writer's messages are a function of its name and their numbers. So the oracle needs two numbers of each writer: the
greatest number that it confirmed as durable, and the greatest that it passed to `put`. Both are in its journal, a file
that stays when the writer is killed. An answer must have every message up to the first number. It must have none after
the second, and none that differs from its put. After an erasure or an expiry has begun, its entries may be missing. No
answer has them once the log states it.

The model judges the answers. The functions are pure. Only its writer uses a `Journal`; one thread uses `Declared` and
`Gone`.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.model import Answer, ModelEntry, OrderKey, Problem, ReferenceModel
from tiered_index import IndexItem, Lookup

KEYS = 199
QUEUES = 4
_BASE_S = 1_699_920_000
_LATE_S = 631_152_000
_WILD = 1009
# one of so many messages has an implausible time, and enters quarantine


def seconds(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the times of messages: four a second, out of order by up to 150 seconds, and some of 1990."""
    return np.where(numbers % _WILD == 5, _LATE_S + numbers % 3600, _BASE_S + (numbers + numbers * 7919 % 600) // 4)


def batch(topic: str, first: int, last: int) -> dict[str, object]:
    """Return the messages `first` to `last` of a writer as columns for `put_batch`."""
    numbers = np.arange(first, last + 1)
    return {
        "topic": [topic] * len(numbers),
        "queue_id": numbers % QUEUES,
        "key": [f"key-{key}" for key in (numbers % KEYS).tolist()],
        "offset": numbers,
        "size": numbers % 1000 + 1,
        "timestamp_ms": seconds(numbers) * 1000 + 7,
    }


def problem_with(
    items: Sequence[IndexItem],
    topic: str,
    key: int,
    durable: int,
    offered: int,
    *,
    begin_s: int = 0,
    end_s: int = 1 << 40,
    truncated: bool = False,
    after: OrderKey | None = None,
    gone: "Gone | None" = None,
    log_number: int = -1,
) -> Problem | None:
    """Return the fault of an answer (its kind, and a sentence), or None.

    `after` is the end of the page before. `log_number` is the log record at the time of the lookup, or an earlier one.
    """
    numbers = np.arange(key, offered + 1, KEYS)
    perhaps_gone = stated = np.zeros(len(numbers), np.bool_)
    if gone is not None:
        perhaps_gone, stated = gone.perhaps_gone(topic, numbers), gone.stated(topic, numbers, log_number)
    name = f"key-{key}"

    def entries(chosen: npt.NDArray[np.bool_]) -> list[ModelEntry]:
        rows = zip(numbers[chosen].tolist(), seconds(numbers[chosen]).tolist(), strict=True)
        return [ModelEntry(topic, name, number % QUEUES, number, number % 1000 + 1, at_s) for number, at_s in rows]

    model = ReferenceModel()
    model.entries = entries((numbers <= durable) & ~perhaps_gone)
    lookup = Lookup(topic=topic, key=name, begin_ms=begin_s * 1000, end_ms=end_s * 1000, max_count=10**9)
    return model.difference([Answer.of(item) for item in items], lookup, entries(~stated), after, truncated=truncated)


class Journal:
    """A writer's declarations. A killed writer leaves only whole lines.

    When `declare` returns, the entries are on the disk.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def offer(self, first: int, last: int) -> None:
        """Note that the put of these messages begins."""
        os.write(self._file, f"o {first} {last}\n".encode())

    def declare(self, number: int) -> None:
        """Note that all messages up to `number` are durable."""
        os.write(self._file, f"d {number}\n".encode())
        os.fsync(self._file)


class Declared:
    """The state of a writer's journal. -1: nothing yet. `puts` counts messages, also repeated ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.durable = self.offered = -1
        self.puts = 0

    def look(self) -> None:
        """Read the new lines of the journal."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().rpartition(b"\n")[0]
        self._read += len(lines) + 1 if lines else 0
        for line in lines.splitlines():
            word, *numbers = line.split()
            if word == b"o":
                self.offered = max(self.offered, int(numbers[1]))
                self.puts += int(numbers[1]) - int(numbers[0]) + 1
            else:
                self.durable = max(self.durable, int(numbers[0]))


class Gone:
    """The erased and expired messages of the writers: those of a topic, key or queue before a second.

    The journal stays when its writer is killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # topic, key, queue (-1: all), second, and the record that states it (-1: perhaps none)
        self.said: list[tuple[str, int, int, int, int]] = []

    def ask(self, topic: str, before_s: int, *, key: int = -1, queue: int = -1) -> None:
        """Note that the log may state this erasure from now on."""
        self._write(topic, key, queue, before_s, -1)

    def state(self, topic: str, before_s: int, log_number: int, *, key: int = -1, queue: int = -1) -> None:
        """Note the record at which the log states this erasure."""
        self._write(topic, key, queue, before_s, log_number)

    def look(self) -> None:
        """Read the journal."""
        lines = self._path.read_bytes().rpartition(b"\n")[0].decode().splitlines() if self._path.exists() else []
        self.said = [(topic, *map(int, numbers)) for topic, *numbers in map(str.split, lines)]  # type: ignore[misc]

    def perhaps_gone(self, topic: str, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return the messages that may be erased or expired."""
        return self._hidden(topic, numbers, self.said)

    def stated(self, topic: str, numbers: npt.NDArray[np.int64], log_number: int) -> npt.NDArray[np.bool_]:
        """Return the messages that are erased or expired in the log up to a record."""
        return self._hidden(topic, numbers, [erasure for erasure in self.said if 0 <= erasure[-1] <= log_number])

    def _hidden(
        self, topic: str, numbers: npt.NDArray[np.int64], said: Sequence[tuple[str, int, int, int, int]]
    ) -> npt.NDArray[np.bool_]:
        hidden, at_s = np.zeros(len(numbers), np.bool_), seconds(numbers)
        for of, key, queue, before_s, _ in said:
            if of == topic:
                of_key, of_queue = (key < 0) | (numbers % KEYS == key), (queue < 0) | (numbers % QUEUES == queue)
                hidden |= of_key & of_queue & (at_s < before_s)
        return hidden

    def _write(self, topic: str, *numbers: int) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(" ".join([topic, *map(str, numbers)]).encode() + b"\n")
            os.fsync(file.fileno())


class Notes:
    """The counts and failures of a process. Each is a line, so that a killed process leaves them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def count(self, what: str, number: int = 1) -> None:
        os.write(self._file, json.dumps({"count": what, "number": number}).encode() + b"\n")

    def fail(self, kind: str, what: str) -> None:
        """Write a failure of one of `Tally.KINDS`."""
        os.write(self._file, json.dumps({"fail": kind, "what": what}).encode() + b"\n")
