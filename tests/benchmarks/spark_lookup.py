"""Suite `spark-lookup`: keys looked up in bulk on Spark, beside a Spark join with a Parquet table of the same messages
sorted by key.

Messages have a key of their own each but for some (`messages`); keys are taken evenly from all of them, from 1,000 up
to 1,000,000. Both jobs end with one sum over all answers, which must agree. Everything lies in local folders. With
`--scale` the suite measures bytes and memory instead (`bulk`): of lookups in an index of so many messages, on two
executors of 1 GiB. A second table says what other ways to read the same index would ask for (`plans`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from tests.benchmarks.bulk import SPREAD, counts_of
from tests.benchmarks.job import Job, index_config, run_process
from tests.benchmarks.plans import BYTES_A_SECOND, EGRESS_PER_GIB_USD, IN_FLIGHT, REQUEST_S, SLOT
from tests.benchmarks.setting import SCALE_MASTER, SparkAmounts, SparkSetting
from tiered_index.cli.bench.figures import Meter, Spec, Table
from tiered_index.cli.bench.setting import require, scratch
from tiered_index.config import IndexConfig
from tiered_index.storage.metering import PriceTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SparkLookup"]

_FULL, _QUICK = 20_000_000, 400_000
_KEYS = (1_000, 10_000, 100_000, 1_000_000)
_QUICK_KEYS = (1_000, 10_000)
_DAYS = 4
_MIB = 1 << 20
_JOINED = ("topic", "key", "offset", "size")
_OURS, _JOIN = "lookup", "join with Parquet"
_PLAN_COLUMNS = (
    "keys",
    "unit",
    "gap",
    "requests",
    "MiB read",
    "of the index",
    "US cents for requests",
    "for bytes that leave",
    "seconds by the model",
    "directories and filters: requests",
    "MiB",
)


@dataclass(frozen=True)
class _Spent:
    """What one job took; `requests` are known of lookups only, `read_bytes` of a join follow from what it must read."""

    elapsed_s: float
    read_bytes: int
    requests: int | None
    answers: tuple[int, int]


class SparkLookup:
    """Index and Parquet table are built once; each round looks up each number of keys both ways."""

    name = "spark-lookup"
    passes = 1

    def specs(self, setting: SparkSetting) -> Sequence[Spec]:
        """As `Suite.specs`."""
        if setting.scale:
            return [
                Spec(_part_read(entries, *batch), "ratio")
                for entries in setting.scale
                for batch in _at_scale(setting, entries)
            ]
        specs = [Spec(_rate(way, count), "keys/s") for count in _counts(setting) for way in (_OURS, _JOIN)]
        specs += [Spec(f"lookup of {count:,} keys: MiB read", "MiB") for count in _counts(setting)]
        return specs + [Spec(f"lookup of {count:,} keys: requests", "count") for count in _counts(setting)]

    def run(self, setting: SparkSetting, folder: Path, meter: Meter) -> None:
        """As `Suite.run`."""
        if setting.scale:
            _run_scale(setting, folder, meter)
            return
        from tests.benchmarks.messages import PLAIN, message_frame, write_parquet
        from tiered_index.spark import build

        entries = _entries(setting)
        index, table = f"file://{folder}/index", folder / "parquet"
        spent: dict[tuple[int, str], list[_Spent]] = {}
        with _session() as spark:
            source = str(folder / "messages")
            message_frame(spark, entries, _DAYS, 8).write.parquet(source)
            layout = setting.layout
            config = IndexConfig.load(preset=layout.preset.name, slots=layout.slots, max_late_s=1e10)
            built = build(spark, source, storage=index, window="1d", config=config)
            require(built.entries, entries, "entries built")
            write_parquet(spark.read.parquet(source), table, PLAIN, _DAYS, entries // _DAYS)
            keys = {count: _write_keys(spark, folder, count, entries) for count in _counts(setting)}
            # once each, uncounted: classes are loaded, workers are forked
            _looked_up(spark, keys[min(keys)], index, config)
            _joined(spark, keys[min(keys)], table)
            for _ in meter.rounds():
                for count, path in keys.items():
                    ours, joined = _looked_up(spark, path, index, config), _joined(spark, path, table)
                    require(ours.answers, joined.answers, f"answers to {count:,} keys")
                    for way, found in ((_OURS, ours), (_JOIN, joined)):
                        meter.record(_rate(way, count), count / found.elapsed_s)
                        spent.setdefault((count, way), []).append(found)
                    meter.record(f"lookup of {count:,} keys: MiB read", ours.read_bytes / _MIB)
                    meter.record(f"lookup of {count:,} keys: requests", ours.requests or 0)
        rows = []
        for count in keys:
            ours_, joined_ = spent[count, _OURS], spent[count, _JOIN]
            rows.append(
                (
                    count,
                    ours_[0].answers[0],
                    ours_[0].requests,
                    round(ours_[0].read_bytes / _MIB, 2),
                    round(_keys_a_second(count, ours_)),
                    round(joined_[0].read_bytes / _MIB, 2),
                    round(_keys_a_second(count, joined_)),
                )
            )
        columns = (
            "keys",
            "entries found",
            "requests",
            "MiB read",
            "keys/s",
            "join: MiB of its columns",
            "join: keys/s",
        )
        meter.tables.append(
            Table(
                f"{entries:,} entries, {built.shards} shards, {built.written_bytes / _MIB:,.0f} MiB",
                columns,
                tuple(rows),
            )
        )


def _rate(way: str, count: int) -> str:
    return f"{way}, {count:,} keys"


def _keys_a_second(count: int, spent: Sequence[_Spent]) -> float:
    return median(count / one.elapsed_s for one in spent)


def _entries(setting: SparkSetting) -> int:
    return setting.spark_entries or min(_QUICK if setting.quick else _FULL, 5 * setting.layout.items)


def _counts(setting: SparkSetting) -> tuple[int, ...]:
    """Return how many keys are looked up; no more than half of the messages have."""
    most = max(1, _entries(setting) // 2)
    return tuple(dict.fromkeys(min(count, most) for count in _wanted(setting)))


def _wanted(setting: SparkSetting) -> tuple[int, ...]:
    return setting.keys or (_QUICK_KEYS if setting.quick else _KEYS)


def _at_scale(setting: SparkSetting, entries: int) -> list[tuple[str, int]]:
    return counts_of(_wanted(setting), entries, SparkAmounts.of(setting).days)


def _part_read(entries: int, kind: str, count: int) -> str:
    return f"{count:,} keys {kind} in {entries:,} entries: bytes read, of the index"


def _run_scale(setting: SparkSetting, folder: Path, meter: Meter) -> None:
    """Look up each number of keys in an index of each number of entries; record how much of the index was read."""
    amounts = SparkAmounts.of(setting)
    master = amounts.masters[0] if len(amounts.masters) == 1 else SCALE_MASTER
    columns = (
        "keys",
        "asked for",
        "found",
        "objects",
        "requests",
        "MiB read",
        "of the index",
        "Python workers, peak MiB",
        "Java, peak MiB",
        "answers compared with a reader's",
        "seconds",
        "load average",
    )
    for entries in setting.scale:
        index: dict[str, Any] = {}
        rows: list[tuple[Any, ...]] = []
        plans: list[tuple[Any, ...]] = []

        def told(
            name: str,
            values: dict[str, Any],
            entries: int = entries,
            index: dict[str, Any] = index,
            rows: list[tuple[Any, ...]] = rows,
            plans: list[tuple[Any, ...]] = plans,
        ) -> None:
            if name == "index":
                index.update(values)
            elif name == "lookup":
                part = values["read_bytes"] / index["bytes"]
                meter.record(_part_read(entries, values["kind"], values["keys"]), part)
                rows.append(
                    (
                        values["keys"],
                        values["kind"],
                        values["found"],
                        values["objects"],
                        values["requests"],
                        round(values["read_bytes"] / _MIB, 2),
                        round(part, 4),
                        " ".join(map(str, values["workers_mib"])),
                        " ".join(map(str, values["java_mib"])),
                        values["checked"],
                        round(values["elapsed_s"], 1),
                        round(values["load_average"], 1),
                    )
                )
            elif name == "plan":
                plans.append(_plan_row(values, index["bytes"]))

        with scratch(folder) as place:
            job = Job(
                master,
                str(place),
                amounts.entries,
                amounts.days,
                1,
                amounts.preset,
                amounts.slots,
                scale=entries,
                counts=_wanted(setting),
            )
            run_process(job, told)
        require(len(rows), len(_at_scale(setting, entries)), "lookups")
        title = (
            f"{entries:,} entries, {index['shards']} shards of {amounts.days} days, {index['bytes'] / _MIB:,.0f} "
            f"MiB; on {master}"
        )
        meter.tables.append(Table(title, columns, tuple(rows)))
        meter.tables.append(Table(_plans_title(entries, index_config(job).prices), _PLAN_COLUMNS, tuple(plans)))


def _plan_row(values: dict[str, Any], index_bytes: int) -> tuple[Any, ...]:
    unit = "slot" if values["unit"] == SLOT else _size(values["unit"])
    return (
        values["keys"],
        f"{unit}, as looked up" if values["used"] else unit,
        _size(values["gap_bytes"]),
        values["requests"],
        round(values["read_bytes"] / _MIB, 2),
        round(values["read_bytes"] / index_bytes, 4),
        round(100 * values["usd_requests"], 6),
        round(100 * values["usd_bytes"], 6),
        round(values["seconds"], 2),
        values["opening_requests"],
        round(values["opening_bytes"] / _MIB, 2),
    )


def _size(count: int) -> str:
    return f"{count / 1024:g} KiB" if count >= 1024 else f"{count} B"


def _plans_title(entries: int, prices: PriceTable) -> str:
    egress = prices.egress_per_gib_usd or EGRESS_PER_GIB_USD
    return (
        f"plans for keys {SPREAD} in {entries:,} entries; {prices.get_per_1000_usd:g} USD for 1,000 requests, "
        f"{egress:g} USD for a GiB "
        f"that leaves the region; {REQUEST_S * 1000:g} ms a request, {IN_FLIGHT} at once, {BYTES_A_SECOND / 1e6:g} MB/s"
    )


@contextlib.contextmanager
def _session() -> Iterator[SparkSession]:
    """The running session, or one of all cores that ends with the block."""
    from pyspark.sql import SparkSession

    from tiered_index.spark import open_session

    if (running := SparkSession.getActiveSession()) is not None:
        yield running
        return
    spark = open_session(
        app_name="tiered_index bench", settings={"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
    )
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


def _write_keys(spark: SparkSession, folder: Path, count: int, entries: int) -> str:
    """Write keys of messages all over the days; return the folder."""
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    from tests.benchmarks.messages import TOPIC

    path = str(folder / f"keys-{count}")
    number: Any = F.col("id") * (entries // count) + 1
    frame = spark.range(count).select(
        F.lit(TOPIC).alias("topic"), F.md5(number.cast("string").cast("binary")).alias("key")
    )
    frame.repartition(2).write.parquet(path)
    return path


def _looked_up(spark: SparkSession, keys: str, index: str, config: IndexConfig) -> _Spent:
    from tiered_index.spark import look_up

    begun = time.perf_counter()
    result = look_up(spark, spark.read.parquet(keys), storage=index, config=config)
    assert result.frame is not None
    answers = _sum(result.frame)
    elapsed_s = time.perf_counter() - begun
    result.release()
    return _Spent(elapsed_s, result.bytes_read, result.requests, answers)


def _joined(spark: SparkSession, keys: str, table: Path) -> _Spent:
    begun = time.perf_counter()
    answers = _sum(spark.read.parquet(keys).join(spark.read.parquet(str(table)), ["topic", "key"]))
    elapsed_s = time.perf_counter() - begun
    return _Spent(elapsed_s, _column_bytes(table), None, answers)


def _sum(frame: DataFrame) -> tuple[int, int]:
    from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

    row = frame.agg(F.count("offset"), F.sum(F.col("offset") + F.col("size"))).collect()[0]
    return row[0], row[1] or 0


def _column_bytes(table: Path) -> int:
    """Return how many bytes the columns that the join reads have, by the files' footers: a join passes over none of
    them.
    """
    total = 0
    for path in table.rglob("*.parquet"):
        metadata = pq.ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            columns = [row_group.column(place) for place in range(row_group.num_columns)]
            total += sum(column.total_compressed_size for column in columns if column.path_in_schema in _JOINED)
    return total
