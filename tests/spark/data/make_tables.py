"""Makes the small Delta and Iceberg tables beside this file with Spark's own writers; `make test` only reads them.

Needs jars of Maven Central, and the version of PySpark that they are for, so use environments of their own:

    python -m venv v && v/bin/pip install pyspark==4.2.0     (4.1.1 for Iceberg)
    mvn dependency:get -Dartifact=io.delta:delta-spark_4.2_2.13:4.4.0
    mvn dependency:get -Dartifact=org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0
    v/bin/python tests/spark/data/make_tables.py delta $(find ~/.m2 -name 'delta-*.jar' -o -name 'unitycatalog-*.jar')
    v/bin/python tests/spark/data/make_tables.py iceberg $(find ~/.m2 -name 'iceberg-spark-*.jar')

The tables of Iceberg state absolute paths, so they are written below `ICEBERG`; tests map this path to the folder.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pyspark.sql import SparkSession

TABLES = Path(__file__).parent / "tables"
ICEBERG = Path("/tmp/tiered-index-golden")
EXTENSIONS = {
    "delta": "io.delta.sql.DeltaSparkSessionExtension",
    "iceberg": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
}
CATALOGS = {
    "delta": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "iceberg": "org.apache.iceberg.spark.SparkCatalog",
}
FIELDS = "topic string, key string, queue_id int, offset bigint, size int, timestamp_ms bigint"
ROWS = "SELECT 'orders', concat('k', id % 10), 0, id, 10, 1700000000000 + id * 1000 FROM range({}, {}, 1, 1)"


def session(kind: str, jars: list[str]) -> SparkSession:
    """Return a session with the tables of one kind, from jars."""
    return (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", ",".join(jars))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.parquet.compression.codec", "zstd")
        .config("spark.sql.extensions", EXTENSIONS[kind])
        .config("spark.sql.catalog.spark_catalog", CATALOGS[kind])
        .config("spark.sql.catalog.spark_catalog.type", "hadoop")
        .config("spark.sql.catalog.spark_catalog.warehouse", str(ICEBERG))
        .getOrCreate()
    )


def insert(spark: SparkSession, table: str, begin: int, end: int) -> None:
    """Append the rows with offsets [begin, end)."""
    spark.sql(f"INSERT INTO {table} {ROWS.format(begin, end)}")


def delta(spark: SparkSession) -> None:
    """Make a table of Delta that is partitioned by two columns."""
    table = f"delta.`{TABLES / 'delta_partitioned'}`"
    columns = FIELDS.replace("topic string, ", "") + ", topic string, at timestamp"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING delta PARTITIONED BY (topic, at)")
    moment = "TIMESTAMP '2023-11-14 22:00:00'"
    for begin, topic in ((0, "'007'"), (5, "'a b:c/ü'")):
        rows = ROWS.format(begin, begin + 5).replace("'orders', ", "").replace(" FROM", f", {topic}, {moment} FROM")
        spark.sql(f"INSERT INTO {table} {rows}")


def iceberg(spark: SparkSession) -> None:
    """Make a table of Iceberg that has an append and a row-level delete."""
    table = "spark_catalog.golden.iceberg_position_deletes"
    spark.sql(
        f"CREATE TABLE {table} ({FIELDS}) USING iceberg TBLPROPERTIES ('format-version' = 2, "
        "'write.delete.mode' = 'merge-on-read')"
    )
    insert(spark, table, 0, 40)
    spark.sql(f"DELETE FROM {table} WHERE offset % 10 = 3")


def main() -> None:
    """Write all tables of one kind again."""
    kind, *jars = sys.argv[1:]
    for folder in TABLES.glob(f"{kind}_*"):
        shutil.rmtree(folder)
    shutil.rmtree(ICEBERG, ignore_errors=True)
    spark = session(kind, jars)
    (delta if kind == "delta" else iceberg)(spark)
    spark.stop()
    for folder in (ICEBERG / "golden").glob("*"):
        # a plan reads metadata only
        shutil.copytree(folder, TABLES / folder.name, ignore=shutil.ignore_patterns("*.parquet", "*.puffin"))
    for path in TABLES.rglob("*.crc"):
        path.unlink()


if __name__ == "__main__":
    main()
