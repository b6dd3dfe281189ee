"""Suite `spark-lookup`: bytes that bulk lookups on Spark read of an index, and peaks of memory, on two executors of 1
GiB.

Most messages have a key of their own (`messages`). Keys are taken evenly from all of them, from 1,000 up to 1,000,000
(`bulk`). Suite `spark` compares CPU time with that of a join.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.bulk import counts_of
from tests.benchmarks.job import run_process
from tests.benchmarks.machine.figures import Meter, Spec, Table
from tests.benchmarks.machine.setting import require, scratch
from tests.benchmarks.setting import SCALE_MASTER, SparkAmounts, SparkSetting, wanted_keys
from tests.benchmarks.spark import job_of

_FULL, _QUICK = 20_000_000, 400_000
_MIB = 1 << 20


class SparkLookup:
    """For each number of entries, an index is built, and each number of keys is looked up in it once."""

    name = "spark-lookup"
    passes = 1

    def specs(self, setting: SparkSetting) -> Sequence[Spec]:
        """Do as `Suite.specs`."""
        return [
            Spec(_part_read(entries, *batch), "ratio")
            for entries in _scale(setting)
            for batch in _at_scale(setting, entries)
        ]

    def run(self, setting: SparkSetting, folder: Path, meter: Meter) -> None:
        """Do as `Suite.run`."""
        amounts = SparkAmounts.of(setting)
        master = setting.masters[0] if setting.masters else SCALE_MASTER
        counts = wanted_keys(setting)
        columns: tuple[str, ...] = ("keys", "asked for", "found", "objects", "requests", "MiB read", "of the index")
        columns += ("Python workers, peak MiB", "Java, peak MiB", "answers compared", "seconds")
        columns += ("load average",)
        for entries in _scale(setting):
            index: dict[str, Any] = {}
            rows: list[tuple[Any, ...]] = []
            with scratch(folder) as place:
                for name, values in run_process(job_of(amounts, place, master, scale=entries, counts=counts)):
                    if name == "index":
                        index = values
                    elif name == "lookup":
                        part = values["read_bytes"] / index["bytes"]
                        meter.record(_part_read(entries, values["kind"], values["keys"]), part)
                        rows.append(
                            (
                                *(values[column] for column in ("keys", "kind", "found", "objects", "requests")),
                                round(values["read_bytes"] / _MIB, 2),
                                round(part, 4),
                                " ".join(map(str, values["workers_mib"])),
                                " ".join(map(str, values["java_mib"])),
                                values["checked"],
                                round(values["elapsed_s"], 1),
                                round(values["load_average"], 1),
                            )
                        )
            require(len(rows), len(_at_scale(setting, entries)), "lookups")
            title = (
                f"{entries:,} entries, {index['shards']} shards of {amounts.days} days, {index['bytes'] / _MIB:,.0f} "
                f"MiB; on {master}"
            )
            meter.tables.append(Table(title, columns, tuple(rows)))


def _scale(setting: SparkSetting) -> tuple[int, ...]:
    return setting.scale or (
        setting.spark_entries or min(_QUICK if setting.quick else _FULL, 5 * setting.layout.items),
    )


def _at_scale(setting: SparkSetting, entries: int) -> list[tuple[str, int]]:
    return counts_of(wanted_keys(setting), entries, SparkAmounts.of(setting).days)


def _part_read(entries: int, kind: str, count: int) -> str:
    return f"{count:,} keys {kind} in {entries:,} entries: bytes read, of the index"
