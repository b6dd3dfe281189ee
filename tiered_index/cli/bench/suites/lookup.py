"""Suite `lookup`: one key at a time and many at once, in a full file that is hot (unsealed) and then compacted."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from tiered_index.cli.bench.figures import Goal, Spec, at_least, at_most
from tiered_index.cli.bench.machine import settle
from tiered_index.cli.bench.messages import ABSENT, TOPIC, keys_of, lookups_of, numbers_of
from tiered_index.cli.bench.meter import Meter, percentiles_us
from tiered_index.cli.bench.setting import Setting, compact_only, fill, require, scratch, without_uploads
from tiered_index.service.index import IndexService

__all__ = ["Lookups", "require_answers"]

_STATES = ("hot", "compacted")
_KINDS = ("lookup", "miss")
_GOALS: dict[str, Goal] = {"hot lookup p50": at_most(50), "hot query_many": at_least(5e5)}


def _spec(name: str, unit: str, section: str) -> Spec:
    return Spec(name, unit, _GOALS.get(name), (section,))


class Lookups:
    """One full file; the rounds of each state take other keys."""

    name = "lookup"
    passes = len(_STATES)

    def specs(self, setting: Setting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        specs = []
        for state in _STATES:
            specs += [
                _spec(f"{state} {kind} {which}", "us", f"{state} {kind}") for kind in _KINDS for which in ("p50", "p99")
            ]
            specs += [
                _spec(f"{state} query_many{what}", "keys/s", f"{state} query_many")
                for what in ("", ", every result read")
            ]
        return specs

    def run(self, setting: Setting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        with scratch(folder) as place, setting.open(place, storage=without_uploads(place)) as index:
            fill(index, 0, setting.entries)
            for state in _STATES:
                if state == "compacted":
                    index.seal()
                    compact_only(index)
                require(
                    [file.place for file in index.files()],
                    [{"hot": "unsealed"}.get(state, state)],
                    "states of the files",
                )
                settle()
                for number in meter.rounds():
                    _measure(index, setting, state, number, meter)


def _measure(index: IndexService, setting: Setting, state: str, seed: int, meter: Meter) -> None:
    numbers = numbers_of(setting.lookups, setting.entries, seed)
    for kind, keys, answers in zip(
        _KINDS, (keys_of(numbers), keys_of(numbers + ABSENT)), (len(numbers), 0), strict=True
    ):
        latencies, found = array("d"), 0
        with meter.section(f"{state} {kind}"):
            for key in keys:
                started_s = time.perf_counter()
                result = index.query(TOPIC, key)
                latencies.append(time.perf_counter() - started_s)
                found += len(result)
        require_answers(setting, found, answers, f"answers of {state} {kind}")
        p50, p99 = percentiles_us(latencies, 50, 99)
        meter.record(f"{state} {kind} p50", p50)
        meter.record(f"{state} {kind} p99", p99)
    asked = lookups_of(numbers_of(setting.many, setting.entries, seed + 1_000))
    with meter.section(f"{state} query_many") as call:
        results = index.query_many(asked)
    with meter.section(f"{state} results") as reading:
        found = sum(len(result) for result in results)
    require_answers(setting, found, len(asked), f"answers of {state} query_many")
    meter.record(f"{state} query_many", len(asked) / call.elapsed_s)
    meter.record(f"{state} query_many, every result read", len(asked) / (call.elapsed_s + reading.elapsed_s))


def require_answers(setting: Setting, found: int, expected: int, what: str) -> None:
    """Raise where answers are missing or, in files that tell keys of equal hash apart, too many."""
    keyed = setting.layout.schema.keyed
    # without fingerprints a key is answered with what others of its 31-bit hash have: one in a hundred at 20,000,000
    # items
    require(found if keyed else min(found, expected), expected, what)
