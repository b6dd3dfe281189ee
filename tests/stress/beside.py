"""A process that reads a root beside its writer, again and again: `python -m tests.stress.beside ROOT SHARED`.

Writer and reader share three numbers in a mapped file: the messages flushed for sure, the puts begun, and whether to
stop. Each answer must have all of the first, and none beyond the second. The last line on stdout is a JSON document of
the results.
"""

from __future__ import annotations

import json
import mmap
import random
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

from tests.stress.census import census
from tests.support.model import ModelEntry, Problem, ReferenceModel
from tiered_index import IndexReader
from tiered_index.types import Lookup, QueryResult

KEYS = 7
NOW_MS = 1_700_000_000_000
_SLOTS = struct.Struct("q")
_FRESH_EVERY = 25
_LEAST = 30


def key_of(number: int) -> str:
    """Return the key of message `number`."""
    return f"k{number % KEYS}"


def message(number: int) -> tuple[str, int, str, int, int, int]:
    """Return message `number`; its second rises and falls."""
    return ("t", number % 3, key_of(number), number, 1 + number, NOW_MS + 1000 * (number * 37 % 400))


class Shared:
    """Three numbers between two processes; each has one writer."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), 24)

    @classmethod
    def make(cls, path: Path) -> Shared:
        path.write_bytes(bytes(24))
        return cls(path)

    def get(self, name: str) -> int:
        return _SLOTS.unpack_from(self._map, 8 * ("flushed", "begun", "stop").index(name))[0]

    def set(self, name: str, value: int) -> None:
        _SLOTS.pack_into(self._map, 8 * ("flushed", "begun", "stop").index(name), value)


def wrong(result: QueryResult, key: int, flushed: int, begun: int) -> Problem | None:
    """Return the fault in an answer to everything under a key, or None."""
    known = ReferenceModel()
    known.entries = [_entry(number) for number in range(key, flushed, KEYS)]
    possible = [_entry(number) for number in range(key, begun, KEYS)]
    return known.problem_with(result, Lookup(topic="t", key=f"k{key}", max_count=10**6), possible)


@cache
def _entry(number: int) -> ModelEntry:
    (entry,) = ReferenceModel().put(*message(number))
    return entry


def _ask(reader: IndexReader, shared: Shared, rng: random.Random, seen: Counter[str]) -> None:
    flushed = shared.get("flushed")
    keys = [rng.randrange(KEYS)] if rng.random() < 0.7 else list(range(KEYS))
    if len(keys) == 1:
        answers = [reader.query("t", f"k{keys[0]}", max_count=10**6)]
    else:
        answers = list(reader.query_many([Lookup(topic="t", key=f"k{key}", max_count=10**6) for key in keys]))
    begun = shared.get("begun")
    for key, result in zip(keys, answers, strict=True):
        problem = wrong(result, key, flushed, begun)
        assert problem is None, f"key {key}: {problem}"
        for report in result.explain.files:
            seen[report.place] += 1
    seen["lookups"] += len(keys)


def _main(root: Path, shared: Shared) -> None:
    seen: Counter[str] = Counter()
    troubles: list[str] = []
    most = 0

    def again(number: int) -> None:
        nonlocal most
        rng = random.Random(number)
        try:
            while (not shared.get("stop") or seen["lookups"] < _LEAST) and not troubles:
                _ask(reader, shared, rng, seen)
                if seen["lookups"] % _FRESH_EVERY == 0:
                    with IndexReader.open(root=root, query_threads=2) as fresh:
                        _ask(fresh, shared, rng, seen)
                    seen["fresh"] += 1
                most = max(most, census(root, collect=False).below)
                time.sleep(0.005)  # lets the writer progress
        except BaseException:  # noqa: BLE001 - the test reports it
            troubles.append(traceback.format_exc())

    with IndexReader.open(root=root, query_threads=2) as reader:
        print("ready", flush=True)
        threads = [threading.Thread(target=again, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not troubles:
            _ask(reader, shared, random.Random(9), seen)
        # also what only a garbage collection would close
        left = census(root, collect=False)
    print(
        json.dumps({"seen": seen, "troubles": troubles, "most": most, "below": left.below, "mappings": left.mappings})
    )


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Shared(Path(sys.argv[2])))
