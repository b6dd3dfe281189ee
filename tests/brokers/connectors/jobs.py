"""Jobs of Spark with a connector's jars, each in a process of its own, because each has its own version of PySpark.

`run_job` runs one; as a program this module is that process. A job prints lines of JSON.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.brokers.jars import class_path, jars_of, pyspark_folder
from tests.integration.cli.command_lines import TOP

TOPIC = "orders"
COLUMNS = "order_id string, position long, bytes int, at timestamp, region int"
MOVED = "order-moved"
TABLES = "A Delta or Iceberg table"
# The settings of a session, by section and name in docs/spark-data.md
RECIPES = {"delta": (TABLES, "DELTA"), "iceberg": (TABLES, "ICEBERG"), "kafka": ("Kafka", "KAFKA_SOURCE")}


def recipe(name: str) -> dict[str, str]:
    """Return the settings of a connector that the page gives."""
    from tests.spark.pages import section

    heading, variable = RECIPES[name]
    (written,) = re.findall(rf"^{variable} = (\{{.*?\}})$", section("spark-data.md", heading), re.MULTILINE | re.DOTALL)
    settings: dict[str, str] = ast.literal_eval(written)
    return settings


def orders(begin: int, end: int) -> list[tuple[str, int, int, int, int]]:
    """Return rows of orders by position: order, position, bytes, seconds since 1970, region."""
    return [(f"order-{n % 40}", n, 300 + n % 7, 1_700_006_400 + n * 60, n % 2) for n in range(begin, end)]


def run_job(
    name: str, folder: Path, *arguments: str, pom: tuple[Path, str, str] | None = None, version: str | None = None
) -> list[dict[str, Any]]:
    """Run a job, and return what it printed. The page's recipe names its jars, or a pom, with a name and a version.

    `version` is of PySpark; None: the virtualenv's. The call waits until Java has ended, too, which has the same pipes.
    """
    if pom is None:
        jars = str(jars_of(recipe(name)["spark.jars.packages"], version))
    else:
        jars = ",".join(map(str, sorted(Path(class_path(*pom)).parent.glob("*.jar"))))
    roots = [str(pyspark_folder(version))] if version is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, str(TOP)]), "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", "tests.brokers.connectors.jobs", name, str(folder), jars]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([*command, *arguments], cwd=TOP, env=environment, timeout=900, check=False, **pipes)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    used = printed.pop(0)["spark"]
    assert version is None or used == version
    return printed


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _rows_of(spark: Any, begin: int, end: int) -> Any:
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    frame = spark.createDataFrame(orders(begin, end), COLUMNS.replace("timestamp", "long"))
    return frame.withColumn("at", F.timestamp_seconds("at")).coalesce(1)


def _mapped() -> dict[str, Any]:
    """Return the columns of an entry in the tables of orders."""
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    constants = {"topic": F.lit(TOPIC), "queue_id": F.lit(0)}
    return {**constants, "key": "order_id", "offset": "position", "size": "bytes", "timestamp_ms": "at"}


def _sentence(act: Callable[[], object]) -> str:
    """Return the first line of the error of an act."""
    from pyspark.errors import PySparkException

    from tiered_index.errors import TieredIndexError

    try:
        act()
    except (TieredIndexError, PySparkException) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


def _programs(folder: Path, table: str, replaced: dict[str, str]) -> tuple[Any, ...]:
    """Return the page's programs: a stream of a table into `index`, a build of `index-2`, a stream of later rows."""
    from tests.spark.pages import programs, section

    settings, stream, anew = programs(section("spark-data.md", TABLES))
    stream = settings + stream
    places = {"/data/lake/orders": table, "/data/lake": str(folder / "warehouse"), "/data/checkpoints": str(folder)}
    for text, own in {**places, "s3://bucket": folder.as_uri(), **replaced}.items():
        assert text in stream + anew
        stream, anew = stream.replace(text, own), anew.replace(text, own)
    built, later = anew.split("\n\n")
    return stream, built, later


def _checked(spark: Any, folder: Path, frame: Any, *places: Path) -> None:
    """Build the index `built` of a table's live rows, and try to build one of its folders."""
    from tiered_index.spark import build

    result = build(spark, frame, storage=(folder / "built").as_uri(), columns=_mapped())
    _say(entries=result.entries)
    refused = [
        _sentence(lambda place=place: build(spark, str(place), storage=(folder / "refused").as_uri()))
        for place in places
    ]
    _say(refused=refused)


def _delta(spark: Any, folder: Path) -> None:
    table, names = folder / "table", {}
    stream, built, later = _programs(folder, str(table), {})
    _rows_of(spark, 0, 120).write.format("delta").partitionBy("region").option(
        "delta.enableDeletionVectors", "true"
    ).save(str(table))
    exec(stream, names)
    _rows_of(spark, 120, 200).write.format("delta").mode("append").save(str(table))
    spark.sql(f"OPTIMIZE delta.`{table}`")
    exec(stream, names)
    spark.sql(f"DELETE FROM delta.`{table}` WHERE position % 3 = 0")
    spark.sql(f"UPDATE delta.`{table}` SET order_id = '{MOVED}' WHERE position % 10 = 1")
    _say(failed=_sentence(lambda: exec(stream, names)))
    live = spark.read.format("delta").load(str(table))
    _checked(spark, folder, live, table, table / "region=1", table / "region=1" / "*.parquet")
    exec(built, names)
    _rows_of(spark, 200, 240).write.format("delta").mode("append").save(str(table))
    exec(later, names)


