"""The options and the amounts of the suites of Spark.

Everything follows from the setting's items, from whether it is quick, and from the options. This module is pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.benchmarks.machine.setting import Setting

MASTERS = ("local[2]",)
SCALE_MASTER = "local-cluster[2,1,1024]"
"""The master of the memory runs: two executors of a core and 1 GiB each."""
SHARED = 64
"""The number of keys that every day has, once each."""
_DAYS = 4
_FULL, _QUICK = 20_000_000, 1_000_000
_KEYS, _QUICK_KEYS = (1_000, 10_000, 1_000_000), (1_000, 10_000)
_YEAR_WEEKS, _QUICK_WEEKS = 52, 6
_LOCAL = re.compile(r"local\[([0-9]+)\]")
_CLUSTER = re.compile(r"local-cluster\[([0-9]+),([0-9]+),[0-9]+\]")


@dataclass
class SparkSetting(Setting):
    """A setting with the options that only the suites of Spark have. Empty ones were not given."""

    spark_entries: int | None = None
    masters: tuple[str, ...] = ()
    scale: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()


@dataclass(frozen=True)
class SparkAmounts:
    """Messages of one key each, spread evenly over `days`, and `weeks` of hourly files. `counts` keys are looked up at
    once.

    `scale`: the numbers of entries of the memory runs.
    """

    entries: int
    days: int
    rounds: int
    masters: tuple[str, ...]
    weeks: int
    scale: tuple[int, ...]
    counts: tuple[int, ...]
    preset: str
    slots: int

    @classmethod
    def of(cls, setting: SparkSetting) -> SparkAmounts:
        """Return the amounts of a setting. Entries are rounded so that each day has whole rounds of the shared keys."""
        wanted = setting.spark_entries or min(_QUICK if setting.quick else _FULL, 2 * setting.layout.items)
        a_day = max(1, wanted // _DAYS // SHARED) * SHARED
        return cls(
            entries=a_day * _DAYS,
            days=_DAYS,
            rounds=setting.rounds,
            masters=setting.masters or ((SCALE_MASTER,) if setting.scale else MASTERS),
            weeks=_QUICK_WEEKS if setting.quick else _YEAR_WEEKS,
            scale=setting.scale,
            # at most as many keys as half of the messages have
            counts=tuple(dict.fromkeys(min(count, a_day * _DAYS // 2) for count in wanted_keys(setting))),
            preset=setting.layout.preset.name,
            slots=setting.layout.slots,
        )

    @property
    def a_day(self) -> int:
        """Messages per day."""
        return self.entries // self.days

    @property
    def measures_all(self) -> bool:
        """Whether to merge a year of files, and to measure `LEFT_OUT`, too.

        With more messages their results would be the same or proportional, and take long.
        """
        return self.entries <= _FULL

    @property
    def space_bytes(self) -> int:
        """Disk space of source, index, Parquet and their shuffles; in a memory run 160 bytes per entry."""
        return max(600 * self.entries, 160 * max(self.scale, default=0))


def wanted_keys(setting: SparkSetting) -> tuple[int, ...]:
    """Return the number of keys to look up at once."""
    return setting.keys or (_QUICK_KEYS if setting.quick else _KEYS)


def cores_of(master: str) -> int | None:
    """Return the number of cores of a local master; None for a cluster, which decides for itself."""
    if found := _LOCAL.fullmatch(master):
        return int(found[1])
    if found := _CLUSTER.fullmatch(master):
        return int(found[1]) * int(found[2])
    return None