def _iceberg(spark: Any, folder: Path) -> None:
    table, name, names = folder / "warehouse" / "shop" / "orders", "lake.shop.orders", {}
    after = '"stream-from-timestamp", int(version.committed_at.timestamp() * 1000) + 1'
    newest = f"SELECT snapshot_id, committed_at FROM {name}.snapshots ORDER BY committed_at DESC LIMIT 1"
    stream, built, later = _programs(
        folder,
        name,
        {
            "settings=DELTA": "settings=ICEBERG",
            'format("delta")': 'format("iceberg")',
            "DESCRIBE HISTORY delta.`{TABLE}` LIMIT 1": newest,
            '.head()["version"]': ".head()",
            '"versionAsOf", version': '"versionAsOf", version.snapshot_id',
            '"startingVersion", version + 1': after,
        },
    )
    modes = ", ".join(f"'write.{change}.mode'='merge-on-read'" for change in ("delete", "update"))
    spark.sql(
        f"CREATE TABLE lake.shop.orders ({COLUMNS}) USING iceberg PARTITIONED BY (region) "
        f"TBLPROPERTIES ('format-version'='2', {modes})"
    )
    _rows_of(spark, 0, 120).writeTo(name).append()
    exec(stream, names)
    _rows_of(spark, 120, 200).writeTo(name).append()
    spark.sql("CALL lake.system.rewrite_data_files(table => 'shop.orders', options => map('rewrite-all', 'true'))")
    exec(stream, names)
    spark.sql("DELETE FROM lake.shop.orders WHERE position % 3 = 0")
    spark.sql(f"UPDATE lake.shop.orders SET order_id = '{MOVED}' WHERE position % 10 = 1")
    deletes = spark.sql("SELECT content, record_count FROM lake.shop.orders.delete_files").collect()
    _say(deletes=[[row.content, row.record_count] for row in deletes])
    _say(failed=_sentence(lambda: exec(stream, names)))
    live = spark.read.format("iceberg").load("lake.shop.orders")
    _checked(
        spark, folder, live, table, table / "data", table / "data" / "region=1", table / "data" / "**" / "*.parquet"
    )
    exec(built, names)
    _rows_of(spark, 200, 240).writeTo(name).append()
    exec(later, names)


def _s3a(spark: Any, folder: Path, bucket: str, endpoint: str) -> None:
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    from tiered_index.spark import build, look_up

    place = f"s3a://{bucket}/lake"
    _rows_of(spark, 0, 200).repartition(3).write.partitionBy("region").parquet(f"{place}/orders")
    keys = spark.createDataFrame([(f"order-{n}",) for n in range(0, 60, 3)], "order_id string")
    keys.repartition(2).write.parquet(f"{place}/keys")
    storage = f"s3://{bucket}/index?endpoint_url={endpoint}&addressing_style=path"
    result = build(spark, spark.read.parquet(f"{place}/orders"), storage=storage, columns=_mapped())
    _say(entries=result.entries)
    answers = look_up(
        spark, spark.read.parquet(f"{place}/keys"), storage=storage, columns={"key": "order_id", "topic": F.lit(TOPIC)}
    )
    for row in answers.frame.collect():
        _say(row=[row.order_id, row.status, row.position, row.offset, row["size"]])
    answers.release()
    closed = f"s3://{bucket}/index?endpoint_url=http://127.0.0.1:1&addressing_style=path"
    orders_read = spark.read.parquet(f"{place}/orders")
    _say(failed=_sentence(lambda: build(spark, orders_read, storage=closed, columns=_mapped())))


def _kafka(spark: Any, folder: Path, address: str, topic: str) -> None:
    """Stream and build the entries of a topic by the page's block and the example's mapping."""
    from tests.spark.pages import DOCS, section
    from tiered_index.spark import build, register

    names: dict[str, Any] = {"spark": spark}
    exec((DOCS / "examples/spark_kafka.py").read_text().partition("spark = open_session()")[0], names)
    (block,) = re.findall(
        r"^```text\n(KAFKA_SOURCE = .*?)^```", section("spark-data.md", "Kafka"), re.MULTILINE | re.DOTALL
    )
    block = block.replace("broker:9092", address).replace('"orders"', repr(topic))
    exec(block, names)
    register(spark)
    sink = names["entries_of"](names["records"]).writeStream.format("tiered_index").options(window="1d", slots=1000)
    sink = sink.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    sink.start((folder / "streamed").as_uri()).awaitTermination()

    exec(re.sub("readStream", "read", block).replace('"maxOffsetsPerTrigger": "5000000",', ""), names)
    build(spark, names["entries_of"](names["records"]), storage=(folder / "built").as_uri(), window="1d")


def _settings(name: str, folder: Path, jars: str, *arguments: str) -> Iterator[tuple[str, str]]:
    if name in RECIPES:
        yield from recipe(name).items()
        yield "spark.jars.ivy", jars
    if name == "delta":
        # 50 tasks for each of its snapshots otherwise
        yield "spark.databricks.delta.snapshotPartitions", "1"
    if name == "iceberg":
        yield "spark.sql.catalog.lake.warehouse", str(folder / "warehouse")
    if name == "s3a":
        yield "spark.jars", jars
        yield "spark.hadoop.fs.s3a.endpoint", arguments[1]
        yield "spark.hadoop.fs.s3a.path.style.access", "true"


def main() -> None:
    """Run a job: its name, a folder, its jars or their folder, and what it needs besides."""
    from tests.spark.sessions import local_session

    name, folder, jars, *arguments = sys.argv[1:]
    settings = dict(_settings(name, Path(folder), jars, *arguments))
    jobs: dict[str, Callable[..., None]] = {"delta": _delta, "iceberg": _iceberg, "s3a": _s3a, "kafka": _kafka}
    with local_session(Path(folder), settings) as spark:
        _say(spark=spark.version)
        jobs[name](spark, Path(folder), *arguments)


if __name__ == "__main__":
    main()
